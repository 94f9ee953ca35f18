"""A ring of stages between a producer and its consumers; it moves.

Shared memory is a ring of slots. The producer fills the next empty slot and
its copies arrive at that slot's barrier `full`; consumers wait for `full`,
multiply, and arrive at the slot's barrier `empty`, for which the producer
waits before it fills the slot again. At first slot 0 is being read while 1 and
2 are full and 3 is being filled; then each hands on to the next. The rings of
rungs 8, 9b and 10 differ in who plays the parts and in how many slots there
are. Who has asked for less motion sees the picture stand still.
"""

from collections.abc import Iterator
import itertools
import math
import re

from matplotlib import patches

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style

# A copy takes almost as long as the arithmetic of a step, which lasts so long
# in the moving picture.
LOAD, STEP_S = 0.9, 1.6
_MIDDLE, _INNER, _OUTER = (32.0, 25.0), 7.6, 15.5


def stages() -> dict[str, int]:
  """Slots of the rings by rung."""
  return {label: _facts.config(label).stages for label in ("8", "9b", "10")}


def states(slot: int, slots: int) -> list[tuple[float, str]]:
  """(since when, state) of a slot over a lap, in parts of the lap.

  A lap starts when slot 0 begins to be read; by then the ring is running.
  """
  laps = 3
  times = _facts.ring_times(laps * slots, slots, LOAD, 1.0, 0.0)
  start = times[slots]["compute"][0]
  found = []
  for step in times[slot::slots]:
    (begin, landed), (read, done) = step["load"], step["compute"]
    for since, state in (
      (begin, "filling"), (landed, "full"), (read, "reading"), (done, "empty"),
    ):  # fmt: skip
      found.append(((since - start) / slots, state))
  # What is filled again at once was never seen empty.
  found = [
    (since, state)
    for (since, state), (until, _) in itertools.pairwise(found)
    if until - since > 1e-9
  ]
  before = [state for since, state in found if since <= 1e-9][-1]
  return [(0.0, before)] + [x for x in found if 1e-9 < x[0] < 1 - 1e-9]


def _fills(style: Style) -> dict[str, str]:
  return {
    "reading": style.c,
    "full": style.tint(style.load, 0.4),
    "filling": style.load,
    "empty": style.tint(style.wait, 0.4),
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


def draw(style: Style) -> Figure:
  """The ring in the middle, the producer left, consumers right."""
  sheet = Sheet(style, 50)
  slots, fills = stages()["10"], _fills(style)
  arc = 360 / slots
  for slot in range(slots):
    lap = states(slot, slots)
    now = lap[0][1]
    # Slot 0 is on the right; numbers rise clockwise.
    start = slot * arc - arc / 2 + 1.2
    sheet.ax.add_patch(
      patches.Wedge(
        _MIDDLE, _OUTER, start, start + arc - 2.4, width=_OUTER - _INNER,
        facecolor=fills[now], edgecolor="none", zorder=1, gid=f"slot-{slot}",
      )
    )  # fmt: skip
    x, y = _at((_INNER + _OUTER) / 2, slot * arc)
    for state in dict(map(reversed, lap)):
      for line, words in ((-1.2, f"slot {slot}"), (1.2, state)):
        sheet.text(
          x, y + line, words, size=SMALL, colour=style.on(fills[state]),
          zorder=4, alpha=1 if state == now else 0,
          gid=f"slot-{slot}-{state}{'-number' if line < 0 else ''}",
        )  # fmt: skip
  words = "ring in\nshared\nmemory"
  sheet.text(*_MIDDLE, words, colour=style.muted, size=SMALL)
  # The hand-over, clockwise: y grows downwards.
  _arc(sheet, 205, 335)
  sheet.text(32, 3.2, "full: copies have landed", weight="bold")
  sheet.text(32, 5.6, "consumers wait for it", colour=style.muted)
  _arc(sheet, 25, 155)
  sheet.text(32, 44.6, "empty: all have read it", weight="bold")
  sheet.text(32, 47, "the producer waits for it", colour=style.muted)
  sheet.box(0.6, 21.4, 13.4, 7.2, "producer", fill=style.load)
  for index, y in enumerate((18.8, 25.6)):
    sheet.box(50, y, 13.4, 5.6, f"consumer {index}", fill=style.c, size=SMALL)
  return sheet.figure


def animate(svg: str, style: Style) -> str:
  """Lets the slots of the written picture go through their states."""
  slots, fills = stages()["10"], _fills(style)
  rules = []
  for slot in range(slots):
    lap = states(slot, slots)
    painted = [(since, f"fill: {fills[state]}") for since, state in lap]
    rules += _rules(f"#slot-{slot} path", f"fill-{slot}", painted, slots)
    for state in dict(map(reversed, lap)):
      names = f"slot-{slot}-{state}", f"slot-{slot}-{state}-number"
      shown = [(since, f"opacity: {int(now == state)}") for since, now in lap]
      selector = ", ".join(f"#{name} > g" for name in names)
      rules += _rules(selector, f"show-{slot}-{state}", shown, slots)
  still = "(prefers-reduced-motion: reduce)"
  rules.append(f"@media {still} {{ * {{ animation: none !important }} }}")
  head, svg, rest = re.split(r"(<svg\b[^>]*>)", svg, maxsplit=1)
  return "\n".join([head + svg, "<style>", *rules, "</style>"]) + rest


def _rules(selector, name, lap, slots: int) -> Iterator[str]:
  """A selector's animation, which jumps from state to state."""
  frames = " ".join(f"{100 * since:.4g}% {{ {what} }}" for since, what in lap)
  yield f"@keyframes {name} {{ {frames} }}"
  seconds = f"{STEP_S * slots:g}s"
  yield f"{selector} {{ animation: {name} {seconds} step-end infinite }}"
