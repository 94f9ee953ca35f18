"""Which products XLA's own kernels are left to compute."""

import dataclasses

from pallas_gemm.kernels import sm90_memory
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem
from pallas_gemm.tuning import model

# What rows of odd lengths may cost where XLA has a kernel for them.
_MOST = 1.04


def why(config: Config, problem: Problem) -> str | None:
  """None, or why XLA's own kernel is expected to be faster than this config.

  XLA's library reads matrices whose rows start at multiples of 16 bytes as
  they are. If they are not whole swizzled pieces, this kernel copies them into
  padded ones or uses tiles that suit them ill, and does not win that back
  (3000^3: 0.90x of jnp.dot). Other matrices XLA does not read fast either.
  """
  p = problem
  a, b = sm90_memory.operand_shapes(p)
  if any(width % 8 for width in (a[1], b[1], p.n)):
    return None
  whole = dataclasses.replace(
    p,
    m=plan.cdiv(p.m, 64) * 64,
    n=plan.cdiv(p.n, 64) * 64,
    k=plan.cdiv(p.k, 64) * 64,
  )
  least = model.predict(model.choose(whole), whole)
  time = model.predict(config, problem)
  if time <= _MOST * least:
    return None
  return (
    f"with rows that are no multiples of 128 bytes it would take"
    f" {time * 1e6:.1f} us instead of {least * 1e6:.1f}; XLA's kernel reads"
    " them as they are"
  )
