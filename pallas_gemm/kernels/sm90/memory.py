"""What a block has on its SM: registers, and in shared memory the ring.

Also subtiles of results, of C and of a bias on their way, and all barriers. How
many of a consumer's results wait in registers is said here too.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax.numpy as jnp

from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.layout import ATOM_ROWS, round_up
from pallas_gemm.kernels.sm90.loaders import Buffer
from pallas_gemm.kernels.sm90.matrices import Matrices
from pallas_gemm.kernels.sm90.tiling import (
  BLOCKS_COPIED,
  SCALES_AT_ONCE,
  THREADS,
  WGMMA_ROWS,
  Tiling,
)

# Barriers; what Mosaic GPU aligns each buffer to.
_SHARED_SLACK, _SHARED_ALIGNMENT = 1024, 1024
# Registers of a consumer that hold neither accumulators nor results.
_OTHER_REGISTERS = 40
# More, where sums are scaled before C is added; of groups along K in 8 bits or
# in planes, of which tiles of 128 x 96 would spill.
_SCALE_REGISTERS, _SLAB_REGISTERS = 44, 16


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
  """Registers, shared memory and barriers of a block."""

  tiling: Tiling
  matrices: Matrices

  @property
  def registers(self) -> tuple[int, int]:
    """Registers of a thread of the producer, and of one of a consumer."""
    return self.matrices.loader.registers[self.tiling.config.consumers]

  @functools.cached_property
  def slab_bytes(self) -> int:
    """Bytes of one stage of the ring."""
    p, cfg = self.tiling.problem, self.tiling.config
    a = layout.bytes_of(cfg.block_m * cfg.block_k, p.a.dtype)
    b = layout.bytes_of(cfg.block_n * cfg.block_k, p.b.dtype)
    of_a, of_b = (4 * x * p.has_blocks for x in self._scales)
    return a * p.a.planes + of_a + (b * p.b.planes + of_b) * p.products

  @property
  def _scales(self) -> tuple[int, int]:
    """Those of a slab's rows of A and columns of B, or of their few blocks.

    TMA writes to multiples of 128 bytes.
    """
    return tuple(round_up(x, 32) for x in self.scales_copied)

  @property
  def scales_copied(self) -> tuple[int, int]:
    """Scales of A, and of each B, that come with a slab."""
    p, cfg = self.tiling.problem, self.tiling.config
    of_a = cfg.block_m + SCALES_AT_ONCE * (p.along == "m")
    return of_a, cfg.block_n if p.has_lines else BLOCKS_COPIED

  @functools.cached_property
  def buffers(self) -> int:
    """Subtiles of a consumer in shared memory: one fills while others leave.

    By rows one is stored with the last columns of the one before.
    """
    if self.tiling.by_rows:
      return 2
    return min(self.tiling.config.epilogue_buffers, len(self.tiling.subtiles))

  @property
  def stores_zeros(self) -> bool:
    """Whether results of groups along K without rows are stored by TMA.

    Else they are sums of a slab of zeros.
    """
    return self.tiling.problem.along == "k" and not self.tiling.by_rows

  @functools.cached_property
  def _subtiles_with_room(self) -> int:
    """A consumer's subtiles that find room in registers while they wait.

    None by rows: 60 groups of 136 along K, 4096 x 1407, take 377 us if none
    waits, 422 if half do (H100).
    """
    tiling, p, cfg = self.tiling, self.tiling.problem, self.tiling.config
    directly = tiling.by_rows or tiling.by_elements
    if tiling.pingpong > 1 or cfg.split_k > 1 or directly:
      return 0
    accumulators = cfg.block_m * cfg.block_n // (THREADS * cfg.consumers)
    accumulators *= p.products * tiling.sums
    room = self.registers[1] - _OTHER_REGISTERS - accumulators
    if p.epilogue.c_dtype and (p.a.scale or p.b.scale):
      room -= _SCALE_REGISTERS
    if p.has_whole_slabs or (p.along == "k" and p.has_small_apart):
      room -= _SLAB_REGISTERS
    elements = WGMMA_ROWS * cfg.epilogue_n * tiling.outputs
    size = layout.bytes_of(elements, p.out_dtype)
    return max(0, min(len(tiling.subtiles), room * 4 * THREADS // size))

  @functools.cached_property
  def has_room_to_defer(self) -> bool:
    """Whether all results find room during the next tile."""
    return self._subtiles_with_room == len(self.tiling.subtiles)

  @functools.cached_property
  def stored_at_once(self) -> float:
    """The part of a consumer's results that finds no room to wait.

    All of them, if less than half would wait, or of results with C not all.
    """
    p, count = self.tiling.problem, len(self.tiling.subtiles)
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
    if self.tiling.work_tiles_of_a_block == 1 or self.stored_at_once == 1:
      return 0
    return self._subtiles_with_room

  @functools.cached_property
  def c_in_place(self) -> bool:
    """Whether a tile of C is loaded to where results are stored from.

    Each subtile of the result then takes the place of what was added to it, and
    all of C has arrived when the accumulators are complete.
    """
    return (
      self.tiling.problem.epilogue.c_dtype == self.tiling.problem.out_dtype
      and not self.tiling.by_elements
      and len(self.tiling.subtiles) <= self.tiling.config.epilogue_buffers
      and self.has_room_to_defer
    )

  @functools.cached_property
  def c_buffers(self) -> int:
    """Subtiles of C in shared memory: all, or one to read, one to come."""
    if self.tiling.pingpong > 1 or self.c_in_place or self.deferred:
      return len(self.tiling.subtiles)
    return min(2, len(self.tiling.subtiles))

  @functools.cached_property
  def shared(self) -> dict[str, Any]:
    """Shared memory and barriers by name, see `block.Shared`."""
    tiling, matrices = self.tiling, self.matrices
    p, cfg = tiling.problem, tiling.config
    (rows, width), columns = matrices.subtile_shape, tiling.operand_columns
    dtype, consumers, stages = matrices.stored_dtype, cfg.consumers, cfg.stages
    a_tile = (cfg.block_m, cfg.block_k)
    a_ring = stages, *(a_tile if p.a.k_last else a_tile[::-1])
    b_ring = stages, *tiling.b_slab_shape
    matrices_b = p.products * p.b.planes
    loads = p.a.planes + matrices_b + (1 + p.products) * p.has_blocks
    found: dict[str, Any] = {
      "a_rings": _swizzled(a_ring, p.a.dtype, columns, p.a.planes),
      "b_rings": _swizzled(b_ring, p.b.dtype, columns, matrices_b),
      "full": _barriers(loads, stages),
    }
    if p.has_blocks:
      of_a, of_b = ((stages, x) for x in self._scales)
      found["scales_a"] = Buffer(of_a, "float32")
      found["scales_b"] = Buffer(of_b, "float32", count=p.products)
    if not tiling.by_elements:
      staged = consumers, self.buffers, rows, width
      found["staging"] = _swizzled(staged, dtype, width, tiling.outputs)
    if tiling.refills:
      axes = [x for x in ("cluster_n", "cluster_m") if getattr(cfg, x) > 1]
      found["empty"] = _barriers(consumers // tiling.pingpong, stages, *axes)
    if cfg.cluster_k > 1:
      stored = math.prod(tiling.stored_tile)
      parts = consumers, p.products, cfg.cluster_k, stored
      found["parts"] = Buffer(parts, "float32")
      found["parts_sent"] = _barriers(1, consumers, "cluster_k")
    found |= matrices.loader.buffers
    if slabs := matrices.loader.slabs_by_tma:
      found["raw_full"] = _barriers(p.products, slabs)
    if p.along == "m" and not tiling.by_rows:
      # Not swizzled, so that rows are stored in any number.
      found["partial_staging"] = Buffer((consumers, rows, width), dtype)
    if p.along == "k" and not p.has_whole_slabs:
      copies = 1 + len(layout.last_slab_copies(cfg.block_k))
      found["last_full"] = _barriers(copies * loads, stages)
    if self.stores_zeros:
      found["zeros"] = _swizzled((rows, width), dtype, width)
    if p.epilogue.bias and cfg.split_k == 1:
      # TMA writes to multiples of 128 bytes.
      side = round_up(tiling.stored_tile[p.epilogue.bias == "n"], 64)
      found["bias"] = Buffer((consumers, side), "float32")
      found["bias_loaded"] = _barriers(1, consumers)
    if matrices.has_c:
      ahead = consumers, self.c_buffers, rows, width
      if not self.c_in_place:
        found["c"] = _swizzled(ahead, p.epilogue.c_dtype, width)
      found["c_loaded"] = _barriers(1, consumers * self.c_buffers)
    return found

  @functools.cached_property
  def shared_bytes(self) -> int:
    """Shared memory of a block, in bytes; a little more than it takes."""
    buffers = [x for x in self.shared.values() if isinstance(x, Buffer)]
    sizes = [layout.bytes_of(math.prod(x.shape), x.dtype) for x in buffers]
    counts = [x.count or 1 for x in buffers]
    each = [round_up(x, _SHARED_ALIGNMENT) for x in sizes]
    return _SHARED_SLACK + sum(map(operator.mul, each, counts))

  def scratch_types(self, bias_dtype=None) -> dict[str, Any]:
    """`shared` as Pallas wants it.

    Args:
      bias_dtype: of the bias, for which there is room in float32.
    """
    found: dict[str, Any] = dict(self.shared)
    if "bias" in found:
      found["bias"] = found["bias"]._replace(dtype=bias_dtype)
    for name, item in found.items():
      if isinstance(item, Buffer):
        kind = _buffer_type(item)
        found[name] = kind if item.count is None else [kind] * item.count
    return found


def _swizzled(
  shape: tuple[int, ...], dtype: str, columns: int, count: int | None = None
) -> Buffer:
  """Room for tiles [..., rows, columns], free of bank conflicts."""
  columns = layout.atom_columns(min(columns, shape[-1]), dtype)
  return Buffer(shape, dtype, layout.bytes_of(columns, dtype), count)


def _barriers(arrivals: int, count: int, *axes: str):
  """Barriers at which blocks along the cluster's axes arrive too."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  sizes = {"num_arrivals": arrivals, "num_barriers": count}
  if axes:
    return plgpu.ClusterBarrier(collective_axes=axes, **sizes)
  return plgpu.Barrier(**sizes)


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
