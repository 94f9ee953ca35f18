"""Grouped products where no kernel takes them: a loop over tiles of rows.

`lax.ragged_dot` multiplies every row with every group: A is expanded to a
matrix for each group, with zeros where a row is not in it. Here a step
multiplies one tile of rows with the matrix of the one group that they are in.
Tiles start where groups start, so there are ceil(rows / tile) + groups - 1 of
them at most, and that many steps run, whatever the sizes: those that are left
over write nothing.

A step copies its group's matrix (XLA fuses a slice at a place that is not known
into no product), so groups of few rows cost less with `lax.ragged_dot`.
`choose` weighs the two.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, dtypes, hardware
from pallas_gemm.ops.spec import Operands, Spec

# A product of two matrices: dot(a, b, contracted dimensions of each, dtype).
Dot = Callable[[jax.Array, jax.Array, tuple[int, int], jnp.dtype], jax.Array]


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The loop, by its tiles of so many rows."""

  rows: int

  def __str__(self) -> str:
    return f"a loop over tiles of {self.rows} rows"


class _Rates(NamedTuple):
  """What a device reaches.

  Attributes:
    flops: of products of large matrices, a second.
    bytes: that copies read and write, a second.
    step: seconds that a step takes beyond those.
    rows: a product of fewer takes as long as one of so many.
  """

  flops: float
  bytes: float
  step: float
  rows: int


# Shares of a GPU's peaks.
_FLOPS, _BYTES, _GPU_STEP, _GPU_ROWS = 0.65, 0.8, 12e-6, 64
# Two cores of a server, float32: 2048 x 1024 x 512 in 8 takes 18 ms, 15 steps
# of 256 rows; 64 rows in 64 groups 1.9 ms, 71 steps of 8 rows.
_CPU = _Rates(flops=2e11, bytes=1e10, step=1e-5, rows=8)
# Of fewer bytes none are saved.
_FEW_BYTES = 2**20
# Of the tiles that are weighed.
_HEIGHTS = 12


