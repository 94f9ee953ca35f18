"""quantize=Recipe() of products of groups of rows; see `eight_bit_recipes`."""

import functools

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import hardware, numerics
from pallas_gemm.quantization import Quantized, Recipe, quantize
from tests.support.eight_bit_calls import assert_right
from tests.support.eight_bit_recipes import (
  FEW,
  SCALINGS,
  each,
  exact,
  factors_of,
  of,
  pulled,
)
from tests.support.ops import SUMS, ragged_numbers
from tests.support.products import float64, normal

SIZES = np.array([130, 0, 1, 127])
SPANS = [slice(*x) for x in zip([0, 130, 130, 131], [130, 130, 131, 258])]


def quantized_groups(recipe: Recipe, a, w):
  """A and B of each group; a scale of a tensor is of all groups."""
  if recipe.scaling != "tensor":
    qs = [of(recipe, a[s], 1) for s in SPANS]
    return qs, [of(recipe, v, 0, weight=True) for v in w]
  qa = of(recipe, a[: SPANS[-1].stop], 1)
  qw = quantize(w, recipe.forward, block=(None,) * 3)
  qs = [Quantized(qa.values[s], qa.scale) for s in SPANS]
  return qs, [Quantized(v, qw.scale[0]) for v in qw.values]


def with_rows_outside(*arrays):
  """Behind the last group NaN, and what would be the largest."""
  return [v.at[258:262].set(np.nan).at[262:].set(1e6) for v in arrays]


def assert_rows(recipe: Recipe, a, w, ct, out, d_a, d_w, bias=None):
  """Rows by the matrix of their group, and both derivatives."""
  assert not out[258:].any() and not d_a[258:].any()
  qs, qws = quantized_groups(recipe, a, w)
  factors = factors_of(recipe, ct, SPANS, a, qs, qws)
  for g, (s, q, qw) in enumerate(zip(SPANS, qs, qws)):
    added = {} if bias is None else {"bias": np.asarray(bias[g])}
    assert_right(out[s], exact(q), exact(qw), **added)
    of_a, of_w = factors[g]
    assert_right(d_a[s], *of_a)
    assert_right(d_w[g], *of_w)


@each(FEW)
def test_ragged_dot(recipe):
  """What rows of no group hold reaches nothing."""
  w, bias = normal(4, 140, 60), normal(4, 60)
  a, ct = with_rows_outside(normal(266, 140), normal(266, 60, seed=2))
  f = functools.partial(
    pallas_gemm.ragged_dot, group_sizes=jnp.asarray(SIZES), quantize=recipe
  )
  out, d_a, d_w, d_bias = pulled(
    lambda a, w, bias: f(a, w, bias=bias), ct, a, w, bias
  )
  assert_rows(recipe, a, w, ct, out, d_a, d_w, bias)
  for g, s in enumerate(SPANS):
    ones = np.ones((1, s.stop - s.start))
    assert_right(d_bias[g][None], ones, float64(ct[s]))


@each(FEW[:4])
@pytest.mark.parametrize("stored", ("mk,gkn", "km,gnk", "mk,kgn", "km,nkg"))
def test_rows_stored_in_any_order(recipe, stored):
  of_a, of_w = stored.split(",")
  numbers = ragged_numbers(
    ((of_a.index("k"),), (of_w.index("k"),)),
    (of_a.index("m"),),
    (of_w.index("g"),),
  )
  a, ct = with_rows_outside(normal(266, 140), normal(266, 60, seed=2))
  w = normal(4, 140, 60)

  def f(a, w):
    a, w = jnp.einsum(f"mk->{of_a}", a), jnp.einsum(f"gkn->{of_w}", w)
    return pallas_gemm.ragged_dot_general(
      a, w, jnp.asarray(SIZES), numbers, quantize=recipe
    )

  assert_rows(recipe, a, w, ct, *pulled(f, ct, a, w))


