"""How threads of the producer fill slots of the ring, with cp.async.

They put what they load where TMA would put it, swizzled. Which operands, and
with what in shared memory, their loader says (`loaders`). Planes of float32 are
made likewise (`splitter`).

* **`Copies`**: pieces of 8 bytes go straight to their place. cp.async takes 4
  or 8 bytes so: 16 groups of 512 rows, 4096 x 4100, take 456 us with 8, and 519
  if 16 are copied and then shifted. With 4 bytes, and rows that start in the
  middle of a word, or with rows along K, of which a slab has 128 bytes each, it
  was slower even than loads of single elements: 472 us instead of 388 (4096 x
  1407), 833 instead of 720 (H100). These copies go through the L1, for which
  the ring leaves little room; that may be why.
* **`Shifts`**: rows that start anywhere are copied from multiples of 16 bytes
  on, past the L1, to plain rows of shared memory. From there each thread takes
  what lies in a row of a swizzle atom, shifts it by up to 15 bytes and stores
  it in the ring. 60 groups of 136 rows, 4096 x 1407, take 331 us so; loads of
  single elements into registers 364, for these hold too little on its way
  (H100).
* **`SlabShifts`**: the same for operands of dense products. A padded copy is a
  kernel of its own: 1.3 us, as long as a small product. So where a work tile
  has few slabs (`Config.moves`), all slabs that the ring has room for are on
  their way at a time. A slab of 64 rows takes some 470 cycles longer so (H100),
  which is why it is for few: 292 x 207 x 685 7.17 -> 5.28 us, 77^3 5.05 ->
  2.72, but 513 x 1025 x 517 7.97 -> 10.6. Behind the end of a matrix zeros are
  found. Where K lies along rows, what is behind a row's end is the next row's,
  and is left out of the last slab.

**Weights of groups** that are no whole number of swizzle atoms, 8 rows of 128
bytes, are not padded: that reads and writes the weights of all groups once
more. 60 groups of 136 rows, 4096 x 1407, took 802 us so, and 285 with 1408
columns (H100). Only the last slab along K is copied, padded with zeros
(`launch._last_slab`), and TMA loads it. Of the slabs before it, what is past
the end of a row is the next row: columns that are not stored. Rows of K beyond
the last are zeros, so a NaN of the next group stays there. Rows that TMA can
address come as atoms, as many as are begun (`mosaic`), others by threads.

Threads take long for a slab of B, however tall A's tile is. So tall and narrow
tiles are best: 16 groups of 512 rows, 4096 x 4100, take 456 us with 256 x 128
and 495 with 128 x 256, and stored [N, K], where rows are shifted, 572 and 739
(H100).
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import ptx
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.loaders import ShiftedTile
from pallas_gemm.kernels.sm90.schedule import WorkTile
from pallas_gemm.kernels.sm90.tiling import Extent

# Slabs that `Copier` has on their way, if the ring has room for two more.
_COPIES = 3

# Given a slab's number and its slot, waits until that is empty, and asks TMA
# for what it loads of the slab.
Begin = Callable[[jax.Array, jax.Array], None]


class Loaded(NamedTuple):
  """What of A, or of each B, is loaded for a work tile.

  Attributes:
    refs: the matrices, in global memory.
    rings: where their slabs go.
    which: of a batch or of groups.
    k_last: whether their rows lie along K.
    begin: the first row or column of the tile.
    extent: how many there are.
    peers: the axis of the cluster whose blocks share the copy.
    raws: where rows are copied that threads shift, or split; none of what TMA
      loads to its place.
  """

  refs: Sequence[Any]
  rings: Sequence[Any]
  which: Any
  k_last: bool
  begin: Any
  extent: Extent
  peers: str | None
  raws: Sequence[Any] = ()

  def origin(self, start, row=0):
    """Row and column of what comes to a slab's row, if K starts at `start`."""
    if self.k_last:
      return self.begin + row, start
    return start + row, self.begin

  @property
  def matrices(self) -> list[Any]:
    """Those of `refs` that the work tile is made of."""
    return [x if len(x.shape) == 2 else x.at[self.which] for x in self.refs]


