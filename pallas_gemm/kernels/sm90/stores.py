"""From accumulators to a result in global memory.

`epilogue` computes results from accumulators, subtile by subtile of 64 rows.
They go through shared memory to TMA (`_store_tile`), row by row where TMA can't
address them (`_store_by_rows`), or right from registers if they are few
(`_store_by_elements`), and in copies of 64, 32, ... 1 rows where a
group ends inside a tile (`_store_first_rows`). Where operands are swapped a
subtile is transposed when it is written to shared memory.

**When.** While results are stored, a warpgroup gives the tensor cores nothing
to do. So they are kept in registers, rounded, until the next work tile is under
way, and each subtile is stored during one of that tile's slabs. On an H200
short sums gain most (7168 x 8192 x 512: 0.85 -> 0.98x of jnp.dot; groups along
K, G = 256: 2989 -> 2764 us), 4096^3 2 %. All subtiles during the first slab
gain little: they take longer than a slab. Where registers do not suffice, as
for float32 or what an activation is applied to, the last subtiles wait that
find room and the others are stored at once: in float32 8192 x 8192 x 512 135 ->
124 us, 8192 x 4096 x 1024 110 -> 103. So are all where that is less than half,
where consumers ping-pong, or where no work tile follows (`Memory.deferred`).

Every barrier among the threads of a warpgroup is explicit: `commit_smem` and
`wait_smem_to_gmem` hold one each.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.epilogue import FusedEpilogue
from pallas_gemm.kernels.sm90.schedule import StoreTarget, WorkTile
from pallas_gemm.kernels.sm90.tiling import WGMMA_ROWS

# Rows that TMA stores at a time where a group ends inside a tile.
_POWERS = (64, 32, 16, 8, 4, 2, 1)

# The results of a subtile of a tile, by its number.
_Results = Callable[[int], Sequence[jax.Array]]


class Pending(NamedTuple):
  """Results that are stored when the next work tile is under way.

  Attributes:
    target: where they go.
    subtiles: of each subtile that waits, the results, in their dtype.
  """

  target: StoreTarget
  subtiles: tuple[tuple[jax.Array, ...], ...]


@dataclasses.dataclass(frozen=True)
class Stores:
  """What one consumer does with its accumulators.

  Attributes:
    block: as the consumer sees it.
    epilogue: what follows the product.
  """

  block: Block
  epilogue: FusedEpilogue

  @property
  def _waiting(self) -> range:
    """The subtiles that wait until the next work tile is under way."""
    plan, count = self.block.plan, len(self.block.plan.tiling.subtiles)
    return range(count - plan.memory.deferred, count)

  @property
  def slabs(self) -> int:
    """The first slabs of a work tile, those that `overlap` is called for."""
    plan = self.block.plan
    of_c = len(plan.tiling.subtiles) if plan.memory.c_in_place else 0
    return len(self._waiting) + of_c

  def nothing(self) -> Pending | None:
    """What is pending before the first work tile; None if nothing ever is."""
    if not self._waiting:
      return None
    plan, staging = self.block.plan, self.block.shared.staging
    shape = WGMMA_ROWS, plan.tiling.subtile_width
    result = jnp.zeros(shape, staging[0].dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA)
    subtile = (result,) * len(staging)
    return Pending(StoreTarget.none(plan), (subtile,) * len(self._waiting))

  def begin(self, work_tile: WorkTile, pending: Pending | None) -> None:
    """To be called before a work tile is multiplied."""
    if pending is not None:
      self._store_partial_of(pending)
      return
    self.epilogue.load_bias(work_tile)
    self.epilogue.load_first_c(work_tile)

  def overlap(
    self, slab: int, work_tile: WorkTile, pending: Pending | None
  ) -> None:
    """To be called when one of the first `slabs` slabs is under way.

    The subtiles of the work tile before are stored, then those of C loaded.
    """
    waiting = len(self._waiting)
    if pending is None:
      self.epilogue.load_c(work_tile, slab)
      return
    if slab < waiting:
      subtile = self._waiting[slab]
      self._store_tile_of(pending, range(subtile, subtile + 1))
      # Now every thread has read C and the bias of the work tile before.
      if slab == 0:
        self.epilogue.load_first_c(work_tile)
      if slab + 1 == waiting:
        self.epilogue.load_bias(work_tile)
      return
    if slab == waiting:  # C goes to where these results have left
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    self.epilogue.load_c(work_tile, slab - waiting)

  def finish(
    self, work_tile: WorkTile, accumulators: list[jax.Array]
  ) -> Pending | None:
    """To be called with a work tile's accumulators; what is pending then."""
    self.epilogue.wait_for_bias()
    results = functools.partial(
      self.epilogue.results_of, work_tile, accumulators
    )
    if at_once := range(self._waiting.start):
      self._store(work_tile, results, at_once)
    if not self._waiting:
      return None

    def rounded(subtile):
      pairs = zip(results(subtile), self.block.shared.staging)
      return tuple(result.astype(staged.dtype) for result, staged in pairs)

    return Pending(work_tile.store_target(), tuple(map(rounded, self._waiting)))

  def end(self, pending: Pending | None) -> None:
    """To be called after the last work tile."""
    if pending is not None:
      self._store_partial_of(pending)
      self._store_tile_of(pending, self._waiting)
    plgpu.wait_smem_to_gmem(0)

  def _store_tile_of(self, pending: Pending, subtiles: range) -> None:
    """Stores some subtiles of a whole tile."""
    plan = self.block.plan
    work_tile = pending.target.work_tile(plan)
    is_whole = pending.target.is_real(plan)
    if plan.problem.along == "m":
      _, is_whole = self._rows_of(work_tile)

    @pl.when(is_whole)
    def _():
      results = self._results_that_waited(pending)
      self._store_tile(work_tile, results, subtiles)

  def _store_partial_of(self, pending: Pending) -> None:
    """Stores what of a tile is in its group, if that is not all of it."""
    plan = self.block.plan
    if plan.problem.along != "m":
      return
    work_tile = pending.target.work_tile(plan)
    rows, is_whole = self._rows_of(work_tile)

    @pl.when(pending.target.is_real(plan) & ~is_whole)
    def _():
      results = self._results_that_waited(pending)
      self._store_first_rows(work_tile, results, self._waiting, rows)

  def _results_that_waited(self, pending: Pending) -> _Results:
    return lambda subtile: pending.subtiles[subtile - self._waiting.start]

  def _store(
    self, work_tile: WorkTile, results: _Results, subtiles: range
  ) -> None:
    """Stores some subtiles of a tile at once."""
    tiling = self.block.plan.tiling
    if tiling.by_rows or tiling.by_elements:
      store = self._store_by_rows if tiling.by_rows else self._store_by_elements
      for subtile in subtiles:
        store(work_tile, *results(subtile), subtile)
        self.epilogue.load_next_c(work_tile, subtile)
    elif tiling.problem.along == "m":
      rows, is_whole = self._rows_of(work_tile)
      pl.when(is_whole)(lambda: self._store_tile(work_tile, results, subtiles))
      pl.when(~is_whole)(
        lambda: self._store_first_rows(work_tile, results, subtiles, rows)
      )
    else:
      self._store_tile(work_tile, results, subtiles)

  def _rows_of(self, work_tile: WorkTile):
    """How many rows of a tile are stored, and whether that is simply all."""
    most, _ = self.block.plan.tiling.warpgroup_tile
    is_split = self.block.plan.config.split == "m"
    above = self.block.warpgroup * most if is_split else 0
    rows = jnp.clip(work_tile.rows - above, 0, most)
    return rows, (rows == most) & work_tile.is_group

  def _store_tile(
    self, work_tile: WorkTile, results: _Results, subtiles: range
  ) -> None:
    """Stores some subtiles by TMA, and does not wait for them."""
    block, plan = self.block, self.block.plan
    count, buffers = len(plan.tiling.subtiles), plan.memory.buffers
    staging, outs = block.shared.staging, block.results.out
    # As many subtiles at a time as leave as many buffers to those before, or
    # all of them: one barrier for each such chunk.
    chunk = buffers if buffers == count else max(1, buffers // 2)
    if self.epilogue.has_c:
      chunk = min(chunk, plan.memory.c_buffers)
    for start in range(subtiles.start, subtiles.stop, chunk):
      now = range(start, min(start + chunk, subtiles.stop))
      # These buffers are free once all stores but the newest have left shared
      # memory; for the first chunks those are stores of the work tile before,
      # which may have ended with any buffer.
      in_turn = start > 0 or count % buffers == 0
      newest = (buffers - len(now)) * len(outs) if in_turn else 0
      plgpu.wait_smem_to_gmem(newest, wait_read_only=True)
      for subtile in now:
        for staged, result in zip(staging, results(subtile)):
          buffer = staged.at[block.warpgroup, subtile % buffers]
          if plan.config.swap_ab:
            buffer = buffer.transpose((1, 0))
          buffer[...] = result.astype(staged.dtype)
      plgpu.commit_smem()
      for subtile in now:
        for staged, out_ref in zip(staging, outs):
          plgpu.copy_smem_to_gmem(
            staged.at[block.warpgroup, subtile % buffers],
            block.subtile_window(out_ref, work_tile, subtile),
          )
        self.epilogue.load_next_c(work_tile, subtile)

  def _store_first_rows(
    self,
    work_tile: WorkTile,
    results: _Results,
    subtiles: range,
    rows: jax.Array,
  ) -> None:
    """Stores the first rows of subtiles: as many as a power of two at a time.

    Rows of no group are stored as zeros. That a number of rows can be stored
    so is from JAX's `ragged_dot_mgpu`.
    """
    block, plan = self.block, self.block.plan
    staged = block.shared.partial_staging.at[block.warpgroup]
    keep = jnp.broadcast_to(
      work_tile.is_group, (WGMMA_ROWS, plan.tiling.subtile_width)
    )
    for subtile in subtiles:
      here = jnp.clip(rows - plan.tiling.subtiles[subtile][0], 0, WGMMA_ROWS)
      for result, out_ref in zip(results(subtile), block.results.out):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # In 32 bits: selecting 16-bit elements spills.
        wide = jnp.int32 if staged.dtype == jnp.int32 else jnp.float32
        result = jnp.where(keep, result.astype(wide), jnp.zeros((), wide))
        compat.store(staged, result.astype(staged.dtype), optimized=False)
        plgpu.commit_smem()
        for height in _POWERS:
          above = here & ~(2 * height - 1)  # rows of greater heights

          @pl.when((here & height) != 0)
          def _(height=height, above=above, out_ref=out_ref, subtile=subtile):
            plgpu.copy_smem_to_gmem(
              block.shared.partial_staging.at[
                block.warpgroup, pl.ds(above, height)
              ],
              block.subtile_window(out_ref, work_tile, subtile, above, height),
            )

  def _store_by_elements(
    self, work_tile: WorkTile, result: jax.Array, subtile: int
  ) -> None:
    """Stores a subtile from registers."""
    block, plan = self.block, self.block.plan
    (out_ref,), (i, j) = block.results.out, plan.tiling.subtiles[subtile]
    row, column = block.stored_origin(work_tile)
    ptx.store_elements(
      result.astype(out_ref.dtype),
      out_ref if len(out_ref.shape) == 2 else out_ref.at[work_tile.out],
      (row + i, column + j),
      transposed=plan.config.swap_ab,
    )

  def _store_by_rows(
    self, work_tile: WorkTile, result: jax.Array, subtile: int
  ) -> None:
    """Stores a subtile row by row, without the sectors that end in the next."""
    block, plan, p = self.block, self.block.plan, self.block.plan.problem
    tiling, (i, j) = plan.tiling, plan.tiling.subtiles[subtile]
    staging = block.shared.staging[0].at[block.warpgroup]
    buffer = subtile % plan.memory.buffers
    staged = staging.at[buffer]
    ptx.wait_for_warpgroup()  # every thread has read the subtile before
    if p.along == "m":

      @pl.when(work_tile.is_group)
      def _():
        staged[...] = result.astype(staged.dtype)

      @pl.when(~work_tile.is_group)
      def _():
        zeros = jnp.zeros(result.shape, staged.dtype)
        staged[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    else:
      staged[...] = result.astype(staged.dtype)
    ptx.wait_for_warpgroup()  # every thread has written this one
    row, column = block.warpgroup_origin(work_tile)
    rows = p.m - row
    if p.along == "m":
      rows, _ = self._rows_of(work_tile)
    (out_ref,) = block.results.out
    is_last = j + tiling.subtile_width == tiling.warpgroup_tile[1]
    ptx.store_rows(
      staged,
      staging.at[1 - buffer] if j else None,
      out_ref if len(out_ref.shape) == 2 else out_ref.at[work_tile.out],
      (row + i, column + j),
      jnp.clip(rows - i, 0, WGMMA_ROWS),
      from_start=not tiling.tiles_overlap or column == 0,
      to_end=not tiling.tiles_overlap and is_last,
    )
