"""Rungs 9a and 9c: tensor cores before Hopper, `mma` on fragments in registers.

**Idea of 9a.** Between 8 and 9: the copies of rung 7 (through registers, no
TMA, A not transposed), then `mma` of 16 x 8 x 16 on fragments that each warp
loads from shared memory, the step that the classics take with WMMA.

**Idea of 9c.** The summit before Hopper. `cp.async` copies from global to
shared memory past registers and L1, 16 bytes a thread, into a ring of slabs;
while the tensor cores multiply one, the next are on the way.

**Loop of 9c.**

    for each block (i, j) of C, 128 x 128, in parallel:   # a thread block
      acc[64, 64] a warp = 0                              # 128 a thread
      start to copy slabs 0 and 1                         # cp.async
      for k in range(K / 32):                             # a grid step
        wait for the own copies of slab k, and for all threads
        start to copy slab k + 2
        a, b = slab k                                     # 16 LDSM.x4
        acc += a @ b                                      # 64 HMMA
      C's block (i, j) = alpha * acc + beta * C

**Traffic.** Global memory as in rung 9. Shared memory: each of 2 x 2 warps
reads 64 rows of A and 64 columns of B, 32 FLOP/byte.

**Shapes.** XLA pads to whole blocks.

Sources: PTX ISA, "Matrix multiply-accumulate" and "Asynchronous copy"; the ring
is CUTLASS's multistage main loop ("Efficient GEMM in CUDA").
"""

import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.ladder import blocks, contract, legal, register_layouts
from pallas_gemm.ladder import tensor_core_common as common
from pallas_gemm.ladder.blocks import GMEM, Specs, window
from pallas_gemm.ladder.register_layouts import load, rows_of_vectors, zeros

DEFAULT = contract.TensorCoreConfig(block_m=128, block_n=128, block_k=32)


def grid(problem, config):
  """Tiles along M, tiles along N, and a step for each slab of K."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), pl.cdiv(problem.k, bk)


def specs(problem, config):
  """A step reads a tile of A and one of B."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  a = plgpu.BlockSpec((bm, bk), lambda i, j, k: (i, k), memory_space=GMEM)
  b = plgpu.BlockSpec((bk, bn), lambda i, j, k: (k, j), memory_space=GMEM)
  c = plgpu.BlockSpec((bm, bn), lambda i, j, k: (i, j), memory_space=GMEM)
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def is_legal(config, problem):
  """None, or why 9a can't run: fragments of 32 terms fit with `acc`."""
  bm, bn = specs(problem, config).out_specs.block_shape
  if not {bm, bn} <= {64, 128} or config.block_k != 32:
    return (
      "block_m and block_n must be 64 or 128, and block_k 32, got"
      f" {bm} x {bn} and {config.block_k}"
    )
  return common.is_legal_grid(grid(problem, config))


def mma_layouts(problem):
  """Who holds what of the sums, A and B, as `mma` prescribes: 2 x 2 warps."""
  layout = plgpu.Layout
  return [
    each(problem.dtype, m_warps=2)
    for each in (layout.MMA_ACC, layout.MMA_LHS, layout.MMA_RHS)
  ]


def kernel(operands, problem, config):
  """9a: rung 7's copies; each warp multiplies fragments in its registers."""
  blocks_m, blocks_n, slabs = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  own, of_a, of_b = mma_layouts(problem)
  (bm, bn), bk = out_spec.block_shape, config.block_k

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_s, b_s = refs
    i, j = lax.axis_index("m"), lax.axis_index("n")

    def slab(k, acc):
      a_tile = load(window(a_spec, a_ref, i, j, k), rows_of_vectors(bk, 8))
      b_tile = load(window(b_spec, b_ref, i, j, k), rows_of_vectors(bn, 8))
      a_s[...] = a_tile
      b_s[...] = b_tile
      return common.mma(acc, load(a_s, of_a), load(b_s, of_b))

    acc = lax.fori_loop(0, slabs, slab, zeros(bm, bn, own))
    c = [load(window(c_spec[0], ref, i, j, 0), own) for ref in c_ref]
    result = contract.combine(acc, *c, problem=problem).astype(problem.dtype)
    compat.store(window(out_spec, out_ref, i, j, 0), result, optimized=False)

  return compat.kernel(
    thread_block,
    name="tensor_cores_mma",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(blocks_m, blocks_n),
    grid_names=("m", "n"),
    scratch_types=(
      common.swizzled(a_spec.block_shape, problem.dtype),
      common.swizzled(b_spec.block_shape, problem.dtype),
    ),
    compiler_params=register_layouts.LANE,
  )(*operands)


