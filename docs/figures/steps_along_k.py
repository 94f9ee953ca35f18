"""One tile of C walks along K: in each step a block of A and one of B.

Above: block (1, 2) of C takes four steps; step k reads the block (1, k) of A
and (k, 2) of B, so that A's block moves right and B's moves down. Below: who
loads a 32 x 32 tile in rung 3: each of its eight warpgroups takes four rows, a
warp one of them, a thread one element.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style
from pallas_gemm import ladder
from pallas_gemm.ladder import contract, register_layouts

PROBLEM = contract.Problem(16, 16, 16)
CONFIG = contract.SimtConfig(block_m=4, block_n=4, block_k=4)
PICKED = (1, 2)
_CELL = 1.3
_SIDE = 16 * _CELL


def loaders() -> np.ndarray:
  """Of each row of rung 3's tile of A the (warpgroup, warp) that loads it."""
  rung = ladder.find("shared_memory")
  config = rung.default_config(PROBLEM)
  count = rung.warpgroups(config)
  rows = config.block_m // count
  layout = register_layouts.element_per_thread(rows, config.block_k, "columns")
  held = _facts.held(layout, (rows, config.block_k))
  found = np.full((config.block_m, 2), -1)
  for warpgroup, warp in np.ndindex(count, register_layouts.WARPS):
    for row in np.unique(held[warp, ..., 0]):
      found[warpgroup * rows + row] = warpgroup, warp
  return found


def _walk(sheet, left, top) -> None:
  style = sheet.style
  specs = _facts.specs("shared_memory", PROBLEM, CONFIG)
  steps = ladder.find("shared_memory").grid(PROBLEM, CONFIG)[2]
  right, low = left + _SIDE + 1.6, top + _SIDE + 1.6
  cell = _CELL, _CELL
  for name, colour, x, y in (
    ("A", style.a, left, low), ("B", style.b, right, top),
    ("C", style.c, right, low),
  ):  # fmt: skip
    for k in range(steps if name != "C" else 1):
      mask = _facts.covered(specs[name], [(*PICKED, k)], (16, 16))
      of_step = style.tint(colour, 1 - 0.21 * k)
      sheet.cells(x, y, mask, cell, of_step, style.text)
      row, column = np.argwhere(mask).mean(0) + 0.5
      words = f"k={k}" if name != "C" else "C"
      place = x + column * _CELL, y + row * _CELL
      tone = style.on(of_step)
      sheet.text(*place, words, size=SMALL, colour=tone, zorder=4)
    sheet.grid(x, y, (16, 16), cell, (4, 4), width=0.7)
    sheet.grid(x, y, (16, 16), cell, (16, 16), style.text, 1.2)
  sheet.head(left + _SIDE / 2, low - 1.7, "A", ha="center")
  sheet.head(right - 1.2, top + _SIDE / 2, "B", ha="right")


def _who(sheet, x, y) -> None:
  style = sheet.style
  w, h = 12.0, 1.3
  for row, (warpgroup, warp) in enumerate(loaders()):
    strength = 1.0 if warpgroup == 0 else 0.3 if warpgroup % 2 else 0.45
    fill = style.tint(style.warps[warp], strength)
    sheet.box(x, y + row * h, w, h, fill=fill, edge=style.page, line=0.6)
  for warpgroup in range(8):
    at = y + (4 * warpgroup + 2) * h
    weight = "normal" if warpgroup else "bold"
    sheet.text(x - 0.8, at, f"wg {warpgroup}", ha="right", weight=weight)
  sheet.grid(x, y, (32, 1), (w, h), (4, 1), style.text, 1.0, z=2)


def draw(style: Style) -> Figure:
  """The walk on the left, who loads on the right."""
  sheet = Sheet(style, 52)
  sheet.head(0.8, 2, "Four steps along K")
  _walk(sheet, 0.8, 4)
  sheet.head(46, 2, "Who loads")
  _who(sheet, 51, 6.2)
  sheet.text(57, 4.4, "a 32 × 32 tile", colour=style.muted)
  for warp in range(4):
    x = 1 + 12.6 * warp
    sheet.box(x, 50, 1.6, 1.4, fill=style.warps[warp])
    sheet.say(x + 2.2, 50.7, f"warp {warp}")
  sheet.say(52, 50.7, "wg: warpgroup", size=SMALL, colour=style.muted)
  return sheet.figure
