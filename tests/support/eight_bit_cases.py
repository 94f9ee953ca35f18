"""Cases of the kernels with operands of 8 bits; see `cases`.

Three slabs of K, so that slots of a ring of two are used again, and edges that
are no multiple of 16 bytes. Promoted sums release a slot otherwise than others.
"""

from pallas_gemm.kernels.sm90.config import Config
from tests.support.cases import (
  B_TRANSPOSED,
  BIAS_M,
  BIAS_N,
  C_BF16,
  C_F32,
  F32,
  GATED,
  GELU,
  IN_PLACE,
  RELU,
  SAVED,
  TWO,
  Case,
  changed,
  problem,
)  # fmt: skip

E4M3, E5M2, INT8 = (
  B_TRANSPOSED | {"dtype": x, "dtype_b": x, "out_dtype": "bfloat16"}
  for x in ("float8_e4m3fn", "float8_e5m2", "int8")
)
MIXED = E4M3 | {"dtype_b": "float8_e5m2"}
FAST = {"fast_accumulation": True}
SCALED = {"scale_a": "vector", "scale_b": "vector"}
TENSORS = {"scale_a": "tensor", "scale_b": "tensor"}
BLOCKS = {"scale_a": "block", "scale_b": "block"}
LINES = {"scale_a": "block", "scale_b": "line"}
BATCHED = {"batch": 2, "batched_a": True, "batched_b": True}
INT32, FP16 = {"out_dtype": "int32"}, {"out_dtype": "float16"}

SMALL = Config(block_m=64, block_n=64, block_k=128, stages=2, consumers=1)
HALVES = changed(SMALL, epilogue_n=32)
_PINGPONG = {"consumers": 2, "split": "pingpong"}
_SWAPPED = changed(
  SMALL, block_n=48, epilogue_n=16, epilogue_buffers=1, swap_ab=True
)
_PLAIN = (65, 64, 272)


def _dense(shape, config: Config, *fields, **others) -> Case:
  factors = {x: others.pop(x) for x in ("alpha", "beta") if x in others}
  return Case(problem(shape, *fields, **others), config, **factors)


def _rows(shape, offsets, config: Config, *fields) -> Case:
  groups = {"ragged": "m", "groups": len(offsets) - 1}
  return Case(problem(shape, *fields, groups), config, offsets=offsets)


def of_slabs(shape, offsets, config: Config, *fields) -> Case:
  """Groups along K, of which the shape has the slabs of all."""
  groups = {"ragged": "k", "groups": len(offsets) - 1}
  return Case(problem(shape, *fields, groups), config, offsets=offsets)


_GROUPS, _ENDS = (140, 64, 272), (3, 22, 120)

RACES = {
  "promoted": _dense(_PLAIN, HALVES, E4M3, SCALED, IN_PLACE),
  "promoted_gated": _dense(
    (130, 64, 272), changed(HALVES, **TWO), MIXED, SCALED, GATED
  ),
  "promoted_groups": _rows(_GROUPS, _ENDS, SMALL, E4M3, SCALED, BIAS_N),
  "blocks": _dense((65, 128, 272), HALVES, E4M3, BLOCKS),
  "lines": _dense((65, 72, 272), HALVES, E4M3, LINES),
  "int8": _dense((130, 64, 272), changed(HALVES, cluster_m=2), INT8, INT32),
  "slabs_of_8_bits": of_slabs(
    (65, 64, 640), (0, 384, 384, 640), HALVES, E4M3, SCALED
  ),
}

