"""How the dense ops compare with jnp.dot, over all measured cases.

How often the speed over the same expression in jax.numpy, on an H200, is so
much; 1 is as fast. The ten worst cases are named.
"""

import math

from matplotlib import ticker
from matplotlib.figure import Figure
import numpy as np

from docs.figures.style import SMALL, Style, chart, drawn
from experiments.harness import dense_tables, tables
from experiments.harness import rows as rows_lib

WORST = 10
# A bin is so many times as wide as the one before; one begins at 1.
_STEP = 1.05


def cases() -> list[dict]:
  """The timed cases, the worst first."""
  path = rows_lib.RESULTS / "nvidia_h200/dense.jsonl"
  rows = dense_tables.compared(rows_lib.latest(rows_lib.read(path)))
  return sorted(rows, key=lambda row: row["ratio_to_jnp_dot"])


def bins(ratios: list[float]) -> np.ndarray:
  """Edges that cover all ratios; 1 is one of them."""
  low = math.floor(math.log(min(ratios), _STEP))
  high = math.floor(math.log(max(ratios), _STEP)) + 1
  return _STEP ** np.arange(low, high + 1, dtype=float)


@drawn
def draw(style: Style) -> Figure:
  """The histogram above, the worst below."""
  found = cases()
  ratios = [row["ratio_to_jnp_dot"] for row in found]
  figure, (ax, names) = chart(64, nrows=2, height_ratios=(1, 0.86))
  counts, edges = np.histogram(ratios, bins(ratios))
  for count, left, right in zip(counts, edges, edges[1:]):
    slower = right <= 1 + 1e-9
    ax.bar(
      left, count, width=right - left, align="edge",
      color=style.wait if slower else style.c, edgecolor=style.page,
      linewidth=0.8,
    )  # fmt: skip
  ax.set(xscale="log", ylabel="cases", xlabel="speed over jnp.dot, H200")
  ax.xaxis.set_major_locator(ticker.FixedLocator([1, 1.25, 1.5, 2, 3, 4]))
  ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%gx"))
  ax.xaxis.set_minor_locator(ticker.NullLocator())
  ax.set_xlim(edges[0] / 1.01, edges[-1] * 1.01)
  mean = tables.geomean(ratios)
  ax.axvline(1, color=style.text, lw=1.4)
  slower = sum(ratio < 1 for ratio in ratios)
  ax.text(
    0.98, 0.97,
    f"{len(ratios)} cases\ngeometric mean {tables.factor(mean)}\n"
    f"{slower} slower than jnp.dot",
    transform=ax.transAxes, ha="right", va="top", linespacing=1.5,
  )  # fmt: skip
  names.axis("off")
  names.set(xlim=(0, 1), ylim=(WORST - 0.4, -1.4))
  names.text(0, -1, f"The {WORST} worst", weight="bold", va="center")
  for line, row in enumerate(found[:WORST]):
    cells = (
      (0, tables.factor(row["ratio_to_jnp_dot"])),
      (0.14, row["suite"]),
      (0.36, dense_tables.label(row)),
    )
    for x, words in cells:
      names.text(x, line, words, va="center", size=SMALL)
  return figure
