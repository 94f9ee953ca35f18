"""Rung 11: as many blocks as SMs, each walks over tiles in an order L2 likes.

**Bottleneck before.** A tile's beginning and end. One block of rung 10 fills an
SM, so the next one starts only when it has left: barriers are set up, the
ring fills and the last subtiles of C are written with the tensor cores idle.
And blocks start in row-major order of tiles, so those that run at one time
span few rows of A and, if N is large, all of B.

**Idea.** Start one block per SM and let it walk over tiles `block`, `block +
blocks`, ... The ring and its phases run on from tile to tile: while the
consumers write C, the producer already loads the next tile. Subtiles of C go
out through two buffers a consumer, stored by TMA asynchronously; a buffer is
waited for when it is needed again: for the last subtiles *during the next
tile*. Tiles are numbered along a snake of strips `raster` wide.

**Loop.** The specs' grid is that of rung 10; the launch's is (SMs,).

    for tile in range(block, tiles, SMs):                 # a block's tiles
      i, j = snake(tile)
      for k in range(K / 64):                             # a grid step
        producer, consumer: as in rung 10, the slot runs on
      consumer: C's block (i, j), subtile by subtile, by TMA; don't wait

11a is the same by `plgpu.emit_pipeline_warp_specialized` in `plgpu.nd_loop`: no
wgmma runs on into the next step, and the ring is drained at a tile's end.

**Traffic.** Into shared memory as in rung 10: 1.61 GB at 4096^3, 85.3
FLOP/byte. What changes is how much of it L2 answers. The tiles that run at
one time need each row of A and column of B that they touch once: R rows and S
columns of C are R S / (R + S) FLOP per byte of device memory. At 8192^3 132
tiles touch 528 x 8192 in row-major order, 496 FLOP/byte; in strips 8 tiles
high 1024 x 4224, 824 FLOP/byte (an H200's ridge is 989.5 / 4.8 = 206).

CUTLASS's "ping-pong" goes further and gives each consumer a tile of its own.
Sources: CUTLASS (persistent tile scheduler, rasterisation); fast.cu worklog,
steps 6 and 10; `plgpu.planar_snake` of JAX for the order.
"""

import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import contract
from pallas_gemm.ladder import tensor_core_common as common
from pallas_gemm.ladder.blocks import Specs, along_k, copy_in, ring

