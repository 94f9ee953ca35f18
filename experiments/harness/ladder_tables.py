"""Rows of the ladder as tables: of a run, of its problems, and over sizes."""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import itertools
import json
import pathlib

from experiments.harness import rows as rows_lib
from experiments.harness import shapes, tables
from experiments.harness.tables import RowDict
from pallas_gemm import hardware, roofline
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract

PROBLEM = tuple(name for name in rows_lib.PROBLEM_FIELDS if name != "kernel")


MS, PERCENT = "ms", "% of cuBLAS"


@dataclasses.dataclass(frozen=True)
class Published:
  """What somebody's ladder reached: figures, with their source.

  A step is put with the rung whose idea it added last; those that have no rung
  of their own (autotuning, a larger tile) have none here. GPUs, sizes and
  clocks differ from ours, so what compares is the ratio to cuBLAS on one GPU.

  Attributes:
    source: who published it.
    problem: dtype and sizes.
    unit: of the figures.
    url: where; None where there is no address to give.
    gpu: what it was measured on; None if that is not said.
    steps: (name, figure, the number of its rung).
    cublas: cuBLAS on the same GPU, in the same unit; None if not given.
    note: what else the source says.
  """

  source: str
  problem: str
  unit: str
  url: str | None = None
  gpu: str | None = None
  steps: Sequence[tuple[str, float, int | None]] = ()
  cublas: float | None = None
  note: str = ""

  def of_cublas(self, number: int) -> float | None:
    """The rung's published speed as a part of cuBLAS's."""
    found = [x for _, x, rung in self.steps if rung == number]
    if found and self.unit == PERCENT:
      return found[-1] / 100
    if not found or self.cublas is None:
      return None
    ratio = found[-1] / self.cublas
    return 1 / ratio if self.unit == MS else ratio


_FIGURES = pathlib.Path(__file__).parents[1] / "results" / "published.json"
PUBLISHED = [Published(**x) for x in json.loads(_FIGURES.read_text())]


def label(row: RowDict) -> str:
  """The rung's number, with the letter of a variant; "" of what is none."""
  if row["number"] is None:
    return ""
  return f"{row['number']}{row.get('variant', '')}"


def peak_flops(row: RowDict, gpu: hardware.Gpu) -> float:
  """Peak FLOP/s of the unit that a row's kernel computes on."""
  default = (row["config"] or {}).get("precision") == "DEFAULT"
  tf32 = default and row["dtype"] == "float32"
  return roofline.peak_flops(gpu, "tf32" if tf32 else row["dtype"])


def of_peak(row: RowDict) -> str:
  """Throughput in per cent of its unit's peak; "-" on an unknown GPU."""
  try:
    gpu = hardware.lookup(row["device"] or "")
  except ValueError:
    return tables.EMPTY
  if row["tflops"] is None:
    return tables.EMPTY
  return f"{1e14 * row['tflops'] / peak_flops(row, gpu):.1f}"


def starts(dtypes: Iterable[str] | None = None) -> list[contract.Rung]:
  """Rungs that speeds count from: the first, and the first of a precision.

  Args:
    dtypes: leaves out those of precisions that none of these belong to.
  """
  first, *_ = ladder = ladder_lib.LADDER
  found = [b for a, b in itertools.pairwise(ladder) if a.dtypes != b.dtypes]
  return [first] + [
    rung for rung in found if dtypes is None or set(dtypes) & set(rung.dtypes)
  ]


def ordered(rows: Iterable[RowDict]) -> list[RowDict]:
  """Rungs by number, each before its variants, then the others as they came."""

  def rank(row: RowDict) -> tuple:
    number = row["number"]
    return number is None, number or 0, row.get("variant", "")

  return sorted(rows, key=rank)


def newest(rows: Iterable[RowDict], failed: bool = False) -> list[RowDict]:
  """The timed rows of the commit that was measured last, each kernel's last.

  Args:
    rows: of one device.
    failed: take also those of results that failed their check, without times.
  """
  rows = list(rows)
  timed = [row for row in rows if row["ms_median"] is not None]
  if not timed:
    return []
  commit = max(timed, key=lambda row: row["utc"])["commit"]
  return rows_lib.latest(
    row
    for row in rows
    if row["commit"] == commit
    and (row["ms_median"] is not None or (failed and row["passed"] is False))
  )


