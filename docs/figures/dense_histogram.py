"""How the dense ops compare with jnp.dot, over all measured cases.

How often the speed over the same expression in jax.numpy, on an H200, is so
much; 1 is as fast. The ten worst cases are named.
"""

from collections.abc import Sequence
import itertools
import math

from matplotlib import ticker
from matplotlib.figure import Figure

from docs.figures.style import SMALL, Style, chart, drawn
from experiments.harness import dense_tables, tables
from experiments.harness import rows as rows_lib

WORST = 10
# A bin is so many times as wide as the one before.
_BIN = 1.05


def bins(speeds: Sequence[float]) -> list[float]:
  """Edges that cover all speeds; 1 is one of them."""
  first = math.floor(math.log(min(speeds), _BIN))
  last = math.floor(math.log(max(speeds), _BIN)) + 1
  return [_BIN**e for e in range(first, last + 1)]


@drawn
def draw(style: Style) -> Figure:
  """The histogram above, the worst below."""
  path = rows_lib.RESULTS / "nvidia_h200/dense.jsonl"
  rows = dense_tables.compared(rows_lib.latest(rows_lib.read(path)))
  rows.sort(key=dense_tables.ratio)
  speeds = [*map(dense_tables.ratio, rows)]
  edges = bins(speeds)
  figure, (ax, names) = chart(64, nrows=2, height_ratios=(1, 0.86))
  for left, right in itertools.pairwise(edges):
    count = sum(left <= speed < right for speed in speeds)
    ax.bar(
      left, count, width=right - left, align="edge", edgecolor=style.page,
      color=style.c if right > 1 + 1e-9 else style.wait, linewidth=0.8,
    )  # fmt: skip
  device = tables.short_name(rows[0])
  ax.set(xscale="log", ylabel="cases", xlabel=f"speed over jnp.dot, {device}")
  marks = [0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 10]
  ax.xaxis.set_major_locator(ticker.FixedLocator(marks))
  ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%gx"))
  ax.xaxis.set_minor_locator(ticker.NullLocator())
  ax.set_xlim(edges[0] / 1.01, edges[-1] * 1.01)
  ax.axvline(1, color=style.text, lw=1.4)
  slower = sum(speed < 1 for speed in speeds)
  ax.text(
    0.98, 0.97,
    f"{len(speeds)} cases\ngeometric mean"
    f" {tables.factor(tables.geomean(speeds))}\n{slower} slower than jnp.dot",
    transform=ax.transAxes, ha="right", va="top", linespacing=1.5,
  )  # fmt: skip
  names.axis("off")
  names.set(xlim=(0, 1), ylim=(WORST - 0.4, -1.4))
  names.text(0, -1, f"The {WORST} worst", weight="bold", va="center")
  columns = (0, tables.RATIO), (0.14, tables.field("suite"))
  for line, row in enumerate(rows[:WORST]):
    for x, words in (*columns, (0.36, dense_tables.label)):
      names.text(x, line, words(row), va="center", size=SMALL)
  return figure
