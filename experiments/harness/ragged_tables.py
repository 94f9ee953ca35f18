"""Rows of grouped products as tables: by suite, peer and sizes."""

from collections.abc import Iterable, Sequence
import operator
import re
import statistics

from experiments.harness import before, ragged_cases, shapes, tables
from experiments.harness.tables import RowDict

DECODE, SIZES = "decode", "sizes"
# What the op is compared with, in the order of columns.
OTHERS = (
  *ragged_cases.PEERS,
  ragged_cases.TWO,
  ragged_cases.DENSE,
  before.NAME,
)
# What arithmetic is taken to allow: near what dense products of that size do,
# 715 to 844 in rows of an H200, not the datasheet's rate.
FLOOR_TFLOPS = 800
# How tables call arms whose names would make a column too wide.
_CALLED = {
  ragged_cases.EXAMPLE: "JAX mgpu",
  ragged_cases.EXAMPLE_DW: "JAX mgpu, transposed",
}
_percent = tables.formatted(".0%")


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
      columns[f"x {_CALLED.get(arm, arm)}"] = tables.summarized(
        tables.geomean, over(arm)
      )
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
    f" op, interleaved, in one run. `{ragged_cases.DENSE}` is one dense product"
    " of the same FLOPs (the MLP of one expert beside a layer), and the *worst*"
    " case the one furthest from it. *share*: the least time over the time. The"
    f" least is that of the FLOP at {FLOOR_TFLOPS} TFLOP/s, or of operands and"
    " results, each moved once at the rate of a copy in the same run, whichever"
    " is longer. Dense products reach about that rate, not the"
    " datasheet's, so a share may pass 100%. Geometric means.",
  ]
  parts += [_against(rows), _sizes(rows), _distributions(rows)]
  parts += [_decode(rows), _skipped(rows)]
  return "\n\n".join(part for part in parts if part)


def against(rows: Iterable[RowDict]) -> tables.Table:
  """Header and cells: each suite against each peer, losses counted."""

  def speed(line: tuple[RowDict, str]) -> float | None:
    return speed_over(*line)

  arms = (*ragged_cases.PEERS, before.NAME)
  lines = [(row, arm) for row in timed(rows) for arm in arms]
  lines = [line for line in lines if speed(line) is not None]
  columns = {
    "suite": lambda group: tables.suite(group[0][0]),
    "beside": lambda group: f"`{_CALLED.get(group[0][1], group[0][1])}`",
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
    for arm in arms
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
    " has one group's weights. `JAX mgpu`: JAX's examples"
    " `ragged_dot_mgpu` and, by weights, `transposed_ragged_dot_mgpu`."
    f"{_tokamax(rows)}"
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


def _reason(skipped: tuple[str, str, str]) -> str:
  """A reason without its numbers and names of kernels."""
  return re.sub(r"[\d.]+(e[-+]\d+)?|ran \w+", "", skipped[2])


def _skipped(rows: Sequence[RowDict]) -> str:
  """Why arms are missing, in a list: a line a reason, whatever its numbers."""
  skipped = (
    (row["suite"], *why)
    for row in timed(rows)
    for why in row["skipped"].items()
  )
  lines = []
  for found in tables.grouped(skipped, _reason).values():
    arms = tables.grouped(found, lambda x: x[1])
    of_arms = ", ".join(
      f"`{arm}` ({', '.join(dict.fromkeys(x[0] for x in of))})"
      for arm, of in arms.items()
    )
    why, *others = dict.fromkeys(x[2] for x in found)
    more = f" (and {len(others)} like it)" if others else ""
    lines.append(f"* {of_arms}: {why}{more}.")
  return "\n".join(["Not measured:", "", *lines]) if lines else ""
