"""GPU kernel time of several functions, interleaved.

The functions under comparison ("arms") are interleaved, A B A B, in one CUPTI
session, so that a change of clock or temperature meets all of them alike.
Before each call a flush evicts the L2 cache; the flush is kept out of the
sums. A call's time is the sum over the kernels it launched: copies, pads and
layout changes count. See `pallas_gemm.measure`, which tells them apart.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from pallas_gemm import measure as measure_lib

# Calls shorter than this, or of more kernels, are also timed by the host's
# clock: there, what it costs to launch is what a user waits for.
WALL_BELOW_MS, WALL_KERNELS = 0.020, 24
DEFAULT_WARMUP = 5
DEFAULT_REPEATS = 25
MIN_REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Arm:
  """One function under comparison.

  Attributes:
    name: what the result is called; unique within a measurement.
    fn: jitted function; its result is waited for and dropped.
    args: its arguments, on the device.
  """

  name: str
  fn: Callable[..., Any]
  args: tuple[Any, ...] = ()

  def call(self) -> None:
    """Runs the function and waits until its kernels have ended."""
    jax.block_until_ready(self.fn(*self.args))


@dataclasses.dataclass(frozen=True)
class Timing:
  """What was measured of one arm.

  Attributes:
    ms: GPU kernel time of each timed call, in milliseconds.
    kernel_names: the kernels of one call, in launch order.
    warmup: untimed calls before the timed ones.
    wall_ms: host time of each call, from dispatch until its result is ready;
      empty if no arm was under `WALL_BELOW_MS` or over `WALL_KERNELS`.
  """

  ms: tuple[float, ...]
  kernel_names: tuple[str, ...]
  warmup: int
  wall_ms: tuple[float, ...] = ()

  @property
  def repeats(self) -> int:
    """How many calls were timed."""
    return len(self.ms)

  @property
  def median(self) -> float:
    """Median kernel time, ms."""
    return float(np.median(self.ms))

  @property
  def p25(self) -> float:
    """Lower quartile of the kernel time, ms."""
    return float(np.percentile(self.ms, 25))

  @property
  def p75(self) -> float:
    """Upper quartile of the kernel time, ms."""
    return float(np.percentile(self.ms, 75))

  @property
  def wall_median(self) -> float | None:
    """Median host time, ms; None if it was not taken."""
    return float(np.median(self.wall_ms)) if self.wall_ms else None


def l2_flush(l2_bytes: int) -> Arm:
  """An arm that evicts the L2; see `measure.l2_flush`."""
  return Arm("flush", measure_lib.l2_flush(l2_bytes))


def measure(
  arms: Sequence[Arm],
  *,
  warmup: int = DEFAULT_WARMUP,
  repeats: int = DEFAULT_REPEATS,
  flush: Arm | None = None,
) -> dict[str, Timing]:
  """Times the arms, interleaved.

  Args:
    arms: what to compare; each is called warmup + 1 + repeats times, or more.
    warmup: untimed calls of each arm (compilation, autotuning, clocks).
    repeats: timed calls of each arm.
    flush: called before every timed call, its time kept out; see `l2_flush`.
      None leaves the caches as the call before left them.

  Returns:
    A Timing for each arm, by name.

  Raises:
    ValueError: no arms, two of one name, warmup < 0, or repeats < 1.
    RuntimeError: as from `measure.kernels`.

  Example:
    timings = measure([Arm("mine", f, (a, b)), Arm("theirs", g, (a, b))],
                      flush=l2_flush(gpu.l2_bytes))
    ratio = timings["theirs"].median / timings["mine"].median
  """
  names = [arm.name for arm in arms]
  if not names or len({*names}) < len(names):
    raise ValueError(f"arms must have different names, got {names}")
  if warmup < 0 or repeats < 1:
    raise ValueError(
      f"want warmup >= 0 and repeats >= 1, got {warmup} and {repeats}"
    )
  for _ in range(max(warmup, 1)):
    for arm in filter(None, (flush, *arms)):
      arm.call()
  calls = {arm.name: arm.call for arm in arms}
  flush_call = flush and flush.call
  launched = measure_lib.kernels(calls, repeats, flush_call)
  found = [
    Timing(
      ms=tuple(sum(ms for _, ms in kernels) for kernels in rounds),
      kernel_names=tuple(name for name, _ in rounds[0]),
      warmup=warmup,
    )
    for rounds in launched.values()
  ]
  if any(
    x.median < WALL_BELOW_MS or len(x.kernel_names) > WALL_KERNELS
    for x in found
  ):
    wall = measure_lib.host_seconds(list(calls.values()), repeats, flush_call)
    found = [
      dataclasses.replace(timing, wall_ms=tuple(1e3 * s for s in seconds))
      for timing, seconds in zip(found, wall)
    ]
  return dict(zip(calls, found))
