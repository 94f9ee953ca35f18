"""A grid, an index map for each matrix, and the blocks that they pick.

A 16 x 16 x 16 product in 4 x 4 blocks has a grid of 4 x 4 x 4 points: a block
of C for each (i, j), and a step for each k. At the point (1, 2, 3) each
BlockSpec's index map says which block of its matrix is meant.
"""

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style
from pallas_gemm import ladder
from pallas_gemm.ladder import contract

PROBLEM = contract.Problem(16, 16, 16)
CONFIG = contract.SimtConfig(block_m=4, block_n=4, block_k=4)
POINT = (1, 2, 3)


def picked() -> list[tuple[str, str, tuple[int, ...]]]:
  """(matrix, its index map in words, the block that it picks)."""
  specs = _facts.specs("shared_memory", PROBLEM, CONFIG)
  at = {name: spec.index_map for name, spec in specs.items()}
  return [
    (name, ", ".join(map_("i", "j", "k")[:2]), tuple(map_(*POINT)))
    for name, map_ in at.items()
  ]


def draw(style: Style) -> Figure:
  """The grid above, the matrices below."""
  sheet = Sheet(style, 52)
  shape = ladder.find("shared_memory").grid(PROBLEM, CONFIG)
  specs = _facts.specs("shared_memory", PROBLEM, CONFIG).values()
  sheet.head(1.5, 2, "The grid, a point (i, j, k)")
  i, j, k = POINT
  x, y, cell, apart = 5.0, 5.4, 2.6, 2.2
  rows, columns, steps = shape
  for step in reversed(range(steps)):
    left, top = x + apart * step, y + apart * step
    # The step that is meant lies on top.
    z = 2 + (10 if step == k else step)
    sheet.box(left, top, columns * cell, rows * cell, fill=style.page, z=z)
    if step == k:
      place = left + j * cell, top + i * cell, cell, cell
      sheet.box(*place, fill=style.text, z=z + 0.2)
    look = {"colour": style.text if step == k else style.line, "z": z + 0.3}
    sheet.grid(left, top, (rows, columns), (cell, cell), **look)
  sheet.text(x - 1.6, y + 2 * cell, "i", colour=style.muted)
  sheet.text(x + 2 * cell, y - 1.3, "j", colour=style.muted)
  sheet.text(x + 5.4 * cell + 1, y + 1.2, "k", colour=style.muted)
  sheet.arrow((x + 4.3 * cell, y - 0.6), (x + 4.3 * cell + 6.2, y + 5.6),
              style.muted, 1.2)  # fmt: skip
  sheet.say(33, 7.6, "grid " + " × ".join(map(str, shape)))
  sheet.say(33, 10.2, f"the point {POINT}", weight="bold")
  sheet.say(33, 14, "each BlockSpec maps it\nto a block of its matrix")
  side, top = 17.0, 30.0
  cell = side / 16
  colours = style.a, style.b, style.c
  every = zip(picked(), specs, colours)
  for column, ((name, words, block), spec, colour) in enumerate(every):
    left = 1.5 + 21.6 * column
    mask = _facts.covered(spec, [POINT], (16, 16))
    sheet.head(left, top - 2, name)
    sheet.text(left + side, top - 2, f"({words})", ha="right")
    sheet.cells(left, top, mask, (cell, cell), colour)
    sheet.grid(left, top, (16, 16), (cell, cell), (4, 4))
    sheet.grid(left, top, (1, 1), (side, side), colour=style.text, width=1.2)
    sheet.text(left + side / 2, top + side + 2.2, f"block {block}")
  return sheet.figure
