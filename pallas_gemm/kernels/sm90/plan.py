"""Everything that follows from a problem and a config, said once.

A `Plan` is arithmetic: how the problem is cut up (`tiling`), how its matrices
lie in global memory (`matrices`) and, here, what a block has in shared memory.
The kernel, the rules on configs (`legal`) and the cost model read it.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import ATOM_ROWS, cdiv, round_up
from pallas_gemm.kernels.sm90.matrices import Matrices
from pallas_gemm.problem import Operand, Problem

# Barriers and the alignment of what lies in shared memory.
_SHARED_SLACK = 1024
# Slabs are asked for in pairs where reading weights takes so many times as long
# as multiplying by them, up to 147 rows a group on an H100; and where a group's
# rows are so many times a tile's at most, so that most groups have one tile.
_TO_LOAD_PAIRS, _ROWS_OF_ONE_TILE = 2.0, 1.25
# Chunks of B in shared memory that threads have copied: one is moved while one
# comes. 60 groups of 136 rows, 4096 x 1407, take 331 us with two and 329 with
# three, which take room from the ring (H100).
_CHUNKS_HELD = 2


class Buffer(NamedTuple):
  """What lies in shared memory under one name.

  Attributes:
    name: by which the kernel knows it.
    shape, dtype: of each buffer.
    swizzle: bytes of a swizzled row; 0 for plain rows.
    count: buffers; None for one that is no list.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  swizzle: int = 0
  count: int | None = None


class Barrier(NamedTuple):
  """Barriers of a block, or of its cluster.

  Attributes:
    name: by which the kernel knows them.
    arrivals: that complete a phase of one.
    count: how many there are.
    over: the cluster's axes whose blocks arrive too.
  """

  name: str
  arrivals: int
  count: int
  over: tuple[str, ...] = ()


class MovedTile(NamedTuple):
  """What threads copy and move of a slab (`moves`).

  Attributes:
    rows: of the slab as it is stored, those that may lie in the matrix.
    columns: likewise, in whole swizzle atoms.
    copied: of the columns, those that may lie in the matrix.
    chunk: rows that are moved at a time.
    swizzle: bytes of a row of the slab's atoms.
  """

  rows: int
  columns: int
  copied: int
  chunk: int
  swizzle: int


