"""Which config computes a problem, and whether XLA's product should.

`choose` has the ordered list of what may compute a problem: what the user
says, `cache` (what `autotune` measured here, and what is shipped), and `model`
and `xla`, which predict.
"""

from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache
from pallas_gemm.tuning.cache import Entry, generation
from pallas_gemm.tuning.choose import INVARIANT_M, model_of, ranked

__all__ = [
  "INVARIANT_M",
  "Config",
  "Entry",
  "Problem",
  "cache",
  "generation",
  "model_of",
  "ranked",
  "resolve",
]


def resolve(
  problem: Problem,
  *,
  config: Config | None = None,
  batch_invariant: bool = False,
) -> Config:
  """The config to compute a problem with, if the Hopper kernel is to.

  In this order: the one given, the fastest measured, the shipped one, the one
  to which the cost model gives the least time. Those that are not legal for
  the problem are passed over, except the one given.

  Args:
    problem: what is to be computed.
    config: the user's choice; returned as it is, legal or not.
    batch_invariant: takes the same config whatever M and the batch are, as
      under `pallas_gemm.batch_invariant`; not of groups along K.

  Raises:
    NotImplementedError: no config is legal; the reason of the last refusal.

  Example:
    >>> from pallas_gemm import tuning
    >>> problem = tuning.Problem.flat(
    ...   m=4096, n=4096, k=4096, dtype="bfloat16", out_dtype="bfloat16"
    ... )
    >>> mine = tuning.Config(block_m=64, block_n=64, consumers=1)
    >>> tuning.resolve(problem, config=mine) is mine
    True
  """
  if config is not None:
    return config
  how = {"batch_invariant": batch_invariant, "xla_too": False}
  return next(candidate.how for candidate in ranked(problem, **how))
