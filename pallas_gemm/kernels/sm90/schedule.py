"""Which tiles a block of the Hopper kernels computes, and from what.

A work tile is one tile of the result: of one matrix of a batch, of one part
of K, or of one group. A `Schedule` numbers the work tiles of a problem, in the
order in which blocks take them up, and says of each where it lies. Here are
those of dense products, in `groups` those of grouped ones.
"""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import mosaic
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan

Index = int | jax.Array


class WorkTile(NamedTuple):
  """A tile of the result, and what it is summed from.

  Attributes:
    row, column: of the result, where this block's tile starts.
    out, a, b: which matrix, where there are several of them.
    start: the row of K where the sum starts.
    steps: slabs that are summed; at least one, none of a tile that is stored
      alone.
    whole: of these, the slabs all of whose rows of K are summed. None if all
      are.
    k_tail: rows of K of the slab after those.
    rows: of the tile that are stored; None for all.
    is_group: whether the tile belongs to a group; None if all do.
  """

  row: Index
  column: Index
  out: Index
  a: Index = 0
  b: Index = 0
  start: Index = 0
  steps: Index = 0
  whole: Index | None = None
  k_tail: Index | None = None
  rows: Index | None = None
  is_group: Index | None = None

  def store_target(self) -> "StoreTarget":
    """Where its results go."""
    packed = self.out
    if self.rows is not None:
      packed = jnp.where(self.is_group, self.rows, -self.rows)
    return StoreTarget(*map(jnp.int32, (self.row, self.column, packed)))


class StoreTarget(NamedTuple):
  """Where the results of a work tile go, in as few registers as that takes.

  Attributes:
    row, column: as of `WorkTile`.
    packed: the matrix; with groups of rows how many rows are stored, less than
      none if they belong to no group.
  """

  row: jax.Array
  column: jax.Array
  packed: jax.Array

  @classmethod
  def none(cls, plan: Plan) -> "StoreTarget":
    """That of no work tile."""
    none = 0 if plan.problem.along == "m" else -1
    return cls(*map(jnp.int32, (0, 0, none)))

  def is_real(self, plan: Plan) -> jax.Array:
    """Whether it is a work tile's, and not `none`."""
    return self.packed != (0 if plan.problem.along == "m" else -1)

  def work_tile(self, plan: Plan) -> WorkTile:
    """A work tile whose results go there; nothing else of it is known."""
    row_shifted, column_shifted = plan.matrices.shifted_inward
    anywhere = column_shifted or plan.tiling.tiles_overlap
    column = _multiple_of(self.column, plan.config.block_n, anywhere)
    if plan.problem.along != "m":
      row = _multiple_of(self.row, plan.config.block_m, row_shifted)
      return WorkTile(row, column, self.packed)
    return WorkTile(
      mosaic.anywhere(self.row),
      column,
      out=0,
      rows=jnp.abs(self.packed),
      is_group=self.packed > 0,
    )


class Schedule(NamedTuple):
  """All work tiles of a problem.

  Attributes:
    work_tiles: how many there are, in tiles of clusters.
    read: what a work tile with a number below that has in global memory; where
      there is none, of number -1.
    work_tile: the work tile, from its number and from that, as this block sees
      it.
    both_ways: whether the second half of the blocks takes its work tiles up
      from the last to the first; None for never.
  """

  work_tiles: Index
  read: Callable[[Index], tuple[Index, ...]]
  work_tile: Callable[[Index, tuple[Index, ...]], WorkTile]
  both_ways: jax.Array | None = None

  def for_each(self, first, step: int, visit, carry):
    """carry = visit(work_tile, carry) for number first, first + step, ...

    Global memory takes hundreds of cycles to answer, so what the next work tile
    is is asked for before this one is visited.
    """
    if isinstance(self.work_tiles, int) and self.work_tiles == step:
      return visit(self.work_tile(first, self._known(first)), carry)
    count = lax.div(self.work_tiles + step - 1 - first, step)
    if self.both_ways is not None:
      from_last = self.both_ways & (2 * first >= step)
      first = jnp.where(from_last, first + (count - 1) * step, first)
      step = jnp.where(from_last, -step, step)

    def iteration(i, state):
      known, carry = state
      number = first + i * step
      following = self._known(number + step)
      return following, visit(self.work_tile(number, known), carry)

    return lax.fori_loop(0, count, iteration, (self._known(first), carry))[1]

  def _known(self, number: Index) -> tuple[Index, ...]:
    """`read`, of the nearest work tile if there is no such number."""
    return self.read(jnp.clip(number, 0, self.work_tiles - 1))


def dense_schedule(plan: Plan) -> Schedule:
  """Tiles within a matrix first, then the batch, then the parts of K."""
  p, cfg = plan.problem, plan.config
  grid, steps = plan.tiling.grid, plan.tiling.slabs
  tiles = math.prod(grid)
  work_tiles = plan.tiling.work_tiles

  def work_tile(i: Index, known: tuple[()]) -> WorkTile:
    del known
    tile = i if work_tiles == tiles else lax.rem(i, tiles)
    row, column = _inside(plan, origin(snake(tile, grid, cfg), plan))
    part = lax.div(i, tiles)
    batch = lax.rem(part, p.batch)
    of_k = lax.div(part, p.batch)
    if cfg.cluster_k > 1:
      of_k = lax.axis_index("cluster_k")
    start = of_k * (steps * cfg.block_k)
    return WorkTile(row, column, part, batch, batch, start, steps)

  return Schedule(work_tiles, lambda _: (), work_tile)


def _inside(plan: Plan, start: tuple[Index, Index]) -> tuple[Index, Index]:
  """Where a tile starts, shifted inward if that is to end with the matrix."""
  p, cfg = plan.problem, plan.config
  ends = p.m - cfg.block_m, p.n - cfg.block_n
  row, column = (
    mosaic.anywhere(jnp.minimum(index, end)) if is_shifted else index
    for index, end, is_shifted in zip(start, ends, plan.matrices.shifted_inward)
  )
  return row, column


def _multiple_of(index: Index, block: int, is_shifted: bool) -> Index:
  """Tells Mosaic GPU where a tile may start, which a carry does not say."""
  return mosaic.anywhere(index) if is_shifted else pl.multiple_of(index, block)


def snake(
  tile: Index, grid: tuple[Index, Index], config: Config
) -> tuple[Index, Index]:
  """Row and column, in tiles of clusters, of a number in the tile order."""
  minor = ("m", "n").index(config.raster_dim)
  return plgpu.planar_snake(tile, grid, minor, config.raster)


def origin(tile: tuple[Index, Index], plan: Plan) -> tuple[Index, Index]:
  """Row and column where this block's tile of a cluster's tile starts."""
  cfg = plan.config
  # To ask for a block's place in its cluster takes time where it is alone, too.
  m_tile, n_tile = tile
  if cfg.cluster_m > 1:
    m_tile = m_tile * cfg.cluster_m + lax.axis_index("cluster_m")
  if cfg.cluster_n > 1:
    n_tile = n_tile * cfg.cluster_n + lax.axis_index("cluster_n")
  column = n_tile * plan.tiling.column_step
  if plan.tiling.tiles_overlap:
    column = mosaic.anywhere(column)
  return m_tile * cfg.block_m, column
