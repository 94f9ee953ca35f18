"""traffic: the worked numbers of the classic texts, and what must hold."""

import dataclasses
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
import pytest

from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import blocks, traffic, traffic_text
from pallas_gemm.ladder.contract import Problem, SimtConfig, TensorCoreConfig

H200 = hardware.lookup("H200")
A100 = hardware.lookup("A100-SXM4-80GB")
SMALL = Problem(16, 16, 16)
CUBE = Problem(4096, 4096, 4096)
BLOCK_4X4 = SimtConfig(block_m=4, block_n=4)
TILE_4X4 = SimtConfig(block_m=4, block_n=4, block_k=4)
# 8 x 8 a thread, as rung 6 has them by default; rung 7 can do so too.
VECTORIZED = SimtConfig(64, 128, 16, 8, 8, vector=4)
RUNGS = {rung.label: rung for rung in ladder.with_variants()}
with hardware.assume("H200"):
  CONFIGS = {label: x.default_config(CUBE) for label, x in RUNGS.items()}


def problem_for(label, m, n, k, **kwargs):
  return Problem(m, n, k, dtype=RUNGS[label].dtypes[0], **kwargs)


def model(rung, problem, config=None):
  """Of a legal config, the rung's default unless told, on H200."""
  rung = ladder.find(rung)
  config = config or CONFIGS[rung.label]
  with hardware.assume("H200"):
    assert rung.is_legal(config, problem) is None
  return traffic.model(rung, config, problem, H200)


# The running example: 16^3 in 4x4 blocks.


@pytest.mark.parametrize("rung", [1, 2, "naive", "coalesced"])
def test_small_example_naive(rung):
  t = model(rung, SMALL, BLOCK_4X4)
  assert t.blocks == 16
  assert t.block_reads == 512
  assert t.block_unique_reads == 128
  assert t.global_load_bytes == 32768
  assert t.flops == 2 * 16**3
  assert t.intensity == 0.25
  assert t.compute_to_load == 0.5


def test_small_example_in_shared_memory():
  t = model("shared_memory", SMALL, TILE_4X4)
  assert t.block_reads == t.block_unique_reads == 128
  assert t.global_load_bytes == 8192
  assert t.intensity == 1.0


def test_the_gain_of_tiling_is_the_block_size():
  for block in (2, 4, 8, 16):
    naive = SimtConfig(block, block)
    tiled = SimtConfig(block, block, block_k=block)
    before = model(2, SMALL, naive)
    after = model(3, SMALL, tiled)
    assert after.intensity / before.intensity == block
    assert before.global_load_bytes / after.global_load_bytes == block


def test_small_example_by_walking_the_loops():
  per_thread, different = 0, set()
  for i, j in itertools.product(range(4), range(4)):
    for k in range(16):
      per_thread += 2
      different |= {("a", i, k), ("b", k, j)}
  t = model(1, SMALL, BLOCK_4X4)
  assert (t.block_reads, t.block_unique_reads) == (per_thread, len(different))


# Accesses per result.


# Rung, config; what each term of a sum reads from global and shared memory.
ACCESSES = [
  (2, None, 2, 0),
  (3, None, 1 / 16, 2),
  (4, None, 1 / 32, 9 / 8),
  (5, SimtConfig(64, 128, 8, thread_m=8, thread_n=8), 3 / 128, 1 / 4),
  (5, SimtConfig(128, 128, 8, thread_m=16, thread_n=8), 1 / 64, 3 / 16),
]


@pytest.mark.parametrize(
  ("rung", "config", "from_global", "from_shared"), ACCESSES
)
def test_accesses_per_result(rung, config, from_global, from_shared):
  for k in (32, 256, 4096):
    t = model(rung, Problem(4096, 4096, k), config)
    assert t.global_accesses_per_result == k * from_global
    assert t.shared_accesses_per_result == k * from_shared
    loaded, stored = t.shared_load_bytes, t.shared_store_bytes
    assert (loaded > 0) == (stored > 0) == (from_shared > 0)


def test_a_32_wide_block_cuts_global_traffic_32_times():
  naive, tiled = model(2, CUBE, SimtConfig(32, 32)), model(3, CUBE)
  assert naive.global_load_bytes == 32 * tiled.global_load_bytes


