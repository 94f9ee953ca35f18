"""Who owns which element: the register layouts of the fp32 rungs.

A Pallas thread on the Mosaic GPU backend is a warpgroup, 128 CUDA threads. A
*layout* says which of them holds which element of an array, and with that all
that the classic fp32 rungs are about: which addresses the lanes of a warp
touch together, and how much work a thread does with what it loads.

How to read one. The tiles apply one after the other to the suffix of the
shape that the tile before left: (64, 128) and then (8, 32) turn a 64 x 128
array into 8 x 4 tiles of 8 x 32. Dimensions of the result count from the end
(-1 is the last of the last tile). `warps` names those dealt over the 4 warps,
`lanes` those dealt over the 32 lanes of a warp, `vector` the elements that
lie side by side in one register group; what nobody is named for, each thread
holds, in the order in which the dimensions stand.
"""

import functools
import math
from typing import Any, Literal

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat

WARPS, LANES = 4, 32
THREADS = WARPS * LANES

# How kernels of this style are lowered: each operation is what its layout
# says, nothing is inferred.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def load(ref: Any, layout: Any) -> jax.Array:
  """Loads `ref` with each thread reading what `layout` gives it.

  Mosaic GPU refuses accesses that it knows to be slow unless told that they
  are meant: in the fp32 rungs they are the lesson.
  """
  return plgpu.load(ref, layout=layout, optimized=False)


def zeros(rows: int, columns: int, layout: Any) -> jax.Array:
  """A float32 accumulator of zeros in `layout`."""
  return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), layout)


