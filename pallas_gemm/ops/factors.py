"""alpha and beta: numbers or arrays of shape (), factors of product and C."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import dtypes
from pallas_gemm.ops import arguments


def factor(
  name: str, value: Any, a: Any, b: Any, out_dtype: Any
) -> tuple[Any, bool]:
  """alpha or beta of A @ B, checked at every call, whatever its value.

  Returns:
    A scalar in the dtype of sums, None for the number 1; whether it is the
    number 0.
  """
  if type(value) in (float, int) and value == 1:
    return None, False
  if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
    value = value.__jax_array__()  # a module's parameter, say
  dtype = jnp.result_type(a, b)
  wide = dtypes.accumulation_dtype(
    dtype, dtype, arguments.dtype_of(out_dtype, dtype)
  )
  if not isinstance(value, jax.Array | np.ndarray):
    # NumPy's numbers are arrays: of them zero is read like any other.
    is_zero = value == 0 and not isinstance(value, np.generic)
    return _number(name, value, wide), is_zero
  arguments.array(name, value)
  if value.shape != ():
    raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
  kinds = {"integer": 0, "floating": 1, "complex": 2}
  have, want = (kinds.get(dtypes.kind(d)) for d in (value.dtype, wide))
  if have is None or want is None or have > want:
    wanted = _wanted(name, wide)
    raise TypeError(f"{wanted}, got an array of {value.dtype}")
  return jnp.asarray(value).astype(wide), False


def _wanted(name: str, wide: Any) -> str:
  words = {"floating": "real", "integer": "an integer", "bool": "the number 1"}
  kind = words.get(dtypes.kind(wide), "a number")
  return f"{name} must be {kind} for {wide.name}"


def _number(name: str, value: Any, wide: Any) -> np.ndarray:
  is_bool = isinstance(value, bool | np.bool_)
  if is_bool or not isinstance(value, numbers.Number):
    raise TypeError(
      f"{name} must be a number or a scalar array, got {type(value).__name__}"
    )
  kind = dtypes.kind(wide)
  is_complex = isinstance(value, complex | np.complexfloating)
  ok = kind != "bool" and (kind == "complex" or not is_complex)
  if ok and kind == "integer" and not isinstance(value, int):
    ok = math.isfinite(value) and value == int(value)
  if not ok:
    raise TypeError(f"{_wanted(name, wide)}, got {value}")
  convert = {"complex": complex, "floating": float, "integer": int}[kind]
  try:
    with np.errstate(over="ignore"):  # infinity, as in JAX
      return np.asarray(convert(value), wide)
  except OverflowError as error:
    raise TypeError(
      f"{name} must fit into {wide.name}, got {arguments.short(int(value))}"
    ) from error
