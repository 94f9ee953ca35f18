"""Waits for threads, and numbers that compilers don't know."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import gpu

from pallas_gemm import compat, hardware
from pallas_gemm.ptx import mlir


def unknown(value: int) -> Any:
  """The number, of which compilers don't know which: of laps of a loop.

  They would unroll it, and what is worked out before it would spill.
  """
  if not compat.targets_gpu():
    return jnp.int32(value)
  splat = plgpu.Layout.WG_SPLAT
  found = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)

  @plgpu.inline_mgpu(return_type=found)
  def number(_):
    x = mlir.asm(f"mov.b32 $0, {value};", "=r", result="i32")
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)

  return number()


def wait_for_warpgroup() -> None:
  """Waits until all threads of the warpgroup are here, and what they stored.

  `plgpu.commit_smem` makes that known to TMA too, by a fence that waits until
  stores to global memory have arrived there: 60 groups of 136 rows along K,
  4096 x 1407, take 391 us with that between subtiles, 379 so (H100).
  """
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    utils.warpgroup_barrier()

  _()


def block_barrier(warpgroups: int) -> Any:
  """Scratch for `wait_for_block`: an mbarrier, or nothing before Hopper."""
  if _suspends():
    return plgpu.Barrier(num_arrivals=warpgroups)
  return plgpu.SMEM((2,), jnp.int32)  # a place among the scratch, not used


def wait_for_block(barrier: Any) -> None:
  """Waits until all threads of the block are here, and what they stored."""
  if _suspends():
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    return

  @plgpu.inline_mgpu()
  def _(_):
    gpu.barrier()  # bar.sync 0

  _()


def _suspends() -> bool:
  """Whether a thread that waits at an mbarrier sleeps, as from Hopper on.

  Before, it asks again and again: with mbarriers rung 3, compiled for an A100,
  took 12 times as long as Hopper's code (both on an H100).
  """
  return hardware.why_not("", ("tma",)) is None
