"""Rung 7, warptiling: block -> warp -> thread, fragments in patches.

**Bottleneck before.** Rung 6 lays its threads out as a line of tiles across the
block. A warp's outputs are then a strip of 16 x 128: it reads 144 values of
shared memory a step for 2,048 outputs, and because neighbouring lanes' columns
start 8 apart, lanes meet in the same banks.

**Idea.** Put a level between block and thread. The block is split into 2 x 2
warp tiles, as square as can be, and a thread's outputs within the warp tile
into 4 x 2 patches of 4 x 4, 16 rows and 32 columns apart. A warp then reads
64 + 64 values a step for 64 x 64 outputs; the lanes of one load read one
solid run of memory, without bank conflicts; lanes of the same row or column
read the same word, which is broadcast. A thread now holds 16 x 8 outputs
instead of 8 x 8, which takes fewer words an FMA.

**Loop.**

    for each block (i, j) of C, 128 x 128, in parallel:   # a thread block
      acc[16, 8] = 0                                      # 4 x 2 patches
      for k in range(K / 8):                              # a grid step
        a_s = A's block (i, k).T; b_s = B's block (k, j)  # 4 floats a load
        wait for all threads
        for kk in range(8):
          a[16] = a_s[kk, rows]; b[8] = b_s[kk, columns]  # 4 + 2 loads
          acc += outer(a, b)
        wait for all threads
      C's block (i, j) = alpha * acc + beta * C

**Traffic**, per output, with BM = BN = 128, TM = 16, TN = 8:

    global   K/64 loads (rung 6: 3K/128)
    shared   K * (TM + TN) / (TM * TN) = 3K/16 a thread (rung 6: K/4),
             K * (64 + 64) / (64 * 64) = K/32 different words a warp
    FMAs per load of 16 bytes: 128 / 6 = 21 (rung 6: 64 / 4 = 16)
    intensity = 32 FLOP/byte. 4096^3: 4.3 GB.

**In Mosaic GPU.** The layout is what changes. A's tile is read a row a lane,
which suits its transposing store (it becomes `stmatrix`, STSM, four words a
lane) and makes the order of the blocks matter: they go down strips 8 blocks
wide. The 128 accumulators leave room for two blocks on an SM; while one waits
for its slab, the other computes. The slab is 8 deep: at 16 the unrolled loop
is 35 KB of instructions.

Source: S. Boehm (2022), kernel 10; its fragments after NVIDIA's CUTLASS
("Efficient GEMM in CUDA") and S. Gray's maxas SGEMM.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import contract, legal, register_layouts
from pallas_gemm.ladder.blocks import GMEM, Specs, rows_of, window
from pallas_gemm.ladder.register_layouts import LANE, load, outer

# 8 x 8 outputs a thread and slabs of 16: 44.0 TFLOP/s; 16 x 8 and 8: 47.1
# (4096^3 on H200). raster 1 -> 8: 43.8 -> 47.1.
DEFAULT = contract.SimtConfig(128, 128, 8, 16, 8, vector=4, raster=8)


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
  """2 x 2 warps; TM x TN elements a thread, in patches of 4 x 4."""
  return register_layouts.warp_tile(config.thread_m, config.thread_n)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  # A slab of A is dealt to 128 threads, a row and 4 columns at a time.
  return legal.vectors_fit(config, least_depth=512 // config.block_m)


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C."""
  blocks_m, blocks_n, steps = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  own = layout(config)
  copy_a = register_layouts.row_per_lane(config.block_m)
  copy_b = register_layouts.rows_of_vectors(config.block_n)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_s, b_s = refs
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    # Down strips of `raster` blocks, so that neighbours share rows in L2.
    i, j = plgpu.planar_snake(block, (blocks_m, blocks_n), 1, config.raster)

    def slab(k, acc):
      a_tile = load(window(a_spec, a_ref, i, j, k), copy_a)
      b_tile = load(window(b_spec, b_ref, i, j, k), copy_b)
      # a_s is [k][m]: rows of A lie side by side.
      compat.store(a_s.transpose((1, 0)), a_tile, optimized=False)
      b_s[...] = b_tile
      for kk in range(config.block_k):
        a_k = load(a_s.at[kk], own.reduce(1))
        b_k = load(b_s.at[kk], own.reduce(0))
        acc += outer(a_k, b_k, own)
      return acc

    acc = jnp.zeros(out_spec.block_shape, jnp.float32)
    acc = lax.fori_loop(0, steps, slab, plgpu.layout_cast(acc, own))
    result = problem.alpha * acc
    # C's rows by warpgroup, of which there is one: stored as one window of
    # (i, j), LLVM takes the 128-bit loads of *A* apart into words.
    own_out = rows_of(out_spec, 1, warpgroup)
    if problem.beta:
      result += problem.beta * load(window(c_spec[0], c_ref[0], i, j, 0), own)
    compat.store(window(own_out, out_ref, i, j, 0), result, optimized=False)

  return compat.kernel(
    thread_block,
    name="warptiling",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    grid=(blocks_m * blocks_n,),
    grid_names=("block",),
    num_threads=1,
    scratch_types=(
      plgpu.SMEM(a_spec.block_shape[::-1], jnp.float32),
      plgpu.SMEM(b_spec.block_shape, jnp.float32),
    ),
    compiler_params=LANE,
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="block, warp, thread; no bank conflicts",
  dtypes=contract.FLOAT32,
  uses=tuple(x for x in contract.SIMT_FIELDS if x != "stages"),
)
