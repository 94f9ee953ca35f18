"""Mistakes in calls of the grouped ops, and which implementation runs."""

from absl import logging
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from pallas_gemm.kernels import triton_dense
from pallas_gemm.ops import dispatch
from tests.support import ragged
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
    TypeError, "activation must be an elementwise", activation=jax.nn.softmax
  ),
  "activation array": case(
    TypeError,
    "activation must not close over an array",
    activation=lambda x: x * LHS[0, :1],
  ),
  "activation of integers": case(
    TypeError, "activation must keep", *INTS, activation=jnp.tanh
  ),
  "dtype": case(
    TypeError,
    "preferred_element_type must be a dtype",
    preferred_element_type="float31",
  ),
  "dtype kind": case(
    TypeError,
    "preferred_element_type must be floating",
    preferred_element_type="int32",
  ),
  "dtype unhashable": case(
    TypeError,
    "preferred_element_type must be hashable, got list",
    preferred_element_type=["float32"],
  ),
  "dtype wide": case(
    TypeError,
    "preferred_element_type float64 needs jax_enable_x64",
    preferred_element_type="float64",
  ),
  "precision": case(TypeError, "precision must be None", precision=3),
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
  "config": case(
    TypeError, "config must be a tuning.Config, got int", config=128
  ),
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
}


@pytest.mark.parametrize("name", RAGGED_DOT)
def test_ragged_dot(name):
  error, message, arrays, keywords = RAGGED_DOT[name]
  with pytest.raises(error, match=message):
    pallas_gemm.ragged_dot(*arrays, **keywords)


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
}


@pytest.mark.parametrize("name", GATED)
def test_gated_ragged_dot(name):
  error, message, arrays, keywords = GATED[name]
  with pytest.raises(error, match=message):
    pallas_gemm.gated_ragged_dot(*arrays, SIZES, **keywords)


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
}


@pytest.mark.parametrize("name", GENERAL)
def test_ragged_dot_general(name):
  error, message, arrays, keywords = GENERAL[name]
  keywords = {
    "group_sizes": SIZES,
    "ragged_dot_dimension_numbers": NUMBERS,
  } | keywords
  with pytest.raises(error, match=message):
    pallas_gemm.ragged_dot_general(*arrays, **keywords)


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


# Which implementation runs.


@pytest.fixture(name="log")
def _log(monkeypatch):
  """What is logged, as if it were the first time."""
  messages = []
  monkeypatch.setattr(dispatch, "_logged", set())
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


def test_xla_promises_no_batch_invariance():
  with pallas_gemm.batch_invariant():
    for f in (
      lambda: pallas_gemm.ragged_dot(*HALF),
      lambda: pallas_gemm.gated_ragged_dot(LHS, RHS, RHS, SIZES),
      lambda: pallas_gemm.ragged_dot_general(LHS, RHS, SIZES, NUMBERS),
    ):
      with pytest.raises(NotImplementedError, match="not batch invariant"):
        f()
  pallas_gemm.ragged_dot(*HALF)
