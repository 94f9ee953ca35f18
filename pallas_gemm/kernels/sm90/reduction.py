"""Sums over parts of K that the blocks of a cluster have, each of one part.

Few tiles with a long sum leave SMs idle. Where the blocks of a cluster have the
same tile (`Config.cluster_k`), each multiplies a part of K. Then it sends every
block, itself too, its sums of those columns of the tile that that block stores,
and adds up what it is sent: in the order of K, so that all results have the
same bits wherever they lie in a tile. The epilogue is of these columns alone,
and no second kernel is needed (`split_k`).

Sums go from registers to the other block's shared memory, in the order of the
registers, 16 bytes a thread. All of it takes four blocks 1,670 cycles for 64 x
64 sums and 2,530 for 64 x 128 ones, 810 of them for the barrier, where through
global memory it takes 2,560 and 3,750 (H100, tuning_log, run exchange-1).

16 x 768 x 1536 NT takes 4.83 us with the best other config and 3.74 so, 768 x
128 x 2048 with C and bias 5.92 and 4.67, 64 x 1600 x 5120 10.1 and 8.8 (H100).
Where tiles are many or large it is slower: blocks that read the same rows of K
are further apart, so the L2 is asked for them more often.
"""

import functools

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.tiling import WGMMA_ROWS


def reduced(block: Block, accumulators: list[jax.Array]) -> list[jax.Array]:
  """The sums over all parts of K, of what this consumer stores.

  Args:
    block: as the consumer sees it.
    accumulators: of this block's part of K, for each product.
  """
  plan, sent = block.plan, block.shared.parts_sent
  count, (_, columns) = plan.config.cluster_k, plan.tiling.stored_tile
  if count == 1:
    return accumulators
  is_on_gpu = compat.targets_gpu()  # Pallas' interpreter sends by memory
  for product, sums in enumerate(accumulators):
    for to in range(count):
      its_columns = sums[:, to * columns : (to + 1) * columns]
      of_k = lax.axis_index("cluster_k")
      if is_on_gpu:
        slot = block.shared.parts.at[block.warpgroup, product, of_k]
        rows = min(plan.problem.m, WGMMA_ROWS)
        ptx.send(its_columns, slot, to, rows=rows)
      else:
        at = block.cluster, block.warpgroup, to, of_k
        block.results.parts[product].at[at][...] = its_columns
  ptx.fence_cluster()
  ptx.wait_for_warpgroup()  # a few threads tell the other blocks
  plgpu.barrier_arrive(sent.at[block.warpgroup])
  plgpu.barrier_wait(sent.at[block.warpgroup])
  if is_on_gpu:
    parts = block.shared.parts.at[block.warpgroup]
    products, shape = plan.problem.products, plan.tiling.stored_tile
    return [ptx.add_sent(parts.at[i], shape) for i in range(products)]
  at = block.cluster, block.warpgroup, lax.axis_index("cluster_k")
  parts = [ref.at[at] for ref in block.results.parts]
  return [
    functools.reduce(jnp.add, (x[i] for i in range(count))) for x in parts
  ]


def result_types(plan: Plan) -> list[jax.ShapeDtypeStruct]:
  """What blocks send each other, of each product, where there is no GPU."""
  tiling, cfg, count = plan.tiling, plan.config, plan.config.cluster_k
  if count == 1 or compat.targets_gpu():
    return []
  shape = tiling.clusters, cfg.consumers, count, count, *tiling.stored_tile
  return [jax.ShapeDtypeStruct(shape, jnp.float32)] * plan.problem.products