@pytest.mark.parametrize(
  ("rows", "columns", "ratio"),
  [(1, 1, 0.5), (8, 1, 8 / 9), (8, 8, 4.0), (8, 16, 16 / 3), (64, 256, 51.2)],
)
def test_compute_to_load(rows, columns, ratio):
  assert traffic.compute_to_load(rows, columns) == pytest.approx(ratio)
  assert ratio == pytest.approx(rows * columns / (rows + columns))


def test_vector_loads_change_instructions_and_not_bytes():
  scalar, vector = model(5, CUBE), model(6, CUBE)
  assert scalar.global_load_bytes == vector.global_load_bytes
  assert scalar.shared_load_bytes == vector.shared_load_bytes
  assert scalar.loads_per_fma == 16 / 64
  assert vector.loads_per_fma == 4 / 64
  assert vector.fma_issue_share == pytest.approx(64 / 68)


# 256^3: one warp.


def test_256_cubed():
  cube = Problem(256, 256, 256)
  assert model("coalesced", cube).fmas == 16_777_216
  kib = 1024
  of = {x: traffic.warp_footprint(x, CONFIGS[x], cube) for x in ("1", "2")}
  assert of == {"1": (32 * kib, kib), "2": (kib, 32 * kib)}


# Which addresses lanes touch.


@pytest.mark.parametrize("k", [0, 5])
def test_lanes(k):
  """Four that walk along a row of C, and four along a column."""
  walk = range(4)
  row, column = (traffic.lanes_addresses(x, k=k) for x in "AB")
  assert [x.a for x in row] == [(0, k)] * 4
  assert [x.b for x in row] == [(k, lane) for lane in walk]
  assert [x.c for x in row] == [(0, lane) for lane in walk]
  assert [x.a for x in column] == [(lane, k) for lane in walk]
  assert [x.b for x in column] == [(k, 0)] * 4
  assert [x.c for x in column] == [(lane, 0) for lane in walk]


def test_lanes_wrap_at_the_width_of_the_block():
  lanes = traffic.lanes_addresses("A", lanes=(3, 4, 5), width=4)
  assert [x.c for x in lanes] == [(0, 3), (1, 0), (1, 1)]
  lanes = traffic.lanes_addresses("B", lanes=(3, 4, 5), width=4)
  assert [x.c for x in lanes] == [(3, 0), (0, 1), (1, 1)]


def test_unknown_mapping():
  with pytest.raises(ValueError, match="mapping must be 'A' or 'B', got 'C'"):
    traffic.lanes_addresses("C")


def test_sectors_of_the_mappings():
  # 32 neighbours are 128 bytes, 4 sectors; 32 rows are 32 sectors.
  assert model(1, CUBE).sectors == (32, 1)
  assert model(2, CUBE).sectors == (1, 4)
  assert model(3, CUBE).sectors is None


def test_sectors_of_a_block_smaller_than_a_warp():
  # Rows of 16 floats are 64 bytes apart: each has its own sector.
  assert model(1, SMALL, BLOCK_4X4).sectors == (4, 1)
  # Four columns are 16 bytes; the warp takes all four rows.
  assert model(2, SMALL, BLOCK_4X4).sectors == (4, 1)


def test_coalescing_is_what_separates_rungs_1_and_2():
  naive, coalesced = model(1, CUBE), model(2, CUBE)
  assert naive.global_load_bytes == coalesced.global_load_bytes
  assert naive.floor.binds == coalesced.floor.binds == "l1"
  # 32 + 1 lines against 1 + 1.
  ratio = naive.floor.seconds / coalesced.floor.seconds
  assert ratio == pytest.approx(33 / 2)


def test_shared_memory_binds_rung_3():
  # A warp is one row of 32: 33 values of shared memory a step.
  t = model(3, CUBE)
  assert t.floor.binds == "shared memory"
  assert t.floor.seconds == pytest.approx(9.05e-3, rel=1e-3)
  wider = model(4, CUBE)
  assert wider.floor.shared_seconds < t.floor.shared_seconds / 5


