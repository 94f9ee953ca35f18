"""Fits the cost model's constants to a device's rows.

  python -m experiments.fit --device=nvidia_h200
  python -m experiments.fit --device=nvidia_h200 --write
  python -m experiments.fit --device=nvidia_h200 --write --keep
  python -m experiments.fit --device=nvidia_h200 --ablate
  python -m experiments.fit --device=nvidia_h200 --drop_to=32 --write \\
      --output=fewer.json
  python -m experiments.fit --device=nvidia_h100_80gb_hbm3 --write \\
      --start=fewer.json --terms=grouped.l2,grouped.tall

Rows are those of dense_tuning.jsonl and ragged_tuning.jsonl in
experiments/results/<device>: configs that were timed on a problem. Those count
whose config is legal today and whose problem has at least four, in one run,
that the model can tell apart. Fitted are the parts model, odd_sizes and grouped
of pallas_gemm/tuning/constants/<device>.json; the others say nothing about one
config beside another, and stay.

The measure is best over chosen: the least measured time of a problem over that
of the config which the model ranks first among the measured ones; 1 is perfect.
A search weighs in how far predicted times are off, for XLA's are compared with
them. The measure is printed for today's constants and for those of the fit, on
the problems that it saw and on those held out: problems are in five folds by a
hash of their fields, the same problem never in two, and five more searches see
four of these each.

Every search starts from round numbers that no row has a say in
(experiments/harness/fit_terms.py), or with --start from the constants of
another device. What the terms are was decided with many of these rows in sight;
what is held out is so from the values alone. Today's constants of a device have
seen all of its rows.

With --ablate a table says what each constant buys: mean best over chosen with
all of them less that without this one (its term removed, the others fitted
again), with the standard error over problems; and how much more predicted times
are off without it. With --drop_to=N constants are left out one by one, each
time that which training problems miss least.

The same seed gives the same constants. A fit takes a minute or two of one core,
--ablate and --drop_to some more each. Needs no GPU.

Exit status: 0; 2 for a command that can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib

from absl import flags
import numpy as np

from experiments.harness import (
  cli,
  fit_file,
  fit_study,
  fit_tables,
  fit_terms,
)
from experiments.harness import rows as rows_lib
from experiments.harness.fit_search import Regret
from pallas_gemm import hardware
from pallas_gemm.tuning import constants

flags.declare_key_flag("seed")
_DEVICE = flags.DEFINE_string(
  "device",
  "nvidia_h200",
  "Folder of experiments/results with the rows; its name is the GPU's.",
)
_START = flags.DEFINE_string(
  "start",
  None,
  "From whose constants every search starts: another device, such as"
  " nvidia_h200, or a file that --output wrote. Default: round numbers.",
)
_TERMS = flags.DEFINE_list(
  "terms",
  [],
  "Constants that are fitted, from round numbers, such as grouped.l2; the"
  " others stay as --start has them. Default: all.",
)
_WRITE = flags.DEFINE_bool(
  "write",
  False,
  "Write the device's file of constants, with the commit, the number of rows,"
  " the date and the regret.",
)
_OUTPUT = flags.DEFINE_string(
  "output", None, "With --write: the file. Default: the device's."
)
cli.not_empty("start", "output")
_KEEP = flags.DEFINE_bool(
  "keep",
  False,
  "With --write: leave the constants as they are, and write only what is said"
  " of them.",
)
_ABLATE = flags.DEFINE_bool("ablate", False, "Print what each constant buys.")
_DROP_TO = flags.DEFINE_integer(
  "drop_to",
  None,
  "Leave constants out until so many remain; --write then writes these.",
  lower_bound=1,
  upper_bound=len(fit_terms.NAMES),
)
_GENERATIONS = flags.DEFINE_integer(
  "generations", 80, "How often a fit draws candidates.", lower_bound=1
)
_MAX_ROWS = flags.DEFINE_integer(
  "max_rows",
  None,
  "Use about so many rows at most, of problems in the order of a hash. Default:"
  " all.",
  lower_bound=1,
)


def gpu_of(device: str, flag: str = "device") -> hardware.Gpu:
  """The GPU whose folder has that name, which a flag gives.

  Raises:
    cli.FlagError: none is known.
  """
  known = {rows_lib.slug(name): name for name in hardware.known_names()}
  if device not in known:
    raise cli.FlagError(
      f"--{flag}: no GPU {device!r}; known: {', '.join(known)}"
    )
  return hardware.lookup(known[device])


def study_of_flags() -> fit_study.Study:
  """The rows and the start that the flags name.

  Raises:
    cli.FlagError: there are none.
  """
  gpu = gpu_of(_DEVICE.value)
  folder = rows_lib.RESULTS / _DEVICE.value
  try:
    rows = fit_study.rows_of(folder, gpu, _MAX_ROWS.value)
  except ValueError as error:
    raise cli.FlagError(f"--device: {error}") from None
  if len(set(rows.fold.tolist())) < 2:
    raise cli.FlagError(f"--device: {folder} has too few rows of tuning")
  start = fit_study.start_of(gpu)
  terms = [name.strip() for name in _TERMS.value] or fit_terms.NAMES
  if unknown := [name for name in terms if name not in fit_terms.NAMES]:
    known = ", ".join(fit_terms.NAMES)
    raise cli.FlagError(f"--terms: no {unknown[0]!r}; there are {known}")
  if _START.value:
    theirs = fit_terms.values_of(_started_from(gpu))
    if _TERMS.value:
      is_fitted = [name in terms for name in fit_terms.NAMES]
      start = np.where(is_fitted, start, theirs)
    else:
      # What they leave out, at 0, no factor leads away from.
      start = np.where(theirs > 0, theirs, start)
  elif _TERMS.value:
    raise cli.FlagError("--terms: goes with --start")
  return fit_study.Study(gpu, rows, start, cli.SEED.value, terms)


def _started_from(gpu: hardware.Gpu) -> constants.Constants:
  """The constants that --start names.

  Raises:
    cli.FlagError: there are none.
  """
  if _START.value.endswith(".json"):
    path = pathlib.Path(_START.value)
    try:
      return constants.from_json(constants.read(path), path)
    except RuntimeError as error:
      raise cli.FlagError(f"--start: {error}") from None
  other = gpu_of(_START.value, "start")
  if other == gpu or not constants.path_of(other.name).exists():
    raise cli.FlagError(
      "--start: want another device that has constants, or a .json, got"
      f" {_START.value}"
    )
  return constants.of(other)


def drop(
  study: fit_study.Study, values: np.ndarray, console: cli.Console
) -> np.ndarray:
  """A fit of fewer constants; says of each that goes what is left."""
  dropped: frozenset[str] = frozenset()
  console.line("left  train   held out  dropped")
  while len(fit_terms.NAMES) - len(dropped) > _DROP_TO.value:
    name, values = study.drop(values, dropped)
    dropped |= {name}
    train = study.scores(values[-1:]).mean()
    held_out = study.held_out(values).mean()
    left = len(fit_terms.NAMES) - len(dropped)
    console.line(f"{left:4}  {train:.4f}  {held_out:.4f}    {name}")
  return values


def output_file() -> pathlib.Path:
  """The file that --write writes."""
  return pathlib.Path(
    _OUTPUT.value or constants.path_of(gpu_of(_DEVICE.value).name)
  )


def write(study: fit_study.Study, values: np.ndarray) -> pathlib.Path:
  """Writes the device's file of constants; returns where."""
  path = output_file()
  held_out = Regret.of(study.held_out(values))
  shipped = None if _KEEP.value else fit_study.rounded(values[-1])
  found = fit_file.content(study, shipped, held_out)
  path.write_text(json.dumps(found, indent=2) + "\n")
  return path


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if (_KEEP.value or _OUTPUT.value) and not _WRITE.value:
    raise cli.FlagError("--keep, --output: go with --write")
  if _ABLATE.value and _DROP_TO.value is not None:
    raise cli.FlagError("--ablate, --drop_to: want one of them")
  if _WRITE.value:
    cli.check_file("output", output_file())
  console = cli.Console()
  study = study_of_flags()
  rows = study.rows
  skipped = ", ".join(f"{n} {why}" for why, n in rows.skipped.items())
  console.line(
    f"{len(rows.us)} rows of {len(rows.first)} problems; left out: {skipped}"
  )
  worths = []
  with console.progress(_steps()):
    study = dataclasses.replace(study, step=console.step)
    console.doing("fit")
    values = study.fit(_GENERATIONS.value)
    if _DROP_TO.value is not None:
      console.doing("fewer constants")
      values = drop(study, values, console)
    if _ABLATE.value:
      console.doing("without each")
      worths = study.ablate(values)
  title, header = f"Best over chosen, {study.gpu.name}", fit_tables.REGRET
  cells = fit_tables.regrets(study, values)
  console.table(title, header, cells, header[2:])
  console.line(fit_tables.errors(study, values))
  if worths:
    console.line()
    title, header = "What each constant buys", fit_tables.WORTH
    console.table(title, header, fit_tables.worths(worths), header[1:])
  if _WRITE.value:
    console.line(f"written: {write(study, values)}")
  return 0


def _steps() -> int:
  """Generations of all that the flags ask for."""
  found = _GENERATIONS.value
  if _DROP_TO.value is not None:
    fewer = len(fit_terms.NAMES) - _DROP_TO.value
    found += fit_study.DROP_GENERATIONS * fewer
  if _ABLATE.value:
    found += fit_study.FOLDS * fit_study.ABLATION_GENERATIONS
  return found


if __name__ == "__main__":
  cli.run(main)
