"""Rows of grouped products as tables and figures: by suite, peer and sizes."""

from collections.abc import Callable, Iterable, Sequence
import itertools
import operator
import statistics

from experiments.harness import plots, ragged_cases, shapes, tables
from experiments.harness.case import OURS
from experiments.harness.tables import RowDict

DECODE, SIZES = "decode", "sizes"
# What the op is compared with, in the order of columns.
OTHERS = (*ragged_cases.PEERS, ragged_cases.TWO, ragged_cases.DENSE)
# What arithmetic is taken to allow: near what dense products of that size do,
# 715 to 844 in rows of an H200, not the datasheet's rate.
FLOOR_TFLOPS = 800
_percent = tables.formatted(".0%")

# Bars of a case, from the top.
_COLOURS = {
  OURS: plots.BLUE,
  ragged_cases.TWO: plots.GREEN,
  ragged_cases.EXAMPLE: plots.VERMILLION,
  ragged_cases.EXAMPLE_DW: plots.VERMILLION,
  "tokamax triton": plots.ORANGE,
  ragged_cases.LAX: plots.GREY,
}
# Lines, told apart by markers too; what distributions are called there.
_LINES = (plots.BLUE, "o"), (plots.GREEN, "s"), (plots.VERMILLION, "^")
_CALLED = {"random": "multinomial", "zipf": "skewed (zipf)"}
_BY_THEMSELVES = (DECODE, SIZES)


def label(fields: RowDict) -> str:
  """A case in words, from a row: "8192x14336x4096 in 8 zipf, dx"."""
  sizes, pass_ = fields["group_sizes"], fields["pass"]
  return f"{tables.shape(fields)} in {fields['groups']} {sizes}, {pass_}"


def cases(rows: Iterable[RowDict]) -> list[RowDict]:
  """The rows of a case; others tell the memory's rate."""
  return [row for row in rows if "arms" in row]


def timed(rows: Iterable[RowDict]) -> list[RowDict]:
  """The cases that were timed."""
  return [row for row in cases(rows) if row["ms_median"] is not None]


def decoding(rows: Iterable[RowDict]) -> list[RowDict]:
  """The cases that are bound by reading the weights."""
  return [row for row in timed(rows) if row["suite"] == DECODE]


def speed_over(row: RowDict, arm: str) -> float | None:
  """Time of an arm over the op's; None if that says nothing.

  The arm may not have been timed. Decoding is bound by reading the weights,
  and a dense product reads those of one group.
  """
  if row["ms_median"] is None or arm not in row["arms"]:
    return None
  if row["suite"] == DECODE and arm == ragged_cases.DENSE:
    return None
  return row["arms"][arm]["ms_median"] / row["ms_median"]


def of_copy(row: RowDict) -> float | None:
  """The part of a copy's rate at which the least bytes were moved."""
  rate = row.get("copy_gbytes_per_s")
  if rate is None or row["gbytes_per_s"] is None:
    return None
  return row["gbytes_per_s"] / rate


def share(row: RowDict) -> float | None:
  """The floor of a case over its time; None if that is not known.

  The floor is its FLOP at `FLOOR_TFLOPS`, or the least bytes at the rate of a
  copy in the same run, whichever takes longer.
  """
  if (memory := of_copy(row)) is None:
    return None
  return max(row["tflops"] / FLOOR_TFLOPS, memory)


def rows_a_group(row: RowDict) -> int:
  """On average."""
  return round(row["m"] / row["groups"])


def measured_parts(row: RowDict) -> list[str]:
  """What was measured of a case, as parts of its line."""
  parts = [row["implementation"]]
  if row["ms_median"] is not None:
    parts += [
      f"{tables.TIME(row):>8}",
      f"{tables.TFLOPS(row):>5} TFLOP/s",
    ]
    if (part := share(row)) is not None:
      parts.append(f"share {part:.0%}")
    if row["suite"] == DECODE:
      parts.append(f"{tables.GBYTES(row):>5} GB/s")
      if (part := of_copy(row)) is not None:
        parts.append(f"{part:.0%} of a copy")
    parts += [
      f"{tables.factor(speed):>6} of {arm}"
      for arm in OTHERS
      if (speed := speed_over(row, arm)) is not None
    ]
    if (ratio := row.get("ratio_to_even")) is not None:
      parts.append(f"{tables.factor(ratio)} of even groups")
    parts += [f"no {arm}: {why}" for arm, why in row["skipped"].items()]
  elif (wall := row.get("wall_ms_median")) is not None:
    parts.append(f"wall {tables.duration(wall)}")
  return parts


