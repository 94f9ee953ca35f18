"""Tier A: numbers of the dense Hopper kernel, in Pallas' GPU interpreter.

Each case is one of the smallest products in which its config has something to
get wrong: tiles that hang over every edge, more slabs of K than the ring has
stages, more tiles than blocks. Rows of shared memory that nothing was loaded
to hold NaN in the interpreter, so what leaks from past an edge shows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from tests.support import dense, oldest, problems

SMALL = Config(block_m=64, block_n=64, stages=2, consumers=1)
ROWS = Config(block_m=128, block_n=64, stages=2, epilogue_n=32)
COLUMNS = Config(block_m=64, block_n=128, stages=3, split="n")
WIDE = Config(block_m=64, block_n=128, stages=2, consumers=1, epilogue_n=32)
MOVES = Config(block_m=64, block_n=64, stages=2, consumers=1, moves=True)
NARROW = Config(block_m=64, block_n=96, stages=2, consumers=1, epilogue_n=32)
OVERLAP = Config(block_m=64, block_n=112, stages=2, consumers=1, epilogue_n=32)
DIRECT = Config(block_m=64, block_n=128, stages=2, consumers=1)
SWAPPED = Config(
  block_m=64,
  block_n=48,
  stages=2,
  consumers=1,
  epilogue_n=16,
  epilogue_buffers=1,
  swap_ab=True,
)


@dataclasses.dataclass(frozen=True)
class Case:
  """One product with one config."""

  shape: tuple[int, int, int]
  config: Config
  problem: dict
  epilogue: dense.Epilogue


def case(name: str, shape, config: Config, epilogue=dense.PLAIN, **problem):
  """A parameter of the test; `problem` has what `Problem` needs beside M, N, K.

  The dtype is bfloat16 unless said, the layout is the end of the name.
  """
  layout = name.rpartition("_")[2]
  problem |= {
    "transpose_a": layout[0] == "t",
    "transpose_b": layout[1] == "t",
    "activation": None
    if epilogue.activation is None
    else epilogue.activation.__name__,
  }
  problem = {"dtype": "bfloat16", "out_dtype": "bfloat16"} | problem
  return pytest.param(Case(shape, config, problem, epilogue), id=name)


def changed(config: Config, **fields) -> Config:
  """`config` with some fields changed."""
  return dataclasses.replace(config, **fields)


TWO = {"consumers": 2}
MANY_NARROW = changed(OVERLAP, block_n=224)
FP16 = {"dtype": "float16", "out_dtype": "float16"}
CASES = (
  # Each number of consumers, each side that they share out, each layout.
  case("one_consumer_nn", (70, 72, 70), SMALL),
  case("one_element_tt", (1, 1, 1), SMALL, **FP16),
  case(
    "rows_nt",
    (130, 40, 70),
    ROWS,
    dense.Epilogue(activation=jax.nn.relu),
    bias="n",
    **FP16,
  ),
  case(
    "columns_tn",
    (40, 136, 200),
    COLUMNS,
    dense.Epilogue(alpha=-0.5, beta=2.0),
    c_dtype="float32",
    out_dtype="float32",
  ),
  case(
    "three_consumers_tt",
    (180, 64, 64),
    Config(block_m=192, block_n=64, stages=2, consumers=3),
    dense.Epilogue(activation=jax.nn.gelu),
    bias="m",
  ),
  # Short rows are transposed: of A, of both, of a batch, with a swap.
  case("short_rows_tn", (19, 72, 90), SMALL),
  case(
    "short_rows_and_columns_tn",
    (3, 5, 70),
    SMALL,
    dense.Epilogue(beta=2.0),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "short_columns_nn", (70, 13, 70), SMALL, batch=2, batched_b=True, **FP16
  ),
  case("short_rows_swapped_tn", (20, 130, 70), SWAPPED),
  # Consumers that ping-pong: one of a block's work tiles, or two, or none.
  case(
    "ping_pong_nn",
    (130, 200, 70),
    changed(SMALL, stages=4, consumers=2, split="pingpong"),
    dense.Epilogue(activation=jax.nn.gelu, beta=2.0),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "three_ping_pong_tt",
    (70, 96, 64),
    changed(SMALL, stages=3, consumers=3, split="pingpong"),
    out_dtype="float32",
  ),
  # Half of the results wait in registers, the others are stored at once.
  case(
    "half_deferred_nt",
    (130, 252, 70),
    changed(SMALL, block_n=256, epilogue_n=32),
    out_dtype="float32",
    bias="m",
  ),
  case(
    "c_ahead_tn",
    (130, 72, 70),
    changed(SMALL, epilogue_n=32, epilogue_buffers=1),
    dense.Epilogue(beta=2.0),
    c_dtype="bfloat16",
  ),
  case("ring_longer_than_k_nn", (3, 24, 64), changed(SMALL, stages=4)),
  case("slabs_of_128_nn", (33, 64, 250), changed(SMALL, block_k=128), **FP16),
  case("order_along_n_nt", (70, 136, 8), changed(SMALL, raster_dim="n")),
  # Columns in atoms of 32, and wgmma's width that only NT has.
  case(
    "narrow_nn",
    (64, 100, 66),
    NARROW,
    dense.Epilogue(beta=0.5),
    c_dtype="float16",
  ),
  case(
    "narrow_tn",
    (20, 160, 64),
    Config(block_m=64, block_n=160, stages=2, consumers=1, epilogue_n=32),
    out_dtype="float16",
  ),
  case(
    "in_steps_of_16_nt",
    (16, 112, 64),
    changed(OVERLAP, epilogue_n=16),
  ),
  # The last subtile has columns of the one before.
  case(
    "overlap_nt",
    (70, 218, 210),
    OVERLAP,
    dense.Epilogue(beta=-2.0),
    c_dtype="float16",
    bias="n",
  ),
  case(
    "overlap_and_c_in_place_nn",
    (70, 100, 130),
    changed(NARROW, epilogue_n=64),
    c_dtype="bfloat16",
  ),
  case(
    "overlap_in_a_cluster_nt", (130, 200, 72), changed(OVERLAP, cluster_m=2)
  ),
  # Last tiles that are moved back, of B, of A, and of both.
  case(
    "moved_back_nn",
    (70, 208, 136),
    WIDE,
    dense.Epilogue(activation=jax.nn.gelu, beta=-0.5),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "moved_back_tt",
    (208, 70, 72),
    changed(ROWS, epilogue_buffers=1),
    bias="m",
    out_dtype="float32",
  ),
  case("moved_back_tn", (144, 208, 72), changed(WIDE, block_m=128, **TWO)),
  case(
    "moved_back_and_swapped_nn",
    (70, 208, 136),
    changed(SWAPPED, block_m=128, **TWO),
    c_dtype="bfloat16",
    bias="n",
    **FP16,
  ),
  case("moved_back_atoms_of_32_nn", (64, 144, 64), NARROW),
  case("moved_back_and_overlap_nn", (64, 240, 64), MANY_NARROW),
  case("moved_back_in_parts_nn", (64, 144, 264), changed(WIDE, split_k=2)),
  case(
    "moved_back_and_ping_pong_nn",
    (130, 272, 64),
    changed(WIDE, stages=2, consumers=2, split="pingpong"),
  ),
  case(
    "moved_back_in_a_batch_nn",
    (70, 144, 72),
    WIDE,
    batch=3,
    batched_a=True,
    batched_b=True,
  ),
  case(
    "moved_back_in_a_cluster_tn",
    (208, 336, 72),
    changed(WIDE, block_m=128, cluster_m=2, **TWO),
  ),
  case(
    "moved_back_and_gated_nn",
    (70, 144, 72),
    WIDE,
    dense.Epilogue(activation=jax.nn.silu),
    gated=True,
  ),
  # Clusters, with a tile to spare.
  case(
    "cluster_2x1_nn",
    (200, 72, 130),
    changed(SMALL, cluster_m=2),
    c_dtype="bfloat16",
    bias="n",
  ),
  case("cluster_2x1_tt", (130, 64, 64), changed(SMALL, cluster_m=2), **FP16),
  case(
    "cluster_1x2_tn",
    (65, 136, 64),
    changed(SMALL, cluster_n=2, epilogue_n=32),
    out_dtype="float32",
  ),
  # C where the results go: more slabs than subtiles of both, and fewer.
  case(
    "c_in_place_nn",
    (70, 304, 520),
    changed(WIDE, epilogue_buffers=4),
    dense.Epilogue(beta=-2.0, activation=jax.nn.silu),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "c_in_place_at_the_end_nt",
    (70, 304, 72),
    changed(WIDE, epilogue_buffers=4),
    c_dtype="float16",
    **FP16,
  ),
  # Batches; a tile that hangs over must leave the next matrix alone.
  case(
    "batch_of_both_tn",
    (33, 40, 65),
    SMALL,
    batch=2,
    batched_a=True,
    batched_b=True,
    c_dtype="bfloat16",
  ),
  case("batch_of_a_nn", (65, 24, 64), SMALL, bias="m", batch=2, batched_a=True),
  case(
    "batch_of_b_nt",
    (24, 72, 64),
    changed(SMALL, cluster_n=2),
    batch=2,
    batched_b=True,
    **FP16,
  ),
  # Two products, and what is kept for derivatives.
  case(
    "gated_nt",
    (72, 66, 130),
    SMALL,
    dense.Epilogue(activation=jax.nn.silu),
    gated=True,
  ),
  case(
    "gated_cluster_nn",
    (65, 64, 64),
    changed(SMALL, cluster_m=2),
    dense.Epilogue(activation=jax.nn.gelu),
    gated=True,
    save_preactivation=True,
    batch=2,
    batched_a=True,
    **FP16,
  ),
  case(
    "save_nn",
    (30, 136, 64),
    COLUMNS,
    dense.Epilogue(activation=jnp.tanh, alpha=0.3),
    bias="n",
    save_preactivation=True,
  ),
  # C where one of two results goes, of two tiles a block.
  case(
    "saved_c_in_place_nn",
    (70, 136, 130),
    changed(SMALL, epilogue_n=32),
    dense.Epilogue(activation=jax.nn.gelu, beta=0.5),
    c_dtype="bfloat16",
    bias="n",
    save_preactivation=True,
  ),
  # Operands swapped: the tile's rows lie along N, its columns along M.
  case("swapped_nn", (70, 72, 330), SWAPPED),
  case("swapped_nt", (40, 150, 66), SWAPPED, bias="n", **FP16),
  case(
    "swapped_tn",
    (40, 130, 200),
    changed(SWAPPED, block_n=64, epilogue_n=64),
    dense.Epilogue(alpha=0.5, activation=jax.nn.gelu),
    bias="m",
  ),
  case("swapped_tt", (100, 72, 64), changed(SWAPPED, block_n=32), **FP16),
  case("swapped_one_element_nn", (1, 1, 1), SWAPPED),
  case("swapped_float32_nn", (41, 80, 72), SWAPPED, out_dtype="float32"),
  case(
    "swapped_float32_with_c_nt",
    (70, 136, 66),
    changed(SWAPPED, epilogue_n=32),
    dense.Epilogue(activation=jax.nn.gelu, beta=-1.0),
    c_dtype="bfloat16",
    bias="m",
    out_dtype="float32",
    batch=2,
    batched_a=True,
  ),
  case("swapped_overlap_nt", (70, 72, 66), changed(SWAPPED, epilogue_n=32)),
  # C is transposed on its way as results are: in place of them, of two tiles a
  # block; in two buffers of its own; one tile a block, with partial subtiles.
  case(
    "swapped_c_in_place_nn",
    (70, 136, 130),
    changed(SWAPPED, epilogue_buffers=3),
    dense.Epilogue(alpha=0.5, beta=-2.0),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "swapped_c_of_another_dtype_nt",
    (50, 70, 66),
    SWAPPED,
    dense.Epilogue(activation=jax.nn.silu),
    c_dtype="float16",
    bias="m",
  ),
  case(
    "swapped_c_overlap_nn",
    (41, 60, 66),
    changed(SWAPPED, epilogue_n=32, epilogue_buffers=2),
    c_dtype="float16",
    **FP16,
  ),
  case(
    "swapped_c_batch_tn",
    (40, 72, 66),
    changed(SWAPPED, block_n=64, epilogue_n=64),
    dense.Epilogue(activation=jnp.tanh),
    c_dtype="bfloat16",
    batch=2,
    batched_a=True,
    save_preactivation=True,
  ),
  # One swizzle atom of the result is as wide as all of it.
  case(
    "swapped_wide_nn",
    (20, 24, 70),
    changed(SWAPPED, block_m=128, consumers=2),
    dense.Epilogue(activation=jnp.tanh),
    save_preactivation=True,
  ),
  case(
    "swapped_batch_of_b_nn",
    (33, 40, 65),
    SWAPPED,
    batch=3,
    batched_b=True,
  ),
  # Threads bring A, B or both, of every layout: more slabs than are on their
  # way at a time, a last one that is cut, none that is left of a part of K.
  case("moves_both_nn", (70, 77, 330), MOVES),
  case(
    "moves_both_nt",
    (130, 70, 250),
    changed(MOVES, block_m=128, stages=3, **TWO),
    dense.Epilogue(activation=jax.nn.gelu, beta=2.0),
    c_dtype="bfloat16",
    bias="n",
  ),
  case("moves_a_tt", (75, 40, 136), MOVES, out_dtype="float32", bias="m"),
  case("moves_a_tn", (141, 136, 200), changed(MOVES, stages=4), **FP16),
  case("moves_b_nn", (9, 126, 80), changed(MOVES, block_n=128)),
  case("moves_b_atoms_of_32_tn", (72, 107, 70), changed(MOVES, block_n=96)),
  case("moves_few_rows_nt", (3, 72, 129), changed(MOVES, stages=3)),
  case("moves_slabs_of_128_nt", (3, 9, 300), changed(MOVES, block_k=128)),
  case(
    "moves_a_batch_nn",
    (33, 72, 65),
    MOVES,
    batch=2,
    batched_a=True,
    batched_b=True,
  ),
  case("moves_b_of_a_batch_tt", (40, 65, 66), MOVES, batch=2, batched_b=True),
  case(
    "moves_gated_nn",
    (20, 70, 72),
    MOVES,
    dense.Epilogue(activation=jax.nn.silu),
    gated=True,
  ),
  case("moves_in_parts_nt", (70, 72, 270), changed(MOVES, split_k=4)),
  case(
    "moves_in_a_cluster_nn",
    (20, 77, 270),
    changed(MOVES, cluster_k=4, epilogue_n=16),
  ),
  case(
    "moves_and_moves_back_tn",
    (141, 208, 130),
    changed(MOVES, block_n=128, epilogue_n=32),
  ),
  case("moves_swapped_nn", (70, 72, 330), changed(SWAPPED, moves=True)),
  case(
    "moves_swapped_nt",
    (41, 70, 130),
    changed(SWAPPED, moves=True),
    dense.Epilogue(beta=-0.5),
    c_dtype="bfloat16",
    bias="m",
  ),
  # Few results that TMA can't address, of a batch, swapped, in a cluster.
  case("by_elements_nn", (70, 77, 64), SMALL, bias="n", out_dtype="float32"),
  case(
    "by_elements_of_a_batch_nt",
    (33, 30, 72),
    ROWS,
    batch=3,
    batched_a=True,
    batched_b=True,
    **FP16,
  ),
  case(
    "by_elements_swapped_nn",
    (41, 77, 72),
    SWAPPED,
    dense.Epilogue(activation=jnp.tanh),
    bias="n",
  ),
  # The same in a cluster: the last block has fewer slabs, or none at all.
  case(
    "cluster_k_nn",
    (65, 40, 270),
    changed(SMALL, cluster_k=4, epilogue_n=16),
    dense.Epilogue(activation=jax.nn.silu, beta=-1.0),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "cluster_k_of_two_tt",
    (9, 200, 200),
    changed(SMALL, cluster_k=2, epilogue_n=32),
    transpose_a=True,
    transpose_b=True,
  ),
  case(
    "cluster_k_gated_saved_nt",
    (33, 40, 130),
    changed(SMALL, cluster_k=2, epilogue_n=32),
    dense.Epilogue(activation=jax.nn.silu),
    gated=True,
    save_preactivation=True,
    transpose_b=True,
  ),
  case(
    "cluster_k_two_consumers_tn",
    (200, 72, 330),
    changed(SMALL, block_m=128, consumers=2, cluster_k=2, epilogue_n=32),
    batch=2,
    batched_a=True,
    transpose_a=True,
    **FP16,
  ),
  case(
    "cluster_k_shared_columns_nn",
    (65, 201, 520),
    changed(
      SMALL,
      block_n=256,
      consumers=2,
      split="n",
      stages=2,
      cluster_k=8,
      epilogue_n=16,
      epilogue_buffers=1,
    ),
    out_dtype="float32",
    c_dtype="float32",
  ),
  # Sums over parts of K, the last of which has fewer slabs.
  case(
    "split_k_nn",
    (65, 40, 270),
    changed(SMALL, split_k=3),
    dense.Epilogue(activation=jax.nn.silu, beta=-1.0),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "split_k_gated_nt",
    (33, 40, 270),
    changed(SMALL, split_k=3),
    dense.Epilogue(activation=jax.nn.silu),
    gated=True,
    transpose_b=True,
  ),
  case(
    "split_k_gated_saved_nn",
    (20, 64, 130),
    changed(SMALL, split_k=2),
    dense.Epilogue(activation=jax.nn.gelu),
    gated=True,
    save_preactivation=True,
  ),
  case(
    "split_k_saved_tn",
    (65, 24, 200),
    changed(SMALL, split_k=2),
    dense.Epilogue(activation=jax.nn.silu),
    save_preactivation=True,
    bias="n",
    transpose_a=True,
  ),
  case(
    "split_k_tt",
    (16, 24, 128),
    changed(SMALL, split_k=2),
    batch=2,
    batched_a=True,
    batched_b=True,
    bias="m",
    **FP16,
  ),
)
# Results whose rows TMA can't address, so that they are stored row by row.
DIRECT_CASES = (
  case("one_column_over_nn", (70, 129, 64), DIRECT),
  case("moves_b_nn", (9, 330, 80), changed(DIRECT, moves=True)),
  case(
    "c_and_bias_tn",
    (10, 257, 64),
    DIRECT,
    dense.Epilogue(activation=jax.nn.relu),
    bias="m",
    c_dtype="float32",
    out_dtype="float32",
  ),
  case(
    "cluster_nt", (9, 131, 70), changed(DIRECT, cluster_n=2), bias="n", **FP16
  ),
  case(
    "batch_nn", (17, 135, 64), DIRECT, batch=2, batched_a=True, batched_b=True
  ),
)
# alpha and, where there is C, beta are known at run time: each way in which
# results leave.
FACTOR_CASES = (
  case("deferred_nt", (70, 136, 130), SMALL, bias="n"),
  case(
    "deferred_c_tn",
    (70, 72, 70),
    changed(SMALL, epilogue_n=32),
    c_dtype="float16",
    **FP16,
  ),
  case("at_once_nn", (70, 136, 70), COLUMNS, c_dtype="float32", bias="m"),
  case(
    "half_deferred_nt",
    (130, 252, 70),
    changed(SMALL, block_n=256, epilogue_n=32),
    out_dtype="float32",
  ),
  case(
    "c_in_place_nn",
    (70, 304, 130),
    changed(WIDE, epilogue_buffers=4),
    dense.Epilogue(activation=jax.nn.silu),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "saved_tt",
    (70, 136, 130),
    COLUMNS,
    dense.Epilogue(activation=jnp.tanh),
    save_preactivation=True,
    c_dtype="float16",
    **FP16,
  ),
  case("by_rows_nn", (70, 129, 64), DIRECT, c_dtype="bfloat16", bias="n"),
  case(
    "ping_pong_nn",
    (130, 200, 70),
    changed(SMALL, stages=4, consumers=2, split="pingpong"),
    dense.Epilogue(activation=jax.nn.gelu),
    c_dtype="float16",
    bias="n",
    **FP16,
  ),
  case(
    "one_work_tile_nn", (3, 24, 64), changed(SMALL, stages=4), c_dtype="float16"
  ),
  case("swapped_nt", (40, 150, 66), SWAPPED, bias="n", **FP16),
  case(
    "swapped_c_in_place_nn",
    (70, 136, 130),
    changed(SWAPPED, epilogue_buffers=3),
    c_dtype="bfloat16",
    bias="n",
  ),
  case(
    "swapped_c_of_another_dtype_nt",
    (50, 70, 66),
    SWAPPED,
    c_dtype="float16",
    bias="m",
  ),
  case(
    "cluster_and_batch_tn",
    (33, 130, 65),
    changed(SMALL, cluster_n=2),
    batch=2,
    batched_a=True,
    batched_b=True,
    c_dtype="bfloat16",
  ),
  case(
    "split_k_nn",
    (65, 40, 270),
    changed(SMALL, split_k=3),
    dense.Epilogue(activation=jax.nn.silu),
    c_dtype="bfloat16",
    bias="n",
  ),
)


@pytest.fixture(autouse=True)
def two_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  problems.assume_sms(monkeypatch, 2)


@pytest.fixture
def room_for_its_cluster(found, monkeypatch):
  """As many SMs as blocks, where a cluster has more than two."""
  blocks = found.config.blocks
  problems.assume_sms(monkeypatch, max(2, blocks))


def _check(found: Case) -> Plan:
  m, n, k = found.shape
  problem = Problem.flat(m=m, n=n, k=k, **found.problem)
  x = dense.operands(problem, seed=m + n + k)
  outs = dense.run(problem, found.config, x, found.epilogue)
  dense.assert_right(outs, problem, x, found.epilogue)
  return Plan.of(problem, found.config)


@pytest.mark.usefixtures("room_for_its_cluster")
@pytest.mark.parametrize("found", oldest.half(CASES))
def test_values(found):
  assert not _check(found).by_rows


@pytest.mark.parametrize("found", DIRECT_CASES)
def test_rows_that_tma_can_not_address(found):
  assert _check(found).by_rows


@pytest.fixture(scope="module")
def has_interpreted():
  """A kernel has been interpreted in this process.

  The first one imports modules that add to the keys of JAX's caches.
  """
  fields = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  problem = Problem.flat(m=1, n=1, k=1, **fields)
  dense.run(problem, SMALL, dense.operands(problem))


@pytest.mark.usefixtures("has_interpreted")
@pytest.mark.parametrize("found", oldest.half(FACTOR_CASES))
def test_factors_known_at_run_time(found):
  """One trace, and so one compilation, serves all their values."""
  m, n, k = found.shape
  problem = Problem.flat(m=m, n=n, k=k, **found.problem)
  x = dense.operands(problem, seed=m + n + k)
  traces = []

  @jax.jit
  def run(x, factors):
    traces.append(factors)
    epilogue = dataclasses.replace(found.epilogue, **factors)
    return dense.run(problem, found.config, x, epilogue)

  names = ("alpha", "beta") if problem.epilogue.c_dtype else ("alpha",)
  for values in ((-0.3, 2.7), (1.0, 0.0)):
    factors = dict(zip(names, map(jnp.float32, values)))
    outs = run(x, factors)
    read = {name: float(factor) for name, factor in factors.items()}
    epilogue = dataclasses.replace(found.epilogue, **read)
    dense.assert_right(outs, problem, x, epilogue)
  assert len(traces) == 1


@pytest.mark.parametrize("split_k", (1, 2))
@pytest.mark.parametrize("name", ("alpha", "beta"))
def test_one_factor_known_at_run_time(name, split_k):
  """The other is compiled in. The bits are those of both compiled in."""
  problem = Problem.flat(
    m=66, n=72, k=140, dtype="bfloat16", out_dtype="float32", c_dtype="float16"
  )
  x = dense.operands(problem)
  config = changed(SMALL, split_k=split_k, epilogue_n=32)
  static = dense.Epilogue(alpha=-0.5, beta=4.0)
  factor = jnp.float32(getattr(static, name))
  read = dataclasses.replace(static, **{name: factor})
  (want,), (got,) = (dense.run(problem, config, x, t) for t in (static, read))
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


def test_a_gated_product_has_no_factors():
  fields = {"dtype": "bfloat16", "out_dtype": "bfloat16", "gated": True}
  problem = Problem.flat(m=40, n=64, k=64, **fields)
  x = dense.operands(problem)
  epilogue = dense.Epilogue(activation=jax.nn.silu)
  (want,) = dense.run(problem, SMALL, x, epilogue)
  epilogue = dataclasses.replace(epilogue, alpha=jnp.float32(3))
  (got,) = dense.run(problem, SMALL, x, epilogue)
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


# NumPy, in which the interpreter computes, remarks on inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("split_k", (1, 2))
def test_nan_stays_in_its_row_and_column(split_k):
  problem = Problem.flat(
    m=70, n=64, k=128, dtype="bfloat16", out_dtype="bfloat16"
  )
  x = dense.operands(problem)
  x["a"] = x["a"].at[0, 66, 3].set(jnp.nan)
  x["b"] = x["b"].at[0, 100, 61].set(jnp.inf)
  (out,) = dense.run(problem, changed(SMALL, split_k=split_k), x)
  out = np.asarray(out[0], np.float32)
  assert np.isnan(out[66]).all()
  assert not np.isfinite(out[:, 61]).any()
  others = np.delete(np.delete(out, 66, axis=0), 61, axis=1)
  assert np.isfinite(others).all()


def test_the_config_does_not_change_the_bits():
  """Each sum is added in the order of K, whoever computes it."""
  problem = Problem.flat(
    m=66, n=64, k=140, dtype="bfloat16", out_dtype="float32"
  )
  x = dense.operands(problem)
  (want,) = dense.run(problem, SMALL, x)
  for config in (changed(ROWS, cluster_m=2), changed(COLUMNS, raster=1)):
    (got,) = dense.run(problem, config, x)
    np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


def test_swapped_operands_have_the_same_bits():
  problem = Problem.flat(
    m=66, n=72, k=140, dtype="bfloat16", out_dtype="bfloat16"
  )
  x = dense.operands(problem)
  (want,) = dense.run(problem, SMALL, x)
  (got,) = dense.run(problem, SWAPPED, x)
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want))
