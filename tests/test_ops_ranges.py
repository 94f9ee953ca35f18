"""Operands and results of other ranges than sums and cotangents have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.quantization import Recipe
from tests.support import ops
from tests.support.cases import pairs
from tests.support.products import normal

SIZES = jnp.array([24, 0, 40])
ROWS, K, N = 64, 32, 16
KERNEL = {"implementation": "sm90"}
FLOAT32 = {"preferred_element_type": jnp.float32}


def _einsum(x, w):
  how = {"_dot_general": pallas_gemm.dot_general} | FLOAT32
  return jnp.einsum("mk,kn->mn", x, w, **how)


def _transposed(x, w, **how):
  return ops.grouped(
    x, w.mT, group_sizes=SIZES, transpose_rhs=True, **FLOAT32, **how
  )


# By name: of x [64, 32] and w [32, 16], or one for each group, in float32.
WIDE = {
  "matmul": functools.partial(ops.dense, out_dtype="float32"),
  "activation": functools.partial(
    ops.dense, out_dtype="float32", activation=jax.nn.relu
  ),
  "dot_general": functools.partial(pallas_gemm.dot_general, **FLOAT32),
  "einsum": _einsum,
  "ragged_dot": functools.partial(ops.grouped, group_sizes=SIZES, **FLOAT32),
  "ragged_dot transposed": _transposed,
}
WAYS = [(name, {}) for name in WIDE]
WAYS += [(x, KERNEL) for x in ("activation", "ragged_dot transposed")]


def _reference(name, x, w, ct):
  """The gradients in float64."""
  x, w, ct = (np.asarray(v, np.float64) for v in (x, w, ct))
  if "ragged" not in name:
    z = x @ w
    ct = ct * (z > 0) if name == "activation" else ct
    return ct @ w.T, x.T @ ct
  ends = np.cumsum(SIZES)
  parts = [slice(end - n, end) for end, n in zip(ends, np.asarray(SIZES))]
  dx = np.concatenate([ct[at] @ w[g].T for g, at in enumerate(parts)])
  return dx, np.stack([x[at].T @ ct[at] for at in parts])


@pytest.mark.parametrize("name,how", WAYS, ids=str)
@pytest.mark.parametrize("cotangent,x", [(2e-8, 4096.0), (1e6, 1e-4)])
def test_cotangents_outside_of_float16(name, how, cotangent, x):
  """float32 results have cotangents that float16 operands can't hold."""
  shape = (3, K, N) if "ragged" in name else (K, N)
  x = jnp.full((ROWS, K), x, jnp.float16)
  w = jnp.full(shape, 0.5, jnp.float16)
  out, vjp = jax.vjp(functools.partial(WIDE[name], **how), x, w)
  assert out.dtype == "float32"
  ct = cotangent * (1 + normal(ROWS, N) / 8)
  for got, want in zip(vjp(ct), _reference(name, x, w, ct)):
    assert got.dtype == "float16"
    with np.errstate(over="ignore"):
      want = want.astype(np.float16)  # where it is no number, so is this
    np.testing.assert_allclose(got, want, rtol=2**-9, atol=2**-23)


def test_cotangents_of_float64():
  """The same of any two dtypes of which one has less range."""
  with jax.enable_x64(True):
    x, w = jnp.ones((2, 3), "float32"), jnp.ones((3, 4), "float32")
    _, vjp = jax.vjp(lambda x: pallas_gemm.matmul(x, w, out_dtype="float64"), x)
    small = jnp.full((2, 4), 1e-50)
    assert float((vjp(1e250 * small * 1e-200)[0] / 4)[0, 0]) == np.float32(1)


# Arguments of activations that float16 can't hold, though the results can.


def _small(v):
  return jax.nn.silu(v) * 1e-3


def _of_groups(f):
  """A grouped op of two groups, of which the second has no rows."""
  return lambda x, *w, **how: f(
    x, *[jnp.stack([v, v]) for v in w], jnp.array([len(x), 0]), **how
  )


# Ops, and what w is divided by in each of their products.
ARGUMENTS = {
  "matmul": (pallas_gemm.matmul, [1]),
  "gated_matmul": (pallas_gemm.gated_matmul, [1, 1e4]),
  "up": (pallas_gemm.gated_matmul, [1e4, 1]),
  "ragged_dot": (_of_groups(pallas_gemm.ragged_dot), [1]),
  "gated_ragged_dot": (_of_groups(pallas_gemm.gated_ragged_dot), [1, 1e4]),
}


