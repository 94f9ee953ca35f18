"""From a unit's sums to its result in global memory; see `sm90_body`.

`sm90_tails` computes results from sums, piece by piece of 64 rows. They go
through shared memory to TMA (`_store_tile`), row by row where TMA can't address
them (`_store_rows`), and in copies of 64, 32, ... 1 rows where a group ends
inside a tile (`_store_first_rows`). Where operands are swapped a piece is
transposed when it is written to shared memory.

**When.** While results are stored, a warpgroup gives the tensor cores nothing
to do. So they are kept in registers, rounded, until the next unit is under way,
and each piece is stored beside one of that unit's slabs. On an H200 short sums
gain most (7168 x 8192 x 512: 0.85 -> 0.98x of jnp.dot; groups along K, G = 256:
2989 -> 2764 us), 4096^3 2 % (dense-9 to -12, ragged-2 to -5 of the notes). All
pieces beside the first slab gain little: they take longer than a slab. Where
registers do not suffice, as for float32 or what an activation is applied to,
the last pieces wait that find room and the others are stored at once: in
float32 8192 x 8192 x 512 135 -> 124 us, 8192 x 4096 x 1024 110 -> 103
(pingpong-3, -5). So are all where that is less than half, where consumers take
turns, or where no unit follows (`plan.deferred_pieces`).

Every barrier among the threads of a warpgroup is explicit: `commit_smem` and
`wait_smem_to_gmem` hold one each.
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

from pallas_gemm import compat
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels import sm90_schedule as schedules
from pallas_gemm.kernels.sm90_tails import Share, Tail

# Rows that are stored at a time where TMA can't.
_ROWS_AT_ONCE = 8
# Rows that TMA stores at a time where a group ends inside a tile.
_POWERS = (64, 32, 16, 8, 4, 2, 1)

# The results of a piece of a tile, by its number.
_Results = Callable[[int], Sequence[jax.Array]]


class Pending(NamedTuple):
  """Results that are stored when the next unit is under way.

  Attributes:
    place: where they go.
    pieces: of each piece that waits, the results, in their dtype.
  """

  place: schedules.Place
  pieces: tuple[tuple[jax.Array, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stores(Share):
  """What one consumer does with its sums.

  Attributes:
    tail: what follows the product.
    out_refs: the results in global memory.
    part_refs: sums over parts of K, likewise.
    staging: of each result, pieces in shared memory.
    rest: a piece for groups that end inside a tile.
  """

  tail: Tail
  out_refs: Any
  part_refs: Any
  staging: Any
  rest: Any = None

  @property
  def _waiting(self) -> range:
    """The pieces that wait until the next unit is under way."""
    count = len(self.pieces)
    deferred = plan.deferred_pieces(self.problem, self.config)
    return range(count - deferred, count)

  @property
  def slabs(self) -> int:
    """The first slabs of a unit that something goes beside, see `beside`."""
    in_place = len(self.pieces) if self.tail.has_c_in_place else 0
    return len(self._waiting) + in_place

  def nothing(self) -> Pending | None:
    """What is pending before the first unit; None if nothing ever is."""
    if not self._waiting:
      return None
    dtype = self.staging[0].dtype
    result = jnp.zeros((plan.WGMMA_ROWS, self.width), dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA)
    piece = (result,) * len(self.staging)
    nowhere = schedules.nowhere(self.problem)
    return Pending(nowhere, (piece,) * len(self._waiting))

  def begin(self, unit: schedules.Unit, pending: Pending | None) -> None:
    """To be called before a unit is multiplied."""
    if pending is not None:
      self._store_rest_of(pending)
      return
    self.tail.load_bias(unit)
    self.tail.load_first_c(unit)

  def beside(
    self, slab: int, unit: schedules.Unit, pending: Pending | None
  ) -> None:
    """To be called when one of the first `slabs` slabs is under way.

    The pieces of the unit before are stored, then those of C loaded.
    """
    waiting = len(self._waiting)
    if pending is None:
      self.tail.load_c(unit, slab)
      return
    if slab < waiting:
      piece = self._waiting[slab]
      self._store_tile_of(pending, range(piece, piece + 1))
      # Now every thread has read C and the bias of the unit before.
      if slab == 0:
        self.tail.load_first_c(unit)
      if slab + 1 == waiting:
        self.tail.load_bias(unit)
      return
    if slab == waiting:  # C goes to where these results have left
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    self.tail.load_c(unit, slab - waiting)

  def finish(
    self, unit: schedules.Unit, sums: list[jax.Array]
  ) -> Pending | None:
    """To be called with a unit's sums; what is pending then."""
    self.tail.wait_for_bias()
    results = functools.partial(self.tail.results_of, sums)
    if unit.part is not None:
      pl.when(unit.part >= 0)(lambda: self._store_part(unit, sums))
    at_once = range(len(self.pieces) - len(self._waiting))
    if at_once and unit.part is None:
      self._store(unit, results, at_once)
    elif at_once:
      pl.when(unit.part < 0)(lambda: self._store(unit, results, at_once))
    if not self._waiting:
      return None

    def rounded(piece):
      some = zip(results(piece), self.staging)
      return tuple(result.astype(staged.dtype) for result, staged in some)

    return Pending(schedules.place(unit), tuple(map(rounded, self._waiting)))

  def end(self, pending: Pending | None) -> None:
    """To be called after the last unit."""
    if pending is not None:
      self._store_rest_of(pending)
      self._store_tile_of(pending, self._waiting)
    plgpu.wait_smem_to_gmem(0)

  def _store_tile_of(self, pending: Pending, some: range) -> None:
    """Stores some pieces of a whole tile."""
    unit = schedules.placed(pending.place, self.problem, self.config)
    is_whole = pending.place.is_real(self.problem)
    if self.problem.ragged == "m":
      _, is_whole = self._rows_of(unit)

    @pl.when(is_whole)
    def _():
      self._store_tile(unit, self._results_that_waited(pending), some)

  def _store_rest_of(self, pending: Pending) -> None:
    """Stores what is no whole tile."""
    if self.problem.ragged != "m":
      return
    unit = schedules.placed(pending.place, self.problem, self.config)
    rows, is_whole = self._rows_of(unit)

    @pl.when(pending.place.is_real(self.problem) & ~is_whole)
    def _():
      results = self._results_that_waited(pending)
      self._store_first_rows(unit, results, self._waiting, rows)

  def _results_that_waited(self, pending: Pending) -> _Results:
    return lambda piece: pending.pieces[piece - self._waiting.start]

  def _store(
    self, unit: schedules.Unit, results: _Results, some: range
  ) -> None:
    """Stores some pieces of a tile at once."""
    if plan.stores_rows(self.problem, self.config):
      for piece in some:
        self._store_rows(unit, *results(piece), piece)
        self.tail.load_next_c(unit, piece)
    elif self.problem.ragged == "m":
      rows, is_whole = self._rows_of(unit)
      pl.when(is_whole)(lambda: self._store_tile(unit, results, some))
      pl.when(~is_whole)(
        lambda: self._store_first_rows(unit, results, some, rows)
      )
    else:
      self._store_tile(unit, results, some)

  def _store_part(self, unit: schedules.Unit, sums: list[jax.Array]) -> None:
    """Stores the sums of a part of K as they are."""
    first, column = schedules.share_corner(unit, self.warpgroup, self.config)
    column -= plan.tail_start(self.problem, self.config)
    for part_ref, x in zip(self.part_refs, sums):
      for i in range(0, x.shape[0], plan.WGMMA_ROWS):
        at = pl.ds(first + i, plan.WGMMA_ROWS), pl.ds(column, x.shape[1])
        piece = x[i : i + plan.WGMMA_ROWS]
        compat.store(part_ref.at[unit.part, *at], piece, optimized=False)

  def _rows_of(self, unit: schedules.Unit):
    """How many rows of a tile are stored, and whether that is simply all."""
    most, _ = plan.share(self.config)
    above = self.warpgroup * most if self.config.split == "m" else 0
    rows = jnp.clip(unit.rows - above, 0, most)
    return rows, (rows == most) & unit.is_group

  def _store_tile(
    self, unit: schedules.Unit, results: _Results, some: range
  ) -> None:
    """Stores some pieces by TMA, and does not wait for them."""
    warpgroup, pieces = self.warpgroup, len(self.pieces)
    buffers = plan.buffers(self.problem, self.config)
    # As many pieces at a time as leave as many buffers to those before, or
    # all of them: one barrier for each such chunk.
    chunk = buffers if buffers == pieces else max(1, buffers // 2)
    if self.tail.has_c:
      chunk = min(chunk, self.tail.c_buffers)
    for start in range(some.start, some.stop, chunk):
      now = range(start, min(start + chunk, some.stop))
      # These buffers are free once all stores but the newest have left shared
      # memory; for the first chunks those are stores of the unit before,
      # which may have ended with any buffer.
      in_turn = start > 0 or pieces % buffers == 0
      newest = (buffers - len(now)) * len(self.out_refs) if in_turn else 0
      plgpu.wait_smem_to_gmem(newest, wait_read_only=True)
      for piece in now:
        for staged, result in zip(self.staging, results(piece)):
          place = staged.at[warpgroup, piece % buffers]
          if self.config.swap_ab:
            place = place.transpose((1, 0))
          place[...] = result.astype(staged.dtype)
      plgpu.commit_smem()
      for piece in now:
        for staged, out_ref in zip(self.staging, self.out_refs):
          plgpu.copy_smem_to_gmem(
            staged.at[warpgroup, piece % buffers],
            self.window(out_ref, unit, piece),
          )
        self.tail.load_next_c(unit, piece)

  def _store_first_rows(
    self, unit: schedules.Unit, results: _Results, some: range, rows: jax.Array
  ) -> None:
    """Stores the first rows of pieces: as many as a power of two at a time.

    Rows of no group are stored as zeros. That a number of rows can be stored
    so is from JAX's `ragged_dot_mgpu`.
    """
    staged = self.rest.at[self.warpgroup]
    keep = jnp.broadcast_to(unit.is_group, (plan.WGMMA_ROWS, self.width))
    for piece in some:
      here = jnp.clip(rows - self.pieces[piece][0], 0, plan.WGMMA_ROWS)
      for result, out_ref in zip(results(piece), self.out_refs):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # In float32: selecting 16-bit elements spills.
        result = jnp.where(keep, result.astype(jnp.float32), 0.0)
        compat.store(staged, result.astype(staged.dtype), optimized=False)
        plgpu.commit_smem()
        for height in _POWERS:
          above = here & ~(2 * height - 1)  # rows of greater heights

          @pl.when((here & height) != 0)
          def _(height=height, above=above, out_ref=out_ref, piece=piece):
            plgpu.copy_smem_to_gmem(
              self.rest.at[self.warpgroup, pl.ds(above, height)],
              self.window(out_ref, unit, piece, above, height),
            )

  def _store_rows(
    self, unit: schedules.Unit, result: jax.Array, piece: int
  ) -> None:
    """Stores a piece row by row, a column a thread."""
    p = self.problem
    staged = self.staging[0].at[self.warpgroup, 0]
    plgpu.commit_smem()  # every thread has read the piece before
    compat.store(staged, result.astype(staged.dtype), optimized=False)
    plgpu.commit_smem()  # every thread has written this one
    tile = schedules.share_corner(unit, self.warpgroup, self.config)
    first, column = (x + y for x, y in zip(tile, self.pieces[piece]))
    rows = jnp.clip(p.m - first, 0, plan.WGMMA_ROWS)
    whole = p.n - p.n % plan.DIRECT

    def store_to(out_ref, column):
      def store_row(row, _):
        target = (first + row, pl.ds(column, plan.DIRECT))
        schedules.window(out_ref, unit.out, target)[...] = staged[row]

      def store_some(i, _):
        for row in range(_ROWS_AT_ONCE):
          store_row(i * _ROWS_AT_ONCE + row, None)

      groups = lax.div(rows, jnp.int32(_ROWS_AT_ONCE))
      lax.fori_loop(0, groups, store_some, None)
      lax.fori_loop(groups * _ROWS_AT_ONCE, rows, store_row, None)

    @pl.when(column < whole)
    def _():
      store_to(self.out_refs[0], column)

    if whole < p.n:

      @pl.when(column == whole)
      def _():
        store_to(self.out_refs[1], 0)
