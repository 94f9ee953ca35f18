"""What the tensor-core rungs share: tile layouts, tile order, legality.

wgmma reads tiles whose rows are permuted ("swizzled") within pieces of 8 rows
by 64 columns of 16-bit elements, 128 bytes a row. TMA writes that form if it
sees the matrix [M, K] as [M/8, K/64, 8, 64], and Mosaic GPU refuses a matrix
that is not a whole number of such pieces. Past the last piece the hardware
fills loads with zeros and drops stores, so tiles may hang over the edge of
the matrix as far as they like.
"""

from collections.abc import Callable
import dataclasses
import itertools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import hardware
from pallas_gemm.ladder import contract

# One piece: 8 rows of 64 16-bit elements, 128 bytes, the widest swizzle.
PIECE_ROWS = 8
PIECE_COLUMNS = 64
# One wgmma computes 64 rows by at most 256 columns. A thread of the warpgroup
# has at most 255 registers: 128 float32 sums leave room for the rest, the next
# size, 256, does not fit.
WGMMA_ROWS = 64
WGMMA_COLUMNS = 256
THREADS = 128
ACCUMULATORS = 128
# Registers of a thread once the producer has given up what it has no use for:
# 128 * (40 + 2 * 232) = 64512 of the 65536 that an SM has.
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
BARRIER_BYTES = 8
# Blocks in a cluster that every GPU with clusters can run.
PORTABLE_CLUSTER = 8


def swizzled(shape: tuple[int, ...], dtype) -> plgpu.SMEM:
  """Shared memory for 16-bit tiles [..., rows, columns], swizzled for wgmma.

  Swizzling permutes the 16-byte units of eight consecutive rows, so that the
  eight rows that one access touches lie in different banks.
  """
  columns = min(PIECE_COLUMNS, shape[-1])
  return plgpu.SMEM(
    shape,
    dtype,
    transforms=(
      plgpu.TilingTransform((PIECE_ROWS, columns)),
      plgpu.SwizzleTransform(2 * columns),
    ),
  )


def padded(
  launch: Callable[..., jax.Array],
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None,
) -> jax.Array:
  """Runs `launch` on operands padded to whole pieces; no copy if they are.

  M to a multiple of 8, N and K to multiples of 64, N to 128 at least. XLA
  copies (reads and writes once) A if M or K does not fit, B if N or K does
  not, and C and the result if M or N does not.
  """
  # Of a matrix that is one piece wide, Mosaic GPU drops the column index of a
  # copy that is one piece wide: what lies past the edge would be stored at
  # column 0 instead of nowhere.
  narrow = b.shape[1] <= PIECE_COLUMNS
  return contract.padded(
    launch,
    a,
    b,
    c,
    multiple_m=PIECE_ROWS,
    multiple_n=2 * PIECE_COLUMNS if narrow else PIECE_COLUMNS,
    multiple_k=PIECE_COLUMNS,
  )


def consumer_tile(config: contract.TensorCoreConfig) -> tuple[int, int]:
  """Rows and columns of the block's tile that one warpgroup accumulates."""
  if config.split == "m":
    return config.block_m // config.consumers, config.block_n
  return config.block_m, config.block_n // config.consumers


def operands(a_tile, b_tile, consumer, config: contract.TensorCoreConfig):
  """The parts of a stage's two tiles that warpgroup `consumer` multiplies."""
  rows, columns = consumer_tile(config)
  if config.split == "m":
    return a_tile.at[pl.ds(consumer * rows, rows), :], b_tile
  return a_tile, b_tile.at[:, pl.ds(consumer * columns, columns)]


def origin(m_tile, n_tile, consumer, config: contract.TensorCoreConfig):
  """Row and column of C where warpgroup `consumer`'s share of a tile starts."""
  rows, columns = consumer_tile(config)
  row, column = m_tile * config.block_m, n_tile * config.block_n
  if config.split == "m":
    return row + consumer * rows, column
  return row, column + consumer * columns


def next_slot(slot, stages: int):
  """The ring's next slot; a select, where a remainder would be a division."""
  return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)


def tile_at(index, grid: tuple[int, int], config: contract.TensorCoreConfig):
  """Row and column, in tiles, of the tile that is visited as number `index`.

  Strips `raster` tiles wide along `raster_dim`, walked up and down in turn (a
  snake): tiles that are computed at one time lie near each other and share
  operands in L2.
  """
  minor = ("m", "n").index(config.raster_dim)
  return plgpu.planar_snake(index, grid, minor, config.raster)


