"""Who holds what of the accumulators of a wgmma.

Left: 64 x 16 results. Each warp of the warpgroup holds 16 rows, all columns.
Right: the first 16 x 8 of warp 0. A lane holds two neighbours of a row, and
the same two columns eight rows further down; the pattern repeats every eight
columns, four registers each time.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style
from pallas_gemm.ladder import tensor_core_common

SHAPE = tensor_core_common.WGMMA_ROWS, 16
PICKED = 5


def owned() -> np.ndarray:
  """[4 warps, 32 lanes, registers, (row, column)]."""
  return _facts.held(plgpu.Layout.WGMMA, SHAPE)


def draw(style: Style) -> Figure:
  """Warps on the left, lanes on the right."""
  own = owned()
  sheet = Sheet(style, 51)
  left, top, cell = 5.5, 5.6, (0.9, 0.68)
  sheet.head(0.8, 2, "Warps, 64 × 16")
  for warp, mask in enumerate(_facts.owner_masks(own.reshape(4, -1, 2), SHAPE)):
    colour = style.warps[warp]
    sheet.cells(left, top, mask, cell, style.tint(colour, 0.4), style.page)
    rows = np.flatnonzero(mask.any(1))
    y = top + (rows[0] + len(rows) / 2) * cell[1]
    sheet.text(left + 12 * cell[0], y, warp, zorder=5)
    place = left - 0.8, top + (rows[0] + 1) * cell[1]
    sheet.text(*place, rows[0], ha="right", size=SMALL, colour=style.muted)
  x0, y0, w, h = 27.5, 5.6, 8.4, 2.2
  sheet.head(x0, 2, "Lanes of warp 0, 16 × 8")
  lane_at = np.full(SHAPE, -1)
  for lane, each in enumerate(own[0]):
    lane_at[each[:, 0], each[:, 1]] = lane
  for row, pair in np.ndindex(16, 4):
    lane, right = lane_at[row, 2 * pair : 2 * pair + 2]
    assert lane == right
    here = lane == PICKED
    strength = 1.0 if here else 0.42 if row < 8 else 0.25
    fill, tone = (
      style.tint(style.warps[0], strength),
      None if here else style.text,
    )
    sheet.tile(
      x0 + pair * w, y0 + row * h, w, h, lane, fill=fill, z=2, colour=tone
    )
  middle = y0 + 8 * h
  sheet.lines([((x0, middle), (x0 + 4 * w, middle))], style.text, 1.4, z=4)
  first = own[0, PICKED]
  registers = int(((first[:, 0] < 16) & (first[:, 1] < 8)).sum())
  y = y0 + 16 * h + 2.2
  sheet.say(
    x0, y, "a box: two columns of a row",
    f"lane {PICKED}: {registers} registers here,",
    f"{registers} more every 8 columns",
  )  # fmt: skip
  first = 8 * cell[0], 16 * cell[1]
  sheet.grid(left, top, (1, 1), first, colour=style.text, width=1.4, z=4)
  return sheet.figure
