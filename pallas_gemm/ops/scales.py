"""Scales of operands in a product of any rank: their letters, and folded.

A scale has the letters of its operand along which it differs (`Spec`). Those
along which a kernel sums are of blocks of 128, of a single dimension; a scale
that has another one there is multiplied into its operand beforehand.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import compat, quantization
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import Operands, Spec, blocks_of, whole_of

BLOCK = quantization.BLOCK
# The field of each operand, and of its scale.
FIELDS = {"a": "scale_a", "b": "scale_b", "b_up": "scale_up"}


def named(scale: jax.Array, word: str, shape: Sequence[int]) -> tuple[Any, str]:
  """A scale without dimensions that are one for all, and its letters.

  Args:
    scale: of `Quantized`.
    word: the letters of its operand.
    shape: of that.
  """
  if scale.ndim == 0:
    return scale, ""
  if not scale.size:  # no element is multiplied, along no kind of blocks
    return jnp.ones((), scale.dtype), ""
  same = [i for i, n in enumerate(scale.shape) if n == 1]
  letters = "".join(
    c if have == size else blocks_of(c)
    for c, have, size in zip(word, scale.shape, shape)
    if have != 1
  )
  return lax.squeeze(scale, same), letters


def multiplied(x: Operands) -> dict[str, Any]:
  """A and each B that is there, or something of each, by field."""
  return {f: v for f in FIELDS if (v := getattr(x, f)) is not None}


def present(
  x: Operands, words: Operands
) -> Iterator[tuple[str, Any, str, str]]:
  """Of each scale: its operand's field, the scale, both words."""
  for field, of in FIELDS.items():
    if (word := getattr(words, of)) is not None:
      yield field, getattr(x, of), word, getattr(words, field)


def spread(
  scale: jax.Array, word: str, letters: str, size: dict[str, int]
) -> tuple[jax.Array, str]:
  """A scale, with one of each index in place of blocks of these letters."""
  for i, c in enumerate(word):
    whole = whole_of(c)
    if c != whole and whole in letters:
      scale = quantization.spread(scale, i, size[whole])
      word = word.replace(c, whole)
  return scale, word


def times(
  v: jax.Array, scale: jax.Array, word: str, of: str, size: dict[str, int]
) -> jax.Array:
  """Values of the letters `of` times their scale, in float32."""
  scale, word = spread(scale.astype(jnp.float32), word, of, size)
  return v.astype(jnp.float32) * spec_lib.lifted(scale, word, of)


def in_operands(x: Operands, spec: Spec) -> tuple[Operands, Spec]:
  """The product of values times scales, multiplied in float32.

  They are rounded to bfloat16, but not on CPUs, which have no fast product of
  that.
  """
  dtype = jnp.bfloat16 if compat.targets_gpu() else jnp.float32
  size, found = spec.letters(x), multiplied(x)
  for field, scale, word, of in present(x, spec.words):
    found[field] = times(found[field], scale, word, of, size)
  found = {field: v.astype(dtype) for field, v in found.items()}
  none = dict.fromkeys(FIELDS.values())
  words = spec.words._replace(**none)
  # How 8 bits are added says nothing of other dtypes.
  spec = dataclasses.replace(spec, words=words, precision=lax.Precision.DEFAULT)
  return x._replace(**found, **none), spec


def applied(z: jax.Array, x: Operands, spec: Spec) -> jax.Array:
  """Sums, shaped as the result, times scales, none of which differs along K."""
  size = spec.letters(x)
  for _, scale, word, of in present(x, spec.words):
    scale, word = spread(scale.astype(z.dtype), word, of, size)
    if "g" in word and spec.ragged == "m":
      scale = spec_lib.of_rows(scale, x.offsets, z.shape[0])
      word = word.replace("g", "m")
    z = z * spec_lib.lifted(scale, word, spec.out)
  return z


def why_not_fused(spec: Spec) -> str | None:
  """None, or why no kernel can apply the scales to sums."""
  ks = spec.contracted
  for _, _, word, of in present(spec.words, spec.words):
    inner = [c for c in word if whole_of(c) in ks]
    if set(inner) & set(ks) or (inner and len(ks) > 1):
      sides = ", ".join(of.upper())
      return f"a scale for each element along what is summed over in [{sides}]"
    if inner and spec.ragged == "k" and not spec.whole_slabs:
      return "blocks along the rows of groups, which start anywhere"
  return None


def with_batched_operands(
  x: Operands, dims: Operands, size: int
) -> tuple[Operands, Operands]:
  """Operands of a vmap, with the new dimension wherever a scale has it."""
  for field, of in FIELDS.items():
    if getattr(dims, of) is not None and getattr(dims, field) is None:
      v = getattr(x, field)
      v = jnp.broadcast_to(v[None], (size, *v.shape))
      x, dims = x._replace(**{field: v}), dims._replace(**{field: 0})
  return x, dims


def kinds(words: Operands) -> tuple[Any, Any]:
  """Of A's and B's scales in a folded product, as `Problem` calls them."""
  of_a, of_b = words.scale_a, (words.scale_b or "") + (words.scale_up or "")
  has_b = (words.scale_b, words.scale_up) != (None, None)
  if has_blocks(words):
    return "block", "line" if "n" in of_b else "block"
  n = "n", blocks_of("n")
  kind_b = "vector" if any(c in of_b for c in n) else "tensor"
  kind_a = "vector" if "m" in (of_a or "") else "tensor"
  return None if of_a is None else kind_a, kind_b if has_b else None


def has_blocks(words: Operands) -> bool:
  """Whether a scale of a folded product differs along K."""
  return any(blocks_of("k") in (word or "") for word in words.scales)


def of_kernel(x: Operands, spec: Spec) -> list[Any]:
  """The scales of a folded product as kernels take them; see `kinds`.

  Where one differs along K all do, A's for each row, and B's for 128 columns
  or each: [matrices or 1, slabs of K, free]. Else they are [.., free or 1].
  """
  size, along_k, found = spec.letters(x), has_blocks(spec.words), []
  of_kinds = kinds(spec.words)
  size |= {blocks_of(c): -(-size[c] // BLOCK) for c in "kn"}
  for field, kind in zip(FIELDS, (*of_kinds, of_kinds[1])):
    v, word = getattr(x, FIELDS[field]), getattr(spec.words, FIELDS[field])
    if kind is None or getattr(x, field) is None:
      found.append(None)
      continue
    v, word = (jnp.ones(()), "") if v is None else (v, word)
    free = "m" if field == "a" else "n"
    if kind == "block" and field != "a":
      free = blocks_of("n")
    v, word = spread(v, word, free, size)
    lead = "b" if not spec.ragged else "" if field == "a" else "g"
    want = lead + blocks_of("k") * along_k + free
    full = [
      size[c] if c in word or (kind != "tensor" and c != lead) else 1
      for c in want
    ]
    v = jnp.broadcast_to(spec_lib.lifted(v, word, want), full)
    found.append(v if lead else v[None])
  return found
