"""What the PTX of `pallas_gemm.ptx` does, run instruction by instruction.

Machine code is compiled elsewhere, and runs on a GPU alone. Here the loads and
stores of each thread are carried out on arrays, with every address and shift.
"""

import itertools
import math

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


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("pitch", [1407, 1402, 1412, 4100, 1404])
@pytest.mark.parametrize(
  ("row", "count"), [(0, 64), (8, 64), (56, 64), (16, 19)]
)
def test_store_rows(monkeypatch, dtype, pitch, row, count):
  """Wherever rows of such a pitch start: each byte once, and no other."""
  size = dtype().itemsize
  starts = range(0, 16, math.gcd(size * pitch, 16))
  widths = 128, 127, 126, 124, 121, 17, 16, 15, 9, 8, 7, 4, 3, 2, 1
  for start, columns in itertools.product(starts, widths):
    tile_end = SLOT + 64 * 128 * size  # nothing past it can be read
    machine = ptx_machine.Machine(monkeypatch, 300 * pitch, tile_end)
    rng = np.random.default_rng(0)
    machine.shared[:] = rng.integers(0, 256, machine.shared.size)
    first = 32 * pitch + start  # a multiple of 16 and that
    staged = ptx_machine.Ref(SLOT, (64, 128), dtype=dtype)
    window = ptx_machine.Ref(first, (64, columns), size * pitch, dtype)
    ptx.store_rows(staged, window, row, count)
    rows = min(8, count - row)
    at_row, column = np.mgrid[:rows, : columns * size]
    at = first + (row + at_row) * size * pitch + column
    tile = SLOT + swizzled(64, 128, 128, size)[row : row + rows, :columns]
    tile = (tile[..., None] + np.arange(size)).reshape(at.shape)
    case = f"{start=} {columns=}"
    np.testing.assert_array_equal(
      machine.globals[at], machine.shared[tile], case
    )
    want = np.zeros_like(machine.written)
    want[at] = 1
    np.testing.assert_array_equal(machine.written, want, case)
