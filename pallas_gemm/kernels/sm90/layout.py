"""How matrices lie in global memory so that the Hopper kernels can use them.

TMA wants row strides that are multiples of 16 bytes, Mosaic GPU whole swizzle
atoms. Matrices for which that does not hold are padded.
"""

import dataclasses
import functools
import math

from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Operand, Problem, bits

# A swizzle atom: 8 rows of 128 bytes.
ATOM_ROWS, ATOM_BYTES = 8, 128
# What TMA wants row strides to be multiples of, and what it reads fast.
_STRIDE_BYTES, _SHORT_BYTES, _FAST_BYTES = 16, 32, 128

# Most bytes of an operand that a copy takes no longer for than a launch.
SMALL_OPERAND = 2 << 20

Shape = tuple[int, int]


def bytes_of(elements: int, dtype: str) -> int:
  return elements * bits(dtype) // 8


def elements_in(size: int, dtype: str) -> int:
  return size * 8 // bits(dtype)


def cdiv(a: int, b: int) -> int:
  return -(-a // b)


def round_up(size: int, step: int) -> int:
  return cdiv(size, step) * step


def last_slab_copies(block_k: int) -> list[int]:
  """Rows of the copies that make up a slab of any number of blocks of 8 rows.

  A half, a quarter, ... of the slab, down to a block. One block is left.
  """
  sizes = []
  while (block_k := block_k // 2) >= ATOM_ROWS:
    sizes.append(block_k)
  return sizes


def atom_columns(columns: int, dtype: str) -> int:
  """Columns of a swizzle atom: 128 bytes, or all there are."""
  return min(elements_in(ATOM_BYTES, dtype), columns)


def is_addressable(columns: int, dtype: str) -> bool:
  """Whether TMA can address the rows of a matrix: their stride."""
  return columns % elements_in(_STRIDE_BYTES, dtype) == 0


def straddles(columns: int, dtype: str) -> bool:
  """Whether rows start at odd multiples of 16 bytes: inside sectors of 32."""
  return bytes_of(columns, dtype) % _SHORT_BYTES == _STRIDE_BYTES


def is_soon_copied(problem: Problem, operand: Operand, shape: Shape) -> bool:
  """Whether a copy with rows that TMA reads fast costs less than it gains."""
  count = problem.matrices(operand) * math.prod(shape)
  is_small = bytes_of(count, operand.dtype) <= SMALL_OPERAND
  return is_small and straddles(shape[1], operand.dtype)


def with_rows_along_k(problem: Problem, swap_ab: bool = False) -> Problem:
  """The problem that is computed: short rows along M, or N, transposed.

  Rows of less than a swizzle atom that TMA can't address must be copied in any
  case; the copy of a small operand has rows along K instead, of which few are
  loaded. 19 x 2296 x 734 TN 6.0 -> 5.1 us, 12 x 1792 x 1600 TN 7.7 -> 6.5; of
  rows that are addressable, 32 x 512 x 3584 TN, 5.2 -> 6.7 (H100). A row that
  is stored as a column is one already: 1 x 18944 x 24576 TT 330 -> 306.

  Where operands are swapped, it is the transposed problem, with A's rows along
  K: so columns of a tile come in steps of 8, and not of swizzle atoms. If A is
  stored [K, M] it is transposed first, which suits few rows.

  wgmma reads 8-bit operands along K alone.
  """
  p = problem
  has_long_rows = (p.a.k_last or p.m >= 64) and (p.b.k_last or p.n >= 64)
  if p.a.bits == 8 and p.along != "k":
    has_long_rows = p.a.k_last and p.b.k_last
  elif p.along:
    has_long_rows = True
  if not swap_ab and has_long_rows:
    return p
  return _with_rows_along_k(p, swap_ab)


@functools.lru_cache(maxsize=1024)  # the cost model asks for dozens of configs
def _with_rows_along_k(problem: Problem, swap_ab: bool) -> Problem:
  p = problem

  def transposed(operand: Operand, size: int, is_swapped: bool) -> Operand:
    elements = p.matrices(operand) * size * p.k
    is_small = bytes_of(elements, operand.dtype) <= SMALL_OPERAND
    is_short = bytes_of(size, operand.dtype) < ATOM_BYTES
    is_copied = is_short and not is_addressable(size, operand.dtype)
    is_column = p.along is None and (size == 1 or (is_copied and is_small))
    k_last = operand.k_last or is_swapped or is_column or operand.bits == 8
    return dataclasses.replace(operand, k_last=k_last)

  a, b = transposed(p.a, p.m, swap_ab), transposed(p.b, p.n, False)
  found = dataclasses.replace(p, a=a, b=b)
  return found.transposed() if swap_ab else found


def operand_shapes(problem: Problem) -> tuple[Shape, Shape]:
  """Rows and columns of A and B in memory."""
  p = problem
  a = (p.m, p.k) if p.a.k_last else (p.k, p.m)
  b = (p.n, p.k) if p.b.k_last else (p.k, p.n)
  return a, b


def operands_misaligned(problem: Problem) -> tuple[bool, bool]:
  """Whether A's, and B's, rows start at no multiples of 128 bytes."""
  p, ((_, a), (_, b)) = problem, operand_shapes(problem)
  a, b = bytes_of(a, p.a.dtype), bytes_of(b, p.b.dtype)
  return a % ATOM_BYTES > 0, b % ATOM_BYTES > 0


@functools.lru_cache(maxsize=1024)
def padding(shape: Shape, columns: int, box_columns: int, dtype: str) -> Shape:
  """Rows and columns of a stored matrix once TMA can address it.

  Args:
    shape: rows and columns of the matrix.
    columns: most columns that a swizzle atom may have.
    box_columns: columns of a copy.
    dtype: of the elements.
  """
  rows, width = shape
  step = elements_in(_STRIDE_BYTES, dtype)
  columns = atom_columns(columns, dtype)
  if box_columns != columns:  # see mosaic.CompilerParams
    rows = rows if rows <= ATOM_ROWS else round_up(rows, ATOM_ROWS)
    step = columns if width > columns else step
  return rows, round_up(width, step)


def operand_paddings(
  problem: Problem, config: Config, columns: int
) -> tuple[Shape, Shape]:
  """Rows and columns of A and B, as stored, once TMA can address them fast.

  Args:
    problem: what is computed.
    config: how.
    columns: of the swizzle atoms of both.
  """
  p, cfg = problem, config
  boxes = (
    cfg.block_k if p.a.k_last else cfg.block_m,
    cfg.block_k if p.b.k_last else cfg.block_n,
  )
  a, b = (
    _aligned(shape, padding(shape, columns, box, dtype), dtype)
    for shape, box, dtype in zip(
      operand_shapes(p), boxes, (p.a.dtype, p.b.dtype)
    )
  )
  if p.along == "k" and not p.has_whole_slabs:  # copies start, end at any row
    return (p.k, a[1]), (p.k, b[1])
  return a, b


def _aligned(shape: Shape, padded: Shape, dtype: str) -> Shape:
  """The padded rows and columns, with rows that TMA reads fast.

  Those of a matrix that is copied anyway start at multiples of 128 bytes; short
  ones of 32. At odd multiples of 16 they take TMA four times as long
  (`odd_sizes`).
  """
  rows, columns = padded
  if columns == shape[-1]:
    return padded
  fast = elements_in(_FAST_BYTES, dtype)
  step = fast if columns > fast else elements_in(_SHORT_BYTES, dtype)
  return rows, round_up(columns, step)


def result_padding(shape: Shape, width: int, block: int, dtype: str) -> Shape:
  """Rows and columns of a result, as stored, that TMA can address.

  Args:
    shape: rows and columns of the result.
    width: columns of a store.
    block: columns of a block's tile.
    dtype: of the result.
  """
  rows, columns = padding(shape, width, width, dtype)
  atom = atom_columns(width, dtype)
  if columns <= atom < block:
    # Of a matrix that is one swizzle atom wide, Mosaic GPU drops the column
    # index of a store that is one atom wide: what lies past the edge would land
    # in column 0 instead of nowhere.
    columns = 2 * atom
  return rows, columns
