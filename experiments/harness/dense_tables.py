"""Rows of the dense ops as tables: by suite, and host times."""

from collections.abc import Iterable, Sequence
import statistics

from experiments.harness import tables, timing
from experiments.harness.tables import RowDict

# The suite whose speed says more of the baseline's copies than of the op.
UNALIGNED = "unaligned"


def label(fields: RowDict) -> str:
  """A case in words, from a row: "NT 32 x 1024x1024x128 bias+gelu"."""
  words = [tables.shape(fields)]
  if fields.get("batch", 1) > 1:
    words.insert(0, f"{fields['batch']} x")
  if fields.get("layout", "NN") != "NN":
    words.append(fields["layout"])
  if fields["kernel"] != "matmul":
    words.append(fields["kernel"].removeprefix("matmul_"))
  if fields.get("epilogue", "none") != "none":
    words.append(fields["epilogue"])
  if fields.get("out_dtype", fields["dtype"]) != fields["dtype"]:
    words.append(f"to {fields['out_dtype']}")
  return " ".join(words)


def cases(rows: Iterable[RowDict]) -> list[RowDict]:
  """The rows that compare an op with its baseline."""
  return [row for row in rows if "epilogue" in row]


def compared(rows: Iterable[RowDict]) -> list[RowDict]:
  """The cases that were timed."""
  return [r for r in cases(rows) if r["ratio_to_jnp_dot"] is not None]


def ratio(row: RowDict) -> float | None:
  """The baseline's time over the op's; None if they were not timed."""
  return row["ratio_to_jnp_dot"]


def tuned_ratio(row: RowDict) -> float | None:
  """The baseline's time over that of the fastest config measured."""
  if row.get("tuned_ms_median") is None:
    return None
  return row["baseline_ms_median"] / row["tuned_ms_median"]


def before_ratio(row: RowDict) -> float | None:
  """The time of another checkout's op over this one's."""
  if row.get("before_ms_median") is None:
    return None
  return row["before_ms_median"] / row["ms_median"]


def summary(rows: Sequence[RowDict]) -> tables.Table:
  """Header and cells: the ratios of each suite, and of all."""
  rows = cases(rows)
  suites = [*tables.grouped(rows, tables.suite).values()]
  if len(suites) > 1:
    suites.append(rows)

  columns = {
    "suite": lambda suite: "all" if suite is rows else tables.suite(suite[0]),
    "cases": lambda suite: str(len(suite)),
    "geomean": tables.summarized(tables.geomean, ratio),
    "worst": tables.summarized(min, ratio),
    "worst case": tables.extreme(min, ratio, label),
    "best": tables.summarized(max, ratio),
    "best case": tables.extreme(max, ratio, label),
  }
  if any(tuned_ratio(row) is not None for row in rows):
    columns["tuned"] = tables.summarized(tables.geomean, tuned_ratio)
  if any(before_ratio(row) is not None for row in rows):
    columns["before"] = tables.summarized(tables.geomean, before_ratio)
    columns["before, worst"] = tables.summarized(min, before_ratio)
  return tables.pivot(suites, columns | {"failed": tables.failed})


def by_seed(rows: Iterable[RowDict]) -> str:
  """Random problems, a line for each draw: how its rows compare.

  Args:
    rows: of one device, in the order in which they were measured.
  """
  draws = tables.grouped(
    compared(rows), lambda row: (row["seed"], row["commit"])
  )

  def below(least: float, value: tables.Value) -> tables.Text:
    return tables.summarized(
      lambda ratios: sum(x < least for x in ratios), value, str
    )

  columns = {
    "seed": lambda draw: str(draw[0]["seed"]),
    "commit": lambda draw: draw[0]["commit"][:10],
    "cases": lambda draw: str(len(draw)),
    "geomean": tables.summarized(tables.geomean, ratio),
    "below 0.95x": below(0.95, ratio),
    "worst": tables.summarized(min, ratio),
    "worst case": tables.extreme(min, ratio, label),
  }
  if any(tuned_ratio(row) for row in rows):
    columns |= {
      "tuned": tables.summarized(tables.geomean, tuned_ratio),
      "tuned, below 0.95x": below(0.95, tuned_ratio),
      "tuned, worst": tables.summarized(min, tuned_ratio),
    }
  return tables.markdown(*tables.pivot(draws.values(), columns))


def measured_parts(row: RowDict) -> list[str]:
  """What was measured of a case, as parts of its line."""
  parts = [row["implementation"]]
  if row["ms_median"] is not None:
    parts += [
      f"{tables.TIME(row):>8}",
      f"{tables.TFLOPS(row):>5} TFLOP/s",
      f"{tables.GBYTES(row):>5} GB/s",
      f"{tables.RATIO(row):>6} of jnp",
    ]
    if (tuned := tuned_ratio(row)) is not None:
      parts.append(f"tuned {tables.factor(tuned)}")
    if (ratio_ := before_ratio(row)) is not None:
      parts.append(f"{tables.factor(ratio_)} of before")
  if (wall := row.get("wall_ms_median")) is not None:
    baseline = row["baseline_wall_ms_median"]
    parts.append(
      f"wall {tables.duration(wall)}, jnp {tables.duration(baseline)}"
    )
  return parts


