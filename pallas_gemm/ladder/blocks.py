"""Blocks by BlockSpec: what the loads and copies of the rungs go by.

`pl.pallas_call` has no lowering for Mosaic GPU: a kernel is started by
`plgpu.kernel(grid=...)`, whose body sees whole arrays. So a rung states its
grid and BlockSpecs as for `pl.pallas_call`, and its body asks here for the
block that a spec maps a point of the grid to:

    a_spec = plgpu.BlockSpec((bm, bk), lambda i, j, k: (i, k))
    window(a_spec, a_ref, i, j, k)  # a_ref.at[i*bm : i*bm+bm, k*bk : k*bk+bk]

`plgpu.emit_pipeline` takes the same specs and copies the blocks itself.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

GMEM, SMEM = plgpu.GMEM, plgpu.SMEM


class Specs(NamedTuple):
  """The blocks of a kernel, as `pl.pallas_call` names them.

  Attributes:
    in_specs: of A, of B, and of C where beta is not 0.
    out_specs: of the result.
  """

  in_specs: tuple[plgpu.BlockSpec, ...]
  out_specs: plgpu.BlockSpec


def window(spec: plgpu.BlockSpec, ref: Any, *indices: Any) -> Any:
  """The block of `ref`, in global memory, of a point of the grid."""
  starts = spec.index_map(*indices)
  at = [
    start if size is None else pl.ds(start * size, size)
    for start, size in zip(starts, spec.block_shape, strict=True)
  ]
  return ref.at[*at]


def rows_of(spec: plgpu.BlockSpec, parts: int, part: Any) -> plgpu.BlockSpec:
  """The spec of one part of each block: its rows are shared out evenly."""
  rows, *columns = spec.block_shape

  def index_map(*indices):
    first, *others = spec.index_map(*indices)
    return first * parts + part, *others

  shape = rows // parts, *columns
  return dataclasses.replace(spec, block_shape=shape, index_map=index_map)


def ring(spec: plgpu.BlockSpec, stages: int, dtype: Any) -> plgpu.SMEM:
  """Shared memory for `stages` blocks of an operand, as the spec lays it."""
  shape = (stages, *spec.block_shape)
  return plgpu.SMEM(shape, dtype, transforms=tuple(spec.transforms))


def copy_in(
  spec: plgpu.BlockSpec, ref: Any, slot: Any, barrier: Any, *indices: Any
) -> None:
  """Starts TMA on a block, to all that share it by `collective_axes`.

  Its bytes arrive at the barrier, once for each copy.
  """
  plgpu.copy_gmem_to_smem(
    window(spec, ref, *indices),
    slot,
    barrier,
    collective_axes=spec.collective_axes,
  )


def along_k(spec: plgpu.BlockSpec, i: Any, j: Any, delay_release: int = 0):
  """The spec for a pipeline whose grid is K alone, in the block (i, j)."""
  return dataclasses.replace(
    spec,
    index_map=lambda k: spec.index_map(i, j, k),
    delay_release=delay_release,
  )


def elements(spec: plgpu.BlockSpec) -> int:
  """Elements of a block; a dimension of None is one index."""
  return math.prod(size or 1 for size in spec.block_shape)


def shared_bytes(
  specs: Sequence[plgpu.BlockSpec], stages: int, itemsize: int
) -> int:
  """Bytes of shared memory for `stages` blocks of each operand."""
  return stages * itemsize * sum(map(elements, specs))


def times_read(spec: plgpu.BlockSpec, grid: Sequence[int]) -> int:
  """How often the points of a grid read each element that the spec covers.

  The product of the grid's dimensions that the index map leaves out: A's
  block (i, k) is read again for each j.
  """
  origin = (0,) * len(grid)
  unit = [
    tuple(int(a == b) for b in range(len(grid))) for a in range(len(grid))
  ]
  moves = [spec.index_map(*u) != spec.index_map(*origin) for u in unit]
  return math.prod(n for n, moved in zip(grid, moves) if not moved)
