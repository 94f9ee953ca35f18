"""Instructions that Pallas has no words for, as PTX.

Each function is called by a whole warpgroup. Where there is no GPU the same is
done by operations that Pallas' interpreter knows.
"""

import math
from typing import Any, NamedTuple

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
    place = _Place(_shared_address(slot), row_bytes, swizzle)
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
    targets = [
      place.of(arith.addi(row, _i32(i * down)), column)
      for i in range(min(period, rows // down))
    ]
    for i in range(rows // down):
      below = i // period * (period * down) * row_bytes
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

  As vectors of 16 bytes, which must be aligned in global memory: each is put
  together of two vectors of shared memory. The elements of a row before its
  first vector and after its last one are stored one by one.

  Args:
    staged: [rows, 128] of shared memory, swizzled, in atoms of 128 bytes.
    window: [rows, columns <= 128] of global memory, from a multiple of 128
      columns on. Of the whole tile, so that what depends on where it starts is
      computed once for all its rows; rows past `count` need not be there.
    row: the first row, a multiple of 8.
    count: only rows before that one are stored.
  """
  columns = window.shape[-1]
  if not compat.targets_gpu():
    for i in range(_ATOM_ROWS):

      @pl.when(row + i < count)
      def _(i=i):
        window[row + i] = staged[row + i, pl.ds(0, columns)]

    return
  scalar = plgpu.Layout.WG_SPLAT
  types = _swizzled_type(staged, _ATOM), plgpu.RefType(), scalar, scalar
  size = jnp.dtype(window.dtype).itemsize
  staged_bytes, row_bytes = staged.shape[-1] * size, columns * size

  @plgpu.inline_mgpu(arg_types=types)
  def _(_, staged, window, row, count):
    row, count = (x.registers.item() for x in (row, count))
    target, pitch = _address(window), _pitch(window)
    source = _multiply_add(row, staged_bytes, _shared_address(staged))
    place = _Place(source, staged_bytes, _ATOM)

    def share(threads: int, above: int) -> _Share:
      nth = arith.remui(_thread(), _i32(threads))
      below = arith.divui(_thread(), _i32(threads))
      below = arith.addi(below, _i32(above))
      start = _multiply_add(_extended(below), pitch, target)
      to = _multiply_add(_extended(row), pitch, start)
      here = _less(arith.addi(row, below), count)
      # All rows whole eights apart start alike.
      return _Share(nth, below, to, _unaligned(start), here)

    threads = staged_bytes // _VECTOR
    for above in range(0, _ATOM_ROWS, _THREADS // threads):
      _store_vector(share(threads, above), place, row_bytes, pitch)
    threads = _THREADS // _ATOM_ROWS
    _store_element(share(threads, 0), place, row_bytes, size, threads)

  _(staged, window, row, jnp.int32(count))


class _Share(NamedTuple):
  """What of a row a thread of `store_rows` stores.

  Attributes:
    nth: its number among the threads of the row.
    row: the row's number, of eight.
    to: where the row starts in global memory.
    head: bytes of the row before its first aligned vector.
    here: whether the row is stored.
  """

  nth: Any
  row: Any
  to: Any
  head: Any
  here: Any


def _store_vector(
  share: _Share, place: "_Place", row_bytes: int, pitch: int
) -> None:
  """Stores an aligned vector of a row, put together of two of shared memory."""
  begin = arith.muli(share.nth, _i32(_VECTOR))
  # Past the tile's last column any vector will do: nothing of it is stored.
  following = arith.addi(begin, _i32(_VECTOR))
  following = arith.remui(following, _i32(place.row_bytes))
  column = arith.addi(begin, share.head)
  is_whole = _less(column, _i32(row_bytes - _VECTOR + 1))
  bytes_of_word = arith.remui(share.head, _i32(_WORD))
  _asm(
    _store_straddling(math.gcd(pitch, _VECTOR)),
    "l,r,r,b,b,r,b",
    arith.addi(share.to, _extended(column)),
    place.of(share.row, begin),
    place.of(share.row, following),
    _has(share.head, 2 * _WORD),
    _has(share.head, _WORD),
    _multiply_add(bytes_of_word, 0x1111, _i32(0x3210)),
    arith.andi(share.here, is_whole),
  )


def _store_straddling(aligned: int) -> str:
  """Stores 16 bytes that lie in two vectors of shared memory.

  They are moved to the front, by two words, by one, and by half of one.

  Operands: $0 where they go in global memory; $1, $2 the vectors; $3, $4
  whether they are moved by two words, and by one; $5 which bytes of two words
  then make one, a digit each; $6 whether they are stored.

  Args:
    aligned: bytes that they are moved by a multiple of.
  """
  steps = []
  if aligned < 16:
    steps += [f"selp.b32 w{i}, w{i + 2}, w{i}, $3;" for i in range(6)]
  if aligned < 8:
    steps += [f"selp.b32 w{i}, w{i + 1}, w{i}, $4;" for i in range(5)]
  if aligned < 4:
    steps += [f"prmt.b32 w{i}, w{i}, w{i + 1}, $5;" for i in range(4)]
  return f"""{{
    .reg .b32 w<8>;
    ld.shared.v4.b32 {{w0, w1, w2, w3}}, [$1];
    ld.shared.v4.b32 {{w4, w5, w6, w7}}, [$2];
    {" ".join(steps)}
    @$6 st.global.v4.b32 [$0], {{w0, w1, w2, w3}};
  }}"""


def _store_element(
  share: _Share, place: "_Place", row_bytes: int, size: int, threads: int
) -> None:
  """Stores an element of a row that is in none of its aligned vectors.

  The first half of a row's threads has those before the vectors, the second
  half those after them: less than 16 bytes each.
  """
  half = threads // 2
  head = arith.minui(share.head, _i32(row_bytes))
  whole = arith.divui(arith.subi(_i32(row_bytes), head), _i32(_VECTOR))
  tail = _multiply_add(whole, _VECTOR, head)
  is_before = _less(share.nth, _i32(half))
  begin = arith.select(is_before, _i32(0), tail)
  end = arith.select(is_before, head, _i32(row_bytes))
  column = _multiply_add(arith.remui(share.nth, _i32(half)), size, begin)
  bits = 8 * size
  _asm(
    f"""{{
      .reg .b{bits} x;
      @$2 ld.shared.b{bits} x, [$1];
      @$2 st.global.b{bits} [$0], x;
    }}""",
    "l,r,b",
    arith.addi(share.to, _extended(column)),
    place.of(share.row, column),
    arith.andi(share.here, _less(column, end)),
  )


def _unaligned(address):
  """Bytes from an address to the first aligned vector."""
  low = arith.trunci(ir.IntegerType.get_signless(32), address)
  return arith.andi(arith.subi(_i32(0), low), _i32(_VECTOR - 1))


class _Place:
  """Where the elements of a swizzled tile lie in shared memory.

  In atoms of 8 rows of up to 128 bytes; first the atoms of 8 whole rows. In an
  atom's row vectors of 16 bytes are permuted.

  Attributes:
    start: of the tile, an address.
    row_bytes: of a row of the tile.
    atom: bytes of a row of an atom.
  """

  def __init__(self, start, row_bytes: int, atom: int):
    self.start, self.row_bytes, self.atom = start, row_bytes, atom

  def of(self, row, column):
    """The address of a column, in bytes, of a row."""
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
    offset = _multiply_add(above, _ATOM_ROWS * self.row_bytes, offset)
    return arith.addi(self.start, offset)


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


def _has(x, bit: int):
  bit = _i32(bit)
  return arith.cmpi(arith.CmpIPredicate.eq, arith.andi(x, bit), bit)


def _less(x, y):
  return arith.cmpi(arith.CmpIPredicate.slt, x, y)


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
