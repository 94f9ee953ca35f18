"""What the programs' command lines share: flags, lines, Ctrl-C, errors."""

from collections.abc import Callable, Sequence
import contextlib
import logging
import os
import pathlib
import re
import signal
import sys
import threading
import traceback
from typing import Any

from absl import app, flags
from absl import logging as absl_logging

from experiments.harness import shapes as shapes_lib
from experiments.harness import timing
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
SUITES = flags.DEFINE_list(
  "suites", [], "What to measure, of the suites above. Default: all."
)
SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of the inputs.", lower_bound=0, upper_bound=2**63 - 1
)
OUTPUT_DIR = flags.DEFINE_string(
  "output_dir",
  None,
  "Where rows go. Default, if nothing above says another:"
  " experiments/results/<device> in a checkout, results/<device> in the current"
  " folder elsewhere.",
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
COMMON = ("kernels", "shapes", "dtype", "seed", "output_dir", "gpu")
TIMED = ("warmup", "repeats")


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


not_empty("output_dir")


def suites(there: Sequence[str]) -> list[str]:
  """The suites that are asked for, of those that there are.

  Raises:
    FlagError: one that is not there.
  """
  if unknown := set(SUITES.value) - set(there):
    raise FlagError(
      f"--suites: no {sorted(unknown)}; there are {', '.join(there)}"
    )
  return SUITES.value or [*there]


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
  numbers = {str(rung.number): rung.number for rung in ladder}
  chosen: set[str] = set()
  for part in (part.strip() for part in text.split(",")):
    first, _, last = part.partition("-")
    if part == "all":
      found = {x.label for x in there}
    elif first in numbers and last in numbers:
      ends = range(numbers[first], numbers[last] + 1)
      found = {rung.label for rung in ladder if rung.number in ends}
    else:
      found = {x.label for x in there if part in (x.label, x.name)}
    if not found:
      names = ", ".join(f"{x.label} {x.name}" for x in there)
      raise FlagError(f"--{flag}: no rung {part!r}; there are {names}")
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


def check_folder(folder: pathlib.Path) -> None:
  """Looks whether files can be written to a folder, or it can be made.

  Raises:
    FlagError: neither.
  """
  there = next(x for x in (folder, *folder.parents) if os.path.lexists(x))
  if not there.is_dir() or not os.access(there, os.W_OK):
    raise FlagError(
      "--output_dir: want a folder that can be written to, got"
      f" {folder}: {there} is none"
    )


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
  """Refuses flags of other programs than that of `module`.

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

  An error of the command line is exit status 2, Ctrl-C and a reader that ended
  are 130; with a traceback, of a fault, it is 70.
  """
  # JAX says at level INFO what it looked for and did not find.
  logging.getLogger("jax").setLevel(logging.WARNING)

  def guarded(argv: Sequence[str]) -> int:
    if len(argv) > 1:
      return _refuse(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
      # absl knows the program that was started by its file.
      started = main.__module__ == "__main__"
      check_flags(sys.argv[0] if started else main.__module__)
      if not flags.FLAGS["verbosity"].present:
        # Each line says which implementation ran; the ops log it too.
        absl_logging.set_verbosity(absl_logging.WARNING)
      if OUTPUT_DIR.value:  # before JAX says what it thinks of the devices
        check_folder(pathlib.Path(OUTPUT_DIR.value))
      return main(argv)
    except FlagError as error:
      return _refuse(str(error))

  try:
    with Interrupt():
      app.run(guarded, flags_parser=_parse)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    _leave()
  except BrokenPipeError:  # what reads it has ended, as `head` does
    _leave()
  except Exception:  # pylint: disable=broad-exception-caught
    traceback.print_exc()  # 1 is a run that ended, with cases that failed
    sys.exit(os.EX_SOFTWARE)
  except SystemExit as end:
    if end.code == INTERRUPTED:
      _leave()
    raise
  finally:
    # While Python shuts down Ctrl-C would be one more traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave() -> None:
  """Ends the process after Ctrl-C, or once nobody reads what it says.

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


def say(text: str = "") -> None:
  """Writes a line at once, into a pipe too."""
  print(text, flush=True)


def table(
  title: str,
  header: Sequence[str],
  cells: Sequence[Sequence[str]],
  numeric: Sequence[str] = (),
) -> None:
  """Writes a table; columns named in `numeric` are flush right."""
  widths = [max(map(len, column)) for column in zip(header, *cells)]
  say(title)
  for row in (header, ["-" * width for width in widths], *cells):
    justified = (
      cell.rjust(width) if name in numeric else cell.ljust(width)
      for name, cell, width in zip(header, row, widths, strict=True)
    )
    say("  ".join(justified).rstrip())


class Interrupt:
  """Context that remembers that Ctrl-C was pressed.

  KeyboardInterrupt that is raised while a kernel calls back into Python may
  come out of JAX as another exception; `pressed` tells. Out of the context it
  comes as KeyboardInterrupt.
  """

  def __init__(self) -> None:
    self.pressed = False
    self._before: Any = None

  def __enter__(self) -> "Interrupt":
    # Only the main thread may set handlers, and only it gets the signal.
    if threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGINT, self._handle)
    return self

  def __exit__(self, _, error: BaseException | None, *__) -> None:
    if self._before is not None:
      signal.signal(signal.SIGINT, self._before)
    logging.disable(logging.NOTSET)
    if self.pressed and isinstance(error, Exception):
      raise KeyboardInterrupt from None

  def _handle(self, *_) -> None:
    self.pressed = True
    # JAX logs the traceback of whatever leaves a callback.
    logging.disable()
    outer = getattr(self._before, "__self__", None)
    if isinstance(outer, Interrupt):
      outer.pressed = True
    raise KeyboardInterrupt
