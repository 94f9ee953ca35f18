"""What several pictures show, asked of the kernels and of memory's rules."""

import collections
from collections.abc import Iterable, Sequence
import functools
import math
from typing import Any

import jax
import numpy as np

from docs.extensions import results
from pallas_gemm import ladder
from pallas_gemm.ladder import register_layouts, tensor_core_common

BANKS = 32
WORD_BYTES = 4
# What one clock of shared memory serves: 32 lanes of one word, or 8 lanes of
# four words each.
CLOCK_BYTES = BANKS * WORD_BYTES


def covered(
  spec, points: Iterable[Sequence[int]], shape: tuple[int, int]
) -> np.ndarray:
  """Which elements of a matrix the blocks of some points of a grid hold."""
  mask = np.zeros(shape, bool)
  for point in points:
    at = tuple(
      start if size is None else slice(start * size, (start + 1) * size)
      for start, size in zip(spec.index_map(*point), spec.block_shape)
    )
    mask[at] = True
  return mask


def wanted_of_banks(addresses: Sequence[int]) -> dict[int, dict]:
  """What one request to shared memory wants: bank -> word -> lanes.

  Addresses are in words, one for each lane, in order. A bank gives one word a
  clock, to as many lanes as want it.
  """
  found = collections.defaultdict(lambda: collections.defaultdict(list))
  for lane, address in enumerate(addresses):
    found[int(address) % BANKS][int(address)].append(lane)
  return {bank: dict(words) for bank, words in found.items()}


def specs(name: str, problem, config) -> dict[str, Any]:
  """A rung's BlockSpecs of A, B and C."""
  found = ladder.find(name).specs(problem, config)
  return dict(zip("ABC", (*found.in_specs, found.out_specs)))


def config(name: str) -> Any:
  """A rung's config at 4096 cubed."""
  rung = ladder.find(name)
  return rung.default_config(results.problem(rung))


def owned(name: str) -> np.ndarray:
  """[warps, lanes, registers, (row, column)] of a rung's block."""
  own = config(name)
  return held(ladder.find(name).layout(own), (own.block_m, own.block_n))


@functools.cache
def held(layout, shape: tuple[int, int]) -> np.ndarray:
  """`register_layouts.owners`, once for each layout."""
  return register_layouts.owners(layout, shape)


def owner_masks(elements: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
  """A mask of a matrix for each thread, from owners' [..., registers, 2]."""
  lead = elements.shape[:-2]
  masks = np.zeros((*lead, *shape), bool)
  flat = masks.reshape(-1, *shape)
  for mask, own in zip(flat, elements.reshape(-1, *elements.shape[-2:])):
    mask[own[:, 0], own[:, 1]] = True
  return masks


def tile_order(tiles: tuple[int, int], config, count: int) -> np.ndarray:
  """[count, 2]: the first tiles that the rung's raster function visits."""

  def at(index):
    return tensor_core_common.tile_at(index, tiles, config)

  indices = np.arange(min(count, math.prod(tiles)), dtype=np.int32)
  return np.stack(jax.jit(jax.vmap(at))(indices), axis=1)


def ring_times(
  steps: int, stages: int, load: float, compute: float, gap: float = 0.0
) -> list[dict[str, tuple[float, float]]]:
  """(start, end) of "load" and "compute" of each step of a ring of stages.

  One stage is a single buffer. A load is from a copy's start until it has
  landed; several can be on the way, with a gap between their starts.
  """
  found: list[dict[str, tuple[float, float]]] = []
  for k in range(steps):
    start = found[k - 1]["load"][0] + gap if k else 0.0
    if k >= stages:  # the slot must be free
      start = max(start, found[k - stages]["compute"][1])
    landed = start + load
    begin = max(landed, found[k - 1]["compute"][1] if k else 0.0)
    found.append({"load": (start, landed), "compute": (begin, begin + compute)})
  return found
