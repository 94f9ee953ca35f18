"""Random products of 8 bits: calls of each op, and what they must give.

On CPUs, interpreted or XLA's, products of 8 bits are added in float32. So they
are held to its bound, some hundred times closer than that of the tensor cores:
of a product K + 5 roundings, two of which are those of the scales.
"""

from collections.abc import Callable
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gemm
from pallas_gemm import check
from pallas_gemm.quantization import Quantized
from tests.support.calls import OUT_DTYPES
from tests.support.ops import ROWS, SUMS

FLOATS = "float8_e4m3fn", "float8_e5m2"
ACTIVATIONS = None, jax.nn.relu, jax.nn.silu, jnp.tanh
SIZES = 1, 7, 97, 128, 150, 261
ON_KERNEL_SIZES = 1, 7, 70, 130
# What a scale has along a dimension: one, one for each, one for each 128.
ONE, EACH, BLOCKS = "one", "each", "blocks"
# Along the free dimension and K, of A and B, which kernels have.
_ENDS = [(ONE, ONE), (EACH, ONE), (BLOCKS, ONE), None]
_ALONG_K = [(EACH, BLOCKS), (BLOCKS, BLOCKS)]


class Factor(NamedTuple):
  """What a user passes, and what it stands for in float64."""

  given: Any
  exact: np.ndarray

  @property
  def parts(self) -> tuple[Any, Any]:
    """Values and scale."""
    return self.given.values, self.given.scale


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """One for each element."""
  for i, size in enumerate(shape if scale.ndim else ()):
    if scale.shape[i] not in (1, size):
      scale = np.repeat(scale, 128, axis=i).take(range(size), axis=i)
  return np.broadcast_to(scale, shape)


