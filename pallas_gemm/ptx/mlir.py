"""MLIR values that the instructions here are made of: threads and addresses.

Tests put arrays of numpy in their place, an element a thread, and so run what
is emitted without a GPU.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gemm.hardware import LINE_BYTES, VECTOR_BYTES

# Of a warpgroup.
THREADS = 128
WARPS, LANES = 4, 32
WORD_BYTES = 4
# Rows of a swizzle atom.
ATOM_ROWS = 8


def swizzled_type(ref: Any, atom: int) -> plgpu.RefType:
  """Of a tile in atoms of 8 rows of that many bytes."""
  columns = atom // jnp.dtype(ref.dtype).itemsize
  return plgpu.RefType(
    (
      plgpu.TilingTransform((ATOM_ROWS, columns)),
      plgpu.SwizzleTransform(atom),
    )
  )


class Swizzle:
  """Where the elements of a swizzled tile lie in shared memory.

  In atoms of 8 rows of up to 128 bytes; first the atoms of 8 whole rows. In an
  atom's row vectors of 16 bytes are permuted.

  Attributes:
    atom: bytes of a row of an atom.
    atoms_bytes: of the atoms of 8 whole rows.
  """

  def __init__(self, row_bytes: int, atom: int):
    self.atom, self.atoms_bytes = atom, ATOM_ROWS * row_bytes

  def of(self, row, column):
    """Bytes from the start to a column, in bytes, of a row."""
    inside = arith.remui(row, i32(ATOM_ROWS))
    # Bits of the address from 128 bytes on.
    permuted = arith.divui(arith.muli(inside, i32(self.atom)), i32(LINE_BYTES))
    permuted = arith.remui(permuted, i32(self.atom // VECTOR_BYTES))
    offset = arith.remui(column, i32(self.atom))
    offset = arith.xori(offset, arith.muli(permuted, i32(VECTOR_BYTES)))
    offset = multiply_add(inside, self.atom, offset)
    atom = arith.divui(column, i32(self.atom))
    offset = multiply_add(atom, ATOM_ROWS * self.atom, offset)
    above = arith.divui(row, i32(ATOM_ROWS))
    return multiply_add(above, self.atoms_bytes, offset)


def pitch(ref) -> int:
  """Bytes from a row of a matrix to the next one."""
  kind = ir.MemRefType(ref.type)
  strides, _ = kind.get_strides_and_offset()
  return strides[0] * utils.bitwidth(kind.element_type) // 8


def address(ref):
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def shared_address(ref):
  return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def thread():
  """The number of a thread in its warpgroup."""
  return arith.remui(utils.thread_idx(), i32(THREADS))


def warp_and_lane():
  """The numbers of a thread's warp in its warpgroup, and in that its own."""
  number = thread()
  return arith.divui(number, i32(LANES)), arith.remui(number, i32(LANES))


def less(x, bound: int):
  return arith.cmpi(arith.CmpIPredicate.slt, x, i32(bound))


def i32(value: int):
  return utils.c(value, ir.IntegerType.get_signless(32))


def extended(x):
  return arith.extui(ir.IntegerType.get_signless(64), x)


def truncated(x):
  return arith.trunci(ir.IntegerType.get_signless(32), x)


def multiply_add(x, factor: int, y):
  return arith.addi(arith.muli(x, utils.c(factor, x.type)), y)


def bytes_behind(address, count: int):
  return arith.addi(address, utils.c(count, address.type))


def for_each(count, visit) -> None:
  """visit(i) for i below a count."""

  @utils.fori(count, [])
  def _(i, carry):
    visit(i)
    return carry


def asm(text: str, constraints: str, *operands, result: str = "void"):
  return llvm.inline_asm(
    ir.Type.parse(f"!llvm.{result}" if result != "i32" else result),
    list(operands),
    text,
    constraints,
    has_side_effects=True,
  )
