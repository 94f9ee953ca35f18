"""What the PTX of `pallas_gemm.ptx` does, run instruction by instruction.

Machine code is compiled elsewhere, and runs on a GPU alone. Here the loads and
stores of each thread are carried out on arrays, with every address and shift.
"""

import numpy as np
import pytest

from pallas_gemm import ptx
from tests.support import ptx_machine

SLOT = 1024


def swizzled(rows, columns, atom, size=2):
  """Bytes from the start of a tile to its elements, worked out anew.

  TMA permutes vectors of 16 bytes: bits 4 to 6 of an address by bits 7 to 9.
  """
  row, column = np.mgrid[:rows, :columns]
  at = row // 8 * (8 * columns * size) + column * size // atom * (8 * atom)
  at += row % 8 * atom + column * size % atom
  return at ^ ((at >> 7) % (atom // 16) << 4)


def words_at(memory, at):
  return memory[at].astype(int) | memory[at + 1].astype(int) << 8


@pytest.mark.parametrize(
  ("rows", "columns", "atom"),
  [
    (64, 256, 128),
    (64, 128, 128),
    (64, 64, 128),
    (64, 192, 64),
    (256, 64, 128),
  ],
)
@pytest.mark.parametrize(
  ("pitch", "corner"), [(1402, (7, 128)), (1402, (4, 64)), (4100, (1, 64))]
)
def test_copy_async(monkeypatch, rows, columns, atom, pitch, corner):
  size = 2 * pitch * (rows + 10)
  machine = ptx_machine.Machine(monkeypatch, size, 65536)
  machine.globals[:] = np.random.default_rng(0).integers(0, 256, size)
  first = (corner[0] * pitch + corner[1]) * 2
  window = ptx_machine.Ref(first, (rows, columns), 2 * pitch)
  slot = ptx_machine.Ref(SLOT, (rows, columns))
  ptx.copy_async(window, slot, swizzle=atom)
  row, column = np.mgrid[:rows, :columns]
  want = words_at(machine.globals, first + 2 * (row * pitch + column))
  got = words_at(machine.shared, SLOT + swizzled(rows, columns, atom))
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  ("rows", "columns", "atom"),
  [
    (32, 256, 128),
    (64, 128, 128),
    (128, 64, 128),
    (32, 64, 128),
    (32, 192, 128),
    (16, 192, 64),
    (16, 160, 64),
    (8, 64, 128),
  ],
)
@pytest.mark.parametrize("pitch", (1400, 1402, 1407, 1412))
@pytest.mark.parametrize("left", (None, 37))
def test_rows_that_start_anywhere(
  monkeypatch, rows, columns, atom, pitch, left
):
  """Copied as vectors, moved to a tile: to its second rows, others stay."""
  height = rows + 10
  size = 2 * pitch * height
  machine = ptx_machine.Machine(monkeypatch, size, 2**17)
  rng = np.random.default_rng(0)
  machine.globals[:] = rng.integers(0, 256, size)
  machine.shared[:] = rng.integers(0, 256, len(machine.shared))
  matrix = ptx_machine.Ref(0, (height, pitch), 2 * pitch)
  raw = ptx_machine.Ref(2**16, (rows, columns + 8), 2 * columns + 16)
  slot = ptx_machine.Ref(SLOT, (2 * rows, columns))
  before = machine.shared.copy()
  corner = 3, 64
  ptx.copy_rows_async(matrix, corner, raw)
  ptx.shift_rows(matrix, corner, raw, slot, rows, swizzle=atom, left=left)
  row, column = np.mgrid[:rows, :columns]
  want = words_at(machine.globals, 2 * ((3 + row) * pitch + 64 + column))
  want = want if left is None else np.where(column < left, want, 0)
  at = SLOT + swizzled(2 * rows, columns, atom)[rows:]
  np.testing.assert_array_equal(words_at(machine.shared, at), want)
  untouched = np.ones(len(before), bool)
  untouched[at], untouched[at + 1] = False, False
  untouched[2**16 : 2**16 + rows * (2 * columns + 16)] = False
  np.testing.assert_array_equal(machine.shared[untouched], before[untouched])


@pytest.mark.parametrize("pitch", (72, 75, 77, 204))
@pytest.mark.parametrize("copied", (8, 64))
@pytest.mark.parametrize("which", (0, 1))
def test_what_lies_behind_a_matrix_is_not_read(
  monkeypatch, pitch, copied, which
):
  """It is zeros: of the last matrix of a batch, and of the one before."""
  height, rows, corner = 70, 32, (50, 16)
  own = 2 * pitch * height
  machine = ptx_machine.Machine(monkeypatch, 2 * own, 2**17)
  rng = np.random.default_rng(0)
  machine.globals[:] = rng.integers(1, 256, 2 * own)
  machine.shared[:] = rng.integers(0, 256, len(machine.shared))
  matrix = ptx_machine.Ref(which * own, (height, pitch), 2 * pitch)
  raw = ptx_machine.Ref(2**16, (rows, 72), 144)
  slot = ptx_machine.Ref(SLOT, (rows, 64))
  ptx.copy_rows_async(matrix, corner, raw, columns=copied, to_end=True)
  ptx.shift_rows(matrix, corner, raw, slot, 0, swizzle=128)
  row, column = np.mgrid[:rows, :copied]
  at = 2 * ((corner[0] + row) * pitch + corner[1] + column)
  padded = np.concatenate([machine.globals, np.zeros(2**14, np.uint8)])
  want = np.where(at < own, words_at(padded, which * own + at), 0)
  assert np.any(at >= own)
  got = words_at(machine.shared, SLOT + swizzled(rows, 64, 128))
  np.testing.assert_array_equal(got[:, :copied], want)


@pytest.mark.parametrize(
  ("width", "dtype"), [(64, np.uint16), (32, np.uint16), (32, np.uint32)]
)
@pytest.mark.parametrize("pitch", (1407, 1402, 1412, 1400))
@pytest.mark.parametrize("count", (64, 19))
@pytest.mark.parametrize("overlap", (True, False))
def test_store_rows(monkeypatch, width, dtype, pitch, count, overlap):
  """Tiles next to each other, with columns of the next: each is stored once."""
  size = np.dtype(dtype).itemsize
  rows, sector = 66, 32 // size
  step = 3 * width - sector * overlap
  first = 2 * step
  machine = ptx_machine.Machine(monkeypatch, size * pitch * rows, 65536)
  rng = np.random.default_rng(0)
  values = rng.integers(0, 2 ** (8 * size), (count, pitch), dtype=np.int64)
  matrix = ptx_machine.Ref(0, (rows, pitch), size * pitch, dtype)
  buffers = [
    ptx_machine.Ref(SLOT + i * 64 * width * size, (64, width), dtype=dtype)
    for i in range(2)
  ]
  starts = range(0, pitch, step)
  for start in (*starts[:2], *starts[-2:]):
    for i in range(3):
      column = start + i * width
      own, before = buffers[i % 2], buffers[1 - i % 2]
      tile = np.zeros((64, width), np.int64)
      part = values[:, column : column + width]
      tile[:count, : part.shape[1]] = part
      at = own.address + swizzled(64, width, width * size, size)
      for k in range(size):
        machine.shared[at + k] = tile >> 8 * k & 0xFF
      ptx.store_rows(
        own,
        before if i else None,
        matrix,
        (1, column),
        count,
        from_start=not overlap or column == 0,
        to_end=not overlap and i == 2,
      )
  at_row, column = np.mgrid[:count, :pitch]
  # Tiles end and start up to a sector after that.
  stored = (column < first) | (column >= starts[-2] + sector * overlap)
  at = size * ((1 + at_row) * pitch + column)
  got = sum(
    machine.globals[at + k].astype(np.int64) << 8 * k for k in range(size)
  )
  np.testing.assert_array_equal(got[stored], values[stored])
  assert machine.written.max() == 1
  inside = np.zeros(machine.written.shape, bool)
  inside[size * pitch : size * pitch * (1 + count)] = True
  assert not machine.written[~inside].any()
