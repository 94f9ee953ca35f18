"""A register layout says which lane of which warp holds which element.

A 4 x 32 array as rung 2's accumulators hold it: a row is a warp's, and its
columns are the lanes. The same layout with a dimension reduced away is how
the operands are held: a lane needs A's value of its row and B's of its column.
"""

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style

PICKED = (1, 5)


def owned():
  """The block's shape, and [warps, lanes, registers, (row, column)]."""
  config = _facts.config("coalesced")
  return (config.block_m, config.block_n), _facts.owned("coalesced")


def draw(style: Style) -> Figure:
  """The array in the middle, next to it what a lane needs of A and B."""
  shape, own = owned()
  sheet = Sheet(style, 38.6)
  x0, y0, w, h = 11.4, 11, 1.6, 4.2
  warp, lane = PICKED
  [[row, column]] = own[warp, lane].tolist()
  sheet.head(0.8, 2, f"{shape[0]} × {shape[1]}: who holds what")
  for index, colour in enumerate(style.warps):
    for each in range(32):
      [[r, c]] = own[index, each].tolist()
      here = (index, each) == PICKED
      sheet.box(
        x0 + c * w, y0 + r * h, w, h,
        fill=colour if here else style.tint(colour, 0.38),
        edge=style.text if here else style.page,
        line=1.6 if here else 0.8, z=3 if here else 1,
      )  # fmt: skip
      if index == 0 and each in (0, 5, 10, 15, 20, 25, 31):
        place = x0 + (c + 0.5) * w, y0 - 1.4
        sheet.text(*place, each, size=SMALL, colour=style.muted)
    [[r, _]] = own[index, 0].tolist()
    sheet.text(x0 - 3.8, y0 + (r + 0.5) * h, f"warp {index}", ha="right")
  sheet.text(x0 - 3.8, y0 - 1.4, "lane", ha="right", colour=style.muted)
  # What the picked lane needs of A's column and B's row at one k.
  for r in range(shape[0]):
    fill = style.a if r == row else style.tint(style.a, 0.25)
    sheet.tile(x0 - 3, y0 + r * h, 2.2, h, fill=fill)
  below = y0 + shape[0] * h + 0.8
  for c in range(shape[1]):
    fill = style.b if c == column else style.tint(style.b, 0.25)
    sheet.tile(x0 + c * w, below, w, 2.2, fill=fill)
  sheet.text(x0 - 1.9, 6.8, "A", weight="bold")
  sheet.text(x0 - 1.9, below + 1.1, "B", weight="bold")
  y = below + 5
  words = f"warp {warp}, lane {lane} holds element ({row}, {column}),"
  sheet.say(x0 - 3, y, words, weight="bold")
  sheet.say(x0 - 3, y + 2.5, f"reads A's row {row} and B's column {column}")
  return sheet.figure
