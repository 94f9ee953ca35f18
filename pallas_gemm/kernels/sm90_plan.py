"""How the Hopper kernels cut a product up: tiles, subtiles, shared memory.

Plain arithmetic on `Config` and `Problem`; what runs on the GPU is in
`sm90_body`, how matrices lie in global memory in `sm90_memory`, which configs
are legal in `sm90_legal`.

Where a config swaps the operands, the problem is the transposed one for all of
the kernel, and for all functions here but `computed`.
"""

import functools
import itertools
from typing import NamedTuple

import jax.numpy as jnp

from pallas_gemm import hardware
from pallas_gemm.kernels.problem import Config, Problem

# A swizzle atom: 8 rows of 128 bytes.
ATOM_ROWS, ATOM_BYTES = 8, 128
# wgmma: 64 rows by at most 256 columns, a multiple of 8. A thread has at most
# 255 registers: 160 accumulators leave room for all else, 192 spill.
WGMMA_ROWS, WGMMA_COLUMNS = 64, 256
THREADS = 128
ACCUMULATORS = {1: 160, 2: 160, 3: 96}
# Registers of a thread of the producer and of one, two or three consumers:
# 128 * (24 + 2 * 240) = 64512 and 128 * (32 + 3 * 160) = 65536 of the 65536
# that an SM has.
REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}
# Columns that a warpgroup stores at a time where TMA can't: one a thread.
DIRECT = THREADS
# Barriers and the alignment of what lies in shared memory.
SHARED_SLACK = 1024
DTYPES = ("bfloat16", "float16")
# Registers of a consumer that hold no results.
_OTHER_REGISTERS = 40


def computed(problem: Problem, config: Config) -> Problem:
  """The problem that the kernel computes: the transposed one, if swapped.

  Its result is the transposed one of the problem; it is stored as the problem
  says.
  """
  return _transposed(problem) if config.swap_ab else problem


# The cost model asks for dozens of configs.
_transposed = functools.lru_cache(maxsize=1024)(Problem.transposed)


def shared_bytes(config: Config, problem: Problem) -> int:
  """Shared memory of a block, in bytes; a little more than it takes."""
  ring = config.stages * slab_bytes(config, problem)
  width = subtile_width(problem, config)
  subtile = config.consumers * WGMMA_ROWS * width
  size = 4 if config.split_k > 1 else jnp.dtype(problem.out_dtype).itemsize
  staged = subtile * size * outputs(problem, config) * buffers(problem, config)
  if problem.ragged == "m":
    staged += subtile * size
  if problem.ragged == "k":
    staged += WGMMA_ROWS * width * size
  fused = config.split_k == 1
  if problem.c_dtype and fused and not c_in_place(problem, config):
    size = jnp.dtype(problem.c_dtype).itemsize
    staged += subtile * size * c_buffers(problem, config)
  if problem.bias and fused:
    staged += config.consumers * 4 * cdiv(max(share(config)), 64) * 64
  return ring + staged + SHARED_SLACK


def slab_bytes(config: Config, problem: Problem) -> int:
  """Bytes of one stage of the ring."""
  columns_b = config.block_n * (2 if problem.gated else 1)
  return 2 * config.block_k * (config.block_m + columns_b)


def share(config: Config) -> tuple[int, int]:
  """Rows and columns of the tile that one consumer computes."""
  if config.split == "pingpong":
    return config.block_m, config.block_n
  if config.split == "m":
    return config.block_m // config.consumers, config.block_n
  return config.block_m, config.block_n // config.consumers


def subtiles(problem: Problem, config: Config) -> list[tuple[int, int]]:
  """Where the 64-row subtiles of a consumer's share start.

  All are of one width. Where it does not divide the columns, the last subtile
  ends with them, and what it shares with the subtile before is stored twice.
  """
  rows, columns = share(config)
  width = subtile_width(problem, config)
  starts = [min(j, columns - width) for j in range(0, columns, width)]
  return list(itertools.product(range(0, rows, WGMMA_ROWS), starts))


