"""Random calls of the drop-ins for jax.lax, many of them wrong in some way."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import pallas_gemm

DTYPES = (
  "bfloat16",
  "float16",
  "float32",
  "int8",
  "int32",
  "bool",
  "int4",
  "uint8",
  "complex64",
  "float8_e4m3fn",
  "float8_e5m2",
)
PRECISIONS = (None, None, "high", lax.DotAlgorithmPreset.F32_F32_F32)
_WRONG_TYPES = ("zz", 3, object)


@dataclasses.dataclass(frozen=True)
class Call:
  """The arguments of a drop-in."""

  arguments: tuple[Any, ...]
  keywords: dict[str, Any]

  def __str__(self) -> str:
    shown = [
      f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)
      for x in self.arguments
    ]
    return f"({', '.join(shown)}, {self.keywords})"


class _Draw:
  """Choices of one random generator."""

  def __init__(self, seed: Sequence[int]):
    self.rng = np.random.default_rng(seed)

  def one_of(self, items: Sequence[Any]) -> Any:
    return items[int(self.rng.integers(len(items)))]

  def happens(self, probability: float) -> bool:
    return bool(self.rng.random() < probability)

  def size(self) -> int:
    return self.one_of((1, 2, 2, 3, 3, 4, 5, 0))

  def dtype(self) -> str:
    wide = ("float64", "int64") if jax.config.jax_enable_x64 else ()
    return self.one_of(DTYPES + wide)

  def array(self, shape: Sequence[int], dtype: str) -> Any:
    """Of JAX or of NumPy, or of a weak type; sums of products are exact.

    Quarters of small integers, so that only results are rounded.
    """
    x = self.rng.integers(-8, 9, shape) / 4
    if dtype == "bool":
      x = x > 0
    elif dtype.startswith("complex"):
      x = x + 1j * self.rng.integers(-8, 9, shape) / 4
    elif "int" in dtype:
      x = self.rng.integers(0 if dtype == "uint8" else -3, 4, shape)
    if self.happens(0.2) and dtype in ("float32", "int32"):
      return jnp.full(shape, 2.0 if dtype == "float32" else 2)  # weak
    x = jnp.asarray(x, dtype)
    return np.asarray(x) if self.happens(0.2) else x

  def options(self) -> dict[str, Any]:
    keywords = {}
    if self.happens(0.6):
      keywords["preferred_element_type"] = self.dtype()
    if (chosen := self.one_of(PRECISIONS)) is not None:
      keywords["precision"] = chosen
    return keywords


def dot_general(index: int) -> Call:
  """A call of `dot_general`; of three, one is wrong in some way.

  Args:
    index: the same call each time.
  """
  draw = _Draw((1, index))
  while True:
    counts = [int(draw.rng.integers(0, most)) for most in (3, 3, 3, 3)]
    batch, contract, free_l, free_r = counts
    if max(batch + contract + free_l, batch + contract + free_r) <= 4:
      break
  shared = {label: draw.size() for label in range(batch + contract)}
  sides = []
  for first, free in ((10, free_l), (20, free_r)):
    sizes = shared | {first + i: draw.size() for i in range(free)}
    labels = [int(label) for label in draw.rng.permutation(list(sizes))]
    sides.append((labels, [sizes[label] for label in labels]))
  order = [
    [int(label) for label in draw.rng.permutation(labels)]
    for labels in (range(batch), range(batch, batch + contract))
  ]
  numbers = [
    [[labels.index(label) for label in kind] for labels, _ in sides]
    for kind in reversed(order)
  ]
  keywords = draw.options()
  shapes = [shape for _, shape in sides]
  if draw.happens(1 / 3):
    _spoil(draw, shapes, numbers, keywords)
  first = draw.dtype()
  dtypes = first, first if draw.happens(0.7) else draw.dtype()
  lhs, rhs = (draw.array(*x) for x in zip(shapes, dtypes))
  return Call((lhs, rhs, _spelt(draw, numbers)), keywords)


def _spoil(draw: _Draw, shapes, numbers, keywords) -> None:
  """Makes a call wrong in one way, of those that it can be wrong in."""
  side = int(draw.rng.integers(2))
  shape = shapes[side]
  taken = [dims[side] for dims in numbers]
  ways = ["type", "no such dimension", "negative", "float", "of one side"]
  if taken[0] + taken[1]:
    ways += ["size", "size", "twice", "both"]
  way = draw.one_of(ways)
  which = taken[0] or taken[1]
  if way == "type":
    keywords["preferred_element_type"] = draw.one_of(_WRONG_TYPES)
  elif way == "size":
    shape[which[0]] += 1
  elif way == "twice":
    which.append(which[0])
  elif way == "both":
    taken[0].append(which[0])
    taken[1].append(which[0])
  else:
    wrong = {"negative": -1, "float": 0.5, "of one side": 0}
    taken[0].append(wrong.get(way, len(shape) + 1))


def _spelt(draw: _Draw, numbers: list[Any]) -> Any:
  """As lists, tuples, arrays or None where that means the same."""
  as_tuples = tuple(tuple(map(tuple, pair)) for pair in numbers)
  way = draw.one_of(("lists", "tuples", "tuples", "arrays", "none"))
  if way == "lists":
    return numbers
  if way == "arrays":
    return tuple(
      tuple(np.asarray(dims, None if dims else int) for dims in pair)
      for pair in numbers
    )
  if way == "none":
    return None if draw.happens(0.5) else as_tuples
  return as_tuples


# Labels of dimensions of lhs and rhs: r ragged, g of groups, b of a batch, k
# and l contracted, m and n free.
_RAGGED = (
  ("rk", "gkn"),
  ("rk", "gkn"),
  ("rm", "rn"),
  ("brk", "gbkn"),
  ("rkl", "gkln"),
  ("rk", "gknm"),
  ("bkr", "bnr"),
)


def ragged_numbers(
  lhs: str, rhs: str, batch: str = "b"
) -> lax.RaggedDotDimensionNumbers:
  """Of operands whose dimensions have these labels, some of a batch."""
  both = [label for label in lhs if label in rhs]
  contract, batched = (
    tuple(
      tuple(side.index(label) for label in both if (label in batch) == wanted)
      for side in (lhs, rhs)
    )
    for wanted in (False, True)
  )
  group = (rhs.index("g"),) if "g" in rhs else ()
  rows = (lhs.index("r"),)
  return lax.RaggedDotDimensionNumbers((contract, batched), rows, group)


def ragged(op: str, index: int) -> Call:
  """A call of a grouped op; of three, one is wrong in some way."""
  draw = _Draw((2, index))
  labels = _RAGGED[0]
  if is_general := op == "ragged_dot_general":
    labels = [
      "".join(draw.rng.permutation(list(side))) for side in draw.one_of(_RAGGED)
    ]
  dims = {label: draw.size() for label in "rkmnbl"}
  dims["g"] = int(draw.rng.integers(1, 4))
  shapes = [[dims[label] for label in side] for side in labels]
  keywords = draw.options()
  sizes = _group_sizes(draw, dims["r"], dims["g"])
  if draw.happens(1 / 3):
    sizes = _spoil_ragged(draw, shapes, sizes, keywords)
  first = draw.dtype()
  is_mixed = is_general and draw.happens(0.3)
  dtypes = first, draw.dtype() if is_mixed else first
  lhs, rhs = (draw.array(*x) for x in zip(shapes, dtypes))
  if not is_general:  # it promotes mixed dtypes, weak ones too, as jnp does
    rhs = rhs.astype(lhs.dtype)
  numbers = (ragged_numbers(*labels),) if is_general else ()
  return Call((lhs, rhs, sizes, *numbers), keywords)


def _group_sizes(draw: _Draw, rows: int, groups: int) -> jax.Array:
  """Whatever adds up to no more than there are rows."""
  bounds = np.sort(draw.rng.integers(0, rows + 1, groups + 1))
  return jnp.asarray(np.diff(bounds), draw.one_of(("int32", "int32", "uint8")))


def _spoil_ragged(draw: _Draw, shapes, sizes, keywords) -> jax.Array:
  """Makes a call wrong in one way; returns the sizes of groups."""
  way = draw.one_of(("type", "size", "float sizes", "rank of sizes", "scalar"))
  if way == "type":
    keywords["preferred_element_type"] = draw.one_of(_WRONG_TYPES)
  elif way == "size":
    shapes[1][:] = [size + 1 for size in shapes[1]]
  elif way == "scalar":
    shapes[0].clear()
  return {
    "float sizes": sizes.astype("float32"),
    "rank of sizes": sizes[None, None, None],
  }.get(way, sizes)


def outcome(f: Callable[..., jax.Array], call: Call) -> Any:
  """What the function returns or raises."""
  try:
    return jax.block_until_ready(f(*call.arguments, **call.keywords))
  except Exception as error:
    return error


def assert_like_lax(op: str, call: Call, valid: bool = False) -> None:
  """The op gives or raises what that of jax.lax does.

  Args:
    op: the name of both.
    call: what is called.
    valid: whether it must be one that is right.
  """
  want, got = (outcome(getattr(of, op), call) for of in (lax, pallas_gemm))
  assert not (valid and isinstance(want, Exception)), want
  # `ragged_dot` takes one rank alone, and says so in words of its own, which
  # may be of another class.
  any_class = op == "ragged_dot"
  if any_class and call.arguments[0].ndim != 2:
    assert isinstance(got, TypeError | ValueError)
    return
  if isinstance(want, jax.errors.JaxRuntimeError):
    # A backend without int4, say: what runs instead may be something else.
    if not isinstance(got, Exception):
      return
  if isinstance(want, Exception):
    assert isinstance(got, Exception), f"{call}\ngives {got}\nnot {want!r}"
    same = type(got) is type(want)
    if any_class:
      same = {type(got), type(want)} <= {TypeError, ValueError} or same
    assert same, f"{call}\nraises {got!r}\nnot {want!r}"
    return
  if isinstance(got, Exception):
    raise AssertionError(f"{call}\nraises {got!r}") from got
  types = [(x.shape, x.dtype, x.weak_type) for x in (got, want)]
  assert types[0] == types[1], f"{call}\ngives {types[0]}, not {types[1]}"
  _assert_close(np.asarray(got), np.asarray(want), call)


def _assert_close(got: np.ndarray, want: np.ndarray, call: Call) -> None:
  dtype = want.dtype
  if not jnp.issubdtype(dtype, jnp.inexact):
    np.testing.assert_array_equal(got, want, str(call))
    return
  wide = np.complex128 if dtype.kind == "c" else np.float64
  got, want = got.astype(wide), want.astype(wide)
  # Sums are exact in float32; 16 bits and 8 are rounded once.
  roundings = math.ldexp(1, 4) if dtype.itemsize >= 4 else 1
  info = jnp.finfo(dtype)
  np.testing.assert_allclose(
    got,
    want,
    rtol=roundings * float(info.eps),
    atol=float(info.smallest_subnormal),
    err_msg=str(call),
  )
