"""Tables of the ops' results and of published ladders, none of them wide."""

from collections.abc import Iterable, Iterator, Sequence
import functools
import re

from docs.extensions import lookup, results
from experiments.harness import (
  apart,
  dense_tables,
  ladder_tables,
  ragged_cases,
  ragged_tables,
  suite_tables,
  tables,
)  # fmt: skip
from experiments.harness import rows as rows_lib
from pallas_gemm import ladder

COLUMNS = 8
_OPS = {"dense": dense_tables.markdown, "ragged": ragged_tables.markdown}
_LIBRARIES = set(ragged_cases.PEERS) - {ragged_cases.FUSED}  # off by default
_TABLE = re.compile(r"(?:^\|.*\|\n?)+", re.M)


def random(gpu: str) -> str:
  """Random problems on a GPU, "h100" say, by the seed that drew them."""
  return narrow(dense_tables.by_seed(results.read(gpu, "dense_unseen")))


def ops(text: str) -> str:
  """The ops against XLA on a GPU: "dense h100" or "ragged h100"."""
  name, gpu = lookup.words(text, 2, "ops and a GPU")
  markdown = lookup.pick(_OPS, name, "ops")
  return narrow(markdown(rows_lib.latest(results.read(gpu, name))))


def published_ladders(_: str) -> str:
  """What others published, a ladder a row."""
  return ladder_tables.published_markdown()


# Targets whose code takes nearly the same stand in one column.
_TARGETS = {
  "7.5": ["75"],
  "8.0": ["80"],
  "8.6, 8.9": ["86", "89"],
  "9.0": ["90a"],
  "10.0, 10.3": ["100a", "103a"],
  "12.0, 12.1": ["120a", "121a"],
}


def targets(_: str) -> str:
  """Registers a thread of each rung on each kind of GPU, by the newest JAX."""
  rows = rows_lib.read(rows_lib.RESULTS / "targets.jsonl")
  newest = max(rows, key=lambda x: [int(part) for part in x["jax"].split(".")])
  rows = [row for row in rows if row["jax"] == newest["jax"]]
  found = {(row["rung"], row["target"]): row.get("registers") for row in rows}
  cells = []
  for label in dict.fromkeys(row["rung"] for row in rows):
    cells.append([f"{label} {ladder.find(label).name}"])
    for column in _TARGETS.values():
      taken = dict.fromkeys(found.get((label, x)) for x in column)
      cells[-1].append(" / ".join(str(x or tables.EMPTY) for x in taken))
  text = tables.markdown(["rung", *_TARGETS], cells, [*_TARGETS])
  spilled = sum(row.get("spill_bytes") or 0 for row in rows)
  notes = f"JAX {newest['jax']}; bytes spilled by all of them: {spilled}."
  return f"{text}\n\n{notes}"


def ampere(gpu: str) -> str:
  """Rungs of 4096 cubed on a GPU: its own code, and an A100's, in two ways."""
  cells = []
  for row in results.read(gpu, "ampere"):
    if row["m"] == 4096:
      arms = (row["kernel"], "lowered for 8.0", "sm_80 PTX")
      times = [row["arms"][arm]["ms_median"] for arm in arms]
      name = f"{ladder.find(row['kernel']).label} {row['kernel']}"
      cells.append([name, *map(tables.rate, times)])
  header = ["rung, ms", "own code", "lowered for 8.0", "PTX of sm_80"]
  return tables.markdown(header, cells, header[1:])


def second_run(gpu: str) -> str:
  """How far a release's second run on a GPU lies from the first."""
  if rows := results.read(gpu, "apart"):
    return _markdown(apart.table(rows))
  return "There is no second run of this release yet."


def eight_bits(gpu: str) -> str:
  """Products of 8 bits beside ours of 16 and XLA's; then layers' passes."""
  found = suite_tables.eight_bits(results.read(gpu, "eight_bits"))
  return "\n\n".join(_markdown(table) for table in found)


def float32(gpu: str) -> str:
  """Products of float32 beside XLA's."""
  rows = results.read(gpu, "float32")
  table = _markdown(suite_tables.float32(rows))
  return f"{table}\n\n{suite_tables.drawn(rows)}"


def float32_errors(gpu: str) -> str:
  """Errors of sums of float32, by length and who adds them up."""
  rows = results.read(gpu, "float32")
  return _markdown(suite_tables.float32_errors(rows))


def _markdown(table: tables.Table) -> str:
  header, cells = table
  return tables.markdown(header, cells, tables.numeric(header))


