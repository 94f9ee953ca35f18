"""Rows as tables: on a terminal, and in README between markers."""

from collections.abc import Iterable, Mapping, Sequence
import pathlib
import statistics
from typing import Any

from experiments.harness import published
from experiments.harness import rows as rows_lib

RowDict = Mapping[str, Any]
EMPTY = "-"
NUMERIC = (
    "#", "time", "p25-p75", "TFLOP/s", "GB/s", "x jnp.dot", "x before",
    "error/bound",
)  # fmt: skip


def duration(ms: float | None) -> str:
  """A time with a unit that suits it, three digits: "172 us", "2.67 ms"."""
  if ms is None:
    return EMPTY
  for scale, unit in ((1e-3, "s"), (1.0, "ms"), (1e3, "us")):
    if ms * scale >= 1 or unit == "us":
      return f"{_digits(ms * scale)} {unit}"
  raise AssertionError("unreachable")


def _digits(x: float) -> str:
  """Three significant digits, never an exponent."""
  if x >= 100:
    return f"{x:.0f}"
  return f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def rate(x: float | None) -> str:
  """A throughput: three significant digits."""
  return EMPTY if x is None else _digits(x)


def factor(x: float | None) -> str:
  """A ratio: "1.031x", "0.103x", "10.6x"."""
  if x is None:
    return EMPTY
  return f"{x:.1f}x" if x >= 10 else f"{x:.3f}x"


def geomean(ratios: Sequence[float]) -> float | None:
  """The geometric mean; None of nothing."""
  return statistics.geometric_mean(ratios) if ratios else None


def by_suite(rows: Iterable[RowDict]) -> dict[str, list[RowDict]]:
  """Rows by suite, and by dtype if it is not bfloat16, as they appear."""
  found: dict[str, list[RowDict]] = {}
  for row in rows:
    dtype = "" if row["dtype"] == "bfloat16" else f" {row['dtype']}"
    found.setdefault(row["suite"] + dtype, []).append(row)
  return found


def shape(row: RowDict) -> str:
  """ "4096x8192x4096": M x N x K."""
  return f"{row['m']}x{row['n']}x{row['k']}"


def expression(row: RowDict) -> str:
  """What was computed, in words of the problem."""
  alpha = "" if row["alpha"] == 1 else f"{row['alpha']:g}*"
  beta = "" if row["beta"] == 0 else f" + {row['beta']:g}*C"
  return f"{alpha}A@B{beta}"


def verdict(row: RowDict) -> str:
  """PASSED, FAILED, or "not judged"."""
  return {True: "PASSED", False: "FAILED"}.get(row["passed"], "not judged")


def of_bound(row: RowDict) -> str:
  """The error as a part of its bound."""
  if row["max_error"] is None or row["error_bound"] is None:
    return "not finite"
  if row["error_bound"] == 0:
    return "0" if row["max_error"] == 0 else "inf"
  return f"{row['max_error'] / row['error_bound']:.2g}"


def over_rung_before(row: RowDict, rows: Iterable[RowDict]) -> float | None:
  """How many times faster than the rung before on the same problem.

  None if either was not timed; also from rung 8 to 9, where the arithmetic
  changes and with it the dtype.
  """
  if row["number"] is None or row["ms_median"] is None:
    return None
  same = {name: row[name] for name in ("m", "n", "k", "dtype", "alpha", "beta")}
  before = rows_lib.find(rows, number=row["number"] - 1, **same)
  if before is None or before["ms_median"] is None:
    return None
  return before["ms_median"] / row["ms_median"]


def ordered(rows: Iterable[RowDict]) -> list[RowDict]:
  """Rungs by number, then the others as they came."""
  return sorted(
    rows, key=lambda row: (row["number"] is None, row["number"] or 0)
  )


def problems(rows: Iterable[RowDict]) -> list[list[RowDict]]:
  """Rows of one problem together; those with the most rungs first."""
  groups: dict[tuple, list[RowDict]] = {}
  for row in rows:
    key = tuple(row[f] for f in rows_lib.PROBLEM_FIELDS if f != "kernel")
    groups.setdefault(key, []).append(row)

  def rank(group: list[RowDict]) -> tuple:
    row = group[0]
    rungs = sum(1 for r in group if r["number"] is not None)
    # float32 before the 16-bit types, as in the ladder.
    return -rungs, row["m"] * row["n"] * row["k"], row["dtype"] != "float32"

  return sorted((ordered(group) for group in groups.values()), key=rank)


