"""The cost model: legal choices, quickly, that agree with what was measured."""

import collections
import dataclasses
import json
import math
import pathlib
import time

import pytest

from pallas_gemm import hardware, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import (
  constants,
  fitted,
  model,
  odd_sizes,
  stages,
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

PROBLEMS = (
  # Rows at odd multiples of 16 bytes, which are moved back or padded.
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


def test_a_choice_takes_little_time():
  """Of this thread's processor time, for sizes that were not seen before."""
  times = []
  for i in range(8):
    start = time.thread_time()
    model.choose(problem(2048, 8192 + 64 * i, 4096))
    times.append(time.thread_time() - start)
  assert min(times) < 3e-3


@pytest.mark.parametrize(
  "case",
  (
    problem(4096, 1000, 768),
    problem(792, 3512, 7016),
  ),
  ids=str,
)
def test_rows_that_suit_xla_better_are_left_to_it(case):
  assert "128 bytes" in why_xla(case)


def test_small_products_of_odd_rows_are_left_to_xla_where_copies_cost_more():
  """By both kernels' measured times: 4.1 and 8.7 us, 46.7 and 21.9 us."""
  small, large = problem(4579, 83, 93), problem(1247, 995, 1711)
  assert "16 bytes" in why_xla(small)
  assert why_xla(large) is None


@pytest.mark.parametrize(
  ("case", "is_left"),
  (
    (problem(4096, 16, 4096), True),
    (problem(4096, 16, 4096, transpose_b=True), False),
    (problem(16, 4096, 4096, transpose_a=True), True),
    (problem(64, 8192, 8192, transpose_a=True), False),
    (problem(4096, 4096, 16), True),
    (problem(4096, 4096, 16, bias="n", activation="gelu"), False),
    (problem(4096, 4096, 32), False),
    (problem(1536, 3584, 24, transpose_b=True), True),
    # XLA takes 21 us for the long sum, 12 here.
    (problem(3, 256, 32000, transpose_a=True, bias="n"), False),
    (problem(256, 512, 784, bias="n", activation="relu"), False),
    (problem(128, 160, 5120), False),
    (problem(128, 1000, 2048, bias="n"), False),
    (problem(4096, 1000, 768), True),
    (problem(128, 712, 56), True),
    (problem(64, 80, 64, batch=2, **BATCHED), True),
    (problem(136, 32, 40, bias="n", activation="gelu"), False),
    (problem(1024, 1024, 64), False),
    (problem(312, 10664, 32, transpose_b=True), True),
    # XLA computes a bias or C in a kernel of its own.
    (problem(872, 1776, 40, bias="n"), False),
    (problem(312, 10664, 32, bias="n"), False),
    (problem(205, 4986, 230, bias="n", transpose_a=True), False),
    (problem(205, 4986, 230, transpose_a=True), True),
    (problem(81, 3582, 63, c_dtype="bfloat16"), True),
    (problem(2000, 3000, 1000, bias="n"), False),
    # Rows of no whole atoms, which are not padded.
    (problem(3000, 4096, 1024, transpose_a=True), False),
    (problem(4096, 2096, 4096), False),
    (problem(2048, 1000, 2048), False),
    (problem(9456, 408, 960, activation="silu"), False),
    (problem(1024, 32, 64, batch=96, transpose_b=True, **BATCHED), True),
    (problem(1024, 64, 64, batch=40, **BATCHED), False),
    (problem(64, 64, 128, batch=2, **BATCHED), False),
    # Rows start at multiples of 4 bytes.
    # Threads store its results.
    (problem(1064, 36, 200, transpose_b=True), False),
    (problem(196, 196, 256, transpose_b=True, batch=8, **BATCHED), False),
    (problem(300, 300, 4096, transpose_b=True), False),
    (problem(6304, 1024, 588), False),
    (problem(647, 176, 122, c_dtype="bfloat16"), False),
  ),
  ids=str,
)
def test_what_is_left_to_xla(case, is_left):
  """By the times of both on an H200 or H100."""
  assert bool(why_xla(case)) == is_left


def test_short_sums_are_stored_as_they_are():
  """Results of swapped operands leave in shorter rows: 40.9 us, 36.2."""
  assert not model.choose(problem(8192, 8192, 64)).swap_ab
  assert not model.choose(problem(4096, 4096, 32)).swap_ab


@pytest.mark.parametrize(
  "case",
  (
    problem(4096, 2048, 64),
    problem(8192, 4096, 64, bias="n", activation="gelu"),
    problem(8192, 1024, 128, c_dtype="bfloat16"),
    problem(8192, 8192, 64, out_dtype="float32"),
    problem(128, 128, 128, batch=128, batched_a=True, batched_b=True),
  ),
  ids=str,
)
def test_consumers_ping_pong_where_sums_are_short(case):
  """By measured times, see `sm90.launch`."""
  config = model.choose(case)
  assert config.split == "pingpong"
  assert config.stages >= 2 * Plan.of(case, config).slabs
  long = dataclasses.replace(case, k=1024)
  assert model.choose(long).split != "pingpong"


def test_consumers_that_ping_pong_have_room_for_their_work_tiles():
  """A slot is refilled if one of them has more tiles than its slots hold."""
  case = problem(256, 256, 128, batch=96, batched_a=True, batched_b=True)
  config = model.choose(case)
  plan = Plan.of(case, config)
  assert plan.work_tiles_of_a_block == 3
  assert (config.split, config.stages) == ("pingpong", 6)
  assert plan.refills


def test_c_of_short_sums_has_buffers_of_its_own():
  """27.5 us with C where results leave from, 22.5 in buffers of its own."""
  case = problem(4096, 4096, 256, c_dtype="bfloat16")
  assert not Plan.of(case, model.choose(case)).c_in_place
  long = dataclasses.replace(case, k=4096)
  assert Plan.of(long, model.choose(long)).c_in_place


def test_one_round_of_tiles_where_c_has_few_slabs_to_come_beside():
  """8.0 us in two rounds of 128 x 128, 6.4 in one."""
  config = model.choose(problem(1024, 4096, 64, c_dtype="bfloat16"))
  assert (config.block_m, config.block_n) == (128, 256)


def test_all_columns_of_a_narrow_result_are_in_one_strip():
  """By measured times, see `tiles._in_one_strip`."""
  for m, n, k in ((2048, 256, 4096), (4096, 128, 2880), (8192, 320, 1280)):
    config = model.choose(problem(m, n, k))
    assert config.raster_dim == ("m" if config.swap_ab else "n")
    columns = config.block_m if config.swap_ab else config.block_n
    assert n <= config.raster * columns
  assert model.choose(problem(4096, 4096, 4096)).raster_dim == "m"


def test_slabs_are_deep_where_few_of_them_are_one_answer_of_the_memory():
  """By measured times, see `tiles._suits_deep_slabs`."""
  for m, n, k in ((1, 4096, 14336), (16, 4096, 4096), (64, 6144, 4096)):
    assert model.choose(problem(m, n, k)).block_k == 128
  for m, n, k in ((64, 12288, 12288), (128, 8192, 28672), (64, 57344, 8192)):
    assert model.choose(problem(m, n, k)).block_k == 64


@pytest.mark.parametrize(
  ("m", "n", "k", "is_deep"),
  (
    (1, 18944, 3584, True),
    (16, 57344, 8192, True),
    (8, 11008, 4096, False),  # 22.7 us in one round, 23.1
    (64, 28672, 4096, False),
  ),
)
def test_slabs_of_rows_of_weights_are_deep(m, n, k, is_deep):
  """By measured times, see `tiles._suits_deep_rounds`."""
  config = model.choose(problem(m, n, k, transpose_b=True))
  assert (config.block_k == 128) == is_deep


def test_blocks_with_one_consumer_gain_little_by_sharing():
  """18.5 us in clusters of 64 x 64 tiles, 13.4 without.

  Part of that is A, which was padded to 504 columns then, and is to 512 now.
  """
  config = model.choose(problem(500, 1024, 4096, transpose_a=True))
  assert (config.block_m, config.block_n, config.split_k) == (64, 64, 1)
  assert config.cluster_m * config.cluster_n == 1


def test_rows_that_tma_reads_slowly_are_shared():
  """8192^2 x 328: 110.3 us, in clusters 82.5."""

  def cluster(m, n, k):
    config = model.choose(problem(m, n, k, transpose_b=True))
    return config.cluster_m * config.cluster_n

  assert cluster(8192, 8192, 336) == 1
  assert cluster(8192, 8192, 328) == 2
  assert cluster(4384, 2496, 328) == 2  # an odd number of tiles


def test_few_odd_rows_of_a_that_xla_reads_as_they_are():
  """100 x 320 x 1536 TN: 5.4 us, 7.3 with the copy of A (H100).

  And 300 x 12288 x 6144 137 us, 68; relu of one slab is part of XLA's kernel:
  389 x 1966 x 60 3.1 us, 6.2.
  """
  with hardware.assume("H100"):
    for size, activation, is_left in (
      ((100, 320, 1536), None, True),
      ((300, 12288, 6144), None, False),
      ((389, 1966, 60), "jax.nn.relu", True),
    ):
      case = problem(*size, transpose_a=True, activation=activation)
      assert bool(why_xla(case)) == is_left


@pytest.mark.parametrize(
  ("m", "n", "k", "is_swapped"),
  (
    (200, 14336, 8192, True),  # 94.0 us without, 85.0 so
    (160, 32000, 8640, True),  # 202.3 and 191.8
    (300, 12288, 6144, True),  # 80.5 and 67.6
    (512, 14336, 8192, False),  # whole tiles of 256 rows
    (1000, 4096, 4096, False),  # a copy takes as long as it gains
  ),
)
def test_few_rows_that_are_stored_as_columns_are_transposed(
  m, n, k, is_swapped
):
  """So that operands can be swapped (H100)."""
  with hardware.assume("H100"):
    config = model.choose(problem(m, n, k, transpose_a=True))
  assert config.swap_ab == is_swapped


def test_results_that_straddle_sectors_are_written_slowly():
  """8192 x 8208 x 128: 41.8 us, x 8200: 61.3, and XLA 60.4."""
  for n, is_left in ((8208, False), (8200, True)):
    case = problem(8192, n, 128, transpose_b=True)
    assert bool(why_xla(case)) == is_left


def test_narrow_subtiles_are_worth_it_where_tiles_divide_a_matrix():
  """128 x 256 tiles 50.1 us, 48.6 and 49.2; 55.3, 50.7 and 52.4 in float32."""
  for out_dtype in ("bfloat16", "float32"):
    case = problem(1792, 6400, 1600, transpose_b=True, out_dtype=out_dtype)
    assert model.choose(case).block_n in (176, 240)


def test_an_odd_number_of_results_is_copied_slowly():
  """By measured times, see `constants.OddSizes`."""
  tile = Config(block_m=128, block_n=208, stages=5, epilogue_n=32)
  fit = constants.of(hardware.current()).odd_sizes
  odd = odd_sizes.costs(Plan.of(problem(4097, 4097, 4096), tile), fit)
  even = odd_sizes.costs(Plan.of(problem(4096, 4097, 4096), tile), fit)
  assert odd.copies > 2 * even.copies
  assert (odd.sums, even.sums) == (2, 1)
  # 42.5 us; 50.6 with 192 x 128 (H100).
  config = model.choose(problem(2047, 2049, 2051))
  assert (config.block_m, config.block_n, config.split_k) == (192, 192, 1)


@pytest.mark.parametrize(
  ("case", "block_k", "count"),
  (
    # 13.8 us, 14.5 with six stages; 40.0, 43.2 with eight.
    (problem(64, 6144, 4096), 128, 5),
    (problem(64, 10240, 8192), 64, 6),
    (problem(128, 8192, 8192), 64, 7),
    # Every pair of SMs has as many blocks: one, two (103.7 us, 104.8 with 9).
    (problem(16, 4096, 14336), 128, 9),
    (problem(16, 8192, 28672), 128, 6),
    # Several rounds: 11.3 us with eight stages, 10.9; 15.7, 15.1.
    (problem(512, 64, 512, batch=64, **BATCHED), 64, 5),
    (problem(512, 64, 512, batch=96, **BATCHED), 64, 5),
    # As many slabs as there are.
    (problem(64, 64, 64), 64, 1),
    (problem(512, 512, 512), 64, 8),
    (problem(64, 64, 64, batch=1024, **BATCHED), 64, 8),
  ),
  ids=str,
)
def test_no_more_is_asked_for_than_pays(case, block_k, count):
  """By measured times, see `stages`."""
  config = model.choose(case)
  assert (config.block_k, config.stages) == (block_k, count)


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


def test_what_memory_answers_at_once_is_the_gpus():
  case = problem(64, 6144, 4096)
  with hardware.assume("H100 PCIe") as slower:
    few = stages.for_latency(case, 128, slower)
  assert few < stages.for_latency(case, 128, hardware.current())


@pytest.mark.parametrize(
  ("n", "k", "in_pairs"),
  (
    (10240, 8192, True),
    (8192, 28672, True),
    (7168, 5120, True),
    # 40 pairs leave 26 without a block.
    (5120, 5120, False),
    (4096, 14336, False),
  ),
)
def test_two_rows_of_tiles_are_in_clusters_that_occupy_most_sms(n, k, in_pairs):
  """By measured times, see `tiles._suits_pairs`."""
  assert (model.choose(problem(128, n, k)).cluster_m == 2) == in_pairs


@pytest.mark.parametrize(
  "case",
  (
    problem(7168, 8192, 512),
    problem(12288, 12288, 3072, transpose_b=True),
  ),
  ids=str,
)
def test_results_that_find_no_room_to_wait_cost_time(case):
  """80.0 us, 85.9 with 256 x 160; 1118 and 1131."""
  config = model.choose(case)
  assert (config.block_m, config.block_n) == (128, 256)
  assert Plan.of(case, config).stored_at_once == 0
  larger = dataclasses.replace(config, block_m=256, block_n=160, epilogue_n=32)
  assert Plan.of(case, larger).stored_at_once == 0.5


def test_tiles_that_make_one_round():
  """64 columns by 256 rows: 38.7 us, the best other tile 42.7."""
  config = model.choose(problem(1024, 2112, 7168))
  assert (config.block_m, config.block_n, config.swap_ab) == (64, 256, True)


def test_k_is_split_for_few_tiles_of_a_gated_product_too():
  """19.3 us in one part, 11.0 in eight."""
  gated = {"gated": True, "activation": "silu", "transpose_b": True}
  assert model.choose(problem(65, 165, 3867, **gated)).split_k > 1


@pytest.mark.parametrize(
  ("n", "k", "fields", "is_left"),
  (
    (1024, 1024, {}, True),
    (3072, 3072, {}, True),
    (3072, 3072, {"transpose_b": False}, False),
    (4096, 4096, {}, False),
    (2048, 2048, {"gated": True, "activation": "silu"}, False),
  ),
)
def test_small_vectors_are_left_to_xlas_reduction(n, k, fields, is_left):
  """By both kernels' measured times, see `xla`."""
  case = problem(1, n, k, **{"transpose_b": True} | fields)
  reason = why_xla(case)
  assert (reason is not None and "reduction" in reason) == is_left


@pytest.mark.parametrize(
  ("shape", "fields", "is_left"),
  (
    # Measured: 5.1 us, XLA 10.2; 14.3, 27.8; 2.9, 5.5; 63.0, 66.1.
    ((19, 2296, 734), {"transpose_a": True}, False),
    ((1728, 40, 6360), {}, False),
    ((24, 48, 464), {}, False),
    ((1, 5760, 16384), {"transpose_a": True, "activation": "silu"}, False),
    # 6.6 us, XLA 4.6; 8.1, 6.6; 4.3, 3.1.
    ((12, 896, 1792), {"transpose_a": True, "out_dtype": "float32"}, True),
    ((3000, 2304, 24), {"transpose_b": True}, True),
    ((96, 32, 196), {"batch": 16, "batched_a": True, "batched_b": True}, True),
  ),
)
def test_short_rows_are_left_to_xla_where_that_is_faster(
  shape, fields, is_left
):
  """By both kernels' times on an H100."""
  with hardware.assume("NVIDIA H100 80GB HBM3"):
    assert (why_xla(problem(*shape, **fields)) is not None) == is_left


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
    rows, columns = plan.grid
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


def test_a_ring_of_two_stages_is_known_to_be_slow():
  """2,486 us at 64 x 256 with two, 1,189 us at 128 x 128 with four stages."""
  case = problem(4096, 14336, 4096, gated=True, activation="jax.nn.silu")
  assert model.choose(case).stages > 2


@pytest.mark.parametrize(
  "sizes", ((4096, 4096, 4096), (4095, 4095, 4095), (1023, 4096, 4096))
)
def test_what_xla_does_not_read_fast_either_is_kept(sizes):
  case = problem(*sizes)
  assert why_xla(case) is None


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
    _, picked = min(timed, key=lambda x: model.predict(Plan.of(case, x[0])))
    best = min(us for _, us in timed)
    reason = why_xla(case) or ""
    if "shorter" in reason and case.n > 1:  # the op computes columns as rows
      picked, best = xla[key], min(best, xla[key])
    ratios.append(best / picked)
  assert len(ratios) > 150
  geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
  assert geomean > 0.975, geomean
  assert min(ratios) > 0.75, min(ratios)
