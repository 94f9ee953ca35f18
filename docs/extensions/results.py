"""The committed rows, as the tables of README and ladder.md take them."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from docs.extensions import lookup
from experiments.harness import (
  counter_tables,
  ladder_tables,
  shapes,
  tables,
)
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract

CUBE = shapes.Shape(4096, 4096, 4096)
# Short names of the GPUs that pages speak of.
GPUS = {
  "h200": "NVIDIA H200",
  "h100": "NVIDIA H100 80GB HBM3",
  "a100": "NVIDIA A100-SXM4-80GB",
}
MEASURED = ("h200", "h100")


@functools.cache
def measured(name: str, experiment: str) -> list[dict[str, Any]]:
  """The timed rows of a GPU's newest commit, of "ladder" or "sweep"."""
  folder = rows_lib.RESULTS / rows_lib.slug(GPUS[name])
  rows = rows_lib.read(folder / f"{experiment}.jsonl")
  return ladder_tables.newest(rows, failed=experiment == "sweep")


@functools.cache
def counted(name: str) -> tuple[dict[str, Any], ...]:
  """The rungs' counters of a GPU, as they were counted together last."""
  folder = rows_lib.RESULTS / rows_lib.slug(GPUS[name])
  rows = rows_lib.read(folder / "counters.jsonl")
  return tuple(counter_tables.newest(rows))


def gpu(name: str) -> hardware.Gpu:
  """A GPU by its short name, or by what `hardware.lookup` takes.

  Raises:
    UnknownError: there is none.
  """
  try:
    return hardware.lookup(GPUS.get(name.lower(), name))
  except ValueError as error:
    raise lookup.UnknownError(f"{error}; also {', '.join(GPUS)}") from None


def rung(label: str) -> contract.Rung:
  """A rung or a variant by its label.

  Raises:
    UnknownError: there is none.
  """
  try:
    return ladder_lib.find(label)
  except ValueError as error:
    raise lookup.UnknownError(str(error)) from None


def before(one: contract.Rung) -> contract.Rung | None:
  """The rung before; of a variant, the rung that it belongs to."""
  number = one.number if one.variant else one.number - 1
  return ladder_lib.find(number) if number else None


def problem(one: contract.Rung, shape: shapes.Shape = CUBE) -> contract.Problem:
  """A rung's problem of a shape, in its own dtype."""
  return contract.Problem(*shape, one.dtypes[0])


def timed(
  one: contract.Rung, name: str, shape: shapes.Shape = CUBE
) -> dict[str, Any]:
  """A rung's timed row.

  Raises:
    UnknownError: there is none; the message lists the shapes.
  """
  return kernel(one.name, name, shape, one.dtypes[0])


def split_measured(
  rungs: Sequence[contract.Rung],
  find: Callable[[contract.Rung, str], dict[str, Any]],
  gpu_name: str,
) -> tuple[list[dict[str, Any]], str]:
  """The rows of rungs that have one, and a line on those that have none."""
  rows, missing = [], []
  for one in rungs:
    try:
      rows.append(find(one, gpu_name))
    except lookup.UnknownError:
      missing.append(one.label)
  on = f"on an {gpu_name.upper()}: {', '.join(missing)}"
  return rows, f"Not measured yet {on}." if missing else ""


def kernel(
  name: str, gpu_name: str, shape: shapes.Shape = CUBE, dtype: str | None = None
) -> dict[str, Any]:
  """The timed row of a kernel, a baseline or a peer.

  Args:
    name: as in the rows.
    gpu_name: short name.
    shape: of the problem.
    dtype: None: that of the only one there is.

  Raises:
    UnknownError: no row matches, or several do.
  """
  for experiment in ("ladder", "sweep"):
    found = [
      row
      for row in measured(gpu_name, experiment)
      if (row["kernel"], tables.shape(row)) == (name, str(shape))
      and row["dtype"] == (dtype or row["dtype"])
      and row["ms_median"] is not None
    ]
    if len(found) == 1:
      return found[0]
  known = measured(gpu_name, "ladder") + measured(gpu_name, "sweep")
  raise lookup.UnknownError(
    f"no one row of {name!r} {dtype or ''} at {shape} on {gpu_name}; there are"
    f" {lookup.listed(dict.fromkeys(x['kernel'] for x in known))} at"
    f" {lookup.listed(dict.fromkeys(map(tables.shape, known)))}"
  )


def relative(row: dict[str, Any], name: str) -> str:
  """A row's speed over another rung: "x before", "x rung 1"; or "-"."""
  [gpu_name] = [x for x in MEASURED if GPUS[x] == row["device"]]
  rows = measured(gpu_name, row["experiment"])
  first = ladder_tables.starts()[:1]
  return ladder_tables.relative(rows, first)[name](row)


def counters(one: contract.Rung, gpu_name: str) -> dict[str, Any]:
  """A rung's counters.

  Raises:
    UnknownError: there are none.
  """
  found = {ladder_tables.label(row): row for row in counted(gpu_name)}
  return lookup.pick(found, one.label, f"counters on {gpu_name} of rung")
