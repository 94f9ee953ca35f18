"""One buffer makes loading and computing take turns; a ring lets them overlap.

Time runs to the right. With one buffer a step's copy starts when the step
before has been computed, and arithmetic waits for each. With a ring of four
slots copies are under way while earlier steps are computed: only the first is
waited for. Lengths are an example: a copy takes one and a half times as long
as the arithmetic of a step.
"""

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style

STEPS, LOAD, COMPUTE, GAP = 8, 1.5, 1.0, 0.3


def times(stages: int) -> list[dict[str, tuple[float, float]]]:
  """Each step's copy and arithmetic."""
  return _facts.ring_times(STEPS, stages, LOAD, COMPUTE, GAP)


def _bar(sheet, x0, scale, span, y, height, words, fill) -> None:
  start, end = span
  sheet.box(
    x0 + start * scale, y, (end - start) * scale, height, words,
    fill=fill, edge=sheet.style.page, size=SMALL, line=1.2,
  )  # fmt: skip


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
  sheet.lines([((x0 + end * scale, 17.4), (x0 + end * scale, y + 3.6))],
              style.text, 1.2)  # fmt: skip
  done = f"all {STEPS} steps\nare done"
  sheet.text(x0 + end * scale + 1, 25, done, ha="left")
  sheet.arrow((x0, 38.6), (63, 38.6), style.muted, 1.2)
  sheet.text(63, 40.6, "time", ha="right", colour=style.muted)
  y = 40.6
  for x, fill, words in (
    (0.5, style.load, "copy"),
    (9.5, style.tint(style.load, 0.35), "landed"),
    (20.5, style.c, "arithmetic"),
    (35, style.tint(style.wait, 0.3), "waiting"),
  ):
    sheet.box(x, y - 0.9, 1.8, 1.8, fill=fill)
    sheet.text(x + 2.5, y, words, ha="left", size=SMALL)
  return sheet.figure
