"""A thread with a column of eight results uses its B value eight times.

Left, rung 3: a thread reads one value of A and one of B for each FMA. Right,
rung 4: eight values of A and one of B, which stays in a register, for eight
FMAs. The number of loads an FMA almost halves.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style
from pallas_gemm import ladder


def thread_values(name: str) -> tuple[int, int, int]:
  """(values of A, values of B, FMAs) of one thread in one step of kk."""
  rung, config = ladder.find(name), _facts.config(name)
  rows = config.block_m // rung.warpgroups(config)
  own = _facts.held(rung.layout(config), (rows, config.block_n))[0, 0]
  a, b = (len(np.unique(own[:, side])) for side in (0, 1))
  return a, b, len(own)


def _thread(sheet, x, y, title, values) -> None:
  style, cell = sheet.style, 3.6
  a, b, fmas = values
  top = y + 11 + (8 - a) * cell / 2
  sheet.head(x, y, title)
  sheet.box(x + 12.5, y + 4.5, cell, cell, fill=style.b, edge=style.page)
  sheet.text(x + 11.5, y + 6.3, "B", weight="bold", ha="right")
  for row in range(a):
    at = top + row * cell
    sheet.box(x + 1.5, at, cell, cell, fill=style.a, edge=style.page)
    sheet.box(x + 12.5, at, cell, cell, fill=style.c, edge=style.page)
    start = x + 1.5 + cell + 0.4, at + cell / 2
    sheet.arrow(start, (x + 12.1, at + cell / 2), style.a, 1.4)
  sheet.arrow((x + 14.3, y + 8.4), (x + 14.3, top - 0.3), style.b, 1.6)
  sheet.text(x + 3.3, top - 1.6, "A", weight="bold")
  sheet.text(x + 17.2, top + a * cell / 2, "C", weight="bold", ha="left")
  bottom = y + 11 + 8 * cell + 2.4
  sheet.say(x, bottom, f"{a} + {b} loads")
  words = f"{fmas} FMA{'s' if fmas > 1 else ''}"
  sheet.say(x, bottom + 2.6, words, weight="bold")


def draw(style: Style) -> Figure:
  """One result left, eight right."""
  sheet = Sheet(style, 49)
  _thread(sheet, 5, 2, "Rung 3: one result", thread_values("shared_memory"))
  _thread(sheet, 37, 2, "Rung 4: a column", thread_values("blocktiling_1d"))
  sheet.lines([((32, 1), (32, 48))])
  return sheet.figure
