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
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from pallas_gemm import quantization
from pallas_gemm.ops import arguments, scales, slabs
from pallas_gemm.ops import product as product_lib
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.cotangents import transposed
from pallas_gemm.ops.scales import BLOCK, FIELDS
from pallas_gemm.ops.spec import Operands, Spec, blocks_of, whole_of
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
  x, spec = _with_one_k(recipe, x, spec)
  words = _words(recipe, x, spec)
  of_bits = dataclasses.replace(
    spec, words=words.of_bits, precision=_precision(recipe)
  )
  types = Operands(*[None if v is None else jax.typeof(v) for v in x])

  @jax.custom_vjp
  def run(x: Operands) -> list[jax.Array]:
    return product_lib.product(_in_bits(recipe, x, spec)[0], of_bits)

  def forward(x: Operands):
    in_bits, _ = _in_bits(recipe, x, spec)
    save = spec.activation is not None or spec.gated
    outs = product_lib.product(in_bits, dataclasses.replace(of_bits, save=save))
    in_bits = in_bits._replace(
      **{f: _saved(getattr(in_bits, f)) for f in words.made}
    )
    a_along_rows = _a_along_rows(recipe, x, spec)
    if a_along_rows is not None:
      a_along_rows = [_saved(v) for v in a_along_rows[:2]]
    return outs[:1], (in_bits, a_along_rows, outs[1:])

  def backward(kept, cts):
    in_bits, a_along_rows, saved = kept
    back = _Backward(
      recipe, types, spec, of_bits, words.a_along_rows, in_bits, a_along_rows
    )
    return (back.cotangents(cts[0], saved),)

  run.defvjp(forward, backward)
  return run(x)


def _saved(v: jax.Array) -> jax.Array:
  return checkpoint_name(v, CHECKPOINT_NAME)


class _Bits(NamedTuple):
  """An operand of 8 bits, and its letters; no scale is a scale of 1."""

  values: jax.Array
  scale: jax.Array | None
  word: str
  of_scale: str | None


class _Words(NamedTuple):
  """Letters of operands in 8 bits, which follow from types.

  Attributes:
    of_bits: of all operands of the product.
    made: the fields of those that are quantised here, and of their scales.
    a_along_rows: of A quantised along its rows, and of its scale.
  """

  of_bits: Operands
  made: tuple[str, ...]
  a_along_rows: tuple[str, str] | None


def _words(recipe: Recipe, x: Operands, spec: Spec) -> _Words:
  found = []

  def trace(x: Operands) -> None:
    _, words = _in_bits(recipe, x, spec)
    along_rows = _a_along_rows(recipe, x, spec)
    of_bits = spec.words._replace(**words)
    along_rows = None if along_rows is None else tuple(along_rows[2:])
    found.append(_Words(of_bits, tuple(words), along_rows))

  jax.eval_shape(trace, x)
  return found[0]


def _with_one_k(recipe: Recipe, x: Operands, spec: Spec):
  """The product with one dimension that is summed over, where blocks lie."""
  w, ks = spec.words, spec.contracted
  if recipe.scaling != "block" or len(ks) < 2 or w.has_scales:
    return x, spec
  there = [f for f in FIELDS if getattr(x, f) is not None]
  if not all(ks in getattr(w, f) for f in there):
    return x, spec  # XLA's product, of what stands for 8 bits
  merged = {f: _merged(getattr(x, f), getattr(w, f), ks) for f in there}
  words = w._replace(**{f: word for f, (_, word) in merged.items()})
  x = x._replace(**{f: v for f, (v, _) in merged.items()})
  return x, dataclasses.replace(spec, words=words)


def _in_bits(
  recipe: Recipe, x: Operands, spec: Spec
) -> tuple[Operands, dict[str, str]]:
  """Operands of 8 bits, those without scales quantised, and words of these."""
  found, words = {}, {}
  for field, of in FIELDS.items():
    v, word = getattr(x, field), getattr(spec.words, field)
    if v is None or getattr(x, of) is not None:
      continue
    if field == "a" and spec.ragged and recipe.scaling == "tensor":
      v = spec_lib.zero_outside(v, x.offsets, spec.words.offsets, word)
    ks, weight = spec.contracted, field != "a"
    bits = _quantized(recipe, recipe.forward, v, word, ks, weight)
    found |= {field: bits.values, of: bits.scale}
    words |= {field: bits.word, of: bits.of_scale}
  return x._replace(**found), words


