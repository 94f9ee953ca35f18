"""Waves of tiles: a block for each tile, and blocks that stay.

4096 x 4096 results in tiles of 128 x 256 are 512 tiles for 132 SMs: three
whole waves and one of 116. Above, rung 10: each tile is a block, which fills
its ring, multiplies, and writes C with the tensor cores idle. Below, rung 11:
a block on each SM takes every 132nd tile; the ring is filled once, and C
leaves during the next tile. The last wave is as full in both. Lengths of
filling and writing are an example.
"""

import math

from docs.extensions import results
from docs.figures import _facts
from docs.figures.style import SMALL, Figure, Sheet, Style
from pallas_gemm import hardware, ladder

FILL, MULTIPLY, WRITE = 0.16, 1.0, 0.22


def waves() -> list[list[int]]:
  """Tiles by wave; tile t runs on SM t % SMs."""
  rung = ladder.find("persistent")
  grid = rung.grid(results.problem(rung), _facts.config("persistent"))
  tiles = math.prod(grid[:2])
  sms = hardware.lookup("H200").sm_count
  return [
    list(range(start, min(start + sms, tiles)))
    for start in range(0, tiles, sms)
  ]


def _rows(found) -> list[int]:
  """SMs to show: first and last with and without a tile in the last wave."""
  last = len(found[-1])
  return sorted({0, 1, last - 1, last, len(found[0]) - 1})


def draw(style: Style) -> Figure:
  """One block a tile above, persistent below."""
  found = waves()
  sms, count = len(found[0]), len(found)
  sheet = Sheet(style, 54)
  x0 = 8.4
  one = FILL + MULTIPLY + WRITE
  scale = (63.2 - x0) / (count * one)
  sheet.head(0.5, 2, f"A block a tile: {sum(map(len, found))} tiles, {sms} SMs")
  sheet.head(0.5, 26, "Blocks that stay")
  writing = style.tint(style.c, 0.45)
  h, step = 2.9, 3.5
  end = FILL + count * MULTIPLY + WRITE
  for persistent, y0 in ((False, 4.2), (True, 28.2)):
    whole = (end if persistent else count * one) * scale
    for line, sm in enumerate(_rows(found)):
      y = y0 + step * line
      sheet.text(x0 - 0.8, y + h / 2, f"SM {sm}", ha="right", size=SMALL)
      sheet.box(x0, y, whole, h, fill=style.tint(style.wait, 0.3))
      at = 0.0
      for index, wave in enumerate(found):
        if sm >= len(wave):
          continue
        if not persistent or index == 0:
          sheet.box(x0 + at * scale, y, FILL * scale, h, fill=style.load)
          at += FILL
        x = x0 + at * scale
        sheet.tile(x, y, MULTIPLY * scale, h, wave[sm], fill=style.c)
        at += MULTIPLY
        x = x0 + at * scale
        more = persistent and index + 1 < count and sm < len(found[index + 1])
        if more:  # during the next tile's arithmetic
          place = x + 0.1, y + 0.68 * h, WRITE * scale, 0.32 * h
          sheet.box(*place, fill=writing, z=3)
        else:
          sheet.box(x, y, WRITE * scale, h, fill=writing)
          at += WRITE
  full = x0 + count * one * scale
  done = x0 + end * scale
  sheet.lines([((full, 3.6), (full, 46.4)), ((done, 27.6), (done, 46.4))],
              style.muted, 1.2, linestyles="dashed")  # fmt: skip
  sheet.arrow((full, 36.5), (done, 36.5), style.text, 1.4)
  sheet.text((full + done) / 2, 34.6, "saved", size=SMALL)
  y = 49
  words = f"last wave: {len(found[-1])} of {sms} SMs"
  sheet.say(x0, y, words, weight="bold")
  sheet.keys(
    y + 3, (0.5, style.load, "fill"), (8, style.c, "multiply, tile"),
    (25, writing, "write C"), (37, style.tint(style.wait, 0.3), "idle"),
  )  # fmt: skip
  return sheet.figure
