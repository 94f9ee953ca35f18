"""Rows as tables: numbers in words, and the pivot."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
import functools
import statistics
from typing import Any

RowDict = Mapping[str, Any]
# What is taken of a row, or of several: words, or a number if there is one.
Text = Callable[[Any], str]
Value = Callable[[Any], float | None]
# Columns of a table: by heading, what one has of a row.
Columns = Mapping[str, Text]
# A header and the cells below it.
Table = tuple[list[str], list[list[str]]]
EMPTY = "-"
# Columns of words; the others hold numbers, flush right.
WORDS = (
    "kernel", "MxNxK", "dtype", "check", "suite", "pass", "worst case",
    "best case", "host time", "speed over even groups", "few rows a group",
    "limit", "rung", "what it adds", "op", "beside", "file",
    "product", "scales", "precision", "elements",
    "gated MLP, forward and backward", "experts, forward and backward",
)  # fmt: skip


def pivot(
  rows: Iterable[Any],
  index: Columns,
  columns: Iterable[tuple[str, Iterable[Any], Columns]] = (),
) -> Table:
  """Header and cells of a table, in Markdown or on a terminal.

  Args:
    rows: whose lines there are, in order; each has one of its own, unless
      there are columns.
    index: what a line begins with.
    columns: what stands right of it, from left to right: a heading,
      rows, and what is shown of one. A line has the last of the rows that the
      index says the same of, and "-" where there is none.

  Example:
    >>> from experiments.harness import tables
    >>> rows = [{"gpu": g, "n": n} for g, n in (("x", 1), ("y", 1), ("y", 2))]
    >>> number = {"N": tables.field("n")}
    >>> x, y = tables.grouped(rows, lambda row: row["gpu"]).values()
    >>> double = {"2N": lambda row: str(2 * row["n"])}
    >>> tables.pivot(rows, number, [("x", x, double), ("y", y, double)])
    (['N', 'x 2N', 'y 2N'], [['1', '2', '2'], ['2', '-', '4']])
  """

  def named(row: Any) -> tuple[str, ...]:
    return tuple(text(row) for text in index.values())

  lines, header = [list(named(row)) for row in rows], [*index]
  if columns := list(columns):
    lines = [list(line) for line in dict.fromkeys(map(tuple, lines))]
  for heading, compared, values in columns:
    found = {named(row): row for row in compared}
    header += [f"{heading} {name}".strip() for name in values]
    for line in lines:
      row = found.get(tuple(line[: len(index)]))
      line += [EMPTY if row is None else text(row) for text in values.values()]
  return header, lines


def numeric(header: Iterable[str]) -> list[str]:
  """The columns that hold numbers."""
  return [name for name in header if name not in WORDS]


def markdown(
  header: Sequence[str],
  cells: Iterable[Sequence[str]],
  right: Sequence[str] | None = None,
) -> str:
  """A GitHub table; columns of numbers, or those told, are flush right."""
  right = numeric(header) if right is None else right
  rule = ["--:" if name in right else "---" for name in header]
  return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *cells))


def grouped(
  rows: Iterable[Any], key: Callable[[Any], Hashable]
) -> dict[Any, list[Any]]:
  """Rows by what they have in common, both in the order of appearance."""
  found: dict[Any, list[Any]] = {}
  for row in rows:
    found.setdefault(key(row), []).append(row)
  return found


def field(name: str, text: Text = str) -> Text:
  """What a column has of a row: one of its fields."""
  return lambda row: text(row[name])


def duration(ms: float | None) -> str:
  """A time with a unit that suits it, three digits: "172 µs", "2.67 ms"."""
  if ms is None:
    return EMPTY
  if ms >= 1e3:
    return f"{_digits(ms / 1e3)} s"
  return f"{_digits(ms)} ms" if ms >= 1 else f"{_digits(ms * 1e3)} µs"


def _digits(x: float) -> str:
  """Three significant digits, never an exponent."""
  if x >= 100:
    return f"{x:.0f}"
  return f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def rate(x: float | None) -> str:
  """A throughput: three significant digits."""
  return EMPTY if x is None else _digits(x)


def factor(x: float | None) -> str:
  """A ratio: "1.031x", "0.103x", "10.6x", "1564x"."""
  if x is None:
    return EMPTY
  return f"{_digits(x)}x" if x >= 10 else f"{x:.3f}x"


def size(count: float | None) -> str:
  """Bytes with a prefix: "33.6 MB"."""
  if count is None:
    return EMPTY
  for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
    if count >= scale:
      return f"{count / scale:.3g} {unit}"
  return f"{count:.0f} B"


def formatted(spec: str) -> Text:
  """What writes numbers in one of Python's formats: ".1f", ".0%"."""
  return lambda x: EMPTY if x is None else format(x, spec)


TIME = field("ms_median", duration)
TFLOPS = field("tflops", rate)
GBYTES = field("gbytes_per_s", rate)
RATIO = field("ratio_to_jnp_dot", factor)


def geomean(ratios: Sequence[float]) -> float | None:
  """The geometric mean; None of nothing."""
  return statistics.geometric_mean(ratios) if ratios else None


def summarized(
  how: Callable[[list[float]], float | None], value: Value, text: Text = factor
) -> Text:
  """What a column has of several rows: their values' mean, min, or max."""

  def of_rows(rows: Iterable[RowDict]) -> str:
    values = [x for row in rows if (x := value(row)) is not None]
    return text(how(values)) if values else EMPTY

  return of_rows


def extreme(end: Callable[..., RowDict], value: Value, text: Text) -> Text:
  """What a column has of several rows: the words of the min or max of them."""

  def of_rows(rows: Iterable[RowDict]) -> str:
    found = [row for row in rows if value(row) is not None]
    return text(end(found, key=value)) if found else EMPTY

  return of_rows


def failed(rows: Iterable[RowDict]) -> str:
  """How many rows are of wrong results."""
  return str(sum(row["passed"] is False for row in rows))


def suite(row: RowDict) -> str:
  """A row's suite, with its dtype if that is not bfloat16."""
  dtype = "" if row["dtype"] == "bfloat16" else f" {row['dtype']}"
  return row["suite"] + dtype


def shape(row: RowDict) -> str:
  """ "4096x8192x4096": M x N x K."""
  return f"{row['m']}x{row['n']}x{row['k']}"


def short_name(row: RowDict) -> str:
  """A row's GPU for a column: of an "NVIDIA H100 80GB HBM3" "H100"."""
  return (row["device"] or "unknown").removeprefix("NVIDIA ").split()[0]


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


def provenance_line(rows: Sequence[RowDict]) -> str:
  """Where the rows come from, in two sentences; several values as a list."""
  values = functools.partial(_values, rows)
  return (
    f"{made_on(rows)} Inputs {values('distribution')}, seed {values('seed')};"
    f" median of {values('repeats')} calls after {values('warmup')}, L2"
    " flushed."
  )


def made_on(rows: Sequence[RowDict]) -> str:
  """Device, versions, commit and days of rows, in a sentence."""
  values = functools.partial(_values, rows)
  return (
    f"{values('device')}; driver {values('driver')}, CUDA {values('cuda')},"
    f" jax {values('jax')}, jaxlib {values('jaxlib')}; commit"
    f" {values('commit', 10)}; {values('utc', 10)}."
  )


def _values(
  rows: Sequence[RowDict], name: str, length: int | None = None
) -> str:
  found = {str(row[name])[:length] for row in rows if row[name] is not None}
  return ", ".join(sorted(found)) or "unknown"
