"""The one list from which it is chosen what computes a problem.

Configs of the Hopper kernel and XLA's own product are candidates alike. What
was measured comes before what is shipped, and that before what is modelled;
measured and modelled seconds are never compared.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Literal, NamedTuple

from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache, grouped, model, xla
from pallas_gemm.tuning.cache import Entry

# Rows of the problem whose config every batch-invariant product of the same
# weights gets: those of a small batch, where it matters most for speed.
INVARIANT_M = 128

Source = Literal["user", "measured", "shipped", "model"]


class Candidate(NamedTuple):
  """One way to compute a problem.

  Attributes:
    how: a config of the Hopper kernel, or "xla".
    seconds: how long it takes, by its source; None if that does not say.
    source: who says so.
    why: why XLA's product comes before the kernel; "" of a config.
  """

  how: Config | Literal["xla"]
  seconds: float | None
  source: Source
  why: str = ""


def ranked(
  problem: Problem,
  *,
  config: Config | None = None,
  batch_invariant: bool = False,
  xla_too: bool = True,
) -> Iterator[Candidate]:
  """The candidates of a problem, best first; later ones cost nothing unasked.

  The last bits of a result depend on the order of its sum, so on the config.
  With `batch_invariant` that is the model's for `INVARIANT_M` rows and no
  batch, whatever these are. What was measured may differ from one M to the
  next, and XLA promises nothing: neither is a candidate (but what was measured
  of groups along K, a sum over all rows).

  Args:
    problem: what is to be computed.
    config: the user's choice; then it is the only candidate.
    batch_invariant: see above.
    xla_too: whether XLA's product is a candidate.

  Raises:
    ValueError: the user's config is not legal.
    NotImplementedError: no config is legal; the reason of the last refusal.
  """
  if config is not None:
    if reason := legal.reason(Plan.of(problem, config)):
      raise ValueError(f"config can't compute this product: {reason}")
    yield Candidate(config, None, "user")
    return
  # Groups along K have no rows of their own, and a K of any size.
  if batch_invariant and problem.along != "k":
    yield Candidate(_for_any_rows(problem), None, "model")
    return
  xla_too = xla_too and not batch_invariant
  for source, lookup in (
    ("measured", cache.lookup),
    ("shipped", cache.shipped),
  ):
    for candidate in _of_entry(lookup(problem), problem, source):
      if xla_too or candidate.how != "xla":
        yield candidate
  yield from _modelled(problem, xla_too)


def model_of(problem: Problem) -> ModuleType:
  """The cost model that predicts the problem: `model`, or `grouped`."""
  return grouped if problem.groups else model


def _for_any_rows(problem: Problem) -> Config:
  """The model's config for `INVARIANT_M` rows (of each group)."""
  groups = problem.groups.count if problem.groups else 1
  nominal = problem.changed(
    m=INVARIANT_M * groups, batch=1, batched_a=False, batched_b=False
  )
  if problem.groups:
    config = grouped.choose(nominal, any_rows=True)
  else:
    config = model.choose(nominal, any_rows=True)
  if reason := legal.reason(Plan.of(problem, config)):
    raise NotImplementedError(reason)
  return config


def _of_entry(
  entry: Entry | None, problem: Problem, source: Source
) -> list[Candidate]:
  """The winner, then the other; nothing if the config is not legal here."""
  if entry is None:
    return []
  config, seconds, theirs = entry
  if config is None:
    why = f"no config of the kernel is {source}, only XLA's product"
    return [Candidate("xla", theirs, source, why)]
  if reason := legal.reason(Plan.of(problem, config)):
    if source == "measured":
      cache.warn_once(f"tuning cache: {config} is not used: {reason}")
    return []
  by_kernel = Candidate(config, seconds, source)
  if not entry.is_xla_faster:
    return [by_kernel, Candidate("xla", theirs, source)]
  times = f"{seconds * 1e6:.1f} us, XLA's product {theirs * 1e6:.1f}"
  why = f"it takes {times} ({source})"
  return [Candidate("xla", theirs, source, why), by_kernel]


def _modelled(problem: Problem, xla_too: bool) -> list[Candidate]:
  """The model's config and XLA's product, that first which seems faster.

  Of grouped products XLA's never does.
  """
  predicts = model_of(problem)
  config = predicts.choose(problem)
  seconds = predicts.predict(Plan.of(problem, config))
  by_kernel = Candidate(config, seconds, "model")
  if not xla_too:
    return [by_kernel]
  if not problem.groups and (left := xla.faster(problem, seconds)):
    return [Candidate("xla", left.seconds, "model", left.why), by_kernel]
  return [by_kernel, Candidate("xla", None, "model")]
