"""What is to be computed, as far as its speed depends on it."""

from collections.abc import Mapping
import dataclasses
import functools
import itertools
import re
from typing import Any, Literal

Side = Literal["m", "n"]
Scale = Literal["tensor", "vector", "block", "line"]
# Those that differ along K.
_ALONG_K = ("block", "line")


def _without_place(activation: str | None) -> str | None:
  """A name without the module of JAX's that older names have."""
  if activation and activation.startswith("jax."):
    return activation.rpartition(".")[2]
  return activation


@functools.cache
def bits(dtype: str) -> int:
  """Bits of an element: the first number in the dtype's name."""
  return int(re.search(r"\d+", dtype)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """A or B, as it is stored.

  Attributes:
    dtype: name of its dtype.
    k_last: whether it is stored [M, K] or [N, K]; else [K, M] or [K, N].
    batched: whether it differs from product to product of a batch.
    scale: None, or what its values are multiplied by: a number of the whole
      matrix, or one of each row of A, or column of B; of blocks, for each 128
      of K, one of each row of A, and one of each 128 columns of B. Blocks of B
      that have one column are lines.
    planes: matrices of that dtype whose sum it is: three bfloat16 ones of
      float32, two where two thirds of its digits will do; else 1.
  """

  dtype: str
  k_last: bool
  batched: bool = False
  scale: Scale | None = None
  planes: int = 1

  @property
  def bits(self) -> int:
    """Of an element."""
    return bits(self.dtype)

  @property
  def value_dtype(self) -> str:
    """Of the operand as it is given: planes are made of float32."""
    return self.dtype if self.planes == 1 else "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
  """Rows of A in groups of sizes known at run time, with a product each.

  Attributes:
    along: the dimension that groups share out. "m": A is [M, K], B
      [count, K, N], the result [M, N]; rows of a group are multiplied with its
      B. "k": A is stored [K, M], B [K, N], the result is [count, M, N], each
      the sum over the rows of a group. Of 8 bits they are stored [M, K] and
      [N, K], and groups are whole slabs: each starts at a multiple of 128, and
      what is between its last row and the next one's first is zeros.
    count: how many there are.
  """

  along: Literal["m", "k"]
  count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
  """What follows a product.

  Attributes:
    bias: None, or the side of the result that the bias runs along: "n" for
      [N], "m" for [M, 1].
    c_dtype: dtype of C; None where C is not read.
    activation: the name of what it computes; None for none.
    gated: whether there is a second product, by a matrix shaped as B.
    save: whether what the activation is applied to is a result too (both
      products if gated), in the result's dtype.
  """

  bias: Side | None = None
  c_dtype: str | None = None
  activation: str | None = None
  gated: bool = False
  save: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One product, dense or grouped, as far as its speed depends on it.

  activation(alpha * A @ B + beta * C + bias), or, if gated,
  activation(A @ B) * (A @ B2). A is [batch or 1, M, K], B [batch or 1, K, N],
  C and the result [batch, M, N]. A product with groups has neither batch nor C
  nor alpha.

  Attributes:
    m, n, k: the product's dimensions; all positive.
    a, b: the operands.
    out_dtype: of the result: "bfloat16", "float16", "float32"; of int8, and
      nothing after it, also "int32".
    batch: products computed; 1 where there is no batch dimension.
    groups: None for a dense product.
    epilogue: what follows the product.
    fast_accumulation: whether 8-bit floats are summed by the tensor cores
      alone, which keep about 13 bits.
    all_pairs: whether each plane of A is multiplied with each of B; else none
      is whose product is below the last digit of the others' sum.

  Example:
    >>> from pallas_gemm.problem import Operand, Problem
    >>> problem = Problem(
    ...   m=4096, n=8192, k=1024, out_dtype="bfloat16",
    ...   a=Operand(dtype="bfloat16", k_last=True),
    ...   b=Operand(dtype="bfloat16", k_last=False))
    >>> problem == Problem.flat(
    ...   m=4096, n=8192, k=1024, dtype="bfloat16", out_dtype="bfloat16")
    True
  """

  m: int
  n: int
  k: int
  a: Operand
  b: Operand
  out_dtype: str
  batch: int = 1
  groups: Groups | None = None
  epilogue: Epilogue = Epilogue()
  fast_accumulation: bool = False
  all_pairs: bool = False

  @functools.cached_property  # dozens of configs ask for it
  def is_promoted(self) -> bool:
    """Whether a slab's sums are added to float32 totals: of 8-bit floats.

    So are those of blocks, each by scales of its own, and of float32.
    """
    is_float8 = self.a.dtype.startswith("float8")
    is_float8 &= not self.fast_accumulation
    return self.has_blocks or is_float8 or self.has_small_apart

  @functools.cached_property
  def planes(self) -> int:
    """Of the operand that has more."""
    return max(self.a.planes, self.b.planes)

  @property
  def has_small_apart(self) -> bool:
    """Whether products of small planes have accumulators of their own."""
    return self.planes > 1

  @functools.cached_property
  def pairs(self) -> tuple[tuple[int, int], ...]:
    """Planes of A and B that are multiplied, from the smallest product on."""
    pairs = itertools.product(range(self.a.planes), range(self.b.planes))
    kept = [x for x in pairs if self.all_pairs or sum(x) < self.planes]
    return tuple(sorted(kept, key=sum, reverse=True))

  @property
  def has_scales(self) -> bool:
    """Whether A or B is multiplied by numbers of its own."""
    return (self.a.scale, self.b.scale) != (None, None)

  @property
  def has_blocks(self) -> bool:
    """Whether scales differ from slab to slab."""
    return self.a.scale in _ALONG_K or self.b.scale in _ALONG_K

  @property
  def has_lines(self) -> bool:
    """Whether these differ from column to column of B, too."""
    return self.b.scale == "line"

  @property
  def sum_dtype(self) -> str:
    """Of the tensor cores' accumulators."""
    return "int32" if self.a.dtype == "int8" else "float32"

  @property
  def along(self) -> Literal["m", "k"] | None:
    """The dimension that groups share out; None of a dense product."""
    return self.groups and self.groups.along

  @property
  def has_whole_slabs(self) -> bool:
    """Whether groups share out slabs of K, none of which is cut."""
    return self.along == "k" and self.a.bits == 8

  @property
  def products(self) -> int:
    """Products of A, by a matrix B each."""
    return 2 if self.epilogue.gated else 1

  def matrices(self, operand: Operand) -> int:
    """How many different matrices A or B, of one product, are."""
    return self.batch if operand.batched else 1

  @functools.cached_property
  def operand_bytes(self) -> int:
    """Of A and B."""
    a = self.m * self.matrices(self.a) * self.a.bits * self.a.planes
    b = self.n * self.matrices(self.b) * self.b.bits * self.b.planes
    b *= self.products
    return self.k * (a + b) // 8

  @functools.cached_property
  def results(self) -> int:
    """Elements of a result."""
    return self.m * self.n * self.batch

  def transposed(self) -> "Problem":
    """The problem of the transposed result: B^T @ A^T, read as it is stored."""
    bias = {None: None, "m": "n", "n": "m"}[self.epilogue.bias]
    return dataclasses.replace(
      self,
      m=self.n,
      n=self.m,
      a=self.b,
      b=self.a,
      epilogue=dataclasses.replace(self.epilogue, bias=bias),
    )

  def row(self) -> dict[str, Any]:
    """All of it under the flat names that measurements are kept by."""
    found = {
      "m": self.m,
      "n": self.n,
      "k": self.k,
      "dtype": self.a.dtype,
      "out_dtype": self.out_dtype,
      "batch": self.batch,
      "batched_a": self.a.batched,
      "batched_b": self.b.batched,
      "transpose_a": not self.a.k_last,
      "transpose_b": self.b.k_last,
      "bias": self.epilogue.bias,
      "c_dtype": self.epilogue.c_dtype,
      "activation": self.epilogue.activation,
      "gated": self.epilogue.gated,
      "ragged": self.along,
      "groups": self.groups.count if self.groups else 0,
      "save_preactivation": self.epilogue.save,
    }
    # What rows that are older do not have.
    if self.b.dtype != self.a.dtype:
      found["dtype_b"] = self.b.dtype
    newer = {
      "scale_a": self.a.scale,
      "scale_b": self.b.scale,
      "fast_accumulation": self.fast_accumulation,
      "planes_a": self.a.planes if self.a.planes > 1 else 0,
      "planes_b": self.b.planes if self.b.planes > 1 else 0,
      "all_pairs": self.all_pairs,
    }
    return found | {name: value for name, value in newer.items() if value}

  def changed(self, **fields: Any) -> "Problem":
    """The problem with other fields of its `row`."""
    return self.from_row(self.row() | fields)

  @classmethod
  def from_row(cls, row: Mapping[str, Any]) -> "Problem":
    """The problem of a `row`; the GPU, which older rows have, is left out."""
    return cls.flat(**{x: row[x] for x in row if x != "device"})

  @classmethod
  def flat(
    cls,
    *,
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    dtype_b: str | None = None,
    batch: int = 1,
    batched_a: bool = False,
    batched_b: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Side | None = None,
    c_dtype: str | None = None,
    activation: str | None = None,
    gated: bool = False,
    ragged: Literal["m", "k"] | None = None,
    groups: int = 0,
    save_preactivation: bool = False,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    fast_accumulation: bool = False,
    planes_a: int = 1,
    planes_b: int = 1,
    all_pairs: bool = False,
  ) -> "Problem":
    """The problem with the fields of a `row`.

    By default one product of A, stored [M, K], and B, stored [K, N]; if
    transposed, they are stored [K, M] and [N, K].
    """
    return cls(
      m=m,
      n=n,
      k=k,
      a=Operand(
        dtype=dtype,
        k_last=not transpose_a,
        batched=batched_a,
        scale=scale_a,
        planes=planes_a,
      ),
      b=Operand(
        dtype=dtype_b or dtype,
        k_last=transpose_b,
        batched=batched_b,
        scale=scale_b,
        planes=planes_b,
      ),
      out_dtype=out_dtype,
      batch=batch,
      groups=Groups(along=ragged, count=groups) if ragged else None,
      epilogue=Epilogue(
        bias=bias,
        c_dtype=c_dtype,
        activation=_without_place(activation),
        gated=gated,
        save=save_preactivation,
      ),
      fast_accumulation=fast_accumulation,
      all_pairs=all_pairs,
    )
