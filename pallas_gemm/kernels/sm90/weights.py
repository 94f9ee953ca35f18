"""Weights of groups that are no whole number of swizzle atoms, not padded.

TMA reads rows that start at multiples of 16 bytes, and Mosaic GPU wants whole
swizzle atoms, 8 rows of 128 bytes. A padded copy reads and writes the weights
of all groups once more: 60 groups of 136 rows, 4096 x 1407, took 802 us so, and
285 with 1408 columns (H100). So only the last slab along K is copied, padded
with zeros (`last_slab`). Of the slabs before it, what is past the end of a row
is the next row: columns that are not stored. Rows of K beyond the last are
zeros, so a NaN of the next group stays there.

* **Rows that TMA can address** come as atoms, as many as are begun
  (`mosaic.CompilerParams`).
* **Other rows** the threads of the producer bring to where TMA would put them,
  swizzled, by cp.async: pieces of 8 bytes straight to their place (`ByCopies`),
  or vectors of 16 that are moved there (`ByMoves`). A still comes by TMA.

Threads take long for a slab of B, however tall A's tile is. So tall and narrow
tiles are best: 16 groups of 512 rows, 4096 x 4100, take 456 us with 256 x 128
and 495 with 128 x 256, and stored [N, K], where threads move them, 572 and 739
(H100).
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.schedule import WorkTile

# Slabs that `ByCopies` has on their way, if the ring has room for two more.
_COPIES = 3

# Given a slab's number and its slot, waits until that is empty, and asks TMA
# for what it loads of the slab.
_Begin = Callable[[jax.Array, jax.Array], None]


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


def read_past_rows(x: jax.Array, columns: int, rows: int = 0) -> jax.Array:
  """Matrices of which a kernel may read windows that run on past a row's end.

  What it finds there is the next row's, so all but the last rows have it. The
  interpreter checks the end of each row: there, rows get that many columns
  more, of NaN; and matrices that many rows more, of zeros.
  """
  if compat.targets_gpu():
    return x
  lead = [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, [*lead, (0, 0), (0, columns)], constant_values=jnp.nan)
  return jnp.pad(x, [*lead, (0, rows), (0, 0)])


def load_by_threads(
  block: Block,
  work_tile: WorkTile,
  slot: jax.Array,
  *,
  begin: _Begin,
  begin_last: _Begin,
) -> jax.Array:
  """Brings a work tile's slabs of B to the ring; the slot after the last one's.

  To be called by a whole warpgroup.

  Args:
    block, work_tile: of whose plan threads load B.
    slot: of the first slab.
    begin: for all slabs but the last.
    begin_last: for the last one, of which TMA loads all.
  """
  kind = ByCopies if block.plan.b_by_copies else ByMoves
  return kind(block, work_tile).load(slot, begin, begin_last)


@dataclasses.dataclass(frozen=True)
class _Loads:
  """The slabs of B of a work tile, but for the last one."""

  block: Block
  work_tile: WorkTile

  @property
  def _count(self):
    """Slabs that threads load."""
    return self.work_tile.steps - 1

  def _corner(self, step) -> tuple[Any, Any]:
    """Row and column of each B where a slab starts."""
    plan, work_tile = self.block.plan, self.work_tile
    corner = work_tile.start + step * plan.config.block_k, work_tile.column
    return corner[::-1] if plan.problem.b.k_last else corner

  @property
  def _swizzle(self) -> int:
    found = (x for x in self.block.plan.shared if x.name == "b_rings")
    return next(found).swizzle

  def _announce(self, slot) -> None:
    """Tells the consumers of a slab that all threads have stored."""
    plgpu.commit_smem()
    for _ in self.block.shared.b_rings:
      plgpu.barrier_arrive(self.block.shared.full.at[slot])


@dataclasses.dataclass(frozen=True)
class ByCopies(_Loads):
  """By cp.async, which needs no registers: whole slabs are on their way.

  That takes 4 or 8 bytes at a time, here 8: 16 groups of 512 rows, 4096 x 4100,
  take 456 us so and 519 if 16 are copied and then moved. With 4 bytes, and rows
  that start in the middle of a word, or with rows along K, of which a slab has
  128 bytes each, it was slower even than loads of single elements: 472 us
  instead of 388 (4096 x 1407), 833 instead of 720 (H100). Such copies go
  through the L1, for which the ring leaves little room; that may be why.
  """

  def load(self, slot, begin: _Begin, begin_last: _Begin) -> jax.Array:
    """As `load_by_threads`."""
    block, count = self.block, self._count
    ahead = min(_COPIES, block.plan.config.stages - 2)

    def load(step, slot):
      begin(step, slot)
      at = map(pl.ds, self._corner(step), block.plan.b_slab_shape)
      at = self.work_tile.b, *at
      for ref, ring in zip(block.operands.b, block.shared.b_rings):
        ptx.copy_async(ref.at[at], ring.at[slot], swizzle=self._swizzle)
      return block.next_slot(slot)

    def announce(slot, in_flight):
      ptx.wait_async(in_flight * block.plan.products)
      self._announce(slot)

    def load_and_announce(step, slots):
      slot, late = load(step, slots[0]), slots[1]
      announce(late, ahead)
      return slot, block.next_slot(late)

    # Two loops: of one with a condition the compiler peels the first rounds off
    # and keeps their addresses, which spills.
    begun, late = jnp.minimum(count, ahead), slot
    slot = lax.fori_loop(0, begun, load, slot)
    slot, late = lax.fori_loop(begun, count, load_and_announce, (slot, late))
    begin_last(count, slot)
    for left in reversed(range(ahead)):
      is_one = count > left
      pl.when(is_one)(lambda late=late, left=left: announce(late, left))
      late = lax.select(is_one, block.next_slot(late), late)
    return block.next_slot(slot)


@dataclasses.dataclass(frozen=True)
class ByMoves(_Loads):
  """By cp.async of 16 bytes, past the L1, and from there to where rows belong.

  Rows that start anywhere are copied from multiples of 16 bytes on, some of
  them at a time, to shared memory. From there each thread takes what lies in a
  row of a swizzle atom, shifts it by up to 15 bytes and stores it in the ring.
  60 groups of 136 rows, 4096 x 1407, take 331 us so; loads of single elements
  into registers 364, for these hold too little on its way (H100).
  """

  def load(self, slot, begin: _Begin, begin_last: _Begin) -> jax.Array:
    """As `load_by_threads`."""
    block, chunks = self.block, self.block.plan.chunks
    rings, raw = block.shared.b_rings, block.shared.raw
    buffers = raw.shape[0]

    def move(nth, slot, state):
      """Chunk `nth` of a slab of each B; those before it, the next buffer."""
      before, buffer = state
      corner, first = self._chunk(before)
      for which, (matrix, ring) in enumerate(zip(self._matrices, rings)):
        ptx.wait_async(buffers - 1)
        ptx.move_rows(
          matrix,
          corner,
          raw.at[buffer],
          ring.at[slot],
          first,
          swizzle=self._swizzle,
        )
        if which == len(rings) - 1:
          pl.when(nth == chunks - 1)(lambda: self._announce(slot))
        self._copy(before + buffers // len(rings), which, buffer)
        buffer = lax.select(buffer == buffers - 1, jnp.int32(0), buffer + 1)
      return before + 1, buffer

    def load(step, state):
      slot, moved = state
      begin(step, slot)
      moved = lax.fori_loop(
        0, chunks, lambda nth, moved: move(nth, slot, moved), moved
      )
      return block.next_slot(slot), moved

    for buffer in range(buffers):
      nth, which = divmod(buffer, len(rings))
      self._copy(jnp.int32(nth), which, buffer)
    state = slot, (jnp.int32(0), jnp.int32(0))
    slot, _ = lax.fori_loop(0, self._count, load, state)
    begin_last(self._count, slot)
    return block.next_slot(slot)

  @property
  def _matrices(self) -> list[Any]:
    """The group's B, or both."""
    return [ref.at[self.work_tile.b] for ref in self.block.operands.b]

  def _chunk(self, nth) -> tuple[tuple[Any, Any], jax.Array]:
    """Where a chunk of a tile starts, of each B, and its row in its slab."""
    chunks, (rows, _) = self.block.plan.chunks, self.block.plan.chunk_shape
    first = lax.rem(nth, chunks) * rows
    row, column = self._corner(lax.div(nth, chunks))
    return (row + first, column), first

  def _copy(self, nth, which: int, buffer) -> None:
    """Starts to copy a chunk of one B; a group of copies, if need be empty."""

    @pl.when(nth < self._count * self.block.plan.chunks)
    def _():
      corner, _ = self._chunk(nth)
      matrix = self._matrices[which]
      ptx.copy_rows_async(matrix, corner, self.block.shared.raw.at[buffer])

    ptx.commit_async()
