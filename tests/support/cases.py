"""Kernel cases: the smallest products in which a config can be wrong.

Tiles hang over every edge, K has more slabs than the ring has stages, blocks
have several tiles. `RACES` are interpreted with race detection and their
values are checked; `VALUES` have what those lack, and their values alone are
checked. The letters of a case say how A and B are stored: "t" is transposed.
Grouped products are in `group_cases`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any

import jax

from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from tests.support import dense, ragged_kernels


@dataclasses.dataclass(frozen=True)
class Case:
  """A product, dense or grouped, with a config.

  Attributes:
    problem: its activation is a name of `jax.nn`.
    config: how it is computed.
    alpha, beta: of dense products.
    offsets: where groups end, the first one's start before them.
  """

  problem: Problem
  config: Config
  alpha: float | jax.Array = 1.0
  beta: float | jax.Array = 1.0
  offsets: tuple[int, ...] = ()

  def prepare(self) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """What runs the kernel, and what checks the results of a run."""
    p = self.problem
    named = p.epilogue.activation
    how: Any = named and getattr(jax.nn, named)
    if p.along:
      module, how = ragged_kernels, (self.offsets, how)
    else:
      epilogue = dense.Epilogue(
        alpha=self.alpha, beta=self.beta, activation=how
      )
      module, how = dense, (epilogue,)
    x = module.operands(p, seed=p.m + p.n + p.k)
    return (
      lambda: module.run(p, self.config, x, *how),
      lambda outs: module.assert_right(outs, p, x, *how),
    )


def changed(config: Config, **fields) -> Config:
  """`config` with some fields changed."""
  return dataclasses.replace(config, **fields)


def pairs(*parts: Sequence[Any]) -> list[tuple]:
  """Combinations in which every two values of two parameters meet.

  Args:
    *parts: what values each parameter has.
  """
  places = list(itertools.combinations(range(len(parts)), 2))

  def pairs_of(case):
    return {(i, j, case[i], case[j]) for i, j in places}

  every = list(itertools.product(*map(range, map(len, parts))))
  missing = set().union(*map(pairs_of, every))
  found = []
  while missing:
    found.append(max(every, key=lambda case: len(missing & pairs_of(case))))
    missing -= pairs_of(found[-1])
  return [tuple(part[i] for part, i in zip(parts, case)) for case in found]


# Fields of problems, by what they are about.
FP16 = {"dtype": "float16", "out_dtype": "float16"}
F32 = {"out_dtype": "float32"}
BIAS_N, BIAS_M = {"bias": "n"}, {"bias": "m"}
C_BF16, C_F16, C_F32 = (
  {"c_dtype": x} for x in ("bfloat16", "float16", "float32")
)
# C goes where the results go.
IN_PLACE = BIAS_N | C_BF16
GELU, SILU, RELU, TANH = (
  {"activation": x} for x in ("gelu", "silu", "relu", "tanh")
)
GATED = SILU | {"gated": True}
SAVED = {"save_preactivation": True}
B_TRANSPOSED = {"transpose_b": True}


def _batch(count: int) -> dict[str, Any]:
  return {"batch": count, "batched_a": True, "batched_b": True}


def problem(shape, *fields: dict[str, Any], **others: Any) -> Problem:
  found = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  for each in (dict(zip("mnk", shape)), *fields, others):
    found |= each
  return Problem.flat(**found)


def _dense(layout: str, shape, config: Config, *fields, **others) -> Case:
  stored = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
  factors = {x: others.pop(x) for x in ("alpha", "beta") if x in others}
  return Case(problem(shape, stored, *fields, **others), config, **factors)


SMALL = Config(block_m=64, block_n=64, stages=2, consumers=1)
# Two subtiles of each tile.
HALVES = changed(SMALL, epilogue_n=32)
TALL = Config(block_m=128, block_n=64, stages=2)
ROWS = changed(TALL, epilogue_n=32)
COLUMNS = Config(block_m=64, block_n=128, stages=3, split="n")
_WIDE = changed(HALVES, block_n=128)
DIRECT = changed(SMALL, block_n=128)
_NARROW = changed(HALVES, block_n=96)
_OVERLAP = changed(HALVES, block_n=112)
_PINGPONG = {"stages": 4, "consumers": 2, "split": "pingpong"}
_THREADS = changed(SMALL, moves=True)
TWO = {"block_m": 128, "consumers": 2}
SWAPPED = changed(
  SMALL, block_n=48, epilogue_n=16, epilogue_buffers=1, swap_ab=True
)

# Two tiles of three slabs of K: whatever is used again is.
_PLAIN = (65, 64, 130)
RACES = {
  "plain": _dense("nn", _PLAIN, HALVES),
  "c_of_another_dtype": _dense("nn", _PLAIN, HALVES, C_F32, BIAS_N),
  "two_consumers": _dense(
    "nn", _PLAIN, changed(COLUMNS, block_n=64, epilogue_n=16), C_F32, BIAS_N
  ),
  "gated": _dense(
    "nn", (65, 64, 66), changed(HALVES, cluster_m=2), GATED, SAVED
  ),
  "batch": _dense("nn", (40, 72, 66), changed(HALVES, cluster_n=2), _batch(2)),
  "cluster_of_four": _dense("nn", (200, 136, 72), changed(HALVES, cluster_m=4)),
  # Two work tiles of a slab, one of three: no slot is used again.
  "short": _dense("nn", (130, 64, 64), HALVES),
  "one_work_tile": _dense(
    "nn", _PLAIN, changed(HALVES, stages=3, epilogue_buffers=1), BIAS_N
  ),
  "one_stage": _dense("nn", (65, 64, 60), changed(HALVES, stages=1), C_BF16),
  "row_wise": _dense(
    "nn", (9, 131, 66), DIRECT, BIAS_N, C_F32, out_dtype="float16"
  ),
  "split_k": _dense("nn", _PLAIN, changed(HALVES, split_k=2)),
  "cluster_k": _dense("nn", _PLAIN, changed(HALVES, cluster_k=2), C_BF16),
  # Threads load A and B: two work tiles of three slabs, two on their way.
  "threads": _dense(
    "nt", (70, 70, 150), changed(_NARROW, stages=3, moves=True)
  ),
  "threads_load_one": _dense(
    "nn", (140, 72, 330), changed(HALVES, moves=True), BIAS_N
  ),
  "threads_in_a_cluster": _dense(
    "nn", (20, 77, 270), changed(HALVES, cluster_k=2, moves=True)
  ),
  "c_in_place": _dense("nn", _PLAIN, HALVES, IN_PLACE),
  "c_ahead": _dense(
    "nn", (65, 64, 200), changed(HALVES, epilogue_buffers=1), IN_PLACE
  ),
  # Half of the results wait in registers.
  "float32": _dense(
    "nn", (130, 256, 130), changed(HALVES, block_n=256), F32, BIAS_N
  ),
  # Columns that are stored twice.
  "overlap": _dense(
    "nt", (65, 80, 130), changed(HALVES, block_n=80, epilogue_buffers=3), C_BF16
  ),
  # Edge tiles, shifted inward, are stored twice in part, by a block or by two.
  "shifted": _dense("tn", (144, 208, 72), changed(_WIDE, **TWO), BIAS_N),
  "shifted_with_c_in_place": _dense(
    "nn", (65, 208, 264), changed(_WIDE, epilogue_buffers=4), IN_PLACE
  ),
  "saved": _dense(
    "nn", (130, 128, 130), changed(_WIDE, epilogue_buffers=1), SAVED
  ),
  "saved_with_c_in_place": _dense(
    "nn", (130, 64, 130), HALVES, SAVED, IN_PLACE
  ),
  "swapped": _dense(
    "nn", (65, 130, 130), changed(HALVES, swap_ab=True, epilogue_buffers=1)
  ),
  "swapped_with_c_in_place": _dense(
    "nn", (65, 130, 130), changed(HALVES, swap_ab=True), IN_PLACE
  ),
  # Five work tiles of two slabs, three of them the first block's: one consumer
  # has two of these, the other one.
  "pingpong": _dense(
    "nn", (40, 72, 66), changed(_NARROW, **_PINGPONG), _batch(5), IN_PLACE
  ),
  # As many slabs as stages, but one consumer has two of the three work tiles.
  "pingpong_of_three_work_tiles": _dense(
    "nn", (384, 64, 66), changed(HALVES, **_PINGPONG | {"stages": 6})
  ),
  "pingpong_in_clusters": _dense(
    "nn",
    (130, 200, 130),
    changed(HALVES, **_PINGPONG | {"stages": 6, "cluster_m": 2}),
  ),
}

# Each number of consumers, each side that they share, each layout.
VALUES = {
  "one_element": _dense("tt", (1, 1, 1), SMALL, FP16),
  "rows": _dense("nt", (130, 40, 70), ROWS, RELU, BIAS_N, FP16),
  "columns": _dense(
    "tn", (40, 136, 200), COLUMNS, C_F32, F32, alpha=-0.5, beta=2.0
  ),
  "three_consumers": _dense(
    "tt", (180, 64, 64), changed(SMALL, block_m=192, consumers=3), GELU, BIAS_M
  ),
  "pingpong_of_three": _dense(
    "tt",
    (70, 96, 64),
    changed(SMALL, stages=3, consumers=3, split="pingpong"),
    F32,
  ),
  "few_rows_and_columns": _dense("tn", (3, 5, 70), SMALL, IN_PLACE, beta=2.0),
  "few_columns_of_a_batch": _dense(
    "nn", (70, 13, 70), SMALL, FP16, batch=2, batched_b=True
  ),
  "slabs_of_128": _dense(
    "nn", (33, 64, 250), changed(SMALL, block_k=128), FP16
  ),
  # Columns in atoms of 32, and wgmma's width that only NT has.
  "narrow": _dense("nn", (64, 100, 66), _NARROW, C_F16, beta=0.5),
  "in_steps_of_16": _dense(
    "nt", (16, 112, 64), changed(_OVERLAP, epilogue_n=16)
  ),
  # The last subtile has columns of the one before.
  "overlap_and_c_in_place": _dense(
    "nn", (70, 100, 130), changed(_NARROW, epilogue_n=64), C_BF16
  ),
  "overlap_in_a_cluster": _dense(
    "nt", (130, 200, 72), changed(_OVERLAP, cluster_m=2)
  ),
  # Last tiles that are shifted inward, of B, of A, and of both.
  "shifted_rows": _dense(
    "tt", (208, 70, 72), changed(ROWS, epilogue_buffers=1), BIAS_M, F32
  ),
  "shifted_and_swapped": _dense(
    "nn", (70, 208, 136), changed(SWAPPED, **TWO), IN_PLACE, FP16
  ),
  "shifted_and_overlap": _dense(
    "nn", (64, 240, 64), changed(_OVERLAP, block_n=224)
  ),
  "shifted_in_parts": _dense("nn", (64, 144, 264), changed(_WIDE, split_k=2)),
  "shifted_and_pingpong": _dense(
    "nn", (130, 272, 64), changed(_WIDE, **_PINGPONG | {"stages": 2})
  ),
  "shifted_in_a_cluster": _dense(
    "tn", (208, 336, 72), changed(_WIDE, **TWO, cluster_m=2)
  ),
  # Clusters, with a tile to spare.
  "cluster_m": _dense(
    "nn", (200, 72, 130), changed(SMALL, cluster_m=2), IN_PLACE
  ),
  "cluster_n_of_four": _dense(
    "tt", (72, 248, 136), changed(SMALL, cluster_n=4)
  ),
  # More slabs than subtiles of C and results.
  "c_in_place_at_the_end": _dense(
    "nt", (70, 304, 72), changed(_WIDE, epilogue_buffers=4), C_F16, FP16
  ),
  # Batches; a tile that hangs over must leave the next matrix alone.
  "batch_of_a": _dense(
    "nn", (65, 24, 64), SMALL, BIAS_M, batch=2, batched_a=True
  ),
  "batch_of_b": _dense(
    "nt",
    (24, 72, 64),
    changed(SMALL, cluster_n=2),
    FP16,
    batch=2,
    batched_b=True,
  ),
  # Operands swapped: the tile's rows lie along N, its columns along M.
  "swapped_tn": _dense(
    "tn",
    (40, 130, 200),
    changed(SWAPPED, block_n=64, epilogue_n=64),
    GELU,
    BIAS_M,
    alpha=0.5,
  ),
  "swapped_float32": _dense(
    "nt",
    (70, 136, 66),
    changed(SWAPPED, epilogue_n=32),
    GELU,
    C_BF16,
    BIAS_M,
    F32,
    beta=-1.0,
    batch=2,
    batched_a=True,
  ),
  # One swizzle atom of the result is as wide as all of it.
  "swapped_wide": _dense(
    "nn", (20, 24, 70), changed(SWAPPED, **TWO), TANH, SAVED
  ),
  # Threads load A, B or both: more slabs than are on their way at a time, a
  # last one that is cut, none that is left of a part of K.
  "threads_load_both": _dense(
    "nt",
    (130, 70, 250),
    changed(_THREADS, stages=3, **TWO),
    GELU,
    IN_PLACE,
    beta=2.0,
  ),
  "threads_load_a_ahead": _dense(
    "tn", (141, 136, 200), changed(_THREADS, stages=4), FP16
  ),
  "threads_load_b": _dense("tn", (72, 107, 70), changed(_THREADS, block_n=96)),
  "threads_load_slabs_of_128": _dense(
    "nt", (3, 9, 300), changed(_THREADS, block_k=128)
  ),
  "threads_load_a_batch": _dense("nn", (33, 72, 65), _THREADS, _batch(2)),
  "threads_gated": _dense("nn", (20, 70, 72), _THREADS, GATED),
  "threads_in_parts": _dense("nt", (70, 72, 270), changed(_THREADS, split_k=4)),
  "threads_and_shifted": _dense(
    "tn", (141, 208, 130), changed(_WIDE, moves=True)
  ),
  "threads_and_swapped": _dense(
    "nt", (41, 70, 130), changed(SWAPPED, moves=True), C_BF16, BIAS_M, beta=-0.5
  ),
  # Few results that TMA can't address, of a batch, swapped, in a cluster.
  "direct": _dense("nn", (70, 77, 64), SMALL, BIAS_N, F32),
  "direct_of_a_batch": _dense("nt", (33, 30, 72), ROWS, _batch(3), FP16),
  "direct_swapped": _dense("nn", (41, 77, 72), SWAPPED, TANH, BIAS_N),
  # Rows that TMA can't address are stored row by row.
  "row_wise_by_threads": _dense(
    "nn", (9, 330, 80), changed(DIRECT, moves=True)
  ),
  "row_wise_float32": _dense(
    "tn", (10, 257, 64), DIRECT, RELU, BIAS_M, C_F32, F32
  ),
  "row_wise_in_a_cluster": _dense(
    "nt", (9, 131, 70), changed(DIRECT, cluster_n=2), BIAS_N, FP16
  ),
  # Sums over parts of K, the last of which has fewer slabs, or none at all.
  "cluster_k_of_four": _dense(
    "nn",
    (65, 40, 270),
    changed(SMALL, cluster_k=4, epilogue_n=16),
    SILU,
    IN_PLACE,
    beta=-1.0,
  ),
  "cluster_k_gated": _dense(
    "nt", (33, 40, 130), changed(HALVES, cluster_k=2), GATED, SAVED
  ),
  "cluster_k_of_a_batch": _dense(
    "tn",
    (200, 72, 330),
    changed(HALVES, **TWO, cluster_k=2),
    FP16,
    batch=2,
    batched_a=True,
  ),
  "cluster_k_of_shared_columns": _dense(
    "nn",
    (65, 201, 520),
    changed(
      COLUMNS,
      block_n=256,
      stages=2,
      cluster_k=8,
      epilogue_n=16,
      epilogue_buffers=1,
    ),
    F32,
    C_F32,
  ),
  "split_k_gated": _dense(
    "nt", (33, 40, 270), changed(SMALL, split_k=3), GATED, SAVED
  ),
  "split_k_saved": _dense(
    "tn", (65, 24, 200), changed(SMALL, split_k=2), SILU, SAVED, BIAS_N
  ),
  "split_k_of_a_batch": _dense(
    "tt", (16, 24, 128), changed(SMALL, split_k=2), FP16, _batch(2), BIAS_M
  ),
}

# Each way in which results leave, of which alpha and beta are known at run
# time.
FACTORS = {
  name: (RACES | VALUES)[name]
  for name in (
    "columns", "pingpong", "c_in_place", "saved_with_c_in_place", "float32",
    "row_wise", "one_work_tile", "swapped_float32", "swapped_with_c_in_place",
    "split_k_of_a_batch",
  )
}  # fmt: skip