def summary(
  rows: Sequence[RowDict],
) -> tuple[list[str], list[list[str]]]:
  """Header and cells of the table that a run ends in."""
  header = [
      "#", "kernel", "MxNxK", "dtype", "time", "p25-p75", "TFLOP/s", "GB/s",
      "x jnp.dot", "x before", "error/bound", "check",
  ]  # fmt: skip
  cells = []
  for row in rows:
    spread = EMPTY
    if row["ms_median"] is not None:
      spread = f"{duration(row['ms_p25'])} - {duration(row['ms_p75'])}"
    cells.append(
      [
        str(row["number"] or ""),
        row["kernel"],
        shape(row),
        row["dtype"],
        duration(row["ms_median"]),
        spread,
        rate(row["tflops"]),
        rate(row["gbytes_per_s"]),
        factor(row["ratio_to_jnp_dot"]),
        factor(over_rung_before(row, rows)),
        of_bound(row),
        verdict(row),
      ]
    )
  return header, cells


def markdown(
  header: Sequence[str], cells: Iterable[Sequence[str]], right: Sequence[str]
) -> str:
  """A GitHub table; columns named in `right` are flush right."""
  rule = ["--:" if name in right else "---" for name in header]
  return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *cells))


def ladder_markdown(rows: Sequence[RowDict]) -> str:
  """The README's tables of one device: one a problem.

  Args:
    rows: timed rows of one device.
  """
  parts = [provenance_line(rows)]
  sources: dict[str, published.Ladder] = {}
  for group in problems(rows):
    yardstick = next(
      (r["kernel"] for r in group if r["kernel"].startswith("jnp.dot")),
      "jnp.dot",
    )
    beside = None
    for row in group:
      if row["number"] is not None:
        beside = beside or published.beside(row["number"])
    header = [
        "#", "kernel", "time", "TFLOP/s", f"x {yardstick}", "x before"
    ]  # fmt: skip
    if beside is not None:
      header.append(f"published, x cuBLAS ({beside.key}, {beside.gpu})")
      sources[beside.key] = beside
    cells = []
    for row in group:
      cell = [
        str(row["number"] or ""),
        row["kernel"],
        duration(row["ms_median"]),
        rate(row["tflops"]),
        factor(row["ratio_to_jnp_dot"]),
        factor(over_rung_before(row, group)),
      ]
      if beside is not None:
        number = row["number"]
        cell.append(
          factor(None if number is None else beside.of_cublas(number))
        )
      cells.append(cell)
    first = group[0]
    parts.append(
      f"**{expression(first)}, M x N x K = {first['m']} x {first['n']} x"
      f" {first['k']}, {first['dtype']}**"
    )
    right = [name for name in header if name != "kernel"]
    parts.append(markdown(header, cells, right))
  parts.append(
    "*x before*: speed over the rung before. A ratio is of times from one"
    " run, interleaved; the row of the yardstick is itself against itself,"
    " so its distance from 1.00x is the noise."
  )
  if sources:
    listed = "; ".join(
      f"{ladder.key}: {ladder.source} ({ladder.gpu}, {ladder.problem})"
      for ladder in sources.values()
    )
    parts.append(f"Published figures: {listed}.")
  return "\n\n".join(parts)


def provenance_line(rows: Sequence[RowDict]) -> str:
  """Where the rows come from, in a sentence; several values as a list."""

  def values(name: str, show=str) -> str:
    found = {show(row[name]) for row in rows if row.get(name) is not None}
    return ", ".join(sorted(found)) or "unknown"

  return (
    f"{values('device')}; driver {values('driver')}, CUDA {values('cuda')},"
    f" jax {values('jax')}, jaxlib {values('jaxlib')}; commit"
    f" {values('commit', lambda c: c[:10])}; {values('utc', lambda u: u[:10])}."
    f" Inputs {values('distribution')}, seed {values('seed')}; median of"
    f" {values('repeats')} calls after {values('warmup')}, L2 flushed."
  )


def between_markers(text: str, name: str, block: str) -> str:
  """`text` with what stands between two marker lines replaced.

  The markers are `<!-- name:begin -->` and `<!-- name:end -->`; they stay.

  Raises:
    ValueError: the markers are not there, once each and in order.
  """
  begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
  if text.count(begin) != 1 or text.count(end) != 1:
    raise ValueError(f"want one line {begin} and one line {end}")
  head, rest = text.split(begin)
  if end not in rest:
    raise ValueError(f"{end} must come after {begin}")
  _, tail = rest.split(end)
  return f"{head}{begin}\n\n{block.strip()}\n\n{end}{tail}"


def update_file(path: pathlib.Path, name: str, block: str) -> bool:
  """Rewrites the block of that name in a file; whether it changed.

  Raises:
    ValueError: there is no such file, or no such block in it.
  """
  if not path.exists():
    raise ValueError(f"there is no {path}")
  old = path.read_text()
  try:
    new = between_markers(old, name, block)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  if new != old:
    path.write_text(new)
  return new != old
