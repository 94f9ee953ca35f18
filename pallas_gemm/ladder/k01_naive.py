"""Rung 1, naive: one CUDA thread computes one C[i][j].

**Bottleneck before.** There is none: this is the triple loop, with the two
outer loops spread over threads and the sum over k left to each of them.

**Idea.** A thread reads one row of A and one column of B from global memory
and adds up K products. Nothing is shared, nothing is kept: every FMA costs
two loads. And the threads are numbered the unlucky way: the 32 lanes of a
warp walk *rows* (mapping B of the classics), so that at each k

    A[i + lane][k]   32 addresses, K floats apart: 32 sectors of 32 bytes for
                     32 useful floats, an eighth of what is moved is used;
    B[k][j]          one address, broadcast to the warp;
    C[i + lane][j]   written once at the end, N floats apart.

**Loop.**

    for each block (i, j) of C, 32 x 4, in parallel:      # a thread block
      for each row r and column c of it, in parallel:     # a thread
        acc = 0
        for k in range(K):                                # a grid step
          acc += A[32 * i + r, k] * B[k, 4 * j + c]
        C[32 * i + r, 4 * j + c] = alpha * acc + beta * C[...]

**Traffic.** 2 loads of 4 bytes per FMA.

    intensity = 2 FLOP / 8 bytes = 0.25 FLOP/byte, whatever the size
    4096^3:     2 * 4096^3 * 4 bytes = 550 GB requested, 1.4e11 FLOP

With M = N = K = 16 and 4 x 4 blocks a block asks for 16 outputs * 16 k * 2 =
512 values, of which only 2 * 4 * 16 = 128 differ; all blocks move 32,768 bytes.
Caches catch the repeats; what binds is the L1, which serves a warp's request
one 128-byte line a cycle, 33 lines a step here.

**In Mosaic GPU.** A Pallas thread is a warpgroup of 128 CUDA threads, and
which of them computes which element is a register layout: here 32 x 4, lanes
along M, warps along N (`own.reduce(1)` is the same dealing of rows, with no
columns). The loop is written once for the warpgroup; each CUDA thread runs
it on its own element, as the CUDA kernel of the same name does.

Source: the first kernel of every GEMM ladder, e.g. S. Boehm, "How to Optimize
a CUDA Matmul Kernel for cuBLAS-like Performance" (2022), kernel 1.
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

DEFAULT = contract.SimtConfig(block_m=32, block_n=4)


def grid(problem, config):
  """Blocks of rows, blocks of columns, and a step for each k."""
  bm, bn = config.block_m, config.block_n
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), problem.k


def specs(problem, config):
  """A step reads one column of a block of A, and one row of a block of B."""
  bm, bn = config.block_m, config.block_n
  a = plgpu.BlockSpec((bm, None), lambda i, j, k: (i, k), memory_space=GMEM)
  b = plgpu.BlockSpec((None, bn), lambda i, j, k: (k, j), memory_space=GMEM)
  c = plgpu.BlockSpec((bm, bn), lambda i, j, k: (i, j), memory_space=GMEM)
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def layout(config):
  """One element a thread; consecutive lanes walk rows."""
  bm, bn = config.block_m, config.block_n
  return register_layouts.element_per_thread(bm, bn, "rows")


def is_legal(config, problem):
  """None, or why `config` can't run."""
  outputs = config.block_m * config.block_n
  return legal.first(
    legal.at_least("outputs a block", outputs, 2),
    legal.at_most("outputs a block", outputs, 4096),
  )


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C."""
  blocks_m, blocks_n, steps = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  own = layout(config)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref = refs  # C is there if beta is not 0
    block = lax.axis_index("block")
    i, j = lax.div(block, blocks_n), lax.rem(block, blocks_n)

    def step(k, acc):
      a_k = load(window(a_spec, a_ref, i, j, k), own.reduce(1))
      b_k = load(window(b_spec, b_ref, i, j, k), own.reduce(0))
      return acc + outer(a_k, b_k, own)

    acc = jnp.zeros(out_spec.block_shape, jnp.float32)
    acc = lax.fori_loop(0, steps, step, plgpu.layout_cast(acc, own))
    result = problem.alpha * acc
    if problem.beta:
      c = load(window(c_spec[0], c_ref[0], i, j, 0), own)
      result += problem.beta * c
    out_block = window(out_spec, out_ref, i, j, 0)
    compat.store(out_block, result, optimized=False)

  return compat.kernel(
    thread_block,
    name="naive",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    # One axis: CUDA allows 2^31 - 1 blocks along x alone.
    grid=(blocks_m * blocks_n,),
    grid_names=("block",),
    compiler_params=LANE,
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="one thread one output, lanes walk rows",
  dtypes=contract.FLOAT32,
  uses=("block_m", "block_n"),
)
