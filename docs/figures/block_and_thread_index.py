"""blockIdx picks a block, threadIdx a thread, and warps run along x.

Above: a CUDA grid of 4 x 3 blocks. Below: the 16 x 8 threads of one of them,
each with its linear number, threadIdx.y * 16 + threadIdx.x; every 32 of them
in that order are a warp. In Pallas none of these is written: a grid point
names the block, a register layout says what a thread holds.
"""

import numpy as np

from docs.figures.style import Figure, Sheet, Style
from pallas_gemm.ladder import register_layouts

GRID, BLOCK = (4, 3), (16, 8)  # x, y
PICKED_BLOCK, PICKED_THREAD = (2, 1), (5, 4)


def linear(x: int, y: int, width: int) -> int:
  """A thread's number in its block, or a block's in its grid."""
  return y * width + x


def draw(style: Style) -> Figure:
  """The grid above, a block below."""
  sheet = Sheet(style, 50)
  sheet.head(1, 2, "Grid: blockIdx (x, y)")
  w, h = 7.4, 3.1
  left, top = 4, 6.4
  for y, x in np.ndindex(GRID[::-1]):
    here = (x, y) == PICKED_BLOCK
    sheet.tile(
      left + x * w, top + y * h, w, h, f"{x}, {y}", line=1.4,
      fill=style.c if here else style.tint(style.c, 0.22),
      colour=None if here else style.text,
    )  # fmt: skip
  sheet.text(left + 2 * w, top - 1.4, "x", colour=style.muted)
  sheet.text(left - 1.6, top + 1.5 * h, "y", colour=style.muted)
  number = linear(*PICKED_BLOCK, GRID[0])
  sheet.say(38, 8, f"block {PICKED_BLOCK}", weight="bold")
  x, y = PICKED_BLOCK
  sheet.say(38, 10.6, f"{y} × {GRID[0]} + {x} = block {number}")
  top0 = 19
  sheet.head(1, top0, "One block: threadIdx (x, y), linear number")
  left, top, w, h = 4, top0 + 4.6, 3.6, 2.5
  for y, x in np.ndindex(BLOCK[::-1]):
    thread = linear(x, y, BLOCK[0])
    colour = style.warps[thread // register_layouts.LANES]
    here = (x, y) == PICKED_THREAD
    fill = colour if here else style.tint(colour, 0.36)
    tone = None if here else style.text
    place = left + x * w, top + y * h, w, h
    sheet.tile(*place, thread, fill=fill, colour=tone)
  sheet.text(left + 8 * w, top - 1.4, "x", colour=style.muted)
  sheet.text(left - 1.6, top + 4 * h, "y", colour=style.muted)
  y = top + BLOCK[1] * h + 2
  x, row = PICKED_THREAD
  thread = linear(x, row, BLOCK[0])
  warp, lane = divmod(thread, register_layouts.LANES)
  sheet.say(left, y, f"{row} × {BLOCK[0]} + {x} = thread {thread}:")
  sheet.say(left + 25, y, f"warp {warp}, lane {lane}", weight="bold")
  for warp, colour in enumerate(style.warps):
    at = left + 14.2 * warp
    sheet.keys(y + 2.8, (at, style.tint(colour, 0.7), f"warp {warp}"))
  return sheet.figure
