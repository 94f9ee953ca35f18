"""epilogues: the forms that activations take inside a kernel."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels import epilogues
from pallas_gemm.kernels.problem import Problem

ROUNDED = Problem(m=64, n=64, k=64, dtype="bfloat16", out_dtype="bfloat16")
FINE = Problem(m=64, n=64, k=64, dtype="float16", out_dtype="float16")
EXACT = Problem(m=64, n=64, k=64, dtype="bfloat16", out_dtype="float32")


def sigmoid(x):
  with np.errstate(over="ignore"):
    return 1 / (1 + np.exp(-x))


def gelu(x):
  return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def in_float64(reference, x):
  with np.errstate(over="ignore", invalid="ignore"):
    return reference(np.asarray(x, np.float64))


@pytest.mark.parametrize(
  ("problem", "most"), ((ROUNDED, 2.0**-14), (FINE, 2.0**-16)), ids=str
)
@pytest.mark.parametrize(
  ("activation", "reference", "least"),
  (
    (jax.nn.sigmoid, sigmoid, -80),
    (jax.nn.silu, lambda x: x * sigmoid(x), -80),
    (jax.nn.gelu, gelu, -8),
  ),
  ids=("sigmoid", "silu", "gelu"),
)
def test_small_values_are_as_exact_as_large_ones(
  activation, reference, least, problem, most
):
  x = jnp.linspace(least, 100, 200_001, dtype=jnp.float32)
  want = in_float64(reference, x)
  out = jax.jit(epilogues.fusible(activation, problem))(x)
  error = np.abs(np.asarray(out, np.float64) - want)
  assert (error <= most * np.abs(want)).all(), (error / np.abs(want)).max()


def test_tanh_has_an_absolute_error():
  x = jnp.linspace(-50, 50, 200_001, dtype=jnp.float32)
  out = jax.jit(epilogues.fusible(jnp.tanh, ROUNDED))(x)
  error = np.abs(np.asarray(out, np.float64) - in_float64(np.tanh, x))
  assert error.max() <= 2.0**-21


@pytest.mark.parametrize("problem", (ROUNDED, FINE), ids=str)
@pytest.mark.parametrize(
  ("activation", "least"),
  (
    (jax.nn.sigmoid, 2.0**-100),
    (jax.nn.silu, 2.0**-100),
    (jax.nn.gelu, 2.0**-100),
    (jnp.tanh, 2.0**-21),
  ),
  ids=("sigmoid", "silu", "gelu", "tanh"),
)
def test_the_ends_are_jaxs(activation, least, problem):
  ends = [math.inf, -math.inf, math.nan, 0.0, -0.0, 3e38, -3e38, 1e-40, -200.0]
  x = jnp.asarray(ends, jnp.float32)
  out = np.asarray(jax.jit(epilogues.fusible(activation, problem))(x))
  want = np.asarray(activation(x))
  np.testing.assert_allclose(out, want, rtol=2.0**-14, atol=least)


@pytest.mark.parametrize(
  "activation",
  (
    jax.nn.gelu,
    functools.partial(jax.nn.gelu, approximate=True),
    lambda x: jax.nn.gelu(x),
  ),
  ids=("itself", "partial", "wrapped"),
)
def test_gelu_is_known_by_what_it_computes(activation):
  assert epilogues.fusible(activation, ROUNDED) is epilogues._gelu


def test_another_function_is_not_taken_for_gelu():
  def quick_gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)

  x = jnp.linspace(-4, 4, 101, dtype=jnp.float32)
  out = epilogues.fusible(quick_gelu, ROUNDED)(x)
  np.testing.assert_allclose(out, quick_gelu(x), rtol=2.0**-14)


def test_float32_results_get_the_function_as_it_is():
  x = jnp.linspace(-9, 9, 10_001, dtype=jnp.float32)
  for activation in (jax.nn.gelu, jax.nn.silu, jnp.tanh):
    out = jax.jit(epilogues.fusible(activation, EXACT))(x)
    np.testing.assert_array_equal(out, jax.jit(activation)(x))
