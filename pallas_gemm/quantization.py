"""Operands of 8 bits: values, and scales that they are multiplied by.

What an array of 8 bits stands for is `values * scale`. `quantize` makes both of
an array; a scale may belong to an element, to 128 of them, or to all of a
dimension, and that in each dimension.

**Numbers.** With amax, the largest finite |x| of a block, and max, the dtype's
largest finite number, a scale is s = amax / max, or the least power of two that
is not below it. It is a normal number of float32. Values are x (1 / s), cut to
[-max, max] and rounded to nearest, ties to even: without the cut, what is 4 %
above max would be NaN in float8_e4m3fn. So

    float8_e4m3fn   |q s - x| <= 2^-4 |x| + 2^-10 s
    float8_e5m2     |q s - x| <= 2^-3 |x| + 2^-17 s
    int8            |q s - x| <= s / 2 + 2^-20 |x|

for |x| of 2^-126 and more; what is smaller may be taken for zero, which XLA
does on CPUs. A block of nothing else has a scale of 1 and zeros.

Nothing but its own place is lost by what is not finite: amax leaves it out. NaN
is NaN, infinity is NaN in float8_e4m3fn, which has none, and infinity in
float8_e5m2. int8 has neither: there the scale of the block is NaN, and its
values are zeros.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, meshes

# Elements of a block, along a dimension that has blocks.
BLOCK = 128
DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
SCALE_DTYPES = ("float32", "bfloat16", "float8_e8m0fnu")
_SCALINGS = ("block", "row", "tensor")
_SOURCES = ("float32", "bfloat16", "float16")
_TINY = float(jnp.finfo(jnp.float32).smallest_normal)
# Bits of both floats, and of float8_e5m2.
_NAN, _INFINITIES = 0x7F, (0x7C, 0xFC)
_NO_INDEX = tuple, bool, np.bool_, type(None), type(...)
_MANTISSA_BITS = 23
_MANTISSA = 2**_MANTISSA_BITS - 1

type DType = Literal["float8_e4m3fn", "float8_e5m2", "int8"]
# Of each dimension; 128 is `BLOCK`.
type Block = Sequence[Literal[1, 128] | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
  """values * scale, which stands wherever an operand of an op stands.

  A pytree of the two: it goes through `jax.jit`, `jax.vmap` and `jax.lax.scan`,
  the latter two if the scale has the dimension that they go over. Nothing is
  checked before an op gets it.

  Attributes:
    values: [..., rows, columns] of float8_e4m3fn, float8_e5m2 or int8.
    scale: of float32, bfloat16 or float8_e8m0fnu; () is one for all, else of
      the rank of the values. A dimension of it is 1 (one for all of them), as
      large as that of the values (one for each), or ceil(size / 128): one for
      each 128, the last of which may be fewer.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> q = pallas_gemm.Quantized(
    ...   jnp.array([[1, 2], [3, 4]], jnp.int8), jnp.array([[0.5], [2.0]])
    ... )
    >>> q.dequantized().tolist(), q.T.scale.shape, q[1].scale.tolist()
    ([[0.5, 1.0], [6.0, 8.0]], (1, 2), [2.0])
  """

  values: Any
  scale: Any

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the values."""
    return self.values.shape

  @property
  def ndim(self) -> int:
    """Of the values."""
    return self.values.ndim

  @property
  def dtype(self) -> Any:
    """Of the values."""
    return self.values.dtype

  @property
  def mT(self) -> "Quantized":
    """The last two dimensions swapped, of values and scale alike."""
    swap = functools.partial(jnp.swapaxes, axis1=-1, axis2=-2)
    scale = swap(self.scale) if self.scale.ndim else self.scale
    return Quantized(swap(self.values), scale)

  @property
  def T(self) -> "Quantized":
    """The transpose of a matrix.

    Raises:
      ValueError: it is no matrix; `mT` takes any rank from 2 on.
    """
    _check(self.ndim == 2, "T needs values of rank 2", f"shape {self.shape}")
    return self.mT

  def __getitem__(self, index: Any) -> "Quantized":
    """An element of the first dimension, or some, and their scales.

    Args:
      index: an integer, also a traced one, a slice or an array of integers.

    Raises:
      TypeError: it is none of these.
      ValueError: the scale is one of blocks along that, of which `index` would
        cut some.
    """
    is_one = not isinstance(index, _NO_INDEX)
    wanted = "the index must be one of the first dimension alone"
    _check(is_one, wanted, repr(index), TypeError)
    values, scale = self.values[index], self.scale
    if scale.ndim == 0:
      return Quantized(values, scale)
    if scale.shape[0] != self.shape[0]:
      of_all = scale.shape[0] == 1
      wanted = "the first dimension must not have scales of blocks"
      _check(of_all, wanted, f"{scale.shape} for values {self.shape}")
      new = range(values.ndim - self.ndim + 1)
      return Quantized(values, lax.expand_dims(scale[0], new))
    return Quantized(values, scale[index])

  def __iter__(self) -> Iterator["Quantized"]:
    """The elements of the first dimension."""
    return map(self.__getitem__, range(self.shape[0]))

  def dequantized(self, dtype: Any = jnp.float32) -> jax.Array:
    """values * scale, multiplied in float32 and rounded to a dtype."""

    def times(values, scale):
      scale = _spread(scale.astype(jnp.float32), values.shape)
      return (values.astype(jnp.float32) * scale).astype(dtype)

    parts = jax.typeof(self.values).sharding.spec
    return _laid_out(times, parts, self.values, self.scale)

  def checked(self, name: str) -> "Quantized":
    """The same, if an op can take it.

    Args:
      name: the argument's.

    Raises:
      TypeError: a dtype of values or scale is none of those above.
      ValueError: the scale has another rank or size.
    """
    values, scale = (
      _typed(f"{name}.{x}", getattr(self, x), dtypes)
      for x, dtypes in (("values", DTYPES), ("scale", SCALE_DTYPES))
    )
    if scale.ndim == 0:
      return self
    wanted = f"{name}.scale must have shape () or rank {values.ndim} like"
    wanted = f"{wanted} {name}.values {values.shape}"
    _check(scale.ndim == values.ndim, wanted, f"shape {scale.shape}")
    for i, (have, size) in enumerate(zip(scale.shape, values.shape)):
      sizes = 1, size, _blocks(size)
      _check(
        have in sizes,
        f"dimension {i} of {name}.scale must be {sizes[0]}, {sizes[1]} or"
        f" {sizes[2]} (one for all, for each, for each {BLOCK}) for"
        f" {name}.values {values.shape}",
        f"shape {scale.shape}",
      )
    return self


