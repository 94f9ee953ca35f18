"""register_layouts: which thread holds which element."""

import math

import numpy as np
import pytest

from pallas_gemm.ladder import register_layouts as layouts

# Each with an array that is dealt out once, and one that repeats it.
DEALT = {
  "lanes walk rows": (layouts.element_per_thread(32, 4, "rows"), (32, 4)),
  "lanes walk columns": (layouts.element_per_thread(4, 32, "columns"), (4, 32)),
  "several a thread": (layouts.element_per_thread(64, 16, "rows"), (64, 16)),
  "column_per_thread": (layouts.column_per_thread(8), (16, 64)),
  "strided_tile": (layouts.strided_tile(8, 8), (64, 128)),
  "contiguous_tile": (layouts.contiguous_tile(8, 8), (64, 128)),
  "warp_tile": (layouts.warp_tile(16, 8), (128, 128)),
  "warp_tile, 2 rows": (layouts.warp_tile(16, 8, 2), (128, 128)),
  "words_of_row_vectors": (layouts.words_of_row_vectors(), (64, 16)),
  "row_per_lane, 32": (layouts.row_per_lane(32), (32, 16)),
  "row_per_lane, 64": (layouts.row_per_lane(64), (64, 16)),
  "row_per_lane, 128": (layouts.row_per_lane(128), (128, 8)),
  "rows_of_vectors": (layouts.rows_of_vectors(128), (16, 128)),
  "rows_of_vectors, narrow": (layouts.rows_of_vectors(32, 8), (64, 32)),
}


def times_held(layout, shape):
  """By how many registers, of all threads, each element is held."""
  held = layouts.owners(layout, shape).reshape(-1, 2)
  return np.bincount(
    np.ravel_multi_index(held.T, shape), minlength=math.prod(shape)
  )


@pytest.mark.parametrize("name", DEALT)
@pytest.mark.parametrize("times", [1, 2])
def test_each_element_has_one_owner(name, times):
  layout, (rows, columns) = DEALT[name]
  shape = times * rows, times * columns
  held = layouts.owners(layout, shape)
  assert held.shape == (4, 32, math.prod(shape) // 128, 2)
  assert (times_held(layout, shape) == 1).all()


@pytest.mark.parametrize("walk", ["rows", "columns"])
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (1, 32), (64, 1), (8, 16)])
def test_spare_threads_hold_what_others_hold(walk, shape):
  layout = layouts.element_per_thread(*shape, walk)
  assert (times_held(layout, shape) == 128 // math.prod(shape)).all()
  held = layouts.owners(layout, shape)
  # A warp repeats the elements it has; it does not leave any to lanes alone.
  per_warp = [len(np.unique(warp, axis=0)) for warp in held.reshape(4, -1, 2)]
  assert per_warp == [min(32, math.prod(shape))] * 4


def test_what_lanes_walk():
  lane = np.arange(32)
  by_rows = layouts.owners(*DEALT["lanes walk rows"])
  by_columns = layouts.owners(*DEALT["lanes walk columns"])
  for warp in range(4):
    same = np.full(32, warp)
    np.testing.assert_array_equal(by_rows[warp, :, 0].T, (lane, same))
    np.testing.assert_array_equal(by_columns[warp, :, 0].T, (same, lane))


def test_what_a_thread_holds():
  def of_one(name):
    rows, columns = layouts.owners(*DEALT[name])[0, 0].T
    return np.unique(rows).tolist(), np.unique(columns).tolist()

  assert of_one("column_per_thread") == ([*range(8)], [0])
  assert of_one("strided_tile") == ([*range(0, 16, 2)], [*range(0, 128, 16)])
  assert of_one("contiguous_tile") == ([*range(8)], [*range(8)])
  # Quadrants of 4 x 4, 16 rows and 32 columns apart.
  quadrants = [16 * i + j for i in range(4) for j in range(4)]
  of_columns = [32 * i + j for i in range(2) for j in range(4)]
  assert of_one("warp_tile") == (quadrants, of_columns)
  assert of_one("warp_tile, 2 rows") == (quadrants, of_columns)


@pytest.mark.parametrize("name", DEALT)
def test_owners_are_those_of_mosaic_gpu(name):
  """Its registers, and the offsets by which its lanes and warps differ."""
  layout, shape = DEALT[name]
  tiled = layout.to_mgpu()
  held = np.ravel_multi_index(
    np.moveaxis(layouts.owners(layout, shape), -1, 0), shape
  )
  registers = tiled.registers_shape(shape)
  assert held.shape[2] == math.prod(registers) * tiled.vector_length
  assert tiled.shape_from_registers_shape(registers) == shape
  strides = tiled.tiling.tile_strides((shape[1], 1))
  sizes = tiled.tiling.tile_shape(shape)

  def offsets(dims):
    each = np.indices([sizes[d] for d in dims]).reshape(len(dims), -1)
    return np.array([strides[d] for d in dims]) @ each

  warps, lanes = offsets(tiled.warp_dims), offsets(tiled.lane_dims)
  np.testing.assert_array_equal(
    held, warps[:, None, None] + lanes[:, None] + held[0, 0]
  )
  neighbours = held.reshape(4, 32, -1, tiled.vector_length)
  assert (np.diff(neighbours) == strides[tiled.vector_dim]).all()
