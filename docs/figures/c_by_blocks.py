"""Each thread block computes one block of C, from a band of A and one of B.

C has 16 x 16 elements in 4 x 4 blocks. Block (1, 2) is picked out: it needs
four whole rows of A and four whole columns of B, and no other block writes
where it writes.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style
from pallas_gemm import ladder
from pallas_gemm.ladder import contract

PROBLEM = contract.Problem(16, 16, 16)
CONFIG = contract.SimtConfig(block_m=4, block_n=4)
PICKED = (1, 2)
_CELL, _GAP = 1.72, 2.2
_SIDE = 16 * _CELL


def bands() -> dict:
  """Masks of A, B and C of the picked block, over all its steps."""
  steps = ladder.find("naive").grid(PROBLEM, CONFIG)[2]
  points = [(*PICKED, k) for k in range(steps)]
  specs = _facts.specs("naive", PROBLEM, CONFIG).items()
  return {x: _facts.covered(spec, points, (16, 16)) for x, spec in specs}


def draw(style: Style) -> Figure:
  """A left of C, B above it."""
  left, top = 2.8, 3.4
  right, low = left + _SIDE + _GAP, top + _SIDE + _GAP
  sheet = Sheet(style, low + _SIDE + 3.4)
  masks = bands()
  cell = _CELL, _CELL
  places = {"A": (left, low), "B": (right, top), "C": (right, low)}
  of = {"A": style.a, "B": style.b, "C": style.c}
  out = _facts.specs("naive", PROBLEM, CONFIG)["C"]
  rows, columns, _ = ladder.find("naive").grid(PROBLEM, CONFIG)
  for i, j in np.ndindex(rows, columns):
    mask = _facts.covered(out, [(i, j, 0)], (16, 16))
    tint = style.tint(style.c, 0.34 if (i + j) % 2 else 0.16)
    sheet.cells(right, low, mask, cell, tint)
    side = 4 * _CELL
    x, y = right + (j + 0.5) * side, low + (i + 0.5) * side
    if (i, j) != PICKED:
      sheet.text(x, y, f"{i}, {j}", size=11, zorder=4)
  for name, (x, y) in places.items():
    sheet.cells(x, y, masks[name], cell, of[name], z=1.2)
    faint = style.tint(style.line, 0.55)
    sheet.grid(x, y, (16, 16), cell, colour=faint, width=0.5)
    sheet.grid(x, y, (16, 16), cell, (16, 16), style.text, 1.2)
  sheet.grid(right, low, (16, 16), cell, (4, 4), style.text, 1.2)
  i, j = PICKED
  x, y = right + (j + 0.5) * 4 * _CELL, low + (i + 0.5) * 4 * _CELL
  look = {"colour": style.on(style.c), "weight": "bold", "zorder": 4}
  sheet.text(x, y, f"{i}, {j}", **look)
  sheet.head(left + _SIDE / 2, low - 1.6, "A", ha="center")
  sheet.head(right - 1.4, top + _SIDE / 2, "B", ha="right")
  sheet.head(right + _SIDE / 2, low + _SIDE + 1.8, "C", ha="center")
  sheet.text(right + _SIDE / 2, top - 1.6, "N", colour=style.muted)
  sheet.text(left - 1.5, low + _SIDE / 2, "M", colour=style.muted)
  x = left + 0.5
  sheet.head(x, top + 2, "C in blocks of 4 × 4")
  sheet.say(
    x, top + 6, "block (1, 2) reads", "4 rows of A and", "4 columns of B,",
    "whole, along K", apart=2.3,
  )  # fmt: skip
  return sheet.figure
