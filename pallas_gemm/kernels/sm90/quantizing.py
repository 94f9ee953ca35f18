"""A matrix quantised along both dimensions from one read, on Hopper.

Products read operands of 8 bits along K alone, and derivatives sum over another
dimension than the product does. So activations, gradients and weights are
wanted both as they are stored and transposed. XLA reads x for the scales of
each, and once more for the values.

A block loads a tile of 128 x 128 by TMA. One warpgroup quantises its rows, the
other its columns, which it reads through a transposed reference (of 16 bits
that is ldmatrix.trans). Each writes values to shared memory, from where TMA
stores them. Blocks have one tile each: while one computes, others on the SM
load.

A scale of a whole row, or column, is known when all of its tiles have been
read. `maxima_both` finds what scales are made of, `cast_both` reads x again.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, mosaic, ptx, quantization
from pallas_gemm.kernels.sm90.layout import ATOM_BYTES, ATOM_ROWS, cdiv
from pallas_gemm.kernels.sm90.quantized_tile import PART, WARPGROUPS, Tile
from pallas_gemm.quantization import BLOCK


class Both(NamedTuple):
  """Matrices quantised along both dimensions.

  Attributes:
    values: [.., R, C].
    scale: of "rows" [.., ceil(C / 128), R], of each 128 of a row; of "blocks"
      [.., ceil(R / 128), ceil(C / 128)].
    values_t: [.., C, R]; of "blocks" the transpose of `values`.
    scale_t: [.., ceil(R / 128), C], of each 128 of a column; of "blocks" the
      transpose of `scale`.
  """

  values: jax.Array
  scale: jax.Array
  values_t: jax.Array
  scale_t: jax.Array


class Factors(NamedTuple):
  """What columns, and then rows, of matrices are multiplied by, in float32.

  Attributes:
    columns: [matrices, C], or 1 for any of the two.
    rows: [matrices, R], likewise.
  """

  columns: jax.Array
  rows: jax.Array


def quantize_both(
  x: jax.Array,
  dtype: str = "float8_e4m3fn",
  *,
  scaling: Literal["rows", "blocks"],
  power_of_two: bool = False,
) -> Both:
  """What `quantization.quantize` makes of matrices and of their transposes.

  Args:
    x: [R, C] or [matrices, R, C] of float32, bfloat16 or float16; not empty.
      XLA copies it if rows are no multiples of 16 bytes, or of 128 and less.
    dtype: of the values.
    scaling: "rows": blocks are (1, 128), of x and of its transpose. "blocks":
      they are (128, 128).
    power_of_two: as of `quantize`.

  Returns:
    Values and scales. XLA slices them off what the kernel wrote where R or C is
    no multiple of 16, or 64 or less; scales of "rows" where it is none of 128.
  """
  rows, columns = x.shape[-2:]
  values, values_t, scale, *scale_t = _launch(
    x, scaling, dtype=dtype, power_of_two=power_of_two
  )
  if scaling == "blocks":
    return Both(values, scale, values_t, jnp.swapaxes(scale, -1, -2))
  return Both(values, scale[..., :rows], values_t, scale_t[0][..., :columns])


def cast_both(
  x: jax.Array,
  factors: Factors,
  factors_t: Factors,
  dtype: str = "float8_e4m3fn",
) -> tuple[jax.Array, jax.Array]:
  """Values of matrices and of their transposes, by factors that are known.

  Args:
    x, dtype: as of `quantize_both`.
    factors: of x. No product may be larger than the dtype's largest number.
    factors_t: of its transpose, whose columns are the rows of x.

  Returns:
    [.., R, C] and [.., C, R]. XLA slices them as those of `quantize_both`.
  """
  values, values_t = _launch(x, "given", *factors, *factors_t, dtype=dtype)
  return values, values_t


def maxima_both(
  x: jax.Array, factors: Factors, dtype: str = "float8_e4m3fn"
) -> tuple[jax.Array, jax.Array]:
  """The largest magnitudes of rows and of columns, for scales of each.

  Numerics: those of `quantization.maxima`, of products in float32.

  Args:
    x, dtype: as of `quantize_both`.
    factors: of columns for the maxima of rows, of rows for those of columns.

  Returns:
    [.., R], of x times the factors of columns, and [.., C], of x times those of
    rows, in float32. XLA takes them of those of tiles, which the kernel wrote.
  """
  block = (1, None, 1)[-x.ndim :]
  of_rows, of_columns = (
    quantization.maxima(of_tiles, dtype, block)[..., 0, :]
    for of_tiles in _launch(x, "maxima", *factors, dtype=dtype)
  )
  return of_rows[..., : x.shape[-2]], of_columns[..., : x.shape[-1]]


def _launch(
  x, name: str, *given: jax.Array, dtype: str, power_of_two: bool = False
) -> list[jax.Array]:
  """Values and those of the transposes, but of "maxima", and scales, or these.

  Of each matrix there is one scale a tile, or one of each row of the tiles and
  one of each of their columns; none if factors of values are given.
  """
  *lead, rows, columns = x.shape
  x = x.reshape(-1, rows, columns)
  matrices, size = x.shape[0], x.dtype.itemsize
  of_rows, of_columns = grid = cdiv(rows, BLOCK), cdiv(columns, BLOCK)
  made = [(of_columns, of_rows * BLOCK), (of_rows, of_columns * BLOCK)]
  made = {"given": [], "blocks": [grid]}.get(name, made)
  pieces, parts = BLOCK * size // ATOM_BYTES, BLOCK // PART
  if width := _width(columns, size, pieces) - columns:
    x = jnp.pad(x, [(0, 0), (0, 0), (0, width)])

  def shape(rows, columns, dtype):
    return jax.ShapeDtypeStruct((matrices, rows, columns), jnp.dtype(dtype))

  def padded(factor, size):
    """Those of whole tiles."""
    factor = jnp.broadcast_to(factor.astype(jnp.float32), (matrices, size))
    return jnp.pad(factor, [(0, 0), (0, -size % BLOCK)], constant_values=1)

  how = {"dtype": dtype, "power_of_two": power_of_two}
  values, shared = [], {}
  if name != "maxima":
    values = [
      shape(rows, _width(columns, 1, pieces), dtype),
      shape(columns, _width(rows, 1, parts), dtype),
    ]
    shared = {"out": _shared(pieces, dtype), "out_t": _shared(parts, dtype)}
  found = compat.kernel(
    functools.partial(_body, count=len(given), **how),
    name=f"sm90_quantize_{name}",
    out_type=[*values, *(shape(*x, jnp.float32) for x in made)],
    grid=(*grid, matrices),
    grid_names=("i", "j", "matrix"),
    num_threads=WARPGROUPS,
    compiler_params=mosaic.CompilerParams(
      unsafe_no_auto_barriers=True, narrow_copies_anywhere=True
    ),
    scratch_types={
      "tile": _shared(pieces, x.dtype),
      **shared,
      "maxima": plgpu.SMEM((BLOCK,), jnp.float32),
      "loaded": plgpu.Barrier(num_arrivals=pieces),
      "reduced": ptx.block_barrier(WARPGROUPS),
    },
  )(x, *map(padded, given, (columns, rows, rows, columns)))
  if values:
    found[:2] = found[0][..., :columns], found[1][..., :rows]
  return [v.reshape(*lead, *v.shape[1:]) for v in found]


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


def _body(*refs, count, loaded, **shared):
  """What a block does; `count` factors are given."""
  i, j = lax.axis_index("i"), lax.axis_index("j")
  corner, warpgroup = (i * BLOCK, j * BLOCK), lax.axis_index("warpgroup")
  x, *refs = (ref.at[lax.axis_index("matrix")] for ref in refs)
  given, made, values = refs[:count], refs[count:], [None, None]
  tile = Tile(**shared, is_given=bool(given))
  if tile.out is not None:
    values, made = made[:2], made[2:]

  @pl.when(warpgroup == 0)
  def _():
    for piece, window in _windows(tile.tile, corner):
      plgpu.copy_gmem_to_smem(x.at[window], piece, loaded)

  plgpu.barrier_wait(loaded)
  scale, of_rows, of_columns = None, given[:2], given[2:]
  if len(made) == 2:
    of_rows, of_columns = given[:1], given[1:]
    of_rows.append(made[0].at[j])
    of_columns.append(made[1].at[i])
  elif made:
    scale = tile.scale_of_all(warpgroup)

  @pl.when(warpgroup == 0)
  def _():
    if scale is not None:
      made[0][i, j] = scale
    tile.quantize_rows(scale, of_rows, corner)
    _store(tile.out, values[0], corner)

  @pl.when(warpgroup == 1)
  def _():
    tile.quantize_columns(scale, of_columns, corner)
    _store(tile.out_t, values[1], corner[::-1])


def _windows(tile, corner):
  """The pieces of a tile, and where they lie in a matrix."""
  pieces, rows, columns = tile.shape
  for i in range(pieces):
    at = pl.ds(corner[0], rows), pl.ds(corner[1] + i * columns, columns)
    yield tile.at[i], at


def _store(tile, matrix, corner) -> None:
  """Stores a tile, if there is one; nothing of it is left on its way."""
  if tile is None:
    return
  plgpu.commit_smem()
  for piece, window in _windows(tile, corner):
    plgpu.copy_smem_to_gmem(piece, matrix.at[window])
  plgpu.wait_smem_to_gmem(0)
