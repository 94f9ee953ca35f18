"""How calls of the ops behave: without jit, compiled how often, and warned of.

What a call computes is in the other tests of the ops.
"""

import functools
import re

from absl import logging
import jax
from jax import export, lax, monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import hardware, report, tuning
from tests.support import mistakes, ops, products
from tests.support.mistakes import BIAS, CALLS, INTS, LHS, RHS, SIZES, A, B, C
from tests.support.ops import NUMBERS

MATMUL = pallas_gemm.matmul
HALF, HALF_WEIGHT = A.astype("bfloat16"), B.astype("bfloat16")
close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)


def like(got, want):
  """Of one type, weak ones too, and close."""
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    x, y = map(jnp.asarray, (x, y))
    assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
    close(*ops.float32(x, y))


# What is an array, and what is no mistake.


class Array:
  """What says how it becomes an array."""

  def __init__(self, array):
    self.array = jnp.asarray(array)

  def __jax_array__(self):
    return self.array


@pytest.mark.parametrize(("op", "argument"), mistakes.ARRAYS)
def test_what_becomes_an_array(op, argument):
  f, call = getattr(pallas_gemm, op), CALLS[op]
  want = f(**call)
  for make in (np.asarray, Array):
    out = f(**call | {argument: make(call[argument])})
    np.testing.assert_array_equal(out, want)


def test_what_is_no_mistake():
  """Near misses of what is."""
  half, config = functools.partial(jnp.multiply, 0.5), tuning.Config()
  matmul = functools.partial(pallas_gemm.matmul, A, B)
  of_ints = functools.partial(pallas_gemm.matmul, INTS, INTS)
  for f, want in (
    (functools.partial(matmul, alpha=float("nan")), jnp.nan * A @ B),
    (functools.partial(matmul, alpha=jnp.array(2), beta=1), 2 * A @ B),
    (functools.partial(matmul, alpha=Array(2.0)), 2 * A @ B),
    (functools.partial(matmul, implementation=["triton", "xla"]), A @ B),
    (functools.partial(matmul, config=config), A @ B),  # for GPUs alone
    (functools.partial(matmul, transpose_a=False, bias=None), A @ B),
    (functools.partial(of_ints, alpha=2.0), 2 * INTS @ INTS),
    (functools.partial(of_ints, alpha=np.int8(2)), 2 * INTS @ INTS),
  ):
    like(f(), want)
  matmul(activation=half, precision=["high", "highest"])
  gated = pallas_gemm.gated_matmul(A, B, B, out_dtype=np.dtype("float16"))
  assert (
    gated.dtype == "float16"
    and matmul(out_dtype=jnp.float16).dtype == "float16"
  )
  for numbers in ([[[1], [0]], [[], []]], NUMBERS):
    like(pallas_gemm.dot_general(A, B, numbers, out_sharding=None), A @ B)
  want = lax.ragged_dot(LHS, RHS, SIZES)
  ragged_dot = functools.partial(pallas_gemm.ragged_dot, LHS, RHS)
  like(ragged_dot(np.array([2, 3, 4], np.uint8)), want)
  like(ragged_dot(SIZES, group_offset=np.int16(0)), want)
  like(ragged_dot(SIZES, ["high", "highest"]), want)
  like(ragged_dot(SIZES, config=config), want)
  ragged_dot(SIZES, preferred_element_type="int32", transpose_rhs=False)
  lhs, rhs = LHS.astype("bfloat16"), RHS.astype("bfloat16")
  pallas_gemm.ragged_dot(lhs, rhs, SIZES, bias=RHS[:, 0])
  lhs, rhs = LHS.astype(int), RHS.astype(int)
  out = pallas_gemm.ragged_dot(lhs, rhs, SIZES, implementation=["sm90", "xla"])
  like(out, lax.ragged_dot(lhs, rhs, SIZES))


def test_errors_say_the_same_under_jit_and_without():
  with pytest.raises(ValueError, match="b must have K = 6 like a"):
    jax.jit(pallas_gemm.matmul)(A, A)
  with jax.disable_jit():
    with pytest.raises(ValueError, match="b must have K = 6 like a"):
      pallas_gemm.matmul(A, A)
    with pytest.raises(TypeError, match="lhs must be an array, got list"):
      pallas_gemm.ragged_dot([[1.0]], RHS, SIZES)
    with pytest.raises(TypeError, match="activation must"):
      pallas_gemm.matmul(A, B, activation=jax.nn.softmax)


