"""A run of a program that measures cases: its lines, rows and exit status."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

from experiments.harness import case as case_lib
from experiments.harness import cli, provenance, tables, timing
from experiments.harness import rows as rows_lib
from experiments.harness import run as run_lib
from pallas_gemm import hardware

RowDict = dict[str, Any]


@dataclasses.dataclass
class Session:
  """What a run prints and keeps.

  Attributes:
    path: of the rows.
    device: name of the device.
    on_gpu: whether it is a GPU, so that kernels are timed.
    name_width: columns for the names of cases.
    caches: what a timed call finds in them.
    interrupt: knows of Ctrl-C.
    rows: those of this run.
    failures: names of what failed or could not run.
    interrupted: Ctrl-C ended the run.
  """

  path: pathlib.Path
  device: str
  on_gpu: bool
  name_width: int = 46
  caches: str = "L2 flushed"
  interrupt: cli.Interrupt = dataclasses.field(default_factory=cli.Interrupt)
  rows: list[RowDict] = dataclasses.field(default_factory=list)
  failures: list[str] = dataclasses.field(default_factory=list)
  interrupted: bool = False

  def __post_init__(self) -> None:
    line = f"{self.device}; times are GPU kernel times, {self.caches}"
    if not self.on_gpu:
      line = f"No NVIDIA GPU ({self.device}): results are checked, not timed"
    cli.say(line)

  @contextlib.contextmanager
  def measuring(self) -> Iterator[None]:
    """Context of all that is measured; Ctrl-C ends it."""
    try:
      with self.interrupt:
        yield
    except KeyboardInterrupt:
      self.interrupted = True

  def case(
    self,
    name: str,
    measure: Callable[[], RowDict],
    parts: Callable[[RowDict], list[str]],
    may_fail: bool = False,
  ) -> None:
    """Keeps and prints the row of a case.

    Args:
      name: what the case is called.
      measure: gives the row.
      parts: what was measured, as parts of a line.
      may_fail: whether it is no failure if the case can't run here.
    """
    found = self._guarded(name, measure, may_fail)
    if found is not None:
      self._keep(found)
      verdict = f"{tables.verdict(found)} error / bound"
      line = [
        f"{name:<{self.name_width}}",
        *parts(found),
        f"{verdict} {tables.of_bound(found)}",
      ]
      if found["passed"] is False:
        self._failed(name)
      cli.say("  ".join(line))

  def suites(
    self,
    cases: Sequence[Any],
    prepare: Callable[[Sequence[Any]], Iterable[Any]],
    measure: Callable[[Any], RowDict],
    label: Callable[[RowDict], str],
    parts: Callable[[RowDict], list[str]],
  ) -> None:
    """Keeps and prints the rows of cases; those of a suite compile together.

    Args:
      cases: in the order of their suites.
      prepare: compiles cases; each that it gives has its `case`.
      measure: gives the row of a prepared case.
      label: what a case is called in its suite, by the row's fields.
      parts: what was measured, as parts of a line.
    """
    for name, suite in itertools.groupby(cases, lambda case: case.suite):
      suite = list(suite)
      for prepared in prepare(suite):
        fields = prepared.case.fields()
        self.case(
          f"{name} {label(fields)} {fields['dtype']}",
          functools.partial(measure, prepared),
          parts,
        )

  def host_rows(
    self,
    name: str,
    measure: Callable[[], Iterable[RowDict]],
    line: Callable[[RowDict], str],
  ) -> None:
    """Keeps and prints rows that compare no case; `measure` gives them."""

    def take() -> None:
      for row in measure():
        self._keep(row)
        cli.say(f"{name} {line(row)}")

    self._guarded(name, take)

  def table(self, title: str, table: tables.Table) -> None:
    """Prints a table, after an empty line."""
    header, cells = table
    cli.say()
    cli.table(title, header, cells, tables.numeric(header))

  def _guarded(
    self, name: str, work: Callable[[], Any], may_fail: bool = False
  ) -> Any:
    """What `work` gives; None if it failed, with its reason in a line."""
    try:
      return work()
    except Exception as error:  # pylint: disable=broad-exception-caught
      if self.interrupt.pressed:  # inside a kernel Ctrl-C comes in disguise
        raise KeyboardInterrupt from None
      reason = case_lib.reason(error)
      if not may_fail:
        self._failed(name)
      cli.say(f"{name}  can't run here: {reason}")
      return None

  def _failed(self, name: str) -> None:
    self.failures.append(" ".join(name.split()))

  def _keep(self, row: RowDict) -> None:
    rows_lib.append(self.path, row)
    self.rows.append(row)

  def finish(self) -> int:
    """Says where the rows are and what failed; the exit status."""
    if self.rows:
      cli.say(f"rows: {self.path}")
    if self.interrupted:
      kept = len(self.rows)
      cli.say(f"interrupted: {kept} finished rows were kept")
      return cli.INTERRUPTED
    if self.failures:
      count, names = len(self.failures), "; ".join(self.failures)
      cli.say(f"FAILED ({count}): {names}")
    return 1 if self.failures else 0


def parse_suites(
  names: Sequence[str],
  suite: Callable[[str, str], list[Any]],
  interpreted: Sequence[str] | None,
  float32: bool = False,
) -> list[Any]:
  """The cases of `--suite`, in 16 bits.

  Args:
    names: of the suites.
    suite: gives the cases of a name and a dtype.
    interpreted: without a GPU the names of small enough suites, else None.
    float32: whether that is taken too.

  Raises:
    cli.FlagError: no such suite, one that is too large, or float32.
  """
  if cli.DTYPE.value == "float32" and not float32:
    raise cli.FlagError("--dtype: the ops are compared in 16 bits")
  try:
    dtype = cli.DTYPE.value or "bfloat16"
    found = [case for name in names for case in suite(name, dtype)]
  except ValueError as error:
    raise cli.FlagError(f"--suite: {error}") from None
  if interpreted is not None and not set(names) <= set(interpreted):
    raise cli.FlagError(
      f"--suite={','.join(names)}: too large without an NVIDIA GPU, where there"
      f" is {' and '.join(interpreted)}"
    )
  return found


def start(experiment: str, on_gpu: bool, **fields: Any) -> Session:
  """A session whose rows go where the flags say; `fields` are of `Session`."""
  device = provenance.device_name()
  path = rows_lib.results_file(device, experiment, cli.OUTPUT_DIR.value)
  return Session(path, device, on_gpu, **fields)


def bench(experiment: str, on_gpu: bool) -> run_lib.Bench:
  """Measures as the flags say."""
  return run_lib.Bench(
    experiment=experiment,
    seed=cli.SEED.value,
    warmup=cli.WARMUP.value,
    repeats=cli.REPEATS.value,
    timed=on_gpu,
    flush=timing.l2_flush(hardware.current().l2_bytes) if on_gpu else None,
  )
