"""Which banks of shared memory one request of a warp wants.

Each panel is one request: the 32 banks from left to right, and above each bank
the different words that lanes want of it. A bank gives one word a clock, to
all lanes that want it, so a stack of two takes two clocks. Above: a warp's
load of A in rung 6's layout. Stored row by row, [m][k], the two rows that the
lanes want lie in one bank, and each of a lane's rows takes a load of its own;
transposed, [k][m], four rows come with one load. Below: the
16-byte loads of B of lanes 0 to 7, which are served together, in rung 6's
layout and in rung 7's. Numbers in boxes are lanes, the first of those that
want the word.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style

# Lanes that one clock serves when each loads 16 bytes.
LANES_OF_VECTORS = _facts.CLOCK_BYTES // 16


def words_of_a(transposed: bool, name: str = "vectorized") -> list[list[int]]:
  """Addresses of a lane's first load of A at kk = 0, a list for each lane.

  Row by row a load is one word, since a lane's next row is a whole row away;
  transposed it is four.
  """
  config, first = _facts.config(name), _facts.owned(name)[0, :, 0, 0]
  if not transposed:
    return [[m * config.block_k] for m in first]
  return [[m + i for i in range(config.vector)] for m in first]


def words_of_b(name: str) -> list[list[int]]:
  """Addresses of a lane's first load of B's row, for lanes of one clock."""
  first = _facts.owned(name)[0, :LANES_OF_VECTORS, 0, 1]
  return [[n + i for i in range(_facts.config(name).vector)] for n in first]


def stacks(words: list[list[int]]) -> dict[int, list[tuple[int, list[int]]]]:
  """Bank -> [(word, lanes)], the lowest first."""
  flat = [(word, lane) for lane, each in enumerate(words) for word in each]
  lanes = np.array([lane for _, lane in flat])
  found = _facts.wanted_of_banks([word for word, _ in flat])
  return {
    bank: [
      (word, sorted(set(lanes[at].tolist()))) for word, at in wants.items()
    ]
    for bank, wants in sorted(found.items())
  }


def conflict(words: list[list[int]]) -> int:
  """Clocks that the request takes."""
  return max(map(len, stacks(words).values()))


def _panel(sheet, x, y, title, words, colour, notes) -> None:
  style, w, h = sheet.style, 0.86, 2.5
  base = y + 2.4 + 2 * h
  sheet.head(x, y, title)
  found = stacks(words)
  for bank in range(_facts.BANKS):
    sheet.box(
      x + bank * w, base, w, 0.9,
      fill=style.tint(style.line, 0.6), edge=style.page, line=0.5,
    )  # fmt: skip
  # Side by side in a row of the stack, words of the same lanes are one box.
  level: dict[tuple, list[int]] = {}
  for bank, wants in found.items():
    for height, (_, lanes) in enumerate(wants):
      level.setdefault((height, tuple(lanes)), []).append(bank)
  for (height, lanes), banks in level.items():
    at, wide = x + banks[0] * w, len(banks) * w
    top = base - (height + 1) * h
    fill = style.tint(colour, 0.95 if height == 0 else 0.6)
    sheet.box(at, top, wide, h, fill=fill, edge=style.page, z=2)
    if len(banks) > 1:
      look = {"size": SMALL, "colour": style.on(fill), "zorder": 5}
      sheet.text(at + wide / 2, top + h / 2, lanes[0], **look)
    else:
      whose = f"lanes {lanes[0]} to {lanes[-1]}"
      sheet.say(at + wide + 0.8, top + h / 2, whose)
  for bank in (0, 31):
    sheet.text(x + (bank + 0.5) * w, base + 2, bank, size=SMALL,
               colour=style.muted)  # fmt: skip
  sheet.text(x + 16 * w, base + 2, "banks", size=SMALL, colour=style.muted)
  times = conflict(words)
  verdict = f"{times}-way conflict" if times > 1 else "no conflict"
  sheet.say(x, base + 4.6, verdict, weight="bold")
  sheet.say(x, base + 7, notes, colour=style.muted)


def draw(style: Style) -> Figure:
  """A above, B below; with conflicts left, without right."""
  sheet = Sheet(style, 40.5)
  left, right = 1.6, 34.6
  for x, title, transposed, notes in (
    (left, "A, rung 6, if stored [m][k]", False, "4 loads of 4 bytes"),
    (right, "A, rung 6, stored [k][m]", True, "1 load of 16 bytes"),
  ):
    _panel(sheet, x, 2, title, words_of_a(transposed), style.a, notes)
  for x, number, name in ((left, 6, "vectorized"), (right, 7, "warptiling")):
    words = words_of_b(name)
    notes = f"lanes {words[1][0] - words[0][0]} columns apart"
    _panel(sheet, x, 23, f"B, rung {number}", words, style.b, notes)
  return sheet.figure