@dataclasses.dataclass(eq=False)
class Plan(Matrices):
  """A tiling, matrices, and what a block has in shared memory.

  `Plan.of` looks up one that exists; `Plan` makes one, which is faster where
  dozens are weighed once.

  Where a config swaps operands, all of it is of the transposed `problem`.

  Example:
    >>> from pallas_gemm.kernels.sm90.config import Config
    >>> from pallas_gemm.kernels.sm90.plan import Plan
    >>> from pallas_gemm.problem import Problem
    >>> problem = Problem.flat(
    ...   m=4096, n=4096, k=4096, dtype="bfloat16", out_dtype="bfloat16")
    >>> plan = Plan.of(problem, Config(block_m=128, block_n=256, stages=4))
    >>> plan.grid, plan.share, plan.slabs
    ((32, 16), (64, 256), 64)
  """

  @staticmethod
  def of(problem: Problem, config: Config) -> "Plan":
    """The plan on the GPU that a trace made now is for."""
    return _plan(problem, config, hardware.current())

  @functools.cached_property
  def slab_bytes(self) -> int:
    """Bytes of one stage of the ring."""
    p, cfg = self.problem, self.config
    a = layout.bytes_of(cfg.block_m * cfg.block_k, p.a.dtype)
    b = layout.bytes_of(cfg.block_n * cfg.block_k, p.b.dtype)
    return a + b * self.products

  @property
  def b_slab_shape(self) -> tuple[int, int]:
    """Rows and columns of a slab of B, as it is stored."""
    shape = self.config.block_k, self.config.block_n
    return shape[::-1] if self.problem.b.k_last else shape

  @functools.cached_property
  def buffers(self) -> int:
    """Subtiles of a consumer in shared memory: one fills while others leave.

    By rows one is stored with the last columns of the one before.
    """
    if self.by_rows:
      return 2
    return min(self.config.epilogue_buffers, len(self.subtiles))

  @property
  def stores_zeros(self) -> bool:
    """Whether results of groups along K without rows are stored by TMA.

    Else they are sums of a slab of zeros.
    """
    return self.problem.along == "k" and not self.by_rows

  @functools.cached_property
  def has_bias(self) -> bool:
    return bool(self.problem.epilogue.bias) and self.config.split_k == 1

  @functools.cached_property
  def c_in_place(self) -> bool:
    """Whether a tile of C is loaded to where results are stored from.

    Each subtile of the result then takes the place of what was added to it, and
    all of C has arrived when the accumulators are complete.
    """
    return (
      self.problem.epilogue.c_dtype == self.problem.out_dtype
      and not self.by_elements
      and len(self.subtiles) <= self.config.epilogue_buffers
      and self.has_room_to_defer
    )

  @functools.cached_property
  def c_buffers(self) -> int:
    """Subtiles of C in shared memory: all, or one to read, one to come."""
    if self.pingpong > 1 or self.c_in_place or self.deferred:
      return len(self.subtiles)
    return min(2, len(self.subtiles))

  @functools.cached_property
  def shared(self) -> tuple[Buffer | Barrier, ...]:
    """What a block has in shared memory.

    For a bias there is room in float32, along the longer side of what a
    consumer stores.
    """
    p, cfg = self.problem, self.config
    (rows, width), columns = self.subtile_shape, self.operand_columns
    dtype, consumers = self.stored_dtype, cfg.consumers
    a_tile, b_tile = (cfg.block_m, cfg.block_k), self.b_slab_shape
    a_tile = a_tile if p.a.k_last else a_tile[::-1]
    staged = (consumers, self.buffers, rows, width)
    axes = ("cluster_n",) * (cfg.cluster_n > 1)
    axes += ("cluster_m",) * (cfg.cluster_m > 1)
    found: list[Buffer | Barrier] = [
      _swizzled("a_ring", (cfg.stages, *a_tile), p.a.dtype, columns),
      _swizzled(
        "b_rings", (cfg.stages, *b_tile), p.b.dtype, columns, self.products
      ),
      Barrier("full", 1 + self.products, cfg.stages),
    ]
    if not self.by_elements:
      found.append(_swizzled("staging", staged, dtype, width, self.outputs))
    if self.refills:
      found.append(Barrier("empty", self.readers, cfg.stages, axes))
    if cfg.cluster_k > 1:
      parts = (
        consumers,
        self.products,
        cfg.cluster_k,
        math.prod(self.own_share),
      )
      found.append(Buffer("parts", parts, "float32"))
      found.append(Barrier("parts_sent", 1, consumers, ("cluster_k",)))
    for name, moved, count in zip(
      ("raw_a", "raw_b"), self.moved_tiles, (1, self.products)
    ):
      if moved:
        beside = layout.elements_in(hardware.VECTOR_BYTES, p.a.dtype)
        shape = self.slabs_held, moved.rows, moved.columns + beside
        found.append(Buffer(name, shape, p.a.dtype, count=count))
    if self.b_by_moves:
      height, across = self.chunk_shape
      across += layout.elements_in(hardware.VECTOR_BYTES, p.b.dtype)
      shape = _CHUNKS_HELD, height, across
      found.append(Buffer("raw", shape, p.b.dtype))
    if p.along == "m" and not self.by_rows:
      # Not swizzled, so that rows are stored in any number.
      found.append(Buffer("partial_staging", (consumers, rows, width), dtype))
    if p.along == "k":
      copies = 1 + len(layout.last_slab_copies(cfg.block_k))
      copies *= 1 + self.products
      found.append(Barrier("last_full", copies, cfg.stages))
      if self.stores_zeros:
        found.append(_swizzled("zeros", (rows, width), dtype, width))
    if self.has_bias:
      # TMA writes to multiples of 128 bytes.
      along = round_up(max(self.own_share), 64)
      found.append(Buffer("bias", (consumers, along), "float32"))
      found.append(Barrier("bias_loaded", 1, consumers))
    if self.has_c:
      ahead = (consumers, self.c_buffers, rows, width)
      if not self.c_in_place:
        found.append(_swizzled("c", ahead, p.epilogue.c_dtype, width))
      found.append(Barrier("c_loaded", 1, consumers * self.c_buffers))
    return tuple(found)

  @functools.cached_property
  def chunk_shape(self) -> tuple[int, int]:
    """Rows and columns of B that threads copy, and move, at a time.

    Of a warp as many rows, a power of two, as its lanes can move: a lane has
    what lies of a row in one swizzle atom.
    """
    rows, columns = self.b_slab_shape
    return self._chunk_rows(rows, columns), columns

  def _chunk_rows(self, rows: int, columns: int) -> int:
    """Of that many rows and columns, rows that threads move at a time.

    As many as four warps have lanes for: 112 rows in one go, and not in seven
    of 16 each, of which each waits for shared memory anew.
    """
    most = 4 * (32 // cdiv(columns, self.operand_columns))
    return max(x for x in range(4, most + 1, 4) if rows % x == 0)

  @property
  def chunks(self) -> int:
    """Chunks of a slab of B."""
    return self.b_slab_shape[0] // self.chunk_shape[0]

  @functools.cached_property
  def moved_tiles(self) -> tuple[MovedTile | None, MovedTile | None]:
    """What threads move of a slab of A, and of each B; None where TMA loads."""
    p, cfg = self.problem, self.config
    sides = (p.m, cfg.block_m, p.a), (p.n, cfg.block_n, p.b)
    a, b = (
      self._moved_tile(size, block, operand) if by_moves else None
      for (size, block, operand), by_moves in zip(sides, self.by_moves)
    )
    return a, b

  def _moved_tile(self, size: int, block: int, operand: Operand) -> MovedTile:
    atom, block_k = self.operand_columns, self.config.block_k
    rows, copied = min(block, round_up(size, ATOM_ROWS)), block_k
    if not operand.k_last:
      rows, copied = block_k, rows
    columns = round_up(copied, atom)
    swizzle = layout.bytes_of(atom, operand.dtype)
    chunk = self._chunk_rows(rows, columns)
    return MovedTile(rows, columns, copied, chunk, swizzle)

  @property
  def slabs_held(self) -> int:
    """Slabs that threads have on their way: all, or as many as find room."""
    stages = self.config.stages
    return self.slabs if self.slabs <= stages else max(1, stages - 1)

  @functools.cached_property
  def shared_bytes(self) -> int:
    """Shared memory of a block, in bytes; a little more than it takes."""
    return _SHARED_SLACK + sum(
      layout.bytes_of(math.prod(x.shape) * (x.count or 1), x.dtype)
      for x in self.shared
      if isinstance(x, Buffer)
    )

  def scratch_types(self, bias_dtype=None) -> dict[str, Any]:
    """`shared` as Pallas wants it, by name.

    Args:
      bias_dtype: of the bias, of which the problem says only the side.
    """
    found: dict[str, Any] = {}
    for item in self.shared:
      if isinstance(item, Barrier):
        found[item.name] = _barrier_type(item)
        continue
      if item.name == "bias":
        along = round_up(self.own_share[self.problem.epilogue.bias == "n"], 64)
        shape = (self.config.consumers, along)
        item = item._replace(shape=shape, dtype=bias_dtype)
      kind = _buffer_type(item)
      found[item.name] = kind if item.count is None else [kind] * item.count
    return found

  @functools.cached_property
  def loads_pairs(self) -> bool:
    """Whether two slabs are asked for at a time, once two slots are empty.

    A slab of weights that are stored along K is 128 bytes of each row. Memory
    gives the next 128 sooner if they are asked for at once: 32 groups of 8 to
    64 rows, 2048 x 4096, 191 to 220 us -> 183 to 207, of 128 rows 240 -> 219
    (H100). But a ring of four slabs then holds fewer ahead. Where the tensor
    cores bind, or a group has several row tiles, which must not lose each other
    for the L2 to read its weights once, that is 2 to 8 % slower: 192 rows 230
    -> 236 us. Of two slots the one would wait for a slab that is released when
    the next has come.
    """
    p, cfg, gpu = self.problem, self.config, self.gpu
    if p.along != "m" or not p.b.k_last or self.b_last_apart:
      return False
    if cfg.stages // self.pingpong < 3:
      return False
    rows = max(1.0, p.m / p.groups.count)
    if rows > _ROWS_OF_ONE_TILE * cfg.block_m:
      return False
    # What reading a group's weights takes, over what multiplying by them does.
    reading = layout.bytes_of(1, p.b.dtype) / gpu.dram_bytes_per_s
    return reading > _TO_LOAD_PAIRS * 2 * rows / gpu.bf16_flops


_plan = functools.lru_cache(maxsize=1024)(Plan)


def _swizzled(
  name: str,
  shape: tuple[int, ...],
  dtype: str,
  columns: int,
  count: int | None = None,
) -> Buffer:
  """Room for tiles [..., rows, columns], free of bank conflicts."""
  columns = layout.atom_columns(min(columns, shape[-1]), dtype)
  return Buffer(name, shape, dtype, layout.bytes_of(columns, dtype), count)


def _buffer_type(buffer: Buffer) -> plgpu.SMEM:
  dtype = jnp.dtype(buffer.dtype)
  if not buffer.swizzle:
    return plgpu.SMEM(buffer.shape, dtype)
  columns = layout.elements_in(buffer.swizzle, buffer.dtype)
  return plgpu.SMEM(
    buffer.shape,
    dtype,
    transforms=(
      plgpu.TilingTransform((ATOM_ROWS, columns)),
      plgpu.SwizzleTransform(buffer.swizzle),
    ),
  )


def _barrier_type(barrier: Barrier):
  count = {"num_arrivals": barrier.arrivals, "num_barriers": barrier.count}
  if barrier.over:
    return plgpu.ClusterBarrier(collective_axes=barrier.over, **count)
  return plgpu.Barrier(**count)
