"""Figures of the dense ops: speed over the baseline, GB/s of small batches."""

from collections.abc import Sequence
import itertools
import math

from experiments.harness import dense_tables, plots, tables
from experiments.harness.tables import RowDict

WORST = 10
# A bin of the histogram is so many times as wide as the one before.
_BIN = 1.05
_SMALL = 11
_LINES = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.INK)


@plots.drawn
def ratios(rows: Sequence[RowDict]):
  """How often an op is so much faster than its baseline, and the worst."""
  if not dense_tables.compared(rows):
    raise ValueError("no case was timed; there is nothing to draw")
  fig, axes = plots.panels(7.6, 7.0, nrows=2, height_ratios=(1, 0.86))
  histogram(*axes, rows, (plots.VERMILLION, plots.BLUE), "white", plots.INK)
  return fig


def histogram(
  ax,
  names,
  rows: Sequence[RowDict],
  colours: tuple[str, str],
  page: str,
  ink: str,
) -> None:
  """Fills two axes: the cases over their speed, and the worst by name.

  Args:
    ax: of the histogram.
    names: of the list.
    rows: of one device.
    colours: of what is slower than the baseline, and of the others.
    page: the colour of the background.
    ink: of the line at 1.
  """
  from matplotlib import ticker  # pylint: disable=g-import-not-at-top

  found = worst_first(rows)
  speeds = [*map(dense_tables.ratio, found)]
  edges = bins(speeds)
  for left, right in itertools.pairwise(edges):
    count = sum(left <= speed < right for speed in speeds)
    colour = colours[right > 1 + 1e-9]
    ax.bar(
        left, count, width=right - left, align="edge", color=colour,
        edgecolor=page, linewidth=0.8,
    )  # fmt: skip
  device = tables.short_name(found[0])
  ax.set(xscale="log", ylabel="cases", xlabel=f"speed over jnp.dot, {device}")
  marks = [0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 10]
  ax.xaxis.set_major_locator(ticker.FixedLocator(marks))
  ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%gx"))
  ax.xaxis.set_minor_locator(ticker.NullLocator())
  ax.set_xlim(edges[0] / 1.01, edges[-1] * 1.01)
  ax.axvline(1, color=ink, lw=1.4)
  slower = sum(speed < 1 for speed in speeds)
  ax.text(
    0.98, 0.97,
    f"{len(speeds)} cases\ngeometric mean"
    f" {tables.factor(tables.geomean(speeds))}\n{slower} slower than jnp.dot",
    transform=ax.transAxes, ha="right", va="top", linespacing=1.5,
  )  # fmt: skip
  _list_of_worst(names, found[:WORST])


def _list_of_worst(ax, rows: Sequence[RowDict]) -> None:
  ax.axis("off")
  ax.set(xlim=(0, 1), ylim=(WORST - 0.4, -1.4))
  ax.text(0, -1, f"The {len(rows)} worst", weight="bold", va="center")
  columns = (0, tables.RATIO), (0.14, tables.field("suite"))
  for line, row in enumerate(rows):
    for x, words in (*columns, (0.36, dense_tables.label)):
      ax.text(x, line, words(row), va="center", size=_SMALL)


def worst_first(rows: Sequence[RowDict]) -> list[RowDict]:
  """The timed cases, by their speed over the baseline."""
  return sorted(dense_tables.compared(rows), key=dense_tables.ratio)


def bins(speeds: Sequence[float]) -> list[float]:
  """Edges that cover all speeds; 1 is one of them."""
  first = math.floor(math.log(min(speeds), _BIN))
  last = math.floor(math.log(max(speeds), _BIN)) + 1
  return [_BIN**e for e in range(first, last + 1)]


@plots.drawn
def small_m(rows: Sequence[RowDict]):
  """The GB/s of Llama's weights times few tokens, over the tokens."""
  groups = tables.grouped(dense_tables.small_m(rows), tables.suite)
  if not groups:
    raise ValueError("no small batch was timed; there is nothing to draw")
  width = 6.4 * len(groups)
  fig, axes = plots.panels(width, 4.6, ncols=len(groups), sharey=True)
  for ax, (name, group) in zip(axes, groups.items()):
    _curves(ax, group)
    ax.set_title(name)
  axes[0].set_ylim(bottom=0)  # of all: they share it
  axes[0].set_ylabel("GB/s: operands and result once / time")
  return fig


def _curves(ax, rows: Sequence[RowDict]) -> None:
  """One model: a colour for each weight matrix, dashed for the baseline."""
  weights = tables.grouped(
    sorted(rows, key=lambda row: row["m"]),
    lambda row: f"N x K = {row['n']} x {row['k']}",
  )
  for (name, group), colour in zip(weights.items(), _LINES):
    m = [row["m"] for row in group]
    rates = [row["gbytes_per_s"] for row in group]
    theirs = [x / dense_tables.ratio(row) for x, row in zip(rates, group)]
    ax.plot(m, rates, color=colour, marker="o", markersize=4, label=name)
    ax.plot(
        m, theirs, color=colour, marker="s", markersize=3, linewidth=1,
        linestyle=(0, (4, 3)),
    )  # fmt: skip
  for field, name in (
    ("copy_gbytes_per_s", "a copy, measured"),
    ("read_gbytes_per_s", "a sum, measured"),
  ):
    if (rate := rows[-1].get(field)) is not None:
      ax.axhline(rate, color=plots.GREY, linewidth=1, linestyle=":")
      plots.note(
        ax, f"{name}: {rate:.0f}", (0.01, rate), (0, 3), fontsize=8,
        xycoords=("axes fraction", "data"),
      )  # fmt: skip
  ticks = sorted({row["m"] for row in rows})
  ax.set_xscale("log", base=2)
  ax.set_xticks(ticks, map(str, ticks))
  ax.set_xlabel("tokens M (dashed: jnp.dot)")
  ax.legend(fontsize=8, loc="lower center")
  ax.grid()
