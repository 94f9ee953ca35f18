"""The cost model: legal choices, quickly, that agree with what was measured."""

import collections
import dataclasses
import json
import math
import pathlib
import re
import sys

import pytest

from pallas_gemm import hardware, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import (
  fitted,
  model,
  tiles,
)
from pallas_gemm.tuning import xla as xla_lib

ROWS = (
  pathlib.Path(__file__).parents[1]
  / "experiments/results/nvidia_h200/dense_tuning.jsonl"
)
# Less what was dropped. Up to dense-8 results were stored at once; which config
# is fastest for a few tiles a block is the same.
RUNS = tuple(
  f"dense-{i}"
  for runs in (
    (2, 3, 4, 6, 8, 12, 13),
    range(15, 39),
    range(40, 44),
    range(46, 49),
  )
  for i in runs
)
RUNS += tuple(f"pingpong-{i}" for i in range(1, 6))
# choice-3 has clusters that are no candidates.
RUNS += tuple(f"choice-{i}" for i in (1, 4, 5, 6, 9, 10, 11))
RUNS += ("pieces-2", "aligned-1", "aligned-2", "tail-1", "swap-c-1", "swap-c-2")


def problem(m, n, k, **fields):
  known = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  return Problem.flat(m=m, n=n, k=k, **(known | fields))


def refusal(case: Problem, config: Config) -> str | None:
  return legal.reason(Plan.of(case, config))


def why_xla(case):
  """Why XLA's product is expected to be faster; None if it is not."""
  config = model.choose(case)
  found = xla_lib.faster(case, model.predict(Plan.of(case, config)))
  return found and found.why


BATCHED = {"batched_a": True, "batched_b": True}
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"

PROBLEMS = (
  # Rows at odd multiples of 16 bytes, where tiles shift inward or are padded.
  problem(792, 3512, 7016),
  problem(376, 136, 856, transpose_b=True),
  problem(1000, 4096, 4096, transpose_a=True),
  problem(1, 1, 1),
  problem(1, 8192, 8192),
  problem(16, 57344, 8192),
  problem(77, 768, 768),
  problem(512, 10240, 8192),
  problem(4096, 4096, 4096),
  problem(4095, 4095, 4095),
  problem(1023, 4097, 2049, bias="n", activation="jax.nn.gelu"),
  problem(128, 128, 65536),
  problem(65536, 8, 512),
  problem(8, 65536, 512, transpose_b=True),
  problem(4096, 14336, 4096, gated=True, activation="jax.nn.silu"),
  problem(
    300, 200, 100, gated=True, activation="jax.nn.silu", save_preactivation=True
  ),
  problem(1000, 1000, 1000, c_dtype="float32", out_dtype="float32"),
  problem(205, 3582, 63, c_dtype="bfloat16", bias="n"),
  problem(2001, 4095, 3000, c_dtype="float32", out_dtype="float32"),
  problem(512, 512, 64, batch=64, batched_a=True, batched_b=True),
  problem(2048, 2048, 2048, transpose_a=True, dtype="float16"),
)


@pytest.mark.parametrize("case", PROBLEMS, ids=str)
def test_the_choice_is_legal_and_first_of_the_candidates(case):
  config = model.choose(case)
  assert refusal(case, config) is None
  some = [c for c in model.candidates(case) if refusal(case, c) is None]
  assert config == some[0]
  assert len(some) == len(set(some)) >= 1
  times = [model.predict(Plan.of(case, c)) for c in some]
  # But for the stages, which are taken away from those in order.
  assert times == pytest.approx(sorted(times), rel=1e-3)
  assert 0 < times[0] < 1


def test_another_gpu_gets_another_choice():
  case = problem(4096, 4096, 4096)
  with hardware.assume("H100 PCIe"):
    slower = model.predict(Plan.of(case, model.choose(case)))
  assert slower > model.predict(Plan.of(case, model.choose(case)))


def test_a_gpu_that_is_no_hopper_has_no_choice():
  with hardware.assume("A100-SXM4-80GB"):
    with pytest.raises(NotImplementedError, match=r"9\.0"):
      model.choose(problem(256, 256, 256))
    less = fitted.resources_of(problem(1, 1, 1), hardware.current())
  # What is cached for its shared memory is not what has room here.
  assert less != fitted.resources_of(problem(1, 1, 1), hardware.current())


