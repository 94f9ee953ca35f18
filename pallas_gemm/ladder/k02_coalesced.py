"""Rung 2, coalesced: the same loop, but lanes walk columns.

**Bottleneck before.** Rung 1's warp touches 32 lines of A at each k and uses
4 bytes of each.

**Idea.** Number the threads the other way (mapping A of the classics): the 32
lanes of a warp walk *columns*. The arithmetic, the loads of a thread and the
bytes requested stay as they are; what changes is which addresses meet in one
request. At each k a warp now touches

    A[i][k]          one address, broadcast;
    B[k][j + lane]   32 neighbours, one line of 128 bytes, all of it used;
    C[i][j + lane]   the same, once at the end.

**Loop.**

    for each block (i, j) of C, 4 x 32, in parallel:      # a thread block
      for each row r and column c of it, in parallel:     # a thread
        acc = 0
        for k in range(K):                                # a grid step
          acc += A[4 * i + r, k] * B[k, 32 * j + c]       # c is the lane
        C[4 * i + r, 32 * j + c] = alpha * acc + beta * C[...]

**Traffic.** 2 loads per FMA as before, 0.25 FLOP/byte requested. But a request
for B is 4 sectors where one for A was 32, and a step is 2 lines of L1 instead
of 33: the largest gain of any step in float32.

**In Mosaic GPU.** The block is 4 x 32 instead of 32 x 4 and the layout deals
the lanes to its columns. Nothing else differs from rung 1.

Source: as rung 1, kernel 2 ("global memory coalescing").
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

DEFAULT = contract.SimtConfig(block_m=4, block_n=32)


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
  """One element a thread; consecutive lanes walk columns."""
  bm, bn = config.block_m, config.block_n
  return register_layouts.element_per_thread(bm, bn, "columns")


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
    name="coalesced",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    # One axis: CUDA allows 2^31 - 1 blocks along x alone.
    grid=(blocks_m * blocks_n,),
    grid_names=("block",),
    compiler_params=LANE,
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="the same loop, lanes walk columns",
  dtypes=contract.FLOAT32,
  uses=("block_m", "block_n"),
)
