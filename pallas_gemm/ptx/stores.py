"""Stores to matrices of global memory that TMA can't address."""

import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gemm import compat
from pallas_gemm.hardware import SECTOR_BYTES, VECTOR_BYTES
from pallas_gemm.ptx import mlir
from pallas_gemm.ptx.shifts import shifted_by


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
    start, pitch = mlir.address(matrix), mlir.pitch(matrix)
    i32 = ir.IntegerType.get_signless(32)
    size = utils.bitwidth(array.mlir_dtype) // 8

    def store(value, index, size):
      row, column = (
        arith.addi(arith.index_cast(i32, x), y) for x, y in zip(index, first)
      )
      here = arith.andi(mlir.less(row, height), mlir.less(column, width))
      down, across = (column, row) if transposed else (row, column)
      at = mlir.multiply_add(mlir.extended(down), pitch, start)
      at = mlir.multiply_add(mlir.extended(across), array_size, at)
      bits = ir.IntegerType.get_signless(8 * size)
      mlir.asm(
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
  kind = mlir.swizzled_type(own, row_bytes)
  window = matrix.at[pl.ds(corner[0], 1), pl.ds(corner[1], columns)]

  @plgpu.inline_mgpu(arg_types=(kind, kind, plgpu.RefType(), *[scalar] * 3))
  def _(_, own, before, window, rows, left, from_start):
    rows, left, from_start = (
      x.registers.item() for x in (rows, left, from_start)
    )
    pitch = mlir.pitch(window)
    place = mlir.Swizzle(row_bytes, row_bytes)
    buffers = mlir.shared_address(before), mlir.shared_address(own)

    def store(first: int, pieces: int) -> None:
      """Some pieces of each row, of 16 bytes, from a number on."""
      step = min(
        height, mlir.THREADS // pieces
      )  # rows that lie alike in sectors
      nth = arith.remui(mlir.thread(), mlir.i32(pieces))
      row = arith.divui(mlir.thread(), mlir.i32(pieces))
      to = mlir.multiply_add(mlir.extended(row), pitch, mlir.address(window))
      past = arith.andi(mlir.truncated(to), mlir.i32(SECTOR_BYTES - 1))
      # Bytes from the start of `own` to the piece, and what of them is stored.
      piece = mlir.multiply_add(
        nth, VECTOR_BYTES, mlir.i32(first * VECTOR_BYTES)
      )
      piece = arith.subi(piece, past)
      least = arith.subi(mlir.i32(0), past)
      if not has_before:
        least = arith.addi(least, mlir.i32(SECTOR_BYTES))
        least = arith.select(from_start, mlir.i32(0), least)
      most = mlir.i32(row_bytes)
      most = most if to_end else arith.subi(most, past)
      most = arith.minsi(most, arith.muli(left, mlir.i32(size)))
      shift = arith.andi(piece, mlir.i32(VECTOR_BYTES - 1))
      places = []
      for ahead in (0, VECTOR_BYTES):
        column = arith.addi(arith.subi(piece, shift), mlir.i32(ahead))
        is_before = arith.cmpi(arith.CmpIPredicate.slt, column, mlir.i32(0))
        wrapped = arith.addi(column, mlir.i32(row_bytes))
        column = arith.select(is_before, wrapped, column)
        # What lies behind the row, nobody stores.
        column = arith.minsi(column, mlir.i32(row_bytes - VECTOR_BYTES))
        buffer = arith.select(is_before, *buffers)
        places.append(arith.addi(buffer, place.of(row, column)))

      def store_row(nth):
        above = arith.muli(nth, mlir.i32(step))
        below = arith.muli(above, mlir.i32(row_bytes))
        mlir.asm(
          _store_piece(max(size, math.gcd(pitch, 8))),
          "l,r,r,r,r,r,r,r,r",
          mlir.multiply_add(mlir.extended(above), pitch, to),
          *(arith.addi(place, below) for place in places),
          piece,
          shift,
          least,
          most,
          arith.addi(row, above),
          rows,
        )

      # A loop of unknown length: unrolled, loads of all rows would spill.
      past_last = arith.addi(rows, mlir.i32(step - 1))
      mlir.for_each(arith.divui(past_last, mlir.i32(step)), store_row)

    pieces = row_bytes // VECTOR_BYTES
    store(0, pieces)
    if to_end:
      store(pieces, SECTOR_BYTES // VECTOR_BYTES)

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
    add.s32 end, $3, {VECTOR_BYTES};
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
    @next ld.shared.v4.b32 {{w4, w5, w6, w7}}, [$2];{shifted_by("$4", 4, size)}
    @full st.global.v4.b32 [to], {{w0, w1, w2, w3}};
    @!part bra DONE;{_store_elements(size)}
    DONE:
  }}"""


def _store_elements(size: int) -> str:
  """What is stored of a piece that is stored in part, so many bytes a time."""
  found = []
  for i in range(VECTOR_BYTES // size):
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
