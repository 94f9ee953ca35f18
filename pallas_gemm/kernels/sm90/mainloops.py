"""How a consumer multiplies a slab of A and B: one class a kind of operands.

A main loop says what the consumer accumulates in and which wgmmas a slab is.
The loop itself, with its waits and releases and what overlaps with it, is the
consumer's, and the same for all. Another kind of operands is a class here,
which `of` chooses by the plan, and what the plan has to know of it: what comes
with each slab has its room in `Memory.shared` and is loaded with A and B
(`Producer._operands`); registers that accumulate are counted by
`Memory._subtiles_with_room`; the swizzle of A and B, which is one, is of
`Tiling.operand_columns`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.kernels.sm90.block import Block


@dataclasses.dataclass(frozen=True)
class FromShared:
  """A and each B from shared memory; an accumulator for each B.

  wgmma reads 16-bit operands along either dimension, so all of NN, NT, TN and
  TT are read as they are stored: a tile that is not stored the way wgmma names
  it is handed over through a transposed reference.
  """

  block: Block

  @property
  def in_flight(self) -> int:
    """wgmmas of a slab. They run on while the slab before is released."""
    return len(self.block.shared.b_rings)

  def accumulators(self) -> list[Any]:
    """Types of what is allocated for the scope of a work tile."""
    accumulator = plgpu.ACC(self.block.plan.tiling.warpgroup_tile, jnp.float32)
    return [accumulator] * self.in_flight

  def issue(self, accumulators: Sequence[Any], slot) -> None:
    """Starts the wgmmas of the slab in that slot, and does not wait for any.

    The slab has arrived. What of it is read into registers must be read when
    this returns; wgmma may go on reading it.
    """
    shared = self.block.shared
    a = self._a(shared.a_ring.at[slot])
    for accumulator, b_ring in zip(accumulators, shared.b_rings):
      plgpu.wgmma(accumulator, a, self._b(b_ring.at[slot]))

  def _a(self, tile):
    """The rows of A's tile that a consumer multiplies, as [rows, block_k]."""
    plan, (rows, _) = self.block.plan, self.block.plan.tiling.warpgroup_tile
    nth = self.block.warpgroup if plan.config.split == "m" else 0
    window = pl.ds(nth * rows, rows)
    if not plan.problem.a.k_last:
      return tile.at[:, window].transpose((1, 0))
    return tile.at[window, :]

  def _b(self, tile):
    """The columns of B's tile that a consumer multiplies."""
    plan, (_, columns) = self.block.plan, self.block.plan.tiling.warpgroup_tile
    nth = self.block.warpgroup if plan.config.split == "n" else 0
    window = pl.ds(nth * columns, columns)
    if plan.problem.b.k_last:
      return tile.at[window, :].transpose((1, 0))
    return tile.at[:, window]


def of(block: Block) -> FromShared:
  """The main loop of a kernel."""
  return FromShared(block)
