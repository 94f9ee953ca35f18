"""Rung 13: Blackwell's tcgen05, whose sums live in a memory of their own.

Compiled for sm_100a and sm_103a, and interpreted. It has never run on a B200:
no figure here is measured.

**Bottleneck before.** Registers. wgmma leaves 64 x 256 sums in a warpgroup's
registers, so a tile larger than 128 x 256 has no room, and a warpgroup that
writes C can't multiply.

**Idea.** `tcgen05.mma` (PTX ISA, "TensorCore 5th Generation Instructions")
reads both operands from shared memory, as wgmma does, and adds to *tensor
memory*: 128 rows of 512 float32 an SM. One thread issues it and none holds a
sum. So a block has three roles that never wait for each other's work: a warp
loads, a warp multiplies, a warpgroup writes C. Two accumulators of 128 x 256
fill the tensor memory; while one is written, the next tile is multiplied into
the other.

**Loop.** Tiles and their order are those of rung 11.

    for tile in range(block, tiles, SMs):                 # a block's tiles
      i, j = snake(tile)
      warp 0: for k in range(K / 64):                     # a grid step
        wait until the slot is empty
        TMA A's block (i, k) and B's block (k, j) into the slot
      warp 1: wait until the accumulator has been read
        for k in range(K / 64):
          wait until the slot is full
          sums += a_tile @ b_tile; the slot is empty after it   # tcgen05.mma
        the accumulator is full after it                  # tcgen05.commit
      warpgroup 1: wait until the accumulator is full
        C's block (i, j) = alpha * sums + beta * C, subtile by subtile, by TMA
        the accumulator has been read

**Traffic.** Into shared memory as in rung 11. An operand of 64 x 256 is read
by one instruction for 128 rows, where wgmma has 64: the tensor cores take half
the bytes of B a FLOP.

JAX's own kernel with a tiled epilogue, not persistent and with one block a
tile, is published at 56 % of a B200's peak; two blocks that share a tile reach
more ("Writing high-performance matrix multiplication kernels for Blackwell",
JAX documentation). The interpreter knows no such pairs, so this rung has none.

Sources: PTX ISA; that page for the order of the steps.
"""

import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import blocks as blocks_lib
from pallas_gemm.ladder import contract, legal
from pallas_gemm.ladder import tensor_core_common as common
from pallas_gemm.ladder.blocks import Specs, copy_in, ring, window

DEFAULT = contract.TensorCoreConfig(
  128, 256, 64, stages=4, epilogue_n=64, raster=8, raster_dim="m"
)
# An SM's tensor memory: rows, and columns of 32 bits.
TMEM_ROWS, TMEM_COLUMNS = 128, 512
_ACCUMULATORS = 2
_LOADER, _MULTIPLIER = 0, 1  # warps of the first warpgroup


