"""float32 weights in planes of bfloat16 that are made once and kept."""

import dataclasses
import functools
import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels.sm90 import planes as planes_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Split:
  """A float32 array as a sum of bfloat16 ones; it stands where a weight does.

  A pytree of its planes: it goes through `jax.jit`, `jax.vmap` and
  `jax.lax.scan`, and is saved, loaded and sharded like other weights. Nothing
  is checked before an op gets it.

  Attributes:
    planes: two or three bfloat16 arrays of one shape, the largest first.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> w = pallas_gemm.split(jnp.array([[1.5, 2.0**-12 + 1]]))
    >>> w.shape, w.dtype.name, len(w.planes), w.joined().tolist()
    ((1, 2), 'float32', 3, [[1.5, 1.000244140625]])
  """

  planes: tuple[Any, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Of each plane."""
    return self.planes[0].shape

  @property
  def ndim(self) -> int:
    """Of each plane."""
    return self.planes[0].ndim

  @property
  def dtype(self) -> Any:
    """Of what the planes add up to: float32."""
    return jnp.dtype("float32")

  def joined(self) -> jax.Array:
    """The sum of the planes, from the smallest on."""
    wide = [plane.astype(jnp.float32) for plane in self.planes[::-1]]
    total, most = functools.reduce(jnp.add, wide), jnp.finfo(jnp.float32).max
    # Next to the largest number two planes, rounded up, add up to infinity.
    inside = jnp.clip(total, -most, most)
    return jnp.where(jnp.isfinite(wide[-1]), inside, total)


compat.register_serialization(Split, "pallas_gemm.Split")


def split(x: jax.Array, planes: Literal[2, 3] = 3) -> Split:
  """The planes that products at a precision read, made once.

  At `precision="highest"` an op makes three planes of each float32 operand, at
  every call: 4 bytes of an element are read, 6 written. A weight that is used
  again can be split beforehand. `matmul`, `gated_matmul`, `ragged_dot` and
  `gated_ragged_dot` take a `Split` for their weights, at the precision that
  multiplies so many planes; the bits of the result are those of the array.
  Elsewhere it is added up again, and said so. It has no derivative; that by the
  other operand is there.

  Args:
    x: float32, of any shape.
    planes: 3 for HIGHEST, BF16_BF16_F32_X6 and _X9, whose sum is x, but for
      numbers below 2^-103; 2 for BF16_BF16_F32_X3 and for groups below HIGHEST,
      which leave 2^-16 |x|.

  Raises:
    TypeError: x is not of float32.
    ValueError: another number of planes.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    >>> y = pallas_gemm.matmul(x, pallas_gemm.split(w), precision="highest")
    >>> y.dtype.name, y.tolist()[0]
    ('float32', [3.0, 3.0, 3.0, 3.0])
  """
  if not isinstance(planes, numbers.Integral) or planes not in (2, 3):
    raise ValueError(f"planes must be 2 or 3, got {planes!r}")
  dtype = jnp.result_type(x)
  if dtype != jnp.float32:
    raise TypeError(f"x must be of float32, got {dtype}")
  return Split(tuple(planes_lib.split(jnp.asarray(x), planes)))
