"""Rung 10 over time: a producer that runs ahead, and two consumers.

Above: the producer starts copies as long as slots are empty (four at the
start), then waits for one each time. Both consumers wait for the first copy
to land and from then on multiply without a gap; the arrows are one slot's
`full` and `empty`. Lengths are an example. Below: a block's registers. The
producer gives most of its share away, for accumulators.
"""

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style
from pallas_gemm import hardware
from pallas_gemm.ladder import tensor_core_common

STEPS, LOAD, COMPUTE, GAP = 8, 2.2, 1.0, 0.4


def registers() -> tuple[list[int], list[int]]:
  """Registers of a thread of each warpgroup: at the start, and moved."""
  config = _facts.config("warp_specialized")
  warpgroups = config.consumers + 1
  sm = hardware.lookup("H200").registers_per_sm
  # Dealt in units of eight.
  each = sm // (warpgroups * tensor_core_common.THREADS) // 8 * 8
  moved = [tensor_core_common.PRODUCER_REGISTERS]
  moved += [tensor_core_common.CONSUMER_REGISTERS] * config.consumers
  return [each] * warpgroups, moved


def draw(style: Style) -> Figure:
  """Time above, registers below."""
  sheet = Sheet(style, 47)
  slots = _facts.config("warp_specialized").stages
  times = _facts.ring_times(STEPS, slots, LOAD, COMPUTE, GAP)
  end = times[-1]["compute"][1]
  x0 = 14.5
  scale = (63 - x0) / end
  rows = {"producer": 5, "consumer 0": 11.5, "consumer 1": 16}
  sheet.head(0.5, 2, "A block's three warpgroups")
  for name, y in rows.items():
    sheet.text(x0 - 1, y + 1.6, name, ha="right")
    sheet.box(x0, y, end * scale, 3.2, fill=style.tint(style.wait, 0.3))
  for k, step in enumerate(times):
    start = x0 + step["load"][0] * scale
    place = start, rows["producer"], GAP * scale, 3.2
    sheet.tile(*place, k, fill=style.load, line=0.8)
    for name in ("consumer 0", "consumer 1"):
      begin, until = (x * scale for x in step["compute"])
      place = x0 + begin, rows[name], until - begin, 3.2
      sheet.tile(*place, k, fill=style.c)
  landed = x0 + times[0]["load"][1] * scale
  begun = x0 + GAP * scale * 0.5
  sheet.arrow((begun, 8.3), (landed, 11.3), style.load, 1.6)
  sheet.say(landed - 2.5, 9.3, "full", size=SMALL)
  free = x0 + times[0]["compute"][1] * scale
  sheet.arrow((free, 11.4), (free + 0.6, 8.3), style.c, 1.6)
  sheet.say(free + 1.6, 9.8, "empty", size=SMALL)
  sheet.arrow((x0, 21), (63, 21), style.muted, 1.2)
  sheet.text(63, 23, "time", ha="right", colour=style.muted)
  sheet.keys(
    23, (0.5, style.load, "starts copies"), (18, style.c, "wgmma"),
    (29.5, style.tint(style.wait, 0.3), "waits"),
  )  # fmt: skip
  sheet.head(0.5, 28.6, "Registers of a thread")
  fills = [style.load, style.c, style.c]
  before, moved = registers()
  per_register = (63 - x0) / sum(before)
  for y, name, counts in (31.4, "at the start", before), (37.4, "moved", moved):
    sheet.text(x0 - 1, y + 1.9, name, ha="right")
    x = x0
    for count, fill in zip(counts, fills):
      width = count * per_register
      sheet.box(x, y, width, 3.8, count, fill=fill, edge=style.page, line=1.5)
      x += width
  held = tensor_core_common.THREADS * sum(moved)
  sm = hardware.lookup("H200").registers_per_sm
  words = f"128 threads each: {held:,} of {sm:,}"
  sheet.say(x0, 43.6, words, colour=style.muted)
  return sheet.figure