def subtiles_overlap(problem: Problem, config: Config) -> bool:
  """Whether the last of a row's `subtiles` has columns of the one before."""
  return share(config)[1] % subtile_width(problem, config) > 0


def _subtile_count(config: Config) -> int:
  """As many as `subtiles`: the cost model asks for dozens of configs."""
  rows, columns = share(config)
  return rows // WGMMA_ROWS * cdiv(columns, config.epilogue_n)


def subtile_width(problem: Problem, config: Config) -> int:
  return DIRECT if stores_rows(problem, config) else config.epilogue_n


def buffers(problem: Problem, config: Config) -> int:
  """Subtiles of a consumer in shared memory: one fills while others leave."""
  if stores_rows(problem, config):
    return 1
  return min(config.epilogue_buffers, len(subtiles(problem, config)))


def c_buffers(problem: Problem, config: Config) -> int:
  """Subtiles of C in shared memory: all, or one is read while another comes."""
  count = len(subtiles(problem, config))
  p, cfg = problem, config
  if pingpong_consumers(cfg) > 1 or c_in_place(p, cfg) or defers_stores(p, cfg):
    return count
  return min(2, count)


def c_in_place(problem: Problem, config: Config) -> bool:
  """Whether a tile of C is loaded to where results are stored from.

  Each subtile of the result then takes the place of what was added to it, and
  all of C has arrived when the accumulators are complete.
  """
  p = problem
  return (
    p.c_dtype == p.out_dtype
    and _subtile_count(config) <= config.epilogue_buffers
    and has_room_to_defer(p, config)
    and not stores_rows(p, config)
  )


def result_shape(problem: Problem, config: Config) -> tuple[int, int]:
  """Rows and columns of the result, as it is stored."""
  shape = problem.m, problem.n
  return shape[::-1] if config.swap_ab else shape


def subtile_shape(problem: Problem, config: Config) -> tuple[int, int]:
  """Rows and columns of a subtile, as it is stored."""
  shape = WGMMA_ROWS, subtile_width(problem, config)
  return shape[::-1] if config.swap_ab else shape


def outputs(problem: Problem, config: Config) -> int:
  """Matrices that the kernel writes; parts of K: a sum of each product."""
  products = 2 if problem.gated else 1
  if config.split_k > 1:
    return products
  return 1 + products if problem.save_preactivation else 1


def stores_rows(problem: Problem, config: Config) -> bool:
  """Whether results are stored row by row, not by TMA.

  That is for results whose rows TMA can't address. A padded result would
  have to be copied: 4095^3 takes 296 us so, and 242 row by row (H200).
  """
  itemsize = jnp.dtype(problem.out_dtype).itemsize
  shape, width = (problem.m, problem.n), config.epilogue_n
  # What takes longest comes last: the cost model asks for dozens of configs.
  return (
    problem.ragged is None
    and config.split_k == 1
    and not problem.save_preactivation
    and not config.swap_ab
    and problem.n >= DIRECT
    and share(config)[1] % DIRECT == 0
    and padding(shape, width, width, itemsize) != shape
  )


def pingpong_consumers(config: Config) -> int:
  """Consumers that ping-pong, a work tile each; 1 if they share each one."""
  return config.consumers if config.split == "pingpong" else 1


def work_tiles_of_a_block(problem: Problem, config: Config) -> int | None:
  """Work tiles that each block has, or one less; None: the device knows."""
  if problem.ragged:
    return None
  return cdiv(_work_tiles(problem, config), _room(config))


def _work_tiles(problem: Problem, config: Config) -> int:
  """Work tiles of all blocks, in tiles of clusters; of one group if groups."""
  rows, columns = grid(problem, config)
  parts = rows * config.tail_columns * (config.tail_split_k - 1)
  return rows * columns * problem.batch * config.split_k + parts