compat.register_serialization(Quantized, "pallas_gemm.Quantized")


def as_quantized(value: Any, name: str = "x") -> Quantized | None:
  """A `Quantized`, checked; None for what is none.

  Args:
    value: a `Quantized`; or what has `qvalue`, `scale` and, perhaps,
      `zero_point`, as Qwix's `QArray`, whose scales may be those of any number
      of elements that divides the dimension.
    name: the argument's.

  Raises:
    TypeError, ValueError: as of `Quantized.checked`; or there is a zero point.
  """
  if isinstance(value, Quantized):
    return value.checked(name)
  if not (hasattr(value, "qvalue") and hasattr(value, "scale")):
    return None
  zero = getattr(value, "zero_point", None)
  wanted = f"{name}.zero_point must be None"
  _check(zero is None, wanted, type(zero).__name__)
  values, scale = value.qvalue, value.scale
  if scale.ndim != values.ndim:
    return Quantized(values, scale).checked(name)
  for i, (have, size) in enumerate(zip(scale.shape, values.shape)):
    if have not in (0, 1, size) and size % have == 0:
      # As scales of 128, if they are of a multiple of it; else of each.
      of = size // have
      repeats = of if of % BLOCK else of // BLOCK
      repeat = functools.partial(jnp.repeat, repeats=repeats, axis=i)
      scale = _laid_out(repeat, jax.typeof(scale).sharding.spec, scale)
  return Quantized(values, scale).checked(name)


def quantize(
  x: jax.typing.ArrayLike,
  dtype: jax.typing.DTypeLike = jnp.float8_e4m3fn,
  *,
  block: Block,
  power_of_two: bool = False,
) -> Quantized:
  """Values of 8 bits, and the scales of blocks, that stand for an array.

  Numerics: the largest finite |x| of a block becomes the largest number of the
  dtype; the module says how far values may be off. Rounding has no derivative,
  and products have none by the result: train with a `Recipe`.

  Args:
    x: [..., rows, columns] of float32, bfloat16 or float16.
    dtype: of the values: float8_e4m3fn, float8_e5m2 or int8.
    block: how many elements have one scale, along each dimension of x: 1, 128,
      or None for all. (1, 128) is what products along the columns want of
      activations and gradients, (128, 128) of weights, (1, None) a scale a row,
      (None, None) one of a whole matrix.
    power_of_two: scales are powers of two: products by them are exact.

  Returns:
    Values of the shape of x. The scale is float32 of the rank of x: of a
    dimension of size n it has n, ceil(n / 128) or 1. On Explicit mesh axes
    values are sharded as x is, and the scale along those dimensions of which
    each share has as many.

  Raises:
    TypeError: x is not of those three dtypes, `dtype` is another one, or
      `block` is no tuple or list, or `power_of_two` no bool.
    ValueError: `block` is none of these tuples.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x = jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    >>> q = pallas_gemm.quantize(x, jnp.int8, block=(1, None))
    >>> q.values.tolist(), q.scale.shape
    ([[64, -127, 32], [0, 0, 0]], (2, 1))
  """
  x = _typed("x", jnp.asarray(x), _SOURCES)
  name = _name("dtype", dtype)
  _check_bool("power_of_two", power_of_two)
  wanted = "block must be a sequence of 1, 128 and None"
  _check(isinstance(block, tuple | list), wanted, repr(block), TypeError)
  fits = [size is None or _is_number(size, (1, BLOCK)) for size in block]
  wanted = f"block must have 1, 128 or None for each dimension of x {x.shape}"
  _check(len(block) == x.ndim and all(fits), wanted, repr(block))
  how = name, tuple(block), power_of_two
  sharding = jax.typeof(x).sharding
  parts = Quantized(sharding.spec, _parts_of_scale(sharding, x.shape, block))
  return _laid_out(lambda x: _quantize(x, *how), parts, x)


