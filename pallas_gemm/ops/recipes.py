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

Sources: DeepSeek-V3's report (blocks); Qwix (bits of the forward product, with
scales that go into the cotangent).
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm.ops import arguments, scales, slabs
from pallas_gemm.ops import product as product_lib
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.bits import (
  ONE,
  Bits,
  by_scales,
  in_blocks,
  quantized,
  scale_of,
  view_of,
)
from pallas_gemm.ops.cotangents import transposed
from pallas_gemm.ops.scales import FIELDS
from pallas_gemm.ops.spec import Operands, Spec, blocks_of
from pallas_gemm.quantization import Recipe

# Of what is kept for derivatives, for policies of `jax.checkpoint`.
CHECKPOINT_NAME = "pallas_gemm_quantized"
_SOURCES = ("float32", "bfloat16", "float16")
_FAST = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


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
  arguments.check(
    spec.ragged != "k",
    "quantize= takes no sums over the rows of groups; pass Quantized operands",
    "ragged_dot_general with a contracted ragged dimension",
    NotImplementedError,
  )
  mesh = spec_lib.explicit_mesh(x.present())
  if mesh is not None:  # XLA lays blocks and groups out
    alone = dataclasses.replace(spec, parts=PartitionSpec())
    of_auto = jax.sharding.auto_axes(
      lambda x: product(recipe, x, alone)[0],
      out_sharding=NamedSharding(mesh, spec.parts),
    )
    return [of_auto(x)]
  given = spec.shape(x)
  x, spec = _with_one_n(recipe, *_with_one_k(recipe, x, spec))
  types = Operands(*[None if v is None else jax.typeof(v) for v in x])

  @jax.custom_vjp
  def run(x: Operands) -> list[jax.Array]:
    bits = {
      field: _pair(recipe, x, spec, field)[0] for field in scales.multiplied(x)
    }
    return product_lib.product(*_by_bits(recipe, x, spec, bits))

  def forward(x: Operands):
    kept = {
      field: _pair(recipe, x, spec, field) for field in scales.multiplied(x)
    }
    kept = jax.tree.map(_saved, kept)
    bits = {field: pair[0] for field, pair in kept.items()}
    in_bits, of_bits = _by_bits(recipe, x, spec, bits)
    save = spec.activation is not None or spec.gated
    outs = product_lib.product(in_bits, dataclasses.replace(of_bits, save=save))
    rest = x._replace(a=None, b=None, b_up=None)
    return outs[:1], (kept, rest, outs[1:])

  def backward(kept, cts):
    pairs, rest, saved = kept
    back = _Backward(recipe, types, spec, pairs, rest)
    return (back.cotangents(cts[0], saved),)

  run.defvjp(forward, backward)
  outs = run(x)
  return outs if spec.shape(x) == given else [v.reshape(given) for v in outs]


def _saved(v: jax.Array) -> jax.Array:
  return checkpoint_name(v, CHECKPOINT_NAME)


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
  n = _alone(spec, w.b, w.a)
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
      found[field], words[field] = _merged(v, word, letters)
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
    in_slabs = field == "a" and spec.ragged
    return given, _moved(given, x.offsets) if in_slabs else given
  w, dtype, along = spec.words, recipe.forward, spec.contracted
  free = _alone(spec, word, w.b if field == "a" else w.a)
  if field != "a":
    return _pair_of_b(recipe, v, word, free, along)
  if spec.ragged:
    if recipe.scaling == "tensor":
      v = spec_lib.zero_outside(v, x.offsets, w.offsets, word)
    rows = slabs.moved(v, slabs.places(x.offsets, v.shape[0]))
    back = _pair_of_a(recipe, rows, word, "m", along)[1]
    return quantized(recipe, dtype, v, word, along), back
  return _pair_of_a(recipe, v, word, free, along)


