"""What the warpgroups of a block share: arguments, shared memory, the ring.

One of them loads (`producer`), the others multiply and store (`consumer`). The
loader fills a ring of `stages` slots with slabs of A and B, which consumers
release once they have read them. Both walk over the same work tiles, and
neither ever stops for the other between two of them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import mosaic
from pallas_gemm.kernels.sm90 import groups, layout, schedule
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.tiling import (
  SCALES_AT_ONCE,
  WGMMA_K_BYTES,
  WGMMA_ROWS,
)

# wgmmas in an unrolled lap of the ring; the descriptors of more would spill.
_UNROLLED_WGMMAS = 16
# A consumer's accumulators up to which the descriptors of a lap have room
# with them and results that wait to be stored.
_MOST_ACCUMULATORS_IF_UNROLLED = 64 * 128


class Arguments(NamedTuple):
  """What a kernel is given: arrays, and in the kernel references to them.

  Attributes:
    tables: of groups, by `tables.make`.
    a: A, of every product of a batch or of all; each plane of it.
    b: B likewise; of a gated product the planes of one, then of the other.
    k_tails: of groups along K, the last rows of A and of each B, likewise.
    b_last: of each B that is not padded, the last slab, padded.
    alpha, beta: [1]; None if there is none, or if it is compiled in.
    bias, c: None if there is none.
    scale_a: None, or of A [matrices or 1, rows or 1].
    scale_b: likewise of each B, [matrices or 1, columns or 1]; () if none has.
      Scales of blocks have slabs in between: [.., slabs, rows], and [.., slabs,
      columns / 128], of lines [.., slabs, columns].
  """

  tables: Any
  a: Any
  b: Any
  k_tails: Any = ()
  b_last: Any = ()
  alpha: Any = None
  beta: Any = None
  bias: Any = None
  c: Any = None
  scale_a: Any = None
  scale_b: Any = ()


class Results(NamedTuple):
  """What a kernel writes.

  Attributes:
    out: the results.
    parts: of each product, sums over parts of K of the blocks of a cluster,
      where there is no GPU.
  """

  out: Any
  parts: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
  """Shared memory and barriers of a block; None for what a plan has not.

  Attributes:
    a_rings: slabs of A, [stages, ...], as they are stored; of each plane.
    b_rings: of each B, and of each plane of it.
    scales_a, scales_b: those of these slabs: of rows of A, and of columns of
      each B or their blocks.
    full, empty: of each slot, what its loads and its readers arrive at.
    last_full: what the loads of a group's last slab arrive at instead.
    raw: chunks of rows of B that threads have copied but not shifted yet.
    raw_a, raw_b: slabs of A, and of each B, of dense products, likewise; or in
      float32, not split yet.
    raw_full: of those, what their loads arrive at.
    staging: of each result, subtiles on their way to global memory; none of
      what is stored by elements.
    partial_staging: a subtile for groups that end inside a tile.
    zeros: a subtile for groups that have no rows.
    bias, bias_loaded: of each consumer, and its barriers.
    c, c_loaded: subtiles of C, None where they lie in `staging`.
    parts, parts_sent: of each consumer and product, what the blocks of a
      cluster have summed of this one's stored tile; and its barriers.
  """

  a_rings: Any
  b_rings: Any
  full: Any
  scales_a: Any = None
  scales_b: Any = ()
  last_full: Any = None
  empty: Any = None
  raw: Any = None
  raw_a: Any = ()
  raw_b: Any = ()
  raw_full: Any = None
  staging: Any = ()
  partial_staging: Any = None
  zeros: Any = None
  bias: Any = None
  bias_loaded: Any = None
  c: Any = None
  c_loaded: Any = None
  parts: Any = None
  parts_sent: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """A block, as one of its warpgroups sees it.

  Attributes:
    plan: of the kernel.
    operands, results: in global memory.
    shared: its shared memory.
    cluster: the number of its cluster.
    warpgroup: which of its warpgroups this is; consumers come first.
  """

  plan: Plan
  operands: Arguments
  results: Results
  shared: Shared
  cluster: jax.Array
  warpgroup: jax.Array

  @property
  def _schedule(self) -> schedule.Schedule:
    if self.plan.problem.groups is None:
      return schedule.dense_schedule(self.plan)
    return groups.grouped_schedule(self.plan, self.operands.tables)

  def for_each_work_tile(self, visit, carry, own: bool = False):
    """carry = visit(work_tile, carry) for the work of this block.

    Or for its own of it, of one of the consumers that ping-pong.
    """
    first, step = self.cluster, self.plan.tiling.clusters
    if own:
      first += self.warpgroup * step
      step *= self.plan.tiling.pingpong
    return self._schedule.for_each(first, step, visit, carry)

  @property
  def _has_whole_laps(self) -> bool:
    """Whether work tiles are whole laps of the ring, worth unrolling."""
    tiling, p, cfg = self.plan.tiling, self.plan.problem, self.plan.config
    if p.along == "k" or tiling.pingpong > 1:
      return False  # groups differ in how many slabs they have
    rows, columns = tiling.warpgroup_tile
    held = rows * columns * tiling.sums
    is_large = held > _MOST_ACCUMULATORS_IF_UNROLLED
    if is_large and (self.plan.memory.deferred or p.is_promoted):
      return False
    k_steps = layout.bytes_of(cfg.block_k, p.a.dtype) // WGMMA_K_BYTES
    lap = cfg.stages * (rows // WGMMA_ROWS) * k_steps * p.products
    lap *= len(p.pairs)
    return tiling.slabs % cfg.stages == 0 and lap <= _UNROLLED_WGMMAS

  def for_each_slab(self, visit, slot, steps, carry=None, at_once: int = 1):
    """carry = visit(step, slot, slot before, carry) for a work tile's slabs.

    Where a work tile is whole laps of the ring, slots are Python numbers and
    wgmma's descriptors are worked out before the loop, as in rung 12.

    Args:
      visit: what is done with a slab.
      slot: of the first slab.
      steps: slabs.
      carry: what the first is given.
      at_once: slabs that are visited at a time, of which `step` and `slot` are
        the first's; they divide the work tile's.

    Returns:
      The slot of the last visit, and that of the next tile's first; None if it
      is the slot that this tile's first had. (With one work tile a block that
      is a constant, which Mosaic GPU does not let out of a scope.) And the last
      carry.
    """
    stages = self.plan.config.stages
    if self._has_whole_laps and at_once == 1:

      def lap(i, carry):
        for s in range(stages):
          carry = visit(i * stages + s, s, (s - 1) % stages, carry)
        return carry

      is_known = isinstance(steps, int)
      laps = steps // stages if is_known else lax.div(steps, stages)
      return (stages - 1, None), lax.fori_loop(0, laps, lap, carry)

    def iteration(nth, state):
      (before, slot), carry = state
      carry = visit(nth * at_once, slot, before, carry)
      for _ in range(at_once - 1):
        slot = self.next_slot(slot)
      return (slot, self.next_slot(slot)), carry

    steps = steps if at_once == 1 else lax.div(steps, jnp.int32(at_once))
    return lax.fori_loop(0, steps, iteration, ((slot, slot), carry))

  def next_slot(self, slot):
    """The next slot of the ring, or of a consumer's part of it.

    By a select, where a remainder would be a division.
    """
    stages, pingpong = self.plan.config.stages, self.plan.tiling.pingpong
    if isinstance(slot, int):
      return (slot + pingpong) % stages
    if pingpong == 1:
      return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)
    following = slot + pingpong
    wrapped = following - stages
    return lax.select(wrapped >= 0, wrapped, following)

  def wait_for(self, work_tile: schedule.WorkTile, step, slot) -> None:
    """Waits until a work tile's slab has arrived in its slot."""
    if self.shared.last_full is None:
      plgpu.barrier_wait(self.shared.full.at[slot])
      return

    @pl.when(step < work_tile.whole)
    def _():
      plgpu.barrier_wait(self.shared.full.at[slot])

    @pl.when(step >= work_tile.whole)
    def _():
      plgpu.barrier_wait(self.shared.last_full.at[slot])

  def release(self, slot, **when) -> None:
    """Says that a consumer has read the slot, or that it is empty at first."""
    if self.shared.empty is not None:
      plgpu.barrier_arrive(self.shared.empty.at[slot], **when)

  def warpgroup_origin(self, work_tile: schedule.WorkTile):
    """Row and column of the result where this consumer's tile starts."""
    rows, columns = self.plan.tiling.warpgroup_tile
    row, column = work_tile.row, work_tile.column
    if self.plan.config.split == "m":
      row += self.warpgroup * rows
    elif self.plan.config.split == "n":
      column += self.warpgroup * columns
    return row, column

  def scales_origin(self, work_tile: schedule.WorkTile):
    """Row of A, and column of B or block of 128, of a tile's first scales.

    TMA copies them from multiples of 16 bytes on; groups start at any row.
    """
    problem, row, column = self.plan.problem, work_tile.row, work_tile.column
    step = jnp.int32(SCALES_AT_ONCE)
    if problem.along == "m":
      row = lax.div(jnp.int32(row), step) * step
    if not problem.has_lines:
      column = lax.div(jnp.int32(column), 128 * step) * step
    return row, column

  def stored_origin(self, work_tile: schedule.WorkTile):
    """Row and column where what this consumer stores starts."""
    row, column = self.warpgroup_origin(work_tile)
    if self.plan.config.cluster_k > 1:
      column += lax.axis_index("cluster_k") * self.plan.tiling.stored_tile[1]
    return row, column

  def subtile_window(
    self, ref, work_tile, subtile: int, first=0, rows=WGMMA_ROWS
  ):
    """The rows from `first` on of a subtile that this consumer stores.

    Args:
      ref: a result, or C, in global memory.
      work_tile: whose.
      subtile: the number of the subtile.
      first, rows: which of its rows.
    """
    tiling, (i, j) = self.plan.tiling, self.stored_origin(work_tile)
    down, across = tiling.subtiles[subtile]
    i, j = i + down + first, j + across
    if tiling.subtiles_overlap:
      j = mosaic.anywhere(j)
    at = (pl.ds(i, rows), pl.ds(j, tiling.subtile_width))
    at = at[::-1] if tiling.config.swap_ab else at
    return window(ref, work_tile.out, at)


def window(ref, batch, at):
  """A window of a matrix, or of one matrix of a batch."""
  return ref.at[at] if len(ref.shape) == 2 else ref.at[batch, *at]


def on_one_warp(visit, number: int = 0) -> None:
  """Calls `visit` on one warp of a warpgroup, and does not wait for it."""

  @plgpu.warp_map
  def _(warp):
    @pl.when(warp == number)
    def _():
      visit()
