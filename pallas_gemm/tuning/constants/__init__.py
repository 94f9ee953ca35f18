"""Constants that no datasheet has, fitted to measured times: a file a GPU.

`<device>.json` has, for operands of 16 bits, the parts that `parts` describes,
and what they were fitted to:

    {"device": "NVIDIA H200",
     "16 bits": {"by": "hand", "commit": "...", "rows": 7260,
                 "date": "2026-11-25",
                 "regret": {"train": {"mean": ...}, "held_out": {...}},
                 "model": {"clock": 1650.0, ...}, "odd_sizes": {...}, ...}}

"train" is the regret of these constants on the rows that they have seen,
"held_out" that of five fits on problems that none of them has seen:
`python -m experiments.fit` writes both.

A file is read once, when the first product is predicted for its GPU.
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

from pallas_gemm import hardware, report
from pallas_gemm.tuning import cache
from pallas_gemm.tuning.constants.parts import (
  Constants,
  Grouped,
  Model,
  OddSizes,
  Stages,
  Xla,
)

__all__ = [
  "FOLDER",
  "WIDTH",
  "Constants",
  "Grouped",
  "Model",
  "OddSizes",
  "Stages",
  "Xla",
  "from_json",
  "of",
  "path_of",
  "read",
]

FOLDER = pathlib.Path(__file__).parent
# The level of a file that has those of operands of this width.
WIDTH = "16 bits"


@functools.lru_cache(maxsize=64)
def of(gpu: hardware.Gpu) -> Constants:
  """The constants of a GPU.

  Those of the nearest known one, by compute capability, then the number of SMs
  and the rate of device memory, if there is no file of its own. That is logged
  once; sizes, clock and rates of `gpu` itself still count.

  Args:
    gpu: what is predicted for.

  Raises:
    RuntimeError: the file is missing or broken; the message names it.

  Example:
    >>> from pallas_gemm import hardware
    >>> from pallas_gemm.tuning import constants
    >>> constants.of(hardware.lookup("H200")).model.clock
    1650.0
  """
  path = path_of(gpu.name)
  if path.exists():
    return from_json(read(path), path)
  nearest = min(_known(), key=lambda known: _distance(known, gpu))
  report.warn_once(
    f"the cost model has no constants of the {gpu.name}: those of the"
    f" {nearest.name} stand in. `pallas_gemm.autotune` measures instead"
  )
  path = path_of(nearest.name)
  return from_json(read(path), path)


def path_of(device: str) -> pathlib.Path:
  """The file of a kind of GPU, "NVIDIA H200" -> .../nvidia_h200.json."""
  return FOLDER / f"{cache.file_stem(device)}.json"


def read(path: pathlib.Path) -> dict[str, Any]:
  """A file of constants.

  Raises:
    RuntimeError: it can't be read, or is none; the message names it.
  """
  try:
    found = json.loads(path.read_bytes())
    found["device"], found[WIDTH]["model"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise RuntimeError(
      f"constants of the cost model: {path} is missing or broken:"
      f" {type(error).__name__}: {error}"
    ) from None
  return found


def from_json(found: dict[str, Any], path: pathlib.Path) -> Constants:
  """The constants of what `read` gives.

  Raises:
    RuntimeError: there are others than this version has, or no numbers.
  """
  parts = {}
  for part in dataclasses.fields(Constants):
    values = found[WIDTH].get(part.name, {})
    names = {x.name for x in dataclasses.fields(part.type)}
    wrong = sorted(names ^ set(values))
    wrong += [name for name, x in values.items() if not _is_number(x)]
    if wrong:
      raise RuntimeError(
        f"constants of the cost model: {path}: {part.name} must have a number"
        f" for each field of {part.type.__name__} and no more; wrong:"
        f" {', '.join(wrong)}"
      )
    parts[part.name] = part.type(**values)
  return Constants(**parts)


def _is_number(x: Any) -> bool:
  return type(x) in (int, float) and math.isfinite(x)


def _known() -> list[hardware.Gpu]:
  """The GPUs that have a file.

  Raises:
    RuntimeError: there is none.
  """
  paths = sorted(FOLDER.glob("*.json"))
  if not paths:
    raise RuntimeError(f"constants of the cost model: {FOLDER} has no *.json")
  return [hardware.lookup(read(path)["device"]) for path in paths]


def _distance(known: hardware.Gpu, gpu: hardware.Gpu) -> tuple[float, ...]:
  """How far a known GPU is from another."""
  (major, minor), (other, other_minor) = (
    known.compute_capability,
    gpu.compute_capability,
  )
  return (
    abs(major - other),
    abs(minor - other_minor),
    abs(known.sm_count - gpu.sm_count),
    abs(known.dram_bytes_per_s - gpu.dram_bytes_per_s),
  )
