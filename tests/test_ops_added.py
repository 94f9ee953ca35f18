"""bias and C of any shape that broadcasts; alpha and beta of any kind."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from tests.support import ops, products
from tests.support.products import normal

A, B, C, BIAS = normal(4, 6), normal(6, 8), normal(4, 8), normal(8)
# Small tiles, so that a small product has several.
SMALL = {
  "implementation": "sm90",
  "config": tuning.Config(
    block_m=64, block_n=64, block_k=64, stages=2, consumers=1, epilogue_n=64
  ),
}


def _broadcast(shape):
  """Every shape that broadcasts to one."""
  for rank in range(len(shape) + 1):
    last = shape[len(shape) - rank :]
    yield from {*itertools.product(*[{1, size} for size in last])}


ADDED_TO = (
  *(((4, 6), (6, 8)), ((1, 4, 6), (3, 6, 8)), ((2, 1, 6), (6, 1))),
  *(((6,), (6, 8)), ((3, 4, 6), (6,)), ((6,), (6,)), ((2, 4, 0), (0, 8))),
)


@pytest.mark.parametrize("shapes", ADDED_TO, ids=str)
@pytest.mark.parametrize("name", ("bias", "c"))
def test_what_is_added_broadcasts(name, shapes):
  """Values and gradients are those of jnp, whatever the shape.

  The bias has one half of the shapes that broadcast, C the other.
  """
  with jax.enable_x64(True):
    a, b = (ops.n64(*shape) for shape in shapes)
    how = {"activation": jnp.sin} | ({"beta": 0.5} if name == "c" else {})

    def step(f):
      one = lambda a, b, v: f(a, b, **{name: v}, **how)  # noqa: E731
      return jax.jit(lambda *x: ops.value_and_gradients(one, x))

    steps = [step(f) for f in (ops.dense, ops.plain)]
    for shape in sorted(_broadcast(jnp.matmul(a, b).shape))[name == "c" :: 2]:
      got, want = (f(a, b, ops.n64(*shape, seed=1)) for f in steps)
      products.assert_same(got, want)


@pytest.mark.parametrize("shape", ((1, 8), (3, 1), (8,), (1, 1), ()), ids=str)
def test_bias_of_groups_broadcasts(shape):
  with jax.enable_x64(True):
    x, w, bias = ops.n64(5, 6), ops.n64(3, 6, 8), ops.n64(*shape)
    how = {"group_sizes": jnp.array([2, 0, 2]), "activation": jnp.sin}
    f = lambda v: ops.grouped(x, w, v, **how)  # noqa: E731
    full = lambda v: f(jnp.broadcast_to(v, (3, 8)))  # noqa: E731

    def step(g):
      out, pullback = jax.vjp(g, bias)
      return out, pullback(out)

    products.assert_same(*jax.jit(lambda: [step(f), step(full)])())


@pytest.mark.parametrize(
  ("dtype", "number"),
  [("float32", 2), ("bfloat16", 0.5), ("float16", np.float32(0.5))],
)
def test_numbers_are_added(dtype, number):
  """Without a change of the result's dtype; as arrays of no dimension."""
  a, b = A.astype(dtype), B.astype(dtype)
  out = pallas_gemm.matmul(a, b, bias=number, c=number)
  same = jnp.full((), number, "float32")
  want = pallas_gemm.matmul(a, b, bias=same, c=same)
  assert out.dtype == dtype
  np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(
  ("bias", "c"),
  (
    *(((1, 64), (64,)), ((64,), (64, 1)), ((1, 1), (2, 1, 64)), ((), ())),
    *(((64, 64), (64, 64)), ((2, 64, 1), (1,)), ((64, 1), (2, 1, 1))),
  ),
  ids=str,
)
def test_sm90_adds_what_broadcasts(bias, c):
  a, b = normal(2, 64, 64, dtype="bfloat16"), normal(64, 64, dtype="bfloat16")
  bias, c = normal(*bias), normal(*c, dtype="bfloat16")
  f = lambda bias, c: pallas_gemm.matmul(a, b, bias=bias, c=c, **SMALL)  # noqa: E731
  added = jnp.broadcast_to(bias + c, (2, 64, 64))
  products.assert_product(f(bias, c), a, b, c=added)
  assert "mosaic_gpu" in ops.lowered(f, bias, c)


# alpha and beta.

# All the same number.
TWO = (
  *(2, 2.0, np.float32(2), np.float64(2), np.int8(2), np.array(2.0)),
  *(jnp.array(2.0), jnp.array(2), jnp.array(2, jnp.bfloat16)),
  jnp.asarray(2.0),  # weak
)


@pytest.mark.parametrize("i", range(len(TWO)))
def test_any_real_number_scales(i):
  two, dtype = TWO[i], ("float32", "bfloat16")[i % 2]
  a, b, c = (x.astype(dtype) for x in (A, B, C))
  out = pallas_gemm.matmul(a, b, c=c, alpha=two, beta=two)
  assert out.dtype == dtype and not out.weak_type
  products.assert_product(out, a, b, c=c, alpha=2, beta=2)


