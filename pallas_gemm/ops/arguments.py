"""Checks of what users pass; each message names argument, got and want.

What depends on values, not on types, is checked at every call; the rest while
a call is traced, so that a compiled call does not pay for it.
"""

from collections.abc import Collection, Mapping
import math
import numbers
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import numerics, report
from pallas_gemm.ops.implementations import IMPLEMENTATIONS

_PRECISIONS = lax.Precision | lax.DotAlgorithmPreset | lax.DotAlgorithm
# Names of implementations that take grouped products.
GROUPED = ("sm90", "xla")


def array(name: str, value: Any) -> Any:
  """An array of numbers or booleans, as `jax.jit` takes it.

  Raises:
    TypeError: it is none.
  """
  if isinstance(value, jax.Array):
    return value
  if hasattr(value, "__jax_array__"):
    return array(name, value.__jax_array__())
  if isinstance(value, np.ma.MaskedArray):
    raise TypeError(
      f"{name} must be an array without a mask, got a masked one; fill it first"
    )
  if isinstance(value, np.ndarray | np.generic):
    if numerics.kind(value.dtype) == "other":
      raise TypeError(f"{name} must hold numbers, got dtype {value.dtype}")
    return value
  if isinstance(value, bool | float | complex):
    return value
  if isinstance(value, int):
    info = jnp.iinfo(jnp.result_type(int))
    if not info.min <= value <= info.max:
      raise ValueError(
        f"{name} must fit into {info.dtype}, got {_short(value)}"
      )
    return value
  raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def _short(value: int) -> str:
  """An integer that may have more digits than anybody reads."""
  digits = value.bit_length() * 3 // 10
  return f"an integer of about {digits} digits" if digits > 30 else str(value)


def check_numbers(**arrays: Any) -> None:
  """What is no array of keys, say, or None; checked while tracing."""
  for name, value in arrays.items():
    dtype = None if value is None else jnp.result_type(value)
    if not isinstance(dtype, np.dtype | type(None)):
      raise TypeError(f"{name} must hold numbers, got dtype {dtype}")


class Key:
  """What a compiled function is kept under: one object for equal options."""

  __slots__ = ("options",)

  def __init__(self, options: NamedTuple):
    self.options = options


_keys: dict[tuple[Any, ...], Key] = {}


def key(
  kind: type, *options: Any, names: Mapping[str, str] | None = None
) -> Key:
  """The key of arguments that are no arrays.

  Args:
    kind: the NamedTuple that they are the fields of.
    *options: the fields.
    names: of arguments that are not called as the fields are.

  Raises:
    TypeError: an argument can't be hashed.
  """
  try:
    return _keys[kind, *options]
  except KeyError:
    return _keys.setdefault((kind, *options), Key(kind(*options)))
  except TypeError:
    found = dict(zip(kind._fields, options))
  for name, value in found.items():
    if name in ("implementation", "precision") and isinstance(value, list):
      value = found[name] = tuple(value)
    try:
      hash(value)
    except TypeError as error:
      raise TypeError(
        f"{(names or {}).get(name, name)} must be hashable, got"
        f" {type(value).__name__}"
      ) from error
  return key(kind, *found.values())


def check_operand(name: str, value: Any) -> None:
  """An array of rank 1 or more."""
  if jnp.ndim(value) == 0:
    raise ValueError(f"{name} must have rank 1 or more, got a scalar")


def check_like(name: str, value: Any, other_name: str, other: Any) -> None:
  """An array of the shape and dtype of another."""
  if value.shape != other.shape or value.dtype != other.dtype:
    raise ValueError(
      f"{name} must be {other.dtype.name}{list(other.shape)} like {other_name},"
      f" got {value.dtype.name}{list(value.shape)}"
    )


def check_rank(name: str, value: Any, rank: int, dimensions: str) -> None:
  """An array of a fixed rank, with `dimensions` its shape in words."""
  if jnp.ndim(value) != rank:
    raise ValueError(
      f"{name} must be {dimensions}, got shape {jnp.shape(value)}"
    )


def check_integers(name: str, value: Any) -> None:
  """An array of integers."""
  dtype = jnp.result_type(value)
  if numerics.kind(dtype) != "integer":
    raise TypeError(f"{name} must hold integers, got dtype {dtype}")


