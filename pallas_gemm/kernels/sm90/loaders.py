"""Loaders: what fills slots of the ring, and what that takes of a block.

TMA addresses rows that start at multiples of 16 bytes. Other operands XLA
copies into padded ones before the kernel (`layout`), or threads of the producer
load them, by cp.async. Likewise XLA makes planes of float32, or these threads
do, of slabs that TMA loads. A loader says which operands threads load, their
registers, the shared memory that is theirs and why it can't load what a config
asks it to; `by_threads` has how they fill a slot. Another way to load is a
class here, one there, and what chooses it: `of`.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.layout import ATOM_ROWS, cdiv, round_up
from pallas_gemm.kernels.sm90.tiling import Tiling
from pallas_gemm.problem import Operand

# Chunks of B in shared memory that threads have copied: one is shifted while
# one comes. 60 groups of 136 rows, 4096 x 1407, take 331 us with two and 329
# with three, which take room from the ring (H100).
_CHUNKS_HELD = 2

# Slabs in float32 that are there to be split, or on their way: 64 groups of 128
# rows, 4096 x 2048, take 1729 us with one, 1600 with two or three (H200). Rows
# that a warpgroup splits at a time.
_SPLIT_AHEAD, SPLIT_ROWS = 2, 16

# Registers of a thread of the producer and of one of one, two or three
# consumers, of the 65536 of an SM.
Registers = dict[int, tuple[int, int]]


class Buffer(NamedTuple):
  """What lies in shared memory under one name.

  Attributes:
    shape, dtype: of each buffer.
    swizzle: bytes of a swizzled row; 0 for plain rows.
    count: buffers; None for one that is no list.
  """

  shape: tuple[int, ...]
  dtype: str
  swizzle: int = 0
  count: int | None = None


class ShiftedTile(NamedTuple):
  """What threads copy and shift of a slab.

  Attributes:
    rows: of the slab as it is stored, those that may lie in the matrix.
    columns: likewise, in whole swizzle atoms.
    copied: of the columns, those that may lie in the matrix.
    chunk: rows that are shifted at a time.
    swizzle: bytes of a row of the slab's atoms.
  """

  rows: int
  columns: int
  copied: int
  chunk: int
  swizzle: int

  @property
  def chunks(self) -> int:
    return self.rows // self.chunk


@dataclasses.dataclass(frozen=True)
class Loader:
  """Loads all by TMA.

  Attributes:
    tiling: of what is loaded.
  """

  tiling: Tiling
  # 128 * (24 + 2 * 240) = 64512 and 128 * (32 + 3 * 160) = 65536.
  registers: ClassVar[Registers] = {1: (24, 240), 2: (24, 240), 3: (32, 160)}

  @property
  def operands(self) -> tuple[bool, bool]:
    """Whether threads load A, and each B."""
    return False, False

  @property
  def buffers(self) -> dict[str, Buffer]:
    """What else lies in shared memory than the ring, by name."""
    return {}

  @property
  def slabs_by_tma(self) -> int:
    """Slabs that TMA loads for threads, all that have room in `buffers`."""
    return 0

  @property
  def reads_past_rows(self) -> bool:
    """Whether threads read what lies behind the end of a row."""
    return any(self.operands) and not self.slabs_by_tma

  @property
  def why_not(self) -> str | None:
    """None, or why it can't load what the config says."""
    return None


class Weights(Loader):
  """Loads B of groups of rows by threads."""

  @property
  def operands(self) -> tuple[bool, bool]:
    return False, True


class Copies(Weights):
  """By cp.async of 8 bytes, which needs no registers."""

  # 128 * (56 + 2 * 224) = 64512.
  registers: ClassVar[Registers] = {1: (80, 240), 2: (56, 224), 3: (56, 152)}


class Shifts(Weights):
  """By cp.async of 16 bytes, which are shifted then."""

  # 128 * (104 + 2 * 200) = 64512.
  registers: ClassVar[Registers] = {1: (168, 240), 2: (104, 200), 3: (104, 136)}

  @functools.cached_property
  def tile(self) -> ShiftedTile:
    """What is shifted of a slab of B."""
    t = self.tiling
    return _shifted_tile(t, t.b_slab_shape, t.b_slab_shape[1], t.problem.b)

  @property
  def buffers(self) -> dict[str, Buffer]:
    tile, dtype = self.tile, self.tiling.problem.b.dtype
    width = tile.copied + layout.elements_in(hardware.VECTOR_BYTES, dtype)
    return {"raw": Buffer((_CHUNKS_HELD, tile.chunk, width), dtype)}


