"""GPU kernel time of several functions, measured side by side.

One mechanism for every experiment. The functions under comparison ("arms")
run in turn, A B A B, inside one CUPTI session, so that a change of clock or
temperature meets all of them alike. Before each call a flush evicts the L2
cache; the flush is kept out of the sums. CUPTI reports every kernel that ran,
in order, and a call's time is the sum over the kernels it launched: copies,
pads and layout changes count.

Which kernel belongs to which call is found by counting. Each arm is called
once in a session of its own, which tells how many kernels it launches and
what they are called; the long list of the measuring session is then cut by
those counts, and every piece must hold the same names. If it does not, there
is no result: RuntimeError.

CUPTI here sees kernels, not memory copies by the copy engine (a device-to-
device memcpy that XLA may emit for an argument returned as it is).
"""

from collections import Counter
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat

# A flush reads this many times the capacity of the L2, so that what was there
# is gone under any replacement policy.
FLUSH_MULTIPLE = 4
# Calls shorter than this are also timed by the host's clock: there, launch
# cost is what a user waits for.
WALL_BELOW_MS = 0.020
DEFAULT_WARMUP = 5
DEFAULT_REPEATS = 25
MIN_REPEATS = 20

Session = Callable[[], contextlib.AbstractContextManager[list]]


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
      empty if no arm was under `WALL_BELOW_MS`.
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
  """An arm that evicts the L2 by reading a buffer that is larger.

  It reads: a flush that writes would leave dirty lines, and the kernel timed
  next would pay for writing them back.

  Args:
    l2_bytes: capacity of the L2.

  Raises:
    ValueError: the capacity is not positive.
  """
  if l2_bytes <= 0:
    raise ValueError(f"l2_bytes must be positive, got {l2_bytes}")
  count = FLUSH_MULTIPLE * l2_bytes // 4
  # Random bits: a constant buffer may be stored compressed.
  buffer = jax.jit(
    lambda: jax.random.bits(jax.random.key(0), (count,), jnp.uint32)
  )()
  return Arm("flush", jax.jit(jnp.max), (jax.block_until_ready(buffer),))


def measure(
  arms: Sequence[Arm],
  *,
  warmup: int = DEFAULT_WARMUP,
  repeats: int = DEFAULT_REPEATS,
  flush: Arm | None = None,
  session: Session = compat.cupti_session,
  tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
  """Times the arms, interleaved.

  Args:
    arms: what to compare; each is called warmup + 1 + repeats times, or more.
    warmup: untimed calls of each arm (compilation, autotuning, clocks).
    repeats: timed calls of each arm.
    flush: called before every timed call, its time kept out; see `l2_flush`.
      None leaves the caches as the call before left them.
    session: context that yields a list, filled at exit with (kernel name, ms)
      of every kernel launched in it; replaced in tests.
    tick: called after each round of arms, for a progress bar.

  Returns:
    A Timing for each arm, by name.

  Raises:
    ValueError: no arms, two of one name, warmup < 0, or repeats < 1.
    RuntimeError: an arm launched no kernel, or the kernels that were seen do
      not add up to the calls that were made; or this machine has no CUPTI.

  Example:
    timings = measure([Arm("mine", f, (a, b)), Arm("theirs", g, (a, b))],
                      flush=l2_flush(gpu.l2_bytes))
    ratio = timings["theirs"].median / timings["mine"].median
  """
  _check(arms, warmup, repeats)
  everyone = list(arms) if flush is None else [flush, *arms]
  for _ in range(max(warmup, 1)):
    for arm in everyone:
      arm.call()
  names = {arm.name: _kernels_of(arm, session) for arm in everyone}

  calls: list[str] = []
  with session() as events:
    for _ in range(repeats):
      for arm in arms:
        # `call` waits: no two calls overlap, so their kernels can't mix.
        if flush is not None:
          flush.call()
          calls.append(flush.name)
        arm.call()
        calls.append(arm.name)
      tick()
  ms = _attribute(events, calls, names)

  wall: dict[str, list[float]] = {arm.name: [] for arm in arms}
  if min(float(np.median(ms[arm.name])) for arm in arms) < WALL_BELOW_MS:
    for _ in range(repeats):
      for arm in arms:
        if flush is not None:
          flush.call()
        start = time.perf_counter()
        arm.call()
        wall[arm.name].append((time.perf_counter() - start) * 1e3)
  return {
    arm.name: Timing(
      ms=tuple(ms[arm.name]),
      kernel_names=names[arm.name],
      warmup=warmup,
      wall_ms=tuple(wall[arm.name]),
    )
    for arm in arms
  }


def _check(arms: Sequence[Arm], warmup: int, repeats: int) -> None:
  if not arms:
    raise ValueError("arms must hold at least one arm, got none")
  for name, count in Counter(arm.name for arm in arms).items():
    if count > 1:
      raise ValueError(f"arms must have different names, got {name!r} twice")
  if warmup < 0:
    raise ValueError(f"warmup must be >= 0, got {warmup}")
  if repeats < 1:
    raise ValueError(f"repeats must be >= 1, got {repeats}")


def _kernels_of(arm: Arm, session: Session) -> tuple[str, ...]:
  """Names of the kernels that one call launches."""
  with session() as events:
    arm.call()
  if not events:
    raise RuntimeError(f"{arm.name} launched no GPU kernel; nothing to time")
  return tuple(name for name, _ in events)


def _attribute(
  events: Sequence[tuple[str, float]],
  calls: Sequence[str],
  names: dict[str, tuple[str, ...]],
) -> dict[str, list[float]]:
  """Cuts the list of kernels into calls; the sum of ms of each call."""
  want = sum(len(names[call]) for call in calls)
  if len(events) != want:
    raise RuntimeError(
      f"CUPTI saw {len(events)} kernels, but {len(calls)} calls should have"
      f" launched {want}; the times can't be attributed"
    )
  ms: dict[str, list[float]] = {call: [] for call in names}
  start = 0
  for call in calls:
    piece = events[start : start + len(names[call])]
    start += len(piece)
    # Compared as a multiset: XLA may run independent kernels of one call in
    # either order.
    if Counter(name for name, _ in piece) != Counter(names[call]):
      raise RuntimeError(
        f"a call of {call} launched {[name for name, _ in piece]}, but"
        f" {list(names[call])} when counted; the times can't be attributed"
      )
    ms[call].append(sum(t for _, t in piece))
  return ms
