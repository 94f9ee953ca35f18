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
from pallas_gemm.kernels.sm90.layout import ATOM_BYTES, ATOM_ROWS, cdiv, round_up
from pallas_gemm.quantization import BLOCK

# Rows that a warpgroup reads at a time, and those of a column.
_ROWS, _COLUMN = 32, 64
# What TMA wants rows of 8 bits to be multiples of.
_STRIDE = 16
_WARPGROUPS = 2
# The layout of wgmma for 32 rows, and with the pairs of it taken apart.
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
    x: [R, C] of float32, bfloat16 or float16; not empty. It is read in place if
      rows are multiples of 16 bytes, and of more than 128.
    dtype: of the values.
    scaling: "rows": blocks are (1, 128), of x and of its transpose. "blocks":
      they are (128, 128).
    power_of_two: as of `quantize`.

  Returns:
    Values and scales. XLA slices them off what the kernel wrote where R or C is
    no multiple of 16; scales of "rows" where it is none of 128.
  """
  (rows, columns), size = x.shape, x.dtype.itemsize
  width = max(round_up(columns, _STRIDE // size), 2 * ATOM_BYTES // size)
  if width > columns:
    x = jnp.pad(x, [(0, 0), (0, width - columns)])
  grid = cdiv(rows, BLOCK), cdiv(columns, BLOCK)
  shape, pieces = jax.ShapeDtypeStruct, BLOCK * size // ATOM_BYTES
  scales = [(grid[1], grid[0] * BLOCK), (grid[0], grid[1] * BLOCK)]
  of_blocks = scaling == "blocks"
  values, values_t, *scales = compat.kernel(
    functools.partial(_body, dtype=dtype, power_of_two=power_of_two),
    name=f"sm90_quantize_{scaling}",
    out_type=[
      shape((rows, round_up(columns, _STRIDE)), jnp.dtype(dtype)),
      shape((columns, round_up(rows, _STRIDE)), jnp.dtype(dtype)),
      *(shape(x, jnp.float32) for x in ([grid] if of_blocks else scales)),
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
      "out_t": _shared(BLOCK // _COLUMN, dtype),
      "maxima": plgpu.SMEM((BLOCK,), jnp.float32),
      "loaded": plgpu.Barrier(num_arrivals=pieces),
      "reduced": ptx.block_barrier(_WARPGROUPS),
    },
  )(x)
  values, values_t = values[:, :columns], values_t[:, :rows]
  if of_blocks:
    return Both(values, *scales, values_t, scales[0].T)
  return Both(values, scales[0][:, :rows], values_t, scales[1][:, :columns])


def _shared(pieces: int, dtype: Any) -> Any:
  """A tile in pieces that are one swizzle atom wide, as narrow copies are."""
  dtype, columns = jnp.dtype(dtype), BLOCK // pieces
  swizzle = plgpu.SwizzleTransform(columns * dtype.itemsize)
  tiling = plgpu.TilingTransform((ATOM_ROWS, columns))
  shape = pieces, BLOCK, columns
  return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _body(x, values, values_t, *scales, dtype, power_of_two, **shared):
  """What a block does."""
  i, j = lax.axis_index("i"), lax.axis_index("j")
  corner, warpgroup = (i * BLOCK, j * BLOCK), lax.axis_index("warpgroup")
  tile = _Tile(**shared, dtype=dtype, power_of_two=power_of_two)
  pl.when(warpgroup == 0)(lambda: tile.load(x, corner))
  plgpu.barrier_wait(tile.loaded)
  scale = None
  if len(scales) == 1:
    scale = tile.scale_of_all(warpgroup)

    @pl.when(warpgroup == 0)
    def _():
      scales[0][i, j] = scale

  @pl.when(warpgroup == 0)
  def _():
    tile.quantize_rows(scale, scales[0].at[i if scale is not None else j], corner[0])
    _store(tile.out, values, corner)

  @pl.when(warpgroup == 1)
  def _():
    tile.quantize_columns(scale, scales[-1].at[i], corner[1])
    _store(tile.out_t, values_t, corner[::-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
  """A tile of x in shared memory, and what becomes of it.

  Attributes:
    tile, out, out_t: x, its values, and those of its transpose, in pieces.
    maxima: the largest magnitude of each row.
    loaded, reduced: barriers: x is there, so are the maxima.
    dtype, power_of_two: as of `quantize_both`.
  """

  tile: Any
  out: Any
  out_t: Any
  maxima: Any
  loaded: Any
  reduced: Any
  dtype: str
  power_of_two: bool

  def load(self, x, corner) -> None:
    """Starts to load the tile."""
    for i, window in _windows(self.tile, corner):
      plgpu.copy_gmem_to_smem(x.at[window], self.tile.at[i], self.loaded)

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
    return self._scale(jnp.max(plgpu.load(self.maxima, layout=spread)))

  def quantize_rows(self, scale, scales, row) -> None:
    """Each row; their scales are stored from `row` on unless there is one."""
    pieces, layout = self.tile.shape[0], self._row_layout
    for start in range(0, BLOCK, _ROWS):
      at = pl.ds(start, _ROWS)
      parts = [(self.tile.at[i, at], self.out.at[i, at]) for i in range(pieces)]
      self._quantize(parts, layout, scale, scales.at[pl.ds(row + start, _ROWS)])

  def quantize_columns(self, scale, scales, column) -> None:
    """The same of columns, which are rows of `out_t`."""
    pieces, _, width = self.tile.shape
    for i in range(pieces):
      parts, at = [], pl.ds(i * width, width)
      for start in range(0, BLOCK, _COLUMN):
        source = self.tile.at[i, pl.ds(start, _COLUMN)].transpose((1, 0))
        parts.append((source, self.out_t.at[start // _COLUMN, at]))
      to = scales.at[pl.ds(column + i * width, width)]
      self._quantize(parts, self._column_layout, scale, to)

  def _quantize(self, parts, layout, scale, scales) -> None:
    """Rows of which these are all parts: what is read, where values go."""
    if scale is None:
      scale = self._scale(self._largest([x for x, _ in parts], layout))
      compat.store(scales, scale, optimized=False)
    inverse = 1 / scale
    for source, out in parts:
      x = plgpu.load(source, layout=layout, optimized=False)
      factor = inverse
      if inverse.ndim:
        factor = lax.broadcast_in_dim(inverse, x.shape, (0,))
        factor = plgpu.layout_cast(factor, layout)
      compat.store(out, self._values(x, factor, layout), optimized=False)

  def _largest(self, sources, layout) -> jax.Array:
    """The largest magnitude of each row, as `quantize` has it."""
    parts = [plgpu.load(x, layout=layout, optimized=False) for x in sources]
    parts = map(_finite, parts)
    if self.dtype == "int8":
      found = [jnp.max(jnp.abs(x), axis=1).astype(jnp.float32) for x in parts]
    else:
      found = [ptx.largest(x, layout) for x in parts]
    return functools.reduce(jnp.maximum, found)

  def _scale(self, amax) -> jax.Array:
    return quantization.scale_of(amax, self.dtype, self.power_of_two)

  def _values(self, x, factor, layout) -> jax.Array:
    """x times the factor, as `quantize` rounds it."""
    is_e5m2 = self.dtype == "float8_e5m2"
    scaled = (x if is_e5m2 else _finite(x)).astype(jnp.float32) * factor
    if layout is _SINGLES:
      scaled, layout = ptx.in_pairs(scaled, layout, _PAIRS), _PAIRS
    if is_e5m2:
      return ptx.to_e5m2(scaled, layout)
    if self.dtype == "int8":
      return quantization.rounded(scaled, self.dtype)
    return scaled.astype(self.dtype)

  @property
  def _row_layout(self) -> Any:
    """Lanes side by side take vectors of 16 bytes of a row of a piece."""
    columns, vector = self.tile.shape[2], 16 // self.tile.dtype.itemsize
    down = 32 * vector // columns
    return compat.tiled_layout(
      (4 * down, columns), (down, columns), (1, vector),
      warps=(-6,), lanes=(-4, -3), vector=-1,
    )  # fmt: skip

  @property
  def _column_layout(self) -> Any:
    """Four lanes along a column: with ldmatrix two elements, else one."""
    return _SINGLES if self.tile.dtype.itemsize == 4 else plgpu.Layout.WGMMA


def _finite(x: jax.Array) -> jax.Array:
  """The same with NaN for infinity."""
  return x * 0 + x


def _windows(tile, corner):
  """Where the pieces of a tile lie in a matrix."""
  pieces, rows, columns = tile.shape
  for i in range(pieces):
    yield i, (pl.ds(corner[0], rows), pl.ds(corner[1] + i * columns, columns))


def _store(tile, matrix, corner) -> None:
  """Stores a tile; nothing of it is left on its way."""
  plgpu.commit_smem()
  for i, window in _windows(tile, corner):
    plgpu.copy_smem_to_gmem(tile.at[i], matrix.at[window])
  plgpu.wait_smem_to_gmem(0)