def _room(config: Config) -> int:
  """Clusters that find room at a time."""
  return hardware.sm_count() // (config.cluster_m * config.cluster_n)


def slabs_of_a_work_tile(problem: Problem, config: Config) -> int:
  """Slabs of K that a work tile of a dense product has."""
  return cdiv(cdiv(problem.k, config.block_k), config.split_k)


def refills_ring(problem: Problem, config: Config) -> bool:
  """Whether a slot of the ring is filled again, once it has been read.

  Where it is not, nothing need be told of slots that have been read. Blocks of
  a cluster tell each other in any case: none may end before its peers have
  what it loads for them.
  """
  work_tiles = work_tiles_of_a_block(problem, config)
  if work_tiles is None or config.cluster_m * config.cluster_n > 1:
    return True
  # Consumers that ping-pong have as many slots each, one of them most tiles.
  pingpong = pingpong_consumers(config)
  work_tiles = cdiv(work_tiles, pingpong) * pingpong
  return work_tiles * slabs_of_a_work_tile(problem, config) > config.stages


def defers_stores(problem: Problem, config: Config) -> bool:
  """Whether results wait in registers until the next work tile is under way."""
  return deferred_subtiles(problem, config) > 0


def deferred_subtiles(problem: Problem, config: Config) -> int:
  """How many subtiles do, the last ones of a consumer's share.

  All that find room, if that is half of them or more; with C all or none.
  """
  p, cfg = problem, config
  if work_tiles_of_a_block(p, cfg) == 1 or stores_rows(p, cfg):
    return 0
  return _room_to_defer(p, cfg)[0] if may_defer(p, cfg) else 0


def may_defer(problem: Problem, config: Config) -> bool:
  """Whether enough of them find room; TMA has to be able to store them."""
  return stored_at_once(problem, config) < 1


def stored_at_once(problem: Problem, config: Config) -> float:
  """The part of a consumer's results that does not wait."""
  p = problem
  if p.c_dtype not in (None, p.out_dtype):
    return 1.0
  some, count = _room_to_defer(p, config)
  least = count if p.c_dtype else count / 2
  return 1 - some / count if 0 < some >= least else 1.0


def has_room_to_defer(problem: Problem, config: Config) -> bool:
  """Whether results have room beside the next work tile's accumulators."""
  some, count = _room_to_defer(problem, config)
  return some == count


def _room_to_defer(problem: Problem, config: Config) -> tuple[int, int]:
  """Of a consumer's subtiles, those that find room, and how many it has."""
  p, cfg = problem, config
  count = _subtile_count(cfg)
  if cfg.split == "pingpong" or cfg.split_k > 1:
    return 0, count
  accumulators = cfg.block_m * cfg.block_n // (THREADS * cfg.consumers)
  room = REGISTERS[cfg.consumers][1] - _OTHER_REGISTERS
  room -= accumulators * 2 if p.gated else accumulators
  size = 4 if p.out_dtype == "float32" else 2
  if p.save_preactivation:
    size *= outputs(p, cfg)
  some = room * 4 * THREADS // (WGMMA_ROWS * cfg.epilogue_n * size)
  return max(0, min(count, some)), count


def last_wave_start(problem: Problem, config: Config) -> int:
  """The first column of the last wave's tiles, summed in parts of K."""
  _, columns = grid(problem, config)
  return (columns - config.tail_columns) * config.block_n


def grid(problem: Problem, config: Config) -> tuple[int, int]:
  """Tiles of clusters along M and N."""
  return (
    cdiv(problem.m, config.block_m * config.cluster_m),
    cdiv(problem.n, config.block_n * config.cluster_n),
  )


