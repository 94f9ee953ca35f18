"""Operands by which there is no derivative: an error, not zeros."""

import functools
from typing import Any

import jax

OF_8_BITS = (
  "a product has no derivative by operands of 8 bits nor by their scales; pass"
  " arrays of 16 or 32 bits and quantize=pallas_gemm.Recipe(), or wrap the"
  " operand in jax.lax.stop_gradient"
)
OF_SPLIT = (
  "a product has no derivative by a Split; pass the array that it was made of,"
  " or wrap it in jax.lax.stop_gradient"
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def constant(v: Any, why: str) -> Any:
  """An array or a pytree, by which a derivative raises a TypeError."""
  del why
  return v


@constant.defjvp
def _raise(why, primals, tangents):
  del primals, tangents
  raise TypeError(why)