@pytest.mark.parametrize(
  "columns, words",
  ((24, None), (8, "epilogue_n must divide 8, .* got 16"), (12, "got 64x12")),
)
def test_a_tile_of_no_whole_subtiles_runs_or_is_told_why_not(columns, words):
  case = problem(256, 256, 256, transpose_b=True)
  config = Config(block_m=64, block_n=columns, consumers=1)
  of_case = fitted.resources_of(case, hardware.current())
  said = refusal(case, fitted.with_c_buffers(config, of_case))
  assert said is None if words is None else re.search(words, said)


def python_calls(choose, *problems):
  """Of functions, by a choice for the last of these: the same on every host.

  What is worked out once a process is done for the others.
  """
  *before, last = problems
  for each in before:
    choose(each)
  events = collections.Counter()
  sys.setprofile(lambda frame, event, arg: events.update([event]))
  try:
    choose(last)
  finally:
    sys.setprofile(None)
  return events["call"]


def test_a_choice_takes_little_time():
  """7,069 calls take 2.0 ms of an idle core."""
  products = (problem(2048, n, 4096) for n in (8192, 8192 + 64))
  assert 1000 < python_calls(model.choose, *products) < 9000


# What XLA took less time for than the kernel, by committed rows; or did not.
LEFT_TO_XLA = (
  # Rows of no whole atoms, and those that start at no multiples of 16 bytes.
  problem(4096, 1000, 768),
  problem(4579, 83, 93),
  problem(128, 712, 56),
  problem(205, 4986, 230, transpose_a=True),
  problem(81, 3582, 63, c_dtype="bfloat16"),
  problem(8192, 8200, 128, transpose_b=True),  # 61.3 us, 60.4
  # Short rows, and few results of one slab.
  problem(4096, 16, 4096),
  problem(16, 4096, 4096, transpose_a=True),
  problem(4096, 4096, 16),
  problem(64, 80, 64, batch=2, **BATCHED),
  problem(312, 10664, 32, transpose_b=True),
  problem(1024, 32, 64, batch=96, transpose_b=True, **BATCHED),
  # A vector times rows of K.
  problem(1, 1024, 1024, transpose_b=True),
  problem(1, 3072, 3072, transpose_b=True),
)
KEPT = (
  problem(1247, 995, 1711),
  problem(4096, 16, 4096, transpose_b=True),
  problem(64, 8192, 8192, transpose_a=True),
  problem(4096, 4096, 32),
  problem(256, 512, 784, bias="n", activation="relu"),
  problem(128, 160, 5120),
  problem(128, 1000, 2048, bias="n"),
  problem(136, 32, 40, bias="n", activation="gelu"),
  problem(1024, 1024, 64),
  # XLA computes a bias in a kernel of its own.
  problem(872, 1776, 40, bias="n"),
  problem(312, 10664, 32, bias="n"),
  problem(205, 4986, 230, bias="n", transpose_a=True),
  problem(2000, 3000, 1000, bias="n"),
  # Rows of no whole atoms, which are not padded.
  problem(9456, 408, 960, activation="silu"),
  problem(64, 64, 128, batch=2, **BATCHED),
  problem(8192, 8208, 128, transpose_b=True),  # 41.8 us
  # Threads store results, whose rows start at multiples of 4 bytes.
  problem(1064, 36, 200, transpose_b=True),
  problem(300, 300, 4096, transpose_b=True),
  problem(6304, 1024, 588),
  problem(1, 3072, 3072),
  problem(1, 4096, 4096, transpose_b=True),
  problem(1, 2048, 2048, transpose_b=True, gated=True, activation="silu"),
  problem(4096, 4096, 4096),
  problem(4095, 4095, 4095),
  problem(1023, 4096, 4096),
)
# The same of an H100; microseconds of the kernel and of XLA.
LEFT_TO_XLA_BY_AN_H100 = (
  problem(100, 320, 1536, transpose_a=True),  # 7.3, 5.4
  problem(389, 1966, 60, transpose_a=True, activation="relu"),  # 6.2, 3.1
  problem(12, 896, 1792, transpose_a=True, out_dtype="float32"),  # 6.6, 4.6
  problem(3000, 2304, 24, transpose_b=True),  # 8.1, 6.6
  problem(96, 32, 196, batch=16, **BATCHED),  # 4.3, 3.1
)
KEPT_BY_AN_H100 = (
  problem(300, 12288, 6144, transpose_a=True),  # 68, 137
  problem(19, 2296, 734, transpose_a=True),  # 5.1, 10.2
  problem(1728, 40, 6360),  # 14.3, 27.8
  problem(24, 48, 464),  # 2.9, 5.5
  problem(1, 5760, 16384, transpose_a=True, activation="silu"),  # 63.0, 66.1
)


