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
from pallas_gemm import ladder
from pallas_gemm.ladder import contract

# Lanes that one clock serves when each loads 16 bytes.
LANES_OF_VECTORS = _facts.CLOCK_BYTES // 16
_PROBLEM = contract.Problem(4096, 4096, 4096)


def _own(name: str):
  """Config and [lanes, registers, (m, n)] of warp 0 of a rung's block."""
  rung = ladder.find(name)
  config = rung.default_config(_PROBLEM)
  shape = config.block_m, config.block_n
  return config, _facts.held(rung.layout(config), shape)[0]


def words_of_a(transposed: bool, name: str = "vectorized") -> list[list[int]]:
  """Addresses of a lane's first load of A at kk = 0, a list for each lane.

  Row by row a load is one word, since a lane's next row is a whole row away;
  transposed it is four.
  """
  config, own = _own(name)
  first = own[:, 0, 0]
  if not transposed:
    return [[m * config.block_k] for m in first]
  return [[m + i for i in range(config.vector)] for m in first]


def words_of_b(name: str) -> list[list[int]]:
  """Addresses of a lane's first load of B's row, for lanes of one clock."""
  config, own = _own(name)
  first = own[:LANES_OF_VECTORS, 0, 1]
  return [[n + i for i in range(config.vector)] for n in first]


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


def _panel(sheet, x, y, title, words, colour, notes, rows) -> None:
  style, w, h = sheet.style, 0.86, 2.5
  base = y + 2.4 + rows * h
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
      sheet.text(
        at + wide / 2, top + h / 2, lanes[0], size=SMALL,
        colour=style.on(fill), zorder=5,
      )  # fmt: skip
    else:
      whose = f"lanes {lanes[0]} to {lanes[-1]}"
      sheet.text(at + wide + 0.8, top + h / 2, whose, ha="left")
  for bank in (0, 31):
    sheet.text(x + (bank + 0.5) * w, base + 2, bank, size=SMALL,
               colour=style.muted)  # fmt: skip
  sheet.text(x + 16 * w, base + 2, "banks", size=SMALL, colour=style.muted)
  times = conflict(words)
  verdict = f"{times}-way conflict" if times > 1 else "no conflict"
  sheet.text(x, base + 4.6, verdict, ha="left", weight="bold")
  sheet.text(x, base + 7, notes, ha="left", colour=style.muted)


def draw(style: Style) -> Figure:
  """A above, B below; with conflicts left, without right."""
  sheet = Sheet(style, 40.5)
  left, right = 1.6, 34.6
  _panel(
    sheet, left, 2, "A, rung 6, if stored [m][k]", words_of_a(False), style.a,
    "4 loads of 4 bytes", 2,
  )  # fmt: skip
  _panel(
    sheet, right, 2, "A, rung 6, stored [k][m]", words_of_a(True), style.a,
    "1 load of 16 bytes", 2,
  )  # fmt: skip
  for x, name, title in (
    (left, "vectorized", "B, rung 6"),
    (right, "warptiling", "B, rung 7"),
  ):
    words = words_of_b(name)
    starts = words[1][0] - words[0][0]
    notes = f"lanes {starts} columns apart"
    _panel(sheet, x, 23, title, words, style.b, notes, 2)
  return sheet.figure
