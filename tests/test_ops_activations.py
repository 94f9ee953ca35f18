"""Activations that are elementwise, however they are written."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support.products import normal

A, B = normal(4, 6), normal(6, 8)
LHS, RHS, SIZES = normal(4, 6), normal(2, 6, 8), jnp.array([1, 3])
HALF = np.float32(0.5)
THIRD = jnp.array(1 / 3)

OPS = {
  "matmul": lambda f: pallas_gemm.matmul(A, B, activation=f),
  "gated_matmul": lambda f: pallas_gemm.gated_matmul(A, B, B, activation=f),
  "ragged_dot": lambda f: pallas_gemm.ragged_dot(LHS, RHS, SIZES, activation=f),
  "gated_ragged_dot": lambda f: pallas_gemm.gated_ragged_dot(
    LHS, RHS, RHS, SIZES, activation=f
  ),
}


@pytest.mark.parametrize("dtype", ("float64", "int64", "complex128"))
def test_operands_of_numpys_dtypes(dtype):
  """They are what JAX makes of them, before the activation too."""
  a, b = (np.round(np.asarray(x)).astype(dtype) for x in (A, B))
  got = pallas_gemm.matmul(a, b, activation=jnp.square)
  want = jnp.square(jnp.matmul(a, b))
  assert got.dtype == want.dtype
  np.testing.assert_allclose(got, want, rtol=1e-5)
  grouped = pallas_gemm.ragged_dot(
    np.ones((4, 6)), np.ones((2, 6, 8)), SIZES, activation=jnp.tanh
  )
  assert grouped.dtype == "float32"


def expected(op, f):
  z = A @ B if "matmul" in op else lax.ragged_dot(LHS, RHS, SIZES)
  return f(z) * z if "gated" in op else f(z)


class Callable:
  """An object that can be called."""

  def __init__(self, factor):
    self.factor = factor

  def __call__(self, x):
    return self.factor * jnp.tanh(x)

  def method(self, x):
    return self(x)


class Unhashable(Callable):
  __hash__ = None


class Equal(Callable):
  """Equal to all of its kind, whatever they compute."""

  def __eq__(self, other):
    return isinstance(other, Equal)

  def __hash__(self):
    return 0


@jax.custom_jvp
def with_derivative(x):
  return jnp.sin(x)


with_derivative.defjvp(lambda x, dx: (jnp.sin(x[0]), 3 * dx[0]))


def _twice(x):
  y = jax.jit(jnp.tanh)(x)
  return jax.jit(jnp.tanh)(y)


ELEMENTWISE = {
  "relu": jax.nn.relu,
  "silu": jax.nn.silu,
  "gelu": jax.nn.gelu,
  "ufunc": jnp.tanh,
  "lax": lax.logistic,
  "identity": lambda x: x,
  "constant": lambda x: 0 * x + 2,
  "zeros": jnp.zeros_like,
  "lambda": lambda x: x * x + 1,
  "default argument": lambda x, y=2.0: x * y,
  "partial": functools.partial(jax.nn.gelu, approximate=False),
  "partial of a ufunc": functools.partial(jnp.multiply, 0.5),
  "nested partial": functools.partial(
    functools.partial(jnp.clip, min=0), max=1
  ),
  "unhashable partial": functools.partial(
    lambda x, ys: ys[0] * x, ys=[2.0, 3.0]
  ),
  "jit": jax.jit(jax.nn.relu),
  "jit inside": _twice,
  "checkpoint": jax.checkpoint(jnp.tanh),
  "custom_jvp": with_derivative,
  "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
  "select": lambda x: lax.select(x > 0, x, jnp.zeros_like(x)),
  "clip": lambda x: jnp.clip(x, -1, 1),
  "stack": lambda x: jnp.stack([x, 0 * x]).max(0),
  "stack of three": lambda x: jnp.stack([x, -x, 0 * x]).sum(0),
  "cast": lambda x: x.astype("bfloat16").astype(x.dtype),
  "in 64 bits": lambda x: jnp.round(x * 16) / 16,
  "NumPy scalar": lambda x: x * HALF,
  "array of shape ()": lambda x: x * THIRD,
  "object": Callable(2.0),
  "method": Callable(2.0).method,
  "unhashable": Unhashable(2.0),
  "equal to others": Equal(2.0),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("op", OPS)
def test_elementwise(op, name):
  f = ELEMENTWISE[name]
  out = OPS[op](f)
  np.testing.assert_allclose(out, expected(op, f), rtol=1e-4, atol=1e-5)
  if op == "matmul":
    jitted = jax.jit(lambda: OPS[op](f))()
    np.testing.assert_allclose(jitted, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_a_derivative_of_its_own_is_used(op):
  def loss(f):
    if op == "matmul":
      return lambda x: pallas_gemm.matmul(x, B, activation=f).sum()
    if op == "gated_matmul":
      return lambda x: pallas_gemm.gated_matmul(x, B, B, activation=f).sum()
    if op == "ragged_dot":
      return lambda x: pallas_gemm.ragged_dot(x, RHS, SIZES, activation=f).sum()
    return lambda x: pallas_gemm.gated_ragged_dot(
      x, RHS, RHS, SIZES, activation=f
    ).sum()

  def reference(x):
    z = x @ B if "matmul" in op else lax.ragged_dot(x, RHS, SIZES)
    return (with_derivative(z) * (z if "gated" in op else 1)).sum()

  np.testing.assert_allclose(
    jax.grad(loss(with_derivative))(A),
    jax.grad(reference)(A),
    rtol=1e-4,
    atol=1e-4,
  )


# What looks the same and is not, one called after the other.


def _scaled(factor):
  return lambda x: x * factor


DIFFERENT = {
  "numbers": lambda s: _scaled(s),
  "NumPy scalars": lambda s: _scaled(np.float32(s)),
  "arrays": lambda s: _scaled(jnp.array(s)),
  "weak arrays": lambda s: _scaled(jnp.asarray(s)),
  "partials": lambda s: functools.partial(jnp.multiply, s),
  "objects": Callable,
  "methods": lambda s: Callable(s).method,
  "unhashable objects": Unhashable,
  "equal objects": Equal,
  "jit": lambda s: jax.jit(_scaled(s)),
  "powers": lambda s: lambda x: abs(x) ** s,
  "bounds": lambda s: lambda x: jnp.clip(x, -s, s),
  "branches": lambda s: jnp.sin if s == 0.5 else jnp.cos,
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("op", OPS)
def test_each_computes_its_own(op, name):
  for factor in (0.5, 3.0, 0.5):
    f = DIFFERENT[name](factor)
    np.testing.assert_allclose(
      OPS[op](f), expected(op, f), rtol=1e-4, atol=1e-5
    )
    del f  # The next one may get its address.


def test_signs_of_zero_and_nan_are_told_apart():
  z = jnp.zeros((1, 1))
  for factor in (0.0, -0.0, float("nan"), 0.0):
    out = pallas_gemm.matmul(z, z, activation=lambda x, s=factor: 0 * x + s)
    np.testing.assert_array_equal(out, np.zeros((1, 1)) + factor)
    f = lambda x, s=factor: jnp.copysign(jnp.ones_like(x), s)  # noqa: E731
    want = np.copysign(1.0, factor)
    assert float(pallas_gemm.matmul(z, z, activation=f)[0, 0]) == want


def test_an_object_that_has_changed():
  f = Unhashable(2.0)
  before = pallas_gemm.matmul(A, B, activation=f)
  f.factor = 4.0
  after = pallas_gemm.matmul(A, B, activation=f)
  np.testing.assert_allclose(after, 2 * before, rtol=1e-6)


def test_derivatives_of_their_own_are_told_apart():
  """Two that compute the same, with other derivatives."""

  def with_slope(slope):
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda x, dx: (jnp.sin(x[0]), slope * dx[0]))
    return f

  for slope in (2.0, 5.0):
    grad = jax.grad(
      lambda a, s=slope: pallas_gemm.matmul(
        a, B, activation=with_slope(s)
      ).sum()
    )(A)
    want = jnp.broadcast_to(slope * B.sum(1), A.shape)
    np.testing.assert_allclose(grad, want, rtol=1e-4, atol=1e-4)
