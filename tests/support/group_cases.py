"""Cases of the grouped kernel; see `cases`.

Groups end inside tiles and inside slabs, some are empty, some rows belong to
none.
"""

from pallas_gemm.kernels.sm90.config import Config
from tests.support.cases import (
  B_TRANSPOSED,
  BIAS_N,
  COLUMNS,
  DIRECT,
  F32,
  FP16,
  GATED,
  GELU,
  HALVES,
  SAVED,
  SILU,
  SMALL,
  TALL,
  TWO,
  Case,
  changed,
  problem,
)  # fmt: skip


def _rows(shape, offsets, config: Config, *fields) -> Case:
  groups = {"ragged": "m", "groups": len(offsets) - 1}
  return Case(problem(shape, groups, *fields), config, offsets=offsets)


def _slabs(shape, offsets, config: Config, *fields) -> Case:
  """Groups along K, of which the shape has the rows of all."""
  groups = {"ragged": "k", "groups": len(offsets) - 1, "transpose_a": True}
  return Case(problem(shape, groups, *fields), config, offsets=offsets)


_PAIRS = Config(
  block_m=64, stages=2, split="n", epilogue_n=128, epilogue_buffers=1
)
_GROUPS, _ENDS = (140, 64, 130), (3, 22, 120)

RACES = {
  # Groups: tiles that end with their group, one that is stored in part, none;
  # whole slabs and last ones.
  "groups": _rows(_GROUPS, _ENDS, SMALL, BIAS_N),
  # Slabs come in pairs: two and one of them each tile.
  "groups_in_pairs": _rows(
    (140, 64, 192), _ENDS, changed(SMALL, stages=3), BIAS_N, B_TRANSPOSED
  ),
  "groups_gated": _rows(
    (80, 64, 66), (3, 22, 80), changed(SMALL, cluster_n=2), GATED, SAVED
  ),
  "groups_of_two_consumers": _rows(
    (140, 64, 64), _ENDS, changed(SMALL, **TWO), BIAS_N, B_TRANSPOSED
  ),
  "groups_pingpong": _rows(
    _GROUPS,
    _ENDS,
    changed(SMALL, stages=9, consumers=3, split="pingpong"),
    BIAS_N,
  ),
  "weights_of_ragged_atoms": _rows((140, 136, 130), _ENDS, DIRECT, BIAS_N),
  # Threads load B, and results are stored by rows, none of them twice.
  "weights_by_threads": _rows((86, 141, 130), (3, 22, 86), DIRECT, BIAS_N),
  # Slabs on their way while one is waited for: none, one, two.
  **{
    f"weights_by_copies_{stages}_stages": _rows(
      (86, 140, 270), (3, 22, 86), changed(DIRECT, stages=stages), BIAS_N
    )
    for stages in (2, 3, 4)
  },
  "slabs": _slabs((64, 64, 140), _ENDS, HALVES),
  "slabs_by_rows": _slabs((64, 141, 140), (3, 22, 22, 120), DIRECT),
  "a_group_of_zeros": _slabs((64, 64, 140), (3, 22, 22, 120), HALVES),
}

VALUES = {
  # Groups: tiles that end with their group, groups smaller than a tile, none.
  "rows_before": _rows((150, 72, 70), (7, 70, 70, 150), SMALL, FP16),
  "no_rows": _rows((70, 64, 64), (70, 70, 70), SMALL),
  "one_row_each": _rows((9, 64, 8), tuple(range(10)), SMALL),
  "rows_by_columns": _rows(
    (140, 136, 130), (0, 64, 65, 129, 140), COLUMNS, B_TRANSPOSED
  ),
  # A second consumer that has some rows, all or none.
  "rows_of_two_consumers": _rows((220, 64, 70), (0, 64, 164, 210), TALL),
  "rows_float32": _rows((80, 72, 64), (0, 5, 77), HALVES, F32),
  "rows_saved": _rows((70, 72, 64), (0, 20, 66), SMALL, SILU, BIAS_N, SAVED),
  "rows_gated": _rows((75, 64, 64), (3, 70), SMALL, GATED, SAVED, B_TRANSPOSED),
  # Weights that are no whole number of atoms: TMA takes the begun ones, threads
  # load rows that it can't address, one, two or four elements at a time.
  "weights_of_135_columns": _rows(
    (150, 135, 131), (0, 3, 3, 90, 140), SMALL, GELU, BIAS_N
  ),
  "weights_of_134_columns": _rows((90, 134, 128), (0, 64, 88), DIRECT, FP16),
  "weights_of_132_columns": _rows(
    (200, 132, 130), (0, 130, 200), changed(SMALL, block_m=192, consumers=3)
  ),
  "weights_of_135_rows": _rows((90, 128, 135), (0, 40, 88), TALL, B_TRANSPOSED),
  # Of two B's with so many columns a chunk has more than it has elsewhere.
  "weights_of_259_columns": _rows(
    (70, 259, 130), (0, 9, 50, 70), changed(_PAIRS, epilogue_n=64), GATED
  ),
  "rows_row_wise": _rows(
    (201, 271, 64), (0, 130, 195), changed(DIRECT, **TWO, stages=3)
  ),
  # Slabs: whole ones, none, a last one that blocks of 8 rows do not make up.
  "slabs_of_70_rows": _slabs((64, 64, 80), (1, 71, 80), SMALL, FP16),
  "slabs_from_5": _slabs((130, 66, 203), (5, 14, 14, 90, 190, 203), TALL),
  "no_slabs": _slabs((64, 64, 5), (2, 2, 2), SMALL),
  "slabs_wide": _slabs((136, 320, 90), (0, 3, 3, 80, 90), _PAIRS),
  # One group that has much more than its share: blocks go both ways.
  "slabs_uneven": _slabs((64, 64, 70), (0, 1, 2, 3, 3, 64, 65, 70, 70), SMALL),
  # Groups of zeros that take longer than the products.
  "most_empty": _slabs((70, 72, 30), (0, 0, 0, 30, 30, 30), TALL),
  "few_slabs": _slabs((40, 64, 5), (0, 1, 4), SMALL, F32),
  "slabs_of_128_in_clusters": _slabs(
    (64, 130, 300), (0, 9, 290), changed(SMALL, block_k=128, cluster_n=2)
  ),
  "slabs_in_clusters": _slabs(
    (130, 64, 140), (0, 70, 140), changed(SMALL, cluster_m=2)
  ),
}
