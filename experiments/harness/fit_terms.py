"""The constants that are fitted: where a search starts, what leaves one out."""

from collections.abc import Iterable
import dataclasses
from typing import NamedTuple

import numpy as np

from pallas_gemm import hardware
from pallas_gemm.tuning import constants

# The other parts say nothing about one config beside another, which is all that
# rows tell: when XLA's product is faster, and how many stages are asked for.
PARTS = {
  "model": constants.Model,
  "odd_sizes": constants.OddSizes,
  "grouped": constants.Grouped,
}
# At such a rate no time passes; JSON has no infinity.
_ENDLESS = 1e12
# What overlaps with this exponent is as long as the longest part of it.
_SHARP = 32.0


class Term(NamedTuple):
  """One constant.

  Attributes:
    start: a round number, of what is usual; rows have no say in it.
    neutral: with which the term is gone: factors 1, what is added 0; or the
      constant that then stands for it too.
  """

  start: float
  neutral: float | str


def terms(gpu: hardware.Gpu) -> dict[str, Term]:
  """The constants by name.

  Args:
    gpu: whose they are; rates start at parts of its own.

  Example:
    >>> from experiments.harness import fit_terms
    >>> from pallas_gemm import hardware
    >>> known = fit_terms.terms(hardware.lookup("H200"))
    >>> known["model.barrier"]
    Term(start=50.0, neutral=0.0)
    >>> known["grouped.l2"]
    Term(start=64.0, neutral='model.l2')
  """
  boost = gpu.clock_hz / 1e6
  memory = gpu.dram_bytes_per_s / 1e6  # bytes a microsecond
  found = {
    "model.clock": (0.85 * boost, boost),
    "model.shared": (1.0, 0.0),
    "model.dram": (0.9, 1.0),
    "model.leaving": (1.0, _ENDLESS),
    "model.l2": (64.0, _ENDLESS),
    "model.store": (128 * 0.85 * boost, _ENDLESS),
    "model.blend": (8.0, _SHARP),
    "model.reduce_rate": (memory / 2, _ENDLESS),
    "model.exchange_rate": (16 * boost, _ENDLESS),
    "odd_sizes.copy_rate": (memory / 2, _ENDLESS),
    "odd_sizes.slice_of_1": (memory / 4, "odd_sizes.copy_rate"),
    "odd_sizes.slice_of_2": (memory / 4, "odd_sizes.copy_rate"),
    "odd_sizes.slice_of_4": (memory / 2, "odd_sizes.copy_rate"),
    "odd_sizes.element_rate": (memory / 4, _ENDLESS),
    "odd_sizes.straddling": (2.0, "odd_sizes.misaligned"),
    "odd_sizes.uneven": (200.0, "odd_sizes.short"),
    "grouped.l2": (64.0, "model.l2"),
  }
  found |= {name: (start, 1.0) for name, start in _FACTORS.items()}
  found |= {name: (start, 0.0) for name, start in _ADDED.items()}
  return {name: Term(*found[name]) for name in NAMES}


NAMES = tuple(
  f"{part}.{field.name}"
  for part, kind in PARTS.items()
  for field in dataclasses.fields(kind)
)
_FACTORS = {
  f"model.{name}": 1.0
  for name in (
      "mma", "third", "tall", "columns", "narrow_dram", "narrow_mma", "swapped",
      "streams", "deep", "hidden", "apart",
  )
} | {
  "grouped.tall": 1.0,
  "model.narrow": 2.0,
  "model.activation": 2.0,
  "model.with_c": 2.0,
  "model.by_rows": 4.0,
  "model.busy": 2.0,
  "odd_sizes.odd_sums": 1.5,
  "odd_sizes.misaligned": 1.5,
  "odd_sizes.by_copies": 2.0,
  "odd_sizes.by_moves": 2.0,
  "odd_sizes.straddling_results": 2.0,
}  # fmt: skip
_ADDED = {
  "model.small": 0.01,
  "model.writes": 0.1,
  "model.scattered": 0.1,
  "odd_sizes.beside": 0.2,
  "model.barrier": 50.0,
  "model.share_m": 80.0,
  "model.share_n": 80.0,
  "model.arrival": 1000.0,
  "model.epilogue": 0.1,
  "model.cut": 0.01,
  "model.subtile": 0.05,
  "model.packed": 0.5,
  "model.applied": 1.0,
  "model.added": 1.0,
  "model.ahead": 1.0,
  "model.wide": 1.0,
  "model.saved": 1.0,
  "model.awaited": 2.0,
  "model.drain": 2.0,
  "model.pingpong": 1.0,
  "model.pingpong_applied": 1.0,
  "model.pingpong_added": 1.0,
  "model.slivers": 0.1,
  "model.launch": 2.0,
  "model.reduce": 1.0,
  "model.exchange": 0.5,
  "odd_sizes.copy": 1.0,
  "odd_sizes.short": 200.0,
  "odd_sizes.move": 100.0,
  "odd_sizes.move_row": 4.0,
}


def values_of(known: constants.Constants) -> np.ndarray:
  """The constants in the order of `NAMES`."""
  found = []
  for name in NAMES:
    part, field = name.split(".")
    found.append(getattr(getattr(known, part), field))
  return np.array(found)


def constants_of(
  values: np.ndarray, others: constants.Constants
) -> constants.Constants:
  """What `values_of` takes apart: numbers, or an array of candidates each.

  Args:
    values: [constants], or [candidates, constants].
    others: has the parts that are not fitted.
  """
  parts: dict[str, dict[str, float | np.ndarray]] = {part: {} for part in PARTS}
  for name, value in zip(NAMES, values.T):
    part, field = name.split(".")
    value = value.copy() if values.ndim > 1 else float(value)
    if values.ndim > 1:
      value.setflags(write=False)  # a model that wrote to it would be wrong
    parts[part][field] = value
  made = {part: PARTS[part](**fields) for part, fields in parts.items()}
  return dataclasses.replace(others, **made)


def without(
  values: np.ndarray, dropped: Iterable[str], known: dict[str, Term]
) -> np.ndarray:
  """The values with the neutral ones of what is dropped.

  Args:
    values: [..., constants].
    dropped: names.
    known: `terms`.
  """
  values, late = values.copy(), []
  for name in dropped:
    neutral = known[name].neutral
    if isinstance(neutral, str):
      late.append((name, neutral))
    else:
      values[..., NAMES.index(name)] = neutral
  # "uneven" by "short", which may be dropped too.
  for name, other in late:
    values[..., NAMES.index(name)] = values[..., NAMES.index(other)]
  return values
