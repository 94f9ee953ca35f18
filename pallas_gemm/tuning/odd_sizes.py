"""What sizes that are no multiples of 64 cost a config; for the cost model.

And the configs of which threads load the operands that TMA can't address.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from pallas_gemm import hardware
from pallas_gemm.hardware import SECTOR_BYTES
from pallas_gemm.kernels.sm90 import layout, loaders
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import constants

# Slabs of all work tiles of a block, up to which threads may load operands, and
# rows and columns of a tile; the addresses of more would spill.
_MOST_SLABS, _MOST_ROWS = 12, 320
# Row tiles up to which threads may make planes, each of which makes them anew;
# stages; and cycles that a slab takes longer, for each of its elements: with it
# dense products are predicted as much too slow as with planes by XLA (H200).
_MOST_SPLIT, _SPLIT_STAGES, _SPLIT = 4, 4, 0.05


class Costs(NamedTuple):
  """What sizes that are no multiples of 64 cost a config.

  Attributes:
    loads: of A and B, as multiples.
    shorter_loads: what of the shorter loads is added to the longer ones.
    results: device memory's time for results, as a multiple.
    copies: microseconds of the copies into and out of padded matrices, and of
      results that threads store.
    short: cycles that a slab takes longer because of short rows.
    sums: to add partial products, as a multiple.
    threads: cycles that a slab takes longer where threads load A or B.
  """

  loads: tuple[float, float]
  shorter_loads: float
  results: float
  copies: float
  short: float
  sums: float
  threads: float = 0.0


def largest(*values: Any) -> Any:
  """The largest number; of arrays, element by element.

  `experiments.fit` predicts for many candidates at once: constants are arrays.
  """
  try:
    return max(values)
  except ValueError:  # arrays are neither true nor false
    return functools.reduce(np.maximum, values)


NONE = Costs((1.0, 1.0), 1.0, 1.0, 0.0, 0.0, 1.0)


def costs(plan: Plan, fit: constants.OddSizes) -> Costs:
  """What the sizes of the plan's problem cost it."""
  p = plan.problem
  # Where no rows lie along K, it is rows that are counted, in atoms of 8.
  step = 64 if p.a.k_last or p.b.k_last else 8
  is_copied = p.a.bits == 8 and any(plan.tiling.transposed)
  is_copied |= p.planes > 1
  is_odd = p.m % 64 or p.n % 64 or p.k % step or is_copied
  return _costs(plan, fit) if is_odd else NONE


def _costs(plan: Plan, fit: constants.OddSizes) -> Costs:
  """The costs of sizes of which one is no multiple of 64."""
  p = plan.problem
  into, out_of = copied_bytes(plan)
  copies = (len(into) + len(out_of)) * fit.copy
  copies += sum(into) / fit.copy_rate + sum(out_of) / _slice_rate(p, fit)
  (_, a), (_, b) = plan.matrices.operand_paddings
  a, b = layout.bytes_of(a, p.a.dtype), layout.bytes_of(b, p.b.dtype)
  if plan.tiling.by_elements:
    copies += bytes_by_elements(plan) / fit.element_rate
  by_a, by_b = plan.loader.operands
  slow_b = 1.0 if by_b else slower(b, fit)
  # Of what a cluster shares, each block asks for a part.
  along = [(a, plan.config.cluster_n)] * (not p.a.k_last)
  along += [(b, plan.config.cluster_m)] * (not p.b.k_last)
  short = [
    (fit.uneven if row % 32 else fit.short) / blocks
    for row, blocks in along
    if row < 128
  ]
  result = layout.bytes_of(plan.matrices.result_shape[1], p.out_dtype)
  piece = layout.bytes_of(
    plan.matrices.subtile_shape[1], plan.matrices.stored_dtype
  )
  straddles = result % 32 == 16 and not plan.tiling.by_rows
  return Costs(
    loads=(
      1.0 if by_a else slower(a, fit),
      by_threads(plan, fit) if loads_weights(plan) else slow_b,
    ),
    shorter_loads=fit.shorter_loads if loads_weights(plan) else 1.0,
    results=straddling_results(piece, fit) if straddles else 1.0,
    copies=copies,
    short=largest(0.0, *short),
    sums=fit.odd_sums if p.results % 2 else 1.0,
    threads=_cycles_of_threads(plan, fit) if plan.config.moves else 0.0,
  )