@pytest.mark.parametrize(
  ("gpu", "case", "is_left"),
  [
    (gpu, case, is_left)
    for gpu, cases, is_left in (
      (H200, LEFT_TO_XLA, True),
      (H200, KEPT, False),
      (H100, LEFT_TO_XLA_BY_AN_H100, True),
      (H100, KEPT_BY_AN_H100, False),
    )
    for case in cases
  ],
  ids=str,
)
def test_what_is_left_to_xla(gpu, case, is_left):
  with hardware.assume(gpu):
    assert bool(why_xla(case)) == is_left


# Fields of the config that was fastest, by committed rows; several values where
# these were as fast. Microseconds are of an H200, or as said.
MEASURED = (
  # Results of swapped operands leave in shorter rows: 40.9, 36.2.
  (problem(8192, 8192, 64), {"swap_ab": False}),
  (problem(4096, 4096, 32), {"swap_ab": False}),
  # Two rounds of 128 x 128 8.0, 6.4 in one.
  (
    problem(1024, 4096, 64, c_dtype="bfloat16"),
    {"block_m": 128, "block_n": 256},
  ),
  (problem(1024, 2112, 7168), {"block_m": 64, "block_n": 256, "swap_ab": True}),
  # `tiles._in_one_strip`.
  (problem(2048, 256, 4096), {"raster_dim": "n", "swap_ab": False}),
  (problem(4096, 128, 2880), {"raster_dim": "n", "swap_ab": False}),
  (problem(8192, 320, 1280), {"raster_dim": "m", "swap_ab": True}),
  (problem(4096, 4096, 4096), {"raster_dim": "m"}),
  # Slabs of 128: `tiles._suits_deep_slabs`, and `_suits_deep_rounds`.
  (problem(1, 4096, 14336), {"block_k": 128}),
  (problem(16, 4096, 4096), {"block_k": 128}),
  (problem(64, 12288, 12288), {"block_k": 64}),
  (problem(128, 8192, 28672), {"block_k": 64, "cluster_m": 2}),
  (problem(64, 57344, 8192), {"block_k": 64}),
  (problem(1, 18944, 3584, transpose_b=True), {"block_k": 128}),
  (problem(8, 11008, 4096, transpose_b=True), {"block_k": 64}),
  (problem(64, 28672, 4096, transpose_b=True), {"block_k": 64}),
  # Pairs that occupy most SMs: `tiles._suits_pairs`.
  (problem(128, 10240, 8192), {"cluster_m": 2}),
  (problem(128, 7168, 5120), {"cluster_m": 2}),
  (problem(128, 5120, 5120), {"cluster_m": 1}),
  (problem(128, 4096, 14336), {"cluster_m": 1}),
  # Rows that TMA reads slowly are shared: 110.3, 82.5.
  (problem(8192, 8192, 336, transpose_b=True), {"blocks": 1}),
  (problem(8192, 8192, 328, transpose_b=True), {"blocks": 2}),
  (problem(4384, 2496, 328, transpose_b=True), {"blocks": 2}),
  # One consumer gains little by sharing: 18.5 in clusters, 13.4.
  (
    problem(500, 1024, 4096, transpose_a=True),
    {"block_m": 64, "block_n": 64, "split_k": 1, "blocks": 1},
  ),
  # 128 x 256 tiles 50.1, 48.6 and 49.2; 55.3, 50.7 and 52.4.
  (problem(1792, 6400, 1600, transpose_b=True), {"block_n": (176, 240)}),
  (
    problem(1792, 6400, 1600, transpose_b=True, out_dtype="float32"),
    {"block_n": (176, 240)},
  ),
  # Results that find no room to wait: 80.0, 85.9 with 256 x 160; 1118, 1131.
  (problem(7168, 8192, 512), {"block_m": 128, "block_n": 256}),
  (
    problem(12288, 12288, 3072, transpose_b=True),
    {"block_m": 128, "block_n": 256},
  ),
  # 42.5; 50.6 with 192 x 128 (H100).
  (problem(2047, 2049, 2051), {"block_m": 192, "block_n": 192, "split_k": 1}),
  # Stages, see `stages`: 13.8, 14.5 with six; 40.0, 43.2 with eight.
  (problem(64, 6144, 4096), {"block_k": 128, "stages": 5}),
  (problem(64, 10240, 8192), {"block_k": 64, "stages": 6}),
  (problem(128, 8192, 8192), {"block_k": 64, "stages": 7}),
  # Every pair of SMs has as many blocks: one, two (103.7, 104.8 with 9).
  (problem(16, 4096, 14336), {"block_k": 128, "stages": 9}),
  (problem(16, 8192, 28672), {"block_k": 128, "stages": 6}),
  # Several rounds: 11.3 with eight stages, 10.9; 15.7, 15.1.
  (problem(512, 64, 512, batch=64, **BATCHED), {"stages": 5}),
  (problem(512, 64, 512, batch=96, **BATCHED), {"stages": 5}),
  # As many slabs as there are.
  (problem(64, 64, 64), {"stages": 1}),
  (problem(512, 512, 512), {"stages": 8}),
  (problem(64, 64, 64, batch=1024, **BATCHED), {"stages": 8}),
  # 2,486 at 64 x 256 with two stages, 1,189 at 128 x 128 with four.
  (
    problem(4096, 14336, 4096, gated=True, activation="silu"),
    {"stages": range(3, 9)},
  ),
  # 19.3 in one part, 11.0 in eight.
  (
    problem(65, 165, 3867, gated=True, activation="silu", transpose_b=True),
    {"split_k": range(2, 65)},
  ),
  # Consumers ping-pong where sums are short.
  (problem(4096, 2048, 64), {"split": "pingpong"}),
  (problem(8192, 1024, 128, c_dtype="bfloat16"), {"split": "pingpong"}),
  (problem(4096, 2048, 1024), {"split": "m"}),
)
# The same of an H100: rows stored as columns are transposed, so that operands
# can be swapped, where a copy takes less than it gains; rows that TMA reads
# slowly are shared.
MEASURED_BY_AN_H100 = (
  (problem(5368, 312, 1432, transpose_b=True), {"blocks": 4}),  # 13.2, 16.5
  (problem(200, 14336, 8192, transpose_a=True), {"swap_ab": True}),  # 94.0, 85
  (problem(160, 32000, 8640, transpose_a=True), {"swap_ab": True}),  # 202, 192
  (problem(300, 12288, 6144, transpose_a=True), {"swap_ab": True}),  # 80.5, 68
  (problem(1000, 4096, 4096, transpose_a=True), {"swap_ab": False}),
)