@dataclasses.dataclass(frozen=True)
class ByThreads(abc.ABC):
  """The slabs of a work tile, for a whole warpgroup.

  Attributes:
    block, work_tile: of whose plan threads load operands.
    operands: these.
  """

  block: Block
  work_tile: WorkTile
  operands: Sequence[Loaded]

  @abc.abstractmethod
  def load(self, slot: jax.Array, begin: Begin, begin_last: Begin) -> jax.Array:
    """Loads them; the slot after the last one's.

    Args:
      slot: of the first slab.
      begin: for all slabs, but for the last one of weights.
      begin_last: for that, of which TMA loads all.
    """

  def _start(self, step):
    """The row of K where a slab starts."""
    return self.work_tile.start + step * self.block.plan.config.block_k

  def _announce(self, slot) -> None:
    """Tells the consumers of a slab that all threads have stored."""
    plgpu.commit_smem()
    for operand in self.operands:
      for _ in operand.rings:
        plgpu.barrier_arrive(self.block.shared.full.at[slot])


@dataclasses.dataclass(frozen=True)
class Copier(ByThreads):
  """Pieces of 8 bytes: whole slabs are on their way."""

  def load(self, slot, begin: Begin, begin_last: Begin) -> jax.Array:
    block, (b,), count = self.block, self.operands, self.work_tile.steps - 1
    plan = block.plan
    ahead = min(_COPIES, plan.config.stages - 2)
    swizzle = layout.bytes_of(plan.tiling.operand_columns, plan.problem.b.dtype)

    def load(step, slot):
      begin(step, slot)
      origin = b.origin(self._start(step))
      at = tuple(map(pl.ds, origin, plan.tiling.b_slab_shape))
      for matrix, ring in zip(b.refs, b.rings):
        window = matrix.at[b.which, *at]
        ptx.copy_async(window, ring.at[slot], swizzle=swizzle)
      return block.next_slot(slot)

    def announce(slot, in_flight):
      ptx.wait_async(in_flight * plan.problem.products)
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
class Shifter(ByThreads):
  """Vectors of 16 bytes, shifted: some chunks are on their way."""

  def load(self, slot, begin: Begin, begin_last: Begin) -> jax.Array:
    block, (b,) = self.block, self.operands
    tile, rings, raw = block.plan.loader.tile, b.rings, block.shared.raw
    count, chunks, buffers = self._count, tile.chunks, raw.shape[0]

    def shift(nth, slot, state):
      """Chunk `nth` of a slab of each B; those before it, the next buffer."""
      before, buffer = state
      origin, first = self._chunk(before)
      for which, (matrix, ring) in enumerate(zip(b.matrices, rings)):
        ptx.wait_async(buffers - 1)
        ptx.shift_rows(
          matrix,
          origin,
          raw.at[buffer],
          ring.at[slot],
          first,
          swizzle=tile.swizzle,
        )
        if which == len(rings) - 1:
          pl.when(nth == chunks - 1)(lambda: self._announce(slot))
        self._copy(before + buffers // len(rings), which, buffer)
        buffer = lax.select(buffer == buffers - 1, jnp.int32(0), buffer + 1)
      return before + 1, buffer

    def load(step, state):
      slot, shifted = state
      begin(step, slot)
      shifted = lax.fori_loop(
        0, chunks, lambda nth, shifted: shift(nth, slot, shifted), shifted
      )
      return block.next_slot(slot), shifted

    for buffer in range(buffers):
      nth, which = divmod(buffer, len(rings))
      self._copy(jnp.int32(nth), which, buffer)
    state = slot, (jnp.int32(0), jnp.int32(0))
    slot, _ = lax.fori_loop(0, count, load, state)
    begin_last(count, slot)
    return block.next_slot(slot)

  @property
  def _count(self):
    """Slabs that threads load: all but the last one."""
    return self.work_tile.steps - 1

  def _chunk(self, nth) -> tuple[tuple[Any, Any], jax.Array]:
    """Where a chunk of a tile starts, of each B, and its row in its slab."""
    (b,), tile = self.operands, self.block.plan.loader.tile
    first = lax.rem(nth, tile.chunks) * tile.chunk
    row, column = b.origin(self._start(lax.div(nth, tile.chunks)))
    return (row + first, column), first

  def _copy(self, nth, which: int, buffer) -> None:
    """Starts to copy a chunk of one B; a group of copies, if need be empty."""

    @pl.when(nth < self._count * self.block.plan.loader.tile.chunks)
    def _():
      origin, _ = self._chunk(nth)
      matrix = self.operands[0].matrices[which]
      ptx.copy_rows_async(matrix, origin, self.block.shared.raw.at[buffer])

    ptx.commit_async()


@dataclasses.dataclass(frozen=True)
class SlabShifter(ByThreads):
  """The same of A, each B or all: some slabs are on their way."""

  def load(self, slot, begin: Begin, begin_last: Begin) -> jax.Array:
    del begin_last
    held = self.block.plan.loader.slabs_held
    steps = ptx.unknown(self.work_tile.steps)

    def copy(step, place):
      pl.when(step < steps)(lambda: self._copy(step, place))
      ptx.commit_async()

    def load(step, state):
      slot, place = state
      begin(step, slot)
      ptx.wait_async(held - 1)
      self._shift(step, place, slot)
      self._announce(slot)
      copy(step + held, place)
      following = lax.select(place == held - 1, jnp.int32(0), place + 1)
      return self.block.next_slot(slot), following

    lax.fori_loop(0, ptx.unknown(held), lambda step, _: copy(step, step), None)
    slot, _ = lax.fori_loop(0, steps, load, (slot, jnp.int32(0)))
    return slot

  @property
  def _tiles(self) -> list[tuple[Loaded, ShiftedTile]]:
    tiles = filter(None, self.block.plan.loader.tiles)
    return list(zip(self.operands, tiles))

  def _copy(self, step, place) -> None:
    """Starts to copy the rows of a slab."""
    start = self._start(step)

    def copy(row, x, tile, matrix, raw) -> None:
      ptx.copy_rows_async(
        matrix,
        x.origin(start, row),
        raw.at[place, pl.ds(row, tile.chunk)],
        columns=tile.copied,
        to_end=True,
      )

    for x, tile in self._tiles:
      for matrix, raw in zip(x.matrices, x.raws):
        what = {"x": x, "tile": tile, "matrix": matrix, "raw": raw}
        _for_each_chunk(tile, functools.partial(copy, **what))

  def _shift(self, step, place, slot) -> None:
    """Shifts them to the ring."""
    plan, start = self.block.plan, self._start(step)
    block_k, left = plan.config.block_k, plan.problem.k - start

    def shift_chunk(row, x, tile, matrix, ring, raw, left) -> None:
      ptx.shift_rows(
        matrix,
        x.origin(start, row),
        raw.at[place, pl.ds(row, tile.chunk)],
        ring.at[slot],
        row,
        swizzle=tile.swizzle,
        left=left if x.k_last else None,
      )

    def shift(left) -> None:
      for x, tile in self._tiles:
        for matrix, ring, raw in zip(x.matrices, x.rings, x.raws):
          what = {"x": x, "tile": tile, "matrix": matrix, "ring": ring}
          visit = functools.partial(shift_chunk, **what, raw=raw, left=left)
          _for_each_chunk(tile, visit)

    if plan.problem.k % block_k and any(x.k_last for x in self.operands):
      pl.when(left >= block_k)(lambda: shift(None))
      pl.when(left < block_k)(lambda: shift(left))
    else:
      shift(None)


def _for_each_chunk(tile: ShiftedTile, visit: Callable[[Any], None]) -> None:
  """visit(first row) for what is shifted at a time."""
  if tile.chunks == 1:
    visit(0)
    return
  lax.fori_loop(
    0, ptx.unknown(tile.chunks), lambda i, _: visit(i * tile.chunk), None
  )
