"""Operands of dense products that TMA can't address, not copied before.

A padded copy is a kernel of its own: 1.3 us, as long as a small product. So
where a work tile has few slabs (`Config.moves`), the threads of the producer
bring these as they bring weights of groups (`weights.ByMoves`): rows come by
cp.async from multiples of 16 bytes on, and are moved to where TMA would put
them. All slabs that the ring has room for are on their way at a time. A slab of
64 rows takes some 470 cycles longer so (H100), which is why it is for few: 292
x 207 x 685 7.17 -> 5.28 us, 77^3 5.05 -> 2.72, but 513 x 1025 x 517 7.97 ->
10.6.

Behind the end of a matrix zeros are found. So nothing is read that is not
there, and rows of K beyond the last add nothing. Where K lies along rows, what
is behind a row's end is the next row's, and is left out of the last slab.
"""

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
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.plan import MovedTile
from pallas_gemm.kernels.sm90.schedule import WorkTile
from pallas_gemm.kernels.sm90.tiling import Extent


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
    raws: where rows are copied that threads move; none of what TMA loads.
    moved: what of a slab they move.
  """

  refs: Sequence[Any]
  rings: Sequence[Any]
  which: Any
  k_last: bool
  begin: Any
  extent: Extent
  peers: str | None
  raws: Sequence[Any] = ()
  moved: MovedTile | None = None

  def corner(self, start, row: int):
    """Row and column of what comes to a slab's row, if K starts at `start`."""
    if self.k_last:
      return self.begin + row, start
    return start + row, self.begin


@dataclasses.dataclass(frozen=True)
class Moves:
  """How a work tile's slabs come, for a whole warpgroup."""

  block: Block
  work_tile: WorkTile
  operands: Sequence[Loaded]

  def load(self, slot, begin: Callable[[Any, Any], None]) -> jax.Array:
    """Brings the slabs to the ring; the slot after the last one's.

    Args:
      slot: of the first one.
      begin: given a slab's number and its slot, waits until that is empty, and
        asks TMA for what it loads of the slab.
    """
    held = self.block.plan.slabs_held
    steps = ptx.unknown(self.work_tile.steps)

    def copy(step, place):
      pl.when(step < steps)(lambda: self._copy(step, place))
      ptx.commit_async()

    def load(step, state):
      slot, place = state
      begin(step, slot)
      ptx.wait_async(held - 1)
      self._move(step, place, slot)
      copy(step + held, place)
      following = lax.select(place == held - 1, jnp.int32(0), place + 1)
      return self.block.next_slot(slot), following

    lax.fori_loop(0, ptx.unknown(held), lambda step, _: copy(step, step), None)
    slot, _ = lax.fori_loop(0, steps, load, (slot, jnp.int32(0)))
    return slot

  def _start(self, step):
    """The row of K where a slab starts."""
    return self.work_tile.start + step * self.block.plan.config.block_k

  def _copy(self, step, place) -> None:
    """Starts to copy the rows of a slab."""
    start = self._start(step)

    def copy(row, x, ref, raw) -> None:
      ptx.copy_rows_async(
        _matrix(ref, x.which),
        x.corner(start, row),
        raw.at[place, pl.ds(row, x.moved.chunk)],
        columns=x.moved.copied,
        to_end=True,
      )

    for x in self.operands:
      for ref, raw in zip(x.refs, x.raws):
        _for_each_chunk(x.moved, functools.partial(copy, x=x, ref=ref, raw=raw))

  def _move(self, step, place, slot) -> None:
    """Moves them to the ring, and tells the consumers."""
    block, start = self.block, self._start(step)
    block_k, k = block.plan.config.block_k, block.plan.problem.k
    left = k - start

    def move_chunk(row, x, ref, ring, raw, left) -> None:
      ptx.move_rows(
        _matrix(ref, x.which),
        x.corner(start, row),
        raw.at[place, pl.ds(row, x.moved.chunk)],
        ring.at[slot],
        row,
        swizzle=x.moved.swizzle,
        left=left if x.k_last else None,
      )

    def move(left) -> None:
      for x in self.operands:
        for ref, ring, raw in zip(x.refs, x.rings, x.raws):
          what = {"x": x, "ref": ref, "ring": ring, "raw": raw, "left": left}
          _for_each_chunk(x.moved, functools.partial(move_chunk, **what))

    if k % block_k and any(x.k_last for x in self.operands):
      pl.when(left >= block_k)(lambda: move(None))
      pl.when(left < block_k)(lambda: move(left))
    else:
      move(None)
    plgpu.commit_smem()
    for x in self.operands:
      for _ in x.rings:
        plgpu.barrier_arrive(block.shared.full.at[slot])


def _for_each_chunk(moved: MovedTile, visit: Callable[[Any], None]) -> None:
  """visit(first row) for what is moved at a time."""
  count = moved.rows // moved.chunk
  if count == 1:
    visit(0)
    return
  lax.fori_loop(
    0, ptx.unknown(count), lambda i, _: visit(i * moved.chunk), None
  )


def _matrix(ref, which):
  """A matrix, or one of a batch."""
  return ref if len(ref.shape) == 2 else ref.at[which]
