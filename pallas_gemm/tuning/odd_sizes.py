"""What sizes that are no multiples of 64 cost a config; for the cost model."""

import math
from typing import NamedTuple

from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem

# Fitted to times on an H200, as those of `model`. Microseconds of a copy, and
# its bytes a microsecond into padded matrices.
_COPY, _COPY_RATE = 1.256, 3359000.0
# The same out of them. A thread of XLA's kernels writes as many results at a
# time, up to four, as divide their number: 4097^2 are copied at 0.8 TB/s, 2048
# x 50257 at 2.8 (H200). To add an odd number of partial sums takes longer,
# too, as a multiple.
_SLICE_RATES = {1: 840000.0, 2: 1450000.0, 4: 2900000.0}
_ODD_SUMS = 2.0
# Loads of rows that do not start at multiples of 128 bytes, as a multiple; and
# of those that start at odd multiples of 16, and so straddle sectors of 32:
# four cycles each. 8192^2 x 336 NT takes 75.0 us, x 328 110.3, and 82.5 where
# blocks of a cluster share them. Such results are written at half the rate:
# 8192 x 8208 x 128 NT 41.8 us, 8192 x 8200 x 128 61.3 (H200).
_MISALIGNED, _STRADDLING = 1.8, 3.0
_STRADDLING_RESULTS = 1.9
# Cycles that a slab takes longer where rows of a matrix that is stored along N
# or M are shorter than 128 bytes, and if they are no multiples of 32 bytes.
_SHORT, _UNEVEN = 170.0, 500.0


class Costs(NamedTuple):
  """What sizes that are no multiples of 64 cost a config.

  Attributes:
    loads: of A and B, as multiples.
    results: device memory's time for results, as a multiple.
    copies: microseconds of the copies into and out of padded matrices, or of
      A for a B that is folded.
    short: cycles that a slab takes longer because of short rows.
    sums: to add partial products, as a multiple.
  """

  loads: tuple[float, float]
  results: float
  copies: float
  short: float
  sums: float


NONE = Costs((1.0, 1.0), 1.0, 0.0, 0.0, 1.0)


def costs(plan: Plan) -> Costs:
  """What the sizes of the plan's problem cost it."""
  p = plan.problem
  return _costs(plan) if p.m % 64 or p.n % 64 or p.k % 64 else NONE


def _costs(plan: Plan) -> Costs:
  """The costs of sizes of which one is no multiple of 64."""
  p = plan.problem
  into, out_of = plan.copied_bytes
  copies = (len(into) + len(out_of)) * _COPY
  copies += sum(into) / _COPY_RATE + sum(out_of) / _slice_rate(p)
  (_, a), (_, b) = plan.operand_paddings
  a, b = layout.bytes_of(a, p.a.dtype), layout.bytes_of(b, p.b.dtype)
  along = [a] * (not p.a.k_last) + [b] * (not p.b.k_last)
  short = [_UNEVEN if row % 32 else _SHORT for row in along if row < 128]
  result = layout.bytes_of(plan.result_shape[1], p.out_dtype)
  return Costs(
    loads=(_slower(a), _slower(b)),
    results=_STRADDLING_RESULTS if result % 32 == 16 else 1.0,
    copies=copies,
    short=max(short, default=0.0),
    sums=_ODD_SUMS if p.results % 2 else 1.0,
  )


def straddles(p: Problem) -> bool:
  """Whether an operand's rows start at odd multiples of 16 bytes."""
  (_, a), (_, b) = layout.operand_shapes(p)
  rows = layout.bytes_of(a, p.a.dtype), layout.bytes_of(b, p.b.dtype)
  return any(row % 32 == 16 for row in rows)


def copies_at_least(p: Problem) -> tuple[float, float, float]:
  """Microseconds of copies of operands, of C, and of results.

  Those of matrices whose rows do not start at multiples of 16 bytes. C and
  results are not copied where K is split, results not if stored by rows.
  """
  copied = [
    layout.bytes_of(p.matrices(x) * math.prod(shape), x.dtype)
    for x, shape in zip((p.a, p.b), layout.operand_shapes(p))
    for _ in range(p.products if x is p.b else 1)
    if layout.bytes_of(shape[1], x.dtype) % 16
  ]
  into = len(copied) * _COPY + 2 * sum(copied) / _COPY_RATE
  c, out_of, c_dtype = 0.0, 0.0, p.epilogue.c_dtype
  if c_dtype and layout.bytes_of(p.n, c_dtype) % 16:
    c = _COPY + 2 * layout.bytes_of(p.results, c_dtype) / _COPY_RATE
  if layout.bytes_of(p.n, p.out_dtype) % 16:
    size = layout.bytes_of(p.results, p.out_dtype)
    out_of = _COPY + 2 * size / _slice_rate(p)
  return into, c, out_of


def _slower(row: int) -> float:
  """Loads of rows of that many bytes, as a multiple."""
  if row % 32:
    return _STRADDLING
  return _MISALIGNED if row % 128 else 1.0


def _slice_rate(p: Problem) -> float:
  return _SLICE_RATES[math.gcd(p.results, 4)]
