"""A rung's tables, as Markdown: its card, its grid, traffic and counters."""

from collections.abc import Sequence
from typing import Any

from docs.extensions import numbers, results
from experiments.harness import counter_tables, modelled, published, tables
from pallas_gemm import hardware
from pallas_gemm.ladder import contract

RowDict = dict[str, Any]


def card(label: str) -> str:
  """What was measured of a rung and its variants, and what others published."""
  one = results.rung(label)
  family = [one, *one.variants]
  timed = [
    (x, gpu, results.timed(x, gpu)) for x in family for gpu in results.MEASURED
  ]
  mine = [row for x, _, row in timed if x is one]
  parts = [_times(timed), _resources(timed), _config(one, mine[0])]
  parts += [_published(one), tables.provenance_line(mine)]
  return "\n\n".join(part for part in parts if part)


def _times(timed: Sequence[tuple[contract.Rung, str, RowDict]]) -> str:
  header = [
      "#", "kernel", "GPU", "time", "TFLOP/s", "% of peak", "x jnp.dot",
      "x before", "x rung 1",
  ]  # fmt: skip
  cells = []
  for x, gpu, row in timed:
    rows = results.beside(row, gpu)
    cells.append(
      [
        x.label,
        f"`{x.name}`",
        tables.short_name(row["device"]),
        tables.duration(row["ms_median"]),
        tables.rate(row["tflops"]),
        tables.of_peak(row),
        tables.factor(row["ratio_to_jnp_dot"]),
        tables.factor(tables.over_rung_before(row, rows)),
        tables.factor(tables.over_start(row, rows, tables.starts()[0])),
      ]
    )
  return tables.markdown(header, cells, header[3:])


def _resources(timed: Sequence[tuple[contract.Rung, str, RowDict]]) -> str:
  """What a thread and a block take; as counted on the first GPU."""
  rows = [
    results.counters(x, gpu)
    for x, gpu, _ in timed
    if gpu == results.MEASURED[0]
  ]
  header, cells = counter_tables.occupancy(rows)
  return tables.markdown(header, cells, header[2:-1]) if cells else ""


def _config(one: contract.Rung, row: RowDict) -> str:
  config = {name: row["config"][name] for name in one.uses}
  return f"Config: `{', '.join(f'{k}={v}' for k, v in config.items())}`."


def _published(one: contract.Rung) -> str:
  """What published ladders got for the step; "" if none has it."""
  cells = []
  for ladder in published.LADDERS if not one.variant else ():
    figures = {}
    before = None
    for name, figure, number in ladder.steps:
      if number == one.number:
        figures[name] = (figure, before)
      before = figure
    for name, (figure, previous) in figures.items():
      source = ladder.source
      if ladder.url:
        source = f"[{source}]({ladder.url})"
      gain = None
      if previous:
        gain = figure / previous
        gain = 1 / gain if ladder.unit == published.MS else gain
      cells.append(
        [
          source,
          ", ".join([ladder.gpu or "GPU not named", ladder.problem]),
          name,
          f"{figure:,g} {ladder.unit}",
          tables.factor(gain),
          tables.factor(ladder.of_cublas(one.number)),
        ]
      )
  if not cells:
    return ""
  header = ["published", "measured on", "step", "figure", "x step before",
            "x cuBLAS"]  # fmt: skip
  return tables.markdown(header, cells, header[3:])


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
  """The traffic model beside the bytes that were counted, at 4096^3."""
  one = results.rung(label)
  rows = {gpu: results.counters(one, gpu) for gpu in results.MEASURED}
  header = ["bytes", "model"]
  for row in rows.values():
    name = tables.short_name(row["device"])
    header += [f"{name} counted", f"{name} counted / model"]
  cells, why = [], {}
  models = [row.get("model") or {} for row in rows.values()]
  for key, words in _QUANTITIES.items():
    if not any(key in m for m in models):
      continue
    cell = [
      words,
      counter_tables.size(next(m[key] for m in models if key in m)),
    ]
    for row in rows.values():
      cell.append(counter_tables.size(row["measured"].get(key)))
      cell.append(tables.factor((row.get("ratio") or {}).get(key)))
    cells.append(cell)
    for row in rows.values():
      text = (row.get("explanation") or {}).get(key)
      if text:
        why.setdefault(text, []).append(tables.short_name(row["device"]))
  parts = [tables.markdown(header, cells, header[1:])]
  t = numbers.traffic_of(label)
  asked = modelled.size(t.global_load_bytes)
  parts.append(
    f"Threads{'' if t.threads_load else ', or TMA,'} ask for {asked} of global"
    f" memory, {t.intensity:.3g} FLOP/byte."
  )
  parts += [f"* {', '.join(gpus)}: {text}" for text, gpus in why.items()]
  return "\n\n".join(parts)


def counters(label: str) -> str:
  """A rung's counters and stalls beside those of the rung before."""
  one = results.rung(label)
  before = results.before(one)
  columns = [
    results.counters(x, gpu)
    for gpu in results.MEASURED
    for x in (before, one)
    if x is not None
  ]
  names = [
    f"{tables.short_name(row['device'])} rung {counter_tables.label(row)}"
    for row in columns
  ]
  titles, *counted = _transposed(*counter_tables.counts(columns))
  del titles
  parts = [tables.markdown(["counter", *names], counted, names)]
  header, cells = counter_tables.stalls(columns)
  if cells:
    _, *waits = _transposed(header, cells)
    rows = [
      [name, *values, counter_tables.REASONS.get(name.replace(" ", "_"), "")]
      for name, *values in waits
    ]
    parts.append(
      tables.markdown(
        ["stall, in warps per issued instruction", *names, "a warp waits for"],
        rows,
        names,
      )
    )
  return "\n\n".join(parts)


def _transposed(
  header: Sequence[str], cells: Sequence[Sequence[str]]
) -> list[list[str]]:
  """Columns as rows, without that of kernels' names."""
  found = [[name, *column] for name, column in zip(header, zip(*cells))]
  return [row for row in found if row[0] != "kernel"]