def along_rows(recipe: Recipe, x, anew: int) -> tuple[list, list]:
  """Rows of each group, quantised along them, and for derivatives.

  Args:
    recipe: of both.
    x: rows of all groups.
    anew: the dimension that derivatives sum over.
  """
  x = x[: SPANS[-1].stop]
  if recipe.scaling == "block":
    own = [of(recipe, x[s], 0) for s in SPANS]
    return own, [of(recipe, x[s], anew) for s in SPANS]
  q = of(recipe, x, 0)
  own = [Quantized(q.values[s], q.scale) for s in SPANS]
  return own, own


def numbers_of(recipe: Recipe, ct, other, along: int) -> np.ndarray:
  """A cotangent [G, M, N], as a sum along one of M and N has it.

  Args:
    recipe: of all.
    ct: the cotangent.
    other: the scale of what it is multiplied with, if that goes into it.
    along: the dimension.
  """
  if recipe.scaling == "row":
    ct = ct * (other if along == 2 else other.T)
  if recipe.gradient is None:
    return float64(ct.astype(jnp.bfloat16))
  if recipe.scaling == "tensor":
    q = quantize(ct, recipe.gradient, block=(None,) * 3)
    return float64(q.values) * float64(q.scale)
  return np.stack(
    [exact(of(recipe, v, along - 1, dtype=recipe.gradient)) for v in ct]
  )


def test_sums_over_rows_are_exported():
  """Without the layout that XLA is told else, which `jax.export` refuses."""
  a, b = (quantize(normal(266, n), block=(None, 1)) for n in (70, 140))
  f = jax.jit(
    lambda a, b: pallas_gemm.ragged_dot_general(a, b, jnp.asarray(SIZES), SUMS)
  )
  platforms = ("cuda",)
  with hardware.assume(hardware.DEFAULT_NAME):
    lowered = f.trace(a, b).lower(lowering_platforms=platforms).as_text()
    exported = export.export(f, platforms=platforms)(a, b).mlir_module()
  assert "LayoutConstraint" in lowered and "LayoutConstraint" not in exported
  assert "mosaic_gpu" in lowered and "mosaic_gpu" in exported


@each(FEW)
@pytest.mark.parametrize("stored", ("km,kn", "mk,nk"))
def test_sums_over_rows(recipe, stored):
  """Both operands in lines along rows; their slabs are no one's result."""
  of_a, of_b = stored.split(",")
  numbers = ragged_numbers(
    ((of_a.index("k"),), (of_b.index("k"),)), (of_a.index("k"),), ()
  )
  a, b = with_rows_outside(normal(266, 70), normal(266, 140))
  ct = normal(4, 70, 140, seed=2)

  def f(a, b):
    a, b = jnp.einsum(f"km->{of_a}", a), jnp.einsum(f"kn->{of_b}", b)
    return pallas_gemm.ragged_dot_general(
      a, b, jnp.asarray(SIZES), numbers, quantize=recipe
    )

  out, d_a, d_b = pulled(f, ct, a, b)
  assert out.dtype == d_a.dtype == d_b.dtype == "float32"
  assert not d_a[258:].any() and not d_b[258:].any()
  (qas, of_b), (qbs, of_a) = (along_rows(recipe, x, 1) for x in (a, b))
  if recipe.gradient is None:
    of_b, of_a = qas, qbs
  to_a, to_b = (
    numbers_of(recipe, ct, qs[0].scale, along)
    for qs, along in ((qbs, 2), (qas, 1))
  )

  def factor(q):
    if recipe.gradient is None:
      v = q.values if recipe.scaling == "row" else q.dequantized()
      return float64(v.astype(jnp.bfloat16))
    return float64(q.values) if recipe.scaling == "row" else exact(q)

  for g, (s, qa, qb) in enumerate(zip(SPANS, qas, qbs)):
    assert_right(out[g], exact(qa).T, exact(qb))
    assert_right(d_a[s], factor(of_a[g]), to_a[g].T)
    assert_right(d_b[s], factor(of_b[g]), to_b[g])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_vmap_of_sums_is_of_each(scaling):
  f = functools.partial(
    pallas_gemm.ragged_dot_general,
    group_sizes=jnp.array([7, 0, 20]),
    ragged_dot_dimension_numbers=SUMS,
    quantize=Recipe(scaling=scaling),
  )

  def both(x, y):
    out, pull = jax.vjp(f, x, y)
    return out, *pull(jnp.cos(out))

  x, y = normal(2, 40, 32), normal(2, 40, 16)
  each_one = zip(*[both(x[i], y[i]) for i in range(2)])
  for got, want in zip(jax.vmap(both)(x, y), each_one):
    np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", (True, False))
