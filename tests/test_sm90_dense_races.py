"""Tier A: the Hopper kernels are free of races, and these tests can tell.

Each call that synchronises is broken in turn, and so are the places where the
order of two calls, or which buffer they are about, is what keeps them apart.
All of it must come to light. Where it can't, the bug is listed with the reason;
a kernel that gains a call gains a test.
"""

import dataclasses
import sys

import jax
import pytest

from pallas_gemm.kernels.sm90 import (
  block,
  by_threads,
  consumer,
  epilogue,
  mainloops,
  producer,
  reduction,
  splitter,
  stores,
)
from tests.support import (
  cases,
  eight_bit_cases,
  group_cases,
  interpret,
  mutations,
  plane_cases,
  problems,
)

MODULES = (
  block, producer, consumer, mainloops, stores, epilogue, reduction, by_threads,
  splitter,
)  # fmt: skip
BUGS = [bug for module in MODULES for bug in mutations.bugs_of(module.__name__)]

# Bugs that nothing can show here, and why.
_PACE = "what is stored are zeros that nothing overwrites: it sets the pace"
UNSEEN = {
  (producer.__name__, "plgpu.barrier_wait", 4, "left out"): (
    "the last releases are waited for so that no block leaves a cluster while"
    " its peers may still arrive; a fault on the chip alone"
  ),
  **{
    (producer.__name__, "plgpu.wait_smem_to_gmem", i, kind): reason
    for i, reason in enumerate((_PACE, mutations.OUTLIVED))
    for kind in ("left out", "too weak")
  },
}

RACES = cases.RACES | group_cases.RACES
RACES |= eight_bit_cases.RACES | plane_cases.RACES


@pytest.fixture(autouse=True)
def few_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  problems.assume_sms(monkeypatch, 2)


def _run(case: cases.Case) -> tuple[bool, bool]:
  """Whether numbers are right, and whether races were found."""
  run, check = case.prepare()
  with interpret.interpreted(detect_races=True) as report:
    outs = jax.block_until_ready(run())
  # Of groups, tables are made first.
  assert report.kernels == (2 if case.problem.groups else 1)
  try:
    check(outs)
  except AssertionError:
    return False, report.races_found
  return True, report.races_found


# One of each kernel: dense, of groups of rows, of groups along K, in planes.
SMOKE = ("c_in_place", "groups", "slabs", "x6")


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=[pytest.mark.smoke] * (x in SMOKE)) for x in RACES],
)
def test_free_of_races(name, monkeypatch):
  case = RACES[name]
  problems.assume_sms(monkeypatch, max(2, case.config.blocks))
  assert _run(case) == (True, False)


def _parameter(bug: mutations.Bug):
  reason = UNSEEN.get((bug.module, *bug.key))
  marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
  name = f"{bug.module.rpartition('.')[2]}-{bug}"
  return pytest.param(bug, id=name, marks=marks)


def test_there_are_calls_to_break():
  missing = set(mutations.CALLS) - {bug.call for bug in BUGS}
  # The kernel waits for one warpgroup at a time, and has no tensor memory.
  assert missing == {"ptx.wait_for_block", "plgpu.wait_load_tmem"}
  there = {(bug.module, *bug.key) for bug in BUGS}
  assert set(UNSEEN) <= there, "no longer in the source"


# Between them they come to every call, most calls by the first.
EXAMPLES = (
  "c_of_another_dtype", "plain", "row_wise", "groups", "c_in_place",
  "a_group_of_zeros", "weights_by_threads", "groups_in_pairs", "cluster_k",
  "threads", "promoted", "x6", "moved_groups", "pairs",
)  # fmt: skip
# Calls that few examples come to, and one that does.
COMES_TO = {
  (producer, "plgpu.commit_smem", 0): "a_group_of_zeros",
  (producer, "plgpu.wait_smem_to_gmem", 0): "a_group_of_zeros",
  (producer, "plgpu.wait_smem_to_gmem", 1): "a_group_of_zeros",
  (producer, "plgpu.barrier_wait", 1): "groups_in_pairs",
  (producer, "plgpu.barrier_wait", 2): "groups_in_pairs",
  (producer, "plgpu.barrier_wait", 3): "weights_by_threads",
  (by_threads, "plgpu.barrier_arrive", 0): "threads",
  (by_threads, "plgpu.commit_smem", 0): "threads",
  (splitter, "plgpu.barrier_wait", 0): "moved_groups",
  (reduction, "plgpu.barrier_arrive", 0): "cluster_k",
  (reduction, "plgpu.barrier_wait", 0): "cluster_k",
  (mainloops, "plgpu.wgmma_wait", 2): "promoted",
  (mainloops, "plgpu.wgmma_wait", 3): "pairs",
  (mainloops, "plgpu.wgmma_wait", 4): "x6",
  (stores, "plgpu.wait_smem_to_gmem", 0): "c_in_place",
  (stores, "plgpu.wait_smem_to_gmem", 3): "groups",
  (stores, "plgpu.commit_smem", 1): "groups",
}


@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS])
def test_a_planted_bug_is_caught(bug, monkeypatch):
  planted = mutations.Planted(bug, monkeypatch)
  site = sys.modules[bug.module], *bug.key[:2]
  first = COMES_TO.get(site, EXAMPLES[0])
  for example in sorted(EXAMPLES, key=lambda x: x != first):
    case = RACES[example]
    problems.assume_sms(monkeypatch, case.config.blocks)
    found = mutations.comes_to_light(
      lambda case=case: _run(case), mutations.attempts(bug)
    )
    if planted.reached:
      break
  assert planted.reached, "the kernel never came to the planted bug"
  assert found


# What else keeps accesses apart: texts of the kernel, and wrong ones.
REWRITES = {
  "c_overwritten_early": (
    "c_of_another_dtype",
    (
      (
        "        for staged, result in zip(staging, results(subtile)):\n",
        "        self.epilogue.load_next_c(work_tile, subtile)\n"
        "        for staged, result in zip(staging, results(subtile)):\n",
      ),
      (
        "          )\n        self.epilogue.load_next_c(work_tile, subtile)\n",
        "          )\n",
      ),
    ),
  ),
  # Three subtiles and two buffers: the tile before ended with the first.
  "staged_where_one_leaves": (
    "c_of_another_dtype",
    ((" if in_turn else 0", ""),),
  ),
  "deferred_where_one_leaves": ("plain", ((" if in_turn else 0", ""),)),
}


@pytest.mark.parametrize("name", REWRITES)
def test_a_wrong_order_is_caught(name, monkeypatch):
  problems.assume_sms(monkeypatch, 1)
  example, rewrites = REWRITES[name]
  mutations.plant_rewrite(stores.Stores, rewrites, monkeypatch)
  # The consumer has a name of its own for it.
  monkeypatch.setattr(consumer, "Stores", stores.Stores)
  case = RACES[example]
  case = dataclasses.replace(
    case,
    problem=case.problem.changed(n=96),
    config=cases.changed(case.config, block_n=96),
  )
  assert mutations.comes_to_light(lambda: _run(case))
