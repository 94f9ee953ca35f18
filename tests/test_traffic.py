"""traffic: the worked numbers of the classic texts, and what must hold."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st
import pytest

from pallas_gemm import hardware
from pallas_gemm.ladder import traffic, traffic_text
from pallas_gemm.ladder.contract import Problem, SimtConfig, TensorCoreConfig

H200 = hardware.lookup("H200")
A100 = hardware.lookup("A100-SXM4-80GB")
SMALL = Problem(16, 16, 16)
BLOCK_4X4 = SimtConfig(block_m=4, block_n=4)
TILE_4X4 = SimtConfig(block_m=4, block_n=4, block_k=4)
TILE_32 = SimtConfig(block_m=32, block_n=32, block_k=32)
BLOCKTILE_1D = SimtConfig(block_m=64, block_n=64, block_k=8, thread_m=8)
BLOCKTILE_2D = SimtConfig(64, 128, 8, thread_m=8, thread_n=8)
VECTORIZED = dataclasses.replace(BLOCKTILE_2D, vector=4)
LADDER = {
  1: SimtConfig(32, 4),
  2: SimtConfig(4, 32),
  3: TILE_32,
  4: BLOCKTILE_1D,
  5: BLOCKTILE_2D,
  6: VECTORIZED,
  7: VECTORIZED,
  8: dataclasses.replace(VECTORIZED, stages=2),
  9: TensorCoreConfig(128, 128, 64),
  10: TensorCoreConfig(128, 256, 64, stages=4, consumers=2),
  11: TensorCoreConfig(128, 256, 64, stages=4, consumers=2, epilogue_n=64),
  12: TensorCoreConfig(
    128, 256, 64, stages=4, consumers=2, epilogue_n=64, cluster_m=2
  ),
}


def problem_for(number, m, n, k, **kwargs):
  return Problem(
    m, n, k, dtype="float32" if number <= 8 else "bfloat16", **kwargs
  )


# The running example: 16^3 in 4x4 blocks.


@pytest.mark.parametrize("rung", [1, 2, "naive", "coalesced"])
def test_small_example_naive(rung):
  t = traffic.model(rung, BLOCK_4X4, SMALL, H200)
  assert t.blocks == 16
  assert t.block_reads == 512
  assert t.block_unique_reads == 128
  assert t.global_load_bytes == 32768
  assert t.flops == 2 * 16**3
  assert t.intensity == 0.25
  assert t.compute_to_load == 0.5


def test_small_example_in_shared_memory():
  t = traffic.model("shared_memory", TILE_4X4, SMALL, H200)
  assert t.block_reads == t.block_unique_reads == 128
  assert t.global_load_bytes == 8192
  assert t.intensity == 1.0


def test_the_gain_of_tiling_is_the_block_size():
  for block in (2, 4, 8, 16):
    naive = SimtConfig(block, block)
    tiled = SimtConfig(block, block, block_k=block)
    before = traffic.model(2, naive, SMALL, H200)
    after = traffic.model(3, tiled, SMALL, H200)
    assert after.intensity / before.intensity == block
    assert before.global_load_bytes / after.global_load_bytes == block


def test_small_example_by_walking_the_loops():
  per_thread, different = 0, set()
  for i, j in itertools.product(range(4), range(4)):
    for k in range(16):
      per_thread += 2
      different |= {("a", i, k), ("b", k, j)}
  t = traffic.model(1, BLOCK_4X4, SMALL, H200)
  assert (t.block_reads, t.block_unique_reads) == (per_thread, len(different))


# Accesses per result.


@pytest.mark.parametrize("k", [32, 256, 4096])
def test_accesses_per_result_of_shared_memory_tiles(k):
  t = traffic.model(3, TILE_32, Problem(4096, 4096, k), H200)
  assert t.global_accesses_per_result == k / 16
  assert t.shared_accesses_per_result == 2 * k


@pytest.mark.parametrize("k", [32, 256, 4096])
def test_accesses_per_result_of_1d_blocktiling(k):
  t = traffic.model(4, BLOCKTILE_1D, Problem(4096, 4096, k), H200)
  assert t.global_accesses_per_result == k / 32
  assert t.shared_accesses_per_result == 9 * k / 8


def test_accesses_per_result_of_2d_blocktiling():
  config = SimtConfig(128, 128, 8, thread_m=8, thread_n=8)
  t = traffic.model(5, config, Problem(4096, 4096, 4096), H200)
  assert t.global_accesses_per_result == 4096 / 64
  assert t.shared_accesses_per_result == 4096 / 4


def test_accesses_per_result_without_tiles():
  t = traffic.model(2, LADDER[2], Problem(4096, 4096, 4096), H200)
  assert t.global_accesses_per_result == 2 * 4096
  assert t.shared_accesses_per_result == 0
  assert t.shared_load_bytes == t.shared_store_bytes == 0


def test_a_32_wide_block_cuts_global_traffic_32_times():
  cube = Problem(4096, 4096, 4096)
  naive = traffic.model(2, SimtConfig(32, 32), cube, H200)
  tiled = traffic.model(3, TILE_32, cube, H200)
  assert naive.global_load_bytes == 32 * tiled.global_load_bytes


@pytest.mark.parametrize(
  ("rows", "columns", "ratio"),
  [(1, 1, 0.5), (8, 1, 8 / 9), (8, 8, 4.0), (8, 16, 16 / 3), (64, 256, 51.2)],
)
def test_compute_to_load(rows, columns, ratio):
  assert traffic.compute_to_load(rows, columns) == pytest.approx(ratio)
  assert ratio == pytest.approx(rows * columns / (rows + columns))


def test_vector_loads_change_instructions_and_not_bytes():
  cube = Problem(4096, 4096, 4096)
  scalar = traffic.model(5, BLOCKTILE_2D, cube, H200)
  vector = traffic.model(6, VECTORIZED, cube, H200)
  assert scalar.global_load_bytes == vector.global_load_bytes
  assert scalar.shared_load_bytes == vector.shared_load_bytes
  assert scalar.loads_per_fma == 16 / 64
  assert vector.loads_per_fma == 4 / 64
  assert vector.fma_issue_share == pytest.approx(64 / 68)


# 256^3: one warp.


def test_256_cubed():
  cube = Problem(256, 256, 256)
  t = traffic.model("coalesced", LADDER[2], cube, H200)
  assert t.fmas == 16_777_216
  assert traffic.warp_footprint("coalesced", LADDER[2], cube) == (
    1024,
    32 * 1024,
  )
  assert traffic.warp_footprint("naive", LADDER[1], cube) == (
    32 * 1024,
    1024,
  )


# Which addresses lanes touch.


@pytest.mark.parametrize("k", [0, 5])
def test_lanes_of_mapping_a(k):
  lanes = traffic.lanes_addresses("A", k=k)
  assert [x.a for x in lanes] == [(0, k)] * 4
  assert [x.b for x in lanes] == [(k, 0), (k, 1), (k, 2), (k, 3)]
  assert [x.c for x in lanes] == [(0, 0), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("k", [0, 5])
def test_lanes_of_mapping_b(k):
  lanes = traffic.lanes_addresses("B", k=k)
  assert [x.a for x in lanes] == [(0, k), (1, k), (2, k), (3, k)]
  assert [x.b for x in lanes] == [(k, 0)] * 4
  assert [x.c for x in lanes] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_lanes_wrap_at_the_width_of_the_block():
  lanes = traffic.lanes_addresses("A", lanes=(3, 4, 5), width=4)
  assert [x.c for x in lanes] == [(0, 3), (1, 0), (1, 1)]
  lanes = traffic.lanes_addresses("B", lanes=(3, 4, 5), width=4)
  assert [x.c for x in lanes] == [(3, 0), (0, 1), (1, 1)]


def test_unknown_mapping():
  with pytest.raises(ValueError, match="mapping must be 'A' or 'B', got 'C'"):
    traffic.lanes_addresses("C")


def test_sectors_of_the_mappings():
  cube = Problem(4096, 4096, 4096)
  # 32 neighbours are 128 bytes, 4 sectors; 32 rows are 32 sectors.
  assert traffic.model(1, LADDER[1], cube, H200).sectors == (32, 1)
  assert traffic.model(2, LADDER[2], cube, H200).sectors == (1, 4)
  assert traffic.model(3, LADDER[3], cube, H200).sectors is None


def test_sectors_of_a_block_smaller_than_a_warp():
  # Rows of 16 floats are 64 bytes apart: each has its own sector.
  assert traffic.model(1, BLOCK_4X4, SMALL, H200).sectors == (4, 1)
  # Four columns are 16 bytes; the warp takes all four rows.
  assert traffic.model(2, BLOCK_4X4, SMALL, H200).sectors == (4, 1)


def test_coalescing_is_what_separates_rungs_1_and_2():
  cube = Problem(4096, 4096, 4096)
  naive = traffic.model(1, LADDER[1], cube, H200)
  coalesced = traffic.model(2, LADDER[2], cube, H200)
  assert naive.global_load_bytes == coalesced.global_load_bytes
  assert naive.floor.binds == coalesced.floor.binds == "l1"
  # 32 + 1 lines against 1 + 1.
  ratio = naive.floor.seconds / coalesced.floor.seconds
  assert ratio == pytest.approx(33 / 2)


@pytest.mark.parametrize(
  ("number", "config", "tile"),
  [
    (1, SimtConfig(32, 4), (32, 1)),
    (1, SimtConfig(128, 1), (32, 1)),
    (2, SimtConfig(4, 32), (1, 32)),
    (2, SimtConfig(4, 4), (4, 4)),
    (3, TILE_32, (8, 32)),
    (4, BLOCKTILE_1D, (32, 32)),
    (4, dataclasses.replace(BLOCKTILE_1D, thread_m=32), (32, 32)),
    (6, VECTORIZED, (16, 128)),
    (7, VECTORIZED, (32, 64)),
    (7, SimtConfig(128, 64, 8, 8, 8, 4), (64, 32)),
  ],
)
def test_warp_tiles(number, config, tile):
  assert traffic.warp_tile(number, config) == tile


def test_a_squarer_warp_reads_less_shared_memory():
  cube = Problem(4096, 4096, 4096)
  wide = traffic.model(6, VECTORIZED, cube, H200)
  square = traffic.model(7, VECTORIZED, cube, H200)
  assert square.shared_load_bytes == wide.shared_load_bytes
  assert square.floor.shared_seconds < wide.floor.shared_seconds


# Tensor cores.


def test_wgmma_reads_of_a_tile():
  # 128x128x64 in wgmmas of 64 x 128: A once, B for each 64 rows.
  problem = Problem(128, 128, 64, "bfloat16")
  t = traffic.model(9, LADDER[9], problem, H200)
  assert t.shared_load_bytes == (128 * 64 + 2 * 128 * 64) * 2
  assert t.shared_store_bytes == 2 * 128 * 64 * 2
  assert t.shared_accesses_per_result == 64 / 128 + 64 / 64


def test_consumers_that_split_columns_read_more_of_a():
  problem = Problem(4096, 4096, 4096, "bfloat16")
  by_m = TensorCoreConfig(128, 256, 64, consumers=2, split="m")
  by_n = dataclasses.replace(by_m, split="n")
  m, n = (traffic.model(10, c, problem, H200) for c in (by_m, by_n))
  tile = 4096 * 4096 / (128 * 256)
  assert n.shared_load_bytes - m.shared_load_bytes == tile * 128 * 4096 * 2
  assert m.global_load_bytes == n.global_load_bytes


def test_the_epilogue_passes_through_shared_memory():
  problem = Problem(1024, 1024, 512, "bfloat16")
  direct = traffic.model(10, LADDER[10], problem, H200)
  staged = traffic.model(11, LADDER[11], problem, H200)
  result = 1024 * 1024 * 2
  assert staged.shared_load_bytes - direct.shared_load_bytes == result
  assert staged.shared_store_bytes - direct.shared_store_bytes == result


@pytest.mark.parametrize(("cm", "cn"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_multicast_divides_the_shared_operand(cm, cn):
  problem = Problem(4096, 8192, 4096, "bfloat16")
  config = TensorCoreConfig(128, 256, 64, cluster_m=cm, cluster_n=cn)
  t = traffic.model(12, config, problem, H200)
  a = 4096 * 4096 * (8192 // 256) // cn
  b = 8192 * 4096 * (4096 // 128) // cm
  assert t.global_load_bytes == 2 * (a + b)
  assert t.block_reads == (128 // cn + 256 // cm) * 4096
  alone = dataclasses.replace(config, cluster_m=1, cluster_n=1)
  before = traffic.model(12, alone, problem, H200)
  # Every thread block still receives its whole tiles.
  assert t.shared_store_bytes == before.shared_store_bytes


# Padding, C, and nothing at all.


def test_padding_counts_until_tma_masks():
  odd, whole = Problem(65, 129, 9), Problem(128, 256, 16)
  for number in (5, 6, 7):
    t = traffic.model(number, LADDER[number], odd, H200)
    padded = traffic.model(number, LADDER[number], whole, H200)
    assert t.global_load_bytes == padded.global_load_bytes
    assert t.global_store_bytes == padded.global_store_bytes == 128 * 256 * 4
    assert t.flops < padded.flops
  t = traffic.model(8, LADDER[8], odd, H200)
  assert t.global_store_bytes == 65 * 129 * 4
  assert t.global_load_bytes == (65 * 2 + 129 * 2) * 9 * 4


@pytest.mark.parametrize("number", LADDER)
def test_c_is_read_only_if_beta_is_not_zero(number):
  plain = problem_for(number, 256, 256, 128)
  added = dataclasses.replace(plain, beta=0.5)
  a = traffic.model(number, LADDER[number], plain, H200)
  b = traffic.model(number, LADDER[number], added, H200)
  c_bytes = 256 * 256 * plain.itemsize
  assert b.global_load_bytes - a.global_load_bytes == c_bytes
  assert b.compulsory_bytes - a.compulsory_bytes == c_bytes
  assert b.block_reads == a.block_reads


@pytest.mark.parametrize("number", LADDER)
@pytest.mark.parametrize(
  "change", [{"k": 0}, {"m": 0}, {"n": 0}, {"alpha": 0.0}]
)
def test_nothing_to_multiply(number, change):
  problem = dataclasses.replace(
    problem_for(number, 8, 8, 8, beta=2.0), **change
  )
  t = traffic.model(number, LADDER[number], problem, H200)
  results = problem.m * problem.n * problem.itemsize
  assert t.blocks == t.flops == t.block_reads == t.shared_load_bytes == 0
  assert t.global_load_bytes == t.global_store_bytes == results
  assert t.compulsory_bytes == 2 * results
  assert t.intensity == 0
  text = traffic_text.explain(number, LADDER[number], problem, H200)
  assert "nothing to launch" in text


# What must hold for every problem.


sizes = st.integers(1, 9000)


@given(
  st.sampled_from(list(LADDER)),
  sizes,
  sizes,
  sizes,
  st.sampled_from([0.0, 1.0]),
)
def test_nothing_moves_less_than_what_is_compulsory(number, m, n, k, beta):
  problem = problem_for(number, m, n, k, beta=beta)
  t = traffic.model(number, LADDER[number], problem, H200)
  assert t.flops == 2 * m * n * k
  assert t.compulsory_bytes <= t.global_load_bytes + t.global_store_bytes
  assert t.block_unique_reads <= t.block_reads or number >= 8
  assert t.floor.compute_seconds >= t.flops / H200.bf16_flops
  assert t.floor.memory_seconds == t.compulsory_bytes / H200.dram_bytes_per_s
  assert t.floor.seconds > 0


@given(
  st.sampled_from(list(LADDER)),
  st.tuples(sizes, sizes, sizes),
  st.tuples(sizes, sizes, sizes),
)
def test_the_floor_rises_with_the_problem(number, shape, more):
  larger = [x + y for x, y in zip(shape, more)]
  config = LADDER[number]
  small = traffic.model(number, config, problem_for(number, *shape), H200)
  large = traffic.model(number, config, problem_for(number, *larger), H200)
  for field in ("compute_seconds", "memory_seconds", "shared_seconds"):
    assert getattr(large.floor, field) >= getattr(small.floor, field) * 0.999
  assert large.global_load_bytes >= small.global_load_bytes


@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 64))
def test_larger_blocks_read_less(rows, columns, k):
  problem = Problem(512, 512, k)
  small = SimtConfig(32, 32, 1)
  large = SimtConfig(32 << rows, 32 << columns, 1)
  assert (
    traffic.model(3, large, problem, H200).global_load_bytes
    <= traffic.model(3, small, problem, H200).global_load_bytes
  )


def test_intensity_rises_along_the_ladder():
  shape = (4096, 4096, 4096)
  intensity = [
    traffic.model(i, c, problem_for(i, *shape), H200).intensity
    for i, c in LADDER.items()
  ]
  assert intensity == sorted(intensity)
  assert intensity[0] == 0.25


def test_one_block_has_one_sm_to_itself():
  t = traffic.model(9, LADDER[9], Problem(128, 128, 4096, "bfloat16"), H200)
  assert t.blocks == 1
  even = t.flops / H200.bf16_flops
  assert t.floor.compute_seconds == pytest.approx(even * H200.sm_count)


# The interface.


@pytest.mark.parametrize(
  ("number", "name"), list(enumerate(traffic.NAMES, start=1))
)
def test_rungs_by_number_and_by_name(number, name):
  assert traffic.rung_number(number) == traffic.rung_number(name) == number
  problem = problem_for(number, 64, 64, 64)
  by_name = traffic.model(name, LADDER[number], problem, H200)
  assert by_name == traffic.model(number, LADDER[number], problem, H200)
  assert (by_name.number, by_name.name) == (number, name)


@pytest.mark.parametrize("rung", [0, 13, -1, "fast", 1.5, None])
def test_no_such_rung(rung):
  with pytest.raises(ValueError, match=r"rung must be 1\.\.12 or one of naive"):
    traffic.rung_number(rung)


@pytest.mark.parametrize(("number", "other"), [(1, 9), (8, 12), (9, 8)])
def test_config_of_the_other_kind(number, other):
  with pytest.raises(TypeError, match=r"config of .* must be a .*Config, got"):
    traffic.model(number, LADDER[other], SMALL, H200)


def test_the_gpu_is_the_current_one():
  with hardware.assume("A100-SXM4-80GB"):
    assert traffic.model(3, TILE_32, SMALL).gpu == A100


@pytest.mark.parametrize("number", LADDER)
@pytest.mark.parametrize(
  "shape", [(1, 1, 1), (16, 16, 16), (4095, 4097, 65), (16384, 16384, 16384)]
)
def test_explain_fits_a_terminal(number, shape):
  problem = problem_for(number, *shape, beta=1.0)
  text = traffic_text.explain(number, LADDER[number], problem, H200)
  lines = text.split("\n")
  assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
  assert text.isascii()
  assert traffic.NAMES[number - 1] in lines[0]
  assert "NVIDIA H200 (132 SMs)" in lines[0]
  assert sum(line.endswith("<- binds") for line in lines) == 1


def test_explain_works_the_small_example():
  text = traffic_text.explain(1, BLOCK_4X4, SMALL, H200)
  lines = {" ".join(line.split()) for line in text.split("\n") if line.strip()}
  assert "work 8,192 FLOP 2 M N K" in lines
  assert "global reads of a block 512 BM BN (TM + TN) K / (TM TN)" in lines
  assert "different ones 128 (BM + BN) K" in lines
  assert "global bytes read 32,768 B by all blocks" in lines
  assert "arithmetic intensity 0.25 FLOP/byte work / global bytes read" in lines


def test_explain_says_that_rates_are_scaled():
  gpu = dataclasses.replace(H200, name="other", modelled_on="NVIDIA H200")
  text = traffic_text.explain(7, VECTORIZED, SMALL, gpu)
  assert "rates scaled from NVIDIA H200" in text
