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
* **Other rows** the threads of the producer copy from where they are to the
  slots of the ring, to where TMA would put them, by `cp.async` (`ThreadLoads`,
  `cp_async`). What is in flight needs no registers, so it is some whole slabs:
  loads to registers were bound by what those hold. A still comes by TMA.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.kernels.sm90 import cp_async
from pallas_gemm.kernels.sm90.block import Block, window
from pallas_gemm.kernels.sm90.layout import bytes_of, cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.schedule import WorkTile

# Bytes of B in flight, at least, while a slab before them is waited for. Device
# memory gives an SM of an H100 14 bytes a cycle, and answers in 695 where
# nothing else is asked of it: 10 KB. Under load it takes longer.
_IN_FLIGHT_BYTES = 24 * 1024


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
  """The slabs of B, but for the last one of each work tile.

  All of it is done by a whole warpgroup. Slabs go on from one work tile to the
  next: `arrived` is called for each slab, and is about the one that was started
  `in_flight` slabs before it.
  """

  block: Block

  @property
  def in_flight(self) -> int:
    """Slabs that are under way while one before them is waited for.

    No more than are needed: consumers do not see them. And two slots less than
    there are at most: consumers release a slab once they have the next one, so
    with one more the producer would wait for itself.
    """
    plan, slab = self.block.plan, self._slab
    size = slab.rows * slab.columns * plan.products
    needed = cdiv(_IN_FLIGHT_BYTES, bytes_of(size, plan.problem.b.dtype))
    return max(0, min(needed, plan.config.stages - 2, plan.slabs - 1))

  @property
  def _slab(self) -> cp_async.Slab:
    """A slab as it is stored."""
    plan = self.block.plan
    shape = plan.config.block_k, plan.config.block_n
    shape = shape[::-1] if plan.problem.b.k_last else shape
    return cp_async.Slab(*shape, plan.b_vector)

  def start(self, work_tile: WorkTile, step, slot) -> None:
    """Starts to copy a slab.

    Args:
      work_tile: whose slab.
      step: the number of the slab.
      slot: of the ring; empty.
    """
    plan = self.block.plan
    corner = work_tile.start + step * plan.config.block_k, work_tile.column
    corner = corner[::-1] if plan.problem.b.k_last else corner
    for parts in self._parts(work_tile.b, corner, slot):
      self._slab.copy(*parts)

  def arrived(self, b, slot, in_flight: int) -> None:
    """Waits for a slab, and says that it is there.

    Args:
      b: which of the groups it is of.
      slot: where it is.
      in_flight: slabs that were started after it.
    """
    cp_async.wait(in_flight)
    for parts in self._parts(b, (0, 0), slot):
      self._slab.shift(*parts)
    plgpu.commit_smem()
    for _ in self.block.shared.b_rings:
      plgpu.barrier_arrive(self.block.shared.full.at[slot])

  def _parts(self, b, corner, slot) -> Iterator[tuple[Any, Any, Any]]:
    """Of each B a window in global memory, its slot, and its ends of rows."""
    shared, slab = self.block.shared, self._slab
    at = pl.ds(corner[0], slab.rows), pl.ds(corner[1], slab.columns)
    words = pl.ds(slot * slab.ends, slab.ends)
    for i, ref in enumerate(self.block.operands.b):
      ends = shared.b_ends and shared.b_ends[i].at[words]
      yield window(ref, b, at), shared.b_rings[i].at[slot], ends
