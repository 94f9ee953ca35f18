"""Mistakes in calls of the grouped ops, and which implementation runs."""

import functools

from absl import logging
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report, tuning
from pallas_gemm.kernels import triton_dense
from tests.support import ragged
from tests.support.mistakes import (
  EITHER,
  NO_ACTIVATIONS,
  NO_ARRAYS,
  NO_DTYPES,
  assert_told,
)
from tests.support.products import normal

LHS, RHS, SIZES = normal(9, 6), normal(3, 6, 8), jnp.array([2, 3, 4])
HALF = LHS.astype("bfloat16"), RHS.astype("bfloat16"), SIZES
INTS = jnp.arange(54).reshape(9, 6), jnp.ones((3, 6, 8), "int32"), SIZES
NUMBERS = lax.RaggedDotDimensionNumbers(
  (((1,), (1,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(0,),
)


def case(error, message, lhs=LHS, rhs=RHS, sizes=SIZES, **keywords):
  """What is raised, what it says, and the call."""
  return error, message, (lhs, rhs, sizes), keywords


RAGGED_DOT = {
  "lhs list": case(TypeError, "lhs must be an array, got list", [[1.0]]),
  "lhs none": case(TypeError, "lhs must be an array, got NoneType", None),
  "lhs rank": case(
    ValueError, r"lhs must be \[M, K\], got shape \(1, 9, 6\)", LHS[None]
  ),
  "lhs keys": case(
    TypeError, "lhs must hold numbers", jax.random.split(jax.random.key(0))
  ),
  "rhs dict": case(TypeError, "rhs must be an array, got dict", rhs={"w": RHS}),
  "rhs rank": case(
    ValueError, r"rhs must be \[G, K, N\], got shape \(6, 8\)", rhs=RHS[0]
  ),
  "rhs rank if transposed": case(
    ValueError, r"rhs must be \[G, N, K\]", rhs=RHS[0], transpose_rhs=True
  ),
  "k": case(
    ValueError, "rhs must have K = 6 like lhs, got K = 5", rhs=RHS[:, :5]
  ),
  "k of transposed": case(
    ValueError, "rhs must have K = 6 like lhs, got K = 8", transpose_rhs=True
  ),
  "transpose_rhs": case(
    TypeError, "transpose_rhs must be a bool, got int", transpose_rhs=1
  ),
  "transpose_rhs none": case(
    TypeError, "transpose_rhs must be a bool, got NoneType", transpose_rhs=None
  ),
  "transpose_rhs NumPy": case(
    TypeError, "transpose_rhs must be a bool, got bool", transpose_rhs=np.True_
  ),
  "transpose_rhs array": case(
    TypeError, "transpose_rhs must be", transpose_rhs=jnp.array(True)
  ),
  "sizes list": case(
    TypeError, "group_sizes must be an array, got list", sizes=[2, 3, 4]
  ),
  "sizes dtype": case(
    TypeError,
    "group_sizes must hold integers, got dtype float32",
    sizes=jnp.ones(3),
  ),
  "sizes bool": case(
    TypeError, "group_sizes must hold integers, got dtype bool", sizes=SIZES > 2
  ),
  "sizes complex": case(
    TypeError, "group_sizes must hold integers", sizes=1j * SIZES
  ),
  "sizes NumPy floats": case(
    TypeError, "group_sizes must hold integers", sizes=np.ones(3, np.float32)
  ),
  "sizes int": case(ValueError, "group_sizes must have rank 1", sizes=9),
  "sizes none": case(TypeError, "group_sizes must be an array", sizes=None),
  "no sizes": case(
    ValueError, "group_sizes must have 3 entries.*got 0", sizes=SIZES[:0]
  ),
  "sizes rank": case(
    ValueError,
    r"group_sizes must have rank 1, got shape \(1, 3\)",
    sizes=SIZES[None],
  ),
  "too few sizes": case(
    ValueError, "group_sizes must have 3 entries.*got 2", sizes=SIZES[:2]
  ),
  "too many sizes": case(
    ValueError,
    "group_sizes must have 3 entries.*got 4; with group_offset",
    sizes=jnp.ones(4, int),
  ),
  "too few sizes for an offset": case(
    ValueError,
    "group_sizes must have 3 entries or more.*got 2",
    sizes=SIZES[:2],
    group_offset=0,
  ),
  "offset dtype": case(
    TypeError, "group_offset must hold integers", group_offset=1.0
  ),
  "offset shape": case(
    ValueError,
    r"group_offset must have shape \(\) or \(1,\), got \(2,\)",
    group_offset=jnp.array([0, 1]),
  ),
  "offset list": case(
    TypeError, "group_offset must be an array, got list", group_offset=[0]
  ),
  "offset bool": case(
    TypeError, "group_offset must hold integers, got.*bool", group_offset=True
  ),
  "offset complex": case(
    TypeError, "group_offset must hold integers", group_offset=1j
  ),
  "offset string": case(
    TypeError, "group_offset must be an array, got str", group_offset="0"
  ),
  "offset huge": case(EITHER, "group_offset must", group_offset=10**400),
  "offset rank": case(
    ValueError,
    r"group_offset must have shape \(\) or \(1,\), got \(1, 1\)",
    group_offset=jnp.zeros((1, 1), int),
  ),
  "bias shape": case(
    ValueError,
    r"bias must have shape \[G, N\] = \(3, 8\), got \(8,\)",
    bias=jnp.ones(8),
  ),
  "bias dtype": case(
    TypeError, "bias must have a dtype", bias=jnp.ones((3, 8), int)
  ),
  "bias list": case(
    TypeError, "bias must be an array, got list", bias=[[1.0] * 8] * 3
  ),
  "activation": case(
    TypeError, "activation must be a function, got str", activation="relu"
  ),
  "activation mixes": case(
    TypeError, "activation must be elementwise", activation=jax.nn.softmax
  ),
  "activation array": case(
    TypeError,
    "activation must not close over an array",
    activation=lambda x: x * LHS[0, :1],
  ),
  "activation array that does not broadcast": case(
    TypeError,
    "activation must not close over an array",
    activation=lambda x: x * LHS[0, :3],
  ),
  "activation of integers": case(
    TypeError, "activation must keep", *INTS, activation=jnp.tanh
  ),
  "type narrow": case(
    TypeError,
    "preferred_element_type.*bfloat16.*int32",
    *INTS,
    preferred_element_type="bfloat16",
  ),
  "type bool": case(
    TypeError,
    "preferred_element_type.*bool.*int32",
    *INTS,
    preferred_element_type=bool,
  ),
  "type wide": case(
    EITHER,
    "preferred_element_type float64 needs jax_enable_x64",
    preferred_element_type="float64",
  ),
  "precision": case(TypeError, "precision must be None", precision=3),
  "precision name": case(
    ValueError, "precision must be known to JAX, got 'zz'", precision="zz"
  ),
  "precision nothing": case(EITHER, "precision must be", precision=()),
  "implementation": case(
    ValueError,
    r"implementation must be of \('sm90', 'xla'\), got 'triton'",
    implementation="triton",
  ),
  "implementation of none": case(
    ValueError, "implementation must hold a name", implementation=()
  ),
  "implementation type": case(
    TypeError, "implementation must be None, a name", implementation=3
  ),
  "implementation dict": case(
    TypeError, "implementation must be .*dict", implementation={}
  ),
  "implementation one of two": case(
    ValueError, "got 'triton'", implementation=["xla", "triton"]
  ),
  "config": case(
    TypeError, "config must be a tuning.Config, got int", config=128
  ),
  "config dict": case(TypeError, "config must be .*dict", config={"m": 1}),
  "config class": case(TypeError, "config must .*type", config=tuning.Config),
  "config of triton": case(
    TypeError,
    "config must be a tuning.Config, got Config",
    config=triton_dense.Config(16, 16, 16),
  ),
  "config of xla": case(
    ValueError,
    "config is one of 'sm90'",
    config=tuning.Config(),
    implementation="xla",
  ),
  "config not legal": case(
    ValueError,
    "config can't compute.*block_k",
    *HALF,
    config=tuning.Config(block_k=17),
    implementation="sm90",
  ),
} | {
  f"type {name}": case(
    EITHER, "preferred_element_type must", preferred_element_type=no_dtype
  )
  for name, no_dtype in NO_DTYPES.items()
}


@pytest.mark.parametrize("name", RAGGED_DOT)
def test_ragged_dot(name):
  error, message, arrays, keywords = RAGGED_DOT[name]
  assert_told(error, message, pallas_gemm.ragged_dot, *arrays, **keywords)


GATED = {
  "x": (TypeError, "x must be an array, got NoneType", (None, RHS, RHS), {}),
  "x rank": (ValueError, r"x must be \[M, K\]", (LHS[0], RHS, RHS), {}),
  "w_gate": (ValueError, r"w_gate must be \[G, K, N\]", (LHS, LHS, RHS), {}),
  "w_up": (TypeError, "w_up must be an array", (LHS, RHS, None), {}),
  "w_up shape": (ValueError, "w_up must be", (LHS, RHS, RHS[:, :, 1:]), {}),
  "w_up dtype": (
    ValueError,
    r"w_up must be float32\[3, 6, 8\] like w_gate, got bfloat16",
    (LHS, RHS, HALF[1]),
    {},
  ),
  "k": (
    ValueError,
    "w_gate must have K = 5 like x",
    (LHS[:, :5], RHS, RHS),
    {},
  ),
  "activation": (
    TypeError,
    "activation must be a function, got None",
    (LHS, RHS, RHS),
    {"activation": None},
  ),
  "groups": (
    ValueError,
    "group_sizes must have 2 entries, as w_gate has groups, got 3",
    (LHS, RHS[1:], RHS[1:]),
    {},
  ),
  "offset": (
    ValueError,
    r"group_offset must have shape \(\) or \(1,\), got \(3,\)",
    (LHS, RHS, RHS),
    {"group_offset": SIZES},
  ),
  "offset dtype": (
    TypeError,
    "group_offset must hold integers",
    (LHS, RHS, RHS),
    {"group_offset": 0.0},
  ),
  "implementation": (
    ValueError,
    r"implementation must be of \('sm90', 'xla'\), got 'triton'",
    (LHS, RHS, RHS),
    {"implementation": "triton"},
  ),
  "implementation type": (
    TypeError,
    "implementation must be None, a name",
    (LHS, RHS, RHS),
    {"implementation": 3},
  ),
  "config": (
    TypeError,
    "config must be a tuning.Config, got str",
    (LHS, RHS, RHS),
    {"config": "fast"},
  ),
  "config of xla": (
    ValueError,
    "config is one of 'sm90'",
    (LHS, RHS, RHS),
    {"config": tuning.Config(), "implementation": "xla"},
  ),
} | {
  f"type {name}": (
    EITHER,
    "preferred_element_type must",
    (LHS, RHS, RHS),
    {"preferred_element_type": no_dtype},
  )
  for name, no_dtype in NO_DTYPES.items()
}


@pytest.mark.parametrize("name", GATED)
def test_gated_ragged_dot(name):
  error, message, arrays, keywords = GATED[name]
  assert_told(
    error, message, pallas_gemm.gated_ragged_dot, *arrays, SIZES, **keywords
  )


GENERAL = {
  "lhs": (TypeError, "lhs must be an array, got list", ([1.0], RHS), {}),
  "numbers": (
    TypeError,
    "ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers",
    (LHS, RHS),
    {"ragged_dot_dimension_numbers": (((1,), (1,)), ((), ()))},
  ),
  "offset": (
    ValueError,
    "group_sizes must have 3 entries or more",
    (LHS, RHS),
    {"group_sizes": SIZES[1:], "group_offset": 0},
  ),
  "implementation": (
    ValueError,
    "implementation must be of",
    (LHS, RHS),
    {"implementation": "triton"},
  ),
  "implementation type": (
    TypeError,
    "implementation must be None, a name",
    (LHS, RHS),
    {"implementation": 3},
  ),
  "implementation of none": (
    ValueError,
    "implementation must hold a name",
    (LHS, RHS),
    {"implementation": []},
  ),
  "numbers none": (
    TypeError,
    "ragged_dot_dimension_numbers must .*NoneType",
    (LHS, RHS),
    {"ragged_dot_dimension_numbers": None},
  ),
  "numbers string": (
    TypeError,
    "ragged_dot_dimension_numbers must .*str",
    (LHS, RHS),
    {"ragged_dot_dimension_numbers": "mk,gkn->mn"},
  ),
  "offset shape": (
    ValueError,
    r"group_offset must have shape \(\) or \(1,\), got \(3,\)",
    (LHS, RHS),
    {"group_offset": SIZES},
  ),
  "offset dtype": (
    TypeError,
    "group_offset must hold integers",
    (LHS, RHS),
    {"group_offset": 0.0},
  ),
  "sizes bool": (
    TypeError,
    "group_sizes",
    (LHS, RHS),
    {"group_sizes": SIZES > 0},
  ),
  "precision": (EITHER, "[Pp]recision", (LHS, RHS), {"precision": 3}),
  "precision name": (
    ValueError,
    "[Pp]recision",
    (LHS, RHS),
    {"precision": "z"},
  ),
  "type narrow": (
    TypeError,
    "preferred_element_type.*bfloat16.*int32",
    INTS[:2],
    {"preferred_element_type": "bfloat16"},
  ),
} | {
  f"type {name}": (
    EITHER,
    "preferred_element_type must",
    (LHS, RHS),
    {"preferred_element_type": no_dtype},
  )
  for name, no_dtype in NO_DTYPES.items()
}


@pytest.mark.parametrize("name", GENERAL)
def test_ragged_dot_general(name):
  error, message, arrays, keywords = GENERAL[name]
  keywords = {
    "group_sizes": SIZES,
    "ragged_dot_dimension_numbers": NUMBERS,
  } | keywords
  assert_told(
    error, message, pallas_gemm.ragged_dot_general, *arrays, **keywords
  )


# What an op is called with, array by array; what may be None.
ARRAYS = {
  "ragged_dot": {
    "lhs": LHS,
    "rhs": RHS,
    "group_sizes": SIZES,
    "group_offset": np.array([0], np.int32),
    "bias": RHS[:, 0],
  },
  "gated_ragged_dot": {
    "x": LHS,
    "w_gate": RHS,
    "w_up": RHS,
    "group_sizes": SIZES,
    "group_offset": np.array([0], np.int32),
  },
  "ragged_dot_general": {
    "lhs": LHS,
    "rhs": RHS,
    "group_sizes": SIZES,
    "group_offset": np.array([0], np.int32),
  },
}
OPTIONAL = ("group_offset", "bias")
NO_ARRAY = [
  (op, argument, kind)
  for op, arrays in ARRAYS.items()
  for argument in arrays
  for kind in ("none", *NO_ARRAYS)
  if kind != "none" or argument not in OPTIONAL
]


def _op(name):
  f = getattr(pallas_gemm, name)
  if name == "ragged_dot_general":
    return functools.partial(f, ragged_dot_dimension_numbers=NUMBERS)
  return f


@pytest.mark.parametrize(("op", "argument", "kind"), NO_ARRAY)
def test_no_array(op, argument, kind):
  keywords = dict(ARRAYS[op])
  make, came = NO_ARRAYS.get(kind, (lambda _: None, "NoneType"))
  keywords[argument] = make(keywords[argument])
  assert_told(TypeError, rf"^{argument} must .*({came})", _op(op), **keywords)


NO_ACTIVATION = [
  (op, kind)
  for op in ("ragged_dot", "gated_ragged_dot")
  for kind in NO_ACTIVATIONS
]


@pytest.mark.parametrize(("op", "kind"), NO_ACTIVATION)
def test_no_activation(op, kind):
  arrays = (LHS, RHS) if op == "ragged_dot" else (LHS, RHS, RHS)
  assert_told(
    TypeError,
    "^activation must",
    _op(op),
    *arrays,
    SIZES,
    activation=NO_ACTIVATIONS[kind],
  )


@pytest.mark.parametrize("transform", (jax.jit, jax.grad))
@pytest.mark.parametrize("op", ("ragged_dot", "gated_ragged_dot"))
def test_activation_closes_over_a_traced_value(transform, op):
  arrays = (LHS, RHS) if op == "ragged_dot" else (LHS, RHS, RHS)

  def f(t):
    return _op(op)(*arrays, SIZES, activation=lambda x: x * t).sum()

  with pytest.raises(TypeError, match="must not close over a traced value"):
    transform(f)(1.0)


# Equal to what was right in the call before, and so compiled already.
EQUAL = {
  "int": (False, 0, "int"),
  "float": (False, 0.0, "float"),
  "NumPy": (False, np.False_, "bool"),
  "int of transposed": (True, 1, "int"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_transpose_rhs_that_equals_a_right_one(name):
  """The check may not depend on what is compiled."""
  right, wrong, came = EQUAL[name]
  arrays = LHS, RHS.swapaxes(1, 2) if right else RHS, SIZES
  for _ in range(2):
    pallas_gemm.ragged_dot(*arrays, transpose_rhs=right)
    assert_told(
      TypeError,
      f"transpose_rhs must be a bool, got {came}",
      pallas_gemm.ragged_dot,
      *arrays,
      transpose_rhs=wrong,
    )


def _numbers(contract, ragged_dimensions, group):
  return lax.RaggedDotDimensionNumbers(
    (contract, ((), ())), ragged_dimensions, group
  )


OF_LAX = {
  "k": (LHS[:, 1:], RHS, SIZES, NUMBERS),
  "sizes dtype": (LHS, RHS, jnp.ones(3), NUMBERS),
  "too few sizes": (LHS, RHS, SIZES[1:], NUMBERS),
  "no group": (LHS, RHS, SIZES, _numbers(((1,), (1,)), (0,), ())),
  "group of sums": (LHS, LHS, SIZES, _numbers(((0,), (0,)), (0,), (1,))),
  "group contracted": (LHS, RHS, SIZES, _numbers(((1,), (1,)), (0,), (1,))),
  "two ragged": (LHS, RHS, SIZES, _numbers(((1,), (1,)), (0, 1), (0,))),
  "no such dimension": (LHS, RHS, SIZES, _numbers(((1,), (1,)), (5,), (0,))),
}


@pytest.mark.parametrize("name", OF_LAX)
def test_errors_that_are_those_of_lax(name):
  arguments = OF_LAX[name]
  with pytest.raises((TypeError, ValueError)) as want:
    lax.ragged_dot_general(*arguments)
  with pytest.raises((TypeError, ValueError)) as got:
    pallas_gemm.ragged_dot_general(*arguments)
  assert got.type is want.type and str(got.value) == str(want.value)


def test_what_is_no_mistake():
  """Near misses of the above."""
  pallas_gemm.ragged_dot(LHS, RHS, np.array([2, 3, 4], np.uint8))
  pallas_gemm.ragged_dot(LHS, RHS, SIZES, group_offset=np.int16(0))
  pallas_gemm.ragged_dot(LHS, RHS, SIZES, ["high", "highest"])
  pallas_gemm.ragged_dot(LHS, RHS, SIZES, config=tuning.Config())  # For GPUs.
  pallas_gemm.ragged_dot(*HALF, bias=jnp.ones((3, 8)))
  pallas_gemm.ragged_dot(*INTS, implementation=["sm90", "xla"])
  pallas_gemm.ragged_dot(LHS, RHS, SIZES, preferred_element_type="int32")
  pallas_gemm.ragged_dot(LHS, RHS, SIZES, transpose_rhs=False, bias=None)


class Array:
  """What says how it becomes an array."""

  def __init__(self, array):
    self.array = array

  def __jax_array__(self):
    return self.array


@pytest.mark.parametrize("op", ARRAYS)
@pytest.mark.parametrize("kind", ("NumPy", "__jax_array__"))
def test_what_becomes_an_array(op, kind):
  make = np.asarray if kind == "NumPy" else lambda x: Array(jnp.asarray(x))
  want = _op(op)(**ARRAYS[op])
  for argument, value in ARRAYS[op].items():
    out = _op(op)(**ARRAYS[op] | {argument: make(value)})
    np.testing.assert_array_equal(out, want, err_msg=argument)


# Which implementation runs.


@pytest.fixture(name="log")
def _log(monkeypatch):
  """What is logged, as if it were the first time."""
  messages = []
  monkeypatch.setattr(report, "_said", set())
  monkeypatch.setattr(
    logging, "info", lambda form, *args: messages.append(form % args)
  )
  jax.clear_caches()
  yield messages
  jax.clear_caches()


def test_logs_once_what_runs_and_why(log):
  for _ in range(2):
    pallas_gemm.ragged_dot(LHS, RHS, SIZES, implementation=("sm90", "xla"))
    jax.clear_caches()
  (message,) = log
  assert "groups 3 along M, M 9, N 8, K 6, NN runs on 'xla'" in message
  assert "sm90: operands must be bfloat16 or float16, got float32" in message


def test_logs_once_what_is_left_to_lax(log):
  numbers = _numbers(((1,), (1,)), (0,), (0,))
  for _ in range(2):
    pallas_gemm.ragged_dot_general(LHS, RHS[..., None], SIZES, numbers)
    jax.clear_caches()
  (message,) = log
  assert "ragged_dot_general runs on jax.lax: lhs and rhs must have" in message


@pytest.mark.parametrize(
  ("arrays", "keywords", "reason"),
  (
    ((LHS, RHS, SIZES), {}, "must be bfloat16 or float16, got float32"),
    (HALF, {"precision": "TF32_TF32_F32"}, "precision"),
  ),
  ids=("dtype", "precision"),
)
def test_what_sm90_refuses(arrays, keywords, reason):
  with pytest.raises(NotImplementedError, match=f"sm90: .*{reason}"):
    pallas_gemm.ragged_dot(*arrays, implementation="sm90", **keywords)


@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("bias", (False, True))
def test_lowers_for_cuda(wide, bias):
  """Ahead of time: kernels alone, forward and one for each gradient.

  Rows of a float32 bias are added by a kernel, too.
  """
  of = ragged.Case(
    m=256, n=128, k=64, sizes=(100, 0, 56), dtype="bfloat16", bias=bias
  )
  with jax.enable_x64(wide):
    x = of.operands()
    step = jax.jit(jax.value_and_grad(lambda x: of(x).astype("float32").sum()))
    text = step.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 + len(x)
    assert "chlo.ragged_dot" not in text and "dot_general" not in text
    text = step.trace(x).lower(lowering_platforms=("cpu",)).as_text()
    assert "mosaic_gpu" not in text
