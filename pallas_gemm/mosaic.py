"""What kernels ask of Mosaic GPU's lowering that Pallas has no argument for.

Each asks by its name, before it is lowered; the lowering of kernels that do not
stays as it is. Private in JAX, as what `compat` touches.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import (
  dialect,
  dialect_lowering,
  launch_context,
  utils,
)
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

# Kernels whose copies start anywhere; see `allow_ragged_copies`.
_anywhere: set[str] = set()
# Those of which wider ones do.
_in_blocks: set[str] = set()
# Those whose wider copies are of matrices that are no whole number of atoms.
_of_ragged: set[str] = set()
# Those of which such copies start at any multiple of 16 bytes of a row.
_inside_rows: set[str] = set()
# Those of whose matrices with so many columns wider copies do too, and may end
# in the next row: names, and columns.
_any_column: set[tuple[str, int]] = set()
# Those whose results leave the L2 first; see `evict_results_first`.
_evicted_first: set[str] = set()
# Those whose barriers several warps make ready; see `spread_barriers`.
_spread: set[str] = set()


def allow_ragged_copies(
  anywhere: str | None = None,
  in_blocks: str | None = None,
  of_ragged: str | None = None,
  inside_rows: str | None = None,
  any_column: tuple[str, int] | None = None,
) -> None:
  """Lets TMA copy one swizzle atom at a time from matrices of any shape.

  Mosaic GPU describes a matrix to TMA as a grid of swizzle atoms (8 rows of
  up to 128 bytes). It refuses a matrix that is not a whole number of them, and
  a copy that does not start with an atom is wrong: what is past the end of the
  atom comes as zeros. A copy that is one atom wide needs no such grid: its
  rows lie one after the other in shared memory either way, and then TMA takes
  any row of any matrix whose row stride is a multiple of 16 bytes. Other
  kernels' copies that Mosaic GPU takes by itself are left as they are.

  Args:
    anywhere: name of a kernel whose copies, if one atom wide, may start at
      any row and column.
    in_blocks: name of a kernel whose wider copies into shared memory may start
      at any row too. All rows of one must lie in the matrix, or none, which
      gives zeros.
    of_ragged: name of a kernel whose wider copies into shared memory start with
      an atom of a matrix that is no whole number of them. All rows of one must
      be followed by another row: what is past their ends is that one's.
    inside_rows: name of a kernel whose wider copies into shared memory of
      matrices that are no whole number of atoms, but of 8 rows, lie within
      their rows and start at any multiple of 16 bytes.
    any_column: name of a kernel, and columns of those of its matrices, of whole
      atoms, of which wider copies into shared memory do so too.
  """
  if anywhere is not None:
    _anywhere.add(anywhere)
  if in_blocks is not None:
    _in_blocks.add(in_blocks)
  if of_ragged is not None:
    _of_ragged.add(of_ragged)
  if inside_rows is not None:
    _inside_rows.add(inside_rows)
  if any_column is not None:
    _any_column.add(any_column)
  _patch_async_copy()


def evict_results_first(name: str) -> None:
  """Lets the L2 drop what a kernel stores by TMA before anything else.

  Args:
    name: of the kernel, all of whose stores are meant.
  """
  _evicted_first.add(name)
  _patch_async_copy()


def spread_barriers(name: str) -> None:
  """Lets four warps of a kernel make its barriers ready, a part each.

  Mosaic GPU has one thread do it, one barrier after the other, 27 cycles each.

  Args:
    name: of the kernel.
  """
  _spread.add(name)
  _patch_barriers()


@functools.cache
def _patch_barriers() -> None:
  operation = dialect.InitializeBarrierOp.OPERATION_NAME
  lowerings, one_by_one = (
    dialect_lowering._lowerings,
    utils.BarrierRef.initialize,
  )
  lower = lowerings[operation]

  def lower_initialize(context, op):
    if _name_here() not in _spread:
      return lower(context, op)
    arrivals = op.arrival_count.value
    if not op.orders_tensor_core.value:
      arrivals *= utils.WARPGROUP_SIZE
    _initialize_barriers(op.base_pointer, op.num_barriers.value, arrivals)
    return []

  def initialize(barrier_memref, arrival_count=1):
    if _name_here() not in _spread:
      return one_by_one(barrier_memref, arrival_count)
    (count,) = ir.MemRefType(barrier_memref.type).shape
    pointer = utils.memref_ptr(barrier_memref)
    _initialize_barriers(pointer, count, arrival_count)
    zero = utils.c(0, ir.IntegerType.get_signless(32))
    phases = memref.alloca(ir.MemRefType.get((), zero.type), [], [])
    memref.store(zero, phases, [])
    return utils.BarrierRef(pointer, zero, phases, count)

  lowerings[operation] = lower_initialize
  utils.BarrierRef.initialize = staticmethod(initialize)


def _name_here() -> str:
  """The name of the kernel that operations are made for; "" if it has none."""
  operation = ir.InsertionPoint.current.block.owner
  while operation is not None:
    found = operation.operation
    if found.name == "builtin.module" and "sym_name" in found.attributes:
      return ir.StringAttr(found.attributes["sym_name"]).value
    operation = found.parent
  return ""


def _initialize_barriers(pointer, count: int, arrivals: int) -> None:
  """Makes barriers ready, each warp of the first warpgroup every fourth."""
  i32 = ir.IntegerType.get_signless(32)
  warp, is_one = utils.warp_idx(), nvvm.elect_sync()
  own = arith.muli(warp, utils.c(8, i32))
  own = arith.addi(llvm.ptrtoint(i32, pointer), own)
  less = arith.CmpIPredicate.ult
  for first in range(0, count, 4):
    has_one = arith.cmpi(less, warp, utils.c(min(4, count - first), i32))
    llvm.inline_asm(
      ir.Type.parse("!llvm.void"),
      [own, utils.c(arrivals, i32), arith.andi(is_one, has_one)],
      f"@$2 mbarrier.init.shared::cta.b64 [$0+{8 * first}], $1;",
      "r,r,b",
      has_side_effects=True,
    )


def anywhere(index: jax.Array) -> jax.Array:
  """A row or column that a copy starts at, if `allow_ragged_copies` lets it.

  Mosaic GPU infers from the indices of copies which layouts shared memory can
  have, and wants to be told that they are multiples of an atom. This tells it
  so, of an index that may be any. Nothing else reads it, and the copies that
  start there are described to TMA row by row.
  """
  return pl.multiple_of(index, 64)


@functools.cache
def _patch_async_copy() -> None:
  context = launch_context.LaunchContext
  original = context.async_copy

  @functools.wraps(original)
  def async_copy(self, *, src_ref, dst_ref, gmem_transform=(), **kwargs):
    into_smem = utils.is_smem_ref(dst_ref.type)
    gmem, smem = (src_ref, dst_ref) if into_smem else (dst_ref, src_ref)
    transforms = gmem_transform
    if not isinstance(transforms, tuple):
      transforms = (transforms,)
    is_ragged = _is_ragged(gmem, transforms)
    name, columns = _kernel_name(self), ir.MemRefType(gmem.type).shape[-1]
    any_column = (name, columns) in _any_column
    wanted = is_ragged or (len(transforms) == 1 and name in _anywhere)
    if wanted and _is_one_atom_wide(smem):
      smem, transforms = utils.memref_fold(smem, 0, 3), ()
    elif into_smem and name in _in_blocks and _is_tiled(smem):
      *_, width = ir.MemRefType(smem.type).shape
      transforms = (_BlocksOfRows(width, any_column),)
    elif into_smem and any_column and _is_tiled(smem):
      transforms = (_InsideRows(transforms[0].tiling),)
    elif into_smem and is_ragged and name in _of_ragged:
      transforms = (_Atoms(transforms[0].tiling),)
    elif into_smem and is_ragged and name in _inside_rows:
      transforms = (_InsideRows(transforms[0].tiling),)
    src_ref, dst_ref = (gmem, smem) if into_smem else (smem, gmem)
    original(
      self,
      src_ref=src_ref,
      dst_ref=dst_ref,
      gmem_transform=transforms,
      **kwargs,
    )
    if not into_smem and name in _evicted_first:
      _evict_stores_first(ir.InsertionPoint.current.block)

  context.async_copy = async_copy


def _evict_stores_first(block) -> None:
  """Gives the TMA stores of a block of operations a policy for the L2.

  Mosaic GPU's have none, and MLIR's lowers none of a store with a predicate.
  """
  name = "nvvm.cp.async.bulk.tensor.global.shared.cta"
  for store in [op for op in block.operations if op.operation.name == name]:
    matrix, source, *indices, predicate = store.operands
    places = ", ".join(f"${3 + i}" for i in range(len(indices)))
    with ir.InsertionPoint(store):
      llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [predicate, source, matrix, *indices],
        "{ .reg .b64 policy;"
        " createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        f" @$0 cp.async.bulk.tensor.{len(indices)}d.global.shared::cta.tile"
        f".bulk_group.L2::cache_hint [$2, {{{places}}}], [$1], policy; }}",
        "b,r,l" + ",r" * len(indices),
        has_side_effects=True,
      )
    store.operation.erase()


def _kernel_name(context) -> str:
  return ir.StringAttr(context.module.operation.attributes["sym_name"]).value


def _is_ragged(gmem, transforms) -> bool:
  """Whether Mosaic GPU would refuse the matrix: not a whole grid of atoms."""
  if len(transforms) != 1:
    return False
  tiling = getattr(transforms[0], "tiling", ())
  shape = tuple(ir.MemRefType(gmem.type).shape)[-2:]
  return len(tiling) == 2 and any(
    size > tile and size % tile for size, tile in zip(shape, tiling)
  )


def _is_one_atom_wide(smem) -> bool:
  shape = tuple(ir.MemRefType(smem.type).shape)
  return len(shape) == 4 and shape[1] == 1


def _is_tiled(smem) -> bool:
  shape = tuple(ir.MemRefType(smem.type).shape)
  return len(shape) == 4 and shape[2] == 8


def _reinterpreted(ref, shape: Sequence[int], strides: Sequence[int]):
  """The same memory under another shape."""
  kind = ir.MemRefType(ref.type)
  _, offset = kind.get_strides_and_offset()
  layout = ir.StridedLayoutAttr.get(offset, strides)
  return memref.reinterpret_cast(
    ir.MemRefType.get(shape, kind.element_type, layout, kind.memory_space),
    ref,
    [],
    [],
    [],
    static_offsets=[offset],
    static_sizes=shape,
    static_strides=strides,
  )


@dataclasses.dataclass(frozen=True)
class _BlocksOfRows(launch_context.MemRefTransform):
  """A matrix as [blocks of 8 rows, atoms of columns, rows, columns].

  TMA adds up coordinates times strides, and dimensions may overlap: the first
  block starts at whichever row, each further one 8 rows on. So only the first
  block's rows are compared with the matrix's, and if the first atom may start
  at any column, its columns alone.

  Attributes:
    width: columns of an atom.
    any_column: whether copies start inside of atoms.
  """

  width: int
  any_column: bool

  def apply(self, ref):
    _, columns = shape = ir.MemRefType(ref.type).shape
    strides = [8 * columns, self.width, columns, 1]
    return _reinterpreted(ref, self.transform_gmem_shape(shape), strides)

  def transform_gmem_shape(self, shape):
    rows, columns = shape
    atoms = -(-columns // self.width)
    inside = columns if self.any_column else min(columns, self.width)
    return (-(-rows // 8), atoms, rows, inside)

  def transform_shape(self, shape):
    rows, columns = shape
    return (rows // 8, columns // self.width, 8, self.width)

  def transform_index(self, idx):
    row, column = idx
    zero, width = (utils.c(x, ir.IndexType.get()) for x in (0, self.width))
    if self.any_column:
      return (zero, zero, row, column)
    return (zero, arith.divui(column, width), row, zero)

  def transform_strides(self, strides):
    row, column = strides
    return (8 * row, self.width * column, row, column)


@dataclasses.dataclass(frozen=True)
class _Atoms(launch_context.MemRefTransform):
  """Matrices as grids of swizzle atoms, whole or not at their ends.

  Attributes:
    tiling: rows and columns of an atom.
  """

  tiling: tuple[int, int]

  def apply(self, ref):
    kind = ir.MemRefType(ref.type)
    given, _ = kind.get_strides_and_offset()
    shape = self.transform_gmem_shape(kind.shape)
    return _reinterpreted(ref, shape, self.transform_strides(given))

  def transform_gmem_shape(self, shape):
    *lead, rows, columns = shape
    height, width = self.tiling
    return (*lead, -(-rows // height), -(-columns // width), *self.tiling)

  def batch(self, leading_rank):
    del leading_rank  # any
    return self

  def transform_shape(self, shape):
    return self.transform_gmem_shape(shape)

  def transform_index(self, idx):
    *lead, row, column = idx
    zero, height, width = (
      utils.c(x, ir.IndexType.get()) for x in (0, *self.tiling)
    )
    atom = arith.divui(row, height), arith.divui(column, width)
    return (*lead, *atom, zero, zero)

  def transform_strides(self, strides):
    *lead, row, column = strides
    height, width = self.tiling
    return (*lead, height * row, width * column, row, column)


@dataclasses.dataclass(frozen=True)
class _InsideRows(_Atoms):
  """The same, of atoms that start at any column of whole blocks of 8 rows.

  The first one does; TMA adds up coordinates times strides, so each further one
  starts an atom's columns later. Only the first one's columns are compared with
  the matrix's: all must lie in it.
  """

  def transform_gmem_shape(self, shape):
    *lead, rows, columns = shape
    height, width = self.tiling
    return (*lead, rows // height, -(-columns // width), height, columns)

  def transform_shape(self, shape):
    return super().transform_gmem_shape(shape)

  def transform_index(self, idx):
    *lead, row, column = idx
    zero, height = (utils.c(x, ir.IndexType.get()) for x in (0, self.tiling[0]))
    return (*lead, arith.divui(row, height), zero, zero, column)
