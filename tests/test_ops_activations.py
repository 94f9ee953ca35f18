"""Activations that are elementwise, however they are written."""

import functools
import gc
import itertools
import weakref

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.kernels import activations
from tests.support import ops
from tests.support.products import normal

A, B = normal(4, 6), normal(6, 8)
HALF, THIRD = np.float32(0.5), jnp.array(1 / 3)
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


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


def _twice(x):
  y = jax.jit(jnp.tanh)(x)
  return jax.jit(jnp.tanh)(y)


def _scaled(factor):
  return lambda x: x * factor


# Functions with derivatives of their own: equal forward, other gradients.


def _by_jvp(k):
  f = jax.custom_jvp(jnp.sin)
  f.defjvp(lambda x, dx: (jnp.sin(x[0]), k * dx[0]))
  return f


def _with_second(k):
  """Equal to others, and to their derivative, but not to the second."""
  slope = jax.custom_jvp(jnp.cos)
  slope.defjvp(lambda x, dx: (jnp.cos(x[0]), k * dx[0]))
  f = jax.custom_jvp(jnp.sin)
  f.defjvp(lambda x, dx: (jnp.sin(x[0]), slope(x[0]) * dx[0]))
  return f


def _surrogate(k):
  f = jax.custom_vjp(lambda x: (x > 0).astype(x.dtype))
  f.defvjp(lambda x: (f(x), x), lambda x, g: (g * k,))
  return f


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
  call = functools.partial(jax.pure_callback, lambda _: np.float32(k), scalar)
  return lambda x: x * call(0.5)


_factor, _LIST = 2.0, [2.0]


def _reads_a_global(x):
  return _factor * x + 1


def _reads_a_list(x):
  return _LIST[0] * x


def _of_globals(f):
  """A function that is always the same, and what it reads another."""

  def make(s):
    globals()["_factor"] = _LIST[0] = s
    return f

  return make


FIXED = {
  "relu": jax.nn.relu,
  "silu": jax.nn.silu,
  "gelu": jax.nn.gelu,
  "ufunc": jnp.tanh,
  "lax": lax.logistic,
  "identity": lambda x: x,
  "zeros": jnp.zeros_like,
  "partial": functools.partial(jax.nn.gelu, approximate=False),
  "jit inside": _twice,
  "checkpoint": jax.checkpoint(jnp.tanh),
  "select": lambda x: lax.select(x > 0, x, jnp.zeros_like(x)),
  "stack": lambda x: jnp.stack([x, 0 * x]).max(0),
  "cast": lambda x: x.astype("bfloat16").astype(x.dtype),
  "in 64 bits": lambda x: jnp.round(x * 16) / 16,
  "NumPy scalar": lambda x: x * HALF,
  "array of shape ()": lambda x: x * THIRD,
  "polynomial inside": jnp.sinc,
}
# Of a number. What looks the same and is not is called one after the other.
OF_NUMBERS = {
  "constant": lambda s: lambda x: 0 * x + s,
  "lambda": lambda s: lambda x: x * x + s,
  "default argument": lambda s: lambda x, y=s: x * y,
  "partial of a ufunc": lambda s: functools.partial(jnp.multiply, s),
  "nested partial": lambda s: functools.partial(
    functools.partial(jnp.clip, min=0), max=s
  ),
  "unhashable partial": lambda s: functools.partial(
    lambda x, ys: ys[0] * x, ys=[s, 3.0]
  ),
  "jit": lambda s: jax.jit(_scaled(s)),
  "where": lambda s: lambda x: jnp.where(x > 0, x, s * x),
  "stack of three": lambda s: lambda x: jnp.stack([x, -x, s * x]).sum(0),
  "numbers": _scaled,
  "NumPy scalars": lambda s: _scaled(np.float32(s)),
  "arrays": lambda s: _scaled(jnp.array(s)),
  "weak arrays": lambda s: _scaled(jnp.asarray(s)),
  "objects": Callable,
  "methods": lambda s: Callable(s).method,
  "unhashable objects": Unhashable,
  "equal objects": Equal,
  "powers": lambda s: lambda x: abs(x) ** (2 * s),
  "bounds": lambda s: lambda x: jnp.clip(x, -s, s),
  "branches": lambda s: jnp.sin if s == 0.5 else jnp.cos,
  "global": _of_globals(_reads_a_global),
  "global list": _of_globals(_reads_a_list),
  "custom_jvp": _by_jvp,
  "its second derivative": _with_second,
  "custom_vjp": _surrogate,
  "custom_gradient": lambda s: jax.custom_gradient(
    lambda x: (x * 1.0, lambda g: g * s)
  ),
  "nondiff_argnums": lambda s: functools.partial(_reversed_by, s),
  "rule inside": lambda s: lambda x: 2 * _surrogate(s)(x),
  "rule of a method": lambda s: _Module(s).act,
  "host": _by_host,
}
# One after the other of the ops; those that have a key of their own meet each.
_MEET_ALL = "numbers", "unhashable objects", "global", "custom_vjp", "host"
EACH = [
  (op, name)
  for i, name in enumerate(FIXED | OF_NUMBERS)
  for j, op in enumerate(ops.ACTIVATED)
  if name in _MEET_ALL or i % 4 == j
]


