"""Rows as tables: on a terminal, and in pages between markers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import pathlib
import statistics
from typing import Any

from experiments.harness import published
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware, roofline
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract

RowDict = Mapping[str, Any]
EMPTY = "-"
# Columns of words; the others hold numbers.
WORDS = ("kernel", "MxNxK", "dtype", "check")


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
  """A ratio: "1.031x", "0.103x", "10.6x", "1564x"."""
  if x is None:
    return EMPTY
  return f"{_digits(x)}x" if x >= 10 else f"{x:.3f}x"


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


def label(row: RowDict) -> str:
  """The rung's number, with the letter of a variant; "" of what is none."""
  if row["number"] is None:
    return ""
  return f"{row['number']}{row.get('variant', '')}"


def peak_flops(row: RowDict, gpu: hardware.Gpu) -> float:
  """Peak FLOP/s of the unit that a row's kernel computes on."""
  default = (row["config"] or {}).get("precision") == "DEFAULT"
  tf32 = default and row["dtype"] == "float32"
  return roofline.peak_flops(gpu, "tf32" if tf32 else row["dtype"])


def of_peak(row: RowDict) -> str:
  """Throughput in per cent of its unit's peak; "-" on an unknown GPU."""
  try:
    gpu = hardware.lookup(row["device"] or "")
  except ValueError:
    return EMPTY
  if row["tflops"] is None:
    return EMPTY
  return f"{1e14 * row['tflops'] / peak_flops(row, gpu):.1f}"


def over_rung_before(row: RowDict, rows: Iterable[RowDict]) -> float | None:
  """How many times faster than the rung before on the same problem.

  A variant is compared with the rung that it belongs to. None if either was
  not timed; also from rung 8 to 9, where the arithmetic changes and with it
  the dtype.
  """
  if row["number"] is None:
    return None
  number = row["number"] - (0 if row.get("variant") else 1)
  return _over(row, rows, number, row["dtype"])


def starts(dtypes: Iterable[str] | None = None) -> list[contract.Rung]:
  """Rungs that speeds count from: the first, and the first of a precision.

  Args:
    dtypes: leaves out those of precisions that none of these belong to.
  """
  first = ladder_lib.LADDER[0]
  found = {rung.dtypes: rung for rung in reversed(ladder_lib.LADDER)}
  return [
    rung
    for rung in reversed(found.values())
    if dtypes is None or rung is first or set(dtypes) & set(rung.dtypes)
  ]


def over_start(
  row: RowDict, rows: Iterable[RowDict], start: contract.Rung
) -> float | None:
  """How many times faster than one of `starts` at the same size.

  The first rung computes in its own dtype, whatever the row's.
  """
  if row["dtype"] in start.dtypes:
    return _over(row, rows, start.number, row["dtype"])
  if start is ladder_lib.LADDER[0]:
    return _over(row, rows, start.number, start.dtypes[0])
  return None


def _over(row, rows, number: int, dtype: str) -> float | None:
  """Speed over a rung (none of its variants) on the same sizes."""
  same = {name: row[name] for name in ("m", "n", "k", "alpha", "beta")}
  other = rows_lib.find(rows, number=number, variant=None, dtype=dtype, **same)
  if other is None or None in (other["ms_median"], row["ms_median"]):
    return None
  return other["ms_median"] / row["ms_median"]


def ordered(rows: Iterable[RowDict]) -> list[RowDict]:
  """Rungs by number, each before its variants, then the others as they came."""

  def rank(row: RowDict) -> tuple:
    number = row["number"]
    return number is None, number or 0, row.get("variant", "")

  return sorted(rows, key=rank)


