"""alpha and beta: numbers, arrays and traced values, with their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from tests.support import products
from tests.support.products import normal

A, B, C, BIAS = normal(4, 6), normal(6, 8), normal(4, 8), normal(8)
SMALL = tuning.Config(
  block_m=64, block_n=64, block_k=64, stages=2, consumers=1, epilogue_n=64
)

# All the same number.
TWO = {
  "int": 2,
  "float": 2.0,
  "NumPy float": np.float32(2),
  "NumPy float64": np.float64(2),
  "NumPy int": np.int8(2),
  "NumPy array": np.array(2.0),
  "array": jnp.array(2.0),
  "array of integers": jnp.array(2),
  "array of another width": jnp.array(2, jnp.bfloat16),
  "weak array": jnp.asarray(2.0),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_any_real_number_scales(name, dtype):
  a, b, c = (x.astype(dtype) for x in (A, B, C))
  out = pallas_gemm.matmul(a, b, c=c, alpha=TWO[name], beta=TWO[name])
  assert out.dtype == dtype and not out.weak_type
  products.assert_product(out, a, b, c=c, alpha=2, beta=2)


@pytest.mark.parametrize(
  "two", (2, np.int8(2), np.array(2), jnp.array(2), jnp.array(2, "uint8"))
)
@pytest.mark.parametrize("dtype", ("int8", "int32", "uint8"))
def test_integers_scale_integers(two, dtype):
  a, b, c = (jnp.arange(16, dtype=dtype).reshape(4, 4) % k for k in (3, 4, 5))
  out = pallas_gemm.matmul(a, b, c=c, alpha=two, beta=two)
  assert out.dtype == dtype
  np.testing.assert_array_equal(
    out, (2 * np.matmul(a, b, dtype=int) + 2 * np.asarray(c, int))
  )


def test_complex_numbers_are_scaled():
  a = A + 1j
  for alpha in (2j, 2.0, jnp.array(2.0)):
    out = pallas_gemm.matmul(a, B, alpha=alpha)
    np.testing.assert_allclose(out, alpha * jnp.matmul(a, B), rtol=1e-5)


@pytest.mark.parametrize("value", (0.0, -1.0, float("inf"), float("nan")))
def test_an_array_is_like_a_number(value):
  for name in ("alpha", "beta"):
    number, array = (
      pallas_gemm.matmul(A, B, c=C, bias=BIAS, **{name: x})
      for x in (value, jnp.array(value))
    )
    np.testing.assert_allclose(array, number, rtol=1e-6)


def test_traced():
  def f(alpha, beta):
    return pallas_gemm.matmul(A, B, c=C, alpha=alpha, beta=beta)

  out = jax.jit(f)(0.5, -2)
  products.assert_product(out, A, B, c=C, alpha=0.5, beta=-2)
  outs = jax.vmap(f, (0, None))(jnp.array([0.5, 2.0]), -2)
  for out, alpha in zip(outs, (0.5, 2.0)):
    products.assert_product(out, A, B, c=C, alpha=alpha, beta=-2)
  outs = jax.vmap(f)(jnp.array([0.5, 2.0]), jnp.array([1.5, 0.0]))
  for out, alpha, beta in zip(outs, (0.5, 2.0), (1.5, 0.0)):
    products.assert_product(out, A, B, c=C, alpha=alpha, beta=beta)


def test_traced_without_c():
  with pytest.raises(ValueError, match=r"beta .*c is None"):
    jax.jit(lambda beta: pallas_gemm.matmul(A, B, beta=beta))(1.0)


def _reference(a, b, c, bias, alpha, beta, activation):
  return activation(alpha * (a @ b) + beta * c + bias)


def _ours(a, b, c, bias, alpha, beta, activation):
  return pallas_gemm.matmul(
    a, b, c=c, bias=bias, alpha=alpha, beta=beta, activation=activation
  )


def test_gradients_of_numbers_that_are_passed_as_such():
  """A traced Python number has a weak type; so has its gradient."""

  def loss(f):
    return lambda alpha, beta: f(A, B, C, BIAS, alpha, beta, jnp.tanh).sum()

  got, want = (jax.grad(loss(f), (0, 1))(0.5, 2.0) for f in (_ours, _reference))
  for x, y in zip(got, want):
    assert x.dtype == y.dtype and x.shape == () and x.weak_type == y.weak_type
    np.testing.assert_allclose(x, y, rtol=1e-4)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_gradients_have_the_factors_dtype(dtype):
  a, b, c = (x.astype("bfloat16") for x in (A, B, C))

  def f(alpha, beta):
    return pallas_gemm.matmul(
      a, b, c=c, alpha=alpha, beta=beta, out_dtype="float32"
    ).sum()

  x = jnp.array(0.5, dtype), jnp.array(2.0, dtype)
  got = jax.grad(f, (0, 1))(*x)
  want = np.asarray(a, float) @ np.asarray(b, float), np.asarray(c, float)
  for grad, term in zip(got, want):
    assert grad.dtype == dtype and grad.shape == ()
    np.testing.assert_allclose(float(grad), term.sum(), rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("activation", (None, jnp.tanh))
def test_gradients_of_many_factors_of_one_product(activation):
  """The product lacks the dimension that the factors have."""

  def f(alphas, matmul):
    return jax.vmap(matmul)(alphas).sum()

  ours = lambda x: pallas_gemm.matmul(A, B, alpha=x, activation=activation)  # noqa: E731
  plain = lambda x: (activation or (lambda z: z))(x * (A @ B))  # noqa: E731
  alphas = jnp.array([0.5, 2.0, -1.0])
  got, want = (jax.grad(f)(alphas, matmul) for matmul in (ours, plain))
  np.testing.assert_allclose(got, want, rtol=1e-3)


def test_vectors():
  x = normal(6)
  f = lambda alpha: pallas_gemm.matmul(A, x, alpha=alpha)  # noqa: E731
  products.assert_product(f(jnp.array(0.5))[:, None], A, x[:, None], alpha=0.5)
  grad = jax.grad(lambda alpha: f(alpha).sum())(0.5)
  np.testing.assert_allclose(grad, (A @ x).sum(), rtol=1e-4)


def test_sm90():
  a, b = normal(64, 64, dtype="bfloat16"), normal(64, 64, dtype="bfloat16")
  c = normal(64, 64, seed=1)

  def f(alpha, beta):
    return pallas_gemm.matmul(
      a,
      b,
      c=c,
      alpha=alpha,
      beta=beta,
      out_dtype="float32",
      implementation="sm90",
      config=SMALL,
    )

  out = jax.jit(f)(0.5, jnp.array(2.0))
  products.assert_product(out, a, b, c=c, alpha=0.5, beta=2.0)
