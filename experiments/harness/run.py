"""Cases that run: arms compiled together, checked, interleaved, made rows."""

from collections.abc import (
  Callable,
  Collection,
  Iterator,
  Mapping,
  Sequence,
)
from concurrent import futures
import contextlib
import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import inputs, provenance, rows, timing
from experiments.harness.case import Arm, Call, Candidate, Case, Config, reason
from pallas_gemm import numerics
from pallas_gemm.tuning import autotune, ranked, resolve

# Compiling leaves Python for most of its time.
_COMPILERS = min(16, os.cpu_count() or 1)
# Enough to choose among configs; no row is made of it.
_CHOOSING = {"warmup": 2, "repeats": 10}
# Fields of a row that say nothing where they do not apply.
_EMPTY = {"alpha": 1.0, "beta": 0.0} | dict.fromkeys(
  ("number", "config", "tflops", "gbytes_per_s", "passed")
)
# Large enough that no cache holds a part of it worth mentioning.
_BANDWIDTH_SHAPE = (16384, 16384)
# A loop launches its kernels again and again.
_MOST_NAMES = 8
# An arm's candidates, or why it has none.
_Found = Sequence[Candidate] | NotImplementedError


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A case that is ready to run.

  Attributes:
    case: what it computes.
    arms: by name, the first one first, candidates whose `fn` waits until the
      function of the case's operands is compiled, and gives it or raises what
      kept it from that.
    facts: optional fields of the row.
  """

  case: Case
  arms: Mapping[str, Sequence[Candidate]]
  facts: Mapping[str, Any]


def prepare(
  cases: Sequence[Case],
  implementation: str | None = None,
  peers: Collection[str] | None = None,
  more: Callable[[Case], Mapping[str, Arm]] = lambda case: {},
) -> Iterator[Prepared]:
  """Compiles the arms of each case; yields when all of them are.

  XLA picks its kernels by timing them, so what it compiles is compiled one by
  one, while nothing else runs on the GPU; an arm that is tuned there was tuned
  before. A Pallas kernel is not run to be compiled: those are lowered and
  compiled meanwhile, in threads.

  Args:
    cases: what to compile.
    implementation: passed to the ops.
    peers: the case's arms to compile besides the first; None for all.
    more: arms of a case besides its own.
  """
  found: dict[Any, tuple[Case, dict[str, _Found]]] = {}
  for case in cases:
    if case.program not in found:
      arms = dict(case.arms(implementation))
      for name in [*arms][1:]:
        if peers is not None and name not in peers:
          arms[name] = _left_out
      arms |= more(case)
      found[case.program] = case, {x: _find(arm) for x, arm in arms.items()}
  with _threads(_COMPILERS) as pool, _threads(1) as alone:
    programs = {
      program: _prepare(case, implementation, arms, pool, alone)
      for program, (case, arms) in found.items()
    }
  for case in cases:
    yield dataclasses.replace(programs[case.program], case=case)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[futures.Executor]:
  """An executor; after an error, or Ctrl-C, it begins nothing that waits."""
  with futures.ThreadPoolExecutor(count) as found:
    try:
      yield found
    except BaseException:
      found.shutdown(wait=False, cancel_futures=True)
      raise


def uncompiled(case: Case) -> Prepared:
  """A case whose arms are compiled when they are first called.

  Raises:
    NotImplementedError: why an arm can't run.
  """
  arms = {
    name: [
      Candidate(functools.partial(_jitted, fn), config) for fn, config in arm()
    ]
    for name, arm in case.arms().items()
  }
  return Prepared(case, arms, {})


def _left_out() -> Sequence[Candidate]:
  raise NotImplementedError("left out by --beside")


def _find(arm: Arm) -> _Found:
  try:
    return arm()
  except NotImplementedError as error:
    return error


def _prepare(
  case: Case,
  implementation: str | None,
  found: Mapping[str, _Found],
  pool: futures.Executor,
  alone: futures.Executor,
) -> Prepared:
  operands = case.operands()
  arms: dict[str, list[Candidate]] = {}
  facts = {}
  for name, candidates in found.items():
    arms[name] = []
    if isinstance(candidates, NotImplementedError):
      arms[name].append(Candidate(functools.partial(_raise, candidates)))
      continue
    for fn, config in candidates:
      text, compiled = _compiling(fn, operands, pool, alone)
      if text and len(arms) == 1:
        ran, config, origin = _choice(fn, operands, text, implementation)
        facts = {"implementation": ran, "config_origin": origin}
      arms[name].append(Candidate(compiled, config))
  return Prepared(case, arms, facts)


def _compiling(
  fn: Call,
  operands: dict[str, Any],
  pool: futures.Executor,
  alone: futures.Executor,
) -> tuple[str, Callable[[], Call]]:
  """A function as XLA gets it, "" if it can't be; and what waits for it."""
  try:
    lowered = _jitted(fn).lower(**operands)
  except Exception as error:  # pylint: disable=broad-exception-caught
    return "", functools.partial(_raise, error)  # it must not cost the others
  text = lowered.as_text()
  is_of_xla = not runs_kernel(text) or "dot_general" in text
  compiling = (alone if is_of_xla else pool).submit(lowered.compile)
  return text, compiling.result