def copied_bytes(plan: Plan) -> tuple[list[int], list[int]]:
  """Bytes read and written by each copy into, and out of, a padded matrix."""
  p, matrices = plan.problem, plan.matrices
  (a, b), (a_pad, b_pad) = matrices.operand_shapes, matrices.operand_paddings
  is_a, is_b = plan.tiling.transposed
  into = [_copied(a, a_pad, p.matrices(p.a), p.a.dtype, is_a and p.m > 1)]
  of_b = _copied(b, b_pad, p.matrices(p.b), p.b.dtype, is_b and p.n > 1)
  if p.a.planes > 1:
    into = [_split(a, a_pad, p.matrices(p.a), p.a.planes)]
  if plan.loader.slabs_by_tma:
    of_b = 0
  elif p.b.planes > 1:
    of_b = _split(b, b_pad, p.matrices(p.b), p.b.planes)
  if last := matrices.last_slab_shape:
    of_b = 2 * layout.bytes_of(p.matrices(p.b) * math.prod(last), p.b.dtype)
  into += [of_b] * p.products
  shape, out_of = matrices.result_shape, []
  if matrices.has_c:
    padded, dtype = matrices.c_padding, p.epilogue.c_dtype
    into.append(_copied(shape, padded, p.batch, dtype))
  if plan.config.split_k == 1 and not plan.tiling.by_rows:
    padded = matrices.result_shapes[0]
    of_one = _copied(shape, padded, p.batch, p.out_dtype)
    out_of = [of_one] * plan.tiling.outputs
  return list(filter(None, into)), list(filter(None, out_of))


def _copied(
  shape: layout.Shape,
  padded: layout.Shape,
  count: int,
  dtype: str,
  transposed: bool = False,
) -> int:
  """Of that many matrices; 0 if they are neither padded nor transposed."""
  if shape == padded and not transposed:
    return 0
  return layout.bytes_of(count * (math.prod(shape) + math.prod(padded)), dtype)


def _split(
  shape: layout.Shape, padded: layout.Shape, count: int, planes: int
) -> int:
  """Of that many matrices in float32, and of their planes."""
  return count * (4 * math.prod(shape) + 2 * planes * math.prod(padded))


def _cycles_of_threads(plan: Plan, fit: constants.OddSizes) -> float:
  """Cycles that a slab takes longer where threads load A, each B, or all."""
  p, cfg = plan.problem, plan.config
  if plan.loader.slabs_by_tma:
    return _SPLIT * cfg.block_n * p.products * cfg.block_k
  sides = (p.m, cfg.block_m, 1), (p.n, cfg.block_n, p.products)
  total = 0.0
  for (size, block, count), by_threads in zip(sides, plan.loader.operands):
    if by_threads:
      rows = min(block, layout.round_up(size, 8))
      total += (fit.threads_cycles + fit.threads_row_cycles * rows) * count
  return total * cfg.block_k / 64


def loaded_by_threads(
  configs: Iterable[Config], problem: Problem, gpu: hardware.Gpu
) -> Iterator[Config]:
  """The configs, and those of a few slabs with threads that load operands."""
  p, ((_, a), (_, b)) = problem, layout.operand_shapes(problem)
  both_by_tma = layout.is_addressable(a, p.a.dtype)
  both_by_tma &= layout.is_addressable(b, p.b.dtype)
  for config in configs:
    yield config
    c = config
    rows, columns = c.block_m, c.block_n * p.products
    if both_by_tma or rows + columns > _MOST_ROWS or c.consumers > 2:
      continue
    if c.cluster_m * c.cluster_n > 1 or c.split == "pingpong":
      continue
    plan = Plan.new(problem, _moving(c, c.stages), gpu)
    by_a, by_b = plan.loader.operands
    loaded = rows * by_a + columns * by_b
    if not loaded:
      continue
    # A slab that threads load needs its room twice, and 16 bytes more a row.
    stages = int(c.stages / (1 + 9 / 8 * loaded / (rows + columns)))
    slabs = plan.tiling.slabs * plan.tiling.work_tiles_of_a_block
    if slabs <= _MOST_SLABS and stages > 1:
      yield _moving(c, min(max(slabs, 2), stages))