def clusters(problem: Problem, config: Config) -> int:
  """Clusters that are launched: one block an SM, or fewer."""
  work_tiles, room = _work_tiles(problem, config), _room(config)
  if problem.ragged == "m":  # how many work tiles there are, the device knows
    _, columns = grid(problem, config)
    return min(room, row_tiles(problem, config) * columns)
  if problem.ragged == "k":
    work_tiles *= problem.groups
  if config.tail_columns:
    return min(room, work_tiles)
  # As few as need the same number of waves: all end at the same time, where a
  # partial last wave would leave part of the memory bandwidth unused.
  return cdiv(work_tiles, cdiv(work_tiles, room))


def row_tiles(problem: Problem, config: Config) -> int:
  """The most tiles that M rows can make up in groups of any sizes.

  Rows before the first group and after the last one count as two more.
  """
  tiles = problem.groups + 2
  return (problem.m + tiles * (config.block_m - 1)) // config.block_m


def schedule_arrays(problem: Problem) -> int:
  """Arrays in which `sm90_schedule` finds what the device knows of groups."""
  return {None: 0, "m": 2, "k": 2}[problem.ragged]


class Extent(NamedTuple):
  """How much of a tile is loaded, along M or N.

  Attributes:
    whole: of every tile but the last.
    last: of the last one, and of those of a cluster beyond it.
    start: where the last one starts.
  """

  whole: int
  last: int
  start: int


def loaded_rows(problem: Problem, config: Config) -> Extent:
  """Rows of A's tiles that are loaded.

  Rows that lie outside of A cost a copy more time than those inside
  (see `sm90_dense`), so they are left out; what their place holds goes to rows
  that are never stored.
  """
  p, cfg = problem, config
  in_part = not p.transpose_a and cfg.cluster_n == 1
  found = _loaded(p.m, cfg.block_m, in_part)
  if p.ragged == "m":  # the device knows where a tile starts
    return found._replace(last=found.whole)
  return found


def loaded_columns(problem: Problem, config: Config) -> Extent:
  """Columns of B's tiles that are loaded."""
  p, cfg = problem, config
  return _loaded(p.n, cfg.block_n, p.transpose_b and cfg.cluster_m == 1)


def _loaded(size: int, block: int, in_part: bool) -> Extent:
  """Not in part: tiles that blocks share, and tiles stored along K.

  Of these, a few columns are no contiguous part of shared memory.
  """
  if not in_part:
    return Extent(block, block, 0)
  start = (cdiv(size, block) - 1) * block
  last = min(block, cdiv(size - start, ATOM_ROWS) * ATOM_ROWS)
  return Extent(last if start == 0 else block, last, start)


def operand_columns(config: Config, problem: Problem) -> int:
  """Columns of the swizzle atoms of A and B; wgmma wants the same of both."""
  _, columns = share(config)
  return 64 if problem.transpose_b or columns % 64 == 0 else 32


@functools.lru_cache(maxsize=1024)
def padding(
  shape, columns: int, box_columns: int, itemsize: int
) -> tuple[int, int]:
  """Rows and columns of a stored matrix once TMA can address it.

  Args:
    shape: [..., rows, columns] of the matrix.
    columns: most columns that a swizzle atom may have.
    box_columns: columns of a copy.
    itemsize: bytes of an element.
  """
  *_, rows, width = shape
  step = 16 // itemsize
  columns = atom_columns(columns, itemsize)
  if box_columns != columns:  # see compat.allow_ragged_copies
    rows = rows if rows <= ATOM_ROWS else cdiv(rows, ATOM_ROWS) * ATOM_ROWS
    step = columns if width > columns else step
  return rows, cdiv(width, step) * step


def atom_columns(columns: int, itemsize: int) -> int:
  """Columns of a swizzle atom: 128 bytes, or all there are."""
  return min(ATOM_BYTES // itemsize, columns)


def lap(config: Config, problem: Problem) -> int:
  """wgmmas of one consumer in one lap of the ring."""
  rows, _ = share(config)
  slab = rows // WGMMA_ROWS * (config.block_k // 16)
  return config.stages * slab * (2 if problem.gated else 1)


def cdiv(a: int, b: int) -> int:
  return -(-a // b)
