"""Rows of grouped products as tables: by suite and pass, and by group sizes."""

from collections.abc import Iterable, Sequence
import statistics
from typing import Any

from experiments.harness import ragged_cases, tables

RowDict = tables.RowDict
DECODE = "decode"
# What the op is compared with, in the order of columns.
OTHERS = (
  ragged_cases.LAX,
  ragged_cases.EXAMPLE,
  ragged_cases.TWO,
  ragged_cases.DENSE,
)
NUMERIC = (
    "cases", "TFLOP/s", *(f"x {name}" for name in OTHERS), "worst", "failed",
    "time", "GB/s", "of a copy", *ragged_cases.PASSES,
)  # fmt: skip


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


def measured_parts(row: RowDict) -> list[str]:
  """What was measured of a case, as parts of its line."""
  parts = [row["implementation"]]
  if row["ms_median"] is not None:
    parts += [
      f"{tables.duration(row['ms_median']):>8}",
      f"{tables.rate(row['tflops']):>5} TFLOP/s",
    ]
    if row["suite"] == DECODE:
      parts.append(f"{tables.rate(row['gbytes_per_s']):>5} GB/s")
      if (share := of_copy(row)) is not None:
        parts.append(f"{share:.0%} of a copy")
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


def by_pass(rows: Iterable[RowDict]) -> dict[tuple[str, str], list[RowDict]]:
  """Rows by suite (and dtype) and pass, as they appear."""
  found: dict[tuple[str, str], list[RowDict]] = {}
  for suite, group in tables.by_suite(rows).items():
    for row in group:
      found.setdefault((suite, row["pass"]), []).append(row)
  return found


def summary(rows: Sequence[RowDict]) -> tuple[list[str], list[list[str]]]:
  """Header and cells: geometric means of each suite and pass."""
  rows = cases(rows)
  there = {arm for row in rows for arm in row["arms"]}
  others = [arm for arm in OTHERS if arm in there]
  header = ["suite", "pass", "cases", "TFLOP/s"]
  header += [f"x {arm}" for arm in others]
  header += ["worst", "worst case", "failed"]
  cells = []
  for (suite, pass_), group in by_pass(rows).items():
    rates = [row["tflops"] for row in timed(group)]
    cell = [suite, pass_, str(len(group)), tables.rate(tables.geomean(rates))]
    for arm in others:
      speeds = [s for row in group if (s := speed_over(row, arm)) is not None]
      cell.append(tables.factor(tables.geomean(speeds)))
    of_dense = {
      label(row): speed
      for row in group
      if (speed := speed_over(row, ragged_cases.DENSE)) is not None
    }
    worst = min(of_dense, key=of_dense.__getitem__, default=None)
    cell += [tables.factor(of_dense.get(worst)), worst or tables.EMPTY]
    cell.append(str(sum(row["passed"] is False for row in group)))
    cells.append(cell)
  return header, cells


def markdown(rows: Sequence[RowDict]) -> str:
  """The page's tables of one device.

  Args:
    rows: the latest rows of the device.
  """
  parts = [
    tables.provenance_line(timed(rows)),
    tables.markdown(*summary(rows), NUMERIC),
    "TFLOP/s count the rows in groups. *x*: time of the other over time of the"
    f" op, interleaved, in one run; `{ragged_cases.DENSE}` is one dense"
    " product of the same FLOPs (the MLP of one expert beside a layer), the"
    " *worst* case the one furthest from it. Geometric means.",
  ]
  parts += [part(rows) for part in (_distributions, _decode, _skipped)]
  return "\n\n".join(part for part in parts if part)


def _distributions(rows: Sequence[RowDict]) -> str:
  """Speed relative to groups of one size, by distribution and pass."""
  found: dict[str, dict[str, Any]] = {}
  for row in timed(rows):
    if row["suite"] == "distributions" and "ratio_to_even" in row:
      ratios = found.setdefault(row["group_sizes"], {})
      ratios[row["pass"]] = row["ratio_to_even"]
  if not found:
    return ""
  passes = [
    p for p in ragged_cases.PASSES if any(p in x for x in found.values())
  ]
  cells = [
    [sizes, *(tables.factor(ratios.get(p)) for p in passes)]
    for sizes, ratios in found.items()
  ]
  return tables.markdown(["speed over even groups", *passes], cells, NUMERIC)


def _decode(rows: Sequence[RowDict]) -> str:
  """How near small groups come to a copy's rate."""
  found = decoding(rows)
  if not found:
    return ""
  header = ["few rows a group", "time", "GB/s", "of a copy"]
  cells = []
  for row in found:
    share = of_copy(row)
    cells.append(
      [
        label(row),
        tables.duration(row["ms_median"]),
        tables.rate(row["gbytes_per_s"]),
        tables.EMPTY if share is None else f"{share:.0%}",
      ]
    )
  table = tables.markdown(header, cells, NUMERIC)
  rates = [r["copy_gbytes_per_s"] for r in found if "copy_gbytes_per_s" in r]
  if not rates:
    return table
  copied = statistics.median(rates)
  return (
    f"{table}\n\nGB/s: the weights of groups that have rows, the rows and the"
    f" result once, over the time; a copy reaches {copied:.0f} GB/s."
  )


def _skipped(rows: Sequence[RowDict]) -> str:
  """Why arms are missing, in a list."""
  found: dict[tuple[str, str], list[RowDict]] = {}
  for row in timed(rows):
    for arm, why in row["skipped"].items():
      found.setdefault((arm, why), []).append(row)
  lines = [
    f"* `{arm}`, {', '.join(dict.fromkeys(r['suite'] for r in group))}: {why}."
    for (arm, why), group in found.items()
  ]
  return "\n".join(["Not measured:", "", *lines]) if lines else ""