# Without jit, and promotion.


@ops.each({x: ops.EVERY[x] for x in ops.EVERY if re.search("epil|gener", x)})
def test_without_jit(op):
  """Nor is any rank promoted."""
  args = op.args(dtype="float32")
  want = op.plain(*args), ops.value_and_gradients(op.plain, args)
  with jax.disable_jit(), jax.numpy_rank_promotion("raise"):
    got = op.ours(*args), ops.value_and_gradients(op.ours, args)
  like(got, want)


WITHOUT_JIT = {
  "group_offset": lambda: pallas_gemm.ragged_dot(
    LHS, RHS[1:], SIZES, group_offset=1
  ),
  "a bias of NumPy's": lambda: pallas_gemm.matmul(A, B, bias=np.ones(8)),
  "numbers": lambda: pallas_gemm.dot_general(2.0, 3.0, (((), ()), ((), ()))),
  "integers": lambda: jax.vmap(MATMUL, (0, None))(INTS[None], INTS),
}


@pytest.mark.parametrize("call", WITHOUT_JIT.values(), ids=WITHOUT_JIT)
def test_what_jit_makes_arrays_of_without_jit(call):
  want = call()
  with jax.disable_jit():
    like(call(), want)


@pytest.mark.parametrize("dtype", ("bfloat16", "float8_e4m3fn"))
def test_strict_promotion(dtype):
  """Of operands it is an error, as JAX's; bias and C are promoted by none."""
  a, b = A.astype(dtype), B.astype(dtype)
  with jax.numpy_dtype_promotion("strict"):
    out = pallas_gemm.matmul(a, b, bias=jnp.ones(8), c=jnp.ones((4, 8)))
    with pytest.raises(ValueError, match="dtype promotion path"):
      pallas_gemm.matmul(a, B)
  assert out.dtype == dtype


# Without weak integers and int8, which jnp.matmul refuses.
WEAK = [
  (first, second)
  for first in (1, 1.0, 1j)
  for second in (1, 1.0, "int8", "bfloat16", "float32")
  if (repr(first), second) != ("1", "int8")
]


@pytest.mark.parametrize(("first", "second"), WEAK)
def test_weak_types_are_those_of_jnp(first, second):
  a, is_dtype = jnp.full((2, 3), first), isinstance(second, str)
  b = jnp.ones((3, 4), second) if is_dtype else jnp.full((3, 4), second)
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


class _Leaky:
  """A new one for each call, as in a module that is made anew."""

  __hash__ = None

  def __call__(self, x):
    return _leaky(x, 0.1)


WAYS = {
  "lambda": lambda: lambda x: x * jnp.tanh(x),
  "partial": lambda: functools.partial(_leaky, slope=0.1),
  "object": _Leaky,
  "jit": lambda: jax.jit(lambda x: x * jnp.tanh(x)),
}
NUMBERS_OF_A_CALL = {
  "alpha": lambda i: {"alpha": 0.5 + i},
  "beta": lambda i: {"c": C, "beta": 0.3 * (i + 1)},
  "NumPy alpha": lambda i: {"alpha": np.float32(0.5 + i)},
  "array alpha": lambda i: {"alpha": jnp.asarray(np.float32(0.5 + i))},
  "all": lambda i: {
    "c": C,
    "alpha": 0.5 + i,
    "beta": 0.3 * (i + 1),
    "activation": WAYS["partial"](),
  },
}


@pytest.mark.parametrize(("op", "way"), [*zip(mistakes.ACTIVATED, WAYS)])
def test_activations_compile_once(compiled, op, way):
  functions = [WAYS[way]() for _ in range(4)]
  del compiled[:]
  for f in functions:
    getattr(pallas_gemm, op)(**CALLS[op] | {"activation": f})
  assert len(compiled) <= 1, compiled


@pytest.mark.parametrize("way", NUMBERS_OF_A_CALL)
def test_numbers_compile_once(compiled, way):
  keywords = [NUMBERS_OF_A_CALL[way](i) for i in range(4)]
  del compiled[:]
  for each in keywords:
    pallas_gemm.matmul(A, B, **each)
  assert len(compiled) == 1, compiled