def check_bool(name: str, value: Any) -> None:
  """A Python boolean: 0 and False are one key of a cache, not one argument."""
  if value is not True and value is not False:
    raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def check_transpose(name: str, value: jax.Array, flag: bool) -> None:
  """A vector has nothing to transpose."""
  if flag and value.ndim == 1:
    raise ValueError(
      f"transpose_{name} needs {name} of rank 2 or more, got shape"
      f" {value.shape}"
    )


def check_inner(names: tuple[str, str], a_shape, b_shape, k_a, k_b) -> None:
  """Both operands have the same K."""
  if k_a != k_b:
    a, b = names
    raise ValueError(
      f"{b} must have K = {k_a} like {a}, got K = {k_b}; shapes"
      f" {tuple(a_shape)} and {tuple(b_shape)}"
    )


def batch_shape(
  names: tuple[str, str], batch_a: tuple[int, ...], batch_b: tuple[int, ...]
) -> tuple[int, ...]:
  """The batch dimensions of the result."""
  try:
    return jnp.broadcast_shapes(batch_a, batch_b)
  except ValueError as error:
    a, b = names
    raise ValueError(
      f"batch dimensions of {b} must broadcast against those of {a}, {batch_a},"
      f" got {batch_b}"
    ) from error


def is_one(value: Any) -> bool:
  """Whether a factor is the number 1 as the program is written."""
  return type(value) in (float, int) and value == 1


def factor(name: str, value: Any, a: Any, b: Any, out_dtype: Any) -> Any:
  """alpha or beta in the dtype of sums, a scalar; checked at every call.

  Args:
    name: of the argument.
    value: a Python number, or an array of shape ().
    a, b: the operands.
    out_dtype: as the user passed it.

  Raises:
    TypeError: no number, or one that the dtype has no room for.
    ValueError: an array that is no scalar.
  """
  dtype = jnp.result_type(a, b)
  wanted = dtype_of(out_dtype, dtype)
  wide = numerics.accumulation_dtype(dtype, dtype, wanted)
  if isinstance(value, jax.Array | np.ndarray):
    array(name, value)
    if value.shape != ():
      raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
    kinds = {"integer": 0, "floating": 1, "complex": 2}
    have, want = (kinds.get(numerics.kind(d)) for d in (value.dtype, wide))
    if have is None or want is None or have > want:
      raise TypeError(
        f"{name} must be {_of_kind(wide)}, got an array of {value.dtype}"
      )
    return jnp.asarray(value).astype(wide)
  return np.asarray(_number(name, value, wide), wide)


def _of_kind(wide: Any) -> str:
  kind = numerics.kind(wide)
  words = {"floating": "real", "integer": "an integer", "bool": "the number 1"}
  return f"{words.get(kind, 'a number')} for {wide.name}"


def _number(name: str, value: Any, wide: Any) -> Any:
  if isinstance(value, bool | np.bool_) or not isinstance(
    value, numbers.Number
  ):
    raise TypeError(
      f"{name} must be a number or a scalar array, got {type(value).__name__}"
    )
  kind, wrong = numerics.kind(wide), f"{name} must be {_of_kind(wide)}, got"
  is_complex = isinstance(value, complex | np.complexfloating)
  if kind == "bool" or (is_complex and kind != "complex"):
    raise TypeError(f"{wrong} {value}")
  try:
    if kind != "integer":
      return complex(value) if kind == "complex" else float(value)
    if not isinstance(value, int) and not math.isfinite(value):
      raise TypeError(f"{wrong} {value}")
    if value != int(value):
      raise TypeError(f"{wrong} {value}")
    info = jnp.iinfo(wide)
    if not info.min <= int(value) <= info.max:
      raise OverflowError
  except OverflowError as error:
    raise TypeError(
      f"{name} must fit into {wide.name}, got {_short(int(value))}"
    ) from error
  return int(value)


def dtype_of(
  value: Any, default: Any, name: str = "out_dtype", like: Any = None
) -> Any:
  """A dtype of numbers that JAX has; `default` for None.

  Args:
    value: as the user passed it.
    default: what None stands for.
    name: of the argument.
    like: operands' dtype whose kind it must have; None for any kind.
  """
  if value is None:
    return default
  try:
    wanted = jnp.dtype(value)
  except TypeError as error:
    raise TypeError(f"{name} must be a dtype, got {value!r}") from error
  if numerics.kind(wanted) == "other":
    raise TypeError(f"{name} must be a dtype of numbers, got {wanted}")
  kind = numerics.kind(wanted if like is None else like)
  if numerics.kind(wanted) != kind:
    raise TypeError(
      f"{name} must be {kind} like the operands, {like.name}, got {wanted.name}"
    )
  if jax.dtypes.canonicalize_dtype(wanted) != wanted:
    raise TypeError(f"{name} {wanted.name} needs jax_enable_x64")
  return wanted


