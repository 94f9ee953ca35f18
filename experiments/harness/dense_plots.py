"""Figures of the dense ops: every case's ratio, and GB/s of small batches."""

from collections.abc import Sequence
import os

from experiments.harness import dense_tables, plots, tables

RowDict = tables.RowDict
_COLUMNS = 3
_LINES = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.INK)


def ratios(rows: Sequence[RowDict], path: str | os.PathLike[str]) -> None:
  """Draws the speed of each case over its baseline, suite by suite.

  Args:
    rows: of one device.
    path: of the PNG.

  Raises:
    ValueError: no case was timed.
    ImportError: matplotlib is not installed.
  """
  timed = dense_tables.compared(rows)
  if not timed:
    raise ValueError("no case was timed; there is nothing to draw")
  plt = plots.pyplot()
  columns = list(plots.columns(tables.by_suite(timed), _COLUMNS))
  height = max(map(plots.lines, columns))
  with plt.rc_context(plots.STYLE):
    fig, axes = plt.subplots(
      1,
      len(columns),
      figsize=(5.6 * len(columns), 1.3 + 0.17 * height),
      squeeze=False,
      layout="constrained",
    )
    limits = _limits(timed)
    for ax, column in zip(axes[0], columns):
      _dots(ax, column, limits, height)
    fig.suptitle(
      f"Speed over the same expression in jax.numpy, {timed[0]['device']}",
      fontweight="bold",
      x=0.01,
      ha="left",
    )
    plots.save(plt, fig, path)


def _limits(rows: Sequence[RowDict]) -> tuple[float, float]:
  found = [row["ratio_to_jnp_dot"] for row in rows]
  found += [x for row in rows if (x := dense_tables.tuned_ratio(row))]
  return min(0.8, min(found) / 1.1), max(1.25, max(found) * 1.35)


def _dots(ax, groups: dict[str, list[RowDict]], limits, height: int) -> None:
  """One column: the cases of each suite, fastest first."""
  from matplotlib import ticker  # pylint: disable=g-import-not-at-top

  ticks: dict[int, str] = {}
  line = 0
  for name, group in groups.items():
    plots.heading(ax, name, line)
    line += 1
    for row in sorted(group, key=lambda r: -r["ratio_to_jnp_dot"]):
      ticks[line] = dense_tables.label(row)
      _dot(ax, row, line)
      line += 1
    line += 1
  ax.axvline(1, color=plots.INK, linewidth=1.2)
  ax.set(xscale="log", xlim=limits, ylim=(height - 0.5, -1))
  ax.set_yticks(list(ticks), list(ticks.values()), fontsize=7)
  ax.tick_params(axis="y", length=0)
  ax.xaxis.set_major_locator(
    ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=8)
  )
  ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%gx"))
  ax.xaxis.set_minor_locator(ticker.NullLocator())
  ax.set_xlabel("faster to the right of 1x (hollow: tuned)")
  ax.grid(axis="x", **plots.GRID)
  ax.set_axisbelow(True)


def _dot(ax, row: RowDict, line: int) -> None:
  ratio = row["ratio_to_jnp_dot"]
  colour = plots.BLUE if ratio >= 1 else plots.VERMILLION
  ax.plot([1, ratio], [line, line], color=colour, linewidth=1.2, zorder=2)
  ax.plot(
      ratio, line, marker="o" if ratio >= 1 else "s", markersize=4,
      color=colour, zorder=3,
  )  # fmt: skip
  furthest = ratio
  if (tuned := dense_tables.tuned_ratio(row)) is not None:
    furthest = max(ratio, tuned)
    ax.plot(
        tuned, line, marker="o", markersize=4, markerfacecolor="none",
        color=plots.INK, zorder=3,
    )  # fmt: skip
  ax.annotate(
    tables.factor(ratio),
    (max(furthest, 1), line),
    xytext=(5, 0),
    textcoords="offset points",
    va="center",
    fontsize=7,
  )


def small_m(rows: Sequence[RowDict], path: str | os.PathLike[str]) -> None:
  """Draws the GB/s of Llama's weights times few tokens, over the tokens.

  Args:
    rows: of one device.
    path: of the PNG.

  Raises:
    ValueError: no such case was timed.
    ImportError: matplotlib is not installed.
  """
  groups = tables.by_suite(dense_tables.small_m(rows))
  if not groups:
    raise ValueError("no small batch was timed; there is nothing to draw")
  plt = plots.pyplot()
  with plt.rc_context(plots.STYLE):
    fig, axes = plt.subplots(
      1,
      len(groups),
      figsize=(6.4 * len(groups), 4.6),
      squeeze=False,
      sharey=True,
      layout="constrained",
    )
    for ax, (name, group) in zip(axes[0], groups.items()):
      _curves(ax, group)
      ax.set_title(name, loc="left", fontsize=10)
    axes[0][0].set_ylim(bottom=0)  # of all: they share it
    axes[0][0].set_ylabel("GB/s: operands and result once / time")
    plots.save(plt, fig, path)


def _curves(ax, rows: Sequence[RowDict]) -> None:
  """One model: a colour for each weight matrix, dashed for the baseline."""
  weights: dict[str, list[RowDict]] = {}
  for row in sorted(rows, key=lambda row: row["m"]):
    weights.setdefault(f"N x K = {row['n']} x {row['k']}", []).append(row)
  for (name, group), colour in zip(weights.items(), _LINES):
    m = [row["m"] for row in group]
    rates = [row["gbytes_per_s"] for row in group]
    theirs = [row["gbytes_per_s"] * row["ms_median"] / row["baseline_ms_median"]
              for row in group]  # fmt: skip
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
      ax.annotate(
        f"{name}: {rate:.0f}",
        (0.01, rate),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
      )
  ticks = sorted({row["m"] for row in rows})
  ax.set_xscale("log", base=2)
  ax.set_xticks(ticks, map(str, ticks))
  ax.set_xlabel("tokens M (dashed: jnp.dot)")
  ax.legend(fontsize=8, loc="lower center", frameon=False)
  ax.grid(**plots.GRID)
  ax.set_axisbelow(True)
