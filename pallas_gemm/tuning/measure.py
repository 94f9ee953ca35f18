"""How long do calls take, side by side?"""

from collections.abc import Callable, Sequence
import itertools
import statistics
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from pallas_gemm import compat, hardware

Call = Callable[[], Any]

_WARMUP, _REPEATS = 2, 15
# A flush reads this many times the capacity of the L2, so that what was there
# is gone under any replacement policy.
_FLUSH_MULTIPLE = 4


def seconds(calls: Sequence[Call]) -> list[float]:
  """Median time of each call.

  The calls take turns, so that a change of clock or temperature meets all of
  them alike. On a GPU: the time of the kernels that a call launches (host
  time where there is no CUPTI), with a cold L2. Without one, where kernels
  are interpreted: host time of one run.

  Args:
    calls: each gives arrays, which are waited for; compiled already.

  Raises:
    RuntimeError: something else launched kernels in the meantime.
  """
  if not compat.targets_gpu():
    return [_host_seconds(call) for call in calls]
  flush = _l2_flush()
  for _ in range(_WARMUP):
    for call in (flush, *calls):
      jax.block_until_ready(call())
  if _has_cupti():
    rounds = _kernel_seconds(calls, flush)
  else:
    logging.log_first_n(
      logging.WARNING, "no CUPTI: calls are timed by the host's clock", 1
    )
    rounds = []
    for _ in range(_REPEATS):
      rounds.append([])
      for call in calls:
        jax.block_until_ready(flush())
        rounds[-1].append(_host_seconds(call))
  return [statistics.median(times) for times in zip(*rounds)]


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


def _kernel_seconds(calls: Sequence[Call], flush: Call) -> list[list[float]]:
  """Kernel time of each call, round by round.

  CUPTI lists the kernels that ran, in order. Each call first runs in a
  session of its own, which counts its kernels; the list of the measuring
  session is cut by those counts.
  """
  counts = [len(_events((call,))) for call in (flush, *calls)]
  one_round = [c for call in calls for c in (flush, call)]
  events = _events(one_round * _REPEATS)
  want = _REPEATS * sum(counts[0] + count for count in counts[1:])
  if len(events) != want:
    raise RuntimeError(
      f"CUPTI saw {len(events)} kernels, the calls launch {want}: something"
      " else uses the GPU from this process, so their times are not known"
    )
  times = iter([ms * 1e-3 for _, ms in events])
  rounds = []
  for _ in range(_REPEATS):
    rounds.append([])
    for count in counts[1:]:
      list(itertools.islice(times, counts[0]))  # the flush
      rounds[-1].append(sum(itertools.islice(times, count)))
  return rounds


def _events(calls: Sequence[Call]) -> list[tuple[str, float]]:
  """(name, ms) of every kernel that the calls launch, one after the other."""
  with compat.cupti_session() as events:
    for call in calls:
      jax.block_until_ready(call())
  return events


def _l2_flush() -> Call:
  """A call that evicts the L2 by reading; writes would leave dirty lines."""
  words = _FLUSH_MULTIPLE * hardware.current().l2_bytes // 4
  # Random bits: a constant buffer may be stored compressed.
  bits = jax.jit(
    lambda: jax.random.bits(jax.random.key(0), (words,), jnp.uint32)
  )()
  largest = jax.jit(jnp.max)
  return lambda: largest(bits)
