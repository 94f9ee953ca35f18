"""epilogues: the forms that activations take inside a kernel."""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels import epilogues
from pallas_gemm.problem import Problem

ROUNDED = Problem.flat(m=64, n=64, k=64, dtype="bfloat16", out_dtype="bfloat16")
FINE = Problem.flat(m=64, n=64, k=64, dtype="float16", out_dtype="float16")
EXACT = Problem.flat(m=64, n=64, k=64, dtype="bfloat16", out_dtype="float32")
# Other tests do without (tests/conftest.py); exp is less exact then.
OPTIMIZED = {
  "xla_backend_optimization_level": 3,
  "xla_llvm_disable_expensive_passes": False,
}


def sigmoid(x):
  with np.errstate(over="ignore"):
    return 1 / (1 + np.exp(-x))


def gelu(x):
  return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def softplus(x):
  return np.logaddexp(x, 0)


def elu(x):
  return np.where(x > 0, x, np.expm1(x))


# NumPy has neither.
_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def gelu_by_erf(x):
  return x / 2 * _erfc(-x / math.sqrt(2))


GELU_BY_ERF = functools.partial(jax.nn.gelu, approximate=False)


def in_float64(reference, x):
  with np.errstate(over="ignore", invalid="ignore"):
    return reference(np.asarray(x, np.float64))


def assert_close(activation, reference, least, problem, most, least_size=0.0):
  """Relative errors are `most` or less; NaN is no error that small.

  Args:
    activation: what a kernel of `problem` is to compute.
    reference: the same in float64.
    least: of the arguments.
    problem: says how exact it is.
    most: the largest relative error.
    least_size: of the results that are compared.
  """
  x = np.linspace(least, 80, 200_001, dtype=np.float32)
  small = np.geomspace(1e-30, min(0.9, -least), 10_001, dtype=np.float32)
  x = np.concatenate([x, small, -small])
  want = in_float64(reference, x)
  compute = epilogues.fusible(activation, problem)
  out = jax.jit(compute, compiler_options=OPTIMIZED)(x)
  error = np.abs(np.asarray(out, np.float64) - want)
  size = np.abs(want)
  far = ~(error <= most * size) & (size >= least_size)
  assert not far.any(), (x[far], error[far] / size[far])


# The function, the same in float64, and the least of its arguments.
FORMS = {
  "sigmoid": (jax.nn.sigmoid, sigmoid, -80),
  "silu": (jax.nn.silu, lambda x: x * sigmoid(x), -80),
  "gelu": (jax.nn.gelu, gelu, -8),
  "gelu_by_erf": (GELU_BY_ERF, gelu_by_erf, -7),
  "softplus": (jax.nn.softplus, softplus, -80),
  "log_sigmoid": (jax.nn.log_sigmoid, lambda x: -softplus(-x), -80),
  "mish": (jax.nn.mish, lambda x: x * np.tanh(softplus(x)), -80),
  "elu": (jax.nn.elu, elu, -80),
  "tanh": (jnp.tanh, np.tanh, -80),
  "expm1": (jnp.expm1, np.expm1, -20),
  "log1p": (jnp.log1p, np.log1p, -0.999),
  "erf": (lax.erf, _erf, -20),
  "erfc": (lax.erfc, _erfc, -20),
}


@pytest.mark.parametrize(
  ("problem", "most"), ((ROUNDED, 2.0**-14), (FINE, 2.0**-16)), ids=str
)
@pytest.mark.parametrize("name", FORMS)
def test_small_values_are_as_exact_as_large_ones(name, problem, most):
  # Below 2^-36 erfc is less exact.
  least_size = 2.0**-36 if name == "erfc" else 0.0
  assert_close(*FORMS[name], problem, most, least_size)


@pytest.mark.parametrize("name", ("expm1", "log1p", "erf"))
def test_forms_for_float32_results(name):
  activation, reference, _ = FORMS[name]
  least = -0.999 if name == "log1p" else -80
  assert_close(activation, reference, least, EXACT, 2.0**-21)


def test_erfc_for_float32_results():
  assert_close(lax.erfc, _erfc, -20, EXACT, 2.0**-16, 2.0**-36)


@pytest.mark.parametrize(
  ("least", "most"), ((-1, 2.0**-20), (-4, 2.0**-18), (-8, 2.0**-15))
)
def test_gelu_by_erf_for_float32_results(least, most):
  assert_close(GELU_BY_ERF, gelu_by_erf, least, EXACT, most)


@pytest.mark.parametrize("problem", (ROUNDED, FINE), ids=str)
@pytest.mark.parametrize(
  "name", sorted(FORMS.keys() - {"gelu_by_erf", "log_sigmoid", "mish"})
)
def test_the_ends_are_jaxs(name, problem):
  activation, *_ = FORMS[name]
  ends = [math.inf, -math.inf, math.nan, 0.0, -0.0, 3e38, -3e38, 1e-40, -200.0]
  x = jnp.asarray(ends, jnp.float32)
  out = np.asarray(jax.jit(epilogues.fusible(activation, problem))(x))
  want = np.asarray(activation(x))
  np.testing.assert_allclose(out, want, rtol=2.0**-14, atol=2.0**-100)


def test_gelu_by_erf_has_a_limit():
  """Where JAX's product of infinity and 0 is NaN."""
  x = jnp.asarray([math.inf, -math.inf, math.nan, 2.0**127, -(2.0**127), -0.0])
  out = epilogues.fusible(GELU_BY_ERF, ROUNDED)(x)
  np.testing.assert_array_equal(out, [math.inf, 0, math.nan, 2.0**127, 0, 0])


@pytest.mark.parametrize(
  ("activation", "form"),
  (
    (jax.nn.gelu, epilogues._gelu),
    (functools.partial(jax.nn.gelu, approximate=True), epilogues._gelu),
    (lambda x: jax.nn.gelu(x), epilogues._gelu),
    (GELU_BY_ERF, epilogues._gelu_by_erf),
    (lambda x: jax.nn.gelu(x, approximate=False), epilogues._gelu_by_erf),
  ),
  ids=("itself", "partial", "wrapped", "by_erf", "by_erf_wrapped"),
)
def test_gelu_is_known_by_what_it_computes(activation, form):
  assert epilogues.fusible(activation, ROUNDED) is form


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
