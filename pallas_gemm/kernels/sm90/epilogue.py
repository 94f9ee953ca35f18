"""What follows a product in the Hopper kernels: scales, C, bias, activation.

It is computed in registers, subtile by subtile: 64 rows by `epilogue_n` columns
of a consumer's tile. C and the bias come through shared memory;
`stores` says when they are asked for.

**C** comes in subtiles during slabs of the work tile, to where the results of
the tile before have left, and each result takes the place of what was added to
it (8192 x 8192 x 1024: 221 -> 205 us on an H200; `Memory.c_in_place`). A short
sum is over before C has come that way. With buffers of its own for all
subtiles, C is asked for when the first result leaves: 4096 x 4096 x 256 27.6 ->
22.5 us. Where C is of another dtype, or results do not wait, it has two buffers
of its own. Where operands are swapped it is transposed on its way into
registers (ldmatrix): 160 x 14336 x 16384 137.7 -> 119.6 us.

**Scales** are loaded by threads, each what it multiplies by: a bulk copy starts
at multiples of 16 bytes, groups of rows anywhere.
"""

from collections.abc import Callable
import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import ptx
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.schedule import WorkTile
from pallas_gemm.kernels.sm90.tiling import WGMMA_ROWS


@dataclasses.dataclass(frozen=True)
class FusedEpilogue:
  """What is done to the accumulators of a consumer.

  Attributes:
    block: as the consumer sees it.
    compute: the results from accumulators, C and bias, see `epilogues.apply`.
  """

  block: Block
  compute: Callable[..., list[jax.Array]]

  @property
  def has_c(self) -> bool:
    return self.block.operands.c is not None

  @property
  def _c(self):
    """Subtiles of C in shared memory."""
    shared = self.block.shared
    return shared.staging[0] if self.block.plan.memory.c_in_place else shared.c

  def load_bias(self, work_tile: WorkTile) -> None:
    block, shared = self.block, self.block.shared
    if shared.bias is None:
      return
    along_n = block.plan.problem.epilogue.bias == "n"
    size = block.plan.tiling.stored_tile[along_n]
    along = pl.ds(block.stored_origin(work_tile)[along_n], size)
    bias = block.operands.bias
    plgpu.copy_gmem_to_smem(
      bias.at[work_tile.b, along]
      if block.plan.problem.groups
      else bias.at[along],
      shared.bias.at[block.warpgroup, pl.ds(0, size)],
      shared.bias_loaded.at[block.warpgroup],
    )

  def load_c(self, work_tile: WorkTile, subtile: int) -> None:
    block, buffers = self.block, self.block.plan.memory.c_buffers
    buffer = subtile % buffers
    plgpu.copy_gmem_to_smem(
      block.subtile_window(block.operands.c, work_tile, subtile),
      self._c.at[block.warpgroup, buffer],
      block.shared.c_loaded.at[block.warpgroup * buffers + buffer],
    )

  def load_first_c(self, work_tile: WorkTile) -> None:
    """As much of C as has buffers of its own."""
    if self.has_c and not self.block.plan.memory.c_in_place:
      for subtile in range(self.block.plan.memory.c_buffers):
        self.load_c(work_tile, subtile)

  def load_next_c(self, work_tile: WorkTile, subtile: int) -> None:
    """What goes where this subtile of C was."""
    following = subtile + self.block.plan.memory.c_buffers
    if self.has_c and following < len(self.block.plan.tiling.subtiles):
      self.load_c(work_tile, following)

  def wait_for_bias(self) -> None:
    if self.block.shared.bias is not None:
      plgpu.barrier_wait(self.block.shared.bias_loaded.at[self.block.warpgroup])

  def results_of(
    self, work_tile: WorkTile, accumulators: list[jax.Array], subtile: int
  ) -> list[jax.Array]:
    """The results of one subtile; waits for its part of C."""
    block, plan = self.block, self.block.plan
    (i, j), width = plan.tiling.subtiles[subtile], plan.tiling.subtile_width
    c_subtile = None
    if self.has_c:
      buffer = subtile % plan.memory.c_buffers
      barrier = block.warpgroup * plan.memory.c_buffers + buffer
      plgpu.barrier_wait(block.shared.c_loaded.at[barrier])
      c_subtile = self._c_of(buffer)
    sums = [x[i : i + WGMMA_ROWS, j : j + width] for x in accumulators]
    return self.compute(
      self._scaled(sums, work_tile, subtile),
      c_subtile,
      None if block.shared.bias is None else self._bias_of(subtile),
    )

  def _scaled(
    self, sums: list[jax.Array], work_tile: WorkTile, subtile: int
  ) -> list[jax.Array]:
    """The sums times the scales; in float32, unless the results are sums."""
    operands, p = self.block.operands, self.block.plan.problem
    if p.out_dtype != p.sum_dtype:
      sums = [x.astype(jnp.float32) for x in sums]
    if p.has_blocks:  # the main loop has applied them
      return sums
    if operands.scale_a is not None:
      factor = self._scale_of(operands.scale_a, work_tile, subtile, 0)
      sums = [x * factor for x in sums]
    if operands.scale_b:
      factors = (
        self._scale_of(x, work_tile, subtile, 1) for x in operands.scale_b
      )
      sums = [x * factor for x, factor in zip(sums, factors)]
    return sums

  def _scale_of(self, ref, work_tile: WorkTile, subtile: int, side: int):
    """A scale of each row of the subtile, or column, or the one of all."""
    block, tiling = self.block, self.block.plan.tiling
    matrices, size = ref.shape
    which = (work_tile.a, work_tile.b)[side] if matrices > 1 else 0
    if size == 1:
      return ref[which, 0]
    shape = WGMMA_ROWS, tiling.subtile_width
    first = block.stored_origin(work_tile)[side]
    first += tiling.subtiles[subtile][side]
    layout = plgpu.Layout.WGMMA.reduce(1 - side)
    values = ptx.load_clamped(ref.at[which], first, shape[side], layout)
    values = lax.broadcast_in_dim(values, shape, (side,))
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA)

  def _c_of(self, buffer: int) -> jax.Array:
    subtile = self._c.at[self.block.warpgroup, buffer]
    if not self.block.plan.config.swap_ab:
      return subtile[...]
    subtile = subtile.transpose((1, 0))
    return plgpu.load(subtile, layout=plgpu.Layout.WGMMA, optimized=False)

  def _bias_of(self, subtile: int) -> jax.Array:
    plan = self.block.plan
    along_n = plan.problem.epilogue.bias == "n"
    size = plan.tiling.subtile_width if along_n else WGMMA_ROWS
    along = pl.ds(plan.tiling.subtiles[subtile][along_n], size)
    values = plgpu.load(
      self.block.shared.bias.at[self.block.warpgroup, along],
      layout=plgpu.Layout.WGMMA.reduce(0 if along_n else 1),
      optimized=False,
    )
    shape = (WGMMA_ROWS, plan.tiling.subtile_width)
    values = values.astype(jnp.float32)
    values = lax.broadcast_in_dim(values, shape, (1 if along_n else 0,))
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA)
