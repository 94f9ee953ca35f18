"""Which tiles a block of the Hopper kernels computes, and from what.

A work tile is one tile of the result: of one matrix of a batch, of one part
of K, or of one group. `of` numbers the work tiles of a problem, in the order in
which blocks take them up, and says of each where it lies. Of groups, whose
sizes only the device knows, the numbers it needs are read from global memory.
"""

from collections.abc import Callable
import enum
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem

Index = int | jax.Array


class WorkTile(NamedTuple):
  """A tile of the result, and what it is summed from.

  Attributes:
    row, column: of the result, where this block's tile starts.
    a, b, out: which matrix, where there are several of them.
    start: the row of K where the sum starts.
    steps: slabs that are summed; at least one.
    whole: of these, the slabs that lie in A and B themselves; those after
      them are in the copies of what a group has beside whole slabs. None if
      all do.
    rows: of the tile that are stored; None for all.
    is_group: whether the tile belongs to a group; None if all do.
    part: of a tile that is summed in parts of K, which; -1 for whole tiles,
      None if all are.
  """

  row: Index
  column: Index
  a: Index
  b: Index
  out: Index
  start: Index
  steps: Index
  whole: Index | None = None
  rows: Index | None = None
  is_group: Index | None = None
  part: Index | None = None


# Of a work tile that is stored and not summed.
_NO_SUM = {"a": 0, "b": 0, "start": 0, "steps": 0}


class Place(NamedTuple):
  """Where the results of a work tile go, in as few registers as that takes.

  Attributes:
    row, column: as of `WorkTile`.
    which: the matrix; with groups of rows how many rows are stored, less than
      none if they belong to no group.
  """

  row: jax.Array
  column: jax.Array
  which: jax.Array

  def is_real(self, problem: Problem) -> jax.Array:
    """Whether it is a work tile's, and not `nowhere`."""
    return self.which != (0 if problem.ragged == "m" else -1)


def nowhere(problem: Problem) -> Place:
  """The place of no work tile."""
  zero = jnp.int32(0)
  return Place(zero, zero, zero if problem.ragged == "m" else jnp.int32(-1))


def place(work_tile: WorkTile) -> Place:
  """Where the results of a work tile go."""
  which = work_tile.out
  if work_tile.part is not None:  # its partial sums are stored at once
    which = jnp.where(work_tile.part < 0, which, -1)
  if work_tile.rows is not None:
    which = jnp.where(work_tile.is_group, work_tile.rows, -work_tile.rows)
  return Place(
    *(jnp.int32(x) for x in (work_tile.row, work_tile.column, which))
  )


def placed(place: Place, p: Problem, cfg: Config) -> WorkTile:
  """A work tile whose results go there; nothing else of it is known."""
  column = pl.multiple_of(place.column, cfg.block_n)
  if p.ragged != "m":
    row = pl.multiple_of(place.row, cfg.block_m)
    return WorkTile(row, column, out=place.which, **_NO_SUM)
  return WorkTile(
    compat.anywhere(place.row),
    column,
    out=0,
    rows=jnp.abs(place.which),
    is_group=place.which > 0,
    **_NO_SUM,
  )


class Schedule(NamedTuple):
  """All work tiles of a problem.

  Attributes:
    work_tiles: how many there are, in tiles of clusters; at least one.
    read: what a work tile with a number below that has in global memory.
    work_tile: the work tile, from its number and from that, as this block sees
      it.
    both_ways: whether the second half of the blocks takes its work tiles up
      from the last to the first; None for never.
  """

  work_tiles: Index
  read: Callable[[Index], tuple[Index, ...]]
  work_tile: Callable[[Index, tuple[Index, ...]], WorkTile]
  both_ways: jax.Array | None = None

  def for_each(self, first, step: int, visit, carry):
    """carry = visit(work_tile, carry) for number first, first + step, ...

    Global memory takes hundreds of cycles to answer, so what the next work tile
    is is asked for before this one is visited.
    """
    if isinstance(self.work_tiles, int) and self.work_tiles == step:
      return visit(self.work_tile(first, self._known(first)), carry)
    count = lax.div(self.work_tiles + step - 1 - first, step)
    if self.both_ways is not None:
      from_last = self.both_ways & (2 * first >= step)
      first = jnp.where(from_last, first + (count - 1) * step, first)
      step = jnp.where(from_last, -step, step)

    def iteration(i, state):
      known, carry = state
      number = first + i * step
      following = self._known(number + step)
      return following, visit(self.work_tile(number, known), carry)

    return lax.fori_loop(0, count, iteration, (self._known(first), carry))[1]

  def _known(self, number: Index) -> tuple[Index, ...]:
    """`read`, of the nearest work tile if there is no such number."""
    return self.read(jnp.clip(number, 0, self.work_tiles - 1))


