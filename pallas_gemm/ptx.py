"""Instructions that Pallas has no words for, as PTX.

Each function is called by a whole warpgroup. Where there is no GPU the same is
done by operations that Pallas' interpreter knows.
"""

import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
import numpy as np

from pallas_gemm import compat
from pallas_gemm.hardware import LINE_BYTES, SECTOR_BYTES, VECTOR_BYTES

_THREADS = 128
_WARPS, _LANES = 4, 32
# Of 64 rows of accumulators, those that a warp has.
_WARP_ROWS = 16
# Bytes of the vectors that a swizzle permutes, and of a word.
_VECTOR, _WORD = VECTOR_BYTES, 4
# Rows of a swizzle atom.
_ATOM_ROWS = 8


def prefetch(window: Any) -> None:
  """Asks the L2 for a window of a matrix in global memory, a hint.

  The interpreter has no caches.

  Args:
    window: [rows, columns]; each row starts anywhere.
  """
  if not compat.targets_gpu():
    return
  rows, columns = window.shape
  size = columns * jnp.dtype(window.dtype).itemsize
  # A row that starts inside of a line ends inside of one.
  requests = rows * (-(-size // LINE_BYTES) + 1)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def _(_, ref):
    start, pitch = _address(ref), _pitch(ref)
    for first in range(0, requests, _THREADS):
      number = arith.addi(_thread(), _i32(first))
      row = _extended(arith.remui(number, _i32(rows)))
      line = arith.muli(arith.divui(number, _i32(rows)), _i32(LINE_BYTES))
      column = _extended(arith.minui(line, _i32(size - 1)))
      at = arith.addi(_multiply_add(row, pitch, start), column)
      _asm("prefetch.global.L2 [$0];", "l", at)

  _(window)


def copy_async(window: Any, slot: Any, *, swizzle: int) -> None:
  """Starts to copy a tile to shared memory, by cp.async.

  As wide as rows are aligned, 8 or 4 bytes; no row starts inside a word.

  Args:
    window: [rows, columns] of global memory.
    slot: [rows, columns] of shared memory, swizzled.
    swizzle: bytes of a row of the slot's atoms.
  """
  if not compat.targets_gpu():
    slot[...] = window[...]
    return
  rows, columns = window.shape
  row_bytes = columns * jnp.dtype(window.dtype).itemsize
  types = plgpu.RefType(), _swizzled_type(slot, swizzle)

  @plgpu.inline_mgpu(arg_types=types)
  def _(_, window, slot):
    pitch = _pitch(window)
    width = _aligned_to(pitch)
    place = _Place(row_bytes, swizzle)
    pieces = row_bytes // width
    # A power of two, so that no thread divides.
    across = 2 ** math.ceil(math.log2(pieces))
    down = _THREADS // across
    nth = arith.remui(_thread(), _i32(across))
    row = arith.divui(_thread(), _i32(across))
    column = arith.muli(nth, _i32(width))
    here = arith.cmpi(arith.CmpIPredicate.ult, nth, _i32(pieces))
    source = _multiply_add(_extended(row), pitch, _address(window))
    source = arith.addi(source, _extended(column))
    # Rows that are whole atoms apart lie alike: their addresses differ by
    # constants.
    period = max(1, _ATOM_ROWS // down)
    to = _shared_address(slot)
    targets = [
      arith.addi(to, place.of(arith.addi(row, _i32(i * down)), column))
      for i in range(min(period, rows // down))
    ]
    for i in range(rows // down):
      below = i // period * (period * down // _ATOM_ROWS) * place.atoms_bytes
      ahead = i * down * pitch
      _asm(
        f"@$2 cp.async.ca.shared.global [$0+{below}], [$1+{ahead}], {width};",
        "r,l,b",
        targets[i % period],
        source,
        here,
      )
    _asm("cp.async.commit_group;", "")

  _(window, slot)


def copy_rows_async(
  matrix: Any,
  corner: tuple[jax.Array, jax.Array],
  raw: Any,
  *,
  columns: int | None = None,
  to_end: bool = False,
) -> None:
  """Starts to copy rows that start anywhere, by cp.async, 16 bytes at a time.

  Each from the last multiple of 16 bytes on, so that it lies as many bytes
  further in shared memory, up to 15; see `move_rows`. What is copied is
  there when the group is done, that `commit_async` closes.

  A vector that holds the start or the end of a row may hold up to 14 bytes that
  lie before or behind the matrix. None does that holds nothing of a row.

  Args:
    matrix: [rows, columns] of global memory, from a multiple of as many bytes
      on as rows are apart.
    corner: row and column of it where the first row starts.
    raw: [rows, columns and 16 bytes more] of shared memory, not swizzled.
    columns: that are copied, in whole vectors; None are all of `raw`.
    to_end: whether zeros are found behind the matrix; else all rows lie in it.
  """
  size = jnp.dtype(matrix.dtype).itemsize
  rows, width = raw.shape
  columns = width - _VECTOR // size if columns is None else columns
  row, column = corner
  if not compat.targets_gpu():
    at = pl.ds(row, rows), pl.ds(column, columns)
    raw[:, pl.ds(0, columns)] = matrix[at]
    return
  raw_pitch, row_bytes = width * size, columns * size
  vectors, own = row_bytes // _VECTOR, rows // _WARPS
  # A power of two, so that no thread divides.
  across = 2 ** math.ceil(math.log2(vectors))
  down = max(1, _LANES // across)
  height = matrix.shape[0]

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
  def _(_, matrix, corner, raw):
    pitch = _pitch(matrix)
    end = _bytes_behind(_address(matrix), height * pitch)
    warp, lane = _warp_and_lane()
    first = arith.muli(warp, _i32(own))
    nth = arith.remui(lane, _i32(across))
    above = arith.divui(lane, _i32(across))
    row = arith.addi(first, above)
    column = arith.muli(nth, _i32(_VECTOR))
    start = _multiply_add(_extended(row), pitch, _address(corner))
    start = arith.addi(start, _extended(column))
    to = _multiply_add(row, raw_pitch, _shared_address(raw))
    to = arith.addi(to, column)
    is_inside = _less(nth, vectors)
    for i in range(0, own, down):
      here = is_inside
      if own - i < down:
        here = arith.andi(here, _less(above, own - i))
      _asm(
        f"""{{
          .reg .b64 from, left; .reg .b32 size;
          add.s64 from, $1, {i * pitch};
          and.b64 from, from, {-_VECTOR};{_left(to_end)}
          @$2 {_copy_vector(i * raw_pitch, to_end)}
        }}""",
        "r,l,b,l",
        to,
        start,
        here,
        end,
      )
    # The vector in which a row ends that starts inside of one.
    row = arith.addi(first, lane)
    _asm(
      f"""{{
        .reg .b64 from, past, left; .reg .b32 size; .reg .pred here;
        and.b64 past, $1, {_VECTOR - 1};
        setp.ne.and.s64 here, past, 0, $2;
        sub.s64 from, $1, past;
        add.s64 from, from, {row_bytes};{_left(to_end)}
        @here {_copy_vector(row_bytes, to_end)}
      }}""",
      "r,l,b,l",
      _multiply_add(row, raw_pitch, _shared_address(raw)),
      _multiply_add(_extended(row), pitch, _address(corner)),
      _less(lane, own),
      end,
    )

  _(matrix, matrix.at[pl.ds(row, 1), pl.ds(column, 1)], raw)


def _left(to_end: bool) -> str:
  """How many bytes of a vector at `from` lie before `$3`, to `size`."""
  if not to_end:
    return ""
  return f"""
          sub.s64 left, $3, from;
          max.s64 left, left, 0;
          min.s64 left, left, {_VECTOR};
          cvt.u32.u64 size, left;"""


def _copy_vector(offset: int, to_end: bool) -> str:
  """From `from`; of what lies past the end zeros."""
  size = ", size" if to_end else ""
  return f"cp.async.cg.shared.global [$0+{offset}], [from], {_VECTOR}{size};"


def move_rows(
  matrix: Any,
  corner: tuple[jax.Array, jax.Array],
  raw: Any,
  slot: Any,
  first: jax.Array | int,
  *,
  swizzle: int,
  left: jax.Array | None = None,
) -> None:
  """Moves rows from where `copy_rows_async` has put them to a tile.

  Each warp the rows that it has copied, each lane what a row of a swizzle atom
  has, or half of it if there are lanes for that, so that no two of eight lanes
  meet in a bank.

  Args:
    matrix, corner: of the copy.
    raw: [rows, columns and 16 bytes more] of shared memory.
    slot: [more rows, columns or more] of shared memory, swizzled.
    first: the row of it where the first one goes.
    swizzle: bytes of a row of the slot's atoms.
    left: columns, of this corner on, that are moved; behind them are zeros.
      None for all.
  """
  size = jnp.dtype(matrix.dtype).itemsize
  rows, width = raw.shape
  columns = width - _VECTOR // size
  if not compat.targets_gpu():
    found = raw[:, pl.ds(0, columns)]
    if left is not None:
      column = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
      found = jnp.where(column < left, found, jnp.zeros_like(found))
    slot[pl.ds(first, rows), pl.ds(0, columns)] = found
    return
  row_bytes, own = columns * size, rows // _WARPS
  piece = swizzle
  if 2 * own * (row_bytes // swizzle) <= _LANES and swizzle > 2 * _VECTOR:
    piece = swizzle // 2
  ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT
  kinds = ref, ref, _swizzled_type(slot, swizzle), scalar, scalar
  slot_row_bytes = slot.shape[1] * size

  @plgpu.inline_mgpu(arg_types=kinds)
  def _(_, corner, raw, slot, first, left):
    first, left = first.registers.item(), left.registers.item()
    pitch, raw_pitch = _pitch(corner), width * size
    warp, lane = _warp_and_lane()
    row = _multiply_add(warp, own, arith.remui(lane, _i32(own)))
    nth = arith.divui(lane, _i32(own))
    column = arith.muli(nth, _i32(piece))
    source = _multiply_add(row, raw_pitch, _shared_address(raw))
    place = _Place(slot_row_bytes, swizzle)
    target = place.of(arith.addi(row, first), column)
    start = _multiply_add(row, pitch, _truncated(_address(corner)))
    here = _less(nth, row_bytes // piece)
    _asm(
      _move_piece(piece // _VECTOR, math.gcd(pitch, _VECTOR), is_cut),
      "r,r,r,b,r",
      arith.addi(source, column),
      arith.addi(_shared_address(slot), target),
      arith.andi(start, _i32(_VECTOR - 1)),
      here,
      arith.subi(arith.muli(left, _i32(size)), column),
    )

  is_cut = left is not None
  at = matrix.at[pl.ds(corner[0], 1), pl.ds(corner[1], 1)]
  left = jnp.int32(columns) if left is None else left
  _(at, raw, slot, jnp.int32(first), left)


def copy_whole_rows_async(matrix: Any, row: jax.Array, raw: Any) -> None:
  """Starts to copy rows as they follow each other, as `copy_rows_async` does.

  Behind the end of the matrix zeros are found.

  Args:
    matrix: [more rows, columns] of global memory; `row` starts at a multiple of
      16 bytes.
    row: the first one.
    raw: [rows, columns] of shared memory, not swizzled, whole vectors.
  """
  (rows, columns), size = raw.shape, jnp.dtype(matrix.dtype).itemsize
  if not compat.targets_gpu():
    raw[...] = matrix[pl.ds(row, rows), pl.ds(0, columns)]
    return
  vectors, all_bytes = (
    rows * columns * size // _VECTOR,
    matrix.shape[0] * columns,
  )
  all_bytes *= size

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
  def _(_, matrix, start, raw):
    end = _bytes_behind(_address(matrix), all_bytes)
    column = arith.muli(_thread(), _i32(_VECTOR))
    source = arith.addi(_address(start), _extended(column))
    to = arith.addi(_shared_address(raw), column)
    for first in range(0, vectors, _THREADS):
      _asm(
        f"""{{
          .reg .b64 from, left; .reg .b32 size;
          add.s64 from, $1, {first * _VECTOR};{_left(True)}
          @$2 {_copy_vector(first * _VECTOR, True)}
        }}""",
        "r,l,b,l",
        to,
        source,
        _less(_thread(), vectors - first),
        end,
      )

  _(matrix, matrix.at[pl.ds(row, 1), pl.ds(0, 1)], raw)


def turn_rows(raw: Any, slot: Any, *, swizzle: int) -> None:
  """Stores columns of plain rows as rows of a tile.

  Each thread two elements of a row at a time. A warp's lanes take columns one
  after the other, so that few of them meet in a bank.

  Args:
    raw: [columns, rows] of shared memory, not swizzled, of two bytes each.
    slot: [rows or more, columns] of shared memory, swizzled.
    swizzle: bytes of a row of the slot's atoms.
  """
  columns, rows = raw.shape
  if not compat.targets_gpu():
    slot[pl.ds(0, rows)] = raw[...].T
    return
  size = jnp.dtype(raw.dtype).itemsize

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _swizzled_type(slot, swizzle)))
  def _(_, raw, slot):
    warp, lane = _warp_and_lane()
    place = _Place(columns * size, swizzle)
    source, to = _shared_address(raw), _shared_address(slot)
    for first in range(0, rows, _WARPS):
      nth = arith.addi(warp, _i32(first))
      row = arith.remui(arith.addi(nth, lane), _i32(rows))
      for pair in range(0, columns // 2, _LANES):
        column = _multiply_add(lane, 2, _i32(2 * pair))
        at = _multiply_add(column, rows * size, source)
        _asm(
          f"""{{
            .reg .b16 low, high; .reg .b32 both;
            @$2 ld.shared.b16 low, [$0];
            @$2 ld.shared.b16 high, [$0+{rows * size}];
            mov.b32 both, {{low, high}};
            @$2 st.shared.b32 [$1], both;
          }}""",
          "r,r,b",
          _multiply_add(row, size, at),
          arith.addi(to, place.of(row, arith.muli(column, _i32(size)))),
          _less(nth, rows),
        )

  _(raw, slot)


def _move_piece(vectors: int, size: int, is_cut: bool) -> str:
  """What a thread of `move_rows` does: so many vectors, put together of more.

  Operands: $0 the first one, $1 where it goes, $2 the bytes of it that are not
  the row's, $3 whether there are any vectors, $4 the bytes that are moved.
  Swizzled vectors of a row differ by bits of their addresses.

  Args:
    vectors: of a row, in one swizzle atom.
    size: bytes that $2 is a multiple of.
    is_cut: whether there are zeros from byte $4 on.
  """
  words = _VECTOR // _WORD * vectors
  loads = "".join(
    f"""
    @$3 ld.shared.v4.b32 {_words(4 * i)}, [$0+{_VECTOR * i}];"""
    for i in range(vectors + (size < _VECTOR))
  )
  stores = "".join(
    f"""
    xor.b32 to, $1, {_VECTOR * i};
    @$3 st.shared.v4.b32 [to], {_words(4 * i)};"""
    for i in range(vectors)
  )
  cut = "".join(
    f"""
    sub.s32 bits, $4, {_WORD * i};
    max.s32 bits, bits, 0;
    shl.b32 bits, bits, 3;
    bmsk.clamp.b32 bits, 0, bits;
    and.b32 w{i}, w{i}, bits;"""
    for i in range(words if is_cut else 0)
  )
  return f"""{{
    .reg .pred is; .reg .b32 w<{words + 4}>, bits, order, to;
    bar.warp.sync 0xffffffff;{loads}{_moved_by("$2", words, size)}{cut}{stores}
    bar.warp.sync 0xffffffff;
  }}"""


def _words(first: int) -> str:
  return "{" + ", ".join(f"w{first + i}" for i in range(4)) + "}"


def unknown(value: int) -> Any:
  """The number, of which compilers don't know which: of laps of a loop.

  They would unroll it, and what is worked out before it would spill.
  """
  if not compat.targets_gpu():
    return jnp.int32(value)
  splat = plgpu.Layout.WG_SPLAT
  found = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)

  @plgpu.inline_mgpu(return_type=found)
  def number(_):
    x = _asm(f"mov.b32 $0, {value};", "=r", result="i32")
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)

  return number()


def commit_async() -> None:
  """Closes a group of copies that `wait_async` counts, if need be of none."""
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    _asm("cp.async.commit_group;", "")

  _()


def wait_async(count: int) -> None:
  """Waits until all groups of copies but the last `count` are done.

  What the thread itself has copied is there then.
  """
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    _asm(f"cp.async.wait_group {count};", "")

  _()


def wait_for_warpgroup() -> None:
  """Waits until all threads of the warpgroup are here, and what they stored.

  `plgpu.commit_smem` makes that known to TMA too, by a fence that waits until
  stores to global memory have arrived there: 60 groups of 136 rows along K,
  4096 x 1407, take 391 us with that between subtiles, 379 so (H100).
  """
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    utils.warpgroup_barrier()

  _()


def fence_cluster() -> None:
  """Waits until the blocks of a cluster have what a thread has sent them.

  Before a barrier of the cluster is arrived at. Who waits for that needs no
  fence: shared memory is read where it was written to, and by no cache.
  """
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    _asm("fence.acq_rel.cluster;", "~{memory}")

  _()


def send(array: jax.Array, slot: Any, block: int, rows: int) -> None:
  """Stores accumulators in shared memory of another block of the cluster.

  Registers as they are, 16 bytes a thread, for `add_sent` of that block.

  Args:
    array: [rows, columns], float32, as wgmma leaves accumulators.
    slot: where it goes: room for it in the own block's shared memory.
    block: the number of the other one in the cluster, or of the own one.
    rows: of each 64, those that count. Warps that have none do not send.
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
  def _(_, array, slot):
    to = _multiply_add(_thread(), _VECTOR, _shared_address(slot))
    there = f"mapa.shared::cluster.u32 $0, $1, {block};"
    to = _asm(there, "=r,r", to, result="i32")
    warp, _ = _warp_and_lane()
    here = _less(warp, -(-rows // _WARP_ROWS))
    words = _words_of(array.registers)
    for i in range(0, len(words), 4):
      store = "@$5 st.shared::cluster.v4.f32 [$0+%d], {$1, $2, $3, $4};"
      store %= i // 4 * _THREADS * _VECTOR
      _asm(store, "r,f,f,f,f,b", to, *words[i : i + 4], here)

  _(array, slot)


def add_sent(parts: Any, shape: tuple[int, int]) -> jax.Array:
  """The sum of what the blocks of a cluster have sent, in their order.

  Args:
    parts: the slots of all blocks, in shared memory.
    shape: rows and columns of what each has sent.
  """
  count, size = parts.shape
  found = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=found)
  def add(_, parts):
    start = _multiply_add(_thread(), _VECTOR, _shared_address(parts))
    zero = utils.c(0.0, ir.F32Type.get())
    like = mgpu.FragmentedArray.splat(zero, shape, layout=mgpu.WGMMA_LAYOUT)

    def part(number):
      words = []
      for i in range(size // (4 * _THREADS)):
        offset = number * size * _WORD + i * _THREADS * _VECTOR
        words += _load_vector(start, offset)
      return _with_registers(like, words)

    total = part(0)
    for number in range(1, count):
      total += part(number)
    return total

  return add(parts)


def _load_vector(address, offset: int) -> list[ir.Value]:
  """Four words of shared memory."""
  load = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
  words = _asm(
    load, "=f,=f,=f,=f,r", address, result="struct<(f32, f32, f32, f32)>"
  )
  return [llvm.extractvalue(ir.F32Type.get(), words, [i]) for i in range(4)]


def _words_of(registers) -> list[ir.Value]:
  """The elements of registers, each a vector."""
  words = []
  for register in registers.flat:
    count = ir.VectorType(register.type).shape[0]
    words += [
      vector.extract(register, dynamic_position=[], static_position=[i])
      for i in range(count)
    ]
  return words


def _with_registers(array, words: list[ir.Value]):
  """An array like another one, with these elements in its registers."""
  kind = ir.VectorType(array.registers.flat[0].type)
  count = kind.shape[0]
  found = np.empty(array.registers.size, dtype=object)
  for i in range(found.size):
    found[i] = vector.from_elements(kind, words[i * count : (i + 1) * count])
  found = found.reshape(array.registers.shape)
  return mgpu.FragmentedArray(
    _registers=found, _layout=array.layout, _is_signed=None
  )


def store_elements(
  array: jax.Array,
  matrix: Any,
  corner: tuple[jax.Array, jax.Array],
  *,
  transposed: bool = False,
) -> None:
  """Stores a tile right from registers, an element or two at a time.

  Args:
    array: [rows, columns], as wgmma leaves accumulators.
    matrix: [rows, columns] of global memory; what lies outside is not stored.
      The interpreter needs all of the tile to lie inside.
    corner: the tile's row and column in it.
    transposed: the matrix is [columns, rows], as it lies in memory.
  """
  if not compat.targets_gpu():
    at = tuple(map(pl.ds, corner, array.shape))
    array, at = (array.T, at[::-1]) if transposed else (array, at)
    matrix.at[at][...] = array
    return
  height, width = matrix.shape[::-1] if transposed else matrix.shape
  scalar = plgpu.Layout.WG_SPLAT
  kinds = plgpu.Layout.WGMMA, plgpu.RefType(), scalar, scalar

  # Two columns of a row are in one register.
  pairs = not transposed and width % 2 == 0

  @plgpu.inline_mgpu(arg_types=kinds)
  def _(_, array, matrix, row, column):
    first = row.registers.item(), column.registers.item()
    start, pitch = _address(matrix), _pitch(matrix)
    i32 = ir.IntegerType.get_signless(32)
    size = utils.bitwidth(array.mlir_dtype) // 8

    def store(value, index, size):
      row, column = (
        arith.addi(arith.index_cast(i32, x), y) for x, y in zip(index, first)
      )
      here = arith.andi(_less(row, height), _less(column, width))
      down, across = (column, row) if transposed else (row, column)
      at = _multiply_add(_extended(down), pitch, start)
      at = _multiply_add(_extended(across), array_size, at)
      bits = ir.IntegerType.get_signless(8 * size)
      _asm(
        f"@$2 st.global.b{8 * size} [$0], $1;",
        f"l,{ {2: 'h', 4: 'r', 8: 'l'}[size] },b",
        at,
        llvm.bitcast(bits, value),
        here,
      )

    array_size = size
    if pairs:
      indices = array.layout.thread_idxs(array.shape)
      for index, value in zip(indices, array.registers.flat):
        store(value, index, 2 * size)
    else:
      array.foreach(lambda value, index: store(value, index, size))

  _(array, matrix, *map(jnp.int32, corner))


def store_rows(
  own: Any,
  before: Any,
  matrix: Any,
  corner: tuple[jax.Array, jax.Array],
  rows: Any,
  *,
  from_start: Any = False,
  to_end: bool = False,
) -> None:
  """Stores rows of shared memory to a matrix whose rows start anywhere.

  In whole sectors of 32 bytes, those that end in `own`; the elements of the
  first one that lie before it are the last ones of `before`. Device memory
  writes 692 MB so in 232 us, in vectors of 16 bytes, where each 16th sector is
  written in two parts, in 405, in words in 510 (rows of 1407, H100, writes-6).

  Args:
    own: [rows, columns] of shared memory, swizzled in atoms of a row's bytes.
    before: the same of the columns before these; None in the first ones of a
      tile.
    matrix: [rows, columns] of global memory.
    corner: row and column of it where `own` starts.
    rows: only so many rows are stored.
    from_start: without `before`, whether the part of the first sector that lies
      in `own` is stored; else none of that sector.
    to_end: whether the part of a sector is, that `own` ends with.
  """
  has_before = before is not None
  if not compat.targets_gpu():
    from_start = has_before | jnp.asarray(from_start)
    _store_columns(own, matrix, corner, rows, from_start)
    return
  (height, columns), end = own.shape, matrix.shape[1]
  size = jnp.dtype(own.dtype).itemsize
  row_bytes, scalar = columns * size, plgpu.Layout.WG_SPLAT
  kind = _swizzled_type(own, row_bytes)
  window = matrix.at[pl.ds(corner[0], 1), pl.ds(corner[1], columns)]

  @plgpu.inline_mgpu(arg_types=(kind, kind, plgpu.RefType(), *[scalar] * 3))
  def _(_, own, before, window, rows, left, from_start):
    rows, left, from_start = (
      x.registers.item() for x in (rows, left, from_start)
    )
    pitch = _pitch(window)
    place = _Place(row_bytes, row_bytes)
    buffers = _shared_address(before), _shared_address(own)

    def store(first: int, pieces: int) -> None:
      """Some pieces of each row, of 16 bytes, from a number on."""
      step = min(height, _THREADS // pieces)  # rows that lie alike in sectors
      nth = arith.remui(_thread(), _i32(pieces))
      row = arith.divui(_thread(), _i32(pieces))
      to = _multiply_add(_extended(row), pitch, _address(window))
      past = arith.andi(_truncated(to), _i32(SECTOR_BYTES - 1))
      # Bytes from the start of `own` to the piece, and what of them is stored.
      piece = _multiply_add(nth, _VECTOR, _i32(first * _VECTOR))
      piece = arith.subi(piece, past)
      least = arith.subi(_i32(0), past)
      if not has_before:
        least = arith.addi(least, _i32(SECTOR_BYTES))
        least = arith.select(from_start, _i32(0), least)
      most = _i32(row_bytes)
      most = most if to_end else arith.subi(most, past)
      most = arith.minsi(most, arith.muli(left, _i32(size)))
      shift = arith.andi(piece, _i32(_VECTOR - 1))
      places = []
      for ahead in (0, _VECTOR):
        column = arith.addi(arith.subi(piece, shift), _i32(ahead))
        is_before = arith.cmpi(arith.CmpIPredicate.slt, column, _i32(0))
        wrapped = arith.addi(column, _i32(row_bytes))
        column = arith.select(is_before, wrapped, column)
        # What lies behind the row, nobody stores.
        column = arith.minsi(column, _i32(row_bytes - _VECTOR))
        buffer = arith.select(is_before, *buffers)
        places.append(arith.addi(buffer, place.of(row, column)))

      def store_row(nth):
        above = arith.muli(nth, _i32(step))
        below = arith.muli(above, _i32(row_bytes))
        _asm(
          _store_piece(max(size, math.gcd(pitch, 8))),
          "l,r,r,r,r,r,r,r,r",
          _multiply_add(_extended(above), pitch, to),
          *(arith.addi(place, below) for place in places),
          piece,
          shift,
          least,
          most,
          arith.addi(row, above),
          rows,
        )

      # A loop of unknown length: unrolled, loads of all rows would spill.
      past_last = arith.addi(rows, _i32(step - 1))
      _for_each(arith.divui(past_last, _i32(step)), store_row)

    pieces = row_bytes // _VECTOR
    store(0, pieces)
    if to_end:
      store(pieces, SECTOR_BYTES // _VECTOR)

  left = jnp.int32(end) - corner[1]
  from_start = jnp.asarray(from_start)
  _(own, before if has_before else own, window, rows, left, from_start)


def _store_columns(own, matrix, corner, rows, from_start) -> None:
  """The same without sectors: as if each row started with one."""
  row, column = corner
  height, columns = own.shape
  sector = SECTOR_BYTES // jnp.dtype(own.dtype).itemsize
  skipped = jnp.where(from_start, jnp.int32(0), jnp.int32(sector))
  count = jnp.clip(matrix.shape[1] - column, skipped, columns) - skipped

  def store(i, _):
    size = 2 ** int(math.log2(columns))
    while size:
      at = skipped + (count & ~(2 * size - 1))

      @pl.when((count & size) != 0)
      def _(at=at, size=size):
        to = matrix.at[pl.ds(row + i, 1), pl.ds(column + at, size)]
        to[...] = own[pl.ds(i, 1), pl.ds(at, size)]

      size //= 2

  jax.lax.fori_loop(0, jnp.minimum(rows, height), store, None)


def _store_piece(size: int) -> str:
  """What a thread of `store_rows` does for one row: 16 bytes, put together.

  Operands: $0 where the row's own elements start in global memory; $1, $2 the
  vectors of shared memory in which the piece starts and ends; $3 its bytes from
  the row's own, $4 from the start of the vector; $5, $6 the bytes from and up
  to which the row is stored; $7 its number, $8 how many rows there are.

  Args:
    size: bytes that all of these are multiples of: 2, 4 or 8.
  """
  return f"""{{
    .reg .pred here, next, is, full, part, not;
    .reg .b32 w<8>, bits, order, end; .reg .b64 to, by; .reg .b16 h<8>;
    setp.lt.s32 here, $7, $8;
    add.s32 end, $3, {_VECTOR};
    setp.ge.and.s32 full, $3, $5, here;
    setp.le.and.s32 full, end, $6, full;
    setp.gt.and.s32 part, end, $5, here;
    setp.lt.and.s32 part, $3, $6, part;
    not.pred not, full;
    and.pred part, part, not;
    setp.ne.and.u32 next, $4, 0, here;
    cvt.s64.s32 by, $3;
    add.s64 to, $0, by;
    @here ld.shared.v4.b32 {{w0, w1, w2, w3}}, [$1];
    @next ld.shared.v4.b32 {{w4, w5, w6, w7}}, [$2];{_moved_by("$4", 4, size)}
    @full st.global.v4.b32 [to], {{w0, w1, w2, w3}};
    @!part bra DONE;{_store_elements(size)}
    DONE:
  }}"""


def _moved_by(by: str, words: int, size: int) -> str:
  """The first words, and what is behind them, by so many bytes, up to 15.

  Args:
    by: the register that says how many; a multiple of `size`.
    words: how many are wanted; four more are there.
    size: 2, 4 or 8; 16 if nothing is to be moved.
  """
  found = []
  for ahead in (2, 1):
    if size <= _WORD * ahead:
      found.append(f"""
    and.b32 bits, {by}, {_WORD * ahead};
    setp.ne.u32 is, bits, 0;""")
      found += [
        f"""
    selp.b32 w{i}, w{i + ahead}, w{i}, is;"""
        for i in range(words + ahead)
      ]
  if size <= 2:
    found.append(f"""
    and.b32 bits, {by}, 2;
    setp.ne.u32 is, bits, 0;
    selp.b32 order, 0x5432, 0x3210, is;""")
    found += [
      f"""
    prmt.b32 w{i}, w{i}, w{i + 1}, order;"""
      for i in range(words)
    ]
  return "".join(found)


def _store_elements(size: int) -> str:
  """What is stored of a piece that is stored in part, so many bytes a time."""
  found = []
  for i in range(_VECTOR // size):
    kind, word = "b32", f"w{i}"
    if size == 8:
      kind, word = "v2.b32", f"{{w{2 * i}, w{2 * i + 1}}}"
    if size == 2:
      kind, word = "b16", f"h{i}"
      if i % 2 == 0:
        found.append(f"""
    mov.b32 {{h{i}, h{i + 1}}}, w{i // 2};""")
    found.append(f"""
    add.s32 end, $3, {size * i};
    setp.ge.and.s32 is, end, $5, part;
    setp.lt.and.s32 is, end, $6, is;
    @is st.global.{kind} [to+{size * i}], {word};""")
  return "".join(found)


class _Place:
  """Where the elements of a swizzled tile lie in shared memory.

  In atoms of 8 rows of up to 128 bytes; first the atoms of 8 whole rows. In an
  atom's row vectors of 16 bytes are permuted.

  Attributes:
    atom: bytes of a row of an atom.
    atoms_bytes: of the atoms of 8 whole rows.
  """

  def __init__(self, row_bytes: int, atom: int):
    self.atom, self.atoms_bytes = atom, _ATOM_ROWS * row_bytes

  def of(self, row, column):
    """Bytes from the start to a column, in bytes, of a row."""
    inside = arith.remui(row, _i32(_ATOM_ROWS))
    # Bits of the address from 128 bytes on.
    turn = arith.divui(arith.muli(inside, _i32(self.atom)), _i32(LINE_BYTES))
    turn = arith.remui(turn, _i32(self.atom // _VECTOR))
    offset = arith.remui(column, _i32(self.atom))
    offset = arith.xori(offset, arith.muli(turn, _i32(_VECTOR)))
    offset = _multiply_add(inside, self.atom, offset)
    atom = arith.divui(column, _i32(self.atom))
    offset = _multiply_add(atom, _ATOM_ROWS * self.atom, offset)
    above = arith.divui(row, _i32(_ATOM_ROWS))
    return _multiply_add(above, self.atoms_bytes, offset)


def _swizzled_type(ref: Any, atom: int) -> plgpu.RefType:
  """Of a tile in atoms of 8 rows of that many bytes."""
  columns = atom // jnp.dtype(ref.dtype).itemsize
  return plgpu.RefType(
    (
      plgpu.TilingTransform((_ATOM_ROWS, columns)),
      plgpu.SwizzleTransform(atom),
    )
  )


def _aligned_to(pitch: int) -> int:
  """Bytes that pieces of rows have, so many bytes apart."""
  return max(_WORD, math.gcd(pitch, 8))


def _pitch(ref) -> int:
  """Bytes from a row of a matrix to the next one."""
  kind = ir.MemRefType(ref.type)
  strides, _ = kind.get_strides_and_offset()
  return strides[0] * utils.bitwidth(kind.element_type) // 8


def _address(ref):
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def _shared_address(ref):
  return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _thread():
  """The number of a thread in its warpgroup."""
  return arith.remui(utils.thread_idx(), _i32(_THREADS))


def _warp_and_lane():
  """The numbers of a thread's warp in its warpgroup, and in that its own."""
  thread = _thread()
  return arith.divui(thread, _i32(_LANES)), arith.remui(thread, _i32(_LANES))


def _less(x, bound: int):
  return arith.cmpi(arith.CmpIPredicate.slt, x, _i32(bound))


def _i32(value: int):
  return utils.c(value, ir.IntegerType.get_signless(32))


def _extended(x):
  return arith.extui(ir.IntegerType.get_signless(64), x)


def _truncated(x):
  return arith.trunci(ir.IntegerType.get_signless(32), x)


def _multiply_add(x, factor: int, y):
  return arith.addi(arith.muli(x, utils.c(factor, x.type)), y)


def _bytes_behind(address, count: int):
  return arith.addi(address, utils.c(count, address.type))


def _for_each(count, visit) -> None:
  """visit(i) for i below a count."""

  @utils.fori(count, [])
  def _(i, carry):
    visit(i)
    return carry


def _asm(text: str, constraints: str, *operands, result: str = "void"):
  return llvm.inline_asm(
    ir.Type.parse(f"!llvm.{result}" if result != "i32" else result),
    list(operands),
    text,
    constraints,
    has_side_effects=True,
  )
