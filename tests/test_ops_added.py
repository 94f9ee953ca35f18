"""bias and C of any shape that broadcasts to the result."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from tests.support import products
from tests.support.products import normal

FLOATS, HALF = ("float32", "bfloat16", "float16"), ("bfloat16", "float16")
# Small tiles, so that a small product has several.
SMALL = tuning.Config(
  block_m=64, block_n=64, block_k=64, stages=2, consumers=1, epilogue_n=64
)


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
  """Values and gradients are those of jnp, whatever the shape."""
  with jax.enable_x64(True):
    a, b = (normal(*shape, dtype="float64") for shape in shapes)

    def ours(a, b, v):
      how = {"beta": 0.5} if name == "c" else {}
      return pallas_gemm.matmul(a, b, **{name: v}, activation=jnp.sin, **how)

    def plain(a, b, v):
      return jnp.sin(jnp.matmul(a, b) + (0.5 * v if name == "c" else v))

    for shape in _broadcast(jnp.matmul(a, b).shape):
      v = normal(*shape, dtype="float64", seed=1)
      got, want = (
        jax.jit(lambda *x, f=f: (f(*x), jax.vjp(f, *x)[1](f(*x))))(a, b, v)
        for f in (ours, plain)
      )
      products.assert_same(got, want)


def test_what_is_added_is_mapped():
  """Under vmap, each of them or the product, with the gradients' sums."""
  with jax.enable_x64(True):
    x, c, bias = (normal(3, *s, dtype="float64") for s in ((4, 6), (4, 1), ()))
    b = normal(6, 8, dtype="float64")
    f = lambda x, c, v: pallas_gemm.matmul(x, b, bias=v, c=c)  # noqa: E731
    plain = lambda x, c, v: x @ b + c + v  # noqa: E731
    for axes in itertools.product((0, None), repeat=3):
      args = [v if i == 0 else v[0] for v, i in zip((x, c, bias), axes)]
      if any(axis == 0 for axis in axes):
        maps = [jax.vmap(g, axes) for g in (f, plain)]
        got, want = (jax.vjp(g, *args)[1](g(*args)) for g in maps)
        products.assert_same(got, want)


@pytest.mark.parametrize("number", (2, 0.5, np.float32(0.5)))
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_are_added(dtype, number):
  """Without a change of the result's dtype; as arrays of no dimension."""
  a, b = normal(4, 6, dtype=dtype), normal(6, 8, dtype=dtype)
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
  a, b = normal(2, 64, 64, dtype=HALF[0]), normal(64, 64, dtype=HALF[0])
  bias, c = normal(*bias), normal(*c, dtype=HALF[0])
  f = lambda bias, c: pallas_gemm.matmul(  # noqa: E731
    a, b, bias=bias, c=c, implementation="sm90", config=SMALL
  )
  added = jnp.broadcast_to(bias + c, (2, 64, 64))
  products.assert_product(f(bias, c), a, b, c=added)
  lowered = jax.jit(f).trace(bias, c).lower(lowering_platforms=("cuda",))
  assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("shape", ((1, 8), (3, 1), (8,), (1, 1), ()), ids=str)
def test_bias_of_groups_broadcasts(shape):
  with jax.enable_x64(True):
    x, w = normal(5, 6, dtype="float64"), normal(3, 6, 8, dtype="float64")
    bias, sizes = normal(*shape, dtype="float64"), jnp.array([2, 0, 2])
    f = lambda v: pallas_gemm.ragged_dot(  # noqa: E731
      x, w, sizes, bias=v, activation=jnp.sin
    )
    full = lambda v: f(jnp.broadcast_to(v, (3, 8)))  # noqa: E731
    got, want = (jax.vjp(g, bias)[1](g(bias)) for g in (f, full))
    products.assert_same((f(bias), got), (full(bias), want))


def test_precision_of_gated_products():
  x, w = normal(4, 6), normal(6, 8)
  sizes = jnp.array([4])
  for precision in (None, "highest"):
    for f in (
      lambda p: pallas_gemm.gated_matmul(x, w, w, precision=p),
      lambda p: pallas_gemm.gated_ragged_dot(
        x, w[None], w[None], sizes, precision=p
      ),
    ):
      text = str(jax.make_jaxpr(functools.partial(f, precision))())
      assert ("precision=None" in text) == (precision is None), text
      assert ("HIGHEST" in text) == (precision == "highest"), text