@dataclasses.dataclass(frozen=True)
class Recipe:
  """In what operands of products are computed, forwards and backwards.

  Attributes:
    forward: the dtype of both operands of a product.
    gradient: the dtype of cotangents, of the same kind as `forward`: floating
      or int8. None: derivatives are computed of bfloat16 operands.
    scaling: what has a scale of its own: "block": each 128 of a row of
      activations and gradients, and 128 x 128 of weights; "row": each row, and
      column of weights; "tensor": a whole operand.
    power_of_two: scales are powers of two.
    fast_accumulation: sums of 8-bit floats are left to the tensor cores, which
      keep about 13 bits of them.

  Raises:
    TypeError, ValueError: an attribute is none of these; the message names it.

  Example:
    >>> import pallas_gemm
    >>> pallas_gemm.Recipe(gradient="float8_e5m2", scaling="row").forward
    'float8_e4m3fn'
  """

  forward: DType = "float8_e4m3fn"
  gradient: DType | None = "float8_e4m3fn"
  scaling: Literal["block", "row", "tensor"] = "block"
  power_of_two: bool = False
  fast_accumulation: bool = False

  def __post_init__(self):
    # Names, so that equal recipes are equal.
    object.__setattr__(self, "forward", _name("forward", self.forward))
    if self.gradient is not None:
      object.__setattr__(self, "gradient", _name("gradient", self.gradient))
      alike = (self.gradient == "int8") == (self.forward == "int8")
      wanted = "gradient must be None or of the kind of forward"
      _check(alike, f"{wanted}, {self.forward}", self.gradient)
    wanted = f"scaling must be one of {_SCALINGS}"
    _check(self.scaling in _SCALINGS, wanted, repr(self.scaling))
    _check_bool("power_of_two", self.power_of_two)
    _check_bool("fast_accumulation", self.fast_accumulation)


# How.


def largest(dtype: str) -> float:
  """The largest finite number that values of a dtype are."""
  return 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)


def maxima(x: jax.Array, dtype: str, block: Block) -> jax.Array:
  """The largest finite |x| of each block; of int8 NaN if any is not finite."""
  is_finite = jnp.isfinite(x)
  amax = _reduced(jnp.where(is_finite, jnp.abs(x), 0.0), block)
  if dtype != "int8":
    return amax
  # Which has no NaN. A maximum of NaN is none in XLA's programs for CPUs.
  lost = _reduced(jnp.where(is_finite, 0.0, 1.0), block)
  return jnp.where(lost > 0, jnp.nan, amax)


def scale_of(amax: jax.Array, dtype: str, power_of_two: bool) -> jax.Array:
  """The scales of blocks with these largest magnitudes; NaN of NaN."""
  most = np.float32(largest(dtype))
  if power_of_two:
    # Rounded up to the next mantissa of `most`, and that made 1.
    most, bits = int(most.view(np.int32)), _bits(amax)
    mantissa = most & _MANTISSA
    bits = (bits + (_MANTISSA - mantissa)) & ~_MANTISSA
    least = 1 << _MANTISSA_BITS
    bits = jnp.maximum(bits - ((most ^ mantissa) - (127 << 23)), least)
    scale = lax.bitcast_convert_type(bits, jnp.float32)
  else:
    # XLA makes products of quotients by constants: so they are alike anywhere.
    scale = jnp.maximum(amax * (1 / most), _TINY)
  scale = jnp.where(amax < _TINY, 1.0, scale)
  return jnp.where(amax == amax, scale, jnp.nan)


