"""A case of the dense ops: compiled, checked, timed, and made a row."""

from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import os
import tempfile
from typing import Any

import jax

from experiments.harness import case_bench, dense_cases, dense_check
from experiments.harness.case_bench import OURS, Call, Choice
from pallas_gemm.tuning import autotune, cache

BASELINE, TUNED = "jnp", "tuned"


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A case whose two arms are compiled.

  Attributes:
    case: what it computes.
    mine, theirs: functions of the case's operands; `mine` is a future, for
      compiling goes on while others are compiled.
    choice: what `mine` runs.
    error: why there are no arms; None if there are.
  """

  case: dense_cases.Case
  mine: futures.Future | None = None
  theirs: Call | None = None
  choice: Choice | None = None
  error: Exception | None = None


def prepare(
  cases: Sequence[dense_cases.Case], implementation: str | None = None
) -> Iterator[Prepared]:
  """Compiles both arms of each case; yields when all of them are.

  XLA picks its kernels by timing them, so whatever it compiles is compiled
  while nothing else runs on the GPU. A Pallas kernel is not run to be
  compiled: those are compiled meanwhile, in threads.

  Args:
    cases: what to compile.
    implementation: passed to the ops.
  """
  with futures.ThreadPoolExecutor(case_bench.COMPILERS) as pool:
    prepared = [_prepare(case, implementation, pool) for case in cases]
  yield from prepared


def _prepare(case, implementation, pool) -> Prepared:
  operands = case.operands()
  try:
    fn = dense_cases.ours(case, implementation)
    lowered = jax.jit(fn).lower(**operands)
    choice = case_bench.choice(fn, operands, lowered, implementation)
    mine = pool.submit(lowered.compile)
    if choice.implementation == "xla":
      mine.exception()  # waits
    theirs = jax.jit(dense_cases.baseline(case)).lower(**operands).compile()
  except Exception as error:  # pylint: disable=broad-exception-caught
    return Prepared(case, error=error)  # it must not cost the others
  return Prepared(case, mine, theirs, choice)


@dataclasses.dataclass
class DenseBench(case_bench.CaseBench):
  """How a run measures its cases.

  Attributes:
    tuned: also time the fastest of the configs that `autotune` measures.
  """

  tuned: bool = False

  def measure(self, prepared: Prepared) -> dict[str, Any]:
    """Checks a case, times it against its baseline, and makes its row.

    Raises:
      Exception: what kept either arm from being compiled or run.
    """
    if prepared.error is not None:
      raise prepared.error
    case, choice = prepared.case, prepared.choice
    operands = case.draw(self.bench.seed)
    arms = {OURS: prepared.mine.result(), BASELINE: prepared.theirs}
    check = dense_check.check(
      case, arms[OURS](**operands), operands, self.bench.seed
    )
    tuned_config = None
    if self.tuned and check.passed and choice.implementation == "sm90":
      arms[TUNED], tuned_config = self._tuned(case)
    times, load, host = {}, case_bench.NO_LOAD, {}
    if check.passed and self.bench.timed:
      times, load = self.times(arms, operands)
    elif check.passed:
      host["wall_ms_median"] = case_bench.host_ms(arms[OURS], operands)
      host["baseline_wall_ms_median"] = case_bench.host_ms(
        arms[BASELINE], operands
      )
    mine, theirs, tuned = (times.get(n) for n in (OURS, BASELINE, TUNED))
    return self.row(
      check=check,
      mine=mine,
      theirs=theirs,
      load=load,
      config=choice.config,
      tflops=mine and case.flops / mine.median / 1e9,
      gbytes_per_s=mine and case.least_bytes / mine.median / 1e6,
      passed=check.passed,
      implementation=choice.implementation,
      config_origin=choice.origin,
      tuned_ms_median=tuned and tuned.median,
      tuned_config=tuned_config,
      **case.fields() | host | self.rates,
    )

  def _tuned(self, case) -> tuple[Call, dict[str, Any]]:
    """The case with the configs that `autotune` finds."""
    operands = case.operands()
    with _own_cache():
      fn = dense_cases.ours(case, self.implementation)
      autotune.autotune(fn, **operands)
      config, _ = case_bench.config_of(fn, operands)
      return jax.jit(fn).lower(**operands).compile(), config


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
  """What is tuned inside is forgotten: other cases get the model's choice."""
  before = os.environ.get(cache.FOLDER_VARIABLE)
  with tempfile.TemporaryDirectory() as folder:
    os.environ[cache.FOLDER_VARIABLE] = folder
    cache.clear()
    try:
      yield
    finally:
      if before is None:
        del os.environ[cache.FOLDER_VARIABLE]
      else:
        os.environ[cache.FOLDER_VARIABLE] = before
      cache.clear()
