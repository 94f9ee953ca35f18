"""Sums over parts of K that the blocks of a cluster have, each of one part.

Few tiles with a long sum leave SMs idle. Where the blocks of a cluster have the
same tile (`Config.cluster_k`), each multiplies a part of K. Then it sends every
block, itself too, what it has summed of that block's share, which is a part of
the tile's columns, and adds up what it is sent: in the order of K, so that all
results have the same bits wherever they lie in a tile. What follows the product
is computed of its share alone, and no second kernel is needed (`split_k`).

Sums go from registers to the other block's shared memory, in the order of the
registers, 16 bytes a thread. All of it takes four blocks 1,670 cycles for 64 x
64 sums and 2,530 for 64 x 128 ones, 810 of them for the barrier, where through
global memory it takes 2,560 and 3,750 (H100, tuning_log, run exchange-1).

16 x 768 x 1536 NT takes 4.83 us with the best other config and 3.74 so, 768 x
128 x 2048 with C and bias 5.92 and 4.67, 64 x 1600 x 5120 10.1 and 8.8 (H100).
Where tiles are many or large it is slower: blocks that read the same rows of K
are further apart, so the L2 is asked for them more often.
"""

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.tiling import WGMMA_ROWS


def added_up(block: Block, accumulators: list[jax.Array]) -> list[jax.Array]:
  """The sums over all parts of K, of what this consumer stores.

  Args:
    block: as the consumer sees it.
    accumulators: of this block's part of K, for each product.
  """
  plan, sent = block.plan, block.shared.parts_sent
  count, (_, columns) = plan.config.cluster_k, plan.own_share
  if count == 1:
    return accumulators
  send, receive = _to_shared, _from_shared
  if not compat.targets_gpu():  # Pallas' interpreter has no other way
    send, receive = _to_global, _from_global
  for product, sums in enumerate(accumulators):
    for to in range(count):
      share = sums[:, to * columns : (to + 1) * columns]
      send(block, product, share, to)
  ptx.fence_cluster()
  ptx.wait_for_warpgroup()  # a few threads tell the other blocks
  plgpu.barrier_arrive(sent.at[block.warpgroup])
  plgpu.barrier_wait(sent.at[block.warpgroup])
  return [receive(block, product) for product in range(plan.products)]


def result_types(plan: Plan) -> list[jax.ShapeDtypeStruct]:
  """What blocks send each other, of each product, where there is no GPU."""
  count, consumers = plan.config.cluster_k, plan.config.consumers
  if count == 1 or compat.targets_gpu():
    return []
  shape = plan.clusters, consumers, count, count, *plan.own_share
  return [jax.ShapeDtypeStruct(shape, jnp.float32)] * plan.products


def _to_shared(block: Block, product: int, share: jax.Array, to: int) -> None:
  slot = lax.axis_index("cluster_k")
  parts = block.shared.parts.at[block.warpgroup, product, slot]
  ptx.send(share, parts, to, rows=min(block.plan.problem.m, WGMMA_ROWS))


def _from_shared(block: Block, product: int) -> jax.Array:
  parts = block.shared.parts.at[block.warpgroup, product]
  return ptx.add_sent(parts, block.plan.own_share)


def _to_global(block: Block, product: int, share: jax.Array, to: int) -> None:
  at = block.cluster, block.warpgroup, to, lax.axis_index("cluster_k")
  block.results.parts[product].at[at][...] = share


def _from_global(block: Block, product: int) -> jax.Array:
  at = block.cluster, block.warpgroup, lax.axis_index("cluster_k")
  parts = block.results.parts[product].at[at]
  total = parts[0]
  for part in range(1, block.plan.config.cluster_k):
    total += parts[part]
  return total
