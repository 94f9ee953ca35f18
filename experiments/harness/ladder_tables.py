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


def expression(row: RowDict) -> str:
  """What was computed, in words of the problem."""
  alpha = "" if row["alpha"] == 1 else f"{row['alpha']:g}*"
  beta = "" if row["beta"] == 0 else f" + {row['beta']:g}*C"
  return f"{alpha}A@B{beta}"


def title(row: RowDict) -> str:
  """The problem of a row, in full."""
  sizes = " x ".join(str(row[name]) for name in "mnk")
  return f"{expression(row)}, M x N x K = {sizes}, {row['dtype']}"


def is_dot(row: RowDict) -> bool:
  """Whether a row is of a baseline."""
  return row["kernel"].startswith("jnp.dot")


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


def markdown(devices: Sequence[Sequence[RowDict]]) -> str:
  """The ladder's tables: one a problem, with columns of each device.

  Args:
    devices: timed rows of each; speeds over other rungs are of the first.
  """
  parts = [tables.provenance_line(rows) for rows in devices]
  everything = [row for rows in devices for row in rows]
  for group in problems(rows_lib.latest(everything)):
    parts += [f"**{title(group[0])}**", _problem_table(group, devices)]
  legend = " ".join(
    f"*x rung {rung.label}*: speed over {rung.name} in {rung.dtypes[0]} at the"
    " same size."
    for rung in starts()
  )
  parts.append(
    "*% of peak*: TFLOP/s over the peak of the unit used: CUDA cores for"
    " float32, tensor cores for 16 bits and TF32. *x jnp.dot*: speed over it,"
    " interleaved in one run; its own row is itself against itself, so the"
    " distance from 1.00x is the noise. *x before*: speed over the rung before;"
    f" of a variant (a letter after the number), over its rung. {legend}"
  )
  return "\n\n".join(parts)


def _problem_table(
  group: Sequence[RowDict], devices: Sequence[Sequence[RowDict]]
) -> str:
  """One problem: a line for each kernel of `group`, columns of each device."""
  dot = next((row["kernel"] for row in group if is_dot(row)), "jnp.dot")
  measured = {
    "time": tables.TIME,
    "TFLOP/s": tables.TFLOPS,
    "% of peak": of_peak,
    f"x {dot}": tables.RATIO,
  }
  same = [
    [row for row in rows if problem(row) == problem(group[0])]
    for rows in devices
  ]
  gpus = [tables.short_name(rows[0]) for rows in devices]
  columns = [(gpu, rows, measured) for gpu, rows in zip(gpus, same)]
  over = relative(devices[0], starts({group[0]["dtype"]}))
  columns.append((gpus[0], same[0], over))
  columns.append(("", group, _published_column(group)))
  return tables.markdown(*tables.pivot(group, KERNEL, columns))


def published(number: int) -> Published | None:
  """The ladder whose column is next to a rung's own numbers."""
  found = (x for x in PUBLISHED if x.of_cublas(number) is not None)
  return next(found, None)


def _published_column(rows: Sequence[RowDict]) -> tables.Columns:
  """A column of a published ladder, if one has these rungs."""
  numbers = [row["number"] for row in rows if row["number"] is not None]
  for ladder in filter(None, map(published, numbers)):

    def of_cublas(row: RowDict, ladder=ladder) -> str:
      rung = row["number"] is not None and not row.get("variant")
      return tables.factor(ladder.of_cublas(row["number"]) if rung else None)

    return {f"published, x cuBLAS ({ladder.source}, {ladder.gpu})": of_cublas}
  return {}


def sweep_markdown(rows: Sequence[RowDict]) -> str:
  """Every kernel over the size, of one device: by precision, four tables.

  Args:
    rows: of one device; those without a time failed their check.
  """
  timed = [row for row in rows if row["ms_median"] is not None]
  parts = [tables.provenance_line(timed)]

  def precision(row: RowDict) -> str:
    return f"{expression(row)}, {row['dtype']}"

  for name, group in tables.grouped(rows, precision).items():
    # Speed over the first rung of the same precision.
    start = starts({group[0]["dtype"]})[-1]
    *_, over = relative(rows, [start]).values()
    quantities = {
      "time": tables.TIME,
      "GFLOP/s": lambda row: tables.rate(1e3 * row["tflops"]),
      "GB/s": tables.GBYTES,
      f"speed over rung {start.label}, {start.name}": over,
    }
    for quantity, text in quantities.items():
      parts.append(f"**{name}: {quantity}**")
      parts.append(tables.markdown(*_over_sizes(group, text)))
  parts.append(
    "*GB/s*: A and B read once and the result written once, over the time;"
    " what a kernel moves beyond that does not count. -: left out, since one"
    " call would take too long. FAILED: the result did not pass its check at"
    " that commit, and was not timed."
  )
  return "\n\n".join(parts)


def _over_sizes(rows: Sequence[RowDict], text: tables.Text) -> tables.Table:
  """A line for each kernel, a column for each size."""

  def shown(row: RowDict) -> str:
    return tables.verdict(row) if row["ms_median"] is None else text(row)

  def size(row: RowDict) -> str:
    is_cube = row["m"] == row["n"] == row["k"]
    return str(row["m"]) if is_cube else tables.shape(row)

  by_size = sorted(rows, key=lambda row: row["m"] * row["n"] * row["k"])
  columns = [
    (heading, group, {"": shown})
    for heading, group in tables.grouped(by_size, size).items()
  ]
  return tables.pivot(ordered(rows), KERNEL, columns)


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