def runs_kernel(text: str) -> bool:
  """Whether a function that is lowered runs one of the Hopper kernels."""
  return "mosaic_gpu" in text


def _jitted(fn: Call) -> Call:
  """A function under jit; one that is already keeps its compiler options."""
  return fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)


def _raise(error: Exception) -> Any:
  raise error


def _choice(
  fn: Call, operands: dict[str, Any], text: str, implementation: str | None
) -> tuple[str, Config, str | None]:
  """What a lowered function runs: implementation, config, and its origin."""
  if runs_kernel(text) or implementation == "sm90":
    return "sm90", *config_of(fn, operands)
  return "triton" if "triton" in text else "xla", None, None


def config_of(fn: Call, operands: dict[str, Any]) -> tuple[Config, str | None]:
  """A function's config, and where it is from: "cache", "shipped" or "model".

  Of several products, the config is one for each. None where it has no product
  that `autotune` knows.
  """
  try:
    problems = [case.problem for case in autotune.find(fn, **operands)]
  except ValueError:
    return None, None
  configs = {
    autotune.describe(problem): dataclasses.asdict(resolve(problem))
    for problem in problems
  }
  best = (next(ranked(problem, xla_too=False)) for problem in problems)
  sources = {candidate.source for candidate in best}
  config = configs if len(configs) > 1 else next(iter(configs.values()))
  if "measured" in sources:
    return config, "cache"
  return config, "shipped" if "shipped" in sources else "model"


