"""A 128-byte swizzle spreads a column over all banks.

Eight rows of a tile, 128 bytes each: eight units of 16 bytes, numbered as they
lie in the row. Without a swizzle unit 2 of every row lies in the same four
banks, so reading it from eight rows is an eight-way conflict. Swizzled, the
units of row r trade places (the place is the unit's number XOR r), and the
eight lie in different banks.
"""

from docs.figures import _facts
from docs.figures.style import Figure, Sheet, Style

ROWS = UNITS = 8  # 16-byte units of a row of 128 bytes
PICKED = 2
_UNIT_WORDS = _facts.CLOCK_BYTES // UNITS // _facts.WORD_BYTES


def places(is_swizzled: bool) -> list[list[int]]:
  """Where unit u of row r lies in its row: [row][unit]."""
  # PTX ISA, "Swizzling modes": XORed with the row's number within eight.
  turns = range(ROWS) if is_swizzled else [0] * ROWS
  return [[unit ^ turn for unit in range(UNITS)] for turn in turns]


def conflict(is_swizzled: bool) -> int:
  """Clocks for reading the picked unit of all rows together."""
  words = [
    row * _facts.BANKS + place[PICKED] * _UNIT_WORDS + word
    for row, place in enumerate(places(is_swizzled))
    for word in range(_UNIT_WORDS)
  ]
  return max(map(len, _facts.wanted_of_banks(words).values()))


def _panel(sheet, x, title, is_swizzled) -> None:
  style, top, w, h = sheet.style, 7.4, 3.3, 2.9
  sheet.head(x, 2, title)
  sheet.say(x, 5.6, "banks 0-3", colour=style.muted, size=11)
  sheet.text(x + 8 * w, 5.6, "28-31", ha="right", colour=style.muted, size=11)
  for row, units in enumerate(places(is_swizzled)):
    for unit, place in enumerate(units):
      here = unit == PICKED
      fill = style.a if here else style.tint(style.a, 0.14)
      at = x + place * w, top + row * h, w, h
      tone = None if here else style.muted
      sheet.box(*at, unit, fill=fill, edge=style.page, line=1.4, colour=tone)
  times = conflict(is_swizzled)
  words = f"{times}-way conflict" if times > 1 else "no conflict"
  y = top + 8 * h + 2.2
  sheet.say(x, y, f"unit {PICKED} of eight rows:")
  sheet.say(x, y + 2.6, words, weight="bold")


def draw(style: Style) -> Figure:
  """Without on the left, with on the right."""
  sheet = Sheet(style, 37.5)
  for row in range(ROWS):
    y = 7.4 + (row + 0.5) * 2.9
    sheet.text(3.4, y, row, ha="right", colour=style.muted)
  sheet.text(3.4, 5.6, "row", ha="right", colour=style.muted, size=11)
  _panel(sheet, 5, "As it comes", False)
  _panel(sheet, 36, "Swizzled", True)
  return sheet.figure
