"""README's two tables, of the rows in the repository: the ladder and the ops.

Every program with --update_readme writes them anew; the pages beside the rows
have all cases.
"""

import pathlib
from typing import Any

from experiments.harness import (
  dense_tables,
  ladder_tables,
  ragged_cases,
  ragged_tables,
  tables,
)
from experiments.harness import rows as rows_lib
from experiments.harness.tables import RowDict
from pallas_gemm import ladder as ladder_lib

# The size that the ladder is compared at.
SIZE = 4096
DEVICES = "nvidia_h200", "nvidia_h100_80gb_hbm3"


def update(readme: pathlib.Path) -> bool:
  """Writes each table that the page has markers for; whether one changed."""
  text = readme.read_text()
  changed = False
  for name, table in (("ladder_overview", ladder), ("ops_overview", ops)):
    if f"<!-- {name}:begin -->" in text:
      changed |= tables.update_file(readme, name, table())
  return changed


def _read(device: str, experiment: str) -> list[dict[str, Any]]:
  return rows_lib.read(rows_lib.RESULTS / device / f"{experiment}.jsonl")


def ladder() -> str:
  """A line for each rung: what it adds, and its speed on each device."""
  rungs = {rung.name: rung for rung in ladder_lib.LADDER}

  def number(row: RowDict) -> str:
    rung = rungs[row["kernel"]]
    return f"[{rung.number}](docs/rungs/{rung.number:02}_{rung.name}.md)"

  def compares(row: RowDict) -> bool:
    rung = rungs.get(row["kernel"])
    same = rung is not None and row["dtype"] == rung.dtypes[0]
    return same and (row["m"], row["n"], row["k"]) == 3 * (SIZE,)

  index = {
    "#": number,
    "rung": tables.field("kernel"),
    "what it adds": lambda row: rungs[row["kernel"]].idea,
  }
  values = {"TFLOP/s": tables.TFLOPS, "x jnp.dot": tables.RATIO}
  columns = []
  for device in DEVICES:
    rows = ladder_tables.newest(_read(device, "ladder"))
    gpu, rows = tables.short_name(rows[0]), [*filter(compares, rows)]
    if not columns:
      columns.append((gpu, rows, {"time": tables.TIME}))
    columns.append((gpu, rows, values))
  lines = [{"kernel": name} for name in rungs]
  return tables.markdown(*tables.pivot(lines, index, columns))


def ops() -> str:
  """What an op computes, beside what, and how much faster; then the losses."""
  dense = dense_tables.compared(rows_lib.latest(_read(DEVICES[0], "dense")))
  ragged = ragged_tables.timed(rows_lib.latest(_read(DEVICES[0], "ragged")))

  fused = [row for row in dense if row["epilogue"] != "none"]
  small = dense_tables.small_m(dense)
  over_jnp = [[*map(dense_tables.ratio, x)] for x in (dense, fused, small)]

  def over(arm: str) -> list[float]:
    mixtral = (row for row in ragged if row["suite"] == "mixtral")
    speeds = (ragged_tables.speed_over(row, arm) for row in mixtral)
    return [speed for speed in speeds if speed is not None]

  lax, example = over(ragged_cases.LAX), over(ragged_cases.EXAMPLE)
  lines = [
    ("`matmul`, all suites", "`jnp`", over_jnp[0]),
    ("`matmul` with bias, C, activation", "`jnp`", over_jnp[1]),
    ("`matmul`, 1 to 128 rows (Llama)", "`jnp`", over_jnp[2]),
    ("`ragged_dot`, Mixtral, and gradients", "`lax.ragged_dot`", lax),
    ("`ragged_dot`, Mixtral", "JAX's `ragged_dot_mgpu`", example),
  ]
  header = ["op", "beside", "cases", "geomean", "worst", "best"]
  cells = []
  for op, beside, speeds in lines:
    figures = tables.geomean(speeds), min(speeds), max(speeds)
    cells.append([op, beside, str(len(speeds)), *map(tables.factor, figures)])
  table = tables.markdown(header, cells)
  note = "`lax.ragged_dot` multiplies all rows with every group."
  return f"{table}\n\n`matmul`: {dense_tables.losses(dense)} {note}"
