"""A case of grouped products: arms compiled, checked, timed, made a row."""

from collections.abc import Iterator, Sequence
from concurrent import futures
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import (
  case_bench,
  contestants,
  ragged_cases,
  ragged_check,
  timing,
)
from experiments.harness.case_bench import OURS, Call, Choice
from pallas_gemm import compat, hardware

LAX, DENSE, TWO = "lax.ragged_dot", "jnp.dot", "two ragged_dot"
EXAMPLE = "jax_ragged_dot_mgpu"
# XLA multiplies all rows with the weights of each group, and masks. A call
# that is predicted to take longer, at peak rate, or more memory is left out.
LONGEST_S = 0.1
LARGEST_GIB = 16
# block_m, block_n, max_concurrent_steps, grid_block_n; block_k is 64.
_EXAMPLE_CONFIGS = (
  (128, 128, 4, 1),
  (128, 128, 4, 8),
  (128, 128, 5, 4),
  (64, 256, 4, 4),
  (64, 128, 6, 8),
)


@dataclasses.dataclass
class Prepared:
  """A case whose arms are compiled.

  Attributes:
    case: what it computes.
    arms: functions of the case's operands by name, `OURS` first, as futures:
      compiling goes on while others are compiled.
    examples: (config, future) of JAX's example kernel, to choose from.
    skipped: why an arm that the case could have is left out.
    choice: what `OURS` runs.
    error: why there are no arms; None if there are.
  """

  case: ragged_cases.Case
  arms: dict[str, futures.Future] = dataclasses.field(default_factory=dict)
  examples: list[tuple[dict[str, int], futures.Future]] = dataclasses.field(
    default_factory=list
  )
  skipped: dict[str, str] = dataclasses.field(default_factory=dict)
  choice: Choice | None = None
  error: Exception | None = None


def prepare(
  cases: Sequence[ragged_cases.Case], implementation: str | None = None
) -> Iterator[Prepared]:
  """Compiles the arms of each case; yields when all of them are.

  Cases that differ in the group sizes alone share theirs: sizes are data. As
  with the dense ops, XLA compiles while nothing runs, Pallas in threads.

  Args:
    cases: what to compile.
    implementation: passed to the ops.
  """
  programs: dict[ragged_cases.Case, Prepared] = {}
  with futures.ThreadPoolExecutor(case_bench.COMPILERS) as pool:
    for case in cases:
      if case.program not in programs:
        programs[case.program] = _prepare(case, implementation, pool)
  for case in cases:
    yield dataclasses.replace(programs[case.program], case=case)


def _prepare(case, implementation, pool) -> Prepared:
  operands = case.operands()
  mine = ragged_cases.ours(case, implementation)
  try:
    lowered = jax.jit(mine).lower(**operands)
    choice = case_bench.choice(mine, operands, lowered, implementation)
  except Exception as error:  # pylint: disable=broad-exception-caught
    return Prepared(case, error=error)  # it must not cost the others
  found = Prepared(case, choice=choice)
  by_xla = choice.implementation == "xla" or case.is_layer

  def add(name: str, lowered, alone: bool = True) -> None:
    found.arms[name] = pool.submit(lowered.compile)
    if alone:
      found.arms[name].exception()  # waits

  add(OURS, lowered, by_xla)
  others = {LAX: ragged_cases.lax(case), DENSE: ragged_cases.dense(case)}
  if case.pass_ == "gated":
    others[TWO] = ragged_cases.two_calls(case, implementation)
  if reason := too_large_for_lax(case):
    found.skipped[LAX] = reason
    del others[LAX]
  for name, fn in others.items():
    try:
      lowered = jax.jit(fn).lower(**operands)
    except Exception as error:  # pylint: disable=broad-exception-caught
      found.skipped[name] = contestants.reason(error)
    else:
      add(name, lowered, by_xla or name != TWO)
  if case.pass_ == "forward":
    try:
      found.examples = _example_arms(case, operands, pool)
    except NotImplementedError as error:
      found.skipped[EXAMPLE] = str(error)
  return found


def too_large_for_lax(case: ragged_cases.Case) -> str | None:
  """Why `jax.lax.ragged_dot` is not tried on a case; None if it is."""
  seconds = case.groups * case.flops(0) / hardware.current().bf16_flops
  if seconds > LONGEST_S:
    return (
      f"XLA multiplies all rows with each of {case.groups} groups: predicted"
      f" {seconds:.2g} s a call at peak rate, the limit is {LONGEST_S:g} s"
    )
  itemsize = jnp.dtype(case.dtype).itemsize
  gib = case.groups * case.m * max(case.k, case.n) * itemsize / 2**30
  if gib > LARGEST_GIB:
    return (
      f"XLA copies all rows for each of {case.groups} groups: predicted"
      f" {gib:.0f} GiB, the limit is {LARGEST_GIB} GiB"
    )
  return None


