"""What one grouped product computes: the static part, operands by name."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import Operands, Spec


class RaggedOperands(NamedTuple):
  """What a grouped product reads; None for what it does not have."""

  a: Any
  b: Any
  b_up: Any
  bias: Any
  offsets: Any

  def present(self) -> list[Any]:
    """Those that are not None, in order."""
    return [x for x in self if x is not None]


class Sizes(NamedTuple):
  """The dimensions of a grouped product."""

  m: int
  n: int
  k: int
  groups: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedSpec:
  """A product for each group of consecutive rows, apart from the operands.

  Rows offsets[g] to offsets[g + 1] are group g; offsets [G + 1] never fall and
  are in [0, rows]. Rows outside of all groups take no part.

  "m": A is [M, K], B is [G, K, N], bias [G, N], results [M, N]:
  activation(A[rows of g] @ B[g] + bias[g]) or, if `gated`,
  activation(A @ B[g]) * (A @ B_up[g]); zeros outside of the groups, whatever
  bias and activation are. "k": A is [K, M], B is [K, N], the result [G, M, N]:
  A[rows of g].T @ B[rows of g].

  Attributes:
    ragged: the dimension of the product that the groups share out.
    out_dtype: of the results.
    transpose_b: B is stored [G, N, K]; of "m" alone.
    activation: elementwise; None for none.
    gated: see above.
    has_bias: there is a bias.
    save: also returns what the activation is applied to (gated: both
      products), rounded to `out_dtype`.
    precision: as of `lax.dot_general`.
    implementation: the names to try, in order; None for the platform's.
    config: of the kernel; None leaves it to tuning.
    batch_invariant: a row's bits must not depend on M or on other rows.
    leading_rows: there may be rows before the first group.
  """

  ragged: Literal["m", "k"]
  out_dtype: Any
  transpose_b: bool = False
  activation: Callable[[Any], Any] | None = None
  gated: bool = False
  has_bias: bool = False
  save: bool = False
  precision: Any = None
  implementation: tuple[str, ...] | None = None
  config: Any = None
  batch_invariant: bool = False
  leading_rows: bool = True

  @property
  def outputs(self) -> int:
    """How many results there are."""
    return (3 if self.gated else 2) if self.save else 1

  def named(self, flat: Sequence[Any]) -> RaggedOperands:
    """The operands that are there, given in order, by name."""
    there = (True, True, self.gated, self.has_bias, True)
    rest = iter(flat)
    return RaggedOperands(*[next(rest) if here else None for here in there])

  def sizes(self, x: RaggedOperands) -> Sizes:
    """The dimensions of operands that fit each other."""
    groups = x.offsets.shape[0] - 1
    n = x.b.shape[-2] if self.transpose_b else x.b.shape[-1]
    m, k = x.a.shape if self.ragged == "m" else x.a.shape[::-1]
    return Sizes(m, n, k, groups)

  def shape(self, x: RaggedOperands) -> tuple[int, ...]:
    """Of each result."""
    m, n, _, groups = self.sizes(x)
    return (m, n) if self.ragged == "m" else (groups, m, n)

  def product_alone(self, **changes: Any) -> "RaggedSpec":
    """The same product with nothing applied to it, and with `changes`.

    Its config is left to tuning: a user's is for the whole.
    """
    alone = dataclasses.replace(
      self,
      activation=None,
      gated=False,
      has_bias=False,
      save=False,
      config=None,
    )
    return dataclasses.replace(alone, **changes)


def accumulation_dtype(x: RaggedOperands, out_dtype: Any) -> Any:
  """What sums and epilogue are computed in: 32 bits or more."""
  widest = max((x.a.dtype, x.b.dtype), key=lambda dtype: dtype.itemsize)
  return spec_lib.accumulation_dtype(widest, out_dtype)


def epilogue(
  sums: Sequence[Any], x: RaggedOperands, spec: RaggedSpec
) -> list[jax.Array]:
  """The results of A @ B (gated: and A @ B_up) of "m", both [M, N]."""
  of_rows = None
  if x.bias is not None:
    # The groups that end at or before a row are those before its own.
    before = x.offsets[None, 1:] <= _row_numbers(x.a)
    of_rows = jnp.take(x.bias, before.sum(1), axis=0, mode="clip")
  dense = Spec(
    out_dtype=spec.out_dtype,
    activation=spec.activation,
    gated=spec.gated,
    save=spec.save,
  )
  results = spec_lib.epilogue(sums, Operands(x.a, x.b, c=of_rows), dense)
  return [zero_outside(result, x.offsets) for result in results]


def zero_outside(rows: jax.Array, offsets: jax.Array) -> jax.Array:
  """Rows [M, N], zeros for those that are in no group, whatever is there."""
  number = _row_numbers(rows)
  inside = (offsets[0] <= number) & (number < offsets[-1])
  return jnp.where(inside, rows, jnp.zeros_like(rows))


def _row_numbers(rows: jax.Array) -> jax.Array:
  return lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0)
