"""Loads from global memory that start at any element."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
import numpy as np

from pallas_gemm import compat
from pallas_gemm.ptx import mlir


def load_clamped(
  vector: Any, start: jax.Array, count: int, layout: Any
) -> jax.Array:
  """Consecutive elements of a vector; past its end some of the last ones.

  Args:
    vector: [size] of float32 in global memory. The interpreter needs all that
      is loaded to lie inside.
    start: the first; even, where threads have two elements each.
    count: how many.
    layout: which threads have them.
  """
  if not compat.targets_gpu():
    return vector.at[pl.ds(start, count)][...]
  (size,) = vector.shape
  found = plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=layout)
  kinds = plgpu.RefType(), plgpu.Layout.WG_SPLAT

  @plgpu.inline_mgpu(arg_types=kinds, return_type=found)
  def load(_, vector, start):
    tiled, in_global = layout.to_mgpu(), ir.Type.parse("!llvm.ptr<1>")
    # Which memory a pointer is to, LLVM does not always find out.
    pointer = llvm.addrspacecast(in_global, utils.memref_ptr(vector))
    length, f32 = tiled.vector_length, ir.F32Type.get()
    i32 = ir.IntegerType.get_signless(32)
    # A pair lies in eight bytes of a vector of an even size.
    step = length if size % length == 0 else 1
    kind = ir.VectorType.get((step,), f32)

    def element(index, ahead: int):
      at = arith.addi(arith.index_cast(i32, index), start.registers.item())
      at = arith.addi(at, mlir.i32(ahead))
      at = arith.minsi(at, mlir.i32(size - step))
      place = utils.getelementptr(pointer, [at], f32)
      return llvm.load(kind, place, alignment=4 * step)

    registers = np.empty(tiled.registers_shape((count,)), dtype=object)
    for i, (index,) in enumerate(tiled.thread_idxs((count,))):
      parts = [element(index, ahead) for ahead in range(0, length, step)]
      registers.flat[i] = utils.vector_concat(parts)
    return mgpu.FragmentedArray(
      _registers=registers, _layout=tiled, _is_signed=None
    )

  return load(vector, jnp.int32(start))
