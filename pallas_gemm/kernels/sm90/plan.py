"""Everything that follows from a problem and a config, said once.

A `Plan` is arithmetic: how the problem is cut up (`tiling`) and, here, what the
kernel has in shared and in global memory. The kernel, the rules on configs
(`legal`) and the cost model read it.
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
from pallas_gemm.kernels.sm90.layout import (
  ATOM_BYTES,
  ATOM_ROWS,
  Shape,
  round_up,
)
from pallas_gemm.kernels.sm90.tiling import WGMMA_ROWS, Tiling
from pallas_gemm.problem import Operand, Problem

# Barriers and the alignment of what lies in shared memory.
_SHARED_SLACK = 1024
# Slabs are asked for in pairs where reading weights takes so many times as long
# as multiplying by them, up to 147 rows a group on an H100; and where a group's
# rows are so many times a tile's at most, so that most groups have one tile.
_TO_LOAD_PAIRS, _ROWS_OF_ONE_TILE = 2.0, 1.25


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


@dataclasses.dataclass(eq=False)
class Plan(Tiling):
  """A tiling and what the kernel has in memory.

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

  # Shared memory.

  @functools.cached_property
  def slab_bytes(self) -> int:
    """Bytes of one stage of the ring."""
    p, cfg = self.problem, self.config
    a = layout.bytes_of(cfg.block_m * cfg.block_k, p.a.dtype)
    b = layout.bytes_of(cfg.block_n * cfg.block_k, p.b.dtype)
    return a + b * self.products

  @functools.cached_property
  def stored_dtype(self) -> str:
    """Of what the kernel writes; parts of K are summed in float32."""
    return "float32" if self.config.split_k > 1 else self.problem.out_dtype

  @functools.cached_property
  def subtile_shape(self) -> Shape:
    """Rows and columns of a subtile, as it is stored."""
    return self._stored(WGMMA_ROWS, self.subtile_width)

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
  def has_c(self) -> bool:
    """Whether the kernel adds C; parts of K are added up before that."""
    return bool(self.problem.epilogue.c_dtype) and self.config.split_k == 1

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

    For a bias there is room in float32, along the longer side of a share.
    """
    p, cfg = self.problem, self.config
    (rows, width), columns = self.subtile_shape, self.operand_columns
    dtype, consumers = self.stored_dtype, cfg.consumers
    a_tile, b_tile = (cfg.block_m, cfg.block_k), (cfg.block_k, cfg.block_n)
    a_tile = a_tile if p.a.k_last else a_tile[::-1]
    b_tile = b_tile[::-1] if p.b.k_last else b_tile
    staged = (consumers, self.buffers, rows, width)
    axes = ("cluster_n",) * (cfg.cluster_n > 1)
    axes += ("cluster_m",) * (cfg.cluster_m > 1)
    found: list[Buffer | Barrier] = [
      _swizzled("a_ring", (cfg.stages, *a_tile), p.a.dtype, columns),
      _swizzled(
        "b_rings", (cfg.stages, *b_tile), p.b.dtype, columns, self.products
      ),
      _swizzled("staging", staged, dtype, width, self.outputs),
      Barrier("full", 1 + self.products, cfg.stages),
    ]
    if self.refills:
      found.append(Barrier("empty", self.readers, cfg.stages, axes))
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
      along = round_up(max(self.share), 64)
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
        along = round_up(self.share[self.problem.epilogue.bias == "n"], 64)
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

  # Global memory.

  @functools.cached_property
  def operand_shapes(self) -> tuple[Shape, Shape]:
    """Rows and columns of A and B in memory."""
    return layout.operand_shapes(self.problem)

  @functools.cached_property
  def moved_back(self) -> tuple[bool, bool]:
    """Whether the last tiles along M, and along N, end where the matrix does.

    They then have rows, or columns, of the tiles before: the same bits are
    stored twice. Of an operand that is stored along that side, in rows that are
    no whole number of swizzle atoms, all that is loaded then lies in its rows,
    and it need not be padded: 512 x 50264 x 768 116.5 -> 63.0 us, 1000 x 4096 x
    4096 TN 48.9 -> 43.2. Small operands are, if their rows would start at odd
    multiples of 16 bytes, which TMA reads slowly: 200 x 4096 x 4096 TN 18.1 us
    with a copy of A, 20.3 without (H100).
    """
    p, cfg = self.problem, self.config
    shapes = self.operand_shapes
    if shapes == self._whole_paddings or p.along:
      return False, False
    dtypes = filter(None, (self.stored_dtype, p.epilogue.c_dtype))
    width = max(layout.bytes_of(cfg.epilogue_n, x) for x in dtypes)
    if cfg.tail_columns or p.k % ATOM_ROWS or width > ATOM_BYTES:
      return False, False
    sides = (p.m, cfg.block_m, p.a), (p.n, cfg.block_n, p.b)
    moved = [
      not operand.k_last
      and size >= block
      and layout.is_addressable(size, operand.dtype)
      and shape != padded
      and not self._is_soon_copied(operand, shape)
      for (size, block, operand), shape, padded in zip(
        sides, shapes, self._whole_paddings
      )
    ]
    return moved[0], moved[1]

  def _is_soon_copied(self, operand: Operand, shape: Shape) -> bool:
    """Whether a copy with rows that TMA reads fast costs less than it gains."""
    count = self.problem.matrices(operand) * math.prod(shape)
    is_small = layout.bytes_of(count, operand.dtype) <= layout.SMALL_OPERAND
    return is_small and layout.straddles(shape[1], operand.dtype)

  @functools.cached_property
  def operand_paddings(self) -> tuple[Shape, Shape]:
    """The same as they are handed to the kernel, most of them to TMA."""
    (_, b), (_, b_pad) = self.operand_shapes, self._whole_paddings
    if self.moved_back[1] or self.b_last_apart:
      return self._a_padding, b
    if self.any_column:
      rows = b_pad[0] if self.problem.along == "k" else round_up(b_pad[0], 8)
      b_pad = rows, self.any_column
    return self._a_padding, b_pad

  @functools.cached_property
  def _a_padding(self) -> Shape:
    """Rows and columns of A as it is handed to the kernel."""
    as_it_is = self.moved_back[0]
    return (self.operand_shapes if as_it_is else self._whole_paddings)[0]

  @functools.cached_property
  def any_column(self) -> int | None:
    """Columns of a B of which tiles start inside of swizzle atoms, if they do.

    As many as tiles reach, and none of A's: by that Mosaic GPU is told which
    copies these are (`compat.allow_ragged_copies`). None where tiles start with
    atoms, or B is stored along K.
    """
    if not self.tiles_overlap or self.problem.b.k_last:
      return None
    atom = layout.elements_in(ATOM_BYTES, self.problem.b.dtype)
    columns = round_up(self.read_columns, atom)
    return columns + atom * (columns == self._a_padding[1])

  @functools.cached_property
  def last_slab_shape(self) -> Shape | None:
    """Rows and columns of the copy of B's last slab, if there is one.

    A whole slab of rows that TMA reads fast.
    """
    if not self.b_last_apart:
      return None
    p, block_k = self.problem, self.config.block_k
    if p.b.k_last:
      return p.n, block_k
    columns = round_up(p.n, layout.elements_in(ATOM_BYTES, p.b.dtype))
    return block_k, self.any_column or columns

  @functools.cached_property
  def result_shape(self) -> Shape:
    """Rows and columns of the result, and of C, as they are stored."""
    return self._stored(self.problem.m, self.problem.n)

  @functools.cached_property
  def c_padding(self) -> Shape:
    """Rows and columns of C once TMA can address it."""
    _, width = self.subtile_shape
    shape, dtype = self.result_shape, self.problem.epilogue.c_dtype
    return layout.padding(shape, width, width, dtype)

  @functools.cached_property
  def result_shapes(self) -> list[Shape]:
    """Rows and columns of the matrices that the kernel writes."""
    p = self.problem
    if self.by_rows:
      return [(p.m, p.n)]
    _, width = self.subtile_shape
    _, block = self._stored(self.config.block_m, self.config.block_n)
    shape, dtype = self.result_shape, self.stored_dtype
    return [layout.result_padding(shape, width, block, dtype)] * self.outputs

  @functools.cached_property
  def evicts_results(self) -> bool:
    """Whether the L2 is told to drop results before operands.

    Where results are more than it holds, nobody finds them there. Those of
    groups along K are most of what a kernel moves, and what few reads there are
    among many writes hold memory up: 64 groups of 8 rows, 7168 x 2048, take 679
    us, and 597 without loads; so 651. Dense ones of short sums: 8192 x 8192 x
    256 61.2 -> 55.8 us, 16384 x 8192 x 64 99.9 -> 92.7, of K from 1024 on the
    same; where they are 1.3 times the L2, 32768 x 1024 x 512, 45.6 -> 46.6
    (H100).
    """
    p, cfg = self.problem, self.config
    if p.along == "m" or cfg.split_k > 1 or cfg.tail_columns:
      return False
    matrices = self.outputs * (p.groups.count if p.along else p.batch)
    size = layout.bytes_of(matrices * p.m * p.n, p.out_dtype)
    return size > self.gpu.l2_bytes * (1 if p.along else 2)

  @functools.cached_property
  def prefetches_operands(self) -> bool:
    """Whether the L2 is asked for all operands before anything is written.

    Operands of a quarter of the L2 stay there, since results leave first: 651
    -> 621 us. 25 MB do not: 212 -> 219 (H100).
    """
    if not (self.problem.along and self.evicts_results):
      return False
    shapes = zip(self.operand_paddings, (self.problem.a, self.problem.b))
    sizes = [layout.bytes_of(math.prod(x), y.dtype) for x, y in shapes]
    return 4 * sum(sizes) <= self.gpu.l2_bytes

  @functools.cached_property
  def copied_bytes(self) -> tuple[list[int], list[int]]:
    """Bytes read and written by each copy into, and out of, a padded matrix."""
    p, copied = self.problem, layout.copied_bytes
    (a, b), (a_pad, b_pad) = self.operand_shapes, self.operand_paddings
    is_a, is_b = self.transposed
    into = [copied(a, a_pad, p.matrices(p.a), p.a.dtype, is_a and p.m > 1)]
    of_b = copied(b, b_pad, p.matrices(p.b), p.b.dtype, is_b and p.n > 1)
    if last := self.last_slab_shape:
      of_b = 2 * layout.bytes_of(p.matrices(p.b) * math.prod(last), p.b.dtype)
    into += [of_b] * self.products
    if self.has_c:
      shape, padded = self.result_shape, self.c_padding
      into.append(copied(shape, padded, p.batch, p.epilogue.c_dtype))
    out_of = []
    if self.config.split_k == 1 and not self.by_rows:
      shape, padded = self.result_shape, self.result_shapes[0]
      out_of = [copied(shape, padded, p.batch, p.out_dtype)] * self.outputs
    return list(filter(None, into)), list(filter(None, out_of))

  def _stored(self, rows: int, columns: int) -> Shape:
    """Rows and columns of part of the result, as it is stored."""
    return (columns, rows) if self.config.swap_ab else (rows, columns)


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
