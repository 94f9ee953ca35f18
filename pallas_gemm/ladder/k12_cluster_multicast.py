"""Rung 12: blocks of a cluster load shared operands once and multicast them.

**Bottleneck of rung 11.** The way from L2 to the SMs. At the tensor cores' full
rate every SM takes 48 bytes a clock, and neighbouring SMs ask for the same
bytes: blocks of one tile column load the same tile of B.

**Idea.** A cluster is a group of blocks that run at the same time on
neighbouring SMs and can write each other's shared memory. Two blocks with
the same columns (`cluster_m` = 2) each load *half* of B's tile and multicast
it into both rings; `cluster_n` = 2 does that to A for blocks with the same
rows. A slot may then be refilled only when the consumers of *every* block
that receives the copy have released it: a release goes to the `empty`
barrier of each of those blocks. And since this is the last rung, tile,
cluster and order are chosen per problem.

**Traffic.** A cluster counts as one tile of (cluster_m BM) x (cluster_n BN):
2 MNK (1/(cluster_m BM) + 1/(cluster_n BN)) bytes leave L2. 128 x 256 with
cluster_m = 2 at 4096^3: 1.07 GB, 128 FLOP/byte, 32 bytes a clock and SM. What
arrives in shared memory, and is read there, is what it was. Price: two SMs
move in step, and tiles are dealt out in pairs.

**Fewer instructions.** A chip at its power limit is as fast as it is frugal:
what is not wgmma costs clock. One *warp* loads, the other three of its
warpgroup sleep; and where `stages` divides K's slabs, loops are unrolled over
the ring, so that slots are constants and wgmma's descriptors are worked out
before the loop. Rung 11's block takes 642 warp instructions for a step of
128 x 256 x 64; with one loading warp it is 517, with the ring unrolled 241.

**In Mosaic GPU.** `collective_axes` on the copy makes each block load its share
and multicast it (CUDA: a 16-bit mask and the slices by hand).
`plgpu.ClusterBarrier` sends one arrival a warpgroup to each block that shares
an axis with this one, where rung 11's barrier takes 128. Blocks must not leave
while another may still signal them: the producer's last waits see to that.
Inside `plgpu.warp_map` a copy does not synchronise the warpgroup first.

**Shapes.** As in rung 9. Where the number of tiles is odd, the cluster's spare
block multiplies zeros. A cluster fits into a GPC, a group of SMs that on an
H200 has 16 or 18; so clusters of more than two blocks leave SMs idle. One that
found no room would start when the rest have ended: fewer are started.

Sources: PTX ISA, `cp.async.bulk.tensor` with `.multicast::cluster`; CUTLASS
(cluster shapes, PipelineTmaAsync); fast.cu worklog, step 8; JAX's
`hopper_matmul_mgpu`, which multicasts in clusters of 2 as well.
"""

import functools
import itertools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import contract, k11_persistent
from pallas_gemm.ladder import tensor_core_common as common

# Rows and columns of a tile, the side that two consumers share out, stages,
# columns of an epilogue's piece; then an estimate of how fast a long product
# runs with it beside the first, which is how the choice weighs a tile against
# the SMs that it leaves idle. For 128 x 256, three stages and pieces of 128
# columns are 0.1-0.3 % ahead of four and 64: the room of a stage buys the
# epilogue two pieces in flight that are twice as wide.
_TILES = (
  (128, 256, "m", 3, 128, 1.0),
  (256, 128, "m", 4, 64, 0.98),
  (128, 128, "m", 4, 64, 0.85),
  (64, 256, "n", 4, 64, 0.75),
  (128, 64, "m", 4, 64, 0.6),
  (64, 128, "n", 4, 64, 0.6),
)
_CLUSTERS = ((2, 1, 1.0), (1, 2, 0.985), (1, 1, 0.999))


