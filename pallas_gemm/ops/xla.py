"""A product as XLA computes it: what every op falls back to."""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm import compat, dtypes, report
from pallas_gemm import sums as sums_lib
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.ops import scales, xla_groups
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import BESIDE, PLANES, Operands, Spec, whole_of
from pallas_gemm.splitting import Split

_MOST_ROLLED = 2**31 - 1
# Elements of a vector of 8 bits.
_VECTOR = 16
NOT_INVARIANT = (
  "XLA chooses the order of additions for M too, so it is not batch invariant"
)

# Whether what is lowered is for CPUs; in the keys of JAX's caches.
on_cpu = jax.make_user_context(False)


def check_invariance(batch_invariant: bool, cuda: bool, why: str = "") -> None:
  """XLA promises none: refused on a Hopper GPU, said elsewhere."""
  if not batch_invariant:
    return
  if cuda and not legal.wrong_gpu():
    raise NotImplementedError(NOT_INVARIANT + why)
  report.warn_once(
    f"batch_invariant() has no effect here: {NOT_INVARIANT}; on a Hopper GPU"
    " the kernel keeps the promise"
  )


def chosen(x: Operands, spec: Spec) -> tuple[xla_groups.Tiles | None, str]:
  """The loop of a grouped product, if it is one; None is XLA's own product.

  Neither keeps an order of additions.
  """
  check_invariance(spec.batch_invariant, compat.targets_gpu())
  tiles = xla_groups.choose(x, spec) if spec.ragged else None
  return tiles, "model" if tiles else ""


def run(
  x: Operands, spec: Spec, out_sharding: NamedSharding | None = None
) -> list[jax.Array]:
  """What `jnp.dot` runs, and XLA's fusions for the epilogue.

  A dense product may have any letters. A grouped one runs in a loop if
  `spec.config` says so. Else XLA multiplies every row with every B, and with
  zeros where the row is not in the group: a NaN or an infinity in B of one
  group reaches the rows of others.
  """
  x, spec = _without_planes(x, spec)
  narrow = jnp.dtype(spec.out_dtype)
  if on_cpu.value and legal.multiplies_all_pairs(spec.precision):
    # XLA has no such products on CPUs; this is as exact.
    spec = dataclasses.replace(spec, precision=lax.Precision.HIGHEST)
  x, spec = _as_xla_multiplies(x, spec)
  # Whether `lax.dot_general` takes the results' dtype itself.
  alone = not (spec.has_epilogue or spec.words.has_scales) and (
    narrow == x.b.dtype or narrow.itemsize > x.b.dtype.itemsize
  )
  alone = alone and not (_is_of_a_vector(x, spec) or _needs_float32(x.a, x.b))
  dtype, sums = narrow if alone else x.wide(narrow), []
  # int8 is added in int32 and rounded once, but for groups on GPUs.
  in_int32 = x.a.dtype == jnp.int8 and (on_cpu.value or not spec.ragged)
  sum_dtype = jnp.int32 if in_int32 else dtype
  for one, product in spec.products(x, out=spec.out, out_dtype=sum_dtype):
    z = (
      _grouped_dot(one, product, spec.config)
      if spec.ragged
      else _dot(one, product, out_sharding)
    )
    sums.append(scales.applied(z.astype(dtype), one, product))
  if spec.ragged == "k":
    return [z.astype(narrow) for z in sums]
  if alone and (not spec.ragged or isinstance(spec.config, xla_groups.Tiles)):
    return sums  # the loop leaves zeros outside of the groups
  return spec_lib.epilogue(sums, x, spec)


def _without_planes(x: Operands, spec: Spec) -> tuple[Operands, Spec]:
  """The product of float32 that the planes of each B add up to."""
  if not x.has_planes:
    return x, spec
  none = dict.fromkeys(BESIDE)
  joined = {
    field: Split(tuple(x.planes(field))).joined()
    for field in PLANES
    if getattr(x, field) is not None
  }
  words = spec.words._replace(**none)
  return x._replace(**joined, **none), dataclasses.replace(spec, words=words)