def host_line(row: RowDict) -> str:
  """A row of the suites "latency" and "bandwidth", as a line."""
  name = f"{row['kernel']} {tables.shape(row)}"
  if row["suite"] == "bandwidth":
    return f"{name}  {tables.GBYTES(row)} GB/s"
  return f"{name}  {', '.join(map(' '.join, host_times(row).items()))}"


def host_times(row: RowDict) -> dict[str, str]:
  """What the host waits for in a row of the suite "latency", by whose it is."""
  scales = {"first_call_ms": 1.0, "dispatch_us": 1e-3, "choose_us": 1e-3}
  return {
    whose: tables.duration(row[prefix + name] * scale)
    for name, scale in scales.items()
    for whose, prefix in (("pallas_gemm", ""), ("jnp.dot", "baseline_"))
    if prefix + name in row
  }


def markdown(rows: Sequence[RowDict]) -> str:
  """The page's tables of one device.

  Args:
    rows: the latest rows of the device.
  """
  parts = [
    tables.provenance_line(compared(rows)),
    tables.markdown(*summary(rows)),
    "Speed over the same expression in `jax.numpy` under `jax.jit`: time of"
    " the baseline over time of the op, interleaved, in one run.",
    losses(compared(rows)),
    _wall(rows),
    _small_m(rows),
    _latency(rows),
  ]
  return "\n\n".join(part for part in parts if part)


def losses(rows: Sequence[RowDict]) -> str:
  """What a mean over compared cases hides, in two sentences; "" of none."""
  if not (ratios := [*map(ratio, rows)]):
    return ""
  slower = sum(x < 1 for x in ratios)
  median = f"median {tables.factor(statistics.median(ratios))}"
  others = [ratio(row) for row in rows if row["suite"] != UNALIGNED]
  if others and len(others) < len(ratios):
    mean = tables.factor(tables.geomean(others))
    median = f"without `{UNALIGNED}`: {mean}; {median}"
  return (
    f"{_few(slower)} of {len(ratios)} cases {'is' if slower < 2 else 'are'}"
    f" slower. {median[0].upper()}{median[1:]}."
  )


def _few(count: int) -> str:
  return str(count) if count else "None"


def _wall(rows: Sequence[RowDict]) -> str:
  """How short cases compare by the host's clock, in some sentences."""
  rows = [row for row in compared(rows) if row.get("wall_ms_median")]
  if not rows:
    return ""
  ratios = [r["baseline_wall_ms_median"] / r["wall_ms_median"] for r in rows]
  kernels = tables.geomean([*map(ratio, rows)])
  lowest = min(ratios)
  more = sum(
    len(row["kernel_names"]) > len(row["baseline_kernel_names"]) for row in rows
  )

  def median(name: str) -> str:
    return tables.duration(statistics.median(row[name] for row in rows))

  return (
    f"That is kernel time. Where one of the two takes less than"
    f" {timing.WALL_BELOW_MS * 1e3:.0f} µs, wall time is taken too, from call"
    f" to result: of these {len(rows)} cases the geomean is"
    f" {tables.factor(kernels)} by kernel time and"
    f" {tables.factor(tables.geomean(ratios))} by wall time, by which"
    f" {sum(x < 1 for x in ratios)} are slower, at worst"
    f" {tables.factor(lowest)} ({label(rows[ratios.index(lowest)])}). At the"
    f" median a call takes {median('wall_ms_median')} with"
    f" {median('ms_median')} of kernels,"
    f" `jnp`'s {median('baseline_wall_ms_median')} with"
    f" {median('baseline_ms_median')}: the rest is the host's and the launch's."
    f" {_few(more)} of these cases {'launches' if more < 2 else 'launch'} more"
    f" kernels than `jnp`."
  )


def small_m(rows: Iterable[RowDict]) -> list[RowDict]:
  """Rows of token batches that are bound by reading the weights."""
  return [
    row
    for row in compared(rows)
    if row["suite"].startswith("llama") and row["m"] <= 128
  ]


def _small_m(rows: Sequence[RowDict]) -> str:
  """How near the small token batches come to a copy's rate, in a sentence."""
  shares = [
    row["gbytes_per_s"] / row["copy_gbytes_per_s"]
    for row in small_m(rows)
    if row.get("copy_gbytes_per_s")
  ]
  if not shares:
    return ""
  rates = [row["copy_gbytes_per_s"] for row in small_m(rows)]
  return (
    f"Llama's weights times 1 to 128 tokens: {min(shares):.0%} to"
    f" {max(shares):.0%}, median {statistics.median(shares):.0%}, of the rate"
    f" of a copy ({statistics.median(rates):.0f} GB/s)."
  )


def _latency(rows: Sequence[RowDict]) -> str:
  """What the host waits for, as a table; "" if that was not measured."""
  what = {
    "first_call": "first call under `jit`: traced, compiled, run",
    "eager_call": "a call outside `jit`, until it returns",
    "model.choose": "the cost model's choice of a config",
  }
  columns = {
    "host time": lambda row: what[row["kernel"]],
    "MxNxK": tables.shape,
    "pallas_gemm": lambda row: host_times(row)["pallas_gemm"],
    "jnp.dot": lambda row: host_times(row).get("jnp.dot", tables.EMPTY),
  }
  found = [row for row in rows if row.get("suite") == "latency"]
  return tables.markdown(*tables.pivot(found, columns)) if found else ""
