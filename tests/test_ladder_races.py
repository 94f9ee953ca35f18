"""Tier A: every rung is free of races, and these tests can tell.

Each call that synchronises, in the source of each rung that has any, is broken
in turn, and that must come to light. Where it can't, the bug is listed with the
reason; a kernel that gains a call gains a test.
"""

import threading

import pytest

from pallas_gemm import hardware, numerics
from pallas_gemm.ladder import BLACKWELL, LADDER, contract, with_variants
from tests.support import interpret, mutations, problems

# What rungs 9-12 share is broken in rung 11, which comes to all of it.
_SHARED = "pallas_gemm.ladder.tensor_core_common"
BUGS = [
  (rung, bug)
  for rung in LADDER + BLACKWELL
  for bug in mutations.bugs_of(rung.module)
] + [(LADDER[10], bug) for bug in mutations.bugs_of(_SHARED)]

# Bugs that nothing can show here, and why.
_DRAIN = (
  "the last releases are waited for so that no barrier is left with a"
  " completion unseen; nothing is loaded after them"
)
_RELEASED = "the accumulator is read next, which waits; the slot stays unused"
_WRITTEN = "every subtile was waited for when it had been read"
UNSEEN = {
  ("k08_double_buffering", "plgpu.barrier_wait", 2, "left out"): _DRAIN,
  ("k10_warp_specialized", "plgpu.barrier_wait", 1, "left out"): _DRAIN,
  ("k11_persistent", "plgpu.barrier_wait", 1, "left out"): _DRAIN,
  ("k12_cluster_multicast", "plgpu.barrier_wait", 1, "left out"): (
    "a block that leaves before its peers have arrived at its barriers is a"
    " fault on the chip alone"
  ),
  # Of rung 10, and of 10a.
  ("k10_warp_specialized", "plgpu.wgmma_wait", 1, "left out"): _RELEASED,
  ("k10_warp_specialized", "plgpu.wgmma_wait", 1, "too weak"): _RELEASED,
  ("k10_warp_specialized", "plgpu.wgmma_wait", 3, "left out"): _RELEASED,
  ("k10_warp_specialized", "plgpu.wgmma_wait", 3, "too weak"): _RELEASED,
  ("k10_warp_specialized", "plgpu.wait_smem_to_gmem", 1, "left out"): _WRITTEN,
  ("k10_warp_specialized", "plgpu.wait_smem_to_gmem", 1, "too weak"): _WRITTEN,
}


def _key(bug: mutations.Bug) -> tuple[str, str, int, str]:
  return (bug.module.rsplit(".", 1)[-1], *bug.key)


def _problem(rung: contract.Rung) -> contract.Gemm:
  """Several tiles, more slabs of K than stages, edges on each side, a C."""
  m, n, k = 200, 136, 264
  if rung.config_type is contract.SimtConfig:
    config = problems.small_configs(rung, contract.Gemm(1, 1, 1))[0]
    m, n = config.block_m + 1, config.block_n - 1
    k = (config.stages + 1) * max(config.block_k, 1) + 1
  return contract.Gemm(m, n, k, rung.dtypes[0], beta=1.0)


def _run(rung, problem, config) -> tuple[numerics.Check, interpret.Report]:
  a, b, c = problems.operands(problem.m, problem.n, problem.k, problem.dtype)
  out, report = interpret.run(
    lambda: rung.gemm(a, b, c, beta=problem.beta, config=config),
    detect_races=True,
  )
  return numerics.check(out, a, b, c, beta=problem.beta), report


@pytest.fixture(autouse=True)
def few_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  monkeypatch.setattr(hardware, "sm_count", lambda: 2)


def test_a_clock_is_joined_as_one_step(monkeypatch):
  """Of an arrival while a thread joins a barrier's clock: both halves, or none.

  A thread with one of them would race with what it has waited for.
  """
  with interpret.interpreted():
    new = interpret.memory.GpuClockBundle
    barrier, waiter, arrival = new(1), new(1), new(1)
    arrival.inc(0)
    arriving = threading.Thread(target=barrier.update, args=(arrival,))
    join = waiter.generic_clock.update

    def join_and_give_way(other):
      join(other)
      arriving.start()
      arriving.join(timeout=0.2)

    monkeypatch.setattr(waiter.generic_clock, "update", join_and_give_way)
    waiter.update(barrier)
    arriving.join()
  assert waiter.async_smem_clock.clock == waiter.generic_clock.clock
  assert barrier.generic_clock.clock == 1


@pytest.mark.parametrize(
  "rung", with_variants() + BLACKWELL, ids=lambda r: r.name
)
def test_free_of_races(rung):
  problem = _problem(rung)
  for config in problems.small_configs(rung, problem):
    check, report = _run(rung, problem, config)
    assert check.passed, (config, check)
    assert report.kernels == 1
    assert not report.races_found, config


def test_there_are_calls_to_break():
  assert {rung.number for rung, _ in BUGS} >= {3, 8, 9, 10, 11, 12}
  assert {bug.call for _, bug in BUGS} == set(mutations.CALLS)
  assert set(UNSEEN) <= {_key(bug) for _, bug in BUGS}, (
    "no longer in the source"
  )


def _parameter(rung: contract.Rung, bug: mutations.Bug):
  reason = UNSEEN.get(_key(bug))
  marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
  return pytest.param(rung, bug, id=f"{_key(bug)[0]}-{bug}", marks=marks)


@pytest.mark.parametrize(
  ("rung", "bug"), [_parameter(rung, bug) for rung, bug in BUGS]
)
def test_a_planted_bug_is_caught(rung, bug, monkeypatch):
  planted = mutations.Planted(bug, monkeypatch)
  for each in (rung, *rung.variants):  # the bug may be a variant's
    problem = _problem(each)
    config = problems.small_configs(each, problem)[0]

    def run(each=each, problem=problem, config=config):
      check, report = _run(each, problem, config)
      return check.passed, report.races_found

    found = mutations.comes_to_light(run, mutations.attempts(bug))
    if planted.reached:
      break
  assert found
  assert planted.reached, "the kernel never came to the planted bug"
