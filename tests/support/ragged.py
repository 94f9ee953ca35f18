"""Grouped products for the tests of the ops: cases, references, bounds."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gemm
from pallas_gemm import dtypes
from tests.support import products
from tests.support.products import normal

Arrays = dict[str, jax.Array]

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A call of `ragged_dot` or, if `gated`, of `gated_ragged_dot`; no arrays.

  `groups` matrices are those of the groups from `offset` on; None is all.
  """

  m: int
  n: int
  k: int
  sizes: tuple[int, ...]
  offset: int | None = None
  groups: int | None = None
  dtype: str = "float32"
  out_dtype: str | None = None
  sizes_dtype: str = "int32"
  transpose: bool = False
  bias: bool = False
  activation: Callable[[jax.Array], jax.Array] | None = None
  gated: bool = False

  @property
  def local(self) -> int:
    """How many matrices there are."""
    return len(self.sizes) if self.groups is None else self.groups

  @property
  def bounds(self) -> list[int]:
    """Where each group with a matrix starts, and where the last one ends."""
    first = min(max(self.offset or 0, 0), len(self.sizes) - self.local)
    sizes = [max(size, 0) for size in self.sizes]
    ends = [sum(sizes[: first + i]) for i in range(self.local + 1)]
    return [min(end, self.m) for end in ends]

  def operands(self, seed: int = 0) -> Arrays:
    """The arrays, N(0, 1), as they are stored; weights N(0, 1/K).

    `bias` is float32, as parameters often are beside 16-bit operands.
    """
    x = {"lhs": normal(self.m, self.k, dtype=self.dtype, seed=seed)}
    shape = (self.n, self.k) if self.transpose else (self.k, self.n)
    for i, name in enumerate(("rhs", "rhs_up") if self.gated else ("rhs",)):
      rhs = normal(self.local, *shape, seed=seed + 1 + i)
      x[name] = (max(1, self.k) ** -0.5 * rhs).astype(self.dtype)
    if self.bias:
      x["bias"] = normal(self.local, self.n, seed=seed + 3)
    return x

  def __call__(
    self, x: Arrays, sizes: Any = None, offset: Any = None, **options: Any
  ) -> jax.Array:
    """The op on `operands`; `options` are passed on.

    Sizes and offset are the case's own, or traced ones to stand for them.
    """
    if sizes is None:
      sizes, offset = jnp.asarray(self.sizes, self.sizes_dtype), self.offset
    options |= {
      "group_sizes": sizes,
      "group_offset": offset,
      "preferred_element_type": self.out_dtype,
      "activation": self.activation,
    }
    if self.gated:
      arrays = x["lhs"], x["rhs"], x["rhs_up"]
      return pallas_gemm.gated_ragged_dot(*arrays, **options)
    return pallas_gemm.ragged_dot(**x, transpose_rhs=self.transpose, **options)

  def assert_right(self, out: jax.Array, x: Arrays) -> None:
    """Shape, dtype and values, group by group; other rows are exact zeros."""
    assert out.shape == (self.m, self.n), self
    assert out.dtype == (self.out_dtype or self.dtype), self
    out, x = np.asarray(out), {name: np.asarray(v) for name, v in x.items()}
    for g, (start, end) in enumerate(self._spans()):
      got, rows = out[start:end], x["lhs"][start:end]
      of_group = self._unstored(x["rhs"][g])
      if self.gated:
        up = self._unstored(x["rhs_up"][g])
        products.assert_gated(got, rows, of_group, up, self.activation)
      else:
        bias = x["bias"][g] if self.bias else None
        products.assert_product(
          got, rows, of_group, bias=bias, activation=self.activation
        )
    self.assert_zero_outside(out)

  def assert_gradients(self, gradients: Arrays, ct: jax.Array, x: Arrays):
    """Of lhs, rhs and bias of a case without activation, for a cotangent."""
    for name, value in gradients.items():
      assert value.shape == x[name].shape, (self, name)
      assert value.dtype == x[name].dtype, (self, name)
    x = {name: np.asarray(v) for name, v in x.items()}
    grads = {name: np.asarray(v) for name, v in gradients.items()}
    full, check = np.asarray(ct), products.assert_product
    ct = full.astype(x["lhs"].dtype)  # as the products take it
    if dtypes.has_less_range(ct.dtype, full.dtype):  # but XLA's in float32
      ct, check = full, products.assert_product_of_xla
    for g, (start, end) in enumerate(self._spans()):
      rows, rhs = x["lhs"][start:end], self._unstored(x["rhs"][g])
      check(grads["lhs"][start:end], ct[start:end], rhs.T)
      check(self._unstored(grads["rhs"][g]), rows.T, ct[start:end])
      if self.bias:
        ones = np.ones((1, end - start), np.float32)
        of_bias = grads["bias"][g][None]
        products.assert_product(of_bias, ones, full[start:end])
    self.assert_zero_outside(grads["lhs"])

  def assert_zero_outside(self, rows: np.ndarray) -> None:
    """Rows of no group are exact zeros."""
    for part in (rows[: self.bounds[0]], rows[self.bounds[-1] :]):
      assert not part.astype(np.float64).any(), self

  def _spans(self) -> list[tuple[int, int]]:
    return list(zip(self.bounds, self.bounds[1:]))

  def _unstored(self, matrix: np.ndarray) -> np.ndarray:
    return matrix.T if self.transpose else matrix


def draw(seed: int, **fixed: Any) -> Case:
  """A random case: sizes that are no multiples of anything."""
  rng = np.random.default_rng(seed)
  m, n, k = (int(size) for size in rng.integers(1, 40, 3))
  total = int(rng.integers(1, 8))
  share = rng.dirichlet(np.full(total, 0.5))
  sizes = rng.multinomial(int(rng.integers(0, 2 * m)), share)
  sizes = np.where(rng.random(total) < 0.1, -sizes - 1, sizes)
  fields = {
    "sizes": tuple(int(size) for size in sizes),
    "dtype": str(rng.choice(DTYPES)),
    "out_dtype": str(rng.choice(DTYPES)),
    "transpose": bool(rng.random() < 0.5),
    "bias": bool(rng.random() < 0.5),
  }
  if rng.random() < 0.5:
    local = int(rng.integers(1, total + 1))
    offset = int(rng.integers(0, total - local + 1))
    fields |= {"groups": local, "offset": offset}
  return Case(m=m, n=n, k=k, **(fields | fixed))


def plain(
  lhs, rhs, group_sizes, bias=None, *, activation=None, group_offset=0
) -> jax.Array:
  """`ragged_dot` in jnp, of group sizes that are not negative and fit."""
  weights = membership(len(lhs), group_sizes).astype(lhs.dtype)
  weights = jax.lax.dynamic_slice_in_dim(weights, group_offset, len(rhs), 1)
  out = jnp.einsum("mg,mk,gkn->mn", weights, lhs, rhs)
  out = out if bias is None else out + weights @ bias
  out = out if activation is None else activation(out)
  return jnp.where(weights.any(1, keepdims=True), out, 0)


def membership(rows: int, group_sizes: jax.Array) -> jax.Array:
  """Which row is in which group, [rows, groups]."""
  number = jnp.arange(rows)[:, None]
  ends = jnp.cumsum(group_sizes)
  return (ends - group_sizes <= number) & (number < ends)
