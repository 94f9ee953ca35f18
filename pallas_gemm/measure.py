"""The timer: which kernels calls launch, and how long they take, in turns.

CUPTI lists every kernel that ran, in order. Which kernel belongs to which call
is found by counting: each call first runs in a session of its own, which tells
what it launches; the list of the measuring session is cut by those counts, and
every piece must hold the same names. If it does not, there is no result.

CUPTI here sees kernels, not memory copies by the copy engine (a device-to-
device memcpy that XLA may emit for an argument returned as it is).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
import functools
import itertools
import statistics
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from pallas_gemm import compat, hardware

Call = Callable[[], Any]
# Of a kernel that ran: its name, and how many milliseconds it took.
Kernel = tuple[str, float]

_WARMUP, _REPEATS = 2, 15
# A flush reads this many times the capacity of the L2, so that what was there
# is gone under any replacement policy.
FLUSH_MULTIPLE = 4


def seconds(calls: Sequence[Call], *, cold: bool = True) -> list[float]:
  """Median time of each call.

  The calls take turns, so that a change of clock or temperature meets all of
  them alike. On a GPU: the time of the kernels that a call launches (host
  time where there is no CUPTI). Without one, where kernels are interpreted:
  host time of one run.

  Args:
    calls: each gives arrays, which are waited for; compiled already.
    cold: whether each finds the L2 flushed.

  Raises:
    RuntimeError: a call launched no kernel, or something else launched
      kernels in the meantime.
  """
  if not compat.targets_gpu():
    return [_host_seconds(call) for call in calls]
  flush = l2_flush(hardware.current().l2_bytes) if cold else None
  for _ in range(_WARMUP):
    for call in filter(None, (flush, *calls)):
      jax.block_until_ready(call())
  if not _has_cupti():
    logging.log_first_n(
      logging.WARNING, "no CUPTI: calls are timed by the host's clock", 1
    )
    times = host_seconds(calls, _REPEATS, flush)
    return [statistics.median(rounds) for rounds in times]
  launched = kernels(dict(enumerate(calls)), _REPEATS, flush)
  return [
    statistics.median(1e-3 * sum(ms for _, ms in found) for found in rounds)
    for rounds in launched.values()
  ]


def kernels(
  calls: Mapping[Hashable, Call],
  repeats: int,
  flush: Call | None = None,
) -> dict[Hashable, list[list[Kernel]]]:
  """The kernels of each call, round by round, in the order they ran.

  Args:
    calls: by what they are called in an error; compiled and warm.
    repeats: rounds, in each of which every call has its turn.
    flush: runs before every call, its kernels left out; see `l2_flush`. None
      leaves the caches as the call before left them.

  Raises:
    RuntimeError: a call launched no kernel, the kernels that were seen do not
      add up to the calls that were made, or this machine has no CUPTI.
  """
  before = [("flush", flush)] if flush else []
  names = {}
  for name, call in (*before, *calls.items()):
    with compat.cupti_session() as events:
      jax.block_until_ready(call())
    names[name] = [kernel for kernel, _ in events]
    if not events:
      raise RuntimeError(f"{name} launched no GPU kernel; nothing to time")
  made = []
  with compat.cupti_session() as events:
    for _ in range(repeats):
      for turn in calls.items():
        # Each is waited for: no two overlap, so their kernels can't mix.
        for name, call in (*before, turn):
          jax.block_until_ready(call())
          made.append(name)
  want = sum(len(names[name]) for name in made)
  if len(events) != want:
    raise RuntimeError(
      f"CUPTI saw {len(events)} kernels, but {len(made)} calls should have"
      f" launched {want}; the times can't be attributed: something else may"
      " use the GPU from this process"
    )
  launched = {name: [] for name in names}
  rest = iter(events)
  for name in made:
    found = list(itertools.islice(rest, len(names[name])))
    # Compared as a multiset: XLA may run independent kernels of one call in
    # either order.
    if Counter(kernel for kernel, _ in found) != Counter(names[name]):
      raise RuntimeError(
        f"a call of {name} launched {[kernel for kernel, _ in found]}, but"
        f" {names[name]} when counted; the times can't be attributed"
      )
    launched[name].append(found)
  return {name: launched[name] for name in calls}


def host_seconds(
  calls: Sequence[Call], repeats: int, flush: Call | None = None
) -> list[list[float]]:
  """Host time of each call, round by round: until its result is ready."""
  times: list[list[float]] = [[] for _ in calls]
  for _ in range(repeats):
    for call, found in zip(calls, times):
      if flush is not None:
        jax.block_until_ready(flush())
      found.append(_host_seconds(call))
  return times


def l2_flush(l2_bytes: int) -> Call:
  """A call that evicts the L2 by reading a buffer that is larger.

  It reads: a flush that writes would leave dirty lines, and the kernel timed
  next would pay for writing them back.

  Args:
    l2_bytes: capacity of the L2.

  Raises:
    ValueError: the capacity is not positive.
  """
  if l2_bytes <= 0:
    raise ValueError(f"l2_bytes must be positive, got {l2_bytes}")
  words = FLUSH_MULTIPLE * l2_bytes // 4
  # Random bits: a constant buffer may be stored compressed.
  bits = jax.jit(
    lambda: jax.random.bits(jax.random.key(0), (words,), jnp.uint32)
  )()
  return functools.partial(jax.jit(jnp.max), jax.block_until_ready(bits))


def _host_seconds(call: Call) -> float:
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def _has_cupti() -> bool:
  try:
    with compat.cupti_session():
      return True
  except RuntimeError:
    return False
