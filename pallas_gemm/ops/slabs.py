"""Groups along K of 8 bits, as a kernel reads them: in whole slabs of 128.

wgmma reads 8 bits along K alone, so operands of which K are the rows are
transposed; and a slab has rows of one group, so each group is filled up with
zeros. XLA does both: one pass over each operand.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm.ops.scales import BLOCK


class Places(NamedTuple):
  """Where rows go.

  Attributes:
    row: of each place, the row that lies there.
    is_there: whether one does; else there are zeros.
    place: of each row, where it lies; of a row in no group past the end.
    offsets: the place where each group starts, and where the last one ends.
  """

  row: jax.Array
  is_there: jax.Array
  place: jax.Array
  offsets: jax.Array


def length(rows: int, groups: int) -> int:
  """Places of so many rows, whatever the sizes of groups."""
  return -(-(rows + groups * (BLOCK - 1)) // BLOCK) * BLOCK


def places(offsets: jax.Array, rows: int) -> Places:
  """Whole slabs for each group.

  Args:
    offsets: [groups + 1], where groups start among the rows, and end.
    rows: how many there are.
  """
  first, last = offsets[:-1], offsets[1:]
  sizes = last - first
  ends = jnp.cumsum(-(-sizes // BLOCK) * BLOCK).astype(offsets.dtype)
  starts = jnp.concatenate([jnp.zeros_like(offsets[:1]), ends])
  place = lax.iota(offsets.dtype, length(rows, first.shape[0]))
  group = _first_above(ends, place)
  within = place - starts[group]
  is_there = within < jnp.append(sizes, 0)[group]
  row = jnp.append(first, 0)[group] + within
  return Places(row, is_there, _of_rows(offsets, starts, rows), starts)


def _of_rows(offsets: jax.Array, starts: jax.Array, rows: int) -> jax.Array:
  """The place of each row."""
  row = lax.iota(offsets.dtype, rows)
  group = _first_above(offsets[1:], row)
  place = starts[group] + row - offsets[group]
  inside = (offsets[0] <= row) & (row < offsets[-1])
  return jnp.where(inside, place, length(rows, offsets.shape[0] - 1))


def _first_above(ends: jax.Array, x: jax.Array) -> jax.Array:
  """How many of the ends, in order, are no larger: in one kernel, no loop.

  `jnp.searchsorted` fails inside of a `jax.shard_map` over some axes.
  """
  return jnp.sum(ends[None] <= x[:, None], 1, dtype=jnp.int32)


def moved(v: jax.Array, to: Places) -> jax.Array:
  """The rows of a matrix at their places."""
  return _taken(v, to.row, to.is_there)


def back(v: jax.Array, to: Places) -> jax.Array:
  """What lies at the place of each row; zeros for rows in no group."""
  return _taken(v, to.place, to.place < v.shape[0])


def _taken(v: jax.Array, at: jax.Array, is_there: jax.Array) -> jax.Array:
  if 0 in v.shape[:1]:  # `jnp.take` refuses it
    return jnp.zeros((*at.shape, *v.shape[1:]), v.dtype)
  unsigned = jnp.dtype(f"uint{8 * v.dtype.itemsize}")
  bits = lax.bitcast_convert_type(v, unsigned)  # a gather of any dtype
  rows = jnp.take(bits, at, axis=0, mode="clip")
  rows = jnp.where(is_there[:, None], rows, jnp.zeros_like(rows))
  return lax.bitcast_convert_type(rows, v.dtype)


@jax.custom_vjp
def differentiable(v: jax.Array, to: Places) -> jax.Array:
  """`moved`, whose derivative is a gather too."""
  return moved(v, to)


differentiable.defvjp(
  lambda v, to: (moved(v, to), to), lambda to, ct: (back(ct, to), None)
)
