"""What each device multiplies of a sharded product.

The plan follows from how operands and result are sharded, and from nothing
else; `sharding` carries it out.
"""

from collections.abc import Iterable, Mapping
import itertools
import math
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from pallas_gemm.ops import scales
from pallas_gemm.ops.scales import BLOCK
from pallas_gemm.ops.spec import BESIDE, Operands, Spec, blocks_of, whole_of

Axes = tuple[str, ...]
# The axes that each letter of an operand, or of the result, is sharded over.
Parts = dict[str, Axes]


class MeshPlan(NamedTuple):
  """What a device does of a sharded product.

  Attributes:
    operands: a PartitionSpec of each operand that a device reads.
    sent: of each, the shape of what the device has itself, if it reads other
      parts too; else None.
    psum: the axes that sums are spread over.
    scatter: of those, by letter of the result, the axes over which a dimension
      of the sums is scattered.
    rows: the axes that the rows of groups are sharded over while multiplying,
      and then in the result.
    groups: the axes that groups are sharded over.
  """

  operands: Operands
  sent: Operands
  psum: Axes
  scatter: Parts
  rows: tuple[Axes, Axes]
  groups: Axes

  def __str__(self) -> str:
    words = [
      f"{name} {spec}" + (f" from {list(sent)}" if sent else "")
      for name, spec, sent in zip(Operands._fields, self.operands, self.sent)
      if spec is not None
    ]
    if self.scatter:
      words.append(f"psum_scatter {self.scatter}")
    scattered = sum(self.scatter.values(), ())
    if rest := [axis for axis in self.psum if axis not in scattered]:
      words.append(f"psum {rest}")
    return ", ".join(words)


class _Mesh(NamedTuple):
  """Sizes: of the mesh's axes, and of each letter."""

  axes: Mapping[str, int]
  size: Mapping[str, int]

  def shards(self, axes: Iterable[str]) -> int:
    return math.prod(self.axes[x] for x in axes)

  def divides(self, letter: str, axes: Axes) -> bool:
    """Whether shards are of one size, and of whole blocks where there are."""
    of = BLOCK if blocks_of(letter) in self.size else 1
    return self.size[letter] % (self.shards(axes) * of) == 0

  def parts(self, word: str, spec: PartitionSpec) -> Parts:
    """What a PartitionSpec says of a word's letters, without axes of size 1."""
    return {
      c: tuple(x for x in _axes(part) if self.axes[x] > 1)
      for c, part in zip(word, (*spec, *(None,) * len(word)))
    }

  def elements(self, parts: Parts, without: str = "") -> float:
    """What a device has of an operand that is not sharded along `without`."""
    axes = [x for c, part in parts.items() if c != without for x in part]
    return math.prod(self.size[c] for c in parts) / self.shards(axes)


def plan_of(
  spec: Spec,
  have: Operands,
  out: PartitionSpec,
  mesh: Mapping[str, int],
  size: Mapping[str, int],
) -> MeshPlan:
  """Which parts a device multiplies, of operands and a result so sharded.

  A device computes its part of the result. What is summed over and sharded
  alike in A and B is multiplied in parts and added up by a psum, or scattered
  where the result is sharded over the same axes; otherwise it is gathered, as
  XLA does. Groups (experts) are summed over, too: a device multiplies the rows
  of its own, and the others are zero.
  """
  sizes = _Mesh(mesh, size)
  at = sizes.parts(spec.out, out)
  summed, scatter = _summed(spec, have, at, sizes)
  product = summed | {
    c: axes[: len(axes) - len(scatter.get(c, ()))] for c, axes in at.items()
  }

  def to(name: str, word: str | None) -> PartitionSpec | None:
    if word is None:
      return None
    # What is applied to the sums has the parts that the result has.
    of_product = name in (*scales.FIELDS, *scales.FIELDS.values(), *BESIDE)
    parts = product if of_product else at
    return PartitionSpec(*[parts.get(c) or of_blocks(c) for c in word])

  def of_blocks(c: str) -> Axes | None:
    """Of blocks, if no shard has a part of one; else a device cuts out its."""
    whole = whole_of(c)
    axes = product.get(whole, ())
    return axes if c != whole and axes and sizes.divides(whole, axes) else None

  def sent(word: str | None, has: PartitionSpec, reads: PartitionSpec):
    if word is None:
      return None
    own, parts = sizes.parts(word, has), sizes.parts(word, reads)
    if all(parts[c][: len(own[c])] == own[c] for c in word):
      return None
    return tuple(-(-size[c] // sizes.shards(own[c])) for c in word)

  ragged = spec.ragged or ""
  reads = Operands(*itertools.starmap(to, spec.words._asdict().items()))
  return MeshPlan(
    reads,
    Operands(*map(sent, spec.words, have, reads)),
    tuple(sorted(set(sum(summed.values(), ())))),
    scatter,
    (product.get(ragged, ()), at.get(ragged, ())),
    summed.get("g", at.get("g", ())),
  )


def _summed(
  spec: Spec, have: Operands, at: Parts, mesh: _Mesh
) -> tuple[Parts, Parts]:
  """What a device's sums are a part of, and over what they are scattered."""
  a, b = mesh.parts(spec.words.a, have.a), mesh.parts(spec.words.b, have.b)
  up = b if have.b_up is None else mesh.parts(spec.words.b_up, have.b_up)
  summed = {}
  for c in spec.contracted:
    # As far as they are sharded alike.
    alike = itertools.takewhile(
      lambda axes: len(set(axes)) == 1, zip(a[c], b[c], up[c])
    )
    axes = tuple(axis for axis, *_ in alike)
    axes = axes or _cut_for_nothing(c, a, b, at, mesh)
    if axes and mesh.divides(c, axes):
      summed[c] = axes
  if spec.ragged == "m" and b["g"] == up["g"] and mesh.divides("g", b["g"]):
    summed |= {"g": b["g"]} if b["g"] else {}
  while True:
    psum = set(sum(summed.values(), ()))
    scatter = {
      c: hit
      for c, axes in at.items()
      if (hit := tuple(x for x in axes if x in psum))
    }
    # Scattered is what varies fastest. Sums of all groups may be too large.
    bad = {
      x
      for c, hit in scatter.items()
      if at[c][-len(hit) :] != hit
      or c == "g"
      or not (mesh.size[c] and mesh.divides(c, at[c]))  # none of nothing
      for x in hit
    }
    if not bad:
      return summed, scatter
    summed = {
      c: tuple(x for x in axes if x not in bad) for c, axes in summed.items()
    }


# Elements of an operand that are gathered in the time that one result of 32
# bits is added up over devices: each of those is sent twice, and twice as wide.
_GATHERED_PER_RESULT = 4


def _cut_for_nothing(c: str, a: Parts, b: Parts, out: Parts, mesh: _Mesh):
  """Axes over which one operand is sharded along K, and the other whole.

  That one is cut for nothing, unless it is sharded over them elsewhere. Then
  results are added up if they are much smaller than what would be gathered: a
  gradient of weights, where that is activations.
  """
  if bool(a[c]) == bool(b[c]):
    return ()
  cut, whole = (a, b) if a[c] else (b, a)
  if set(cut[c]) & {x for axes in whole.values() for x in axes}:
    return ()
  results = _GATHERED_PER_RESULT * mesh.elements(out)
  return cut[c] if results <= mesh.elements(cut, without=c) else ()


def _axes(part: Any) -> Axes:
  if part is None or isinstance(part, str):
    return () if part is None else (part,)
  return tuple(part) if isinstance(part, tuple) else (part,)
