"""One contestant against its baseline: checked, then timed, then a row."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax

from experiments.harness import contestants, inputs, provenance, rows, timing
from pallas_gemm import numerics
from pallas_gemm.ladder import contract

# Products of more multiply-adds than this are checked on SAMPLE rows times
# SAMPLE columns, spread so that every output tile is met; float64 on the host
# would take minutes otherwise.
CHECKED_IN_FULL = 1024**3
SAMPLE = 512
# Enough to choose among configs; no row is made of it.
_CHOOSING = {"warmup": 2, "repeats": 10}


@dataclasses.dataclass
class Bench:
  """How an experiment measures: the same for every kernel of a run.

  Attributes:
    experiment: name in the rows.
    seed: of the inputs.
    warmup: untimed calls.
    repeats: timed calls.
    flush: evicts the L2 before each timed call; None where nothing is timed
      (no GPU), or to measure with warm caches.
    timed: whether there is a GPU to time; without one results are checked.
    measure: `timing.measure`; replaced in tests.
    tick: called after each round of arms.
  """

  experiment: str
  seed: int = 0
  warmup: int = timing.DEFAULT_WARMUP
  repeats: int = timing.DEFAULT_REPEATS
  flush: timing.Arm | None = None
  timed: bool = True
  measure: Callable[..., dict[str, timing.Timing]] = timing.measure
  tick: Callable[[], None] = lambda: None

  def times(self, arms: list[timing.Arm]) -> dict[str, timing.Timing]:
    """Times arms side by side as this run does."""
    return self.measure(
      arms,
      warmup=self.warmup,
      repeats=self.repeats,
      flush=self.flush,
      tick=self.tick,
    )

  def chooses(self, arms: list[timing.Arm]) -> dict[str, timing.Timing]:
    """Times arms briefly, to pick one."""
    return self.measure(arms, flush=self.flush, **_CHOOSING)

  def compare(
    self,
    problem: contract.Problem,
    operands: contestants.Operands,
    contestant: contestants.Contestant,
    baseline: contestants.Contestant,
    number: int | None = None,
    optional: Mapping[str, Any] | None = None,
  ) -> dict[str, Any]:
    """Checks a contestant, times it against the baseline, and makes its row.

    A result that fails its check is not timed. The baseline may be the
    contestant itself: then the ratio shows the noise of this measurement.

    Args:
      problem: what is computed.
      operands: a, b and c (None if beta is zero).
      contestant: what the row is of.
      baseline: jnp.dot for this problem.
      number: the rung's number, for the row.
      optional: see `row`.

    Returns:
      The row, as a dict; see `rows.Row`.
    """
    out = jax.block_until_ready(contestant.fn(*operands))
    full = problem.m * problem.n * problem.k <= CHECKED_IN_FULL
    check = numerics.check(
      out,
      *operands,
      alpha=problem.alpha,
      beta=problem.beta,
      seed=self.seed,
      sample=None if full else SAMPLE,
      tf32=contestant.tf32,
    )
    del out
    passed = bool(check.passed) if contestant.judged else None
    mine = theirs = None
    load = provenance.Load()
    if self.timed and passed is not False:
      arms = [
        timing.Arm(contestant.kernel, contestant.fn, operands),
        timing.Arm(f"{baseline.kernel} (baseline)", baseline.fn, operands),
      ]
      with provenance.Monitor() as monitor:
        timings = self.times(arms)
      mine, theirs = (timings[arm.name] for arm in arms)
      load = monitor.load
    return self.row(
      check,
      mine,
      theirs,
      load,
      optional=optional,
      kernel=contestant.kernel,
      number=number,
      m=problem.m,
      n=problem.n,
      k=problem.k,
      dtype=problem.dtype,
      alpha=problem.alpha,
      beta=problem.beta,
      config=contestant.config,
      tflops=mine and contestants.tflops(problem, mine.median),
      gbytes_per_s=mine and contestants.gbytes_per_s(problem, mine.median),
      passed=passed,
    )

  def row(
    self,
    check: numerics.Check | None,
    mine: timing.Timing | None,
    theirs: timing.Timing | None,
    load: provenance.Load,
    *,
    optional: Mapping[str, Any] | None = None,
    **fields: Any,
  ) -> dict[str, Any]:
    """A row of what was found, with the provenance of this run.

    Args:
      check: of the result; None where there is nothing to check.
      mine: the kernel's times; None if it was not timed.
      theirs: the baseline's, interleaved; None if there are none.
      load: the GPU's state meanwhile.
      optional: fields of `rows.OPTIONAL_FIELDS`; None leaves one out.
      **fields: the fields of `rows.Row` that say what was measured.
    """
    row = rows.Row(
      experiment=self.experiment,
      ms_median=mine and mine.median,
      ms_p25=mine and mine.p25,
      ms_p75=mine and mine.p75,
      baseline_ms_median=theirs and theirs.median,
      ratio_to_jnp_dot=mine and theirs and theirs.median / mine.median,
      max_error=check and worst_error(check),
      error_bound=check and float(check.error_bound),
      repeats=mine.repeats if mine else 0,
      warmup=mine.warmup if mine else 0,
      distribution=inputs.DISTRIBUTION,
      seed=self.seed,
      sm_clock_mhz=load.sm_clock_mhz,
      power_w=load.power_w,
      temperature_c=load.temperature_c,
      kernel_names=list(mine.kernel_names) if mine else [],
      baseline_kernel_names=list(theirs.kernel_names) if theirs else [],
      utc=provenance.utc(),
      **provenance.versions(),
      **fields,
    )
    wall = {
      "wall_ms_median": mine and mine.wall_median,
      "baseline_wall_ms_median": theirs and theirs.wall_median,
    }
    return rows.as_dict(row, **wall | dict(optional or {}))


def worst_error(check: numerics.Check) -> float:
  """|result - reference| where it is the largest part of its bound.

  The bound differs from element to element, so an error says something beside
  its own bound alone: `check` passed exactly if this is <= check.error_bound.
  """
  if math.isfinite(check.worst_ratio):
    return check.worst_ratio * check.error_bound
  return float(check.max_error)
