"""Grouped products over the rows of a group, on an H200.

Above: the share of the roofline, the larger of FLOP over the tensor cores'
peak and bytes over device memory's. With few rows a group reading weights
binds, with many the tensor cores do; between, tiles are part empty. Below:
how many times as fast as jax.lax.ragged_dot, and as the grouped kernel that
JAX ships as an example, in the forward pass. Filled: groups of one size.
"""

from matplotlib import ticker
from matplotlib.figure import Figure

from docs.figures.style import Style, chart, drawn
from experiments.harness import ragged_cases, ragged_tables, shapes
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware

_PASSES = ("forward", "dx", "dw")
_NAMES = {
  ragged_cases.LAX: "lax.ragged_dot",
  ragged_cases.EXAMPLE: "JAX's example kernel",
}


def cases() -> list[dict]:
  """The timed products of models, each pass by itself."""
  path = rows_lib.RESULTS / "nvidia_h200/ragged.jsonl"
  rows = ragged_tables.timed(rows_lib.latest(rows_lib.read(path)))
  published = shapes.tagged(shapes.GROUPED, "published")
  return [
    row for row in rows if row["pass"] in _PASSES and row["suite"] in published
  ]


def rows_a_group(row: dict) -> float:
  """On average."""
  return row["m"] / row["groups"]


def share(row: dict) -> float:
  """Of the roofline: the least time over the time."""
  gpu = hardware.lookup(row["device"])
  return max(
    row["tflops"] * 1e12 / gpu.bf16_flops,
    row["gbytes_per_s"] * 1e9 / gpu.dram_bytes_per_s,
  )


def _dot(ax, style, row, y, colour, shift=1.0) -> None:
  even = row["group_sizes"] == "even"
  ax.plot(
    rows_a_group(row) * shift * (0.94 if even else 1.06), y, "o",
    markersize=7, color=colour, markeredgewidth=1.6,
    markerfacecolor=colour if even else "none", zorder=3,
  )  # fmt: skip


@drawn
def draw(style: Style) -> Figure:
  """Share of the roofline above, speed over others below."""
  found = cases()
  figure, (top, low) = chart(64, nrows=2, sharex=True)
  for row in found:
    _dot(top, style, row, 100 * share(row), style.c)
    if row["pass"] != "forward":
      continue
    for arm, colour, shift in (
      (ragged_cases.LAX, style.warps[0], 0.92),
      (ragged_cases.EXAMPLE, style.warps[1], 1.08),
    ):
      if (speed := ragged_tables.speed_over(row, arm)) is not None:
        _dot(low, style, row, speed, colour, shift)
  top.set(ylim=(0, 100), ylabel="% of the roofline")
  top.set_title("Forward, dx and dw", loc="left", weight="bold")
  low.set(xscale="log", yscale="log", xlabel="rows a group, on average")
  low.set(ylabel="times as fast as")
  low.set_title("Forward, over others", loc="left", weight="bold")
  low.axhline(1, color=style.text, lw=1.2)
  ticks = sorted({round(rows_a_group(row)) for row in found})
  low.xaxis.set_major_locator(ticker.FixedLocator(ticks))
  low.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
  low.yaxis.set_major_locator(ticker.FixedLocator([1, 2, 5, 10, 20, 30]))
  low.yaxis.set_major_formatter(ticker.FormatStrFormatter("%gx"))
  for axis in (low.xaxis, low.yaxis):
    axis.set_minor_locator(ticker.NullLocator())
  low.set_ylim(0.8, 50)
  for ax in (top, low):
    ax.grid()
  for face, words in ((style.c, "even groups"), ("none", "uneven")):
    top.plot([], [], "o", color=style.c, markerfacecolor=face, label=words,
             markersize=7, markeredgewidth=1.6)  # fmt: skip
  top.legend(loc="lower right", frameon=False, handletextpad=0.2)
  for arm, colour in zip(_NAMES, style.warps):
    low.plot([], [], "o", color=colour, label=_NAMES[arm], markersize=7)
  low.legend(loc="upper left", frameon=False, handletextpad=0.2)
  return figure
