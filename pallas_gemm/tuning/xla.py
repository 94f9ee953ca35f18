"""Which products XLA's own kernels are expected to compute faster, and why."""

import dataclasses
from typing import NamedTuple

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.tuning import model

# What rows of odd lengths may cost where XLA has a kernel for them. Small
# products take it longer: 256 x 512 x 784 with bias 10.1 us (3.6 here), 128 x
# 160 x 5120 6.8 (4.9), 128 x 1000 x 2048 7.1 (6.3; H200).
_MOST, _MOST_BESIDE = 1.04, 0.8e-6
# XLA's kernels for rows that do not start at multiples of 16 bytes: a launch,
# what a step of K waits for, and the rate at which they multiply. Within 11 %
# (mean) of 14 products of up to 60 us on an H200, so what is to be gained must
# be more.
_LAUNCH, _PER_K, _FLOPS_PER_S = 3.5e-6, 8e-9, 120e12
_LEAST_GAIN = 0.9
# XLA's kernels where rows are short, as a launch and part of the peak rate of
# device memory: for a sum over K that is cut in parts, and for one step of K.
# Within 11 % (mean) of 39 products on an H200.
_SHORT_LAUNCH, _ONE_STEP_LAUNCH, _SHORT_RATE = 3.2e-6, 2.4e-6, 0.95
# What follows a product XLA computes in a kernel of its own, from float32 sums:
# a launch, and eight bytes a result, at a multiple of the peak rate of device
# memory, for much of it stays in L2. (`jnp.dot(a, b) + bias`, which rounds the
# product first, is one kernel.) That is 0.4 to 1.3 times what nine products on
# an H200 took longer for a bias or C.
_EPILOGUE_LAUNCH, _EPILOGUE_RATE = 1.6e-6, 1.15
# Results up to which XLA's kernel for a sum of one slab, and no more than that,
# is done sooner: it has no barriers to make ready and no ring to fill. 13 of 14
# such products took it 1 to 45 % less, 1.3 to 2.7 us (H200). With an epilogue
# they are faster here, and some larger ones: 1024 x 1024 x 64 takes 2.75 us,
# XLA 2.9; 1024 times 32^3 4.3 and 3.0.
_FEW_RESULTS = 5 * 2**17
# The same where rows are short as well, of A or B along a K below 64, or of a
# result of fewer than 64 columns: XLA took 8 to 45 % less for 13 of 13 products
# of up to 3.3 million results (H200), up to 14 % more for 4096 x 4096 x 32.
_FEW_RESULTS_OF_SHORT_ROWS = 2**22
# XLA's reduction for a vector times a matrix stored along K: a launch, and part
# of the peak rate of device memory. Within 23 % of 18 products of 0.5 to 50 MB
# on an H200, 7 % in the mean; along N it takes up to five times as long.
_VECTOR_LAUNCH, _VECTOR_RATE = 1.5e-6, 0.75
# Slabs of 64 and work tiles a block with which XLA's kernels, whose consumers
# ping-pong at sums of any length, are 5 to 8 % faster if results are float32:
# only half of those find room to wait in registers here (H200).
_WIDE_SLABS, _WIDE_WORK_TILES = range(5, 25), 3


class Faster(NamedTuple):
  """XLA's product where it is expected to be faster than the Hopper kernel.

  Attributes:
    why: the reason, in words; "it" is the kernel.
    seconds: about how long it takes; None if only the difference is known.
  """

  why: str
  seconds: float | None = None


