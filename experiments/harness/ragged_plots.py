"""Figures of grouped products: TFLOP/s of every arm, and GB/s of decoding."""

from collections.abc import Callable, Sequence
import os

from experiments.harness import plots, ragged_cases, ragged_tables, tables
from experiments.harness.case import OURS

RowDict = tables.RowDict
Rate = Callable[[RowDict, str], float | None]
_COLUMNS = 2
# Bars of a case, from the top; also told apart by their order.
_COLOURS = {
  OURS: plots.BLUE,
  ragged_cases.TWO: plots.GREEN,
  ragged_cases.EXAMPLE: plots.VERMILLION,
  ragged_cases.LAX: plots.GREY,
}
_THICKNESS = 0.84


def throughput(rows: Sequence[RowDict], path: str | os.PathLike[str]) -> None:
  """Draws the TFLOP/s of each arm, a dense product's marked.

  Args:
    rows: of one device.
    path: of the PNG.

  Raises:
    ValueError: no case was timed.
    ImportError: matplotlib is not installed.
  """
  found = [
    row
    for row in ragged_tables.timed(rows)
    if row["suite"] != ragged_tables.DECODE
  ]

  def rate(row: RowDict, arm: str) -> float | None:
    return row["arms"].get(arm, {}).get("tflops")

  _figure(found, path, rate, "TFLOP/s of the rows in groups")


def decode(rows: Sequence[RowDict], path: str | os.PathLike[str]) -> None:
  """Draws the GB/s of each arm where groups have few rows.

  Args:
    rows: of one device.
    path: of the PNG.

  Raises:
    ValueError: no such case was timed.
    ImportError: matplotlib is not installed.
  """
  found = ragged_tables.decoding(rows)

  def rate(row: RowDict, arm: str) -> float | None:
    # A dense product reads one weight, so its rate says nothing here.
    if arm not in row["arms"] or arm == ragged_cases.DENSE:
      return None
    return (
      row["gbytes_per_s"] * row["ms_median"] / row["arms"][arm]["ms_median"]
    )

  rates = [r["copy_gbytes_per_s"] for r in found if "copy_gbytes_per_s" in r]
  _figure(found, path, rate, "GB/s: operands and result once / time", rates)


def _figure(
  rows: Sequence[RowDict], path, rate: Rate, what: str, copied=()
) -> None:
  """Bars in columns of suites."""
  if not rows:
    raise ValueError("no such case was timed; there is nothing to draw")
  plt = plots.pyplot()
  columns = list(plots.columns(tables.by_suite(rows), _COLUMNS))
  height = max(map(plots.lines, columns))
  limit = 1.08 * max(
    x
    for row in rows
    for arm in row["arms"]
    if (x := rate(row, arm)) is not None
  )
  with plt.rc_context(plots.STYLE):
    fig, axes = plt.subplots(
      1,
      len(columns),
      figsize=(6 * len(columns), 1.8 + 0.32 * height),
      squeeze=False,
      layout="constrained",
    )
    for ax, column in zip(axes[0], columns):
      _bars(ax, column, rate)
      ax.set(xlim=(0, max([limit, *copied])), ylim=(height - 0.5, -1))
      ax.set_xlabel(what)
      for x in copied[-1:]:
        ax.axvline(x, color=plots.INK, linewidth=1, linestyle=":")
        ax.annotate(
          f"a copy: {x:.0f}",
          (x, -1),
          xytext=(-3, 3),
          textcoords="offset points",
          ha="right",
          fontsize=8,
        )
    # All arms of any column, each once, below the columns.
    handles = {}
    for ax in axes[0]:
      for handle, name in zip(*ax.get_legend_handles_labels()):
        handles.setdefault(name, handle)
    fig.legend(
      handles.values(), handles, loc="outside lower center", ncols=5,
      frameon=False,
    )  # fmt: skip
    fig.suptitle(
      f"Grouped products, {rows[0]['device']}",
      fontweight="bold",
      x=0.01,
      ha="left",
    )
    plots.save(plt, fig, path)


def _bars(ax, groups: plots.Groups, rate: Rate) -> None:
  """One column: the cases of each suite as measured, a bar for each arm."""
  ticks: dict[int, str] = {}
  line = 0
  for name, group in groups.items():
    plots.heading(ax, name, line)
    line += 1
    for row in group:
      ticks[line] = ragged_tables.label(row)
      _case(ax, row, line, rate)
      line += 1
    line += 1
  ax.set_yticks(list(ticks), list(ticks.values()), fontsize=7)
  ax.tick_params(axis="y", length=0)
  ax.grid(axis="x", **plots.GRID)
  ax.set_axisbelow(True)


def _case(ax, row: RowDict, line: int, rate: Rate) -> None:
  there = [arm for arm in _COLOURS if rate(row, arm) is not None]
  thickness = _THICKNESS / len(there)
  for i, arm in enumerate(there):
    ax.barh(
      line - _THICKNESS / 2 + (i + 0.5) * thickness,
      rate(row, arm),
      height=thickness,
      color=_COLOURS[arm],
      label=arm,
    )
  if (ceiling := rate(row, ragged_cases.DENSE)) is not None:
    half = _THICKNESS / 2
    ax.plot(
      [ceiling] * 2,
      [line - half, line + half],
      color=plots.INK,
      linewidth=1.5,
      label=f"{ragged_cases.DENSE}, dense",
    )
