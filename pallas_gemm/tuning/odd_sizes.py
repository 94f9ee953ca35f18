"""What sizes that are no multiples of 64 cost a config; for the cost model."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_gemm.kernels import sm90_memory
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem

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
    stores_rows: the result is stored row by row.
    copies: microseconds of the copies into and out of padded matrices.
    short: cycles that a slab takes longer because of short rows.
    sums: to add partial products, as a multiple.
  """

  loads: tuple[float, float]
  results: float
  stores_rows: bool
  copies: float
  short: float
  sums: float


def of(config: Config, p: Problem) -> Costs | None:
  """The costs; `p` is the problem that the kernel computes."""
  return costs(config, p) if p.m % 64 or p.n % 64 or p.k % 64 else None


def _slower(columns: int) -> float:
  """Loads of rows of that many elements of 16 bits, as a multiple."""
  if columns % 16:
    return _STRADDLING
  return _MISALIGNED if columns % 64 else 1.0


def straddles(p: Problem) -> bool:
  """Whether an operand's rows start at odd multiples of 16 bytes."""
  return any(columns % 16 == 8 for _, columns in sm90_memory.operand_shapes(p))


def copies_at_least(p: Problem) -> tuple[float, float, float]:
  """Microseconds of copies of operands, of C, and of results.

  Those of matrices whose rows do not start at multiples of 16 bytes. C and
  results are not copied where K is split, results not if stored by rows.
  """
  a, b = sm90_memory.operand_shapes(p)
  operands = [(a, p.batch if p.batched_a else 1)]
  operands += [(b, p.batch if p.batched_b else 1)] * (2 if p.gated else 1)
  copied = [batch * math.prod(x) for x, batch in operands if x[1] % 8]
  into = len(copied) * _COPY + 2 * 2 * sum(copied) / _COPY_RATE
  c, out_of = 0.0, 0.0
  size = jnp.dtype(p.c_dtype).itemsize if p.c_dtype else 0
  if p.n * size % 16:
    c = _COPY + 2 * size * p.results / _COPY_RATE
  size = jnp.dtype(p.out_dtype).itemsize
  if p.n * size % 16:
    rate = _SLICE_RATES[math.gcd(p.results, 4)]
    out_of = _COPY + 2 * size * p.results / rate
  return into, c, out_of


@functools.lru_cache(maxsize=1024)
def costs(config: Config, p: Problem) -> Costs:
  """The costs of sizes of which one is no multiple of 64."""
  a, b = sm90_memory.operand_shapes(p)
  padded = sm90_memory.operand_paddings(config, p, a, b)
  into, out_of = sm90_memory.copied_bytes(config, p)
  copies = (len(into) + len(out_of)) * _COPY
  slice_rate = _SLICE_RATES[math.gcd(p.results, 4)]
  copies += sum(into) / _COPY_RATE + sum(out_of) / slice_rate
  along = [padded[0][1]] * p.transpose_a + [padded[1][1]] * (not p.transpose_b)
  short = [_UNEVEN if n % 16 else _SHORT for n in along if n < 64]
  width = plan.result_shape(p, config)[1] * jnp.dtype(p.out_dtype).itemsize
  return Costs(
    loads=(_slower(padded[0][1]), _slower(padded[1][1])),
    results=_STRADDLING_RESULTS if width % 32 == 16 else 1.0,
    stores_rows=plan.stores_rows(p, config),
    copies=copies,
    short=max(short, default=0.0),
    sums=_ODD_SUMS if p.results % 2 else 1.0,
  )