def own(rows: Iterable[RowDict]) -> list[RowDict]:
  """The rows of the ladder's own problems; others are somebody's."""
  known = shapes.suite("ladder") + shapes.suite("large")
  return [row for row in rows if (row["m"], row["n"], row["k"]) in known]


def problem(row: RowDict) -> tuple:
  """What rows must have in common to stand in one table."""
  return tuple(row[name] for name in PROBLEM)


def problems(rows: Iterable[RowDict]) -> list[list[RowDict]]:
  """Rows of one problem together; those with the most rungs first."""

  def rank(group: list[RowDict]) -> tuple:
    row = group[0]
    rungs = sum(1 for r in group if r["number"] is not None)
    # float32 before the 16-bit types, as in the ladder.
    return -rungs, row["m"] * row["n"] * row["k"], row["dtype"] != "float32"

  return sorted(map(ordered, tables.grouped(rows, problem).values()), key=rank)


KERNEL: tables.Columns = {"#": label, "kernel": tables.field("kernel")}


def relative(
  rows: Sequence[RowDict], first: Iterable[contract.Rung] = ()
) -> tables.Columns:
  """Columns of speeds over other rungs at the same size.

  Args:
    rows: of the other rungs. The rung before a variant is the one that it
      belongs to. There is none before rung 9, where the arithmetic changes and
      with it the dtype.
    first: also over these, of `starts`. The first rung computes in its own
      dtype, whatever a row's.
  """

  def over(row: RowDict, number: int, dtype: str) -> str:
    same = {name: row[name] for name in PROBLEM} | {"dtype": dtype}
    other = rows_lib.find(rows, number=number, variant=None, **same)
    if other is None or None in (other["ms_median"], row["ms_median"]):
      return tables.EMPTY
    return tables.factor(other["ms_median"] / row["ms_median"])

  def before(row: RowDict) -> str:
    if row["number"] is None:
      return tables.EMPTY
    return over(row, row["number"] - (not row.get("variant")), row["dtype"])

  def over_start(rung: contract.Rung, row: RowDict) -> str:
    is_first = rung is ladder_lib.LADDER[0]
    return over(row, rung.number, rung.dtypes[0] if is_first else row["dtype"])

  return {"x before": before} | {
    f"x rung {rung.label}": functools.partial(over_start, rung)
    for rung in first
  }


def summary(rows: Iterable[RowDict]) -> tables.Table:
  """Header and cells of the table that a run ends in."""
  rows = [row for group in problems(rows) for row in group]

  def spread(row: RowDict) -> str:
    ends = [tables.duration(row[name]) for name in ("ms_p25", "ms_p75")]
    return tables.EMPTY if row["ms_median"] is None else " - ".join(ends)

  columns = KERNEL | {
    "MxNxK": tables.shape,
    "dtype": tables.field("dtype"),
    "time": tables.TIME,
    "p25-p75": spread,
    "TFLOP/s": tables.TFLOPS,
    "% of peak": of_peak,
    "GB/s": tables.GBYTES,
    "x jnp.dot": tables.RATIO,
    **relative(rows, starts({row["dtype"] for row in rows})),
    "error/bound": tables.of_bound,
    "check": tables.verdict,
  }
  return tables.pivot(rows, columns)


def published_markdown() -> str:
  """The table of other people's ladders."""
  cells = []
  for x in PUBLISHED:
    source = f"[{x.source}]({x.url})" if x.url else x.source
    steps = ", ".join(f"{name} {figure:g}" for name, figure, _ in x.steps)
    cublas = "" if x.cublas is None else f"cuBLAS {x.cublas:g}"
    what = ", ".join([x.gpu or "GPU not named", x.problem, x.unit])
    figures = "; ".join(filter(None, (steps, cublas, x.note)))
    cells.append([source, what, figures])
  return tables.markdown(["source", "GPU, problem, unit", "steps"], cells, ())
