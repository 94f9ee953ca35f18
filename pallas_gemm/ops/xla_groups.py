"""Grouped products where no kernel takes them: a loop over tiles of rows.

`lax.ragged_dot` multiplies every row with every group: A is expanded to a
matrix for each group, with zeros where a row is not in it. Here a loop goes
over groups, and in each over tiles of rows, which are multiplied with the
matrix of that group alone.

A group's matrix is copied first (XLA fuses a slice at a place that is not known
into no product), and a GPU's loop asks the host before each further tile, so
groups of few rows cost less with `lax.ragged_dot`. `choose` weighs the two.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import compat, dtypes, hardware
from pallas_gemm.ops.spec import Operands, Spec

# A product of two matrices: dot(a, b, contracted dimensions of each, dtype).
Dot = Callable[[jax.Array, jax.Array, tuple[int, int], jnp.dtype], jax.Array]
Step = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The loop, by its tiles of so many rows."""

  rows: int

  def __str__(self) -> str:
    return f"a loop over tiles of {self.rows} rows"


class _Rates(NamedTuple):
  """What a device reaches.

  Attributes:
    flops: of a tile's product, a second.
    lax_flops: of `lax.ragged_dot`'s one large product.
    bytes: that copies read and write, a second.
    group: seconds that a group takes beyond those.
    tile: seconds that a tile takes beyond those.
    rows: a product of fewer takes as long as one of so many.
    least: rows of the smallest tile that is weighed.
  """

  flops: float
  lax_flops: float
  bytes: float
  group: float
  tile: float
  rows: int
  least: int


# Shares of a GPU's peaks, and seconds, which the host takes to launch the
# kernels of a loop's body and to ask whether there is one tile more (H100,
# ragged_loop.jsonl).
_FLOPS, _LAX_FLOPS, _BYTES = 0.65, 0.85, 0.8
_GPU_GROUP, _GPU_TILE, _GPU_ROWS = 30e-6, 22e-6, 64
# Two cores of a server, float32. Each tile reads all of its matrix: 2048 x 512
# x 1024 in 8 groups takes 51 ms in tiles of 8 or 16 rows, 25 of 64.
_CPU = _Rates(1e11, 1e11, bytes=2e10, group=5e-6, tile=5e-6, rows=64, least=8)
# Of fewer bytes none are saved.
_FEW_BYTES = 2**20
# Of the tiles that are weighed.
_HEIGHTS = 12


def choose(x: Operands, spec: Spec) -> Tiles | None:
  """The loop with the least predicted time; None if `lax.ragged_dot` has less.

  Its temporaries are not larger. On CPUs it is the loop, in which a NaN stays
  in its group, whatever it takes: there it is slower, or larger, with few rows
  in few groups alone.

  None also if sizes are symbolic, on other platforms than CPUs and GPUs, and of
  numbers of less than a byte, of which XLA multiplies no slices.

  Args:
    x: the operands of a folded product.
    spec: what is computed.
  """
  rates = _rates(x, spec)
  is_symbolic = not all(isinstance(size, int) for size in spec.sizes(x))
  bits = [jax.dtypes.itemsize_bits(v.dtype) for v in (x.a, x.b)]
  if rates is None or is_symbolic or min(bits) < 8:
    return None
  of_lax, of_loop = times(x, spec, rates)
  best = min(of_loop, key=of_loop.get, default=None)
  is_faster = best and (rates is _CPU or of_loop[best] < of_lax)
  return best if is_faster else None


def times(
  x: Operands, spec: Spec, rates: _Rates
) -> tuple[float, dict[Tiles, float]]:
  """Predicted seconds of `lax.ragged_dot` and of loops without more memory.

  Both are a roofline: products at the rate of the device, and what is copied
  around them.
  """
  _, m, n, k, groups = spec.sizes(x)
  rows, depth = (m, k) if spec.ragged == "m" else (k, m)
  size = max(x.a.dtype.itemsize, x.b.dtype.itemsize)
  matrix = depth * n
  # Bytes that are held, that a group moves, a tile, and a row of it. A group
  # along M copies its matrix; its rows are those of A, of the product and of
  # the result. Along K a tile adds to sums in 32 bits, which the group rounds,
  # and copies rows of A and B.
  if spec.ragged == "m":
    held, of_group, of_tile = size * matrix, 2 * size * matrix, 0
    of_row = (2 * k + 4 * n) * size
  else:
    wide = x.wide(spec.out_dtype).itemsize * matrix
    held, of_group, of_tile = 2 * wide, wide + size * matrix, wide
    of_row = 2 * (m + n) * size
  # What `lax.ragged_dot` makes of A, writes and reads: a matrix for each group.
  expanded = rows * groups * depth * size
  of_lax = 2 * rows * groups * matrix / rates.lax_flops
  of_lax = max(of_lax, expanded / rates.bytes) + expanded / rates.bytes
  found = {}
  for tile in sorted({min(rates.least << i, rows) for i in range(_HEIGHTS)}):
    fits = held + of_row * tile // 2 <= max(expanded, _FEW_BYTES)
    if not fits and (found or rates is not _CPU):
      break
    step = 2 * max(tile, rates.rows) * matrix / rates.flops + rates.tile
    step += (of_tile + of_row * tile) / rates.bytes
    # The last of a group's tiles is half full.
    tiles = groups * max(1, rows / (groups * tile) + 0.5)
    group = of_group / rates.bytes + rates.group
    found[Tiles(tile)] = groups * group + tiles * step
  return of_lax, found