def _example_arms(
  case, operands, pool
) -> list[tuple[dict[str, int], futures.Future]]:
  """The grouped matmul that JAX ships as an example, in a few configs.

  Raises:
    NotImplementedError: it does not take this case, or is not there.
  """
  if not compat.targets_gpu():
    raise NotImplementedError("it needs a Hopper GPU")
  try:
    # pylint: disable=g-import-not-at-top
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
  except ImportError as error:
    raise NotImplementedError(f"this JAX does not have it: {error}") from None
  found, refused = [], ""
  names = ("block_m", "block_n", "max_concurrent_steps", "grid_block_n")
  for values in _EXAMPLE_CONFIGS:
    config = dict(zip(names, values)) | {"block_k": 64}
    if case.n % (config["block_n"] * config["grid_block_n"]):
      refused = refused or "N must be a multiple of block_n * grid_block_n"
      continue
    dot = functools.partial(ragged_dot_mgpu.ragged_dot, **config)
    fn = _example(dot)
    try:
      lowered = jax.jit(fn).lower(**operands)
    except (ValueError, NotImplementedError) as error:
      refused = contestants.first_line(error)
      continue
    found.append((config, pool.submit(lowered.compile)))
  if not found:
    raise NotImplementedError(f"no config fits: {refused}")
  return found


def _example(dot: Call) -> Call:
  def call(lhs, rhs, group_sizes, **others):
    del others
    return dot(lhs, rhs, group_sizes=group_sizes)

  return call


@dataclasses.dataclass
class RaggedBench(case_bench.CaseBench):
  """How a run measures its cases.

  Attributes:
    even: ms of each program on groups of one size, as measured so far.
  """

  even: dict[ragged_cases.Case, float] = dataclasses.field(default_factory=dict)

  def measure(self, prepared: Prepared) -> dict[str, Any]:
    """Checks a case, times its arms side by side, and makes its row.

    Raises:
      Exception: what kept an arm from being compiled or run.
    """
    if prepared.error is not None:
      raise prepared.error
    case, seed = prepared.case, self.bench.seed
    operands = case.draw(seed)
    mine = prepared.arms[OURS].result()
    check = ragged_check.check(case, mine(**operands), operands, seed)
    skipped = dict(prepared.skipped)
    times, load, configs, host = {}, case_bench.NO_LOAD, {}, {}
    if check.passed:
      arms = {OURS: mine} | self._others(prepared, operands, skipped)
      if self.bench.timed:
        if prepared.examples:
          try:
            arms[EXAMPLE], configs[EXAMPLE] = self._example(prepared, operands)
          except Exception as error:  # pylint: disable=broad-exception-caught
            skipped[EXAMPLE] = contestants.reason(error)
        times, load = self.times(arms, operands)
      else:
        host["wall_ms_median"] = case_bench.host_ms(mine, operands)
    return self._row(prepared, check, times, load, configs, skipped, host)

  def _others(self, prepared, operands, skipped) -> dict[str, Call]:
    """The arms beside ours that run; why one does not goes to `skipped`."""
    found = {}
    for name, future in prepared.arms.items():
      if name == OURS:
        continue
      try:
        found[name] = self._warm(future, operands)
      except Exception as error:  # pylint: disable=broad-exception-caught
        skipped[name] = contestants.reason(error)  # most likely no memory
    return found

  def _warm(self, future, operands) -> Call:
    """A compiled arm that has run once."""
    fn = future.result()
    jax.block_until_ready(fn(**operands))
    return fn

  def _row(
    self, prepared, check, times, load, configs, skipped, host
  ) -> dict[str, Any]:
    case, seed = prepared.case, self.bench.seed
    mine = times.get(OURS)
    flops = case.flops(seed)
    if mine and case.sizes == "even":
      self.even[case.program] = mine.median
    even = self.even.get(case.program)
    return self.row(
      check=check,
      mine=mine,
      theirs=times.get(LAX),
      load=load,
      config=prepared.choice.config,
      tflops=mine and flops / mine.median / 1e9,
      gbytes_per_s=mine and case.least_bytes(seed) / mine.median / 1e6,
      passed=check.passed,
      implementation=prepared.choice.implementation,
      config_origin=prepared.choice.origin,
      ratio_to_even=mine and even and even / mine.median,
      arms={
        name: _arm(timing_, flops, configs.get(name))
        for name, timing_ in times.items()
      },
      skipped=skipped,
      **case.fields() | host | self.rates,
    )

  def _example(self, prepared, operands) -> tuple[Call, dict[str, int]]:
    """JAX's example kernel with the fastest of its configs, and that config.

    Raises:
      NotImplementedError: it can't be compiled, or its result is wrong.
    """
    fns, refused = {}, None
    for config, future in prepared.examples:
      refused = future.exception() or refused
      if future.exception() is None:
        fns[str(config)] = config, future.result()
    if not fns:
      raise NotImplementedError(
        f"no config compiles: {contestants.first_line(refused)}"
      )
    candidates = {name: fn for name, (_, fn) in fns.items()}
    times = self.bench.chooses(case_bench.calls(candidates, operands))
    config, fn = fns[min(times, key=lambda name: times[name].median)]
    found = ragged_check.check(
      prepared.case, fn(**operands), operands, self.bench.seed
    )
    if not found.passed:
      raise NotImplementedError(
        f"wrong: an error of {found.worst_ratio:.2g} times its bound"
      )
    return fn, config


def _arm(
  found: timing.Timing, flops: int, config: dict[str, int] | None
) -> dict[str, Any]:
  """What a row says of an arm."""
  fields = {
    "ms_median": found.median,
    "ms_p25": found.p25,
    "ms_p75": found.p75,
    "tflops": flops / found.median / 1e9,
    "kernel_names": list(found.kernel_names),
  }
  return fields if config is None else fields | {"config": config}
