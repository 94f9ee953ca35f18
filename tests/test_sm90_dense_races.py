"""Tier A: the Hopper kernels are free of races, and these tests can tell.

Each call that synchronises is broken in turn, and so are the places where the
order of two calls, or which buffer they are about, is what keeps them apart.
All of it must come to light. Where it can't, the bug is listed with the reason;
a kernel that gains a call gains a test.
"""

import dataclasses

import jax
import pytest

from pallas_gemm.kernels.sm90 import (
  block,
  consumer,
  epilogue,
  exchange,
  moves,
  producer,
  stores,
  weights,
)
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from tests.support import (
  dense,
  interpret,
  mutations,
  problems,
  ragged_kernels,
)

MODULES = (
  block, producer, consumer, stores, epilogue, exchange, moves, weights
)  # fmt: skip
BUGS = [bug for module in MODULES for bug in mutations.bugs_of(module.__name__)]

# Bugs that nothing can show here, and why.
_PACE = "what is stored are zeros that nothing overwrites: it sets the pace"
_OUTLIVED = "waited for so that shared memory outlives its readers, on the chip"
UNSEEN = {
  (producer.__name__, "plgpu.barrier_wait", 4, "left out"): (
    "the last releases are waited for so that no block leaves a cluster while"
    " its peers may still arrive; a fault on the chip alone"
  ),
  **{
    (producer.__name__, "plgpu.wait_smem_to_gmem", i, kind): reason
    for i, reason in enumerate((_PACE, _OUTLIVED))
    for kind in ("left out", "too weak")
  },
}

SMALL = Config(block_m=64, block_n=64, stages=2, consumers=1, epilogue_n=32)
# Two tiles of three slabs of K: whatever is used again is.
PLAIN = Problem.flat(m=65, n=64, k=130, dtype="bfloat16", out_dtype="bfloat16")
WITH_C = PLAIN.changed(c_dtype="float32", bias="n")
# C where the results go.
IN_PLACE = (WITH_C.changed(c_dtype="bfloat16"), SMALL)
# Operands swapped: results are transposed on their way.
SWAPPED = (
  PLAIN.changed(n=130),
  dataclasses.replace(SMALL, swap_ab=True, epilogue_buffers=1),
)
# Parts of K in a cluster.
CLUSTER_K = (
  PLAIN.changed(c_dtype="bfloat16"),
  dataclasses.replace(SMALL, cluster_k=2),
)
# Results that are stored row by row.
ROWS = (
  WITH_C.changed(m=9, n=131, k=66, out_dtype="float16"),
  dataclasses.replace(SMALL, block_n=128, epilogue_n=64),
)

# Five work tiles of two slabs, three of them the first block's: one consumer
# has two of these, the other one.
PINGPONG = (
  PLAIN.changed(
    m=40,
    n=72,
    k=66,
    batch=5,
    batched_a=True,
    batched_b=True,
    bias="n",
    c_dtype="bfloat16",
  ),
  dataclasses.replace(
    SMALL, block_n=96, stages=4, consumers=2, split="pingpong"
  ),
)

# Groups: tiles that end with their group, one that is stored in part, none;
# whole slabs and last ones.
GROUPS = Problem.flat(
  m=140,
  n=64,
  k=130,
  dtype="bfloat16",
  out_dtype="bfloat16",
  ragged="m",
  groups=2,
  bias="n",
)
SLABS = Problem.flat(
  m=64,
  n=64,
  k=140,
  dtype="bfloat16",
  out_dtype="bfloat16",
  ragged="k",
  groups=2,
  transpose_a=True,
)
EMPTY = SLABS.changed(groups=3)
OFFSETS = {2: (3, 22, 120), 3: (3, 22, 22, 120)}
WIDE_SUBTILES = dataclasses.replace(SMALL, epilogue_n=64)
# Slabs come in pairs: two and one of them each tile.
IN_PAIRS = (
  GROUPS.changed(k=192, transpose_b=True),
  dataclasses.replace(WIDE_SUBTILES, stages=3),
)
# Threads load B, and results are stored by rows, none of them twice.
BY_THREADS = (
  GROUPS.changed(m=86, n=141),
  dataclasses.replace(WIDE_SUBTILES, block_n=128),
)
# Threads bring A and B: two work tiles of three slabs, two on their way.
MOVES = (
  PLAIN.changed(m=70, n=70, k=150, transpose_b=True),
  dataclasses.replace(SMALL, stages=3, block_n=96, moves=True),
)

