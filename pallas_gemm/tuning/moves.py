"""Operands that threads bring (`kernels.sm90.moves`): costs, configs."""

from collections.abc import Iterable, Iterator
import dataclasses
import functools

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.problem import Operand, Problem
from pallas_gemm.tuning import constants

# Whether threads could bring A, and B, with operands as they are and swapped.
Movable = tuple[tuple[bool, bool], ...]

# Slabs of all work tiles of a block, up to which threads may bring operands.
_MOST_SLABS = 12
# Rows and columns of a tile, up to which they may.
_MOST_ROWS = 320


def movable(p: Problem, swap_ab: bool) -> tuple[bool, bool]:
  """Whether threads could bring A, and each B, of a problem (`moves`)."""
  read = layout.with_rows_along_k(p)
  a, b = (
    _movable(p, operand, size, as_read.k_last or (swap_ab and operand is p.a))
    for operand, size, as_read in ((p.a, p.m, read.a), (p.b, p.n, read.b))
  )
  return a, b


def _movable(p: Problem, operand: Operand, size: int, along_k: bool) -> bool:
  """Of an operand that the kernel reads along K or not."""
  columns = p.k if operand.k_last else size
  is_transposed = along_k and not operand.k_last
  can_be_copied = layout.is_addressable(columns, operand.dtype)
  return not (p.along or can_be_copied or is_transposed)


def cycles(
  p: Problem,
  config: Config,
  moved: tuple[bool, bool],
  fit: constants.OddSizes,
) -> float:
  """Cycles that a slab takes longer where threads bring A, each B, or all.

  Args:
    p: what the kernel computes, with operands swapped if the config says so.
    config: how.
    moved: whether they bring A, and B.
    fit: constants.
  """
  c, (move_a, move_b) = config, moved
  a = _move(p.m, c.block_m, fit) if move_a else 0.0
  b = _move(p.n, c.block_n, fit) * p.products if move_b else 0.0
  return (a + b) * c.block_k / 64


def _move(size: int, block: int, fit: constants.OddSizes) -> float:
  """Cycles of a slab of 64 of one operand."""
  return fit.move + fit.move_row * min(block, -(-size // 8) * 8)


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
    movable: whether threads could bring A, and B, as they are and swapped.
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
    moved = move_a * rows + move_b * columns
    if not moved:
      continue
    tiles = cdiv(m, rows) * cdiv(n, c.block_n) * p.batch * c.split_k
    room = hardware.clusters_at_once(c.blocks, gpu.sm_count)
    slabs = cdiv(p.k, c.block_k * c.split_k * c.cluster_k) * cdiv(tiles, room)
    # A slab that is moved needs its room twice, and 16 bytes more a row.
    stages = int(c.stages / (1 + 9 / 8 * moved / (rows + columns)))
    if slabs <= _MOST_SLABS and stages > 1:
      yield _moving(c, min(max(slabs, 2), stages))


@functools.cache
def _moving(config: Config, stages: int) -> Config:
  return dataclasses.replace(config, stages=stages, moves=True)
