"""What one product computes: the static part, and the operands by name."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_gemm.kernels.problem import Side


class Operands(NamedTuple):
  """What a product reads; None for what it does not have."""

  a: Any
  b: Any
  b_up: Any = None
  bias: Any = None
  c: Any = None

  def present(self) -> list[Any]:
    """Those that are not None, in order."""
    return [x for x in self if x is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """activation(alpha * A @ B + beta * C + bias), apart from the operands.

  A is [batch or 1, M, K], B is [batch or 1, K, N], C and the results are
  [batch, M, N]. If `gated`: activation(A @ B) * (A @ B_up), B_up shaped as B.

  Attributes:
    out_dtype: of the results.
    alpha, beta: factors of the product and of C.
    transpose_a, transpose_b: A is stored [.., K, M], B [.., N, K].
    activation: elementwise; None for none.
    gated: see above.
    bias: the side of the result that the bias runs along; None without one.
    has_c: there is a C.
    save: also returns what the activation is applied to (gated: both
      products), rounded to `out_dtype`.
    precision: as of `lax.dot_general`.
    implementation: the names to try, in order; None for the platform's.
    config: of the kernel; None leaves it to tuning.
    batch_invariant: a row's bits must not depend on M or the batch.
  """

  out_dtype: Any
  alpha: complex = 1.0
  beta: complex = 1.0
  transpose_a: bool = False
  transpose_b: bool = False
  activation: Callable[[Any], Any] | None = None
  gated: bool = False
  bias: Side | None = None
  has_c: bool = False
  save: bool = False
  precision: Any = None
  implementation: tuple[str, ...] | None = None
  config: Any = None
  batch_invariant: bool = False

  @property
  def has_epilogue(self) -> bool:
    """Whether anything is applied to A @ B."""
    return (
      self.alpha != 1
      or self.activation is not None
      or self.bias is not None
      or self.has_c
    )

  @property
  def outputs(self) -> int:
    """How many results there are."""
    return (3 if self.gated else 2) if self.save else 1

  def named(self, flat: Sequence[Any]) -> Operands:
    """The operands that are there, given in order, by name."""
    there = (True, True, self.gated, self.bias is not None, self.has_c)
    rest = iter(flat)
    return Operands(*[next(rest) if here else None for here in there])

  def sizes(self, x: Operands) -> tuple[int, int, int, int]:
    """(batch, M, N, K) of operands that fit each other."""
    m, k = x.a.shape[:0:-1] if self.transpose_a else x.a.shape[1:]
    n = x.b.shape[1] if self.transpose_b else x.b.shape[2]
    batch = x.a.shape[0] if x.b.shape[0] == 1 else x.b.shape[0]
    return batch, m, n, k

  def product_alone(self) -> "Spec":
    """The same product, times alpha, with nothing else applied to it.

    Its config is left to tuning: a user's is for the whole.
    """
    return dataclasses.replace(
      self,
      beta=1.0,
      activation=None,
      gated=False,
      bias=None,
      has_c=False,
      save=False,
      config=None,
    )


def kind(dtype: Any) -> str:
  """The kind of number: floating, complex, integer, bool; or other."""
  kinds = {
    "floating": jnp.floating,
    "complex": jnp.complexfloating,
    "integer": jnp.integer,
    "bool": jnp.bool_,
  }
  for name, parent in kinds.items():
    if jnp.issubdtype(dtype, parent):
      return name
  return "other"


def accumulation_dtype(dtype: Any, out_dtype: Any) -> Any:
  """What sums and epilogue are computed in: 32 bits or more."""
  least = {"floating": jnp.float32, "integer": jnp.int32}
  if jnp.issubdtype(dtype, jnp.unsignedinteger):
    least["integer"] = jnp.uint32
  wide = jnp.dtype(least.get(kind(dtype), dtype))
  return max(
    (wide, jnp.dtype(dtype), jnp.dtype(out_dtype)), key=lambda d: d.itemsize
  )


def epilogue(sums: Sequence[Any], x: Operands, spec: Spec) -> list[Any]:
  """The results of A @ B (gated: and A @ B_up), in the dtype of the sums."""
  if spec.gated:
    gate, up = sums
    saved = [gate, up]
    out = spec.activation(gate) * up
  else:
    (z,) = sums
    if spec.alpha != 1:
      z = z * jnp.asarray(spec.alpha, z.dtype)
    if x.c is not None:
      c = x.c.astype(z.dtype)
      z = z + (c if spec.beta == 1 else c * jnp.asarray(spec.beta, z.dtype))
    if x.bias is not None:
      z = z + bias_as_matrix(x.bias, spec.bias).astype(z.dtype)
    saved = [z]
    out = z if spec.activation is None else spec.activation(z)
  results = [out, *saved] if spec.save else [out]
  return [result.astype(spec.out_dtype) for result in results]


def bias_as_matrix(bias: Any, side: Side) -> Any:
  """[1, N] of a bias along N, [M, 1] of one along M."""
  return bias[None, :] if side == "n" else bias[:, None]


def is_empty(sizes: tuple[int, ...]) -> bool:
  """Whether a dimension is zero."""
  return math.prod(sizes) == 0
