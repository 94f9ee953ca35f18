"""Figures of grouped products: TFLOP/s of every arm, GB/s, and the share."""

from collections.abc import Callable, Iterator, Sequence
import itertools

from experiments.harness import (
  plots,
  ragged_cases,
  ragged_tables,
  shapes,
  tables,
)
from experiments.harness.case import OURS
from experiments.harness.tables import RowDict

Rate = Callable[[RowDict, str], float | None]
Groups = dict[str, Sequence[RowDict]]
# Bars of a case, from the top; also told apart by their order.
_COLOURS = {
  OURS: plots.BLUE,
  ragged_cases.TWO: plots.GREEN,
  ragged_cases.EXAMPLE: plots.VERMILLION,
  ragged_cases.EXAMPLE_DW: plots.VERMILLION,
  "tokamax triton": plots.ORANGE,
  ragged_cases.LAX: plots.GREY,
}
_THICKNESS = 0.84
_COLUMNS = 2
# Lines, told apart by markers too; what distributions are called beside them.
_LINES = (plots.BLUE, "o"), (plots.GREEN, "s"), (plots.VERMILLION, "^")
_CALLED = {"random": "multinomial", "zipf": "skewed (zipf)"}
_BY_THEMSELVES = (ragged_tables.DECODE, ragged_tables.SIZES)


@plots.drawn
def throughput(rows: Sequence[RowDict]):
  """The TFLOP/s of each arm of cases with peers, a dense product's marked."""
  found = [
    row
    for row in ragged_tables.timed(rows)
    if row["suite"] not in _BY_THEMSELVES and len(row["arms"]) > 1
  ]

  def rate(row: RowDict, arm: str) -> float | None:
    return row["arms"].get(arm, {}).get("tflops")

  return _figure(found, rate, "TFLOP/s of the rows in groups")


@plots.drawn
def decode(rows: Sequence[RowDict]):
  """The GB/s of each arm where groups have few rows."""
  found = ragged_tables.decoding(rows)

  def rate(row: RowDict, arm: str) -> float | None:
    speed = ragged_tables.speed_over(row, arm)
    return None if speed is None else row["gbytes_per_s"] / speed

  rates = [r["copy_gbytes_per_s"] for r in found if "copy_gbytes_per_s" in r]
  return _figure(found, rate, "GB/s: operands and result once / time", rates)


@plots.drawn
def sizes(rows: Sequence[RowDict]):
  """The share over rows a group: a panel a pass, a line a distribution."""
  found = [
    row
    for row in ragged_tables.timed(rows)
    if row["suite"] == ragged_tables.SIZES
    and ragged_tables.share(row) is not None
  ]
  if not found:
    raise ValueError("no such case was timed; there is nothing to draw")
  if len(devices := {row["device"] for row in found}) > 1:
    raise ValueError(f"want rows of one device, got {sorted(devices)}")
  by_pass = tables.grouped(found, lambda row: row["pass"])
  passes = [x for x in shapes.TRAINING if x in by_pass]
  fig, axes = plots.panels(12, 4.2, ncols=len(passes), sharey=True)
  for ax, pass_ in zip(axes, passes):
    group = by_pass[pass_]
    _curves(ax, group)
    ax.set(title=pass_, xlabel="rows a group, on average")
  axes[0].set(ylim=(0, None), ylabel="share: the least time over the time")
  axes[0].yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
  fig.legend(
    *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
  )  # fmt: skip
  row = found[0]
  weights = f"{row['k']} x {row['n']} in {row['groups']} groups"
  plots.title(fig, f"Grouped products of {weights}, {row['device']}")
  return fig


