"""The ladder's tables: of all rungs, and of one; and the box on its page."""

from collections.abc import Sequence
import math
import shlex

from docs.extensions import lookup, numbers, results, sources
from experiments import ladder as program
from experiments.harness import (
  counter_tables,
  ladder_tables,
  rung_text,
  shapes,
  tables,
)  # fmt: skip
from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import contract

# What holds each rung back, as the next page's counters show it.
BOUND_BY = {
  1: "L1: a line for each lane's load",
  2: "latency of L1: two loads for each FMA",
  3: "shared memory: two reads for each FMA",
  4: "shared memory: five reads for eight FMAs",
  5: "issue slots: loads and addresses",
  6: "bank conflicts in shared memory",
  7: "waits for the slab",
  8: "the FMA units",
  9: "latency: loads and wgmma alternate",
  10: "beginning and end of each tile",
  11: "power, and the tensor cores",
  12: "power, and the tensor cores",
}


def title(number: int) -> str:
  """The name of a rung in words: "Shared memory"."""
  words = ladder.find(number).name.replace("_", " ").capitalize()
  return words.replace("1d", "1D").replace("2d", "2D")


def roadmap(folder: str) -> str:
  """All rungs on one screen; their pages lie in a folder, "" for this one."""
  folder = folder and f"{folder.rstrip('/')}/"
  header = ["#", "rung", "what it adds", "then bound by", "TFLOP/s", "x before",
            "x jnp.dot"]  # fmt: skip
  cells = []
  for one in ladder.LADDER:
    row = results.timed(one, results.FIRST)
    page = f"{folder}{one.number:02}_{one.name}.md"
    before = results.relative(row, "x before") if one.number > 1 else ""
    words = title(one.number), one.idea, BOUND_BY[one.number]
    figures = tables.TFLOPS(row), before, tables.RATIO(row)
    cells.append([f"[{one.number}]({page})", *words, *figures])
  return tables.markdown(header, cells, [header[0], *header[4:]])


def box(text: str) -> str:
  """What a rung gains, what binds it, and the lines that do it.

  "6: one part | another": each part is of a line in the rung's file.
  """
  label, _, parts = text.partition(":")
  one = ladder.find(label.strip())
  row, binds = results.timed(one, "h200"), BOUND_BY[one.number]
  gain = f"{tables.TFLOPS(row)} TFLOP/s on an H200"
  if before := results.before(one):
    faster = results.relative(row, "x before")
    gain = f"{tables.TFLOPS(results.timed(before, 'h200'))} → {gain}"
    gain += f", {faster}" if faster != tables.EMPTY else ", in 16 bits"
    binds = f"{BOUND_BY[before.number]} → {binds}"
  lines = [f"> **{gain}.** Bound by: {binds}.", ">", "> ```python"]
  path = lookup.ROOT / (one.module.replace(".", "/") + ".py")
  source = path.read_text().splitlines()
  for part in parts.split("|"):
    at = sources.line(source, part.strip(), 0, path)
    lines.append(f"> {source[at].strip()}")
  return "\n".join([*lines, "> ```"])


def problems(text: str) -> str:
  """The ladder on each GPU, all problems or one: "'4096x4096x4096 float32'"."""
  parts = []
  for gpu in sorted(results.MEASURED, key=lambda x: x != results.FIRST):
    rows = ladder_tables.own(results.measured(gpu, "ladder"))
    parts.append(tables.made_on(rows))
    found = tables.grouped(rows, lambda x: f"{tables.shape(x)} {x['dtype']}")
    for name in shlex.split(text) or found:
      group = lookup.pick(found, name, "problem")
      words = name.replace("x", " × ").replace(" float", ", float")
      parts += [
        f"**{tables.short_name(group[0])}: {words.replace(' b', ', b')}**",
        _timed(group),
      ]
  return "\n\n".join(parts)


def _timed(rows: Sequence[results.RowDict]) -> str:
  """Rows of one GPU: the one table of times there is."""
  unit, times = in_one_unit([row["ms_median"] for row in rows], _TIMES)
  shown = {id(row): time for row, time in zip(rows, times)}
  columns = {
    "#": ladder_tables.label,
    "kernel": tables.field("kernel"),
    f"time, {unit}": lambda row: shown[id(row)],
    "TFLOP/s": tables.TFLOPS,
    "GB/s": tables.GBYTES,
    "% of peak": ladder_tables.of_peak,
    "x jnp.dot": tables.RATIO,
    "x before": lambda row: results.relative(row, "x before"),
  }
  header, cells = tables.pivot(rows, columns)
  return tables.markdown(header, cells, header[2:])


