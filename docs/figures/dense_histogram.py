"""How the dense ops compare with jnp.dot, over all measured cases.

How often the speed over the same expression in jax.numpy, on an H200, is so
much; 1 is as fast. The ten worst cases are named.
"""

from matplotlib.figure import Figure

from docs.figures.style import Style, chart, drawn
from experiments.harness import dense_tables
from experiments.harness import rows as rows_lib


@drawn
def draw(style: Style) -> Figure:
  """The histogram above, the worst below."""
  path = rows_lib.RESULTS / "nvidia_h200/dense.jsonl"
  rows = rows_lib.latest(rows_lib.read(path))
  figure, (ax, names) = chart(64, nrows=2, height_ratios=(1, 0.86))
  colours = style.wait, style.c
  dense_tables.histogram(ax, names, rows, colours, style.page, style.text)
  return figure
