"""What one product computes: the static part, and the operands by name.

Every dimension has a letter, as in einsum: a letter of A and B that the result
lacks is summed over, one that all three have is a batch dimension.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm import compat, dtypes, meshes
from pallas_gemm.problem import Side

_UNSHARDED = PartitionSpec()
# For dimensions that have no letter of their own: those of a folded or grouped
# product are b, m, n, k, g and o. JAX has no largest rank, so the last of these
# are the 20902 letters that Unicode has in one piece.
LETTERS = "acdefhijlpqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + "".join(
  map(chr, range(0x4E00, 0x9FA6))
)
# From a letter to that of its blocks, of 128 indices each, that scales have.
_TO_BLOCKS = 0x10000
# The fields of a B, and of the smaller planes that it may have beside it.
PLANES = {"b": ("b_2", "b_3"), "b_up": ("up_2", "up_3")}
BESIDE = *PLANES["b"], *PLANES["b_up"]


class Operands(NamedTuple):
  """What a product reads, or something of each; None for what is not there."""

  a: Any
  b: Any
  b_up: Any = None
  bias: Any = None
  c: Any = None
  alpha: Any = None
  beta: Any = None
  offsets: Any = None
  scale_a: Any = None
  scale_b: Any = None
  scale_up: Any = None
  b_2: Any = None
  b_3: Any = None
  up_2: Any = None
  up_3: Any = None

  def present(self) -> list[Any]:
    """Those that are not None, in order."""
    return [x for x in self if x is not None]

  @property
  def scales(self) -> "tuple[Any, Any, Any]":
    """Of A, B and B_up."""
    return self.scale_a, self.scale_b, self.scale_up

  @property
  def has_scales(self) -> bool:
    """Whether an operand has one."""
    return any(scale is not None for scale in self.scales)

  @property
  def has_planes(self) -> bool:
    """Whether each B is a sum of planes, of which it is the largest."""
    return self.b_2 is not None

  def planes(self, field: str) -> list[Any]:
    """Those of a B, the largest first; or it alone."""
    fields = field, *PLANES[field]
    return [v for x in fields if (v := getattr(self, x)) is not None]

  def beside_b(self) -> dict[str, Any]:
    """The smaller planes of B, by field."""
    return {x: getattr(self, x) for x in PLANES["b"]}

  @property
  def of_up(self) -> "Operands":
    """With B_up in place of B."""
    return self._replace(b=self.b_up, b_2=self.up_2, b_3=self.up_3)

  def wide(self, out_dtype: Any) -> Any:
    """The dtype of sums and epilogue."""
    return dtypes.accumulation_dtype(self.a.dtype, self.b.dtype, out_dtype)


class Sizes(NamedTuple):
  """The dimensions of a product; 0 groups: it is dense."""

  batch: int
  m: int
  n: int
  k: int
  groups: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """activation(alpha * A @ B + beta * C + bias), apart from the operands.

  If there is a B_up: activation(A @ B) * (A @ B_up). An operand that has a
  scale stands for its product with that.

  In a grouped product rows offsets[g] to offsets[g + 1] are group g; offsets
  [G + 1] never fall and lie within the rows. Rows outside of all groups take no
  part. Its letters are m, n, k, g and o (of the offsets), the others are batch
  dimensions. `ragged` is the dimension that groups share out. "m": A is [m, k],
  B [g, k, n], bias [g, n], the result [m, n]: each row is multiplied with the B
  of its group; zeros outside of the groups, whatever bias and activation are.
  "k": A is [k, m], B [k, n], the result [g, m, n]: A[rows of g].T @ B[rows of
  g].

  Attributes:
    words: the letters of each operand, one a dimension; None: not there. A
      scale has those of its operand that it is not the same along, of
      dimensions with one for each 128 indices `blocks_of` the letter.
    out: the letters of the results.
    out_dtype: of the results.
    parts: how the results' type is sharded over Explicit mesh axes.
    ragged: see above; None without groups.
    activation: an `activations.Activation`; None for none.
    save: also returns what the activation is applied to (gated: both
      products), rounded to `out_dtype`.
    precision: as of `lax.dot_general`.
    in_planes: float32 is multiplied in planes of bfloat16, as it says.
    implementation: the names to try, in order; None for the platform's.
    config: of the kernel; None leaves it to tuning.
    reduce_dtype: what parts of sums that devices have are rounded to before
      they are added up; None leaves them as they are.
    batch_invariant: a row's bits must not depend on how many others there are.
    leading_rows: there may be rows before the first group.
    whole_slabs: groups along K start at multiples of 128, so that no block of
      128 has rows of two; zeros lie between them.
    rounds_cotangent: of a product whose results of 16 bits are wider than asked
      for: their cotangent has been in 16 bits, and is rounded to them again.
    around: of a device's part of a sharded product: what lies around it.
    before: why something was applied to the operands before the product.
  """

  words: Operands
  out: str
  out_dtype: Any
  parts: PartitionSpec = _UNSHARDED
  ragged: Literal["m", "k"] | None = None
  activation: Any = None
  save: bool = False
  precision: Any = None
  in_planes: bool = False
  implementation: tuple[str, ...] | None = None
  config: Any = None
  reduce_dtype: Any = None
  batch_invariant: bool = False
  leading_rows: bool = True
  whole_slabs: bool = False
  rounds_cotangent: bool = False
  around: str = ""
  before: str = ""

  @property
  def gated(self) -> bool:
    return self.words.b_up is not None

  @property
  def transpose_a(self) -> bool:
    """A folded A is stored [.., K, M]."""
    return self.words.a.endswith("km")

  @property
  def transpose_b(self) -> bool:
    """A folded B is stored [.., N, K]."""
    return self.words.b.endswith("nk")

  @property
  def bias(self) -> Side | None:
    """The side of the result that a folded product's bias runs along."""
    return None if self.words.bias is None else self.words.bias[-1]

  @property
  def has_epilogue(self) -> bool:
    """Whether anything is applied to A @ B."""
    applied = self.activation, *self.words[2:6]
    return any(x is not None for x in applied)

  @property
  def outputs(self) -> int:
    """How many results there are."""
    return (3 if self.gated else 2) if self.save else 1

  @property
  def contracted(self) -> str:
    """The letters that are summed over, as A has them."""
    a, b, out = self.words.a, self.words.b, self.out
    return "".join(c for c in a if c in b and c not in out)

  def free(self, word: str, other: str) -> str:
    """The letters of the result that one operand has, and the other has not."""
    return "".join(c for c in word if c in self.out and c not in other)

  def named(self, flat: Sequence[Any]) -> Operands:
    """The operands that are there, given in order, by name."""
    rest = iter(flat)
    return Operands(*[None if w is None else next(rest) for w in self.words])

  def letters(self, x: Operands) -> dict[str, int]:
    """The size of each letter. One that some operands have as 1 broadcasts."""
    size: dict[str, int] = {}
    for word, v in zip(self.words, x):
      for c, n in zip(word or "", getattr(v, "shape", ())):
        if c not in size or (isinstance(size[c], int) and size[c] == 1):
          size[c] = n
    if self.ragged:
      size["g"] = size["o"] - 1
    return size

  def sizes(self, x: Operands) -> Sizes:
    """Of a folded product."""
    size = self.letters(x)
    return Sizes(size.get("b", 1), *[size[c] for c in "mnk"], size.get("g", 0))

  def shape(self, x: Operands) -> tuple[int, ...]:
    """Of each result."""
    size = self.letters(x)
    return tuple(size[c] for c in self.out)

  def is_empty(self, x: Operands) -> bool:
    """Whether a dimension of a folded product is zero."""
    return 0 in self.sizes(x)[: 5 if self.ragged else 4]

  def parts_of(self) -> dict[str, Any]:
    """How each letter of the results is sharded."""
    return dict(zip(self.out, (*self.parts, *(None,) * len(self.out))))

  def product_alone(self, words: Operands, **changes: Any) -> "Spec":
    """A product of `words`, with nothing else applied to it, and `changes`.

    Dimensions that only the rest has are not the product's, and its config is
    left to tuning: a user's is for the whole.
    """
    kept = "".join(word for word in words if word) + "g" * bool(self.ragged)
    left = {c: part for c, part in self.parts_of().items() if c in kept}
    alone = dataclasses.replace(
      self,
      words=words,
      out="".join(left),
      parts=PartitionSpec(*left.values()),
      activation=None,
      save=False,
      config=None,
    )
    return dataclasses.replace(alone, **changes)

  def products(
    self, x: Operands, **changes: Any
  ) -> Iterator[tuple[Operands, "Spec"]]:
    """A @ B alone and, if gated, A @ B_up."""

    def one(v: Operands, scale: Any) -> Operands:
      found = Operands(v.a, v.b, offsets=v.offsets, **v.beside_b())
      return found._replace(scale_a=v.scale_a, scale_b=scale)

    w = self.words
    yield (
      one(x, x.scale_b),
      self.product_alone(one(w, w.scale_b), **changes),
    )
    if self.gated:
      yield (
        one(x.of_up, x.scale_up),
        self.product_alone(one(w.of_up, w.scale_up), **changes),
      )


