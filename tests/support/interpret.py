"""Runs kernels in Pallas' GPU interpreter, with its blind spots patched.

The interpreter executes a Mosaic GPU kernel on the CPU, a thread of Python for
each warpgroup, and can keep a vector clock for each to report races. As it
comes it does not see the reads of `wgmma`: the instruction runs on an engine
of its own and goes on reading shared memory until `wgmma_wait`, so a slot that
is released or overwritten before that is a race on the chip and none in the
interpreter. The patches here, which hold only inside `interpreted()`,

* give each wgmma a clock of its own that its thread joins when it waits,
* let TMA overwrite what threads have *read*, once a barrier orders the two:
  a value that is read is in a register before its thread arrives, and the
  fence between proxies is for writes (CUTLASS's pipelines, which load
  operands from shared memory and release the stage without a fence, rest on
  the same),
* let TMA stores put the same bits over each other in any order (the grouped
  kernel computes some rows twice): which came last shows nowhere,
* join two clocks as one step: who has waited for a barrier joins its clock
  without a lock, and an arrival at its next phase that falls between the two
  halves of a clock leaves a waiter with races that are none,
* take an A operand that lives in registers,
* take `predicate=` of `copy_smem_to_gmem`,
* let JAX 0.11 accept, as hardware and JAX 0.12 do, a barrier whose last
  completion a thread leaves unobserved.

`arguments_in_numpy()` has nothing to do with what is computed: it takes away
what most of the interpreter's time goes to.

Everything that depends on private JAX is in this file and in `transfers.py`; it
is for tests alone.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import faulthandler
import sys
import threading
import types
from typing import Any
from unittest import mock

import jax
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import (
  gpu_callbacks,
  interpret_pallas_call,
  jaxpr_interpret,
)
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

from tests.support import transfers

# Clocks of transfers in flight that the interpreter can tell apart. Two
# transfers that share one hide each other's races.
_TRANSFERS = 1024


@dataclasses.dataclass
class Report:
  """What the interpreter saw; filled when `interpreted()` ends.

  Attributes:
    races_found: whether two unordered accesses touched the same memory.
    kernels: kernels that were run.
  """

  races_found: bool = False
  kernels: int = 0


@contextlib.contextmanager
def interpreted(
  *, detect_races: bool = False, limit_s: float = 120.0
) -> Iterator[Report]:
  """Context in which every kernel runs in the patched GPU interpreter.

  Block on all results before the context ends. A kernel that hangs (a missing
  arrival: no signal reaches it) ends the process with a traceback of every
  thread after `limit_s` seconds.

  Args:
    detect_races: keep vector clocks and compare every access; slower.
    limit_s: seconds until the process is ended.

  Example:
    >>> from tests.support.interpret import interpreted
    >>> with interpreted(detect_races=True) as report:
    ...   pass
    >>> report.races_found
    False
  """
  report = Report()
  options = {}
  if "on_race" in {
    f.name for f in dataclasses.fields(plgpu.InterpretGPUParams)
  }:
    options["on_race"] = "warn"  # Raising is all that JAX 0.11 can't do.
  params = plgpu.InterpretGPUParams(
    detect_races=detect_races,
    num_tma_threads_per_device=_TRANSFERS,
    **options,
  )
  # A trace holds the interpreter's functions that it was made with.
  jax.clear_caches()
  interpret_pallas_call.reset_gpu_interpret_mode_state()
  faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
  try:
    with _patches(report), plgpu.force_gpu_interpret_mode(params):
      yield report
      report.races_found |= _races_found()
  finally:
    faulthandler.cancel_dump_traceback_later()
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    jax.clear_caches()


@contextlib.contextmanager
def arguments_in_numpy() -> Iterator[None]:
  """Context in which callbacks get their arguments as NumPy arrays.

  JAX puts each on a device first, and the interpreter's callbacks take them
  back: more than half of the time of a small kernel without tensor cores
  (rung 3 at 129 x 257 x 65: 2.5 -> 0.8 s).
  """

  def copied(args, *_):
    # XLA takes the memory back when the callback has returned.
    return jax.tree.map(np.array, args)

  to_int = memory._to_int

  def to_int_from_numpy(x):
    return x.item() if isinstance(x, np.ndarray) else to_int(x)

  api = types.SimpleNamespace(**vars(callback.api) | {"device_put": copied})
  with (
    mock.patch.object(callback, "api", api),
    mock.patch.object(memory, "_to_int", to_int_from_numpy),
  ):
    yield


def run(
  f: Callable[..., Any],
  *args,
  detect_races: bool = False,
  limit_s: float = 120.0,
) -> tuple[np.ndarray, Report]:
  """`f(*args)` in the interpreter: the result on the host, and the report."""
  with interpreted(detect_races=detect_races, limit_s=limit_s) as report:
    value = np.asarray(jax.block_until_ready(f(*args)))
  return value, report


def _races_found() -> bool:
  races = gpu_callbacks._races
  return races is not None and races.races_found


# The patches. Each takes the place of a function of the interpreter that has
# the same arguments in every supported JAX.

_initialize = gpu_callbacks._initialize_shared_memory
_deref = gpu_callbacks.wgmma_accumulator_deref
_copy_smem_to_gmem = gpu_callbacks.copy_smem_to_gmem
_reset_per_cluster = memory.GPUSharedMemory.reset_per_cluster_state
_deallocate = memory.Barrier.deallocate
_update = memory.GpuClockBundle.update
_joining = threading.Lock()
_wait_smem_to_gmem = (
  jaxpr_interpret.JaxprInterpreter._interpret_wait_smem_to_gmem_p
)
_primitives = jaxpr_interpret.gpu_primitives


def _reset_per_cluster_state(shared):
  """Also forgets the wgmmas in flight (clocks of each thread), and stores."""
  shared.wgmmas_in_flight = collections.defaultdict(collections.deque)
  shared.stored = getattr(shared, "stored", {})
  _reset_per_cluster(shared)


def _wait_for_wgmmas(shared, thread, pending: int):
  """The thread has seen all but its last `pending` wgmmas come to their end."""
  with shared.lock:
    in_flight = shared.wgmmas_in_flight[thread]
    if len(in_flight) > pending and shared.detect_races:
      shared.incr_clock(thread, take_lock=False)
    while len(in_flight) > pending:
      clock = in_flight.popleft()
      if shared.detect_races:
        shared.clocks[thread].update(clock)


@gpu_callbacks.fail_on_exception
def _wgmma(
  *,
  token,
  mesh_location,
  thread,
  acc_allocation_key_as_array,
  acc_transforms,
  a_allocation_key_as_array,
  a_transforms,
  b_allocation_key_as_array,
  b_transforms,
  source_info=None,
):
  """acc += a @ b, whose operands are read by an asynchronous engine."""
  shared = gpu_callbacks._get_shared_memory()
  where = memory.GPULoggingInfo(mesh_location, thread, source_info)
  clock = None
  if shared.detect_races:
    clock = shared.incr_clock(thread)
    clock.inc(shared.get_next_tma_thread_id())

  def locate(key_array, transforms):
    key = memory.HostAllocationKey.from_array(key_array)
    transforms = gpu_callbacks._remove_noop_transforms(transforms)
    return key, shared.access(key, jax.tree.map(int, transforms))

  def content(key, access):
    value, _, _ = shared.get_buffer_content(
      key, access, thread, increment_clock=False, logging_info=where
    )
    return value

  def operand(key_array, transforms):
    array = np.asarray(key_array)
    if array.ndim == 2:
      return array  # In registers: its value, no key of an allocation.
    key, access = locate(key_array, transforms)
    if clock is not None:
      gpu_callbacks.get_races().check_read(
        thread,
        clock.async_smem_clock.copy(),
        key,
        access,
        source_info=source_info,
      )
    return content(key, access)

  a = operand(a_allocation_key_as_array, a_transforms)
  b = operand(b_allocation_key_as_array, b_transforms)
  key, access = locate(acc_allocation_key_as_array, acc_transforms)
  acc = content(key, access)
  # Floats in float64, where sums of one slab are exact or nearly so. In float32
  # BLAS adds in an order of its machine's and of where in a tile a row lies.
  wide = np.float64 if acc.dtype == np.float32 else acc.dtype
  with np.errstate(over="ignore", invalid="ignore"):
    product = np.matmul(a.astype(wide), b.astype(wide)).astype(acc.dtype)
  shared.store_buffer_content(
    key,
    access,
    acc + product,
    thread,
    increment_clock=False,
    logging_info=where,
  )
  with shared.lock:
    shared.wgmmas_in_flight[thread].append(clock)
  return token


def _wgmma_accumulator_deref(*, thread, wait_n, **kwargs):
  if wait_n is not None:
    _wait_for_wgmmas(gpu_callbacks._get_shared_memory(), thread, wait_n)
  return _deref(thread=thread, wait_n=wait_n, **kwargs)


@gpu_callbacks.fail_on_exception
def _wgmma_wait(*, token, thread, n):
  _wait_for_wgmmas(gpu_callbacks._get_shared_memory(), thread, n)
  return token


def _update_as_one(clock, other):
  """Joins both halves of `other`; no join of another thread comes between."""
  with _joining:
    _update(clock, other)


def _predicated_copy_smem_to_gmem(*, token, predicate, **kwargs):
  if predicate is not None and not bool(predicate):
    return token
  return _copy_smem_to_gmem(token=token, predicate=None, **kwargs)


def _lenient_deallocate(barrier):
  with barrier.cv:
    if barrier.ref_count == 1:
      for thread in barrier.last_observed_phase_by_thread:
        barrier.last_observed_phase_by_thread[thread] = barrier.phase
  _deallocate(barrier)


def _interpret_waits(interpreter, eqn, token, get_invals):
  """The rule of both waits; see `_Primitives`."""
  if eqn.primitive is not _primitives.wgmma_wait_p:
    # It asserts that its primitive is the one it knows.
    with mock.patch.object(jaxpr_interpret, "gpu_primitives", _primitives):
      return _wait_smem_to_gmem(interpreter, eqn, token, get_invals)
  callback = jaxpr_interpret.callback
  token = callback.io_callback(
    _wgmma_wait,
    gpu_callbacks.TOKEN_SHAPE_DTYPE,
    token=token,
    thread=interpreter.thread,
    n=eqn.params["n"],
  )
  return token, []


class _OneOf:
  """Compares equal to each of some primitives."""

  def __init__(self, *primitives):
    self._primitives = primitives

  def __eq__(self, other):
    return any(other is p for p in self._primitives)

  __hash__ = None


class _Primitives:
  """The interpreter's view of the primitives.

  It matches an equation's primitive against the attributes of this object in
  turn, and skips `wgmma_wait_p`. Here that name matches nothing, and the rule
  of `wait_smem_to_gmem_p`, which may have effects, gets both.
  """

  wgmma_wait_p = object()
  wait_smem_to_gmem_p = _OneOf(
    _primitives.wait_smem_to_gmem_p, _primitives.wgmma_wait_p
  )

  def __getattr__(self, name):
    return getattr(_primitives, name)


@contextlib.contextmanager
def _patches(report: Report) -> Iterator[None]:
  def initialize(**kwargs):
    # Each kernel starts a record of its own.
    if gpu_callbacks._shared_memory is None:
      report.races_found |= _races_found()
      report.kernels += 1
    return _initialize(**kwargs)

  interpreter = jaxpr_interpret.JaxprInterpreter
  patches = [
    (gpu_callbacks, "_initialize_shared_memory", initialize),
    (gpu_callbacks, "wgmma", _wgmma),
    (gpu_callbacks, "wgmma_accumulator_deref", _wgmma_accumulator_deref),
    (gpu_callbacks, "copy_smem_to_gmem", _predicated_copy_smem_to_gmem),
    (
      gpu_callbacks.AsyncCopyGmemToSmemTask,
      "post_read",
      transfers.check_into_smem,
    ),
    (
      gpu_callbacks.AsyncCopySmemToGmemTask,
      "post_read",
      transfers.check_into_gmem,
    ),
    (memory.GpuClockBundle, "update", _update_as_one),
    (jaxpr_interpret, "gpu_primitives", _Primitives()),
    (interpreter, "_interpret_wait_smem_to_gmem_p", _interpret_waits),
    (
      memory.GPUSharedMemory,
      "reset_per_cluster_state",
      _reset_per_cluster_state,
    ),
  ]
  if not hasattr(memory, "BarrierReallocationChecker"):  # JAX 0.11
    patches.append((memory.Barrier, "deallocate", _lenient_deallocate))
  with contextlib.ExitStack() as stack:
    for owner, name, replacement in patches:
      stack.enter_context(mock.patch.object(owner, name, replacement))
    yield
