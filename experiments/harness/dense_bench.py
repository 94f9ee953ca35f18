"""A case of the dense ops: compiled, checked, timed, and made a row."""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import os
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import (
  bench,
  dense_cases,
  dense_check,
  inputs,
  provenance,
  rows,
  timing,
)
from pallas_gemm import numerics
from pallas_gemm.tuning import autotune, cache, resolve

Call = Callable[..., Any]

OURS, BASELINE, TUNED = "pallas_gemm", "jnp", "tuned"
_COMPILERS = min(16, os.cpu_count() or 1)
# Without a GPU a call is interpreted: slow, and its time says little.
_HOST_CALLS = 3
# Fields of a row that say nothing where they do not apply.
_EMPTY = {
  "number": None,
  "alpha": 1.0,
  "beta": 0.0,
  "config": None,
  "tflops": None,
  "gbytes_per_s": None,
  "passed": None,
}
_NO_LOAD = provenance.Load()
# Large enough that no cache holds a part of it worth mentioning.
_BANDWIDTH_SHAPE = (16384, 16384)


@dataclasses.dataclass(frozen=True)
class Choice:
  """What ran for a case.

  Attributes:
    implementation: "sm90", "triton" or "xla".
    config: of the Hopper kernel; of several products, one for each.
    origin: "cache" if one was measured before, else "model".
  """

  implementation: str
  config: dict[str, Any] | None = None
  origin: str | None = None


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
  with futures.ThreadPoolExecutor(_COMPILERS) as pool:
    prepared = [_prepare(case, implementation, pool) for case in cases]
  yield from prepared


def _prepare(case, implementation, pool) -> Prepared:
  operands = case.operands()
  try:
    fn = dense_cases.ours(case, implementation)
    lowered = jax.jit(fn).lower(**operands)
    choice = _choice(fn, operands, lowered, implementation)
    mine = pool.submit(lowered.compile)
    if choice.implementation == "xla":
      mine.exception()  # waits
    theirs = jax.jit(dense_cases.baseline(case)).lower(**operands).compile()
  except Exception as error:  # pylint: disable=broad-exception-caught
    return Prepared(case, error=error)  # it must not cost the others
  return Prepared(case, mine, theirs, choice)


def _choice(fn, operands, lowered, implementation: str | None) -> Choice:
  """Implementation and config that a lowered function has."""
  text = lowered.as_text()
  if "mosaic_gpu" in text or implementation == "sm90":
    return Choice("sm90", *_config(fn, operands))
  return Choice("triton" if "triton" in text else "xla")


def _config(fn, operands) -> tuple[dict[str, Any], str]:
  """The config of a function's products, and where it comes from."""
  problems = [case.problem for case in autotune.find(fn, **operands)]
  configs = {
    autotune.describe(problem): dataclasses.asdict(resolve(problem))
    for problem in problems
  }
  measured = any(cache.lookup(problem) is not None for problem in problems)
  config = configs if len(configs) > 1 else next(iter(configs.values()))
  return config, "cache" if measured else "model"


@dataclasses.dataclass
class DenseBench:
  """How a run measures its cases.

  Attributes:
    bench: times arms and makes rows.
    tuned: also time the fastest of the configs that `autotune` measures.
    rates: GB/s of this GPU by `measure_bandwidth`, for every row.
    implementation: passed to the ops.
  """

  bench: bench.Bench
  tuned: bool = False
  rates: dict[str, float] = dataclasses.field(default_factory=dict)
  implementation: str | None = None

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
    times, load, host = {}, _NO_LOAD, {}
    if check.passed and self.bench.timed:
      times, load = self._times(arms, operands)
    elif check.passed:
      host["wall_ms_median"] = _host_ms(arms[OURS], operands)
      host["baseline_wall_ms_median"] = _host_ms(arms[BASELINE], operands)
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

  def row(
    self,
    *,
    check: numerics.Check | None = None,
    mine: timing.Timing | None = None,
    theirs: timing.Timing | None = None,
    load: provenance.Load = _NO_LOAD,
    **fields: Any,
  ) -> dict[str, Any]:
    """A row of this program, optional fields among the others."""
    optional = {k: v for k, v in fields.items() if k in rows.OPTIONAL_FIELDS}
    fields = {k: v for k, v in fields.items() if k not in optional}
    return self.bench.row(
      check, mine, theirs, load, optional=optional, **_EMPTY | fields
    )

  def _times(self, arms: dict[str, Call], operands):
    calls = [
      timing.Arm(name, functools.partial(fn, **operands))
      for name, fn in arms.items()
    ]
    with provenance.Monitor() as monitor:
      times = self.bench.times(calls)
    return times, monitor.load

  def _tuned(self, case) -> tuple[Call, dict[str, Any]]:
    """The case with the configs that `autotune` finds."""
    operands = case.operands()
    with _own_cache():
      fn = dense_cases.ours(case, self.implementation)
      autotune.autotune(fn, **operands)
      config, _ = _config(fn, operands)
      return jax.jit(fn).lower(**operands).compile(), config

  def measure_bandwidth(self) -> list[dict[str, Any]]:
    """Rows of a copy and of a sum of 1 GiB; sets `rates`."""
    m, n = _BANDWIDTH_SHAPE
    x = jax.block_until_ready(
      inputs.normal(self.bench.seed, 0, (m, n), "float32")
    )
    # Negated, for XLA copies an array as it is without a kernel to time.
    copy = timing.Arm("copy", jax.jit(jnp.negative), (x,))
    read = timing.Arm("read", jax.jit(jnp.sum), (x,))
    times = self.bench.times([copy, read])
    found = []
    for name, passes in (("copy", 2), ("read", 1)):
      rate = passes * x.nbytes / times[name].median / 1e6
      self.rates[f"{name}_gbytes_per_s"] = rate
      found.append(
        self.row(
          mine=times[name],
          suite="bandwidth",
          kernel=name,
          m=m,
          n=n,
          k=1,
          dtype="float32",
          gbytes_per_s=rate,
        )
      )
    return found


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


def _host_ms(fn: Call, operands: dict[str, jax.Array]) -> float:
  """Host time of a call, in ms: the median of a few."""
  found = []
  for _ in range(_HOST_CALLS):
    start = time.perf_counter()
    jax.block_until_ready(fn(**operands))
    found.append((time.perf_counter() - start) * 1e3)
  return statistics.median(found)
