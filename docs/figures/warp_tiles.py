"""Rung 7: block, warp tiles, and the patches of a thread.

Left: the block of 128 x 128 results, coloured by the warp that owns them, and
the eight patches of 4 x 4 that lane 0 of warp 0 holds. Right: the 32 lanes
side by side in 16 x 32 results; what they load together is one solid run of A
and one of B.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style

PATCH = 4


def owned() -> np.ndarray:
  """[4 warps, 32 lanes, registers, (row, column)] of rung 7's block."""
  return _facts.owned("warptiling")


def draw(style: Style) -> Figure:
  """The block on the left, lanes on the right."""
  own = owned()
  shape = tuple((own.reshape(-1, 2).max(0) + 1).tolist())
  sheet = Sheet(style, 42)
  cell = 34 / shape[0]
  left, top = 1.5, 5.4
  sheet.head(left, 2, f"Block of {shape[0]} × {shape[1]}")
  warps = _facts.owner_masks(own.reshape(4, -1, 2), shape)
  for warp, (mask, colour) in enumerate(zip(warps, style.warps)):
    sheet.cells(left, top, mask, (cell, cell), style.tint(colour, 0.35))
    row, column = np.argwhere(mask).mean(0) + 0.5
    if warp:
      x, y = left + column * cell, top + row * cell
      sheet.text(x, y, f"warp {warp}", zorder=5)
  half = shape[0] // 2, shape[1] // 2
  sheet.grid(left, top, shape, (cell, cell), half, style.text, 1.2)
  [thread] = _facts.owner_masks(own[0, :1], shape)
  sheet.cells(left, top, thread, (cell, cell), style.warps[0], style.page, z=2)
  # The lanes of warp 0's first 16 x 32 results.
  held = {
    tuple(at): lane for lane, each in enumerate(own[0]) for at in each.tolist()
  }
  there = np.array([at for at in held if at[0] < 16 and at[1] < 32])
  rows, columns = there.max(0) + 1
  sheet.box(left, top, columns * cell, rows * cell, edge=style.text, z=3)
  x0, y0, w, h = 39.5, 11.4, 2.85, 3.4
  sheet.head(x0, 2, "Lanes of warp 0")
  words = f"in {rows} × {columns}: a patch of"
  sheet.say(x0, 5, words, f"{PATCH} × {PATCH} each", apart=2.4)
  for r, c in np.ndindex(rows // PATCH, columns // PATCH):
    lane = held[r * PATCH, c * PATCH]
    fill = style.warps[0] if lane == 0 else style.tint(style.warps[0], 0.35)
    tone = None if lane == 0 else style.text
    sheet.tile(x0 + c * w, y0 + r * h, w, h, lane, fill=fill, z=2, colour=tone)
  bottom = y0 + rows // PATCH * h
  corner = left + columns * cell, top + rows * cell
  sides = [((corner[0], top), (x0, y0)), (corner, (x0, bottom))]
  sheet.lines(sides, style.muted)
  count = int(thread.sum()) // PATCH**2
  sheet.say(
    x0, bottom + 3, "filled: what lane 0", f"holds, {count} patches,",
    "16 rows and 32", "columns apart", apart=2.4,
  )  # fmt: skip
  return sheet.figure
