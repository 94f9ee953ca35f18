"""How a consumer multiplies a work tile: one class a kind of sums.

A main loop says what it allocates, what it starts with, what it does with a
slab, when it releases the slot, and what the sums are. The loop over slabs, its
waits for them and what overlaps with it are the consumer's, and the same for
all. Another kind of operands or sums is a class here, which `of` chooses by the
plan, and what the plan has to know of it: what comes with each slab has its
room in `Memory.shared` and is loaded with A and B (`Producer._load_slab`);
registers that accumulate are counted by `Tiling.sums`; the swizzle of A and B,
which is one, is of `Tiling.operand_columns`.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.schedule import WorkTile
from pallas_gemm.problem import bits


class Mainloop(Protocol):
  """What is done with the slabs of a work tile, one after the other."""

  def allocated(self) -> list[Any]:
    """Types of what is allocated for the scope of a work tile."""

  def start(self, work_tile: WorkTile) -> Any:
    """What the first slab is given as carry."""

  def multiply(
    self,
    work_tile: WorkTile,
    scope: Sequence[Any],
    slots: Any,
    step: Any,
    carry: Any,
    overlap: Any,
  ) -> Any:
    """Multiplies the slab of number `step`, which has arrived; the next carry.

    Of `Tiling.slabs_at_once` the first; it waits for the others itself.

    Args:
      work_tile: whose.
      scope: what is allocated.
      slots: where the slab lies, and where the one before it lay.
      step: its number.
      carry: what it was given by the slab before.
      overlap: is called while the tensor cores have the slab; of several with
        the number of each among them.
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
    return [accumulator] * plan.problem.products

  def start(self, work_tile) -> None:
    return None

  def multiply(self, work_tile, scope, slots, step, carry, overlap) -> None:
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

  def _issue(self, accumulators: Sequence[Any], slot, pairs=None) -> None:
    """Starts the wgmmas of the slab in that slot, and does not wait for any.

    Args:
      accumulators: of each B.
      slot: of the ring.
      pairs: of planes of A and B; None for all that are multiplied.
    """
    shared, problem = self.block.shared, self.block.plan.problem
    a = [self._a(ring.at[slot]) for ring in shared.a_rings]
    of_b = itertools.batched(shared.b_rings, problem.b.planes)
    for accumulator, rings in zip(accumulators, of_b):
      for i, j in pairs or problem.pairs:
        plgpu.wgmma(accumulator, a[i], self._b(rings[j].at[slot]))

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

  def start(self, work_tile) -> tuple[jax.Array, ...]:
    zeros = jnp.zeros(self.block.plan.tiling.warpgroup_tile, jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    return (zeros,) * self.block.plan.problem.products

  def multiply(self, work_tile, scope, slots, step, carry, overlap):
    """Multiplies it, and releases it itself: it has been read then."""
    return self._add(slots[0], carry, overlap)

  def _add(self, slot, totals, overlap, scaled=list):
    """The totals, and what is made of the sums of the slab in that slot."""

    def add(*accumulators):
      self._issue(accumulators, slot)
      overlap()
      plgpu.wgmma_wait(0)
      self.block.release(slot)
      sums = scaled(x[...] for x in accumulators)
      return tuple(map(jnp.add, totals, sums))

    return pl.run_scoped(add, *FromShared.allocated(self))

  def sums(self, scope, slot, carry) -> list[jax.Array]:
    return list(carry)


@dataclasses.dataclass(frozen=True)
class Scaled(Promoted):
  """The same, times the scales of the slab's blocks, which come with it.

  They are loaded before wgmmas are issued, since a warp that issues waits for
  the tensor cores. Of the blocks of each B a consumer has columns of one.
  """

  def multiply(self, work_tile, scope, slots, step, carry, overlap):
    scales = self._scales(work_tile, slots[0])
    scaled = functools.partial(self._scaled, *scales)
    return self._add(slots[0], carry, overlap, scaled)

  def _scales(self, work_tile, slot):
    """Of the slab's rows of A, and of each B."""
    shared = self.block.shared
    of_rows = self._loaded(shared.scales_a, work_tile, slot, 0)
    return of_rows, [self._of_b(x, work_tile, slot) for x in shared.scales_b]

  def _loaded(self, ring, work_tile, slot, side: int):
    """A consumer's scales of the slab's rows, or of its columns."""
    size = self.block.plan.tiling.warpgroup_tile[side]
    first = self.block.warpgroup_origin(work_tile)[side]
    first -= self.block.scales_origin(work_tile)[side]
    window = ring.at[slot, pl.ds(first, size)]
    layout = plgpu.Layout.WGMMA.reduce(1 - side)
    return plgpu.load(window, layout=layout, optimized=False)

  def _of_b(self, ring, work_tile, slot):
    _, first = self.block.scales_origin(work_tile)
    _, column = self.block.warpgroup_origin(work_tile)
    return ring[slot, lax.div(jnp.int32(column), jnp.int32(128)) - first]

  def _scaled(self, of_rows, of_b, sums) -> list[jax.Array]:
    """The sums of each product of the slab, times what they stand for."""
    factors = [self._spread(of_rows * scale, 0) for scale in of_b]
    return [x.astype(jnp.float32) * y for x, y in zip(sums, factors)]

  def _spread(self, values, side: int):
    """Numbers of rows, or of columns, as those of all accumulators."""
    shape = self.block.plan.tiling.warpgroup_tile
    spread = lax.broadcast_in_dim(values, shape, (side,))
    return plgpu.layout_cast(spread, plgpu.Layout.WGMMA)


class ScaledByLines(Scaled):
  """The same of lines of each B."""

  def _of_b(self, ring, work_tile, slot):
    return self._loaded(ring, work_tile, slot, 1)

  def _scaled(self, of_rows, of_b, sums) -> list[jax.Array]:
    by_rows = [x.astype(jnp.float32) * self._spread(of_rows, 0) for x in sums]
    return [x * self._spread(y, 1) for x, y in zip(by_rows, of_b)]


@dataclasses.dataclass(frozen=True)
class OfPlanes(Promoted):
  """float32: the sums of small products apart from the large one's.

  What is not finite of the small ones, inf * 0 or inf - inf among parts of
  numbers that are, is dropped: the large product then says what the sum is.
  They are as accurate as totals, since nothing large is there to be aligned
  with.
  """

  def multiply(self, work_tile, scope, slots, step, carry, overlap):
    block, plan, count = self.block, self.block.plan, len(carry)
    *small_pairs, large_pair = plan.problem.pairs

    def add(*accumulators):
      small, large = accumulators[:count], accumulators[count:]
      slot = slots[0]
      for nth in range(plan.tiling.slabs_at_once):
        if nth:
          before, slot = slot, block.next_slot(slot)
          block.wait_for(work_tile, step + nth, slot)
        self._issue(small, slot, small_pairs)
        self._issue(large, slot, [large_pair])
        overlap(nth)
        if nth:
          plgpu.wgmma_wait(count * len(plan.problem.pairs))
          block.release(before)
      rest = [plgpu.wgmma_accumulator_load(x, wait_n=count) for x in small]
      rest = [jnp.where(jnp.abs(x) < jnp.inf, x, 0.0) for x in rest]
      plgpu.wgmma_wait(0)
      block.release(slot)
      sums = [x[...] + y for x, y in zip(large, rest)]
      return tuple(map(jnp.add, carry, sums))

    return pl.run_scoped(add, *FromShared.allocated(self) * 2)


def of(block: Block) -> Mainloop:
  """The main loop of a kernel."""
  if block.plan.problem.has_small_apart:
    return OfPlanes(block)
  if block.plan.problem.has_lines:
    return ScaledByLines(block)
  if block.plan.problem.has_blocks:
    return Scaled(block)
  return (Promoted if block.plan.problem.is_promoted else FromShared)(block)
