"""What the tensor-core rungs share: swizzled tiles, parts of them, legality.

wgmma reads tiles whose rows are permuted ("swizzled") within swizzle atoms: 8
rows by 64 columns of 16-bit elements, 128 bytes a row. TMA writes that form if
it sees the matrix [M, K] as [M/8, K/64, 8, 64], and Mosaic GPU refuses a matrix
that is not a whole number of atoms. Past the last atom the hardware fills loads
with zeros and drops stores, so tiles may hang over the edge of the matrix as
far as they like.
"""

import itertools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import blocks, contract, legal

# A swizzle atom: 8 rows of 64 16-bit elements, 128 bytes, the widest swizzle.
ATOM_ROWS = 8
ATOM_COLUMNS = 64
# One wgmma computes 64 rows by at most 256 columns. A thread of the warpgroup
# has at most 255 registers: 128 float32 accumulators leave room for all else,
# the next size, 256, does not fit.
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
# Thread blocks that CUDA launches along y and z of a grid; x takes 2**31 - 1.
MOST_BLOCKS_Y = 65535


def swizzle(columns: int) -> tuple[Any, ...]:
  """Transforms of a tile that wgmma can read, of so many columns.

  They permute the 16-byte units of eight consecutive rows, so that the eight
  rows that one access touches lie in different banks.
  """
  columns = min(ATOM_COLUMNS, columns)
  return (
    plgpu.TilingTransform((ATOM_ROWS, columns)),
    plgpu.SwizzleTransform(2 * columns),
  )


# Of the tiles that wgmma reads: their rows are multiples of 64 elements.
SWIZZLE = swizzle(ATOM_COLUMNS)


def swizzled(shape: tuple[int, ...], dtype: Any) -> plgpu.SMEM:
  """Shared memory for 16-bit tiles [..., rows, columns], swizzled."""
  return plgpu.SMEM(shape, dtype, transforms=swizzle(shape[-1]))


def padding(
  problem: contract.Gemm, config: contract.TensorCoreConfig | None
) -> tuple[int, int, int]:
  """M to a multiple of 8, N and K to multiples of 64, N to 128 at least."""
  del config
  # Of a matrix that is one atom wide, Mosaic GPU drops the column index of a
  # copy that is one atom wide: what lies past the edge would be stored at
  # column 0 instead of nowhere.
  narrow = problem.n <= ATOM_COLUMNS
  columns = 2 * ATOM_COLUMNS if narrow else ATOM_COLUMNS
  return ATOM_ROWS, columns, ATOM_COLUMNS


def padded_columns(problem: contract.Gemm) -> int:
  """N as XLA pads it."""
  columns = padding(problem, None)[1]
  return pl.cdiv(problem.n, columns) * columns


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


def subtile(block, consumer, at, config: contract.TensorCoreConfig):
  """The subtile at row and column `at` of consumer's part of a block of C."""
  if block is None:
    return None
  (rows, columns), (row, column) = consumer_tile(config), at
  if config.split == "m":
    row += consumer * rows
  else:
    column += consumer * columns
  return block.at[pl.ds(row, WGMMA_ROWS), pl.ds(column, config.epilogue_n)]


def subtiles(config: contract.TensorCoreConfig) -> list[tuple[int, int]]:
  """Where the 64 x epilogue_n subtiles of a warpgroup's accumulator start."""
  rows, columns = consumer_tile(config)
  return list(
    itertools.product(
      range(0, rows, WGMMA_ROWS), range(0, columns, config.epilogue_n)
    )
  )


def send(acc, stage, out_subtile, c_subtile, loaded, problem) -> None:
  """Sends alpha * acc + beta * C to global memory; does not wait for it.

  Args:
    acc: the accumulators of a subtile, in registers.
    stage: shared memory for it that nobody uses.
    out_subtile: where it belongs, in global memory.
    c_subtile: C there, or None where beta is 0; it comes by way of `stage`.
    loaded: barrier for C.
    problem: what is computed.
  """
  c = None
  if c_subtile is not None:
    plgpu.copy_gmem_to_smem(c_subtile, stage, loaded)
    plgpu.barrier_wait(loaded)
    c = stage[...]
  stage[...] = contract.combine(acc, c, problem=problem).astype(problem.dtype)
  plgpu.commit_smem()  # what threads wrote becomes visible to TMA
  plgpu.copy_smem_to_gmem(stage, out_subtile)


def store(acc, at, parts, specs, problem, config) -> None:
  """Sends a consumer's accumulators to C subtile by subtile.

  It does not wait for the last.

  Args:
    acc: the accumulators, in registers.
    at: row and column, in tiles, of the tile that it is of.
    parts: (consumer, result in global memory, [C] or [], the consumers'
      staging buffers [consumers, buffers, 64, epilogue_n], their barriers for
      subtiles of C).
    specs: of the rung.
    problem: what is computed.
    config: the tile sizes.
  """
  consumer, out_ref, c_ref, staged, c_loaded = parts
  stages, loaded = staged.at[consumer], c_loaded.at[consumer]
  out_block = blocks.window(specs.out_specs, out_ref, *at, 0)
  c_block = None
  if c_ref:
    c_block = blocks.window(specs.in_specs[2], c_ref[0], *at, 0)
  buffers, rows, columns = stages.shape
  for index, (m, n) in enumerate(subtiles(config)):
    # All stores but the newest have left shared memory, so this buffer is
    # free. For the first subtiles those are stores of the tile before.
    plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
    out_subtile, c_subtile = (
      subtile(block, consumer, (m, n), config) for block in (out_block, c_block)
    )
    own, stage = acc[m : m + rows, n : n + columns], stages.at[index % buffers]
    send(own, stage, out_subtile, c_subtile, loaded, problem)


