"""Operands of products, quantised by a `Recipe` along what is summed over."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import meshes, quantization
from pallas_gemm.ops import both_orders, scales
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.scales import BLOCK, FIELDS
from pallas_gemm.ops.spec import Operands, Spec, blocks_of
from pallas_gemm.quantization import Recipe

# A factor of 1, with its letters.
ONE = 1.0, ""
_FAST = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
# Of `quantize`, by scaling: along what is summed over, and along the rest.
_BLOCKS = {"tensor": (None, None), "row": (None, 1), "block": (BLOCK, 1)}


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

  @property
  def transposed(self) -> "View":
    return View(self.batch, self.columns, self.rows)

  def matrices(self, v: jax.Array) -> jax.Array:
    """[matrices, R, C]."""
    size = dict(zip(self.word, v.shape))
    return v.reshape([math.prod(size[c] for c in part) for part in self])

  def vector(self, factor, letters: str, size: dict[str, int]) -> jax.Array:
    """What has these letters is multiplied by: [matrices, .], or [1, 1]."""
    value, word = factor
    if not word:
      return jnp.asarray(value, jnp.float32).reshape(1, 1)
    letters = self.batch + letters
    value = spec_lib.lifted(value, word, letters)
    value = jnp.broadcast_to(value, [size[c] for c in letters])
    return value.reshape(math.prod(size[c] for c in self.batch), -1)


def view_of(v: jax.Array, word: str, free: str, along: str) -> View | None:
  """An operand as matrices, one of whose dimensions is what is summed over.

  None if it is none, or `both_orders` does not take it, whose types say nothing
  of meshes.
  """
  if not v.size or meshes.explicit([v]) is not None:
    return None
  for rows, columns in ((free, along), (along, free)):
    if rows and columns and word.endswith(rows + columns):
      return View(word[: -len(rows + columns)], rows, columns)
  return None


def quantized(
  recipe: Recipe,
  dtype: str,
  v: jax.Array,
  word: str,
  along: str,
  wide: str = "",
) -> Bits:
  """An operand, quantised along what is summed over.

  Args:
    wide: other letters that have scales of 128.
  """
  inside, outside = _BLOCKS[recipe.scaling]
  block = tuple(inside if c in along + wide else outside for c in word)
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


def scales_of_both(
  recipe: Recipe,
  dtype: str,
  v: jax.Array,
  view: View,
  along: str,
  inside: Sequence[tuple[Any, str]],
) -> list[tuple[jax.Array, str]]:
  """Those of rows along `along`, and along the other side, from one read.

  Args:
    inside: what is multiplied along each beforehand, with its letters.
  """
  size = dict(zip(view.word, v.shape))
  order = 1 if view.columns == along else -1
  sides = view.columns, view.rows
  factors = (view.vector(*x, size) for x in zip(inside[::order], sides))
  found = both_orders.maxima(view.matrices(v), *factors, dtype)
  made = []
  for amax, side in zip(found, sides[::-1]):
    scale = quantization.scale_of(amax, dtype, recipe.power_of_two)
    word = view.batch + side
    shape = [size[c] for c in word]
    made.append(scales.named(scale.reshape(shape), word, shape))
  return made[::order]


def in_blocks(
  recipe: Recipe, dtype: str, v: jax.Array, view: View, along: str, square: bool
) -> tuple[Bits, Bits]:
  """Blocks along `along`, and along the other side, each of which lies last."""
  size = dict(zip(view.word, v.shape))
  made = both_orders.in_blocks(
    view.matrices(v), dtype, square=square, power_of_two=recipe.power_of_two
  )
  found, batch = {}, [size[c] for c in view.batch]
  for values, scale, of in (
    (*made[:2], view),
    (*made[2:], view.transposed),
  ):
    own, last = [size[c] for c in of.rows], of.columns[0]
    values = values.reshape(*batch, *own, -1)
    if square:
      of_scale = of.batch + blocks_of(of.rows) + blocks_of(last)
      scale = scale.reshape(*batch, *scale.shape[1:])
    else:
      of_scale = of.batch + blocks_of(last) + of.rows
      scale = scale.reshape(*batch, scale.shape[1], *own)
    word = of.batch + of.rows + last
    found[of.columns] = Bits(values, scale, word, of_scale)
  return found.pop(along), *found.values()


def by_scales(
  dtype: str,
  v: jax.Array,
  view: View,
  along: str,
  factors: Sequence[Sequence[tuple[Any, str]]],
  of_both: Sequence[tuple[jax.Array, str]],
) -> tuple[Bits, Bits]:
  """Values along `along`, and along the other side, each of which lies last.

  Args:
    factors: of each, numbers of columns and of rows, with their letters.
    of_both: the scale of each, with its letters.
  """
  size = dict(zip(view.word, v.shape))
  views = [view, view.transposed]
  order = 1 if view.columns == along else -1
  values = both_orders.by_factors(
    view.matrices(v),
    *(
      [view.vector(*x, size) for x in zip(of_one, (of.columns, of.rows))]
      for of_one, of in zip(factors[::order], views)
    ),
    dtype,
  )
  return tuple(
    Bits(x.reshape([size[c] for c in of.word]), scale, of.word, of_scale)
    for x, of, (scale, of_scale) in zip(
      values[::order], views[::order], of_both
    )
  )


def in_both(
  recipe: Recipe,
  dtype: str,
  v: jax.Array,
  word: str,
  free: str,
  along: str,
  square: bool,
) -> tuple[Bits, Bits] | None:
  """Quantised along `along`, and for a sum over `free`, from one read.

  Rows and tensors have the same bits in both; blocks are quantised for each.
  """
  blocks = recipe.scaling == "block"
  view = view_of(v, word, free, along)
  if view is None or (blocks and len(along) > 1):
    return None
  if blocks:
    return in_blocks(recipe, dtype, v, view, along, square)
  scale, of_scale = made = scale_of(recipe, dtype, v, word, along)
  inverse = 1 / scale, of_scale
  factors = (ONE, inverse), (inverse, ONE)
  return by_scales(dtype, v, view, along, factors, (made, made))


def by_bits(
  recipe: Recipe, x: Operands, spec: Spec, pairs: dict[str, tuple[Bits, Bits]]
) -> tuple[Operands, Spec]:
  """The product of operands in 8 bits, the first of each pair."""
  found, words = {}, {}
  for field, (v, _) in pairs.items():
    found |= {field: v.values, FIELDS[field]: v.scale}
    words |= {field: v.word, FIELDS[field]: v.of_scale}
  words = spec.words._replace(**words)
  spec = dataclasses.replace(spec, words=words, precision=precision_of(recipe))
  return x._replace(**found), spec


def precision_of(recipe: Recipe) -> Any:
  """Of products of its 8 bits."""
  is_fast = recipe.fast_accumulation and recipe.forward != "int8"
  return _FAST if is_fast else None


def merged(v: jax.Array, word: str, letters: str) -> tuple[jax.Array, str]:
  """Dimensions that lie together as one."""
  at, size = word.index(letters), len(letters)
  shape = (
    *v.shape[:at],
    math.prod(v.shape[at : at + size]),
    *v.shape[at + size :],
  )
  return v.reshape(shape), word.replace(letters, letters[0])
