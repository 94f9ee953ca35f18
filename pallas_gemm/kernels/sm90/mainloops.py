"""How a consumer multiplies a work tile: one class a kind of sums.

A main loop says what it allocates, what it starts with, what it does with a
slab, when it releases the slot, and what the sums are. The loop over slabs, its
waits for them and what overlaps with it are the consumer's, and the same for
all. Another kind of operands or sums is a class here, which `of` chooses by the
plan, and what the plan has to know of it: what comes with each slab has its
room in `Memory.shared` and is loaded with A and B (`Producer._operands`);
registers that accumulate are counted by `Tiling.accumulators`; the swizzle of A
and B, which is one, is of `Tiling.operand_columns`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, Protocol

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.problem import bits


class Mainloop(Protocol):
  """What is done with the slabs of a work tile, one after the other."""

  def allocated(self) -> list[Any]:
    """Types of what is allocated for the scope of a work tile."""

  def start(self) -> Any:
    """What the first slab is given as carry."""

  def multiply(
    self, scope: Sequence[Any], slots: Any, step: Any, carry: Any, overlap: Any
  ) -> Any:
    """Multiplies the slab of number `step`, which has arrived; the next carry.

    Args:
      scope: what is allocated.
      slots: where the slab lies, and where the one before it lay.
      step: its number.
      carry: what it was given by the slab before.
      overlap: is called once while the tensor cores have the slab.
    """

  def sums(
    self, scope: Sequence[Any], slot: Any, carry: Any
  ) -> list[jax.Array]:
    """The sums of each product, after the last slab, which lies in `slot`."""


@dataclasses.dataclass(frozen=True)
class FromShared:
  """A and each B from shared memory; an accumulator for each B.

  wgmma reads 16-bit operands along either dimension, so all of NN, NT, TN and
  TT are read as they are stored: a tile that is not stored the way wgmma names
  it is handed over through a transposed reference. 8-bit ones it reads along K
  alone.
  """

  block: Block

  def allocated(self) -> list[Any]:
    plan = self.block.plan
    dtype = jnp.dtype(plan.problem.sum_dtype)
    accumulator = plgpu.ACC(plan.tiling.warpgroup_tile, dtype)
    return [accumulator] * len(self.block.shared.b_rings)

  def start(self) -> None:
    return None

  def multiply(self, scope, slots, step, carry, overlap) -> None:
    """Starts its wgmmas; the slab before is released while they run on."""
    slot, before = slots
    self._issue(scope, slot)

    def release_before():
      plgpu.wgmma_wait(len(scope))  # this slab runs on
      self.block.release(before, predicate=step > 0)

    # Loads wait for the release: 16384 x 2048 x 512 with C 61.1 -> 57.0 us
    # (H200). Subtiles of float32 take longer, and before it there is more to
    # overlap with: 4096 x 14336 x 4096 599.9 us, after it 609.6.
    in_order = (release_before, overlap)
    is_wide = bits(self.block.plan.problem.out_dtype) == 32
    for act in in_order[::-1] if is_wide else in_order:
      act()

  def sums(self, scope, slot, carry) -> list[jax.Array]:
    plgpu.wgmma_wait(0)
    self.block.release(slot)
    return [accumulator[...] for accumulator in scope]

  def _issue(self, accumulators: Sequence[Any], slot) -> None:
    """Starts the wgmmas of the slab in that slot, and does not wait for any."""
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


@dataclasses.dataclass(frozen=True)
class Promoted(FromShared):
  """Sums of one slab in an accumulator, added to float32 totals in registers.

  The tensor cores keep about 13 bits of a sum of 8-bit floats, so of a long one
  few are right. While a consumer adds, the others' products run.
  """

  def allocated(self) -> list[Any]:
    return []

  def start(self) -> tuple[jax.Array, ...]:
    zeros = jnp.zeros(self.block.plan.tiling.warpgroup_tile, jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    return (zeros,) * len(self.block.shared.b_rings)

  def multiply(self, scope, slots, step, carry, overlap):
    """Multiplies it, and releases it itself: it has been read then."""

    def add(*accumulators):
      self._issue(accumulators, slots[0])
      overlap()
      plgpu.wgmma_wait(0)
      self.block.release(slots[0])
      return tuple(x + y[...] for x, y in zip(carry, accumulators))

    return pl.run_scoped(add, *super().allocated())

  def sums(self, scope, slot, carry) -> list[jax.Array]:
    return list(carry)


def of(block: Block) -> Mainloop:
  """The main loop of a kernel."""
  return (Promoted if block.plan.problem.is_promoted else FromShared)(block)