def default_config(problem: contract.Problem) -> contract.TensorCoreConfig:
  """The tile and cluster whose last round of tiles wastes least."""
  m, n = problem.m, problem.n
  sms = hardware.sm_count()

  def cost(candidate):
    (bm, bn, *_, tile_speed), (cm, cn, cluster_speed) = candidate
    if cm * cn > sms or (cm > 1 and m <= bm) or (cn > 1 and n <= bn):
      return math.inf  # nobody to share with
    tiles = contract.cdiv(m, bm * cm) * contract.cdiv(n, bn * cn)
    rounds = contract.cdiv(tiles, sms // (cm * cn))
    return rounds * bm * bn / (tile_speed * cluster_speed)

  tile, (cluster_m, cluster_n, _) = min(
    itertools.product(_TILES, _CLUSTERS), key=cost
  )
  block_m, block_n, split, stages, epilogue_n, _ = tile
  return contract.TensorCoreConfig(
    block_m=block_m,
    block_n=block_n,
    block_k=64,
    stages=stages,
    consumers=2,
    split=split,
    epilogue_n=epilogue_n,
    raster=8,
    raster_dim="m",
    cluster_m=cluster_m,
    cluster_n=cluster_n,
  )


def is_legal(
  config: contract.TensorCoreConfig, problem: contract.Problem
) -> str | None:
  """None, or the reason why the config can't run."""
  del problem
  blocks = config.cluster_m * config.cluster_n
  if blocks > min(common.PORTABLE_CLUSTER, hardware.sm_count()):
    return (
      f"a cluster must have at most {common.PORTABLE_CLUSTER} blocks, got"
      f" {config.cluster_m} x {config.cluster_n}"
    )
  # 2 x 2 ran at 0.6x of jnp.dot, and the interpreter's race detector has once
  # in some forty runs reported a copy over a read there that was not explained.
  if min(config.cluster_m, config.cluster_n) > 1:
    return (
      "a cluster must lie along one side, got"
      f" {config.cluster_m} x {config.cluster_n}"
    )
  # Each block loads its share of a tile: a whole number of 8-row pieces.
  for name, rows in (("cluster_n", "block_m"), ("cluster_m", "block_k")):
    share, of = getattr(config, name), getattr(config, rows)
    if of % (share * common.PIECE_ROWS):
      return (
        f"{rows} must be a multiple of {common.PIECE_ROWS} * {name}, got"
        f" {of} and {share}"
      )
  return common.is_legal_ring(config)


def clusters_at_once(blocks: int) -> int:
  """Clusters of so many blocks that run at the same time, one block an SM."""
  sms, gpc = hardware.sm_count(), hardware.SMALLEST_GPC_SMS
  if blocks <= 2:  # SMs come in pairs
    return sms // blocks
  return max(1, sms // gpc * (gpc // blocks))


def for_each_step(visit, slot, *, k_steps: int, stages: int):
  """visit(step, slot, slot before) for a tile's slabs, from `slot` on.

  Where whole laps of the ring make up a tile, slots are Python numbers.

  Returns:
    The slot of the last slab and that of the next tile's first.
  """
  if k_steps % stages == 0:

    def lap(i, _):
      for s in range(stages):
        visit(i * stages + s, s, (s - 1) % stages)

    lax.fori_loop(0, k_steps // stages, lap, None)
    return stages - 1, slot  # which is 0 in this case

  def turn(step, slots):
    before, slot = slots
    visit(step, slot, before)
    return slot, common.next_slot(slot, stages)

  return lax.fori_loop(0, k_steps, turn, (slot, slot))


def multiply_tile(slot, acc, *, consumer, ring, k_steps: int, config):
  """Rung 11's loop over one tile's slabs, each step alike."""
  a_ring, b_ring, full, empty = ring

  def multiply(step, slot, before):
    plgpu.barrier_wait(full.at[slot])
    tiles = a_ring.at[slot], b_ring.at[slot]
    plgpu.wgmma(acc, *common.operands(*tiles, consumer, config))
    plgpu.wgmma_wait(1)  # the step before is done, this one runs on
    plgpu.barrier_arrive(empty.at[before], predicate=step > 0)

  last, slot = for_each_step(
    multiply, slot, k_steps=k_steps, stages=config.stages
  )
  plgpu.wgmma_wait(0)
  plgpu.barrier_arrive(empty.at[last])
  return acc[...], slot


def kernel(
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None,
  problem: contract.Problem,
  config: contract.TensorCoreConfig,
) -> jax.Array:
  """alpha * A @ B + beta * C; clusters walk over tiles and share operands."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  stages, consumers = config.stages, config.consumers
  cluster_m, cluster_n = config.cluster_m, config.cluster_n
  share_a = "cluster_n" if cluster_n > 1 else None
  share_b = "cluster_m" if cluster_m > 1 else None

  def launch(a, b, c):
    (m, k), n = a.shape, b.shape[1]
    k_steps = contract.cdiv(k, bk)
    # Tiles are dealt out to clusters: cluster_m x cluster_n at a time.
    grid = (contract.cdiv(m, bm * cluster_m), contract.cdiv(n, bn * cluster_n))
    tiles = grid[0] * grid[1]
    clusters = min(tiles, clusters_at_once(cluster_m * cluster_n))

    def body(a_ref, b_ref, *refs):
      c_ref, *refs = refs if c is not None else (None, *refs)
      out_ref, a_ring, b_ring, staging, full, empty, c_loaded = refs
      cluster = lax.axis_index("cluster")
      warpgroup = lax.axis_index("warpgroup")

      def for_each_tile(visit, slot):
        """slot = visit(m_tile, n_tile, slot) for the tiles of this block."""

        def turn(i, slot):
          m_tile, n_tile = common.tile_at(cluster + i * clusters, grid, config)
          m_tile = m_tile * cluster_m + lax.axis_index("cluster_m")
          n_tile = n_tile * cluster_n + lax.axis_index("cluster_n")
          return visit(m_tile, n_tile, slot)

        turns = lax.div(tiles - 1 - cluster, clusters) + 1
        return lax.fori_loop(0, turns, turn, slot)

      def load_tile(m_tile, n_tile, slot):
        rows, columns = pl.ds(m_tile * bm, bm), pl.ds(n_tile * bn, bn)

        def load(step, slot, _):
          plgpu.barrier_wait(empty.at[slot])
          slab = pl.ds(step * bk, bk)
          plgpu.copy_gmem_to_smem(
            a_ref.at[rows, slab],
            a_ring.at[slot],
            full.at[slot],
            collective_axes=share_a,
          )
          plgpu.copy_gmem_to_smem(
            b_ref.at[slab, columns],
            b_ring.at[slot],
            full.at[slot],
            collective_axes=share_b,
          )

        _, slot = for_each_step(load, slot, k_steps=k_steps, stages=stages)
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

      @pl.when(warpgroup < consumers)
      def _consume():
        plgpu.set_max_registers(common.CONSUMER_REGISTERS, action="increase")
        for slot in range(stages):  # the ring starts empty
          plgpu.barrier_arrive(empty.at[slot])

        def compute_tile(m_tile, n_tile, slot):
          multiply = functools.partial(
            multiply_tile,
            slot,
            consumer=warpgroup,
            ring=(a_ring, b_ring, full, empty),
            k_steps=k_steps,
            config=config,
          )
          share = common.consumer_tile(config)
          acc, slot = pl.run_scoped(multiply, plgpu.ACC(share, jnp.float32))
          k11_persistent.store_tile(
            acc,
            common.origin(m_tile, n_tile, warpgroup, config),
            c_ref,
            out_ref,
            staging.at[warpgroup],
            c_loaded.at[warpgroup],
            problem,
            config,
          )
          return slot

        for_each_tile(compute_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    return compat.kernel(
      body,
      name="cluster_multicast",
      out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
      grid=(clusters,),
      grid_names=("cluster",),
      cluster=(cluster_m, cluster_n),
      cluster_names=("cluster_m", "cluster_n"),
      num_threads=consumers + 1,
      thread_name="warpgroup",
      scratch_types=(
        common.swizzled((stages, bm, bk), a.dtype),
        common.swizzled((stages, bk, bn), a.dtype),
        common.swizzled(common.staging_shape(config), a.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # A and B
        plgpu.ClusterBarrier(
          collective_axes=tuple(x for x in (share_a, share_b) if x),
          num_arrivals=consumers,
          num_barriers=stages,
        ),
        plgpu.Barrier(num_barriers=consumers),
      ),
    )(*([a, b] + ([] if c is None else [c])))

  return common.padded(launch, a, b, c)


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT16S,
  idea="clusters load shared operands once; best config per shape",
  config_type=contract.TensorCoreConfig,
  default_config=default_config,
  is_legal=is_legal,
  kernel=kernel,
)
