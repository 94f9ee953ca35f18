"""Cases that are ready to run: their arms compiled together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import os
from typing import Any

import jax

from experiments.harness.case import Call, Candidate, Case, Config, reason
from pallas_gemm.tuning import autotune, cache, resolve

# Compiling leaves Python for most of its time.
_COMPILERS = min(16, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A case that is ready to run.

  Attributes:
    case: what it computes.
    arms: by name, the first one first, candidates whose `fn` waits until the
      function of the case's operands is compiled, and gives it.
    skipped: why an arm that the case has is not there.
    facts: optional fields of the row.
    error: why the case can't run; None if it can.
  """

  case: Case
  arms: Mapping[str, Sequence[Candidate]] = dataclasses.field(
    default_factory=dict
  )
  skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  error: Exception | None = None


def prepare(
  cases: Sequence[Case], implementation: str | None = None
) -> Iterator[Prepared]:
  """Compiles the arms of each case; yields when all of them are.

  XLA picks its kernels by timing them, so whatever it compiles is compiled
  while nothing else runs on the GPU. A Pallas kernel is not run to be
  compiled: those are compiled meanwhile, in threads.

  Args:
    cases: what to compile.
    implementation: passed to the ops.
  """
  programs: dict[Any, Prepared] = {}
  with futures.ThreadPoolExecutor(_COMPILERS) as pool:
    for case in cases:
      if case.program not in programs:
        programs[case.program] = _prepare(case, implementation, pool)
  for case in cases:
    yield dataclasses.replace(programs[case.program], case=case)


def uncompiled(case: Case, **facts: Any) -> Prepared:
  """A case whose arms are compiled by their first calls.

  Raises:
    Exception: why an arm can't run.
  """
  arms = {
    name: [
      Candidate(functools.partial(_same, jax.jit(fn)), config)
      for fn, config in arm()
    ]
    for name, arm in case.arms().items()
  }
  return Prepared(case, arms, facts=facts)


def _same(x: Call) -> Call:
  return x


def _prepare(
  case: Case, implementation: str | None, pool: futures.Executor
) -> Prepared:
  operands = case.operands()
  arms, skipped, facts = {}, {}, {}
  for name, arm in case.arms(implementation).items():
    try:
      candidates = arm()
      lowered = _lowered(candidates, operands)
      if not arms:
        [(text, _)] = lowered
        ran, config, origin = _choice(
          candidates[0].fn, operands, text.as_text(), implementation
        )
        lowered = [(text, config)]
        facts = {"implementation": ran, "config_origin": origin}
    except Exception as error:  # pylint: disable=broad-exception-caught
      if not arms or not case.may_skip:
        return Prepared(case, error=error)  # it must not cost the others
      skipped[name] = reason(error)
    else:
      arms[name] = [
        Candidate(_compiling(text, pool), config) for text, config in lowered
      ]
  return Prepared(case, arms, skipped, facts)


def _lowered(
  candidates: Sequence[Candidate], operands: dict[str, Any]
) -> list[tuple[Any, Config]]:
  """Of the candidates that take the operands: what to compile, the config.

  Raises:
    Exception: why none does.
  """
  found, refused = [], None
  for fn, config in candidates:
    try:
      found.append((jax.jit(fn).lower(**operands), config))
    except Exception as error:  # pylint: disable=broad-exception-caught
      refused = refused or error
  if found:
    return found
  if len(candidates) > 1:
    refused = NotImplementedError(f"no config fits: {reason(refused)}")
  raise refused


def _compiling(lowered: Any, pool: futures.Executor) -> Callable[[], Call]:
  """Waits for what is compiled in a thread."""
  text = lowered.as_text()
  future = pool.submit(lowered.compile)
  if "mosaic_gpu" not in text or "dot_general" in text:
    future.exception()  # XLA's: nothing else may run until it is done
  return future.result


def _choice(
  fn: Call, operands: dict[str, Any], text: str, implementation: str | None
) -> tuple[str, Config, str | None]:
  """What a lowered function runs: implementation, config, and its origin."""
  if "mosaic_gpu" in text or implementation == "sm90":
    return "sm90", *config_of(fn, operands)
  return "triton" if "triton" in text else "xla", None, None


def config_of(fn: Call, operands: dict[str, Any]) -> tuple[Config, str | None]:
  """A function's config, and where it is from: "cache" or "model".

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
  measured = any(cache.lookup(problem) is not None for problem in problems)
  config = configs if len(configs) > 1 else next(iter(configs.values()))
  return config, "cache" if measured else "model"
