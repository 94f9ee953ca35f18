"""What users get wrong, and what is said of that; what is no mistake."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from pallas_gemm.kernels import triton_dense
from tests.support.mistakes import (
  ACTIVATED,
  ARRAYS,
  CALLS,
  INTS,
  LHS,
  NO_ACTIVATIONS,
  NO_ARRAYS,
  NO_DTYPES,
  RHS,
  SIZES,
  SQUARE,
  A,
  B,
  C,
  cover,
  takes,
  told,
)
from tests.support.ops import NUMBERS

CONFIG, TRITON = tuning.Config(), triton_dense.Config(16, 16, 16)
HALF = functools.partial(jnp.asarray, dtype="bfloat16")
HUGE = 10**400

# Arguments that do not fit together: what of `CALLS` is changed, or one after
# the other of several changes, by what is said.
INTEGERS = {"a": INTS, "b": INTS, "bias": None, "c": INTS}
INTEGER_GROUPS = {"lhs": INTS, "rhs": jnp.stack([INTS] * 3), "bias": None}
TANH = {"activation": jnp.tanh}
FEW = {"group_sizes": SIZES, "group_offset": None}
WIDE_BIAS = {"b": jnp.ones(6), "bias": jnp.ones((4, 2)), "c": None}
BATCHES = {"a": jnp.ones((2, 4, 6)), "b": RHS}
GATED_BATCHES = {"x": jnp.ones((2, 4, 6)), "w_gate": RHS, "w_up": RHS}
TWO_GROUPS = FEW | {"w_gate": RHS[1:], "w_up": RHS[1:]}
VALUE_ERRORS = {
  "matmul": {
    "a must have rank 1 or more, got a scalar": {"a": 2.0},
    "b must have rank 1 or more": {"b": jnp.ones(())},
    "b must have K = 6 like a, got K = 4": {"b": SQUARE},
    "b must have K = 4 like a, got K = 6": {"transpose_a": True},
    "b must have K = 6 like a, got K = 8": {"transpose_b": True},
    "b must have K = 3 like a, got K = 6": {"a": jnp.ones(3)},
    "batch dimensions of b must broadcast against those of a": BATCHES,
    "transpose_a needs a of rank 2": {"a": jnp.ones(6), "transpose_a": True},
    "transpose_b needs b of rank 2": {"b": jnp.ones(6), "transpose_b": True},
    "bias must broadcast to the result's shape (4, 8), got (": [
      {"bias": jnp.ones(4)},
      {"bias": jnp.ones((1, 1, 8))},
    ],
    "bias must broadcast to the result's shape (4,), got (4, 2)": WIDE_BIAS,
    # For each row it would be one of (2, 4, 1).
    "bias must broadcast to the result's shape (2, 4), got (4, 1)": {
      "a": jnp.ones((2, 4, 6)),
      "b": jnp.ones(6),
      "bias": jnp.ones((4, 1)),
      "c": None,
    },
    "c must broadcast to the result's shape (4, 8), got (": [
      {"c": jnp.ones((8, 4))},
      {"c": jnp.ones((2, 4, 8))},
    ],
    "beta is 0.5 but c is None; pass c": {"c": None, "beta": 0.5},
    "beta is 0.0 but c is None; pass c": {"c": None, "beta": 0},
    "beta is 0.5 but c is None": {"c": None, "beta": jnp.array(0.5)},
    "config is one of 'triton', which": {"config": TRITON},
  },
  "gated_matmul": {
    "w_up must be float32[6, 8] like w_gate": {"w_up": B.T},
    "w_up must be float32[6, 8] like w_gate, got bfloat16": {"w_up": HALF(B)},
    "x must have rank 1 or more": {"x": 2.0},
    "w_gate must have rank 1": {"w_gate": 2.0, "w_up": 2.0},
    "w_gate must have K = 4 like x": {"x": SQUARE},
    "batch dimensions of w_gate must broadcast ...those of x": GATED_BATCHES,
    "config is one of 'triton', which": {"config": TRITON},
  },
  "dot_general": {
    "jax.lax.dot: dimension_numbers must": [
      {"dimension_numbers": None, "lhs": x}
      for x in (jnp.ones((2, 4, 6)), jnp.ones(()))
    ],
  },
  "ragged_dot": {
    "lhs must be [M, K], got shape (1, 9, 6)": {"lhs": LHS[None]},
    "rhs must be [G, K, N], got shape (6, 8)": {"rhs": RHS[0]},
    "rhs must be [G, N, K]": {"rhs": RHS[0], "transpose_rhs": True},
    "rhs must have K = 6 like lhs, got K = 5": {"rhs": RHS[:, :5]},
    "rhs must have K = 6 like lhs, got K = 8": {"transpose_rhs": True},
    "group_sizes must have rank 1, got shape ()": {"group_sizes": 9},
    "group_sizes must have rank 1, got shape (1, 3)": {
      "group_sizes": SIZES[None]
    },
    "group_sizes must have 3 entries...; with group_offset it may have more": [
      FEW | {"group_sizes": jnp.ones(count, int)} for count in (0, 2, 4)
    ],
    "group_sizes must have 3 entries or more, as rhs has groups, got 2": {
      "group_sizes": SIZES[:2]
    },
    "bias must broadcast to [G, N] = (3, 8), got (3,)": {"bias": jnp.ones(3)},
  },
  "gated_ragged_dot": {
    "x must be [M, K]": {"x": LHS[0]},
    "w_gate must be [G, K, N]": {"w_gate": LHS, "w_up": LHS},
    "w_up must be float32[3, 6, 8] ...got float32[3, 6, 7]": {
      "w_up": RHS[:, :, 1:]
    },
    "w_up must be float32[3, 6, 8] like w_gate, got bfloat16": {
      "w_up": HALF(RHS)
    },
    "w_gate must have K = 5 like x": {"x": LHS[:, :5]},
    "group_sizes must have 2 entries, as w_gate has groups": TWO_GROUPS,
  },
  "ragged_dot_general": {
    "group_sizes must have 3 entries or more": {"group_sizes": SIZES[1:]},
  },
}
TYPE_ERRORS = {
  "matmul": {
    "bias must have a dtype that fits": {"bias": jnp.arange(8)},
    "c must have a dtype that fits": [{"c": C + 1j}, INTEGERS | {"c": SQUARE}],
    "beta must be ...str": {"c": None, "beta": "2"},
    "beta must be ...bool": {"c": None, "beta": True},
    "activation must be elementwise, got reduce_max in it": {
      "activation": lambda x: x - x.max()
    },
    "activation must keep shape and dtype": INTEGERS | TANH,
    "out_dtype must be floating like the operands, float32, got ": [
      {"out_dtype": x} for x in ("int32", "complex64", "bool")
    ],
    "out_dtype must be integer": INTEGERS | {"out_dtype": "float32"},
  },
  "gated_matmul": {
    "out_dtype must be floating": {"out_dtype": int},
    "activation must be a function, got None": {"activation": None},
  },
  "ragged_dot": {
    "bias must have a dtype": {"bias": jnp.ones((3, 8), int)},
    "preferred_element_type must be ...int32, got ": [
      INTEGER_GROUPS | {"preferred_element_type": x}
      for x in ("bfloat16", "bool")
    ],
    "preferred_element_type float64 needs jax_enable_x64": {
      "preferred_element_type": "float64"
    },
    "config must be a tuning.Config, got Config": {"config": TRITON},
    "config.stages must be an int, got ...3": {
      "config": tuning.Config(stages=np.int64(3))
    },
    "activation must keep shape and dtype": INTEGER_GROUPS | TANH,
  },
  "gated_ragged_dot": {
    "activation must be a function, got None": {"activation": None},
  },
  "ragged_dot_general": {
    "ragged_dot_dimension_numbers must be a jax.lax.RaggedDot...got "
    + type(x).__name__: {"ragged_dot_dimension_numbers": x}
    for x in (NUMBERS, None, "mk,gkn->mn")
  },
}
# What no argument may be, by what is said; {0} is the argument, {1} the type of
# its value.
NO_NUMBERS = [
  *(3, "ab", (), {"contract": (1, 0)}, (((1,), (0,)),), ((1,), (0,))),
  *((((1,), (0,)), ((), ()), ()), (((1,), (0,), (0,)), ((), ()))),
  *((None, ((), ())), ((((1,),), ((0,),)), ((), ()))),
  *(((("1",), ("0",)), ((), ())), (((1.0,), (0.0,)), ((), ()))),
  (np.array([[1.0], [0.0]]), np.zeros((2, 0), int)),
]
OPTIONS = {
  "dimension_numbers": {"...Error: {0} must be ((lhs ": NO_NUMBERS},
  "out_dtype preferred_element_type": {"TypeError: {0} must be ": NO_DTYPES},
  "out_dtype": {"TypeError: {0} float64 needs jax_enable_x64": ["float64"]},
  "reduce_dtype": {
    "TypeError: {0} must be ": NO_DTYPES,
    "TypeError: {0} must be floating, of 16 to 32 bits, for sums": [
      *("int32", bool, "complex64", "float8_e4m3fn"),
    ],
    "TypeError: {0} float64 needs jax_enable_x64": ["float64"],
  },
  "transpose_a transpose_b transpose_rhs": {
    "TypeError: {0} must be a bool, got {1}": ["yes", None, jnp.array(True)],
  },
  "implementation": {
    "ValueError: {0} must be of (...'sm90', ...), got 'cublas'": [
      *("cublas", ["xla", "cublas"]),
    ],
    "ValueError: {0} must be of (...'sm90', ...), got ": [
      *("", "XLA", ("xla", None)),
    ],
    "ValueError: {0} must hold a name, got an empty sequence": [(), []],
    "TypeError: {0} must be None, a name or a sequence of names, got {1}": [
      *(3, b"xla"),
    ],
    "TypeError: {0} must be hashable, got {1}": [{}, {"xla"}, np.array("xla")],
    "TypeError: {0} must be hashable, got tuple": [[["xla"]]],
  },
  "config": {
    "TypeError: {0} must be a tuning.Config...got {1}": [128, "fast", type],
    "TypeError: {0} must be a tuning.Config, got dict": [{"block_m": 128}],
  },
  "precision": {
    "TypeError: {0} must be None, a lax.Precision (or two), ...got ": [
      *(3, b"high", (), ("high",) * 3, ("high", None)),
    ],
    "ValueError: {0} must be ...'highest', or ...got 'hihgest'": ["hihgest"],
    "TypeError: {0} must be hashable, got dict": [{}],
  },
  "out_sharding": {
    "TypeError: {0} must be None, a PartitionSpec or ...got {1}": [
      *("x", 3, ("x", None)),
    ],
  },
  "group_sizes": {
    "TypeError: {0} must hold integers, got dtype ": [
      *(jnp.ones(3), np.ones(3, np.float32), SIZES > 2, 1j * SIZES),
    ],
  },
  "group_offset": {
    "TypeError: {0} must hold integers, got dtype ": [1.0, True, 1j],
    "ValueError: {0} must have shape () or (1,), got ": [
      *(jnp.array([0, 1]), SIZES, jnp.zeros((1, 1), int)),
    ],
    "ValueError: {0} must fit into int32, got an integer of about 398 digits": [
      HUGE,
    ],
  },
}
# The same of alpha and beta, of operands of some kind.
FLOATS = {"a": A, "b": B, "bias": None, "c": C}
UNSIGNED = FLOATS | dict.fromkeys("abc", INTS.astype("uint8"))
COMPLEX = FLOATS | dict.fromkeys("abc", SQUARE + 1j)
FACTORS = [
  (FLOATS, "TypeError: {0} must be a number or a scalar array, got {1}", [
    "2", b"2", True, False, np.True_, None, [2.0], {}, abs, np.str_("2"),
    np.datetime64("2020-01-01"),
  ]),
  (FLOATS, "TypeError: {0} must hold numbers, got dtype object", [
    np.array(2, object),
  ]),
  (FLOATS, "TypeError: {0} must be an array without a mask", [
    np.ma.masked_array(2.0, True),
  ]),
  (FLOATS, "ValueError: {0} must be a scalar, got shape (", [
    jnp.ones(3), np.ones(1, np.float32), C,
  ]),
  (FLOATS, "TypeError: {0} must be real for float32, got ", [
    1j, jnp.array(1j), jnp.array(True), jax.random.key(0),
  ]),
  (INTEGERS, "TypeError: {0} must be an integer for int32, got ", [
    0.5, float("nan"), float("inf"), np.float32(0.5), jnp.array(2.0),
    jnp.array(1j),
  ]),
  (INTEGERS, "TypeError: {0} must fit into int32, got ", [2**40, HUGE]),
  (UNSIGNED, "TypeError: {0} must fit into uint32, got -1", [-1]),
  (FLOATS, "TypeError: {0} must fit into float32, got an integer of about", [
    HUGE, -HUGE,
  ]),
  (COMPLEX, "TypeError: {0} must fit into complex64, got ", [HUGE]),
]  # fmt: skip


def _mistakes():
  """(op, words, changes) of the tables above."""
  for kind, table in (("Value", VALUE_ERRORS), ("Type", TYPE_ERRORS)):
    for op, said in table.items():
      for words, changes in said.items():
        for one in changes if isinstance(changes, list) else [changes]:
          yield op, f"{kind}Error: {words}", one
  for op in ACTIVATED:
    xla = {"config": CONFIG, "implementation": "xla"}
    yield op, "ValueError: config is one of 'sm90', which", xla
  for op in ("ragged_dot", "gated_ragged_dot", "ragged_dot_general"):
    words = "implementation must be of ('sm90', 'xla'), got 'triton'"
    yield op, f"ValueError: {words}", {"implementation": "triton"}
  for arguments, said in OPTIONS.items():
    for name in arguments.split():
      for op in (op for op in CALLS if takes(op, name)):
        for words, values in said.items():
          for value in values:
            text = words.format(name, type(value).__name__)
            yield op, text, {name: value}
  for name in ("alpha", "beta"):
    for call, words, values in FACTORS:
      for value in values:
        text = words.format(name, type(value).__name__)
        yield "matmul", text, call | {name: value}


@pytest.mark.parametrize(("op", "words", "changes"), [*_mistakes()])
def test_mistake(op, words, changes):
  told(words, op, **changes)


@pytest.mark.parametrize(("where", "words", "make"), cover(NO_ARRAYS, ARRAYS))
def test_no_array(where, words, make):
  op, argument = where
  value = make(CALLS[op][argument])
  if value is None and argument in ("bias", "c", "group_offset"):
    pytest.skip("there need be none")
  words = words.format(type(value).__name__)
  told(f"TypeError: {argument} must {words}", op, **{argument: value})


@pytest.mark.parametrize(
  ("op", "words", "activation"), cover(NO_ACTIVATIONS, ACTIVATED)
)
def test_no_activation(op, words, activation):
  told(f"TypeError: activation must {words}", op, activation=activation)


@pytest.mark.parametrize("op", ACTIVATED)
def test_activation_closes_over_a_traced_value(op):
  words = "TypeError: activation must not close over a traced value"
  f = lambda t: told(words, op, activation=lambda x: x * t)  # noqa: E731
  jax.jit(f)(1.0)
  with pytest.raises(TypeError, match="scalar-output"):  # of no output
    jax.grad(f)(1.0)


@pytest.mark.parametrize("op", ("matmul", "ragged_dot"))
@pytest.mark.parametrize(
  ("field", "want"),
  (
    ({"block_k": 17}, "block_k must be 64"),
    ({"raster": 2**31}, "sizes and tiles"),
  ),
)
def test_a_config_that_is_not_legal(op, field, want):
  how = {"config": tuning.Config(**field), "implementation": "sm90"}
  how |= {x: HALF(v) for x, v in CALLS[op].items() if x in "a b lhs rhs"}
  told(f"ValueError: config can't compute this product: {want}", op, **how)


@pytest.mark.parametrize("name", ("alpha", "beta"))
@pytest.mark.parametrize("transform", (jax.jit, jax.grad))
def test_traced_factors_of_a_wrong_kind(name, transform):
  def f(t, of):
    factor = {name: t.astype(of) if of else t[None]}
    return pallas_gemm.matmul(A, B, c=C, **factor).sum().real

  for of, kind in (("complex64", TypeError), ("bool", TypeError)):
    with pytest.raises(kind, match=f"{name} must .*{of}"):
      transform(lambda t, of=of: f(t, of))(1.0)
  with pytest.raises(ValueError, match=rf"{name} must .*\(1,\)"):
    transform(lambda t: f(t, None))(1.0)


# Equal to what is right, and so perhaps compiled already.
EQUAL = [
  ("matmul", "alpha", 1.0, [True, np.True_]),
  ("matmul", "alpha", 1, [True]),
  ("matmul", "alpha", 0.0, [False]),
  ("matmul", "alpha", 2.0, [2 + 0j]),
  ("matmul", "beta", 1.0, [True]),
  ("matmul", "beta", 0.0, [False]),
  ("matmul", "beta", 2.0, [2 + 0j]),
  ("matmul", "transpose_a", False, [0, 0.0, np.False_]),
  ("matmul", "transpose_b", True, [1, np.True_]),
  ("ragged_dot", "transpose_rhs", False, [0, 0.0, np.False_]),
  ("ragged_dot", "transpose_rhs", True, [1]),
]


@pytest.mark.parametrize(("op", "argument", "right", "wrong"), EQUAL)
def test_what_equals_something_right(op, argument, right, wrong):
  """The check may not depend on what is compiled."""
  call = dict.fromkeys("abc", SQUARE) | {"bias": None}
  if op == "ragged_dot":
    call = CALLS[op] | {"rhs": RHS[:, :, :6], "bias": None}
  for value in wrong:
    for _ in range(2):
      getattr(pallas_gemm, op)(**call | {argument: right})
      told(f"TypeError: {argument} must be ", op, **call | {argument: value})


# What an op calls otherwise than another one.
OTHER_NAMES = {
  "out_dtype": "preferred_element_type",
  "preferred_element_type": "out_dtype",
  "transpose_b": "transpose_rhs",
  "transpose_rhs": "transpose_b",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
@pytest.mark.parametrize("op", CALLS)
def test_a_keyword_of_another_op(op, name):
  """The error has the name that this one takes; no signature shows more."""
  other = OTHER_NAMES[name]
  shown = inspect.signature(getattr(pallas_gemm, op)).parameters.values()
  assert inspect.Parameter.VAR_KEYWORD not in {x.kind for x in shown}
  if takes(op, name):
    return
  words = f"TypeError: {op}() got an unexpected keyword argument {name!r}; it"
  words += f" takes {other}, not {name}" if takes(op, other) else " takes "
  told(words, op, **{name: None})
  told(words, op, **{name: "float32"})
