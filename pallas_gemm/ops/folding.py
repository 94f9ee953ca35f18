"""A product of any rank as the one that kernels know, and back.

Folded, a dense product is A [batch or 1, M, K] by B [batch or 1, K, N], each
possibly stored with its last two dimensions the other way round, bias [N] or
[M], C [batch, M, N]; a grouped one is as `Spec` says. Scales have, of b, g, m,
n, and blocks of n and k, in this order, what they differ along. Only shapes
change, unless the letters lie so that an operand has to be copied.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm.ops import scales
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import BESIDE, Operands, Spec, blocks_of

Run = Callable[[Operands, Spec], Any]
# Letters of a grouped product that are no batch dimension.
_GROUPED = "mnkgo"


def is_fused(spec: Spec) -> bool:
  """Whether one kernel has room for all that is applied to the product."""
  w = spec.words
  return (
    all(c in w.a or c in w.b for c in spec.out if not spec.ragged)
    and not w.alpha  # not one factor, but many
    and w.b_up in (None, w.b)
  )


def over_batch(run: Run, x: Operands, spec: Spec) -> Any:
  """A grouped product for each index of its batch dimensions, one by one."""
  have = {c: [c in (w or "") for w in spec.words] for c in spec.out}
  extra = [c for c in spec.out if c not in _GROUPED]
  if not extra:
    return run(x, spec)
  # Dimensions of the same operands are one loop.
  has = have[extra[0]]
  extra = "".join(c for c in extra if have[c] == has)
  size = tuple(spec.letters(x)[c] for c in extra)
  left = [w and "".join(c for c in w if c not in extra) for w in spec.words]
  out = "".join(c for c in spec.out if c not in extra)
  one = dataclasses.replace(spec, words=Operands(*left), out=out)
  batched = [
    spec_lib.in_order(v, w, extra + rest)
    for v, w, rest, here in zip(x, spec.words, left, has)
    if here
  ]
  batched = [v.reshape(math.prod(size), *v.shape[len(size) :]) for v in batched]

  def body(examples):
    rest = iter(examples)
    example = [next(rest) if here else v for v, here in zip(x, has)]
    return list(over_batch(run, Operands(*example), one))

  outs = [v.reshape(*size, *v.shape[1:]) for v in lax.map(body, batched)]
  return [spec_lib.in_order(v, extra + out, spec.out) for v in outs]


def grouped(run: Run, x: Operands, spec: Spec) -> list[jax.Array]:
  """The results of a grouped product without batch dimensions, by `run`."""
  order_a, out = ("mk", "mn") if spec.ragged == "m" else ("km", "gmn")
  orders_b = ("gkn", "gnk") if spec.ragged == "m" else ("kn",)
  w = spec.words
  order_b = w.b if w.b in orders_b else orders_b[0]
  if w.scale_a is not None:
    # As in a dense product: of A's rows no scale keeps blocks.
    of_a = scales.spread(x.scale_a, w.scale_a, "m", spec.letters(x))
    x, w = x._replace(scale_a=of_a[0]), w._replace(scale_a=of_a[1])
  words = w._replace(a=order_a, b=order_b, b_up=w.b_up and order_b)
  words = words._replace(bias=w.bias and "gn")
  beside = [field for field in BESIDE if getattr(w, field)]
  words = words._replace(**dict.fromkeys(beside, order_b))
  order = ["g", "m", "n", "k", *map(blocks_of, "nk")]
  for field in scales.FIELDS.values():
    if (word := getattr(w, field)) is not None:
      ordered = "".join(sorted(word, key=order.index))
      words = words._replace(**{field: ordered})
  moved = [
    v if v is None or have == want else spec_lib.lifted(v, have, want)
    for v, have, want in zip(x, w, words)
  ]
  outs = run(Operands(*moved), dataclasses.replace(spec, words=words, out=out))
  if spec.out == out:
    return list(outs)
  return [spec_lib.lifted(v, out, spec.out) for v in outs]


class _Sides(NamedTuple):
  """The letters of a dense product: result [batch, rows, columns]."""

  batch: str
  rows: str
  columns: str
  contracted: str


def dense(run: Run, x: Operands, spec: Spec) -> list[jax.Array]:
  """The results of a dense product by `run`, which gets it folded."""
  w, size = spec.words, spec.letters(x)
  if first := _summed_last(spec):
    wide = x.wide(spec.out_dtype)
    parts = dataclasses.replace(spec, out=first + spec.out, out_dtype=wide)
    return [jnp.sum(z, 0).astype(spec.out_dtype) for z in dense(run, x, parts)]
  if (out := _in_order(spec)) != spec.out:
    ordered = dataclasses.replace(spec, out=out)
    outs = dense(run, x, ordered)
    return [spec_lib.lifted(z, out, spec.out) for z in outs]
  sides = _sides(spec)
  # A vector on the left is a row, one on the right is a column.
  a_k_first = bool(sides.rows) and _is_k_first(w.a, sides, sides.rows)
  b_k_first = _is_k_first(w.b, sides, sides.columns)
  a = _matrices(x.a, w.a, sides, sides.rows, a_k_first, size)
  of_b = sides, sides.columns, b_k_first, size
  b, b_up = _matrices(x.b, w.b, *of_b), None
  if x.b_up is not None:
    b_up = _matrices(x.b_up, w.b_up, *of_b)
  beside = {
    field: _matrices(v, w.b, *of_b)
    for field in BESIDE
    if (v := getattr(x, field)) is not None
  }
  side, bias = _bias_side(w.bias, sides), None
  if side is not None:
    bias = x.bias.reshape(-1)
    if not w.bias:  # one number
      bias = jnp.broadcast_to(bias, _product(sides.columns, size))
    if side == "m" and (more := sides.rows[: -len(w.bias)]):
      bias = jnp.tile(bias, _product(more, size))
  c, beta, word_beta = x.c, x.beta, w.beta
  if w.beta or (x.bias is not None and side is None):
    c, beta, word_beta = _all_added(x, spec, side is None), None, None
  elif c is not None:
    c = spec_lib.lifted(c, w.c, spec.out)
  if c is not None:
    c = jnp.broadcast_to(c, spec.shape(x))
    c = c.reshape([_product(part, size) for part in sides[:3]])
  folded_scales, of_scales = _scales(x, spec, sides, size)
  word_b = "bkn" if b_k_first else "bnk"
  words = Operands(
    "bkm" if a_k_first else "bmk",
    word_b,
    w.b_up and word_b,
    side,
    None if c is None else "bmn",
    w.alpha,
    word_beta,
  )._replace(**of_scales, **dict.fromkeys(beside, word_b))
  folded = dataclasses.replace(spec, words=words, out="bmn")
  operands = Operands(a, b, b_up, bias, c, x.alpha, beta)
  outs = run(operands._replace(**folded_scales, **beside), folded)
  return [out.reshape(spec.shape(x)) for out in outs]


def _product(letters: str, size: dict[str, int]) -> int:
  return math.prod(size[c] for c in letters)


def _summed_last(spec: Spec) -> str:
  """A dimension in front of A and B that is added up after the products.

  What is summed over does not lie together, so that A or B would be copied.
  """
  a, b, ks = spec.words.a, spec.words.b, spec.contracted
  first = a[:1]
  together = ks in a and ks in b
  return first if first == b[:1] and first in ks and not together else ""


def _in_order(spec: Spec) -> str:
  """The letters of the result, with those that A alone has behind a batch."""
  b, (rest, columns) = spec.words.b, _columns(spec)
  rows = [c for c in rest if c not in b]
  return "".join([*[c for c in rest if c in b], *rows]) + columns


def _columns(spec: Spec) -> tuple[str, str]:
  """The last letters of the result that B alone has, behind the others."""
  a, b, out = spec.words.a, spec.words.b, spec.out
  columns = _last(out, lambda c: c in b and c not in a)
  return out[: len(out) - len(columns)], columns


def _sides(spec: Spec) -> _Sides:
  """Which letters are rows, columns and batch dimensions.

  Of the letters before the columns those that A alone has, and has next to
  each other, are rows: a batch of A alone is more rows, unless A would have to
  be copied for that.
  """
  a, b, ks = spec.words.a, spec.words.b, spec.contracted
  rest, columns = _columns(spec)
  most = _last(rest, lambda c: c in a and c not in b)
  for i in (*range(len(most) + 1), 0):  # the last: A is copied anyway
    rows = most[i:]
    sides = _Sides(rest[: len(rest) - len(rows)], rows, columns, ks)
    batch = _in(sides.batch, a)
    if a in (batch + rows + ks, batch + ks + rows):
      break
  return sides


def _last(word: str, wanted: Callable[[str], bool]) -> str:
  start = len(word)
  while start and wanted(word[start - 1]):
    start -= 1
  return word[start:]


def _in(letters: str, word: str) -> str:
  return "".join(c for c in letters if c in word)


def _is_k_first(word: str, sides: _Sides, free: str) -> bool:
  ks = sides.contracted
  return bool(ks) and word == _in(sides.batch, word) + ks + free


def _matrices(
  v: jax.Array,
  word: str,
  sides: _Sides,
  free: str,
  k_first: bool,
  size: dict[str, int],
) -> jax.Array:
  """[batch or 1, K, free], or without `k_first` [batch or 1, free, K]."""
  batch, last = _in(sides.batch, word), (free, sides.contracted)
  last = last[::-1] if k_first else last
  v = spec_lib.lifted(v, word, batch + "".join(last))
  matrix = [_product(part, size) for part in last]
  if batch and batch != sides.batch:  # copied: it broadcasts along some of them
    v = v.reshape(*[size[c] if c in word else 1 for c in sides.batch], *matrix)
    v = jnp.broadcast_to(v, (*[size[c] for c in sides.batch], *matrix))
  return v.reshape(_product(sides.batch, size) if batch else 1, *matrix)


def _scales(x: Operands, spec: Spec, sides: _Sides, size: dict[str, int]):
  """The scales, and their letters, as the operands are folded."""
  found, words = {}, {}
  for field, v, word, _ in scales.present(x, spec.words):
    free = sides.rows if field == "a" else sides.columns
    spread = "" if len(free) == 1 and field != "a" else free
    v, word = scales.spread(v, word, spread, size)
    k = blocks_of(sides.contracted) if len(sides.contracted) == 1 else ""
    blocks = blocks_of(free) if len(free) == 1 else ""
    parts, folded = [], ""
    for letters, name in (
      (sides.batch, "b"),
      (free, "m" if field == "a" else "n"),
      (blocks, blocks_of("n")),
      (k, blocks_of("k")),
    ):
      if _in(letters, word):
        parts.append(letters)
        folded += name
    letters = "".join(parts)
    v = spec_lib.lifted(v, word, letters)
    v = jnp.broadcast_to(v, [size[c] for c in letters])
    v = v.reshape([_product(part, size) for part in parts])
    of = scales.FIELDS[field]
    found[of], words[of] = v, folded
  return found, words


def _bias_side(word: str | None, sides: _Sides) -> spec_lib.Side | None:
  """The side that a bias runs along, if it is one for all."""
  if word is None or not (word or sides.columns):
    return None
  if word in ("", sides.columns):
    return "n"
  return "m" if sides.rows.endswith(word) else None


def _all_added(x: Operands, spec: Spec, with_bias: bool) -> jax.Array:
  """beta * C, and a bias for each example: the kernel has one for all."""
  wide = x.wide(spec.out_dtype)
  plain = dataclasses.replace(spec, out_dtype=wide, activation=None, save=False)
  x = x._replace(alpha=None, bias=x.bias if with_bias else None)
  nothing = jnp.zeros([1] * len(spec.out), wide)
  return spec_lib.epilogue([nothing], x, plain)[0]
