"""Mistakes: each names the argument, what came and what is needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from pallas_gemm.kernels import triton_dense
from tests import test_ops_ragged_errors
from tests.support.mistakes import (
  EITHER,
  NO_ACTIVATIONS,
  NO_ARRAYS,
  NO_DTYPES,
  assert_told,
)
from tests.support.products import normal

A, B = normal(4, 6), normal(6, 8)
SQUARE = normal(4, 4)
INTS = jnp.arange(16).reshape(4, 4)
HALF = normal(4, 4, dtype="bfloat16")
C = normal(4, 8)
COMPLEX = SQUARE + 1j
HUGE = 10**400


def case(error, message, a=A, b=B, **keywords):
  """What is raised, what it says, and the call."""
  return error, message, a, b, keywords


MATMUL = {
  "a list": case(TypeError, "a must be an array, got list", [[1.0]], B),
  "a none": case(TypeError, "a must be an array, got NoneType", None, B),
  "b dict": case(TypeError, "b must be an array, got dict", A, {"w": B}),
  "a scalar": case(ValueError, "a must have rank 1 or more", 2.0, B),
  "b scalar": case(ValueError, "b must have rank 1 or more", A, jnp.ones(())),
  "a keys": case(
    TypeError, "a must hold numbers", jax.random.split(jax.random.key(0)), B
  ),
  "k": case(ValueError, "b must have K = 6 like a, got K = 4", A, SQUARE),
  "k of transposed a": case(
    ValueError, "b must have K = 4 like a, got K = 6", transpose_a=True
  ),
  "k of transposed b": case(
    ValueError, "b must have K = 6 like a, got K = 8", transpose_b=True
  ),
  "k of vectors": case(
    ValueError, "b must have K = 3 like a, got K = 6", jnp.ones(3), B
  ),
  "batch": case(
    ValueError,
    "batch dimensions of b",
    jnp.ones((2, 4, 6)),
    jnp.ones((3, 6, 8)),
  ),
  "transpose_a int": case(
    TypeError, "transpose_a must be a bool, got int", transpose_a=0
  ),
  "transpose_b string": case(
    TypeError, "transpose_b must be a bool, got str", transpose_b="yes"
  ),
  "transpose_a none": case(
    TypeError, "transpose_a must be a bool, got NoneType", transpose_a=None
  ),
  "transpose_b NumPy bool": case(
    TypeError, "transpose_b must be a bool, got bool", transpose_b=np.bool_(0)
  ),
  "transpose_b array": case(
    TypeError, "transpose_b must be", transpose_b=jnp.array(True)
  ),
  "transpose_a of a vector": case(
    ValueError,
    "transpose_a needs a of rank 2",
    jnp.ones(6),
    B,
    transpose_a=True,
  ),
  "transpose_b of a vector": case(
    ValueError,
    "transpose_b needs b of rank 2",
    A,
    jnp.ones(6),
    transpose_b=True,
  ),
  "bias size": case(
    ValueError, r"bias must have shape \[N\] = \(8,\)", bias=jnp.ones(4)
  ),
  "bias rank": case(ValueError, "bias must have shape", bias=jnp.ones((1, 8))),
  "bias dtype": case(TypeError, "bias must have a dtype", bias=jnp.arange(8)),
  "bias list": case(
    TypeError, "bias must be an array, got list", bias=[1.0] * 8
  ),
  "bias scalar": case(ValueError, "bias must have shape", bias=jnp.ones(())),
  "c shape": case(
    ValueError,
    r"c must have the result's shape \(4, 8\), got \(8, 4\)",
    c=jnp.ones((8, 4)),
  ),
  "c broadcast": case(
    ValueError, "c must have the result's shape", c=jnp.ones((1, 8))
  ),
  "c dtype": case(
    TypeError, "c must have a dtype", c=jnp.ones((4, 8), jnp.complex64)
  ),
  "c tuple": case(TypeError, "c must be an array, got tuple", c=(1.0,)),
  "c of integers": case(TypeError, "c must have a dtype", INTS, INTS, c=SQUARE),
  "beta without c": case(ValueError, "beta is 0.5 but c is None", beta=0.5),
  "beta zero without c": case(ValueError, "beta is 0.0 but c is None", beta=0),
  "alpha string": case(TypeError, "alpha must be .*got str", alpha="2"),
  "alpha bytes": case(TypeError, "alpha must be .*got bytes", alpha=b"2"),
  "alpha bool": case(TypeError, "alpha must be .*got bool", alpha=False),
  "alpha NumPy bool": case(
    TypeError, "alpha must be .*got bool", alpha=np.bool_(True)
  ),
  "alpha none": case(TypeError, "alpha must be .*got NoneType", alpha=None),
  "alpha list": case(TypeError, "alpha must be .*got list", alpha=[2.0]),
  "alpha dict": case(TypeError, "alpha must be .*got dict", alpha={}),
  "alpha function": case(TypeError, "alpha must be .*function", alpha=abs),
  "alpha NumPy string": case(
    TypeError, "alpha must be .*str", alpha=np.str_("2")
  ),
  "alpha date": case(
    TypeError, "alpha must be .*datetime64", alpha=np.datetime64("2020-01-01")
  ),
  "alpha object": case(
    TypeError, "alpha must .*object", alpha=np.array(2, object)
  ),
  "alpha masked": case(
    TypeError, "alpha must .*[Mm]asked", alpha=np.ma.masked_array(2.0, True)
  ),
  "alpha of three": case(ValueError, r"alpha must .*\(3,\)", alpha=jnp.ones(3)),
  "alpha of one": case(
    ValueError, r"alpha must .*\(1,\)", alpha=np.ones(1, np.float32)
  ),
  "alpha like the result": case(
    ValueError, r"alpha must .*\(4, 8\)", alpha=jnp.ones((4, 8))
  ),
  "alpha complex array": case(
    TypeError, "alpha must .*complex64", alpha=jnp.array(1j)
  ),
  "alpha bool array": case(
    TypeError, "alpha must .*bool", alpha=jnp.array(True)
  ),
  "alpha key": case(TypeError, "alpha must .*key", alpha=jax.random.key(0)),
  "alpha float array of integers": case(
    TypeError,
    "alpha must .*integer.*float32",
    INTS,
    INTS,
    alpha=jnp.array(2.0),
  ),
  "alpha complex array of integers": case(
    TypeError, "alpha must .*complex64", INTS, INTS, alpha=jnp.array(1j)
  ),
  "alpha huge": case(EITHER, "alpha must .*float32", alpha=HUGE),
  "alpha huge and negative": case(EITHER, "alpha must ", alpha=-HUGE),
  "alpha huge of integers": case(
    TypeError, "alpha must fit into int32", INTS, INTS, alpha=HUGE
  ),
  "alpha huge of complex": case(
    EITHER, "alpha must .*complex64", COMPLEX, COMPLEX, alpha=HUGE
  ),
  "alpha negative of unsigned": case(
    TypeError,
    "alpha must fit into uint32, got -1",
    INTS.astype("uint8"),
    INTS.astype("uint8"),
    alpha=-1,
  ),
  "alpha infinite of integers": case(
    TypeError, "alpha must be an integer", INTS, INTS, alpha=float("inf")
  ),
  "alpha NumPy fraction of integers": case(
    TypeError, "alpha must be an integer", INTS, INTS, alpha=np.float32(0.5)
  ),
  "beta string": case(TypeError, "beta must be .*got str", beta="2", c=C),
  "beta none": case(TypeError, "beta must be .*got NoneType", beta=None, c=C),
  "beta bool": case(TypeError, "beta must be .*got bool", beta=True, c=C),
  "beta list": case(TypeError, "beta must be .*got list", beta=[1.0], c=C),
  "beta complex": case(TypeError, "beta must be real", beta=1j, c=C),
  "beta huge": case(EITHER, "beta must .*float32", beta=HUGE, c=C),
  "beta of three": case(
    ValueError, r"beta must .*\(3,\)", beta=jnp.ones(3), c=C
  ),
  "beta like C": case(ValueError, r"beta must .*\(4, 8\)", beta=C, c=C),
  "beta complex array": case(
    TypeError, "beta must .*complex64", beta=jnp.array(1j), c=C
  ),
  "beta float array of integers": case(
    TypeError,
    "beta must .*integer.*float32",
    INTS,
    INTS,
    beta=jnp.array(2.0),
    c=INTS,
  ),
  "beta array without c": case(
    ValueError, "beta .*c is None", beta=jnp.array(0.5)
  ),
  "beta string without c": case(TypeError, "beta must be .*str", beta="2"),
  "alpha complex": case(TypeError, "alpha must be real", alpha=1j),
  "alpha fraction of integers": case(
    TypeError,
    "alpha must be an integer for int32, got 0.5",
    INTS,
    INTS,
    alpha=0.5,
  ),
  "alpha nan of integers": case(
    TypeError, "alpha must be an integer", INTS, INTS, alpha=float("nan")
  ),
  "alpha too large": case(
    TypeError, "alpha must fit into int32", INTS, INTS, alpha=2**40
  ),
  "beta fraction of integers": case(
    TypeError, "beta must be an integer", INTS, INTS, beta=0.5, c=INTS
  ),
  "activation string": case(
    TypeError, "activation must be a function, got str", activation="relu"
  ),
  "activation shape": case(
    TypeError, "activation must keep shape", activation=jnp.ravel
  ),
  "activation reduces": case(TypeError, "activation must", activation=jnp.sum),
  "activation mixes": case(
    TypeError, "activation must be elementwise", activation=jax.nn.softmax
  ),
  "activation of all": case(
    TypeError,
    "activation must be elementwise, got reduce_max in it",
    activation=lambda x: x - x.max(),
  ),
  "activation reverses": case(
    TypeError, "must be elementwise, got rev in it", activation=jnp.flip
  ),
  "activation dtype": case(
    TypeError, r"activation must keep .*got bool", activation=lambda x: x > 0
  ),
  "activation of integers": case(
    TypeError, "activation must keep", INTS, INTS, activation=jnp.tanh
  ),
  "activation arguments": case(
    TypeError, "activation must be an elementwise", activation=jnp.add
  ),
  "activation array": case(
    TypeError,
    "activation must not close over an array",
    activation=lambda x: x * A[0, :1],
  ),
  "activation array that does not broadcast": case(
    TypeError,
    "activation must not close over an array",
    activation=lambda x: x * A[0, :3],
  ),
  "out_dtype": case(
    TypeError, "out_dtype must be a dtype", out_dtype="float31"
  ),
  "out_dtype kind": case(
    TypeError, "out_dtype must be floating", out_dtype="int32"
  ),
  "out_dtype of integers": case(
    TypeError, "out_dtype must be integer", INTS, INTS, out_dtype="float32"
  ),
  "out_dtype complex": case(
    TypeError, "out_dtype must be floating.*complex64", out_dtype="complex64"
  ),
  "out_dtype bool": case(
    TypeError, "out_dtype must be floating.*bool", out_dtype=bool
  ),
  "out_dtype wide": case(
    TypeError, "out_dtype float64 needs jax_enable_x64", out_dtype="float64"
  ),
  "implementation": case(
    ValueError,
    "implementation must be of .*'sm90'.*got 'cublas'",
    implementation="cublas",
  ),
  "implementation one of two": case(
    ValueError, "got 'cublas'", implementation=["xla", "cublas"]
  ),
  "implementation none of any": case(
    ValueError, "implementation must hold a name", implementation=()
  ),
  "implementation type": case(
    TypeError, "implementation must be None, a name", implementation=3
  ),
  "implementation dict": case(
    TypeError, "implementation must be .*dict", implementation={}
  ),
  "implementation set": case(
    TypeError, "implementation must be .*set", implementation={"xla"}
  ),
  "implementation bytes": case(
    TypeError, "implementation must be .*bytes", implementation=b"xla"
  ),
  "implementation array": case(
    TypeError,
    "implementation must be .*array",
    implementation=np.array(["xla"]),
  ),
  "implementation nameless": case(
    ValueError, "implementation must be of .*''", implementation=""
  ),
  "implementation in capitals": case(
    ValueError, "implementation must be of .*'XLA'", implementation="XLA"
  ),
  "implementation of none": case(
    EITHER, "implementation must be .*None", implementation=("xla", None)
  ),
  "implementation of lists": case(
    EITHER, "implementation must be", implementation=[["xla"]]
  ),
  "config type": case(TypeError, "config must be a tuning.Config", config=128),
  "config dict": case(
    TypeError, "config must be .*dict", config={"block_m": 128}
  ),
  "config class": case(
    TypeError, "config must be .*type", config=tuning.Config
  ),
  "config string": case(TypeError, "config must be .*str", config="fast"),
  "config of xla": case(
    ValueError,
    "config is one of 'sm90'",
    config=tuning.Config(),
    implementation="xla",
  ),
  "config of triton": case(
    ValueError,
    "config is one of 'triton'",
    config=triton_dense.Config(16, 16, 16),
  ),
  "config not legal": case(
    ValueError,
    "config can't compute.*block_k",
    HALF,
    HALF,
    config=tuning.Config(block_k=17),
    implementation="sm90",
  ),
  "precision type": case(TypeError, "precision must be None", precision=3),
  "precision name": case(
    ValueError, "precision must be known to JAX, got 'exact'", precision="exact"
  ),
  "precision three": case(
    TypeError, "precision must be None", precision=("high",) * 3
  ),
  "precision bytes": case(TypeError, "precision must be", precision=b"high"),
  "precision of none": case(
    TypeError, "precision must be None", precision=("high", None)
  ),
  "precision nothing": case(EITHER, "precision must be", precision=()),
  "precision dict": case(EITHER, "precision must be .*", precision={}),
} | {
  f"out_dtype {name}": case(TypeError, "out_dtype must be", out_dtype=no_dtype)
  for name, no_dtype in NO_DTYPES.items()
}


@pytest.mark.parametrize("name", MATMUL)
def test_matmul(name):
  error, message, a, b, keywords = MATMUL[name]
  assert_told(error, message, pallas_gemm.matmul, a, b, **keywords)


GATED = {
  "shapes": (ValueError, "w_up must be", (A, B, B.T), {}),
  "dtypes": (
    ValueError,
    "w_up must be float32",
    (A, B, B.astype("bfloat16")),
    {},
  ),
  "x": (TypeError, "x must be an array, got NoneType", (None, B, B), {}),
  "x scalar": (ValueError, "x must have rank 1 or more", (2.0, B, B), {}),
  "w_gate": (TypeError, "w_gate must be an array", (A, [1.0], B), {}),
  "w_gate scalar": (ValueError, "w_gate must have rank 1", (A, 2.0, 2.0), {}),
  "w_up": (TypeError, "w_up must be an array", (A, B, None), {}),
  "k": (ValueError, "w_gate must have K = 4 like x", (SQUARE, B, B), {}),
  "batch": (
    ValueError,
    "batch dimensions of w_gate",
    (jnp.ones((2, 4, 6)), jnp.ones((3, 6, 8)), jnp.ones((3, 6, 8))),
    {},
  ),
  "activation": (
    TypeError,
    "activation must be a function, got None",
    (A, B, B),
    {"activation": None},
  ),
  "out_dtype kind": (
    TypeError,
    "out_dtype must be floating",
    (A, B, B),
    {"out_dtype": int},
  ),
  "out_dtype wide": (
    TypeError,
    "out_dtype float64 needs jax_enable_x64",
    (A, B, B),
    {"out_dtype": "float64"},
  ),
  "config": (TypeError, "config must be", (A, B, B), {"config": "fast"}),
  "config of xla": (
    ValueError,
    "config is one of 'sm90'",
    (A, B, B),
    {"config": tuning.Config(), "implementation": "xla"},
  ),
  "config of triton": (
    ValueError,
    "config is one of 'triton'",
    (A, B, B),
    {"config": triton_dense.Config(16, 16, 16)},
  ),
  "implementation": (
    ValueError,
    "implementation",
    (A, B, B),
    {"implementation": "x"},
  ),
  "implementation type": (
    TypeError,
    "implementation must be None, a name",
    (A, B, B),
    {"implementation": 3},
  ),
  "implementation none of any": (
    ValueError,
    "implementation must hold a name",
    (A, B, B),
    {"implementation": []},
  ),
} | {
  f"out_dtype {name}": (
    TypeError,
    "out_dtype must be",
    (A, B, B),
    {"out_dtype": no_dtype},
  )
  for name, no_dtype in NO_DTYPES.items()
}


@pytest.mark.parametrize("name", GATED)
def test_gated_matmul(name):
  error, message, arrays, keywords = GATED[name]
  assert_told(error, message, pallas_gemm.gated_matmul, *arrays, **keywords)


NUMBERS = (((1,), (0,)), ((), ()))


def general(error, message, numbers=NUMBERS, lhs=A, rhs=B, **keywords):
  """What is raised, what it says, and the call."""
  return error, message, (lhs, rhs, numbers), keywords


# Where `jax.lax.dot_general` says "dimension numbers", that will do.
DOT_GENERAL = {
  "numbers int": general(EITHER, "dimension_numbers must", 3),
  "numbers string": general(EITHER, "dimension_numbers must", "ab"),
  "numbers empty": general(EITHER, "dimension_numbers must", ()),
  "numbers dict": general(
    EITHER, "dimension_numbers must", {"contract": (1, 0)}
  ),
  "numbers without batch": general(
    EITHER, "dimension_numbers must", (((1,), (0,)),)
  ),
  "numbers of contraction": general(
    EITHER, "dimension_numbers must", ((1,), (0,))
  ),
  "numbers of three": general(
    EITHER, "dimension_numbers must", (((1,), (0,)), ((), ()), ())
  ),
  "numbers of three sides": general(
    EITHER, "dimension_numbers must", (((1,), (0,), (0,)), ((), ()))
  ),
  "numbers none inside": general(
    EITHER, "dimension_numbers must", (None, ((), ()))
  ),
  "numbers nested": general(
    EITHER, "dimension.numbers", ((((1,),), ((0,),)), ((), ()))
  ),
  "numbers strings": general(
    EITHER, "dimension.numbers", ((("1",), ("0",)), ((), ()))
  ),
  "numbers floats": general(
    TypeError, "dimension.numbers", (((1.0,), (0.0,)), ((), ()))
  ),
  "numbers float array": general(
    TypeError,
    "dimension.numbers",
    (np.array([[1.0], [0.0]]), np.zeros((2, 0), int)),
  ),
  "numbers none": general(
    EITHER, "dimension_numbers must", None, lhs=jnp.ones((2, 4, 6))
  ),
  "numbers none of a scalar": general(
    EITHER, "dimension_numbers must", None, lhs=jnp.ones(())
  ),
  "no such dimension": general(
    TypeError, "lhs dimension numbers", (((2,), (0,)), ((), ()))
  ),
  "negative dimension": general(
    TypeError, "rhs dimension numbers", (((1,), (-2,)), ((), ()))
  ),
  "twice": general(
    TypeError, "lhs contracting dimensions", (((1, 1), (0, 1)), ((), ()))
  ),
  "batch and contracted": general(
    TypeError, "lhs batch dimensions", (((1,), (0,)), ((1,), (0,)))
  ),
  "of one side": general(
    TypeError, "contracting dimensions", (((1,), ()), ((), ()))
  ),
  "k": general(TypeError, "contracting dimensions", rhs=SQUARE),
  "batch": general(TypeError, "batch dimensions", (((), ()), ((0,), (0,)))),
  "type narrow": general(
    TypeError,
    "preferred_element_type.*bfloat16.*int32",
    lhs=INTS,
    rhs=INTS,
    preferred_element_type="bfloat16",
  ),
  "type bool": general(
    TypeError,
    "preferred_element_type.*bool.*int32",
    lhs=INTS,
    rhs=INTS,
    preferred_element_type=bool,
  ),
  "precision type": general(EITHER, "[Pp]recision.*3", precision=3),
  "precision name": general(ValueError, "[Pp]recision.*zz", precision="zz"),
  "precision three": general(EITHER, "[Pp]recision", precision=("high",) * 3),
  "precision nothing": general(EITHER, "[Pp]recision", precision=()),
  "out_sharding string": general(
    TypeError, "out_sharding.*str", out_sharding="x"
  ),
  "out_sharding int": general(TypeError, "out_sharding.*int", out_sharding=3),
  "out_sharding tuple": general(
    TypeError, "out_sharding.*tuple", out_sharding=("x", None)
  ),
} | {
  f"type {name}": general(
    EITHER, "preferred_element_type must", preferred_element_type=no_dtype
  )
  for name, no_dtype in NO_DTYPES.items()
}


@pytest.mark.parametrize("name", DOT_GENERAL)
def test_dot_general(name):
  error, message, arrays, keywords = DOT_GENERAL[name]
  if "precision" in keywords:
    # `jax.lax` shows what came at the end of many lines.
    message = f"(?s){message}"
  assert_told(error, message, pallas_gemm.dot_general, *arrays, **keywords)


# What an op is called with, array by array; what may be None.
ARRAYS = {
  "matmul": {"a": A, "b": B, "bias": B[0], "c": C},
  "gated_matmul": {"x": A, "w_gate": B, "w_up": B},
  "dot_general": {"lhs": A, "rhs": B},
}
OPTIONAL = ("bias", "c")
NO_ARRAY = [
  (op, argument, kind)
  for op, arrays in ARRAYS.items()
  for argument in arrays
  for kind in ("none", *NO_ARRAYS)
  if kind != "none" or argument not in OPTIONAL
]


@pytest.mark.parametrize(("op", "argument", "kind"), NO_ARRAY)
def test_no_array(op, argument, kind):
  keywords = dict(ARRAYS[op])
  make, came = NO_ARRAYS.get(kind, (lambda _: None, "NoneType"))
  keywords[argument] = make(keywords[argument])
  if op == "dot_general":
    keywords["dimension_numbers"] = NUMBERS
  assert_told(
    TypeError,
    rf"^{argument} must .*({came})",
    getattr(pallas_gemm, op),
    **keywords,
  )


NO_ACTIVATION = [
  (op, kind) for op in ("matmul", "gated_matmul") for kind in NO_ACTIVATIONS
]


@pytest.mark.parametrize(("op", "kind"), NO_ACTIVATION)
def test_no_activation(op, kind):
  assert_told(
    TypeError,
    "^activation must",
    getattr(pallas_gemm, op),
    *((A, B) if op == "matmul" else (A, B, B)),
    activation=NO_ACTIVATIONS[kind],
  )


# Equal to what was right in the call before, and so compiled already.
EQUAL = {
  "alpha": ({"alpha": 1.0}, {"alpha": True}, "alpha must .*bool"),
  "alpha int": ({"alpha": 1}, {"alpha": True}, "alpha must .*bool"),
  "alpha zero": ({"alpha": 0.0}, {"alpha": False}, "alpha must .*bool"),
  "alpha complex": ({"alpha": 2.0}, {"alpha": 2 + 0j}, "alpha must be real"),
  "alpha NumPy": ({"alpha": 1.0}, {"alpha": np.True_}, "alpha must .*bool"),
  "beta": ({"beta": 1.0, "c": C}, {"beta": True, "c": C}, "beta must .*bool"),
  "beta without c": ({"beta": 1.0}, {"beta": True}, "beta must .*bool"),
  "beta zero": (
    {"beta": 0.0, "c": C},
    {"beta": False, "c": C},
    "beta must .*bool",
  ),
  "beta complex": (
    {"beta": 2.0, "c": C},
    {"beta": 2 + 0j, "c": C},
    "beta must be real",
  ),
  "transpose_a": ({}, {"transpose_a": 0}, "transpose_a must be .*int"),
  "transpose_a float": ({}, {"transpose_a": 0.0}, "transpose_a must .*float"),
  "transpose_b": (
    {"transpose_b": True, "b": B.T},
    {"transpose_b": 1, "b": B.T},
    "transpose_b must be .*int",
  ),
  "transpose_b NumPy": (
    {"transpose_b": True, "b": B.T},
    {"transpose_b": np.True_, "b": B.T},
    "transpose_b must be .*bool",
  ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_equals_something_right(name):
  """The check may not depend on what is compiled."""
  right, wrong, message = EQUAL[name]
  for _ in range(2):
    pallas_gemm.matmul(**{"a": A, "b": B} | right)
    assert_told(
      TypeError, message, pallas_gemm.matmul, **{"a": A, "b": B} | wrong
    )


def test_there_are_many_mistakes():
  """Of those written down here and beside the grouped ops, one by one."""
  ragged = test_ops_ragged_errors
  tables = [MATMUL, GATED, DOT_GENERAL, EQUAL, ragged.RAGGED_DOT, ragged.GATED]
  tables += [ragged.GENERAL, ragged.OF_LAX, ragged.EQUAL]
  assert sum(map(len, tables)) >= 160
  generated = (NO_ARRAY, NO_ACTIVATION, ragged.NO_ARRAY, ragged.NO_ACTIVATION)
  assert sum(map(len, generated)) >= 400


@pytest.mark.parametrize("transform", (jax.jit, jax.grad))
@pytest.mark.parametrize("op", ("matmul", "gated_matmul"))
def test_activation_closes_over_a_traced_value(transform, op):
  arrays = (A, B) if op == "matmul" else (A, B, B)

  def f(t):
    op_ = getattr(pallas_gemm, op)
    return op_(*arrays, activation=lambda x: x * t).sum()

  with pytest.raises(TypeError, match="must not close over a traced value"):
    transform(f)(1.0)


@pytest.mark.parametrize("name", ("alpha", "beta"))
@pytest.mark.parametrize("transform", (jax.jit, jax.grad))
def test_traced_factors_of_a_wrong_kind(name, transform):
  def f(t, of):
    factor = {name: t.astype(of) if of else t[None]}
    return pallas_gemm.matmul(A, B, c=C, **factor).sum().real

  for of, error in (("complex64", TypeError), ("bool", TypeError)):
    with pytest.raises(error, match=f"{name} must .*{of}"):
      transform(lambda t, of=of: f(t, of))(1.0)
  with pytest.raises(ValueError, match=rf"{name} must .*\(1,\)"):
    transform(lambda t: f(t, None))(1.0)


def test_strict_promotion_is_that_of_jax():
  with jax.numpy_dtype_promotion("strict"):
    with pytest.raises(ValueError, match="dtype promotion path"):
      pallas_gemm.matmul(A, B.astype(jnp.bfloat16))


class Array:
  """What says how it becomes an array."""

  def __init__(self, array):
    self.array = array

  def __jax_array__(self):
    return self.array


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
  pallas_gemm.matmul(A, B, config=tuning.Config())  # For GPUs alone.
  pallas_gemm.matmul(A, B, out_dtype=jnp.bfloat16)
  pallas_gemm.gated_matmul(A, B, B, out_dtype=np.dtype("float16"))
  pallas_gemm.matmul(A, B, transpose_a=False, transpose_b=False, bias=None)
  for numbers in ([[[1], [0]], [[], []]], NUMBERS):
    pallas_gemm.dot_general(A, B, numbers, out_sharding=None)


@pytest.mark.parametrize("op", ARRAYS)
@pytest.mark.parametrize("kind", ("NumPy", "__jax_array__"))
def test_what_becomes_an_array(op, kind):
  make = np.asarray if kind == "NumPy" else Array
  f = getattr(pallas_gemm, op)
  if op == "dot_general":
    f = functools.partial(f, dimension_numbers=NUMBERS)
  want = f(**ARRAYS[op])
  for argument, value in ARRAYS[op].items():
    out = f(**ARRAYS[op] | {argument: make(value)})
    np.testing.assert_array_equal(out, want, err_msg=argument)


def test_a_matrix_is_masked_nowhere():
  """What is masked is no number: filled in, it is."""
  masked = np.ma.masked_array(np.asarray(A), np.asarray(A) > 0)
  out = pallas_gemm.matmul(masked.filled(0), B)
  np.testing.assert_array_equal(out, pallas_gemm.matmul(jnp.minimum(A, 0), B))


def test_errors_say_the_same_under_jit():
  with pytest.raises(ValueError, match="b must have K = 6 like a"):
    jax.jit(pallas_gemm.matmul)(A, SQUARE)
