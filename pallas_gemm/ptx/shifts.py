"""What threads shift inside shared memory: rows to where TMA would put them."""

import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from pallas_gemm import compat
from pallas_gemm.hardware import VECTOR_BYTES
from pallas_gemm.ptx import mlir


def shift_rows(
  matrix: Any,
  corner: tuple[jax.Array, jax.Array],
  raw: Any,
  slot: Any,
  first: jax.Array | int,
  *,
  swizzle: int,
  left: jax.Array | None = None,
) -> None:
  """Shifts rows from where `copy_rows_async` has put them to a tile.

  Each warp the rows that it has copied, each lane what a row of a swizzle atom
  has, or half of it if there are lanes for that, so that no two of eight lanes
  meet in a bank.

  Args:
    matrix, corner: of the copy.
    raw: [rows, columns and 16 bytes more] of shared memory.
    slot: [more rows, columns or more] of shared memory, swizzled.
    first: the row of it where the first one goes.
    swizzle: bytes of a row of the slot's atoms.
    left: columns, of this corner on, that are shifted; behind them are zeros.
      None for all.
  """
  size = jnp.dtype(matrix.dtype).itemsize
  rows, width = raw.shape
  columns = width - VECTOR_BYTES // size
  if not compat.targets_gpu():
    found = raw[:, pl.ds(0, columns)]
    if left is not None:
      column = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
      found = jnp.where(column < left, found, jnp.zeros_like(found))
    slot[pl.ds(first, rows), pl.ds(0, columns)] = found
    return
  row_bytes, own = columns * size, rows // mlir.WARPS
  piece, atoms = swizzle, row_bytes // swizzle
  if 2 * own * atoms <= mlir.LANES and swizzle > 2 * VECTOR_BYTES:
    piece = swizzle // 2
  ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT
  kinds = ref, ref, mlir.swizzled_type(slot, swizzle), scalar, scalar
  slot_row_bytes = slot.shape[1] * size

  @plgpu.inline_mgpu(arg_types=kinds)
  def _(_, corner, raw, slot, first, left):
    first, left = first.registers.item(), left.registers.item()
    pitch, raw_pitch = mlir.pitch(corner), width * size
    warp, lane = mlir.warp_and_lane()
    row = mlir.multiply_add(warp, own, arith.remui(lane, mlir.i32(own)))
    nth = arith.divui(lane, mlir.i32(own))
    column = arith.muli(nth, mlir.i32(piece))
    source = mlir.multiply_add(row, raw_pitch, mlir.shared_address(raw))
    place = mlir.Swizzle(slot_row_bytes, swizzle)
    target = place.of(arith.addi(row, first), column)
    start = mlir.multiply_add(row, pitch, mlir.truncated(mlir.address(corner)))
    here = mlir.less(nth, row_bytes // piece)
    mlir.asm(
      _shift_piece(
        piece // VECTOR_BYTES, math.gcd(pitch, VECTOR_BYTES), is_cut
      ),
      "r,r,r,b,r",
      arith.addi(source, column),
      arith.addi(mlir.shared_address(slot), target),
      arith.andi(start, mlir.i32(VECTOR_BYTES - 1)),
      here,
      arith.subi(arith.muli(left, mlir.i32(size)), column),
    )

  is_cut = left is not None
  at = matrix.at[pl.ds(corner[0], 1), pl.ds(corner[1], 1)]
  left = jnp.int32(columns) if left is None else left
  _(at, raw, slot, jnp.int32(first), left)


def _shift_piece(vectors: int, size: int, is_cut: bool) -> str:
  """What a thread of `shift_rows` does: so many vectors, put together of more.

  Operands: $0 the first one, $1 where it goes, $2 the bytes of it that are not
  the row's, $3 whether there are any vectors, $4 the bytes that are shifted.
  Swizzled vectors of a row differ by bits of their addresses.

  Args:
    vectors: of a row, in one swizzle atom.
    size: bytes that $2 is a multiple of.
    is_cut: whether there are zeros from byte $4 on.
  """
  words = VECTOR_BYTES // mlir.WORD_BYTES * vectors
  loads = "".join(
    f"""
    @$3 ld.shared.v4.b32 {_words(4 * i)}, [$0+{VECTOR_BYTES * i}];"""
    for i in range(vectors + (size < VECTOR_BYTES))
  )
  stores = "".join(
    f"""
    xor.b32 to, $1, {VECTOR_BYTES * i};
    @$3 st.shared.v4.b32 [to], {_words(4 * i)};"""
    for i in range(vectors)
  )
  cut = "".join(
    f"""
    sub.s32 bits, $4, {mlir.WORD_BYTES * i};
    max.s32 bits, bits, 0;
    shl.b32 bits, bits, 3;
    bmsk.clamp.b32 bits, 0, bits;
    and.b32 w{i}, w{i}, bits;"""
    for i in range(words if is_cut else 0)
  )
  return f"""{{
    .reg .pred is; .reg .b32 w<{words + 4}>, bits, order, to;
    bar.warp.sync 0xffffffff;{loads}{shifted_by("$2", words, size)}{cut}{stores}
    bar.warp.sync 0xffffffff;
  }}"""


def _words(first: int) -> str:
  return "{" + ", ".join(f"w{first + i}" for i in range(4)) + "}"


def shifted_by(by: str, words: int, size: int) -> str:
  """The first words, and what is behind them, by so many bytes, up to 15.

  Args:
    by: the register that says how many; a multiple of `size`.
    words: how many are wanted; four more are there.
    size: 2, 4 or 8; 16 if nothing is to be shifted.
  """
  found = []
  for ahead in (2, 1):
    if size <= mlir.WORD_BYTES * ahead:
      found.append(f"""
    and.b32 bits, {by}, {mlir.WORD_BYTES * ahead};
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
