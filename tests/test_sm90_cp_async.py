"""The PTX that copies rows no TMA can address, run on NumPy.

The text itself runs, as 128 threads; a GPU has to show the rest.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import cp_async
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from tests.support import ptx, ragged_kernels

# Where the slot and the ends of rows lie in shared memory.
SLOT, ENDS_BEHIND = 2048, 256
# Of 2 bytes; its rows are 128 bytes in an atom, of 8 rows.
ATOM = 64


@dataclasses.dataclass(frozen=True)
class Window:
  """A slab of a matrix [rows, columns], of one of two groups."""

  shape: tuple[int, int]
  group: int
  corner: tuple[int, int]

  @property
  def start(self) -> int:
    """The element of all groups that it starts with."""
    (rows, columns), (row, column) = self.shape, self.corner
    return (self.group * rows + row) * columns + column


def _strides(columns: int) -> tuple[int, ...]:
  """Bytes between blocks of 8 rows, atoms, rows and elements of a slot."""
  return 16 * columns, 1024, 128, 2


def _unswizzled(slot: np.ndarray, rows: int, columns: int) -> np.ndarray:
  """[rows, columns] of a slot: vectors of a row lie crossed with its number."""
  atoms = slot.reshape(rows // 8, columns // ATOM, 8, 8, 8)
  row = np.arange(8)
  atoms = np.stack([atoms[:, :, r, row ^ r] for r in row], axis=2)
  return atoms.transpose(0, 2, 1, 3, 4).reshape(rows, columns)


def _copied(slab: cp_async.Slab, window: Window) -> tuple[np.ndarray, ...]:
  """What the slot holds after a slab's text ran, and what it should."""
  rng = np.random.default_rng(0)
  weights = rng.integers(0, 2**16, 2 * math.prod(window.shape), np.uint16)
  size = 2 * slab.rows * slab.columns
  ends = SLOT + size + ENDS_BEHIND
  shared = ptx.Memory.of(np.zeros(ends + 4 * slab.ends, np.uint8))
  addresses = SLOT, 2 * window.start, ends
  group = ptx.Warpgroup(shared, ptx.Memory.of(weights), addresses)
  strides = _strides(slab.columns), (2 * window.shape[1], 2), (4,)
  group.run(slab.copy_text(*strides))
  if slab.ends:
    group.run(slab.shift_text(*strides))
  slot = shared.data[SLOT : SLOT + size].view(np.uint16)
  row, column = np.indices((slab.rows, slab.columns))
  want = weights[window.start + row * window.shape[1] + column]
  assert not shared.data[:SLOT].any()
  assert not shared.data[SLOT + size : ends].any()
  return _unswizzled(slot, slab.rows, slab.columns), want


@pytest.mark.any_jax
@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("block_n", [64, 128, 192, 256, 320, 384, 512, 576])
def test_columns_of_groups(block_n, group, vector):
  """B as [K, N], the last tile, which runs on into the next row.

  The slab is the one before the last, of which there is one row of K: nothing
  behind that is read.
  """
  shape = 129, block_n + vector
  window = Window(shape, group, (64, block_n))
  got, want = _copied(cp_async.Slab(64, block_n, vector), window)
  np.testing.assert_array_equal(got, want)


@pytest.mark.any_jax
@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("block_n", [64, 80, 136, 192, 256])
def test_rows_of_groups(block_n, group, vector):
  """B as [N, K], the last tile and the slab before the last one."""
  shape = 2 * block_n, 128 + vector
  window = Window(shape, group, (block_n, 64))
  got, want = _copied(cp_async.Slab(block_n, 64, vector), window)
  np.testing.assert_array_equal(got, want)


@pytest.mark.any_jax
@pytest.mark.parametrize("group", [0, 1])
def test_an_even_number_of_rows_or_not(group):
  """Whether a group starts at an odd element depends on both sizes."""
  for rows in (129, 130):
    window = Window((rows, 131), group, (0, 0))
    got, want = _copied(cp_async.Slab(64, 128, 1), window)
    np.testing.assert_array_equal(got, want)


@pytest.mark.any_jax
@pytest.mark.parametrize(
  ("right", "wrong"),
  [
    ("xor.b32 d1, d0, 144;", "xor.b32 d1, d0, 128;"),
    ("and.b64 a1, a1, -4;", "and.b64 a1, a1, -1;"),
    ("selp.b64 a0, a0, a1, is_first;", "selp.b64 a0, a1, a0, is_first;"),
    ("selp.b32 row, 1, 0, is_late;", "selp.b32 row, 0, 1, is_late;"),
    ("xor.b32 y, y, t;", "xor.b32 y, y, 0;"),
    ("shf.r.wrap.b32 v3, v3, v4, 16;", "shf.r.wrap.b32 v3, v3, t, 16;"),
    ("mad.lo.u32 end, warp, 8, row;", "mad.lo.u32 end, warp, 4, row;"),
  ],
)
def test_a_wrong_line_is_seen(right, wrong, monkeypatch):
  original, seen = cp_async._block, set()

  def block(lines):
    seen.update(lines)
    return original(wrong if line == right else line for line in lines)

  monkeypatch.setattr(cp_async, "_block", block)
  with pytest.raises(AssertionError):
    for group in range(2):
      test_columns_of_groups(128, group, 1)
  assert right in seen


@pytest.mark.parametrize("transpose_b", [False, True])
def test_slots_lie_as_the_text_is_tested_with(transpose_b, monkeypatch):
  """Strides of what Mosaic GPU hands over are those of the tests above."""
  found = []
  original = cp_async.Slab.copy_text

  def copy_text(slab, *strides):
    found.append((slab, *map(tuple, strides)))
    return original(slab, *strides)

  monkeypatch.setattr(cp_async.Slab, "copy_text", copy_text)
  n, k = (512, 331) if transpose_b else (331, 512)
  problem = Problem.flat(
    m=512,
    n=n,
    k=k,
    dtype="bfloat16",
    out_dtype="bfloat16",
    ragged="m",
    groups=3,
    transpose_b=transpose_b,
  )
  config = Config(block_m=128, block_n=256, stages=3, epilogue_buffers=1)
  kernel, arguments = ragged_kernels.example(problem, config)
  with hardware.assume("NVIDIA H200"):
    traced = jax.jit(kernel).trace(*arguments)
    traced.lower(lowering_platforms=("cuda",))
  slab = cp_async.Slab(*((256, 64) if transpose_b else (64, 256)), 1)
  strides = _strides(slab.columns)
  assert set(found) == {(slab, strides, (2 * 331, 2), (4,))}
