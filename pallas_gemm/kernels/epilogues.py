"""What follows a product inside a kernel: alpha, C, bias, activation, gate."""

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


def fusible(activation, problem: Problem):
  """The activation as a kernel can compute it."""
  if activation is None:
    return None
  if others := _primitives(activation) - PRIMITIVES:
    raise NotImplementedError(
      f"the activation contains {', '.join(sorted(others))}, which a Hopper"
      " kernel can't compute"
    )
  replace = {"tanh": _tanh} if is_approximate(activation, problem) else {}
  return compat.without_custom_derivatives(activation, replace)


def _primitives(activation) -> set[str]:
  some = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  return compat.primitives_of(activation, some)


def is_approximate(activation, problem: Problem) -> bool:
  """Whether exp is one instruction, good to 2^-22, and division the like.

  That is for results of 16 bits. The one-instruction forms of sin, cos, log
  and tanh have absolute errors, which show where the result is small.
  """
  return (
    problem.out_dtype != "float32"
    and activation is not None
    and not _primitives(activation) & {"cos", "log", "log2", "sin"}
  )


def _tanh(x):
  """tanh with an absolute error of 2^-21: 1 - 2 / (1 + exp(2 x)).

  The one instruction that there is has 2^-11: in gelu, 1 + tanh would lose
  most of its digits for negative arguments.
  """
  root = lax.rsqrt(1 + jnp.exp2(2 * math.log2(math.e) * x))
  return 1 - 2 * (root * root)


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