@pytest.mark.parametrize(
  ("gpu", "case", "want"),
  [(H200, *x) for x in MEASURED] + [(H100, *x) for x in MEASURED_BY_AN_H100],
  ids=str,
)
def test_choices_that_were_measured(gpu, case, want):
  with hardware.assume(gpu):
    config = model.choose(case)
  for name, values in want.items():
    some = values if isinstance(values, tuple | range) else (values,)
    assert getattr(config, name) in some, name


def test_consumers_that_ping_pong_refill_slots_of_three_work_tiles():
  """One of them has two, more than its slots hold."""
  case = problem(256, 256, 128, batch=96, **BATCHED)
  config = model.choose(case)
  plan = Plan.of(case, config)
  assert (config.split, config.stages) == ("pingpong", 6)
  assert plan.tiling.work_tiles_of_a_block == 3 and plan.tiling.refills


def test_c_of_short_sums_has_buffers_of_its_own():
  """27.5 us with C where results leave from, 22.5 in buffers of its own."""
  case = problem(4096, 4096, 256, c_dtype="bfloat16")
  assert not Plan.of(case, model.choose(case)).memory.c_in_place
  long = dataclasses.replace(case, k=4096)
  assert Plan.of(long, model.choose(long)).memory.c_in_place


@pytest.mark.parametrize("n, k", ((4096, 64), (64, 100), (10240, 8192)))
def test_a_batch_invariant_config_is_for_any_rows(n, k):
  found = {
    tuning.resolve(case, batch_invariant=True): case
    for case in (problem(m, n, k) for m in (1, 128, 512, 65536))
  }
  (config,) = found
  for case in (problem(m, n, k) for m in (1, 128, 512, 65536)):
    assert refusal(case, config) is None
  assert config.cluster_m == config.cluster_n == 1


