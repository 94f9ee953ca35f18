"""The shipped table of configs, as it would be written today."""

from collections.abc import Iterator

from experiments.harness import dense_cases, ragged_cases
from pallas_gemm import autotuning, hardware, tuning
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache
from pallas_gemm.tuning.cache import Entry


def table_of(device: str, suite: str = "all") -> str:
  """The file of a kind of GPU: what is chosen for each problem of the suites.

  What was measured there, and is in the tuning cache, comes with its times; the
  cost model's choices have none.

  Args:
    device: its name.
    suite: of which dense and grouped cases.
  """
  with hardware.assume(device):
    return cache.shipped_lines((p, _entry(p)) for p in _problems(suite))


def _entry(problem: Problem) -> Entry:
  known = cache.lookup(problem) or cache.shipped(problem)
  if known is not None:
    return known
  how = next(tuning.ranked(problem)).how
  return Entry(None if how == "xla" else how)


def _problems(suite: str) -> Iterator[Problem]:
  """What the Hopper kernel could compute of the suites, each problem once."""
  seen: set[Problem] = set()
  for cases in (dense_cases, ragged_cases):
    for case in cases.suite(suite):
      try:
        found = autotuning.find(cases.ours(case), **case.operands())
      except ValueError:  # nothing for the kernel
        continue
      for problem in (x.problem for x in found if x.problem not in seen):
        seen.add(problem)
        yield problem
