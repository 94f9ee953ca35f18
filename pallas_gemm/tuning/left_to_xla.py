"""Which products XLA's own kernels are left to compute."""

import dataclasses

from pallas_gemm import hardware
from pallas_gemm.kernels import sm90_memory
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem
from pallas_gemm.tuning import model

# What rows of odd lengths may cost where XLA has a kernel for them.
_MOST = 1.04
# XLA's kernels for rows that do not start at multiples of 16 bytes: a launch,
# what a step of K waits for, and the rate at which they multiply. Within 11 %
# (mean) of 14 products of up to 60 us on an H200 (dense.jsonl, dense-3, -18,
# -21), so what is to be gained must be more.
_LAUNCH, _PER_K, _FLOPS_PER_S = 3.5e-6, 8e-9, 120e12
_LEAST_GAIN = 0.9
# XLA's reduction for a vector times a matrix stored along K: a launch, and part
# of the peak rate of device memory. Within 22 % of 18 products of 0.5 to 50 MB
# on an H200 (dense-28, -30); along N it takes up to five times as long.
_VECTOR_LAUNCH, _VECTOR_RATE = 1.5e-6, 0.7


def why(config: Config, problem: Problem) -> str | None:
  """None, or why XLA's own kernel is expected to be faster than this config.

  XLA's library reads matrices whose rows start at multiples of 16 bytes as
  they are. If they are not whole swizzled pieces, this kernel copies them into
  padded ones or uses tiles that suit them ill, and does not win that back
  (3000^3: 0.90x of jnp.dot). Other matrices XLA does not read fast either, but
  it reads small ones in less time than copies take (4579 x 83 x 93: 4.1 us,
  this kernel 8.7). A vector times a matrix stored along K is a reduction to
  XLA, and small ones are done when a tile has not yet left (1 x 1024 x 1024:
  2.1 us, this kernel 3.6).
  """
  p = problem
  time = model.predict(config, problem)
  if p.m == 1 and p.transpose_b and not p.gated:
    rate = _VECTOR_RATE * hardware.current().dram_bytes_per_s
    matrices = p.batch if p.batched_b else 1
    theirs = _VECTOR_LAUNCH + matrices * p.n * p.k * 2 / rate
    if time > theirs:
      return (
        f"a vector times a matrix stored along K would take {time * 1e6:.1f}"
        f" us, XLA's reduction about {theirs * 1e6:.1f}"
      )
  a, b = sm90_memory.operand_shapes(p)
  if any(width % 8 for width in (a[1], b[1], p.n)):
    flops = 2.0 * p.batch * p.m * p.n * p.k * (2 if p.gated else 1)
    theirs = _LAUNCH + _PER_K * p.k + flops / _FLOPS_PER_S
    if time <= _LEAST_GAIN * theirs:
      return None
    return (
      "with rows that do not start at multiples of 16 bytes it would take"
      f" {time * 1e6:.1f} us, XLA's kernel about {theirs * 1e6:.1f}"
    )
  whole = dataclasses.replace(
    p,
    m=plan.cdiv(p.m, 64) * 64,
    n=plan.cdiv(p.n, 64) * 64,
    k=plan.cdiv(p.k, 64) * 64,
  )
  least = model.predict(model.choose(whole), whole)
  if time <= _MOST * least:
    return None
  return (
    f"with rows that are no multiples of 128 bytes it would take"
    f" {time * 1e6:.1f} us instead of {least * 1e6:.1f}; XLA's kernel reads"
    " them as they are"
  )
