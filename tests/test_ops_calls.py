"""How calls of the ops behave: without jit, compiled how often, and warned of.

What a call computes is in the other tests of the ops.
"""

import functools

from absl import logging
import jax
from jax import export, lax, monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import hardware
from tests.support import products
from tests.support.products import normal

A, B, C = normal(4, 6), normal(6, 8), normal(4, 8)
LHS, RHS, SIZES = normal(4, 6), normal(2, 6, 8), jnp.array([1, 3])
NUMBERS = (((1,), (0,)), ((), ()))
RAGGED_NUMBERS = lax.RaggedDotDimensionNumbers(
  (((1,), (1,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(0,),
)
# Each op of two arrays, and the same with jax.numpy and jax.lax.
OPS = {
  "matmul": (
    lambda a, b: pallas_gemm.matmul(
      a, b, c=C, alpha=0.5, beta=2.0, bias=B[0], activation=jnp.tanh
    ),
    lambda a, b: jnp.tanh(0.5 * (a @ b) + 2 * C + B[0]),
    (A, B),
  ),
  "plain matmul": (pallas_gemm.matmul, jnp.matmul, (A, B)),
  "gated_matmul": (
    lambda a, b: pallas_gemm.gated_matmul(a, b, 2 * b),
    lambda a, b: jax.nn.silu(a @ b) * (a @ (2 * b)),
    (A, B),
  ),
  "dot_general": (
    lambda a, b: pallas_gemm.dot_general(a, b, NUMBERS),
    jnp.matmul,
    (A, B),
  ),
  "ragged_dot": (
    lambda a, b: pallas_gemm.ragged_dot(
      a, b, SIZES, bias=b[:, 0], activation=jnp.tanh
    ),
    lambda a, b: jnp.tanh(
      lax.ragged_dot(a, b, SIZES) + jnp.repeat(b[:, 0], SIZES, axis=0)
    ),
    (LHS, RHS),
  ),
  "ragged_dot with offset": (
    lambda a, b: pallas_gemm.ragged_dot(
      a, b[1:], SIZES, group_offset=jnp.array(1)
    ),
    lambda a, b: lax.ragged_dot(a, b.at[0].set(0), SIZES),
    (LHS, RHS),
  ),
  "gated_ragged_dot": (
    lambda a, b: pallas_gemm.gated_ragged_dot(a, b, 2 * b, SIZES),
    lambda a, b: (
      jax.nn.silu(lax.ragged_dot(a, b, SIZES)) * lax.ragged_dot(a, 2 * b, SIZES)
    ),
    (LHS, RHS),
  ),
  "ragged_dot_general": (
    lambda a, b: pallas_gemm.ragged_dot_general(a, b, SIZES, RAGGED_NUMBERS),
    lambda a, b: lax.ragged_dot(a, b, SIZES),
    (LHS, RHS),
  ),
}


@pytest.mark.parametrize("name", OPS)
def test_without_jit(name):
  ours, reference, arrays = OPS[name]

  def step(f):
    return jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), (0, 1))

  want, want_out = step(reference)(*arrays), reference(*arrays)
  with jax.disable_jit():
    out = ours(*arrays)
    got = step(ours)(*arrays)
  assert out.dtype == want_out.dtype and out.shape == want_out.shape
  np.testing.assert_allclose(out, want_out, rtol=1e-4, atol=1e-5)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4),
    got,
    want,
  )


WITHOUT_JIT = {
  "group_offset": lambda: pallas_gemm.ragged_dot(
    LHS, RHS[1:], SIZES, group_offset=1
  ),
  "a bias of NumPy's": lambda: pallas_gemm.matmul(A, B, bias=np.ones(8)),
  "numbers": lambda: pallas_gemm.dot_general(2.0, 3.0, (((), ()), ((), ()))),
}


@pytest.mark.parametrize("call", WITHOUT_JIT.values(), ids=WITHOUT_JIT)
def test_what_jit_makes_arrays_of_without_jit(call):
  want = call()
  with jax.disable_jit():
    got = call()
  assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
  np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("name", OPS)
def test_no_rank_is_promoted(name):
  ours, _, arrays = OPS[name]
  with jax.numpy_rank_promotion("raise"):
    jax.grad(lambda *x: ours(*x).sum(), (0, 1))(*arrays)


@pytest.mark.parametrize("dtype", ("bfloat16", "float8_e4m3fn"))
def test_no_dtype_of_bias_and_c_is_promoted(dtype):
  a, b = A.astype(dtype), B.astype(dtype)
  with jax.numpy_dtype_promotion("strict"):
    out = pallas_gemm.matmul(a, b, bias=jnp.ones(8), c=jnp.ones((4, 8)))
  assert out.dtype == dtype


