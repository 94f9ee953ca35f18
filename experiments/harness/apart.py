"""How far two measurements of the same lie apart."""

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.harness import rows as rows_lib
from experiments.harness import tables


def apart(
  first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]
) -> dict[str, Any] | None:
  """What the times say that are in both; None if there are none.

  A factor is the longer of two median times over the shorter.

  Returns:
    times: how many; geomean, worst: of the factors; worst_case: whose it is.

  Example:
    >>> from experiments.harness import apart
    >>> rows = [
    ...   {"kernel": "naive", "m": 1, "n": 2, "k": 3, "ms_median": ms}
    ...   for ms in (10.0, 10.2)
    ... ]
    >>> apart.apart(rows[:1], rows[1:])
    {'times': 1, 'geomean': 1.02, 'worst': 1.02, 'worst_case': 'naive 1x2x3'}
  """
  one, other = _times(first), _times(second)
  factors = {
    case: max(ms / other[case], other[case] / ms)
    for case, ms in one.items()
    if case in other
  }
  if not factors:
    return None
  worst = max(factors, key=factors.__getitem__)
  (kernel, m, n, k, *more), arm = worst
  names = [arm or kernel, f"{m}x{n}x{k}"] if m else filter(None, more)
  return {
    "times": len(factors),
    "geomean": tables.geomean(list(factors.values())),
    "worst": factors[worst],
    "worst_case": " ".join(map(str, names)),
  }


def table(rows: Iterable[Mapping[str, Any]]) -> tables.Table:
  """Of files, each with what `apart` says of it."""
  header = ["file", "times", "geomean", "worst", "worst case"]
  cells = []
  for row in rows:
    factors = map(tables.factor, (row["geomean"], row["worst"]))
    cells.append([row["file"], str(row["times"]), *factors, row["worst_case"]])
  return header, cells


def _times(rows: Iterable[Mapping[str, Any]]) -> dict[tuple, float]:
  """By what was measured and arm, "" for a row that has none, median times."""
  found, fields = {}, rows_lib.PROBLEM_FIELDS + rows_lib.VARIANT_FIELDS
  for row in rows_lib.latest(rows):
    case = tuple(map(row.get, fields))
    for arm, of in (row.get("arms") or {"": row}).items():
      if ms := of.get("ms_median"):
        found[case, arm] = ms
  return found
