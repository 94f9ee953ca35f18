"""Instructions that Pallas has no words for, as PTX.

Each function is called by a whole warpgroup. Where there is no GPU the same is
done by operations that Pallas' interpreter knows.
"""

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

# Bytes that the L2 holds under one address.
_LINE = 128
_THREADS = 128
# Bytes of the vectors that a swizzle permutes, and of a word.
_VECTOR, _WORD = 16, 4
# Rows of a swizzle atom, and most bytes of one.
_ATOM_ROWS, _ATOM = 8, 128


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
  requests = rows * (-(-size // _LINE) + 1)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def _(_, ref):
    start, pitch = _address(ref), _pitch(ref)
    for first in range(0, requests, _THREADS):
      number = arith.addi(_thread(), _i32(first))
      row = _extended(arith.remui(number, _i32(rows)))
      line = arith.muli(arith.divui(number, _i32(rows)), _i32(_LINE))
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


def wait_async(count: int) -> None:
  """Waits until all calls of `copy_async` but the last `count` are done.

  What the thread itself has copied is there then.
  """
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    _asm(f"cp.async.wait_group {count};", "")

  _()


def store_rows(staged: Any, window: Any, row: jax.Array, count: Any) -> None:
  """Stores 8 rows of shared memory to a matrix whose rows start anywhere.

  As wide as the rows are aligned, 8 or 4 bytes. Where rows of 16-bit elements
  start at odd ones, words are put together of two words, and a first or last
  element is stored by itself.

  Args:
    staged: [rows, 128] of shared memory, swizzled, in atoms of 128 bytes.
    window: [8, columns <= 128] of global memory, from a multiple of 128
      columns on.
    row: the first row, a multiple of 8.
    count: only rows before that one are stored.
  """
  rows, columns = window.shape
  if not compat.targets_gpu():
    for i in range(rows):

      @pl.when(row + i < count)
      def _(i=i):
        window[i] = staged[row + i, pl.ds(0, columns)]

    return
  size, across = jnp.dtype(window.dtype).itemsize, staged.shape[-1]
  scalar = plgpu.Layout.WG_SPLAT
  types = _swizzled_type(staged, _ATOM), plgpu.RefType(), scalar, scalar

  @plgpu.inline_mgpu(arg_types=types)
  def _(_, staged, window, row, count):
    row, count = (x.registers.item() for x in (row, count))
    pitch = _pitch(window)
    width = _aligned_to(pitch)
    place = _Place(across * size, _ATOM)
    threads = across * size // width  # of a row
    nth = arith.remui(_thread(), _i32(threads))
    first = arith.divui(_thread(), _i32(threads))
    source = _multiply_add(row, across * size, _shared_address(staged))
    begin = arith.muli(nth, _i32(width))
    following = arith.addi(begin, _i32(width))
    for above in range(0, rows, _THREADS // threads):
      below = arith.addi(first, _i32(above))
      _asm(
        _store_row(columns * size, width, straddles=pitch % _WORD != 0),
        "l,r,r,r,r,r",
        _multiply_add(_extended(below), pitch, _address(window)),
        arith.addi(source, place.of(below, begin)),
        arith.addi(source, place.of(below, following)),
        nth,
        arith.addi(row, below),
        count,
      )

  _(staged, window, row, jnp.int32(count))


def _store_row(size: int, width: int, straddles: bool) -> str:
  """What a thread of `store_rows` does for one row.

  Operands: $0 where the row starts in global memory; $1, $2 the thread's piece
  of it, and the next one, in shared memory; $3 the number of the thread in the
  row; $4 that of the row, $5 how many there are.

  Args:
    size: of a row, in bytes.
    width: bytes of a store.
    straddles: whether each other row starts in the middle of a word.
  """
  if straddles:
    return _store_straddling_row(size // 2)
  kind, word = ("v2.b32", "{lo, hi}") if width == 8 else ("b32", "lo")
  return f"""{{
    .reg .pred here; .reg .b32 lo, hi; .reg .b64 to;
    setp.lt.s32 here, $4, $5;
    setp.lt.and.u32 here, $3, {size // width}, here;
    mad.wide.u32 to, $3, {width}, $0;
    @here ld.shared.{kind} {word}, [$1];
    @here st.global.{kind} [to], {word};
  }}"""


def _store_straddling_row(elements: int) -> str:
  """The same of elements of 16 bits, of rows that start at any.

  A row that starts in the middle of a word begins with an element, then come
  words of the elements 1 and 2, 3 and 4 and so on. What is left is an element.
  """
  left = "odd" if elements % 2 == 0 else "even"
  return f"""{{
    .reg .pred odd, even, here, whole, first, last, next;
    .reg .b32 lo, hi, word, past, count; .reg .b64 to, by; .reg .b16 a, b;
    setp.lt.s32 here, $4, $5;
    cvt.u32.u64 past, $0;
    and.b32 past, past, 2;
    setp.ne.u32 odd, past, 0;
    setp.eq.u32 even, past, 0;
    selp.b32 count, {(elements - 1) // 2}, {elements // 2}, odd;
    mad.wide.u32 to, $3, {_WORD}, $0;
    cvt.u64.u32 by, past;
    add.s64 to, to, by;
    setp.eq.and.u32 first, $3, 0, here;
    and.pred first, first, odd;
    setp.lt.and.u32 whole, $3, count, here;
    setp.eq.and.u32 last, $3, count, here;
    and.pred last, last, {left};
    setp.lt.and.u32 next, $3, 63, here;
    mov.b32 hi, 0;
    @here ld.shared.b32 lo, [$1];
    @next ld.shared.b32 hi, [$2];
    mov.b32 {{a, b}}, lo;
    @first st.global.b16 [$0], a;
    prmt.b32 word, lo, hi, 0x5432;
    selp.b32 word, word, lo, odd;
    mov.b32 {{a, b}}, word;
    @whole st.global.b32 [to], word;
    @last st.global.b16 [to], a;
  }}"""


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
    turn = arith.divui(arith.muli(inside, _i32(self.atom)), _i32(_ATOM))
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


def _i32(value: int):
  return utils.c(value, ir.IntegerType.get_signless(32))


def _extended(x):
  return arith.extui(ir.IntegerType.get_signless(64), x)


def _multiply_add(x, factor: int, y):
  return arith.addi(arith.muli(x, utils.c(factor, x.type)), y)


def _asm(text: str, constraints: str, *operands) -> None:
  llvm.inline_asm(
    ir.Type.parse("!llvm.void"),
    list(operands),
    text,
    constraints,
    has_side_effects=True,
  )
