"""Rung 4, blocktiling_1d: each thread computes a column of 8 outputs.

**Bottleneck before.** Rung 3 loads two values from shared memory for every
FMA, and shared memory serves far fewer values than the FMA units take.

**Idea.** A thread computes TM = 8 outputs below each other. At each kk it
loads one value of B, which stays in a register, and 8 of A: 9 loads for 8
FMAs instead of 16. With more outputs a thread, the block can grow to 64 x 64
with half the threads of rung 3, and a larger block reads global memory less
often.

**Loop.**

    for each block (i, j) of C, 64 x 64, in parallel:     # a thread block
      acc[8] = 0                                          # 8 a thread
      for k in range(K / 32):                             # a grid step
        a_s = A's block (i, k); b_s = B's block (k, j)    # to shared memory
        wait for all threads
        for kk in range(32):
          b = b_s[kk, column]                             # one value
          for t in range(8): acc[t] += a_s[row + t, kk] * b
        wait for all threads
      C's block (i, j) = alpha * acc + beta * C

**Traffic**, per output, with BM = BN = 64 and TM = 8:

    global   K/BN + K/BM = K/32 loads (rung 3: K/16)
    shared   K * (TM + 1) / TM = 9K/8 loads (rung 3: 2K)
    intensity = 16 FLOP/byte. 4096^3: 8.6 GB.

**In Mosaic GPU.** 512 CUDA threads are 4 warpgroups; each owns 16 rows as 2 x 2
warps of 8 rows x 32 columns, one column a lane. `own.reduce(0)`, in which the
row of B is loaded, is one register a thread: the B value held in a register
needs no code of its own. The slab is 32 deep, not 8 as in the texts: each slab
costs two block-wide barriers, at which 512 threads arrive one after the other.

Source: S. Boehm (2022), kernel 4.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.ladder import contract, legal, register_layouts
from pallas_gemm.ladder.blocks import GMEM, Specs, rows_of, shared_bytes, window
from pallas_gemm.ladder.register_layouts import LANE, load, outer

# block_k 8 -> 16 -> 32: 8.3 -> 17.7 -> 20.1 TFLOP/s at 4096^3 on H200.
DEFAULT = contract.SimtConfig(block_m=64, block_n=64, block_k=32, thread_m=8)


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


def warpgroups(config):
  """Warpgroups of a block: each owns 2 * TM rows."""
  return config.block_m // (2 * config.thread_m)


def layout(config):
  """A column of TM rows a thread, 2 x 2 warps."""
  return register_layouts.column_per_thread(config.thread_m)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  count = warpgroups(config)
  if config.block_n != 64 or not 1 <= count <= min(8, config.block_k):
    return (
      "block_n must be 64, and block_m / (2 * thread_m), the block's"
      f" warpgroups, 1 to 8 and at most block_k, got {config}"
    )
  return legal.fits(shared_bytes(specs(problem, config).in_specs[:2], 1, 4))


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C."""
  blocks_m, blocks_n, steps = grid(problem, config)
  in_specs, out_spec = specs(problem, config)
  (bm, bn), bk = out_spec.block_shape, config.block_k
  # What one warpgroup owns of the block, and copies of a tile of A and B.
  count, own = warpgroups(config), layout(config)
  rows, depth = bm // count, bk // count
  copy_a = register_layouts.element_per_thread(rows, bk, "columns")
  copy_b = register_layouts.element_per_thread(depth, bn, "columns")

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_s, b_s, loaded, computed = refs
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    i, j = lax.div(block, blocks_n), lax.rem(block, blocks_n)
    own_m = pl.ds(warpgroup * rows, rows)
    own_k = pl.ds(warpgroup * depth, depth)
    own_a, own_b, *own_c, own_out = (
      rows_of(spec, count, warpgroup) for spec in (*in_specs, out_spec)
    )

    def slab(k, acc):
      # Both loads are in flight before the first store waits for one.
      a_tile = load(window(own_a, a_ref, i, j, k), copy_a)
      b_tile = load(window(own_b, b_ref, i, j, k), copy_b)
      a_s[own_m] = a_tile
      b_s[own_k] = b_tile
      ptx.wait_for_block(loaded)

      def step(kk, acc):
        a_k = load(a_s.at[own_m, kk], own.reduce(1))  # TM values
        b_k = load(b_s.at[kk], own.reduce(0))  # one value
        return acc + outer(a_k, b_k, own)

      acc = lax.fori_loop(0, bk, step, acc)
      ptx.wait_for_block(computed)
      return acc

    acc = plgpu.layout_cast(jnp.zeros((rows, bn), jnp.float32), own)
    result = problem.alpha * lax.fori_loop(0, steps, slab, acc)
    if problem.beta:
      result += problem.beta * load(window(own_c[0], c_ref[0], i, j, 0), own)
    compat.store(window(own_out, out_ref, i, j, 0), result, optimized=False)

  return compat.kernel(
    thread_block,
    name="blocktiling_1d",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    grid=(blocks_m * blocks_n,),
    grid_names=("block",),
    num_threads=count,
    scratch_types=(
      plgpu.SMEM(in_specs[0].block_shape, jnp.float32),
      plgpu.SMEM(in_specs[1].block_shape, jnp.float32),
      ptx.block_barrier(count),
      ptx.block_barrier(count),
    ),
    compiler_params=LANE,
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="a thread computes a column of 8",
  dtypes=contract.FLOAT32,
  uses=("block_m", "block_n", "block_k", "thread_m"),
)