CLEAN = {
  "two_consumers": (
    WITH_C,
    Config(block_m=64, block_n=64, stages=3, split="n", epilogue_n=16),
  ),
  "gated": (
    PLAIN.changed(gated=True, save_preactivation=True, k=66),
    dataclasses.replace(SMALL, cluster_m=2),
  ),
  "batch": (
    PLAIN.changed(m=40, n=72, k=66, batch=2, batched_a=True, batched_b=True),
    dataclasses.replace(SMALL, cluster_n=2),
  ),
  # Two work tiles of a slab, one of three: no slot is used again.
  "short": (PLAIN.changed(m=130, k=64), SMALL),
  "one_work_tile": (
    PLAIN.changed(bias="n"),
    dataclasses.replace(SMALL, stages=3, epilogue_buffers=1),
  ),
  "one_stage": (
    PLAIN.changed(k=60, c_dtype="bfloat16"),
    dataclasses.replace(SMALL, stages=1),
  ),
  "rows": ROWS,
  "split_k": (PLAIN, dataclasses.replace(SMALL, split_k=2)),
  "cluster_k": CLUSTER_K,
  "groups": (GROUPS, WIDE_SUBTILES),
  "groups_in_pairs": IN_PAIRS,
  "groups_gated": (
    GROUPS.changed(m=80, k=66, bias=None, gated=True, save_preactivation=True),
    dataclasses.replace(WIDE_SUBTILES, cluster_n=2),
  ),
  "groups_of_two_consumers": (
    GROUPS.changed(k=64, transpose_b=True),
    dataclasses.replace(WIDE_SUBTILES, block_m=128, consumers=2),
  ),
  "weights_of_ragged_atoms": (
    GROUPS.changed(n=136),
    dataclasses.replace(WIDE_SUBTILES, block_n=128),
  ),
  "weights_by_threads": BY_THREADS,
  # Slabs on their way while one is waited for: none, one, two.
  **{
    f"weights_by_copies_{stages}_stages": (
      BY_THREADS[0].changed(n=140, k=270),
      dataclasses.replace(BY_THREADS[1], stages=stages),
    )
    for stages in (2, 3, 4)
  },
  "moves": MOVES,
  "moves_one_of_them": (
    PLAIN.changed(m=140, n=72, k=330, bias="n"),
    dataclasses.replace(SMALL, moves=True),
  ),
  "moves_in_a_cluster": (
    PLAIN.changed(m=20, n=77, k=270),
    dataclasses.replace(SMALL, cluster_k=2, moves=True),
  ),
  "slabs": (SLABS, SMALL),
  "slabs_by_rows": (
    EMPTY.changed(n=141),
    dataclasses.replace(WIDE_SUBTILES, block_n=128),
  ),
  "a_group_of_zeros": (EMPTY, SMALL),
  "c_in_place": IN_PLACE,
  "c_ahead": (
    IN_PLACE[0].changed(k=200),
    dataclasses.replace(SMALL, epilogue_buffers=1),
  ),
  # Half of the results wait in registers.
  "float32": (
    PLAIN.changed(m=130, n=256, out_dtype="float32", bias="n"),
    dataclasses.replace(SMALL, block_n=256),
  ),
  # Columns that are stored twice.
  "overlap": (
    PLAIN.changed(n=80, c_dtype="bfloat16", transpose_b=True),
    dataclasses.replace(SMALL, block_n=80, epilogue_buffers=3),
  ),
  # Tiles that are stored twice in part, by a block or by two.
  "moved_back": (
    PLAIN.changed(m=144, n=208, k=72, transpose_a=True, bias="n"),
    dataclasses.replace(SMALL, block_m=128, block_n=128, consumers=2),
  ),
  "moved_back_with_c_in_place": (
    IN_PLACE[0].changed(n=208, k=264),
    dataclasses.replace(SMALL, block_n=128, epilogue_buffers=4),
  ),
  "saved": (
    PLAIN.changed(m=130, n=128, save_preactivation=True),
    dataclasses.replace(SMALL, block_n=128, epilogue_buffers=1),
  ),
  "saved_with_c_in_place": (
    IN_PLACE[0].changed(m=130, save_preactivation=True),
    SMALL,
  ),
  "swapped": SWAPPED,
  "swapped_with_c_in_place": (
    SWAPPED[0].changed(c_dtype="bfloat16", bias="n"),
    dataclasses.replace(SMALL, swap_ab=True),
  ),
  "pingpong": PINGPONG,
  # As many slabs as stages, but one consumer has two of the three work tiles.
  "pingpong_of_three_work_tiles": (
    PLAIN.changed(m=384, k=66),
    dataclasses.replace(PINGPONG[1], block_n=64, stages=6),
  ),
  "pingpong_in_clusters": (
    PLAIN.changed(m=130, n=200),
    dataclasses.replace(PINGPONG[1], block_n=64, stages=6, cluster_m=2),
  ),
  "pingpong_of_groups": (
    GROUPS,
    dataclasses.replace(WIDE_SUBTILES, stages=9, consumers=3, split="pingpong"),
  ),
}


@pytest.fixture(autouse=True)
def few_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  problems.assume_sms(monkeypatch, 2)


def _run(problem: Problem, config: Config) -> tuple[bool, bool]:
  """Whether numbers are right, and whether races were found."""
  run, check = (_grouped if problem.along else _dense)(problem, config)
  with interpret.interpreted(detect_races=True) as report:
    outs = jax.block_until_ready(run())
  # Of groups, tables are made first.
  assert report.kernels == (2 if problem.groups else 1)
  try:
    check(outs)
  except AssertionError:
    return False, report.races_found
  return True, report.races_found


