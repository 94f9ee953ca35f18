"""Products for the tests of the ops: operands, float64 references, bounds."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import numerics

# What a sum passes through after K additions: alpha, C, bias; and what the
# float32 versions of the activations below are off at most, in roundings.
_EPILOGUE_ROUNDINGS = 4
_ACTIVATION_ROUNDINGS = 32
# The steepest of the activations below is gelu, 1.13.
_STEEPEST = 1.2


def _silu(z):
  return z / (1 + np.exp(-z))


def _gelu(z):
  inner = np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)
  return z * (1 + np.tanh(inner)) / 2


def _gelu_by_erf(z):
  return z / 2 * np.vectorize(math.erfc, otypes=[np.float64])(-z / 2**0.5)


# Each as JAX has it, in float64.
ACTIVATIONS = {
  jax.nn.relu: lambda z: np.maximum(z, 0),
  jax.nn.silu: _silu,
  jax.nn.gelu: _gelu,
  functools.partial(jax.nn.gelu, approximate=False): _gelu_by_erf,
  jnp.tanh: np.tanh,
}


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> jax.Array:
  """N(0, 1); other arrays for other shapes and seeds."""
  rng = np.random.default_rng((seed, *shape))
  return jnp.asarray(rng.standard_normal(shape), dtype)


def float64(x: Any) -> np.ndarray:
  """On the host."""
  return np.asarray(x).astype(np.float64)


def assert_product(
  out: jax.Array,
  a: jax.Array,
  b: jax.Array,
  *,
  bias: jax.Array | None = None,
  c: jax.Array | None = None,
  alpha: float = 1.0,
  beta: float = 1.0,
  activation: Any = None,
) -> None:
  """`out` is activation(alpha * A @ B + beta * C + bias), within its bound."""
  want, bound = _preactivation(a, b, bias, c, alpha, beta)
  if activation is not None:
    want, bound = _activated(activation, want, bound, a.dtype)
  _assert_within(out, want, bound)


def assert_gated(out, x, w_gate, w_up, activation) -> None:
  """`out` is activation(x @ w_gate) * (x @ w_up), within its bound."""
  gate = _preactivation(x, w_gate, None, None, 1.0, 1.0)
  gate, gate_bound = _activated(activation, *gate, x.dtype)
  up, up_bound = _preactivation(x, w_up, None, None, 1.0, 1.0)
  bound = np.abs(gate) * up_bound + (np.abs(up) + up_bound) * gate_bound
  bound += _unit(x.dtype) * (np.abs(gate * up) + bound)
  _assert_within(out, gate * up, bound)


def assert_same(got: Any, want: Any) -> None:
  """Trees of float64 arrays that differ by less than 2^12 roundings."""
  jax.tree.map(_assert_same_array, got, want)


def _assert_same_array(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype == np.float64
  assert got.shape == want.shape
  bound = numerics.gamma(2**12, 2.0**-53) * (1 + np.abs(want).max(initial=0))
  assert np.all(np.abs(got - want) <= bound), np.abs(got - want).max()


def _preactivation(a, b, bias, c, alpha, beta):
  unit = _unit(a.dtype)
  x, y = float64(a), float64(b)
  want = alpha * np.matmul(x, y)
  rounded = numerics.gamma(a.shape[-1] + _EPILOGUE_ROUNDINGS, unit)
  bound = rounded * abs(alpha) * np.matmul(np.abs(x), np.abs(y))
  for factor, term in ((beta, c), (1.0, bias)):
    if term is not None:
      want = want + factor * float64(term)
      rounded = numerics.gamma(_EPILOGUE_ROUNDINGS, unit)
      bound = bound + rounded * np.abs(factor * float64(term))
  return want, bound


def _activated(activation, z, bound, dtype):
  own = numerics.gamma(_ACTIVATION_ROUNDINGS, _unit(dtype))
  own = own * (np.abs(z) + 1)
  return ACTIVATIONS[activation](z), _STEEPEST * bound + own


def _unit(dtype) -> float:
  """Of accumulation: tensor cores truncate the sums of 16-bit operands."""
  return {2: 2.0**-23, 4: 2.0**-24, 8: 2.0**-53}[jnp.dtype(dtype).itemsize]


def _assert_within(out, want, bound):
  info = jnp.finfo(out.dtype)
  unit = 2.0 ** -(info.nmant + 1)
  bound = bound + unit * (np.abs(want) + bound) + float(info.smallest_normal)
  assert out.shape == want.shape
  error = np.abs(float64(out) - want)
  # NaN compares false.
  assert np.all(error <= bound), f"{(error / bound).max()} of the bound"