def is_legal_ring(config, problem):
  """None, or why 9c can't run: what 9a needs, and slabs of a ring that fit."""
  a, b, *_ = specs(problem, config).in_specs
  return legal.first(
    is_legal(config, problem),
    legal.at_least("stages", config.stages, 2),
    legal.fits(blocks.shared_bytes((a, b), config.stages, 2)),
  )


def kernel_by_ring(operands, problem, config):
  """9c: cp.async fills a ring of slabs while `mma` multiplies older ones."""
  blocks_m, blocks_n, slabs = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  own, of_a, of_b = mma_layouts(problem)
  stages = config.stages

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_ring, b_ring = refs
    block = lax.axis_index("block")
    i, j = plgpu.planar_snake(block, (blocks_m, blocks_n), 1, config.raster)

    def copy(k):
      for spec, ref, ring in (a_spec, a_ref, a_ring), (b_spec, b_ref, b_ring):
        # Past the last slab it is copied once more, so that as many copies
        # are on the way at any slab, and the wait below is one number.
        source = window(spec, ref, i, j, jnp.minimum(k, slabs - 1))
        atom = 2 * min(common.ATOM_COLUMNS, spec.block_shape[1])
        ptx.copy_async(source, ring.at[lax.rem(k, stages)], swizzle=atom)

    def slab(k, acc):
      ptx.wait_async(2 * (stages - 2))  # own copies of A and B of slab k
      # Others' too; and all have read the slab before, which is overwritten.
      ptx.wait_for_warpgroup()
      copy(k + stages - 1)
      slot = lax.rem(k, stages)
      a_tile, b_tile = load(a_ring.at[slot], of_a), load(b_ring.at[slot], of_b)
      return common.mma(acc, a_tile, b_tile)

    for k in range(stages - 1):
      copy(k)
    acc = lax.fori_loop(0, slabs, slab, zeros(*out_spec.block_shape, own))
    ptx.wait_async(0)
    c = [load(window(c_spec[0], ref, i, j, 0), own) for ref in c_ref]
    result = contract.combine(acc, *c, problem=problem).astype(problem.dtype)
    compat.store(window(out_spec, out_ref, i, j, 0), result, optimized=False)

  return compat.kernel(
    thread_block,
    name="tensor_cores_ampere",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(blocks_m * blocks_n,),
    grid_names=("block",),
    scratch_types=[
      common.swizzled((stages, *spec.block_shape), problem.dtype)
      for spec in (a_spec, b_spec)
    ],
    compiler_params=register_layouts.LANE,
  )(*operands)


_FIELDS = ("block_m", "block_n", "block_k")
MMA = contract.make_rung(
  __name__,
  variant="a",
  name="tensor_cores_mma",
  idea="mma on fragments in registers, as rungs 4-8 hold them",
  dtypes=contract.FLOAT16S,
  uses=_FIELDS,
  needs=("mma",),
  kernel=kernel,
)
RING = contract.make_rung(
  __name__,
  variant="c",
  name="tensor_cores_ampere",
  idea="9a with a ring of slabs by cp.async: the summit before Hopper",
  dtypes=contract.FLOAT16S,
  uses=(*_FIELDS, "stages", "raster"),
  needs=("mma",),
  DEFAULT=contract.TensorCoreConfig(128, 128, 32, stages=3, raster=8),
  is_legal=is_legal_ring,
  launch=lambda problem, config: (math.prod(grid(problem, config)[:2]),),
  kernel=kernel_by_ring,
)
