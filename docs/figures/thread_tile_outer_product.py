"""A thread's tile of 8 x 8 results is the outer product of two fragments.

In one step of kk a thread reads eight values of A and eight of B into
registers; each of A meets each of B, 64 FMAs for 16 loads. The numbers are the
rows and columns of the block that thread 0 of rung 5 holds: its rows lie 2
apart and its columns 16, so that lanes of a warp read neighbours.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style


def fragments() -> tuple[np.ndarray, np.ndarray]:
  """Rows and columns of rung 5's block that thread 0 holds."""
  own = _facts.owned("blocktiling_2d")[0, 0]
  return tuple(np.unique(own[:, side]) for side in (0, 1))


def draw(style: Style) -> Figure:
  """A's fragment on the left, B's above, their products between."""
  rows, columns = fragments()
  sheet = Sheet(style, 54)
  cell, left, top = 4.7, 16.5, 11.5
  picked = 5, 2
  for r, row in enumerate(rows):
    y = top + r * cell
    fill = style.a if r == picked[0] else style.tint(style.a, 0.45)
    sheet.box(left - cell - 2, y, cell, cell, row, fill=fill, edge=style.page)
  for c, column in enumerate(columns):
    x = left + c * cell
    fill = style.b if c == picked[1] else style.tint(style.b, 0.45)
    sheet.box(x, top - cell - 2, cell, cell, column, fill=fill, edge=style.page)
  for r, c in np.ndindex(len(rows), len(columns)):
    # On the way from one of the two picked values to their product.
    on_way = r <= picked[0] and c <= picked[1] and (
      r == picked[0] or c == picked[1]
    )  # fmt: skip
    strength = 1 if (r, c) == picked else 0.55 if on_way else 0.25
    place = left + c * cell, top + r * cell, cell, cell
    sheet.tile(*place, fill=style.tint(style.c, strength), line=1.5)
  y = top + (picked[0] + 0.5) * cell
  x = left + (picked[1] + 0.5) * cell
  sheet.arrow((left - 2, y), (x - cell / 2, y), style.text, 1.6)
  sheet.arrow((x, top - 2), (x, y - cell / 2), style.text, 1.6)
  sheet.head(left - cell - 3.2, top + 4 * cell, "A", ha="right")
  place = left - cell - 3.2, top + 4 * cell + 2.6
  sheet.text(*place, "rows", ha="right", size=SMALL)
  sheet.head(left + 4 * cell, 1.6, "B, columns", ha="center")
  a, b = len(rows), len(columns)
  words = f"{a} + {b} loads, {a} × {b} = {a * b} FMAs"
  sheet.text(left + 4 * cell, 51.8, words, weight="bold")
  return sheet.figure
