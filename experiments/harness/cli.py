"""What the programs' command lines share: flags, and errors in one line."""

from collections.abc import Callable, Sequence
import contextlib
import logging
import os
import pathlib
import re
import signal
import sys
import tempfile
from typing import Any

from absl import app, flags

from experiments.harness import console, timing
from experiments.harness import shapes as shapes_lib
from pallas_gemm import hardware
from pallas_gemm.ladder import contract

DTYPES = contract.FLOAT32 + contract.FLOAT16S
# Exit status after Ctrl-C.
INTERRUPTED = 130
# The module of flags that a program gives to itself; --help leaves them out.
INTERNAL = "internal"

KERNELS = flags.DEFINE_string(
  "kernels",
  "all",
  "Which rungs: 'all' (with their variants), numbers, ranges, names, or a"
  " variant's label, separated by commas: --kernels=1-8, --kernels=7,8a,"
  " --kernels=naive,persistent.",
)
SHAPES = flags.DEFINE_list(
  "shapes",
  [],
  "Products [M,K]x[K,N] as MxNxK, separated by commas:"
  " --shapes=4096x8192x4096,1023x4097x2049.",
)
DTYPE = flags.DEFINE_enum(
  "dtype",
  None,
  DTYPES,
  "Element type. Default, for rungs: the first that each takes (float32 for"
  " 1-8, bfloat16 for 9-12); rungs that do not take it are left out. For the"
  " dense ops: bfloat16.",
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.", lower_bound=0)
OUTPUT_DIR = flags.DEFINE_string(
  "output_dir",
  None,
  "Where rows and plots go. Default: experiments/results/<device> in a"
  " checkout, results/<device> in the current folder elsewhere.",
)
GPU = flags.DEFINE_string(
  "gpu",
  None,
  "GPU that the traffic model describes, by name, such as H200. Default: the"
  " one in this machine, or an H200 if there is none.",
)
WARMUP = flags.DEFINE_integer(
  "warmup", timing.DEFAULT_WARMUP, "Untimed calls.", lower_bound=0
)
REPEATS = flags.DEFINE_integer(
  "repeats",
  timing.DEFAULT_REPEATS,
  f"Timed calls, at least {timing.MIN_REPEATS}; the median is reported.",
  lower_bound=timing.MIN_REPEATS,
)
PLOT = flags.DEFINE_bool("plot", True, "Draw the plots, beside the rows.")
UPDATE_README = flags.DEFINE_bool(
  "update_readme",
  False,
  "Rewrite the tables in README and in the pages of experiments/results,"
  " between markers such as ladder:begin and ladder:end. Without a flag that"
  " says what to measure, nothing is measured: the tables and plots are made of"
  " the rows in experiments/results.",
)
FROM_ROWS = flags.DEFINE_string(
  "from_rows",
  None,
  "Measure nothing; print the table of this JSONL file, and draw its plots.",
)
README_FILE = flags.DEFINE_string(
  "readme",
  None,
  "The one page that --update_readme rewrites. Default: README.md and those of"
  " experiments/results.",
)
COMMON = ("kernels", "shapes", "dtype", "seed", "output_dir", "gpu")
TIMED = ("warmup", "repeats", "plot", "update_readme", "from_rows", "readme")


class FlagError(Exception):
  """A command that can't be carried out; the message is one line."""


def not_empty(*names: str) -> None:
  """Has flags of paths refused if they are empty.

  That is what a variable of the shell that is not set makes of them.
  """
  for name in names:
    flags.register_validator(
      name, lambda value: value != "", "want a path, got nothing"
    )


not_empty("output_dir", "from_rows", "readme")


def parse_rungs(
  text: str, ladder: Sequence[contract.Rung], flag: str = "kernels"
) -> tuple[contract.Rung, ...]:
  """The rungs and variants that a flag names, in the ladder's order.

  Args:
    text: what the flag says.
    ladder: where they are looked for.
    flag: its name.

  Raises:
    FlagError: a number, range, label or name that no rung or variant has.
  """
  there = [x for rung in ladder for x in (rung, *rung.variants)]
  numbers = {rung.number for rung in ladder}
  chosen: set[str] = set()
  for part in (part.strip() for part in text.split(",")):
    ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if part == "all":
      found = {x.label for x in there}
    elif ends:
      first, last = int(ends[1]), int(ends[2] or ends[1])
      whole = {first, last} <= numbers  # a range whose ends are rungs
      found = {r.label for r in ladder if whole and first <= r.number <= last}
    else:
      found = {x.label for x in there if part in (x.label, x.name)}
    if not found:
      raise FlagError(
        f"--{flag}: no rung {part if ends else repr(part)};"
        f" there are {', '.join(f'{x.label} {x.name}' for x in there)}"
      )
    chosen |= found
  return tuple(x for x in there if x.label in chosen)


def parse_shapes(
  shapes: Sequence[str], sizes: Sequence[str] = ()
) -> tuple[shapes_lib.Shape, ...]:
  """Shapes of `--shapes` after squares of `--sizes`, each once.

  Raises:
    FlagError: one that can't be read, or has a dimension under 1.
  """
  found = []
  for size in sizes:
    if not re.fullmatch(r"\d+", size.strip()) or int(size) < 1:
      raise FlagError(f"--sizes: want positive integers, got {size!r}")
    found.append(shapes_lib.Shape(*[int(size)] * 3))
  try:
    found += map(shapes_lib.parse, shapes)
  except ValueError as error:
    raise FlagError(f"--shapes: {error}") from None
  return tuple(dict.fromkeys(found))


def gpu() -> hardware.Gpu:
  """The GPU that the traffic model describes.

  Raises:
    FlagError: none is known by the name of `--gpu`.
  """
  try:
    return hardware.lookup(GPU.value) if GPU.value else hardware.current()
  except ValueError as error:
    raise FlagError(f"--gpu: {error}") from None


def parse_suites(
  names: Sequence[str],
  suite: Callable[[str, str], list[Any]],
  interpreted: Sequence[str] | None,
) -> list[Any]:
  """The cases of `--suite`, in 16 bits.

  Args:
    names: of the suites.
    suite: the cases of a name and a dtype.
    interpreted: without a GPU, the names of what is small enough; else None.

  Raises:
    FlagError: no such suite, one that is too large, or float32.
  """
  if DTYPE.value == "float32":
    raise FlagError("--dtype: the ops are compared in 16 bits")
  try:
    dtype = DTYPE.value or "bfloat16"
    found = [case for name in names for case in suite(name, dtype)]
  except ValueError as error:
    raise FlagError(f"--suite: {error}") from None
  if interpreted is not None and not set(names) <= set(interpreted):
    raise FlagError(
      f"--suite={','.join(names)}: too large without an NVIDIA GPU, where there"
      f" is {' and '.join(interpreted)}"
    )
  return found


def check_folder(folder: pathlib.Path) -> None:
  """Tries whether files can be written to a folder; leaves nothing behind.

  Raises:
    FlagError: it is none, can't be made, or can't be written to.
  """
  try:
    there = next(x for x in (folder, *folder.parents) if os.path.lexists(x))
    # The folders that are missing are made in a folder that goes away again.
    with tempfile.TemporaryDirectory(dir=there) as probe:
      made = pathlib.Path(probe, folder.relative_to(there))
      made.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise FlagError(
      "--output_dir: want a folder that can be written to, got"
      f" {folder}: {error.strerror}"
    ) from None


def check_file(flag: str, path: pathlib.Path) -> None:
  """Tries whether a file can be written; leaves it as it is.

  Raises:
    FlagError: it can't; the message names the flag.
  """
  there = os.path.lexists(path)
  try:
    path.open("ab").close()
    if not there:
      path.unlink()
  except OSError as error:
    raise FlagError(
      f"--{flag}: want a file that can be written, got {path}: {error.strerror}"
    ) from None


def check_flags(module: str) -> None:
  """Looks for flags of the programs' modules that this program has no use for.

  Args:
    module: the program's.

  Raises:
    FlagError: there is one.
  """
  used = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(module)}
  for owner, found in flags.FLAGS.flags_by_module_dict().items():
    for flag in found if owner.startswith("experiments.") else ():
      if flag.present and flag.name not in used:
        raise FlagError(f"--{flag.name}: not a flag of this program")


