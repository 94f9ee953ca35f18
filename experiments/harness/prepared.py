"""Cases that are ready to run: their arms compiled together."""

from collections.abc import (
  Callable,
  Collection,
  Iterator,
  Mapping,
  Sequence,
)
from concurrent import futures
import dataclasses
import os
from typing import Any

import jax

from experiments.harness.case import Call, Candidate, Case, Config
from pallas_gemm.tuning import autotune, ranked, resolve

# Compiling leaves Python for most of its time.
_COMPILERS = min(16, os.cpu_count() or 1)


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
) -> Iterator[Prepared]:
  """Compiles the arms of each case; yields when all of them are.

  XLA picks its kernels by timing them, so whatever it compiles is compiled
  while nothing else runs on the GPU. A Pallas kernel is not run to be
  compiled: those are compiled meanwhile, in threads.

  Args:
    cases: what to compile.
    implementation: passed to the ops.
    peers: the arms to compile beside the first; None for all.
  """
  programs: dict[Any, Prepared] = {}
  with futures.ThreadPoolExecutor(_COMPILERS) as pool:
    for case in cases:
      if case.program not in programs:
        programs[case.program] = _prepare(case, implementation, peers, pool)
  for case in cases:
    yield dataclasses.replace(programs[case.program], case=case)


def uncompiled(case: Case) -> Prepared:
  """A case whose arms are compiled when they are first called.

  Raises:
    NotImplementedError: why an arm can't run.
  """
  arms = {
    name: [Candidate(_giving(_jitted(fn)), config) for fn, config in arm()]
    for name, arm in case.arms().items()
  }
  return Prepared(case, arms, {})


def _prepare(
  case: Case,
  implementation: str | None,
  peers: Collection[str] | None,
  pool: futures.Executor,
) -> Prepared:
  operands = case.operands()
  arms: dict[str, list[Candidate]] = {}
  facts = {}
  for name, arm in case.arms(implementation).items():
    arms[name] = []
    try:
      if peers is not None and len(arms) > 1 and name not in peers:
        raise NotImplementedError("left out by --beside")
      candidates = arm()
    except NotImplementedError as error:
      candidates = [Candidate(_raising(error))]
    for fn, config in candidates:
      text, compiled = _compiling(fn, operands, pool)
      if text and len(arms) == 1:
        ran, config, origin = _choice(fn, operands, text, implementation)
        facts = {"implementation": ran, "config_origin": origin}
      arms[name].append(Candidate(compiled, config))
  return Prepared(case, arms, facts)


def _compiling(
  fn: Call, operands: dict[str, Any], pool: futures.Executor
) -> tuple[str, Callable[[], Call]]:
  """A function as XLA gets it, "" if it can't be; and what waits for it."""
  try:
    lowered = _jitted(fn).lower(**operands)
  except Exception as error:  # pylint: disable=broad-exception-caught
    return "", _raising(error)  # it must not cost the others
  text = lowered.as_text()
  future = pool.submit(lowered.compile)
  if not runs_kernel(text) or "dot_general" in text:
    future.exception()  # XLA's: nothing else may run until it is done
  return text, future.result


def runs_kernel(text: str) -> bool:
  """Whether a function that is lowered runs one of the Hopper kernels."""
  return "mosaic_gpu" in text


def _jitted(fn: Call) -> Call:
  """A function under jit; one that is already keeps its compiler options."""
  return fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)


def _giving(fn: Call) -> Callable[[], Call]:
  return lambda: fn


def _raising(error: Exception) -> Call:
  def fn(**_):
    raise error

  return fn


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
