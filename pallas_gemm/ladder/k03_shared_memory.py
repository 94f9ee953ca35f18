"""Rung 3, shared_memory: a block loads each value once and shares it.

**Bottleneck before.** Rung 2's loads are coalesced, but each value of A is
still asked for by every thread of its row and each value of B by every thread
of its column.

**Idea.** The threads of a 32 x 32 block walk K in slabs of 32. They first copy
a 32 x 32 tile of A and one of B to shared memory together, one element of
each a thread, wait for each other, multiply out of shared memory, and wait
again before the tiles are overwritten.

**Loop.**

    for each block (i, j) of C, 32 x 32, in parallel:     # a thread block
      acc = 0                                             # one a thread
      for k in range(K / 32):                             # a grid step
        a_s = A's block (i, k); b_s = B's block (k, j)    # to shared memory
        wait for all threads
        for kk in range(32):
          acc += a_s[row, kk] * b_s[kk, column]
        wait for all threads
      C's block (i, j) = alpha * acc + beta * C

**Traffic**, per output:

    global   2 * K / 32 = K/16 loads (rung 2: 2K)
    shared   2K loads
    intensity = block / 4 = 8 FLOP/byte (rung 2: 0.25): global traffic falls
    by the block size. 4096^3: 17 GB instead of 550.

16^3 in 4 x 4 blocks: 128 loads a block, all different, 8,192 bytes in all,
1.0 FLOP/byte: four times rung 2, the block size. What binds now is shared
memory: 2 loads for 1 FMA.

**In Mosaic GPU.** 1,024 outputs at one a thread are 8 warpgroups, 8 Pallas
threads of one block, each owning 4 rows. Two things differ from the CUDA
kernel. There is no `__syncthreads` over warpgroups: an mbarrier stands in
(`num_arrivals` counts warpgroups: 8 * 128 threads), and before Hopper, where
waiting threads would not sleep, `bar.sync 0`. And rows of shared memory
may be read by `ldmatrix` (LDSM), which Mosaic GPU picks. LLVM unrolls the
loop over kk by four and merges A's loads to 128 bits. Unrolled whole, it takes
44 registers a thread, not 28: one block an SM, 7.5 -> 5.6 TFLOP/s (H200).

Source: D. Kirk, W. Hwu, "Programming Massively Parallel Processors", tiled
matrix multiplication; S. Boehm (2022), kernel 3.
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

DEFAULT = contract.SimtConfig(block_m=32, block_n=32, block_k=32)


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
  """Warpgroups of a block: one output a thread."""
  return max(1, config.block_m * config.block_n // register_layouts.THREADS)


def layout(config):
  """One element a thread of the rows that a warpgroup owns."""
  rows = config.block_m // warpgroups(config)
  return register_layouts.element_per_thread(rows, config.block_n, "columns")


def is_legal(config, problem):
  """None, or why `config` can't run."""
  outputs = config.block_m * config.block_n
  # Each warpgroup copies rows of A and B; Mosaic has no arrays of one element.
  rows = max(warpgroups(config), 2)
  return legal.first(
    legal.at_least("block_m", config.block_m, rows),
    legal.at_least("block_k", config.block_k, rows),
    legal.at_least("block_n", config.block_n, 2),
    legal.at_most("threads a block", outputs, 1024),
    legal.fits(shared_bytes(specs(problem, config).in_specs[:2], 1, 4)),
  )


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
        a_k = load(a_s.at[own_m, kk], own.reduce(1))
        b_k = load(b_s.at[kk], own.reduce(0))
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
    name="shared_memory",
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
  idea="tiles of A and B shared by a block",
  dtypes=contract.FLOAT32,
  uses=("block_m", "block_n", "block_k"),
)
