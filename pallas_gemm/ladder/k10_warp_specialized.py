"""Rung 10: one warpgroup loads, two multiply, a ring of stages between them.

**Bottleneck before.** Latency. In rung 9 loading and multiplying alternate:
each slab pays the way to L2 or device memory and back, several hundred clocks
to the 512 that its wgmmas take, and only neighbouring blocks fill the gap.

**Idea.** Give loading to a warpgroup of its own, the producer. Shared memory is
a ring of `stages` slots; slot s has two barriers. `full[s]`: both copies into
it have landed. `empty[s]`: every consumer has finished reading it. The producer
runs ahead as far as the ring allows. Consumers keep one wgmma in flight: after
issuing step k they wait for step k - 1 alone and release *its* slot, so the
tensor cores always have the next instruction queued. Two consumers share a tile
of 128 x 256, 64 rows each: its accumulators need 256 registers a thread in one
warpgroup, 128 in two. Loading needs few registers, so the producer gives most
of its share away (`set_max_registers`: 40 and 232).

**Loop**, for each block (i, j) of C, 128 x 256, and k in range(K / 64):

    producer:  wait for empty[k % 4]
               TMA A's block (i, k) and B's block (k, j) to slot k % 4
    consumer:  wait for full[k % 4]
               acc += its 64 rows of a_ring[k % 4] @ b_ring[k % 4]   # wgmma
               wait for the wgmma of k - 1; release empty[(k - 1) % 4]

10a is the same ring, made by `plgpu.emit_pipeline_warp_specialized`.

**Traffic.** Global to shared memory: 2 MNK (1/BM + 1/BN) bytes, for 128 x 256
at 4096^3: 1.61 GB, 85.3 FLOP/byte; 48 bytes a clock and SM at the tensor
cores' full rate, where rung 9 needed 64. Shared memory: 64 x 256 a consumer,
64 N / (64 + N) = 51.2 FLOP/byte for N = 256, 62 % of the 128 bytes a clock
(128 x 128 a consumer: 42.7, 75 %). The ring holds 4 * 48 KiB = 192 KiB, so one
block an SM. C: 2 MN bytes.

**In Mosaic GPU.** The producer is a whole warpgroup, in CUDA one warp or thread
is enough. Phases of barriers are counted by Mosaic GPU (one bit a barrier in
a register), CUDA kernels carry them by hand. A release is 128 arrivals, one a
thread of the warpgroup. The ring's slot is carried and wraps by a select: no
division in the loop.

Sources: CUTLASS, "Efficient GEMM in CUDA" (warp specialisation, cooperative
kernels); fast.cu worklog, steps 4 and 5; JAX, "Writing Mosaic GPU kernels".
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import contract, legal
from pallas_gemm.ladder import tensor_core_common as common
from pallas_gemm.ladder.blocks import Specs, along_k, copy_in, ring, window

DEFAULT = contract.TensorCoreConfig(
  128, 256, 64, stages=4, consumers=2, split="m", epilogue_n=64
)


def grid(problem, config):
  """Tiles along M, tiles along N, and a step for each slab of K."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), pl.cdiv(problem.k, bk)