@functools.cache
def element_per_thread(
  block_m: int, block_n: int, walk: Literal["rows", "columns"]
) -> Any:
  """One element a thread; consecutive lanes walk rows or columns.

  Threads are numbered along the walked dimension first, then along the other.
  A block of more than 128 elements gives each thread several, 128 elements
  apart; one of fewer is computed by several threads alike (they store the
  same value).

  Args:
    block_m: rows of the block, a power of two.
    block_n: columns of the block, a power of two.
    walk: "rows" is mapping B of the classics (uncoalesced), "columns" is
      mapping A (coalesced).
  """
  fast, slow = (block_m, block_n) if walk == "rows" else (block_n, block_m)
  lanes_fast = min(LANES, fast)
  lanes_slow = min(LANES // lanes_fast, slow)
  warps_fast = min(WARPS, fast // lanes_fast)
  warps_slow = min(WARPS // warps_fast, slow // lanes_slow)
  spare_lanes = LANES // (lanes_fast * lanes_slow)
  spare_warps = WARPS // (warps_fast * warps_slow)
  tile = (lanes_fast * warps_fast, lanes_slow * warps_slow)
  warp_tile = (lanes_fast, lanes_slow)
  if walk == "columns":
    tile, warp_tile = tile[::-1], warp_tile[::-1]
  # (tile)(warp_tile)(1, 1) leaves, from the end:
  #   -2, -1 the element; -4, -3 lanes; -6, -5 warps.
  fast_dim, slow_dim = (-4, -3) if walk == "rows" else (-3, -4)
  return compat.tiled_layout(
    tile,
    warp_tile,
    (1, 1),
    warps=(*_spare(spare_warps), slow_dim - 2, fast_dim - 2),
    lanes=(*_spare(spare_lanes), slow_dim, fast_dim),
    vector=-1,
  )


def _spare(times: int) -> tuple[plgpu.Replicated, ...]:
  """Threads that are left over do the same as their neighbours."""
  return (plgpu.Replicated(times),) if times > 1 else ()


@functools.cache
def column_per_thread(thread_m: int) -> Any:
  """Each thread a column of `thread_m` rows: 2 x 2 warps of thread_m x 32.

  For blocks of 2 * thread_m rows and 64 columns.
  """
  return compat.tiled_layout(
    (2 * thread_m, 64),
    (thread_m, 32),
    (thread_m, 1),
    warps=(-6, -5),
    lanes=(-3,),
    vector=-1,
  )


@functools.cache
def strided_tile(thread_m: int, thread_n: int) -> Any:
  """Each thread thread_m x thread_n elements that lie apart.

  For blocks of 8 * thread_m rows and 16 * thread_n columns. The 2 x 16 lanes
  of a warp are neighbours, a thread's own rows are 2 apart and its columns
  16: accesses by 4-byte words are free of bank conflicts.
  """
  return compat.tiled_layout(
    (8 * thread_m, 16 * thread_n),
    (2 * thread_m, 16 * thread_n),
    (2, 16),
    (1, 1),
    warps=(-8,),
    lanes=(-4, -3),
    vector=-1,
  )


@functools.cache
def contiguous_tile(thread_m: int, thread_n: int) -> Any:
  """Each thread a solid thread_m x thread_n tile, in vectors of 4.

  For blocks of 8 * thread_m rows and 16 * thread_n columns. Lanes are
  thread_n columns apart: at 8 columns, lane i meets lane i + 4 in the same four
  banks, so the eight lanes that one clock could serve meet in pairs.
  """
  return compat.tiled_layout(
    (8 * thread_m, 16 * thread_n),
    (2 * thread_m, 16 * thread_n),
    (thread_m, thread_n),
    (4,),
    warps=(-7,),
    lanes=(-5, -4),
    vector=-1,
  )


@functools.cache
def warp_tile(thread_m: int, thread_n: int, rows_together: int = 1) -> Any:
  """Block -> 2 x 2 warps -> 4 x 8 lanes -> patches of 4 x 4 a thread.

  For blocks of 8 * thread_m rows and 16 * thread_n columns. A thread's 4 x 4
  patches are 16 rows and 32 columns apart, so the lanes of a warp read one
  solid run of 16 floats of A and one of 32 of B: no bank conflicts.

  Args:
    thread_m: rows a thread holds, a multiple of 4.
    thread_n: columns a thread holds, a multiple of 4.
    rows_together: 1 or 2 rows are finished across a patch before the next
      patch. It orders the FFMAs and nothing else; which order suits the
      register banks best was found by measuring.
  """
  m, n = 4 * thread_m, 8 * thread_n
  return compat.tiled_layout(
    (2 * m, 2 * n),
    (m, n),  # a warp
    (16, n),  # patches along M
    (4, n),  # lanes along M
    (rows_together, n),
    (rows_together, 32),  # patches along N
    (1, 32),
    (1, 4),  # lanes along N, each 4 columns wide
    warps=(-16, -15),
    lanes=(-12, -3),
    vector=-1,
  )


@functools.cache
def words_of_row_vectors() -> Any:
  """Two 128-bit vectors of each row side by side, 16 rows a warp.

  For arrays of a multiple of 64 rows and of 8 columns. A request from global
  memory uses its 32-byte sectors whole. The 4 neighbours that a thread takes
  are words of their own, so that a transposing store can part them.
  """
  return compat.tiled_layout(
    (16 * WARPS, 8),
    (16, 8),
    (1, 4),
    (1, 1),
    warps=(-8,),
    lanes=(-6, -5),
    vector=-1,
  )


@functools.cache
def row_per_lane(rows: int) -> Any:
  """Each lane one row, 4 columns of it at a time: what a transpose reads.

  For arrays of `rows` rows (32, 64 or a multiple of 128) and a multiple of 4
  columns for each warp that its rows leave over. Stored transposed, the lanes
  of a warp write one solid run, and Mosaic GPU can use `stmatrix`. From
  global memory each request takes half a sector of 32 rows; the L1 keeps the
  other half for the next.
  """
  warps_m = min(WARPS, rows // LANES)
  warps_k = WARPS // warps_m
  return compat.tiled_layout(
    (LANES * warps_m, 4 * warps_k),
    (LANES, 4),
    (1, 1),
    warps=(-6, -5),
    lanes=(-4,),
    vector=-1,
  )


@functools.cache
def rows_of_vectors(columns: int, vector: int = 4) -> Any:
  """Consecutive lanes take consecutive 128-bit vectors of a row-major block.

  For blocks of `columns` columns (16 to 512, a power of two).

  Args:
    columns: of the block.
    vector: elements in 128 bits.
  """
  lanes_n = min(LANES, columns // vector)
  lanes_m = LANES // lanes_n
  return compat.tiled_layout(
    (WARPS * lanes_m, vector * lanes_n),
    (lanes_m, vector * lanes_n),
    (1, vector),
    warps=(-6,),
    lanes=(-4, -3),
    vector=-1,
  )


def base_tile(layout: Any) -> tuple[int, ...]:
  """The smallest array that the layout deals out; larger ones repeat it."""
  (tile, *_), *_ = compat.layout_facts(layout)
  return tile


def owners(layout: Any, shape: tuple[int, int]) -> np.ndarray:
  """Which element of an array each register of each thread holds.

  Args:
    layout: of this file.
    shape: of the array, a multiple of `base_tile(layout)`.

  Returns:
    [4 warps, 32 lanes, registers, 2]: (row, column).

  Example:
    >>> from pallas_gemm.ladder import register_layouts
    >>> layout = register_layouts.element_per_thread(4, 32, "columns")
    >>> held = register_layouts.owners(layout, (4, 32))
    >>> held[1, 5].tolist()  # warp 1, lane 5: row 1, column 5
    [[1, 5]]
  """
  tiles, in_warps, in_lanes = compat.layout_facts(layout)
  index = np.arange(math.prod(shape)).reshape(shape)
  for tile in tiles:
    lead = index.shape[: -len(tile)]
    sides = [
      (size // part, part)
      for size, part in zip(index.shape[len(lead) :], tile, strict=True)
    ]
    index = index.reshape(*lead, *(x for side in sides for x in side))
    # Tiles first, then what is inside of them.
    dims = range(len(lead), index.ndim)
    index = index.transpose(*range(len(lead)), *dims[::2], *dims[1::2])

  def dealt(dims):
    """Dimensions, from the front, that are dealt out; copies of each."""
    named = [d + index.ndim for d in dims if isinstance(d, int)]
    spare = math.prod(d.times for d in dims if not isinstance(d, int))
    return named, spare

  (warps, spare_warps), (lanes, spare_lanes) = map(dealt, (in_warps, in_lanes))
  own = [d for d in range(index.ndim) if d not in (*warps, *lanes)]
  held = index.transpose(*warps, *lanes, *own)
  held = held.reshape(1, WARPS // spare_warps, 1, LANES // spare_lanes, -1)
  # Threads that are left over hold what their neighbours hold.
  held = np.broadcast_to(
    held, (spare_warps, held.shape[1], spare_lanes, *held.shape[3:])
  ).reshape(WARPS, LANES, -1)
  return np.stack(np.divmod(held, shape[1]), axis=-1)


def outer(column: jax.Array, row: jax.Array, layout: Any) -> jax.Array:
  """column[:, None] * row[None, :], each thread multiplying what it owns.

  `column` is in `layout.reduce(1)` and `row` in `layout.reduce(0)`: every
  thread already holds the values that its elements need, so the broadcasts
  cost no instruction; added to an accumulator, the products become FFMAs.
  """
  shape = (column.shape[0], row.shape[0])
  # The layout of a broadcast is taken from a cast that follows it directly.
  column = plgpu.layout_cast(lax.broadcast_in_dim(column, shape, (0,)), layout)
  row = plgpu.layout_cast(lax.broadcast_in_dim(row, shape, (1,)), layout)
  return column * row
