"""Rows of experiments.counters as tables and figures: occupancy, stalls."""

from collections.abc import Iterable, Mapping, Sequence
import math

from experiments.harness import ladder_tables, plots, tables
from experiments.harness import rows as rows_lib
from experiments.harness.tables import RowDict

# Why a warp does not issue an instruction, in ncu's words, and what it waits
# for. A warp that is "selected" issues one. Samples by instruction (an H100's
# waits.jsonl) say what the names stand for in rungs whose threads load nothing:
# "long_scoreboard" is the wait at an mbarrier, "barrier" also that for wgmma.
REASONS = {
  "long_scoreboard": (
    "a value from global memory, or from L2 (where TMA loads, an mbarrier: a"
    " slab, or room for one)"
  ),
  "short_scoreboard": "a value from shared memory",
  "mio_throttle": "room in the queue to shared memory",
  "lg_throttle": "room in the queue to global memory",
  "tex_throttle": "room in the queue to the texture unit",
  "barrier": "the other warps at a barrier, or the end of wgmma",
  "membar": "a memory fence",
  "wait": "the fixed latency of its last instruction",
  "math_pipe_throttle": "an arithmetic pipe that is busy",
  "gmma": "wgmma",
  "dispatch_stall": "the dispatcher",
  "not_selected": "its turn: it is ready, another warp was chosen",
  "selected": "nothing",
  "no_instruction": "its next instruction to be fetched",
  "branch_resolving": "the target of a branch",
  "imc_miss": "a constant that is not in the constant cache",
  "drain": "its stores, at its end",
  "sleeping": "the end of a sleep",
  "misc": "something else",
}
OTHERS = "others"
SHOWN_REASONS = 8
# Okabe and Ito's, so that neighbours differ in brightness; the last is for
# all reasons that have no colour of their own.
_REASON_COLOURS = (
    plots.BLUE, "#E69F00", "#56B4E9", plots.VERMILLION, "#F0E442",
    plots.GREEN, "#CC79A7", plots.INK, "#D9D9D9",
)  # fmt: skip
_DARK = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.INK)
# Panels of `counters`: title, counter, scale, and whether over a log axis.
_PANELS = (
  ("DRAM read, GB", "dram_read_bytes", 1e-9, True),
  ("L2 read, GB", "l2_read_bytes", 1e-9, True),
  ("L1 hit rate, %", "l1_hit_percent", 1, False),
  ("L2 hit rate, %", "l2_hit_percent", 1, False),
  ("bank conflicts of loads, M", "shared_load_bank_conflicts", 1e-6, True),
  ("FMA pipe busy, %", "fma_pipe_percent", 1, False),
  ("tensor pipe busy, %", "tensor_pipe_percent", 1, False),
  ("issue slots used, %", "issue_active_percent", 1, False),
)


def newest(rows: Sequence[RowDict]) -> list[RowDict]:
  """A row a rung, in the ladder's order, of what was counted together last.

  That is: at the commit of the last row, and of the shapes counted there the
  one with the most rungs.
  """
  last = rows_lib.latest(
    row for row in rows if row["commit"] == rows[-1]["commit"]
  )
  shapes = tables.grouped(last, tables.shape).values()
  return ladder_tables.ordered(max(shapes, key=len, default=[]))


def markdown(
  rows: Sequence[RowDict], pictures: Mapping[str, Sequence[str]]
) -> str:
  """The tables of one device, each with what to read off it.

  Args:
    rows: as `newest` gives them.
    pictures: by the name of a figure, what shows it.
  """
  first = rows[0]
  jax = sorted({row["jax"] for row in rows if row["jax"]})
  parts = [
    f"### {first['device']}",
    f"Counted with Nsight Compute at M x N x K = {tables.shape(first)}: driver"
    f" {first['driver']}, CUDA {first['cuda']}, jax {', '.join(jax)}; commit"
    f" {(first['commit'] or 'unknown')[:10]}; {first['utc'][:10]}. Caches are"
    " flushed before each of its passes, clocks are not locked.",
  ]
  sections = (
    (_OCCUPANCY, occupancy(rows), None),
    (_COUNTS, counts(rows), "counters.png"),
    (_STALLS + _waits_for(rows), stalls(rows), "stalls.png"),
  )
  for text, (header, cells), figure in sections:
    if cells:
      parts += [text, tables.markdown(header, cells)]
      parts += pictures.get(figure, [])
  return "\n\n".join(parts)


