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
import itertools
from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import ptx
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.schedule import WorkTile
from pallas_gemm.problem import bits

# Slabs before a slab's own at which its scales are asked for. One takes as long
# as memory to answer if it is less: 64 x 14336 x 4096 of blocks in 64 x 32
# tiles 45 us, of rows 27 (H100, one slab ahead; three were not timed).
_AHEAD = 3


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

    Args:
      work_tile: whose.
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

  def _add(self, slot, totals, overlap, factors=lambda: None):
    """The totals with the sums of the slab in that slot, times factors."""

    def add(*accumulators):
      self._issue(accumulators, slot)
      overlap()
      found = factors()
      plgpu.wgmma_wait(0)
      self.block.release(slot)
      sums = [x[...] for x in accumulators]
      if found is not None:
        sums = [x.astype(jnp.float32) * y for x, y in zip(sums, found)]
      return tuple(map(jnp.add, totals, sums))

    return pl.run_scoped(add, *FromShared.allocated(self))

  def sums(self, scope, slot, carry) -> list[jax.Array]:
    return list(carry)


@dataclasses.dataclass(frozen=True)
class Scaled(Promoted):
  """The same, times the scales of the slab's blocks.

  Threads load what they multiply by from global memory, some slabs ahead: two
  numbers of A for each 64 rows, and one of each B, of whose blocks a tile has
  columns of one.
  """

  def start(self, work_tile):
    ahead = [self._scales(work_tile, step) for step in range(_AHEAD)]
    return super().start(work_tile), ahead

  def multiply(self, work_tile, scope, slots, step, carry, overlap):
    totals, (scales, *ahead) = carry
    ahead.append(self._scales(work_tile, step + _AHEAD))
    factors = self._factors(slots[0], *scales)
    return self._add(slots[0], totals, overlap, factors), ahead

  def _factors(self, slot, of_rows, of_b):
    """What gives the factors of the slab's sums, one of each B."""
    found = [self._spread(of_rows * scale, 0) for scale in of_b]
    return lambda: found

  def _spread(self, values, side: int):
    """Numbers of rows, or of columns, as those of all accumulators."""
    shape = self.block.plan.tiling.warpgroup_tile
    spread = lax.broadcast_in_dim(values, shape, (side,))
    return plgpu.layout_cast(spread, plgpu.Layout.WGMMA)

  def sums(self, scope, slot, carry) -> list[jax.Array]:
    return list(carry[0])

  def _scales(self, work_tile, step):
    """Of each row, and of each B, in a slab; the last one for those after."""
    block, operands = self.block, self.block.operands
    row, column = block.warpgroup_origin(work_tile)
    rows, _ = block.plan.tiling.warpgroup_tile
    matrices, slabs, _ = operands.scale_a.shape
    size = block.plan.config.block_k
    slab = lax.div(jnp.int32(work_tile.start), jnp.int32(size)) + step
    slab = jnp.minimum(slab, slabs - 1)
    of_a = operands.scale_a.at[work_tile.a if matrices > 1 else 0, slab]
    layout = plgpu.Layout.WGMMA.reduce(1)
    of_rows = ptx.load_clamped(of_a, row, rows, layout)

    def of_columns(ref):
      matrices, _, blocks = ref.shape
      which = work_tile.b if matrices > 1 else 0
      nth = lax.div(jnp.int32(column), jnp.int32(size))
      return ref[which, slab, jnp.minimum(nth, blocks - 1)]

    if block.plan.problem.has_lines:
      return of_rows, ()
    return of_rows, tuple(map(of_columns, operands.scale_b))


@dataclasses.dataclass(frozen=True)
class ScaledByLines(Scaled):
  """The same of lines of each B, whose scales come with its slabs.

  What sums are multiplied by is worked out while the tensor cores have them.
  """

  def _factors(self, slot, of_rows, of_b):
    plan, block = self.block.plan, self.block
    _, columns = plan.tiling.warpgroup_tile
    nth = block.warpgroup if plan.config.split == "n" else 0
    window = pl.ds(nth * columns, columns)

    def factor(ring):
      layout = plgpu.Layout.WGMMA.reduce(0)
      line = plgpu.load(ring.at[slot, window], layout=layout, optimized=False)
      return self._spread(of_rows, 0) * self._spread(line, 1)

    return lambda: list(map(factor, block.shared.lines))


@dataclasses.dataclass(frozen=True)
class OfPlanes(Promoted):
  """float32: the sums of small products apart from the large one's.

  What is not finite of the small ones, inf * 0 or inf - inf among parts of
  numbers that are, is dropped: the large product then says what the sum is.
  They are as accurate as totals, since nothing large is there to be aligned
  with.
  """

  def _add(self, slot, totals, overlap, factors=None):
    *small_pairs, large_pair = self.block.plan.problem.pairs

    def add(*accumulators):
      count = len(totals)
      small, large = accumulators[:count], accumulators[count:]
      self._issue(small, slot, small_pairs)
      self._issue(large, slot, [large_pair])
      overlap()
      rest = [plgpu.wgmma_accumulator_load(x, wait_n=count) for x in small]
      rest = [jnp.where(jnp.abs(x) < jnp.inf, x, 0.0) for x in rest]
      plgpu.wgmma_wait(0)
      self.block.release(slot)
      sums = [x[...] + y for x, y in zip(large, rest)]
      return tuple(map(jnp.add, totals, sums))

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
