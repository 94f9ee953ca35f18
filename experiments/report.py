"""Prints tables of the rows that were measured.

  python -m experiments.report                     of experiments/results
  python -m experiments.report --rows=/tmp/rows    of a folder

Nothing is measured. Of a kernel and problem the last row counts, of the ladder
and of counters those of the newest commit. The pages of docs/, with their
pictures, are made of the same rows by `python -m docs.write`.

Exit status: 0; 2 for a command that can't be carried out.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import pathlib

from absl import flags

from experiments.harness import (
  cli,
  counter_tables,
  dense_tables,
  ladder_tables,
  ragged_tables,
  suite_tables,
  tables,
)
from experiments.harness import rows as rows_lib
from experiments.harness.tables import RowDict

_ROWS = flags.DEFINE_string(
  "rows",
  None,
  "A folder of rows, which a program had as --output_dir. Default: those in"
  " experiments/results, a device after the other.",
)
cli.not_empty("rows")

Rows = Sequence[RowDict]
Tables = Iterator[tables.Table]


def _ladder(rows: Rows, failed: bool = False) -> Tables:
  yield ladder_tables.summary(ladder_tables.newest(rows, failed))


def _counters(rows: Rows) -> Tables:
  newest = counter_tables.newest(rows)
  for table in (
    counter_tables.occupancy,
    counter_tables.counts,
    counter_tables.stalls,
  ):
    yield table(newest)


def _dense(rows: Rows) -> Tables:
  yield dense_tables.summary(dense_tables.compared(rows_lib.latest(rows)))


def _ragged(rows: Rows) -> Tables:
  found = ragged_tables.timed(rows_lib.latest(rows))
  yield ragged_tables.summary(found)
  yield ragged_tables.against(found)


def _float32(rows: Rows) -> Tables:
  newest = rows_lib.latest(rows)
  yield suite_tables.float32(newest)
  yield suite_tables.float32_errors(newest)


# By the name of a file of rows, its tables.
TABLES: dict[str, Callable[[Rows], Tables]] = {
  "ladder": _ladder,
  "sweep": functools.partial(_ladder, failed=True),
  "counters": _counters,
  "dense": _dense,
  "dense_unseen": _dense,
  "ragged": _ragged,
  "eight_bits": lambda rows: suite_tables.eight_bits(rows_lib.latest(rows)),
  "float32": _float32,
}


def rows_of(path: pathlib.Path) -> Rows:
  """The rows of a file.

  Raises:
    cli.FlagError: it can't be read, or holds something else.
  """
  try:
    found = rows_lib.read(path)
    for row in found:
      if (other := row.get("experiment")) != path.stem:
        raise ValueError(f"want rows of {path.stem}, got one of {other}")
      if path.stem != "counters":
        rows_lib.validate(row)
  except (OSError, ValueError) as error:
    raise cli.FlagError(f"{path}: {error}") from None
  return found


def show(folder: pathlib.Path) -> bool:
  """Prints the tables of the rows in a folder; whether there are any."""
  is_empty = True
  for name, of_rows in TABLES.items():
    path = folder / f"{name}.jsonl"
    rows = rows_of(path)
    for header, cells in of_rows(rows) if rows else ():
      if cells:
        is_empty = False
        numeric = tables.numeric(header)
        cli.table(f"Rows of {path}", header, cells, numeric)
        cli.say()
  return not is_empty


def main(argv: Sequence[str]) -> int:
  """Carries out the command; returns the exit status."""
  del argv
  folders = sorted(rows_lib.RESULTS.glob("*/"))
  if _ROWS.value:
    folders = [pathlib.Path(_ROWS.value)]
  # A run without a GPU leaves rows that have no times.
  shown = [show(folder) for folder in folders]
  if not any(shown):
    where = _ROWS.value or rows_lib.RESULTS
    raise cli.FlagError(f"--rows: no timed rows in {where}")
  return 0


if __name__ == "__main__":
  cli.run(main)
