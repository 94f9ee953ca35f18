"""A ring of stages between a producer and its consumers.

Shared memory is a ring of slots. The producer fills the next empty slot and
its copies arrive at that slot's barrier `full`; consumers wait for `full`,
multiply, and arrive at the slot's barrier `empty`, for which the producer
waits before it fills the slot again. Here slot 0 is being read while 1 and 2
are full and 3 is being filled. The rings of rungs 8, 9b and 10 differ in who
plays the parts and in how many slots there are.
"""

import itertools
import math

from matplotlib import patches
from matplotlib.figure import Figure

from docs.figures.style import SMALL, Sheet, Style, drawn
from pallas_gemm import ladder
from pallas_gemm.ladder import contract

_MIDDLE, _INNER, _OUTER = (32.0, 25.0), 7.6, 15.5


def stages() -> dict[str, int]:
  """Slots of the rings by rung."""
  rungs = {x: ladder.find(x) for x in ("8", "9b", "10")}
  return {
    label: rung.default_config(
      contract.Problem(4096, 4096, 4096, rung.dtypes[0])
    ).stages
    for label, rung in rungs.items()
  }


def _at(radius: float, degrees: float) -> tuple[float, float]:
  angle = math.radians(degrees)
  x, y = _MIDDLE
  return x + radius * math.cos(angle), y + radius * math.sin(angle)


def _arc(sheet: Sheet, start: float, end: float) -> None:
  """An arrow round the ring."""
  degrees = [start + (end - start) * i / 40 for i in range(41)]
  points = [_at(_OUTER + 1.3, each) for each in degrees]
  sheet.lines(list(itertools.pairwise(points))[:-2], sheet.style.text, 1.6)
  sheet.arrow(points[-4], points[-1], width=1.6)


@drawn
def draw(style: Style) -> Figure:
  """The ring in the middle, the producer left, consumers right."""
  sheet = Sheet(style, 50)
  slots = stages()["10"]
  arc = 360 / slots
  landed = style.tint(style.load, 0.4)
  states = [
    ("read", style.c),
    *[("full", landed)] * (slots - 2),
    ("filling", style.load),
  ]
  for slot, (state, fill) in enumerate(states):
    # Slot 0 is on the right; numbers rise clockwise.
    start = slot * arc - arc / 2 + 1.2
    sheet.ax.add_patch(
      patches.Wedge(
        _MIDDLE, _OUTER, start, start + arc - 2.4, width=_OUTER - _INNER,
        facecolor=fill, edgecolor="none", zorder=1,
      )
    )  # fmt: skip
    x, y = _at((_INNER + _OUTER) / 2, slot * arc)
    colour = style.on(fill)
    sheet.text(x, y - 1.2, f"slot {slot}", size=SMALL, colour=colour, zorder=4)
    sheet.text(x, y + 1.2, state, size=SMALL, colour=colour, zorder=4)
  sheet.text(
    *_MIDDLE, "ring in\nshared\nmemory", colour=style.muted, size=SMALL
  )
  # The hand-over, clockwise: y grows downwards.
  _arc(sheet, 205, 335)
  sheet.text(32, 3.2, "full: copies have landed", weight="bold")
  sheet.text(32, 5.6, "consumers wait for it", colour=style.muted)
  _arc(sheet, 25, 155)
  sheet.text(32, 44.6, "empty: all have read it", weight="bold")
  sheet.text(32, 47, "the producer waits for it", colour=style.muted)
  x = _MIDDLE[0]
  sheet.box(0.6, 21.4, 13, 7.2, "producer", fill=style.load)
  sheet.arrow((13.6, 25), (x - _OUTER - 0.3, 25), style.load, 2.4)
  for index, y in enumerate((18.4, 26.2)):
    sheet.box(50, y, 13.4, 5.6, f"consumer {index}", fill=style.c, size=SMALL)
    at = x + _OUTER + 0.3
    sheet.arrow((at, 25 + (index - 0.5) * 3), (49.8, y + 2.8), style.c, 2.2)
  return sheet.figure
