"""Operands that threads bring (`kernels.sm90.moves`): costs, configs."""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
from typing import Literal

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.problem import Operand, Problem
from pallas_gemm.tuning import constants

# How threads bring an operand: as rows, or short rows that they turn.
How = Literal["rows", "turned"] | None
# How they could bring A, and B, with operands as they are and swapped.
Movable = tuple[tuple[How, How], ...]

# Slabs of all work tiles of a block, up to which threads may bring operands.
_MOST_SLABS = 12
# Rows and columns of a tile, up to which they may.
_MOST_ROWS = 320


def movable(p: Problem, swap_ab: bool) -> tuple[How, How]:
  """How threads could bring A, and each B, of a problem (`moves`)."""
  read = layout.with_rows_along_k(p)
  a, b = (
    _movable(p, operand, size, as_read.k_last or (swap_ab and operand is p.a))
    for operand, size, as_read in ((p.a, p.m, read.a), (p.b, p.n, read.b))
  )
  return a, b


def _movable(p: Problem, operand: Operand, size: int, along_k: bool) -> How:
  """How threads could bring an operand that the kernel reads along K or not."""
  if p.along:
    return None
  columns = p.k if operand.k_last else size
  if layout.is_addressable(columns, operand.dtype):
    # XLA's transposed copy of 16 rows and more takes less time than turning.
    return None
  if along_k and not operand.k_last:
    is_turned = size > 1 and layout.can_be_turned(p, operand, size)
    return "turned" if is_turned else None
  return "rows"


def cycles(
  p: Problem,
  config: Config,
  moved: tuple[How, How],
  fit: constants.OddSizes,
) -> float:
  """Cycles that a slab takes longer where threads bring A, each B, or all.

  Args:
    p: what the kernel computes, with operands swapped if the config says so.
    config: how.
    moved: how they bring A, and B.
    fit: constants.
  """
  c, (move_a, move_b) = config, moved
  a = _move(p.m, c.block_m, move_a, fit)
  b = _move(p.n, c.block_n, move_b, fit) * p.products
  return (a + b) * c.block_k / 64


def _move(size: int, block: int, moved: How, fit: constants.OddSizes) -> float:
  """Cycles of a slab of 64 of one operand."""
  if moved == "turned":
    return fit.turn + fit.turn_row * size if size <= block else 0.0
  if moved == "rows":
    return fit.move + fit.move_row * min(block, -(-size // 8) * 8)
  return 0.0


def with_moves(
  configs: Iterable[Config],
  problem: Problem,
  gpu: hardware.Gpu,
  movable: Movable,
) -> Iterator[Config]:
  """The configs, and those of a few slabs with threads that bring operands.

  Args:
    configs: worth a try.
    problem: what is computed, with short rows transposed.
    gpu: where.
    movable: how threads could bring A, and B, as they are and swapped.
  """
  p = problem
  for config in configs:
    yield config
    c = config
    if c.cluster_m * c.cluster_n > 1 or c.split == "pingpong":
      continue
    m, n, (move_a, move_b) = p.m, p.n, movable[c.swap_ab]
    if c.swap_ab:
      m, n, move_a, move_b = n, m, move_b, move_a
    rows, columns = c.block_m, c.block_n * p.products
    if rows + columns > _MOST_ROWS or c.consumers > 2:
      continue  # addresses would spill
    moved = (
      _brought(m, rows, move_a) + _brought(n, c.block_n, move_b) * p.products
    )
    if not moved:
      continue
    tiles = cdiv(m, rows) * cdiv(n, c.block_n) * p.batch * c.split_k
    room = hardware.clusters_at_once(c.blocks, gpu.sm_count)
    slabs = cdiv(p.k, c.block_k * c.split_k * c.cluster_k) * cdiv(tiles, room)
    # A slab that is moved needs its room twice, and 16 bytes more a row.
    stages = int(c.stages / (1 + 9 / 8 * moved / (rows + columns)))
    are_few = slabs <= _MOST_SLABS or "rows" not in (move_a, move_b)
    if are_few and stages > 1:
      yield _moving(c, min(max(slabs, 2), stages))


def _brought(size: int, block: int, moved: How) -> int:
  """Of a tile's rows, or columns, those that threads bring, or turn."""
  if moved == "turned":  # by one tile
    return size if size <= block else 0
  return block if moved else 0


@functools.cache
def _moving(config: Config, stages: int) -> Config:
  return dataclasses.replace(config, stages=stages, moves=True)
