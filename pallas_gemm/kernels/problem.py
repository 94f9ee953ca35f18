"""What is to be computed, and how: the two values that tuning is about."""

import dataclasses
import functools
from typing import Literal

Side = Literal["m", "n"]
Split = Literal["m", "n", "pingpong"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One product, dense or grouped, as far as its speed depends on it.

  activation(alpha * A @ B + beta * C + bias), or, if `gated`,
  activation(A @ B) * (A @ B2) with a second matrix shaped as B. A is
  [batch or 1, M, K], B is [batch or 1, K, N], C and the result [batch, M, N].

  If `ragged`, groups of consecutive rows of A, of sizes known at run time,
  have a product each. "m": A is [M, K], B is [groups, K, N], the result
  [M, N]; rows of a group are multiplied with its B. "k": A is stored [K, M]
  (`transpose_a`), B is [K, N], the result [groups, M, N]; it is the sum over
  the rows of a group. Both have neither batch nor C nor alpha.

  Attributes:
    m, n, k: the product's dimensions; all positive.
    dtype: of A and B: "bfloat16" or "float16".
    out_dtype: of the result: "bfloat16", "float16" or "float32".
    batch: products computed; 1 where there is no batch dimension.
    batched_a, batched_b: whether A and B differ from product to product.
    transpose_a: A is stored [K, M].
    transpose_b: B is stored [N, K].
    bias: None, or the side of the result that the bias runs along: "n" for
      [N], "m" for [M, 1].
    c_dtype: dtype of C; None where C is not read.
    activation: the function's qualified name; None for none.
    gated: computes the gated product.
    ragged: None, or the dimension that groups share out: "m" or "k".
    groups: of a ragged product; 0 of a dense one.
    save_preactivation: also writes what the activation is applied to (both
      products if gated), in out_dtype.
  """

  m: int
  n: int
  k: int
  dtype: str
  out_dtype: str
  batch: int = 1
  batched_a: bool = False
  batched_b: bool = False
  transpose_a: bool = False
  transpose_b: bool = False
  bias: Side | None = None
  c_dtype: str | None = None
  activation: str | None = None
  gated: bool = False
  ragged: Literal["m", "k"] | None = None
  groups: int = 0
  save_preactivation: bool = False

  @functools.cached_property
  def operands(self) -> int:
    """Elements of A and B."""
    a = self.m * (self.batch if self.batched_a else 1)
    b = self.n * (self.batch if self.batched_b else 1)
    return self.k * (a + b * (2 if self.gated else 1))

  @functools.cached_property
  def results(self) -> int:
    """Elements of all results."""
    return self.m * self.n * self.batch

  def transposed(self) -> "Problem":
    """The problem of the transposed result: B^T @ A^T, read as it is stored."""
    return dataclasses.replace(
      self,
      m=self.n,
      n=self.m,
      transpose_a=not self.transpose_b,
      transpose_b=not self.transpose_a,
      batched_a=self.batched_b,
      batched_b=self.batched_a,
      bias={None: None, "m": "n", "n": "m"}[self.bias],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the dense Hopper kernel computes a product.

  Attributes:
    block_m, block_n: the tile of the result that a thread block computes; of
      a gated product, `block_n` columns of the result, thus twice as many
      of the two products.
    block_k: the slab of K that one stage of the ring holds.
    stages: slabs in flight.
    consumers: warpgroups that multiply.
    split: the side of the tile that the consumers share out, or "pingpong":
      none, they compute a tile each, in turn.
    cluster_m, cluster_n: blocks of a cluster along each side; blocks of one
      tile column (row) share their loads of B (A).
    raster: width of the strips, in clusters' tiles, that the order of tiles
      walks along.
    raster_dim: the side that a strip is `raster` wide along.
    epilogue_n: columns of the subtiles in which a tile is written; if they
      don't divide a consumer's columns, the last two subtiles overlap.
    epilogue_buffers: subtiles of a consumer that may be on their way at a time.
    split_k: parts of K that are computed apart and summed by a second kernel
      in a fixed order.
    tail_columns, tail_split_k: the last columns of tiles are summed in parts of
      K, as many, to fill the last wave of tiles.
    swap_ab: computes the transposed result from B and A instead: the tile's
      rows lie along N and its columns along M, so that `block_m` counts
      columns of the result, `block_n` rows, and likewise the other fields.
  """

  block_m: int = 128
  block_n: int = 256
  block_k: int = 64
  stages: int = 4
  consumers: int = 2
  split: Split = "m"
  cluster_m: int = 1
  cluster_n: int = 1
  raster: int = 8
  raster_dim: Side = "m"
  epilogue_n: int = 64
  epilogue_buffers: int = 2
  split_k: int = 1
  tail_columns: int = 0
  tail_split_k: int = 1
  swap_ab: bool = False
