"""Groups of rows that have a product each, and where they start on the device.

    out[rows of g] = activation(A[rows of g] @ B[g] + bias[g])     ragged "m"
    out[g] = A[rows of g].T @ B[rows of g]                         ragged "k"

The first is the forward pass of a mixture of experts, and the derivative by its
rows; the second the derivative by its weights. Rows of a group are consecutive,
and where groups start only the device knows. So a kernel makes small tables of
them (`tables`), from which blocks read what their work tiles are
(`grouped_schedule`).

**Groups of rows.** Tiles start where groups start, so no tile has rows of two
groups. The last tile of a group that is larger than a tile ends where the group
ends, and computes some rows a second time: the same bits are stored twice, and
nothing is masked. Only a group that is smaller than a tile is stored in part
(`stores`). Rows that belong to no group are tiles of few slabs, whose
accumulators are dropped and zeros stored. Tiles of one group follow each other,
those of the same columns first, so that blocks which run at a time share its B
in the L2.

**Groups along K.** A work tile sums the slabs of its group, from its first row
on. Of the last slab TMA fetches blocks of 8 rows; those beyond the group's end
from beyond the matrix, which gives zeros. The one block that the end cuts is
first copied by that kernel, filled up with zeros. So rows of other groups never
meet, a NaN stays in its group, and no step is masked. Results of groups without
rows are zeros, which a warp of its own stores meanwhile, or sums of a
slab of zeros (`Memory.stores_zeros`).

Of 8 bits, which wgmma reads along K alone, operands are stored along K, where a
cut slab would end inside of rows. So the caller starts each group at a multiple
of a slab, behind zeros, and all slabs are whole ones.

Sources: MegaBlocks and CUTLASS (grouped GEMM with a schedule on the device).
"""

import math

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_gemm import mosaic
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.schedule import (
  Index,
  Schedule,
  WorkTile,
  origin,
  snake,
)

# Times the mean that the largest group along K has, from which half of the
# blocks start with the small groups. On an H200, of 256 groups the largest 42
# times: 3484 -> 3185 us; of 8 groups 2.9 times: no gain; even sizes would take
# 5 % longer.
_UNEVEN = 4


def grouped_schedule(plan: Plan, tables) -> Schedule:
  """The work tiles of a grouped product.

  Args:
    plan: of a problem with groups.
    tables: of `tables.make`, in global memory.
  """
  along_m = plan.problem.along == "m"
  return (_schedule_of_rows if along_m else _schedule_of_slabs)(plan, *tables)


