"""Rung 5, blocktiling_2d: each thread computes 8 x 8 outputs.

**Bottleneck before.** Rung 4 still loads 9 values for 8 FMAs.

**Idea.** Extend the thread's column to a tile. At each kk a thread loads a
fragment of 8 values of A and one of 8 values of B to registers and forms
their outer product: 64 FMAs for 16 loads.

**Loop.**

    for each block (i, j) of C, 64 x 128, in parallel:    # a thread block
      acc[8, 8] = 0                                       # 8 x 8 a thread
      for k in range(K / 8):                              # a grid step
        a_s = A's block (i, k); b_s = B's block (k, j)    # to shared memory
        wait for all threads
        for kk in range(8):
          a[8] = a_s[rows, kk]; b[8] = b_s[kk, columns]   # to registers
          acc += outer(a, b)
        wait for all threads
      C's block (i, j) = alpha * acc + beta * C

**Traffic**, per output, with a block of BM = 64, BN = 128 and TM = TN = 8:

    global   K/BM + K/BN = 3K/128 loads (rung 4: 4K/128)
    shared   K * (TM + TN) / (TM * TN) = K/4 loads (rung 4: 9K/8)
    FMAs per shared load = TM * TN / (TM + TN) = 4 (rung 4: 8/9)
    intensity = 21 FLOP/byte. 4096^3: 6.4 GB.

**In Mosaic GPU.** 128 threads of 64 outputs are one warpgroup, and a block is
one. With that the barriers of rungs 3 and 4 are gone from the source: Mosaic
GPU puts a warpgroup barrier (BAR.SYNC) before and after every store to
shared memory, which is the barrier after the load and the one after the
compute. A thread's rows are 2 apart and its columns 16, so lanes are
neighbours: A is read word by word, the row of B by `ldmatrix`, which Mosaic
GPU picks, four words a lane at once. In CUDA the tile is usually solid
and the loads are left to the compiler to widen.

Source: S. Boehm (2022), kernel 5.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import contract, legal, register_layouts
from pallas_gemm.ladder.blocks import GMEM, Specs, shared_bytes, window
from pallas_gemm.ladder.register_layouts import LANE, load, outer

DEFAULT = contract.SimtConfig(
  block_m=64, block_n=128, block_k=8, thread_m=8, thread_n=8
)


def grid(problem, config):
  """Blocks of rows, blocks of columns, and a step for each slab of K."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), pl.cdiv(problem.k, bk)


def specs(problem, config):
  """A step reads a tile of A and one of B."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  a = plgpu.BlockSpec((bm, bk), lambda i, j, k: (i, k), memory_space=GMEM)
  b = plgpu.BlockSpec((bk, bn), lambda i, j, k: (k, j), memory_space=GMEM)
  c = plgpu.BlockSpec((bm, bn), lambda i, j, k: (i, j), memory_space=GMEM)
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def layout(config):
  """TM x TN elements a thread, apart from each other: lanes are neighbours."""
  return register_layouts.strided_tile(config.thread_m, config.thread_n)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  thread = config.thread_m, config.thread_n
  tiles = specs(problem, config).in_specs[:2]
  return legal.first(
    legal.block_is(config, 8 * thread[0], 16 * thread[1]),
    legal.at_most("outputs a thread", thread[0] * thread[1], 128),
    legal.at_most("block_k", config.block_k, 64),
    legal.fits(shared_bytes(tiles, 1, 4)),
  )


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C."""
  blocks_m, blocks_n, steps = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  own = layout(config)
  copy_a = register_layouts.element_per_thread(*a_spec.block_shape, "columns")
  copy_b = register_layouts.element_per_thread(*b_spec.block_shape, "columns")

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_s, b_s = refs
    block = lax.axis_index("block")
    i, j = lax.div(block, blocks_n), lax.rem(block, blocks_n)

    def slab(k, acc):
      a_tile = load(window(a_spec, a_ref, i, j, k), copy_a)
      b_tile = load(window(b_spec, b_ref, i, j, k), copy_b)
      a_s[...] = a_tile
      b_s[...] = b_tile

      def step(kk, acc):
        a_k = load(a_s.at[:, kk], own.reduce(1))  # TM values
        b_k = load(b_s.at[kk], own.reduce(0))  # TN values
        return acc + outer(a_k, b_k, own)

      return lax.fori_loop(0, config.block_k, step, acc)

    acc = jnp.zeros(out_spec.block_shape, jnp.float32)
    acc = lax.fori_loop(0, steps, slab, plgpu.layout_cast(acc, own))
    result = problem.alpha * acc
    if problem.beta:
      result += problem.beta * load(window(c_spec[0], c_ref[0], i, j, 0), own)
    compat.store(window(out_spec, out_ref, i, j, 0), result, optimized=False)

  return compat.kernel(
    thread_block,
    name="blocktiling_2d",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    grid=(blocks_m * blocks_n,),
    grid_names=("block",),
    scratch_types=(
      plgpu.SMEM(a_spec.block_shape, jnp.float32),
      plgpu.SMEM(b_spec.block_shape, jnp.float32),
    ),
    compiler_params=LANE,
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="a thread computes 8 x 8",
  dtypes=contract.FLOAT32,
  uses=("block_m", "block_n", "block_k", "thread_m", "thread_n"),
)
