"""Where a problem's matrices lie in global memory, for a config.

Which operands are copied before the kernel runs, and how long their rows are
then; what the kernel writes; what of both the L2 is told.
"""

import dataclasses
import functools
import math

from pallas_gemm.kernels.sm90 import layout, loaders
from pallas_gemm.kernels.sm90.layout import (
  ATOM_BYTES,
  ATOM_ROWS,
  Shape,
  round_up,
)
from pallas_gemm.kernels.sm90.tiling import WGMMA_ROWS, Tiling


@dataclasses.dataclass(eq=False)
class Matrices(Tiling):
  """A tiling and the matrices that the kernel reads and writes.

  Operands are those of `problem`: swapped, if the config says so.
  """

  # Operands.

  @functools.cached_property
  def loader(self) -> loaders.Loader:
    return loaders.of(self)

  @functools.cached_property
  def b_last_apart(self) -> bool:
    """Whether B's last slab is copied, and so B need not be padded."""
    if not self.b_would_be_padded:
      return False
    (_, columns), dtype = self.operand_shapes[1], self.problem.b.dtype
    return self.loader.operands[1] or layout.is_addressable(columns, dtype)

  @functools.cached_property
  def operand_shapes(self) -> tuple[Shape, Shape]:
    """Rows and columns of A and B in memory."""
    return layout.operand_shapes(self.problem)

  @functools.cached_property
  def shifted_inward(self) -> tuple[bool, bool]:
    """Whether the last tiles along M, and along N, end where the matrix does.

    They then have rows, or columns, of the tiles before: the same bits are
    stored twice. Of an operand that is stored along that side, in rows that are
    no whole number of swizzle atoms, all that is loaded then lies in its rows,
    and it need not be padded: 512 x 50264 x 768 116.5 -> 63.0 us, 1000 x 4096 x
    4096 TN 48.9 -> 43.2. Small operands are, if their rows would start at odd
    multiples of 16 bytes, which TMA reads slowly: 200 x 4096 x 4096 TN 18.1 us
    with a copy of A, 20.3 without (H100).
    """
    p, cfg = self.problem, self.config
    shapes = self.operand_shapes
    if shapes == self.whole_paddings or p.along:
      return False, False
    dtypes = filter(None, (self.stored_dtype, p.epilogue.c_dtype))
    width = max(layout.bytes_of(cfg.epilogue_n, x) for x in dtypes)
    if p.k % ATOM_ROWS or width > ATOM_BYTES:
      return False, False
    sides = (p.m, cfg.block_m, p.a), (p.n, cfg.block_n, p.b)
    shifted = [
      not operand.k_last
      and size >= block
      and layout.is_addressable(size, operand.dtype)
      and shape != padded
      and not layout.is_soon_copied(p, operand, shape)
      for (size, block, operand), shape, padded in zip(
        sides, shapes, self.whole_paddings
      )
    ]
    return shifted[0], shifted[1]

  @functools.cached_property
  def operand_paddings(self) -> tuple[Shape, Shape]:
    """The same as they are handed to the kernel, most of them to TMA."""
    (_, b), (_, b_pad) = self.operand_shapes, self.whole_paddings
    if self.shifted_inward[1] or self.b_last_apart or self.loader.operands[1]:
      return self._a_padding, b
    if self.unaligned_columns:
      rows = b_pad[0] if self.problem.along == "k" else round_up(b_pad[0], 8)
      b_pad = rows, self.unaligned_columns
    return self._a_padding, b_pad

  @functools.cached_property
  def _a_padding(self) -> Shape:
    """Rows and columns of A as it is handed to the kernel."""
    as_it_is = self.shifted_inward[0] or self.loader.operands[0]
    return (self.operand_shapes if as_it_is else self.whole_paddings)[0]

  @functools.cached_property
  def unaligned_columns(self) -> int | None:
    """Columns of a B of which tiles start inside of swizzle atoms, if they do.

    As many as tiles reach, and none of A's: by that Mosaic GPU is told which
    copies these are (`mosaic.CompilerParams`). None where tiles start with
    atoms, or B is stored along K.
    """
    p = self.problem
    by_threads = p.along is None and self.loader.operands[1]
    if not self.tiles_overlap or p.b.k_last or by_threads:
      return None
    atom = layout.elements_in(ATOM_BYTES, p.b.dtype)
    columns = round_up(self.read_columns, atom)
    return columns + atom * (columns == self._a_padding[1])

  @functools.cached_property
  def last_slab_shape(self) -> Shape | None:
    """Rows and columns of the copy of B's last slab, if there is one.

    A whole slab of rows that TMA reads fast.
    """
    if not self.b_last_apart:
      return None
    p, block_k = self.problem, self.config.block_k
    if p.b.k_last:
      return p.n, block_k
    columns = round_up(p.n, layout.elements_in(ATOM_BYTES, p.b.dtype))
    return block_k, self.unaligned_columns or columns

  # Results, and C.

  @functools.cached_property
  def stored_dtype(self) -> str:
    """Of what the kernel writes; parts of K are summed in float32."""
    return "float32" if self.config.split_k > 1 else self.problem.out_dtype

  @functools.cached_property
  def subtile_shape(self) -> Shape:
    """Rows and columns of a subtile, as it is stored."""
    return self._stored(WGMMA_ROWS, self.subtile_width)

  @functools.cached_property
  def has_c(self) -> bool:
    """Whether the kernel adds C; parts of K are added up before that."""
    return bool(self.problem.epilogue.c_dtype) and self.config.split_k == 1

  @functools.cached_property
  def result_shape(self) -> Shape:
    """Rows and columns of the result, and of C, as they are stored."""
    return self._stored(self.problem.m, self.problem.n)

  @functools.cached_property
  def c_padding(self) -> Shape:
    """Rows and columns of C once TMA can address it."""
    _, width = self.subtile_shape
    shape, dtype = self.result_shape, self.problem.epilogue.c_dtype
    return layout.padding(shape, width, width, dtype)

  @functools.cached_property
  def result_shapes(self) -> list[Shape]:
    """Rows and columns of the matrices that the kernel writes."""
    p = self.problem
    if self.by_rows:
      return [(p.m, p.n)]
    if self.by_elements:
      return [self.result_shape]
    _, width = self.subtile_shape
    _, block = self._stored(self.config.block_m, self.config.block_n)
    shape, dtype = self.result_shape, self.stored_dtype
    return [layout.result_padding(shape, width, block, dtype)] * self.outputs

  @functools.cached_property
  def evicts_results(self) -> bool:
    """Whether the L2 is told to drop results before operands.

    Where results are more than it holds, nobody finds them there. Those of
    groups along K are most of what a kernel moves, and what few reads there are
    among many writes hold memory up: 64 groups of 8 rows, 7168 x 2048, take 679
    us, and 597 without loads; so 651. Dense ones of short sums: 8192 x 8192 x
    256 61.2 -> 55.8 us, 16384 x 8192 x 64 99.9 -> 92.7, of K from 1024 on the
    same; where they are 1.3 times the L2, 32768 x 1024 x 512, 45.6 -> 46.6
    (H100).
    """
    p = self.problem
    if p.along == "m" or self.config.split_k > 1:
      return False
    matrices = self.outputs * (p.groups.count if p.along else p.batch)
    size = layout.bytes_of(matrices * p.m * p.n, p.out_dtype)
    return size > self.gpu.l2_bytes * (1 if p.along else 2)

  @functools.cached_property
  def prefetches_operands(self) -> bool:
    """Whether the L2 is asked for all operands before anything is written.

    Operands of a quarter of the L2 stay there, since results leave first: 651
    -> 621 us. 25 MB do not: 212 -> 219 (H100).
    """
    if not (self.problem.along and self.evicts_results):
      return False
    shapes = zip(self.operand_paddings, (self.problem.a, self.problem.b))
    sizes = [layout.bytes_of(math.prod(x), y.dtype) for x, y in shapes]
    return 4 * sum(sizes) <= self.gpu.l2_bytes

  @functools.cached_property
  def copied_bytes(self) -> tuple[list[int], list[int]]:
    """Bytes read and written by each copy into, and out of, a padded matrix."""
    p, copied = self.problem, layout.copied_bytes
    (a, b), (a_pad, b_pad) = self.operand_shapes, self.operand_paddings
    is_a, is_b = self.transposed
    into = [copied(a, a_pad, p.matrices(p.a), p.a.dtype, is_a and p.m > 1)]
    of_b = copied(b, b_pad, p.matrices(p.b), p.b.dtype, is_b and p.n > 1)
    if last := self.last_slab_shape:
      of_b = 2 * layout.bytes_of(p.matrices(p.b) * math.prod(last), p.b.dtype)
    into += [of_b] * self.products
    if self.has_c:
      shape, padded = self.result_shape, self.c_padding
      into.append(copied(shape, padded, p.batch, p.epilogue.c_dtype))
    out_of = []
    if self.config.split_k == 1 and not self.by_rows:
      shape, padded = self.result_shape, self.result_shapes[0]
      out_of = [copied(shape, padded, p.batch, p.out_dtype)] * self.outputs
    return list(filter(None, into)), list(filter(None, out_of))

  def _stored(self, rows: int, columns: int) -> Shape:
    """Rows and columns of part of the result, as it is stored."""
    return (columns, rows) if self.config.swap_ab else (rows, columns)
