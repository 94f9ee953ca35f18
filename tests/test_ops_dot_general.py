"""dot_general against jax.lax.dot_general, and inside of libraries."""

from flax import nnx
import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support import drop_in, oldest, products
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


def _ints(*shape, dtype):
  return jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 7 - 3, dtype)


def _fp8(*shape, seed):
  return normal(*shape, dtype="float8_e4m3fn", seed=seed)


_MATRICES = (((1,), (0,)), ((), ()))
# Calls of `jax.lax.dot_general` that are easily got wrong.
LIKE_LAX = {
  "int4 to float32": (
    _ints(2, 1, 5, dtype="int4"),
    _ints(2, dtype="int4"),
    (((0,), (0,)), ((), ())),
    None,
    "float32",
  ),
  "fp8 to int8": (
    _fp8(5, 4, seed=0),
    _fp8(4, 5, seed=1),
    _MATRICES,
    None,
    "int8",
  ),
  "float32 to bool": (
    normal(3, 4) / 8,
    normal(4, 5) / 8,
    _MATRICES,
    None,
    bool,
  ),
  "float32 to int32": (2 * normal(3, 4), normal(4, 5), _MATRICES, None, int),
  "int8 to float32": (
    jnp.full((3, 4), 100, "int8"),
    jnp.full((4, 5), 100, "int8"),
    _MATRICES,
    None,
    "float32",
  ),
  "complex to float32": (
    normal(3, 4) + 1j,
    normal(4, 5) + 1j,
    _MATRICES,
    None,
    "float32",
  ),
  "float32 to bfloat16": (
    normal(3, 4),
    normal(4, 5),
    _MATRICES,
    None,
    "bfloat16",
  ),
  "numbers none": (normal(3, 4), normal(4, 5), None),
  "numbers none of vectors": (normal(4), normal(4), None),
  "numbers none of a vector": (normal(3, 4), normal(4), None),
  "numbers arrays": (
    normal(3, 4),
    normal(4, 5),
    (np.array([[1], [0]]), np.zeros((2, 0), int)),
  ),
  "numbers arrays inside": (
    normal(3, 4),
    normal(4, 5),
    ((np.array([1]), np.array([0])), ((), ())),
  ),
  "numbers one array": (
    normal(2, 3, 4),
    normal(2, 4, 5),
    np.array([[[2], [1]], [[0], [0]]]),
  ),
  "numbers of JAX": (
    normal(3, 4),
    normal(4, 5),
    ((jnp.array([1]), jnp.array([0])), ((), ())),
  ),
  "numbers NumPy": (
    normal(3, 4),
    normal(4, 5),
    (((np.int64(1),), (np.uint8(0),)), ((), ())),
  ),
  "numbers ranges": (
    normal(3, 4),
    normal(4, 5),
    ((range(1, 2), range(1)), (range(0), range(0))),
  ),
  "weak": (jnp.full((2, 2), 1.0), jnp.full((2, 2), 3.0), _MATRICES),
  "weak and strong": (jnp.full((2, 2), 1.0), normal(2, 2), _MATRICES),
  "weak and half": (
    jnp.full((2, 2), 1.0),
    normal(2, 2, dtype="bfloat16"),
    _MATRICES,
  ),
  "weak to int32": (
    jnp.full((2, 2), 1.0),
    jnp.full((2, 2), 3.0),
    _MATRICES,
    None,
    "int32",
  ),
  "weak integers": (jnp.full((2, 2), 1), jnp.full((2, 2), 3), _MATRICES),
  "a number": (2.0, normal(2, 2), (((), ()), ((), ()))),
  "two numbers": (2, 3, (((), ()), ((), ()))),
}


@pytest.mark.parametrize("name", LIKE_LAX)
@pytest.mark.parametrize("wide", (False, True), ids=("x32", "x64"))
def test_like_lax(name, wide):
  with jax.enable_x64(wide):
    call = drop_in.Call(LIKE_LAX[name], {})
    want = drop_in.outcome(lax.dot_general, call)
    assert not isinstance(want, Exception), want
    got = drop_in.outcome(pallas_gemm.dot_general, call)
    drop_in.assert_alike(got, want, call)


@pytest.mark.parametrize("index", oldest.half(range(200)))
@pytest.mark.parametrize("wide", (False, True), ids=("x32", "x64"))
def test_random_calls_like_lax(index, wide):
  with jax.enable_x64(wide):
    call = drop_in.dot_general(index)
    want = drop_in.outcome(lax.dot_general, call)
    got = drop_in.outcome(pallas_gemm.dot_general, call)
    drop_in.assert_alike(got, want, call)


def test_random_calls_are_of_both_kinds():
  """About a third is refused by lax, and what it refuses differs."""
  raised = []
  for index in range(200):
    call = drop_in.dot_general(index)
    try:
      jax.eval_shape(
        lambda *x, call=call: lax.dot_general(
          *x, *call.arguments[2:], **call.keywords
        ),
        *call.arguments[:2],
      )
    except (TypeError, ValueError) as error:
      raised.append(str(error))
  assert 60 <= len(raised) <= 120
  assert len(set(raised)) >= 40


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
    # Both are called _dot_general: our own is compiled by itself.
    assert "name=_dot_general" in str(jax.make_jaxpr(loss(injected))(variables))


def test_flax_nnx():
  x = normal(2, 4, 5)
  plain = nnx.Linear(5, 6, rngs=nnx.Rngs(0))
  injected = nnx.Linear(
    5, 6, rngs=nnx.Rngs(0), dot_general=pallas_gemm.dot_general
  )
  np.testing.assert_array_equal(injected(x), plain(x))