VALUES = {
  # Edges of every dimension, of which no two agree; one row, one element.
  "edges": _dense((70, 77, 200), HALVES, E4M3, SCALED),
  "one_element": _dense((1, 1, 1), SMALL, E5M2, F32),
  "one_row": _dense((1, 72, 130), SMALL, MIXED, SCALED, FP16),
  "one_row_swapped": _dense((1, 130, 272), _SWAPPED, E4M3, SCALED),
  "by_rows": _dense(
    (10, 131, 272), changed(HALVES, block_n=128), E4M3, SCALED, C_F32, F32
  ),
  # Sums that are not promoted, and what follows them.
  "fast": _dense(
    (130, 72, 272),
    changed(HALVES, **TWO),
    E4M3,
    FAST,
    SCALED,
    GELU,
    BIAS_N,
    alpha=-0.5,
  ),
  "fast_of_columns": _dense(
    (64, 130, 272), changed(SMALL, block_n=128, **_PINGPONG | {"split": "n"}),
    E5M2, FAST, TENSORS, F32, BIAS_M,
  ),
  "tensor_scales": _dense(
    (70, 72, 272), HALVES, MIXED, TENSORS, RELU, C_BF16, beta=2.0
  ),
  "scale_of_a": _dense(_PLAIN, HALVES, E4M3, {"scale_a": "vector"}, SAVED),
  "scale_of_b": _dense(_PLAIN, HALVES, INT8, {"scale_b": "vector"}, F32),
  # Operands that XLA transposes first.
  "transposed": _dense(
    (70, 72, 200), HALVES, E4M3, SCALED, transpose_a=True, transpose_b=False
  ),
  "batch": _dense(
    (40, 72, 130), HALVES, E4M3, SCALED, BATCHED
  ),
  "batch_of_one_a": _dense(
    (40, 72, 130), HALVES, INT8, SCALED, batch=2, batched_b=True
  ),
  "promoted_in_a_cluster": _dense(
    (200, 72, 272), changed(SMALL, cluster_m=2, stages=3), MIXED, SCALED
  ),
  "promoted_three_consumers": _dense(
    (180, 64, 130), changed(SMALL, block_m=192, consumers=3), E4M3, SCALED
  ),
  "promoted_pingpong": _dense(
    (200, 96, 130),
    changed(SMALL, block_n=96, epilogue_n=32, stages=4, **_PINGPONG),
    E4M3,
    SCALED,
  ),
  "swapped_float32": _dense(
    (41, 130, 272), _SWAPPED, E4M3, SCALED, F32, C_BF16, BIAS_N
  ),
  "swapped_int8": _dense((41, 130, 272), _SWAPPED, INT8, INT32),
  "split_k": _dense((33, 40, 300), changed(SMALL, split_k=2), E4M3, SCALED),
  "split_k_gated": _dense(
    (33, 40, 300), changed(SMALL, split_k=3), E4M3, SCALED, GATED, SAVED
  ),
  "cluster_k": _dense(
    (33, 40, 300), changed(SMALL, cluster_k=2, epilogue_n=16), E4M3, SCALED
  ),
  "int8_whole_laps": _dense((70, 72, 256), HALVES, INT8, SCALED, FP16),
  # Scales of blocks: a block's columns in two tiles, fewer than a tile's.
  "blocks_of_edges": _dense(
    (70, 200, 300), changed(SMALL, block_n=128, stages=3), MIXED, BLOCKS, F32
  ),
  "blocks_of_one_row": _dense((1, 72, 130), SMALL, E4M3, BLOCKS),
  "blocks_of_int8": _dense(
    (130, 136, 272), changed(HALVES, **TWO), INT8, BLOCKS, GELU, IN_PLACE
  ),
  "blocks_gated": _dense(
    (130, 136, 272), changed(HALVES, **TWO), E4M3, BLOCKS, GATED
  ),
  "blocks_of_a_batch": _dense(
    (40, 136, 130), HALVES, E5M2, BLOCKS, BATCHED
  ),
  "blocks_in_parts_of_k": _dense(
    (33, 136, 400), changed(SMALL, cluster_k=2, epilogue_n=16), E4M3, BLOCKS
  ),
  "blocks_pingpong": _dense(
    (200, 136, 130), changed(SMALL, stages=4, **_PINGPONG), E4M3, BLOCKS
  ),
  "blocks_of_groups": _rows(
    (250, 136, 272), (0, 0, 1, 128, 129, 250), SMALL, E4M3, BLOCKS
  ),
  "blocks_of_groups_in_a_cluster": _rows(
    (150, 136, 272), (7, 70, 70, 149), changed(SMALL, cluster_n=2), E4M3, BLOCKS
  ),
  # The same for each column: rows of scales that TMA can't address, more
  # columns than one consumer's, a last slab that is a copy.
  "lines_of_edges": _dense(
    (70, 201, 300), changed(SMALL, block_n=96, epilogue_n=32), MIXED, LINES, F32
  ),
  "lines_of_one_element": _dense((1, 1, 1), SMALL, E5M2, LINES),
  "lines_of_columns": _dense(
    (64, 130, 272),
    changed(SMALL, block_n=128, **_PINGPONG | {"split": "n"}),
    INT8,
    LINES,
    BIAS_M,
  ),
  "lines_gated_in_a_cluster": _dense(
    (130, 136, 272), changed(HALVES, cluster_m=2), E4M3, LINES, GATED
  ),
  "lines_of_a_batch": _dense(
    (40, 136, 130), changed(HALVES, cluster_n=2), E5M2, LINES, BATCHED
  ),
  "lines_in_parts_of_k": _dense(
    (33, 136, 300), changed(SMALL, cluster_k=2, epilogue_n=16), E4M3, LINES
  ),
  "lines_pingpong": _dense(
    (200, 136, 130), changed(SMALL, stages=4, **_PINGPONG), E4M3, LINES
  ),
  "lines_of_groups": _rows(
    (250, 136, 272), (0, 0, 1, 128, 129, 250), SMALL, E4M3, LINES
  ),
  "lines_of_slabs": of_slabs(
    (70, 137, 600), (128, 512, 512, 640), changed(HALVES, cluster_m=2), E4M3,
    LINES,
  ),
  # Groups: none, of one row, of 127, from odd rows on.
  "groups_of_any_size": _rows(
    (250, 72, 144), (0, 0, 1, 128, 129, 250), SMALL, E4M3, SCALED
  ),
  "groups_fast": _rows(
    (150, 72, 70), (7, 70, 70, 150), changed(SMALL, **TWO), E5M2, FAST, SCALED
  ),
  "groups_gated": _rows((75, 64, 272), (3, 70), SMALL, MIXED, SCALED, GATED),
  "groups_of_tensors": _rows(_GROUPS, _ENDS, SMALL, E4M3, TENSORS, GELU),
  "groups_transposed": _rows(
    (90, 72, 130), (0, 40, 88), SMALL, E4M3, SCALED, {"transpose_b": False}
  ),
  "groups_int32": _rows(
    (140, 72, 272), (3, 22, 140), HALVES, INT8, INT32
  ),
  "groups_by_rows": _rows(
    (86, 141, 130), (3, 22, 86), changed(SMALL, block_n=128), INT8, SCALED
  ),
  # Groups along K: from any slab on, none, one that is cut by the end of K;
  # results of edges, in a cluster, all groups empty, one with all slabs.
  "slabs_from_any": of_slabs(
    (70, 136, 600), (128, 128, 256, 640), HALVES, MIXED, SCALED
  ),
  "slabs_fast": of_slabs(
    (130, 141, 512), (0, 128, 512), changed(SMALL, **TWO), E5M2, FAST, TENSORS
  ),
  "slabs_of_int8": of_slabs(
    (70, 72, 384), (0, 0, 256, 384), HALVES, INT8, SCALED, F32
  ),
  "slabs_of_int32": of_slabs((70, 72, 256), (0, 128, 256), HALVES, INT8, INT32),
  "slabs_in_clusters_of_8_bits": of_slabs(
    (130, 64, 512), (0, 384, 512), changed(SMALL, cluster_m=2), E4M3, SCALED
  ),
  "no_slabs_of_8_bits": of_slabs(
    (64, 64, 256), (128,) * 4, HALVES, E4M3, SCALED
  ),
  "no_slabs_of_several_tiles": of_slabs(
    (70, 64, 256), (0, 0, 0), HALVES, E4M3, FAST
  ),
  "slabs_uneven_of_8_bits": of_slabs(
    (64, 64, 1280), (0, 128, *(1280,) * 7), SMALL, E4M3
  ),
  "slabs_of_blocks": of_slabs(
    (70, 136, 640), (128, 512, 512, 640), HALVES, E4M3, BLOCKS
  ),
}  # fmt: skip