DEFAULT = contract.TensorCoreConfig(
  128, 256, 64, 4, 2, "m", epilogue_n=64, raster=8, raster_dim="m"
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


def launch(problem, config):
  """A thread block on each SM; no more than there are tiles."""
  return (min(math.prod(grid(problem, config)[:2]), hardware.sm_count()),)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  return common.is_legal_ring(config, specs(problem, config))


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C; blocks that stay and walk over tiles."""
  *tiles, slabs = grid(problem, config)
  (blocks,) = launch(problem, config)
  (a_spec, b_spec, *_), _ = tiles_of = specs(problem, config)
  stages, consumers = config.stages, config.consumers
  buffers = common.staging_buffers(config)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_ring, b_ring, staging, full, empty, c_loaded = refs
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

    def for_each_tile(visit, slot):
      """slot = visit(i, j, slot) for the tiles (i, j) of this block."""

      def iteration(t, slot):
        return visit(*common.tile_at(block + t * blocks, tiles, config), slot)

      count = lax.div(math.prod(tiles) - 1 - block, blocks) + 1
      return lax.fori_loop(0, count, iteration, slot)

    @pl.when(warpgroup == consumers)
    def _produce():
      plgpu.set_max_registers(common.PRODUCER_REGISTERS, action="decrease")

      def load_tile(i, j, slot):
        def load(k, slot):
          plgpu.barrier_wait(empty.at[slot])
          copy_in(a_spec, a_ref, a_ring.at[slot], full.at[slot], i, j, k)
          copy_in(b_spec, b_ref, b_ring.at[slot], full.at[slot], i, j, k)
          return common.next_slot(slot, stages)

        return lax.fori_loop(0, slabs, load, slot)

      slot = for_each_tile(load_tile, jnp.int32(0))
      for _ in range(stages):  # leave no release unseen
        plgpu.barrier_wait(empty.at[slot])
        slot = common.next_slot(slot, stages)

    def multiply_tile(slot, acc):
      # Rung 10's loop over a tile's slabs, from `slot` of the ring on.
      def multiply(slot):
        plgpu.barrier_wait(full.at[slot])
        stage = a_ring.at[slot], b_ring.at[slot], warpgroup
        plgpu.wgmma(acc, *common.operands(*stage, config))

      def step(_, previous):
        slot = common.next_slot(previous, stages)
        multiply(slot)
        plgpu.wgmma_wait(1)  # the step before is done, this one runs on
        plgpu.barrier_arrive(empty.at[previous])
        return slot

      multiply(slot)
      slot = lax.fori_loop(1, slabs, step, slot)
      plgpu.wgmma_wait(0)
      plgpu.barrier_arrive(empty.at[slot])
      return acc[...], common.next_slot(slot, stages)

    @pl.when(warpgroup < consumers)
    def _consume():
      plgpu.set_max_registers(common.CONSUMER_REGISTERS, action="increase")
      for slot in range(stages):  # the ring starts empty
        plgpu.barrier_arrive(empty.at[slot])

      def compute_tile(i, j, slot):
        multiply = functools.partial(multiply_tile, slot)
        share = common.consumer_tile(config)
        acc, slot = pl.run_scoped(multiply, plgpu.ACC(share, jnp.float32))
        parts = warpgroup, out_ref, c_ref, staging, c_loaded
        common.store(acc, (i, j), parts, tiles_of, problem, config)
        return slot

      for_each_tile(compute_tile, jnp.int32(0))
      plgpu.wait_smem_to_gmem(0)

  return compat.kernel(
    thread_block,
    name="persistent",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(blocks,),
    grid_names=("block",),
    num_threads=consumers + 1,
    scratch_types=(
      ring(a_spec, stages, problem.dtype),
      ring(b_spec, stages, problem.dtype),
      common.staging(config, buffers, problem.dtype),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # A and B
      plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
      plgpu.Barrier(num_barriers=consumers),
    ),
  )(*operands)


def kernel_by_pipeline(operands, problem, config):
  """11a: rung 10a's pipeline in a loop over tiles, one ring for all of them."""
  *tiles, slabs = grid(problem, config)
  (a_spec, b_spec, *_), _ = tiles_of = specs(problem, config)
  buffers = common.staging_buffers(config)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, staging, c_loaded = refs
    warpgroup = lax.axis_index("warpgroup")

    def slab(_, a_tile, b_tile, acc):
      plgpu.wgmma(acc, *common.operands(a_tile, b_tile, warpgroup, config))
      plgpu.wgmma_wait(0)  # the next tile's copies must not meet a wgmma
      return acc

    def pipeline(i, j):
      def compute(run):
        def accumulate(acc):
          run(acc)
          return acc[...]

        share = common.consumer_tile(config)
        acc = pl.run_scoped(accumulate, plgpu.ACC(share, jnp.float32))
        parts = warpgroup, out_ref, c_ref, staging, c_loaded
        common.store(acc, (i, j), parts, tiles_of, problem, config)

      return plgpu.emit_pipeline_warp_specialized(
        slab,
        grid=(slabs,),
        in_specs=[along_k(spec, i, j) for spec in (a_spec, b_spec)],
        max_concurrent_steps=min(config.stages, slabs),
        memory_registers=common.PRODUCER_REGISTERS,
        wg_axis="warpgroup",
        num_compute_wgs=config.consumers,
        compute_context=compute,
      )

    def walk(allocated):
      @plgpu.nd_loop((math.prod(tiles),), collective_axes="block")
      def _tile(loop):
        at = common.tile_at(loop.index[0], tiles, config)
        pipeline(*at)(a_ref, b_ref, allocations=allocated)

      plgpu.wait_smem_to_gmem(0)

    allocations = pipeline(0, 0).get_allocations(a_ref, b_ref)
    pl.run_scoped(walk, allocated=allocations, collective_axes="warpgroup")

  return compat.kernel(
    thread_block,
    name="persistent_pipeline",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=launch(problem, config),
    grid_names=("block",),
    num_threads=config.consumers + 1,
    scratch_types=(
      common.staging(config, buffers, problem.dtype),
      plgpu.Barrier(num_barriers=config.consumers),
    ),
  )(*operands)


_FIELDS = contract.TENSOR_CORE_FIELDS[:-2]
_PIPELINE = contract.make_rung(
  __name__,
  variant="a",
  name="persistent_pipeline",
  idea="the same by emit_pipeline_warp_specialized, drained at each tile",
  dtypes=contract.FLOAT16S,
  needs=("wgmma", "tma", "setmaxnreg"),
  uses=_FIELDS,
  padding=common.padding,
  kernel=kernel_by_pipeline,
)
RUNG = contract.make_rung(
  __name__,
  idea="a block per SM walks over tiles; C leaves during the next tile",
  dtypes=contract.FLOAT16S,
  needs=("wgmma", "tma", "setmaxnreg"),
  uses=_FIELDS,
  padding=common.padding,
  variants=(_PIPELINE,),
)
