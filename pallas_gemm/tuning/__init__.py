"""Which config computes a problem: the user's, the measured one, a modelled.

`problem` says what a problem and a config are, `model` predicts the time of a
config, `cache` remembers what `autotune` measured, and `resolve` picks.
"""

import dataclasses

from pallas_gemm.kernels.problem import Config, Problem
from pallas_gemm.tuning import cache
from pallas_gemm.tuning.generation import generation

__all__ = ["INVARIANT_M", "Config", "Problem", "generation", "resolve"]

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
  # Here, because they import this package for `Problem`.
  from pallas_gemm.kernels import sm90_plan
  from pallas_gemm.tuning import grouped, model

  chosen_by = grouped if problem.ragged else model
  # Groups have a K of their own each, which no config splits: no row's bits
  # depend on the others.
  if batch_invariant and not problem.ragged:
    nominal = dataclasses.replace(
      problem, m=INVARIANT_M, batch=1, batched_a=False, batched_b=False
    )
    return model.choose(nominal)
  measured = cache.lookup(problem)
  if measured is not None:
    reason = sm90_plan.is_legal(measured, problem)
    if reason is None:
      return measured
    cache.warn_once(f"tuning cache: {measured} is not used: {reason}")
  return chosen_by.choose(problem)