def of(problem: Problem, config: Config, refs: list[Any]) -> Schedule:
  """The schedule of a problem; `refs` hold what it reads of the groups."""
  if problem.ragged is None:
    if config.tail_columns:
      return _dense_with_split_last_wave(problem, config)
    return _dense(problem, config)
  return (_rows if problem.ragged == "m" else _slabs)(problem, config, *refs)


def _dense(p: Problem, cfg: Config) -> Schedule:
  """Tiles within a matrix first, then the batch, then the parts of K."""
  grid = plan.grid(p, cfg)
  tiles = math.prod(grid)
  work_tiles = tiles * p.batch * cfg.split_k
  steps = plan.cdiv(plan.cdiv(p.k, cfg.block_k), cfg.split_k)

  def work_tile(i: Index, known: tuple[()]) -> WorkTile:
    del known
    tile = i if work_tiles == tiles else lax.rem(i, tiles)
    row, column = _corner(_snake(tile, grid, cfg), cfg)
    part = lax.div(i, tiles)
    batch = lax.rem(part, p.batch)
    start = lax.div(part, p.batch) * (steps * cfg.block_k)
    return WorkTile(row, column, batch, batch, part, start, steps)

  return Schedule(work_tiles, lambda _: (), work_tile)


def _dense_with_split_last_wave(p: Problem, cfg: Config) -> Schedule:
  """Whole tiles first, then the parts of those in the last columns."""
  rows, columns = plan.grid(p, cfg)
  grid = rows, columns - cfg.tail_columns
  whole, split = math.prod(grid), rows * cfg.tail_columns
  slabs = plan.cdiv(p.k, cfg.block_k)
  steps = plan.cdiv(slabs, cfg.tail_split_k)

  def work_tile(i: Index, known: tuple[()]) -> WorkTile:
    del known
    is_part = i >= whole
    m_tile, n_tile = _snake(jnp.minimum(i, whole - 1), grid, cfg)
    # Blocks that share a part share its slabs of A and B.
    nth = jnp.maximum(i - whole, 0)
    part, tile = lax.div(nth, split), lax.rem(nth, split)
    m_tile = jnp.where(is_part, lax.rem(tile, rows), m_tile)
    n_tile = jnp.where(is_part, grid[1] + lax.div(tile, rows), n_tile)
    row, column = _corner((m_tile, n_tile), cfg)
    first = part * steps
    return WorkTile(
      row=row,
      column=column,
      a=0,
      b=0,
      out=0,
      start=jnp.where(is_part, first, 0) * cfg.block_k,
      steps=jnp.where(is_part, jnp.minimum(steps, slabs - first), slabs),
      part=jnp.where(is_part, part, -1),
    )

  return Schedule(whole + split * cfg.tail_split_k, lambda _: (), work_tile)


def _rows(p: Problem, cfg: Config, tiles_ref, count_ref) -> Schedule:
  """Row tiles in the order of their groups: blocks share a group's B.

  Args:
    p: has groups of rows.
    cfg: how.
    tiles_ref: [most row tiles, 3]: first row, rows, group or -1.
    count_ref: [1], how many row tiles there are.
  """
  row_tiles = count_ref[0]
  _, columns = plan.grid(p, cfg)
  steps = plan.cdiv(p.k, cfg.block_k)
  # What is summed for rows of no group is not stored. Whole laps of the ring,
  # if those of groups are.
  least = min(steps, cfg.stages)

  def read(i: Index):
    m_tile, _ = _snake(i, (row_tiles, columns), cfg)
    return tuple(tiles_ref[m_tile, field] for field in range(3))

  def work_tile(i: Index, known: tuple[Index, ...]) -> WorkTile:
    row, rows, group = known
    _, n_tile = _snake(i, (row_tiles, columns), cfg)
    _, column = _corner((0, n_tile), cfg)
    is_group = group >= 0
    return WorkTile(
      row=compat.anywhere(row),
      column=column,
      a=0,
      b=jnp.maximum(group, 0),
      out=0,
      start=0,
      steps=jnp.where(is_group, steps, least),
      rows=rows,
      is_group=is_group,
    )

  return Schedule(row_tiles * columns, read, work_tile)