@dataclasses.dataclass
class Bench:
  """How an experiment measures: the same for every case of a run.

  Attributes:
    experiment: name in the rows.
    seed: of the inputs.
    warmup: untimed calls.
    repeats: timed calls.
    flush: evicts the L2 before each timed call; None where nothing is timed
      (no GPU), or to measure with warm caches.
    timed: whether there is a GPU to time; without one results are checked.
    rates: GB/s of this GPU by `measure_bandwidth`, for every row.
  """

  experiment: str
  seed: int = 0
  warmup: int = timing.DEFAULT_WARMUP
  repeats: int = timing.DEFAULT_REPEATS
  flush: timing.Arm | None = None
  timed: bool = True
  rates: dict[str, float] = dataclasses.field(default_factory=dict)

  def times(
    self, arms: Mapping[str, Call], operands: dict[str, Any], **how: int
  ) -> dict[str, timing.Timing]:
    """Times arms, interleaved, as this run does but for what `how` says."""
    how = {"warmup": self.warmup, "repeats": self.repeats} | how
    calls = [
      timing.Arm(name, functools.partial(fn, **operands))
      for name, fn in arms.items()
    ]
    return timing.measure(calls, flush=self.flush, **how)

  def measure(self, prepared: Prepared) -> dict[str, Any]:
    """Checks a case, times its arms, and makes its row.

    A result that is wrong is not timed, and the time of an arm that did not
    run what it claims is not kept.

    Raises:
      Exception: what kept an arm from being compiled or run, or what it ran
        instead; of another than the first only where the case may not skip it.
    """
    case = prepared.case
    operands = jax.block_until_ready(case.draw(self.seed))
    first, *others = prepared.arms
    arms = {first: self._fastest(prepared.arms[first], operands)}
    check = case.check(arms[first].fn(**operands), operands, self.seed)
    reasons, times, load = {}, {}, None
    if check.passed is not False:
      for name in others:
        try:
          arms[name] = self._checked(case, prepared.arms[name], operands)
        except Exception as error:  # pylint: disable=broad-exception-caught
          if not case.may_skip:
            raise
          reasons[name] = reason(error)  # most likely no memory
          _check_that_gpu_answers(name, error)
      if self.timed:
        with provenance.Monitor() as monitor:
          fns = {name: arm.fn for name, arm in arms.items()}
          times = self.times(fns, operands)
        load = monitor.load
        for name, why in _refuted(case, times).items():
          if not case.may_skip:
            raise NotImplementedError(f"{name}: {why}")
          reasons[name] = why
          del times[name]
    flops = case.flops(self.seed)
    mine, of_arms = times.get(first), {}
    if case.may_skip:
      fields = {name: _arm_fields(x, flops) for name, x in times.items()}
      for name in fields.keys() - {first}:
        if (config := arms[name].config) is not None:
          fields[name]["config"] = config
      of_arms = {"arms": fields, "skipped": reasons}
    else:
      for name in times.keys() - {first, case.baseline}:
        of_arms[f"{name}_ms_median"] = times[name].median
        if (config := arms[name].config) is not None:
          of_arms[f"{name}_config"] = config
    return self.row(
      check=check,
      mine=mine,
      theirs=times.get(case.baseline),
      load=load,
      config=arms[first].config,
      tflops=mine and flops / mine.median / 1e9,
      gbytes_per_s=mine and case.least_bytes(self.seed) / mine.median / 1e6,
      passed=check.passed,
      **case.fields() | self.rates | dict(prepared.facts) | of_arms,
    )

  def _fastest(
    self, candidates: Sequence[Candidate], operands: dict[str, Any]
  ) -> Candidate:
    """The candidate, compiled; of several that run, the fastest.

    Raises:
      Exception: why none runs.
    """
    if len(candidates) == 1:
      [(compiled, config)] = candidates
      return Candidate(compiled(), config)
    found, refused = {}, None
    for compiled, config in candidates:
      try:
        fn = compiled()
        jax.block_until_ready(fn(**operands))
      except Exception as error:  # pylint: disable=broad-exception-caught
        refused = refused or error
      else:
        found[str(config)] = Candidate(fn, config)
    if not found:
      raise NotImplementedError(f"no config runs: {reason(refused)}")
    fns = {name: candidate.fn for name, candidate in found.items()}
    times = self.times(fns, operands, **_CHOOSING)
    return found[min(times, key=lambda name: times[name].median)]

  def _checked(
    self, case: Case, candidates: Sequence[Candidate], operands: dict[str, Any]
  ) -> Candidate:
    """An arm after the first, once it was called.

    Raises:
      NotImplementedError: of what was chosen among several, or may be left out
        and has a config, the result is wrong.
      Exception: why it does not run.
    """
    arm = self._fastest(candidates, operands)
    results = jax.block_until_ready(arm.fn(**operands))
    if len(candidates) > 1 or (case.may_skip and arm.config is not None):
      found = case.check(results, operands, self.seed)
      if not found.passed:
        raise NotImplementedError(
          f"wrong: an error of {found.worst_ratio:.2g} times its bound"
        )
    return arm

  def row(
    self,
    *,
    check: numerics.Check | None = None,
    mine: timing.Timing | None = None,
    theirs: timing.Timing | None = None,
    load: provenance.Load | None = None,
    **fields: Any,
  ) -> dict[str, Any]:
    """A row of what was found, with the provenance of this run.

    Args:
      check: of the result; None where there is nothing to check.
      mine: the kernel's times; None if it was not timed.
      theirs: the baseline's, interleaved; None if there are none.
      load: the GPU's state meanwhile; None if nothing was timed.
      **fields: the fields of `rows.Row` that say what was measured, and
        optional ones; None leaves one of these out.
    """
    optional = {
      "wall_ms_median": mine and mine.wall_median,
      "baseline_wall_ms_median": theirs and theirs.wall_median,
    }
    for name in fields.keys() & rows.OPTIONAL_FIELDS.keys():
      optional[name] = fields.pop(name)
    row = rows.Row(
      experiment=self.experiment,
      ms_median=mine and mine.median,
      ms_p25=mine and mine.p25,
      ms_p75=mine and mine.p75,
      baseline_ms_median=theirs and theirs.median,
      ratio_to_jnp_dot=mine and theirs and theirs.median / mine.median,
      max_error=check and float(check.worst_error),
      error_bound=check and float(check.error_bound),
      repeats=mine.repeats if mine else 0,
      warmup=mine.warmup if mine else 0,
      distribution=fields.pop("distribution", inputs.DISTRIBUTION),
      seed=self.seed,
      kernel_names=_named_once(mine.kernel_names) if mine else [],
      baseline_kernel_names=list(theirs.kernel_names) if theirs else [],
      utc=provenance.utc(),
      **dataclasses.asdict(load or provenance.Load()),
      **provenance.versions(),
      **_EMPTY | fields,
    )
    return rows.as_dict(row, **optional)

  def measure_bandwidth(self) -> Iterator[dict[str, Any]]:
    """Rows of a copy and of a sum of 1 GiB; sets `rates`."""
    m, n = _BANDWIDTH_SHAPE
    x = jax.block_until_ready(inputs.normal(self.seed, 0, (m, n), "float32"))
    # Negated, for XLA copies an array as it is without a kernel to time.
    arms = {"copy": jax.jit(jnp.negative), "read": jax.jit(jnp.sum)}
    calls = {name: functools.partial(fn, x) for name, fn in arms.items()}
    times = self.times(calls, {})
    for name, passes in (("copy", 2), ("read", 1)):
      rate = passes * x.nbytes / times[name].median / 1e6
      self.rates[f"{name}_gbytes_per_s"] = rate
      fields = {"suite": "bandwidth", "kernel": name, "dtype": "float32"}
      fields |= {"m": m, "n": n, "k": 1, "gbytes_per_s": rate}
      yield self.row(mine=times[name], **fields)


def _check_that_gpu_answers(name: str, error: Exception) -> None:
  """Raises RuntimeError if an arm's error has ended all use of the GPU."""
  try:
    jax.block_until_ready(jnp.negative(1.0))
  except jax.errors.JaxRuntimeError:
    text = f"{name} leaves a GPU that runs nothing: {reason(error)}"
    raise RuntimeError(text) from error


def _refuted(case: Case, times: dict[str, timing.Timing]) -> dict[str, str]:
  """The arms that did not run what they claim, and why."""
  found = {
    name: case.claims[name].refuted(x.kernel_names, case.products)
    for name, x in times.items()
    if name in case.claims
  }
  return {name: why for name, why in found.items() if why}


def _named_once(names: Sequence[str]) -> list[str]:
  """Kernels in the order of launches; of a loop's hundreds each once."""
  return list(dict.fromkeys(names) if len(names) > _MOST_NAMES else names)


def _arm_fields(times: timing.Timing, flops: int) -> dict[str, Any]:
  """What a row says of an arm's times."""
  return {
    "ms_median": times.median,
    "ms_p25": times.p25,
    "ms_p75": times.p75,
    "tflops": flops / times.median / 1e9,
    "kernel_names": _named_once(times.kernel_names),
  }