class SlabShifts(Loader):
  """Loads A, each B or all of dense products, likewise, slabs at a time."""

  # With 104, addresses of A's and B's rows would spill.
  registers: ClassVar[Registers] = {1: (168, 240), 2: (152, 176), 3: (128, 128)}

  @functools.cached_property
  def operands(self) -> tuple[bool, bool]:
    """Those that TMA can't address, if they are not transposed before."""
    p = self.tiling.problem
    a, b = (
      not is_transposed and not layout.is_addressable(columns, operand.dtype)
      for (_, columns), operand, is_transposed in zip(
        layout.operand_shapes(p), (p.a, p.b), self.tiling.transposed
      )
    )
    return a, b

  @functools.cached_property
  def tiles(self) -> tuple[ShiftedTile | None, ShiftedTile | None]:
    """What is shifted of a slab of A, and of each B."""
    p, cfg = self.tiling.problem, self.tiling.config
    sides = (p.m, cfg.block_m, p.a), (p.n, cfg.block_n, p.b)
    a, b = (
      self._tile(size, block, operand) if is_theirs else None
      for (size, block, operand), is_theirs in zip(sides, self.operands)
    )
    return a, b

  def _tile(self, size: int, block: int, operand: Operand) -> ShiftedTile:
    block_k = self.tiling.config.block_k
    rows, copied = min(block, round_up(size, ATOM_ROWS)), block_k
    if not operand.k_last:
      rows, copied = block_k, rows
    columns = round_up(copied, self.tiling.operand_columns)
    return _shifted_tile(self.tiling, (rows, columns), copied, operand)

  @property
  def slabs_held(self) -> int:
    """Slabs that are on their way: all, or as many as find room."""
    slabs, stages = self.tiling.slabs, self.tiling.config.stages
    return slabs if slabs <= stages else max(1, stages - 1)

  @property
  def buffers(self) -> dict[str, Buffer]:
    dtype = self.tiling.problem.a.dtype
    more = layout.elements_in(hardware.VECTOR_BYTES, dtype)
    counts = (1, self.tiling.problem.products)
    return {
      name: Buffer((self.slabs_held, x.rows, x.columns + more), dtype, 0, count)
      for name, x, count in zip(("raw_a", "raw_b"), self.tiles, counts)
      if x
    }

  @property
  def why_not(self) -> str | None:
    cfg = self.tiling.config
    is_shared = cfg.cluster_m * cfg.cluster_n > 1
    if self.tiling.problem.along or is_shared or cfg.split == "pingpong":
      return "moves has no groups, no cluster of several tiles and no pingpong"
    if self.tiling.problem.a.bits == 8:
      return "moves shifts 16-bit elements, got 8-bit operands"
    if not any(self.operands):
      return "moves is for operands whose rows TMA can't address, got none"
    return None


class Splits(Loader):
  """Makes planes of B's slabs in float32, which TMA loads."""

  # 128 * (56 + 2 * 224) = 64512. Sums of planes take 192.
  registers: ClassVar[Registers] = {1: (80, 240), 2: (56, 224), 3: (32, 160)}

  @property
  def operands(self) -> tuple[bool, bool]:
    return False, True

  @property
  def slabs_by_tma(self) -> int:
    return _SPLIT_AHEAD

  @property
  def buffers(self) -> dict[str, Buffer]:
    t = self.tiling
    shape = self.slabs_by_tma, *t.b_slab_shape
    raw = Buffer(shape, "float32", layout.ATOM_BYTES, t.problem.products)
    return {"raw_b": raw}

  @property
  def why_not(self) -> str | None:
    t, cfg = self.tiling, self.tiling.config
    if t.problem.along == "k" or cfg.swap_ab or t.pingpong > 1:
      return "moves makes no planes of groups along K, swap_ab and pingpong"
    is_shared = cfg.cluster_m * cfg.cluster_n > 1
    if t.problem.b.planes == 1 or is_shared:
      return "moves makes planes of float32 B, in no cluster of several tiles"
    _, shape = layout.operand_shapes(t.problem)
    columns = layout.elements_in(layout.ATOM_BYTES, "float32")
    rows, box = t.b_slab_shape
    is_whole = layout.padding(shape, columns, box, "float32") == shape
    if rows % SPLIT_ROWS:
      return f"moves splits a multiple of {SPLIT_ROWS} columns, got {rows}"
    if t.transposed[1] or t.tiles_overlap or not is_whole:
      return (
        f"moves makes planes of what TMA can address, got rows of {shape[1]}"
      )
    return None


def of(tiling: Tiling) -> Loader:
  """The loader of a kernel."""
  if tiling.config.moves:
    return (Splits if tiling.problem.planes > 1 else SlabShifts)(tiling)
  return _of_weights(tiling) if tiling.problem.along == "m" else Loader(tiling)


def _of_weights(tiling: Tiling) -> Loader:
  """The loader of weights of groups, see `by_threads`."""
  p, cfg = tiling.problem, tiling.config
  _, (_, columns) = layout.operand_shapes(p)
  is_addressable = layout.is_addressable(columns, p.b.dtype)
  if not tiling.b_would_be_padded or is_addressable or p.b.bits == 8:
    return Loader(tiling)
  # All that is loaded lies in B: whole tiles of rows, or columns that run on
  # into the next row.
  is_inside = p.n % cfg.block_n == 0 if p.b.k_last else p.n >= cfg.block_n
  if not is_inside or tiling.pingpong > 1 or cfg.cluster_n > 1:
    return Loader(tiling)
  is_in_words = layout.bytes_of(columns, p.b.dtype) % 8 == 0
  return (Copies if is_in_words and not p.b.k_last else Shifts)(tiling)


def _shifted_tile(
  tiling: Tiling, shape: layout.Shape, copied: int, operand: Operand
) -> ShiftedTile:
  """Of that many rows and columns.

  Of a warp as many rows are shifted at a time, a divisor of all, as its lanes
  can: a lane has what lies of a row in one swizzle atom. So 112 rows in one go,
  and not in seven of 16 each, of which each waits for shared memory anew.
  """
  (rows, columns), atom = shape, tiling.operand_columns
  most = 4 * (32 // cdiv(columns, atom))
  chunk = max(x for x in range(4, most + 1, 4) if rows % x == 0)
  swizzle = layout.bytes_of(atom, operand.dtype)
  return ShiftedTile(rows, columns, copied, chunk, swizzle)
