"""The derivative of a product by 8 bits; see `recipes`."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import dtypes
from pallas_gemm.ops import product as product_lib
from pallas_gemm.ops import scales, slabs
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.bits import (
  ONE,
  Bits,
  by_bits,
  by_scales,
  in_blocks,
  in_both,
  merged,
  precision_of,
  quantized,
  scale_of,
  scales_of_both,
  view_of,
)
from pallas_gemm.ops.cotangents import transposed
from pallas_gemm.ops.scales import FIELDS
from pallas_gemm.ops.spec import Operands, Spec, blocks_of
from pallas_gemm.quantization import Recipe


@dataclasses.dataclass(frozen=True)
class Backward:
  """The derivative of one product.

  Attributes:
    recipe: how cotangents are quantised.
    types: of the operands.
    spec: of the product.
    pairs: its operands in 8 bits, each for the product, and for the cotangent
      of the other one.
    rest: what else it has.
  """

  recipe: Recipe
  types: Operands
  spec: Spec
  pairs: dict[str, tuple[Bits, Bits]]
  rest: Operands

  def cotangents(self, ct: jax.Array, saved: Sequence[jax.Array]) -> Operands:
    """Of all operands; None of those that have none."""
    types, rest = self.types, self.rest
    cts = [ct.astype(jnp.bfloat16) if ct.dtype.itemsize == 1 else ct]
    if saved:
      x = rest._replace(**{f: self.pairs[f][0].values for f in self.pairs})
      apply = product_lib.activation_of_saved(x, self.spec)
      cts = jax.vjp(apply, *saved)[1](ct)
    found = self._of_the_rest(cts[0])
    if rest.alpha is not None:
      alpha = rest.alpha
      cts = [_narrowed(alpha * ct.astype(alpha.dtype), ct.dtype) for ct in cts]
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
    x, spec = by_bits(self.recipe, self.rest, self.spec, self.pairs)
    linear = dataclasses.replace(spec, activation=None, out_dtype=ct.dtype)
    of_rest = lambda rest: product_lib.product(  # noqa: E731
      x._replace(**rest), linear
    )[0]
    return jax.vjp(of_rest, rest)[1](ct)[0]

  def _in_bits(self, ct: jax.Array, b: str) -> tuple[Bits, Bits]:
    """The cotangent for the product by B, and for that by A."""
    spec, w, word = self.spec, self.spec.words, self.spec.out
    m, n = spec.free(w.a, w.b), spec.free(getattr(w, b), w.a)
    by_b = self._inside(self.pairs[b][1], n)
    by_a = self._inside(self.pairs["a"][1], m)
    if spec.ragged == "m":
      in_slabs = self._in_slabs(self._times(ct, by_a))
      rows = self._times(ct, by_b)
      rows = spec_lib.zero_outside(rows, self.rest.offsets, w.offsets, word)
      return self._quantized(rows, word, n), in_slabs
    view, gradient = view_of(ct, word, m, n), self.recipe.gradient
    are_blocks = self.recipe.scaling == "block"
    # B has no blocks of several dimensions, nor has A where they lie apart.
    rows_are_one = m[1:2] not in self.pairs["a"][1].word
    is_one = len(n) < 2 and (len(m) < 2 or rows_are_one)
    # The kernel of blocks multiplies by no scale of a `Quantized`.
    is_plain = is_one and not by_b and not by_a
    if not gradient or view is None or (are_blocks and not is_plain):
      by_b, by_a, of_a = self._times(ct, by_b), self._times(ct, by_a), word
      if are_blocks and len(m) > 1 and rows_are_one:
        if m not in word:  # B's batch dimensions are between them
          of_a = m + "".join(c for c in word if c not in m)
          by_a = spec_lib.in_order(by_a, word, of_a)
        (by_a, of_a), m = merged(by_a, of_a, m), m[0]
      return self._quantized(by_b, word, n), self._quantized(by_a, of_a, m)
    if are_blocks:
      return in_blocks(self.recipe, gradient, ct, view, n, False)
    # XLA would work out the derivative of an activation for a maximum again: of
    # gate and up, 4096 x 14336, its kernels take 527 us, what writes both
    # without a maximum 191 (H100). The kernel that finds those of rows has it
    # written as well, but on several devices they are XLA's, too.
    ct = lax.optimization_barrier(ct)
    inside = by_b or ONE, by_a or ONE
    if self.recipe.scaling == "row":
      # XLA reads it for each of both: 43 us each, of 4096 x 14336 in bfloat16.
      made = scales_of_both(self.recipe, gradient, ct, view, n, inside)
    else:
      made = [
        scale_of(self.recipe, gradient, self._times(ct, x), word, along)
        for x, along in ((by_b, n), (by_a, m))
      ]
    factors = [(x, (1 / scale, of)) for x, (scale, of) in zip(inside, made)]
    return by_scales(gradient, ct, view, n, factors, made)

  def _in_slabs(self, ct: jax.Array) -> Bits:
    """A cotangent of groups of rows for the product by A, in slabs."""
    to = slabs.places(self.rest.offsets, ct.shape[0])
    ct, word = slabs.moved(ct, to), self.spec.out
    if gradient := self.recipe.gradient:
      if pair := in_both(self.recipe, gradient, ct, word, "n", "m", False):
        return pair[0]
    return self._quantized(ct, word, "m")

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
    if self.spec.ragged == "m" and along == "m":  # A's lie in slabs
      to = slabs.places(self.rest.offsets, self._rows)
      return slabs.back(scale[:, None], to)[:, 0], word
    if "g" in word:  # of each row's group
      rest = word.replace("g", "")
      scale = spec_lib.in_order(scale, word, f"g{rest}")
      scale = spec_lib.of_rows(scale, self.rest.offsets, self._rows)
      word = f"m{rest}"
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
    bits, in_slabs = self.pairs[other][1], spec.ragged == "m" and not to_a
    along = spec.free(getattr(w, other), getattr(w, field))
    if self._inside(bits, along) is not None:
      bits = dataclasses.replace(bits, scale=None, of_scale=None)
    if in_slabs:
      offsets = slabs.places(offsets, self._rows).offsets
    if not self.recipe.gradient:
      ct, bits = _in_bfloat16(ct, bits)
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
      precision=precision_of(self.recipe) if self.recipe.gradient else None,
    )
    x = Operands(first.values, second.values, offsets=offsets)
    x = x._replace(scale_a=first.scale, scale_b=second.scale)
    return product_lib.product(x, alone)[0]


def _narrowed(v: jax.Array, dtype: Any) -> jax.Array:
  """In a dtype, if that has the range."""
  return v if dtypes.has_less_range(dtype, v.dtype) else v.astype(dtype)


def _renamed(bits: Bits, names: dict[int, str]) -> Bits:
  """The same by other letters, and by the blocks of those."""
  blocks = {blocks_of(chr(c)): blocks_of(to) for c, to in names.items()}
  names = names | str.maketrans(blocks)
  word, of = bits.word.translate(names), bits.of_scale
  of = None if of is None else of.translate(names)
  return dataclasses.replace(bits, word=word, of_scale=of)


def _in_bfloat16(ct: Bits, bits: Bits) -> list[Bits]:
  """Both operands of a cotangent's product, what has a scale multiplied out.

  float16 need not hold what a scale makes of either.
  """
  values = bits.values.astype(jnp.float32)
  if bits.scale is not None:
    size = dict(zip(bits.word, values.shape))
    values = scales.times(values, bits.scale, bits.of_scale, bits.word, size)
  other = Bits(values.astype(jnp.bfloat16), None, bits.word, None)
  return [Bits(ct.values.astype(jnp.bfloat16), None, ct.word, None), other]