@pytest.mark.parametrize(
  ("name", "mode", "how"),
  pairs(tuple(ARGUMENTS), ("grad", "jvp", "vmap"), ({}, KERNEL)),
  ids=str,
)
def test_arguments_of_activations_outside_of_float16(name, mode, how):
  """As in float32, of which there is room enough."""
  x, w = jnp.full((1, 8), 100, jnp.float16), jnp.full((8, 16), 200, jnp.float16)
  op, parts = ARGUMENTS[name]

  def ours(x, w):
    weights = [w / part for part in parts]
    out = op(x, *weights, activation=_small, **how)
    return out.astype(jnp.float32).sum()

  def plain(x, w):
    weights = [(w / part).astype("float16").astype(w.dtype) for part in parts]
    gate, *up = (x @ v for v in weights)
    return (_small(gate) * (up[0] if up else 1)).sum()

  wide = x.astype(jnp.float32), w.astype(jnp.float32)
  if mode == "jvp":
    got = jax.jvp(ours, (x, w), (x, w))[1:]
    want = jax.jvp(plain, wide, wide)[1:]
  else:
    grad = jax.grad(ours, (0, 1))
    batched = jax.vmap(grad)(x[None], w[None]) if mode == "vmap" else grad(x, w)
    got = [v.reshape(u.shape) for v, u in zip(batched, (x, w))]
    want = jax.grad(plain, (0, 1))(*wide)
  for g, v in zip(got, want):
    # Cotangents, operands and results are rounded to it once each.
    np.testing.assert_allclose(g, v, rtol=3 * float(jnp.finfo("float16").eps))


RECIPES = [Recipe(scaling=s) for s in ("tensor", "row", "block")]
RECIPES += [Recipe(gradient=None, scaling=s) for s in ("row", "block")]
each = functools.partial(pytest.mark.parametrize, "recipe", ids=str)


@each(RECIPES[:3])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_of_recipes(name, recipe):
  """The same, of equal numbers, which 8 bits and a scale hold."""
  x, w = jnp.full((2, 8), 100, jnp.float16), jnp.full((8, 16), 200, jnp.float16)
  op, parts = ARGUMENTS[name]

  def loss(x, w, **how):
    out = op(x, *[w / part for part in parts], activation=_small, **how)
    return out.astype(jnp.float32).sum()

  got, want = (
    jax.grad(functools.partial(loss, **how), (0, 1))(x, w)
    for how in ({"quantize": recipe}, {})
  )
  for g, v in zip(got, want):
    assert g.dtype == "float16"
    np.testing.assert_allclose(g, v, rtol=2**-5)


@each(RECIPES)
def test_of_recipes_with_a_large_factor(recipe):
  a, b = jnp.full((2, 4), 0.01, jnp.float16), jnp.ones((4, 3), jnp.float16)
  f = functools.partial(pallas_gemm.matmul, alpha=1e5, quantize=recipe)
  slope = jax.grad(lambda a: f(a, b / 100).astype(jnp.float32).sum())(a)
  np.testing.assert_allclose(slope, np.full((2, 4), 3000), rtol=2**-7)


@each(RECIPES[3:])
def test_scales_that_round_up_past_float16(recipe):
  recipe = dataclasses.replace(recipe, power_of_two=True)
  a, b = jnp.full((3, 128), 1e-3, jnp.float16), jnp.full((128, 4), 65e3, "f2")
  f = lambda a: pallas_gemm.matmul(a, b, quantize=recipe)  # noqa: E731
  y, pull = jax.vjp(f, a)
  for ct, want in ((0.0, 0.0), (1e-3, 260.0)):
    (got,) = pull(jnp.full_like(y, ct))
    np.testing.assert_allclose(got, jnp.full_like(a, want), rtol=2**-4)


@each(RECIPES[3:])
def test_small_cotangents_of_recipes(recipe):
  """Beside a scale that is multiplied into them they are smaller still."""
  x, w, ct = normal(64, 128), normal(128, 96) / 50, normal(64, 96) * 1e-4
  x, w, ct = (v.astype(jnp.float16) for v in (x, w, ct))
  f = lambda x: pallas_gemm.matmul(x, w, quantize=recipe)  # noqa: E731
  (got,) = jax.vjp(f, x)[1](ct)
  w, ct, got = (np.asarray(v, np.float64) for v in (w, ct, got))
  off, most = np.abs(got - ct @ w.T), np.abs(ct) @ np.abs(w).T
  assert (off <= 2**-4 * most + 2**-24).all()
