"""What follows a product in the Hopper kernels: C, bias, activation, gate.

It is computed in registers, subtile by subtile: 64 rows by `epilogue_n` columns
of a consumer's share of a tile. C and the bias come through shared memory;
`sm90_stores` says when they are asked for.

**C** comes in subtiles beside slabs of the work tile, to where the results of
the tile before have left, and each result takes the place of what was added to
it (8192 x 8192 x 1024: 221 -> 205 us on an H200; `plan.c_in_place`). A short
sum is over before C has come that way. With buffers of its own for all
subtiles, C is asked for when the first result leaves: 4096 x 4096 x 256 27.6 ->
22.5 us. Where C is of another dtype, or results do not wait, it has two buffers
of its own. Where operands are swapped it is transposed on its way into
registers (ldmatrix): 160 x 14336 x 16384 137.7 -> 119.6 us.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels import sm90_schedule as schedules
from pallas_gemm.kernels.problem import Config, Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
  """One consumer's share of a tile.

  Attributes:
    problem, config: of the kernel.
    warpgroup: the consumer.
  """

  problem: Problem
  config: Config
  warpgroup: jax.Array

  @property
  def subtiles(self) -> list[tuple[int, int]]:
    return plan.subtiles(self.problem, self.config)

  @property
  def width(self) -> int:
    return plan.subtile_width(self.problem, self.config)

  def window(self, ref, work_tile, subtile: int, first=0, rows=plan.WGMMA_ROWS):
    """The part of a result, or of C, that a subtile of the tile is."""
    i, j = schedules.share_corner(work_tile, self.warpgroup, self.config)
    i, j = i + self.subtiles[subtile][0] + first, j + self.subtiles[subtile][1]
    if plan.subtiles_overlap(self.problem, self.config):
      j = compat.anywhere(j)
    at = (pl.ds(i, rows), pl.ds(j, self.width))
    at = at[::-1] if self.config.swap_ab else at
    return schedules.window(ref, work_tile.out, at)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue(Share):
  """What is done to the accumulators of a consumer's share.

  Attributes:
    compute: the results from accumulators, C and bias, see `epilogues`.
    bias_ref, bias, bias_loaded: in global and in shared memory, its barriers.
    c_ref, c, c_loaded: likewise.
  """

  compute: Callable[..., list[jax.Array]]
  bias_ref: Any = None
  bias: Any = None
  bias_loaded: Any = None
  c_ref: Any = None
  c: Any = None
  c_loaded: Any = None

  @property
  def has_c(self) -> bool:
    return self.c is not None

  @property
  def has_c_in_place(self) -> bool:
    return self.has_c and plan.c_in_place(self.problem, self.config)

  @property
  def c_buffers(self) -> int:
    return plan.c_buffers(self.problem, self.config)

  def load_bias(self, work_tile: schedules.WorkTile) -> None:
    along_n = self.problem.bias == "n"
    if self.bias is not None:
      corner = schedules.share_corner(work_tile, self.warpgroup, self.config)
      size = plan.share(self.config)[along_n]
      along = pl.ds(corner[along_n], size)
      plgpu.copy_gmem_to_smem(
        self.bias_ref.at[work_tile.b, along]
        if self.problem.ragged
        else self.bias_ref.at[along],
        self.bias.at[self.warpgroup, pl.ds(0, size)],
        self.bias_loaded.at[self.warpgroup],
      )

  def load_c(self, work_tile: schedules.WorkTile, subtile: int) -> None:
    buffer = subtile % self.c_buffers
    plgpu.copy_gmem_to_smem(
      self.window(self.c_ref, work_tile, subtile),
      self.c.at[self.warpgroup, buffer],
      self.c_loaded.at[self.warpgroup * self.c_buffers + buffer],
    )

  def load_first_c(self, work_tile: schedules.WorkTile) -> None:
    """As much of C as has buffers of its own."""
    if self.has_c and not self.has_c_in_place:
      for subtile in range(self.c_buffers):
        self.load_c(work_tile, subtile)

  def load_next_c(self, work_tile: schedules.WorkTile, subtile: int) -> None:
    """What goes where this subtile of C was."""
    if self.has_c and subtile + self.c_buffers < len(self.subtiles):
      self.load_c(work_tile, subtile + self.c_buffers)

  def wait_for_bias(self) -> None:
    if self.bias is not None:
      plgpu.barrier_wait(self.bias_loaded.at[self.warpgroup])

  def results_of(
    self, accumulators: list[jax.Array], subtile: int
  ) -> list[jax.Array]:
    """The results of one subtile; waits for its part of C."""
    i, j = self.subtiles[subtile]
    c_subtile = None
    if self.has_c:
      buffer = subtile % self.c_buffers
      barrier = self.warpgroup * self.c_buffers + buffer
      plgpu.barrier_wait(self.c_loaded.at[barrier])
      c_subtile = self._c_of(buffer)
    return self.compute(
      [x[i : i + plan.WGMMA_ROWS, j : j + self.width] for x in accumulators],
      c_subtile,
      None if self.bias is None else self._bias_of(subtile),
    )

  def _c_of(self, buffer: int) -> jax.Array:
    subtile = self.c.at[self.warpgroup, buffer]
    if not self.config.swap_ab:
      return subtile[...]
    subtile = subtile.transpose((1, 0))
    return plgpu.load(subtile, layout=plgpu.Layout.WGMMA, optimized=False)

  def _bias_of(self, subtile: int) -> jax.Array:
    along_n = self.problem.bias == "n"
    size = self.width if along_n else plan.WGMMA_ROWS
    values = plgpu.load(
      self.bias.at[
        self.warpgroup, pl.ds(self.subtiles[subtile][along_n], size)
      ],
      layout=plgpu.Layout.WGMMA.reduce(0 if along_n else 1),
      optimized=False,
    )
    shape = (plan.WGMMA_ROWS, self.width)
    values = values.astype(jnp.float32)
    values = lax.broadcast_in_dim(values, shape, (1 if along_n else 0,))
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA)
