"""Operands that know their scale, as users pass them to the ops."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm import dtypes, report
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.ops import arguments, constants, planes, scales
from pallas_gemm.ops.arguments import check
from pallas_gemm.ops.scales import FIELDS
from pallas_gemm.ops.spec import Operands
from pallas_gemm.quantization import Quantized, Recipe, as_quantized
from pallas_gemm.splitting import Split

_BFLOAT16 = jax.ShapeDtypeStruct((), jnp.bfloat16)


def operand(name: str, value: Any) -> Any:
  """An array, a `Split`, or a `Quantized` of what is one."""
  if isinstance(value, Split):
    return value
  if hasattr(value, "__jax_array__") and not isinstance(value, jax.Array):
    return operand(name, value.__jax_array__())  # of `nnx.Param`
  found = as_quantized(value, name)
  return arguments.array(name, value) if found is None else found


def typed(a: Any, b: Any) -> Sequence[Any]:
  """What the types of factors and activations follow from.

  Sums of `Quantized` are floating; JAX promotes no two 8-bit floats.
  """
  is_mixed = {str(getattr(v, "dtype", "")) for v in (a, b)} == set(
    legal.FLOATS8
  )
  if is_mixed or isinstance(a, Quantized) or isinstance(b, Quantized):
    return _BFLOAT16, _BFLOAT16
  return [
    jax.ShapeDtypeStruct((), v.dtype) if isinstance(v, Split) else v
    for v in (a, b)
  ]


def apart(
  names: Operands, x: Operands, recipe: Recipe | None = None
) -> Operands:
  """The operands, values and scales of each `Quantized` apart.

  Beside an array of 16 bits or more it is multiplied out, and said so, unless
  there is a recipe, by which that becomes one of 8 bits.

  Raises:
    TypeError: a `Quantized` beside 8 bits of another kind.
  """
  x = planes.joined(names, x)
  found, there = {}, scales.multiplied(x)
  wide = [v.dtype for v in there.values() if v.dtype.itemsize > 1]
  of_recipe = {recipe.forward} if wide and isinstance(recipe, Recipe) else set()
  for (field, v), name in zip(there.items(), names):
    if not isinstance(v, Quantized):
      continue
    _check_mesh(name, v)
    if of_recipe or not wide:
      found |= {field: v.values, FIELDS[field]: v.scale}
      continue
    wanted = (
      f"an array beside the Quantized {name} must be of 8 bits or floating"
    )
    is_floating = dtypes.kind(wide[0]) in ("floating", "complex")
    check(is_floating, wanted, wide[0].name, TypeError)
    report.warn_once(
      f"{name} of {v.dtype.name} is multiplied by its scale into {wide[0].name}"
      f" outside of the kernel: {1 + 2 * wide[0].itemsize} bytes for each of"
      " its elements are read and written at each call; quantize the other"
      " operand too, or convert it once, beforehand"
    )
    v = constants.constant(v, constants.OF_8_BITS)
    found[field] = v.dequantized(wide[0])
  x = x._replace(**found)
  kinds = {v.dtype.name for v in scales.multiplied(x).values()}
  if of_recipe:
    kinds = of_recipe | (kinds - {dtype.name for dtype in wide})
  if x.has_scales:
    wanted = "operands with scales must all be of float8_e4m3fn or float8_e5m2,"
    ok = kinds <= set(legal.FLOATS8) or kinds == {"int8"}
    check(
      ok, f"{wanted} or all of int8", " and ".join(sorted(kinds)), TypeError
    )
  return x


def _check_mesh(name: str, v: Quantized) -> None:
  """Values and scale lie on one mesh, as far as types say."""
  own, of_scale = (jax.typeof(x).sharding.mesh for x in (v.values, v.scale))
  wanted = f"{name}.scale must lie on the mesh of {name}.values, {own}"
  ok = own.empty or of_scale.empty or own == of_scale
  check(ok, wanted, str(of_scale))


def multiplied_out(x: Operands) -> Operands:
  """A and B in bfloat16, for what only `jax.lax` takes."""
  one = jnp.ones((), jnp.float32)
  both = (
    Quantized(v, one if scale is None else scale)
    for v, scale in ((x.a, x.scale_a), (x.b, x.scale_b))
  )
  of_8_bits = (constants.constant(v, constants.OF_8_BITS) for v in both)
  return Operands(*[v.dequantized(jnp.bfloat16) for v in of_8_bits])


def result_dtype(value: Any, x: Operands, name: str = "out_dtype") -> Any:
  """Of a product's result: by default of scaled operands bfloat16.

  Args:
    value: what the user asks for.
    x: the operands, values and scales apart, of promoted dtypes.
    name: of the argument.
  """
  if x.has_planes:
    float32 = jnp.dtype("float32")
    return arguments.dtype_of(value, float32, name, like=float32)
  if not x.has_scales:
    dtype = max(x.a.dtype, x.b.dtype, key=lambda dtype: dtype.itemsize)
    return arguments.dtype_of(value, dtype, name, like=dtype)
  bfloat16 = jnp.dtype("bfloat16")
  wanted = arguments.dtype_of(value, bfloat16, name)
  is_wide = wanted.name in ("bfloat16", "float16", "float32")
  what = f"{name} must be of 16 or 32 bits, floating, for operands with scales"
  check(is_wide, what, wanted.name, TypeError)
  return wanted


def named(
  x: Operands, words: dict[str, str], batch: str
) -> tuple[dict[str, Any], dict[str, str]]:
  """Scales without dimensions that are one for all, and their letters.

  Args:
    x: the operands; values and scales as users have them.
    words: the letters of each operand, by its field.
    batch: letters along which no scale keeps blocks.
  """
  found, of_found = {}, {}
  for field, of in FIELDS.items():
    if (scale := getattr(x, of)) is not None:
      shape = getattr(x, field).shape
      scale, word = scales.named(scale, words[field], shape)
      size = dict(zip(words[field], shape))
      found[of], of_found[of] = scales.spread(scale, word, batch, size)
  return found, of_found