def run(main: Callable[[Sequence[str]], int]) -> None:
  """`absl.app.run`, with what ends a program early told in one line.

  An error of the command line is exit status 2, Ctrl-C is 130.
  """
  # JAX and matplotlib say at level INFO what they looked for and did not find.
  for library in ("jax", "matplotlib"):
    logging.getLogger(library).setLevel(logging.WARNING)

  def guarded(argv: Sequence[str]) -> int:
    if len(argv) > 1:
      return _refuse(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
      # absl knows the program that was started by its file.
      started = main.__module__ == "__main__"
      check_flags(sys.argv[0] if started else main.__module__)
      if OUTPUT_DIR.value:  # before JAX says what it thinks of the devices
        check_folder(pathlib.Path(OUTPUT_DIR.value))
      return main(argv)
    except FlagError as error:
      return _refuse(str(error))

  try:
    with console.Interrupt():
      app.run(guarded, flags_parser=_parse)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    _leave()
  except SystemExit as end:
    if end.code == INTERRUPTED:
      _leave()
    raise
  finally:
    # While Python shuts down Ctrl-C would be one more traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave() -> None:
  """Ends the process after Ctrl-C.

  Threads of an interrupted kernel may still run; where Python shuts down under
  them, the process crashes.
  """
  with contextlib.suppress(OSError):  # what reads them may be gone already
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(INTERRUPTED)


def _parse(argv: list[str]) -> list[str]:
  if any(arg in ("-h", "-help", "--help", "--helpshort") for arg in argv[1:]):
    app.usage(shorthelp=True, writeto_stdout=True)
    sys.exit(0)
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    sys.exit(_refuse(str(error)))


def _refuse(message: str) -> int:
  line = " ".join(message.split())
  print(f"error: {line} (--help lists the flags)", file=sys.stderr)
  return 2
