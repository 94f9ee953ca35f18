"""Everything that follows from a problem and a config, said once.

A `Plan` is arithmetic: how the problem is cut up (`tiling`), how its matrices
lie in global memory (`matrices`) and, here, what a block has in shared memory.
The kernel, the rules on configs (`legal`) and the cost model read it.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import ATOM_ROWS, round_up
from pallas_gemm.kernels.sm90.loaders import Buffer
from pallas_gemm.kernels.sm90.matrices import Matrices
from pallas_gemm.kernels.sm90.tiling import THREADS, WGMMA_K_BYTES, WGMMA_ROWS
from pallas_gemm.problem import Problem

# Barriers and the alignment of what lies in shared memory.
_SHARED_SLACK = 1024
# Registers of a consumer that hold neither accumulators nor results.
_OTHER_REGISTERS = 40
# wgmmas in an unrolled lap of the ring; the descriptors of more would spill.
_UNROLLED_WGMMAS = 16
# A consumer's accumulators up to which the descriptors of a lap have room
# with them and results that wait to be stored.
_MOST_ACCUMULATORS_IF_UNROLLED = 64 * 128
# Slabs are asked for in pairs where reading weights takes so many times as long
# as multiplying by them, up to 147 rows a group on an H100; and where a group's
# rows are so many times a tile's at most, so that most groups have one tile.
_TO_LOAD_PAIRS, _ROWS_OF_ONE_TILE = 2.0, 1.25


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


@dataclasses.dataclass(eq=False)
class Plan(Matrices):
  """A tiling, matrices, and what a block has in shared memory.

  `Plan.of` looks up one that exists; `Plan` makes one, which is faster where
  dozens are weighed once.

  Where a config swaps operands, all of it is of the transposed `problem`.
  """

  @staticmethod
  def of(problem: Problem, config: Config) -> "Plan":
    """The plan on the GPU that a trace made now is for."""
    return _plan(problem, config, hardware.current())

  @property
  def registers(self) -> tuple[int, int]:
    """Registers of a thread of the producer, and of one of a consumer."""
    return self.loader.registers[self.config.consumers]

  @functools.cached_property
  def slab_bytes(self) -> int:
    """Bytes of one stage of the ring."""
    p, cfg = self.problem, self.config
    a = layout.bytes_of(cfg.block_m * cfg.block_k, p.a.dtype)
    b = layout.bytes_of(cfg.block_n * cfg.block_k, p.b.dtype)
    return a + b * self.products

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
  def _subtiles_with_room(self) -> int:
    """A consumer's subtiles that find room in registers while they wait.

    None by rows: 60 groups of 136 along K, 4096 x 1407, take 377 us if none
    waits, 422 if half do (H100).
    """
    cfg = self.config
    directly = self.by_rows or self.by_elements
    if self.pingpong > 1 or cfg.split_k > 1 or directly:
      return 0
    accumulators = cfg.block_m * cfg.block_n // (THREADS * cfg.consumers)
    room = self.registers[1] - _OTHER_REGISTERS
    room -= accumulators * self.products
    elements = WGMMA_ROWS * cfg.epilogue_n * self.outputs
    size = layout.bytes_of(elements, self.problem.out_dtype)
    return max(0, min(len(self.subtiles), room * 4 * THREADS // size))

  @functools.cached_property
  def has_room_to_defer(self) -> bool:
    """Whether all results find room during the next tile."""
    return self._subtiles_with_room == len(self.subtiles)

  @functools.cached_property
  def stored_at_once(self) -> float:
    """The part of a consumer's results that finds no room to wait.

    All of them, if less than half would wait, or of results with C not all.
    """
    p, count = self.problem, len(self.subtiles)
    if p.epilogue.c_dtype not in (None, p.out_dtype):
      return 1.0
    least = count if p.epilogue.c_dtype else count / 2
    waiting = self._subtiles_with_room
    return 1 - waiting / count if 0 < waiting >= least else 1.0

  @functools.cached_property
  def deferred(self) -> int:
    """Subtiles of a consumer that wait until the next work tile is under way.

    The last ones, in registers. None if no work tile follows.
    """
    if self.work_tiles_of_a_block == 1 or self.stored_at_once == 1:
      return 0
    return self._subtiles_with_room

  @functools.cached_property
  def whole_laps(self) -> bool:
    """Whether work tiles are whole laps of the ring, worth unrolling."""
    p, cfg = self.problem, self.config
    if p.along == "k" or self.pingpong > 1:
      return False  # groups differ in how many slabs they have
    rows, columns = self.warpgroup_tile
    if self.deferred and rows * columns > _MOST_ACCUMULATORS_IF_UNROLLED:
      return False
    k_steps = layout.bytes_of(cfg.block_k, p.a.dtype) // WGMMA_K_BYTES
    lap = cfg.stages * (rows // WGMMA_ROWS) * k_steps * self.products
    return self.slabs % cfg.stages == 0 and lap <= _UNROLLED_WGMMAS

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
        math.prod(self.stored_tile),
      )
      found.append(Buffer("parts", parts, "float32"))
      found.append(Barrier("parts_sent", 1, consumers, ("cluster_k",)))
    found += self.loader.buffers
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
      along = round_up(max(self.stored_tile), 64)
      found.append(Buffer("bias", (consumers, along), "float32"))
      found.append(Barrier("bias_loaded", 1, consumers))
    if self.has_c:
      ahead = (consumers, self.c_buffers, rows, width)
      if not self.c_in_place:
        found.append(_swizzled("c", ahead, p.epilogue.c_dtype, width))
      found.append(Barrier("c_loaded", 1, consumers * self.c_buffers))
    return tuple(found)

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
        along = round_up(
          self.stored_tile[self.problem.epilogue.bias == "n"], 64
        )
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


def _buffer_type(buffer: Buffer) -> Any:
  from jax.experimental.pallas import mosaic_gpu as plgpu

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


def _barrier_type(barrier: Barrier) -> Any:
  from jax.experimental.pallas import mosaic_gpu as plgpu

  count = {"num_arrivals": barrier.arrivals, "num_barriers": barrier.count}
  if barrier.over:
    return plgpu.ClusterBarrier(collective_axes=barrier.over, **count)
  return plgpu.Barrier(**count)
