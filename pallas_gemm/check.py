"""Is a fused result right? A float64 reference, and its bound.

A product is held to the bound of `numerics`. What follows it carries that bound
along: C and a bias add the roundings of their own; an activation maps an
interval of that width around the exact sum to an interval of results, whose
larger half is the bound; a gate multiplies what its partner is off by.
Evaluating the activation and rounding the result come on top.
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import numerics

# What evaluating an activation may be off, relative to the larger of its
# argument and its value, by the dtype of the result. For 16 bits that is what
# the kernels' forms are good to; they leave float32 to the compiler, whose
# worst, erf by a series, is off by 2^-21.
ACTIVATION_ERROR = {
  "bfloat16": 2.0**-14,
  "float16": 2.0**-16,
  "float32": 2.0**-20,
}
_OF_FEWER_BITS = ACTIVATION_ERROR["bfloat16"]


class Expected(NamedTuple):
  """What a result must be.

  Attributes:
    want: [M, N], float64.
    bound: [M, N], what each element may be off before it is rounded to the
      dtype of the result.
  """

  want: np.ndarray
  bound: np.ndarray

  def check(self, out: Any) -> numerics.Check:
    """Compares a result, [M, N]; see `numerics.compare`."""
    return numerics.compare(out, self.want, self.bound)


def expected(
  a: Any,
  b: Any,
  b_up: Any = None,
  *,
  bias: Any = None,
  c: Any = None,
  alpha: float = 1.0,
  beta: float = 1.0,
  activation: Callable[[jax.Array], jax.Array] | None = None,
  out_dtype: Any = None,
  reduced: tuple[Any, int] | None = None,
  scales: Sequence[Any] = (None, None, None),
  fast_accumulation: bool = False,
  tf32: bool = False,
  planes: Literal[2, 3] | None = None,
) -> tuple[Expected, ...]:
  """What activation(alpha * A @ B + beta * C + bias) must be.

  Args:
    a: [M, K]: float32, float16, bfloat16 or of 8 bits, on the host or a device.
    b: [K, N].
    b_up: [K, N]; with it the result is activation(A @ B) * (A @ B_up).
    bias: [N] or [M, 1].
    c: [M, N].
    alpha: factor of the product.
    beta: factor of C.
    activation: an elementwise JAX function; None is none.
    out_dtype: dtype of the result; None is that of a, of 8 bits bfloat16.
    reduced: see `numerics.error_bound`.
    scales: what A's rows, B's columns and those of B_up are multiplied by, each
      a vector or a number, or one number for each element; None is by nothing.
    fast_accumulation: sums of 8-bit floats are not promoted.
    tf32, planes: see `numerics.error_bound`.

  Returns:
    Of the result, and of each sum that goes into it: a kernel may give those
    too, for derivatives.

  Raises:
    ValueError: shapes that do not fit, or K above 131071 of int8.

  Example:
    >>> import jax
    >>> import numpy as np
    >>> from pallas_gemm import check
    >>> a, b = np.ones((1, 3), np.float32), -np.ones((3, 2), np.float32)
    >>> result, product = check.expected(a, b, activation=jax.nn.relu)
    >>> result.check(np.maximum(a @ b, 0)).passed, product.check(a @ b).passed
    (True, True)
    >>> result.check(a @ b).passed
    False
  """
  scale_a, *of_b = scales
  sums = [
    _sum(
      a,
      factor,
      bias,
      c,
      alpha,
      beta,
      reduced=reduced,
      scales=(scale_a, scale),
      fast=fast_accumulation,
      tf32=tf32,
      planes=planes,
    )
    for factor, scale in zip((b, b_up), of_b)
    if factor is not None
  ]
  if out_dtype is not None and jnp.dtype(out_dtype) == jnp.int32:  # exact
    sums = [Expected(x.want, np.zeros_like(x.bound)) for x in sums]
  if activation is None and b_up is None:
    return sums[0], *sums
  dtype = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
  inexact = ACTIVATION_ERROR.get(dtype.name, _OF_FEWER_BITS)
  return _activated(activation, sums, inexact), *sums


def _sum(a, b, bias, c, alpha, beta, *, scales, **how) -> Expected:
  """alpha * A @ B + beta * C + bias, and its bound before it is rounded."""
  shape = a.shape[0], b.shape[1]
  added, size = np.zeros(shape), np.zeros(shape)
  for factor, term in ((beta, c), (1.0, bias)):
    if term is not None and factor != 0:
      term = factor * np.asarray(term).astype(np.float64)
      added, size = added + term, size + np.abs(term)
  dtypes, (of_a, of_b) = (a.dtype, b.dtype), scales
  if of_a is not None:
    a = np.asarray(a).astype(np.float64) * _spread(of_a, (-1, 1))
  if of_b is not None:
    b = np.asarray(b).astype(np.float64) * _spread(of_b, (1, -1))
  want = numerics.reference(a, b, added, alpha, 1.0)
  # Terms of different signs cancel in the sum, their errors do not.
  bound = numerics.bound_of_sum(
    a,
    b,
    size,
    alpha,
    1.0,
    dtypes=dtypes,
    more=sum(x is not None for x in scales),
    **how,
  )
  return Expected(want, bound)


def _spread(scale: Any, vector: tuple[int, int]) -> np.ndarray:
  """A scale that broadcasts to its operand."""
  scale = np.asarray(scale).astype(np.float64)
  return scale if scale.ndim == 2 else scale.reshape(vector)


def _activated(activation, sums, inexact: float) -> Expected:
  """activation(sum), or activation(gate) * up of two sums."""

  def result(offsets) -> np.ndarray:
    x, *up = (s.want + at * s.bound for at, s in zip(offsets, sums))
    out = x if activation is None else _in_float64(activation, x)
    return out * up[0] if up else out

  with np.errstate(all="ignore"):
    want = result([0] * len(sums))
    corners = itertools.product((-1, 1), repeat=len(sums))
    spread = np.max([np.abs(result(x) - want) for x in corners], axis=0)
    size = np.prod([np.abs(s.want) for s in sums], axis=0)
    return Expected(want, spread + inexact * np.maximum(size, np.abs(want)))


def _in_float64(activation, x: np.ndarray) -> np.ndarray:
  """activation(x); of a float32 argument if it takes no other."""
  with jax.enable_x64(True):
    try:
      out = activation(jnp.asarray(x))
    except TypeError:
      out = activation(jnp.asarray(x, jnp.float32))
    return np.asarray(out).astype(np.float64)