def _as_xla_multiplies(x: Operands, spec: Spec) -> tuple[Operands, Spec]:
  """The product of operands of dtypes that XLA is right with: of one.

  Scales apply to sums; those that differ along K are multiplied in. XLA has a
  product of 8 bits that is dense; values in more bits are the same ones. On a
  GPU that of int8 is taken in whole vectors: one of K = 9 that was left to XLA
  was wrong (JAX 0.11.2), for a reason that is not known.
  """
  is_float8 = "float8" in x.a.dtype.name or "float8" in x.b.dtype.name
  if not (is_float8 or spec.words.has_scales):
    wide = max(x.a.dtype, x.b.dtype, key=lambda dtype: dtype.itemsize)
    total = x.wide(spec.out_dtype)
    if wide == jnp.int8 and total != jnp.int32 and not _fits_int32(x, spec):
      wide = total
    values = {f: v.astype(wide) for f, v in scales.multiplied(x).items()}
    return x._replace(**values), spec
  if any(
    whole_of(c) in spec.contracted for w in spec.words.scales for c in w or ""
  ):
    return scales.in_operands(x, spec)
  precision = lax.Precision.HIGHEST
  if is_float8:
    if not (on_cpu.value or spec.ragged) and x.a.dtype == x.b.dtype:
      return x, spec
    precision = lax.Precision.DEFAULT  # not None, which the context means
  elif _fits_int32(x, spec) and (on_cpu.value or _is_whole(x, spec)):
    return x, dataclasses.replace(spec, precision=precision)
  wide = jnp.float32 if on_cpu.value or not is_float8 else jnp.bfloat16
  values = {f: v.astype(wide) for f, v in scales.multiplied(x).items()}
  return x._replace(**values), dataclasses.replace(spec, precision=precision)


def _fits_int32(x: Operands, spec: Spec) -> bool:
  """Whether no sum of products of int8 overflows. A symbolic one may."""
  size = spec.letters(x)
  k = math.prod(size[c] for c in spec.contracted)
  return isinstance(k, int) and k <= sums_lib.MOST_INT8


def _is_whole(x: Operands, spec: Spec) -> bool:
  """Whether a product is dense, and its M, N and K are whole vectors."""
  size, (a, b, *_) = spec.letters(x), spec.words
  sides = spec.contracted, spec.free(a, b), spec.free(b, a)
  found = [math.prod(size[c] for c in letters) for letters in sides]
  return not spec.ragged and all(
    isinstance(n, int) and n % _VECTOR == 0 for n in found
  )


def _is_of_a_vector(x: Operands, spec: Spec) -> bool:
  """Whether A has one row, or B one column, on any device.

  XLA makes of that an elementwise product and a sum, and rounds each product to
  16 bits if those results are asked for: in bfloat16, N(0, 1) and K = 256, six
  times the bound. If float32 is asked for it does not, in as many fusions. How
  XLA shards operands is not known here: of a mesh's devices each may have one.
  A symbolic size is taken for more.
  """
  w = spec.words
  free = (
    [size for c, size in zip(word, v.shape) if c in spec.out and c not in other]
    for v, word, other in ((x.a, w.a, w.b), (x.b, w.b, w.a))
  )
  return any(
    all(isinstance(size, int) for size in sizes)  # none is symbolic
    and math.prod(sizes) <= jax.device_count()
    for sizes in free
  )


