"""The product that a cotangent of an operand is."""

from typing import Any, NamedTuple

from pallas_gemm.ops.spec import Spec

# How the letters of a grouped product are called in those that its cotangents
# are, by `ragged` and what the cotangent is of; see `Spec`.
_RENAMED = {
  ("m", "a"): {"n": "k", "k": "n"},
  ("m", "b"): {"m": "k", "k": "m"},
  ("m", "b transposed"): {"m": "k", "n": "m", "k": "n"},
  ("k", "a"): {"k": "m", "n": "k", "m": "n"},
  ("k", "b"): {"k": "m", "m": "k"},
}


class Transposed(NamedTuple):
  """The product that a cotangent of A or of B is, as `Spec` names it.

  Attributes:
    ct: the letters of the result's cotangent, one of its operands.
    other: of B for a cotangent of A, and the other way round.
    out: of its result.
    ct_is_a: whether the result's cotangent is its A.
    ragged: as of `Spec`.
    names: what letters of the product are called in it.
  """

  ct: str
  other: str
  out: str
  ct_is_a: bool
  ragged: str | None
  names: dict[int, str]

  def operands(self, ct: Any, other: Any) -> tuple[Any, Any]:
    """As A and B."""
    return (ct, other) if self.ct_is_a else (other, ct)


def transposed(spec: Spec, to_a: bool) -> Transposed:
  """The product that a cotangent of A (else of B) is."""
  w = spec.words
  target, other = (w.a, w.b) if to_a else (w.b, w.a)
  if not spec.ragged:
    last = target[-1:]
    ct_is_a = not last or last not in spec.out or last in other
    ct_is_a |= w.has_planes  # which B alone has
    return Transposed(spec.out, other, target, ct_is_a, None, {})
  # The two kinds of grouped products are each other's derivatives.
  of = "a" if to_a else "b"
  if spec.ragged == "m" and not to_a and w.b.index("n") < w.b.index("k"):
    of = "b transposed"
  names = str.maketrans(_RENAMED[spec.ragged, of])
  # What has the rows, and of two that have them the one with the letter m.
  ct_is_a = of != "b" and spec.ragged == "m"
  return Transposed(
    spec.out.translate(names),
    other.translate(names),
    target.translate(names),
    ct_is_a,
    "k" if spec.ragged == "m" and not to_a else "m",
    names,
  )