@pytest.mark.parametrize("scaling", SCALINGS)
def test_sums_of_frozen_rows(scaling, first):
  """One side `Quantized`; of positive numbers, so that 2^-4 of each adds up."""
  sizes, ct = jnp.array([7, 0, 20]), jnp.abs(normal(3, 30, 12)) + 0.5
  x = quantize(jnp.abs(normal(40, 30)) + 0.5, block=(1, None))
  y = jnp.abs(normal(40, 12)) + 0.5
  f = functools.partial(
    pallas_gemm.ragged_dot_general,
    group_sizes=sizes,
    ragged_dot_dimension_numbers=SUMS,
    preferred_element_type="float32",
  )
  recipe = Recipe(scaling=scaling)
  order = (lambda x, y: (x, y)) if first else (lambda x, y: (y, x))
  ct = ct if first else ct.mT
  ours = pulled(lambda y: f(*order(x, y), quantize=recipe), ct, y)
  plain = pulled(lambda y: f(*order(x.dequantized(), y)), ct, y)
  off = (1 + 2.0**-4) * (1 + 2.0**-8) - 1 + numerics.gamma(300, 2.0**-24)
  for got, want in zip(ours, plain):
    assert bool((jnp.abs(got - want) <= off * want).all())


@pytest.mark.parametrize("rows", (0, 3))
@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rows_and_no_groups(scaling, rows):
  """Derivatives of nothing are zeros."""
  sizes = jnp.zeros(2, jnp.int32)
  how = {"quantize": Recipe(scaling=scaling)}
  x, y, w = normal(rows, 4), normal(rows, 5), normal(2, 4, 5)
  f = functools.partial(pallas_gemm.ragged_dot, group_sizes=sizes, **how)
  sums = functools.partial(
    pallas_gemm.ragged_dot_general,
    group_sizes=sizes,
    ragged_dot_dimension_numbers=SUMS,
    **how,
  )
  for op, operands in ((f, (x, w)), (sums, (x, y))):
    out, pull = jax.vjp(op, *operands)
    assert not out.any()
    assert not any(v.any() for v in pull(jnp.ones_like(out)))


@pytest.mark.parametrize("block", ((1, None), (1, 128), (128, None), (1, 1)))
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frozen_rows_of_groups(scaling, block):
  """The derivative by weights of rows that are `Quantized`, in any groups."""
  sizes, ct = jnp.array([7, 0, 20]), jnp.abs(normal(40, 12, seed=3)) + 0.5
  x = quantize(jnp.abs(normal(40, 140)) + 0.5, block=block)
  w = jnp.abs(normal(3, 140, 12)) + 0.5
  f = functools.partial(pallas_gemm.ragged_dot, group_sizes=sizes)
  recipe = Recipe(scaling=scaling)
  _, back = jax.vjp(
    lambda w: f(x, w, quantize=recipe, preferred_element_type="float32"), w
  )
  _, plain = jax.vjp(lambda w: f(x.dequantized(), w), w)
  # Of positive numbers 2^-4 of the cotangent, and of its scaled bits, add up.
  off = 2.0**-4 + 2.0**-10 + numerics.gamma(300, 2.0**-24)
  (ours,), (want,) = back(ct), plain(ct)
  assert bool((jnp.abs(ours - want) <= off * want).all())
