"""One load of 16 bytes in place of four of 4, and A transposed on its way.

Above: a thread that takes four neighbouring words issues four load
instructions, or one. Below: a warp's part of A's tile in rung 6. Each thread
takes four words of a row, and stores them word by word in four rows of the
tile in shared memory, which is A transposed: [k][m]. Then eight rows of A at
one k lie side by side, and two 16-byte loads fetch a fragment.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style
from pallas_gemm.ladder import register_layouts

SHAPE = 16, 8


def taken() -> np.ndarray:
  """[32 lanes, 4, (m, k)]: what warp 0 takes of its 16 rows of A."""
  layout = register_layouts.words_of_row_vectors()
  return _facts.held(layout, (16 * register_layouts.WARPS, SHAPE[1]))[0]


def _instructions(sheet) -> None:
  style = sheet.style
  sheet.head(1, 2, "Four loads")
  sheet.head(34, 2, "One load")
  for word in range(4):
    sheet.box(1 + word * 6.6, 4, 5.4, 3, "4 B", fill=style.a)
  sheet.box(34, 4, 24, 3, "16 B", fill=style.a)
  for x, words in ((1, "4 issue slots"), (34, "1 issue slot")):
    sheet.say(x, 9, words, colour=style.muted)


def draw(style: Style) -> Figure:
  """Instructions above, the transposing store below."""
  sheet = Sheet(style, 56)
  _instructions(sheet)
  own = taken()
  shown = (0, 1, 2, 9)
  names = dict(zip(shown, style.warps))
  cell = 2.0
  left, right, top = 4.5, 29.5, 19
  sheet.head(left, 14.4, "A, row by row")
  sheet.head(right, 14.4, "in shared memory: [k][m]")
  for x, shape in ((left, SHAPE), (right, SHAPE[::-1])):
    sheet.box(x, top, shape[1] * cell, shape[0] * cell,
              fill=style.tint(style.a, 0.12))  # fmt: skip
    sheet.grid(x, top, shape, (cell, cell), width=0.6)
  sheet.text(left + 4 * cell, top - 1.4, "k", colour=style.muted)
  sheet.text(left - 1.4, top + 8 * cell, "m", colour=style.muted)
  sheet.text(right + 8 * cell, top - 1.4, "m", colour=style.muted)
  sheet.text(right - 1.4, top + 4 * cell, "k", colour=style.muted)
  for lane, colour in names.items():
    for word, (m, k) in enumerate(own[lane]):
      for x, y in ((left + k * cell, top + m * cell),
                   (right + m * cell, top + k * cell)):  # fmt: skip
        sheet.tile(x, y, cell, cell, word, fill=colour, z=2)
  y = top + 8 * cell + 2.4
  sheet.say(right, y, "words 0 to 3 of")
  for place, (lane, colour) in enumerate(names.items()):
    x = right + 16.5 * (place % 2)
    sheet.keys(y + 3 + 2.8 * (place // 2), (x, colour, f"lane {lane}"))
  rows = np.unique(own[..., 0])
  words = f"{len(rows)} rows of A side by side:\nread 4 at a time"
  sheet.say(right, y + 10.5, words, colour=style.muted)
  return sheet.figure
