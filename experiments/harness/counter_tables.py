"""Rows of experiments.counters as tables: occupancy, stalls."""

from collections.abc import Iterable, Sequence
import math

from experiments.harness import ladder_tables, tables
from experiments.harness import rows as rows_lib
from experiments.harness.tables import RowDict

# Why a warp does not issue an instruction, in ncu's words, and what it waits
# for. A warp that is "selected" issues one. Samples by instruction (an H100's
# waits.jsonl) say what the names stand for in rungs whose threads load nothing:
# "long_scoreboard" is the wait at an mbarrier, "barrier" also that for wgmma.
REASONS = {
  "long_scoreboard": (
    "a value from global memory, L1 or farther (where TMA loads, an mbarrier: a"
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


whole = tables.formatted(".0f")
percent = tables.formatted(".1f")


def kib(x: float | None) -> str:
  """Bytes in KiB: "192.1"."""
  return percent(None if x is None else x / 1024)


def number(x: float | None) -> str:
  """A count with a prefix: "33.6 M"."""
  return tables.size(x).removesuffix("B").strip()


def warps(x: float) -> str:
  """Cycles of waiting for each instruction: "383", "12.4", "0.05", "0"."""
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
