"""How XLA shards an array when it partitions a program, by a mesh's axes.

XLA may shard over a part of an axis, for which a PartitionSpec has no words:
of columns over 8 devices, seen as 12 heads, each two devices have 3 heads.
"""

import math
from typing import Any

from jax.sharding import Mesh, PartitionSpec
import numpy as np

from pallas_gemm import compat


def parts_of(array: Any, mesh: Mesh) -> PartitionSpec:
  """The nearest PartitionSpec; what differs from it is for XLA to move.

  Args:
    array: its shape and sharding, as `custom_partitioning` tells them with
      `decode_shardings=False`.
    mesh: what XLA partitions over.
  """
  tiles = compat.tiles_of_devices(array.sharding, mesh)
  if tiles is None:
    return PartitionSpec()
  each = zip(np.moveaxis(tiles, -1, 0), array.shape)
  return PartitionSpec(*[_axes(tile, size, mesh) for tile, size in each])


def _axes(tile: np.ndarray, size: int, mesh: Mesh) -> tuple[str, ...]:
  """The axes that a dimension lies over.

  Over the major part of some it counts as over all of these, if it divides: a
  device then takes a part of what it has. Else it counts as whole.

  Args:
    tile: the number of each device's tile, in the mesh's shape.
    size: of the dimension.
    mesh: of the devices.
  """
  grows = [np.ptp(tile, axis=i).max() for i in range(tile.ndim)]
  axes = sorted(np.flatnonzero(grows), key=lambda i: -grows[i])  # major first
  sizes = [tile.shape[i] for i in axes]
  shards, tiles = math.prod(sizes), tile.max() + 1
  number = np.arange(shards).reshape(sizes) * tiles // shards
  rest = [i for i in range(tile.ndim) if i not in axes]
  given = tile.transpose(*axes, *rest).reshape(*sizes, -1)
  alike = (given == number[..., None]).all()
  if not alike or (tiles != shards and size % shards):
    return ()
  return tuple(mesh.axis_names[i] for i in axes)
