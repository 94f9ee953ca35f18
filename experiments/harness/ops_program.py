"""What the programs that compare the ops share: cases by name, and a run."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from experiments.harness import cli, dense_tables, prepared, report
from experiments.harness import console as console_lib
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib

RowDict = dict[str, Any]


def suites(given: Sequence[str]) -> list[str]:
  """The names that a user listed, each once."""
  return list(dict.fromkeys(name.strip() for name in given))


def cases(
  names: Sequence[str],
  suite: Callable[[str, str], list[Any]],
  small: Sequence[str],
  on_gpu: bool,
) -> list[Any]:
  """The cases of suites, in the dtype of the flags.

  Args:
    names: of the suites.
    suite: the cases of a name and a dtype.
    small: names of what can be interpreted.
    on_gpu: whether there is a GPU.

  Raises:
    cli.FlagError: a dtype that the kernels don't take, no such suite, or not
      without a GPU.
  """
  if cli.DTYPE.value == "float32":
    raise cli.FlagError("--dtype: the ops are compared in 16 bits")
  found = []
  for name in names:
    try:
      found += suite(name, cli.DTYPE.value or "bfloat16")
    except ValueError as error:
      raise cli.FlagError(f"--suite: {error}") from None
  large = [name for name in names if name not in small]
  if large and not on_gpu:
    raise cli.FlagError(
      f"--suite={','.join(large)}: too large without an NVIDIA GPU, unlike"
      f" {', '.join(small)}"
    )
  return found


def run(
  console: console_lib.Console,
  of: report.Report,
  cases: Sequence[Any],
  *,
  on_gpu: bool,
  title: str,
  implementation: str | None,
  measure: Callable[..., RowDict],
  label: Callable[[RowDict], str],
  parts: Callable[[RowDict], list[str]],
  last: Callable[[session_lib.Session, run_lib.Bench], None] | None = None,
  **fields: Any,
) -> int:
  """Measures cases: lines, rows, table, plots and pages; the exit status.

  Args:
    console: where lines go.
    of: the table, plots and page of the rows.
    cases: in the order of their suites.
    on_gpu: whether kernels are timed.
    title: of the table, with {} for the device.
    implementation: passed to the ops.
    measure: (session, bench, prepared case) -> its row.
    label: what a case is called beside its suite, by the row's fields.
    parts: what was measured, as parts of a line.
    last: what is measured when the cases are done.
    **fields: of the session.
  """
  session = session_lib.start(console, of.experiment, on_gpu, **fields)
  bench = session_lib.bench(of.experiment, on_gpu)
  with session.measuring(len(cases)):
    if on_gpu:
      session.host_rows(
        "bandwidth", bench.measure_bandwidth, dense_tables.host_line
      )
    session.suites(
      cases,
      functools.partial(prepared.prepare, implementation=implementation),
      functools.partial(measure, session, bench),
      label,
      parts,
    )
    if last is not None:
      last(session, bench)
  of.table(console, title.format(session.device), session.rows)
  folder = session.path.parent
  return session.finish(lambda rows: of.show(console, rows, folder))