def test_what_compiles_again(compiled):
  """The counter counts: these two are not the same."""
  for activation in (jnp.tanh, jnp.sin):
    pallas_gemm.matmul(A, B, activation=activation)
  assert len(compiled) == 2


def test_sizes_of_groups_compile_once(compiled):
  sizes = [jnp.array(x) for x in ([1, 3, 5], [4, 0, 0], [0, 0, 0])]
  del compiled[:]
  for each in sizes:
    pallas_gemm.ragged_dot(LHS, RHS, each)
  assert len(compiled) == 1, compiled


# Warnings.


@pytest.fixture(name="warned")
def _warned(monkeypatch):
  """What is warned of, as if it were the first time in this process."""
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


@ops.each(ops.ACTIVATED | ops.DROP_INS)
def test_batch_invariance_is_xlas_product_off_hopper(warned, op):
  """With its gradients, and one warning inside of it alone."""
  args = op.args(dtype="float32")
  want = ops.value_and_gradients(op.ours, args)
  assert not warned
  with pallas_gemm.batch_invariant():
    got = ops.value_and_gradients(op.ours, args)
  jax.tree.map(np.testing.assert_array_equal, got, want)
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


@pytest.mark.parametrize("weight", ("int8", "uint8", "bool"))
def test_a_weight_that_is_converted_is_warned_of_once(warned, weight):
  """Again where the report starts anew."""
  b = jnp.round(B).astype(weight)
  for rows in (4, 3):
    out = pallas_gemm.matmul(HALF[:rows], b)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, jnp.matmul(HALF[:rows], b))
    jax.clear_caches()
  (message,) = warned
  assert "converted" in message and weight in message
  assert message.endswith("convert it once, if it is used again")
  report.reset()
  pallas_gemm.matmul(HALF, b)
  assert len(warned) == 2


# What `jax.linear_transpose` is asked of, and what is said of that.
_same = lambda v: v  # noqa: E731
NOT_LINEAR = {
  "in a and b together": [
    (MATMUL, (A, B)),
    (ops.DROP_INS["dot_general"].ours, (HALF, HALF_WEIGHT)),
    (lambda a, b: pallas_gemm.ragged_dot(a, b, SIZES), (LHS, RHS)),
    (jax.vmap(MATMUL), (A[None], B[None])),
  ],
  "in a and alpha together": [
    (lambda a, x: MATMUL(a, B, alpha=x), (A, jnp.float32(2))),
  ],
  "in beta and c together": [
    (lambda c, x: MATMUL(A, B, c=c, beta=x), (C, jnp.float32(2))),
  ],
  "in a and a together": [
    (lambda x: pallas_gemm.gated_matmul(x, B, B, activation=_same), (A,)),
  ],
  "behind an activation that is not": [
    (lambda b: MATMUL(A, b, activation=jnp.exp), (B,)),
    (lambda x: MATMUL(A, B, bias=x, activation=jax.nn.silu), (BIAS,)),
    (lambda b: pallas_gemm.gated_matmul(A, b, B), (B,)),
  ],
}


@pytest.mark.parametrize(
  ("words", "f", "args"),
  [(words, *case) for words, cases in NOT_LINEAR.items() for case in cases],
)
def test_linear_transpose_of_what_is_not_linear(words, f, args):
  with pytest.raises(ValueError, match=f"needs what is linear, .*not {words}"):
    jax.linear_transpose(f, *args)(f(*args))


@pytest.mark.parametrize("names", (("b", "bias"), ("a", "c"), ("bias", "c")))
def test_linear_transpose_over_sums(names):
  """It is linear in one factor and in what is added, as in jnp."""
  with jax.enable_x64(True):
    x = dict(zip(("a", "b", "bias", "c"), ops.ADDED.args()))
    args = [x[name] for name in names]
    ours, want = (
      lambda *v, f=f: f(**x | dict(zip(names, v)))
      for f in (ops.dense, ops.plain)
    )
    got = jax.linear_transpose(ours, *args)(x["c"])
    products.assert_same(got, jax.vjp(want, *args)[1](x["c"]))
