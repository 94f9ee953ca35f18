"""Rung 10: one warpgroup loads, two multiply, a ring of stages between them.

**Bottleneck of rung 9.** Latency. Loading and multiplying take turns: each slab
pays the way to L2 or device memory and back, several hundred clocks beside
the 512 that its wgmmas take, and only neighbouring blocks fill the gap.

**Idea.** Give loading to a warpgroup of its own, the producer. Shared memory
is a ring of `stages` slots; slot s has two barriers. `full[s]`: both copies
into it have landed. `empty[s]`: every consumer has finished reading it. The
producer runs ahead as far as the ring allows; consumers find their operands
waiting. They keep one wgmma in flight: after issuing step k they wait for
step k - 1 alone and release *its* slot, so the tensor cores always have the
next instruction queued. Two consumers share a tile of 128 x 256 (64 rows
each, or half the columns): the sums of such a tile need 256 registers a thread
in one warpgroup, 128 in two. Loading needs few registers, so the producer
gives most of its share away (`set_max_registers`: 40 and 232).

**Traffic.** Global to shared memory: 2 MNK (1/BM + 1/BN) bytes, for 128 x 256
at 4096^3: 1.61 GB, 85.3 FLOP/byte; 48 bytes a clock and SM at the tensor
cores' full rate, where rung 9 needed 64. Shared memory: 64 x 256 a consumer,
64 N / (64 + N) = 51.2 FLOP/byte for N = 256, 62 % of the 128 bytes a clock
(128 x 128 a consumer: 42.7, 75 %). The ring holds 4 * 48 KiB = 192 KiB, so one
block an SM. C: 2 MN bytes.

**In Mosaic GPU.** `plgpu.emit_pipeline_warp_specialized` writes this ring for
you; here it stands in full. The producer is a whole warpgroup, in CUDA one
warp or thread is enough. Phases of barriers are counted by Mosaic GPU (one
bit a barrier in a register), CUDA kernels carry them by hand. A release is
128 arrivals, one a thread of the warpgroup. The ring's slot is carried and
wraps by a select: no division in the loop.

**Shapes.** As in rung 9.

Sources: CUTLASS, "Efficient GEMM in CUDA" (warp specialisation, cooperative
kernels); fast.cu worklog, steps 4 and 5; JAX, "Writing Mosaic GPU kernels".
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
  """128x256 tiles, 64 rows a consumer, a ring of four stages."""
  del problem
  return contract.TensorCoreConfig(
    block_m=128,
    block_n=256,
    block_k=64,
    stages=4,
    consumers=2,
    split="m",
    epilogue_n=64,
  )


def is_legal(
  config: contract.TensorCoreConfig, problem: contract.Problem
) -> str | None:
  """None, or the reason why the config can't run."""
  del problem
  if reason := common.unused(
    config, "raster", "raster_dim", "cluster_m", "cluster_n"
  ):
    return reason
  return common.is_legal_ring(config, buffers=1)


def kernel(
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None,
  problem: contract.Problem,
  config: contract.TensorCoreConfig,
) -> jax.Array:
  """alpha * A @ B + beta * C; the last warpgroup loads, the others multiply."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  stages, consumers = config.stages, config.consumers

  def launch(a, b, c):
    (m, k), n = a.shape, b.shape[1]
    k_steps = contract.cdiv(k, bk)

    def body(a_ref, b_ref, *refs):
      c_ref, *refs = refs if c is not None else (None, *refs)
      out_ref, a_ring, b_ring, staging, full, empty, c_loaded = refs
      m_tile, n_tile = lax.axis_index("m"), lax.axis_index("n")
      warpgroup = lax.axis_index("warpgroup")

      @pl.when(warpgroup == consumers)
      def _produce():
        plgpu.set_max_registers(common.PRODUCER_REGISTERS, action="decrease")
        rows, columns = pl.ds(m_tile * bm, bm), pl.ds(n_tile * bn, bn)

        def load(step, slot):
          plgpu.barrier_wait(empty.at[slot])
          slab = pl.ds(step * bk, bk)
          plgpu.copy_gmem_to_smem(
            a_ref.at[rows, slab], a_ring.at[slot], full.at[slot]
          )
          plgpu.copy_gmem_to_smem(
            b_ref.at[slab, columns], b_ring.at[slot], full.at[slot]
          )
          return common.next_slot(slot, stages)

        slot = lax.fori_loop(0, k_steps, load, jnp.int32(0))
        for _ in range(stages):  # leave no release unseen
          plgpu.barrier_wait(empty.at[slot])
          slot = common.next_slot(slot, stages)

      @pl.when(warpgroup < consumers)
      def _consume():
        plgpu.set_max_registers(common.CONSUMER_REGISTERS, action="increase")
        for slot in range(stages):  # the ring starts empty
          plgpu.barrier_arrive(empty.at[slot])

        def accumulate(acc):
          def multiply(slot):
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(
              acc,
              *common.operands(
                a_ring.at[slot], b_ring.at[slot], warpgroup, config
              ),
            )

          def step(_, previous):
            slot = common.next_slot(previous, stages)
            multiply(slot)
            plgpu.wgmma_wait(1)  # the step before is done, this one runs on
            plgpu.barrier_arrive(empty.at[previous])
            return slot

          multiply(jnp.int32(0))
          slot = lax.fori_loop(1, k_steps, step, jnp.int32(0))
          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(empty.at[slot])
          return acc[...]

        acc = pl.run_scoped(
          accumulate, plgpu.ACC(common.consumer_tile(config), jnp.float32)
        )
        row, column = common.origin(m_tile, n_tile, warpgroup, config)
        stage = staging.at[warpgroup]
        size_m, size_n = common.WGMMA_ROWS, config.epilogue_n
        for i, j in common.pieces(config):
          window = (pl.ds(row + i, size_m), pl.ds(column + j, size_n))
          c_piece = None
          if c_ref is not None:
            loaded = c_loaded.at[warpgroup]
            plgpu.copy_gmem_to_smem(c_ref.at[window], stage, loaded)
            plgpu.barrier_wait(loaded)
            c_piece = stage[...]
          piece = acc[i : i + size_m, j : j + size_n]
          piece = contract.combine(piece, c_piece, problem)
          stage[...] = piece.astype(a.dtype)
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(stage, out_ref.at[window])
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.wait_smem_to_gmem(0)

    return compat.kernel(
      body,
      name="warp_specialized",
      out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
      grid=(contract.cdiv(m, bm), contract.cdiv(n, bn)),
      grid_names=("m", "n"),
      num_threads=consumers + 1,
      thread_name="warpgroup",
      scratch_types=(
        common.swizzled((stages, bm, bk), a.dtype),
        common.swizzled((stages, bk, bn), a.dtype),
        common.swizzled(
          (consumers, common.WGMMA_ROWS, config.epilogue_n), a.dtype
        ),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # A and B
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        plgpu.Barrier(num_barriers=consumers),
      ),
    )(*([a, b] + ([] if c is None else [c])))

  return common.padded(launch, a, b, c)


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT16S,
  idea="one warpgroup loads, two multiply, a ring of stages between them",
  config_type=contract.TensorCoreConfig,
  default_config=default_config,
  is_legal=is_legal,
  kernel=kernel,
)