def specs(problem, config):
  """A step reads a tile of A and one of B, swizzled, by TMA."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  tile = functools.partial(
    plgpu.BlockSpec, memory_space=plgpu.SMEM, transforms=common.SWIZZLE
  )
  a = tile((bm, bk), lambda i, j, k: (i, k))
  b = tile((bk, bn), lambda i, j, k: (k, j))
  c = tile((bm, bn), lambda i, j, k: (i, j))
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  return legal.first(
    common.is_legal_ring(config, specs(problem, config), buffers=1),
    common.is_legal_grid(grid(problem, config)),
  )


def store(acc, at, warpgroup, out_ref, c_ref, stage, loaded, problem, config):
  """Sends a consumer's share of the tile `at` to C, subtile by subtile."""
  (_, _, *c_spec), out_spec = specs(problem, config)
  out_block = window(out_spec, out_ref, *at, 0)
  c_block = window(c_spec[0], c_ref[0], *at, 0) if problem.beta else None
  for m, n in common.subtiles(config):
    rows, columns = stage.shape
    subtile, out_subtile, c_subtile = (
      acc[m : m + rows, n : n + columns],
      common.subtile(out_block, warpgroup, (m, n), config),
      common.subtile(c_block, warpgroup, (m, n), config),
    )
    common.send(subtile, stage, out_subtile, c_subtile, loaded, problem)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  plgpu.wait_smem_to_gmem(0)


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C; the last warpgroup loads, the others multiply."""
  blocks_m, blocks_n, slabs = grid(problem, config)
  (a_spec, b_spec, *_), _ = specs(problem, config)
  stages, consumers = config.stages, config.consumers

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_ring, b_ring, staging, full, empty, c_loaded = refs
    i, j = lax.axis_index("m"), lax.axis_index("n")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == consumers)
    def _produce():
      plgpu.set_max_registers(common.PRODUCER_REGISTERS, action="decrease")

      def load(k, slot):
        plgpu.barrier_wait(empty.at[slot])
        copy_in(a_spec, a_ref, a_ring.at[slot], full.at[slot], i, j, k)
        copy_in(b_spec, b_ref, b_ring.at[slot], full.at[slot], i, j, k)
        return common.next_slot(slot, stages)

      slot = lax.fori_loop(0, slabs, load, jnp.int32(0))
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
          tiles = a_ring.at[slot], b_ring.at[slot]
          plgpu.wgmma(acc, *common.operands(*tiles, warpgroup, config))

        def step(_, previous):
          slot = common.next_slot(previous, stages)
          multiply(slot)
          plgpu.wgmma_wait(1)  # the step before is done, this one runs on
          plgpu.barrier_arrive(empty.at[previous])
          return slot

        multiply(jnp.int32(0))
        slot = lax.fori_loop(1, slabs, step, jnp.int32(0))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[slot])
        return acc[...]

      share = common.consumer_tile(config)
      acc = pl.run_scoped(accumulate, plgpu.ACC(share, jnp.float32))
      c_parts = c_ref, staging.at[warpgroup, 0], c_loaded.at[warpgroup]
      store(acc, (i, j), warpgroup, out_ref, *c_parts, problem, config)

  return compat.kernel(
    thread_block,
    name="warp_specialized",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(blocks_m, blocks_n),
    grid_names=("m", "n"),
    num_threads=consumers + 1,
    scratch_types=(
      ring(a_spec, stages, problem.dtype),
      ring(b_spec, stages, problem.dtype),
      common.staging(config, 1, problem.dtype),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # A and B
      plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
      plgpu.Barrier(num_barriers=consumers),
    ),
  )(*operands)


def kernel_by_pipeline(operands, problem, config):
  """10a: the same ring, made by `plgpu.emit_pipeline_warp_specialized`."""
  blocks_m, blocks_n, slabs = grid(problem, config)
  (a_spec, b_spec, *_), _ = specs(problem, config)
  stages = min(config.stages, slabs)
  in_flight = min(1, stages - 1)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, staging, c_loaded = refs
    i, j = lax.axis_index("m"), lax.axis_index("n")
    warpgroup = lax.axis_index("warpgroup")

    def slab(_, a_tile, b_tile, acc):
      tiles = common.operands(a_tile, b_tile, warpgroup, config)
      plgpu.wgmma(acc, *tiles)
      plgpu.wgmma_wait(in_flight)
      return acc

    def compute(pipeline):
      def accumulate(acc):
        pipeline(acc)
        plgpu.wgmma_wait(0)
        return acc[...]

      share = common.consumer_tile(config)
      acc = pl.run_scoped(accumulate, plgpu.ACC(share, jnp.float32))
      c_parts = c_ref, staging.at[warpgroup, 0], c_loaded.at[warpgroup]
      store(acc, (i, j), warpgroup, out_ref, *c_parts, problem, config)

    plgpu.emit_pipeline_warp_specialized(
      slab,
      grid=(slabs,),
      in_specs=[along_k(spec, i, j, in_flight) for spec in (a_spec, b_spec)],
      max_concurrent_steps=stages,
      memory_registers=common.PRODUCER_REGISTERS,
      wg_axis="warpgroup",
      num_compute_wgs=config.consumers,
      compute_context=compute,
    )(a_ref, b_ref)

  return compat.kernel(
    thread_block,
    name="warp_specialized_pipeline",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(blocks_m, blocks_n),
    grid_names=("m", "n"),
    num_threads=config.consumers + 1,
    scratch_types=(
      common.staging(config, 1, problem.dtype),
      plgpu.Barrier(num_barriers=config.consumers),
    ),
  )(*operands)


_FIELDS = contract.TENSOR_CORE_FIELDS[:7]
_PIPELINE = contract.make_rung(
  __name__,
  variant="a",
  name="warp_specialized_pipeline",
  idea="the same ring, ready-made: emit_pipeline_warp_specialized",
  dtypes=contract.FLOAT16S,
  needs=("wgmma", "tma", "setmaxnreg"),
  uses=_FIELDS,
  padding=common.padding,
  kernel=kernel_by_pipeline,
)
RUNG = contract.make_rung(
  __name__,
  idea="one warpgroup loads, two multiply, a ring of stages between them",
  dtypes=contract.FLOAT16S,
  needs=("wgmma", "tma", "setmaxnreg"),
  uses=_FIELDS,
  padding=common.padding,
  variants=(_PIPELINE,),
)
