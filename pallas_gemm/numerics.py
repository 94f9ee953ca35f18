"""Is a product right? A float64 reference and an elementwise error bound.

Two correct kernels rarely agree to the last bit, because they add the same
numbers in a different order. What every correct kernel obeys is a bound. With
A and B given, C = A @ B accumulated in floating point of unit roundoff u
satisfies, in any order of summation and with or without fused multiply-adds,

    |C - A B| <= gamma_K |A| |B|,    gamma_K = K u / (1 - K u),

element by element (N. Higham, *Accuracy and Stability of Numerical
Algorithms*, 2nd ed., section 3.5). The derivation counts roundings: no
product passes through more than K of them on its way into the sum. A sum that
is split (over thread blocks, say) and then added up passes through no more,
so the bound holds for split-K too, and for `jnp.dot`.

What enters beside gamma_K:

* u of the accumulation. CUDA cores round float32 to nearest: u = 2^-24.
  Tensor cores take the products of 16-bit operands exactly, align a group of
  them with the accumulator to the largest exponent, and *truncate*. What a
  group of n products loses is at most n units of 2^-23 of the largest
  magnitude, which the same formula covers with u = 2^-23 (M. Fasi et al.,
  *Numerical behavior of NVIDIA tensor cores*, 2021).
* Operands of 8 bits, and float32 in planes of bfloat16: see `sums`.
* TF32 operands: their last 13 bits are dropped before the product, a relative
  change of up to 2^-10 of each.
* The epilogue: alpha and beta become float32, and each of alpha * sum,
  beta * C and their sum is rounded. That is 3 more roundings on each path.
* The result's dtype: round to nearest with p bits of significand has unit
  roundoff 2^-p: 2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16.
* Sums over devices: where each rounds its part to a dtype of unit roundoff v
  before they are added in it, a product passes through one more rounding for
  each of the devices, of unit v.
* Underflow, where relative bounds say nothing: results below the smallest
  normal number may be flushed to zero (XLA does so on CPUs), and so may
  subnormal operands.

The bound assumes that no intermediate sum overflows float32 unless the result
does.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import sampling, sums
from pallas_gemm.sums import gamma

_EPILOGUE_ROUNDINGS = 3


@dataclasses.dataclass(frozen=True)
class Check:
  """What `check` found.

  Attributes:
    passed: every checked element is within its bound.
    max_error: largest |out - reference|; inf where exactly one of the two is
      NaN or they are different infinities.
    error_bound: the bound at the element where error / bound is largest.
    worst_ratio: the largest error / bound; at most 1 when passed.
    checked: how many elements were compared.
    worst: that element's row and column, of those compared; () if none was.
  """

  passed: bool
  max_error: float
  error_bound: float
  worst_ratio: float
  checked: int
  worst: tuple[int, ...] = ()

  @property
  def worst_error(self) -> float:
    """|out - reference| at that element; `passed` is worst_error <= bound.

    Bounds differ from element to element: an error says nothing beside another.
    """
    if np.isfinite(self.worst_ratio):
      return self.worst_ratio * self.error_bound
    return self.max_error


def reference(
  a: Any,
  b: Any,
  c: Any | None = None,
  alpha: float = 1.0,
  beta: float = 0.0,
) -> np.ndarray:
  """The result in float64, alpha * A @ B + beta * C, on the host.

  As in BLAS, a factor of zero means "not read": no NaN spreads from there.

  Args:
    a: [M, K], any real dtype, NumPy or JAX.
    b: [K, N].
    c: [M, N]; needed when beta is not 0.
    alpha: factor of the product.
    beta: factor of C.

  Returns:
    [M, N], float64.

  Raises:
    ValueError: shapes that do not fit, or beta without c.

  Example:
    >>> import numpy as np
    >>> from pallas_gemm import numerics
    >>> numerics.reference(np.ones((1, 3)), np.ones((3, 2)), alpha=2.0)
    array([[6., 6.]])
  """
  m, n, _ = _check_shapes(a, b, c, beta)
  with np.errstate(all="ignore"):
    out = np.zeros((m, n))
    if alpha != 0:
      out = np.float64(alpha) * (_float64(a) @ _float64(b))
    if beta != 0:
      out = out + np.float64(beta) * _float64(c)
  return out


def error_bound(
  a: Any,
  b: Any,
  c: Any | None = None,
  alpha: float = 1.0,
  beta: float = 0.0,
  out_dtype: Any = None,
  *,
  tf32: bool = False,
  planes: Literal[2, 3] | None = None,
  reduced: tuple[Any, int] | None = None,
) -> np.ndarray:
  """Largest |C - reference| that a correct kernel can show, elementwise.

  Args:
    a: [M, K], float32, float16 or bfloat16.
    b: [K, N].
    c: [M, N]; needed when beta is not 0.
    alpha: factor of the product.
    beta: factor of C.
    out_dtype: dtype of the result; None is the dtype of a.
    tf32: the operands are float32 and may be cut to TF32, as `jnp.dot` does
      at default precision on GPUs.
    planes: the operands are float32 and multiplied in so many planes of
      bfloat16, as precision HIGHEST (3) and BF16_BF16_F32_X3 (2) do on the
      Hopper kernel.
    reduced: the dtype that parts of the sums were rounded to before they were
      added up over devices, and how many parts; None: no such rounding.

  Returns:
    [M, N], float64; NaN or inf where an operand is.

  Raises:
    ValueError: shapes that do not fit, beta without c, or K > 131071 of int8.
    TypeError: out_dtype is none of the three.
  """
  dtype = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
  before = bound_of_sum(a, b, c, alpha, beta, tf32, reduced, planes=planes)
  return after_rounding(before, reference(a, b, c, alpha, beta), dtype)


def check(
  out: Any,
  a: Any,
  b: Any,
  c: Any | None = None,
  *,
  alpha: float = 1.0,
  beta: float = 0.0,
  sample: int | None = None,
  seed: int = 0,
  tf32: bool = False,
  planes: Literal[2, 3] | None = None,
  reduced: tuple[Any, int] | None = None,
) -> Check:
  """Compares a result with the float64 reference, against the error bound.

  NaN passes only where the reference is NaN, an infinity only where the
  reference is that infinity or so large that rounding it to the result's
  dtype may overflow.

  With `sample`, the reference is computed for as many rows and columns, with
  K in full: one of each of equally many stripes, the first and the last row
  among them, the others at random, so that every output tile of a regular
  kernel is met. The cost falls from M N K to sample^2 K. The rest of the output
  is scanned for NaN and infinities, unless products of the largest operands
  could overflow the dtype of `out`, as float16's often could.

  Args:
    out: [M, N], what a kernel gave for the other arguments; float32, float16
      or bfloat16; of int8 also int32, which must be exact.
    a: [M, K].
    b: [K, N].
    c: [M, N]; needed when beta is not 0.
    alpha: factor of the product.
    beta: factor of C.
    sample: rows and columns to check; None checks every element.
    seed: picks the sampled rows and columns.
    tf32, planes, reduced: see `error_bound`.

  Raises:
    ValueError: shapes that do not fit, beta without c, sample below 1, or K >
      131071 of int8.
    TypeError: a dtype of out that is none of the three.

  Example:
    >>> import numpy as np
    >>> from pallas_gemm import numerics
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    >>> numerics.check(a @ b, a, b).passed
    True
    >>> numerics.check(a @ b + 1, a, b).passed
    False
  """
  m, n, _ = _check_shapes(a, b, c, beta)
  if tuple(out.shape) != (m, n):
    raise ValueError(f"out must have shape {(m, n)}, got {tuple(out.shape)}")
  dtype = jnp.dtype(out.dtype)
  is_exact = dtype == jnp.int32 and a.dtype == b.dtype == jnp.int8
  if not is_exact:
    sums.result_roundoff(dtype)
  if sample is not None and sample < 1:
    raise ValueError(f"sample must be None or at least 1, got {sample}")
  stray, rows, columns = 0, np.arange(m), np.arange(n)
  if sample is not None and (sample < m or sample < n):
    rng = np.random.default_rng(seed)
    rows, columns = (
      sampling.stratified(m, sample, rng),
      sampling.stratified(n, sample, rng),
    )
    if not is_exact and _cannot_overflow(a, b, c, alpha, beta, dtype):
      stray = m * n - int(_count_finite(out))
    # Indexing stays on the device that holds the arrays; only what is
    # checked travels to the host.
    out, a, b = out[rows][:, columns], a[rows], b[:, columns]
    c = None if c is None or beta == 0 else c[rows][:, columns]
  want = reference(a, b, c, alpha, beta)
  before = bound_of_sum(a, b, c, alpha, beta, tf32, reduced, planes=planes)
  if is_exact:
    before = np.zeros_like(before)
  found = compare(out, want, before)
  if found.worst:
    i, j = found.worst
    found = dataclasses.replace(found, worst=(int(rows[i]), int(columns[j])))
  wrong = {"passed": False, "max_error": np.inf, "worst_ratio": np.inf}
  return dataclasses.replace(found, **wrong if stray else {})


def compare(out: Any, want: np.ndarray, before: np.ndarray) -> Check:
  """Compares a result with a reference, given each element's bound.

  NaN and infinities pass where `check` says.

  Args:
    out: [M, N]; float32, float16 or bfloat16, or int32, which is exact.
    want: [M, N], the reference in float64.
    before: [M, N], what a correct kernel may be off before it rounds the
      result to its dtype, as `bound_of_sum` says.

  Raises:
    TypeError: a dtype of out that is none of the three.
  """
  dtype = jnp.dtype(out.dtype)
  is_exact = dtype == jnp.int32  # nothing is rounded
  bound = before if is_exact else after_rounding(before, want, dtype)
  got = _float64(out)
  if got.size == 0:
    return Check(True, 0.0, 0.0, 0.0, 0)
  with np.errstate(all="ignore"):
    error = np.abs(got - want)
    # A result that rounds to an infinity: half a unit above the largest
    # finite number, less what the sum may be off.
    limit = np.inf
    if not is_exact:
      largest = float(jnp.finfo(dtype).max)
      limit = largest * (1 + sums.result_roundoff(dtype) / 2)
    overflow = np.isinf(got) & (np.abs(want) + before >= limit)
    overflow &= np.sign(got) == np.sign(want)
    same = (np.isnan(got) & np.isnan(want)) | (got == want) | overflow
    error = np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))
    ratio = np.where(same, 0.0, error / bound)
    # Beside a reference that is NaN or infinite there is no room for error.
    bound = np.where(np.isfinite(want), bound, 0.0)
    ratio = np.where(~same & ~np.isfinite(want), np.inf, ratio)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
  worst = np.unravel_index(np.argmax(ratio), ratio.shape)
  return Check(
    passed=bool(ratio[worst] <= 1),
    max_error=float(error.max()),
    error_bound=float(bound[worst]),
    worst_ratio=float(ratio[worst]),
    checked=got.size,
    worst=tuple(map(int, worst)),
  )


def bound_of_sum(
  a: Any,
  b: Any,
  c: Any = None,
  alpha=1.0,
  beta=0.0,
  tf32=False,
  reduced=None,
  *,
  dtypes: tuple[Any, Any] | None = None,
  fast: bool = False,
  more: int = 0,
  planes: int | None = None,
) -> np.ndarray:
  """`error_bound` of the float32 sum, before it is rounded to a dtype.

  Args:
    a, b, c, alpha, beta, tf32, reduced: see `error_bound`.
    dtypes: of the operands, where a and b are these times their scales.
    fast: sums of 8-bit floats are not promoted.
    more: roundings of scales.
    planes: see `error_bound`.
  """
  m, n, k = _check_shapes(a, b, c, beta)
  dtypes = dtypes or (a.dtype, b.dtype)
  after = _EPILOGUE_ROUNDINGS + more
  u = sums.unit_roundoff(dtypes, tf32)
  how = {"tf32": tf32, "fast": fast, "planes": planes}
  rounded = sums.relative_error(k, dtypes, after, **how)
  # The reference is rounded too, in float64.
  rounded += gamma(k + 2, 2.0**-53)
  tiny = float(jnp.finfo(jnp.float32).smallest_normal)
  lost = (k + 1) * tiny
  if reduced is not None:
    dtype, parts = jnp.dtype(reduced[0]), reduced[1]
    further = gamma(parts, sums.result_roundoff(dtype))
    lost += 2 * parts * sums.flushed(dtype)
    rounded = rounded + further + rounded * further
  before = np.zeros((m, n))
  with np.errstate(all="ignore"):
    if alpha != 0:
      x, y = np.abs(_float64(a)), np.abs(_float64(b))
      magnitude = x @ y
      flushed = lost
      small_x, small_y = sums.lost(x, planes), sums.lost(y, planes)
      if small_x.any() or small_y.any():
        flushed = flushed + small_x @ y + x @ small_y
      before += abs(alpha) * (rounded * magnitude + flushed)
    if beta != 0:
      z = np.abs(_float64(c))
      before += abs(beta) * gamma(_EPILOGUE_ROUNDINGS + 1, u) * z
      before += abs(beta) * (sums.subnormal(z) + tiny)
  return before + tiny


def after_rounding(
  before: np.ndarray, want: np.ndarray, dtype: Any
) -> np.ndarray:
  """A bound to which the rounding of the result, `want`, to a dtype is added.

  Raises:
    TypeError: the dtype is not float32, float16 or bfloat16.
  """
  with np.errstate(all="ignore"):
    rounded = sums.result_roundoff(dtype) * (np.abs(want) + before)
    return before + rounded + sums.flushed(dtype)


def _check_shapes(a, b, c, beta) -> tuple[int, int, int]:
  """(M, N, K)."""
  for name, x in (("a", a), ("b", b)):
    if len(x.shape) != 2:
      raise ValueError(f"{name} must have rank 2, got shape {tuple(x.shape)}")
  (m, k), (k_b, n) = a.shape, b.shape
  if k != k_b:
    raise ValueError(
      f"b must have {k} rows, as a {tuple(a.shape)} has columns, got shape"
      f" {tuple(b.shape)}"
    )
  if beta != 0 and c is None:
    raise ValueError(f"beta is {beta} but c is None; pass c or beta=0")
  if beta != 0 and tuple(c.shape) != (m, n):
    raise ValueError(f"c must have shape {(m, n)}, got {tuple(c.shape)}")
  return m, n, k


def _cannot_overflow(a, b, c, alpha, beta, dtype) -> bool:
  """Whether finite operands are small enough that every result is finite."""
  bound = abs(alpha) * a.shape[1] * _largest(a) * _largest(b)
  if beta != 0:
    bound += abs(beta) * _largest(c)
  # NaN compares false, as it should.
  return bool(bound < float(jnp.finfo(dtype).max) / 2)


def _largest(x) -> float:
  """The largest |x|, found on the device that holds x; 0 if empty."""
  if 0 in x.shape:
    return 0.0
  xp = jnp if isinstance(x, jax.Array) else np
  return float(xp.max(xp.abs(x)))


def _count_finite(x):
  """Finite elements; at most 2^31 - 1 a row block on a device."""
  if isinstance(x, jax.Array):
    return np.asarray(jnp.isfinite(x).sum(axis=1)).sum(dtype=np.int64)
  return np.isfinite(x).sum(dtype=np.int64)


def _float64(x) -> np.ndarray:
  return np.asarray(x).astype(np.float64)
