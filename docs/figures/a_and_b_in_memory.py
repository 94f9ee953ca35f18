"""The same walk touches memory differently in A and in B.

Above: matrices are stored row by row, so A's row is a run of neighbouring
addresses, and the elements of B's column lie a whole row apart. Below: what
the 32 lanes of a warp ask for in one step of k, drawn in the 128-byte lines
of memory. In rung 1, whose lanes walk rows, A's 32 elements lie in 32 lines;
in rung 2, whose lanes walk columns, everything lies in two.
"""

import numpy as np

from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style
from pallas_gemm import hardware
from pallas_gemm.ladder import contract

PROBLEM = contract.Problem(4096, 4096, 4096)
_WORDS = hardware.LINE_BYTES // PROBLEM.itemsize


def touched(rung_name: str) -> dict[str, np.ndarray]:
  """Words that a warp asks for in step 0: a mask of lines x words of each."""
  warp = _facts.owned(rung_name)[0, :, 0]
  found = {}
  # A[row, 0] and B[0, column]
  for name, words in (("A", warp[:, 0] * PROBLEM.k), ("B", warp[:, 1])):
    lines, at = np.divmod(words, _WORDS)
    there = np.unique(lines)
    mask = np.zeros((len(there), _WORDS), bool)
    mask[np.searchsorted(there, lines), at] = True
    found[name] = mask
  return found


def _addresses(sheet, x, y, name, picked, colour) -> None:
  style, cell = sheet.style, (3.3, 2.6)
  sheet.cells(x, y, picked, cell, colour)
  sheet.grid(x, y, picked.shape, cell)
  for number, (row, column) in enumerate(np.ndindex(picked.shape)):
    at = x + (column + 0.5) * cell[0], y + (row + 0.5) * cell[1]
    tone = style.on(colour) if picked[row, column] else style.muted
    sheet.text(*at, number, size=SMALL, colour=tone, zorder=4)
  sheet.head(x, y - 1.7, name)


def _lines(sheet, x, y, masks, title) -> None:
  style = sheet.style
  sheet.head(x, y, title)
  y += 3.4
  for name, colour in (("A", style.a), ("B", style.b)):
    mask = masks[name]
    lines, (w, h) = len(mask), (0.8, 0.62 if len(masks[name]) > 1 else 1.4)
    sheet.box(x, y, _WORDS * w, lines * h, fill=style.tint(style.line, 0.3))
    sheet.cells(x, y, mask, (w, h), colour)
    sheet.grid(x, y, mask.shape, (w, h), (1, _WORDS), width=0.6)
    y += lines * h + 1.5
    words = f"{name}: {lines} line{'s' if lines > 1 else ''},"
    words += f" {mask.sum()} word{'s' if mask.sum() > 1 else ''}"
    sheet.say(x, y, words)
    y += 3.2
  total = sum(map(len, masks.values()))
  sheet.say(x, y, f"{total} lines a step", weight="bold")


def draw(style: Style) -> Figure:
  """Addresses above, lines below."""
  sheet = Sheet(style, 56)
  row, column = np.zeros((2, 4, 8), bool)
  row[1], column[:, 2] = True, True
  _addresses(sheet, 2, 4, "A: a row, side by side", row, style.a)
  _addresses(sheet, 35.5, 4, "B: a column, a row apart", column, style.b)
  _lines(sheet, 2, 19, touched("naive"), "Rung 1: lanes walk rows")
  _lines(sheet, 35.5, 19, touched("coalesced"), "Rung 2: walk columns")
  sheet.say(
    35.5, 43, "grey: 128-byte lines of", "memory, 32 words each;",
    "colour: what the 32 lanes", "of a warp ask for", apart=2.4,
    colour=style.muted,
  )  # fmt: skip
  return sheet.figure
