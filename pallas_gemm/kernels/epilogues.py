"""What follows a product inside a kernel: alpha, C, bias, activation, gate."""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels.problem import Problem

# What an activation may be made of: what Mosaic GPU lowers, on every
# supported JAX.
PRIMITIVES = frozenset(
  """
  abs add and broadcast_in_dim convert_element_type cos div eq exp
  exp2 ge gt integer_pow le log log2 logistic lt max min mul ne neg or round
  rsqrt select_n sign sin sqrt square sub tanh
""".split()
)

# What an activation is traced with.
_PIECE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
_LOG2_E = math.log2(math.e)
# See `_reciprocal`: the guess, and what makes the largest error least.
_NEGATED_EXPONENT = 0x7EF33400
_FIRST, _SECOND = 1.50096122, 0.74903909


def fusible(activation, problem: Problem):
  """The activation as a kernel can compute it."""
  if activation is None:
    return None
  if others := _primitives(activation) - PRIMITIVES:
    raise NotImplementedError(
      f"the activation contains {', '.join(sorted(others))}, which a Hopper"
      " kernel can't compute"
    )
  if not is_approximate(activation, problem):
    return compat.without_custom_derivatives(activation)
  # float16 is eight times as precise as bfloat16.
  is_fine = problem.out_dtype == "float16"
  if _traced(activation) == _traced(jax.nn.gelu):
    return _fine_gelu if is_fine else _gelu
  logistic = _fine_logistic if is_fine else _logistic
  replace = {"tanh": _tanh, "logistic": logistic}
  return compat.without_custom_derivatives(activation, replace)


def _primitives(activation) -> set[str]:
  return compat.primitives_of(activation, _PIECE)


def _traced(activation) -> str:
  return str(jax.make_jaxpr(activation)(_PIECE))


def is_approximate(activation, problem: Problem) -> bool:
  """Whether exp is one instruction, good to 2^-22, and division the like.

  That is for results of 16 bits. The one-instruction forms of sin, cos, log
  and tanh have absolute errors, which show where the result is small. Here
  tanh is good to 2^-21 (absolute), sigmoid, silu and gelu to 2^-14 (relative),
  or to 2^-16 if the result is float16.
  """
  return (
    problem.out_dtype != "float32"
    and activation is not None
    and not _primitives(activation) & {"cos", "log", "log2", "sin"}
  )


def _reciprocal(x):
  """1 / x, with a relative error of 2^-14.9, of 1 <= x <= 2^126.

  Negating the exponent gives a guess g, good to 5 %; with e = 1 - x g, 1 / x is
  g (1 + e + e^2 + ...). Of that the first three terms, with constants for which
  the largest error is least: g ((x g - 1.5)^2 + 0.75), a quarter of what is
  left out. Two steps of Newton's method take one instruction more: 8192 x 4096
  x 1024 with gelu 107.2 -> 105.3 us (activation-3).
  """
  guess = _NEGATED_EXPONENT - lax.bitcast_convert_type(x, jnp.int32)
  guess = lax.bitcast_convert_type(guess, jnp.float32)
  rest = x * guess - _FIRST
  return guess * (rest * rest + _SECOND)


def _fine_reciprocal(x):
  """The same with a step of Newton's method, which squares its error."""
  found = _reciprocal(x)
  return found + found * (1 - x * found)


def _tanh(x):
  """tanh with an absolute error of 2^-21: 1 - 2 / (1 + exp(2 x)).

  The one instruction that there is has 2^-11: in gelu, 1 + tanh would lose
  most of its digits for negative arguments.
  """
  root = lax.rsqrt(1 + jnp.exp2(2 * _LOG2_E * x))
  return 1 - 2 * (root * root)


def _gelu(x, reciprocal=_reciprocal):
  """gelu as x * sigmoid(2 u): 1 + tanh(u) has few digits where it is small.

  With the constants multiplied beforehand there is less to do for each result:
  8192 x 4096 x 1024 108.6 -> 105.8 us on an H200 (activation-1).
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
  14336 x 4096 1209 -> 1203 us (activation-1). That FMAs can take over is from
  FlashAttention-4 (2025), which does so for exp2.
  """
  # 2^126 is as much as `_reciprocal` takes: its guess is then 0. NaN remains.
  return reciprocal(1 + jnp.exp2(jnp.minimum(x, 126)))


_fine_gelu = functools.partial(_gelu, reciprocal=_fine_reciprocal)
_fine_logistic = functools.partial(_logistic, reciprocal=_fine_reciprocal)


def tail(sums, c, bias, *, alpha, beta, activation, problem):
  """The results (float32) of one piece or one matrix from its sums."""
  if problem.gated:
    gate, up = sums
    out = activation(gate) * up
    return [out, gate, up] if problem.save_preactivation else [out]
  (x,) = sums
  if alpha != 1.0:
    x = x * jnp.float32(alpha)
  if c is not None:
    c = c.astype(jnp.float32)
    x = x + (c if beta == 1.0 else c * jnp.float32(beta))
  if bias is not None:
    x = x + bias
  out = x if activation is None else activation(x)
  return [out, x] if problem.save_preactivation else [out]
