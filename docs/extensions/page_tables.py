"""The tables of README, for pages, and of random problems."""

from collections.abc import Sequence
from typing import Any

from docs.extensions import lookup, results
from experiments.harness import (
  dense_tables,
  ladder_tables,
  ragged_cases,
  ragged_tables,
  tables,
)
from experiments.harness import rows as rows_lib
from pallas_gemm import ladder as ladder_lib

_OPS = {"dense": dense_tables.markdown, "ragged": ragged_tables.markdown}


def ladder(text: str) -> str:
  """The ladder on both GPUs; of all its problems or of one "MxNxK dtype".

  Raises:
    UnknownError: no row is of that problem.
  """
  devices = [
    ladder_tables.own(results.measured(name, "ladder"))
    for name in results.MEASURED
  ]
  wanted = text.split()

  def chosen(row) -> bool:
    return all(word in (tables.shape(row), row["dtype"]) for word in wanted)

  found = [[row for row in rows if chosen(row)] for rows in devices]
  if not all(found):
    there = dict.fromkeys(
      f"{tables.shape(row)} {row['dtype']}" for rows in devices for row in rows
    )
    raise lookup.UnknownError(
      f"no rows of the ladder at {text!r}; there is {lookup.listed(there)}"
    )
  return "\n\n".join(_narrow(rows) for rows in found)


def _narrow(rows: Sequence[dict[str, Any]]) -> str:
  """A GPU's rows, a table for each problem, on a column of text."""
  first = ladder_tables.starts()[:1]
  relative = ladder_tables.relative(rows, first)
  columns = {
    "#": ladder_tables.label,
    "kernel": lambda row: row["kernel"],
    "time": tables.TIME,
    "TFLOP/s": tables.TFLOPS,
    "% of peak": ladder_tables.of_peak,
    "x jnp.dot": tables.RATIO,
    "x before": relative["x before"],
  }
  parts = []
  for problem, group in tables.grouped(rows, _problem).items():
    header, cells = tables.pivot(group, columns)
    parts.append(f"**{tables.short_name(rows[0])}: {problem}**")
    parts.append(tables.markdown(header, cells, header[2:]))
  return "\n\n".join(parts)


def _problem(row: dict[str, Any]) -> str:
  return f"{tables.shape(row).replace('x', ' × ')}, {row['dtype']}"


def random(text: str) -> str:
  """Random problems on a GPU, "h100" say, by the seed that drew them.

  Raises:
    UnknownError: no GPU of that name.
  """
  measured = {name: results.GPUS[name] for name in results.MEASURED}
  gpu = lookup.pick(measured, text, "GPU")
  path = rows_lib.RESULTS / rows_lib.slug(gpu) / "dense_unseen.jsonl"
  return dense_tables.by_seed(rows_lib.read(path))


def ops(text: str) -> str:
  """The ops against XLA on an H200: "dense", "ragged"; both if not said.

  Raises:
    UnknownError: no ops of that name.
  """
  return "\n\n".join(
    lookup.pick(_OPS, name, "ops")(_ops_rows(name))
    for name in text.split() or _OPS
  )


def _ops_rows(name: str) -> list[dict[str, Any]]:
  """The latest rows of "dense" or "ragged" on an H200."""
  folder = rows_lib.RESULTS / rows_lib.slug(results.GPUS["h200"])
  return rows_lib.latest(rows_lib.read(folder / f"{name}.jsonl"))


def published_ladders(text: str) -> str:
  """What others published, a ladder a row."""
  del text
  return ladder_tables.published_markdown()


def ladder_overview(text: str) -> str:
  """A line for each rung: what it adds, and its speed on each GPU."""
  del text
  rungs = {rung.name: rung for rung in ladder_lib.LADDER}

  def number(row: dict[str, Any]) -> str:
    rung = rungs[row["kernel"]]
    return f"[{rung.number}](docs/rungs/{rung.number:02}_{rung.name}.md)"

  index = {
    "#": number,
    "rung": tables.field("kernel"),
    "what it adds": lambda row: rungs[row["kernel"]].idea,
  }
  columns = []
  for name in results.MEASURED:
    timed = [results.timed(rung, name) for rung in rungs.values()]
    gpu = tables.short_name(timed[0])
    if not columns:
      columns.append((gpu, timed, {"time": tables.TIME}))
    values = {"TFLOP/s": tables.TFLOPS, "x jnp.dot": tables.RATIO}
    columns.append((gpu, timed, values))
  return tables.markdown(*tables.pivot(timed, index, columns))


def ops_overview(text: str) -> str:
  """What an op computes, its baseline, and how much faster; then the losses."""
  del text
  dense = dense_tables.compared(_ops_rows("dense"))
  mixtral = [
    row
    for row in ragged_tables.timed(_ops_rows("ragged"))
    if row["suite"] == "mixtral"
  ]
  fused = [row for row in dense if row["epilogue"] != "none"]
  cells = []
  for op, baseline, arm, rows in (
    ("`matmul`, all suites", "`jnp`", None, dense),
    ("`matmul` with bias, C, activation", "`jnp`", None, fused),
    (
      "`matmul`, 1 to 128 rows (Llama)", "`jnp`", None,
      dense_tables.small_m(dense),
    ),
    (
      "`ragged_dot`, Mixtral, and gradients", "`lax.ragged_dot`",
      ragged_cases.LAX, mixtral,
    ),
    (
      "`ragged_dot`, Mixtral", "JAX's `ragged_dot_mgpu`", ragged_cases.EXAMPLE,
      mixtral,
    ),
  ):  # fmt: skip
    speeds = [
      ragged_tables.speed_over(row, arm) if arm else dense_tables.ratio(row)
      for row in rows
    ]
    speeds = [speed for speed in speeds if speed is not None]
    figures = tables.geomean(speeds), min(speeds), max(speeds)
    cells.append([op, baseline, str(len(speeds)), *map(tables.factor, figures)])
  header = ["op", "beside", "cases", "geomean", "worst", "best"]
  note = "`lax.ragged_dot` multiplies all rows with every group."
  losses = dense_tables.losses(dense)
  return f"{tables.markdown(header, cells)}\n\n`matmul`: {losses} {note}"