class Draw:
  """Random arrays and choices."""

  def __init__(self, *seed: int, kernel: bool = False):
    """Of what a kernel has, small, or of all that there is."""
    self.rng = np.random.default_rng(seed)
    self.kernel = kernel
    self.dtypes = [self.one(FLOATS), self.one(FLOATS)]
    if self.chance(0.25):
      self.dtypes = ["int8", "int8"]
    of_a, of_b = _ENDS, _ENDS
    if self.chance(0.4):
      of_a, of_b = _ALONG_K, _ALONG_K
    elif kernel and self.chance(0.3):  # one is spread for the other
      of_a = _ALONG_K
    elif not kernel and self.chance(0.8):
      of_a = of_b = [*itertools.product((ONE, EACH, BLOCKS), repeat=2)]
    self.kinds = [self.one(of_a), self.one(of_b)]
    if self.kinds == [None, None]:
      self.kinds = [(ONE, ONE), None]

  def one(self, values: Any) -> Any:
    return values[self.rng.integers(len(values))]

  def chance(self, of: float = 0.5) -> bool:
    return bool(self.rng.random() < of)

  def size(self) -> int:
    return self.one(ON_KERNEL_SIZES if self.kernel else SIZES)

  def normal(self, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(self.rng.standard_normal(shape), dtype)

  def factor(self, side: int, dims: dict[str, int], free: str) -> Factor:
    """An operand.

    Args:
      side: 0 is A, 1 is B.
      dims: sizes by letter, as stored; "k" is summed over.
      free: the other letter of the matrix; the rest is a batch or groups.
    """
    shape, dtype = tuple(dims.values()), self.dtypes[side]
    if dtype == "int8":
      values = self.rng.integers(-127, 128, shape).astype(np.int8)
    else:
      values = np.asarray(self.normal(*shape, dtype=dtype))
    kind = self.kinds[side]
    if kind is None:
      is_alone = self.chance()  # values without a scale, or a scale ()
      scale = np.float32(1 if is_alone else 0.75)
    else:
      along = {free: kind[0], "k": kind[1]}
      of = [along.get(c) or self.one((ONE, EACH)) for c in dims]
      sizes = {ONE: lambda n: 1, EACH: int, BLOCKS: lambda n: -(-n // 128)}
      scale = 2 ** self.rng.uniform(
        -2, 2, [sizes[x](n) for x, n in zip(of, shape)]
      )
    scale = scale * (2.0**-6 if dtype == "int8" else 1)
    scale = jnp.asarray(
      scale, self.one(("float32", "float32", "bfloat16", "float8_e8m0fnu"))
    )
    exact = values.astype(np.float64)
    exact = exact * spread(np.asarray(scale).astype(np.float64), shape)
    return Factor(Quantized(jnp.asarray(values), scale), exact)


# How a result is compared: the arrays of each product of matrices.


def assert_right(out: Any, a: Any, b: Any, b_up: Any = None, **epilogue: Any):
  """[M, N] is what `check.expected` says of float64 operands."""
  ones = 1.0, 1.0, 1.0  # a rounding of each scale
  want = check.expected(
    a, b, b_up, **epilogue, scales=ones, out_dtype=out.dtype
  )[0]
  assert out.shape == want.want.shape
  found = want.check(np.asarray(out))
  assert found.passed, found


def assert_batch(out: Any, a: Any, b: Any, *rest: Any, **epilogue: Any):
  """The same of matrices with a batch in front, which broadcast."""
  batch = out.shape[:-2]
  c = epilogue.pop("c", None)
  stack = [
    None if v is None else np.broadcast_to(v, batch + v.shape[-2:])
    for v in (a, b, *rest)
  ]
  for i in np.ndindex(batch):
    matrices = [None if v is None else v[i] for v in stack]
    of_c = {} if c is None else {"c": c[i]}
    assert_right(out[i], *matrices, **epilogue, **of_c)


# Calls: each draws its operands, and returns results and a check of them.
Call = tuple[Callable[[], jax.Array], Callable[[jax.Array], None]]


def matmul(draw: Draw, **how: Any) -> Call:
  m, n, k = draw.size(), draw.size(), draw.size()
  k = 0 if draw.chance(0.05) else k
  flags = {"transpose_a": draw.chance(0.3), "transpose_b": draw.chance(0.6)}
  batch = {"x": 2} if draw.chance(0.3) else {}
  word_a = "km" if flags["transpose_a"] else "mk"
  word_b = "nk" if flags["transpose_b"] else "kn"
  sizes = {"m": m, "n": n, "k": k}
  a = draw.factor(0, batch | {c: sizes[c] for c in word_a}, "m")
  shared = draw.chance()
  b = draw.factor(
    1, ({} if shared else batch) | {c: sizes[c] for c in word_b}, "n"
  )
  epilogue = _epilogue(draw, (*batch.values(), m, n))
  how |= flags | epilogue | {"out_dtype": draw.one((None, *OUT_DTYPES))}
  run = functools.partial(pallas_gemm.matmul, a.given, b.given, **how)
  exact_a = a.exact.swapaxes(-1, -2) if flags["transpose_a"] else a.exact
  exact_b = b.exact.swapaxes(-1, -2) if flags["transpose_b"] else b.exact
  epilogue = {x: np.asarray(v) if x in ("bias", "c") else v
              for x, v in epilogue.items()}  # fmt: skip
  return run, lambda out: assert_batch(out, exact_a, exact_b, **epilogue)


def _epilogue(draw: Draw, shape: tuple[int, ...]) -> dict[str, Any]:
  found: dict[str, Any] = {"activation": draw.one(ACTIVATIONS)}
  m, n = shape[-2:]
  if draw.chance():
    found["bias"] = draw.normal(*draw.one(((n,), (m, 1))))
  if draw.chance(0.3):
    found |= {"c": draw.normal(*shape, dtype="bfloat16"), "beta": 1.5}
  if draw.chance(0.3):
    found["alpha"] = 0.5
  return found


def gated_matmul(draw: Draw, **how: Any) -> Call:
  m, n, k = draw.size(), draw.size(), draw.size()
  x = draw.factor(0, {"m": m, "k": k}, "m")
  gate, up = (draw.factor(1, {"k": k, "n": n}, "n") for _ in range(2))
  how |= {"activation": draw.one(ACTIVATIONS[1:])}
  operands = [v.given for v in (x, gate, up)]
  run = functools.partial(
    pallas_gemm.gated_matmul, *operands, out_dtype=draw.one(OUT_DTYPES), **how
  )
  activation = how["activation"]
  return run, lambda out: assert_right(
    out, x.exact, gate.exact, up.exact, activation=activation
  )


def dot_general(draw: Draw) -> Call:
  """Dimensions in any order, one or two that are summed over."""
  sizes = {"b": 2, "m": draw.size(), "n": draw.size(), "k": draw.size()}
  sizes["l"] = draw.one((1, 3))
  with_l, with_b = "l" * draw.chance(), "b" * draw.chance()
  word_a = "".join(draw.rng.permutation([*f"mk{with_b}{with_l}"]))
  word_b = "".join(draw.rng.permutation([*f"nk{with_b}{with_l}"]))
  a = draw.factor(0, {c: sizes[c] for c in word_a}, "m")
  b = draw.factor(1, {c: sizes[c] for c in word_b}, "n")
  numbers = tuple(
    tuple(tuple(map(word.index, letters)) for word in (word_a, word_b))
    for letters in ("k" + with_l, with_b)
  )
  run = functools.partial(
    pallas_gemm.dot_general,
    *(a.given, b.given, numbers),
    preferred_element_type=draw.one((None, *OUT_DTYPES)),
  )

  def matrices(exact, word, free):
    order = [*with_b, free, "k", *with_l]
    v = exact.transpose([word.index(c) for c in order])
    return v.reshape(*v.shape[: len(with_b) + 1], -1)

  exact_b = matrices(b.exact, word_b, "n").swapaxes(-1, -2)
  exact_a = matrices(a.exact, word_a, "m")
  return run, lambda out: assert_batch(out, exact_a, exact_b)


def vmap(draw: Draw) -> Call:
  """Over values of A, and perhaps scales of B; what is left is shared."""
  m, n, k = draw.size(), draw.size(), draw.size()
  a = draw.factor(0, {"m": m, "k": k}, "m")
  b = draw.factor(1, {"k": k, "n": n}, "n")
  # Times powers of two: exact.
  times = np.array([1.0, 2.0, 0.5]) if draw.chance() else np.ones(1)
  values = jnp.stack([a.parts[0], -a.parts[0], a.parts[0]])
  scale = b.parts[1].astype("float32")
  scales = jnp.stack([scale * x for x in times.astype(np.float32)])
  is_shared = len(times) == 1
  axes = Quantized(0, None), Quantized(None, None if is_shared else 0)
  run = functools.partial(
    jax.vmap(functools.partial(pallas_gemm.matmul, out_dtype="float32"), axes),
    Quantized(values, a.parts[1]),
    Quantized(b.parts[0], scale if is_shared else scales),
  )
  exact_a = np.stack([a.exact, -a.exact, a.exact])
  exact_b = b.exact * times[:, None, None]
  return run, lambda out: assert_batch(out, exact_a, exact_b)


# Groups.


class Groups(NamedTuple):
  """Which rows each group has: `rhs` has the groups from `offset` on."""

  sizes: np.ndarray
  offset: int | None
  rows: int

  def spans(self, count: int) -> list[slice]:
    ends = np.minimum(np.cumsum([0, *self.sizes]), self.rows)
    first = self.offset or 0
    return [slice(*ends[i : i + 2]) for i in range(first, first + count)]


def groups(draw: Draw, count: int) -> Groups:
  extra = draw.rng.integers(0, 3) if draw.chance(0.3) else None
  few = 0, 1, 3, 40, 127, 128
  sizes = [draw.one(few) for _ in range(count + (extra or 0))]
  rest = draw.one((0, 0, 5, 20))
  offset = None if extra is None else int(draw.rng.integers(0, extra + 1))
  return Groups(np.array(sizes), offset, max(1, sum(sizes) + rest))


def _with_nan(x: Factor, where: np.ndarray) -> Factor:
  """NaN in rows; of int8, which has none, in scales of each row."""
  values, scale = map(np.array, x.parts)
  if values.dtype != np.int8:
    values[where] = np.nan
  elif scale.ndim and scale.shape[0] == len(values) > 1:
    scale = scale.astype(np.float32)
    scale[where] = np.nan
  return x._replace(given=Quantized(jnp.asarray(values), jnp.asarray(scale)))


def _of_groups(draw: Draw) -> tuple[int, int, int, Groups, np.ndarray, Any]:
  count = draw.one((1, 2) if draw.kernel else (1, 2, 4))
  of, n, k = groups(draw, count), draw.size(), draw.size()
  outside = np.ones(of.rows, bool)
  for span in of.spans(count):
    outside[span] = False
  call = {"group_sizes": jnp.asarray(of.sizes)}
  if of.offset is not None:
    call["group_offset"] = jnp.asarray(of.offset)
  return count, n, k, of, outside, call


def ragged_dot(draw: Draw, op: str = "ragged_dot", **how: Any) -> Call:
  """Rows by a matrix for each group, by any op that has that."""
  is_plain, gated = op == "ragged_dot", op == "gated_ragged_dot"
  count, n, k, of, outside, call = _of_groups(draw)
  is_transposed = is_plain and draw.chance()
  dims = {"g": count} | (
    {"n": n, "k": k} if is_transposed else {"k": k, "n": n}
  )
  a = _with_nan(draw.factor(0, {"m": of.rows, "k": k}, "m"), outside)
  bs = [draw.factor(1, dims, "n") for _ in range(1 + gated)]
  how |= call
  activation = bias = None
  if op == "ragged_dot_general":
    how["ragged_dot_dimension_numbers"] = ROWS
  else:
    activation = how["activation"] = draw.one(ACTIVATIONS[gated:])
  if is_plain:
    bias = draw.normal(count, n) if draw.chance() else None
    how |= {"transpose_rhs": is_transposed, "bias": bias}
  run = functools.partial(
    getattr(pallas_gemm, op),
    *(a.given, *[b.given for b in bs]),
    preferred_element_type=draw.one((None, *OUT_DTYPES)),
    **how,
  )

  def compare(out):
    assert not np.asarray(out)[outside].astype(np.float32).any()
    for g, span in enumerate(of.spans(count)):
      one = [b.exact[g].T if is_transposed else b.exact[g] for b in bs]
      more = {} if bias is None else {"bias": np.asarray(bias[g])}
      assert_right(
        out[span], a.exact[span], *one, activation=activation, **more
      )

  return run, compare


def ragged_sums(draw: Draw, **how: Any) -> Call:
  """Sums over the rows of each group."""
  if draw.kernel:  # blocks along rows have no kernel: groups start anywhere
    draw.kinds = [draw.one(_ENDS[:2]) for _ in range(2)]
  count, n, m, of, _, _ = _of_groups(draw)
  of = of._replace(offset=None, sizes=of.sizes[:count])
  outside = np.arange(of.rows) >= sum(of.sizes)
  a = _with_nan(draw.factor(0, {"k": of.rows, "m": m}, "m"), outside)
  b = _with_nan(draw.factor(1, {"k": of.rows, "n": n}, "n"), outside)
  run = functools.partial(
    pallas_gemm.ragged_dot_general,
    *(a.given, b.given, jnp.asarray(of.sizes), SUMS),
    preferred_element_type=draw.one((None, *OUT_DTYPES)),
    **how,
  )

  def compare(out):
    assert out.shape == (count, m, n)
    for g, span in enumerate(of.spans(count)):
      assert_right(out[g], a.exact[span].T, b.exact[span])

  return run, compare


EVERY = {
  "matmul": matmul,
  "gated_matmul": gated_matmul,
  "dot_general": dot_general,
  "ragged_dot": ragged_dot,
  "gated_ragged_dot": functools.partial(ragged_dot, op="gated_ragged_dot"),
  "ragged_dot_general": functools.partial(ragged_dot, op="ragged_dot_general"),
  "ragged_dot_general, sums": ragged_sums,
  "vmap": vmap,
}
ON_KERNEL = [x for x in EVERY if x not in ("dot_general", "vmap")]