def _dot(x: Operands, spec: Spec, out_sharding: Any) -> jax.Array:
  """A @ B as one `lax.dot_general`, whatever the letters."""
  word_a, word_b, out = spec.words.a, spec.words.b, spec.out
  a, word_a = _without_shared_batch(x.a, word_a)
  b, word_b = _without_shared_batch(x.b, word_b)
  have = [c for c in out if c in word_a and c in word_b]
  have += [c for c in word_a if c in out and c not in word_b]
  have += [c for c in word_b if c in out and c not in word_a]
  both = [c for c in word_a if c in word_b]
  sides = [c for c in both if c not in out], [c for c in out if c in both]
  numbers = tuple(
    tuple(tuple(map(word.index, letters)) for word in (word_a, word_b))
    for letters in sides
  )
  if out_sharding is not None:
    parts = dict(zip(out, out_sharding.spec))
    spec_of = PartitionSpec(*[parts.get(c) for c in have])
    out_sharding = NamedSharding(out_sharding.mesh, spec_of)
  precision = spec.precision
  if "float8" in a.dtype.name and not legal.accumulates_fast(precision):
    precision = lax.Precision.HIGHEST  # whose sums are promoted
  z = lax.dot_general(
    *_that_xla_multiplies(a, b),
    numbers,
    precision=precision,
    preferred_element_type=spec.out_dtype,
    out_sharding=out_sharding,
  )
  return spec_lib.lifted(z, "".join(have), out)


def _needs_float32(a: jax.Array, b: jax.Array) -> bool:
  """Whether XLA must be given, and asked for, float32.

  If the result is transposed XLA may do so within the product. On CPUs it then
  adds bfloat16 in bfloat16, and has no product that gives float32.
  """
  return on_cpu.value and all(
    v.dtype.itemsize == 2 and dtypes.kind(v.dtype) == "floating" for v in (a, b)
  )


def _that_xla_multiplies(a: jax.Array, b: jax.Array) -> list[jax.Array]:
  """The same numbers: products of 16 bits are exact in float32."""
  wide = _needs_float32(a, b)
  return [v.astype(jnp.float32) if wide else v for v in (a, b)]


def _without_shared_batch(v: jax.Array, word: str) -> tuple[jax.Array, str]:
  """A folded operand that all of the batch shares has no dimension for it."""
  shared = word.startswith("b") and v.shape[0] == 1
  return (jnp.squeeze(v, 0), word[1:]) if shared else (v, word)


# By the letters of B.
_DIMENSIONS = {
  word: lax.RaggedDotDimensionNumbers(
    (contracted, ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=groups,
  )
  for word, contracted, groups in (
    ("gkn", ((1,), (1,)), (0,)),
    ("gnk", ((1,), (2,)), (0,)),
    ("kn", ((0,), (0,)), ()),
  )
}


def _grouped_dot(x: Operands, spec: Spec, config: Any) -> jax.Array:
  """[M, N], of anything outside of the groups, or [G, M, N]."""
  a, b, first = x.a, x.b, x.offsets[0]
  both = max((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
  if isinstance(config, xla_groups.Tiles):

    def dot(a, b, contracted, dtype):
      return lax.dot_general(
        *_that_xla_multiplies(a.astype(both), b.astype(both)),
        (tuple((i,) for i in contracted), ((), ())),
        precision=spec.precision,
        preferred_element_type=dtype,
      )

    return xla_groups.run(x, spec, config, dot)
  # XLA starts with the first row: rows are rotated.
  rotated = spec.leading_rows
  if rotated:
    a = _rolled(a, -first)
    b = _rolled(b, -first) if spec.ragged == "k" else b
  out = lax.ragged_dot_general(
    *_that_xla_multiplies(a.astype(both), b.astype(both)),
    jnp.diff(x.offsets),
    _DIMENSIONS[spec.words.b],
    precision=spec.precision,
    preferred_element_type=spec.out_dtype,
  )
  rotated = rotated and spec.ragged == "m"
  return _rolled(out, first) if rotated else out


def _rolled(x: jax.Array, by: jax.Array) -> jax.Array:
  """`jnp.roll` of rows, of which that takes no more than int32 has numbers."""
  rows = x.shape[0]
  if not isinstance(rows, int) or rows <= _MOST_ROLLED:
    return jnp.roll(x, by, axis=0)
  with jax.enable_x64(True):
    first = -by.astype(jnp.int64) % rows
    return lax.dynamic_slice_in_dim(jnp.concatenate([x, x]), first, rows)
