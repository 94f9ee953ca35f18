"""Copies from global to shared memory by threads, with cp.async; prefetches."""

import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from pallas_gemm import compat
from pallas_gemm.hardware import LINE_BYTES, VECTOR_BYTES
from pallas_gemm.ptx import mlir


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
    start, pitch = mlir.address(ref), mlir.pitch(ref)
    for first in range(0, requests, mlir.THREADS):
      number = arith.addi(mlir.thread(), mlir.i32(first))
      row = mlir.extended(arith.remui(number, mlir.i32(rows)))
      line = arith.muli(
        arith.divui(number, mlir.i32(rows)), mlir.i32(LINE_BYTES)
      )
      column = mlir.extended(arith.minui(line, mlir.i32(size - 1)))
      at = arith.addi(mlir.multiply_add(row, pitch, start), column)
      mlir.asm("prefetch.global.L2 [$0];", "l", at)

  _(window)


def copy_async(window: Any, slot: Any, *, swizzle: int) -> None:
  """Starts to copy a tile to shared memory, by cp.async.

  As wide as rows are aligned, 16, 8 or 4 bytes; no row starts inside a word.
  It is a group of its own, which `wait_async` counts.

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
  types = plgpu.RefType(), mlir.swizzled_type(slot, swizzle)

  @plgpu.inline_mgpu(arg_types=types)
  def _(_, window, slot):
    pitch = mlir.pitch(window)
    width = max(mlir.WORD_BYTES, math.gcd(pitch, VECTOR_BYTES))
    # Only vectors may pass by the L1, which has no use for them.
    cache = "cg" if width == VECTOR_BYTES else "ca"
    place = mlir.Swizzle(row_bytes, swizzle)
    pieces = row_bytes // width
    # A power of two, so that no thread divides.
    across = 2 ** math.ceil(math.log2(pieces))
    down = mlir.THREADS // across
    nth = arith.remui(mlir.thread(), mlir.i32(across))
    row = arith.divui(mlir.thread(), mlir.i32(across))
    column = arith.muli(nth, mlir.i32(width))
    here = arith.cmpi(arith.CmpIPredicate.ult, nth, mlir.i32(pieces))
    source = mlir.multiply_add(mlir.extended(row), pitch, mlir.address(window))
    source = arith.addi(source, mlir.extended(column))
    # Rows that are whole atoms apart lie alike: their addresses differ by
    # constants.
    period = max(1, mlir.ATOM_ROWS // down)
    to = mlir.shared_address(slot)
    targets = [
      arith.addi(to, place.of(arith.addi(row, mlir.i32(i * down)), column))
      for i in range(min(period, rows // down))
    ]
    for i in range(rows // down):
      below = (
        i // period * (period * down // mlir.ATOM_ROWS) * place.atoms_bytes
      )
      ahead = i * down * pitch
      mlir.asm(
        f"@$2 cp.async.{cache}.shared.global"
        f" [$0+{below}], [$1+{ahead}], {width};",
        "r,l,b",
        targets[i % period],
        source,
        here,
      )
    mlir.asm("cp.async.commit_group;", "")

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
  further in shared memory, up to 15; see `shift_rows`. What is copied is
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
  columns = width - VECTOR_BYTES // size if columns is None else columns
  row, column = corner
  if not compat.targets_gpu():
    at = pl.ds(row, rows), pl.ds(column, columns)
    raw[:, pl.ds(0, columns)] = matrix[at]
    return
  raw_pitch, row_bytes, height = width * size, columns * size, matrix.shape[0]
  vectors, own = row_bytes // VECTOR_BYTES, rows // mlir.WARPS
  # A power of two, so that no thread divides.
  across = 2 ** math.ceil(math.log2(vectors))
  down = max(1, mlir.LANES // across)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
  def _(_, matrix, corner, raw):
    pitch = mlir.pitch(matrix)
    end = mlir.bytes_behind(mlir.address(matrix), height * pitch)
    warp, lane = mlir.warp_and_lane()
    first = arith.muli(warp, mlir.i32(own))
    nth = arith.remui(lane, mlir.i32(across))
    above = arith.divui(lane, mlir.i32(across))
    row = arith.addi(first, above)
    column = arith.muli(nth, mlir.i32(VECTOR_BYTES))
    start = mlir.multiply_add(mlir.extended(row), pitch, mlir.address(corner))
    start = arith.addi(start, mlir.extended(column))
    to = mlir.multiply_add(row, raw_pitch, mlir.shared_address(raw))
    to = arith.addi(to, column)
    is_inside = mlir.less(nth, vectors)
    for i in range(0, own, down):
      here = is_inside
      if own - i < down:
        here = arith.andi(here, mlir.less(above, own - i))
      mlir.asm(
        _copy_piece(i * pitch, i * raw_pitch, to_end),
        "r,l,b,l",
        to,
        start,
        here,
        end,
      )
    row = arith.addi(first, lane)
    mlir.asm(
      _copy_row_end(row_bytes, to_end),
      "r,l,b,l",
      mlir.multiply_add(row, raw_pitch, mlir.shared_address(raw)),
      mlir.multiply_add(mlir.extended(row), pitch, mlir.address(corner)),
      mlir.less(lane, own),
      end,
    )

  _(matrix, matrix.at[pl.ds(row, 1), pl.ds(column, 1)], raw)


def commit_async() -> None:
  """Closes a group of copies that `wait_async` counts, if need be of none."""
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    mlir.asm("cp.async.commit_group;", "")

  _()


def wait_async(count: int) -> None:
  """Waits until all groups of copies but the last `count` are done.

  What the thread itself has copied is there then.
  """
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    mlir.asm(f"cp.async.wait_group {count};", "")

  _()


def _copy_piece(ahead: int, offset: int, to_end: bool) -> str:
  """Copies the vector that holds a byte of a row, so far from `$1`."""
  return f"""{{
    .reg .b64 from, left; .reg .b32 size;
    add.s64 from, $1, {ahead};
    and.b64 from, from, {-VECTOR_BYTES};{_left(to_end)}
    @$2 {_copy_vector(offset, to_end)}
  }}"""


def _copy_row_end(row_bytes: int, to_end: bool) -> str:
  """Copies the vector in which a row ends that starts inside of one."""
  return f"""{{
    .reg .b64 from, past, left; .reg .b32 size; .reg .pred here;
    and.b64 past, $1, {VECTOR_BYTES - 1};
    setp.ne.and.s64 here, past, 0, $2;
    sub.s64 from, $1, past;
    add.s64 from, from, {row_bytes};{_left(to_end)}
    @here {_copy_vector(row_bytes, to_end)}
  }}"""


def _left(to_end: bool) -> str:
  """How many bytes of a vector at `from` lie before `$3`, to `size`."""
  if not to_end:
    return ""
  return f"""
          sub.s64 left, $3, from;
          max.s64 left, left, 0;
          min.s64 left, left, {VECTOR_BYTES};
          cvt.u32.u64 size, left;"""


def _copy_vector(offset: int, to_end: bool) -> str:
  """From `from`; of what lies past the end zeros."""
  size = ", size" if to_end else ""
  return (
    f"cp.async.cg.shared.global [$0+{offset}], [from], {VECTOR_BYTES}{size};"
  )
