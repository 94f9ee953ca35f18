"""Products of 8 bits from elsewhere that ours are compared with.

Each takes a case of `eight_bits`: two `Quantized` operands stored along K, and
of groups their sizes. It gives a function of the case's operands, or raises
NotImplementedError with the reason why there is none.
"""

import functools
import importlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from experiments.harness import ragged_peers
from experiments.harness.case import XLA, Arm, Candidate

BLOCK = 128
# Of A [M, K] and B [N, K].
ALONG_K = ((1,), (1,)), ((), ())
# Sums over the rows of each group.
OF_ROWS = lax.RaggedDotDimensionNumbers(
  (((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(),
)
# Rows of A by B [G, N, K].
BY_ROWS = lax.RaggedDotDimensionNumbers(
  (((1,), (2,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(0,),
)
_WIDE = {"preferred_element_type": jnp.float32}


def arms(case: Any) -> dict[str, Arm]:
  """By name; of those that no case of a kind has there is none."""
  if case.groups:
    of = {"lax.ragged_dot": lax_ragged_dot}
  else:
    of = {
      "jax.nn.scaled_matmul": nn_scaled_matmul,
      "lax.scaled_dot": lax_scaled_dot,
      "qwix": qwix_dot_general,
    }
  return {name: functools.partial(arm, case) for name, arm in of.items()}


# All of them are left to XLA.
CLAIMS = dict.fromkeys(
  ("jax.nn.scaled_matmul", "lax.scaled_dot", "qwix", "lax.ragged_dot"), XLA
)


def nn_scaled_matmul(case: Any) -> list[Candidate]:
  """`jax.nn.scaled_matmul`, which takes a scale for each row and block of K."""
  _needs(jax.nn, "scaled_matmul")
  _needs_floats_along_k(case)
  _needs_whole_blocks(case, case.k)

  def call(a, b):
    values = (x.values[None] for x in (a, b))
    scales = (_of_each_row(x)[None] for x in (a, b))
    how = {"preferred_element_type": jnp.bfloat16}
    return jax.nn.scaled_matmul(*values, *scales, **how)[0]

  return [Candidate(call)]


def lax_scaled_dot(case: Any) -> list[Candidate]:
  """`jax.lax.scaled_dot`, of the same scales."""
  _needs(lax, "scaled_dot")
  _needs_floats_along_k(case)
  _needs_whole_blocks(case, case.k)

  def call(a, b):
    return lax.scaled_dot(
      a.values,
      b.values,
      lhs_scale=_of_each_row(a),
      rhs_scale=_of_each_row(b),
      dimension_numbers=ALONG_K,
      preferred_element_type=jnp.bfloat16,
    )

  return [Candidate(call)]


def qwix_dot_general(case: Any) -> list[Candidate]:
  """`qwix.dot_general`, of blocks a product each, which are then added up."""
  try:
    qwix = importlib.import_module("qwix")
  except ImportError as error:
    raise NotImplementedError(f"it lacks a module: {error}") from None
  _needs_whole_blocks(case, case.n, case.k)
  dims = ALONG_K if case.k_last else (((1,), (0,)), ((), ()))

  def call(a, b):
    a, b = (
      qwix.QArray(x.values, x.scale, None, x.values.dtype) for x in (a, b)
    )
    return qwix.dot_general(a, b, dims, **_WIDE).astype(jnp.bfloat16)

  return [Candidate(call, {"qwix": qwix.__version__})]


def lax_ragged_dot(case: Any) -> list[Candidate]:
  """`jax.lax.ragged_dot` of the values, times scales of rows and columns."""
  if case.scales != "row":
    raise NotImplementedError("it has no scales of blocks")
  if case.pass_ == "dw":
    raise NotImplementedError(
      "XLA compiles sums over rows of 8 bits for minutes"
    )
  return ragged_peers.lax_ragged_dot(case, _by_rows)


def _by_rows(a: Any, b: Any, sizes: jax.Array) -> jax.Array:
  z = lax.ragged_dot_general(a.values, b.values, sizes, BY_ROWS, **_WIDE)
  rows = jnp.repeat(
    b.scale[..., 0], sizes, 0, total_repeat_length=len(a.values)
  )
  return (z * a.scale * rows).astype(jnp.bfloat16)


def _of_each_row(x: Any) -> jax.Array:
  """The scale of a matrix [R, K], [R, slabs or 1]."""
  rows, have = len(x.values), len(x.scale)
  each = BLOCK if have not in (1, rows) else rows // have
  return jnp.repeat(x.scale, each, 0, total_repeat_length=rows)


def _needs_whole_blocks(case: Any, *sizes: int) -> None:
  is_block = case.scales in ("block", "line")
  if is_block and any(size % BLOCK for size in sizes):
    raise NotImplementedError(f"it takes whole blocks of {BLOCK}, got {sizes}")


def _needs(module: Any, name: str) -> None:
  if not hasattr(module, name):
    raise NotImplementedError(f"this JAX has no {module.__name__}.{name}")


def _needs_floats_along_k(case: Any) -> None:
  if not case.k_last or case.dtype == "int8":
    raise NotImplementedError("it takes 8-bit floats, stored along K")
