"""ragged_dot_general against jax.lax.ragged_dot_general."""

import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report
from tests.support import drop_in, oldest, products, ragged
from tests.support.products import normal


def numbers(contract, ragged_dim, group, batch=((), ())):
  return lax.RaggedDotDimensionNumbers((contract, batch), ragged_dim, group)


# Shapes of lhs and rhs, dimension numbers, the same as an einsum with which row
# (r) is in which group (g), and whether operands are transposed.
GENERAL = {
  "rows": (
    ((9, 5), (3, 5, 4)),
    numbers(((1,), (1,)), (0,), (0,)),
    "rg,rk,gkn->rn",
    False,
  ),
  "rhs transposed": (
    ((9, 5), (3, 4, 5)),
    numbers(((1,), (2,)), (0,), (0,)),
    "rg,rk,gnk->rn",
    False,
  ),
  "columns": (
    ((5, 9), (3, 5, 4)),
    numbers(((0,), (1,)), (1,), (0,)),
    "rg,kr,gkn->rn",
    True,
  ),
  "groups last": (
    ((9, 5), (5, 4, 3)),
    numbers(((1,), (0,)), (0,), (2,)),
    "rg,rk,kng->rn",
    True,
  ),
  "groups between": (
    ((9, 5), (4, 3, 5)),
    numbers(((1,), (2,)), (0,), (1,)),
    "rg,rk,ngk->rn",
    True,
  ),
  "sums": (
    ((9, 5), (9, 4)),
    numbers(((0,), (0,)), (0,), ()),
    "rg,rm,rn->gmn",
    False,
  ),
  "sums of columns": (
    ((5, 9), (4, 9)),
    numbers(((1,), (1,)), (1,), ()),
    "rg,mr,nr->gmn",
    True,
  ),
}
LEFT_TO_LAX = {
  "batch": (
    (2, 9, 5),
    (3, 2, 5, 4),
    numbers(((2,), (2,)), (1,), (0,), ((0,), (1,))),
    "batch dimensions",
  ),
  "ragged batch": (
    (9, 6, 5),
    (9, 5, 4),
    numbers(((2,), (1,)), (0,), (), ((0,), (0,))),
    "batch dimensions",
  ),
  "two contracted": (
    (9, 5, 2),
    (3, 5, 2, 4),
    numbers(((1, 2), (1, 2)), (0,), (0,)),
    "contracts 2",
  ),
  "two free": (
    (9, 5),
    (3, 5, 4, 2),
    numbers(((1,), (1,)), (0,), (0,)),
    r"must have ranks \(2, 3\), got \(2, 4\)",
  ),
}


@pytest.mark.parametrize("name", GENERAL)
def test_general(name):
  shapes, numbers, subscripts, transposes = GENERAL[name]
  sizes = jnp.array([4, 0, 3])
  with jax.enable_x64(True):
    lhs, rhs = (normal(*shape, dtype="float64") for shape in shapes)
    weights = ragged.membership(9, sizes).astype("float64")

    def ours(lhs, rhs):
      return pallas_gemm.ragged_dot_general(lhs, rhs, sizes, numbers)

    def reference(lhs, rhs):
      return jnp.einsum(subscripts, weights, lhs, rhs)

    def loss(f):
      return lambda lhs, rhs: (f(lhs, rhs) ** 2).sum()

    got = jax.jit(jax.value_and_grad(loss(ours), (0, 1)))(lhs, rhs)
    want = jax.jit(jax.value_and_grad(loss(reference), (0, 1)))(lhs, rhs)
    products.assert_same(got, want)
    jaxpr = str(jax.make_jaxpr(ours)(lhs, rhs))
    assert "pallas_gemm[" in jaxpr
    text = jax.jit(ours).lower(lhs, rhs).as_text()
    assert ("stablehlo.transpose" in text) == transposes


@pytest.mark.parametrize("name", LEFT_TO_LAX)
def test_general_left_to_lax(name, monkeypatch):
  said = []
  monkeypatch.setattr(report, "log_once", said.append)
  jax.clear_caches()
  lhs_shape, rhs_shape, numbers, reason = LEFT_TO_LAX[name]
  lhs, rhs, sizes = normal(*lhs_shape), normal(*rhs_shape), jnp.array([4, 0, 3])
  arguments = lhs, rhs, sizes, numbers
  want = lax.ragged_dot_general(*arguments)
  for implementation in (None, "xla", ["sm90", "xla"]):
    out = pallas_gemm.ragged_dot_general(
      *arguments, implementation=implementation
    )
    np.testing.assert_array_equal(out, want)
  for message in said:
    assert re.search(f"runs on jax.lax: .*{reason}", message)
  assert said
  for keywords in ({"implementation": "sm90"}, {"group_offset": 0}):
    with pytest.raises(NotImplementedError, match=reason):
      pallas_gemm.ragged_dot_general(*arguments, **keywords)