def tile_at(index, tiles: tuple[int, int], config: contract.TensorCoreConfig):
  """Row and column, in tiles, of the tile that is visited as number `index`.

  Strips `raster` tiles wide along `raster_dim`, walked up and down in turn (a
  snake): tiles that are computed at one time lie near each other and share
  operands in L2.
  """
  minor = ("m", "n").index(config.raster_dim)
  return plgpu.planar_snake(index, tiles, minor, config.raster)


def next_slot(slot, stages: int):
  """The ring's next slot; a select, where a remainder would be a division."""
  return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)


def staging_buffers(config: contract.TensorCoreConfig) -> int:
  """Subtiles of a warpgroup in shared memory: one fills while one leaves."""
  return min(2, len(subtiles(config)))


def staging(
  config: contract.TensorCoreConfig, buffers: int, dtype: Any
) -> plgpu.SMEM:
  """Shared memory for the staged subtiles of all consumers."""
  shape = (config.consumers, buffers, WGMMA_ROWS, config.epilogue_n)
  return swizzled(shape, dtype)


def mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """`plgpu.mma`: acc + a @ b from registers, 16 x 8 x 16 at a time.

  The interpreter has no rule for it; there it is a product in float32.
  """
  if compat.targets_gpu():
    return plgpu.mma(acc, a, b)
  return acc + jnp.dot(a.astype(acc.dtype), b.astype(acc.dtype))


def is_legal_tile(
  config: contract.TensorCoreConfig, specs: blocks.Specs
) -> str | None:
  """None, or why no warpgroup can multiply the tiles of the specs."""
  if config.consumers > 2:
    return f"consumers must be 1 or 2, got {config.consumers}"
  (block_m, block_n), depth = specs.out_specs.block_shape, config.block_k
  if depth % ATOM_COLUMNS:
    return f"block_k must be a multiple of {ATOM_COLUMNS}, got {depth}"
  divided = block_m if config.split == "m" else block_n
  rows, columns = consumer_tile(config)
  if divided % config.consumers or rows % WGMMA_ROWS or columns % ATOM_COLUMNS:
    return (
      f"a consumer's share must be multiples of {WGMMA_ROWS} rows and"
      f" {ATOM_COLUMNS} columns, got {block_m}x{block_n} split"
      f" along {config.split} over {config.consumers}"
    )
  if columns > WGMMA_COLUMNS or rows * columns > THREADS * ACCUMULATORS:
    return (
      f"a consumer's share must have at most {WGMMA_COLUMNS} columns and"
      f" {THREADS * ACCUMULATORS} elements, got {rows}x{columns}"
    )
  return None


def is_legal_grid(grid: tuple[int, int, int]) -> str | None:
  """None, or why CUDA can't launch a thread block for each tile.

  The first dimension of Pallas' grid is CUDA's y here, the second its x.
  """
  return legal.at_most("tiles along M", grid[0], MOST_BLOCKS_Y)


def is_legal_ring(
  config: contract.TensorCoreConfig,
  specs: blocks.Specs,
  buffers: int | None = None,
) -> str | None:
  """None, or why a ring of these stages with its staging can't run."""
  if reason := is_legal_tile(config, specs):
    return reason
  if config.stages < 2:
    return f"stages must be at least 2, got {config.stages}"
  _, columns = consumer_tile(config)
  width = config.epilogue_n
  if width not in (16, 32) and (width == 0 or width % ATOM_COLUMNS):
    return (
      f"epilogue_n must be 16, 32 or a multiple of {ATOM_COLUMNS}, got {width}"
    )
  if columns % width:
    return f"epilogue_n must divide {columns}, got {width}"
  if len(subtiles(config)) > 2 and len(subtiles(config)) % 2:
    return (
      "epilogue_n must cut a consumer's share into an even number of subtiles,"
      f" got {len(subtiles(config))}"
    )
  if reason := is_legal_cluster(config):
    return reason
  ring = blocks.shared_bytes(specs.in_specs[:2], config.stages, 2)
  buffers = buffers or staging_buffers(config)
  staged = 2 * config.consumers * buffers * WGMMA_ROWS * width
  barriers = BARRIER_BYTES * (2 * config.stages + config.consumers)
  return legal.fits(ring + staged + barriers)


def is_legal_cluster(config: contract.TensorCoreConfig) -> str | None:
  """None, or why blocks of the cluster can't share tiles."""
  cluster = config.cluster_m, config.cluster_n
  most = min(PORTABLE_CLUSTER, hardware.sm_count())
  if cluster[0] * cluster[1] > most:
    return (
      f"a cluster must have at most {most} blocks, got {cluster[0]} x"
      f" {cluster[1]}"
    )
  # 2 x 2 ran at 0.6x of jnp.dot, and the interpreter's race detector has once
  # in some forty runs reported a copy over a read there that was not explained.
  if min(cluster) > 1:
    return f"a cluster must lie along one side, got {cluster[0]} x {cluster[1]}"
  # Each block loads its share of a tile: a whole number of 8-row atoms.
  for name, rows in (("cluster_n", "block_m"), ("cluster_m", "block_k")):
    share, of = getattr(config, name), getattr(config, rows)
    if of % (share * ATOM_ROWS):
      return (
        f"{rows} must be a multiple of {ATOM_ROWS} * {name}, got {of} and"
        f" {share}"
      )
  return None