def ops_overview(gpu: str) -> str:
  """What an op computes, its baseline, and how much faster; then the losses.

  Lines and sentences of what has no rows are left out; 8 bits and float32, if
  theirs are of another commit than 16 bits.
  """
  read = functools.partial(results.read, gpu)
  dense = dense_tables.compared(rows_lib.latest(read("dense")))
  ragged = ragged_tables.timed(rows_lib.latest(read("ragged")))
  mixtral, sizes, groups = (
    [row for row in ragged if row["suite"] == x]
    for x in ("mixtral", "sizes", "unseen")
  )
  fused = [row for row in dense if row["epilogue"] != "none"]
  drawn = dense_tables.compared(read("dense_unseen"))
  drawn = [row for row in drawn if row["commit"] == drawn[-1]["commit"]]
  rungs = ladder_tables.own(results.measured(gpu, "ladder"))
  commits = {row["commit"] for row in dense}
  eight_bits, float32 = (
    [row for row in read(name) if {row["commit"]} == commits]
    for name in ("eight_bits", "float32")
  )
  cells = []
  for op, baseline, speeds in (
    ("`matmul`, all suites", "`jnp`", map(dense_tables.ratio, dense)),
    ("`matmul` with bias, C, activation", "`jnp`",
     map(dense_tables.ratio, fused)),
    ("`matmul`, 1 to 128 rows (Llama)", "`jnp`",
     map(dense_tables.ratio, dense_tables.small_m(dense))),
    ("`matmul`, random problems", "`jnp`", map(dense_tables.ratio, drawn)),
    ("`matmul` in float32, `\"highest\"`, random", "`jnp`",
     suite_tables.float32_gains(float32)),
    ("`matmul` in 8 bits, large, scales by rows", "`matmul`, 16 bits",
     suite_tables.eight_bits_gains(eight_bits)),
    ("`ragged_dot`, Mixtral, and gradients", "`lax.ragged_dot`",
     _over(mixtral, ragged_cases.LAX)),
    ("the same", "best of JAX, tokamax, cuequivariance",
     _over(mixtral, *_LIBRARIES)),
    ("`ragged_dot`, random", "the same", _over(groups, *_LIBRARIES)),
  ):  # fmt: skip
    if speeds := list(speeds):
      figures = tables.geomean(speeds), min(speeds), max(speeds)
      figures = map(tables.factor, figures)
      cells.append([op, baseline, str(len(speeds)), *figures])
  header = ["op", "beside", "cases", "geomean", "worst", "best"]
  notes = _losses(dense, drawn, mixtral, sizes)
  notes.append(
    tables.made_on([*rungs, *dense, *drawn, *mixtral, *sizes, *groups])
  )
  return f"{tables.markdown(header, cells)}\n\n{' '.join(notes)}"


def _losses(
  dense: Sequence[results.RowDict],
  drawn: Sequence[results.RowDict],
  mixtral: Sequence[results.RowDict],
  sizes: Sequence[results.RowDict],
) -> list[str]:
  """Sentences on what the overview's lines don't say, none without rows."""
  notes = [f"`matmul`: {dense_tables.losses(dense)}"] if dense else []
  if drawn:
    slow = sum(dense_tables.ratio(row) < 0.95 for row in drawn)
    notes.append(f"{slow} of {len(drawn)} random ones are below 0.95x.")
  if both := dense + drawn:
    left = sum(row["implementation"] == "xla" for row in both)
    notes.append(f"{left} of all {len(both)} are left to XLA.")
  if walls := [
    row["baseline_wall_ms_median"] / row["wall_ms_median"]
    for row in dense
    if row.get("wall_ms_median")
  ]:
    wall = tables.factor(tables.geomean(walls))
    notes.append(f"Calls below 20 µs: {wall} by wall time.")
  if _over(mixtral, ragged_cases.LAX):
    notes.append("`lax.ragged_dot` multiplies all rows with every group.")
  absent = _LIBRARIES - {arm for row in mixtral for arm in row["arms"]}
  if _over(mixtral, *_LIBRARIES):
    absent = [x for x in sorted(absent) if "tuned" not in x]
    notes += [f"Mixtral's rows lack `{x}`." for x in absent]
  shares = [
    ragged_tables.share(row)
    for row in sizes
    if 64 <= ragged_tables.rows_a_group(row) <= 384
  ]
  if known := [share for share in shares if share is not None]:
    least = f"at least {min(known):.0%} of the roofline"
    notes.append(f"Groups of 64 to 384 rows: {least}.")
  return notes


def _over(rows: Iterable[results.RowDict], *arms: str) -> list[float]:
  """The least speed over arms that have a time, of each case."""
  of_cases = (
    [ragged_tables.speed_over(row, arm) for arm in arms] for row in rows
  )
  found = (min(filter(None, speeds), default=None) for speeds in of_cases)
  return [speed for speed in found if speed is not None]


def narrow(text: str) -> str:
  """Markdown whose wide tables are cut in parts, one below the other.

  Parts are equal, if at most one more than needed makes them so. Each begins
  with the columns that say what a line is of. Columns that are empty, or all
  zero, are left out, and lines that have nothing.
  """
  return _TABLE.sub(lambda match: "\n\n".join(_parts(match[0])) + "\n", text)


def _parts(table: str) -> Iterator[str]:
  header, _, *cells = (
    line.strip("| \n").split(" | ") for line in table.splitlines()
  )
  if len(header) <= COLUMNS:
    yield table.strip()
    return
  first = 1
  while header[first] in tables.WORDS:
    first += 1

  def says(columns: Iterable[int], row: Sequence[str]) -> bool:
    return any(row[i] not in (tables.EMPTY, "0") for i in columns)

  every = range(first, len(header))
  kept = [i for i in every if any(says([i], row) for row in cells)]
  least = -(-len(kept) // (COLUMNS - first)) or 1
  fit = (n for n in (least, least + 1) if len(kept) % n == 0)
  size = -(-len(kept) // next(fit, least)) or 1
  for start in range(0, len(kept), size):
    part = kept[start : start + size]
    lines = [row for row in (header, *cells) if says(part, row)]
    picked = [[*row[:first], *(row[i] for i in part)] for row in lines]
    yield tables.markdown(picked[0], picked[1:])