def newest(
  rows: Iterable[RowDict], failed: bool = False
) -> list[dict[str, Any]]:
  """The timed rows of the commit that was measured last, each kernel's last.

  Args:
    rows: of one device.
    failed: take also those of results that failed their check, without times.
  """
  rows = list(rows)
  timed = [row for row in rows if row["ms_median"] is not None]
  if not timed:
    return []
  commit = max(timed, key=lambda row: row["utc"])["commit"]
  return rows_lib.latest(
    row
    for row in rows
    if row["commit"] == commit
    and (row["ms_median"] is not None or (failed and row["passed"] is False))
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
  first = starts({row["dtype"] for row in rows})
  header = [
      "#", "kernel", "MxNxK", "dtype", "time", "p25-p75", "TFLOP/s",
      "% of peak", "GB/s", "x jnp.dot", "x before",
      *(f"x rung {rung.label}" for rung in first), "error/bound", "check",
  ]  # fmt: skip
  cells = []
  for row in rows:
    spread = EMPTY
    if row["ms_median"] is not None:
      spread = f"{duration(row['ms_p25'])} - {duration(row['ms_p75'])}"
    cells.append(
      [
        label(row),
        row["kernel"],
        shape(row),
        row["dtype"],
        duration(row["ms_median"]),
        spread,
        rate(row["tflops"]),
        of_peak(row),
        rate(row["gbytes_per_s"]),
        factor(row["ratio_to_jnp_dot"]),
        factor(over_rung_before(row, rows)),
        *(factor(over_start(row, rows, rung)) for rung in first),
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


def ladder_markdown(devices: Sequence[Sequence[RowDict]]) -> str:
  """The ladder's tables: one a problem, with columns of each device.

  Args:
    devices: timed rows of each; speeds over other rungs are of the first.
  """
  parts = [provenance_line(rows) for rows in devices]
  everything = [row for rows in devices for row in rows]
  for group in problems(rows_lib.latest(everything)):
    parts += [f"**{title(group[0])}**", _problem_table(group, devices)]
  parts.append(
    "*% of peak*: TFLOP/s over the peak of the unit used: CUDA cores for"
    " float32, tensor cores for 16 bits and TF32. *x jnp.dot*: speed over it,"
    " interleaved in one run; its own row is itself against itself, so the"
    " distance from 1.00x is the noise. *x before*: speed over the rung before;"
    f" of a variant (a letter after the number), over its rung. {legend()}"
  )
  return "\n\n".join(parts)


def title(row: RowDict) -> str:
  """The problem of a row, in full."""
  sizes = " x ".join(str(row[name]) for name in "mnk")
  return f"{expression(row)}, M x N x K = {sizes}, {row['dtype']}"


def legend() -> str:
  """What the columns of cumulative speed are."""
  return " ".join(
    f"*x rung {rung.label}*: speed over {rung.name} in {rung.dtypes[0]} at the"
    " same size."
    for rung in starts()
  )


def _problem_table(
  group: Sequence[RowDict], devices: Sequence[Sequence[RowDict]]
) -> str:
  """One problem: a row for each kernel of `group`, columns of each device."""
  names = [row["kernel"] for row in group]
  dot = next((name for name in names if is_dot(name)), "jnp.dot")
  first = starts({group[0]["dtype"]})
  numbers = [row["number"] for row in group if row["number"] is not None]
  beside = next(filter(None, map(published.beside, numbers)), None)
  gpus = [short_name(rows[0]["device"] or "unknown") for rows in devices]
  header = ["#", "kernel"]
  for gpu in gpus:
    columns = ("time", "TFLOP/s", "% of peak", f"x {dot}")
    header += [f"{gpu} {column}" for column in columns]
  relative = ("before", *(f"rung {rung.label}" for rung in first))
  header += [f"{gpus[0]} x {column}" for column in relative]
  if beside is not None:
    header.append(f"published, x cuBLAS ({beside.source}, {beside.gpu})")
  cells = []
  for row in group:
    cell = [label(row), row["kernel"]]
    key = {
      name: row.get(name) for name in (*rows_lib.PROBLEM_FIELDS, "variant")
    }
    found = [rows_lib.find(rows, **key) for rows in devices]
    for mine in found:
      cell += _columns(mine) if mine else 4 * [EMPTY]
    mine = found[0] or dict(row, ms_median=None)
    cell.append(factor(over_rung_before(mine, devices[0])))
    cell += [factor(over_start(mine, devices[0], rung)) for rung in first]
    if beside is not None:
      rung = row["number"] is not None and not row.get("variant")
      cell.append(factor(beside.of_cublas(row["number"]) if rung else None))
    cells.append(cell)
  return markdown(header, cells, [name for name in header if name != "kernel"])


def _columns(row: RowDict) -> list[str]:
  return [
    duration(row["ms_median"]),
    rate(row["tflops"]),
    of_peak(row),
    factor(row["ratio_to_jnp_dot"]),
  ]


def is_dot(kernel: str) -> bool:
  """Whether a row's kernel is a baseline."""
  return kernel.startswith("jnp.dot")


def short_name(device: str) -> str:
  """A GPU's name for a column: "NVIDIA H100 80GB HBM3" is "H100"."""
  return device.removeprefix("NVIDIA ").split()[0]


def sweep_markdown(rows: Sequence[RowDict]) -> str:
  """Every kernel over the size, of one device: by precision, four tables.

  Args:
    rows: of one device; those without a time failed their check.
  """
  parts = [provenance_line([x for x in rows if x["ms_median"] is not None])]
  precisions: dict[str, list[RowDict]] = {}
  for row in rows:
    name = f"{expression(row)}, {row['dtype']}"
    precisions.setdefault(name, []).append(row)
  for name, group in precisions.items():
    show = {
      "time": lambda row: duration(row["ms_median"]),
      "GFLOP/s": lambda row: rate(1e3 * row["tflops"]),
      "GB/s": lambda row: rate(row["gbytes_per_s"]),
    }
    # Here the speed over the first rung of the same precision.
    for rung in starts({group[0]["dtype"]})[-1:]:
      show[f"speed over rung {rung.label}, {rung.name}"] = (
        lambda row, rung=rung: factor(over_start(row, rows, rung))
      )
    for quantity, cell in show.items():
      parts.append(f"**{name}: {quantity}**")
      parts.append(_over_sizes(group, cell))
  parts.append(
    "*GB/s*: A and B read once and the result written once, over the time;"
    " what a kernel moves beyond that does not count. -: left out, since one"
    " call would take too long. FAILED: the result did not pass its check at"
    " that commit, and was not timed."
  )
  return "\n\n".join(parts)


def _over_sizes(rows: Sequence[RowDict], cell: Callable[[RowDict], str]) -> str:
  """A row for each kernel, a column for each size."""
  sizes = sorted(
    {(row["m"], row["n"], row["k"]) for row in rows}, key=math.prod
  )
  header = ["#", "kernel"]
  header += ["x".join(map(str, dict.fromkeys(size))) for size in sizes]
  kernels = {row["kernel"]: label(row) for row in ordered(rows)}

  def shown(row: RowDict | None) -> str:
    if row is None:
      return EMPTY
    return cell(row) if row["ms_median"] is not None else verdict(row)

  cells = []
  for kernel, number in kernels.items():
    found = [
      rows_lib.find(rows, kernel=kernel, m=m, n=n, k=k) for m, n, k in sizes
    ]
    cells.append([number, kernel, *map(shown, found)])
  return markdown(header, cells, ["#", *header[2:]])


def published_markdown() -> str:
  """The table of other people's ladders."""
  header = ["source", "GPU, problem, unit", "steps"]
  return markdown(header, published.cells(), ())


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
