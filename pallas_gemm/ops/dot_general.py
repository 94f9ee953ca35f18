"""`dot_general`: the drop-in for `jax.lax.dot_general`."""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
from jax import lax

from pallas_gemm import tuning
from pallas_gemm.ops import arguments, dispatch
from pallas_gemm.ops.gemm import gemm
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.spec import Operands, Spec


def dot_general(
  lhs: jax.Array,
  rhs: jax.Array,
  dimension_numbers: Any,
  precision: Any = None,
  preferred_element_type: Any = None,
  *,
  out_sharding: Any = None,
) -> jax.Array:
  """`jax.lax.dot_general`, on the kernels of `matmul` where they take it.

  For libraries that let one inject it: `flax.linen.Dense(dot_general=...)`,
  `flax.nnx.Linear`, `jnp.einsum(..., _dot_general=...)`.

  Operands are read in place where each has its batch dimensions in front and
  its contracting dimensions together, in the same order in both, either last
  or right behind the batch dimensions. Others are transposed by XLA first: one
  read and one write of the operand. Products of mixed dtypes and those with
  `out_sharding` are passed on to `jax.lax.dot_general`.

  Args:
    lhs: an array.
    rhs: an array.
    dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs
      batch)) dimensions.
    precision: as of `jax.lax.dot_general`.
    preferred_element_type: the result's dtype.
    out_sharding: as of `jax.lax.dot_general`.

  Returns:
    [batch dimensions, lhs free dimensions, rhs free dimensions].

  Raises:
    TypeError, ValueError: as `jax.lax.dot_general`.
    NotImplementedError: a product that is passed on, or that falls back to
      XLA, inside of `batch_invariant`.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((5, 4))
    >>> pallas_gemm.dot_general(x, w, (((2,), (1,)), ((), ()))).shape
    (2, 3, 5)
  """
  if out_sharding is not None:
    dispatch.log_once("dot_general with out_sharding runs on jax.lax")
    if is_batch_invariant():
      raise NotImplementedError(
        "out_sharding leaves the product to XLA, which is not batch invariant"
      )
    return lax.dot_general(
      lhs,
      rhs,
      dimension_numbers,
      precision,
      preferred_element_type,
      out_sharding=out_sharding,
    )
  return _dot_general(
    lhs,
    rhs,
    _as_tuples(dimension_numbers),
    _as_tuples(precision),
    preferred_element_type,
    tuning.generation(),
  )


def _as_tuples(value: Any) -> Any:
  """Nested sequences as tuples, which can be hashed."""
  if isinstance(value, Sequence) and not isinstance(value, str):
    if type(value) not in (list, tuple):
      return value  # a named tuple: a dot algorithm
    return tuple(_as_tuples(item) for item in value)
  return value


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _dot_general(
  lhs, rhs, dimension_numbers, precision, preferred_element_type, generation
):
  del generation  # a key: the config may be another one now
  reference = functools.partial(
    lax.dot_general,
    dimension_numbers=dimension_numbers,
    precision=precision,
    preferred_element_type=preferred_element_type,
  )
  out = jax.eval_shape(reference, lhs, rhs)  # raises what is to be raised
  if lhs.dtype != rhs.dtype:
    if is_batch_invariant():
      raise NotImplementedError(
        "mixed dtypes leave the product to XLA, which is not batch invariant"
      )
    return reference(lhs, rhs)
  (contract_l, contract_r), (batch_l, batch_r) = dimension_numbers
  # The order in which dimensions are contracted is free: as `lhs` has them.
  order = sorted(range(len(contract_l)), key=lambda i: contract_l[i])
  a, a_k_last = _to_rank_3(lhs, batch_l, [contract_l[i] for i in order])
  b, b_k_last = _to_rank_3(rhs, batch_r, [contract_r[i] for i in order])
  spec = Spec(
    out_dtype=out.dtype,
    transpose_a=not a_k_last,
    transpose_b=b_k_last,
    precision=arguments.precision(precision),
    batch_invariant=is_batch_invariant(),
  )
  (result,) = gemm(Operands(a, b), spec)
  return result.reshape(out.shape)


def _to_rank_3(
  x: jax.Array, batch: Sequence[int], contract: Sequence[int]
) -> tuple[jax.Array, bool]:
  """[batch, free, K] and True, or [batch, K, free] and False."""
  free = [i for i in range(x.ndim) if i not in (*batch, *contract)]
  sizes = [
    math.prod(x.shape[i] for i in dims) for dims in (batch, free, contract)
  ]
  if [*batch, *contract, *free] == list(range(x.ndim)) and free:
    return x.reshape(sizes[0], sizes[2], sizes[1]), False
  # The identity where the contracting dimensions are last.
  return x.transpose(*batch, *free, *contract).reshape(sizes), True