def _rates(x: Operands, spec: Spec) -> _Rates | None:
  platform = compat.target_device().platform
  if platform not in compat.CUDA_PLATFORMS:
    return _CPU if platform == "cpu" else None
  gpu, flops = hardware.current(), 0.0
  if max(v.dtype.itemsize for v in (x.a, x.b)) == 2:
    flops = gpu.bf16_flops
  elif spec.precision in (None, lax.Precision.DEFAULT):
    flops = gpu.tf32_flops
  flops = flops or gpu.fp32_flops
  return _Rates(
    _FLOPS * flops,
    _LAX_FLOPS * flops,
    _BYTES * gpu.dram_bytes_per_s,
    _GPU_GROUP,
    _GPU_TILE,
    _GPU_ROWS,
    least=_GPU_ROWS,
  )


def run(x: Operands, spec: Spec, tiles: Tiles, dot: Dot) -> jax.Array:
  """[M, N], zeros outside of the groups, or [G, M, N].

  Args:
    x: A and B of a folded product, and offsets.
    spec: of the product alone.
    tiles: how many rows a step has.
    dot: multiplies two matrices.
  """
  along = _along_m if spec.ragged == "m" else _along_k
  rows = x.a.shape[0]
  return along(x, spec, min(tiles.rows, rows), dot)


def _tile(
  start: jax.Array, count: jax.Array, tile: int, rows: int
) -> tuple[jax.Array, jax.Array]:
  """Where to slice a tile, and which of its rows are the group's, [tile, 1].

  A slice that would end behind the last row starts sooner.
  """
  first = jnp.minimum(start, min(rows - tile, jnp.iinfo(start.dtype).max))
  row = lax.broadcasted_iota(start.dtype, (tile, 1), 0) - (start - first)
  return first, (row >= 0) & (row < count)


def _loop(first: int, count: jax.Array, tile: int, step: Step, carry: Any):
  """Runs step(row, carry) for tiles of a group, from its `first` on."""
  tiles = lax.div(count + (tile - 1), count.dtype.type(tile))
  body = lambda i, carry: step(i * tile, carry)  # noqa: E731
  return lax.fori_loop(count.dtype.type(first), tiles, body, carry)


def _along_m(x: Operands, spec: Spec, tile: int, dot: Dot) -> jax.Array:
  """Each tile writes its own rows of the result, and leaves the others."""
  rows, of_b = x.a.shape[0], spec.words.b.replace("g", "")
  contracted = 1, of_b.index("k")

  def group(out, at):
    b, start, count = at

    def step(row, out):
      first, own = _tile(start + row, count - row, tile, rows)
      a = lax.dynamic_slice_in_dim(x.a, first, tile)
      z = dot(a, b, contracted, out.dtype)
      z = jnp.where(own, z, lax.dynamic_slice_in_dim(out, first, tile))
      return lax.dynamic_update_slice_in_dim(out, z, first, 0)

    return _loop(0, count, tile, step, out), None

  out = jnp.zeros(spec.shape(x), spec.out_dtype)
  groups = x.b, x.offsets[:-1], jnp.diff(x.offsets)
  return lax.scan(group, out, groups)[0]


def _along_k(x: Operands, spec: Spec, tile: int, dot: Dot) -> jax.Array:
  """A group's tiles are added up, and rounded once."""
  rows = x.a.shape[0]
  wide = dtypes.accumulation_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)

  def group(_, at):
    start, count = at

    def part(row):
      first, own = _tile(start + row, count - row, tile, rows)
      # Zeros in both: a NaN of another group's row times zero is a NaN.
      a, b = (
        jnp.where(own, lax.dynamic_slice_in_dim(v, first, tile), 0)
        for v in (x.a, x.b)
      )
      return dot(a, b, (0, 0), wide)

    def sums():
      step = lambda row, sums: sums + part(row)  # noqa: E731
      return _loop(1, count, tile, step, part(0)).astype(spec.out_dtype)

    # Sums that begin as zeros are written and read once more: 1.4x at
    # 8192 x 4096 x 14336 in 8.
    zeros = lambda: jnp.zeros(spec.shape(x)[1:], spec.out_dtype)  # noqa: E731
    return None, lax.cond(count > 0, sums, zeros)

  groups = x.offsets[:-1], jnp.diff(x.offsets)
  return lax.scan(group, None, groups)[1]