def faster(config: Config, problem: Problem, time: float) -> Faster | None:
  """XLA's product, if it is expected to be faster than this config.

  XLA's library reads matrices whose rows start at multiples of 16 bytes as they
  are. If they are not whole swizzle atoms, this kernel copies them into
  padded ones or uses tiles that suit them ill, and does not win that back
  (3000^3: 0.90x of jnp.dot). Other matrices XLA does not read fast either, but
  it reads small ones in less time than copies take (4579 x 83 x 93: 4.1 us,
  this kernel 8.7). Rows shorter than 128 bytes of a matrix that is stored along
  M or N, and K of 16 or less, are slow for TMA (4096 x 16 x 4096: 11.4 us, this
  kernel 17.1, and 10.7 where B is stored [N, K]). A vector times a matrix
  stored along K is a reduction to XLA, and small ones are done when a tile has
  not yet left (1 x 1024 x 1024: 2.1 us, this kernel 3.6). Few results of K up
  to 64 are sooner done too (64 x 80 x 64, twice: 1.4 us, this kernel 1.8), and
  some more of short rows (312 x 10664 x 32: 4.6 us, this kernel 5.2).
  float32 results of sums neither short nor long take longer to store (4096 x
  4096 x 512: 28.9 us, this kernel 31.2).

  Args:
    config: of the kernel.
    problem: what is computed.
    time: what the config is predicted to take, in seconds.
  """
  p = problem
  if p.m == 1 and p.b.k_last and not p.epilogue.gated:
    rate = _VECTOR_RATE * hardware.current().dram_bytes_per_s
    matrices = p.matrices(p.b)
    theirs = _VECTOR_LAUNCH + matrices * p.n * p.k * 2 / rate + _epilogue(p)
    if time > theirs:
      return Faster(
        f"a vector times a matrix stored along K would take {time * 1e6:.1f}"
        f" us, XLA's reduction about {theirs * 1e6:.1f}",
        theirs,
      )
  if (theirs := _of_short_rows(p)) and time > _LEAST_GAIN * theirs:
    return Faster(
      f"with rows shorter than 128 bytes it would take {time * 1e6:.1f} us,"
      f" XLA's kernel about {theirs * 1e6:.1f}",
      theirs,
    )
  if p.k <= 64 and p.results <= _FEW_RESULTS and not _has_epilogue(p):
    return Faster(
      "XLA's kernel starts sooner, and there is one slab to multiply"
    )
  if _is_one_slab_of_short_rows(p):
    return Faster(
      "XLA's kernel starts sooner, and rows are shorter than 128 bytes"
    )
  if _has_wide_results(p, config):
    return Faster(
      "float32 results of sums of this length would take longer to store"
    )
  a, b = layout.operand_shapes(p)
  if any(width % 8 for width in (a[1], b[1], p.n)):
    flops = 2.0 * p.batch * p.m * p.n * p.k * p.products
    theirs = _LAUNCH + _PER_K * p.k + flops / _FLOPS_PER_S + _epilogue(p)
    if time <= _LEAST_GAIN * theirs:
      return None
    return Faster(
      "with rows that do not start at multiples of 16 bytes it would take"
      f" {time * 1e6:.1f} us, XLA's kernel about {theirs * 1e6:.1f}",
      theirs,
    )
  whole = dataclasses.replace(
    p,
    m=cdiv(p.m, 64) * 64,
    n=cdiv(p.n, 64) * 64,
    k=cdiv(p.k, 64) * 64,
  )
  least = model.predict(Plan.of(whole, model.choose(whole)))
  if time <= _MOST * least + _MOST_BESIDE + _epilogue(p):
    return None
  return Faster(
    f"with rows that are no multiples of 128 bytes it would take"
    f" {time * 1e6:.1f} us instead of {least * 1e6:.1f}; XLA's kernel reads"
    " them as they are"
  )


def _epilogue(problem: Problem) -> float:
  """Seconds that XLA takes for the epilogue, in a kernel of its own."""
  p = problem
  if not _has_epilogue(p):
    return 0.0
  rate = _EPILOGUE_RATE * hardware.current().dram_bytes_per_s
  return _EPILOGUE_LAUNCH + 8 * p.results / rate


def _has_epilogue(problem: Problem) -> bool:
  """Whether results are more than a product."""
  p = problem
  return p.epilogue != Epilogue()


def _is_one_slab_of_short_rows(problem: Problem) -> bool:
  """Whether one slab of short rows, or into short rows, is multiplied."""
  p = problem
  if p.k > 64 or _has_epilogue(p):
    return False
  along_k = p.k < 64 and (p.a.k_last or p.b.k_last)
  return (along_k or p.n < 64) and p.results <= _FEW_RESULTS_OF_SHORT_ROWS


def _has_wide_results(problem: Problem, config: Config) -> bool:
  """Whether float32 results of a product hold up the next tile's slabs."""
  p = problem
  if p.out_dtype != "float32" or _has_epilogue(p) or p.batch > 1:
    return False
  work_tiles = Plan.of(p, config).work_tiles_of_a_block or 0
  return cdiv(p.k, 64) in _WIDE_SLABS and work_tiles >= _WIDE_WORK_TILES


def _of_short_rows(problem: Problem) -> float | None:
  """Seconds that XLA's kernel takes if rows are short, else None."""
  p = problem
  along = [p.m] * (not p.a.k_last) + [p.n] * (not p.b.k_last)
  launch = _SHORT_LAUNCH
  if min(along, default=64) >= 64:
    # What follows a product, XLA computes apart if it is not cut in parts.
    if p.k > 16 or _has_epilogue(p):
      return None
    launch = _ONE_STEP_LAUNCH
  rate = _SHORT_RATE * hardware.current().dram_bytes_per_s
  a = p.m * p.k * p.matrices(p.a)
  b = p.n * p.k * p.matrices(p.b)
  return p.products * (launch + 2 * (a + b + p.results) / rate) + _epilogue(p)