def test_a_factor_may_be_a_parameter_of_a_module():
  class Parameter:
    def __jax_array__(self):
      return jnp.float32(2)

  got = pallas_gemm.matmul(A, B, alpha=Parameter())
  np.testing.assert_array_equal(got, pallas_gemm.matmul(A, B, alpha=2.0))


def test_errors_without_jit():
  with jax.disable_jit():
    with pytest.raises(ValueError, match="b must have K = 6 like a"):
      pallas_gemm.matmul(A, A)
    with pytest.raises(TypeError, match="lhs must be an array, got list"):
      pallas_gemm.ragged_dot([[1.0]], RHS, SIZES)
    with pytest.raises(TypeError, match="activation must"):
      pallas_gemm.matmul(A, B, activation=jax.nn.softmax)


@pytest.mark.parametrize("dtype", ("bfloat16", "int8"))
def test_other_dtypes_without_jit(dtype):
  a, b = (jnp.round(x).astype(dtype) for x in (A, B))
  want = jnp.matmul(a, b)
  with jax.disable_jit():
    out = pallas_gemm.matmul(a, b)
    vmapped = jax.vmap(pallas_gemm.matmul, (0, None))(a[None], b)[0]
  np.testing.assert_array_equal(out, want)
  np.testing.assert_array_equal(vmapped, want)


# Weak types.


# Without weak integers and int8, which jnp.matmul refuses.
WEAK = [
  (first, second)
  for first in (1, 1.0, 1j)
  for second in (1, 1.0, "int8", "bfloat16", "float32")
  if (repr(first), second) != ("1", "int8")
]


@pytest.mark.parametrize(("first", "second"), WEAK)
def test_weak_types_are_those_of_jnp(first, second):
  a = jnp.full((2, 3), first)
  b = (
    jnp.ones((3, 4), second)
    if isinstance(second, str)
    else jnp.full((3, 4), second)
  )
  assert a.weak_type
  for x, y in ((a, b), (b.T, a.T), (a, np.asarray(b))):
    out, want = pallas_gemm.matmul(x, y), jnp.matmul(x, y)
    assert (out.dtype, out.weak_type) == (want.dtype, want.weak_type)
    np.testing.assert_array_equal(out, want)
    jitted = jax.eval_shape(pallas_gemm.matmul, x, y)
    assert (jitted.dtype, jitted.weak_type) == (want.dtype, want.weak_type)


def test_a_dtype_that_is_asked_for_is_not_weak():
  a = jnp.full((2, 2), 1.0)
  out = pallas_gemm.matmul(a, a, out_dtype="float32")
  want = jnp.matmul(a, a, preferred_element_type="float32")
  assert out.weak_type == want.weak_type == False  # noqa: E712


# Compilations.


@pytest.fixture(name="compiled")
def _compiled():
  """What has been compiled since; nothing is at first."""
  names = []

  def listen(event, seconds, **keywords):
    del seconds
    if event == "/jax/core/compile/backend_compile_duration":
      names.append(keywords.get("fun_name"))

  jax.clear_caches()
  monitoring.register_event_duration_secs_listener(listen)
  yield names
  monitoring.unregister_event_duration_listener(listen)
  jax.clear_caches()


def _leaky(x, slope):
  return jnp.where(x > 0, x, slope * x)


WAYS = {
  "lambda": lambda i: {"activation": lambda x: x * jnp.tanh(x)},
  "partial": lambda i: {"activation": functools.partial(_leaky, slope=0.1)},
  "object": lambda i: {"activation": _Leaky()},
  "jit": lambda i: {"activation": jax.jit(lambda x: x * jnp.tanh(x))},
}
NUMBER_WAYS = {
  "alpha": lambda i: {"alpha": 0.5 + i},
  "beta": lambda i: {"c": C, "beta": 0.3 * (i + 1)},
  "NumPy alpha": lambda i: {"alpha": np.float32(0.5 + i)},
  "array alpha": lambda i: {"alpha": jnp.asarray(np.float32(0.5 + i))},
  "all": lambda i: {
    "c": C,
    "alpha": 0.5 + i,
    "beta": 0.3 * (i + 1),
    "activation": functools.partial(_leaky, slope=0.1),
  },
}


class _Leaky:
  """A new one for each call, as in a module that is made anew."""

  __hash__ = None

  def __call__(self, x):
    return _leaky(x, 0.1)


def _calls_compile_once(compiled, f, keywords):
  keywords = [keywords(i) for i in range(4)]
  del compiled[:]
  for each in keywords:
    jax.block_until_ready(f(**each))
  assert len(compiled) == 1, compiled


