"""What the lanes of a warp touch: elements, and sectors and lines of memory.

Lanes of a warp that touch the same sector of 32 bytes, or line of 128, are
served together. Which elements a lane has is read off its rung's register
layout.
"""

from collections.abc import Sequence
import dataclasses
from typing import Literal

import numpy as np

from pallas_gemm import ladder as ladder_lib
from pallas_gemm.hardware import LINE_BYTES, SECTOR_BYTES, WARP_THREADS
from pallas_gemm.ladder import contract, register_layouts


@dataclasses.dataclass(frozen=True)
class LaneAccess:
  """The (row, column) of A, B and C that one lane touches in one step."""

  a: tuple[int, int]
  b: tuple[int, int]
  c: tuple[int, int]


def lanes_addresses(
  mapping: Literal["A", "B"],
  *,
  k: int = 0,
  lanes: Sequence[int] = range(4),
  width: int = WARP_THREADS,
) -> tuple[LaneAccess, ...]:
  """What the lanes of a warp touch in step k of the naive loop.

  Args:
    mapping: "A": consecutive lanes take consecutive columns of C
      (coalesced); "B": consecutive rows (uncoalesced).
    k: the step.
    lanes: which lanes; T0-T3 unless told.
    width: lanes along the walked dimension; the next lane starts the next
      column (mapping B) or row (mapping A).

  Raises:
    ValueError: another mapping.

  Example:
    >>> from pallas_gemm.ladder import lanes
    >>> [x.b for x in lanes.lanes_addresses("A", k=7)]
    [(7, 0), (7, 1), (7, 2), (7, 3)]
    >>> [x.b for x in lanes.lanes_addresses("B", k=7)]
    [(7, 0), (7, 0), (7, 0), (7, 0)]
  """
  if mapping not in ("A", "B"):
    raise ValueError(f"mapping must be 'A' or 'B', got {mapping!r}")
  touched = []
  for lane in lanes:
    slow, fast = divmod(lane, width)
    row, column = (slow, fast) if mapping == "A" else (fast, slow)
    touched.append(LaneAccess(a=(row, k), b=(k, column), c=(row, column)))
  return tuple(touched)


def units_touched(
  addresses: Sequence[tuple[int, int]],
  row_stride: int,
  itemsize: int = 4,
  unit: int = SECTOR_BYTES,
) -> int:
  """Aligned units of memory that one request of a warp touches.

  Args:
    addresses: (row, column) of each lane.
    row_stride: elements from one row to the next.
    itemsize: bytes of an element.
    unit: bytes of a unit; a sector (32) unless told, a cache line has 128.

  Example:
    >>> from pallas_gemm.ladder import lanes
    >>> warp = lanes.lanes_addresses("A", lanes=range(32))
    >>> lanes.units_touched([x.b for x in warp], row_stride=4096)
    4
    >>> warp = lanes.lanes_addresses("B", lanes=range(32))
    >>> lanes.units_touched([x.a for x in warp], row_stride=4096)
    32
  """
  return len(
    {
      (row * row_stride + column) * itemsize // unit
      for row, column in addresses
    }
  )


def warp_tile(
  rung: contract.Rung | int | str, config: contract.SimtConfig
) -> tuple[int, int]:
  """Rows and columns of the block that one warp of an fp32 rung computes."""
  lanes = _first_warp(ladder_lib.find(rung), config)
  return tuple(len(np.unique(lanes[..., side])) for side in (0, 1))


def _first_warp(rung, config) -> np.ndarray:
  """(row, column) of what each lane of a warp holds: [32, registers, 2]."""
  rows, columns = config.block_m, config.block_n
  # Warpgroups share out the rows; the consumers of a loader, the columns.
  own_rows, own_columns = register_layouts.base_tile(rung.layout(config))
  if rows > own_rows:
    rows //= rung.warpgroups(config)
  elif columns > own_columns:
    columns //= rung.warpgroups(config)
  return register_layouts.owners(rung.layout(config), (rows, columns))[0]


def requests(rung, config, problem):
  """Sectors of A and of B in a step, and lines of a warp's requests for both.

  A lane requests each of its rows of A and each of its columns of B.
  """
  lanes = _first_warp(rung, config)
  rows, columns = (np.unique(lanes[..., side], axis=1) for side in (0, 1))
  requests_a = [[(row, 0) for row in each] for each in rows.T]
  requests_b = [[(0, column) for column in each] for each in columns.T]

  def touched(requests, stride, unit):
    of = (stride, problem.itemsize, unit)
    return [units_touched(request, *of) for request in requests]

  sectors = tuple(
    touched(requests, stride, SECTOR_BYTES)[0]
    for requests, stride in ((requests_a, problem.k), (requests_b, problem.n))
  )
  lines = sum(touched(requests_a, problem.k, LINE_BYTES))
  return sectors, lines + sum(touched(requests_b, problem.n, LINE_BYTES))
