"""dot_general against jax.lax.dot_general, and inside of libraries."""

from flax import nnx
import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support import products
from tests.support.products import normal

# lhs shape, rhs shape, dimension numbers.
CASES = (
  ((4, 5), (5, 6), (((1,), (0,)), ((), ()))),
  ((5, 4), (5, 6), (((0,), (0,)), ((), ()))),
  ((4, 5), (6, 5), (((1,), (1,)), ((), ()))),
  ((5, 4), (6, 5), (((0,), (1,)), ((), ()))),
  ((2, 3, 5), (5, 6), (((2,), (0,)), ((), ()))),
  ((2, 3, 5), (5, 6, 7), (((2,), (0,)), ((), ()))),
  ((2, 3, 5), (3, 5, 6), (((1, 2), (0, 1)), ((), ()))),
  ((2, 3, 5), (5, 3, 6), (((1, 2), (1, 0)), ((), ()))),
  ((2, 3, 5), (3, 5, 6), (((2, 1), (1, 0)), ((), ()))),
  ((3, 4, 5), (3, 5, 6), (((2,), (1,)), ((0,), (0,)))),
  ((3, 5, 4), (3, 6, 5), (((1,), (2,)), ((0,), (0,)))),
  ((2, 3, 4, 5), (2, 3, 5, 6), (((3,), (2,)), ((0, 1), (0, 1)))),
  ((2, 3, 4, 5), (3, 2, 5, 6), (((3,), (2,)), ((0, 1), (1, 0)))),
  ((4, 3, 5), (5, 6, 3), (((2,), (0,)), ((1,), (2,)))),
  ((2, 4, 3, 5), (2, 6, 3, 5), (((3,), (3,)), ((0, 2), (0, 2)))),
  ((2, 5, 4, 7), (5, 7, 6), (((1, 3), (0, 1)), ((), ()))),
  ((5,), (5,), (((0,), (0,)), ((), ()))),
  ((5,), (5, 6), (((0,), (0,)), ((), ()))),
  ((3, 5), (3, 5), (((1,), (1,)), ((0,), (0,)))),
  ((4,), (6,), (((), ()), ((), ()))),
  ((3, 4), (3, 6), (((), ()), ((0,), (0,)))),
  ((3,), (3,), (((), ()), ((0,), (0,)))),
  ((), (6,), (((), ()), ((), ()))),
  ((0, 5), (5, 6), (((1,), (0,)), ((), ()))),
  ((4, 0), (0, 6), (((1,), (0,)), ((), ()))),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
  *shapes, numbers = case
  with jax.enable_x64(True):
    lhs, rhs = (normal(*shape, dtype="float64") for shape in shapes)
    want = lax.dot_general(lhs, rhs, numbers)
    out = pallas_gemm.dot_general(lhs, rhs, numbers)
    assert out.dtype == want.dtype and out.shape == want.shape
    products.assert_same(out, want)

    def loss(f):
      return lambda *x: (f(*x, numbers) ** 2).sum()

    got = jax.grad(loss(pallas_gemm.dot_general), (0, 1))(lhs, rhs)
    want = jax.grad(loss(lax.dot_general), (0, 1))(lhs, rhs)
    products.assert_same(got, want)


@pytest.mark.parametrize("case", CASES[:6] + CASES[9:12], ids=str)
def test_operands_are_read_in_place(case):
  *shapes, numbers = case
  lhs, rhs = (normal(*shape) for shape in shapes)
  f = jax.jit(lambda a, b: pallas_gemm.dot_general(a, b, numbers))
  assert "stablehlo.transpose" not in f.lower(lhs, rhs).as_text()


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "int8", "complex64"))
@pytest.mark.parametrize("wide", (False, True))
def test_dtypes(dtype, wide):
  lhs, rhs = (jnp.round(3 * normal(*s)).astype(dtype) for s in ((4, 5), (5, 6)))
  preferred = {"int8": "int32", "bfloat16": "float32"}.get(dtype, dtype)
  preferred = preferred if wide else None
  numbers = (((1,), (0,)), ((), ()))
  arguments = lhs, rhs, numbers, "highest", preferred
  want = lax.dot_general(*arguments)
  out = pallas_gemm.dot_general(*arguments)
  assert out.dtype == want.dtype
  np.testing.assert_array_equal(out, want)  # Small integers: exact.


