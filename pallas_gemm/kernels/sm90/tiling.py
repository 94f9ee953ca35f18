"""How a problem is cut up: tiles, slabs of K, subtiles of results."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

from pallas_gemm import hardware
from pallas_gemm.hardware import SECTOR_BYTES
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import (
  ATOM_BYTES,
  ATOM_ROWS,
  cdiv,
  round_up,
)
from pallas_gemm.problem import Problem, bits

# wgmma: 64 rows by at most 256 columns, a multiple of 8, and 32 bytes of K.
WGMMA_ROWS, WGMMA_COLUMNS, WGMMA_K_BYTES = 64, 256, 32
THREADS = 128
# Scales that TMA copies start at multiples of 16 bytes. Blocks of 128 columns:
# a tile's three at most, and those before them.
SCALES_AT_ONCE, BLOCKS_COPIED = 4, 8
# Results with fewer columns are not stored by rows; sums that are shorter take
# less time than their results take to be written.
_FEWEST_COLUMNS, _MOST_K = 128, 256


class Extent(NamedTuple):
  """How much of a tile is loaded, along M or N.

  Attributes:
    whole: of every tile but the last.
    last: of the last one, and of those of a cluster beyond it.
    start: where the last one starts.
  """

  whole: int
  last: int
  start: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tiling:
  """How a problem is cut up; properties are computed when first read.

  Attributes:
    given: the problem as asked.
    config: how it is computed, legal or not.
    gpu: where.
  """

  given: Problem
  config: Config
  gpu: hardware.Gpu

  @functools.cached_property
  def problem(self) -> Problem:
    """What the kernel computes: the transposed problem if operands are swapped.

    Its result is the transposed one of `given`, and is stored as `given` says.
    All that follows is of this problem, with short rows transposed.
    """
    return layout.with_rows_along_k(self.given, self.config.swap_ab)

  @functools.cached_property
  def transposed(self) -> tuple[bool, bool]:
    """Whether A and B are transposed before the kernel, by XLA."""
    given = self.given.a, self.given.b
    given = given[::-1] if self.config.swap_ab else given
    now = self.problem.a, self.problem.b
    return tuple(x.k_last and not y.k_last for x, y in zip(now, given))

  @functools.cached_property
  def warpgroup_tile(self) -> tuple[int, int]:
    """Rows and columns of the tile that one consumer computes."""
    cfg = self.config
    if cfg.split == "pingpong":
      return cfg.block_m, cfg.block_n
    if cfg.split == "m":
      return cfg.block_m // cfg.consumers, cfg.block_n
    return cfg.block_m, cfg.block_n // cfg.consumers

  @functools.cached_property
  def stored_tile(self) -> tuple[int, int]:
    """Rows and columns of what the consumer stores.

    Where blocks sum parts of K, each has a part of the columns.
    """
    rows, columns = self.warpgroup_tile
    return rows, columns // self.config.cluster_k

  @functools.cached_property
  def pingpong(self) -> int:
    """Consumers that ping-pong, a work tile each; 1 if they share each one."""
    return self.config.consumers if self.config.split == "pingpong" else 1

  @functools.cached_property
  def b_would_be_padded(self) -> bool:
    """Whether weights of groups, of some slabs, would be padded for TMA."""
    p = self.problem
    if p.along != "m" or p.k <= self.config.block_k or p.planes > 1:
      return False
    return layout.operand_shapes(p)[1] != self.whole_paddings[1]

  @functools.cached_property
  def whole_paddings(self) -> tuple[layout.Shape, layout.Shape]:
    """Rows and columns of A and B once TMA can address all of them."""
    columns = self.operand_columns
    return layout.operand_paddings(self.problem, self.config, columns)

  # Work tiles.

  @functools.cached_property
  def tiles_overlap(self) -> bool:
    """Whether tiles end with columns that the next ones have, too.

    Where rows of results start anywhere, a tile then stores whole sectors, of
    which the last begins in it and ends in the next. That is worth more tiles
    only where memory binds: 16 groups of 512 along K, 4096 x 4100, take 18 for
    17 columns of tiles.
    """
    p, cfg = self.problem, self.config
    if not self.by_rows or self.warpgroup_tile[1] <= self.subtile_width:
      return False
    if cfg.split == "n":  # the other consumer has these columns
      return False
    step = cfg.block_n - layout.elements_in(SECTOR_BYTES, p.out_dtype)
    groups = p.groups.count if p.along == "k" else 1
    return p.k <= _MOST_K * groups or cdiv(p.n, step) == cdiv(p.n, cfg.block_n)

  @functools.cached_property
  def column_step(self) -> int:
    """Columns from a tile's first to that of the next tile."""
    sector = layout.elements_in(SECTOR_BYTES, self.problem.out_dtype)
    return self.config.block_n - sector * self.tiles_overlap

  @functools.cached_property
  def grid(self) -> tuple[int, int]:
    """Tiles of clusters along M and N."""
    p, cfg = self.problem, self.config
    return (
      cdiv(p.m, cfg.block_m * cfg.cluster_m),
      cdiv(p.n, self.column_step * cfg.cluster_n),
    )

  @functools.cached_property
  def read_columns(self) -> int:
    """Columns up to which tiles reach, beyond N or not."""
    tiles = self.grid[1] * self.config.cluster_n
    return (tiles - 1) * self.column_step + self.config.block_n

  @functools.cached_property
  def slabs(self) -> int:
    """Slabs of K that a work tile of a dense product has."""
    parts = self.config.split_k * self.config.cluster_k
    return cdiv(cdiv(self.problem.k, self.config.block_k), parts)

  @functools.cached_property
  def slabs_at_once(self) -> int:
    """Slabs whose sums are added to totals together.

    Two of planes of 32 of K: totals are then added up as often as with slabs of
    64, of which a ring holds two. Groups along K may have any number of slabs.
    """
    p, cfg = self.problem, self.config
    is_short = p.has_small_apart and cfg.block_k == 32 and p.along != "k"
    return 1 + (is_short and self.slabs % 2 == 0 and cfg.stages > 2)

  @functools.cached_property
  def row_tiles(self) -> int:
    """The most tiles that M rows can make up in groups of any sizes.

    Rows before the first group and after the last one count as two more.
    """
    p, block_m = self.problem, self.config.block_m
    tiles = p.groups.count + 2
    return (p.m + tiles * (block_m - 1)) // block_m

  @functools.cached_property
  def work_tiles(self) -> int:
    """Work tiles of all blocks, in tiles of clusters; of groups, of one."""
    rows, columns = self.grid
    return rows * columns * self.problem.batch * self.config.split_k

  @functools.cached_property
  def work_tiles_of_a_block(self) -> int | None:
    """Work tiles that each block has, or one less; None: the device knows."""
    if self.problem.along:
      return None
    return cdiv(self.work_tiles, self.clusters)

  @functools.cached_property
  def clusters(self) -> int:
    """Clusters that are launched: one block an SM, or fewer."""
    p, work_tiles = self.problem, self.work_tiles
    room = hardware.clusters_at_once(self.config.blocks, self.gpu.sm_count)
    if p.along == "m":  # how many work tiles there are, the device knows
      return min(room, self.row_tiles * self.grid[1])
    if p.along == "k":
      work_tiles *= p.groups.count
    if self.config.cluster_k > 1:
      return work_tiles  # sums of another tile would need room of their own
    # As few as need the same number of waves: all end at the same time, where a
    # partial last wave would leave part of the memory bandwidth unused.
    return cdiv(work_tiles, cdiv(work_tiles, room))

  # The ring.

  @property
  def b_slab_shape(self) -> layout.Shape:
    """Rows and columns of a slab of B, as it is stored."""
    shape = self.config.block_k, self.config.block_n
    return shape[::-1] if self.problem.b.k_last else shape

  @functools.cached_property
  def operand_columns(self) -> int:
    """Columns of the swizzle atoms of A and B; wgmma wants the same of both."""
    atom = layout.elements_in(ATOM_BYTES, self.problem.a.dtype)
    is_whole = self.problem.b.k_last or self.warpgroup_tile[1] % atom == 0
    # Mosaic GPU multiplies whole atoms of K, however A is stored.
    return min(atom if is_whole else atom // 2, self.config.block_k)

  @property
  def sums(self) -> int:
    """Registers of a thread for each of its elements, of one product.

    Accumulators; totals; scales of lines, which are fewer, or accumulators of
    small products.
    """
    p = self.problem
    return 1 + p.is_promoted + p.has_lines + p.has_small_apart

  @functools.cached_property
  def refills(self) -> bool:
    """Whether a slot of the ring is filled again, once it has been read.

    Where it is not, nothing need be told of slots that have been read. Blocks
    of a cluster tell each other in any case: none may end before its peers have
    what it loads for them.
    """
    cfg, work_tiles = self.config, self.work_tiles_of_a_block
    if work_tiles is None or cfg.cluster_m > 1 or cfg.cluster_n > 1:
      return True
    # Consumers that ping-pong have as many slots each, one of them most tiles.
    return round_up(work_tiles, self.pingpong) * self.slabs > cfg.stages

  @functools.cached_property
  def loaded_a(self) -> Extent:
    """Rows of A's tiles that are loaded.

    Rows that lie outside of A cost a copy more time than those inside: 192 x
    6144 x 6144 with 128 x 96 tiles, 44.6 -> 26.8 us (H200). So they are left
    out; what their place holds goes to rows that are never stored.
    """
    p, cfg = self.problem, self.config
    in_part = p.a.k_last and cfg.cluster_n == 1
    found = _extent(p.m, cfg.block_m, cfg.block_m, in_part)
    if p.along == "m":  # the device knows where a tile starts
      return found._replace(last=found.whole)
    return found

  @functools.cached_property
  def loaded_b(self) -> Extent:
    """Columns of B's tiles that are loaded."""
    p, cfg = self.problem, self.config
    in_part = p.b.k_last and cfg.cluster_m == 1
    return _extent(p.n, cfg.block_n, self.column_step, in_part)

  # Results.

  @functools.cached_property
  def outputs(self) -> int:
    """Matrices that the kernel writes; parts of K: a sum of each product."""
    if self.config.split_k > 1:
      return self.problem.products
    return 1 + self.problem.products if self.problem.epilogue.save else 1

  @functools.cached_property
  def by_rows(self) -> bool:
    """Whether results are stored row by row, not by TMA.

    That is for results whose rows TMA can't address. A padded result would
    have to be copied: 4095^3 takes 296 us so, and 242 row by row (H200). Of
    groups along K, whose results are most of what is moved, it is for rows that
    TMA would store in parts of sectors, too. None of whole slabs: what has no
    rows would have no slab of zeros.
    """
    p, cfg = self.problem, self.config
    if p.has_whole_slabs:
      return False
    row = layout.bytes_of(p.n, p.out_dtype)
    if p.along == "k":
      starts_anywhere = row % SECTOR_BYTES > 0
    else:
      starts_anywhere = not layout.is_addressable(p.n, p.out_dtype)
    return (
      starts_anywhere
      and cfg.split_k == cfg.cluster_k == 1
      and not p.epilogue.save
      and not cfg.swap_ab
      and p.n >= _FEWEST_COLUMNS
      and self.warpgroup_tile[1] % self._columns_by_rows == 0
    )

  @functools.cached_property
  def by_elements(self) -> bool:
    """Whether threads store results from registers, one or two at a time.

    That is for few results whose rows TMA can't address, and that are not
    stored by rows: a padded result would be copied, which takes 1.3 us. And for
    32-bit results of swapped operands, which stmatrix can't transpose; eight
    threads then have a whole sector.
    """
    p, cfg = self.problem, self.config
    if p.along or cfg.split_k > 1 or p.epilogue.save:
      return False
    if cfg.swap_ab and bits(p.out_dtype) == 32:
      return True
    columns = p.m if cfg.swap_ab else p.n
    if self.by_rows or layout.is_addressable(columns, p.out_dtype):
      return False
    return layout.bytes_of(p.results, p.out_dtype) <= layout.SMALL_OPERAND

  @functools.cached_property
  def _columns_by_rows(self) -> int:
    """Columns that a warpgroup stores at a time by rows: 128 bytes.

    Of results, or of C if its elements are larger.
    """
    p = self.problem
    dtypes = filter(None, (p.out_dtype, p.epilogue.c_dtype))
    return min(layout.elements_in(ATOM_BYTES, x) for x in dtypes)

  @functools.cached_property
  def subtile_width(self) -> int:
    return self._columns_by_rows if self.by_rows else self.config.epilogue_n

  @functools.cached_property
  def subtiles(self) -> tuple[tuple[int, int], ...]:
    """Where the 64-row subtiles start of what a consumer stores.

    All are of one width. Where it does not divide the columns, the last subtile
    ends with them, and what it shares with the subtile before is stored twice.
    """
    (rows, columns), width = self.stored_tile, self.subtile_width
    starts = [min(j, columns - width) for j in range(0, columns, width)]
    return tuple(itertools.product(range(0, rows, WGMMA_ROWS), starts))

  @functools.cached_property
  def subtiles_overlap(self) -> bool:
    """Whether the last of a row's `subtiles` has columns of the one before."""
    return self.stored_tile[1] % self.subtile_width > 0


def _extent(size: int, block: int, step: int, in_part: bool) -> Extent:
  """Of tiles so many rows, or columns, apart.

  Not in part: tiles that blocks share, and tiles stored along K. Of these, a
  few columns are no contiguous part of shared memory.
  """
  if not in_part:
    return Extent(block, block, 0)
  start = (cdiv(size, step) - 1) * step
  last = min(block, round_up(size - start, ATOM_ROWS))
  return Extent(last if start == 0 else block, last, start)