def _precision(recipe: Recipe) -> Any:
  is_fast = recipe.fast_accumulation and recipe.forward != "int8"
  return _FAST if is_fast else None


def _quantized(
  recipe: Recipe,
  dtype: str,
  v: jax.Array,
  word: str,
  along: str,
  is_weight: bool = False,
) -> _Bits:
  """An operand, quantised along the letters that a product sums over."""
  block = [None if c in along else 1 for c in word]
  if recipe.scaling == "tensor":
    block = [None] * len(word)
  elif recipe.scaling == "block":
    own = [c for c in word if c not in along + "g"]
    wide = along + (own[-1] if is_weight and own else "")
    block = [BLOCK if c in wide else 1 for c in word]
  q = quantization.quantize(
    v, dtype, block=tuple(block), power_of_two=recipe.power_of_two
  )
  scale, of_scale = scales.named(q.scale, word, v.shape)
  return _Bits(q.values, scale, word, of_scale)


def _merged(v: jax.Array, word: str, letters: str) -> tuple[jax.Array, str]:
  """Dimensions that lie together as one."""
  at, size = word.index(letters), len(letters)
  shape = (
    *v.shape[:at],
    math.prod(v.shape[at : at + size]),
    *v.shape[at + size :],
  )
  return v.reshape(shape), word.replace(letters, letters[0])