@pytest.mark.parametrize(
  ("dtype", "two"),
  [
    *(("int8", 2), ("int32", np.int8(2)), ("uint8", np.array(2))),
    *(("int8", jnp.array(2)), ("int32", jnp.array(2, "uint8"))),
  ],
)
def test_integers_scale_integers(two, dtype):
  a, b, c = (jnp.arange(16, dtype=dtype).reshape(4, 4) % k for k in (3, 4, 5))
  out = pallas_gemm.matmul(a, b, c=c, alpha=two, beta=two)
  assert out.dtype == dtype
  want = 2 * np.matmul(a, b, dtype=int) + 2 * np.asarray(c, int)
  np.testing.assert_array_equal(out, want)


def test_a_number_past_float32_is_infinity():
  assert np.isinf(pallas_gemm.matmul(A, B, alpha=1e300)).all()


@pytest.mark.parametrize("value", (0.0, -1.0, float("inf"), float("nan")))
def test_an_array_is_like_a_number(value):
  for name in ("alpha", "beta"):
    number, array = (
      pallas_gemm.matmul(A, B, c=C, bias=BIAS, **{name: x})
      for x in (value, jnp.array(value))
    )
    np.testing.assert_allclose(array, number, rtol=1e-6)


@pytest.mark.parametrize("zero", (np.float32(0), np.array(0.0), jnp.array(0.0)))
def test_only_pythons_zero_is_not_read(zero):
  """NaN stays with a zero of NumPy's, as with one in an array."""
  a, c = (x.at[0, 0].set(jnp.nan) for x in (A, C))
  for f in (
    lambda x: pallas_gemm.matmul(a, B, alpha=x),
    lambda x: pallas_gemm.matmul(A, B, c=c, beta=x),
  ):
    assert np.isfinite(f(0)).all()
    assert np.isnan(f(zero)[0, 0]) and np.isfinite(f(zero)[1:]).all()


def test_traced_without_c():
  with pytest.raises(ValueError, match=r"beta .*c is None"):
    jax.jit(lambda beta: pallas_gemm.matmul(A, B, beta=beta))(1.0)


def test_gradients_of_numbers_that_are_passed_as_such():
  """A traced Python number has a weak type; so has its gradient."""
  how = {"c": C, "bias": BIAS, "activation": jnp.tanh}
  got, want = (
    jax.grad(lambda x, y, f=f: f(A, B, alpha=x, beta=y, **how).sum(), (0, 1))(
      0.5, 2.0
    )
    for f in (ops.dense, ops.plain)
  )
  for x, y in zip(got, want):
    assert x.dtype == y.dtype and x.shape == () and x.weak_type == y.weak_type
    np.testing.assert_allclose(x, y, rtol=1e-4)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_gradients_have_the_factors_dtype(dtype):
  a, b, c = (x.astype("bfloat16") for x in (A, B, C))
  f = lambda alpha, beta: ops.dense(  # noqa: E731
    a, b, c=c, alpha=alpha, beta=beta, out_dtype="float32"
  ).sum()
  got = jax.grad(f, (0, 1))(jnp.array(0.5, dtype), jnp.array(2.0, dtype))
  want = np.asarray(a, float) @ np.asarray(b, float), np.asarray(c, float)
  for grad, term in zip(got, want):
    assert grad.dtype == dtype and grad.shape == ()
    np.testing.assert_allclose(float(grad), term.sum(), rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("activation", (None, jnp.tanh))
def test_gradients_of_many_factors_of_one_product(activation):
  """The product lacks the dimension that the factors have."""
  alphas = jnp.array([0.5, 2.0, -1.0])

  def loss(f):
    one = lambda x: f(A, B, alpha=x, activation=activation)  # noqa: E731
    return lambda alphas: jax.vmap(one)(alphas).sum()

  got, want = (jax.grad(loss(f))(alphas) for f in (ops.dense, ops.plain))
  np.testing.assert_allclose(got, want, rtol=1e-3)


def test_factors_of_vectors():
  x = normal(6)
  f = lambda alpha: pallas_gemm.matmul(A, x, alpha=alpha)  # noqa: E731
  products.assert_product(f(jnp.array(0.5))[:, None], A, x[:, None], alpha=0.5)
  grad = jax.grad(lambda alpha: f(alpha).sum())(0.5)
  np.testing.assert_allclose(grad, (A @ x).sum(), rtol=1e-4)


def test_sm90_scales():
  a, b = normal(64, 64, dtype="bfloat16"), normal(64, 64, dtype="bfloat16")
  c, how = normal(64, 64, seed=1), SMALL | {"out_dtype": "float32"}
  f = lambda x, y: pallas_gemm.matmul(a, b, c=c, alpha=x, beta=y, **how)  # noqa: E731
  out = jax.jit(f)(0.5, jnp.array(2.0))
  products.assert_product(out, a, b, c=c, alpha=0.5, beta=2.0)


@pytest.mark.parametrize("name", ("bias", "c"))
def test_what_is_real_is_added_to_a_complex_product(name):
  with jax.enable_x64(True):
    a, b, v = ops.n64(4, 6), ops.n64(6, 8) + 1j, ops.n64(4, 8, seed=2)

    def loss(f):
      return jax.value_and_grad(lambda v: jnp.sum(jnp.abs(f(v))))(v)

    got = loss(lambda v: pallas_gemm.matmul(a, b, **{name: v}))
    want = loss(lambda v: jnp.matmul(a, b) + v)
    for x, y in zip(got, want):
      np.testing.assert_allclose(x, y, rtol=1e-12)
    a, b = a.astype("float32"), b.astype("complex64")
    with pytest.raises(
      TypeError, match="fits into the accumulation's, complex"
    ):
      pallas_gemm.matmul(a, b, **{name: v})
