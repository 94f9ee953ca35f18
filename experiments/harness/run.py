"""A case that is ready to run: checked, timed in turns, and made a row."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import inputs, provenance, rows, timing
from experiments.harness.case import Candidate, Case, reason
from experiments.harness.prepared import Prepared
from pallas_gemm import numerics

# Enough to choose among configs; no row is made of it.
_CHOOSING = {"warmup": 2, "repeats": 10}
# Fields of a row that say nothing where they do not apply.
_EMPTY = {"alpha": 1.0, "beta": 0.0} | dict.fromkeys(
  ("number", "config", "tflops", "gbytes_per_s", "passed")
)
# Large enough that no cache holds a part of it worth mentioning.
_BANDWIDTH_SHAPE = (16384, 16384)


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
    host_calls: calls timed by the host's clock where there is no GPU.
    rates: GB/s of this GPU by `measure_bandwidth`, for every row.
  """

  experiment: str
  seed: int = 0
  warmup: int = timing.DEFAULT_WARMUP
  repeats: int = timing.DEFAULT_REPEATS
  flush: timing.Arm | None = None
  timed: bool = True
  host_calls: int = 3
  rates: dict[str, float] = dataclasses.field(default_factory=dict)

  def times(
    self, arms: Sequence[timing.Arm], **how: int
  ) -> dict[str, timing.Timing]:
    """Times arms side by side as this run does, but for what `how` says."""
    how = {"warmup": self.warmup, "repeats": self.repeats} | how
    return timing.measure(arms, flush=self.flush, **how)

  def measure(self, prepared: Prepared) -> dict[str, Any]:
    """Checks a case, times its arms side by side, and makes its row.

    A result that is wrong is not timed, and the time of an arm that did not
    run what it claims is not kept.

    Raises:
      Exception: what kept an arm from being compiled or run, or what it ran
        instead; of one beside the first only where the case may not skip it.
    """
    case = prepared.case
    operands = jax.block_until_ready(case.draw(self.seed))
    first, *others = prepared.arms
    arms = {first: self._fastest(prepared.arms[first], operands)}
    check = case.check(arms[first].fn(**operands), operands, self.seed)
    skipped, times, load, wall = {}, {}, None, {}
    if check.passed is not False:
      for name in others:
        try:
          arms[name] = self._beside(case, prepared.arms[name], operands)
        except Exception as error:  # pylint: disable=broad-exception-caught
          if not case.may_skip:
            raise
          skipped[name] = reason(error)  # most likely no memory
      if self.timed:
        with provenance.Monitor() as monitor:
          times = self.times(_timed(arms, operands))
        load = monitor.load
        for name, why in _refuted(case, times).items():
          if not case.may_skip:
            raise NotImplementedError(f"{name}: {why}")
          skipped[name] = why
          del times[name]
      else:
        wall = self._wall(arms, case.baseline, operands)
    flops = case.flops(self.seed)
    mine, beside = times.get(first), {}
    if case.may_skip:
      said = {name: _said(x, flops) for name, x in times.items()}
      for name in said.keys() - {first}:
        if (config := arms[name].config) is not None:
          said[name]["config"] = config
      beside = {"arms": said, "skipped": skipped}
    else:
      for name in times.keys() - {first, case.baseline}:
        beside[f"{name}_ms_median"] = times[name].median
        beside[f"{name}_config"] = arms[name].config
    return self.row(
      check=check,
      mine=mine,
      theirs=times.get(case.baseline),
      load=load,
      config=arms[first].config,
      tflops=mine and flops / mine.median / 1e9,
      gbytes_per_s=mine and case.least_bytes(self.seed) / mine.median / 1e6,
      passed=check.passed,
      **case.fields() | wall | self.rates | dict(prepared.facts) | beside,
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
    times = self.times(_timed(found, operands), **_CHOOSING)
    return found[min(times, key=lambda name: times[name].median)]

  def _beside(
    self, case: Case, candidates: Sequence[Candidate], operands: dict[str, Any]
  ) -> Candidate:
    """An arm beside the first, after a call of it.

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

  def _wall(
    self, arms: dict[str, Candidate], baseline: str, operands: dict[str, Any]
  ) -> dict[str, float]:
    """Host times of the first arm and its baseline, in ms: medians."""
    found = {}
    for name, prefix in ((next(iter(arms)), ""), (baseline, "baseline_")):
      calls = []
      for _ in range(self.host_calls if name in arms else 0):
        start = time.perf_counter()
        jax.block_until_ready(arms[name].fn(**operands))
        calls.append((time.perf_counter() - start) * 1e3)
      if calls:
        found[f"{prefix}wall_ms_median"] = statistics.median(calls)
    return found

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
      distribution=inputs.DISTRIBUTION,
      seed=self.seed,
      kernel_names=list(mine.kernel_names) if mine else [],
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
    copy = timing.Arm("copy", jax.jit(jnp.negative), (x,))
    read = timing.Arm("read", jax.jit(jnp.sum), (x,))
    times = self.times([copy, read])
    for name, passes in (("copy", 2), ("read", 1)):
      rate = passes * x.nbytes / times[name].median / 1e6
      self.rates[f"{name}_gbytes_per_s"] = rate
      fields = {"suite": "bandwidth", "kernel": name, "dtype": "float32"}
      fields |= {"m": m, "n": n, "k": 1, "gbytes_per_s": rate}
      yield self.row(mine=times[name], **fields)


def _refuted(case: Case, times: dict[str, timing.Timing]) -> dict[str, str]:
  """The arms that did not run what they claim, and why."""
  found = {
    name: case.claims[name].refuted(x.kernel_names, case.products)
    for name, x in times.items()
    if name in case.claims
  }
  return {name: why for name, why in found.items() if why}


def _said(times: timing.Timing, flops: int) -> dict[str, Any]:
  """What a row says of an arm's times."""
  return {
    "ms_median": times.median,
    "ms_p25": times.p25,
    "ms_p75": times.p75,
    "tflops": flops / times.median / 1e9,
    "kernel_names": list(times.kernel_names),
  }


def _timed(
  arms: dict[str, Candidate], operands: dict[str, Any]
) -> list[timing.Arm]:
  return [
    timing.Arm(name, functools.partial(arm.fn, **operands))
    for name, arm in arms.items()
  ]
