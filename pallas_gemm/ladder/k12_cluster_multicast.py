"""Rung 12: blocks of a cluster load shared operands once and multicast them.

**Bottleneck before.** The way from L2 to the SMs. At the tensor cores' full
rate every SM takes 48 bytes a clock, and neighbouring SMs ask for the same
bytes: blocks of one tile column load the same tile of B.

**Idea.** A cluster is a group of blocks that run at the same time on
neighbouring SMs and can write each other's shared memory. Two blocks with
the same columns (`cluster_m` = 2) each load *half* of B's tile and multicast
it into both rings; `cluster_n` = 2 does that to A for blocks with the same
rows. A slot may then be refilled only when the consumers of *every* block
that receives the copy have released it: a release goes to the `empty`
barrier of each of those blocks. Tile and cluster are chosen per problem.

**Loop.** Rung 11's; the specs' grid is that of the tiles, the launch's is
(clusters,), and the blocks of a cluster have neighbouring tiles.

    producer:  wait for empty, until the consumers of both blocks are done
               TMA half of B's block (k, j) to both blocks; A's block (i, k)
    consumer:  as before; release the slot to the producers of both blocks

**Traffic.** A cluster counts as one tile of (cluster_m BM) x (cluster_n BN):
2 MNK (1/(cluster_m BM) + 1/(cluster_n BN)) bytes leave L2. 128 x 256 with
cluster_m = 2 at 4096^3: 1.07 GB, 128 FLOP/byte, 32 bytes a clock and SM.
Shared memory receives, and is read, as before.

**Fewer instructions**, whose gain was not measured apart. One *warp* loads, the
other three sleep: 17.5 million warp instructions at 4096^3, where rung 11 takes
22.3 (counted). Where `stages` divides K's slabs (at 6144^3) loops are unrolled
over the ring too, and slots are constants.

**In Mosaic GPU.** `collective_axes` in the spec makes each block load its share
and multicast it (CUDA: a 16-bit mask and the slices by hand).
`plgpu.ClusterBarrier` sends one arrival a warpgroup (not 128) to each block
that shares an axis with this one. The producer's last waits keep a block from
leaving while others may signal it.

Sources: PTX ISA, `cp.async.bulk.tensor` with `.multicast::cluster`; CUTLASS
(PipelineTmaAsync); fast.cu worklog, step 8; JAX's `hopper_matmul_mgpu`.
"""

import dataclasses
import functools
import itertools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import contract
from pallas_gemm.ladder import tensor_core_common as common
from pallas_gemm.ladder.blocks import Specs, copy_in, ring


def _tile(bm, bn, split, stages, epilogue_n):
  sizes = bm, bn, 64, stages, 2, split, epilogue_n
  return contract.TensorCoreConfig(*sizes, raster=8, raster_dim="m")


# Tiles and clusters, with an estimate of how fast a long product runs with
# each, of the first's. For 128 x 256, three stages and subtiles of 128 columns
# are 0.1-0.3 % ahead of four and 64: twice as wide subtiles in flight.
_TILES = {
  _tile(128, 256, "m", 3, 128): 1.0,
  _tile(256, 128, "m", 4, 64): 0.98,
  _tile(128, 128, "m", 4, 64): 0.85,
  _tile(64, 256, "n", 4, 64): 0.75,
  _tile(128, 64, "m", 4, 64): 0.6,
  _tile(64, 128, "n", 4, 64): 0.6,
}
_CLUSTERS = {(2, 1): 1.0, (1, 2): 0.985, (1, 1): 0.999}