def _slabs(p: Problem, cfg: Config, groups_ref, facts_ref) -> Schedule:
  """Tiles within the result of a group first, then the groups that have rows.

  Large groups come first. They keep the tensor cores busy, groups of few rows
  the memory, which their results have to be written to: where sizes differ
  much, half of the blocks start with the small ones.

  Args:
    p: has groups along K.
    cfg: how.
    groups_ref: [groups, 3]: first row, row after the last, group; by size.
    facts_ref: see `Facts`.
  """
  grid = plan.grid(p, cfg)
  tiles = math.prod(grid)

  def read(i: Index):
    nth = lax.div(i, tiles)
    return tuple(groups_ref[nth, field] for field in range(3))

  def work_tile(i: Index, known: tuple[Index, ...]) -> WorkTile:
    start, end, group = known
    row, column = _corner(_snake(lax.rem(i, tiles), grid, cfg), cfg)
    cut = slabs_of(start, end, cfg.block_k)
    edges = lax.div(cut.edges + cfg.block_k - 1, cfg.block_k)
    # If no group has rows, the first has a slab of zeros.
    steps = jnp.maximum(cut.whole + edges, 1)
    start = pl.multiple_of(cut.first, plan.ATOM_ROWS)
    return WorkTile(row, column, group, group, group, start, steps, cut.whole)

  work_tiles = tiles * facts_ref[Facts.filled]
  return Schedule(work_tiles, read, work_tile, facts_ref[Facts.uneven] != 0)


class Facts(enum.IntEnum):
  """What the device knows of groups along K.

  Attributes:
    filled: how many groups have rows; at least one.
    uneven: whether sizes differ much.
    spare: whether products take longer than zeros for the other groups.
  """

  filled = 0
  uneven = 1
  spare = 2


def for_each_zero(p: Problem, cfg: Config, refs, cluster, visit) -> None:
  """visit(work_tile) for this block's tiles of the groups that have no rows."""
  groups_ref, facts_ref = refs
  grid = plan.grid(p, cfg)
  tiles, step = math.prod(grid), plan.clusters(p, cfg)

  def iteration(i, _):
    number = first + i * step
    group = groups_ref[lax.div(number, tiles), 2]
    row, column = _corner(_snake(lax.rem(number, tiles), grid, cfg), cfg)
    visit(WorkTile(row, column, out=group, **_NO_SUM))

  first = facts_ref[Facts.filled] * tiles + cluster
  count = lax.div(tiles * p.groups + step - 1 - first, step)
  lax.fori_loop(0, count, iteration, None)


class Slabs(NamedTuple):
  """How the rows of a group are cut into slabs of K.

  TMA addresses swizzle atoms of 8 rows, so whole slabs start at a multiple
  of 8. At most 7 rows before them and fewer than a slab after them are left:
  `edges`, fewer than block_k + 7.

  Attributes:
    head: rows before the first whole slab.
    first: row where that starts.
    whole: number of whole slabs.
    edges: rows that are in none.
  """

  head: Index
  first: Index
  whole: Index
  edges: Index


def slabs_of(start: Index, end: Index, block_k: int) -> Slabs:
  """The slabs of rows start..end; numbers of a kernel, or arrays of them."""
  atom = plan.ATOM_ROWS
  first = lax.div(start + atom - 1, atom) * atom
  whole = lax.div(jnp.maximum(end - first, 0), block_k)
  head = jnp.minimum(first, end) - start
  return Slabs(head, first, whole, end - start - whole * block_k)


def share_corner(work_tile: WorkTile, consumer: jax.Array, config: Config):
  """Row and column of the result where a consumer's share of a tile starts."""
  rows, columns = plan.share(config)
  row, column = work_tile.row, work_tile.column
  if config.split == "m":
    row += consumer * rows
  elif config.split == "n":
    column += consumer * columns
  return row, column


def window(ref, batch, at):
  """A window of a matrix, or of one matrix of a batch."""
  return ref.at[at] if len(ref.shape) == 2 else ref.at[batch, *at]


def _snake(tile: Index, grid: tuple[Index, Index], cfg: Config):
  minor = ("m", "n").index(cfg.raster_dim)
  return plgpu.planar_snake(tile, grid, minor, cfg.raster)


def _corner(tile: tuple[Index, Index], cfg: Config) -> tuple[Index, Index]:
  """Row and column where this block's tile of a cluster's tile starts."""
  m_tile = tile[0] * cfg.cluster_m + lax.axis_index("cluster_m")
  n_tile = tile[1] * cfg.cluster_n + lax.axis_index("cluster_n")
  return m_tile * cfg.block_m, n_tile * cfg.block_n
