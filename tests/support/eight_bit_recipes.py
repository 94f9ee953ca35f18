"""What a `Recipe` makes of operands and cotangents, by public functions alone.

The factors of each derivative are known bit by bit where nothing is applied to
sums.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.quantization import Quantized, Recipe, quantize
from tests.support.eight_bit_calls import spread
from tests.support.products import float64

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SCALINGS = "block", "row", "tensor"
DTYPES = (E4M3, E4M3), (E4M3, E5M2), ("int8", "int8"), (E4M3, None)
RECIPES = [
  Recipe(forward=x, gradient=y, scaling=scaling)
  for scaling in SCALINGS
  for x, y in DTYPES
]
# Each two of a scaling and dtypes meet in `test_matmul`.
FEW = [RECIPES[i] for i in (0, 5, 10, 3, 6, 8, 7)]


def _named(recipe: Recipe) -> str:
  return f"{recipe.scaling}-{recipe.forward}-{recipe.gradient}"


each = functools.partial(pytest.mark.parametrize, "recipe", ids=_named)


def of(recipe: Recipe, x, along: int, weight: bool = False, dtype=None):
  """A matrix, quantised along a dimension that is summed over."""
  block = [None, None]
  if recipe.scaling != "tensor":
    size = 128 if recipe.scaling == "block" else None
    block = [size if i == along else 1 for i in range(2)]
    if recipe.scaling == "block" and weight:
      block = [128, 128]
  x = jnp.asarray(x, jnp.float32) if x.dtype == np.float64 else x
  return quantize(x, dtype or recipe.forward, block=tuple(block))


def exact(q: Quantized) -> np.ndarray:
  return float64(q.values) * spread(float64(q.scale), q.shape)


def factors_of(recipe: Recipe, ct, spans, a, qas, qbs):
  """The factors of both derivatives of each group's A @ B, in float64.

  Args:
    recipe: of all.
    ct: the cotangent, of all groups.
    spans: the rows of each.
    a: of all; qas, qbs: both operands of each in 8 bits.
  """
  to_a = to_b = jnp.asarray(ct[: spans[-1].stop], jnp.float32)
  is_row, is_block = recipe.scaling == "row", recipe.scaling == "block"
  if is_row:  # scales go into the cotangent
    to_a, to_b = (
      jnp.concatenate([ct[s] * q.scale for s, q in zip(spans, qs)])
      for qs in (qbs, qas)
    )
  if recipe.gradient is None:
    rounded = lambda v: float64(v.astype(jnp.bfloat16))  # noqa: E731
    to_a, to_b = rounded(to_a), rounded(to_b)
    numbers = lambda q: rounded(q.values if is_row else q.dequantized())  # noqa: E731
  else:
    cast = functools.partial(of, recipe, dtype=recipe.gradient)
    to_a = exact(cast(to_a, 1))
    # A group has blocks of rows of its own.
    parts = [to_b[s] for s in spans] if is_block else [to_b]
    to_b = np.concatenate([exact(cast(v, 0)) for v in parts])
    numbers = lambda q: float64(q.values) if is_row else exact(q)  # noqa: E731
    if is_block:  # A anew, along its rows
      qas = [of(recipe, a[s], 0) for s in spans]
  return [
    ((to_a[s], numbers(qb).T), (numbers(qa).T, to_b[s]))
    for s, qa, qb in zip(spans, qas, qbs)
  ]


def backward(recipe: Recipe, ct, a, b):
  """The same of one product: dA's, and dB's."""
  qa, qb = of(recipe, a, 1), of(recipe, b, 0, weight=True)
  return factors_of(recipe, ct, [slice(0, len(a))], a, [qa], [qb])[0]


def pulled(f, ct, *x):
  """Result and cotangents."""

  def both(ct, *x):
    out, pull = jax.vjp(f, *x)
    return out, *pull(ct)

  return jax.jit(both)(ct, *x)