def test_general_with_sizes_of_each_batch():
  *shapes, numbers, _ = LEFT_TO_LAX["batch"]
  lhs, rhs = (normal(*shape) for shape in shapes)
  sizes = jnp.array([[4, 0, 3], [1, 2, 3]])
  want = lax.ragged_dot_general(lhs, rhs, sizes, numbers)
  out = pallas_gemm.ragged_dot_general(lhs, rhs, sizes, numbers)
  np.testing.assert_array_equal(out, want)


def test_general_with_offset_and_dtypes():
  case = ragged.Case(
    m=20,
    n=7,
    k=5,
    sizes=(3, 4, 6),
    offset=1,
    groups=2,
    dtype="bfloat16",
    out_dtype="float32",
  )
  x = case.operands()
  _, numbers, *_ = GENERAL["rows"]
  out = pallas_gemm.ragged_dot_general(
    *x.values(), jnp.asarray(case.sizes), numbers, "highest", "float32", 1
  )
  case.assert_right(out, x)
  mixed = x["lhs"], x["rhs"].astype("float32"), jnp.array([3, 4]), numbers
  out = pallas_gemm.ragged_dot_general(*mixed)
  want = lax.ragged_dot_general(*mixed)
  assert out.dtype == want.dtype
  np.testing.assert_array_equal(out, want)


# Other kinds and spellings, against jax.lax.

RANDOM = [
  (op, index)
  for op in ("ragged_dot", "ragged_dot_general")
  for index in range(30)
]


@pytest.mark.parametrize(("op", "index"), oldest.half(RANDOM))
@pytest.mark.parametrize("wide", (False, True), ids=("x32", "x64"))
def test_random_calls_like_lax(op, index, wide):
  with jax.enable_x64(wide):
    call = getattr(drop_in, op)(index)
    want = drop_in.outcome(getattr(lax, op), call)
    got = drop_in.outcome(getattr(pallas_gemm, op), call)
    # `ragged_dot` takes one rank alone, and says so in words of its own.
    if op == "ragged_dot" and call.arguments[0].ndim != 2:
      assert isinstance(got, TypeError | ValueError)
      return
    drop_in.assert_alike(got, want, call, any_class=op == "ragged_dot")


KINDS = (
  ("int8", "float32"),
  ("int8", "int32"),
  ("int8", "uint8"),
  ("uint8", "bfloat16"),
  ("int32", "float32"),
  ("bool", "int32"),
  ("bfloat16", "int32"),
  ("float32", "int32"),
  ("float32", "bfloat16"),
  ("float32", "complex64"),
  ("float8_e4m3fn", "float32"),
  ("int4", "float32"),
)


@pytest.mark.parametrize(("dtype", "to"), KINDS)
@pytest.mark.parametrize("op", ("ragged_dot", "ragged_dot_general"))
def test_kinds_of_results_are_those_of_lax(op, dtype, to):
  lhs, rhs = (
    jnp.round(2 * normal(*shape)).astype(dtype) for shape in ((9, 5), (3, 5, 4))
  )
  arguments = (lhs, rhs, jnp.array([4, 0, 3]))
  if op == "ragged_dot_general":
    arguments += (numbers(((1,), (1,)), (0,), (0,)),)
  call = drop_in.Call(arguments, {"preferred_element_type": to})
  want = drop_in.outcome(getattr(lax, op), call)
  assert not isinstance(want, Exception), want
  got = drop_in.outcome(getattr(pallas_gemm, op), call)
  drop_in.assert_alike(got, want, call)


@pytest.mark.parametrize("weak", ("lhs", "rhs", "both"))
@pytest.mark.parametrize("op", ("ragged_dot", "ragged_dot_general"))
def test_weak_types_are_those_of_lax(op, weak):
  lhs, rhs = normal(9, 5), normal(3, 5, 4)
  lhs = jnp.full_like(lhs, 1.0) if weak == "rhs" else jnp.full(lhs.shape, 1.0)
  rhs = jnp.full_like(rhs, 1.0) if weak == "lhs" else jnp.full(rhs.shape, 1.0)
  arguments = (lhs, rhs, jnp.array([4, 0, 3]))
  if op == "ragged_dot_general":
    arguments += (numbers(((1,), (1,)), (0,), (0,)),)
  call = drop_in.Call(arguments, {})
  want = drop_in.outcome(getattr(lax, op), call)
  got = drop_in.outcome(getattr(pallas_gemm, op), call)
  drop_in.assert_alike(got, want, call)
