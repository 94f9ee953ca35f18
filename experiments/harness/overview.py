"""README's two tables, of the rows in the repository: the ladder and the ops.

Every program with --update_readme writes them anew; the pages beside the rows
have all cases.
"""

from collections.abc import Callable, Sequence
import pathlib
from typing import Any

from experiments.harness import (
  dense_tables,
  ragged_cases,
  ragged_tables,
  tables,
)
from experiments.harness import rows as rows_lib
from pallas_gemm import ladder as ladder_lib

RowDict = tables.RowDict
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
  measured = [tables.newest(_read(device, "ladder")) for device in DEVICES]
  gpus = [tables.short_name(rows[0]["device"]) for rows in measured]
  header = ["#", "rung", "what it adds", f"{gpus[0]} time"]
  for gpu in gpus:
    header += [f"{gpu} TFLOP/s", f"{gpu} x jnp.dot"]
  cells = []
  for rung in ladder_lib.LADDER:
    size = dict.fromkeys("mnk", SIZE)
    found = [
      rows_lib.find(
        rows, kernel=rung.name, variant=None, dtype=rung.dtypes[0], **size
      )
      for rows in measured
    ]
    page = f"docs/rungs/{rung.number:02}_{rung.name}.md"
    cell = [f"[{rung.number}]({page})", rung.name, rung.idea]
    cell.append(tables.duration(found[0] and found[0]["ms_median"]))
    for row in found:
      cell.append(tables.rate(row and row["tflops"]))
      cell.append(tables.factor(row and row["ratio_to_jnp_dot"]))
    cells.append(cell)
  right = [name for name in header if name not in ("rung", "what it adds")]
  return tables.markdown(header, cells, right)


def ops() -> str:
  """What an op computes, beside what, and how much faster; then the losses."""
  dense = dense_tables.compared(rows_lib.latest(_read(DEVICES[0], "dense")))
  grouped = ragged_tables.timed(rows_lib.latest(_read(DEVICES[0], "ragged")))

  def of(suites: Sequence[str], rows: Sequence[RowDict]) -> list[RowDict]:
    return [row for row in rows if row["suite"] in suites]

  def of_dense(row: RowDict) -> float | None:
    return row["ratio_to_jnp_dot"]

  def over(arm: str) -> Callable[[RowDict], float | None]:
    return lambda row: ragged_tables.speed_over(row, arm)

  mixtral = of(("mixtral",), grouped)
  small = dense_tables.small_m(dense)
  lines = [
    ("`matmul`, all suites", "`jnp`", dense, of_dense),
    (
      "`matmul` with bias, C, activation",
      "`jnp`",
      of(("epilogues", "models"), dense),
      of_dense,
    ),
    ("`matmul`, 1 to 128 rows (Llama)", "`jnp`", small, of_dense),
    (
      "`ragged_dot`, Mixtral, and gradients",
      "`lax.ragged_dot`",
      mixtral,
      over(ragged_cases.LAX),
    ),
    (
      "`ragged_dot`, Mixtral",
      "JAX's `ragged_dot_mgpu`",
      mixtral,
      over(ragged_cases.EXAMPLE),
    ),
  ]
  header = ["op", "beside", "cases", "geomean", "worst", "best"]
  cells = [_line(*line) for line in lines]
  table = tables.markdown(header, cells, header[2:])
  note = "`lax.ragged_dot` multiplies all rows with every group."
  return f"{table}\n\n`matmul`: {dense_tables.losses(dense)} {note}"


def _line(
  name: str,
  beside: str,
  rows: Sequence[RowDict],
  speed: Callable[[RowDict], float | None],
) -> list[str]:
  found = [x for row in rows if (x := speed(row)) is not None]
  ends = tables.geomean(found), min(found), max(found)
  return [name, beside, str(len(found)), *map(tables.factor, ends)]
