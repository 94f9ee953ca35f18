"""What the fp32 rungs share: the launch, the edges and the epilogue.

A rung's own file says how a block of A @ B is accumulated; where the block
lies, what happens at the edges and how it is stored is the same in rungs 1-7
and stands here.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import contract

# Lane semantics: each operation is what its layout says, nothing is inferred.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def gemm(
  accumulate: Callable[..., jax.Array],
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None,
  problem: contract.Problem,
  config: contract.SimtConfig,
  *,
  name: str,
  layout: Any,
  warpgroups: int = 1,
  scratch_types: Sequence[Any] = (),
) -> jax.Array:
  """Launches one thread block for each block_m x block_n block of the result.

  Rungs 1-7 load through registers, which nothing masks: operands that are no
  whole number of blocks are padded with zeros by XLA first and the result is
  cut, one read and one write of each such operand beside the product.

  Args:
    accumulate: (a_ref, b_ref, m0, n0, warpgroup, *scratch_refs) -> the sum
      over k for the rows that this warpgroup owns, in `layout`; m0 and n0 are
      the block's first row and column in global memory.
    a: [M, K] float32.
    b: [K, N] float32.
    c: [M, N] float32 or None.
    problem: the sizes and factors.
    config: the tile sizes.
    name: the kernel's name in profiles.
    layout: register layout of a warpgroup's part of the block.
    warpgroups: warpgroups of a block; they share its rows out evenly.
    scratch_types: shared memory and barriers.

  Returns:
    [M, N] float32.
  """
  block_m, block_n = config.block_m, config.block_n
  rows = block_m // warpgroups

  def launch(a, b, c):
    blocks_m, blocks_n = a.shape[0] // block_m, b.shape[1] // block_n

    def body(a_ref, b_ref, *refs):
      c_ref, (out_ref, *scratch) = (
        (None, refs) if c is None else (refs[0], refs[1:])
      )
      # One grid axis: CUDA allows 2^31 - 1 blocks along x alone.
      block = lax.axis_index("block")
      i, j = block_at(block, (blocks_m, blocks_n), config.raster)
      m0, n0 = i * block_m, j * block_n
      warpgroup = lax.axis_index("warpgroup")
      acc = accumulate(a_ref, b_ref, m0, n0, warpgroup, *scratch)
      at = pl.ds(m0 + warpgroup * rows, rows), pl.ds(n0, block_n)
      c_block = None if c_ref is None else load(c_ref.at[*at], layout)
      result = contract.combine(acc, c_block, problem)
      compat.store(out_ref.at[*at], result, optimized=False)

    return compat.kernel(
      body,
      name=name,
      out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32),
      grid=(blocks_m * blocks_n,),
      grid_names=("block",),
      num_threads=warpgroups,
      thread_name="warpgroup",
      scratch_types=tuple(scratch_types),
      compiler_params=LANE,
    )(*[x for x in (a, b, c) if x is not None])

  return contract.padded(
    launch,
    a,
    b,
    c,
    multiple_m=block_m,
    multiple_n=block_n,
    multiple_k=max(config.block_k, 1),
  )


def block_at(
  block: jax.Array, blocks: tuple[int, int], raster: int
) -> tuple[jax.Array, jax.Array]:
  """Row and column of the result's block that thread block `block` computes.

  Blocks with neighbouring numbers run at the same time. `raster` 1 walks one
  row of blocks after the other; more walks down strips that are `raster`
  blocks wide, turning around at each end, so that what runs together reads
  fewer different rows and columns, and L2 serves more of it.
  """
  if raster == 1:
    return lax.div(block, jnp.int32(blocks[1])), lax.rem(
      block, jnp.int32(blocks[1])
    )
  return plgpu.planar_snake(block, blocks, 1, raster)


def zeros(rows: int, columns: int, layout: Any) -> jax.Array:
  """A float32 accumulator of zeros in `layout`."""
  return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), layout)


def load(ref: Any, layout: Any) -> jax.Array:
  """Loads `ref` with each thread reading what `layout` gives it.

  Mosaic GPU refuses accesses that it knows to be slow unless told that they
  are meant: in these rungs they are the lesson.
  """
  return plgpu.load(ref, layout=layout, optimized=False)


def sync(barrier: Any) -> None:
  """All warpgroups of the block have come here (`__syncthreads` in CUDA).

  Pallas has no barrier instruction across warpgroups; an mbarrier serves, on
  which each of the block's threads arrives.
  """
  plgpu.barrier_arrive(barrier)
  plgpu.barrier_wait(barrier)


def fixed(config: contract.SimtConfig, **fields: int) -> str | None:
  """Reason if a field that this rung has no use for is not as it must be."""
  for name, value in fields.items():
    if (got := getattr(config, name)) != value:
      return f"{name} must be {value} in this rung, got {got}"
  return None


def powers_of_two(config: contract.SimtConfig, *names: str) -> str | None:
  """Reason if one of the named fields is no power of two."""
  for name in names:
    if (size := getattr(config, name)) < 1 or size & (size - 1):
      return f"{name} must be a power of two, got {size}"
  return None


def at_most(what: str, value: int, most: int) -> str | None:
  """Reason if there are too many of something."""
  return f"{what}: {value}, at most {most}" if value > most else None


def slabs_fit(config: contract.SimtConfig) -> str | None:
  """Reason if a slab of A and one of B are too much for shared memory."""
  slab = config.block_k * (config.block_m + config.block_n)
  return at_most(
    "bytes of shared memory",
    4 * slab,
    hardware.current().shared_bytes_per_block,
  )


def first(*reasons: str | None) -> str | None:
  """The first reason that is one."""
  return next((r for r in reasons if r is not None), None)


def default(config: contract.SimtConfig):
  """A rung's `default_config` that is the same for every problem."""
  return lambda problem: dataclasses.replace(config)
