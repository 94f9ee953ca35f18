"""The order of tiles decides how much of A and B is wanted at one time.

C of 8192 x 8192 in tiles of 128 x 256; the 132 tiles that run first are green.
Row by row they span all of B's columns; in strips of eight tiles, rung 11's
order, about half of them. Blue and orange: the rows of A and columns of B that
they read, which L2 has to hold or device memory to send.
"""

import itertools

import numpy as np

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style
from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import contract

PROBLEM = contract.Problem(8192, 8192, 8192, "bfloat16")


def orders() -> dict[str, np.ndarray]:
  """[132, 2]: the tiles that run first, row by row and in strips."""
  rung = ladder.find("persistent")
  config = rung.default_config(PROBLEM)
  tiles = rung.grid(PROBLEM, config)[:2]
  count = hardware.lookup("H200").sm_count
  by_row = np.stack(np.divmod(np.arange(count), tiles[1]), axis=1)
  return {
    "Row by row": by_row,
    f"Strips of {config.raster}": _facts.tile_order(tiles, config, count),
  }


def bytes_wanted(order: np.ndarray) -> tuple[int, int]:
  """Bytes of A and of B that these tiles read, each once."""
  rung = ladder.find("persistent")
  config = rung.default_config(PROBLEM)
  rows, columns = (len(np.unique(order[:, side])) for side in (0, 1))
  depth = PROBLEM.k * PROBLEM.itemsize
  return rows * config.block_m * depth, columns * config.block_n * depth


def draw(style: Style) -> Figure:
  """Row by row above, strips below; the upper rows of C's tiles."""
  rung = ladder.find("persistent")
  shape = rung.grid(PROBLEM, rung.default_config(PROBLEM))[:2]
  shown = 2 * rung.default_config(PROBLEM).raster - 4
  sheet = Sheet(style, 50.4)
  left, cell = 5.0, (1.82, 0.91)
  for y, (name, order) in zip((2.0, 24.6), orders().items()):
    sheet.head(0.8, y, name)
    a, b = (count / 1e6 for count in bytes_wanted(order))
    words = f"A {a:.1f} + B {b:.1f} = {a + b:.1f} MB"
    sheet.text(left + shape[1] * cell[0], y, words, ha="right")
    mask = np.zeros(shape, bool)
    mask[order[:, 0], order[:, 1]] = True
    top = y + 5.4
    sheet.cells(left, top, mask[:shown], cell, style.c)
    rows, columns = mask.any(1)[:shown, None], mask.any(0)[None]
    sheet.cells(left - 2.6, top, rows, (2.0, cell[1]), style.a)
    sheet.cells(left, top - 2.6, columns, (cell[0], 2.0), style.b)
    sheet.text(left - 1.6, top + rows.sum() * cell[1] + 1.6, "A")
    middle = left + columns.sum() * cell[0] / 2
    sheet.text(middle, top - 1.6, "B", colour=style.on(style.b), zorder=4)
    faint = style.tint(style.line, 0.7)
    sheet.grid(left, top, (shown, shape[1]), cell, colour=faint, width=0.5)
    way = (left, top) + (order[:, ::-1] + 0.5) * cell
    pairs = itertools.pairwise(map(tuple, way))
    if name == "Row by row":  # without the way back to the left
      pairs = [pair for pair in pairs if pair[0][1] == pair[1][1]]
    sheet.lines(list(pairs), style.on(style.c), 0.9, z=4)
    words = f"C: {shown} of {shape[0]} rows of {shape[1]} tiles"
    sheet.say(left, top + shown * cell[1] + 1.7, words, colour=style.muted)
  words = f"green: the {len(order)} tiles that run first, in that order"
  sheet.say(0.8, 48.4, words)
  return sheet.figure
