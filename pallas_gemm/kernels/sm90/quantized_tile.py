"""What two warpgroups make of a tile in shared memory: scales and values.

One quantises its rows, the other its columns. Each reads some of them twice,
for their maxima and for their values: in registers they would leave room for
two blocks on an SM instead of three.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx, quantization
from pallas_gemm.quantization import BLOCK

WARPGROUPS = 2
# Rows that are read at a time, and how many of those of a column.
_ROWS, PART = 32, 64
# The layout of wgmma for 32 rows, and with its pairs taken apart.
_PAIRS = compat.tiled_layout(
  (32, 8), (8, 8), (2,), warps=(-5,), lanes=(-3, -2), vector=-1
)
_SINGLES = compat.tiled_layout(
  (32, 8), (8, 8), (2,), (1,), warps=(-6,), lanes=(-4, -3), vector=-1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """A tile of x in shared memory, and what becomes of it.

  Attributes:
    tile, out, out_t: x, its values, and those of its transpose, in pieces; the
      latter two are None if the maxima of products are all that is wanted.
    maxima: the largest magnitude of each row.
    reduced: a barrier: the maxima are there.
    dtype, power_of_two: as of `quantize_both`.
    is_given: what x is multiplied by is read; no scales are made.
  """

  tile: Any
  out: Any = None
  out_t: Any = None
  maxima: Any
  reduced: Any
  dtype: str
  power_of_two: bool
  is_given: bool

  def scale_of_all(self, warpgroup) -> jax.Array:
    """The one scale of the tile: each warpgroup looks at half of the rows."""
    for start in range(0, BLOCK // WARPGROUPS, _ROWS):
      rows = pl.ds(warpgroup * (BLOCK // WARPGROUPS) + start, _ROWS)
      sources = [self.tile.at[i, rows] for i in range(self.tile.shape[0])]
      self.maxima[rows] = self._largest(sources, self._row_layout)
    ptx.wait_for_block(self.reduced)
    # All of them for each warp.
    spread = compat.tiled_layout(
      (BLOCK,), (4,), warps=(plgpu.Replicated(4),), lanes=(-2,), vector=-1
    )
    maxima = plgpu.load(self.maxima, layout=spread)
    amax = jnp.max(maxima) + jnp.sum(maxima * 0)  # NaN of NaN
    if not self.power_of_two:
      return self._scale(amax)
    # JAX 0.11 has no bits of a number, but of vectors: all alike, exactly.
    amax = lax.broadcast_in_dim(amax, (BLOCK,), ())
    return jnp.sum(self._scale(plgpu.layout_cast(amax, spread))) / BLOCK

  def quantize_rows(self, scale, refs, corner) -> None:
    """Each row; see `_quantize` of what `refs` are, from this corner on."""
    pieces, _, width = self.tile.shape
    for start in range(0, BLOCK, _ROWS):
      at = pl.ds(start, _ROWS)

      def part(i, at=at):
        return self.tile.at[i, at], (self.out, i, at), corner[1] + i * width

      own = pl.ds(corner[0] + start, _ROWS)
      self._quantize(part, pieces, self._row_layout, scale, refs, own)

  def quantize_columns(self, scale, refs, corner) -> None:
    """The same of columns, which are the rows of the transpose."""
    pieces, _, width = self.tile.shape
    # What ldmatrix gives: lanes along a column with two elements each.
    layout = plgpu.Layout.WGMMA if width == 64 else _SINGLES
    for i in range(pieces):

      def part(nth, i=i):
        source = self.tile.at[i, pl.ds(nth * PART, PART)].transpose((1, 0))
        to = self.out_t, nth, pl.ds(i * width, width)
        return source, to, corner[0] + nth * PART

      own = pl.ds(corner[1] + i * width, width)
      self._quantize(part, BLOCK // PART, layout, scale, refs, own)

  def _quantize(self, part, count, layout, scale, refs, own) -> None:
    """Some rows.

    Args:
      part: what is read of a part of them, where its values go, if anywhere,
        and its first column.
      count: of parts.
      layout: of what is read.
      scale: of all, or None.
      refs: of given factors those of columns, and then those of rows, or where
        maxima go; if none are given, where scales go.
      own: the rows.
    """
    load = functools.partial(plgpu.load, optimized=False)

    def of_columns(x, column):
      """What it is multiplied by, from its first column on."""
      columns = refs[0].at[pl.ds(column, x.shape[1])]
      factor = load(columns, layout=layout.reduce(0))
      return _spread(factor, x.shape, 1, layout)

    def larger(i, found):
      source, _, column = part(i)
      factors = [of_columns(source, column)]
      return jnp.maximum(found, self._largest([source], layout, factors))

    if self.out is None:
      # A loop: registers hold one part, which leaves room for four blocks.
      found = jnp.zeros(own.size, jnp.float32)
      found = plgpu.layout_cast(found, layout.reduce(1))
      found = lax.fori_loop(0, count, larger, found)
      compat.store(refs[1].at[own], found, optimized=False)
      return
    parts = list(map(part, range(count)))
    if self.is_given:
      factor = load(refs[1].at[own], layout=layout.reduce(1))
    else:
      if scale is None:
        scale = self._scale(self._largest([x for x, _, _ in parts], layout))
        compat.store(refs[0].at[own], scale, optimized=False)
      factor = 1 / scale
    for source, (out, *at), column in parts:
      x, factors = load(source, layout=layout), [factor]
      if factor.ndim:
        factors = [_spread(factor, x.shape, 0, layout)]
      if self.is_given:
        factors.insert(0, of_columns(source, column))
      values = self._values(x, factors, layout)
      compat.store(out.at[*at], values, optimized=False)

  def _largest(self, sources, layout, factors=()) -> jax.Array:
    """The largest magnitude of each row; of int8 NaN if any is not finite."""
    parts = [plgpu.load(x, layout=layout, optimized=False) for x in sources]
    if factors:
      parts = [x.astype(jnp.float32) * y for x, y in zip(parts, factors)]
    parts = list(map(_finite, parts))
    found = [ptx.largest(x, layout) for x in parts]
    found = functools.reduce(jnp.maximum, found)
    if self.dtype == "int8":
      # XLA's programs for CPUs, the interpreter's, lose NaN in a maximum.
      zeros = [x.astype(jnp.float32) * 0 for x in parts]
      found += sum(jnp.sum(x, axis=1) for x in zeros)
    return found

  def _scale(self, amax) -> jax.Array:
    return quantization.scale_of(amax, self.dtype, self.power_of_two)

  def _values(self, x, factors, layout) -> jax.Array:
    """x times the factors, rounded as `quantize` does."""
    is_e5m2 = self.dtype == "float8_e5m2"  # which has infinities
    scaled = (x if is_e5m2 else _finite(x)).astype(jnp.float32)
    scaled = functools.reduce(jnp.multiply, factors, scaled)
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
    width, vector = self.tile.shape[2], 16 // self.tile.dtype.itemsize
    warp = 32 * vector // width, width
    tiles = (4 * warp[0], width), warp, (1, vector)
    return compat.tiled_layout(*tiles, warps=(-6,), lanes=(-4, -3), vector=-1)


def _spread(x, shape, axis: int, layout) -> jax.Array:
  """A vector along an axis of a matrix, over the other one."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)


def _finite(x: jax.Array) -> jax.Array:
  """The same with NaN for infinity."""
  return x * 0 + x