def summary(rows: Sequence[RowDict]) -> tables.Table:
  """Header and cells: geometric means of each suite and pass."""
  rows = cases(rows)

  def over(arm: str) -> tables.Value:
    return lambda row: speed_over(row, arm)

  of_dense, tflops = over(ragged_cases.DENSE), operator.itemgetter("tflops")
  columns = {
    "suite": lambda group: tables.suite(group[0]),
    "pass": lambda group: group[0]["pass"],
    "cases": lambda group: str(len(group)),
    "TFLOP/s": tables.summarized(tables.geomean, tflops, tables.rate),
    "share": tables.summarized(tables.geomean, share, _percent),
  }
  for arm in OTHERS:
    if any(arm in row["arms"] for row in rows):
      columns[f"x {arm}"] = tables.summarized(tables.geomean, over(arm))
  columns |= {
    "worst": tables.summarized(min, of_dense),
    "worst case": tables.extreme(min, of_dense, label),
    "failed": tables.failed,
  }
  # Suites as they appear, and so the passes of each.
  groups = [
    group
    for suite in tables.grouped(rows, tables.suite).values()
    for group in tables.grouped(suite, lambda row: row["pass"]).values()
  ]
  return tables.pivot(groups, columns)


def markdown(rows: Sequence[RowDict]) -> str:
  """The page's tables of one device.

  Args:
    rows: the latest rows of the device.
  """
  parts = [
    tables.provenance_line(timed(rows)),
    tables.markdown(*summary(rows)),
    "TFLOP/s count the rows in groups. *x*: time of the other over time of the"
    f" op, interleaved, in one run; `{ragged_cases.DENSE}` is one dense"
    " product of the same FLOPs (the MLP of one expert beside a layer), the"
    " *worst* case the one furthest from it. *share*: the least time over the"
    f" time; the least is that of the FLOP at {FLOOR_TFLOPS} TFLOP/s, or of"
    " operands and results, each moved once at the rate of a copy in the same"
    " run, whichever is longer. Dense products reach about that rate, not the"
    " datasheet's, so a share may pass 100%. Geometric means.",
  ]
  parts += [_against(rows), _sizes(rows), _distributions(rows)]
  parts += [_decode(rows), _skipped(rows)]
  return "\n\n".join(part for part in parts if part)


def against(rows: Iterable[RowDict]) -> tables.Table:
  """Header and cells: each suite against each peer, losses counted."""

  def speed(line: tuple[RowDict, str]) -> float | None:
    return speed_over(*line)

  lines = [(row, arm) for row in timed(rows) for arm in ragged_cases.PEERS]
  lines = [line for line in lines if speed(line) is not None]
  columns = {
    "suite": lambda group: tables.suite(group[0][0]),
    "beside": lambda group: f"`{group[0][1]}`",
    "cases": lambda group: str(len(group)),
    "slower": lambda group: str(sum(speed(x) < 1 for x in group)),
    "geomean": tables.summarized(tables.geomean, speed),
    "worst": tables.summarized(min, speed),
    "worst case": tables.extreme(min, speed, lambda line: label(line[0])),
  }
  by_suite = tables.grouped(lines, lambda line: tables.suite(line[0]))
  groups = [
    [line for line in suite if line[1] == arm]
    for suite in by_suite.values()
    for arm in ragged_cases.PEERS
  ]
  return tables.pivot(filter(None, groups), columns)


def _against(rows: Sequence[RowDict]) -> str:
  """Each peer, with how many cases the op is slower in."""
  header, cells = against(rows)
  if not cells:
    return ""
  return (
    f"{tables.markdown(header, cells)}\n\nTime of the peer over time of the op;"
    " *slower*: cases that the op takes longer for. `jnp.dot` is no peer: it"
    f" has one group's weights.{_tokamax(rows)}"
  )


def _tokamax(rows: Sequence[RowDict]) -> str:
  """Which tokamax it was, what was patched for it, and whether it was tuned."""
  said = []
  for row in timed(rows):
    for name, arm in row["arms"].items():
      if "tokamax" not in (config := arm.get("config") or {}):
        continue
      parts = [f" `{name}`: version {config['tokamax']}"]
      if "triton" in config:
        parts.append(f"Triton {config['triton']}")
      if "patched" in config:
        parts.append(config["patched"])
      parts.append("by its own tuner" if "tuned" in config else "not tuned")
      said.append(", ".join(parts) + ".")
  return "".join(dict.fromkeys(said))


def _sizes(rows: Sequence[RowDict]) -> str:
  """The share over rows a group: a column each distribution and pass."""
  found = [row for row in timed(rows) if row["suite"] == SIZES]
  columns = [
    (f"{pass_} {how}", group, {"": lambda row: _percent(share(row))})
    for pass_ in shapes.TRAINING
    for how, group in tables.grouped(
      (row for row in found if row["pass"] == pass_),
      lambda row: row["group_sizes"],
    ).items()
  ]
  index = {"rows a group": lambda row: str(rows_a_group(row))}
  lines = sorted(found, key=rows_a_group)
  if not found:
    return ""
  return (
    f"{tables.markdown(*tables.pivot(lines, index, columns))}\n\n"
    f"Share, of {found[0]['k']} x {found[0]['n']} in {found[0]['groups']}"
    " groups, by rows a group on average."
  )


