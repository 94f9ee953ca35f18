"""Operands and results of other ranges than sums and cotangents have."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support.products import normal

SIZES = jnp.array([24, 0, 40])
ROWS, K, N = 64, 32, 16


def _einsum(x, w):
  return jnp.einsum(
    "mk,kn->mn",
    x,
    w,
    preferred_element_type=jnp.float32,
    _dot_general=pallas_gemm.dot_general,
  )


# By name: of x [64, 32] and w [32, 16], or one for each group, in float32.
WIDE = {
  "matmul": lambda x, w, **how: pallas_gemm.matmul(
    x, w, out_dtype="float32", **how
  ),
  "activation": lambda x, w, **how: pallas_gemm.matmul(
    x, w, out_dtype="float32", activation=jax.nn.relu, **how
  ),
  "dot_general": lambda x, w: pallas_gemm.dot_general(
    x, w, preferred_element_type=jnp.float32
  ),
  "einsum": _einsum,
  "ragged_dot": lambda x, w, **how: pallas_gemm.ragged_dot(
    x, w, SIZES, preferred_element_type=jnp.float32, **how
  ),
  "ragged_dot transposed": lambda x, w, **how: pallas_gemm.ragged_dot(
    x,
    w.mT,
    SIZES,
    preferred_element_type=jnp.float32,
    transpose_rhs=True,
    **how,
  ),
}
KERNEL = {"implementation": "sm90"}
WAYS = [(name, {}) for name in WIDE] + [
  (name, KERNEL) for name in WIDE if name not in ("dot_general", "einsum")
]


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
  out, vjp = jax.vjp(lambda x, w: WIDE[name](x, w, **how), x, w)
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


ARGUMENTS = {
  "matmul": lambda x, w, how: pallas_gemm.matmul(
    x, w, activation=_small, **how
  ),
  "gated_matmul": lambda x, w, how: pallas_gemm.gated_matmul(
    x, w, w / 1e4, activation=_small, **how
  ),
  "up": lambda x, w, how: pallas_gemm.gated_matmul(
    x, w / 1e4, w, activation=_small, **how
  ),
  "ragged_dot": lambda x, w, how: pallas_gemm.ragged_dot(
    x, w[None], jnp.array([len(x)]), activation=_small, **how
  ),
  "gated_ragged_dot": lambda x, w, how: pallas_gemm.gated_ragged_dot(
    x, w[None], w[None] / 1e4, jnp.array([len(x)]), activation=_small, **how
  ),
}


def _of_arguments(name, x, w):
  """The same in the operands' own dtype, of which there is room enough."""
  dot = lax.dot_general
  numbers = (((1,), (0,)), ((), ()))
  small = (w / 1e4).astype("float16").astype(w.dtype)
  gate = dot(x, small if name == "up" else w, numbers)
  if "gated" in name:
    return _small(gate) * dot(x, small, numbers)
  return _small(gate) * (dot(x, w, numbers) if name == "up" else 1)


@pytest.mark.parametrize("how", ({}, KERNEL), ids=str)
@pytest.mark.parametrize("mode", ("grad", "jvp", "vmap"))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_activations_outside_of_float16(name, mode, how):
  x = jnp.full((1, 8), 100, jnp.float16)
  w = jnp.full((8, 16), 200, jnp.float16)

  def loss(f):
    return lambda x, w: f(x, w).astype(jnp.float32).sum()

  ours = loss(lambda x, w: ARGUMENTS[name](x, w, how))
  theirs = loss(lambda x, w: _of_arguments(name, x, w))
  wide = x.astype(jnp.float32), w.astype(jnp.float32)
  if mode == "jvp":
    got = jax.jvp(ours, (x, w), (x, w))[1:]
    want = jax.jvp(theirs, wide, wide)[1:]
  else:
    grad = jax.grad(ours, (0, 1))
    batched = jax.vmap(grad)(x[None], w[None]) if mode == "vmap" else grad(x, w)
    got = [v.reshape(u.shape) for v, u in zip(batched, (x, w))]
    want = jax.grad(theirs, (0, 1))(*wide)
  for g, v in zip(got, want):
    # Cotangents, operands and results are rounded to it once each.
    np.testing.assert_allclose(g, v, rtol=3 * float(jnp.finfo("float16").eps))
