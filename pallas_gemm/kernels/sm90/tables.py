"""What a grouped product needs to know of its groups, in one small kernel.

Where groups start only the device knows. Before the product, a kernel of many
short blocks makes of it what the product's blocks read:

* **Groups of rows**: a row of a table for each tile, which says all of its
  group, and up to which tile each group goes. A block for each range of rows
  adds up how many tiles those before it have, and writes its own.
* **Groups along K**: the groups in order of size, and the block of 8 rows that
  a group's end cuts, filled up with zeros (`groups`). A block for each group
  counts how many are larger; others copy rows by TMA, one at a time. A row that
  is not the group's is fetched from beyond the matrix, where TMA finds zeros,
  so that no value of other groups is read, NaN or not.

A call takes as long as its kernels in turn, and XLA made three of the tables,
and of groups along K one more for each matrix: of 32 groups 9.2 us, this takes
3.0, of 128 along K 11.6 and 4.4, of some 60 groups of rows 4.5 and 1.9 (H100).

Pallas' Triton backend would do as well, but JAX has deprecated it, warns
wherever it is lowered, and does not export it.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels.sm90.layout import ATOM_ROWS, cdiv, round_up
from pallas_gemm.kernels.sm90.plan import Plan

# Elements along a dimension that one copy by TMA takes at most. A block copies
# as many columns of a cut block of rows and no more: whole rows of a matrix
# Mosaic GPU stores as one run of bytes, so that a second copy, of columns past
# the end, would be stored to the rows below.
_COPY = 256
# Threads of a block: groups that it looks at side by side; and of how many it
# holds the offsets at a time.
_THREADS, _MOST_GROUPS = 128, 2048
# Tiles that one block writes of a range of rows that has all, and the most
# blocks of a range.
_TILES, _MOST_PARTS = 64, 8

Tables = tuple[jax.Array, jax.Array]


def make(
  plan: Plan, offsets: jax.Array, matrices: Sequence[jax.Array]
) -> tuple[Tables, list[jax.Array]]:
  """The tables that `groups.grouped_schedule` reads, and the K tails.

  Args:
    plan: of a problem with groups.
    offsets: int32 [groups + 1]; rows of group g are offsets[g] to offsets[g+1].
    matrices: of groups along K, [K, columns] each, which TMA can address; of
      whole slabs, which have no tails, any.

  Returns:
    Of groups of rows [most row tiles, 4], of each tile its group's first row,
    row after the last, number and first tile, and [groups + 2], how many row
    tiles there are up to each group. Rows before the first group and after the
    last one are of group -1; rows of the table without a tile are zeros. No K
    tails.
    Of groups along K [groups, 3], first row, row after the last and group,
    large groups first, and [2], how many groups have rows, and their rows. Of
    each matrix [8 * groups, columns]: a group's rows after its last whole block
    of 8, then zeros.
  """
  rows = plan.problem.along == "m"
  return (_of_rows if rows else _of_slabs)(plan, offsets, list(matrices))


def _of_rows(plan: Plan, offsets: jax.Array, matrices: list[jax.Array]):
  del matrices  # there are no tails
  ranges = plan.problem.groups.count + 2
  parts = min(_MOST_PARTS, cdiv(plan.tiling.row_tiles, _TILES))
  tables = _int32(plan.tiling.row_tiles, 4), _int32(ranges)
  body = functools.partial(_rows_body, plan=plan, parts=parts)
  (tables,) = _kernel(body, plan, [tables], (parts, ranges))(offsets)
  return tables, []


def _of_slabs(plan: Plan, offsets: jax.Array, matrices: list[jax.Array]):
  count = plan.problem.groups.count
  if plan.problem.has_whole_slabs:
    matrices = []
  tails = [
    jax.ShapeDtypeStruct((ATOM_ROWS * count, x.shape[1]), x.dtype)
    for x in matrices
  ]
  parts = 1 + sum(map(_parts_of, matrices))
  scratch = matrices and {
    "rows": plgpu.SMEM((ATOM_ROWS, _COPY), plan.problem.a.dtype),
    "rows_loaded": plgpu.Barrier(num_arrivals=ATOM_ROWS),
  }
  types = [(_int32(count, 3), _int32(2)), tails]
  kernel = _kernel(_slabs_body, plan, types, (parts, count), scratch)
  tables, tails = kernel(offsets, matrices)
  return tables, tails


def _kernel(
  body,
  plan: Plan,
  out_type: list[Any],
  grid: tuple[int, int],
  scratch: dict[str, Any] | None = None,
):
  groups = min(plan.problem.groups.count, _MOST_GROUPS)
  copies = cdiv(round_up(groups, _THREADS) + 1, _COPY)
  return compat.kernel(
    body,
    name=f"sm90_tables_{plan.problem.along}",
    out_type=out_type,
    grid=grid,
    # CUDA takes more blocks along the last one.
    grid_names=("part", "range"),
    scratch_types={
      "bounds": plgpu.SMEM((copies * _COPY,), jnp.int32),
      "loaded": plgpu.Barrier(num_arrivals=copies),
    }
    | (scratch or {}),
  )


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def _rows_body(
  offsets, tables, *, plan: Plan, parts: int, bounds, loaded
) -> None:
  """Tiles of a range of rows: before the groups, of one, or after them."""
  (table, tile_ends), height = tables, plan.config.block_m
  range_, part = lax.axis_index("range"), lax.axis_index("part")
  group, last = range_ - 1, plan.problem.groups.count

  def tiles_of(rows):
    return lax.div(rows + (height - 1), height)

  start = jnp.where(group < 0, 0, offsets[jnp.maximum(group, 0)])
  end = offsets[jnp.minimum(range_, last)]
  end = jnp.where(group == last, plan.problem.m, end)
  tiles = tiles_of(end - start)
  counted = 0
  for number, size in _pieces(offsets, bounds, loaded):
    counted += jnp.where(number < group, tiles_of(size), 0)
  before = jnp.where(group < 0, 0, tiles_of(offsets[0])) + _sum(counted)

  @pl.when(part == 0)
  def _():
    tile_ends[range_] = before + tiles

  def write(i, _):
    nth = part + i * parts
    known = jnp.where(group < last, group, -1)
    for field, value in enumerate((start, end, known, before)):
      table[before + nth, field] = jnp.where(nth < tiles, value, 0)

  # The last range's blocks write zeros behind the last tile too.
  written = jnp.where(group == last, plan.tiling.row_tiles - before, tiles)
  lax.fori_loop(0, lax.div(written + (parts - 1 - part), parts), write, None)


def _slabs_body(
  offsets, matrices, tables, tails, *, bounds, loaded, **copied
) -> None:
  """A group's place among all, or some columns of its cut rows."""
  part = lax.axis_index("part")

  @pl.when(part == 0)
  def _():
    _write_group(offsets, tables, _pieces(offsets, bounds, loaded))

  first = 1
  for matrix, its_tails in zip(matrices, tails):
    end = first + _parts_of(matrix)

    @pl.when((part >= first) & (part < end))
    def _(matrix=matrix, its_tails=its_tails, nth=part - first):
      _copy_tail(offsets, matrix, its_tails, nth, **copied)

    first = end