def blocks_of(letter: str) -> str:
  """The letter of a dimension's blocks."""
  return chr(ord(letter) + _TO_BLOCKS)


def whole_of(letter: str) -> str:
  """The letter that one of blocks is made of; other letters as they are."""
  code = ord(letter)
  return chr(code - _TO_BLOCKS) if code >= _TO_BLOCKS else letter


def in_order(v: jax.Array, word: str, out: str) -> jax.Array:
  """Dimensions in the order of `out`."""
  order = sorted(range(len(word)), key=lambda i: out.index(word[i]))
  return v if order == list(range(len(word))) else v.transpose(order)


def lifted(v: jax.Array, word: str, out: str) -> jax.Array:
  """Dimensions in the order of `out`, with 1 for those that are not there."""
  v = in_order(v, word, out)
  missing = [i for i, c in enumerate(out) if c not in word]
  if meshes.explicit([v]) is not None:
    return jnp.expand_dims(v, missing)  # a reshape may not keep the sharding
  shape = iter(v.shape)
  return v.reshape([next(shape) if c in word else 1 for c in out])


def epilogue(sums: Sequence[Any], x: Operands, spec: Spec) -> list[Any]:
  """The results of A @ B (gated: and A @ B_up), shaped as the result.

  Everything is computed in the dtype of the sums.
  """
  w, (z, *up) = spec.words, sums
  if x.alpha is not None:
    z = z * lifted(x.alpha.astype(z.dtype), w.alpha, spec.out)
  if x.c is not None:
    c = lifted(x.c.astype(z.dtype), w.c, spec.out)
    if x.beta is not None:
      c = c * lifted(x.beta.astype(z.dtype), w.beta, spec.out)
    z = z + c
  if x.bias is not None and spec.ragged:
    z = z + of_rows(x.bias, x.offsets, z.shape[0]).astype(z.dtype)
  elif x.bias is not None:
    z = z + lifted(x.bias.astype(z.dtype), w.bias, spec.out)
  out = z if spec.activation is None else spec.activation(z)
  if up:
    out = out * up[0]
  results = [out, z, *up] if spec.save else [out]
  results = [result.astype(spec.out_dtype) for result in results]
  if spec.ragged != "m":
    return results
  return [zero_outside(v, x.offsets, w.offsets, spec.out) for v in results]