@pytest.mark.parametrize("batch", (1, 64, 4096, 100_000))
@pytest.mark.parametrize("m", (1, 64, 300))
def test_many_small_products_have_a_config(m, batch):
  case = problem(m, 64, 64, batch=batch, batched_a=batch > 1)
  assert refusal(case, model.choose(case)) is None


def test_clusters_whose_tiles_would_lie_outside_are_not_tried():
  gpu = hardware.current()
  case = problem(640, 2112, 7168, transpose_b=True)
  found = list(tiles.worth_a_try(case, gpu))
  assert any(c.cluster_m * c.cluster_n > 1 for c in found)
  for config in found:
    plan = Plan.of(case, config)
    rows, columns = plan.tiling.grid
    assert rows * config.cluster_m == cdiv(plan.problem.m, config.block_m)
    assert columns * config.cluster_n == cdiv(plan.problem.n, config.block_n)
  # A's few rows would be loaded as 64.
  few = tiles.worth_a_try(problem(16, 4096, 4096), gpu)
  assert all(c.cluster_n == 1 for c in few)


def test_rows_of_a_swapped_tile_are_the_fewest_for_their_number_of_tiles():
  case = problem(200, 4096, 4096)
  heights = {
    c.block_n for c in tiles.worth_a_try(case, hardware.current()) if c.swap_ab
  }
  assert heights == {208, 112, 80, 64, 48, 32, 16}


@pytest.mark.rows
def test_the_model_agrees_with_what_was_measured_of_8_bits():
  """By the least times: a median has an H100 at the limit of its power."""
  rows = ROWS.parents[1] / "nvidia_h100_80gb_hbm3/eight_bits_tuning.jsonl"
  errors, measured = [], collections.defaultdict(list)
  with hardware.assume("NVIDIA H100 80GB HBM3"):
    for row in map(json.loads, rows.read_text().splitlines()):
      case, us = Problem.flat(**row["problem"]), row["least_us"]
      plan = Plan.of(case, Config(**row["config"]))
      predicted = 1e6 * tuning.model_of(case).predict(plan)
      measured[case].append((predicted, us))
      if not case.groups:
        errors.append(abs(math.log(predicted / us)))
  assert sum(errors) / len(errors) < 0.035
  for found in measured.values():
    _, picked = min(found)
    assert picked < 1.1 * min(us for _, us in found)


@pytest.mark.rows
def test_the_model_agrees_with_what_was_measured():
  """Of the configs measured on a problem, it picks one near the fastest.

  XLA's kernel is one more where it is picked since rows are short.
  """
  measured, xla = collections.defaultdict(list), {}
  for line in ROWS.read_text().splitlines():
    row = json.loads(line)
    if row["run"] in RUNS and "variant" not in row:
      key = row["run"], json.dumps(row["problem"])
      if row["config"].keys() - vars(Config()).keys():
        continue  # a field that is no longer there
      config, case = Config(**row["config"]), problem(**row["problem"])
      # What was slow may no longer be legal.
      if config.split == "pingpong" and refusal(case, config):
        continue
      measured[key].append((config, row["us"]))
      xla[key] = row["xla_us"]
  ratios = []
  for key, timed in measured.items():
    case = problem(**json.loads(key[1]))
    found = [(model.predict(Plan.of(case, config)), us) for config, us in timed]
    predicted, picked = min(found)
    best = min(us for _, us in timed)
    left = xla_lib.faster(case, predicted)
    # The op computes columns as rows.
    if left and "shorter" in left.why and case.n > 1:
      picked, best = xla[key], min(best, xla[key])
    ratios.append(best / picked)
  assert len(ratios) > 150
  geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
  assert geomean > 0.975, geomean
  assert min(ratios) > 0.75, min(ratios)