def split_by_threads(
  configs: Iterable[Config], problem: Problem, gpu: hardware.Gpu
) -> Iterator[Config]:
  """The configs, and those of few row tiles with threads that make planes."""
  p, rows = problem, problem.m
  if p.along == "m":
    rows /= p.groups.count
  for config in configs:
    yield config
    c = config
    if p.b.planes == 1 or p.along == "k" or c.swap_ab:
      continue
    is_shared = c.cluster_m * c.cluster_n > 1 or c.split == "pingpong"
    if is_shared or rows > _MOST_SPLIT * c.block_m:
      continue
    config = dataclasses.replace(_moving(c, 1), block_k=32, epilogue_buffers=1)
    memory = Plan.new(p, config, gpu).memory
    left = gpu.shared_bytes_per_block - memory.shared_bytes
    stages = min(_SPLIT_STAGES, 1 + left // memory.slab_bytes)
    if stages > 1:
      yield _moving(config, stages)


@functools.cache
def _moving(config: Config, stages: int) -> Config:
  return dataclasses.replace(config, stages=stages, moves=True)


def bytes_by_elements(plan: Plan) -> float:
  """Bytes of results that threads store; more where runs are shorter.

  None where they are whole sectors.
  """
  p, size = plan.problem, layout.bytes_of(1, plan.problem.out_dtype)
  # Four threads have two columns of a row each, eight a column's rows.
  run = 8 * size if plan.config.swap_ab or p.n % 2 == 0 else 4 * size
  return p.results * size * 16 / run if run < SECTOR_BYTES else 0.0


def loads_weights(plan: Plan) -> bool:
  """Whether threads load weights of groups."""
  return isinstance(plan.loader, loaders.Weights)


def by_threads(plan: Plan, fit: constants.OddSizes) -> float:
  """Loads of B, as a multiple, where threads load it and TMA loads A."""
  if isinstance(plan.loader, loaders.Copies):
    return fit.by_copies
  # A chunk takes as long whatever it holds: 60 groups of 136, 4096 x 1407, with
  # 128 x 64 tiles 734 us, with 128 x 128 473 (H100).
  columns = 128 * plan.loader.tile.chunks * 64 / plan.config.block_k
  return fit.by_moves * columns / plan.config.block_n


def straddling_results(piece: int, fit: constants.OddSizes) -> float:
  """Device memory's time for results that straddle sectors, as a multiple.

  Two sectors of each piece of a row that TMA stores are written in part, in a
  piece of 64 bytes two of three: groups along K, 4096 x 1400, took 572 us so
  (192 x 160 tiles, H200), by rows 346 (H100).

  Args:
    piece: bytes of a row that are stored at a time, up to 128 of them.
    fit: constants; its factor is that of 128.
  """
  pieces = layout.ATOM_BYTES / min(piece, layout.ATOM_BYTES)
  return 1 + (fit.straddling_results - 1) * pieces


def slower(row: int, fit: constants.OddSizes) -> float:
  """Loads of rows of that many bytes, as a multiple."""
  if row % 32:
    return fit.straddling
  return fit.misaligned if row % 128 else 1.0


def _slice_rate(p: Problem, fit: constants.OddSizes) -> float:
  rates = {1: fit.slice_of_1, 2: fit.slice_of_2, 4: fit.slice_of_4}
  return rates[math.gcd(p.results, 4)]