@pytest.mark.parametrize(
  ("rung", "config", "tile"),
  [
    (1, None, (32, 1)),
    (1, SimtConfig(128, 1), (32, 1)),
    (1, SimtConfig(64, 64), (32, 32)),
    (2, None, (1, 32)),
    (2, SimtConfig(1, 128), (1, 32)),
    (2, BLOCK_4X4, (4, 4)),
    (2, SimtConfig(64, 64), (32, 32)),
    (3, None, (1, 32)),
    (3, TILE_4X4, (4, 4)),
    (4, None, (8, 32)),
    (4, SimtConfig(64, 64, 32, thread_m=32), (32, 32)),
    (5, None, (16, 128)),
    (6, None, (16, 128)),
    (7, None, (64, 64)),
    (7, VECTORIZED, (32, 64)),
    (7, SimtConfig(128, 64, 8, 16, 4, 4), (64, 32)),
    (8, None, (64, 64)),
    (8, SimtConfig(64, 256, 16, 8, 8, 4, stages=2), (32, 64)),
    ("8a", None, (64, 64)),
  ],
)
def test_warp_tiles(rung, config, tile):
  rung = ladder.find(rung)
  config = config or CONFIGS[rung.label]
  with hardware.assume("H200"):
    assert rung.is_legal(config, CUBE) is None
  assert traffic.warp_tile(rung, config) == tile


def test_a_squarer_warp_reads_less_shared_memory():
  wide, square = model(6, CUBE, VECTORIZED), model(7, CUBE, VECTORIZED)
  assert square.shared_load_bytes == wide.shared_load_bytes
  assert square.floor.shared_seconds < wide.floor.shared_seconds


# Tensor cores.


def test_wgmma_reads_of_a_tile():
  # 128x128x64 in wgmmas of 64 x 128: A once, B for each 64 rows.
  t = model(9, Problem(128, 128, 64, "bfloat16"))
  result = 128 * 128
  assert t.shared_load_bytes == (128 * 64 + 2 * 128 * 64 + result) * 2
  assert t.shared_store_bytes == (2 * 128 * 64 + result) * 2
  assert t.shared_accesses_per_result == 64 / 128 + 64 / 64


def test_mma_reads_of_a_tile():
  # 2 x 2 warps of 64 x 64: A and B twice. The result leaves from registers.
  t = model("9a", Problem(128, 128, 64, "bfloat16"))
  assert t.shared_load_bytes == 2 * (128 + 128) * 64 * 2
  assert t.shared_store_bytes == (128 + 128) * 64 * 2
  assert t.shared_accesses_per_result == 64 / 64 + 64 / 64
  assert t.compute_to_load == 32


def test_consumers_that_split_columns_read_more_of_a():
  problem = Problem(4096, 4096, 4096, "bfloat16")
  by_m = CONFIGS["10"]
  by_n = dataclasses.replace(by_m, split="n")
  m, n = (model(10, problem, config) for config in (by_m, by_n))
  tile = 4096 * 4096 / (128 * 256)
  assert n.shared_load_bytes - m.shared_load_bytes == tile * 128 * 4096 * 2
  assert m.global_load_bytes == n.global_load_bytes


def test_the_result_passes_through_shared_memory():
  # With twice K, the operands do so twice and the result once.
  for label in ("9", "9b", "10", "10a", "11", "11a", "12"):
    short, long = (
      model(label, problem_for(label, 1024, 1024, k)) for k in (512, 1024)
    )
    for field in ("shared_load_bytes", "shared_store_bytes"):
      result = 2 * getattr(short, field) - getattr(long, field)
      assert result == 1024 * 1024 * 2