_TIMES = {"ms": 1.0, "µs": 1e-3}
_BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
_COUNTS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def steps(text: str) -> str:
  """Rungs and variants in the order in which a page takes them: "8 9a 9 9b"."""
  rungs = [ladder.find(label) for label in text.split()]
  # The first GPU on which all of them were measured.
  for gpu in results.MEASURED:
    rows, missing = results.split_measured(rungs, results.timed, gpu)
    if not missing:
      break
  else:
    return missing
  cells = []
  for one, row, before in zip(rungs, rows, [None, *rows]):
    same = before is not None and before["dtype"] == row["dtype"]
    gain = before["ms_median"] / row["ms_median"] if same else None
    name = f"{one.label} {one.name}"
    cells.append([name, one.idea, tables.TFLOPS(row), tables.factor(gain)])
  speed = f"TFLOP/s, {gpu.upper()}"
  header = ["step", "what it adds", speed, "x step before"]
  return tables.markdown(header, cells, header[2:])


def sizes(text: str) -> str:
  """Times over the size of cubes: "float32 2 8 'jnp.dot HIGHEST'" (H200)."""
  dtype, *names = shlex.split(text)
  names = [ladder.find(x).name if x[0].isdigit() else x for x in names]
  header, columns = ["kernel"], []
  for side in (128 << i for i in range(7)):
    shape = shapes.Shape(side, side, side)
    rows = [results.kernel(x, "h200", shape, dtype) for x in names]
    unit, times = in_one_unit([row["ms_median"] for row in rows], _TIMES)
    header.append(f"{side}³, {unit}")
    columns.append(times)
  kernels = [f"{ladder_tables.label(x)} {x['kernel']}".strip() for x in rows]
  return tables.markdown(header, zip(kernels, *columns))


def in_one_unit(
  values: Sequence[float | None], units: dict[str, float]
) -> tuple[str, list[str]]:
  """The unit that suits the largest of some values, and all of them in it."""
  most = max((x for x in values if x is not None), default=0)
  unit = next((name for name, x in units.items() if most >= x), [*units][-1])

  def digits(x: float) -> str:
    x /= units[unit]
    after = 2 - math.floor(math.log10(x)) if x else 0
    return f"{x:,.{max(0, after)}f}"

  return unit, [tables.EMPTY if x is None else digits(x) for x in values]


def card(label: str) -> str:
  """What was measured of a rung and its variants, and what others published."""
  one = ladder.find(label)
  family = [one, *one.variants]
  parts, mine = [], []
  for gpu in results.MEASURED:
    rows, missing = results.split_measured(family, results.timed, gpu)
    mine += rows[:1]
    if rows:
      parts += [f"**{tables.short_name(rows[0])}**", _timed(rows)]
    parts.append(missing)
  columns = {"#": ladder_tables.label} | counter_tables.OCCUPANCY
  if one.variants:
    parts.append("*x before* of a variant is over its rung.")
  del columns["threads"], columns["warps/SM"]
  counted, _ = results.split_measured(family, results.counters, "h200")
  if counted:
    header, cells = tables.pivot(counted, columns)
    parts.append(tables.markdown(header, cells, header[1:-1]))
  with hardware.assume(results.GPUS["h200"]):
    config = one.default_config(results.problem(one))
  fields = ", ".join(f"{name}={getattr(config, name)}" for name in one.uses)
  change = "[Change it](../change_a_kernel.md)."
  parts += [f"Config: `{fields}`. {change}", _published(one)]
  if mine:
    parts.append(tables.provenance_line(mine))
  return "\n\n".join(filter(None, parts))


def _published(one: contract.Rung) -> str:
  """What published ladders got for the step; "" if none has it."""
  cells = []
  for x in ladder_tables.PUBLISHED:
    for i, (name, figure, number) in enumerate(x.steps):
      if number != one.number or one.variant:
        continue
      gain = figure / x.steps[i - 1][1] if i else None
      if gain and x.unit == ladder_tables.MS:
        gain = 1 / gain
      factors = map(tables.factor, (gain, x.of_cublas(number)))
      source = f"[{x.source}]({x.url or '../published.md'})"
      on = f"{x.gpu or 'GPU not named'}, {x.problem}"
      cells.append([source, on, name, f"{figure:,g} {x.unit}", *factors])
  header = ["published", "measured on", "step", "figure", "x step before",
            "x cuBLAS"]  # fmt: skip
  return tables.markdown(header, cells, header[3:]) if cells else ""


def grid(label: str) -> str:
  """Grid and BlockSpecs at 4096^3, as `--explain` prints them."""
  one = ladder.find(label)
  problem = results.problem(one)
  with hardware.assume(results.GPUS["h200"]):
    config = one.default_config(problem)
    dimensions, started = rung_text.grid_cells(one, problem, config)
    header, *specs = rung_text.block_cells(one, problem, config)
  size = " x ".join(str(getattr(problem, side)) for side in "mnk")
  steps = [[f"`{x}`", count, text] for x, count, text in dimensions]
  blocks = [
    (name, f"`{block}`", f"`{at}`", *rest) for name, block, at, *rest in specs
  ]
  parts = [
    f"M x N x K = {size}, {problem.dtype}:",
    tables.markdown(["grid", "steps", "of"], steps, ["steps"]),
    started and f"Started: {started}, which take (i, j) in turn.",
    tables.markdown(("BlockSpec", *header[1:]), blocks, ["bytes"]),
  ]
  return "\n\n".join(filter(None, parts))


