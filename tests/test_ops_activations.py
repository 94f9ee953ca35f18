"""Activations that are elementwise, however they are written."""

import functools
import gc
import weakref

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.kernels import activations
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
  np.testing.assert_allclose(
    jax.grad(_loss(op, with_derivative))(A),
    jax.grad(_expected_loss(op, with_derivative))(A),
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


# Functions with derivatives of their own: equal forward, other gradients.


def _surrogate(k):
  f = jax.custom_vjp(lambda x: (x > 0).astype(x.dtype))
  f.defvjp(lambda x: (f(x), x), lambda x, g: (g * k,))
  return f


def _by_custom_gradient(k):
  return jax.custom_gradient(lambda x: (x * 1.0, lambda g: g * k))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reversed_by(k, x):
  return x * 1.0


_reversed_by.defvjp(lambda k, x: (x * 1.0, ()), lambda k, _, g: (-k * g,))


class _Module:
  """What it computes with may change in place, so that it has no key."""

  def __init__(self, k):
    self.k = k

  def act(self, x):
    return _surrogate(self.k)(x)


def _by_host(k):
  scalar = jax.ShapeDtypeStruct((), "float32")

  def f(x):
    return x * jax.pure_callback(lambda _: np.float32(k), scalar, 0.5)

  return f


RULES = {
  "custom_vjp": _surrogate,
  "custom_gradient": _by_custom_gradient,
  "nondiff_argnums": lambda k: functools.partial(_reversed_by, k),
  "inside": lambda k: lambda x: 2 * _surrogate(k)(x),
  "method": lambda k: _Module(k).act,
  "host": _by_host,
}


def _loss(op, f):
  if op == "matmul":
    return lambda x: pallas_gemm.matmul(x, B, activation=f).sum()
  if op == "gated_matmul":
    return lambda x: pallas_gemm.gated_matmul(x, B, B, activation=f).sum()
  if op == "ragged_dot":
    return lambda x: pallas_gemm.ragged_dot(x, RHS, SIZES, activation=f).sum()
  return lambda x: pallas_gemm.gated_ragged_dot(
    x, RHS, RHS, SIZES, activation=f
  ).sum()


def _expected_loss(op, f):
  def loss(x):
    z = x @ B if "matmul" in op else lax.ragged_dot(x, RHS, SIZES)
    return (f(z) * (z if "gated" in op else 1)).sum()

  return loss


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("op", OPS)
def test_each_has_its_own_rule(op, rule):
  for k in (1.0, 10.0, 1.0):
    f = RULES[rule](k)
    if rule == "host":  # has no derivative
      got, want = OPS[op](f), expected(op, lambda z, k=k: k * z)
    else:
      got = jax.grad(_loss(op, f))(A)
      want = jax.grad(_expected_loss(op, f))(A)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def _with_second(k):
  """Equal to others, and to their derivative, but not to the second."""
  slope = jax.custom_jvp(jnp.cos)
  slope.defjvp(lambda x, dx: (jnp.cos(x[0]), k * dx[0]))
  f = jax.custom_jvp(jnp.sin)
  f.defjvp(lambda x, dx: (jnp.sin(x[0]), slope(x[0]) * dx[0]))
  return f


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_of_their_own(op):
  for k in (2.0, 5.0):
    f = _with_second(k)
    got, want = (
      jax.jvp(jax.grad(of(op, f)), [A], [A])[1]
      for of in (_loss, _expected_loss)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


_factor, _LIST = 2.0, [2.0]


def _reads_a_global(x):
  return _calls_another(x) + 1


def _calls_another(x):
  return _factor * x


def _reads_a_list(x):
  return _LIST[0] * x


@pytest.mark.parametrize("op", OPS)
def test_a_global_that_has_changed(op, monkeypatch):
  for factor in (2.0, 3.0):
    monkeypatch.setitem(globals(), "_factor", factor)
    _LIST[0] = factor
    for f in (_reads_a_global, _reads_a_list):
      np.testing.assert_allclose(
        OPS[op](f), expected(op, f), rtol=1e-4, atol=1e-5
      )


def test_what_computes_the_same_is_traced_once(monkeypatch):
  """In an eager loop a fresh lambda or partial costs no trace."""
  traced = []
  checked = activations._checked
  monkeypatch.setattr(
    activations, "_checked", lambda *args: traced.append(0) or checked(*args)
  )
  fresh = {
    "lambda": lambda: lambda x: jax.nn.softplus(x) * 0.75,
    "partial": lambda: functools.partial(jax.nn.leaky_relu, negative_slope=0.3),
    "closure": lambda: _scaled(0.875),
    "rule": lambda: _surrogate(0.625),
  }
  for name, make in fresh.items():
    kept = [activations.of(make(), A, B, None) for _ in range(3)]
    assert kept[0] is kept[1] is kept[2], name
  assert len(traced) == len(fresh)


def test_nothing_outlives_the_caches():
  """The layer that an activation is a method of goes with them."""
  layers = []
  for k in (0.1, 0.2):
    layer = Callable(k)
    layers.append(weakref.ref(layer))
    jax.grad(_loss("gated_matmul", layer.method))(A)
    pallas_gemm.matmul(A, B, activation=layer.method)
  del layer
  jax.clear_caches()
  gc.collect()
  assert [layer() for layer in layers] == [None, None]


@pytest.mark.parametrize("op", OPS)
def test_no_tracer_leaks(op):
  with jax.checking_leaks():
    f = lambda x: jnp.sin(x) * 7.125  # noqa: E731
    np.testing.assert_allclose(
      OPS[op](f), expected(op, f), rtol=1e-4, atol=1e-5
    )


def test_names_say_what_is_computed():
  def name(f):
    return activations.of(f, A, B, None).name

  assert name(jax.nn.gelu) == name(lambda x: jax.nn.gelu(x)) == "gelu"
  assert name(functools.partial(jax.nn.gelu, approximate=False)) == "gelu_erf"
  assert name(lambda x: jnp.maximum(x, 0)) == name(jax.nn.relu) == "relu"
  other = name(lambda x: x * 3)
  assert other == name(lambda y: y * 3) != name(lambda x: x * 4)
