"""What kind of number a dtype is, and what sums of it are computed in."""

from typing import Any

import jax.numpy as jnp


def kind(dtype: Any) -> str:
  """The kind of number: floating, complex, integer, bool; or other."""
  if getattr(dtype, "kind", "") == "m":  # NumPy counts durations as integers
    return "other"
  kinds = {
    "floating": jnp.floating,
    "complex": jnp.complexfloating,
    "integer": jnp.integer,
    "bool": jnp.bool_,
  }
  for name, parent in kinds.items():
    if jnp.issubdtype(dtype, parent):
      return name
  return "other"


def accumulation_dtype(a: Any, b: Any, out_dtype: Any) -> Any:
  """What sums and epilogue of a product are computed in: 32 bits or more.

  Args:
    a, b: dtypes of the operands.
    out_dtype: of the result.
  """
  dtype, out_dtype = max(a, b, key=lambda d: d.itemsize), jnp.dtype(out_dtype)
  if kind(dtype) != kind(out_dtype):  # of integers to floating, say
    dtype = out_dtype
  least = {"floating": jnp.float32, "integer": jnp.int32}
  if jnp.issubdtype(dtype, jnp.unsignedinteger):
    least["integer"] = jnp.uint32
  wide = jnp.dtype(least.get(kind(dtype), dtype))
  return max((wide, dtype, out_dtype), key=lambda d: d.itemsize)


def has_less_range(dtype: Any, other: Any) -> bool:
  """Whether a floating dtype overflows where another one does not.

  Example:
    >>> from pallas_gemm import dtypes
    >>> [dtypes.has_less_range(d, "float32") for d in ("float16", "bfloat16")]
    [True, False]
  """
  if not kind(dtype) == kind(other) == "floating":
    return False
  return jnp.finfo(dtype).maxexp < jnp.finfo(other).maxexp
