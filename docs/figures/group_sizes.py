"""Grouped products over rows a group, on an H100: one layer, three passes.

The share of the time that FLOP at 800 TFLOP/s, or bytes at the rate of a copy,
take at least, of 4096 x 2048 in 32 groups. On the left reading or writing
weights binds, on the right the tensor cores; between, both do, and tiles are
part empty. Rows at random leave tiles emptier than groups of one size, skewed
ones more so.
"""

from docs.figures.style import Figure, Style, chart, ticks
from experiments.harness import ragged_tables, shapes
from experiments.harness import rows as rows_lib

_CALLED = {"even": "even", "random": "at random", "zipf": "skewed (zipf)"}
_MARKERS = dict(zip(_CALLED, "os^"))


def cases() -> list[dict]:
  """The timed products of the suite."""
  path = rows_lib.RESULTS / "nvidia_h100_80gb_hbm3/ragged.jsonl"
  rows = ragged_tables.timed(rows_lib.latest(rows_lib.read(path)))
  return [row for row in rows if row["suite"] == ragged_tables.SIZES]


def draw(style: Style) -> Figure:
  """A panel a pass, a line a distribution of rows."""
  found = cases()
  figure, axes = chart(34, ncols=len(shapes.TRAINING), sharey=True)
  for ax, pass_ in zip(axes, shapes.TRAINING):
    for (how, called), colour in zip(_CALLED.items(), style.warps):
      line = sorted(
        (ragged_tables.rows_a_group(row), 100 * ragged_tables.share(row))
        for row in found
        if (row["pass"], row["group_sizes"]) == (pass_, how)
      )
      look = {"marker": _MARKERS[how], "markersize": 5}
      ax.plot(*zip(*line), color=colour, label=called, **look)
    ax.set(xscale="log", xlabel="rows a group")
    ax.set_title(pass_, loc="left", weight="bold")
    ticks(ax.xaxis, [8, 32, 128, 512])
    ax.grid()
  axes[0].set(ylim=(0, 105), ylabel="least time in % of the time")
  axes[0].legend(loc="lower left", frameon=False)
  return figure
