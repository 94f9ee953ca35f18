"""The constants that are fitted: where a search starts, what leaves one out."""

from collections.abc import Iterable
import dataclasses

import numpy as np

from pallas_gemm import hardware
from pallas_gemm.tuning import constants

# Which config is chosen; how many stages are asked for, rows do not tell.
_PARTS = {
  "model": constants.Model,
  "odd_sizes": constants.OddSizes,
  "grouped": constants.Grouped,
}
MODEL = tuple(
  f"{part}.{field.name}"
  for part, kind in _PARTS.items()
  for field in dataclasses.fields(kind)
)
# When XLA's product is faster: where a search starts. The other constants of
# that part say for which problems these are asked.
_XLA = {
  "xla.most": 1.0,
  "xla.most_added_s": 2e-6,
  "xla.launch": 3e-6,
  "xla.per_k": 5e-9,
  "xla.flops": 1e14,
  "xla.words": 0.8,
  "xla.short_launch": 2e-6,
  "xla.short_per_k": 5e-10,
  "xla.short_most_k": 8192.0,
  "xla.short_padded": 2e-6,
  "xla.short_rate": 0.9,
  "xla.few_odd_rows": 1.0,
}
XLA = tuple(_XLA)
NAMES = MODEL + XLA
# At such a rate no time passes; JSON has no infinity.
_ENDLESS = 1e12
# What overlaps with this exponent is as long as the longest part of it.
_SHARP = 32.0
# Multiples, without which the term is 1, and what is added, without which it is
# 0; by where a search starts.
_FACTORS = {
  1.0: "mma mma_three_consumers mma_many_rows columns narrow_dram narrow_mma"
  " swapped streams deep hidden l2_cluster_k grouped.dram_many_rows",
  1.5: "odd_sizes.odd_sums odd_sizes.misaligned",
  2.0: "narrow activation with_c busy odd_sizes.by_copies odd_sizes.by_moves"
  " odd_sizes.straddling_results",
  4.0: "by_rows",
}
_ADDED = {
  0.01: "small cut",
  0.05: "subtile",
  0.1: "writes scattered epilogue narrow_subtile_us",
  0.2: "odd_sizes.shorter_loads",
  0.5: "deferred_us exchange",
  1.0: "applied added c_buffered_us wide saved pingpong pingpong_applied"
  " pingpong_added reduce odd_sizes.copy",
  2.0: "c_latency_us drain launch",
  4.0: "odd_sizes.threads_row_cycles",
  50.0: "barrier",
  80.0: "share_m share_n",
  100.0: "odd_sizes.threads_cycles",
  200.0: "odd_sizes.short",
  1000.0: "arrival",
}


def terms(gpu: hardware.Gpu) -> dict[str, tuple[float, float | str | None]]:
  """Of each constant by name: where a search starts, and what leaves it out.

  The start is a round number, of what is usual; rows have no say in it. What
  leaves a constant out is a number with which its term is gone, or the name of
  the constant that then stands for it too; XLA's stay.

  Args:
    gpu: whose they are; rates start at parts of its own.
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
  for neutral, table in ((1.0, _FACTORS), (0.0, _ADDED)):
    for start, names in table.items():
      for name in names.split():
        full = name if "." in name else f"model.{name}"
        found[full] = start, neutral
  found |= {name: (start, None) for name, start in _XLA.items()}
  return {name: found[name] for name in NAMES}


def start_of(gpu: hardware.Gpu) -> np.ndarray:
  """The round numbers, [constants]."""
  return np.array([start for start, _ in terms(gpu).values()])


def values_of(known: constants.Constants) -> np.ndarray:
  """The constants in the order of `NAMES`."""
  split = (name.split(".") for name in NAMES)
  return np.array([getattr(getattr(known, part), x) for part, x in split])


def constants_of(
  values: np.ndarray, others: constants.Constants
) -> constants.Constants:
  """What `values_of` takes apart: numbers, or an array of candidates each.

  Args:
    values: [constants], or [candidates, constants].
    others: has the constants that are not fitted.
  """
  parts: dict[str, dict[str, float | np.ndarray]] = {}
  for name, value in zip(NAMES, values.T):
    part, field = name.split(".")
    value = value.copy() if values.ndim > 1 else float(value)
    if values.ndim > 1:
      value.setflags(write=False)  # a model that wrote to it would be wrong
    parts.setdefault(part, {})[field] = value
  made = {
    part: dataclasses.replace(getattr(others, part), **fields)
    for part, fields in parts.items()
  }
  return dataclasses.replace(others, **made)


def without(
  values: np.ndarray, dropped: Iterable[str], gpu: hardware.Gpu
) -> np.ndarray:
  """The values, [..., constants], with the neutral ones of what is dropped.

  Args:
    values: those of all.
    dropped: names of `MODEL`.
    gpu: whose they are.
  """
  known, values, late = terms(gpu), values.copy(), []
  for name in dropped:
    _, neutral = known[name]
    if isinstance(neutral, str):
      late.append((name, neutral))
    else:
      values[..., NAMES.index(name)] = neutral
  # "uneven" by "short", which may be dropped too.
  for name, other in late:
    values[..., NAMES.index(name)] = values[..., NAMES.index(other)]
  return values