@pytest.mark.parametrize("way", WAYS | NUMBER_WAYS)
def test_matmul_compiles_once(compiled, way):
  f = functools.partial(pallas_gemm.matmul, A, B)
  _calls_compile_once(compiled, f, (WAYS | NUMBER_WAYS)[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
  "op",
  (
    functools.partial(pallas_gemm.gated_matmul, A, B, B),
    functools.partial(pallas_gemm.ragged_dot, LHS, RHS, SIZES),
    functools.partial(pallas_gemm.gated_ragged_dot, LHS, RHS, RHS, SIZES),
  ),
  ids=("gated_matmul", "ragged_dot", "gated_ragged_dot"),
)
def test_other_ops_compile_once(compiled, op, way):
  _calls_compile_once(compiled, op, WAYS[way])


def test_what_compiles_again(compiled):
  """The counter counts: these two are not the same."""
  for activation in (jnp.tanh, jnp.sin):
    pallas_gemm.matmul(A, B, activation=activation)
  assert len(compiled) == 2


def test_sizes_of_groups_compile_once(compiled):
  sizes = [jnp.array(x) for x in ([1, 3], [4, 0], [0, 0])]
  del compiled[:]
  for each in sizes:
    pallas_gemm.ragged_dot(LHS, RHS, each)
  assert len(compiled) == 1, compiled


# Warnings.


@pytest.fixture(name="warned")
def _warned(monkeypatch):
  """What is warned of, as if it were the first time in this process."""
  from pallas_gemm import report

  messages = []
  monkeypatch.setattr(
    logging,
    "warning",
    lambda form, *args: messages.append(form % args if args else form),
  )
  report.reset()
  jax.clear_caches()
  yield messages
  report.reset()
  jax.clear_caches()


HALF, HALF_WEIGHT = A.astype("bfloat16"), B.astype("bfloat16")


def test_batch_invariance_off_hopper_is_xlas_product(warned):
  want = pallas_gemm.matmul(HALF, HALF_WEIGHT)
  assert not warned
  with pallas_gemm.batch_invariant():
    out = pallas_gemm.matmul(HALF, HALF_WEIGHT)
  np.testing.assert_array_equal(out, want)
  (message,) = warned
  assert "batch invariant" in message.replace("-", " ").replace("_", " ")


def test_batch_invariance_is_warned_of_once(warned):
  with pallas_gemm.batch_invariant():
    for rows in (4, 3, 2):
      pallas_gemm.matmul(HALF[:rows], HALF_WEIGHT)
      jax.jit(pallas_gemm.matmul)(HALF[:rows], HALF_WEIGHT)
      jax.clear_caches()
    pallas_gemm.matmul(HALF, HALF_WEIGHT, implementation="xla")
  assert len(warned) == 1


@pytest.mark.parametrize("name", OPS)
def test_batch_invariance_raises_for_no_op(warned, name):
  ours, reference, arrays = OPS[name]
  with pallas_gemm.batch_invariant():
    out = ours(*arrays)
    grads = jax.grad(lambda *x: ours(*x).sum(), (0, 1))(*arrays)
  np.testing.assert_allclose(out, reference(*arrays), rtol=1e-4, atol=1e-5)
  want = jax.grad(lambda *x: reference(*x).sum(), (0, 1))(*arrays)
  for x, y in zip(grads, want):
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
  assert len(warned) == 1


def test_a_promise_that_is_not_kept_is_not_exported_for_a_gpu():
  f = jax.jit(lambda a, b: pallas_gemm.dot_general(a, b, NUMBERS))
  with hardware.assume("NVIDIA H200"), pallas_gemm.batch_invariant():
    with pytest.raises(NotImplementedError, match="batch invariant"):
      export.export(f, platforms=("cuda",))(A, B)


def test_what_is_left_to_lax_is_warned_of(warned):
  with pallas_gemm.batch_invariant():
    out = pallas_gemm.dot_general(HALF, B, NUMBERS)
    batched = pallas_gemm.dot_general(
      A[None], B[None], (((2,), (1,)), ((0,), (0,)))
    )
  np.testing.assert_array_equal(out, lax.dot_general(HALF, B, NUMBERS))
  products.assert_product(batched[0], A, B)
  assert 1 <= len(warned) <= 2


def test_outside_of_batch_invariance_nothing_is_warned_of(warned):
  for ours, _, arrays in OPS.values():
    ours(*arrays)
  pallas_gemm.matmul(HALF, HALF_WEIGHT)
  assert not warned


@pytest.mark.parametrize("weight", ("int8", "uint8"))
def test_a_weight_that_is_converted_is_warned_of_once(warned, weight):
  b = jnp.round(B).astype(weight)
  for rows in (4, 3):
    out = pallas_gemm.matmul(HALF[:rows], b)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, jnp.matmul(HALF[:rows], b))
    jax.clear_caches()
  (message,) = warned
  assert "converted" in message and weight in message


def test_report_starts_anew(warned):
  from pallas_gemm import report

  b = jnp.round(B).astype("int8")
  for _ in range(2):
    pallas_gemm.matmul(HALF, b)
    report.reset()
    jax.clear_caches()
  assert len(warned) == 2