_OCCUPANCY = (
  "**Occupancy.** What a thread and a block take, and so how many blocks an SM"
  " has room for; *limit* is what leaves no room for one more. *Active*: warps"
  " that were there, of those that an SM can hold, as counted. Few warps are"
  " no fault by themselves: from blocktiling on, rungs trade them for results"
  " held in registers, and hide latency within a warp."
)
_COUNTS = (
  "**Counters.** DRAM and L2: bytes that crossed, so less is better until A, B"
  " and C have crossed once. *Conflicts*: cycles that shared memory was asked"
  " again because lanes of a warp wanted the same bank. *Pipes* and *issue*:"
  " busy cycles of those in which an SM had work; the one near 100 % is what"
  " binds, and if none is, latency does."
)
_STALLS = (
  "**Stalls.** Warps that wait for a reason, for each instruction that is"
  " issued: the sum, plus one, is the cycles from one instruction of a warp to"
  " its next. The largest are what to work on, unless *issue* above is near"
  " 100 % and nothing is lost."
)


whole = tables.formatted(".0f")
percent = tables.formatted(".1f")


def kib(x: float | None) -> str:
  """Bytes in KiB: "192.1"."""
  return percent(None if x is None else x / 1024)


def number(x: float | None) -> str:
  """A count with a prefix: "33.6 M"."""
  return tables.size(x).removesuffix("B").strip()


def warps(x: float) -> str:
  """Warps for each instruction: "383", "12.4", "0.05", "0"."""
  return "0" if x < 0.005 else tables.rate(x)


def _field(part: str, name: str, text: tables.Text) -> tables.Text:
  """What a column has of a row: a field of one of its parts."""
  return lambda row: text(row[part].get(name))


OCCUPANCY: tables.Columns = {
  "registers": _field("occupancy", "registers", whole),
  "spilled bytes": _field("occupancy", "spill_bytes", whole),
  "shared KiB": _field("occupancy", "shared_bytes", kib),
  "threads": _field("occupancy", "threads", whole),
  "blocks/SM": _field("occupancy", "blocks_per_sm", whole),
  "warps/SM": _field("occupancy", "warps_per_sm", whole),
  "active %": _field("occupancy", "warps_active_percent", tables.rate),
  "limit": _field("occupancy", "limit", lambda x: x or tables.EMPTY),
}
COUNTS: tables.Columns = {
  "DRAM read": _field("measured", "dram_read_bytes", tables.size),
  "DRAM written": _field("measured", "dram_write_bytes", tables.size),
  "L2 read": _field("measured", "l2_read_bytes", tables.size),
  "L2 written": _field("measured", "l2_write_bytes", tables.size),
  "L1 hit %": _field("measured", "l1_hit_percent", percent),
  "L2 hit %": _field("measured", "l2_hit_percent", percent),
  "load conflicts": _field("measured", "shared_load_bank_conflicts", number),
  "store conflicts": _field("measured", "shared_store_bank_conflicts", number),
  "FMA pipe %": _field("measured", "fma_pipe_percent", percent),
  "tensor pipe %": _field("measured", "tensor_pipe_percent", percent),
  "issue %": _field("measured", "issue_active_percent", percent),
}


def occupancy(rows: Iterable[RowDict]) -> tables.Table:
  """Header and cells of what kernels take; no cells if no row says."""
  found = [row for row in rows if row.get("occupancy")]
  return tables.pivot(found, ladder_tables.KERNEL | OCCUPANCY)


def counts(rows: Iterable[RowDict]) -> tables.Table:
  """Header and cells of the counters."""
  return tables.pivot(rows, ladder_tables.KERNEL | COUNTS)


def stalls(rows: Sequence[RowDict]) -> tables.Table:
  """Header and cells of what warps wait for; no cells if no row says."""
  shown = largest(rows)

  def wait(name: str) -> tables.Text:
    return lambda row: warps(grouped(row, shown)[name])

  columns = {name.replace("_", " "): wait(name) for name in (*shown, OTHERS)}
  columns["sum"] = lambda row: warps(sum(grouped(row, shown).values()))
  found = [row for row in rows if grouped(row, shown)]
  return tables.pivot(found, ladder_tables.KERNEL | columns)


def largest(rows: Iterable[RowDict]) -> list[str]:
  """The reasons that are the largest part of rungs' stalls, most first."""
  parts: dict[str, float] = {}
  for row in rows:
    waits = _waits(row)
    for name, value in waits.items():
      part = value / (sum(waits.values()) or 1)
      parts[name] = parts.get(name, 0.0) + part
  found = [name for name, part in parts.items() if part > 0]
  return sorted(found, key=lambda name: -parts[name])[:SHOWN_REASONS]


def grouped(row: RowDict, shown: Sequence[str]) -> dict[str, float]:
  """A row's stalls by the reasons shown, and all others together."""
  waits = _waits(row)
  if not waits:
    return {}
  found = {name: waits.pop(name, 0.0) for name in shown}
  return {**found, OTHERS: math.fsum(waits.values())}


def _waits(row: RowDict) -> dict[str, float]:
  found = row.get("stalls") or {}
  return {name: x for name, x in found.items() if name != "selected"}