def _moved(bits: Bits, offsets: jax.Array) -> Bits:
  """Rows of groups, and their scales, in slabs."""
  size = dict(zip(bits.word, bits.values.shape))
  to = slabs.places(offsets, size["m"])
  scale, of = scales.spread(bits.scale, bits.of_scale, "m", size)
  if "m" in of:
    scale = jnp.moveaxis(scale, of.index("m"), 0)
    rows = slabs.moved(scale.reshape(size["m"], -1), to)
    scale = rows.reshape(-1, *scale.shape[1:])
    of = "m" + of.replace("m", "")
  return Bits(slabs.moved(bits.values, to), scale, bits.word, of)


def _pair_of_a(recipe, v, word: str, free: str, along: str):
  """A along what is summed over, and for the sum over its rows."""
  dtype, anew = recipe.forward, recipe.scaling == "block" and recipe.gradient
  if anew or recipe.scaling != "block":
    if pair := _in_both(recipe, dtype, v, word, free, along, False):
      return pair
  bits = quantized(recipe, dtype, v, word, along)
  if not anew:
    return bits, bits
  if len(free) > 1 and free in word:
    v, word = _merged(v, word, free)
    free = free[0]
  return bits, quantized(recipe, dtype, v, word, free)


def _pair_of_b(recipe, v, word: str, free: str, along: str):
  """B, which has the same bits and scales in both."""
  blocks, dtype = recipe.scaling == "block", recipe.forward
  if not blocks or len(free + along) == 2:
    if pair := _in_both(recipe, dtype, v, word, free, along, blocks):
      return pair
  wide = free[-1:] if blocks else ""
  bits = quantized(recipe, dtype, v, word, along, wide)
  return bits, bits


