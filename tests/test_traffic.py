"""traffic: the worked numbers of the classic texts, and what must hold."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st
import pytest

from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import blocks, lanes, traffic
from pallas_gemm.ladder.contract import Gemm, SimtConfig, TensorCoreConfig

H200 = hardware.lookup("H200")
SMALL = Gemm(16, 16, 16)
CUBE = Gemm(4096, 4096, 4096)
BLOCK_4X4 = SimtConfig(block_m=4, block_n=4)
# 8 x 8 a thread, as rung 6 has them by default; rung 7 can do so too.
VECTORIZED = SimtConfig(64, 128, 16, 8, 8, vector=4)
RUNGS = {rung.label: rung for rung in ladder.with_variants()}
with hardware.assume("H200"):
  CONFIGS = {label: x.default_config(CUBE) for label, x in RUNGS.items()}


def problem_for(label, m, n, k, **kwargs):
  return Gemm(m, n, k, dtype=RUNGS[label].dtypes[0], **kwargs)


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
  assert t.flops == 2 * t.fmas == 2 * 16**3
  assert t.intensity == 0.25
  assert t.compute_to_load == 0.5


def test_the_gain_of_tiling_is_the_block_size():
  for block in (2, 4, 8, 16):
    naive = SimtConfig(block, block)
    tiled = SimtConfig(block, block, block_k=block)
    before = model(2, SMALL, naive)
    after = model(3, SMALL, tiled)
    assert after.intensity / before.intensity == block
    assert before.global_load_bytes / after.global_load_bytes == block


# Rung, config; what each term of a sum reads from global and shared memory.
@pytest.mark.parametrize(
  ("rung", "config", "from_global", "from_shared"),
  [
    (2, None, 2, 0),
    (3, None, 1 / 16, 2),
    (4, None, 1 / 32, 9 / 8),
    (5, SimtConfig(64, 128, 8, thread_m=8, thread_n=8), 3 / 128, 1 / 4),
    (5, SimtConfig(128, 128, 8, thread_m=16, thread_n=8), 1 / 64, 3 / 16),
  ],
)
def test_accesses_per_result(rung, config, from_global, from_shared):
  for k in (32, 256, 4096):
    t = model(rung, Gemm(4096, 4096, k), config)
    assert t.global_accesses_per_result == k * from_global
    assert t.shared_accesses_per_result == k * from_shared
    loaded, stored = t.shared_load_bytes, t.shared_store_bytes
    assert (loaded > 0) == (stored > 0) == (from_shared > 0)


def test_vector_loads_change_instructions_and_not_bytes():
  scalar, vector = model(5, CUBE), model(6, CUBE)
  assert scalar.global_load_bytes == vector.global_load_bytes
  assert scalar.shared_load_bytes == vector.shared_load_bytes
  assert scalar.loads_per_fma == 16 / 64
  assert vector.loads_per_fma == 4 / 64
  assert vector.fma_issue_share == pytest.approx(64 / 68)


# Which addresses lanes touch.


WRAPPED = {"lanes": (3, 4, 5), "width": 4}


@pytest.mark.parametrize(
  ("mapping", "options", "results"),
  [
    ("A", {}, [(0, 0), (0, 1), (0, 2), (0, 3)]),
    ("B", {}, [(0, 0), (1, 0), (2, 0), (3, 0)]),
    ("A", WRAPPED, [(0, 3), (1, 0), (1, 1)]),
    ("B", WRAPPED, [(3, 0), (0, 1), (1, 1)]),
  ],
)
def test_lanes(mapping, options, results):
  found = traffic.lanes_addresses(mapping, k=5, **options)
  touched = [((i, 5), (5, j), (i, j)) for i, j in results]
  assert [(x.a, x.b, x.c) for x in found] == touched
  with pytest.raises(ValueError, match="mapping must be 'A' or 'B', got 'C'"):
    traffic.lanes_addresses("C")


@pytest.mark.parametrize(
  ("rung", "problem", "config", "sectors"),
  [
    # 32 neighbours are 128 bytes, 4 sectors; 32 rows are 32 sectors.
    (1, CUBE, None, (32, 1)),
    (2, CUBE, None, (1, 4)),
    (3, CUBE, None, None),
    # Rows of 16 floats are 64 bytes apart: each has its own sector. Four
    # columns are 16 bytes; the warp takes all four rows.
    (1, SMALL, BLOCK_4X4, (4, 1)),
    (2, SMALL, BLOCK_4X4, (4, 1)),
  ],
)
def test_sectors(rung, problem, config, sectors):
  assert model(rung, problem, config).sectors == sectors


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
    (2, BLOCK_4X4, (4, 4)),
    (2, SimtConfig(64, 64), (32, 32)),
    (3, None, (1, 32)),
    (3, SimtConfig(4, 4, block_k=4), (4, 4)),
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
  assert lanes.warp_tile(rung, config) == tile


def test_a_squarer_warp_reads_less_shared_memory():
  wide, square = model(6, CUBE, VECTORIZED), model(7, CUBE, VECTORIZED)
  assert square.shared_load_bytes == wide.shared_load_bytes
  assert square.floor.shared_seconds < wide.floor.shared_seconds


# Tensor cores.


def test_reads_of_a_tile():
  # 128x128x64 in wgmmas of 64 x 128: A once, B for each 64 rows.
  t = model(9, Gemm(128, 128, 64, "bfloat16"))
  result = 128 * 128
  assert t.shared_load_bytes == (128 * 64 + 2 * 128 * 64 + result) * 2
  assert t.shared_store_bytes == (2 * 128 * 64 + result) * 2
  assert t.shared_accesses_per_result == 64 / 128 + 64 / 64
  # 2 x 2 warps of 64 x 64: A and B twice. The result leaves from registers.
  t = model("9a", Gemm(128, 128, 64, "bfloat16"))
  assert t.shared_load_bytes == 2 * (128 + 128) * 64 * 2
  assert t.shared_store_bytes == (128 + 128) * 64 * 2
  assert t.shared_accesses_per_result == 64 / 64 + 64 / 64
  assert t.compute_to_load == 32


def test_consumers_that_split_columns_read_more_of_a():
  problem = Gemm(4096, 4096, 4096, "bfloat16")
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
  problem = Gemm(4096, 8192, 4096, "bfloat16")
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
  for label, t in facts.items():
    assert bool(t.slabs) == (RUNGS[label].number > 2)
    assert t.threads_load == ("tma" not in RUNGS[label].needs)


@pytest.mark.parametrize(
  ("variant", "like"),
  [
    ("8a", "7"),
    ("9a", "9"),
    ("9b", "9"),
    ("9c", "9"),
    ("10a", "10"),
    ("11a", "11"),
  ],
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


# What must hold for every problem.


sizes = st.integers(1, 9000)
labels, shapes = st.sampled_from(list(RUNGS)), st.tuples(sizes, sizes, sizes)


@given(labels, shapes, st.sampled_from([0.0, 1.0]))
def test_nothing_moves_less_than_what_is_compulsory(label, shape, beta):
  m, n, k = shape
  t = model(label, problem_for(label, m, n, k, beta=beta))
  assert t.flops == 2 * m * n * k
  assert t.compulsory_bytes <= t.global_load_bytes + t.global_store_bytes
  assert t.block_unique_reads <= t.block_reads or label == "12"
  assert t.floor.compute_seconds >= t.flops / H200.bf16_flops
  assert t.floor.memory_seconds == t.compulsory_bytes / H200.dram_bytes_per_s
  assert t.floor.seconds > 0


@given(labels, shapes, shapes)
def test_the_floor_rises_with_the_problem(label, shape, more):
  larger = [x + y for x, y in zip(shape, more)]
  small = model(label, problem_for(label, *shape))
  large = model(label, problem_for(label, *larger))
  for field in ("compute_seconds", "memory_seconds", "shared_seconds"):
    assert getattr(large.floor, field) >= getattr(small.floor, field) * 0.999
  assert large.global_load_bytes >= small.global_load_bytes


def test_intensity_rises_along_the_ladder():
  intensity = [
    model(rung, problem_for(rung.label, 4096, 4096, 4096)).intensity
    for rung in ladder.LADDER
  ]
  assert intensity == sorted(intensity)
  assert intensity[0] == 0.25


def test_one_block_has_one_sm_to_itself():
  t = model(9, Gemm(128, 128, 4096, "bfloat16"))
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
    found = traffic.model(3, CONFIGS["3"], SMALL).gpu
  assert found == hardware.lookup("A100-SXM4-80GB")
