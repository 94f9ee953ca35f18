"""More dimensions, and larger ones, than anybody has letters or bits for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.ops import grouped, xla
from tests.support import ops, products
from tests.support.ops import SUMS, n64

# More than 64 are too many for NumPy, which makes some of the arrays.
RANK = 50
ONES = (1,) * RANK
SIZES = jnp.array([1, 3])


def mapped(f, count=RANK):
  """Under so many vmaps."""
  for _ in range(count):
    f = jax.vmap(f)
  return f


def _added(x, w):
  return pallas_gemm.matmul(
    x, w, bias=w[0], c=x[:, :1], activation=jnp.tanh, alpha=0.5
  )


TWO = (*ONES, 4, 3), (*ONES, 3, 2)
# Ops of many dimensions, the same in JAX, and the shapes of both operands.
DEEP = {
  "vmaps of matmul": (mapped(pallas_gemm.matmul), jnp.matmul, TWO),
  "vmaps of an epilogue": (
    mapped(_added),
    lambda x, w: jnp.tanh(0.5 * (x @ w) + w[..., :1, :] + x[..., :1]),
    TWO,
  ),
  "vmaps of gated_matmul": (
    mapped(lambda x, w: pallas_gemm.gated_matmul(x, w, 2 * w)),
    lambda x, w: ops.plain_gated(x, w, 2 * w),
    TWO,
  ),
  "vmaps of ragged_dot": (
    mapped(lambda x, w: pallas_gemm.ragged_dot(x, w, SIZES)),
    mapped(lambda x, w: jnp.concatenate([x[:1] @ w[0], x[1:] @ w[1]])),
    ((*ONES[2:], 2, 3, 4, 3), (*ONES[2:], 2, 3, 2, 3, 2)),
  ),
  "matmul": (
    *(pallas_gemm.matmul, jnp.matmul),
    ((2, *ONES[1:], 4, 3), (*ONES[1:], 5, 3, 2)),
  ),
  "matmul of one": (pallas_gemm.matmul, jnp.matmul, ((*ONES, 4, 3), (3, 2))),
  "dot_general": (
    lambda x, y: pallas_gemm.dot_general(x, y, (((0,), (1,)), ((), ()))),
    lambda x, y: jnp.tensordot(x, y, ((0,), (1,))),
    ((3, 2, *ONES[:24]), (4, 3, *ONES[:24])),
  ),
}


@pytest.mark.parametrize("name", DEEP)
def test_many_dimensions(name):
  """Values and gradients, compiled."""
  ours, plain, shapes = DEEP[name]
  with jax.enable_x64(True):
    args = [n64(*shape, seed=i) for i, shape in enumerate(shapes)]
    both = lambda f: jax.jit(lambda *x: (f(*x), jax.vjp(f, *x)[1](f(*x))))  # noqa: E731
    products.assert_same(both(ours)(*args), both(plain)(*args))


def test_many_dimensions_on_the_kernel():
  shape = jax.ShapeDtypeStruct((*ONES[:24], 4096, 4096), "bfloat16")
  numbers = (((25,), (24,)), ((), ()))
  f = lambda x, y: pallas_gemm.dot_general(x, y, numbers)  # noqa: E731
  assert "mosaic_gpu" in ops.lowered(f, shape, shape)


# Rows that int32 has no numbers for.

MOST = 2**31


def _shape(*shape, dtype="bfloat16"):
  return jax.ShapeDtypeStruct(shape, dtype)


LONG = {
  "matmul": lambda x, w, sizes: pallas_gemm.matmul(x, w[0]),
  "sums": lambda x, w, sizes: pallas_gemm.matmul(x, x, transpose_a=True),
  "ragged_dot": lambda x, w, sizes: pallas_gemm.ragged_dot(
    x, w, sizes, bias=w[:, 0], activation=jax.nn.gelu
  ),
  "group_offset": lambda x, w, sizes: pallas_gemm.ragged_dot(
    x, w[1:], sizes, group_offset=1
  ),
  "gated": lambda x, w, sizes: pallas_gemm.gated_ragged_dot(x, w, w, sizes),
  "ragged sums": lambda x, w, sizes: pallas_gemm.ragged_dot_general(
    x, x * w[0, :, 0], sizes, SUMS
  ),
}


@pytest.mark.parametrize("name", LONG)
def test_many_rows_are_lowered(name):
  """Values and gradients, with sizes of any dtype, and never on the kernel."""
  loss = lambda *x: LONG[name](*x).astype("float32").sum()  # noqa: E731
  step = jax.value_and_grad(loss, (0, 1))
  for wide, dtype, rows in (
    (False, "int32", MOST - 1),
    (False, "int32", MOST),
    (True, "int64", 4 * MOST),
    (True, "int8", MOST),
  ):
    with jax.enable_x64(wide):
      shapes = _shape(rows, 8), _shape(2, 8, 16), _shape(2, dtype=dtype)
      traced = jax.jit(step).trace(*shapes)
      assert [v.shape for v in traced.out_info[1]] == [(rows, 8), (2, 8, 16)]
      for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "mosaic_gpu" not in text


@pytest.mark.parametrize("rows", (MOST - 1, MOST, 4 * MOST))
@pytest.mark.parametrize("has_groups", (False, True))
def test_the_kernel_refuses_many_rows(has_groups, rows):
  def f(x, w, sizes):
    if has_groups:
      return pallas_gemm.ragged_dot(x, w, sizes, implementation="sm90")
    return pallas_gemm.matmul(x, w[0], implementation="sm90")

  shapes = _shape(rows, 64), _shape(2, 64, 128), _shape(2, dtype="int32")
  with pytest.raises(NotImplementedError, match="sizes and tiles must be at"):
    ops.lowered(f, *shapes)


def test_bounds_of_many_rows():
  """In 64 bits where JAX has them; else the rows past 32 are in no group."""
  for wide, ends in (
    (True, [0, 2**31 - 5, 2**32 - 10, 2**33]),
    (False, [0, 2**31 - 5, 2**31 - 1, 2**31 - 1]),
  ):
    with jax.enable_x64(wide):
      last = 2**40 if wide else 2**31 - 1
      sizes = jnp.array([2**31 - 5, 2**31 - 5, last])
      np.testing.assert_array_equal(grouped.bounds(sizes, None, 2**33, 3), ends)
      first = grouped.bounds(sizes, jnp.array(1), 2**33, 1)
      np.testing.assert_array_equal(first, ends[1:3])


def test_a_roll_of_many_rows(monkeypatch):
  """As `jnp.roll`, seen where that can do it."""
  shape = _shape(MOST, 8)
  ops.lowered(xla._rolled, shape, _shape(dtype="int32"))
  x = jnp.arange(10).reshape(5, 2)
  monkeypatch.setattr(xla, "_MOST_ROLLED", 4)
  for by in range(-5, 6):
    np.testing.assert_array_equal(
      xla._rolled(x, jnp.int32(by)), jnp.roll(x, by, axis=0)
    )