def _dense(problem: Problem, config: Config):
  """A run of the kernel, and what checks its results."""
  x = dense.operands(problem)
  activation = jax.nn.silu if problem.epilogue.gated else None
  epilogue = dense.Epilogue(activation=activation)
  return (
    lambda: dense.run(problem, config, x, epilogue),
    lambda outs: dense.assert_right(outs, problem, x, epilogue),
  )


def _grouped(problem: Problem, config: Config):
  """The same of groups that end at `OFFSETS`, or with the last row."""
  x = ragged_kernels.operands(problem)
  rows = problem.m if problem.along == "m" else problem.k
  offsets = tuple(min(offset, rows) for offset in OFFSETS[problem.groups.count])
  how = (offsets, jax.nn.silu if problem.epilogue.gated else None)
  return (
    lambda: ragged_kernels.run(problem, config, x, *how),
    lambda outs: ragged_kernels.assert_right(outs, problem, x, *how),
  )


@pytest.mark.any_jax
@pytest.mark.parametrize("name", CLEAN)
def test_free_of_races(name):
  assert _run(*CLEAN[name]) == (True, False)


def _parameter(bug: mutations.Bug):
  reason = UNSEEN.get((bug.module, *bug.key))
  marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
  name = f"{bug.module.rpartition('.')[2]}-{bug}"
  return pytest.param(bug, id=name, marks=marks)


def test_there_are_calls_to_break():
  missing = set(mutations.CALLS) - {bug.call for bug in BUGS}
  assert not missing
  there = {(bug.module, *bug.key) for bug in BUGS}
  assert set(UNSEEN) <= there, "no longer in the source"


# Between them they come to every call, most calls by the first.
EXAMPLES = (
  (WITH_C, SMALL),
  (PLAIN, SMALL),
  ROWS,
  (GROUPS, WIDE_SUBTILES),
  IN_PLACE,
  (EMPTY, SMALL),
  BY_THREADS,
  IN_PAIRS,
  CLUSTER_K,
  MOVES,
)
# Calls that few examples come to, and one that does.
COMES_TO = {
  (producer.__name__, "plgpu.commit_smem", 0): EXAMPLES[5],
  (producer.__name__, "plgpu.wait_smem_to_gmem", 0): EXAMPLES[5],
  (producer.__name__, "plgpu.wait_smem_to_gmem", 1): EXAMPLES[5],
  (producer.__name__, "plgpu.barrier_wait", 1): IN_PAIRS,
  (producer.__name__, "plgpu.barrier_wait", 2): IN_PAIRS,
  (producer.__name__, "plgpu.barrier_wait", 3): BY_THREADS,
  (weights.__name__, "plgpu.barrier_arrive", 0): BY_THREADS,
  (weights.__name__, "plgpu.commit_smem", 0): BY_THREADS,
  (moves.__name__, "plgpu.barrier_arrive", 0): MOVES,
  (moves.__name__, "plgpu.commit_smem", 0): MOVES,
  (exchange.__name__, "plgpu.barrier_arrive", 0): CLUSTER_K,
  (exchange.__name__, "plgpu.barrier_wait", 0): CLUSTER_K,
  (stores.__name__, "plgpu.wait_smem_to_gmem", 0): EXAMPLES[4],
  (stores.__name__, "plgpu.wait_smem_to_gmem", 3): EXAMPLES[3],
  (stores.__name__, "plgpu.commit_smem", 1): EXAMPLES[3],
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS])
def test_a_planted_bug_is_caught(bug, monkeypatch):
  planted = mutations.Planted(bug, monkeypatch)
  first = COMES_TO.get((bug.module, *bug.key[:2]), EXAMPLES[0])
  for example in sorted(EXAMPLES, key=lambda x: x is not first):
    problems.assume_sms(monkeypatch, example[1].blocks)
    found = mutations.comes_to_light(
      lambda example=example: _run(*example), mutations.attempts(bug)
    )
    if planted.reached:
      break
  assert planted.reached, "the kernel never came to the planted bug"
  assert found


# What else keeps accesses apart: texts of the kernel, and wrong ones.
REWRITES = {
  "c_overwritten_early": (
    WITH_C,
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
  "staged_where_one_leaves": (WITH_C, ((" if in_turn else 0", ""),)),
  "deferred_where_one_leaves": (PLAIN, ((" if in_turn else 0", ""),)),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", REWRITES)
def test_a_wrong_order_is_caught(name, monkeypatch):
  problems.assume_sms(monkeypatch, 1)
  problem, rewrites = REWRITES[name]
  mutations.plant_rewrite(stores.Stores, rewrites, monkeypatch)
  # The consumer has a name of its own for it.
  monkeypatch.setattr(consumer, "Stores", stores.Stores)
  problem = problem.changed(n=96)
  config = dataclasses.replace(SMALL, block_n=96)
  assert mutations.comes_to_light(lambda: _run(problem, config))
