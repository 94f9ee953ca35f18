"""What the programs about the ops share: what ran, times, rows, bandwidth."""

from collections.abc import Callable
import dataclasses
import functools
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import bench, inputs, provenance, rows, timing
from pallas_gemm import numerics
from pallas_gemm.tuning import autotune, cache, resolve

Call = Callable[..., Any]

OURS = "pallas_gemm"
# Compiling leaves Python for most of its time.
COMPILERS = min(16, os.cpu_count() or 1)
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
NO_LOAD = provenance.Load()
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


def choice(
  fn: Call, operands: dict[str, Any], lowered: Any, implementation: str | None
) -> Choice:
  """Implementation and config that a lowered function has."""
  text = lowered.as_text()
  if "mosaic_gpu" in text or implementation == "sm90":
    return Choice("sm90", *config_of(fn, operands))
  return Choice("triton" if "triton" in text else "xla")


def config_of(
  fn: Call, operands: dict[str, Any]
) -> tuple[dict[str, Any] | None, str | None]:
  """The config of a function's products, and where it comes from.

  None where it has no product that `autotune` knows.
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


@dataclasses.dataclass
class CaseBench:
  """How a run measures its cases.

  Attributes:
    bench: times arms and makes rows.
    implementation: passed to the ops.
    rates: GB/s of this GPU by `measure_bandwidth`, for every row.
  """

  bench: bench.Bench
  implementation: str | None = None
  rates: dict[str, float] = dataclasses.field(default_factory=dict)

  def row(
    self,
    *,
    check: numerics.Check | None = None,
    mine: timing.Timing | None = None,
    theirs: timing.Timing | None = None,
    load: provenance.Load = NO_LOAD,
    **fields: Any,
  ) -> dict[str, Any]:
    """A row of this program, optional fields among the others."""
    optional = {k: v for k, v in fields.items() if k in rows.OPTIONAL_FIELDS}
    fields = {k: v for k, v in fields.items() if k not in optional}
    return self.bench.row(
      check, mine, theirs, load, optional=optional, **_EMPTY | fields
    )

  def times(
    self, arms: dict[str, Call], operands: dict[str, Any]
  ) -> tuple[dict[str, timing.Timing], provenance.Load]:
    """Times functions of the same operands side by side."""
    with provenance.Monitor() as monitor:
      times = self.bench.times(calls(arms, operands))
    return times, monitor.load

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


def calls(arms: dict[str, Call], operands: dict[str, Any]) -> list[timing.Arm]:
  """Functions of the same operands, to be timed."""
  return [
    timing.Arm(name, functools.partial(fn, **operands))
    for name, fn in arms.items()
  ]


def host_ms(fn: Call, operands: dict[str, Any]) -> float:
  """Host time of a call, in ms: the median of a few."""
  found = []
  for _ in range(_HOST_CALLS):
    start = time.perf_counter()
    jax.block_until_ready(fn(**operands))
    found.append((time.perf_counter() - start) * 1e3)
  return statistics.median(found)
