"""Mistakes: each names the argument, what came and what is needed."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import tuning
from pallas_gemm.kernels import triton_dense
from tests.support.products import normal

A, B = normal(4, 6), normal(6, 8)
SQUARE = normal(4, 4)
INTS = jnp.arange(16).reshape(4, 4)
HALF = normal(4, 4, dtype="bfloat16")


class Unhashable:
  """A callable that can't be hashed."""

  __hash__ = None

  def __call__(self, x):
    return x


def case(error, message, a=A, b=B, **keywords):
  """What is raised, what it says, and the call."""
  return error, message, a, b, keywords


MATMUL = {
  "a list": case(TypeError, "a must be an array, got list", [[1.0]], B),
  "a none": case(TypeError, "a must be an array, got NoneType", None, B),
  "a string": case(TypeError, "str", "x", B),
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
  "alpha array": case(
    TypeError,
    "alpha must be a Python number.*scale the result",
    alpha=jnp.ones(()),
  ),
  "beta array": case(
    TypeError,
    "beta must be a Python number",
    beta=jnp.ones(()),
    c=jnp.ones((4, 8)),
  ),
  "alpha string": case(
    TypeError, "alpha must be a Python number, got str", alpha="2"
  ),
  "alpha bool": case(
    TypeError, "alpha must be a Python number, got bool", alpha=False
  ),
  "alpha none": case(
    TypeError, "alpha must be a Python number, got NoneType", alpha=None
  ),
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
    TypeError, "activation must be an elementwise", activation=jax.nn.softmax
  ),
  "activation of all": case(
    TypeError,
    "activation must be elementwise, got reduce_max of all",
    activation=lambda x: x - x.max(),
  ),
  "activation reverses": case(
    TypeError, "must be elementwise, got rev of all", activation=jnp.flip
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
  "activation unhashable": case(
    TypeError,
    "activation must be hashable, got Unhashable",
    activation=Unhashable(),
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
    TypeError, "implementation must be hashable", implementation={}
  ),
  "config type": case(TypeError, "config must be a tuning.Config", config=128),
  "config dict": case(
    TypeError, "config must be hashable, got dict", config={"block_m": 128}
  ),
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
}


@pytest.mark.parametrize("name", MATMUL)
def test_matmul(name):
  error, message, a, b, keywords = MATMUL[name]
  with pytest.raises(error, match=message):
    pallas_gemm.matmul(a, b, **keywords)


GATED = {
  "shapes": (ValueError, "w_up must be", (A, B, B.T), {}),
  "dtypes": (
    ValueError,
    "w_up must be float32",
    (A, B, B.astype("bfloat16")),
    {},
  ),
  "x": (TypeError, "x must be an array, got NoneType", (None, B, B), {}),
  "w_gate": (TypeError, "w_gate must be an array", (A, [1.0], B), {}),
  "w_up": (TypeError, "w_up must be an array", (A, B, None), {}),
  "k": (ValueError, "w_gate must have K = 4 like x", (SQUARE, B, B), {}),
  "activation": (
    TypeError,
    "activation must be a function, got None",
    (A, B, B),
    {"activation": None},
  ),
  "config": (TypeError, "config must be", (A, B, B), {"config": "fast"}),
  "implementation": (
    ValueError,
    "implementation",
    (A, B, B),
    {"implementation": "x"},
  ),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_matmul(name):
  error, message, arrays, keywords = GATED[name]
  with pytest.raises(error, match=message):
    pallas_gemm.gated_matmul(*arrays, **keywords)


@pytest.mark.parametrize("transform", (jax.jit, jax.grad, jax.vmap))
def test_traced_factor(transform):
  def f(t):
    return pallas_gemm.matmul(A, B, alpha=t).sum()

  with pytest.raises(TypeError, match="alpha must be a Python number"):
    transform(f)(jnp.ones(3) if transform is jax.vmap else 1.0)


@pytest.mark.parametrize("transform", (jax.jit, jax.grad))
def test_activation_closes_over_a_traced_value(transform):
  def f(t):
    return pallas_gemm.matmul(A, B, activation=lambda x: x * t).sum()

  with pytest.raises(TypeError, match="must not close over a traced value"):
    transform(f)(1.0)


def test_strict_promotion_is_that_of_jax():
  with jax.numpy_dtype_promotion("strict"):
    with pytest.raises(ValueError, match="dtype promotion path"):
      pallas_gemm.matmul(A, B.astype(jnp.bfloat16))


def test_what_is_no_mistake():
  """Near misses of the above."""
  half = functools.partial(jnp.multiply, 0.5)
  pallas_gemm.matmul(A, B, alpha=float("nan"))
  pallas_gemm.matmul(INTS, INTS, alpha=2.0)
  pallas_gemm.matmul(A, B, implementation=["triton", "xla"])
  pallas_gemm.matmul(A, B, activation=half, precision=["high", "highest"])
  pallas_gemm.matmul(A, B, config=tuning.Config())  # For GPUs alone.
  pallas_gemm.matmul(A, B, activation=jax.jit(jax.nn.relu), bias=jnp.ones(8))
  # Elementwise, though along a dimension of its own.
  pallas_gemm.matmul(A, B, activation=lambda x: jnp.stack([x, 0 * x]).max(0))


def test_errors_say_the_same_under_jit():
  with pytest.raises(ValueError, match="b must have K = 6 like a"):
    jax.jit(pallas_gemm.matmul)(A, SQUARE)
