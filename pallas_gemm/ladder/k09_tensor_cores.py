"""Rung 9: wgmma multiplies tiles straight out of shared memory.

**Bottleneck before.** The FMA units. An SM starts 128 float32 FMAs a clock,
256 FLOP; nothing about memory can lift rung 8 above that.

**Idea.** The tensor cores do 4096 FLOP a clock and SM in bfloat16 or float16
with float32 accumulators, 16 times as much. One `wgmma` (PTX ISA, "Asynchronous
Warpgroup Level Matrix Instructions") is issued by the four warps of a warpgroup
together and multiplies 64 x 16 by 16 x N, N <= 256, *reading both operands from
shared memory*: the register fragments of rungs 4-8 are gone, registers hold
accumulators alone, 128 a thread for a block of 128 x 128. Nothing overlaps
inside a block; three fit on an SM and hide some of their waits.

**Loop.** Rung 9 and, with four slabs on the way instead of one, 9b:

    for each block (i, j) of C, 128 x 128, in parallel:   # a thread block
      acc[128, 128] = 0                                   # 128 a thread
      for k in range(K / 64):                             # a grid step
        TMA A's block (i, k) and B's block (k, j)         # emit_pipeline
        acc += a_tile @ b_tile                            # wgmma
        wait for wgmma                                    # 9b: the one before
      C's block (i, j) = alpha * acc + beta * C           # by TMA

9a and 9c, in `k09_mma.py`, are the step that GPUs before Hopper take: `mma` on
fragments that each warp loads from shared memory.

**Traffic.** Global to shared memory: 2 MNK (1/BM + 1/BN) bytes, for 128 x 128
at 4096^3: 2.15 GB, BM BN / (BM + BN) = 64 FLOP/byte; at the tensor cores' full
rate an SM would have to receive 64 bytes a clock. Shared memory: a wgmma of N
columns reads 2 * 16 (64 + N) bytes for 2 * 64 * 16 N FLOP, 64 N / (64 + N) =
42.7 FLOP/byte for N = 128: 96 of the 128 bytes that an SM's shared memory
gives a clock. C: written once, 2 MN bytes.

**In Mosaic GPU.** A Pallas thread is a warpgroup, which is what wgmma wants.
The accumulator is a reference (`plgpu.ACC`); wgmma descriptors, fences and
commits, all written by hand in CUDA, come out of `plgpu.wgmma`, the swizzle
out of the specs' transforms, slots and barriers out of `plgpu.emit_pipeline`.

**Shapes.** Tiles may overhang; XLA pads M to 8s, N (128 at least) and K to 64s.

Sources: PTX ISA; CUTLASS, "Efficient GEMM in CUDA"; the step from CUDA cores
to wgmma and TMA is the second of the fast.cu worklog (P. Shankhdhar,
"Outperforming cuBLAS on H100").
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import blocks, contract, k09_mma, legal
from pallas_gemm.ladder import tensor_core_common as common
from pallas_gemm.ladder.blocks import SMEM, Specs, along_k, window

# The largest tile, of powers of two, that one warpgroup can accumulate; one
# stage, by default.
DEFAULT = contract.TensorCoreConfig(block_m=128, block_n=128, block_k=64)


def grid(problem, config):
  """Tiles along M, tiles along N, and a step for each slab of K."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), pl.cdiv(problem.k, bk)


def specs(problem, config):
  """A step reads a tile of A and one of B, swizzled, by TMA."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  tile = functools.partial(
    plgpu.BlockSpec, memory_space=SMEM, transforms=common.SWIZZLE
  )
  a = tile((bm, bk), lambda i, j, k: (i, k))
  b = tile((bk, bn), lambda i, j, k: (k, j))
  c = tile((bm, bn), lambda i, j, k: (i, j))
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  (a, b, *_), c = tiles = specs(problem, config)
  need = blocks.shared_bytes((a, b), config.stages, 2)
  need += blocks.shared_bytes((c,), 1, 2)
  barriers = common.BARRIER_BYTES * (config.stages + 1)
  return legal.first(
    common.is_legal_tile(config, tiles),
    legal.fits(need + barriers),
    common.is_legal_grid(grid(problem, config)),
  )


def kernel(operands, problem, config, name="tensor_cores"):
  """alpha * A @ B + beta * C, one warpgroup a block."""
  blocks_m, blocks_n, slabs = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  stages = min(config.stages, slabs)
  # With one slot there is nothing to multiply while another slab comes.
  in_flight = min(1, stages - 1)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, c_tile, c_loaded = refs
    i, j = lax.axis_index("m"), lax.axis_index("n")

    def accumulate(acc):
      def slab(_, a_tile, b_tile):
        plgpu.wgmma(acc, a_tile, b_tile)
        plgpu.wgmma_wait(in_flight)  # the tiles before are overwritten next

      plgpu.emit_pipeline(
        slab,
        grid=(slabs,),
        in_specs=[along_k(x, i, j, in_flight) for x in (a_spec, b_spec)],
        max_concurrent_steps=stages,
      )(a_ref, b_ref)
      return acc[...]

    acc = plgpu.ACC(out_spec.block_shape, jnp.float32)
    acc = pl.run_scoped(accumulate, acc)
    c_block = window(c_spec[0], c_ref[0], i, j, 0) if problem.beta else None
    out_block = window(out_spec, out_ref, i, j, 0)
    common.send(acc, c_tile, out_block, c_block, c_loaded, problem)
    plgpu.wait_smem_to_gmem(0)

  return compat.kernel(
    thread_block,
    name=name,
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(blocks_m, blocks_n),
    grid_names=("m", "n"),
    scratch_types=(
      common.swizzled(out_spec.block_shape, problem.dtype),
      plgpu.Barrier(),
    ),
  )(*operands)


_FIELDS = ("block_m", "block_n", "block_k")
_PIPELINED = contract.make_rung(
  __name__,
  variant="b",
  name="tensor_cores_pipelined",
  idea="rung 9 with four steps of its pipeline in flight",
  dtypes=contract.FLOAT16S,
  needs=("wgmma", "tma"),
  uses=(*_FIELDS, "stages"),
  DEFAULT=dataclasses.replace(DEFAULT, stages=4),
  padding=common.padding,
  kernel=functools.partial(kernel, name="tensor_cores_pipelined"),
)
RUNG = contract.make_rung(
  __name__,
  idea="wgmma on swizzled tiles in shared memory, one slab at a time",
  dtypes=contract.FLOAT16S,
  needs=("wgmma", "tma"),
  uses=_FIELDS,
  padding=common.padding,
  variants=(k09_mma.MMA, _PIPELINED, k09_mma.RING),
)
