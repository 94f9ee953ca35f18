"""Cases of the kernels with operands in planes of bfloat16; see `cases`."""

from pallas_gemm.kernels.sm90.config import Config
from tests.support.cases import (
  BIAS_M,
  BIAS_N,
  C_F32,
  GATED,
  GELU,
  SAVED,
  TWO,
  Case,
  changed,
  problem,
)  # fmt: skip

X3, X6 = (
  {"planes_a": x, "planes_b": x, "out_dtype": "float32"} for x in (2, 3)
)
X9 = X6 | {"all_pairs": True}
# float32 by bfloat16, and the other way round.
OF_A, OF_B = X6 | {"planes_b": 1}, X6 | {"planes_a": 1}
BF16, FP16 = {"out_dtype": "bfloat16"}, {"out_dtype": "float16"}
BATCHED = {"batch": 2, "batched_a": True, "batched_b": True}

SMALL = Config(block_m=64, block_n=64, block_k=32, stages=2, consumers=1)
HALVES = changed(SMALL, epilogue_n=32)
# Threads make the planes of B.
MOVED = changed(HALVES, moves=True)
# Totals after every other slab, if there is an even number of them.
IN_PAIRS = {"stages": 3}
_SWAPPED = changed(
  SMALL, block_n=48, epilogue_n=16, epilogue_buffers=1, swap_ab=True
)
# Three slabs of K, so that slots of a ring of two are used again.
_PLAIN, _ODD = (72, 64, 80), (70, 77, 81)


def _dense(layout: str, shape, config: Config, *fields, **others) -> Case:
  stored = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
  factors = {x: others.pop(x) for x in ("alpha", "beta") if x in others}
  return Case(problem(shape, stored, *fields, **others), config, **factors)


def _groups(along: str, shape, offsets, config: Config, *fields) -> Case:
  groups = {"ragged": along, "groups": len(offsets) - 1}
  groups["transpose_a"] = along == "k"
  return Case(problem(shape, *fields, groups), config, offsets=offsets)


_OF_ROWS, _ENDS = (140, 64, 80), (3, 22, 120)
_OF_SLABS, _CUTS = (72, 64, 140), (0, 13, 13, 90)

RACES = {
  "x6": _dense("nn", _PLAIN, HALVES, X6, C_F32),
  "x6_gated": _dense(
    "nt", (130, 64, 80), changed(HALVES, **TWO), X6, BF16, GATED
  ),
  "x6_groups": _groups("m", _OF_ROWS, _ENDS, HALVES, X6, BIAS_N),
  "x6_slabs": _groups("k", _OF_SLABS, _CUTS, HALVES, X6),
  "x3": _dense("tn", _PLAIN, changed(HALVES, cluster_n=2), X3),
  "moved_groups": _groups("m", _OF_ROWS, _ENDS, MOVED, X6, BIAS_N),
  "pairs": _dense("nn", (72, 64, 250), changed(HALVES, **IN_PAIRS), X6, C_F32),
  "pairs_groups": _groups(
    "m", (140, 64, 120), _ENDS, changed(HALVES, **IN_PAIRS), X6, BIAS_N
  ),
}

VALUES = {
  "edges_nn": _dense("nn", _ODD, HALVES, X6),
  "edges_nt": _dense("nt", _ODD, HALVES, X6, GELU),
  "edges_tn": _dense("tn", _ODD, HALVES, X6, BIAS_M, SAVED),
  "edges_tt": _dense("tt", _ODD, changed(HALVES, block_k=64), X6, BF16),
  "one_element": _dense("nn", (1, 1, 1), SMALL, X6),
  "one_row": _dense("nt", (1, 72, 130), SMALL, X6, FP16),
  "swapped": _dense("nt", (5, 130, 100), _SWAPPED, X6),
  "by_rows": _dense(
    "nn", (10, 131, 72), changed(HALVES, block_n=128), X3, C_F32
  ),
  "two_consumers": _dense("nn", (200, 136, 200), changed(SMALL, **TWO), X6),
  "narrow": _dense(
    "nn", (72, 130, 200), changed(SMALL, epilogue_n=16, **TWO), X6, C_F32
  ),
  "deep": _dense("nn", (72, 64, 200), changed(SMALL, block_k=64), X6),
  "x9": _dense("nn", _PLAIN, SMALL, X9),
  "x3": _dense("nt", _ODD, SMALL, X3, BF16, alpha=2.0),
  "by_bf16": _dense("nt", _ODD, HALVES, OF_A, C_F32, beta=-1.0),
  "bf16_by": _dense("tn", _PLAIN, HALVES, OF_B),
  "batched": _dense("nn", _ODD, HALVES, X6, BATCHED),
  "split_k": _dense("nn", (72, 64, 300), changed(SMALL, split_k=2), X6, C_F32),
  "cluster_k": _dense(
    "nn", (72, 64, 300), changed(HALVES, cluster_k=2), X6, BIAS_N
  ),
  "cluster_m": _dense("nt", (136, 64, 80), changed(HALVES, cluster_m=2), X6),
  "groups_of_bf16_weights": _groups("m", _OF_ROWS, _ENDS, HALVES, OF_A),
  "moved": _dense("nn", (72, 96, 200), MOVED, X6),
  "moved_nt": _dense("nt", (70, 77, 200), changed(MOVED, **TWO), OF_B, GELU),
  # No whole swizzle atoms of 64 columns.
  "moved_narrow": _dense(
    "nn", (72, 192, 104), changed(MOVED, block_n=96), X6, BATCHED
  ),
  "moved_short": _dense(
    "nt", (72, 112, 104), changed(MOVED, block_n=112, epilogue_n=16), X6
  ),
  "moved_x3": _dense("nt", (72, 64, 96), changed(MOVED, block_k=64), X3),
  "moved_gated": _dense(
    "nt", (130, 64, 80), changed(MOVED, **TWO), X6, BF16, GATED
  ),
  "moved_cluster_k": _dense(
    "nn", (72, 64, 304), changed(MOVED, cluster_k=2), X6, BIAS_N
  ),
  "pairs_odd": _dense("nt", _ODD, changed(HALVES, **IN_PAIRS), X6),
  "pairs_edges": _dense(
    "tn", (70, 77, 241), changed(HALVES, stages=4), X6, BIAS_M, SAVED
  ),
  "pairs_gated": _dense(
    "nt", (130, 64, 120), changed(HALVES, **TWO | IN_PAIRS), X6, BF16, GATED
  ),
  "pairs_split_k": _dense(
    "nn", (72, 64, 250), changed(SMALL, split_k=2, **IN_PAIRS), X6, C_F32
  ),
  "pairs_cluster": _dense(
    "nt", (72, 130, 128), changed(HALVES, cluster_n=2, **IN_PAIRS), OF_A, C_F32
  ),
  "pairs_moved": _dense(
    "nn", (72, 96, 256), changed(MOVED, **IN_PAIRS), X6, BATCHED
  ),
  "pairs_moved_groups": _groups(
    "m", (140, 64, 128), _ENDS, changed(MOVED, **IN_PAIRS), X6, BIAS_N
  ),
  "slabs_x3": _groups("k", _OF_SLABS, _CUTS, HALVES, X3),
}
