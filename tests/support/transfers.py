"""Races of what TMA writes, in the interpreter of `interpret.py`."""

import dataclasses
from typing import Any

from jax._src.pallas.mosaic.interpret import race_detection_state
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
import numpy as np


def check_into_smem(task, tma_thread_id, shared):
  """Races of what TMA writes to shared memory.

  Earlier writes must be visible to the asynchronous proxy; earlier reads need
  only have happened.
  """
  if not shared.detect_races:
    return
  task.clock.inc(tma_thread_id)
  races = gpu_callbacks.get_races()
  key = task.dst_allocation_key
  after_reads = task.clock.generic_clock.copy()
  after_writes = task.clock.async_smem_clock.copy()
  with races.lock:
    earlier = [(entry, after_reads) for entry in races.reads[key]]
    earlier += [(entry, after_writes) for entry in races.writes[key]]
    _record_write(races, task, after_writes, earlier)
  races._check_ref_union(task.thread, after_writes, key, True, task.source_info)


def check_into_gmem(task, tma_thread_id, shared):
  """Races of what TMA writes to global memory, where its bits differ."""
  if not shared.detect_races:
    return
  task.clock.inc(tma_thread_id)
  task.write_clock = task.clock.copy()
  races = gpu_callbacks.get_races()
  now = task.clock.async_smem_clock.copy()
  data, _, _ = shared.get_buffer_content(
    task.src_allocation_key,
    task.src_access,
    task.thread,
    increment_clock=False,
    logging_info=task.logging_info,
  )
  where = tuple(
    x if isinstance(x, slice) else slice(x, x + 1)
    for x in task.dst_access.range
  )
  store = _Store(now, where, np.asarray(data))
  with races.lock:
    key = task.dst_allocation_key
    earlier = [*races.reads[key], *races.writes[key]]
    others = [(x, now) for x in earlier if not store.agrees(shared.stored, x)]
    _record_write(races, task, now, others)
    shared.stored[id(now)] = store


@dataclasses.dataclass(frozen=True)
class _Store:
  """What TMA writes to global memory: its clock, where, and the values.

  A write is known by its clock, which is kept here lest another takes its id.
  """

  clock: Any
  where: tuple[slice, ...]
  data: np.ndarray

  def agrees(self, stores: "dict[int, _Store]", entry) -> bool:
    """Whether an earlier access is such a store of the same bits."""
    other = stores.get(id(entry[1]))
    if other is None:
      return False
    both = [
      slice(max(a.start, b.start), min(a.stop, b.stop))
      for a, b in zip(self.where, other.where)
    ]
    if any(x.start >= x.stop for x in both):
      return False
    return np.array_equal(self._bits(both), other._bits(both))

  def _bits(self, window: list[slice]) -> np.ndarray:
    data = self.data.reshape([x.stop - x.start for x in self.where])
    cut = [
      slice(x.start - own.start, x.stop - own.start)
      for x, own in zip(window, self.where)
    ]
    return np.ascontiguousarray(data[tuple(cut)]).view(np.uint8)


def _record_write(races, task, now, earlier) -> None:
  """Reports which earlier accesses the write of a transfer races with."""
  touches = task.dst_access.range
  for (_, clock, touched, frame), ordered_by in earlier:
    if not clock.ordered(ordered_by) and race_detection_state._ranges_overlap(
      touches, touched
    ):
      races.races_found = True
      print(f"RACE DETECTED: TMA writes {touches} over {frame}")
  races.writes[task.dst_allocation_key].append(
    (task.thread, now, touches, str(task.source_info))
  )