def grid(problem, config):
  """Tiles along M, tiles along N, and a step for each slab of K."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), pl.cdiv(problem.k, bk)


def specs(problem, config):
  """A step reads a tile of A and one of B, swizzled, by TMA."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  tile = functools.partial(
    plgpu.BlockSpec, memory_space=plgpu.SMEM, transforms=common.SWIZZLE
  )
  a = tile((bm, bk), lambda i, j, k: (i, k))
  b = tile((bk, bn), lambda i, j, k: (k, j))
  c = tile((bm, bn), lambda i, j, k: (i, j))
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def launch(problem, config):
  """A thread block on each SM; no more than there are tiles."""
  return (min(math.prod(grid(problem, config)[:2]), hardware.sm_count()),)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  if bm != TMEM_ROWS or bn not in (64, 128, 256) or bk % common.ATOM_COLUMNS:
    return (
      f"block_m must be {TMEM_ROWS}, block_n 64, 128 or 256 and block_k a"
      f" multiple of {common.ATOM_COLUMNS}, got {bm}, {bn} and {bk}"
    )
  width = config.epilogue_n
  if width not in (16, 32, 64, 128) or bn % (2 * width):
    return f"epilogue_n must be 16 to 128 and divide {bn} / 2, got {width}"
  ring_bytes = blocks_lib.shared_bytes(
    specs(problem, config).in_specs[:2], config.stages, 2
  )
  return legal.first(
    legal.at_least("stages", config.stages, 2),
    legal.fits(ring_bytes + 2 * 2 * bm * width + 1024),
  )


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C; two warps and a warpgroup share out the work."""
  *tiles, slabs = grid(problem, config)
  (blocks,) = launch(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  (bm, bn), stages, width = (
    out_spec.block_shape,
    config.stages,
    config.epilogue_n,
  )

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_ring, b_ring, sums, staging = refs[:-5]
    full, empty, done, drained, c_loaded = refs[-5:]
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    count = lax.div(math.prod(tiles) - 1 - block, blocks) + 1

    def for_each_tile(visit):
      """visit(t, i, j) for the tiles (i, j) of this block, in its order."""

      def iteration(t, _):
        visit(t, *common.tile_at(block + t * blocks, tiles, config))

      lax.fori_loop(0, count, iteration, None)

    def accumulator(t):
      which = lax.rem(t, _ACCUMULATORS)
      return which, sums.at[:, pl.ds(which * bn, bn)]

    def load_tile(t, i, j):
      def load(k, _):
        step = t * slabs + k
        slot = lax.rem(step, stages)

        @pl.when(step >= stages)
        def _():
          plgpu.barrier_wait(empty.at[slot])

        copy_in(a_spec, a_ref, a_ring.at[slot], full.at[slot], i, j, k)
        copy_in(b_spec, b_ref, b_ring.at[slot], full.at[slot], i, j, k)

      lax.fori_loop(0, slabs, load, None)

    def multiply_tile(t, i, j):
      del i, j
      which, acc = accumulator(t)

      @pl.when(t >= _ACCUMULATORS)
      def _():
        plgpu.barrier_wait(drained.at[which])

      def multiply(k, _):
        slot = lax.rem(t * slabs + k, stages)
        plgpu.barrier_wait(full.at[slot])
        plgpu.tcgen05_mma(
          acc,
          a_ring.at[slot],
          b_ring.at[slot],
          empty.at[slot],
          accumulate=k > 0,
        )

      lax.fori_loop(0, slabs, multiply, None)
      plgpu.tcgen05_commit_arrive(done.at[which])

    def store_tile(t, i, j):
      which, acc = accumulator(t)
      plgpu.barrier_wait(done.at[which])
      out_block = window(out_spec, out_ref, i, j, 0)
      c_block = window(c_spec[0], c_ref[0], i, j, 0) if c_ref else None
      for index in range(bn // width):
        # The store before the last has left shared memory: its buffer is free,
        # for a tile has an even number of subtiles.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        columns = (slice(None), pl.ds(index * width, width))
        own = plgpu.async_load_tmem(acc.at[columns])
        common.send(
          own,
          staging.at[index % 2],
          out_block.at[columns],
          c_block.at[columns] if c_ref else None,
          c_loaded,
          problem,
        )
      plgpu.wait_load_tmem()
      plgpu.barrier_arrive(drained.at[which])

    @pl.when(warpgroup == 0)
    def _():
      @plgpu.warp_map
      def _(warp):
        pl.when(warp == _LOADER)(lambda: for_each_tile(load_tile))
        pl.when(warp == _MULTIPLIER)(lambda: for_each_tile(multiply_tile))

    @pl.when(warpgroup == 1)
    def _():
      for_each_tile(store_tile)
      plgpu.wait_smem_to_gmem(0)

  barrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
  return compat.kernel(
    thread_block,
    name="tensor_memory",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(blocks,),
    grid_names=("block",),
    num_threads=2,
    scratch_types=(
      ring(a_spec, stages, problem.dtype),
      ring(b_spec, stages, problem.dtype),
      plgpu.TMEM((bm, _ACCUMULATORS * bn), jnp.float32),
      common.swizzled((2, bm, width), problem.dtype),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # A and B
      barrier(num_barriers=stages),
      barrier(num_barriers=_ACCUMULATORS),
      barrier(num_barriers=_ACCUMULATORS),
      plgpu.Barrier(),
    ),
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="sums in tensor memory; a warp multiplies while a warpgroup writes C",
  dtypes=contract.FLOAT16S,
  needs=("tcgen05", "tma"),
  uses=(*contract.TENSOR_CORE_FIELDS[:4], "epilogue_n", "raster", "raster_dim"),
  padding=common.padding,
)
