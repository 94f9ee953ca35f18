"""A matrix quantised along both dimensions from one read, on Hopper.

Products read operands of 8 bits along K alone, and derivatives sum over another
dimension than the product does. So activations, gradients and weights are
wanted both as they are stored and transposed. XLA reads x for the scales of
each, and once more for the values.

A block loads a tile of 128 x 128 by TMA. One warpgroup quantises its rows, the
other its columns, which it reads through a transposed reference (of 16 bits
that is ldmatrix.trans). Each writes values to shared memory, from where TMA
stores them. Blocks have one tile each: while one computes, others on the SM
load. Tiles are read twice from shared memory, for maxima and for values: in
registers they would leave room for two blocks instead of three.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, mosaic, ptx, quantization
from pallas_gemm.kernels.sm90.layout import ATOM_BYTES, ATOM_ROWS, cdiv
from pallas_gemm.quantization import BLOCK

# Rows that a warpgroup reads at a time, and how many of those of a column.
_ROWS, _PART = 32, 64
_WARPGROUPS = 2
# The layout of wgmma for 32 rows, and with its pairs taken apart.
_PAIRS = compat.tiled_layout(
  (32, 8), (8, 8), (2,), warps=(-5,), lanes=(-3, -2), vector=-1
)
_SINGLES = compat.tiled_layout(
  (32, 8), (8, 8), (2,), (1,), warps=(-6,), lanes=(-4, -3), vector=-1
)


class Both(NamedTuple):
  """A matrix quantised along both dimensions.

  Attributes:
    values: [R, C].
    scale: of "rows" [ceil(C / 128), R], of each 128 of a row; of "blocks"
      [ceil(R / 128), ceil(C / 128)].
    values_t: [C, R]; of "blocks" the transpose of `values`.
    scale_t: [ceil(R / 128), C], of each 128 of a column; of "blocks" the
      transpose of `scale`.
  """

  values: jax.Array
  scale: jax.Array
  values_t: jax.Array
  scale_t: jax.Array


def quantize_both(
  x: jax.Array,
  dtype: str = "float8_e4m3fn",
  *,
  scaling: Literal["rows", "blocks"],
  power_of_two: bool = False,
) -> Both:
  """What `quantization.quantize` makes of a matrix and of its transpose.

  Args:
    x: [R, C] of float32, bfloat16 or float16; not empty. XLA copies it if rows
      are no multiples of 16 bytes, or of 128 and less.
    dtype: of the values.
    scaling: "rows": blocks are (1, 128), of x and of its transpose. "blocks":
      they are (128, 128).
    power_of_two: as of `quantize`.

  Returns:
    Values and scales. XLA slices them off what the kernel wrote where R or C is
    no multiple of 16, or 128 or less; scales of "rows" where it is none of 128.
  """
  (rows, columns), size = x.shape, x.dtype.itemsize
  pieces, parts = BLOCK * size // ATOM_BYTES, BLOCK // _PART
  if width := _width(columns, size, pieces) - columns:
    x = jnp.pad(x, [(0, 0), (0, width)])
  i, j = grid = cdiv(rows, BLOCK), cdiv(columns, BLOCK)
  is_rows, shape = scaling == "rows", jax.ShapeDtypeStruct
  of_scales = [(j, i * BLOCK), (i, j * BLOCK)] if is_rows else [grid]
  values, values_t, *scales = compat.kernel(
    functools.partial(_body, dtype=dtype, power_of_two=power_of_two),
    name=f"sm90_quantize_{scaling}",
    out_type=[
      shape((rows, _width(columns, 1, pieces)), jnp.dtype(dtype)),
      shape((columns, _width(rows, 1, parts)), jnp.dtype(dtype)),
      *(shape(x, jnp.float32) for x in of_scales),
    ],
    grid=grid,
    grid_names=("i", "j"),
    num_threads=_WARPGROUPS,
    compiler_params=mosaic.CompilerParams(
      unsafe_no_auto_barriers=True, narrow_copies_anywhere=True
    ),
    scratch_types={
      "tile": _shared(pieces, x.dtype),
      "out": _shared(pieces, dtype),
      "out_t": _shared(parts, dtype),
      "maxima": plgpu.SMEM((BLOCK,), jnp.float32),
      "loaded": plgpu.Barrier(num_arrivals=pieces),
      "reduced": ptx.block_barrier(_WARPGROUPS),
    },
  )(x)
  values, values_t = values[:, :columns], values_t[:, :rows]
  if not is_rows:
    return Both(values, *scales, values_t, scales[0].T)
  return Both(values, scales[0][:, :rows], values_t, scales[1][:, :columns])


def _width(columns: int, size: int, pieces: int) -> int:
  """Columns, of elements of a size, with which TMA takes pieces of tiles.

  Of a matrix as wide as one of them, Mosaic GPU drops the column that a copy
  starts at: the next piece, which lies outside, would take its place.
  """
  step = 16 // size
  return max(cdiv(columns, step) * step, BLOCK // pieces + step)


def _shared(pieces: int, dtype: Any) -> Any:
  """A tile in pieces that are one swizzle atom wide, as narrow copies are."""
  dtype, columns = jnp.dtype(dtype), BLOCK // pieces
  swizzle = plgpu.SwizzleTransform(columns * dtype.itemsize)
  tiling = plgpu.TilingTransform((ATOM_ROWS, columns))
  shape = pieces, BLOCK, columns
  return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _body(x, values, values_t, *scales, loaded, **shared):
  """What a block does."""
  i, j = lax.axis_index("i"), lax.axis_index("j")
  corner, warpgroup = (i * BLOCK, j * BLOCK), lax.axis_index("warpgroup")
  tile = _Tile(**shared)

  @pl.when(warpgroup == 0)
  def _():
    for piece, window in _windows(tile.tile, corner):
      plgpu.copy_gmem_to_smem(x.at[window], piece, loaded)

  plgpu.barrier_wait(loaded)
  if len(scales) == 2:
    scale, of_rows, of_columns = None, scales[0].at[j], scales[1].at[i]
  else:
    scale, of_rows, of_columns = tile.scale_of_all(warpgroup), None, None

    @pl.when(warpgroup == 0)
    def _():
      scales[0][i, j] = scale

  @pl.when(warpgroup == 0)
  def _():
    tile.quantize_rows(scale, of_rows, corner[0])
    _store(tile.out, values, corner)

  @pl.when(warpgroup == 1)
  def _():
    tile.quantize_columns(scale, of_columns, corner[1])
    _store(tile.out_t, values_t, corner[::-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
  """A tile of x in shared memory, and what becomes of it.

  Attributes:
    tile, out, out_t: x, its values, and those of its transpose, in pieces.
    maxima: the largest magnitude of each row.
    reduced: a barrier: the maxima are there.
    dtype, power_of_two: as of `quantize_both`.
  """

  tile: Any
  out: Any
  out_t: Any
  maxima: Any
  reduced: Any
  dtype: str
  power_of_two: bool

  def scale_of_all(self, warpgroup) -> jax.Array:
    """The one scale of the tile: each warpgroup looks at half of the rows."""
    for start in range(0, BLOCK // _WARPGROUPS, _ROWS):
      rows = pl.ds(warpgroup * (BLOCK // _WARPGROUPS) + start, _ROWS)
      sources = [self.tile.at[i, rows] for i in range(self.tile.shape[0])]
      self.maxima[rows] = self._largest(sources, self._row_layout)
    ptx.wait_for_block(self.reduced)
    # All of them for each warp.
    spread = compat.tiled_layout(
      (BLOCK,), (4,), warps=(plgpu.Replicated(4),), lanes=(-2,), vector=-1
    )
    maxima = plgpu.load(self.maxima, layout=spread)
    return self._scale(jnp.max(maxima) + jnp.sum(maxima * 0))

  def quantize_rows(self, scale, scales, row) -> None:
    """Each row; scales, unless there is one, are stored from `row` on."""
    pieces = range(self.tile.shape[0])
    for start in range(0, BLOCK, _ROWS):
      at = pl.ds(start, _ROWS)
      parts = [(self.tile.at[i, at], self.out.at[i, at]) for i in pieces]
      to = scales and scales.at[pl.ds(row + start, _ROWS)]
      self._quantize(parts, self._row_layout, scale, to)

  def quantize_columns(self, scale, scales, column) -> None:
    """The same of columns, which are rows of `out_t`."""
    pieces, _, width = self.tile.shape
    # What ldmatrix gives: lanes along a column with two elements each.
    layout = plgpu.Layout.WGMMA if width == 64 else _SINGLES
    for i in range(pieces):
      parts, at = [], pl.ds(i * width, width)
      for nth in range(self.out_t.shape[0]):
        source = self.tile.at[i, pl.ds(nth * _PART, _PART)]
        parts.append((source.transpose((1, 0)), self.out_t.at[nth, at]))
      to = scales and scales.at[pl.ds(column + i * width, width)]
      self._quantize(parts, layout, scale, to)

  def _quantize(self, parts, layout, scale, to) -> None:
    """Rows of which these are all parts: what is read, where values go."""
    if scale is None:
      scale = self._scale(self._largest([x for x, _ in parts], layout))
      compat.store(to, scale, optimized=False)
    factor = 1 / scale
    for source, out in parts:
      x = plgpu.load(source, layout=layout, optimized=False)
      if factor.ndim:
        spread = lax.broadcast_in_dim(factor, x.shape, (0,))
        values = self._values(x, plgpu.layout_cast(spread, layout), layout)
      else:
        values = self._values(x, factor, layout)
      compat.store(out, values, optimized=False)

  def _largest(self, sources, layout) -> jax.Array:
    """The largest magnitude of each row; of int8 NaN if any is not finite."""
    found = None
    for source in sources:
      x = _finite(plgpu.load(source, layout=layout, optimized=False))
      largest = ptx.largest(x, layout)
      if self.dtype == "int8":
        largest += jnp.sum(x.astype(jnp.float32) * 0, axis=1)
      if found is not None:
        # XLA's programs for CPUs, the interpreter's, lose NaN in a maximum.
        largest = jnp.maximum(found, largest) + (found * 0 + largest * 0)
      found = largest
    return found

  def _scale(self, amax) -> jax.Array:
    return quantization.scale_of(amax, self.dtype, self.power_of_two)

  def _values(self, x, factor, layout) -> jax.Array:
    """x times the factor, rounded as `quantize` does."""
    is_e5m2 = self.dtype == "float8_e5m2"  # which has infinities
    scaled = (x if is_e5m2 else _finite(x)).astype(jnp.float32) * factor
    if layout is _SINGLES:
      scaled, layout = ptx.in_pairs(scaled, _SINGLES, _PAIRS), _PAIRS
    if is_e5m2:
      return ptx.to_e5m2(scaled, layout)
    if self.dtype != "int8":
      return scaled.astype(self.dtype)
    # The last bits of the sum are the nearest integer. Fused with the product
    # it would be rounded once; that of `quantize` is rounded twice.
    total = lax.optimization_barrier(scaled) + 1.5 * 2**23
    bits = lax.bitcast_convert_type(total, jnp.int32)
    return jnp.where(scaled == scaled, bits, 0).astype(jnp.int8)

  @property
  def _row_layout(self) -> Any:
    """Lanes side by side take vectors of 16 bytes of a row of a piece."""
    columns, vector = self.tile.shape[2], 16 // self.tile.dtype.itemsize
    down = 32 * vector // columns
    tiles = (4 * down, columns), (down, columns), (1, vector)
    return compat.tiled_layout(*tiles, warps=(-6,), lanes=(-4, -3), vector=-1)


def _finite(x: jax.Array) -> jax.Array:
  """The same with NaN for infinity."""
  return x * 0 + x


def _windows(tile, corner):
  """The pieces of a tile, and where they lie in a matrix."""
  pieces, rows, columns = tile.shape
  for i in range(pieces):
    at = pl.ds(corner[0], rows), pl.ds(corner[1] + i * columns, columns)
    yield tile.at[i], at


def _store(tile, matrix, corner) -> None:
  """Stores a tile; nothing of it is left on its way."""
  plgpu.commit_smem()
  for piece, window in _windows(tile, corner):
    plgpu.copy_smem_to_gmem(piece, matrix.at[window])
  plgpu.wait_smem_to_gmem(0)