def of_rows(of_groups: jax.Array, offsets: jax.Array, rows: int) -> jax.Array:
  """What each row's group has; of a row in no group that of another one."""
  # The groups that end at or before a row are those before its own.
  number = lax.broadcasted_iota(offsets.dtype, (rows, 1), 0)
  before = offsets[None, 1:] <= number
  return jnp.take(of_groups, before.sum(1), axis=0, mode="clip")


def without_product(x: Operands, spec: Spec) -> list[jax.Array]:
  """As in BLAS: what K or alpha of zero leave, activation(beta * C + bias)."""
  space, device = jax.typeof(x.a).memory_space, jax.memory.Space.Device
  if space != device:  # where a reshape leaves no scalar
    outs = without_product(
      jax.tree.map(lambda v: jax.device_put(v, device), x), spec
    )
    return [jax.device_put(v, space) for v in outs]
  shape, wide = spec.shape(x), x.wide(spec.out_dtype)
  mesh = meshes.explicit(x.present())
  to = mesh and NamedSharding(mesh, spec.parts)
  no_groups = spec.ragged and x.offsets.shape == (1,)
  is_result = 0 in shape or spec.ragged == "k" or no_groups
  dtype = spec.out_dtype if is_result else wide
  zeros = jnp.zeros(shape, dtype, out_sharding=to)
  zeros, *_ = compat.join_varying(zeros, *x.present())
  if is_result:
    return [zeros] * spec.outputs
  return epilogue([zeros] * (1 + spec.gated), x._replace(alpha=None), spec)


def zero_outside(
  rows: jax.Array, offsets: jax.Array, word: str, out: str
) -> jax.Array:
  """Zeros for the rows (the letter m) in no group, whatever is there."""
  at, word = word.index("o"), word.replace("o", "")
  first, last = (
    lifted(lax.index_in_dim(offsets, i, at, keepdims=False), word, out)
    for i in (0, -1)
  )
  at = out.index("m")
  shape = [n if i == at else 1 for i, n in enumerate(rows.shape)]
  number = lax.broadcasted_iota(offsets.dtype, shape, at)
  inside = (first <= number) & (number < last)
  if (mesh := meshes.explicit([rows])) is not None:  # `jnp.where` wants it so
    of = zip(jax.typeof(rows).sharding.spec, rows.shape, inside.shape)
    parts = [part if n == have else None for part, n, have in of]
    to = NamedSharding(mesh, PartitionSpec(*parts))
    inside = jax.sharding.reshard(inside, to)
  return jnp.where(inside, rows, jnp.zeros_like(rows))
