"""Rung 6, vectorized: 128-bit loads, and A transposed on its way to SMEM.

**Bottleneck before.** Rung 5 moves words of 4 bytes. A load instruction takes
an issue slot that an FFMA could have had, whatever its width.

**Idea.** Move 16 bytes at a time. From global memory a thread takes 4
neighbouring floats of a row of A or B. From shared memory it takes its
fragments 4 floats at a time, which for A needs 8 *rows* of one k side by
side: so A is stored transposed, [k][m].

**Loop.**

    for each block (i, j) of C, 64 x 128, in parallel:    # a thread block
      acc[8, 8] = 0                                       # 8 x 8 a thread
      for k in range(K / 16):                             # a grid step
        a_s = A's block (i, k).T; b_s = B's block (k, j)  # 4 floats a load
        wait for all threads
        for kk in range(16):
          a[8] = a_s[kk, rows]; b[8] = b_s[kk, columns]   # 2 + 2 loads
          acc += outer(a, b)
        wait for all threads
      C's block (i, j) = alpha * acc + beta * C

**Traffic.** Byte for byte rung 5's (the slab is 16 deep instead of 8, which
changes no total). Instructions, per thread and k, for 64 FMAs:

    shared   4 loads of 16 bytes (rung 5: 8 words of A and 2 LDSM for B)
    global   (64 + 128) / 128 / 4 = 0.4 loads (rung 5: 1.5)

**In Mosaic GPU.** A layout whose `vector` dimension has 4 elements makes a load
128 bits wide; global references are generic pointers, so the instruction in
SASS is LD.E.128, not LDG.E.128. The transpose is a store through
`ref.transpose`, word by word (a register vector can't be torn apart, so the
tile of A is held in a layout of single words whose 4 neighbours the compiler
fuses to one load). The loop over kk is unrolled from this rung on: with
addresses known, LLVM and ptxas pair the loads with the FFMAs of the step
before.

Source: S. Boehm (2022), kernel 6.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import contract, legal, register_layouts
from pallas_gemm.ladder.blocks import GMEM, Specs, window
from pallas_gemm.ladder.register_layouts import LANE, load, outer

DEFAULT = contract.SimtConfig(
  block_m=64, block_n=128, block_k=16, thread_m=8, thread_n=8, vector=4
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
  """A solid tile of TM x TN elements a thread, in vectors of 4."""
  return register_layouts.contiguous_tile(config.thread_m, config.thread_n)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  return legal.first(
    legal.vectors_fit(config),
    None
    if config.block_m % 64 == 0 and config.block_k % 8 == 0
    else "a slab of A must be a multiple of 64 x 8 to be dealt to 128"
    f" threads, got {config.block_m} x {config.block_k}",
  )


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C."""
  blocks_m, blocks_n, steps = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  own = layout(config)
  copy_a = register_layouts.words_of_row_vectors()
  copy_b = register_layouts.rows_of_vectors(config.block_n)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_s, b_s = refs
    block = lax.axis_index("block")
    i, j = lax.div(block, blocks_n), lax.rem(block, blocks_n)

    def slab(k, acc):
      a_tile = load(window(a_spec, a_ref, i, j, k), copy_a)
      b_tile = load(window(b_spec, b_ref, i, j, k), copy_b)
      # a_s is [k][m]: 8 rows of A lie side by side.
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
    if problem.beta:
      result += problem.beta * load(window(c_spec[0], c_ref[0], i, j, 0), own)
    compat.store(window(out_spec, out_ref, i, j, 0), result, optimized=False)

  return compat.kernel(
    thread_block,
    name="vectorized",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    grid=(blocks_m * blocks_n,),
    grid_names=("block",),
    scratch_types=(
      plgpu.SMEM(a_spec.block_shape[::-1], jnp.float32),
      plgpu.SMEM(b_spec.block_shape, jnp.float32),
    ),
    compiler_params=LANE,
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="128-bit accesses, A transposed in SMEM",
  dtypes=contract.FLOAT32,
  uses=("block_m", "block_n", "block_k", "thread_m", "thread_n", "vector"),
)
