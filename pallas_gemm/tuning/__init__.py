"""Which config computes a problem: the user's, the measured one, a modelled.

`problem` says what a problem and a config are, `model` predicts the time of a
config, `cache` remembers what `autotune` measured, and `resolve` picks.
"""

import dataclasses
from types import ModuleType

from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache
from pallas_gemm.tuning.generation import generation

__all__ = [
  "INVARIANT_M",
  "Config",
  "Problem",
  "generation",
  "model_of",
  "resolve",
]

# Rows of the problem whose config every batch-invariant product of the same
# weights gets: those of a small batch of tokens, where the config matters
# most for speed.
INVARIANT_M = 128


def resolve(
  problem: Problem,
  *,
  config: Config | None = None,
  batch_invariant: bool = False,
) -> Config:
  """The config to compute a problem with.

  In this order: the one given, the one measured to be the fastest (if the
  kernel takes it), the one of the cost model.

  The order in which a sum over K is added depends on the config, and so do
  the last bits of the result. With `batch_invariant` the config is the
  model's for `INVARIANT_M` rows and no batch, whatever M and the batch are:
  one for each N, K, dtypes, layout and epilogue. What was measured is not
  asked, because it may differ from one M to the next.

  Args:
    problem: what is to be computed.
    config: the user's choice; returned as it is, legal or not.
    batch_invariant: see above.

  Example:
    >>> from pallas_gemm import tuning
    >>> problem = tuning.Problem(
    ...   m=4096, n=4096, k=4096, dtype="bfloat16", out_dtype="bfloat16"
    ... )
    >>> mine = tuning.Config(block_m=64, block_n=64, consumers=1)
    >>> tuning.resolve(problem, config=mine) is mine
    True
  """
  if config is not None:
    return config
  # Here, because both import this package for `Problem`.
  from pallas_gemm.kernels.sm90 import legal
  from pallas_gemm.kernels.sm90.plan import Plan

  model = model_of(problem)
  # Groups along K have no rows of their own, and a K of any size.
  if batch_invariant and problem.ragged != "k":
    nominal = dataclasses.replace(
      problem,
      m=INVARIANT_M * max(1, problem.groups),
      batch=1,
      batched_a=False,
      batched_b=False,
    )
    if problem.ragged:
      return model.choose(nominal)
    return model.choose(nominal, any_rows=True)
  measured = cache.lookup(problem)
  if measured is not None:
    reason = legal.reason(Plan.of(problem, measured))
    if reason is None:
      return measured
    cache.warn_once(f"tuning cache: {measured} is not used: {reason}")
  return model.choose(problem)


def model_of(problem: Problem) -> ModuleType:
  """The cost model of such problems: `model`, or `grouped`."""
  from pallas_gemm.tuning import grouped, model

  return grouped if problem.ragged else model
