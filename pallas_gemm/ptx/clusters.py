"""What the blocks of a cluster send each other through shared memory."""

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
import numpy as np

from pallas_gemm import compat
from pallas_gemm.hardware import VECTOR_BYTES
from pallas_gemm.ptx import mlir

# Of 64 rows of accumulators, those that a warp has.
_WARP_ROWS = 16


def fence_cluster() -> None:
  """Waits until the blocks of a cluster have what a thread has sent them.

  Before a barrier of the cluster is arrived at. Who waits for that needs no
  fence: shared memory is read where it was written to, and by no cache.
  """
  if not compat.targets_gpu():
    return

  @plgpu.inline_mgpu()
  def _(_):
    mlir.asm("fence.acq_rel.cluster;", "~{memory}")

  _()


def send(array: jax.Array, slot: Any, block: int, rows: int) -> None:
  """Stores accumulators in shared memory of another block of the cluster.

  Registers as they are, 16 bytes a thread, for `add_sent` of that block.

  Args:
    array: [rows, columns], float32, as wgmma leaves accumulators.
    slot: where it goes: room for it in the own block's shared memory.
    block: the number of the other one in the cluster, or of the own one.
    rows: of each 64, those that count. Warps that have none do not send.
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
  def _(_, array, slot):
    to = mlir.multiply_add(
      mlir.thread(), VECTOR_BYTES, mlir.shared_address(slot)
    )
    there = f"mapa.shared::cluster.u32 $0, $1, {block};"
    to = mlir.asm(there, "=r,r", to, result="i32")
    warp, _ = mlir.warp_and_lane()
    here = mlir.less(warp, -(-rows // _WARP_ROWS))
    words = _words_of(array.registers)
    for i in range(0, len(words), 4):
      store = "@$5 st.shared::cluster.v4.f32 [$0+%d], {$1, $2, $3, $4};"
      store %= i // 4 * mlir.THREADS * VECTOR_BYTES
      mlir.asm(store, "r,f,f,f,f,b", to, *words[i : i + 4], here)

  _(array, slot)


def add_sent(parts: Any, shape: tuple[int, int]) -> jax.Array:
  """The sum of what the blocks of a cluster have sent, in their order.

  Args:
    parts: the slots of all blocks, in shared memory.
    shape: rows and columns of what each has sent.
  """
  count, size = parts.shape
  found = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=found)
  def add(_, parts):
    start = mlir.multiply_add(
      mlir.thread(), VECTOR_BYTES, mlir.shared_address(parts)
    )
    zero = utils.c(0.0, ir.F32Type.get())
    like = mgpu.FragmentedArray.splat(zero, shape, layout=mgpu.WGMMA_LAYOUT)

    def part(number):
      words = []
      for i in range(size // (4 * mlir.THREADS)):
        offset = (
          number * size * mlir.WORD_BYTES + i * mlir.THREADS * VECTOR_BYTES
        )
        words += _load_vector(start, offset)
      return _with_registers(like, words)

    total = part(0)
    for number in range(1, count):
      total += part(number)
    return total

  return add(parts)


def _load_vector(address, offset: int) -> list[ir.Value]:
  """Four words of shared memory."""
  load = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
  words = mlir.asm(
    load, "=f,=f,=f,=f,r", address, result="struct<(f32, f32, f32, f32)>"
  )
  return [llvm.extractvalue(ir.F32Type.get(), words, [i]) for i in range(4)]


def _words_of(registers) -> list[ir.Value]:
  """The elements of registers, each a vector."""
  words = []
  for register in registers.flat:
    count = ir.VectorType(register.type).shape[0]
    words += [
      vector.extract(register, dynamic_position=[], static_position=[i])
      for i in range(count)
    ]
  return words


def _with_registers(array, words: list[ir.Value]):
  """An array like another one, with these elements in its registers."""
  kind = ir.VectorType(array.registers.flat[0].type)
  count = kind.shape[0]
  found = np.empty(array.registers.size, dtype=object)
  for i in range(found.size):
    found[i] = vector.from_elements(kind, words[i * count : (i + 1) * count])
  found = found.reshape(array.registers.shape)
  return mgpu.FragmentedArray(
    _registers=found, _layout=array.layout, _is_signed=None
  )
