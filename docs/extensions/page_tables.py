"""The tables of README, for pages, and of random problems."""

from collections.abc import Sequence
from typing import Any

from docs.extensions import lookup, results
from experiments import report
from experiments.harness import (
  dense_tables,
  ladder_tables,
  ragged_tables,
  tables,
)
from experiments.harness import rows as rows_lib

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
  folder = rows_lib.RESULTS / rows_lib.slug(results.GPUS["h200"])
  parts = []
  for name in text.split() or _OPS:
    markdown = lookup.pick(_OPS, name, "ops")
    rows = rows_lib.latest(rows_lib.read(folder / f"{name}.jsonl"))
    parts.append(markdown(rows))
  return "\n\n".join(parts)


def published_ladders(text: str) -> str:
  """What others published, a ladder a row."""
  del text
  return ladder_tables.published_markdown()


def ops_overview(text: str) -> str:
  """README's table of the ops."""
  del text
  return report.ops_overview()