def _in_both(
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


def _by_bits(
  recipe: Recipe, x: Operands, spec: Spec, bits: dict[str, Bits]
) -> tuple[Operands, Spec]:
  """The product of operands in 8 bits."""
  found, words = {}, {}
  for field, v in bits.items():
    found |= {field: v.values, FIELDS[field]: v.scale}
    words |= {field: v.word, FIELDS[field]: v.of_scale}
  words = spec.words._replace(**words)
  spec = dataclasses.replace(spec, words=words, precision=_precision(recipe))
  return x._replace(**found), spec


def _precision(recipe: Recipe) -> Any:
  is_fast = recipe.fast_accumulation and recipe.forward != "int8"
  return _FAST if is_fast else None


def _merged(v: jax.Array, word: str, letters: str) -> tuple[jax.Array, str]:
  """Dimensions that lie together as one."""
  at, size = word.index(letters), len(letters)
  shape = (
    *v.shape[:at],
    math.prod(v.shape[at : at + size]),
    *v.shape[at + size :],
  )
  return v.reshape(shape), word.replace(letters, letters[0])


def _alone(spec: Spec, word: str, other: str) -> str:
  """The letters of the result that one operand has, and the other has not."""
  return "".join(c for c in word if c in spec.out and c not in other)


@dataclasses.dataclass(frozen=True)
class _Backward:
  """The derivative of one product.

  Attributes:
    recipe: how cotangents are quantised.
    types: of the operands.
    spec: of the product.
    pairs: its operands in 8 bits; see `_pair`.
    rest: what else it has.
  """

  recipe: Recipe
  types: Operands
  spec: Spec
  pairs: dict[str, tuple[Bits, Bits]]
  rest: Operands

  def cotangents(self, ct: jax.Array, saved: Sequence[jax.Array]) -> Operands:
    """Of all operands; None of those that have none."""
    types, rest, cts = self.types, self.rest, [ct]
    if saved:
      x = rest._replace(**{f: self.pairs[f][0].values for f in self.pairs})
      apply = product_lib.activation_of_saved(x, self.spec)
      cts = jax.vjp(apply, *saved)[1](ct)
    found = self._of_the_rest(cts[0])
    if rest.alpha is not None:
      alpha = rest.alpha
      cts = [(alpha * ct.astype(alpha.dtype)).astype(ct.dtype) for ct in cts]
    of_a = []
    for ct, b in zip(cts, ("b", "b_up")):
      by_b, by_a = self._in_bits(ct, b)
      if types.scale_a is None:
        of_a.append(self._product(by_b, "a", b))
      if getattr(types, FIELDS[b]) is None:
        found[b] = self._product(by_a, b, "a")
    if of_a:
      found["a"] = sum(of_a[1:], of_a[0])
    return Operands(None, None)._replace(**found)

  def _of_the_rest(self, ct: jax.Array) -> dict[str, jax.Array]:
    """Of what is applied to the sums, before the activation."""
    names = "bias", "c", "alpha", "beta"
    rest = {n: v for n in names if (v := getattr(self.rest, n)) is not None}
    if not rest:
      return {}
    bits = {field: pair[0] for field, pair in self.pairs.items()}
    x, spec = _by_bits(self.recipe, self.rest, self.spec, bits)
    linear = dataclasses.replace(spec, activation=None)
    of_rest = lambda rest: product_lib.product(  # noqa: E731
      x._replace(**rest), linear
    )[0]
    return jax.vjp(of_rest, rest)[1](ct)[0]

  def _in_bits(self, ct: jax.Array, b: str) -> tuple[Bits, Bits]:
    """The cotangent for the product by B, and for that by A."""
    spec, w, word = self.spec, self.spec.words, self.spec.out
    m, n = _alone(spec, w.a, w.b), _alone(spec, getattr(w, b), w.a)
    by_b = self._inside(self.pairs[b][1], n)
    by_a = self._inside(self.pairs["a"][1], m)
    if spec.ragged:
      in_slabs = self._in_slabs(self._times(ct, by_a))
      rows = self._times(ct, by_b)
      rows = spec_lib.zero_outside(rows, self.rest.offsets, w.offsets, word)
      return self._quantized(rows, word, n), in_slabs
    view, gradient = view_of(ct, word, m, n), self.recipe.gradient
    are_blocks = self.recipe.scaling == "block"
    # B has no blocks of several dimensions.
    if not gradient or view is None or (are_blocks and len(n) > 1):
      by_b, by_a, of_a = self._times(ct, by_b), self._times(ct, by_a), word
      if are_blocks:
        by_a, of_a, m = self._as_a_lies(by_a, m)
      return self._quantized(by_b, word, n), self._quantized(by_a, of_a, m)
    if are_blocks:
      return in_blocks(self.recipe, gradient, ct, view, n, False)
    made, factors = [], []
    for inside, along in ((by_b, n), (by_a, m)):
      of_one = self._times(ct, inside)
      scale, of = scale_of(self.recipe, gradient, of_one, word, along)
      made.append((scale, of))
      factors.append((inside or ONE, (1 / scale, of)))
    return by_scales(gradient, ct, view, n, factors, made)

  def _in_slabs(self, ct: jax.Array) -> Bits:
    """A cotangent of groups of rows for the product by A, in slabs."""
    to = slabs.places(self.rest.offsets, ct.shape[0])
    ct, word = slabs.moved(ct, to), self.spec.out
    if gradient := self.recipe.gradient:
      if pair := _in_both(self.recipe, gradient, ct, word, "n", "m", False):
        return pair[0]
    return self._quantized(ct, word, "m")

  def _as_a_lies(self, ct: jax.Array, m: str) -> tuple[jax.Array, str, str]:
    """A cotangent whose rows are one dimension, if those of A are."""
    word, of_a = self.spec.out, self.pairs["a"][1].word
    if len(m) > 1 and m in word and m not in of_a and m[0] in of_a:
      return *_merged(ct, word, m), m[0]
    return ct, word, m

  def _quantized(self, ct: jax.Array, word: str, along: str) -> Bits:
    """A cotangent by XLA alone, or in its own bits."""
    gradient = self.recipe.gradient
    if not gradient:
      return Bits(ct, None, word, None)
    return quantized(self.recipe, gradient, ct, word, along)

  def _inside(self, bits: Bits, along: str) -> tuple[jax.Array, str] | None:
    """A scale that differs along what is summed over, and its letters."""
    word = bits.of_scale or ""
    if not set(word) & set(along) or set(word) - {*self.spec.out, "g"}:
      return None
    scale = bits.scale.astype(jnp.float32)
    if self.spec.ragged and along == "m":  # A's lie in slabs
      to = slabs.places(self.rest.offsets, self._rows)
      back = jnp.zeros((self._rows + 1,), scale.dtype)
      at = jnp.where(to.is_there, to.row, self._rows)
      return back.at[at].set(scale)[:-1], word
    if "g" in word:  # of each row's group
      scale = spec_lib.of_rows(scale, self.rest.offsets, self._rows)
      word = word.replace("g", "m")
    return scale, word

  @property
  def _rows(self) -> int:
    """Of A, in groups."""
    return self.types.a.shape[self.spec.words.a.index("m")]

  def _times(self, ct: jax.Array, inside) -> jax.Array:
    """A cotangent times a scale of what it is multiplied with."""
    if inside is None:
      return ct
    return ct.astype(jnp.float32) * spec_lib.lifted(*inside, self.spec.out)

  def _product(self, ct: Bits, field: str, other: str) -> jax.Array:
    """The cotangent of A, from one B; or of a B, from A."""
    spec, w, to_a = self.spec, self.spec.words, field == "a"
    one = w._replace(b=getattr(w, other if to_a else field))
    t = transposed(dataclasses.replace(spec, words=one), to_a)
    target, offsets = getattr(self.types, field), self.rest.offsets
    bits, in_slabs = self.pairs[other][1], bool(spec.ragged) and not to_a
    along = _alone(spec, getattr(w, other), getattr(w, field))
    if self._inside(bits, along) is not None:
      bits = dataclasses.replace(bits, scale=None, of_scale=None)
    if in_slabs:
      offsets = slabs.places(offsets, self._rows).offsets
    if not self.recipe.gradient:
      ct, bits = _in_16_bits(ct, bits, target)
    first, second = t.operands(*(_renamed(v, t.names) for v in (ct, bits)))
    words = Operands(first.word, second.word, offsets=w.offsets)
    alone = spec.product_alone(
      words._replace(scale_a=first.of_scale, scale_b=second.of_scale),
      implementation=product_lib.or_xla(spec.implementation),
      ragged=t.ragged,
      whole_slabs=in_slabs,
      out=t.out,
      out_dtype=target.dtype,
      parts=target.sharding.spec,
      precision=_precision(self.recipe) if self.recipe.gradient else None,
    )
    x = Operands(first.values, second.values, offsets=offsets)
    x = x._replace(scale_a=first.scale, scale_b=second.scale)
    return product_lib.product(x, alone)[0]


def _renamed(bits: Bits, names: dict[int, str]) -> Bits:
  """The same by other letters, and by the blocks of those."""
  blocks = {blocks_of(chr(c)): blocks_of(to) for c, to in names.items()}
  names = names | str.maketrans(blocks)
  word, of = bits.word.translate(names), bits.of_scale
  of = None if of is None else of.translate(names)
  return dataclasses.replace(bits, word=word, of_scale=of)


def _in_16_bits(ct: Bits, bits: Bits, target: Any) -> list[Bits]:
  """Both operands of a cotangent's product, what has a scale multiplied out."""
  dtype = target.dtype if target.dtype.itemsize == 2 else jnp.bfloat16
  values = bits.values.astype(jnp.float32)
  size = dict(zip(bits.word, values.shape))
  if bits.scale is not None:
    scale, of = scales.spread(bits.scale, bits.of_scale, bits.word, size)
    values *= spec_lib.lifted(scale.astype(jnp.float32), of, bits.word)
  other = Bits(values.astype(dtype), None, bits.word, None)
  return [Bits(ct.values.astype(dtype), None, ct.word, None), other]