def pieces(config: contract.TensorCoreConfig) -> list[tuple[int, int]]:
  """Where the 64 x epilogue_n pieces of a warpgroup's accumulator start."""
  rows, columns = consumer_tile(config)
  return list(
    itertools.product(
      range(0, rows, WGMMA_ROWS), range(0, columns, config.epilogue_n)
    )
  )


def staging_buffers(config: contract.TensorCoreConfig) -> int:
  """Pieces of a warpgroup in shared memory: one fills while one leaves."""
  return min(2, len(pieces(config)))


def staging_shape(config: contract.TensorCoreConfig) -> tuple[int, ...]:
  """Shape of the staged pieces of all consumers."""
  buffers = staging_buffers(config)
  return (config.consumers, buffers, WGMMA_ROWS, config.epilogue_n)


def shared_bytes(config: contract.TensorCoreConfig, buffers: int) -> int:
  """Bytes of the ring, the staged pieces and the barriers of a ring kernel."""
  ring = config.stages * config.block_k * (config.block_m + config.block_n)
  staged = config.consumers * buffers * WGMMA_ROWS * config.epilogue_n
  barriers = 2 * config.stages + config.consumers
  return 2 * (ring + staged) + BARRIER_BYTES * barriers


def unused(config: contract.TensorCoreConfig, *names: str) -> str | None:
  """The first of the fields that a rung has no use for and that is set."""
  defaults = {f.name: f.default for f in dataclasses.fields(config)}
  for name in names:
    if (value := getattr(config, name)) != defaults[name]:
      return (
        f"{name} has no meaning here and must stay {defaults[name]!r}, got"
        f" {value!r}"
      )
  return None


def is_legal_tile(config: contract.TensorCoreConfig) -> str | None:
  """None, or why no warpgroup can multiply these tiles."""
  gpu = hardware.current()
  if gpu.compute_capability != (9, 0):
    major, minor = gpu.compute_capability
    return (
      "wgmma needs a GPU of compute capability 9.0 (Hopper),"
      f" {gpu.name} has {major}.{minor}"
    )
  if config.consumers > 2:
    return f"consumers must be 1 or 2, got {config.consumers}"
  if config.block_k % PIECE_COLUMNS:
    return (
      f"block_k must be a multiple of {PIECE_COLUMNS}, got {config.block_k}"
    )
  divided = config.block_m if config.split == "m" else config.block_n
  rows, columns = consumer_tile(config)
  if divided % config.consumers or rows % WGMMA_ROWS or columns % PIECE_COLUMNS:
    return (
      f"a consumer's share must be multiples of {WGMMA_ROWS} rows and"
      f" {PIECE_COLUMNS} columns, got {config.block_m}x{config.block_n} split"
      f" along {config.split} over {config.consumers}"
    )
  if columns > WGMMA_COLUMNS or rows * columns > THREADS * ACCUMULATORS:
    return (
      f"a consumer's share must have at most {WGMMA_COLUMNS} columns and"
      f" {THREADS * ACCUMULATORS} elements, got {rows}x{columns}"
    )
  return None


def is_legal_ring(
  config: contract.TensorCoreConfig, buffers: int | None = None
) -> str | None:
  """None, or why a ring of such stages with such a staging can't run."""
  if reason := is_legal_tile(config):
    return reason
  if config.stages < 2:
    return f"stages must be at least 2, got {config.stages}"
  _, columns = consumer_tile(config)
  width = config.epilogue_n
  if width not in (16, 32) and (width == 0 or width % PIECE_COLUMNS):
    return (
      f"epilogue_n must be 16, 32 or a multiple of {PIECE_COLUMNS}, got {width}"
    )
  if columns % width:
    return f"epilogue_n must divide {columns}, got {width}"
  if len(pieces(config)) > 2 and len(pieces(config)) % 2:
    return (
      "epilogue_n must cut a consumer's share into an even number of pieces,"
      f" got {len(pieces(config))}"
    )
  return fits(shared_bytes(config, buffers or staging_buffers(config)))


def fits(need: int) -> str | None:
  """None, or that a block can't have so many bytes of shared memory."""
  have = hardware.current().shared_bytes_per_block
  if need > have:
    return f"tiles need {need} bytes of shared memory, a block has {have}"
  return None
