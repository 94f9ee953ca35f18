"""Values of 8 bits, planes of float32, and registers in pairs."""

from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector
import numpy as np

from pallas_gemm import compat

# Bits of float8_e5m2 in which its largest number and infinity differ.
_INFINITY = 0x7B ^ 0x7C


def to_e5m2(array: jax.Array, layout: Any) -> jax.Array:
  """Values in float8_e5m2, with the infinities that there are.

  Of them the instruction makes the largest finite number.

  Args:
    array: of float32.
    layout: that it has.
  """
  values = array.astype(jnp.float8_e5m2)
  if not compat.targets_gpu():
    return values

  @plgpu.inline_mgpu(
    arg_types=(layout, layout),
    return_type=plgpu.ShapeDtypeStruct(
      array.shape, jnp.float8_e5m2, layout=layout
    ),
  )
  def corrected(_, array, values):
    found = np.empty_like(values.registers)
    for at, x in np.ndenumerate(array.registers):
      bits = ir.VectorType.get(x.type.shape, ir.IntegerType.get_signless(8))
      infinity = arith.constant(x.type, _splat(x.type, float("inf")))
      is_infinite = arith.cmpf(arith.CmpFPredicate.OEQ, math.absf(x), infinity)
      changed, same = (
        arith.constant(bits, _splat(bits, value)) for value in (_INFINITY, 0)
      )
      mask = arith.select(is_infinite, changed, same)
      value = values.registers[at]
      fixed = arith.xori(vector.bitcast(bits, value), mask)
      found[at] = vector.bitcast(value.type, fixed)
    return mgpu.FragmentedArray(
      _registers=found, _layout=values.layout, _is_signed=None
    )

  return corrected(array, values)


def _splat(kind: Any, value: float) -> Any:
  kind = ir.VectorType(kind)
  make = ir.FloatAttr.get if isinstance(value, float) else ir.IntegerAttr.get
  return ir.DenseElementsAttr.get_splat(kind, make(kind.element_type, value))


def split_off(x: jax.Array, near: jax.Array, layout: Any) -> list[jax.Array]:
  """A number rounded to bfloat16, and what x is more than that.

  Two are rounded by an instruction. Of `astype` there and back the compiler
  makes one for each.

  Args:
    x: of float32.
    near: of float32, what is rounded: x or close to it.
    layout: that both have, of vectors of some twos of elements.
  """
  if not compat.targets_gpu():  # where XLA takes two casts for none
    return [near.astype(jnp.bfloat16), x - lax.reduce_precision(near, 8, 7)]
  types = [
    plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)
    for dtype in (jnp.bfloat16, jnp.float32)
  ]

  @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=types)
  def split(_, x, near):
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    planes, rests = (np.empty_like(x.registers) for _ in range(2))
    for at, one in np.ndenumerate(x.registers):
      (count,) = ir.VectorType(one.type).shape
      left, words = [], []
      for i in range(0, count, 2):
        low, high = (
          vector.extract(near.registers[at], [], [j]) for j in (i, i + 1)
        )
        word = llvm.inline_asm(
          i32, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"
        )
        words.append(word)
        for j, bits in (
          (i, arith.shli(word, utils.c(16, i32))),
          (i + 1, arith.andi(word, utils.c(-(2**16), i32))),
        ):
          x_j = vector.extract(one, [], [j])
          left.append(arith.subf(x_j, arith.bitcast(f32, bits)))
      planes[at] = vector.bitcast(
        ir.VectorType.get((count,), ir.BF16Type.get()),
        vector.from_elements(ir.VectorType.get((count // 2,), i32), words),
      )
      rests[at] = vector.from_elements(one.type, left)
    return [
      mgpu.FragmentedArray(_registers=y, _layout=x.layout, _is_signed=None)
      for y in (planes, rests)
    ]

  return split(x, near)


def in_pairs(array: jax.Array, layout: Any, paired: Any) -> jax.Array:
  """The same array, of whose registers each two are one.

  Args:
    array: each thread has elements one by one.
    layout: that it has.
    paired: the same, but that two of them are a vector.
  """
  if not compat.targets_gpu():
    return array
  of = plgpu.ShapeDtypeStruct(array.shape, array.dtype, layout=paired)

  @plgpu.inline_mgpu(arg_types=(layout,), return_type=of)
  def joined(_, x):
    layout = paired.to_mgpu()
    shape = layout.registers_shape(tuple(array.shape))
    singles = x.registers.reshape(-1, 2)
    registers = np.empty(len(singles), dtype=object)
    for i, pair in enumerate(singles):
      registers[i] = utils.vector_concat(list(pair))
    return mgpu.FragmentedArray(
      _registers=registers.reshape(shape),
      _layout=layout,
      _is_signed=x.is_signed,
    )

  return joined(array)