def _step(op, f, rest, activation):
  """Value and gradient; of some the second derivative, or none."""
  of = lambda x: op(x, *rest, activation=f)  # noqa: E731
  if activation == "host":
    return of
  slope = jax.grad(ops.squared(of))
  if activation == "its second derivative":
    return lambda x: jax.jvp(slope, [x], [x])
  return lambda x: (of(x), slope(x))


@pytest.mark.parametrize(("name", "activation"), EACH)
def test_each_computes_its_own(name, activation):
  op = ops.ACTIVATED[name]
  first, *rest = op.args(dtype="float32")
  for s in (0.5, 3.0, 0.5) if activation in OF_NUMBERS else (None,):
    f = OF_NUMBERS[activation](s) if s else FIXED[activation]
    got, want = (_step(g, f, rest, activation) for g in op[:2])
    jax.tree.map(close, jax.jit(got)(first), want(first))
    out, want = (g(first, *rest, activation=f) for g in op[:2])
    close(out, want)
    del f, got, want  # The next one may get its address.


@pytest.mark.parametrize("dtype", ("float64", "int64", "complex128"))
def test_operands_of_numpys_dtypes(dtype):
  """They are what JAX makes of them, before the activation too."""
  a, b = (np.round(np.asarray(x)).astype(dtype) for x in (A, B))
  got = pallas_gemm.matmul(a, b, activation=jnp.square)
  want = jnp.square(jnp.matmul(a, b))
  assert got.dtype == want.dtype
  np.testing.assert_allclose(got, want, rtol=1e-5)
  x, w, sizes = np.ones((4, 6)), np.ones((2, 6, 8)), np.array([1, 3])
  grouped = pallas_gemm.ragged_dot(x, w, sizes, activation=jnp.tanh)
  assert grouped.dtype == "float32"


def test_double_precision_is_another_function():
  """Of constants that only float64 tells apart."""
  a, b = np.ones((2, 3)), np.ones((3, 2))
  rounded = _scaled(float(np.float32(0.1)))
  f = _scaled(0.1)
  for g in (rounded, f):
    pallas_gemm.matmul(a, b, activation=g)
  with jax.enable_x64(True):
    out = pallas_gemm.matmul(a, b, activation=f)
  np.testing.assert_allclose(out, np.full((2, 2), 0.3), rtol=1e-15)


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
  for k, op in itertools.product((0.1, 0.2), (ops.MATMUL, ops.GATED)):
    layer = Callable(k)
    layers.append(weakref.ref(layer))
    f = op.given(activation=layer.method).ours
    jax.grad(ops.squared(f))(*op.args(dtype="float32"))
  del layer, f
  jax.clear_caches()
  gc.collect()
  assert [layer() for layer in layers] == [None] * 4


@ops.each(ops.ACTIVATED)
def test_no_tracer_leaks(op):
  f = lambda x: jnp.sin(x) * 7.125  # noqa: E731
  args = op.args(dtype="float32")
  with jax.checking_leaks():
    close(op.ours(*args, activation=f), op.plain(*args, activation=f))


def test_names_say_what_is_computed():
  def name(f):
    return activations.of(f, A, B, None).name

  assert name(jax.nn.gelu) == name(lambda x: jax.nn.gelu(x)) == "gelu"
  assert name(functools.partial(jax.nn.gelu, approximate=False)) == "gelu_erf"
  assert name(lambda x: jnp.maximum(x, 0)) == name(jax.nn.relu) == "relu"
  other = name(lambda x: x * 3)
  assert other == name(lambda y: y * 3) != name(lambda x: x * 4)


def test_a_librarys_name_makes_no_library_function():
  """Which `functools.wraps` copies, the module's too."""

  @functools.wraps(jnp.tanh)
  def scaled(x):
    return s * x

  by_rule = jax.custom_jvp(scaled)
  by_rule.defjvps(lambda tangent, out, x: s * tangent)
  for s in (1.0, 2.0):
    for f in (scaled, by_rule):
      out = pallas_gemm.matmul(A, B, activation=f)
      close(out, s * pallas_gemm.matmul(A, B))
