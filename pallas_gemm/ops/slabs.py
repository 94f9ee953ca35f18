"""Groups along K of 8 bits, as a kernel reads them: in whole slabs of 128.

wgmma reads 8 bits along K alone, so operands of which K are the rows are
transposed; and a slab has rows of one group, so each group is filled up with
zeros. XLA does both: one pass over each operand in 8 bits.
"""

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm.ops.scales import BLOCK
from pallas_gemm.ops.spec import Operands


def length(k: int, groups: int) -> int:
  """Rows in whole slabs, of K rows in groups of any sizes."""
  return -(-(k + groups * (BLOCK - 1)) // BLOCK) * BLOCK


def whole(x: Operands) -> Operands:
  """A [M, K], B [N, K], and where groups start, all multiples of 128.

  Args:
    x: of a folded product with groups along K: A [K, M], B [K, N].
  """
  first, last = x.offsets[:-1], x.offsets[1:]
  sizes = last - first
  ends = jnp.cumsum(-(-sizes // BLOCK) * BLOCK)
  offsets = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
  place = lax.iota(ends.dtype, length(x.a.shape[0], sizes.shape[0]))
  group = jnp.searchsorted(ends, place, side="right")
  within = place - offsets[group]
  is_there = within < jnp.append(sizes, 0)[group]
  row = jnp.append(first, 0)[group] + within

  def moved(v: jax.Array) -> jax.Array:
    # As bytes: XLA gathers no 8-bit floats on some platforms.
    bits = lax.bitcast_convert_type(v, jnp.uint8)
    rows = jnp.take(bits, row, axis=0, mode="clip")
    rows = jnp.where(is_there[:, None], rows, 0)
    return lax.bitcast_convert_type(rows.T, v.dtype)

  return x._replace(a=moved(x.a), b=moved(x.b), offsets=offsets)
