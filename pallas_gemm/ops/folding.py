"""Batch dimensions of `jnp.matmul` as the one batch dimension of a product."""

from collections.abc import Sequence
import math

import jax
import jax.numpy as jnp

from pallas_gemm.ops.spec import Operands, Spec


def to_rank_3(x: Operands, spec: Spec, shape: tuple[int, ...]) -> Operands:
  """The operands as `gemm` takes them; C and the result only change shape.

  Trailing batch dimensions that B does not have become rows of A, unless A is
  stored transposed. An operand is copied only where it broadcasts along some of
  the remaining batch dimensions and not along others.

  Args:
    x: A [..., M, K], B [..., K, N], bias [N] or [M], C of the result's shape.
    spec: what is computed.
    shape: of the result, [..., M, N].
  """
  *batch, m, n = shape
  batch_a = _padded(x.a.shape[:-2], len(batch))
  batch_b = _padded(x.b.shape[:-2], len(batch))
  kept = len(batch)
  while kept and batch_b[kept - 1] == 1 and not spec.transpose_a:
    kept -= 1
  rows = math.prod(batch[kept:])
  matrix = x.a.shape[-2:] if spec.transpose_a else (rows * m, x.a.shape[-1])
  lead = batch[:kept]

  def of_b(b):
    return _one_batch(b.reshape(*batch_b[:kept], *b.shape[-2:]), lead)

  bias, c = x.bias, x.c
  if spec.bias == "m" and rows != 1:
    bias = jnp.tile(bias, rows)
  if c is not None:
    c = c.reshape(math.prod(lead), rows * m, n)
  return Operands(
    a=_one_batch(x.a.reshape(*batch_a[:kept], *matrix), lead),
    b=of_b(x.b),
    b_up=None if x.b_up is None else of_b(x.b_up),
    bias=bias,
    c=c,
  )


def _padded(batch: tuple[int, ...], rank: int) -> tuple[int, ...]:
  return (1,) * (rank - len(batch)) + tuple(batch)


def _one_batch(x: jax.Array, lead: Sequence[int]) -> jax.Array:
  """[batch or 1, ., .] of an operand that broadcasts to `lead`."""
  *batch, rows, columns = x.shape
  if all(size == 1 for size in batch):
    return x.reshape(1, rows, columns)
  x = jnp.broadcast_to(x, (*lead, rows, columns))
  return x.reshape(math.prod(lead), rows, columns)