def _curves(ax, rows: Sequence[RowDict]) -> None:
  """The lines of one pass, over powers of two."""

  def called(row: RowDict) -> str:
    how, dtype = row["group_sizes"], row["dtype"]
    words = [_CALLED.get(how, how), *([dtype] * (dtype != "bfloat16"))]
    return ", ".join(words)

  groups = tables.grouped(rows, called)
  for (name, line), style in zip(groups.items(), itertools.cycle(_LINES)):
    line = sorted(line, key=ragged_tables.rows_a_group)
    x = [ragged_tables.rows_a_group(row) for row in line]
    y = [ragged_tables.share(row) for row in line]
    colour, marker = style
    ax.plot(x, y, color=colour, marker=marker, markersize=5, label=name)
  at = {ragged_tables.rows_a_group(row) for row in rows}
  named = sorted(x for x in at if x & (x - 1) == 0)
  ax.set_xscale("log", base=2)
  ax.set_xticks(named, [str(x) for x in named])
  ax.set_xticks(sorted(at - {*named}), [""] * len(at - {*named}), minor=True)
  ax.grid()


def _figure(
  rows: Sequence[RowDict], rate: Rate, what: str, copied: Sequence[float] = ()
):
  """Bars in columns of suites."""
  if not rows:
    raise ValueError("no such case was timed; there is nothing to draw")
  columns = list(_columns(tables.grouped(rows, tables.suite)))
  height = max(map(_lines, columns))
  rates = (rate(row, arm) for row in rows for arm in row["arms"])
  limit = 1.08 * max(x for x in rates if x is not None)
  width = 6 * len(columns)
  fig, axes = plots.panels(width, 1.8 + 0.32 * height, ncols=len(columns))
  handles = {}
  for ax, column in zip(axes, columns):
    _bars(ax, column, rate)
    ax.set(xlim=(0, max([limit, *copied])), ylim=(height - 0.5, -1))
    ax.set_xlabel(what)
    for x in copied[-1:]:
      ax.axvline(x, color=plots.INK, linewidth=1, linestyle=":")
      words = f"a copy: {x:.0f}"
      plots.note(ax, words, (x, -1), (-3, 3), ha="right", fontsize=8)
    # All arms of any column, each once, below the columns.
    for handle, name in zip(*ax.get_legend_handles_labels()):
      handles.setdefault(name, handle)
  fig.legend(
    handles.values(), handles, loc="outside lower center", ncols=5,
  )  # fmt: skip
  plots.title(fig, f"Grouped products, {rows[0]['device']}")
  return fig


def _columns(groups: Groups) -> Iterator[Groups]:
  """Groups in order, cut into columns of about one height."""
  enough = _lines(groups) / _COLUMNS
  column: Groups = {}
  for name, group in groups.items():
    # A group that would mostly hang over begins the next column.
    if column and _lines(column) + len(group) / 2 > enough:
      yield column
      column = {}
    column[name] = group
  yield column


def _lines(groups: Groups) -> int:
  """Lines of a column: a title and a gap for each group, and its rows."""
  return sum(len(group) + 2 for group in groups.values())


def _bars(ax, groups: Groups, rate: Rate) -> None:
  """One column: the cases of each suite as measured, a bar for each arm."""
  ticks: dict[int, str] = {}
  at = 0
  for name, group in groups.items():
    plots.note(
      ax, name, (0, at), (4, 0), xycoords=("axes fraction", "data"),
      va="center", fontweight="bold", fontsize=9,
    )  # fmt: skip
    for line, row in enumerate(group, at + 1):
      ticks[line] = ragged_tables.label(row)
      _case(ax, row, line, rate)
    at += len(group) + 2
  ax.set_yticks(list(ticks), list(ticks.values()), fontsize=7)
  ax.tick_params(axis="y", length=0)
  ax.grid(axis="x")


def _case(ax, row: RowDict, line: int, rate: Rate) -> None:
  arms = [arm for arm in _COLOURS if rate(row, arm) is not None]
  thickness = _THICKNESS / len(arms)
  top, bottom = line - _THICKNESS / 2, line + _THICKNESS / 2
  for i, arm in enumerate(arms):
    ax.barh(
      top + (i + 0.5) * thickness, rate(row, arm), height=thickness,
      color=_COLOURS[arm], label=arm,
    )  # fmt: skip
  if (ceiling := rate(row, ragged_cases.DENSE)) is not None:
    ax.plot(
      [ceiling] * 2, [top, bottom], color=plots.INK, linewidth=1.5,
      label=f"{ragged_cases.DENSE}, dense",
    )  # fmt: skip
