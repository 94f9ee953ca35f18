"""Products of 16- and 32-bit arrays by 8 bits: `quantize=Recipe()` of the ops.

Each operand is quantised along what is summed over, with scales taken from its
values. The derivative is that of the product at the quantised values: its two
products are computed by 8 bits as well, of the cotangent, which is quantised,
and of what the forward product had:

  scaling    by A (summed over N)           by B (summed over M)
  "block"    B's blocks of 128 x 128        A, quantised anew along M
  "row"      B's bits; its scales go        A's bits; its scales go
             into the cotangent first       into the cotangent first
  "tensor"   B's bits and scale             A's bits and scale

Sums over the rows of groups have no weight: both operands are quantised as A
is, their rows in slabs that are whole for each group.

Sources: DeepSeek-V3's report (blocks); Qwix (bits of the forward product, with
scales that go into the cotangent).
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm import compat, dtypes, meshes
from pallas_gemm.ops import arguments, constants, scales, slabs
from pallas_gemm.ops import product as product_lib
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.bits import Bits, by_bits, in_both, merged, quantized
from pallas_gemm.ops.recipe_cotangents import Backward
from pallas_gemm.ops.scales import FIELDS
from pallas_gemm.ops.spec import Operands, Spec
from pallas_gemm.quantization import Recipe

# Of what is kept for derivatives, for policies of `jax.checkpoint`.
CHECKPOINT_NAME = "pallas_gemm_quantized"
_SOURCES = ("float32", "bfloat16", "float16")


def check(recipe: Any, names: Operands, x: Operands, precision: Any) -> None:
  """Raises if operands are none that a recipe is for."""
  is_recipe = isinstance(recipe, Recipe)
  wanted = "quantize must be a pallas_gemm.Recipe or None"
  arguments.check(is_recipe, wanted, type(recipe).__name__, TypeError)
  for field, of in FIELDS.items():
    v, scale = getattr(x, field), getattr(x, of)
    if v is not None and scale is None:
      wanted = f"quantize= needs {getattr(names, field)} to be Quantized or of"
      ok, wanted = v.dtype.name in _SOURCES, f"{wanted} {', '.join(_SOURCES)}"
      arguments.check(ok, wanted, v.dtype.name, TypeError)
  wanted = "precision must be None beside quantize=, which says how to compute"
  arguments.check(precision is None, wanted, repr(precision))


def rule(options: Any, names: Operands, x: Operands) -> Any:
  """The function of operands and spec that computes what the options ask for.

  Args:
    options: of the op.
    names: of the operands, as users call them.
    x: the operands; of `Quantized` values and scales.
  """
  if options.quantize is None:
    return product_lib.product
  check(options.quantize, names, x, options.precision)
  return functools.partial(product, options.quantize)


def product(recipe: Recipe, x: Operands, spec: Spec) -> list[jax.Array]:
  """The result of `spec` by 8 bits.

  Differentiable, in reverse mode, by all that is neither of 8 bits nor a scale.

  Args:
    recipe: how operands without scales are quantised.
    x, spec: as of `product.product`.
  """
  x = spec.named(compat.join_varying(*x.present()))
  for field, of in FIELDS.items():
    if getattr(x, of) is not None:
      given = {name: getattr(x, name) for name in (field, of)}
      x = x._replace(**constants.constant(given, constants.OF_8_BITS))
  mesh = meshes.explicit(x.present())
  if mesh is not None:  # XLA lays blocks and groups out
    alone = dataclasses.replace(spec, parts=PartitionSpec())
    of_auto = meshes.on_auto_axes(
      lambda x: product(recipe, x, alone),
      mesh,
      NamedSharding(mesh, spec.parts),
    )
    return of_auto(x)
  given = spec.shape(x)
  if spec.ragged:
    x, spec = _with_rows_first(x, spec)
  if spec.ragged == "k":
    x, spec = _in_slabs(x, spec)
  x, spec = _with_one_n(recipe, *_with_one_k(recipe, x, spec))
  types = Operands(*[None if v is None else jax.typeof(v) for v in x])

  def pairs(x: Operands) -> dict[str, tuple[Bits, Bits]]:
    return {f: _pair(recipe, x, spec, f) for f in scales.multiplied(x)}

  @jax.custom_vjp
  def run(x: Operands) -> list[jax.Array]:
    return product_lib.product(*by_bits(recipe, x, spec, pairs(x)))

  def forward(x: Operands):
    kept = jax.tree.map(_saved, pairs(x))
    in_bits, of_bits = by_bits(recipe, x, spec, kept)
    save = spec.activation is not None or spec.gated
    wide = in_bits.wide(spec.out_dtype)
    if save and dtypes.has_less_range(spec.out_dtype, wide):  # see `product`
      of_bits = dataclasses.replace(of_bits, out_dtype=wide)
    out, *saved = product_lib.product(
      in_bits, dataclasses.replace(of_bits, save=save)
    )
    rest = x._replace(a=None, b=None, b_up=None)
    return [out.astype(spec.out_dtype)], (kept, rest, saved)

  def backward(kept, cts):
    of_both, rest, saved = kept
    back = Backward(recipe, types, spec, of_both, rest)
    return (back.cotangents(cts[0], saved),)

  run.defvjp(forward, backward)
  outs = run(x)
  return outs if spec.shape(x) == given else [v.reshape(given) for v in outs]


def _saved(v: jax.Array) -> jax.Array:
  return checkpoint_name(v, CHECKPOINT_NAME)


def _with_rows_first(x: Operands, spec: Spec) -> tuple[Operands, Spec]:
  """The product with the rows of groups in front, where `slabs` wants them."""
  found, words = {}, {}
  for field, word in scales.multiplied(spec.words).items():
    if spec.ragged in word:
      words[field] = spec.ragged + word.replace(spec.ragged, "")
      v = getattr(x, field)
      found[field] = spec_lib.in_order(v, word, words[field])
  spec = dataclasses.replace(spec, words=spec.words._replace(**words))
  return x._replace(**found), spec


def _in_slabs(x: Operands, spec: Spec) -> tuple[Operands, Spec]:
  """Sums over the rows of groups, with the rows in slabs."""
  to, words = slabs.places(x.offsets, x.a.shape[0]), spec.words
  found, of_found = {"offsets": to.offsets}, {}
  for field, v in scales.multiplied(x).items():
    of = FIELDS[field]
    if (scale := getattr(x, of)) is None:
      found[field] = slabs.differentiable(v, to)
      continue
    bits = Bits(v, scale, getattr(words, field), getattr(words, of))
    bits = _moved(bits, to)
    found |= {field: bits.values, of: bits.scale}
    of_found[of] = bits.of_scale
  words = words._replace(**of_found)
  spec = dataclasses.replace(spec, words=words, whole_slabs=True)
  return x._replace(**found), spec


def _with_one_k(recipe: Recipe, x: Operands, spec: Spec):
  """The product with one dimension that is summed over, where blocks lie.

  If they lie apart it is XLA's, of what stands for 8 bits.
  """
  w, ks = spec.words, spec.contracted
  if recipe.scaling != "block" or len(ks) < 2 or w.has_scales:
    return x, spec
  there = scales.multiplied(w).values()
  return _with_one(x, spec, ks) if all(ks in c for c in there) else (x, spec)


def _with_one_n(recipe: Recipe, x: Operands, spec: Spec):
  """The product with one dimension that B alone has, where blocks lie.

  A weight of attention is a matrix so: [features, heads, features of a head].
  """
  w = spec.words
  n = spec.free(w.b, w.a)
  added = [word for word in (w.c, w.bias) if word and set(word) & set(n)]
  there = [w.b, spec.out, *([w.b_up] if w.b_up else []), *added]
  is_one = len(n) < 2 or not all(n in word for word in there)
  if recipe.scaling != "block" or w.has_scales or spec.parts or is_one:
    return x, spec
  return _with_one(x, spec, n)


def _with_one(x: Operands, spec: Spec, letters: str) -> tuple[Operands, Spec]:
  """The product with one dimension for several, wherever they lie together."""
  found, words = {}, {}
  for field, v, word in zip(Operands._fields, x, spec.words):
    if letters in (word or ""):
      found[field], words[field] = merged(v, word, letters)
  words, out = spec.words._replace(**words), spec.out
  out = out.replace(letters, letters[0])
  return x._replace(**found), dataclasses.replace(spec, words=words, out=out)


def _pair(
  recipe: Recipe, x: Operands, spec: Spec, field: str
) -> tuple[Bits, Bits]:
  """An operand for the product, and for the cotangent of the other one."""
  v, word, of = getattr(x, field), getattr(spec.words, field), FIELDS[field]
  if (scale := getattr(x, of)) is not None:
    given = Bits(v, scale, word, getattr(spec.words, of))
    if field != "a" or spec.ragged != "m":
      return given, given
    return given, _moved(given, slabs.places(x.offsets, v.shape[0]))
  w, dtype, along = spec.words, recipe.forward, spec.contracted
  free = spec.free(word, w.b if field == "a" else w.a)
  if field != "a" and spec.ragged != "k":
    return _pair_of_b(recipe, v, word, free, along)
  if spec.ragged == "m":
    if recipe.scaling == "tensor":
      v = spec_lib.zero_outside(v, x.offsets, w.offsets, word)
    rows = slabs.moved(v, slabs.places(x.offsets, v.shape[0]))
    back = _pair_of_a(recipe, rows, word, "m", along)[1]
    return quantized(recipe, dtype, v, word, along), back
  return _pair_of_a(recipe, v, word, free, along)


def _moved(bits: Bits, to: slabs.Places) -> Bits:
  """Rows, which come first, and their scales, in slabs."""
  size, row = dict(zip(bits.word, bits.values.shape)), bits.word[0]
  scale, of = scales.spread(bits.scale, bits.of_scale, row, size)
  if row in of:
    scale = jnp.moveaxis(scale, of.index(row), 0)
    rows = slabs.moved(scale.reshape(size[row], -1), to)
    scale = rows.reshape(-1, *scale.shape[1:])
    of = row + of.replace(row, "")
  return Bits(slabs.moved(bits.values, to), scale, bits.word, of)


def _pair_of_a(recipe, v, word: str, free: str, along: str):
  """A, or rows of groups, along what is summed over and along the rest."""
  dtype, anew = recipe.forward, recipe.scaling == "block" and recipe.gradient
  if anew or recipe.scaling != "block":
    if pair := in_both(recipe, dtype, v, word, free, along, False):
      return pair
  bits = quantized(recipe, dtype, v, word, along)
  if not anew:
    return bits, bits
  if len(free) > 1 and free in word:
    v, word = merged(v, word, free)
    free = free[0]
  return bits, quantized(recipe, dtype, v, word, free)


def _pair_of_b(recipe, v, word: str, free: str, along: str):
  """B, which has the same bits and scales in both."""
  blocks, dtype = recipe.scaling == "block", recipe.forward
  if not blocks or len(free + along) == 2:
    if pair := in_both(recipe, dtype, v, word, free, along, blocks):
      return pair
  wide = free[-1:] if blocks else ""
  bits = quantized(recipe, dtype, v, word, along, wide)
  return bits, bits
