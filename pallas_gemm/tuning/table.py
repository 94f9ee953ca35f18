"""What is shipped with the package: known choices for a kind of GPU.

`table/<device>.jsonl` has a line a problem: its fields that differ from their
defaults, and an entry (`entries`).

    {"problem": {"m": 1, "n": 8192, ...}, "config": {"swap_ab": true, ...}}

A file is read once, when the first product is lowered for its GPU. There need
not be one. `python -m experiments.tune --freeze=FILE` writes what is chosen
today for the suites' problems, so that a change of the cost model leaves them
alone.
"""

from collections.abc import Iterable
import functools
import json
import pathlib

from pallas_gemm import hardware
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import entries
from pallas_gemm.tuning.entries import Entry

_FOLDER = pathlib.Path(__file__).parent / "table"


def lookup(problem: Problem) -> Entry | None:
  """The entry of a problem for the GPU that a trace made now is for."""
  known = _known(hardware.current().name)
  return known.get(problem) if known else None


def lines(found: Iterable[tuple[Problem, Entry]]) -> str:
  """The content of a file that knows these."""
  return "".join(
    json.dumps({"problem": entries.short_row(problem)} | entries.to_json(entry))
    + "\n"
    for problem, entry in found
  )


@functools.cache
def _known(device: str) -> dict[Problem, Entry]:
  path = _FOLDER / f"{entries.file_stem(device)}.jsonl"
  if not path.exists():
    return {}
  rows = map(json.loads, path.read_text().splitlines())
  return {
    Problem.from_row(row["problem"]): entries.from_json(row) for row in rows
  }
