"""Operands of products, quantised by a `Recipe` along what is summed over."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_gemm import quantization
from pallas_gemm.ops import both_orders, scales
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.scales import BLOCK
from pallas_gemm.ops.spec import blocks_of
from pallas_gemm.quantization import Recipe


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("values", "scale"),
  meta_fields=("word", "of_scale"),
)
@dataclasses.dataclass(frozen=True)
class Bits:
  """Values of 8 bits and their scale, or None, with the letters of both."""

  values: Any
  scale: Any
  word: str
  of_scale: str | None


class View(NamedTuple):
  """An operand as matrices: the letters of batch, rows and columns."""

  batch: str
  rows: str
  columns: str

  @property
  def word(self) -> str:
    return "".join(self)

  def matrices(self, v: jax.Array) -> jax.Array:
    """[matrices, R, C]."""
    size, sizes = dict(zip(self.word, v.shape)), []
    for letters in self:
      sizes.append(math.prod(size[c] for c in letters))
    return v.reshape(sizes)


def view_of(word: str, free: str, along: str) -> View | None:
  """An operand as matrices, one of whose dimensions is what is summed over."""
  for rows, columns in ((free, along), (along, free)):
    if rows and columns and word.endswith(rows + columns):
      return View(word[: -len(rows + columns)], rows, columns)
  return None


def can_be_in_both(v: jax.Array) -> bool:
  """Whether `both_orders` takes an array; its types say nothing of meshes."""
  return bool(v.size) and spec_lib.explicit_mesh([v]) is None


def block_of(
  recipe: Recipe, word: str, along: str, wide: str = ""
) -> list[Any]:
  """The block of `quantize` for an operand that is summed along some letters.

  Args:
    wide: another letter that has scales of 128.
  """
  if recipe.scaling == "tensor":
    return [None] * len(word)
  if recipe.scaling == "row":
    return [None if c in along else 1 for c in word]
  return [BLOCK if c in along + wide else 1 for c in word]


def quantized(
  recipe: Recipe,
  dtype: str,
  v: jax.Array,
  word: str,
  along: str,
  wide: str = "",
) -> Bits:
  """An operand, quantised along what is summed over; see `block_of`."""
  block = tuple(block_of(recipe, word, along, wide))
  q = quantization.quantize(
    v, dtype, block=block, power_of_two=recipe.power_of_two
  )
  scale, of_scale = scales.named(q.scale, word, v.shape)
  return Bits(q.values, scale, word, of_scale)


def scale_of(
  recipe: Recipe, dtype: str, v: jax.Array, word: str, along: str
) -> tuple[jax.Array, str]:
  """The scale alone, and its letters, of rows or of a tensor."""
  bits = quantized(recipe, dtype, v, word, along)
  return bits.scale, bits.of_scale


def in_blocks(
  recipe: Recipe, dtype: str, v: jax.Array, view: View, square: bool
) -> tuple[Bits, Bits]:
  """Blocks along columns, and along rows, each of which lies last."""
  size = dict(zip(view.word, v.shape))
  made = both_orders.in_blocks(
    view.matrices(v), dtype, square=square, power_of_two=recipe.power_of_two
  )
  batch, found = [size[c] for c in view.batch], []
  sides = view.rows, view.columns
  for values, scale, (rows, columns) in (
    (*made[:2], sides),
    (*made[2:], sides[::-1]),
  ):
    own, along = [size[c] for c in rows], columns[0]
    values = values.reshape(*batch, *own, -1)
    if square:
      of_scale = view.batch + blocks_of(rows) + blocks_of(along)
      scale = scale.reshape(*batch, *scale.shape[1:])
    else:
      of_scale = view.batch + blocks_of(along) + rows
      scale = scale.reshape(*batch, scale.shape[1], *own)
    found.append(Bits(values, scale, view.batch + rows + along, of_scale))
  return tuple(found)


def by_scales(
  dtype: str,
  v: jax.Array,
  view: View,
  factors: Sequence[tuple[Any, str]],
  factors_t: Sequence[tuple[Any, str]],
) -> tuple[jax.Array, jax.Array]:
  """Values by numbers of columns and rows, in both orders, each with letters.

  Args:
    factors: of columns and of rows, each with its letters; None is 1.
    factors_t: of the transpose, whose columns are the rows.
  """
  size = dict(zip(view.word, v.shape))
  matrices = math.prod(size[c] for c in view.batch)

  def vector(factor, letters):
    value, word = factor
    if value is None:
      return jnp.ones((1, 1), jnp.float32)
    value = spec_lib.lifted(value, word, view.batch + letters)
    own = math.prod(size[c] for c in letters)
    if not word:
      return value.reshape(1, 1)
    shape = [size[c] for c in view.batch + letters]
    return jnp.broadcast_to(value, shape).reshape(matrices, own)

  sides = view.columns, view.rows
  values = both_orders.by_factors(
    view.matrices(v),
    tuple(map(vector, factors, sides)),
    tuple(map(vector, factors_t, sides[::-1])),
    dtype,
  )
  batch, rows, columns = ([size[c] for c in letters] for letters in view)
  return (
    values[0].reshape(*batch, *rows, *columns),
    values[1].reshape(*batch, *columns, *rows),
  )
