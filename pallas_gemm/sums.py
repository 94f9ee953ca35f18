"""How far a sum of products may be off, by what the operands are.

All bounds are relative to S = |A| |B|, of the sum before it is rounded to the
dtype of a result. Each term passes through at most K roundings of unit u:
gamma_K (`numerics`), u = 2^-24 for CUDA cores, 2^-23 for tensor cores, which
truncate.

**8-bit floats.** Products are exact. The tensor cores take 32 of them with the
accumulator, 33 terms, aligned to the largest, and keep about 13 bits of each:
what is cut off is less than 2^-13 of the largest magnitude, for each term.
(NVIDIA documents none of it; DeepSeek-V3's report measured it.) Terms are cut
towards zero, so no partial sum is ever larger than the sum of magnitudes, at
most S, and losses add up without growing: K / 32 steps of 33 terms lose less
than 33/32 K 2^-13 S. That is the bound of fast accumulation. Promoted, a lap of
128 loses at most 132 * 2^-13 of its own magnitudes, so all laps that of S, and
adding up ceil(K / 128) laps in float32 adds as many roundings of 2^-24.

**float32 in planes of bfloat16** (`kernels.sm90.planes`). Rounding to nearest
leaves 2^-8 of a number after one plane, 2^-16 after two and nothing after
three, if that is no smaller than 2^-126. What products of planes are left out
is 3.1 * 2^-16 S of two planes, 2.1 * 2^-24 S of three. Tensor cores sum laps of
at most 64 of K, with |A0| |B0| <= (1 + 2^-8)^2 S. Each lap truncates the sum of
its 64 large products, and so loses 64 * 2^-23 of their magnitudes, and apart
from these the sum of at most 8 * 64 small ones, which are below 1.01 * 2^-7 S
in all: 1.08 * 64 * 2^-23 S together. A lap's two sums are added in float32, and
so are the laps: one rounding more than there are laps. So the bound of three
planes is below the gamma_K of float32 from K = 150 on.

**int8.** Products are at most 2^14 in size, so sums are exact in int32 while
K < 2^17. Rounding one to float32 is one rounding of 2^-24.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

U_FLOAT32 = 2.0**-24
_U_TRUNCATED = 2.0**-23
_TF32_OPERAND = 2.0**-10
# Of 8-bit floats: what a term loses, terms that are cut for each product, and
# products that are summed up before they are added to a total.
_U_FLOAT8, _CUT, _LAP = 2.0**-13, 33 / 32, 128
# Of int8: the longest sum that is exact.
MOST_INT8 = 2**17 - 1
# Of operands in planes: what is left out of their products, by planes, the most
# of K that is summed before it is added to a total, and what a lap loses.
_LEFT_OUT = {2: 3.1 * 2.0**-16, 3: 2.1 * 2.0**-24}
_LAP_OF_PLANES = 64
_CUT_OF_PLANES = 1.08


def gamma(roundings: int, unit: float) -> float:
  """What n successive roundings of unit u can grow to, n u / (1 - n u).

  Raises:
    ValueError: n u is 1 or more; no digit is certain after so many.
  """
  if roundings * unit >= 1:
    raise ValueError(
      f"roundings must be below {1 / unit:.0f} for a unit roundoff of"
      f" {unit}, got {roundings}"
    )
  return roundings * unit / (1 - roundings * unit)


def unit_roundoff(dtypes: tuple[Any, Any], tf32: bool) -> float:
  """Of one addition: 2^-24, or 2^-23 where tensor cores truncate."""
  widest = max(jnp.dtype(x).itemsize for x in dtypes)
  return _U_TRUNCATED if widest < 4 or tf32 else U_FLOAT32


def relative_error(
  k: int,
  dtypes: tuple[Any, Any],
  more: int,
  *,
  tf32: bool,
  fast: bool,
  planes: int | None = None,
) -> float:
  """What of S a sum of K products may be off, and `more` roundings after it.

  Args:
    k: products that are summed.
    dtypes: of the operands.
    more: roundings of what follows, alpha, beta and C say.
    tf32: operands are float32 and may be cut to TF32.
    fast: sums of 8-bit floats are not promoted.
    planes: None, or the planes of bfloat16 that float32 is multiplied in.

  Raises:
    ValueError: no digit is certain, or a sum of int8 may overflow.
  """
  if all(jnp.dtype(x) == jnp.int8 for x in dtypes):
    if k > MOST_INT8:
      raise ValueError(f"k must be at most {MOST_INT8} for int8, got {k}")
    return gamma(1 + more, U_FLOAT32)
  if all(jnp.dtype(x).name.startswith("float8") for x in dtypes):
    laps = 1 if fast else math.ceil(k / _LAP)
    cut = (k if fast else min(k, _LAP)) * _CUT * _U_FLOAT8
    added = gamma(laps + more, U_FLOAT32)
    return cut + added + cut * added
  if planes:
    return _of_planes(k, more, planes)
  rounded = gamma(k + more, unit_roundoff(dtypes, tf32))
  if not tf32:
    return rounded
  further = (1 + _TF32_OPERAND) ** 2 - 1
  return rounded + further + rounded * further


def _of_planes(k: int, more: int, planes: int) -> float:
  """The same of operands in planes."""
  left = _LEFT_OUT[planes]
  cut = gamma(min(k, _LAP_OF_PLANES), _U_TRUNCATED) * _CUT_OF_PLANES
  added = gamma(1 + math.ceil(k / _LAP_OF_PLANES) + more, U_FLOAT32)
  rounded = cut + added + cut * added
  return left + rounded + left * rounded


def flushed(dtype: Any) -> float:
  """What is lost of a number that is too small for a dtype.

  float16 has gradual underflow on every device; half a unit of its smallest
  subnormal is lost. The others may be flushed.
  """
  if dtype == jnp.float16:
    return 2.0**-25
  return float(jnp.finfo(dtype).smallest_normal)


def result_roundoff(dtype: Any) -> float:
  """2^-p of a dtype with p bits of significand."""
  if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
    raise TypeError(
      f"the result must be float32, float16 or bfloat16, got {dtype.name}"
    )
  return 2.0 ** -(jnp.finfo(dtype).nmant + 1)


def lost(x: np.ndarray, planes: int | None) -> np.ndarray:
  """The most that is lost of each number below the smallest normal one.

  In planes it is that of what the first one leaves, too.
  """
  if planes is None:
    return subnormal(x)
  tiny = float(jnp.finfo(jnp.float32).smallest_normal)
  return np.where(x < tiny * 2**24, np.minimum(x, 2 * tiny), 0.0)


def subnormal(x: np.ndarray) -> np.ndarray:
  """What is subnormal in float32 (and bfloat16) of x, zero elsewhere."""
  tiny = float(jnp.finfo(jnp.float32).smallest_normal)
  return np.where(x < tiny, x, 0.0)
