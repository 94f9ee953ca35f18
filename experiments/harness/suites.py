"""What programs have in common that measure suites of cases on a GPU alone."""

from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import case as case_lib
from experiments.harness import cli, sum_errors, tables
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib
from pallas_gemm import compat, numerics

# Are compiled together; an interrupted run has rows of those before.
_AT_A_TIME = 8


def measure(
  experiment: str,
  there: Sequence[str],
  cases: Callable[[Sequence[str], int], Iterable[case_lib.Case]],
  named: Sequence[str],
  dtype: str,
) -> int:
  """Measures what the flags say; returns the exit status.

  Args:
    experiment: what rows call it.
    there: its suites; `sum_errors.SUITE` may be one.
    cases: those of the other suites, by a seed.
    named: the fields that a case is called by.
    dtype: of the operands whose sums have errors.

  Raises:
    FlagError: a suite that is not there, or no GPU.
  """
  suites = cli.suites(there)
  if not compat.targets_gpu():
    raise cli.FlagError(f"{experiment} is measured on a GPU, and none is here")
  session = session_lib.start(experiment, True, name_width=52)
  bench = session_lib.bench(experiment, True)
  with session.measuring():
    for some in itertools.batched(cases(suites, bench.seed), _AT_A_TIME):
      for prepared in run_lib.prepare(some):
        fields = prepared.case.fields()
        name = " ".join(str(fields[x]) for x in named if fields.get(x))
        session.case(name, functools.partial(bench.measure, prepared), parts)
    of_sums = sum_errors.SUITE in suites
    for case in sum_errors.cases(dtype) if of_sums else ():
      row = functools.partial(sum_errors.row, bench, case)
      session.case(case.name, row, sum_errors.parts)
  return session.finish()


def finite(results: Any) -> numerics.Check:
  """Of a layer's results and derivatives, without a known bound: no NaN."""
  found = jax.tree.leaves(results)
  passed = all(bool(jnp.isfinite(x).all()) for x in found)
  return numerics.Check(passed, 0.0, 0.0, 0.0, len(found))


def parts(row: dict[str, Any]) -> list[str]:
  """Time and rate of each arm, and why there is none."""
  found = [
    f"{name} {tables.duration(arm['ms_median'])} {arm['tflops']:.0f} TFLOP/s"
    for name, arm in row["arms"].items()
  ]
  return found + [f"{name}: {why}" for name, why in row["skipped"].items()]