def _a_along_rows(recipe: Recipe, x: Operands, spec: Spec) -> _Bits | None:
  """A in blocks along its rows, for the cotangent of B."""
  if recipe.scaling != "block" or not recipe.gradient or x.scale_a is not None:
    return None
  a, word = x.a, spec.words.a
  if spec.ragged:
    a = slabs.moved(a, slabs.places(x.offsets, a.shape[0]))
  along = _alone(spec, word, spec.words.b)
  if len(along) > 1 and along in word and along in spec.out:
    a, word = _merged(a, word, along)
    along = along[0]
  return _quantized(recipe, recipe.forward, a, word, along)


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
    of_bits: of that of 8 bits.
    words_along_rows: the letters of `a_along_rows`.
    x: the operands in 8 bits.
    a_along_rows: A in blocks along its rows, and their scale; or None.
  """

  recipe: Recipe
  types: Operands
  spec: Spec
  of_bits: Spec
  words_along_rows: tuple[str, str] | None
  x: Operands
  a_along_rows: Sequence[jax.Array] | None

  def cotangents(self, ct: jax.Array, saved: Sequence[jax.Array]) -> Operands:
    """Of all operands; None of those that have none."""
    types, x, cts = self.types, self.x, [ct]
    if saved:
      apply = product_lib.activation_of_saved(x, self.spec)
      cts = jax.vjp(apply, *saved)[1](ct)
    found = self._of_the_rest(cts[0])
    if x.alpha is not None:
      cts = [
        (x.alpha * ct.astype(x.alpha.dtype)).astype(ct.dtype) for ct in cts
      ]
    pairs = [*zip(cts, ("b", "b_up"))]
    if types.scale_a is None:
      of_a = [self._of_operand(ct, "a", b) for ct, b in pairs]
      found["a"] = sum(of_a[1:], of_a[0])
    for ct, b in pairs:
      if getattr(types, FIELDS[b]) is None:
        found[b] = self._of_operand(ct, b, "a")
    return Operands(None, None)._replace(**found)

  def _of_the_rest(self, ct: jax.Array) -> dict[str, jax.Array]:
    """Of what is applied to the sums, before the activation."""
    names = "bias", "c", "alpha", "beta"
    rest = {n: v for n in names if (v := getattr(self.x, n)) is not None}
    if not rest:
      return {}
    linear = dataclasses.replace(self.of_bits, activation=None)
    of_rest = lambda rest: product_lib.product(  # noqa: E731
      self.x._replace(**rest), linear
    )[0]
    return jax.vjp(of_rest, rest)[1](ct)[0]

  def _of_operand(self, ct: jax.Array, field: str, other: str) -> jax.Array:
    """Of A, from one B; or of a B, from A."""
    spec, w, to_a = self.spec, self.spec.words, field == "a"
    one = w._replace(b=getattr(w, other if to_a else field))
    t = transposed(dataclasses.replace(spec, words=one), to_a)
    target, offsets = getattr(self.types, field), self.x.offsets
    along = _alone(spec, getattr(w, other), getattr(w, field))
    bits = self._bits(other)
    word, ct = spec.out, ct.astype(jnp.float32)
    if spec.ragged and not to_a:
      ct = spec_lib.zero_outside(ct, offsets, w.offsets, word)
    ct, bits = self._with_scale_inside(ct, bits, along)
    if other == "a" and self.a_along_rows is not None:
      if spec.ragged:
        to = slabs.places(offsets, ct.shape[0])
        ct, offsets = slabs.moved(ct, to), to.offsets
      elif len(along) > 1 and along in word and along not in bits.word:
        ct, word = _merged(ct, word, along)
        along = along[0]
    both = self._of_both(ct, word, along, bits, target)
    names = {blocks_of(chr(c)): blocks_of(to) for c, to in t.names.items()}
    names = t.names | str.maketrans(names)
    both = [b._replace(word=b.word.translate(names)) for b in both]
    words = [b.of_scale and b.of_scale.translate(names) for b in both]
    first, second = t.operands(*both)
    of_scale_a, of_scale_b = t.operands(*words)
    alone = spec.product_alone(
      Operands(
        first.word,
        second.word,
        offsets=w.offsets,
        scale_a=of_scale_a,
        scale_b=of_scale_b,
      ),
      implementation=product_lib.or_xla(spec.implementation),
      ragged=t.ragged,
      whole_slabs=offsets is not self.x.offsets,
      out=t.out,
      out_dtype=target.dtype,
      parts=target.sharding.spec,
      precision=_precision(self.recipe) if self.recipe.gradient else None,
    )
    operands = Operands(
      first.values,
      second.values,
      offsets=offsets,
      scale_a=first.scale,
      scale_b=second.scale,
    )
    return product_lib.product(operands, alone)[0]

  def _bits(self, field: str) -> _Bits:
    """An operand of the forward product, or A along its rows."""
    if field == "a" and self.a_along_rows is not None:
      return _Bits(*self.a_along_rows, *self.words_along_rows)
    of, w = FIELDS[field], self.of_bits.words
    return _Bits(
      getattr(self.x, field),
      getattr(self.x, of),
      getattr(w, field),
      getattr(w, of),
    )

  def _with_scale_inside(
    self, ct: jax.Array, bits: _Bits, along: str
  ) -> tuple[jax.Array, _Bits]:
    """A scale that differs along what is summed over, in the cotangent."""
    word = bits.of_scale or ""
    if not set(word) & set(along) or any(c != whole_of(c) for c in word):
      return ct, bits
    scale = bits.scale.astype(jnp.float32)
    if "g" in word:  # of each row's group
      scale = spec_lib.of_rows(scale, self.x.offsets, ct.shape[0])
      word = word.replace("g", "m")
    ct = ct * spec_lib.lifted(scale, word, self.spec.out)
    return ct, bits._replace(scale=None, of_scale=None)

  def _of_both(
    self, ct: jax.Array, word: str, along: str, bits: _Bits, target: Any
  ) -> list[_Bits]:
    """The cotangent and the other operand, as they are multiplied."""
    if self.recipe.gradient:
      return [
        _quantized(self.recipe, self.recipe.gradient, ct, word, along),
        bits,
      ]
    dtype = target.dtype if target.dtype.itemsize == 2 else jnp.bfloat16
    values, size = bits.values.astype(jnp.float32), {}
    size = dict(zip(bits.word, values.shape))
    if bits.scale is not None:
      scale, of = scales.spread(bits.scale, bits.of_scale, bits.word, size)
      values *= spec_lib.lifted(scale.astype(jnp.float32), of, bits.word)
    other = _Bits(values.astype(dtype), None, bits.word, None)
    return [_Bits(ct.astype(dtype), None, word, None), other]
