"""What follows a product inside a kernel: alpha, C, bias, activation, gate."""

import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import jaxprs
from pallas_gemm.problem import Problem

# What an activation may be made of: what Mosaic GPU lowers, on every
# supported JAX. `_replacements` are others.
PRIMITIVES = frozenset(
  """
  abs add and broadcast_in_dim clamp convert_element_type cos div eq exp
  exp2 ge gt integer_pow le log log2 logistic lt max min mul ne neg or round
  rsqrt select_n sign sin sqrt square sub tanh
""".split()
)

# What an activation is traced with.
_SUBTILE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
_LOG2_E = math.log2(math.e)
# See `_reciprocal`: the guess, and what makes the largest error least.
_NEGATED_EXPONENT = 0x7EF33400
_FIRST, _SECOND = 1.50096122, 0.74903909
# See `_normal_tail`: by rising powers, for 16-bit and for float32 results.
_LOG2_OF_NORMAL_TAIL = (
  -1.000014, -1.1510357, -0.4589643, -0.05350137, 0.008303247, -8.8322215e-4,
  5.6154104e-5, -1.5882472e-6,
)  # fmt: skip
_FINE_LOG2_OF_NORMAL_TAIL = (
  -0.99999994, -1.1511074, -0.45919564, -0.05250993, 0.007031271,
  -4.9401937e-5, -2.6937356e-4, 7.9485595e-5, -1.32735495e-5, 1.4310775e-6,
  -9.84405e-8, 3.9364125e-9, -6.967238e-11,
)  # fmt: skip


def fusible(activation, problem: Problem):
  """The activation as a kernel can compute it."""
  if activation is None:
    return None
  replace = _replacements(activation, problem)
  if others := _primitives(activation) - PRIMITIVES - replace.keys():
    raise NotImplementedError(
      f"the activation contains {', '.join(sorted(others))}, which a Hopper"
      " kernel can't compute"
    )
  approximate = is_approximate(activation, problem)
  # float16 is eight times as precise as bfloat16.
  is_fine = problem.out_dtype == "float16"
  traced = _traced(activation)
  if traced == _traced(jax.nn.gelu) and approximate:
    return _fine_gelu if is_fine else _gelu
  if traced == _traced(functools.partial(jax.nn.gelu, approximate=False)):
    return _gelu_by_erf if approximate else _fine_gelu_by_erf
  return jaxprs.without_custom_derivatives(activation, replace)


def _replacements(activation, problem: Problem) -> dict[str, Any]:
  """What is computed instead of some primitives, by their names."""
  if not is_approximate(activation, problem):
    return {
      "copy": _same,
      "erf": _fine_erf,
      "erfc": _fine_erfc,
      "expm1": _fine_expm1,
      "log1p": _fine_log1p,
    }
  is_fine = problem.out_dtype == "float16"
  return {
    "copy": _same,
    "erf": _erf,
    "erfc": _erfc,
    "expm1": _expm1,
    "log1p": _log1p,
    "logistic": _fine_logistic if is_fine else _logistic,
    "tanh": _tanh,
  }


def _primitives(activation) -> set[str]:
  return jaxprs.primitives_of(activation, _SUBTILE)


def _traced(activation) -> str:
  return str(jax.make_jaxpr(activation)(_SUBTILE))


def is_approximate(activation, problem: Problem) -> bool:
  """Whether exp is one instruction, good to 2^-22, and division the like.

  That is for results of 16 bits. The one-instruction forms of sin, cos and log
  have absolute errors, which show where the result is small. Here sigmoid, silu
  and gelu have relative errors up to 2^-14; tanh, expm1, log1p, erf and, above
  2^-36, erfc up to 2^-15; if the result is float16, each up to 2^-16.
  `pallas_gemm.check` holds results to that.
  """
  return (
    problem.out_dtype != "float32"
    and activation is not None
    and not _primitives(activation) & {"cos", "log", "log2", "sin"}
  )


def _reciprocal(x):
  """1 / x, with a relative error of 2^-14.9, of 1 <= x <= 2^125.

  Negating the exponent gives a guess g, good to 5 %; with e = 1 - x g, 1 / x is
  g (1 + e + e^2 + ...). Of that the first three terms, with constants for which
  the largest error is least: g ((x g - 1.5)^2 + 0.75), a quarter of what is
  left out. Two steps of Newton's method take one instruction more: 8192 x 4096
  x 1024 with gelu 107.2 -> 105.3 us (H200).
  """
  guess = _NEGATED_EXPONENT - lax.bitcast_convert_type(x, jnp.int32)
  guess = lax.bitcast_convert_type(guess, jnp.float32)
  off = x * guess - _FIRST
  return guess * (off * off + _SECOND)


def _fine_reciprocal(x):
  """The same with a step of Newton's method, which squares its error."""
  found = _reciprocal(x)
  return found + found * (1 - x * found)


def _series(x, coefficients):
  """The polynomial with these coefficients, by rising powers."""
  total = coefficients[-1]
  for coefficient in coefficients[-2::-1]:
    total = total * x + coefficient
  return total


def _tanh(x):
  """tanh: 1 - 2 / (1 + exp(2 x)), or x - x^3 / 3 where that has few digits.

  The one instruction that there is has a relative error of 2^-11: in gelu,
  1 + tanh would lose most of its digits for negative arguments.
  """
  root = lax.rsqrt(1 + jnp.exp2(2 * _LOG2_E * x))
  small = x * _series(x * x, (1, -1 / 3))
  return jnp.where(abs(x) < 2**-4, small, 1 - 2 * (root * root))


