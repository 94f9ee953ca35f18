"""How the Hopper kernels compute a problem: the value that tuning is about."""

import dataclasses
from typing import Literal

from pallas_gemm.problem import Side

Split = Literal["m", "n", "pingpong"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the Hopper kernels compute a product.

  Attributes:
    block_m, block_n: the tile of the result that a thread block computes; of
      a gated product, `block_n` columns of the result, thus twice as many
      of the two products.
    block_k: the slab of K that one stage of the ring holds.
    stages: slabs in flight.
    consumers: warpgroups that multiply.
    split: the side of the tile that the consumers divide, or "pingpong":
      none, they compute a tile each, in turn.
    cluster_m, cluster_n: blocks of a cluster along each side; blocks of one
      tile column (row) share their loads of B (A).
    cluster_k: blocks of a cluster that sum a part of K each, for one tile, and
      then add up a part of its columns each.
    raster: width of the strips, in clusters' tiles, that the order of tiles
      walks along.
    raster_dim: the side that a strip is `raster` wide along.
    epilogue_n: columns of the subtiles in which a tile is written; if they
      don't divide a consumer's columns, the last two subtiles overlap.
    epilogue_buffers: subtiles of a consumer that may be on their way at a time.
    split_k: parts of K that are computed apart and summed by a second kernel
      in a fixed order.
    swap_ab: computes the transposed result from B and A instead: the tile's
      rows lie along N and its columns along M, so that `block_m` counts
      columns of the result, `block_n` rows, and likewise the other fields.
    moves: threads load the operands whose rows TMA can't address, which are
      copied before the kernel otherwise; of float32 B they make the planes.
  """

  block_m: int = 128
  block_n: int = 256
  block_k: int = 64
  stages: int = 4
  consumers: int = 2
  split: Split = "m"
  cluster_m: int = 1
  cluster_n: int = 1
  cluster_k: int = 1
  raster: int = 8
  raster_dim: Side = "m"
  epilogue_n: int = 64
  epilogue_buffers: int = 2
  split_k: int = 1
  swap_ab: bool = False
  moves: bool = False

  @property
  def blocks(self) -> int:
    """Blocks of a cluster."""
    return self.cluster_m * self.cluster_n * self.cluster_k
