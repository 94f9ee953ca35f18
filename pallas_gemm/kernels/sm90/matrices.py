"""Where a problem's matrices lie in global memory, for a config.

Which operands are copied before the kernel runs, and how long their rows are
then; what the kernel writes; what of both the L2 is told.
"""

import dataclasses
import functools

from pallas_gemm.kernels.sm90 import layout, loaders
from pallas_gemm.kernels.sm90.layout import (
  ATOM_BYTES,
  ATOM_ROWS,
  Shape,
  round_up,
)
from pallas_gemm.kernels.sm90.tiling import WGMMA_ROWS, Tiling


@dataclasses.dataclass(frozen=True, eq=False)
class Matrices:
  """The matrices that the kernel reads and writes.

  Operands are those of `tiling.problem`: swapped, if the config says so.
  """

  tiling: Tiling

  # Operands.

  @functools.cached_property
  def loader(self) -> loaders.Loader:
    """What loads A and B."""
    return loaders.of(self.tiling)

  @functools.cached_property
  def b_last_apart(self) -> bool:
    """Whether B's last slab is copied, and so B need not be padded."""
    if not self.tiling.b_would_be_padded:
      return False
    (_, columns), dtype = self.operand_shapes[1], self.tiling.problem.b.dtype
    return self.loader.operands[1] or layout.is_addressable(columns, dtype)

  @functools.cached_property
  def operand_shapes(self) -> tuple[Shape, Shape]:
    """Rows and columns of A and B in memory."""
    return layout.operand_shapes(self.tiling.problem)

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
    p, cfg = self.tiling.problem, self.tiling.config
    shapes = self.operand_shapes
    if shapes == self.tiling.whole_paddings or p.along:
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
        sides, shapes, self.tiling.whole_paddings
      )
    ]
    return shifted[0], shifted[1]

  @functools.cached_property
  def operand_paddings(self) -> tuple[Shape, Shape]:
    """The same as they are handed to the kernel, most of them to TMA."""
    tiling = self.tiling
    (_, b), (_, b_pad) = self.operand_shapes, tiling.whole_paddings
    if self.shifted_inward[1] or self.b_last_apart or self.loader.operands[1]:
      return self._a_padding, b
    if self.unaligned_columns:
      rows = b_pad[0] if tiling.problem.along == "k" else round_up(b_pad[0], 8)
      b_pad = rows, self.unaligned_columns
    return self._a_padding, b_pad

  @functools.cached_property
  def _a_padding(self) -> Shape:
    """Rows and columns of A as it is handed to the kernel."""
    as_it_is = self.shifted_inward[0] or self.loader.operands[0]
    return (self.operand_shapes if as_it_is else self.tiling.whole_paddings)[0]

  @functools.cached_property
  def unaligned_columns(self) -> int | None:
    """Columns of a B of which tiles start inside of swizzle atoms, if they do.

    As many as tiles reach, and none of A's: by that Mosaic GPU is told which
    copies these are (`mosaic.CompilerParams`). None where tiles start with
    atoms, or B is stored along K.
    """
    p = self.tiling.problem
    by_threads = p.along is None and self.loader.operands[1]
    if not self.tiling.tiles_overlap or p.b.k_last or by_threads:
      return None
    atom = layout.elements_in(ATOM_BYTES, p.b.dtype)
    columns = round_up(self.tiling.read_columns, atom)
    return columns + atom * (columns == self._a_padding[1])

  @functools.cached_property
  def last_slab_shape(self) -> Shape | None:
    """Rows and columns of the copy of B's last slab, if there is one.

    A whole slab of rows that TMA reads fast.
    """
    if not self.b_last_apart:
      return None
    p, block_k = self.tiling.problem, self.tiling.config.block_k
    if p.b.k_last:
      return p.n, block_k
    columns = round_up(p.n, layout.elements_in(ATOM_BYTES, p.b.dtype))
    return block_k, self.unaligned_columns or columns

  # Results, and C.

  @functools.cached_property
  def stored_dtype(self) -> str:
    """Of what the kernel writes; parts of K are summed in float32."""
    p, cfg = self.tiling.problem, self.tiling.config
    return "float32" if cfg.split_k > 1 else p.out_dtype

  @functools.cached_property
  def subtile_shape(self) -> Shape:
    """Rows and columns of a subtile, as it is stored."""
    return self._stored(WGMMA_ROWS, self.tiling.subtile_width)

  @functools.cached_property
  def has_c(self) -> bool:
    """Whether the kernel adds C; parts of K are added up before that."""
    p, cfg = self.tiling.problem, self.tiling.config
    return bool(p.epilogue.c_dtype) and cfg.split_k == 1

  @functools.cached_property
  def result_shape(self) -> Shape:
    """Rows and columns of the result, and of C, as they are stored."""
    return self._stored(self.tiling.problem.m, self.tiling.problem.n)

  @functools.cached_property
  def c_padding(self) -> Shape:
    """Rows and columns of C once TMA can address it."""
    _, width = self.subtile_shape
    shape, dtype = self.result_shape, self.tiling.problem.epilogue.c_dtype
    return layout.padding(shape, width, width, dtype)

  @functools.cached_property
  def result_shapes(self) -> list[Shape]:
    """Rows and columns of the matrices that the kernel writes."""
    p = self.tiling.problem
    if self.tiling.by_rows:
      return [(p.m, p.n)]
    if self.tiling.by_elements:
      return [self.result_shape]
    _, width = self.subtile_shape
    _, block = self._stored(
      self.tiling.config.block_m, self.tiling.config.block_n
    )
    shape, dtype = self.result_shape, self.stored_dtype
    return [
      layout.result_padding(shape, width, block, dtype)
    ] * self.tiling.outputs

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
    p = self.tiling.problem
    if p.along == "m" or self.tiling.config.split_k > 1:
      return False
    matrices = self.tiling.outputs * (p.groups.count if p.along else p.batch)
    size = layout.bytes_of(matrices * p.m * p.n, p.out_dtype)
    return size > self.tiling.gpu.l2_bytes * (1 if p.along else 2)

  def _stored(self, rows: int, columns: int) -> Shape:
    """Rows and columns of part of the result, as it is stored."""
    return (columns, rows) if self.tiling.config.swap_ab else (rows, columns)
