"""One buffer makes loading and computing take turns; a ring lets them overlap.

Time runs to the right. With one buffer a step's copy starts when the step
before has been computed, and arithmetic waits for each. With a ring of four
slots copies are under way while earlier steps are computed: only the first is
waited for. Lengths are an example: a copy takes one and a half times as long
as the arithmetic of a step.
"""

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style

STEPS, LOAD, COMPUTE, GAP = 8, 1.5, 1.0, 0.3


def times(stages: int) -> list[dict[str, tuple[float, float]]]:
  """Each step's copy and arithmetic."""
  return _facts.ring_times(STEPS, stages, LOAD, COMPUTE, GAP)


def _bar(sheet, x0, scale, span, y, height, words, fill) -> None:
  start, end = span
  place = x0 + start * scale, y, (end - start) * scale, height
  sheet.tile(*place, words, fill=fill, line=1.2)


def draw(style: Style) -> Figure:
  """Serial above, a ring below, on one scale."""
  sheet = Sheet(style, 42)
  serial, ring = times(1), times(4)
  x0 = 11.5
  scale = (63 - x0) / serial[-1]["compute"][1]
  rows = (("load", style.load), ("compute", style.c))
  sheet.head(0.5, 2, "One buffer: load, then compute")
  for line, (what, colour) in enumerate(rows):
    y = 4.4 + 4 * line
    sheet.text(x0 - 1, y + 1.5, what, ha="right")
    sheet.box(x0, y, 63 - x0, 3, fill=style.tint(style.wait, 0.3))
    for k, step in enumerate(serial):
      _bar(sheet, x0, scale, step[what], y, 3, k, colour)
  sheet.head(0.5, 16, "A ring of four slots")
  end = ring[-1]["compute"][1]
  for slot in range(4):
    y = 18.4 + 3.2 * slot
    sheet.text(x0 - 1, y + 1.3, f"slot {slot}", ha="right")
    sheet.box(x0, y, end * scale, 2.6, fill=style.tint(style.wait, 0.3))
    for k in range(slot, STEPS, 4):
      _bar(sheet, x0, scale, ring[k]["load"], y, 2.6, k, style.load)
      held = ring[k]["load"][1], ring[k]["compute"][1]
      _bar(sheet, x0, scale, held, y, 2.6, "", style.tint(style.load, 0.35))
  y = 18.4 + 3.2 * 4
  sheet.text(x0 - 1, y + 1.5, "compute", ha="right")
  sheet.box(x0, y, end * scale, 3, fill=style.tint(style.wait, 0.3))
  for k, step in enumerate(ring):
    _bar(sheet, x0, scale, step["compute"], y, 3, k, style.c)
  done = x0 + end * scale
  sheet.lines([((done, 17.4), (done, y + 3.6))], style.text, 1.2)
  sheet.say(done + 1, 25, f"all {STEPS} steps\nare done")
  sheet.arrow((x0, 38.6), (63, 38.6), style.muted, 1.2)
  sheet.text(63, 40.6, "time", ha="right", colour=style.muted)
  sheet.keys(
    40.6, (0.5, style.load, "copy"),
    (9.5, style.tint(style.load, 0.35), "landed"),
    (20.5, style.c, "arithmetic"),
    (35, style.tint(style.wait, 0.3), "waiting"),
  )  # fmt: skip
  return sheet.figure
