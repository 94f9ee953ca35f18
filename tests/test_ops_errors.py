"""Arguments that do not fit together, and what is wrong in no op."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from pallas_gemm.kernels import triton_dense
from tests.support import products
from tests.support.mistakes import (
  ACTIVATED,
  CALLS,
  INTS,
  LHS,
  NUMBERS,
  RHS,
  SIZES,
  SQUARE,
  A,
  B,
  C,
  ragged_numbers,
  takes,
  told,
)
from tests.support.ops import dense, n64, plain

CONFIG, TRITON = tuning.Config(), triton_dense.Config(16, 16, 16)
INTEGERS = {"a": INTS, "b": INTS, "bias": None, "c": INTS}
INT_GROUPS = LHS.astype(int), RHS.astype(int), SIZES
FEW = {"group_sizes": SIZES, "group_offset": None}
MISTAKES = {
  "matmul": [
    ("ValueError: a must have rank 1 or more, got a scalar", {"a": 2.0}),
    ("ValueError: b must have rank 1 or more", {"b": jnp.ones(())}),
    ("ValueError: b must have K = 6 like a, got K = 4", {"b": SQUARE}),
    ("ValueError: b must have K = 4 like a, got K = 6", {"transpose_a": True}),
    ("ValueError: b must have K = 6 like a, got K = 8", {"transpose_b": True}),
    ("ValueError: b must have K = 3 like a, got K = 6", {"a": jnp.ones(3)}),
    (
      "ValueError: batch dimensions of b must broadcast against those of a",
      {"a": jnp.ones((2, 4, 6)), "b": jnp.ones((3, 6, 8))},
    ),
    (
      "ValueError: transpose_a needs a of rank 2",
      {"a": jnp.ones(6), "transpose_a": True},
    ),
    (
      "ValueError: transpose_b needs b of rank 2",
      {"b": jnp.ones(6), "transpose_b": True},
    ),
    (
      "ValueError: bias must broadcast to the result's shape (4, 8), got (4,)",
      {"bias": jnp.ones(4)},
    ),
    ("ValueError: bias must broadcast", {"bias": jnp.ones((1, 1, 8))}),
    (
      "ValueError: bias must broadcast to the result's shape (4,), got (4, 2)",
      {"b": jnp.ones(6), "bias": jnp.ones((4, 2)), "c": None},
    ),
    ("TypeError: bias must have a dtype that fits", {"bias": jnp.arange(8)}),
    (
      "ValueError: c must broadcast to the result's shape (4, 8), got (8, 4)",
      {"c": jnp.ones((8, 4))},
    ),
    ("ValueError: c must broadcast", {"c": jnp.ones((2, 4, 8))}),
    ("TypeError: c must have a dtype that fits", {"c": C + 1j}),
    ("TypeError: c must have a dtype that fits", INTEGERS | {"c": SQUARE}),
    ("ValueError: beta is 0.5 but c is None; pass c", {"c": None, "beta": 0.5}),
    ("ValueError: beta is 0.0 but c is None; pass c", {"c": None, "beta": 0}),
    (
      "ValueError: beta is 0.5 but c is None",
      {"c": None, "beta": jnp.array(0.5)},
    ),
    ("TypeError: beta must be ...str", {"c": None, "beta": "2"}),
    ("TypeError: beta must be ...bool", {"c": None, "beta": True}),
    (
      "TypeError: activation must be elementwise, got reduce_max in it",
      {"activation": lambda x: x - x.max()},
    ),
    (
      "TypeError: activation must keep shape and dtype",
      INTEGERS | {"activation": jnp.tanh},
    ),
    *[
      (f"TypeError: out_dtype must be floating ...{x}", {"out_dtype": x})
      for x in ("int32", "complex64", "bool")
    ],
    (
      "TypeError: out_dtype must be integer",
      INTEGERS | {"out_dtype": "float32"},
    ),
    ("ValueError: config is one of 'triton', which", {"config": TRITON}),
  ],
  "gated_matmul": [
    ("ValueError: w_up must be float32[6, 8] like w_gate", {"w_up": B.T}),
    (
      "ValueError: w_up must be float32[6, 8] like w_gate, got bfloat16",
      {"w_up": B.astype("bfloat16")},
    ),
    ("ValueError: x must have rank 1 or more", {"x": 2.0}),
    ("ValueError: w_gate must have rank 1", {"w_gate": 2.0, "w_up": 2.0}),
    ("ValueError: w_gate must have K = 4 like x", {"x": SQUARE}),
    (
      "ValueError: batch dimensions of w_gate must broadcast ...those of x",
      {"x": jnp.ones((2, 4, 6)), "w_gate": RHS, "w_up": RHS},
    ),
    ("TypeError: out_dtype must be floating", {"out_dtype": int}),
    (
      "TypeError: activation must be a function, got None",
      {"activation": None},
    ),
    ("ValueError: config is one of 'triton', which", {"config": TRITON}),
  ],
  "dot_general": [
    *[
      ("...Error: dimension_numbers must be ((lhs ", {"dimension_numbers": x})
      for x in (
        3,
        "ab",
        (),
        {"contract": (1, 0)},
        (((1,), (0,)),),
        ((1,), (0,)),
        (((1,), (0,)), ((), ()), ()),
        (((1,), (0,), (0,)), ((), ())),
        (None, ((), ())),
        ((((1,),), ((0,),)), ((), ())),
        ((("1",), ("0",)), ((), ())),
        (((1.0,), (0.0,)), ((), ())),
        (np.array([[1.0], [0.0]]), np.zeros((2, 0), int)),
      )
    ],
    *[
      (
        "ValueError: jax.lax.dot: dimension_numbers must",
        {"dimension_numbers": None, "lhs": x},
      )
      for x in (jnp.ones((2, 4, 6)), jnp.ones(()))
    ],
  ],
  "ragged_dot": [
    ("ValueError: lhs must be [M, K], got shape (1, 9, 6)", {"lhs": LHS[None]}),
    ("ValueError: rhs must be [G, K, N], got shape (6, 8)", {"rhs": RHS[0]}),
    (
      "ValueError: rhs must be [G, N, K]",
      {"rhs": RHS[0], "transpose_rhs": True},
    ),
    (
      "ValueError: rhs must have K = 6 like lhs, got K = 5",
      {"rhs": RHS[:, :5]},
    ),
    (
      "ValueError: rhs must have K = 6 like lhs, got K = 8",
      {"transpose_rhs": True},
    ),
    (
      "ValueError: group_sizes must have rank 1, got shape ()",
      {"group_sizes": 9},
    ),
    (
      "ValueError: group_sizes must have rank 1, got shape (1, 3)",
      {"group_sizes": SIZES[None]},
    ),
    *[
      (
        f"ValueError: group_sizes must have 3 entries...got {count}; with"
        " group_offset it may have more",
        FEW | {"group_sizes": jnp.ones(count, int)},
      )
      for count in (0, 2, 4)
    ],
    (
      "ValueError: group_sizes must have 3 entries or more...got 2",
      {"group_sizes": SIZES[:2]},
    ),
    (
      "ValueError: bias must broadcast to [G, N] = (3, 8), got (3,)",
      {"bias": jnp.ones(3)},
    ),
    ("TypeError: bias must have a dtype", {"bias": jnp.ones((3, 8), int)}),
    *[
      (
        f"TypeError: preferred_element_type must be ...int32, got {x}",
        {"lhs": INTS, "rhs": jnp.stack([INTS] * 3), "bias": None}
        | {"preferred_element_type": x},
      )
      for x in ("bfloat16", "bool")
    ],
    (
      "TypeError: preferred_element_type float64 needs jax_enable_x64",
      {"preferred_element_type": "float64"},
    ),
    (
      "TypeError: config must be a tuning.Config, got Config",
      {"config": TRITON},
    ),
    (
      "TypeError: activation must keep shape and dtype",
      {"lhs": INTS, "rhs": jnp.stack([INTS] * 3), "activation": jnp.tanh},
    ),
  ],
  "gated_ragged_dot": [
    ("ValueError: x must be [M, K]", {"x": LHS[0]}),
    ("ValueError: w_gate must be [G, K, N]", {"w_gate": LHS, "w_up": LHS}),
    (
      "ValueError: w_up must be float32[3, 6, 8] ...got float32[3, 6, 7]",
      {"w_up": RHS[:, :, 1:]},
    ),
    (
      "ValueError: w_up must be float32[3, 6, 8] like w_gate, got bfloat16",
      {"w_up": RHS.astype("bfloat16")},
    ),
    ("ValueError: w_gate must have K = 5 like x", {"x": LHS[:, :5]}),
    (
      "ValueError: group_sizes must have 2 entries, as w_gate has groups",
      FEW | {"w_gate": RHS[1:], "w_up": RHS[1:]},
    ),
    (
      "TypeError: activation must be a function, got None",
      {"activation": None},
    ),
  ],
  "ragged_dot_general": [
    *[
      (
        "TypeError: ragged_dot_dimension_numbers must be a"
        f" jax.lax.RaggedDotDimensionNumbers, got {type(x).__name__}",
        {"ragged_dot_dimension_numbers": x},
      )
      for x in (NUMBERS, None, "mk,gkn->mn")
    ],
    (
      "ValueError: group_sizes must have 3 entries or more",
      {"group_sizes": SIZES[1:]},
    ),
  ],
}
for _op in ACTIVATED:
  _xla = {"config": CONFIG, "implementation": "xla"}
  MISTAKES[_op] += [("ValueError: config is one of 'sm90', which", _xla)]
for _op in CALLS:
  if takes(_op, "out_dtype"):
    _words = "TypeError: out_dtype float64 needs jax_enable_x64"
    MISTAKES[_op] += [(_words, {"out_dtype": "float64"})]
  elif takes(_op, "implementation"):
    _words = (
      "ValueError: implementation must be of ('sm90', 'xla'), got 'triton'"
    )
    MISTAKES[_op] += [(_words, {"implementation": "triton"})]


@pytest.mark.parametrize(
  ("op", "words", "changes"),
  [(op, *mistake) for op in MISTAKES for mistake in MISTAKES[op]],
)
def test_mistake(op, words, changes):
  told(words, op, **changes)


@pytest.mark.parametrize("op", ("matmul", "ragged_dot"))
def test_a_config_that_is_not_legal(op):
  how = {"config": tuning.Config(block_k=17), "implementation": "sm90"}
  half = {
    name: CALLS[op][name].astype("bfloat16")
    for name in ("a", "b", "lhs", "rhs")
    if name in CALLS[op]
  }
  words = "ValueError: config can't compute this product: block_k must be 64"
  told(words, op, **half, **how)


# Errors of lax.

OF_LAX = {
  "dot_general": [
    (A, B, (((2,), (0,)), ((), ()))),
    (A, B, (((1,), (-2,)), ((), ()))),
    (A, B, (((1, 1), (0, 1)), ((), ()))),
    (A, B, (((1, 0), (0,)), ((), ()))),
    (A, B, (((1,), (0,)), ((1,), (0,)))),
    (A, B, (((1,), (0,)), ((0,), ()))),
    (A, B, (((1,), ()), ((), ()))),
    (A, B, (((), ()), ((0,), (0,)))),
    (A, SQUARE, NUMBERS),
    (INTS, INTS, NUMBERS, None, "bfloat16"),
    (INTS, INTS, NUMBERS, None, bool),
  ],
  "ragged_dot_general": [
    (LHS[:, 1:], RHS, SIZES, ragged_numbers()),
    (LHS, RHS, jnp.ones(3), ragged_numbers()),
    (LHS, RHS, SIZES > 0, ragged_numbers()),
    (LHS, RHS, SIZES[1:], ragged_numbers()),
    (LHS, RHS, SIZES, ragged_numbers(group=())),
    (LHS, LHS, SIZES, ragged_numbers(((0,), (0,)), group=(1,))),
    (LHS, RHS, SIZES, ragged_numbers(group=(1,))),
    (LHS, RHS, SIZES, ragged_numbers(ragged=(0, 1))),
    (LHS, RHS, SIZES, ragged_numbers(ragged=(5,))),
    (*INT_GROUPS, ragged_numbers(), None, "bfloat16"),
  ],
}


@pytest.mark.parametrize(
  ("op", "arguments"), [(op, call) for op in OF_LAX for call in OF_LAX[op]]
)
def test_errors_that_are_those_of_lax(op, arguments):
  with pytest.raises((TypeError, ValueError)) as want:
    getattr(lax, op)(*arguments)
  with pytest.raises((TypeError, ValueError)) as got:
    getattr(pallas_gemm, op)(*arguments)
  assert got.type is want.type and str(got.value) == str(want.value)


# How calls are made.


def test_strict_promotion_is_that_of_jax():
  with jax.numpy_dtype_promotion("strict"):
    with pytest.raises(ValueError, match="dtype promotion path"):
      pallas_gemm.matmul(A, B.astype(jnp.bfloat16))


def test_errors_say_the_same_under_jit():
  with pytest.raises(ValueError, match="b must have K = 6 like a"):
    jax.jit(pallas_gemm.matmul)(A, SQUARE)


def test_what_is_no_mistake():
  """Near misses of the above."""
  half = functools.partial(jnp.multiply, 0.5)
  pallas_gemm.matmul(A, B, alpha=float("nan"))
  pallas_gemm.matmul(INTS, INTS, alpha=2.0)
  pallas_gemm.matmul(INTS, INTS, alpha=np.int8(2), beta=jnp.array(3), c=INTS)
  pallas_gemm.matmul(A, B, alpha=np.float32(2), beta=np.array(2.0), c=C)
  pallas_gemm.matmul(A, B, alpha=jnp.array(2), beta=1)
  pallas_gemm.matmul(A, B, implementation=["triton", "xla"])
  pallas_gemm.matmul(A, B, activation=half, precision=["high", "highest"])
  pallas_gemm.matmul(A, B, config=CONFIG)  # For GPUs alone.
  pallas_gemm.matmul(A, B, out_dtype=jnp.bfloat16)
  pallas_gemm.gated_matmul(A, B, B, out_dtype=np.dtype("float16"))
  pallas_gemm.matmul(A, B, transpose_a=False, transpose_b=False, bias=None)
  for numbers in ([[[1], [0]], [[], []]], NUMBERS):
    pallas_gemm.dot_general(A, B, numbers, out_sharding=None)
  ragged_dot = functools.partial(pallas_gemm.ragged_dot, LHS, RHS)
  ragged_dot(np.array([2, 3, 4], np.uint8))
  ragged_dot(SIZES, group_offset=np.int16(0))
  ragged_dot(SIZES, ["high", "highest"])
  ragged_dot(SIZES, config=CONFIG)
  ragged_dot(SIZES, preferred_element_type="int32", transpose_rhs=False)
  pallas_gemm.ragged_dot(
    LHS.astype("bfloat16"), RHS.astype("bfloat16"), SIZES, bias=RHS[:, 0]
  )
  pallas_gemm.ragged_dot(*INT_GROUPS, implementation=["sm90", "xla"])


# What `jax.linear_transpose` is asked of, and what is said of that.
NOT_LINEAR = {
  "in a and b together": [
    (pallas_gemm.matmul, (A, B)),
    (
      lambda a, b: pallas_gemm.dot_general(a, b, NUMBERS),
      (A.astype("bfloat16"), B.astype("bfloat16")),
    ),
    (lambda a, b: pallas_gemm.ragged_dot(a, b, SIZES), (LHS, RHS)),
    (jax.vmap(pallas_gemm.matmul), (A[None], B[None])),
  ],
  "in a and alpha together": [
    (lambda a, x: pallas_gemm.matmul(a, B, alpha=x), (A, jnp.float32(2))),
  ],
  "in beta and c together": [
    (lambda c, x: pallas_gemm.matmul(A, B, c=c, beta=x), (C, jnp.float32(2))),
  ],
  "in a and a together": [
    (
      lambda x: pallas_gemm.gated_matmul(x, B, B, activation=lambda v: v),
      (A,),
    ),
  ],
  "behind an activation that is not": [
    (lambda b: pallas_gemm.matmul(A, b, activation=jnp.exp), (B,)),
    (
      lambda x: pallas_gemm.matmul(A, B, bias=x, activation=jax.nn.silu),
      (B[0],),
    ),
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
    x = {"a": n64(4, 6), "b": n64(6, 8), "bias": n64(8), "c": n64(4, 8)}
    args = [x[name] for name in names]
    ours, want = (
      lambda *v, f=f: f(**x | dict(zip(names, v))) for f in (dense, plain)
    )
    got = jax.linear_transpose(ours, *args)(x["c"])
    products.assert_same(got, jax.vjp(want, *args)[1](x["c"]))
