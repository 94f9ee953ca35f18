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
* **Other rows** the threads of the producer bring from where they are to where
  TMA would put them, swizzled, by way of registers (`ByRegisters`) or by
  cp.async (`ByCopies`). A still comes by TMA. Loads bind: without them the
  kernel of 60 groups takes 235 us, with them, by registers, 373.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.kernels.sm90.block import Block, window
from pallas_gemm.kernels.sm90.layout import ATOM_ROWS
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.schedule import WorkTile

_WARPS, _LANES = 4, 32
# A chunk is so many registers of a thread: a load of one element takes one, of
# two or more half as many as there are elements.
_CHUNK = 16
# Chunks that a thread holds, by the number of consumers.
_HELD = {1: 6, 2: 4, 3: 3}
# Most elements that a load takes; rows at multiples of 8 are left to TMA.
_WIDEST = 4
# Slabs between what is asked of the L2 and what is loaded, by elements that a
# load takes: 4096 x 1407 373 us with 2 and 395 with 4, 4096 x 4100 699 and 645.
_AHEAD = {1: 2, 2: 4, 4: 4}
# Slabs that `ByCopies` has on their way, if the ring has room for two more.
_COPIES = 3

# A chunk of each B.
_Chunk = tuple[jax.Array, ...]
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
  kind = ByCopies if block.plan.b_by_copies else ByRegisters
  return kind(block, work_tile).load(slot, begin, begin_last)


@dataclasses.dataclass(frozen=True)
class _Loads:
  """The slabs of B of a work tile, but for the last one."""

  block: Block
  work_tile: WorkTile

  @property
  def _shape(self) -> tuple[int, int]:
    """Rows and columns of a slab, as it is stored."""
    cfg = self.block.plan.config
    shape = cfg.block_k, cfg.block_n
    return shape[::-1] if self.block.plan.problem.b.k_last else shape

  @property
  def _count(self):
    """Slabs that threads load."""
    return self.work_tile.steps - 1

  def _windows(self, step, row: int, rows: int) -> list[Any]:
    """Rows of a slab of each B, in global memory."""
    plan, work_tile = self.block.plan, self.work_tile
    corner = work_tile.start + step * plan.config.block_k, work_tile.column
    if plan.problem.b.k_last:
      corner = corner[::-1]
    at = pl.ds(corner[0] + row, rows), pl.ds(corner[1], self._shape[1])
    return [window(ref, work_tile.b, at) for ref in self.block.operands.b]

  def _announce(self, slot) -> None:
    """Tells the consumers of a slab that all threads have stored."""
    plgpu.commit_smem()
    for _ in self.block.shared.b_rings:
      plgpu.barrier_arrive(self.block.shared.full.at[slot])


@dataclasses.dataclass(frozen=True)
class ByCopies(_Loads):
  """By cp.async, which needs no registers: whole slabs are on their way.

  That takes 4 or 8 bytes at a time, here 8: 16 groups of 512 rows, 4096 x 4100,
  take 600 us so and 711 by registers. With 4 bytes, and rows that start in the
  middle of a word, 472 us instead of 388 (4096 x 1407), and with rows along K,
  of which a slab has 128 bytes each, 833 instead of 720 (H100). Such copies go
  through the L1, for which the ring leaves little room; that may be why.
  """

  def load(self, slot, begin: _Begin, begin_last: _Begin) -> jax.Array:
    """As `load_by_threads`."""
    block, count = self.block, self._count
    ahead = min(_COPIES, block.plan.config.stages - 2)

    def load(step, slot):
      begin(step, slot)
      found = self._windows(step, 0, self._shape[0])
      for x, ring in zip(found, block.shared.b_rings):
        ptx.copy_async(x, ring.at[slot], swizzle=self._swizzle)
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

  @property
  def _swizzle(self) -> int:
    found = (x for x in self.block.plan.shared if x.name == "b_rings")
    return next(found).swizzle