def choose(x: Operands, spec: Spec) -> Tiles | None:
  """The loop with the least predicted time; None if `lax.ragged_dot` has less.

  Its temporaries are not larger. On CPUs it is the loop: there it takes longer
  with a few rows alone, of which microseconds are spent.

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
  # Bytes. A step along M copies its group's matrix, which is then read, and of
  # each row A, the product and the result. One along K adds a product to sums
  # and stores them, both in 32 bits, and copies rows of A and B.
  if spec.ragged == "m":
    held, moved, of_row = size, 3 * size, (2 * k + 4 * n) * size
  else:
    wide = x.wide(spec.out_dtype).itemsize
    held, moved, of_row = 2 * wide, 4 * wide + size, 2 * (m + n) * size

  def seconds(rows: int, moved: float) -> float:
    flops = 2 * max(rows, rates.rows) * depth * n
    return flops / rates.flops + moved / rates.bytes

  # What `lax.ragged_dot` makes of A: a matrix for each group.
  expanded = rows * groups * depth * size
  found = {}
  for tile in sorted({min(rates.rows << i, rows) for i in range(_HEIGHTS)}):
    if held * depth * n + of_row * tile // 2 > max(expanded, _FEW_BYTES):
      break
    step = seconds(tile, moved * depth * n + of_row * tile) + rates.step
    found[Tiles(tile)] = _count(rows, groups, tile) * step
  return seconds(rows * groups, 3 * expanded + 2 * rows * n * size), found


def _rates(x: Operands, spec: Spec) -> _Rates | None:
  platform = compat.target_device().platform
  if platform not in compat.CUDA_PLATFORMS:
    return _CPU if platform == "cpu" else None
  gpu, flops = hardware.current(), 0.0
  if max(v.dtype.itemsize for v in (x.a, x.b)) == 2:
    flops = gpu.bf16_flops
  elif spec.precision in (None, lax.Precision.DEFAULT):
    flops = gpu.tf32_flops
  flops = _FLOPS * (flops or gpu.fp32_flops)
  return _Rates(flops, _BYTES * gpu.dram_bytes_per_s, _GPU_STEP, _GPU_ROWS)


class _Steps(NamedTuple):
  """Of each step, [steps].

  Attributes:
    group: the tile's.
    start: its first row.
    count: rows of the group from there on.
    is_first: whether it is the group's first tile.
  """

  group: jax.Array
  start: jax.Array
  count: jax.Array
  is_first: jax.Array


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


def _steps(offsets: jax.Array, tile: int, rows: int) -> _Steps:
  groups = offsets.shape[0] - 1
  sizes = jnp.diff(offsets)
  tiles = lax.div(sizes, sizes.dtype.type(tile)) + (sizes % tile != 0)
  ends = jnp.cumsum(tiles, dtype=sizes.dtype)
  number = lax.iota(sizes.dtype, _count(rows, groups, tile))
  group = jnp.sum(ends[None] <= number[:, None], 1, dtype=np.int32)
  group = jnp.minimum(group, groups - 1)
  nth = number - (ends - tiles)[group]
  before = jnp.where(number < ends[-1], nth * tile, sizes[group])
  return _Steps(
    group,
    offsets[:-1][group] + before,
    sizes[group] - before,
    nth == 0,
  )


def _count(rows: int, groups: int, tile: int) -> int:
  """Steps: of what groups have, each but one has a last tile that is begun."""
  return -(-rows // tile) + min(groups, rows) - 1


def _tile(
  start: jax.Array, count: jax.Array, tile: int, rows: int
) -> tuple[jax.Array, jax.Array]:
  """Where to slice a tile, and which of its rows are the step's, [tile, 1].

  A slice that would end behind the last row starts sooner.
  """
  first = jnp.minimum(start, min(rows - tile, jnp.iinfo(start.dtype).max))
  row = lax.broadcasted_iota(start.dtype, (tile, 1), 0) - (start - first)
  return first, (row >= 0) & (row < count)


def _along_m(x: Operands, spec: Spec, tile: int, dot: Dot) -> jax.Array:
  """Each step writes its own rows of the result, and leaves the others."""
  rows, of_b = x.a.shape[0], spec.words.b.replace("g", "")
  contracted = 1, of_b.index("k")

  def step(out, at):
    first, own = _tile(at.start, at.count, tile, rows)
    a = lax.dynamic_slice_in_dim(x.a, first, tile)
    b = lax.dynamic_index_in_dim(x.b, at.group, keepdims=False)
    z = dot(a, b, contracted, out.dtype)
    z = jnp.where(own, z, lax.dynamic_slice_in_dim(out, first, tile))
    return lax.dynamic_update_slice_in_dim(out, z, first, 0), None

  out = jnp.zeros(spec.shape(x), spec.out_dtype)
  return lax.scan(step, out, _steps(x.offsets, tile, rows))[0]


def _along_k(x: Operands, spec: Spec, tile: int, dot: Dot) -> jax.Array:
  """Sums of a group are carried on; rounded, they replace what is there."""
  rows, shape = x.a.shape[0], spec.shape(x)
  wide = dtypes.accumulation_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)

  def step(carry, at):
    sums, out = carry
    first, own = _tile(at.start, at.count, tile, rows)
    # Zeros in both: a NaN of another group's row times zero is a NaN.
    a, b = (
      jnp.where(own, lax.dynamic_slice_in_dim(v, first, tile), 0)
      for v in (x.a, x.b)
    )
    sums = jnp.where(at.is_first, 0, sums) + dot(a, b, (0, 0), wide)
    new = sums.astype(out.dtype)
    return (sums, lax.dynamic_update_index_in_dim(out, new, at.group, 0)), None

  carry = jnp.zeros(shape[1:], wide), jnp.zeros(shape, spec.out_dtype)
  return lax.scan(step, carry, _steps(x.offsets, tile, rows))[0][1]
