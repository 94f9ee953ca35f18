"""Groups of rows: the sizes that users pass, and where the groups start."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.ops import arguments


def check_sizes(
  group_sizes: Any, group_offset: Any, groups: int, of: str
) -> None:
  """Integers, one for each group; more if there is an offset to start at.

  Args:
    group_sizes: of all groups.
    group_offset: None, or the first of those that are computed.
    groups: how many are computed.
    of: the argument that has as many.
  """
  arguments.check_integers("group_sizes", group_sizes)
  if group_sizes.ndim != 1:
    raise ValueError(
      f"group_sizes must have rank 1, got shape {group_sizes.shape}"
    )
  (count,) = group_sizes.shape
  if group_offset is None and count != groups:
    raise ValueError(
      f"group_sizes must have {groups} entries, as {of} has groups, got"
      f" {count}; with group_offset it may have more"
    )
  if group_offset is None:
    return
  if count < groups:
    raise ValueError(
      f"group_sizes must have {groups} entries or more, as {of} has groups,"
      f" got {count}"
    )
  arguments.check_integers("group_offset", group_offset)
  if group_offset.shape not in ((), (1,)):
    raise ValueError(
      f"group_offset must have shape () or (1,), got {group_offset.shape}"
    )


def check_bias(bias: Any, groups: int, n: int, wide: Any) -> None:
  """A row for each group."""
  arguments.check_epilogue_array("bias", bias, wide)
  if bias.shape != (groups, n):
    raise ValueError(
      f"bias must have shape [G, N] = ({groups}, {n}), got {bias.shape}"
    )


def bounds(
  group_sizes: jax.Array, group_offset: jax.Array | None, m: int, groups: int
) -> jax.Array:
  """Where groups start and end: int32 [groups + 1], never falling, in [0, m].

  Args:
    group_sizes: [groups or more], integers of any value.
    group_offset: the first group, a scalar or [1]; None is 0.
    m: rows.
    groups: how many.
  """
  if group_sizes.dtype.itemsize < 4:  # it may have no room for m
    group_sizes = group_sizes.astype(jnp.int32)
  sizes = jnp.clip(group_sizes, 0, m).astype(jnp.int32)
  numbers = lax.iota(jnp.int32, groups + 1)
  if group_offset is not None:
    last = group_sizes.shape[0] - groups
    numbers += jnp.clip(group_offset.reshape(()), 0, last).astype(jnp.int32)
  # Each bound is a sum of its own, for then XLA makes one kernel of it all.
  is_before = lax.iota(jnp.int32, sizes.shape[0]) < numbers[:, None]
  before = jnp.where(is_before, sizes, 0)
  ends = lax.reduce(before, np.int32(0), _saturating_add, (1,))
  return jnp.minimum(ends, m).astype(jnp.int32)


def _saturating_add(x: jax.Array, y: jax.Array) -> jax.Array:
  """x + y, or the largest number there is; neither is negative."""
  largest = np.int32(np.iinfo(np.int32).max)
  return x + jnp.minimum(y, largest - x)