@pytest.mark.parametrize(("cm", "cn"), [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4)])
def test_multicast_divides_the_shared_operand(cm, cn):
  problem = Problem(4096, 8192, 4096, "bfloat16")
  alone = TensorCoreConfig(128, 256, 64, stages=3, consumers=2, epilogue_n=64)
  config = dataclasses.replace(alone, cluster_m=cm, cluster_n=cn)
  t = model(12, problem, config)
  a = 4096 * 4096 * (8192 // 256) // cn
  b = 8192 * 4096 * (4096 // 128) // cm
  assert t.global_load_bytes == 2 * (a + b)
  assert t.block_reads == (128 // cn + 256 // cm) * 4096
  before = model(12, problem, alone)
  # Every thread block still receives its whole tiles.
  assert t.shared_store_bytes == before.shared_store_bytes


# The grid and the BlockSpecs.


@pytest.mark.parametrize("label", RUNGS)
def test_blocks_read_what_their_specs_say(label):
  rung, config = RUNGS[label], CONFIGS[label]
  sizes = 4 * config.block_m, 3 * config.block_n, 5 * (config.block_k or 1)
  problem = problem_for(label, *sizes)
  assert rung.padded(problem, config) == problem
  grid = rung.grid(problem, config)
  reads = 0
  for spec in rung.specs(problem, config).in_specs:
    sharers = [getattr(config, x) for x in spec.collective_axes or ()]
    reads += blocks.elements(spec) * math.prod(grid) // math.prod(sharers)
  t = model(label, problem)
  if t.slabs:
    assert t.block_reads * t.blocks == reads
    assert t.global_load_bytes == reads * problem.itemsize
  else:
    assert t.block_unique_reads * t.blocks == reads


def test_how_operands_come():
  facts = {x: model(x, problem_for(x, 256, 256, 64)) for x in RUNGS}
  assert {x for x, t in facts.items() if not t.slabs} == {"1", "2"}
  assert {x for x, t in facts.items() if t.threads_load} == {
    "1", "2", "3", "4", "5", "6", "7", "8a", "9a",
  }  # fmt: skip


@pytest.mark.parametrize(
  ("variant", "like"),
  [("8a", "7"), ("9a", "9"), ("9b", "9"), ("10a", "10"), ("11a", "11")],
)
def test_variants_move_what_a_rung_does(variant, like):
  t, rung = (
    model(x, problem_for(x, 4096, 4096, 4096)) for x in (variant, like)
  )
  for field in ("intensity", "block_reads", "global_load_bytes", "blocks"):
    assert getattr(t, field) == getattr(rung, field)


# Padding, C, and nothing at all.


@pytest.mark.parametrize("label", RUNGS)
def test_padding_counts_until_tma_masks(label):
  odd, rung = problem_for(label, 129, 257, 9), RUNGS[label]
  padded = rung.padded(odd, CONFIGS[label])
  t = model(label, odd)
  if t.threads_load:
    whole = model(label, padded)
    for field in ("global_load_bytes", "global_store_bytes", "block_reads"):
      assert getattr(t, field) == getattr(whole, field)
    assert t.global_store_bytes == padded.m * padded.n * odd.itemsize
    assert t.flops < whole.flops
    return
  config = CONFIGS[label]
  blocks_m, blocks_n, _ = rung.grid(odd, config)
  # Both blocks of a column of a cluster read B together.
  blocks_m = blocks_m / getattr(config, "cluster_m", 1)
  assert t.global_store_bytes == 129 * 257 * odd.itemsize
  reads = (129 * blocks_n + 257 * math.ceil(blocks_m)) * 9
  assert t.global_load_bytes == reads * odd.itemsize


@pytest.mark.parametrize("label", RUNGS)
def test_c_is_read_only_if_beta_is_not_zero(label):
  plain = problem_for(label, 256, 256, 128)
  added = dataclasses.replace(plain, beta=0.5)
  a, b = model(label, plain), model(label, added)
  c_bytes = 256 * 256 * plain.itemsize
  assert b.global_load_bytes - a.global_load_bytes == c_bytes
  assert b.compulsory_bytes - a.compulsory_bytes == c_bytes
  assert b.block_reads == a.block_reads


@pytest.mark.parametrize("label", RUNGS)
@pytest.mark.parametrize(
  "change", [{"k": 0}, {"m": 0}, {"n": 0}, {"alpha": 0.0}]
)
def test_nothing_to_multiply(label, change):
  problem = dataclasses.replace(problem_for(label, 8, 8, 8, beta=2.0), **change)
  t = model(label, problem)
  results = problem.m * problem.n * problem.itemsize
  assert t.blocks == t.flops == t.block_reads == t.shared_load_bytes == 0
  assert t.global_load_bytes == t.global_store_bytes == results
  assert t.compulsory_bytes == 2 * results
  assert t.intensity == 0
  text = traffic_text.explain(label, CONFIGS[label], problem, H200)
  assert "nothing to launch" in text


# What must hold for every problem.


sizes = st.integers(1, 9000)


@given(
  st.sampled_from(list(RUNGS)),
  sizes,
  sizes,
  sizes,
  st.sampled_from([0.0, 1.0]),
)
def test_nothing_moves_less_than_what_is_compulsory(label, m, n, k, beta):
  t = model(label, problem_for(label, m, n, k, beta=beta))
  assert t.flops == 2 * m * n * k
  assert t.compulsory_bytes <= t.global_load_bytes + t.global_store_bytes
  assert t.block_unique_reads <= t.block_reads or label == "12"
  assert t.floor.compute_seconds >= t.flops / H200.bf16_flops
  assert t.floor.memory_seconds == t.compulsory_bytes / H200.dram_bytes_per_s
  assert t.floor.seconds > 0


@given(
  st.sampled_from(list(RUNGS)),
  st.tuples(sizes, sizes, sizes),
  st.tuples(sizes, sizes, sizes),
)
def test_the_floor_rises_with_the_problem(label, shape, more):
  larger = [x + y for x, y in zip(shape, more)]
  small = model(label, problem_for(label, *shape))
  large = model(label, problem_for(label, *larger))
  for field in ("compute_seconds", "memory_seconds", "shared_seconds"):
    assert getattr(large.floor, field) >= getattr(small.floor, field) * 0.999
  assert large.global_load_bytes >= small.global_load_bytes


@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 64))
def test_larger_blocks_read_less(rows, columns, k):
  problem = Problem(512, 512, k)
  small = SimtConfig(4, 4, 8)
  large = SimtConfig(4 << rows, 4 << columns, 8)
  assert (
    model(3, problem, large).global_load_bytes
    <= model(3, problem, small).global_load_bytes
  )


def test_intensity_rises_along_the_ladder():
  intensity = [
    model(rung, problem_for(rung.label, 4096, 4096, 4096)).intensity
    for rung in ladder.LADDER
  ]
  assert intensity == sorted(intensity)
  assert intensity[0] == 0.25


def test_one_block_has_one_sm_to_itself():
  t = model(9, Problem(128, 128, 4096, "bfloat16"))
  assert t.blocks == 1
  even = t.flops / H200.bf16_flops
  assert t.floor.compute_seconds == pytest.approx(even * H200.sm_count)


# The interface.


@pytest.mark.parametrize("label", RUNGS)
def test_rungs_by_label_by_name_and_by_number(label):
  rung, problem = RUNGS[label], problem_for(label, 64, 64, 64)
  t = model(rung, problem)
  assert model(label, problem) == model(rung.name, problem) == t
  assert (t.number, t.name) == (rung.number, rung.name)
  if not rung.variant:
    assert model(rung.number, problem) == t


@pytest.mark.parametrize(("label", "other"), [("1", "9"), ("8a", "9a")])
def test_config_of_the_other_kind(label, other):
  for rung, config in ((label, other), (other, label)):
    with pytest.raises(TypeError, match=r"config of .* must be a .*Config, go"):
      traffic.model(rung, CONFIGS[config], SMALL, H200)


def test_the_gpu_is_the_current_one():
  with hardware.assume("A100-SXM4-80GB"):
    assert traffic.model(3, CONFIGS["3"], SMALL).gpu == A100


@pytest.mark.parametrize("label", RUNGS)
@pytest.mark.parametrize(
  "shape", [(1, 1, 1), (16, 16, 16), (4095, 4097, 65), (16384, 16384, 16384)]
)
def test_explain_fits_a_terminal(label, shape):
  problem = problem_for(label, *shape, beta=1.0)
  text = traffic_text.explain(label, CONFIGS[label], problem, H200)
  lines = text.split("\n")
  assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
  assert text.isascii()
  assert lines[0].startswith(f"rung {label}, {RUNGS[label].name}, ")
  assert "NVIDIA H200 (132 SMs)" in lines[0]
  assert sum(line.endswith("<- binds") for line in lines) == 1


@pytest.mark.parametrize("label", RUNGS)
def test_explain_claims_what_the_kernel_does(label):
  problem = problem_for(label, 4096, 4096, 4096)
  text = traffic_text.explain(label, CONFIGS[label], problem, H200)
  tensor_cores = RUNGS[label].number >= 9
  assert ("by wgmma" in text) == (tensor_cores and label != "9a")
  assert ("for mma" in text) == (label == "9a")
  assert ("issue slots" in text) == (2 < RUNGS[label].number <= 8)
  assert ("by multicast" in text) == (label == "12")
  assert ("different ones" in text) == (label in ("1", "2"))


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
  text = traffic_text.explain(7, CONFIGS["7"], SMALL, gpu)
  assert "rates scaled from NVIDIA H200" in text
