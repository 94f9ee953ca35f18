"""The largest magnitudes of rows."""

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_gemm import compat


def largest(array: jax.Array, layout: Any) -> jax.Array:
  """The largest |x| of each row, in float32, but for NaN; 0 of nothing else.

  An instruction takes two elements of 16 bits, and their magnitudes, at a time;
  Mosaic GPU's own maximum is NaN where one of the elements is.

  Args:
    array: [rows, columns] of float32, bfloat16 or float16.
    layout: that it has.
  """
  if not compat.targets_gpu():
    found = jnp.where(jnp.isnan(array), 0, jnp.abs(array))
    return jnp.max(found, axis=1).astype(jnp.float32)
  of_rows = plgpu.ShapeDtypeStruct(
    array.shape[:1], array.dtype, layout=layout.reduce(1)
  )

  @plgpu.inline_mgpu(arg_types=(layout,), return_type=of_rows)
  def reduced(_, x):
    return x.reduce(_larger, 1)

  found = jnp.abs(reduced(array).astype(jnp.float32))
  return jnp.where(found >= 0, found, 0.0)  # a row of NaN alone


def _larger(a: ir.Value, b: ir.Value) -> ir.Value:
  """The larger magnitude of each two; signs mean nothing."""
  kind = a.type
  if not isinstance(kind, ir.VectorType):
    one = ir.VectorType.get((1,), kind)
    a, b = (vector.broadcast(one, x) for x in (a, b))
    return vector.extract(_larger(a, b), [], [0])
  kind = ir.VectorType(kind)
  (count,), bits = kind.shape, utils.bitwidth(kind.element_type)
  if count * bits > 32:
    step = 32 // bits
    parts = [slice(i, i + step) for i in range(0, count, step)]
    cut = utils.vector_slice
    return utils.vector_concat([_larger(cut(a, x), cut(b, x)) for x in parts])
  word = ir.IntegerType.get_signless(count * bits)
  suffix = f"{kind.element_type}" + ("x2" if count == 2 else "")
  register = {16: "h", 32: "r"}[count * bits]
  found = llvm.inline_asm(
    word,
    [utils.bitcast(x, word) for x in (a, b)],
    f"max.xorsign.abs.{suffix} $0, $1, $2;",
    f"={register},{register},{register}",
  )
  return utils.bitcast(found, kind)