# Of device memory the model knows the least that any kernel moves.
_TRAFFIC = {
  "dram_read_bytes": "read from DRAM (least)",
  "dram_write_bytes": "written to DRAM (least)",
  "l2_read_bytes": "read from L2 (model)",
  "l2_write_bytes": "written to L2 (model)",
  "thread_load_bytes": "loaded by threads (model)",
}


def traffic(label: str) -> str:
  """The bytes that were expected and those that were counted, at 4096^3."""
  one = ladder.find(label)
  rows = []
  for gpu in results.MEASURED:
    rows += results.split_measured([one], results.counters, gpu)[0]
  if not rows:
    return "Not counted yet."
  header, cells = ["GB", "expected"], []
  for row in rows:
    header += [f"{tables.short_name(row)} counted", "counted / expected"]
  for key, name in _TRAFFIC.items():
    models = [(row["model"] or {}).get(key) for row in rows]
    if not any(models):
      continue
    cells.append([name, f"{next(filter(None, models)) / 1e9:,.3g}"])
    for row in rows:
      counted, ratio = row["measured"].get(key), (row["ratio"] or {}).get(key)
      gb = tables.EMPTY if counted is None else f"{counted / 1e9:,.3g}"
      cells[-1] += [gb, tables.factor(ratio)]
  t = numbers.traffic_of(label)
  return (
    f"{tables.markdown(header, cells, header[1:])}\n\n"
    "Results that are still in L2 at the end are not counted as written to"
    " DRAM.\n\n"
    f"Threads{'' if t.threads_load else ', or TMA,'} ask for"
    f" {tables.size(t.global_load_bytes)} of global memory,"
    f" {t.intensity:.3g} FLOP/byte."
  )


def counters(label: str) -> str:
  """A rung's counters and stalls next to those of the rung before, folded."""
  one = ladder.find(label)
  rungs = [x for x in (results.before(one), one) if x is not None]
  parts = []
  for gpu in results.MEASURED:
    rows, missing = results.split_measured(rungs, results.counters, gpu)
    if missing:
      parts.append(missing)
      continue
    names = [f"rung {x.label}" for x in rungs]
    text = tables.markdown(["counter", *names], _counted(rows), names)
    header, cells = counter_tables.stalls(rows)
    reasons = counter_tables.REASONS
    waits = [
      [*x, reasons.get(x[0].replace(" ", "_"), "")]
      for x in [*zip(header, *cells)][2:]
    ]
    if waits:
      header = ["stall", *names, "a warp waits for"]
      text += "\n\nStalls, in cycles of waiting for each instruction:\n\n"
      text += tables.markdown(header, waits, names)
    beside = f", and of rung {rungs[0].label}" if len(rungs) > 1 else ""
    gpu_name = tables.short_name(rows[0])
    parts.append(
      sources.folded(f"Counters and stalls on an {gpu_name}{beside}", text)
    )
  return "\n\n".join(parts)


_COUNTERS = {
  "dram_read_bytes": "DRAM read",
  "dram_write_bytes": "DRAM written",
  "l2_read_bytes": "L2 read",
  "l2_write_bytes": "L2 written",
  "l1_hit_percent": "L1 hits, %",
  "l2_hit_percent": "L2 hits, %",
  "shared_load_bank_conflicts": "bank conflicts of loads",
  "shared_store_bank_conflicts": "bank conflicts of stores",
  "fma_pipe_percent": "FMA pipe busy, %",
  "tensor_pipe_percent": "tensor pipe busy, %",
  "issue_active_percent": "issue slots used, %",
}


def _counted(rows: Sequence[results.RowDict]) -> list[list[str]]:
  """A line a counter, then each rung's; bytes, and conflicts, in one unit."""
  values = {x: [row["measured"].get(x) for row in rows] for x in _COUNTERS}
  lines = []
  for key, own in values.items():
    kind = key.rpartition("_")[2]
    if kind == "percent":
      lines.append([_COUNTERS[key], *map(counter_tables.percent, own)])
      continue
    alike = [x for name in values if name.endswith(kind) for x in values[name]]
    units = _BYTES if kind == "bytes" else _COUNTS
    unit, shown = in_one_unit([*own, *alike], units)
    head = f"{_COUNTERS[key]}, {unit}".rstrip(", ")
    lines.append([head, *shown[: len(own)]])
  return lines


def run_lines(text: str) -> str:
  """What `python -m experiments.ladder` printed of rungs: "1 2 h200"."""
  *labels, gpu = lookup.words(text, 2, "rungs and a GPU")
  every = results.measured(gpu, "ladder")
  lines = []
  for label in labels:
    one = ladder.find(label)
    row = results.timed(one, gpu)
    name = f"{one.label:>3} {one.name:<16} {tables.shape(row)} {row['dtype']}"
    verdict = f"{tables.verdict(row)} error / bound {tables.of_bound(row)}"
    parts = program.measured_parts(row, every)
    lines.append("  ".join([name, *parts, verdict]))
  return "```text\n" + "\n".join(lines) + "\n```"
