"""The committed rows, as pages and pictures take them."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from docs.extensions import lookup
from experiments.harness import counter_tables, ladder_tables, shapes, tables
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import contract

CUBE = shapes.Shape(4096, 4096, 4096)
# Short names of the GPUs that pages speak of.
GPUS = {
  "h200": "NVIDIA H200",
  "h100": "NVIDIA H100 80GB HBM3",
  "a100": "NVIDIA A100-SXM4-80GB",
}
MEASURED = ("h200", "h100")
# The one that pages speak of where they name none.
FIRST = "h200"
RowDict = dict[str, Any]


def read(gpu_name: str, experiment: str) -> list[RowDict]:
  """All rows of a GPU, "h100" say, of an experiment."""
  there = {x: GPUS[x] for x in MEASURED}
  folder = rows_lib.slug(lookup.pick(there, gpu_name, "GPU"))
  return rows_lib.read(rows_lib.RESULTS / folder / f"{experiment}.jsonl")


@functools.cache
def measured(name: str, experiment: str) -> list[RowDict]:
  """The timed rows of a GPU's newest commit, of "ladder" or "sweep"."""
  rows = read(name, experiment)
  return ladder_tables.newest(rows, failed=experiment == "sweep")


@functools.cache
def counted(name: str) -> list[RowDict]:
  """The rungs' counters of a GPU, as they were counted together last."""
  return counter_tables.newest(read(name, "counters"))


def gpu(name: str) -> hardware.Gpu:
  """A GPU by its short name, or by what `hardware.lookup` takes."""
  return hardware.lookup(GPUS.get(name.lower(), name))


def before(one: contract.Rung) -> contract.Rung | None:
  """The rung before; of a variant, the rung that it belongs to."""
  number = one.number if one.variant else one.number - 1
  return ladder.find(number) if number else None


def problem(one: contract.Rung, shape: shapes.Shape = CUBE) -> contract.Problem:
  """A rung's problem of a shape, in its own dtype."""
  return contract.Problem(*shape, one.dtypes[0])


def timed(one: contract.Rung, name: str, shape: shapes.Shape = CUBE) -> RowDict:
  """A rung's timed row."""
  return kernel(one.name, name, shape, one.dtypes[0])


def split_measured(
  rungs: Sequence[contract.Rung],
  find: Callable[[contract.Rung, str], RowDict],
  gpu_name: str,
) -> tuple[list[RowDict], str]:
  """The rows of rungs that have one, and a line on those that have none."""
  rows, missing = [], []
  for one in rungs:
    try:
      rows.append(find(one, gpu_name))
    except ValueError:
      missing.append(one.label)
  on = f"on an {gpu_name.upper()}: {', '.join(missing)}"
  return rows, f"Not measured yet {on}." if missing else ""


def kernel(
  name: str, gpu_name: str, shape: shapes.Shape = CUBE, dtype: str | None = None
) -> RowDict:
  """The timed row of a kernel, a baseline or a peer; the one dtype there is."""
  known = measured(gpu_name, "ladder") + measured(gpu_name, "sweep")
  want = name, str(shape), dtype
  for experiment in ("ladder", "sweep"):
    found = [
      row
      for row in measured(gpu_name, experiment)
      if (row["kernel"], tables.shape(row), dtype and row["dtype"]) == want
      and row["ms_median"] is not None
    ]
    if len(found) == 1:
      return found[0]
  raise ValueError(
    f"no one row of {name!r} {dtype or ''} at {shape} on {gpu_name}; there are"
    f" {lookup.listed(dict.fromkeys(x['kernel'] for x in known))} at"
    f" {lookup.listed(dict.fromkeys(map(tables.shape, known)))}"
  )


def relative(row: RowDict, name: str) -> str:
  """A row's speed over another rung: "x before", "x rung 1"; or "-"."""
  [gpu_name] = [x for x in MEASURED if GPUS[x] == row["device"]]
  rows = measured(gpu_name, row["experiment"])
  first = ladder_tables.starts()[:1]
  return ladder_tables.relative(rows, first)[name](row)


def counters(one: contract.Rung, gpu_name: str) -> RowDict:
  """A rung's counters."""
  found = {ladder_tables.label(row): row for row in counted(gpu_name)}
  return lookup.pick(found, one.label, f"counters on {gpu_name} of rung")
