"""What is to be computed, as far as its speed depends on it."""

import dataclasses
import functools
import re
from typing import Literal

Side = Literal["m", "n"]


@functools.cache
def bits(dtype: str) -> int:
  """Bits of an element: the first number in the dtype's name."""
  return int(re.search(r"\d+", dtype)[0])


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
