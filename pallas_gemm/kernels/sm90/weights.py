"""Weights of groups that are no whole number of swizzle atoms, not padded.

TMA reads rows that start at multiples of 16 bytes, and Mosaic GPU wants whole
swizzle atoms, 8 rows of 128 bytes. A padded copy reads and writes the weights
of all groups once more: 60 groups of 136 rows, 4096 x 1407, took 802 us so, and
285 with 1408 columns (H100). So only the last slab along K is copied, padded
with zeros (`last_slab`). Of the slabs before it, what is past the end of a row
is the next row: columns that are not stored. Rows of K beyond the last are
zeros, so a NaN of the next group stays there.

* **Rows that TMA can address** come as atoms, as many as are begun
  (`compat.allow_ragged_copies`).
* **Other rows** the threads of the producer copy from where they are to where
  TMA would put them, swizzled, 4 or 8 bytes at a time by cp.async, which needs
  no registers: some whole slabs are on their way (`ThreadLoads`). Rows that
  start in the middle of a word are shifted by an element once they have
  arrived. A still comes by TMA.
"""

import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import ptx
from pallas_gemm.kernels.sm90.block import Block, window
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.schedule import WorkTile

# Slabs that are on their way while one is waited for, if the ring has two more.
_AHEAD = 3


def last_slab(b: jax.Array, plan: Plan) -> jax.Array:
  """The last slab of each group's B, filled up with zeros.

  Args:
    b: [groups, K, N], stored [groups, N, K] if the problem says so.
    plan: in which that is a copy (`Plan.b_last_apart`).

  Returns:
    [groups, block_k, N or more], or [groups, N, block_k].
  """
  p, block_k = plan.problem, plan.config.block_k
  start = (plan.slabs - 1) * block_k
  part = b[:, :, start:] if p.b.k_last else b[:, start:]
  extra = [
    want - have for want, have in zip(plan.last_slab_shape, part.shape[1:])
  ]
  return jnp.pad(part, [(0, 0), *((0, size) for size in extra)])


@dataclasses.dataclass(frozen=True)
class ThreadLoads:
  """The slabs of B of a work tile, but for the last one.

  All of it is done by a whole warpgroup.
  """

  block: Block
  work_tile: WorkTile

  @property
  def ahead(self) -> int:
    """Slabs that are copied before one is announced."""
    return min(_AHEAD, self.block.plan.config.stages - 2)

  def load(self, step, slot) -> None:
    """Starts to copy a slab to its slot of the ring, which is empty."""
    for found, ring, edges in self._tiles(step, slot):
      ptx.copy_async(found, ring, edges, swizzle=self._swizzle)

  def announce(self, step, slot, in_flight: int) -> None:
    """Tells the consumers of a slab; so many later ones are on their way."""
    ptx.wait_async(in_flight * self.block.plan.products)
    if self.block.plan.b_straddles:
      plgpu.commit_smem()  # what every thread has copied is there
      for found, ring, edges in self._tiles(step, slot):
        ptx.straighten(found, ring, edges, swizzle=self._swizzle)
    plgpu.commit_smem()
    for _ in self.block.shared.b_rings:
      plgpu.barrier_arrive(self.block.shared.full.at[slot])

  @property
  def _swizzle(self) -> int:
    found = (x for x in self.block.plan.shared if x.name == "b_rings")
    return next(found).swizzle

  def _tiles(self, step, slot):
    """Of each B where a slab comes from, its slot, and the words after rows."""
    plan, work_tile = self.block.plan, self.work_tile
    shared, cfg = self.block.shared, plan.config
    corner = work_tile.start + step * cfg.block_k, work_tile.column
    at = tuple(map(pl.ds, corner, (cfg.block_k, cfg.block_n)))
    at = at[::-1] if plan.problem.b.k_last else at
    for ref, ring, edges in zip(
      self.block.operands.b, shared.b_rings, shared.b_edges
    ):
      edges = None if edges is None else edges.at[slot]
      yield window(ref, work_tile.b, at), ring.at[slot], edges