def _write_group(offsets, tables, pieces) -> None:
  """The group's row of the table; large groups first, equal ones in order."""
  table, counts = tables
  group, count = lax.axis_index("range"), table.shape[0]
  start, end = offsets[group], offsets[group + 1]
  larger = filled = 0
  for number, size in pieces:
    is_same = (size == end - start) & (number < group)
    larger += jnp.where((size > end - start) | is_same, 1, 0)
    filled += jnp.where(size > 0, 1, 0)
  rank = _sum(larger)
  for field, value in enumerate((start, end, group)):
    table[rank, field] = value

  @pl.when(group == 0)
  def _():
    counts[0] = _sum(filled)
    counts[1] = offsets[count] - offsets[0]


def _parts_of(matrix) -> int:
  """How many blocks copy a group's cut rows of the matrix."""
  return cdiv(matrix.shape[1], _COPY)


def _copy_tail(offsets, matrix, tails, part, rows, rows_loaded) -> None:
  """Copies a part of the group's cut block of rows."""
  group = lax.axis_index("range")
  end = offsets[group + 1]
  count = lax.rem(end - offsets[group], ATOM_ROWS)
  columns = pl.ds(part * _COPY, _COPY)
  for row in range(ATOM_ROWS):
    beyond = matrix.shape[0]
    source = jnp.where(row < count, end - count + row, beyond)
    plgpu.copy_gmem_to_smem(
      matrix.at[pl.ds(source, 1), columns], rows.at[pl.ds(row, 1)], rows_loaded
    )
  plgpu.barrier_wait(rows_loaded)
  to = tails.at[pl.ds(group * ATOM_ROWS, ATOM_ROWS), columns]
  plgpu.copy_smem_to_gmem(rows, to)
  plgpu.wait_smem_to_gmem(0)


def _pieces(offsets, bounds, loaded) -> Iterator[tuple[jax.Array, jax.Array]]:
  """Numbers and sizes of some groups at a time; behind the last, none > 0.

  There TMA finds an end of zero. It takes no start that is not a multiple of 16
  bytes, so that ends are read from shared memory one after the starts.
  """
  count = offsets.shape[0] - 1
  lane = lax.broadcasted_iota(jnp.int32, (_THREADS,), 0)
  # Pallas takes a copy past the end if it is not told where the copy starts.
  zero = 0 * lax.axis_index("range")
  for first in range(0, count, _MOST_GROUPS):
    if first:
      plgpu.commit_smem()  # all threads have read what was there
    for i in range(0, bounds.shape[0], _COPY):
      source = offsets.at[pl.ds(zero + (first + i), _COPY)]
      plgpu.copy_gmem_to_smem(source, bounds.at[pl.ds(i, _COPY)], loaded)
    plgpu.barrier_wait(loaded)
    for i in range(0, min(count - first, _MOST_GROUPS), _THREADS):
      starts, ends = (bounds[pl.ds(i + j, _THREADS)] for j in (0, 1))
      yield lane + (first + i), ends - starts


def _sum(values: jax.Array) -> jax.Array:
  return jnp.sum(values, dtype=jnp.int32)