def _waits_for(rows: Sequence[RowDict]) -> str:
  """What the reasons shown mean."""
  meanings = (
    f"*{name.replace('_', ' ')}*: {REASONS.get(name, 'see Nsight Compute')}"
    for name in largest(rows)
  )
  return f" A warp waits for — {'; '.join(meanings)}."


@plots.drawn
def draw_counters(rows: Sequence[RowDict]):
  """Counters as small multiples: a panel each, a bar a rung."""
  if not rows:
    raise ValueError("no rung was counted; there is nothing to draw")
  fig, axes = plots.panels(
    13, 2 * (1.0 + 0.22 * len(rows)), nrows=2, ncols=4, sharey=True
  )
  colours = [plots.COLOURS[row["dtype"]] for row in rows]
  for ax, (title, name, scale, log) in zip(axes, _PANELS, strict=True):
    values = [row["measured"].get(name, 0.0) * scale for row in rows]
    _panel(ax, values, colours, log)
    ax.set_title(title)
  plots.lines(axes[0], _names(rows))
  note = ": fp32 in blue, 16-bit in vermillion"
  plots.title(fig, f"Counters on {_what(rows)}{note}")
  return fig


def _panel(ax, values: list[float], colours: Sequence[str], log: bool) -> None:
  """Horizontal bars with their values."""
  positive = [x for x in values if x > 0]
  low = min(positive, default=1.0) / 3 if log else 0.0
  most = max(positive, default=1.0)
  # What a log axis can't show (nothing at all) has a label and no bar.
  ax.barh(range(len(values)), [max(x, low) for x in values], color=colours)
  if log:
    ax.set(xscale="log", xlim=(low, most * (most / low) ** 0.35))
  else:
    ax.set_xlim(0, max(100.0, most) * 1.22)
    ax.set_xticks(range(0, 101, 25))
  for i, x in enumerate(values):
    text = "0" if x == 0 else f"{x:.3g}"
    plots.note(ax, text, (max(x, low), i), (3, 0), va="center", fontsize=8)
  ax.grid(axis="x")
  ax.tick_params(axis="y", length=0)


@plots.drawn
def draw_stalls(rows: Sequence[RowDict]):
  """What warps wait for: each rung's shares, and how much it is.

  Sums differ by a factor of a hundred, so they have a log axis of their own
  next to the shares.
  """
  shown = largest(rows)
  waits = [grouped(row, shown) for row in rows]
  rows = [row for row, found in zip(rows, waits) if sum(found.values()) > 0]
  waits = [found for found in waits if sum(found.values()) > 0]
  if not waits:
    raise ValueError("no row tells of stalls; there is nothing to draw")
  totals = [sum(found.values()) for found in waits]
  fig, (left, right) = plots.panels(
    12, 1.9 + 0.34 * len(rows), ncols=2, sharey=True, width_ratios=(3, 1)
  )
  _stack(left, waits, totals)
  plots.lines(left, _names(rows))
  _panel(right, totals, [plots.GREY] * len(rows), log=True)
  left.set_title("share of the stalls, %")
  title = "warps stalled for each\ninstruction issued"
  right.set_title(title)
  fig.legend(
    *left.get_legend_handles_labels(), loc="outside lower center", ncols=5,
    fontsize=9,
  )  # fmt: skip
  plots.title(fig, f"What warps wait for on {_what(rows)}")
  return fig


def _stack(
  ax, waits: Sequence[Mapping[str, float]], totals: Sequence[float]
) -> None:
  """Shares of the reasons, side by side; a letter each, as in the legend."""
  starts = [0.0] * len(waits)
  for i, name in enumerate(waits[0]):
    colour = _REASON_COLOURS[-1 if name == OTHERS else i]
    letter = chr(ord("a") + i)
    widths = [100 * found[name] / all_ for found, all_ in zip(waits, totals)]
    ax.barh(
      range(len(waits)), widths, left=starts, height=0.78, color=colour,
      edgecolor="white", linewidth=0.6,
      label=f"{letter}  {name.replace('_', ' ')}",
    )  # fmt: skip
    for row, (start, width) in enumerate(zip(starts, widths)):
      if width >= 3:
        ax.text(
            start + width / 2, row, letter, ha="center", va="center",
            fontsize=8, color="white" if colour in _DARK else plots.INK,
        )  # fmt: skip
      starts[row] = start + width
  ax.set_xlim(0, 100)


def _names(rows: Sequence[RowDict]) -> list[str]:
  return [f"{ladder_tables.label(row)}  {row['kernel']}" for row in rows]


def _what(rows: Sequence[RowDict]) -> str:
  return f"{rows[0]['device']}, M x N x K = {tables.shape(rows[0])}"


FIGURES = {"counters.png": draw_counters, "stalls.png": draw_stalls}