@dataclasses.dataclass(frozen=True)
class ByRegisters(_Loads):
  """Loads of as many elements as every row starts at multiples of, up to 4.

  A thread holds some chunks: while it stores one, memory answers for the
  others. And each slab is asked of the L2 some slabs earlier, by prefetches,
  since registers alone hold too little in flight.
  """

  @property
  def _rows(self) -> int:
    """Rows of a chunk: a power of two, as warps and swizzle atoms have."""
    plan, (rows, columns) = self.block.plan, self._shape
    vector = _vector(plan)
    least = max(ATOM_ROWS, _WARPS * _LANES // _lanes_of_a_row(vector))
    most = _CHUNK * _WARPS * _LANES * min(vector, 2) // plan.products
    return math.gcd(rows, max(least, 2 ** int(math.log2(most / columns))))

  @property
  def _ahead(self) -> int:
    return _AHEAD[_vector(self.block.plan)]

  def load(self, slot, begin: _Begin, begin_last: _Begin) -> jax.Array:
    """As `load_by_threads`."""
    block, count = self.block, self._count

    def load(step, state):
      slot, held = state
      begin(step, slot)
      return block.next_slot(slot), self._store(step, slot, held)

    slot, _ = lax.fori_loop(0, count, load, (slot, self._first()))
    begin_last(count, slot)
    return block.next_slot(slot)

  def _first(self) -> tuple[_Chunk, ...]:
    """The first chunks of a work tile, as many as a thread holds."""
    for step in range(self._ahead):
      self._prefetch(jnp.int32(step))
    plan = self.block.plan
    held = _HELD[plan.config.consumers] + 1 - plan.products
    # A chunk of whole atoms may be larger: of two B's, 256 columns each.
    elements = self._rows * self._shape[1] * plan.products
    registers = elements // (_WARPS * _LANES * min(_vector(plan), 2))
    held = max(1, held * _CHUNK // max(_CHUNK, registers))
    return tuple(self._load(jnp.int32(0), nth) for nth in range(held))

  def _store(self, step, slot, held: tuple[_Chunk, ...]) -> tuple[_Chunk, ...]:
    """Fills a slot with a slab; the chunks that a thread then holds.

    Args:
      step: the number of the slab.
      slot: of the ring; empty.
      held: the slab's first chunks, or more.
    """
    self._prefetch(step + self._ahead)
    shared = self.block.shared
    rows, columns = self._shape
    chunks = rows // self._rows
    for nth in range(chunks):
      at = pl.ds(nth * self._rows, self._rows), pl.ds(0, columns)
      for ring, x in zip(shared.b_rings, held[0]):
        compat.store(ring.at[slot, *at], x, optimized=False)
      held = (*held[1:], self._load(step, nth + len(held)))
    self._announce(slot)
    return held

  def _load(self, step, nth: int) -> _Chunk:
    """The chunk of that number, counted from the start of a slab on.

    After the last slab, those of the last one again, which nobody stores.
    """
    more, nth = divmod(nth, self._shape[0] // self._rows)
    step = jnp.minimum(step + more, self._count - 1)
    layout = _layout(_vector(self.block.plan))
    windows = self._windows(step, nth * self._rows, self._rows)
    return tuple(plgpu.load(x, layout=layout, optimized=False) for x in windows)

  def _prefetch(self, step) -> None:
    """Asks the L2 for a slab, if there is such a one."""

    @pl.when(step < self._count)
    def _():
      for found in self._windows(step, 0, self._shape[0]):
        ptx.prefetch(found)


def _vector(plan: Plan) -> int:
  """Elements that a load takes: as many as every row starts at multiples of."""
  _, (_, columns) = plan.operand_shapes
  return math.gcd(columns, _WIDEST)


def _lanes_of_a_row(vector: int) -> int:
  """Lanes that load one row, of an atom's 64 columns at most."""
  return min(_LANES, 64 // vector)


def _layout(vector: int) -> Any:
  """Warps side by side along rows, each with as many rows as lanes make up.

  A warp has at most the 64 columns of a swizzle atom, so that no two lanes
  store to one bank.
  """
  lanes = _lanes_of_a_row(vector)
  rows, columns = _LANES // lanes, lanes * vector
  return compat.tiled_layout(
    (_WARPS * rows, columns),
    (rows, columns),
    (1, vector),
    warps=(-6,),
    lanes=(-4, -3),
    vector=-1,
  )