def rounded(scaled: jax.Array, dtype: str) -> jax.Array:
  """Values that are x / s in float32; of int8 zeros for NaN."""
  most = largest(dtype)
  cut = jnp.clip(scaled, -most, most)
  if dtype == "int8":
    return jnp.where(scaled == scaled, jnp.round(cut), 0.0).astype(dtype)
  # Some of XLA's programs for GPUs make the largest number of an infinity.
  bits = lax.bitcast_convert_type(cut.astype(dtype), jnp.uint8)
  other = _NAN
  if dtype == "float8_e5m2":
    infinity = jnp.where(scaled > 0, *_INFINITIES)
    other = jnp.where(scaled == scaled, infinity, _NAN)
  bits = jnp.where(
    jnp.abs(scaled) < jnp.inf, bits, jnp.asarray(other, jnp.uint8)
  )
  return lax.bitcast_convert_type(bits, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(x, dtype: str, block, power_of_two: bool) -> Quantized:
  x = x.astype(jnp.float32)
  scale = scale_of(maxima(x, dtype, block), dtype, power_of_two)
  values = rounded(x * _spread(1 / scale, x.shape), dtype)
  return Quantized(values, scale)


def _laid_out(f: Any, parts: Any, *args: jax.Array) -> Any:
  """f(*args), sharded by a PartitionSpec, or several, on Explicit mesh axes."""
  if (mesh := meshes.explicit(args)) is None:
    return f(*args)
  on_mesh = functools.partial(jax.sharding.NamedSharding, mesh)
  return meshes.on_auto_axes(f, mesh, jax.tree.map(on_mesh, parts))(*args)


def _parts_of_scale(sharding: Any, shape: Sequence[int], block: Block) -> Any:
  """Those of the array, along each dimension that its shares divide."""
  parts = []
  for part, size, of in zip(sharding.spec, shape, block):
    names = part if isinstance(part, tuple) else (part,) if part else ()
    shares = math.prod(sharding.mesh.shape[name] for name in names)
    size = {1: size, BLOCK: _blocks(size), None: 1}[of]
    parts.append(None if size % shares else part)
  return jax.sharding.PartitionSpec(*parts)


def _reduced(x: jax.Array, block) -> jax.Array:
  """The largest element of each block; none is negative."""
  short = [
    -size % BLOCK if of == BLOCK else 0 for size, of in zip(x.shape, block)
  ]
  if any(short):
    x = jnp.pad(x, [(0, size) for size in short])
  parts = [
    {1: (size, 1), BLOCK: (size // BLOCK, BLOCK), None: (1, size)}[of]
    for size, of in zip(x.shape, block)
  ]
  x = x.reshape([size for pair in parts for size in pair])
  return jnp.max(x, axis=tuple(range(1, x.ndim, 2)), initial=0.0)


def spread(scale: jax.Array, axis: int, size: int) -> jax.Array:
  """Scales of blocks along a dimension as one of each of its indices."""
  scale = jnp.repeat(scale, BLOCK, axis=axis)
  if scale.shape[axis] == size:
    return scale
  # A slice would ask whether there are as many, which of a symbolic size JAX
  # can't tell.
  edges = [(0, 0, 0)] * scale.ndim
  edges[axis] = (0, size - scale.shape[axis], 0)
  return lax.pad(scale, jnp.ones((), scale.dtype), edges)


def _spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Scales of which each dimension is 1, or that of what they belong to."""
  for i, (have, size) in enumerate(zip(scale.shape, shape)):
    if have not in (1, size):
      scale = spread(scale, i, size)
  return scale


def _bits(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.int32)


def _blocks(size: int) -> int:
  return -(-size // BLOCK)


# Checks.


def _check(
  ok: bool, wanted: str, got: str, error: type[Exception] = ValueError
) -> None:
  if not ok:
    raise error(f"{wanted}, got {got}")


def _check_bool(name: str, value: Any) -> None:
  is_bool = isinstance(value, bool)
  _check(is_bool, f"{name} must be a bool", repr(value), TypeError)


def _is_number(value: Any, numbers: tuple[int, ...]) -> bool:
  """Whether it is one of them, and neither a bool nor a float."""
  return type(value) is int and value in numbers


def _name(argument: str, dtype: Any) -> str:
  """The name of a dtype of values."""
  try:
    name = jnp.dtype(dtype).name
  except TypeError:
    name = repr(dtype)
  is_known = dtype is not None and name in DTYPES
  wanted = f"{argument} must be one of {DTYPES}"
  _check(is_known, wanted, "None" if dtype is None else name, TypeError)
  return name


def _typed(name: str, value: Any, dtypes: tuple[str, ...]) -> Any:
  """An array of one of these dtypes."""
  got = type(value).__name__
  if hasattr(value, "dtype") and hasattr(value, "ndim"):
    got = getattr(value.dtype, "name", str(value.dtype))
  _check(got in dtypes, f"{name} must be one of {dtypes}", got, TypeError)
  return value
