"""The two figures of experiments.counters: counts, and what warps wait for.

matplotlib is needed only when a figure is drawn.
"""

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any

from experiments.harness import counter_tables, ladder_tables, plots, tables

RowDict = Mapping[str, Any]
Path = str | os.PathLike[str]
# Okabe and Ito's, so that neighbours differ in brightness; the last is for
# all reasons that have no colour of their own.
_REASON_COLOURS = (
    plots.BLUE, "#E69F00", "#56B4E9", plots.VERMILLION, "#F0E442",
    plots.GREEN, "#CC79A7", plots.INK, "#D9D9D9",
)  # fmt: skip
_DARK = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.INK)
_COLOURS = {
  "float32": plots.BLUE,
  "bfloat16": plots.VERMILLION,
  "float16": plots.VERMILLION,
}
# Panels of `counters`: title, counter, scale, and whether over a log axis.
_PANELS = (
  ("DRAM read, GB", "dram_read_bytes", 1e-9, True),
  ("L2 read, GB", "l2_read_bytes", 1e-9, True),
  ("L1 hit rate, %", "l1_hit_percent", 1, False),
  ("L2 hit rate, %", "l2_hit_percent", 1, False),
  ("bank conflicts of loads, M", "shared_load_bank_conflicts", 1e-6, True),
  ("FMA pipe busy, %", "fma_pipe_percent", 1, False),
  ("tensor pipe busy, %", "tensor_pipe_percent", 1, False),
  ("issue slots used, %", "issue_active_percent", 1, False),
)
_COLUMNS = 4


def counters(rows: Sequence[RowDict], path: Path) -> None:
  """Draws counters as small multiples: a panel each, a bar a rung.

  Args:
    rows: as `counter_tables.newest` gives them.
    path: of the PNG.

  Raises:
    ValueError: there are no rows.
    ImportError: matplotlib is not installed.
  """
  if not rows:
    raise ValueError("no rung was counted; there is nothing to draw")
  plt = plots.pyplot()
  with plt.rc_context(plots.STYLE):
    fig, axes = plt.subplots(
      len(_PANELS) // _COLUMNS,
      _COLUMNS,
      figsize=(13, 2 * (1.0 + 0.22 * len(rows))),
      sharey=True,
      layout="constrained",
    )
    for ax, (title, name, scale, log) in zip(axes.flat, _PANELS, strict=True):
      values = [row["measured"].get(name, 0.0) * scale for row in rows]
      _panel(ax, values, [_COLOURS[row["dtype"]] for row in rows], log)
      ax.set_title(title, loc="left", fontsize=10)
    _name_rungs(axes[0, 0], rows)
    _heading(fig, rows, "Counters", ": fp32 in blue, 16-bit in vermillion")
    plots.save(plt, fig, path)


def _panel(ax, values: list[float], colours: Sequence[str], log: bool) -> None:
  """Horizontal bars with their values."""
  positive = [x for x in values if x > 0]
  low = min(positive, default=1.0) / 3 if log else 0.0
  most = max(positive, default=1.0)
  # What a log axis can't show (nothing at all) has a label and no bar.
  ax.barh(range(len(values)), [max(x, low) for x in values], color=colours)
  if log:
    ax.set_xscale("log")
    ax.set_xlim(low, most * (most / low) ** 0.35)
  else:
    ax.set_xlim(0, max(100.0, most) * 1.22)
    ax.set_xticks(range(0, 101, 25))
  for i, value in enumerate(values):
    ax.annotate(
      "0" if value == 0 else f"{value:.3g}",
      (max(value, low), i),
      xytext=(3, 0),
      textcoords="offset points",
      va="center",
      fontsize=8,
    )
  ax.grid(axis="x", **plots.GRID)
  ax.set_axisbelow(True)
  ax.tick_params(axis="y", length=0)


def stalls(rows: Sequence[RowDict], path: Path) -> None:
  """Draws what warps wait for: each rung's shares, and how much it is.

  Sums differ by a factor of a hundred, so they have a log axis of their own
  beside the shares.

  Args:
    rows: as `counter_tables.newest` gives them.
    path: of the PNG.

  Raises:
    ValueError: no row tells of stalls.
    ImportError: matplotlib is not installed.
  """
  shown = counter_tables.largest(rows)
  found = [(row, counter_tables.grouped(row, shown)) for row in rows]
  found = [(row, waits) for row, waits in found if sum(waits.values()) > 0]
  if not found:
    raise ValueError("no row tells of stalls; there is nothing to draw")
  rows = [row for row, _ in found]
  totals = [sum(waits.values()) for _, waits in found]
  plt = plots.pyplot()
  with plt.rc_context(plots.STYLE):
    fig, (left, right) = plt.subplots(
      1,
      2,
      figsize=(12, 1.9 + 0.34 * len(rows)),
      sharey=True,
      width_ratios=(3, 1),
      layout="constrained",
    )
    _stack(left, [waits for _, waits in found], totals)
    _name_rungs(left, rows)
    _panel(right, totals, [plots.GREY] * len(rows), log=True)
    left.set_title("share of the stalls, %", loc="left", fontsize=10)
    title = "warps stalled for each\ninstruction issued"
    right.set_title(title, loc="left", fontsize=10)
    handles, names = left.get_legend_handles_labels()
    fig.legend(
      handles,
      names,
      loc="outside lower center",
      ncols=5,
      frameon=False,
      fontsize=9,
    )
    _heading(fig, rows, "What warps wait for")
    plots.save(plt, fig, path)


def _stack(
  ax, found: Sequence[Mapping[str, float]], totals: Sequence[float]
) -> None:
  """Shares of the reasons, side by side; a letter each, as in the legend."""
  starts = [0.0] * len(found)
  for i, name in enumerate(found[0]):
    last = name == counter_tables.OTHERS
    colour = _REASON_COLOURS[-1 if last else i]
    letter = chr(ord("a") + i)
    widths = [
      100 * waits[name] / total
      for waits, total in zip(found, totals, strict=True)
    ]
    ax.barh(
      range(len(found)),
      widths,
      left=starts,
      color=colour,
      edgecolor="white",
      linewidth=0.6,
      height=0.78,
      label=f"{letter}  {name.replace('_', ' ')}",
    )
    for row, (start, width) in enumerate(zip(starts, widths, strict=True)):
      if width >= 3:
        ax.text(
            start + width / 2, row, letter, ha="center", va="center",
            fontsize=8, color="white" if colour in _DARK else plots.INK,
        )  # fmt: skip
      starts[row] = start + width
  ax.set_xlim(0, 100)
  ax.tick_params(axis="y", length=0)


def _name_rungs(ax, rows: Sequence[RowDict]) -> None:
  """Rungs along the shared axis, the first on top."""
  names = [f"{ladder_tables.label(row)}  {row['kernel']}" for row in rows]
  ax.set_yticks(range(len(rows)), names)
  ax.set_ylim(len(rows) - 0.4, -0.6)


def _heading(fig, rows: Sequence[RowDict], what: str, note: str = "") -> None:
  """The figure's title."""
  first = rows[0]
  fig.suptitle(
    f"{what} on {first['device']}, M x N x K = {tables.shape(first)}{note}",
    fontweight="bold",
    x=0.01,
    ha="left",
  )


FIGURES: dict[str, Callable[[Sequence[RowDict], Path], None]] = {
  "counters.png": counters,
  "stalls.png": stalls,
}
