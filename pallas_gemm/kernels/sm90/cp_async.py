"""PTX that copies rows no TMA can address into swizzled shared memory.

`cp.async` takes 4 or 8 bytes at multiples of as many from global to shared
memory, past the registers: what is in flight is bounded by slots of the ring
alone. The swizzle keeps 16 bytes together, so each piece goes to its place.

Where rows have an odd number of elements of 2 bytes, every second one starts
between two words. It is copied from the word that its start lies in, so it
arrives an element late, and is shifted in place after that (`shift`); the word
behind it, which has its last element, waits in `ends`.

A warp copies, and shifts, rows of its own, two of each 8: what one of its
threads has waited for, a barrier of the warp shows to the others.

    row 0 to 7 of each atom   0 1   2 3   4 5   6 7
    warp                       0     1     2     3

The text is made here and run by `compat.run_ptx`. The interpreter copies by
loads and stores instead; tests run the text itself on a few lines of NumPy.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import compat
from pallas_gemm.kernels.sm90.layout import ATOM_BYTES, ATOM_ROWS

_WARPS, _LANES, _VECTOR_BYTES = 4, 32, 16
_ELEMENT_BYTES = 2
_COPY = "cp.async.ca.shared.global"
# Vectors that a thread holds while it shifts: 16 registers.
_BATCH = 4
_TRANSFORMS = (
  plgpu.TilingTransform((ATOM_ROWS, ATOM_BYTES // _ELEMENT_BYTES)),
  plgpu.SwizzleTransform(ATOM_BYTES),
)

# Bytes between neighbours along each dimension.
_Strides = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Slab:
  """A slab of rows that start at multiples of 1, 2 or 4 elements of 2 bytes.

  All of it is done by a whole warpgroup.

  Attributes:
    rows: a multiple of 8, at most 256.
    columns: a multiple of 64.
    vector: elements that all rows start at multiples of: 1, 2 or 4.

  Example:
    >>> from pallas_gemm.kernels.sm90.cp_async import Slab
    >>> text = Slab(64, 256, 4).copy_text((8192, 1024, 128, 2), (8200, 2))
    >>> text.count("cp.async.ca.shared.global"), Slab(64, 256, 4).ends
    (32, 0)
  """

  rows: int
  columns: int
  vector: int

  @property
  def ends(self) -> int:
    """Words of shared memory that the ends of rows take."""
    return self.rows // 2 if self.vector == 1 else 0

  def copy(self, window: Any, slot: Any, ends: Any) -> None:
    """Starts to copy; `commit` closes the group that it belongs to.

    Args:
      window: [rows, columns], in global memory. Where `vector` is 1, the
        elements before and behind each row that starts at an odd one are read.
      slot: [rows, columns], tiled and swizzled, in shared memory.
      ends: [`ends`] words of shared memory; None if there are none.
    """
    if not compat.targets_gpu():
      value = plgpu.load(window, optimized=False)
      compat.store(slot, value, optimized=False)
      return
    refs = (slot, window) if ends is None else (slot, window, ends)
    compat.run_ptx(self.copy_text, *refs, transforms=(_TRANSFORMS,))

  def shift(self, window: Any, slot: Any, ends: Any) -> None:
    """Puts rows in place that have arrived an element late.

    Args:
      window: any that starts at an odd element if and only if `copy`'s did.
      slot, ends: as of `copy`, whose group has been waited for.
    """
    if self.vector == 1 and compat.targets_gpu():
      refs = slot, window, ends
      compat.run_ptx(self.shift_text, *refs, transforms=(_TRANSFORMS,))

  def copy_text(self, slot: _Strides, window: _Strides, *_: _Strides) -> str:
    """PTX for `copy`, from how the slot and the window lie in memory.

    Threads lie side by side along an atom's 128 bytes of a row.
    """
    pitch, piece = window[0], max(2, self.vector) * _ELEMENT_BYTES
    block, atom, *_ = slot
    lanes = ATOM_BYTES // piece
    rows_of_a_thread = ATOM_ROWS * lanes // (_WARPS * _LANES)
    nth_row = range(rows_of_a_thread)
    lines = [
      ".reg .b32 t, row, x, y, lane, d0, d1;",
      ".reg .b64 start, step, a0, a1;",
      "mov.u32 t, %tid.x;",
      "and.b32 t, t, 127;",
      *_divide("row", "x", "t", lanes),
      f"mul.lo.u32 row, row, {rows_of_a_thread};",
      f"mul.lo.u32 x, x, {piece};",
      "shl.b32 y, row, 4;",
      "xor.b32 y, y, x;",
      "mad.lo.u32 d0, row, 128, y;",
      "add.u32 d0, d0, $0;",
      "xor.b32 d1, d0, 144;",  # the next row: 128 bytes on, swizzled by 16
      "cvta.to.global.u64 start, $1;",
      f"mul.wide.u32 step, row, {pitch};",
      "add.u64 start, start, step;",
      "cvt.u64.u32 step, x;",
    ]
    for nth in nth_row:
      lines.append(f"add.u64 a{nth}, start, {nth * pitch};")
      if self.vector == 1:
        lines.append(f"and.b64 a{nth}, a{nth}, -4;")
      lines.append(f"add.u64 a{nth}, a{nth}, step;")
    blocks = range(self.rows // ATOM_ROWS)
    atoms = range(self.columns * _ELEMENT_BYTES // ATOM_BYTES)
    for i, nth, j in itertools.product(blocks, nth_row, atoms):
      to = f"[d{nth}+{i * block + j * atom}]"
      of = f"[a{nth}+{i * ATOM_ROWS * pitch + j * ATOM_BYTES}]"
      lines.append(f"{_COPY} {to}, {of}, {piece};")
    return _block(lines + (self._ends_lines(pitch) if self.ends else []))

  def _ends_lines(self, pitch: int) -> list[str]:
    """Copies the word behind each row that arrives late, a lane each."""
    count = self.rows // ATOM_ROWS
    return [
      ".reg .pred is_row, is_first;",
      f"setp.lt.u32 is_row, x, {4 * count};",
      "and.b64 start, start, 2;",
      # Of the two rows the first is late if the window starts at an odd
      # element, else the second; both bases have 4 bytes a lane added.
      "setp.ne.u64 is_first, start, 0;",
      "selp.b64 a0, a0, a1, is_first;",
      "sub.u64 a0, a0, step;",
      "shr.u32 lane, x, 2;",
      f"mul.wide.u32 step, lane, {ATOM_ROWS * pitch};",
      "add.u64 a0, a0, step;",
      "shr.u32 row, row, 1;",
      f"mad.lo.u32 row, row, {count}, lane;",
      "mad.lo.u32 row, row, 4, $2;",
      f"@is_row {_COPY} [row], [a0+{self.columns * _ELEMENT_BYTES}], 4;",
    ]

  def shift_text(self, slot: _Strides, *_: _Strides) -> str:
    """PTX for `shift`: a lane has 16 bytes of a row, a warp whole rows."""
    block, atom, *_ = slot
    width, units = self._shifted_units(block, atom)
    lines = [
      ".reg .b32 t, warp, lane, row, x, y, d, first, end;",
      ".reg .b64 odd;",
      ".reg .pred p, is_late, is_in, is_last;",
      f".reg .b32 {_names('v', 5 * _BATCH)};",
      "mov.u32 t, %tid.x;",
      "and.b32 lane, t, 31;",
      "shr.u32 warp, t, 5;",
      "and.b32 warp, warp, 3;",
      # The late one of the warp's two rows.
      "and.b64 odd, $1, 2;",
      "setp.eq.u64 is_late, odd, 0;",
      "selp.b32 row, 1, 0, is_late;",
      "mad.lo.u32 row, warp, 2, row;",
      # Where this lane's row starts, and its vector.
      "shl.b32 y, row, 4;",
      "mad.lo.u32 d, row, 128, $0;",
      *_divide("row", "x", "lane", width),  # of the rows at a time
      f"mad.lo.u32 d, row, {block}, d;",
      "add.u32 first, d, y;",
      f"setp.eq.u32 is_last, x, {width - 1};",
      "and.b32 t, x, 7;",
      "shl.b32 t, t, 4;",
      "xor.b32 y, y, t;",
      "add.u32 d, d, y;",
      "shr.u32 x, x, 3;",
      f"mad.lo.u32 d, x, {atom}, d;",
      f"mad.lo.u32 end, warp, {self.rows // ATOM_ROWS}, row;",
      "mad.lo.u32 end, end, 4, $2;",
      "bar.warp.sync 0xffffffff;",  # what other lanes have waited for
    ]
    for start in range(0, len(units), _BATCH):
      lines += _shift_batch(units[start : start + _BATCH])
    return _block(lines)

  def _shifted_units(self, block: int, atom: int) -> tuple[int, list["_Unit"]]:
    """How many lanes have a row, or a part of one, and what they do in turn."""
    blocks = self.rows // ATOM_ROWS
    atoms = self.columns * _ELEMENT_BYTES // ATOM_BYTES
    # A row, or the fewest parts of one that a warp has lanes for.
    most = _LANES * _VECTOR_BYTES // ATOM_BYTES
    of_part = max(n for n in range(1, most + 1) if atoms % n == 0)
    width = of_part * ATOM_BYTES // _VECTOR_BYTES
    rows = _LANES // width  # at a time
    units = [
      _Unit(
        offset=i * block + first * atom,
        end=4 * i if first + of_part == atoms else None,
        next=i * block + (first + of_part) * atom,
        rows=min(rows, blocks - i),
      )
      for i in range(0, blocks, rows)
      for first in range(0, atoms, of_part)
    ]
    return width, units


@dataclasses.dataclass(frozen=True)
class _Unit:
  """A vector of each lane: of some rows, or of a part of one.

  Attributes:
    offset: bytes from the warp's first row and vector.
    end: bytes from its first end; None if the part is not a row's last.
    next: bytes to the part that follows.
    rows: that there are.
  """

  offset: int
  end: int | None
  next: int
  rows: int


def _shift_batch(units: Sequence[_Unit]) -> list[str]:
  """All lanes load, then each stores: a lane's last element is another's."""
  loads, moves, stores = [], [], []
  for n, unit in enumerate(units):
    *own, after = (f"v{5 * n + i}" for i in range(5))
    vector = "{" + ", ".join(own) + "}"
    of_end = f"first+{unit.next}" if unit.end is None else f"end+{unit.end}"
    is_in = [f"setp.lt.u32 is_in, row, {unit.rows};"]
    loads += [
      *is_in,
      f"@is_in ld.shared.v4.b32 {vector}, [d+{unit.offset}];",
      "and.pred p, is_in, is_last;",
      f"@p ld.shared.b32 {after}, [{of_end}];",
    ]
    moves += [
      f"shfl.sync.down.b32 t, {own[0]}, 1, 31, 0xffffffff;",
      f"selp.b32 {after}, {after}, t, is_last;",
      *(
        f"shf.r.wrap.b32 {low}, {low}, {high}, 16;"
        for low, high in itertools.pairwise([*own, after])
      ),
    ]
    stores += [*is_in, f"@is_in st.shared.v4.b32 [d+{unit.offset}], {vector};"]
  return [*loads, *moves, "bar.warp.sync 0xffffffff;", *stores]


def commit() -> None:
  """Closes the group of what was copied since the last one; may be none."""
  if compat.targets_gpu():
    compat.run_ptx(lambda: "cp.async.commit_group;")


def wait(in_flight: int) -> None:
  """Waits for a thread's groups, but for so many of the last ones."""
  if compat.targets_gpu():
    compat.run_ptx(lambda: f"cp.async.wait_group {in_flight};")


def _divide(quotient: str, rest: str, x: str, by: int) -> list[str]:
  """x / by of numbers below 128, where `by` is 24 or a power of two.

  To ptxas, `div` in such text is a division.
  """
  return [
    f"mul.lo.u32 {quotient}, {x}, {-(-1024 // by)};",
    f"shr.u32 {quotient}, {quotient}, 10;",
    f"mul.lo.u32 {rest}, {quotient}, {by};",
    f"sub.u32 {rest}, {x}, {rest};",
  ]


def _names(prefix: str, count: int) -> str:
  return ", ".join(f"{prefix}{i}" for i in range(count))


def _block(lines: Iterable[str]) -> str:
  """With registers of its own."""
  return "\n".join(("{", *lines, "}"))
