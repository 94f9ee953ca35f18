"""The two figures of experiments.counters: counts, and what warps wait for.

Their rows are as `counter_tables.newest` gives them.
"""

from collections.abc import Mapping, Sequence

from experiments.harness import counter_tables, ladder_tables, plots, tables
from experiments.harness.tables import RowDict

# Okabe and Ito's, so that neighbours differ in brightness; the last is for
# all reasons that have no colour of their own.
_REASON_COLOURS = (
    plots.BLUE, "#E69F00", "#56B4E9", plots.VERMILLION, "#F0E442",
    plots.GREEN, "#CC79A7", plots.INK, "#D9D9D9",
)  # fmt: skip
_DARK = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.INK)
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


@plots.drawn
def counters(rows: Sequence[RowDict]):
  """Counters as small multiples: a panel each, a bar a rung."""
  if not rows:
    raise ValueError("no rung was counted; there is nothing to draw")
  fig, axes = plots.panels(
    13, 2 * (1.0 + 0.22 * len(rows)), nrows=2, ncols=4, sharey=True
  )
  colours = [plots.COLOURS[row["dtype"]] for row in rows]
  for ax, (title, name, scale, log) in zip(axes, _PANELS, strict=True):
    values = [row["measured"].get(name, 0.0) * scale for row in rows]
    _panel(ax, values, colours, log)
    ax.set_title(title)
  plots.lines(axes[0], _names(rows))
  note = ": fp32 in blue, 16-bit in vermillion"
  plots.title(fig, f"Counters on {_what(rows)}{note}")
  return fig


def _panel(ax, values: list[float], colours: Sequence[str], log: bool) -> None:
  """Horizontal bars with their values."""
  positive = [x for x in values if x > 0]
  low = min(positive, default=1.0) / 3 if log else 0.0
  most = max(positive, default=1.0)
  # What a log axis can't show (nothing at all) has a label and no bar.
  ax.barh(range(len(values)), [max(x, low) for x in values], color=colours)
  if log:
    ax.set(xscale="log", xlim=(low, most * (most / low) ** 0.35))
  else:
    ax.set_xlim(0, max(100.0, most) * 1.22)
    ax.set_xticks(range(0, 101, 25))
  for i, x in enumerate(values):
    text = "0" if x == 0 else f"{x:.3g}"
    plots.note(ax, text, (max(x, low), i), (3, 0), va="center", fontsize=8)
  ax.grid(axis="x")
  ax.tick_params(axis="y", length=0)


@plots.drawn
def stalls(rows: Sequence[RowDict]):
  """What warps wait for: each rung's shares, and how much it is.

  Sums differ by a factor of a hundred, so they have a log axis of their own
  beside the shares.
  """
  shown = counter_tables.largest(rows)
  waits = [counter_tables.grouped(row, shown) for row in rows]
  rows = [row for row, found in zip(rows, waits) if sum(found.values()) > 0]
  waits = [found for found in waits if sum(found.values()) > 0]
  if not waits:
    raise ValueError("no row tells of stalls; there is nothing to draw")
  totals = [sum(found.values()) for found in waits]
  fig, (left, right) = plots.panels(
    12, 1.9 + 0.34 * len(rows), ncols=2, sharey=True, width_ratios=(3, 1)
  )
  _stack(left, waits, totals)
  plots.lines(left, _names(rows))
  _panel(right, totals, [plots.GREY] * len(rows), log=True)
  left.set_title("share of the stalls, %")
  title = "warps stalled for each\ninstruction issued"
  right.set_title(title)
  fig.legend(
    *left.get_legend_handles_labels(), loc="outside lower center", ncols=5,
    fontsize=9,
  )  # fmt: skip
  plots.title(fig, f"What warps wait for on {_what(rows)}")
  return fig


def _stack(
  ax, waits: Sequence[Mapping[str, float]], totals: Sequence[float]
) -> None:
  """Shares of the reasons, side by side; a letter each, as in the legend."""
  starts = [0.0] * len(waits)
  for i, name in enumerate(waits[0]):
    colour = _REASON_COLOURS[-1 if name == counter_tables.OTHERS else i]
    letter = chr(ord("a") + i)
    widths = [100 * found[name] / all_ for found, all_ in zip(waits, totals)]
    ax.barh(
      range(len(waits)), widths, left=starts, height=0.78, color=colour,
      edgecolor="white", linewidth=0.6,
      label=f"{letter}  {name.replace('_', ' ')}",
    )  # fmt: skip
    for row, (start, width) in enumerate(zip(starts, widths)):
      if width >= 3:
        ax.text(
            start + width / 2, row, letter, ha="center", va="center",
            fontsize=8, color="white" if colour in _DARK else plots.INK,
        )  # fmt: skip
      starts[row] = start + width
  ax.set_xlim(0, 100)


def _names(rows: Sequence[RowDict]) -> list[str]:
  return [f"{ladder_tables.label(row)}  {row['kernel']}" for row in rows]


def _what(rows: Sequence[RowDict]) -> str:
  return f"{rows[0]['device']}, M x N x K = {tables.shape(rows[0])}"


FIGURES = {"counters.png": counters, "stalls.png": stalls}
