"""float32 as a sum of bfloat16 matrices, its planes, for the tensor cores.

Three planes have all 24 bits of a float32, two have 16. Products of planes are
exact in float32; which of them are added up `Problem.pairs` says. XLA makes the
planes, in one pass over an operand, with whatever comes before it.

Source: G. Henry, P. T. P. Tang, A. Heinecke, *Leveraging the bfloat16
Artificial Intelligence Datatype For Higher-Precision Computations*, 2019.
"""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

# Bits of a float32 that its largest plane has, were it cut.
CUT = 0xFFFF0000


def listed(x: jax.Array | Sequence[jax.Array]) -> list[jax.Array]:
  """An operand, or its planes, which the user keeps."""
  return [x] if isinstance(x, jax.Array) else [*x]


def made(x: Sequence[jax.Array], count: int) -> list[jax.Array]:
  """The planes of an operand; those that there are."""
  return split(x[0], count) if len(x) == 1 else [*x]


def split(x: jax.Array, count: int) -> list[jax.Array]:
  """Matrices of bfloat16 whose sum is x.

  Each is what is left of x, rounded to nearest. Their sum is x if there are
  three and x is 0 or of magnitude 2^-103 to the largest; two leave 2^-16 |x|.
  An infinity and a NaN are those of the first plane, with zeros in the others.

  Args:
    x: float32; of bfloat16 one plane alone.
    count: how many.
  """
  if count == 1:
    return [x]
  planes, is_finite = [], jnp.isfinite(x)
  for _ in range(count):
    # Not x.astype(bfloat16) and back, which XLA takes for x.
    plane = lax.reduce_precision(x, 8, 7)
    if not planes:
      word = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(CUT)
      cut = lax.bitcast_convert_type(word, jnp.float32)
      overflows = is_finite & jnp.isinf(plane)
      plane = jnp.where(overflows, cut, plane)
      plane = jnp.where(jnp.isnan(x), jnp.nan, plane)
    planes.append(plane.astype(jnp.bfloat16))
    x = jnp.where(is_finite, x - plane, 0.0)
  return planes
