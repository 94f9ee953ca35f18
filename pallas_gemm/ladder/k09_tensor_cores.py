"""Rung 9: wgmma multiplies tiles straight out of shared memory.

**Bottleneck of rung 8.** The FMA units. An SM starts 128 float32 FMAs a clock,
256 FLOP; nothing about memory can lift rung 8 above that.

**Idea.** The tensor cores do 4096 FLOP a clock and SM in bfloat16 or float16
with float32 sums, 16 times as much. One `wgmma` (PTX ISA, "Asynchronous
Warpgroup Level Matrix Instructions") is issued by the four warps of a
warpgroup together and multiplies 64 x 16 by 16 x N, N <= 256, *reading both
operands from shared memory*: the register fragments of rungs 4-8 are gone,
registers hold sums alone. A block is one warpgroup and owns 128 x 128 of C,
128 sums a thread. Per slab of 64: TMA brings A's and B's tile, a barrier says
that they are there, wgmma runs, and only when it is done is the next slab
asked for. Nothing overlaps inside a block; three blocks fit on an SM (64 KiB
of shared memory, ~154 registers a thread) and hide some of each other's waits.

**Traffic.** Global to shared memory: 2 MNK (1/BM + 1/BN) bytes, for 128 x 128
at 4096^3: 2.15 GB, BM BN / (BM + BN) = 64 FLOP/byte; at the tensor cores' full
rate an SM would have to receive 64 bytes a clock. Shared memory: a wgmma of N
columns reads 2 * 16 (64 + N) bytes for 2 * 64 * 16 N FLOP, 64 N / (64 + N) =
42.7 FLOP/byte for N = 128; an SM's 128 bytes a clock then keep the tensor
cores busy with a third to spare. C: written once, 2 MN bytes (with beta read
once more).

**In Mosaic GPU.** A Pallas thread is a warpgroup, which is what wgmma wants.
The accumulator is a reference (`plgpu.ACC`); wgmma descriptors, fences and
commits, all written by hand in CUDA, come out of `plgpu.wgmma`, the swizzle
out of the tiles' transforms. A copy's bytes are announced to the barrier by
all 128 threads, where CUDA kernels let one thread do it. The epilogue stages
the tile in shared memory because TMA clips at C's edge and wgmma's register
layout would write 16-byte runs of a row.

**Shapes.** Tiles may overhang; M % 8, N % 64 and K % 64 are padded by XLA
(`tensor_core_common.padded` says what is copied then).

Sources: PTX ISA; CUTLASS, "Efficient GEMM in CUDA"; the step from CUDA cores
to wgmma and TMA is the second of the fast.cu worklog (P. Shankhdhar,
"Outperforming cuBLAS on H100").
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import contract
from pallas_gemm.ladder import tensor_core_common as common


def default_config(problem: contract.Problem) -> contract.TensorCoreConfig:
  """128x128 tiles, the largest that one warpgroup can accumulate."""
  del problem
  return contract.TensorCoreConfig(block_m=128, block_n=128, block_k=64)


def is_legal(
  config: contract.TensorCoreConfig, problem: contract.Problem
) -> str | None:
  """None, or the reason why the config can't run."""
  del problem
  if reason := common.unused(
    config,
    "stages",
    "consumers",
    "split",
    "epilogue_n",
    "raster",
    "raster_dim",
    "cluster_m",
    "cluster_n",
  ):
    return reason
  if reason := common.is_legal_tile(config):
    return reason
  return common.fits(_shared_bytes(config))


def _shared_bytes(config: contract.TensorCoreConfig) -> int:
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return 2 * (bm * bk + bk * bn + bm * bn) + 2 * common.BARRIER_BYTES


def kernel(
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None,
  problem: contract.Problem,
  config: contract.TensorCoreConfig,
) -> jax.Array:
  """alpha * A @ B + beta * C, one warpgroup a block, one slab at a time."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k

  def launch(a, b, c):
    (m, k), n = a.shape, b.shape[1]

    def body(a_ref, b_ref, *refs):
      c_ref, *refs = refs if c is not None else (None, *refs)
      out_ref, a_tile, b_tile, out_tile, loaded, c_loaded = refs
      rows = pl.ds(lax.axis_index("m") * bm, bm)
      columns = pl.ds(lax.axis_index("n") * bn, bn)

      def accumulate(acc):
        def step(i, _):
          slab = pl.ds(i * bk, bk)
          plgpu.copy_gmem_to_smem(a_ref.at[rows, slab], a_tile, loaded)
          plgpu.copy_gmem_to_smem(b_ref.at[slab, columns], b_tile, loaded)
          plgpu.barrier_wait(loaded)
          plgpu.wgmma(acc, a_tile, b_tile)
          plgpu.wgmma_wait(0)  # the tiles are overwritten next

        lax.fori_loop(0, contract.cdiv(k, bk), step, None)
        return acc[...]

      acc = pl.run_scoped(accumulate, plgpu.ACC((bm, bn), jnp.float32))
      c_tile = None
      if c_ref is not None:
        plgpu.copy_gmem_to_smem(c_ref.at[rows, columns], out_tile, c_loaded)
        plgpu.barrier_wait(c_loaded)
        c_tile = out_tile[...]
      out_tile[...] = contract.combine(acc, c_tile, problem).astype(a.dtype)
      plgpu.commit_smem()  # what threads wrote becomes visible to TMA
      plgpu.copy_smem_to_gmem(out_tile, out_ref.at[rows, columns])
      plgpu.wait_smem_to_gmem(0)

    return compat.kernel(
      body,
      name="tensor_cores",
      out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
      grid=(contract.cdiv(m, bm), contract.cdiv(n, bn)),
      grid_names=("m", "n"),
      scratch_types=(
        common.swizzled((bm, bk), a.dtype),
        common.swizzled((bk, bn), a.dtype),
        common.swizzled((bm, bn), a.dtype),
        plgpu.Barrier(num_arrivals=2),  # A and B
        plgpu.Barrier(),
      ),
    )(*([a, b] + ([] if c is None else [c])))

  return common.padded(launch, a, b, c)


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT16S,
  idea="wgmma on swizzled tiles in shared memory, one slab at a time",
  config_type=contract.TensorCoreConfig,
  default_config=default_config,
  is_legal=is_legal,
  kernel=kernel,
)
