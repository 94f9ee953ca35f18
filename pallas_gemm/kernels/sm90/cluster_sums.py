"""Sums over parts of K, added up within a cluster.

Where tiles are fewer than SMs and K is long, the blocks of a cluster along K
(`Config.cluster_k`) multiply a part of K each, of one tile. Each then sends the
columns of its accumulators that another block is to store to that block's
shared memory, and adds up what it is sent, in the order of the parts: same bits
every time. What follows, bias and activation too, all blocks do, of some
columns each.

`split_k` sends such sums through global memory to a second kernel.

Source of sums within a cluster: NVIDIA, "CUDA C++ Programming Guide",
distributed shared memory.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.plan import Plan


def add_up(block: Block, accumulators: Sequence[jax.Array]) -> list[jax.Array]:
  """The whole sums of what this block stores of a tile.

  Args:
    block: as a consumer sees it.
    accumulators: its share of the tile, [rows, columns] of each product, summed
      over this block's part of K.

  Returns:
    Of each product [rows, columns // cluster_k].
  """
  plan, consumer = block.plan, block.warpgroup
  width, parts = plan.stored_share[1], plan.config.cluster_k
  arrived = block.shared.sums_arrived.at[consumer]
  part = lax.axis_index("cluster_k")
  sent = _received(block)
  for x, place in zip(accumulators, sent):
    for to in range(parts):
      columns = x[:, to * width : (to + 1) * width]
      if compat.targets_gpu():
        plgpu.async_store_smem(
          columns,
          place.at[consumer, part],
          arrived,
          cluster_idx=jnp.int32(to),
          cluster_dim="cluster_k",
        )
      else:
        place[to, consumer, part] = columns
  if not compat.targets_gpu():
    sent = [place.at[part] for place in sent]
    plgpu.barrier_arrive(arrived)
  plgpu.barrier_wait(arrived)
  return [_sum(place.at[consumer], parts) for place in sent]


def _received(block: Block) -> Sequence:
  """Where sums lie, of each product; [to, ...] where there is no GPU."""
  if compat.targets_gpu():
    return block.shared.sums
  return [x.at[block.cluster] for x in block.results.sums]


def _sum(place, parts: int) -> jax.Array:
  total = place[0]
  for part in range(1, parts):
    total = total + place[part]
  return total


def interpreted_sums(plan: Plan) -> list[jax.ShapeDtypeStruct]:
  """What the blocks of clusters send each other where there is no GPU.

  The interpreter knows no other block's shared memory: there, sums go through
  global memory.
  """
  parts = plan.config.cluster_k
  if parts == 1 or compat.targets_gpu():
    return []
  shape = plan.clusters, parts, plan.config.consumers, parts, *plan.stored_share
  return [jax.ShapeDtypeStruct(shape, jnp.float32)] * plan.products
