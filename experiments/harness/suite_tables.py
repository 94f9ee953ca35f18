"""Tables of the suites of 8 bits and of float32."""

from collections.abc import Iterator, Sequence

from experiments.harness import tables
from experiments.harness.tables import RowDict, Table


def eight_bits(rows: Sequence[RowDict]) -> Iterator[Table]:
  """Products of 8 bits beside ours of 16 and XLA's; then layers' passes."""
  cells = []
  for row, wide in _with_wide(rows):
    kind = row["epilogue"] or "none"
    kind = f"int8, {kind}" if row["dtype"] == "int8" else kind
    ours = row["arms"]["pallas_gemm"]
    peers = [wide]
    peers += [x for arm, x in row["arms"].items() if arm.startswith("xla")]
    gains = [tables.factor(x["ms_median"] / ours["ms_median"]) for x in peers]
    gains = [*gains, tables.EMPTY][:2]
    cells.append([_product(row), kind, f"{ours['tflops']:.0f}", *gains])
  yield ["product", "scales", "TFLOP/s", "of bfloat16", "of XLA"], cells
  for layer in (row for row in rows if row["suite"] == "layer"):
    best = layer["arms"]["pallas_gemm bf16"]["ms_median"]
    times = {arm: x["ms_median"] for arm, x in layer["arms"].items()}
    cells = [
      [arm, tables.duration(ms), tables.factor(best / ms)]
      for arm, ms in times.items()
    ]
    name = "experts" if layer["kernel"] == "moe" else "gated MLP"
    yield [f"{name}, forward and backward", "time", "of bfloat16"], cells


def eight_bits_gains(rows: Sequence[RowDict]) -> list[float]:
  """Speed over ours of 16 bits, of dense products with scales by rows."""
  return [
    wide["ms_median"] / row["arms"]["pallas_gemm"]["ms_median"]
    for row, wide in _with_wide(rows)
    if (row["suite"], row["epilogue"]) == ("dense", "row")
  ]


def _with_wide(
  rows: Sequence[RowDict],
) -> Iterator[tuple[RowDict, RowDict]]:
  """Products of 8 bits, each with the same of 16."""
  fields = "m", "n", "k", "groups", "pass", "layout"
  at = lambda row: tuple(row.get(x) for x in fields)  # noqa: E731
  wide = {at(row): row for row in rows if row["dtype"] == "bfloat16"}
  for row in rows:
    if row["dtype"] != "bfloat16" and at(row) in wide:
      yield row, wide[at(row)]


def float32(rows: Sequence[RowDict]) -> Table:
  """Products of float32 beside XLA's."""
  cells = []
  for row in rows:
    if row["suite"] not in ("dense", "grouped", "layer"):
      continue
    ms = {arm: x["ms_median"] for arm, x in row["arms"].items()}
    ours, theirs, *_ = ms.values()
    x6, kept = ms.get("xla x6"), ms.get("pallas_gemm, B split")
    tflops = row["arms"]["pallas_gemm"]["tflops"]
    cells.append([_product(row), row["epilogue"], f"{tflops:.0f}"])
    for one, other in ((theirs, ours), (x6, ours), (theirs, kept)):
      gain = tables.factor(one / other) if one and other else tables.EMPTY
      cells[-1].append(gain)
  header = ["product", "precision", "TFLOP/s", "of XLA", "of XLA's x6"]
  return [*header, "B split, of XLA"], cells


def float32_gains(rows: Sequence[RowDict]) -> list[float]:
  """Speed over XLA's, of drawn products of float32 at HIGHEST."""
  return [
    row["arms"]["xla"]["ms_median"] / row["arms"]["pallas_gemm"]["ms_median"]
    for row in rows
    if row["suite"] == "unseen"
  ]


def drawn(rows: Sequence[RowDict]) -> str:
  """How drawn products of float32 compare, in a sentence."""
  found = float32_gains(rows)
  gains = map(tables.factor, (tables.geomean(found), min(found), max(found)))
  mean, worst, best = gains
  return (
    f"{len(found)} drawn products at HIGHEST have {mean} of XLA's speed in the"
    f" geometric mean, {worst} at worst, {best} at best."
  )


def float32_errors(rows: Sequence[RowDict]) -> Table:
  """Errors of sums of float32, by length and who adds them up."""
  arms = "pallas_gemm HIGHEST", "xla HIGHEST", "xla x6"
  arms += "pallas_gemm x3", "xla x3"
  cells = [
    [row["distribution"], str(row["k"])]
    + [f"{row['arms'][arm]['frobenius']:.1e}" for arm in arms]
    for row in rows
    if row["suite"] == "errors"
  ]
  return ["elements", "K", *arms], cells


def _product(row: RowDict) -> str:
  """Sizes, groups, and how operands are stored if another way is usual."""
  name = f"{row['m']}x{row['n']}x{row['k']}"
  if row.get("groups"):
    return f"{name} in {row['groups']}, {row['pass']}"
  if row["kernel"] == "newton_schulz":
    return f"a step of Newton and Schulz, {row['m']}²"
  if row["suite"] == "layer":
    return f"MLP of {name}, forward and backward"
  usual = "NN" if row["dtype"] == "float32" else "NT"
  return name + (f" {row['layout']}" if row["layout"] != usual else "")
