"""What the PTX of `pallas_gemm.ptx` does, run instruction by instruction.

Machine code is compiled elsewhere, and runs on a GPU alone. Here the loads and
stores of each thread are carried out on arrays, with every address and shift.
"""

import numpy as np
import pytest

from pallas_gemm import ptx
from tests.support import ptx_machine

SLOT = 1024


def swizzled(rows, columns, atom):
  """Bytes from the start of a tile to its elements of 16 bits, worked out anew.

  TMA permutes vectors of 16 bytes: bits 4 to 6 of an address by bits 7 to 9.
  """
  row, column = np.mgrid[:rows, :columns]
  at = row // 8 * (8 * columns * 2) + column * 2 // atom * (8 * atom)
  at += row % 8 * atom + column * 2 % atom
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
  ("pitch", "columns"),
  [
    *((1407, x) for x in (128, 127, 3, 1)),
    *((1402, x) for x in (128, 126, 2)),
    *((1412, x) for x in (128, 124, 4)),
    (1407, 126),
  ],
)
@pytest.mark.parametrize(("row", "count"), [(0, 64), (8, 64), (16, 19)])
def test_store_rows(monkeypatch, pitch, columns, row, count):
  machine = ptx_machine.Machine(monkeypatch, 2 * pitch * 80, 32768)
  rng = np.random.default_rng(0)
  machine.shared[:] = rng.integers(0, 256, machine.shared.size)
  first = 2 * (pitch * (3 + row) + 256)
  staged = ptx_machine.Ref(SLOT, (64, 128))
  window = ptx_machine.Ref(first, (8, columns), 2 * pitch)
  ptx.store_rows(staged, window, row, count)
  rows = min(8, count - row)
  tile = words_at(machine.shared, SLOT + swizzled(64, 128, 128))
  at_row, column = np.mgrid[:rows, :columns]
  at = first + 2 * (at_row * pitch + column)
  np.testing.assert_array_equal(
    words_at(machine.globals, at), tile[row : row + rows, :columns]
  )
  want = np.zeros_like(machine.written)
  want[np.stack([at, at + 1])] = 1
  np.testing.assert_array_equal(machine.written, want)  # and nothing else