def _schedule_of_rows(plan: Plan, tiles_ref, ends_ref) -> Schedule:
  """All tiles of a group, then those of the next one."""
  cfg, row_tiles = plan.config, ends_ref[plan.problem.groups.count + 1]
  _, columns = plan.tiling.grid
  # What is summed for rows of no group is not stored. Whole laps of the ring,
  # if those of groups are, and as many slabs as are visited at once.
  at_once = plan.tiling.slabs_at_once
  least = min(plan.tiling.slabs, cfg.stages // at_once * at_once)

  def read(i: Index):
    return tuple(tiles_ref[lax.div(i, columns), field] for field in range(4))

  def work_tile(i: Index, known: tuple[Index, ...]) -> WorkTile:
    start, end, group, first = known
    tiles = _cdiv(end - start, cfg.block_m), columns
    m_tile, n_tile = tile_in_group(i - first * columns, tiles, cfg)
    row, rows = rows_of_tile(start, end, m_tile, cfg)
    _, column = origin((0, n_tile), plan)
    is_group = group >= 0
    return WorkTile(
      row=mosaic.anywhere(row),
      column=column,
      a=0,
      b=jnp.maximum(group, 0),
      out=0,
      start=0,
      steps=jnp.where(is_group, plan.tiling.slabs, least),
      rows=rows,
      is_group=is_group,
    )

  return Schedule(row_tiles * columns, read, work_tile)


def tile_in_group(
  i: Index, tiles: tuple[Index, Index], config: Config
) -> tuple[Index, Index]:
  """Row and column tile of a number in the order of a group's tiles.

  In strips along one side, up to `raster` wide and about equally so. Blocks
  that run at a time then have all row tiles of a column, and read its B once:
  160 groups of 204 rows, 5120 x 1536, 1041 -> 988 us where strips end with
  groups (H100).
  """
  minor = ("m", "n").index(config.raster_dim)
  across, along = tiles[minor], tiles[1 - minor]
  width = _cdiv(across, _cdiv(across, config.raster))
  strip = lax.div(i, width * along)
  i -= strip * width * along
  here = jnp.minimum(width, across - strip * width)
  line = lax.div(i, here)
  place = strip * width + i - line * here
  line = jnp.where(lax.rem(strip, 2) == 1, along - 1 - line, line)
  return (place, line) if minor == 0 else (line, place)


def _cdiv(a: Index, b: Index) -> jax.Array:
  return lax.div(a + (b - 1), b)


def rows_of_tile(
  start: Index, end: Index, m_tile: Index, config: Config
) -> tuple[Index, Index]:
  """The first row of a group's tile, and how many it has."""
  height = config.block_m
  row = jnp.minimum(start + m_tile * height, end - height)
  row = jnp.maximum(row, start)
  return row, jnp.minimum(end - row, height)


def _schedule_of_slabs(plan: Plan, groups_ref, counts_ref) -> Schedule:
  """Tiles within the result of a group first, then the groups that have rows.

  Large groups come first. They keep the tensor cores busy, groups of few rows
  the memory, which their results have to be written to: where sizes differ
  much, half of the blocks start with the small ones.
  """
  cfg, grid = plan.config, plan.tiling.grid
  tiles, has_whole_slabs = math.prod(grid), plan.problem.has_whole_slabs

  def read(i: Index):
    if has_whole_slabs:  # where no group has rows, there is no work tile
      i = jnp.maximum(i, 0)
    nth = lax.div(i, tiles)
    return tuple(groups_ref[nth, field] for field in range(3))

  def work_tile(i: Index, known: tuple[Index, ...]) -> WorkTile:
    start, end, group = known
    row, column = origin(snake(lax.rem(i, tiles), grid, cfg), plan)
    if has_whole_slabs:
      start = pl.multiple_of(start, cfg.block_k)
      steps = lax.div(end - start, cfg.block_k)
      return WorkTile(row, column, group, group, group, start, steps)
    whole = lax.div(end - start, cfg.block_k)
    k_tail = lax.rem(end - start, cfg.block_k)
    # A group without rows that is summed up has a slab of zeros.
    has_tail = (k_tail > 0) | (whole == 0)
    return WorkTile(
      row=row,
      column=column,
      a=0,
      b=0,
      out=group,
      start=mosaic.anywhere(start),
      steps=whole + has_tail.astype(whole.dtype),
      whole=whole,
      k_tail=k_tail,
    )

  tables = groups_ref, counts_ref
  count = plan.problem.groups.count
  if plan.memory.stores_zeros:
    count = summed_groups(plan, tables)
  work_tiles = tiles * jnp.int32(count)
  return Schedule(work_tiles, read, work_tile, is_uneven(tables))


def filled_groups(tables) -> jax.Array:
  """How many groups along K have rows; at least one."""
  return jnp.maximum(tables[1][0], 1)


def summed_groups(plan: Plan, tables) -> jax.Array:
  """How many groups are summed up: those with rows, or one without.

  Of whole slabs none without: its scales may be anything.
  """
  return tables[1][0] if plan.problem.has_whole_slabs else filled_groups(tables)


def is_uneven(tables) -> jax.Array:
  """Whether sizes of groups along K differ much."""
  groups, counts = tables
  mean = lax.div(counts[1], filled_groups(tables))
  return groups[0, 1] - groups[0, 0] > _UNEVEN * mean


def has_spare_time(plan: Plan, tables) -> jax.Array:
  """Whether products take longer than zeros for groups without rows."""
  p, cfg = plan.problem, plan.config
  empty = p.groups.count - summed_groups(plan, tables)
  subtiles = cfg.consumers * len(plan.tiling.subtiles)
  return tables[1][1] > cfg.block_k * subtiles * empty


def for_each_tile_of_zeros(plan: Plan, tables, cluster, visit) -> None:
  """visit(work_tile) for this block's tiles of the groups that have no rows."""
  cfg, (groups_ref, _) = plan.config, tables
  tiles, step = math.prod(plan.tiling.grid), plan.tiling.clusters

  def iteration(i, _):
    number = first + i * step
    group = groups_ref[lax.div(number, tiles), 2]
    tile = snake(lax.rem(number, tiles), plan.tiling.grid, cfg)
    visit(WorkTile(*origin(tile, plan), group))

  first = summed_groups(plan, tables) * tiles + cluster
  count = lax.div(tiles * plan.problem.groups.count + step - 1 - first, step)
  lax.fori_loop(0, count, iteration, None)
