"""What kernels ask of Mosaic GPU's lowering that Pallas has no argument for.

A kernel asks by its `CompilerParams`. The lowering of kernels that have
Pallas' own stays as it is. Private in JAX, as what `compat` touches.
"""

import contextvars
import dataclasses
import functools
from typing import Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import (
  dialect,
  dialect_lowering,
  launch_context,
  utils,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from pallas_gemm import compat


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerParams(plgpu.CompilerParams):
  """Pallas' own, and how TMA copies of a kernel are lowered.

  Mosaic GPU describes a matrix to TMA as a grid of swizzle atoms (8 rows of
  up to 128 bytes). It refuses a matrix that is not a whole number of them, a
  ragged one, and a copy that does not start with an atom is wrong: what is past
  the end of the atom comes as zeros. A copy that is one atom wide, a narrow
  one, needs no grid: its rows lie one after the other in shared memory
  either way. Narrow copies of ragged matrices are described to TMA row by row,
  if their row stride is a multiple of 16 bytes.

  Four warps of the kernel make its barriers ready, a part each. Mosaic GPU has
  one thread do it, one barrier after the other, 27 cycles each.

  Attributes:
    narrow_copies_anywhere: whether narrow copies may start at any row and
      column.
    wide_copies_at_any_row: whether wider copies into shared memory may. All
      rows of one must lie in the matrix, or none, which gives zeros.
    wide_copies_of_ragged: where wider copies into shared memory start, in
      ragged matrices. "atom": with an atom. All rows of one must be followed by
      another row: what is past their ends is that one's. "column": at any
      multiple of 16 bytes of a row of matrices of whole blocks of 8 rows. All
      columns must lie in the matrix. None: they are refused.
    columns_inside_atoms: columns of matrices of whole atoms of which wider
      copies into shared memory start at any multiple of 16 bytes of a row, too.
    evict_results_first: whether the L2 drops what the kernel stores by TMA
      before anything else.
  """

  narrow_copies_anywhere: bool = False
  wide_copies_at_any_row: bool = False
  wide_copies_of_ragged: Literal["atom", "column"] | None = None
  columns_inside_atoms: int | None = None
  evict_results_first: bool = False

  def __post_init__(self):
    super().__post_init__()
    _patch_lowering()


# Of the kernel that is being lowered, if they are of this module.
_params: contextvars.ContextVar[CompilerParams | None] = contextvars.ContextVar(
  "params", default=None
)


@functools.cache
def _patch_lowering() -> None:
  """Puts the rules of this module before Mosaic GPU's own."""
  lowering, context = compat.kernel_lowering(), launch_context.LaunchContext
  lowering.lower_jaxpr_to_module = _with_params(lowering.lower_jaxpr_to_module)
  context.async_copy = _async_copy(context.async_copy)
  rules, barrier = dialect_lowering._lowerings, utils.BarrierRef
  name = dialect.InitializeBarrierOp.OPERATION_NAME
  rules[name] = _initialize_operation(rules[name])
  barrier.initialize = staticmethod(_initialize_reference(barrier.initialize))


def _with_params(lower):
  @functools.wraps(lower)
  def lower_kernel(*args, **kwargs):
    own = (x for x in args if isinstance(x, CompilerParams))
    token = _params.set(next(own, None))
    try:
      return lower(*args, **kwargs)
    finally:
      _params.reset(token)

  return lower_kernel


def _initialize_operation(lower):
  def initialize(context, op):
    if _params.get() is None:
      return lower(context, op)
    arrivals = op.arrival_count.value
    if not op.orders_tensor_core.value:
      arrivals *= utils.WARPGROUP_SIZE
    _initialize_barriers(op.base_pointer, op.num_barriers.value, arrivals)
    return []

  return initialize


def _initialize_reference(one_by_one):
  def initialize(barrier_memref, arrival_count=1):
    if _params.get() is None:
      return one_by_one(barrier_memref, arrival_count)
    (count,) = ir.MemRefType(barrier_memref.type).shape
    pointer = utils.memref_ptr(barrier_memref)
    _initialize_barriers(pointer, count, arrival_count)
    zero = utils.c(0, ir.IntegerType.get_signless(32))
    phases = memref.alloca(ir.MemRefType.get((), zero.type), [], [])
    memref.store(zero, phases, [])
    return utils.BarrierRef(pointer, zero, phases, count)

  return initialize


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
  """A row or column that a copy starts at, if `CompilerParams` let it.

  Mosaic GPU infers from the indices of copies which layouts shared memory can
  have, and wants to be told that they are multiples of an atom. This tells it
  so, of an index that may be any. Nothing else reads it, and the copies that
  start there are described to TMA row by row.
  """
  return pl.multiple_of(index, 64)


def _async_copy(original):
  @functools.wraps(original)
  def async_copy(self, *, src_ref, dst_ref, gmem_transform=(), **kwargs):
    params = _params.get()
    into_smem = utils.is_smem_ref(dst_ref.type)
    gmem, smem = (src_ref, dst_ref) if into_smem else (dst_ref, src_ref)
    if params is not None:
      smem, gmem_transform = _described(
        params, gmem, smem, gmem_transform, into_smem
      )
    src_ref, dst_ref = (gmem, smem) if into_smem else (smem, gmem)
    original(
      self,
      src_ref=src_ref,
      dst_ref=dst_ref,
      gmem_transform=gmem_transform,
      **kwargs,
    )
    if params is not None and params.evict_results_first and not into_smem:
      _evict_stores_first(ir.InsertionPoint.current.block)

  return async_copy


def _described(params: CompilerParams, gmem, smem, transforms, into_smem: bool):
  """What of shared memory is copied, and the transforms of global memory."""
  if not isinstance(transforms, tuple):
    transforms = (transforms,)
  is_alone = len(transforms) == 1
  tiling = getattr(transforms[0], "tiling", ()) if is_alone else ()
  shape = tuple(ir.MemRefType(gmem.type).shape)[-2:]
  is_ragged = len(tiling) == 2 and any(
    size > tile and size % tile for size, tile in zip(shape, tiling)
  )
  box = tuple(ir.MemRefType(smem.type).shape)
  is_narrow = len(box) == 4 and box[1] == 1
  if is_narrow and (is_ragged or (is_alone and params.narrow_copies_anywhere)):
    return utils.memref_fold(smem, 0, 3), ()
  of_ragged = params.wide_copies_of_ragged if is_ragged else None
  any_row = params.wide_copies_at_any_row
  cuts_atoms = of_ragged == "column" or shape[-1] == params.columns_inside_atoms
  is_wide = into_smem and len(box) == 4 and box[2] == 8
  if is_wide and (any_row or cuts_atoms or of_ragged):
    return smem, (_Grid(box[2:], any_row, cuts_atoms),)
  return smem, transforms


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


@dataclasses.dataclass(frozen=True)
class _Grid(launch_context.MemRefTransform):
  """Matrices as [blocks of rows, atoms of columns, rows, columns].

  TMA adds up coordinates times strides, and dimensions may overlap. The first
  block starts at whichever row, each further one a block's rows later, so only
  the first one's rows are compared with the matrix's. Columns likewise: an atom
  that starts inside of one is compared with the matrix's as the first.

  Attributes:
    tiling: rows and columns of an atom.
    any_row: whether copies start inside of blocks.
    cuts_atoms: whether copies start inside of atoms.
  """

  tiling: tuple[int, int]
  any_row: bool
  cuts_atoms: bool

  def apply(self, ref):
    """The same memory under another shape."""
    kind = ir.MemRefType(ref.type)
    given, offset = kind.get_strides_and_offset()
    shape = self.transform_gmem_shape(kind.shape)
    strides = self.transform_strides(given)
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

  def transform_gmem_shape(self, shape):
    *lead, rows, columns = shape
    height, width = self.tiling
    return (
      *lead,
      -(-rows // height),
      -(-columns // width),
      rows if self.any_row else height,
      columns if self.cuts_atoms else min(columns, width),
    )

  def batch(self, leading_rank):
    del leading_rank  # any
    return self

  def transform_shape(self, shape):
    *lead, rows, columns = shape
    height, width = self.tiling
    return (*lead, rows // height, columns // width, *self.tiling)

  def transform_index(self, idx):
    *lead, row, column = idx
    zero, height, width = (
      utils.c(x, ir.IndexType.get()) for x in (0, *self.tiling)
    )
    block = atom = zero
    if not self.any_row:
      block, row = arith.divui(row, height), zero
    if not self.cuts_atoms:
      atom, column = arith.divui(column, width), zero
    return (*lead, block, atom, row, column)

  def transform_strides(self, strides):
    *lead, row, column = strides
    height, width = self.tiling
    return (*lead, height * row, width * column, row, column)