def _expm1(x):
  small = x * _series(x, (1, 1 / 2, 1 / 6))
  return jnp.where(abs(x) < 2**-5, small, jnp.exp2(_LOG2_E * x) - 1)


def _fine_expm1(x):
  """exp(x) - 1 to 3 units in the last place, if exp is good to one."""
  small = x * _series(x, [1 / math.factorial(n) for n in range(1, 9)])
  return jnp.where(abs(x) < 0.5, small, jnp.exp(x) - 1)


def _log1p(x):
  small = x * _series(x, (1, -1 / 2, 1 / 3))
  return jnp.where(abs(x) < 2**-5, small, jnp.log(1 + x))


def _fine_log1p(x):
  """log(1 + x) to 4.3 units in the last place, if log is good to one."""
  small = x * _series(x, [-((-1) ** n) / n for n in range(1, 14)])
  return jnp.where(abs(x) < 0.25, small, jnp.log(1 + x))


def _normal_tail(x, coefficients=_LOG2_OF_NORMAL_TAIL):
  """The normal distribution's 1 - cdf(x) of x >= 0, by its logarithm.

  That is close to a parabola: the polynomial with the least largest error (a
  linear program found it) is good to 2^-16 up to x = 7, by the fine
  coefficients to 2^-22 at 1, 2^-19 at 4 and 2^-16 at 8, where 2^-23 of the
  logarithm is that much. For larger x it is less exact, below 2^-39, and falls
  still.
  """
  return jnp.exp2(_series(x, coefficients))


def _erf(x, coefficients=_LOG2_OF_NORMAL_TAIL):
  terms = [(-1) ** n / math.factorial(n) / (2 * n + 1) for n in range(7)]
  small = 2 / math.sqrt(math.pi) * x * _series(x * x, terms)
  large = 1 - 2 * _normal_tail(math.sqrt(2) * abs(x), coefficients)
  return jnp.where(abs(x) < 0.5, small, jnp.where(x < 0, -large, large))


def _erfc(x, coefficients=_LOG2_OF_NORMAL_TAIL):
  tail = 2 * _normal_tail(math.sqrt(2) * abs(x), coefficients)
  return jnp.where(x < 0, 2 - tail, tail)


def _gelu_by_erf(x, coefficients=_LOG2_OF_NORMAL_TAIL):
  """gelu(approximate=False), x * cdf(x), as max(x, 0) - |x| * cdf(-|x|).

  As many instructions as `_gelu` takes.
  """
  size = jnp.minimum(abs(x), 2.0**100)  # At infinity the product is 0.
  return jnp.maximum(x, 0) - size * _normal_tail(size, coefficients)


def _gelu(x, reciprocal=_reciprocal):
  """gelu as x * sigmoid(2 u): 1 + tanh(u) has few digits where it is small.

  With the constants multiplied beforehand there is less to do for each result:
  8192 x 4096 x 1024 108.6 -> 105.8 us on an H200.
  """
  scale = -2 * _LOG2_E * math.sqrt(2 / math.pi)
  z = x * (scale + scale * 0.044715 * (x * x))
  return x * _one_over_one_plus_exp2(z, reciprocal)


def _logistic(x, reciprocal=_reciprocal):
  return _one_over_one_plus_exp2(-_LOG2_E * x, reciprocal)


def _one_over_one_plus_exp2(x, reciprocal=_reciprocal):
  """1 / (1 + 2^x), with a relative error of 2^-14 by `_reciprocal`.

  An SM computes exp2 of 16 elements a clock, of reciprocals as many, of FMAs
  128: the reciprocal of each result is better made of these. Gated 4096 x 2 *
  14336 x 4096 1209 -> 1203 us (H200). That FMAs can take over is from
  FlashAttention-4 (2025), which does so for exp2.
  """
  # 2^126 is as much as `_reciprocal` takes: its guess is then 0. NaN remains.
  return reciprocal(1 + jnp.exp2(jnp.minimum(x, 126)))


def _same(x):
  return x


_fine_gelu = functools.partial(_gelu, reciprocal=_fine_reciprocal)
_fine_logistic = functools.partial(_logistic, reciprocal=_fine_reciprocal)
_fine_erf, _fine_erfc, _fine_gelu_by_erf = (
  functools.partial(function, coefficients=_FINE_LOG2_OF_NORMAL_TAIL)
  for function in (_erf, _erfc, _gelu_by_erf)
)


def apply(accumulators, c, bias, *, alpha, beta, activation, problem):
  """The results (float32) of one subtile or matrix from its accumulators.

  alpha and beta are Python numbers, or float32 scalars known at run time.
  """
  if problem.epilogue.gated:
    gate, up = accumulators
    out = activation(gate) * up
    return [out, gate, up] if problem.epilogue.save else [out]
  (x,) = accumulators
  x = _times(x, alpha)
  if c is not None:
    x = x + _times(c.astype(jnp.float32), beta)
  if bias is not None:
    x = x + bias
  out = x if activation is None else activation(x)
  return [out, x] if problem.epilogue.save else [out]


def _times(x, factor):
  """x * factor; nothing is done where that is known to change nothing."""
  if isinstance(factor, jax.Array):
    return x * factor
  return x if factor == 1.0 else x * jnp.float32(factor)