def default_config(problem):
  """The tile and cluster whose last wave of tiles wastes least."""
  sms, n = hardware.sm_count(), common.padded_columns(problem)

  def cost(candidate):
    (tile, tile_speed), ((cm, cn), cluster_speed) = candidate
    bm, bn = tile.block_m, tile.block_n
    alone = (cm > 1 and problem.m <= bm) or (cn > 1 and n <= bn)
    if alone or cm * cn > sms:
      return math.inf  # nobody to share with
    clusters = pl.cdiv(problem.m, bm * cm) * pl.cdiv(n, bn * cn)
    waves = pl.cdiv(clusters, sms // (cm * cn))
    return waves * bm * bn / (tile_speed * cluster_speed)

  candidates = itertools.product(_TILES.items(), _CLUSTERS.items())
  (tile, _), ((cm, cn), _) = min(candidates, key=cost)
  return dataclasses.replace(tile, cluster_m=cm, cluster_n=cn)


def grid(problem, config):
  """Tiles along M, tiles along N, and a step for each slab of K."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), pl.cdiv(problem.k, bk)


def specs(problem, config):
  """As in rung 11; blocks of a cluster share tiles of A, or of B."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  share_a = ("cluster_n",) if config.cluster_n > 1 else None
  share_b = ("cluster_m",) if config.cluster_m > 1 else None
  tile = functools.partial(
    plgpu.BlockSpec, memory_space=plgpu.SMEM, transforms=common.SWIZZLE
  )
  a = tile((bm, bk), lambda i, j, k: (i, k), collective_axes=share_a)
  b = tile((bk, bn), lambda i, j, k: (k, j), collective_axes=share_b)
  c = tile((bm, bn), lambda i, j, k: (i, j))
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def clusters_along(problem, config):
  """Clusters along M and along N: tiles are dealt out to them together."""
  tiles_m, tiles_n, _ = grid(problem, config)
  return pl.cdiv(tiles_m, config.cluster_m), pl.cdiv(tiles_n, config.cluster_n)


def launch(problem, config):
  """As many clusters as run at the same time; no more than have tiles."""
  cluster = config.cluster_m * config.cluster_n
  most = hardware.clusters_at_once(cluster, hardware.sm_count())
  return (min(math.prod(clusters_along(problem, config)), most),)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  return common.is_legal_ring(config, specs(problem, config))


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C; clusters walk over tiles and share operands."""
  slabs = grid(problem, config)[2]
  strips = clusters_along(problem, config)
  (clusters,) = launch(problem, config)
  (a_spec, b_spec, *_), _ = tiles_of = specs(problem, config)
  shared = (a_spec.collective_axes or ()) + (b_spec.collective_axes or ())
  stages, consumers = config.stages, config.consumers
  buffers = common.staging_buffers(config)

  def for_each_slab(visit, slot):
    """visit(k, slot, slot before) from `slot` on; (last slot, next slot)."""
    if slabs % stages == 0:  # whole laps: slots are Python numbers

      def lap(i, _):
        for s in range(stages):
          visit(i * stages + s, s, (s - 1) % stages)

      lax.fori_loop(0, slabs // stages, lap, None)
      return stages - 1, slot  # which is 0 in this case

    def iteration(k, slots):
      before, slot = slots
      visit(k, slot, before)
      return slot, common.next_slot(slot, stages)

    return lax.fori_loop(0, slabs, iteration, (slot, slot))

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_ring, b_ring, staging, full, empty, c_loaded = refs
    cluster, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")

    def for_each_tile(visit, slot):
      """slot = visit(i, j, slot) for the tiles (i, j) of this block."""

      def iteration(t, slot):
        i, j = common.tile_at(cluster + t * clusters, strips, config)
        i = i * config.cluster_m + lax.axis_index("cluster_m")
        j = j * config.cluster_n + lax.axis_index("cluster_n")
        return visit(i, j, slot)

      count = lax.div(math.prod(strips) - 1 - cluster, clusters) + 1
      return lax.fori_loop(0, count, iteration, slot)

    def load_tile(i, j, slot):
      def load(k, slot, _):
        plgpu.barrier_wait(empty.at[slot])
        copy_in(a_spec, a_ref, a_ring.at[slot], full.at[slot], i, j, k)
        copy_in(b_spec, b_ref, b_ring.at[slot], full.at[slot], i, j, k)

      _, slot = for_each_slab(load, slot)
      return slot

    @pl.when(warpgroup == consumers)
    def _produce():
      plgpu.set_max_registers(common.PRODUCER_REGISTERS, action="decrease")

      @plgpu.warp_map
      def _one_warp(warp):
        @pl.when(warp == 0)
        def _():
          slot = for_each_tile(load_tile, jnp.int32(0))
          for _ in range(stages):  # leave no release unseen
            plgpu.barrier_wait(empty.at[slot])
            slot = common.next_slot(slot, stages)

    def multiply_tile(slot, acc):
      def multiply(k, slot, before):
        plgpu.barrier_wait(full.at[slot])
        tiles = a_ring.at[slot], b_ring.at[slot]
        plgpu.wgmma(acc, *common.operands(*tiles, warpgroup, config))
        plgpu.wgmma_wait(1)  # the step before is done, this one runs on
        plgpu.barrier_arrive(empty.at[before], predicate=k > 0)

      last, slot = for_each_slab(multiply, slot)
      plgpu.wgmma_wait(0)
      plgpu.barrier_arrive(empty.at[last])
      return acc[...], slot

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
    name="cluster_multicast",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.dtype),
    grid=(clusters,),
    grid_names=("cluster",),
    cluster=(config.cluster_m, config.cluster_n),
    cluster_names=("cluster_m", "cluster_n"),
    num_threads=consumers + 1,
    scratch_types=(
      ring(a_spec, stages, problem.dtype),
      ring(b_spec, stages, problem.dtype),
      common.staging(config, buffers, problem.dtype),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # A and B
      plgpu.ClusterBarrier(
        collective_axes=shared,
        num_arrivals=consumers,
        num_barriers=stages,
      ),
      plgpu.Barrier(num_barriers=consumers),
    ),
  )(*operands)


RUNG = contract.make_rung(
  __name__,
  idea="clusters load shared operands once; best config per shape",
  dtypes=contract.FLOAT16S,
  needs=("wgmma", "tma", "setmaxnreg", "cluster"),
  padding=common.padding,
)
