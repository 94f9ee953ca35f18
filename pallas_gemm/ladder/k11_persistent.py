"""Rung 11: as many blocks as SMs, each walks over tiles in an order L2 likes.

**Bottleneck of rung 10.** A tile's beginning and end. One block fills an SM, so
the next one starts only when it has left: barriers are set up, the ring
fills and the last pieces of C are written with the tensor cores idle. And
blocks start in row-major order of tiles, so those that run at one time
span few rows of A and, if N is large, all of B.

**Idea.** Start one block per SM and let it walk over tiles `block`, `block +
blocks`, ... The ring and its phases run on from tile to tile: while the
consumers write C, the producer already loads the next tile. Pieces of C go
out through two buffers a consumer, stored by TMA asynchronously; a buffer is
waited for when it is needed again, for the last pieces that is *during the
next tile*. Tiles are numbered along a snake of strips `raster` wide.

**Traffic.** Into shared memory as in rung 10: 2 MNK (1/BM + 1/BN), 1.61 GB at
4096^3 with 128 x 256, 85.3 FLOP/byte; C 2 MN. What changes is how much of it
L2 answers. The P tiles that run at one time need each row of A and column of
B that they touch once: R rows and S columns of C are R S / (R + S) FLOP per
byte of device memory. At 8192^3, 132 tiles: row-major order touches 4.1 rows
of 32 tiles, 528 x 8192, 496 FLOP/byte; strips 8 tiles high touch 1024 x 4224,
824 FLOP/byte. An H200's ridge is 989.5 / 4.8 = 206, and both miss it by far;
the wider margin is bandwidth and energy saved, not a different bound. (At
4096^3 a row is 16 tiles: 840 either way.)

**In Mosaic GPU.** The loop over tiles is `lax.fori_loop` in each role; the slot
is carried from tile to tile, phases live on in registers. `commit_smem` is the
proxy fence before a TMA store, `wait_smem_to_gmem(1, wait_read_only=True)` is
`cp.async.bulk.wait_group.read 1`. CUDA kernels of this name do the same;
CUTLASS's "ping-pong" goes further and gives each consumer a tile of its own,
so that one multiplies while the other writes.

**Shapes.** As in rung 9.

Sources: CUTLASS (persistent tile scheduler, rasterisation); fast.cu worklog,
steps 6 and 10; `plgpu.planar_snake` of JAX for the order.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import contract
from pallas_gemm.ladder import tensor_core_common as common


def default_config(problem: contract.Problem) -> contract.TensorCoreConfig:
  """128x256 tiles, a ring of four stages, strips of 8 tiles."""
  del problem
  return contract.TensorCoreConfig(
    block_m=128,
    block_n=256,
    block_k=64,
    stages=4,
    consumers=2,
    split="m",
    epilogue_n=64,
    raster=8,
    raster_dim="m",
  )


def is_legal(
  config: contract.TensorCoreConfig, problem: contract.Problem
) -> str | None:
  """None, or the reason why the config can't run."""
  del problem
  if reason := common.unused(config, "cluster_m", "cluster_n"):
    return reason
  return common.is_legal_ring(config)


def multiply_tile(slot, acc, *, consumer, ring, k_steps: int, config):
  """Rung 10's loop over one tile's slabs, from `slot` of the ring on.

  Returns:
    The tile's sums and the slot of the next tile's first slab.
  """
  a_ring, b_ring, full, empty = ring

  def multiply(slot):
    plgpu.barrier_wait(full.at[slot])
    tiles = a_ring.at[slot], b_ring.at[slot]
    plgpu.wgmma(acc, *common.operands(*tiles, consumer, config))

  def step(_, previous):
    slot = common.next_slot(previous, config.stages)
    multiply(slot)
    plgpu.wgmma_wait(1)  # the step before is done, this one runs on
    plgpu.barrier_arrive(empty.at[previous])
    return slot

  multiply(slot)
  slot = lax.fori_loop(1, k_steps, step, slot)
  plgpu.wgmma_wait(0)
  plgpu.barrier_arrive(empty.at[slot])
  return acc[...], common.next_slot(slot, config.stages)


def store_tile(acc, corner, c_ref, out_ref, staging, c_loaded, problem, config):
  """Sends a consumer's sums to C piece by piece, and does not wait for them.

  Args:
    acc: the sums, in registers.
    corner: row and column of C where they belong.
    c_ref: C in global memory, or None.
    out_ref: the result in global memory.
    staging: this consumer's buffers, [buffers, 64, epilogue_n].
    c_loaded: this consumer's barrier for pieces of C.
    problem: what is computed.
    config: the tile sizes.
  """
  buffers = common.staging_buffers(config)
  rows, columns = common.WGMMA_ROWS, config.epilogue_n
  for index, (i, j) in enumerate(common.pieces(config)):
    window = (pl.ds(corner[0] + i, rows), pl.ds(corner[1] + j, columns))
    stage = staging.at[index % buffers]
    # All stores but the newest have left shared memory, so this buffer is
    # free. For the first pieces those are stores of the tile before.
    plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
    c_piece = None
    if c_ref is not None:
      plgpu.copy_gmem_to_smem(c_ref.at[window], stage, c_loaded)
      plgpu.barrier_wait(c_loaded)
      c_piece = stage[...]
    piece = acc[i : i + rows, j : j + columns]
    piece = contract.combine(piece, c_piece, problem)
    stage[...] = piece.astype(out_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, out_ref.at[window])


def kernel(
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None,
  problem: contract.Problem,
  config: contract.TensorCoreConfig,
) -> jax.Array:
  """alpha * A @ B + beta * C; blocks that stay and walk over tiles."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  stages, consumers = config.stages, config.consumers

  def launch(a, b, c):
    (m, k), n = a.shape, b.shape[1]
    k_steps = contract.cdiv(k, bk)
    grid = (contract.cdiv(m, bm), contract.cdiv(n, bn))
    tiles = grid[0] * grid[1]
    blocks = min(tiles, hardware.sm_count())

    def body(a_ref, b_ref, *refs):
      c_ref, *refs = refs if c is not None else (None, *refs)
      out_ref, a_ring, b_ring, staging, full, empty, c_loaded = refs
      block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

      def for_each_tile(visit, slot):
        """slot = visit(m_tile, n_tile, slot) for the tiles of this block."""

        def turn(i, slot):
          index = block + i * blocks
          return visit(*common.tile_at(index, grid, config), slot)

        turns = lax.div(tiles - 1 - block, blocks) + 1
        return lax.fori_loop(0, turns, turn, slot)

      @pl.when(warpgroup == consumers)
      def _produce():
        plgpu.set_max_registers(common.PRODUCER_REGISTERS, action="decrease")

        def load_tile(m_tile, n_tile, slot):
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

          return lax.fori_loop(0, k_steps, load, slot)

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
          store_tile(
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
      name="persistent",
      out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
      grid=(blocks,),
      grid_names=("block",),
      num_threads=consumers + 1,
      thread_name="warpgroup",
      scratch_types=(
        common.swizzled((stages, bm, bk), a.dtype),
        common.swizzled((stages, bk, bn), a.dtype),
        common.swizzled(common.staging_shape(config), a.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # A and B
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        plgpu.Barrier(num_barriers=consumers),
      ),
    )(*([a, b] + ([] if c is None else [c])))

  return common.padded(launch, a, b, c)


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT16S,
  idea="a block per SM walks over tiles; C leaves during the next tile",
  config_type=contract.TensorCoreConfig,
  default_config=default_config,
  is_legal=is_legal,
  kernel=kernel,
)