def check_epilogue_array(name: str, value: jax.Array, wide: Any) -> None:
  """The dtype of bias or C: of the operands' kind, and no wider than sums."""
  if (
    numerics.kind(value.dtype) != numerics.kind(wide)
    or value.dtype.itemsize > wide.itemsize
  ):
    raise TypeError(
      f"{name} must have a dtype that fits into the accumulation's,"
      f" {wide.name}, got {value.dtype.name}"
    )


def implementation(
  value: Any, known: Collection[str] = tuple(IMPLEMENTATIONS)
) -> tuple[str, ...] | None:
  """The names to try, all of those known; None for the platform's."""
  if value is None:
    return None
  names = (value,) if isinstance(value, str) else value
  if not isinstance(names, tuple | list):
    raise TypeError(
      "implementation must be None, a name or a sequence of names, got"
      f" {type(value).__name__}"
    )
  if not names:
    raise ValueError("implementation must hold a name, got an empty sequence")
  for name in names:
    if name not in known:
      raise ValueError(
        f"implementation must be of {tuple(known)}, got {name!r}"
      )
  return tuple(names)


def check_config(
  config: Any,
  names: tuple[str, ...] | None,
  known: Collection[str] = tuple(IMPLEMENTATIONS),
) -> None:
  """A config of one of the implementations that will be tried."""
  if config is None:
    return
  # Here, because most calls have no config and need no Triton.
  from pallas_gemm.kernels import triton_dense
  from pallas_gemm.tuning import Config

  owners = {
    "sm90": (Config, "a tuning.Config"),
    "triton": (triton_dense.Config, "a triton_dense.Config"),
  }
  owners = {name: owner for name, owner in owners.items() if name in known}
  owner = next((n for n, (t, _) in owners.items() if isinstance(config, t)), "")
  if not owner:
    raise TypeError(
      f"config must be {' or '.join(words for _, words in owners.values())},"
      f" got {type(config).__name__}"
    )
  if owner not in (names or ("sm90", "xla")):
    raise ValueError(
      f"config is one of {owner!r}, which implementation={names} does not try"
    )


def precision(value: Any) -> Any:
  """None, a lax.Precision, two of them, or an algorithm; never a name.

  None is what `jax.default_matmul_precision` says now.
  """
  if value is None:
    value = jax.config.jax_default_matmul_precision
  if value is None or isinstance(value, _PRECISIONS):
    return value
  if isinstance(value, str) and value in lax.DotAlgorithmPreset.__members__:
    return lax.DotAlgorithmPreset[value]
  pair = value if isinstance(value, tuple | list) else (value,)
  if not 0 < len(pair) <= 2 or not all(
    isinstance(item, str | lax.Precision) for item in pair
  ):
    raise TypeError(
      "precision must be None, a lax.Precision (or two), a name of one, or a"
      f" lax.DotAlgorithmPreset, got {value!r}"
    )
  try:
    pair = tuple(lax.Precision(item) for item in pair)
  except ValueError as error:
    raise ValueError(
      f"precision must be known to JAX, got {value!r}"
    ) from error
  return pair[0] if len(pair) == 1 else pair


def check_out_sharding(value: Any) -> None:
  """None, a PartitionSpec or a NamedSharding."""
  kinds = jax.sharding.PartitionSpec | jax.sharding.NamedSharding
  if value is not None and not isinstance(value, kinds):
    raise TypeError(
      "out_sharding must be None, a PartitionSpec or a NamedSharding, got"
      f" {type(value).__name__}"
    )


def promoted(names: tuple[str, ...], *arrays: jax.Array) -> list[jax.Array]:
  """Operands of one dtype, as `jnp.matmul` has them."""
  dtype = jnp.result_type(*arrays[:2])
  for name, x in zip(names, arrays):
    if x.dtype.itemsize == 1 < dtype.itemsize:
      report.warn_once(
        f"{name} of {x.dtype.name} is converted to {dtype.name} outside of the"
        f" kernel: {1 + 2 * dtype.itemsize} bytes for each of its elements are"
        " read and written at each call; convert weights once, beforehand"
      )
  return [x.astype(dtype) for x in arrays]
