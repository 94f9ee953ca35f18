"""A rung's tables, as Markdown: its card, its grid, traffic and counters."""

from collections.abc import Sequence
from typing import Any

from docs.extensions import numbers, results
from experiments.harness import (
  counter_tables,
  ladder_tables,
  modelled,
  published,
  tables,
)
from pallas_gemm import hardware
from pallas_gemm.ladder import contract

RowDict = dict[str, Any]


def card(label: str) -> str:
  """What was measured of a rung and its variants, and what others published."""
  one = results.rung(label)
  family = [one, *one.variants]
  timed = [results.timed(x, gpu) for x in family for gpu in results.MEASURED]
  mine = [row for row in timed if row["kernel"] == one.name]
  config = {name: mine[0]["config"][name] for name in one.uses}
  parts = [
    _times(timed),
    _resources([results.counters(x, results.MEASURED[0]) for x in family]),
    f"Config: `{', '.join(f'{k}={v}' for k, v in config.items())}`.",
    "" if one.variant else _published(one),
    tables.provenance_line(mine),
  ]
  return "\n\n".join(part for part in parts if part)


def _times(timed: Sequence[RowDict]) -> str:
  columns = {
    "#": ladder_tables.label,
    "kernel": lambda row: f"`{row['kernel']}`",
    "GPU": tables.short_name,
    "time": tables.TIME,
    "TFLOP/s": tables.TFLOPS,
    "% of peak": ladder_tables.of_peak,
    "x jnp.dot": tables.RATIO,
    "x before": lambda row: results.relative(row, "x before"),
    "x rung 1": lambda row: results.relative(row, "x rung 1"),
  }
  header, cells = tables.pivot(timed, columns)
  return tables.markdown(header, cells, header[3:])


def _resources(counted: Sequence[RowDict]) -> str:
  """What a thread and a block take."""
  header, cells = counter_tables.occupancy(counted)
  return tables.markdown(header, cells, header[2:-1]) if cells else ""


def _published(one: contract.Rung) -> str:
  """What published ladders got for the step; "" if none has it."""
  cells = []
  for ladder in published.LADDERS:
    for before, (name, figure, number) in zip(
      (None, *ladder.steps), ladder.steps
    ):
      if number != one.number:
        continue
      gain = figure / before[1] if before else None
      if gain and ladder.unit == published.MS:
        gain = 1 / gain
      source = f"[{ladder.source}]({ladder.url})"
      cells.append(
        [
          source if ladder.url else ladder.source,
          f"{ladder.gpu or 'GPU not named'}, {ladder.problem}",
          name,
          f"{figure:,g} {ladder.unit}",
          tables.factor(gain),
          tables.factor(ladder.of_cublas(number)),
        ]
      )
  header = [
      "published", "measured on", "step", "figure", "x step before", "x cuBLAS",
  ]  # fmt: skip
  return tables.markdown(header, cells, header[3:]) if cells else ""


def grid(label: str) -> str:
  """Grid and BlockSpecs at 4096^3, as `--explain` prints them."""
  one = results.rung(label)
  problem = results.problem(one)
  with hardware.assume(results.GPUS["h200"]):
    config = one.default_config(problem)
    dimensions, started = modelled.grid_cells(one, problem, config)
    specs = modelled.block_cells(one, problem, config)
  size = " x ".join(str(getattr(problem, side)) for side in "mnk")
  parts = [
    f"M x N x K = {size}, {problem.dtype}:",
    tables.markdown(
      ["grid", "steps", "of"],
      [[f"`{x}`", count, text] for x, count, text in dimensions],
      ["steps"],
    ),
  ]
  if started:
    parts.append(f"Started: {started}, which take (i, j) in turn.")
  header, *cells = specs
  header = ("BlockSpec", *header[1:])
  cells = [
    (name, f"`{block}`", f"`{at}`", *rest) for name, block, at, *rest in cells
  ]
  parts.append(tables.markdown(header, cells, ["bytes"]))
  return "\n\n".join(parts)


_QUANTITIES = {
  "dram_read_bytes": "read from DRAM",
  "dram_write_bytes": "written to DRAM",
  "l2_read_bytes": "read from L2",
  "l2_write_bytes": "written to L2",
  "thread_load_bytes": "loaded by threads",
}


def traffic(label: str) -> str:
  """The traffic model and the bytes that were counted, at 4096^3."""
  one = results.rung(label)
  rows = [results.counters(one, gpu) for gpu in results.MEASURED]
  models = [row.get("model") or {} for row in rows]
  keys = [key for key in _QUANTITIES if any(key in model for model in models)]

  def modelled_size(key: str) -> str:
    return counter_tables.size(next(m[key] for m in models if key in m))

  columns = {"bytes": _QUANTITIES.get, "model": modelled_size}
  for row in rows:

    def counted(key: str, row=row) -> str:
      return counter_tables.size(row["measured"].get(key))

    def of_model(key: str, row=row) -> str:
      return tables.factor((row.get("ratio") or {}).get(key))

    gpu = tables.short_name(row)
    columns[f"{gpu} counted"] = counted
    columns[f"{gpu} counted / model"] = of_model
  header, cells = tables.pivot(keys, columns)
  model = numbers.traffic_of(label)
  parts = [
    tables.markdown(header, cells, header[1:]),
    f"Threads{'' if model.threads_load else ', or TMA,'} ask for"
    f" {modelled.size(model.global_load_bytes)} of global memory,"
    f" {model.intensity:.3g} FLOP/byte.",
  ]
  return "\n\n".join(parts)


def counters(label: str) -> str:
  """A rung's counters and stalls, and those of the rung before."""
  one = results.rung(label)
  rungs = [x for x in (results.before(one), one) if x is not None]
  rows = [results.counters(x, gpu) for gpu in results.MEASURED for x in rungs]
  names = [
    f"{tables.short_name(row)} rung {ladder_tables.label(row)}" for row in rows
  ]
  counts = _transposed(counter_tables.counts(rows))
  parts = [tables.markdown(["counter", *names], counts, names)]
  if waits := _transposed(counter_tables.stalls(rows)):
    header = ["stall, in warps per issued instruction", *names,
              "a warp waits for"]  # fmt: skip
    reasons = counter_tables.REASONS
    cells = [[*x, reasons.get(x[0].replace(" ", "_"), "")] for x in waits]
    parts.append(tables.markdown(header, cells, names))
  return "\n\n".join(parts)


def _transposed(table: tables.Table) -> list[tuple[str, ...]]:
  """Columns as rows, without those that name a rung; none of no cells."""
  header, cells = table
  return [*zip(header, *cells)][2:] if cells else []