def _distributions(rows: Sequence[RowDict]) -> str:
  """Speed relative to groups of one size, by distribution and pass."""
  found = [
    row
    for row in timed(rows)
    if row["suite"] == "distributions" and "ratio_to_even" in row
  ]
  passes = tables.grouped(found, lambda row: row["pass"])
  ratio = {"": tables.field("ratio_to_even", tables.factor)}
  columns = [(x, passes[x], ratio) for x in shapes.PASSES if x in passes]
  index = {"speed over even groups": tables.field("group_sizes")}
  table = tables.pivot(found, index, columns)
  return tables.markdown(*table) if found else ""


def _decode(rows: Sequence[RowDict]) -> str:
  """How near small groups come to a copy's rate."""
  columns = {
    "few rows a group": label,
    "time": tables.TIME,
    "GB/s": tables.GBYTES,
    "of a copy": lambda row: _percent(of_copy(row)),
  }
  if not (found := decoding(rows)):
    return ""
  table = tables.markdown(*tables.pivot(found, columns))
  rates = [r["copy_gbytes_per_s"] for r in found if "copy_gbytes_per_s" in r]
  if not rates:
    return table
  return (
    f"{table}\n\nGB/s: the weights of groups that have rows, the rows and the"
    " result once, over the time; a copy reaches"
    f" {statistics.median(rates):.0f} GB/s."
  )


def _skipped(rows: Sequence[RowDict]) -> str:
  """Why arms are missing, in a list."""
  skipped = (
    (row["suite"], *why)
    for row in timed(rows)
    for why in row["skipped"].items()
  )
  lines = []
  for (arm, why), found in tables.grouped(skipped, lambda x: x[1:]).items():
    suites = ", ".join(dict.fromkeys(suite for suite, *_ in found))
    lines.append(f"* `{arm}`, {suites}: {why}.")
  return "\n".join(["Not measured:", "", *lines]) if lines else ""


@plots.drawn
def draw_throughput(rows: Sequence[RowDict]):
  """The TFLOP/s of each arm of cases with peers, a dense product's marked."""
  found = [
    row
    for row in timed(rows)
    if row["suite"] not in _BY_THEMSELVES and len(row["arms"]) > 1
  ]

  def tflops(row: RowDict, arm: str) -> float | None:
    return row["arms"].get(arm, {}).get("tflops")

  return _bars(found, tflops, "TFLOP/s of the rows in groups")


@plots.drawn
def draw_decode(rows: Sequence[RowDict]):
  """The GB/s of each arm where groups have few rows."""
  found = decoding(rows)

  def rate(row: RowDict, arm: str) -> float | None:
    speed = speed_over(row, arm)
    return None if speed is None else row["gbytes_per_s"] / speed

  copies = [r["copy_gbytes_per_s"] for r in found if "copy_gbytes_per_s" in r]
  return _bars(found, rate, "GB/s: operands and result once / time", copies)


def _bars(
  rows: Sequence[RowDict],
  rate: Callable[[RowDict, str], float | None],
  what: str,
  copies: Sequence[float] = (),
):
  """Bars of a rate of each arm, below the name of their suite."""
  if not rows:
    raise ValueError("no such case was timed; there is nothing to draw")
  dense = ragged_cases.DENSE
  bars = plots.Bars(label, rate, _COLOURS, {dense: f"{dense}, dense"})
  groups = tables.grouped(rows, tables.suite)
  figure = bars.figure(groups, what, [(x, f"a copy: {x:.0f}") for x in copies])
  plots.title(figure, f"Grouped products, {rows[0]['device']}")
  return figure


@plots.drawn
def draw_sizes(rows: Sequence[RowDict]):
  """The share over rows a group: a panel a pass, a line a distribution."""
  found = [
    row
    for row in timed(rows)
    if row["suite"] == SIZES and share(row) is not None
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
    line = sorted(line, key=rows_a_group)
    x = [rows_a_group(row) for row in line]
    y = [share(row) for row in line]
    colour, marker = style
    ax.plot(x, y, color=colour, marker=marker, markersize=5, label=name)
  at = {rows_a_group(row) for row in rows}
  named = sorted(x for x in at if x & (x - 1) == 0)
  ax.set_xscale("log", base=2)
  ax.set_xticks(named, [str(x) for x in named])
  ax.set_xticks(sorted(at - {*named}), [""] * len(at - {*named}), minor=True)
  ax.grid()