def test_precision():
  numbers = (((1,), (0,)), ((), ()))
  for precision in ("high", lax.Precision.HIGHEST, ["high", "high"]):
    f = jax.jit(
      lambda a, b, p=precision: pallas_gemm.dot_general(a, b, numbers, p)
    )
    text = f.lower(normal(4, 5), normal(5, 6)).as_text()
    assert "precision = [HIGH" in text


def test_mixed_dtypes_are_passed_on():
  lhs, rhs = normal(4, 5, dtype="bfloat16"), normal(5, 6)
  numbers = (((1,), (0,)), ((), ()))
  for arguments in ((lhs, rhs, numbers), (lhs, rhs, numbers, None, "float32")):
    want = lax.dot_general(*arguments)
    out = pallas_gemm.dot_general(*arguments)
    assert out.dtype == want.dtype
    np.testing.assert_array_equal(out, want)
  with pallas_gemm.batch_invariant():
    with pytest.raises(NotImplementedError, match="mixed dtypes"):
      pallas_gemm.dot_general(lhs, rhs, numbers)


@pytest.mark.parametrize(
  "numbers",
  (
    (((1,), (1,)), ((), ())),
    (((1,), (0,)), ((0,), ())),
    (((5,), (0,)), ((), ())),
    (((1, 0), (0,)), ((), ())),
  ),
  ids=str,
)
def test_errors_are_those_of_lax(numbers):
  arguments = normal(4, 5), normal(5, 6), numbers
  with pytest.raises((TypeError, ValueError)) as want:
    lax.dot_general(*arguments)
  with pytest.raises((TypeError, ValueError)) as got:
    pallas_gemm.dot_general(*arguments)
  assert got.type is want.type and str(got.value) == str(want.value)


def test_out_sharding_is_passed_on():
  mesh = jax.make_mesh(
    (1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,)
  )
  with jax.set_mesh(mesh):
    out = pallas_gemm.dot_general(
      normal(4, 5),
      normal(5, 6),
      (((1,), (0,)), ((), ())),
      out_sharding=jax.sharding.PartitionSpec("d"),
    )
    assert jax.typeof(out).sharding.spec[0] == "d"


def test_einsum():
  spec = "bqhd,bkhd->bhqk"
  with jax.enable_x64(True):
    x, y = (normal(2, n, 4, 5, dtype="float64") for n in (3, 6))
    out = jnp.einsum(spec, x, y, _dot_general=pallas_gemm.dot_general)
    products.assert_same(out, jnp.einsum(spec, x, y))


@pytest.mark.parametrize(
  "layer",
  (
    lambda **kw: nn.Dense(6, param_dtype="float64", **kw),
    lambda **kw: nn.DenseGeneral(
      (2, 3), axis=(-2, -1), param_dtype="float64", **kw
    ),
  ),
  ids=("Dense", "DenseGeneral"),
)
def test_flax_linen(layer):
  with jax.enable_x64(True):
    x = normal(2, 4, 5, dtype="float64")
    plain, injected = layer(), layer(dot_general=pallas_gemm.dot_general)
    variables = plain.init(jax.random.key(0), x)

    def loss(module):
      return lambda v: (module.apply(v, x) ** 2).sum()

    got = jax.jit(jax.value_and_grad(loss(injected)))(variables)
    want = jax.jit(jax.value_and_grad(loss(plain)))(variables)
    products.assert_same(got, want)
    assert "pallas_gemm" in str(jax.make_jaxpr(loss(injected))(variables))


def test_flax_nnx():
  x = normal(2, 4, 5)
  plain = nnx.Linear(5, 6, rngs=nnx.Rngs(0))
  injected = nnx.Linear(
    5, 6, rngs=nnx.Rngs(0), dot_general=pallas_gemm.dot_general
  )
  np.testing.assert_array_equal(injected(x), plain(x))
