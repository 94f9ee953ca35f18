"""Checks of what users pass; each message names argument, got and want.

They run while a call is traced, so a compiled call does not pay for them.
"""

from collections.abc import Callable, Collection
import math
import numbers
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.implementations import IMPLEMENTATIONS

_PRECISIONS = lax.Precision | lax.DotAlgorithmPreset | lax.DotAlgorithm


class Options(NamedTuple):
  """The arguments of `matmul` that are no arrays."""

  activation: Any
  alpha: Any
  beta: Any
  transpose_a: Any
  transpose_b: Any
  out_dtype: Any
  precision: Any
  implementation: Any
  config: Any


def hashable(
  options: tuple[Any, ...], names: tuple[str, ...] = Options._fields
) -> tuple[Any, ...]:
  """The options with lists made tuples.

  Args:
    options: as the user passed them.
    names: of the arguments that they are.

  Raises:
    TypeError: one can't be hashed, as what a compiled function is kept under
      must be.
  """
  found = dict(zip(names, options, strict=True))
  for name, value in found.items():
    if name in ("implementation", "precision") and isinstance(value, list):
      value = found[name] = tuple(value)
    try:
      hash(value)
    except TypeError as error:
      if name in ("alpha", "beta"):
        raise _no_number(name, value) from error
      raise TypeError(
        f"{name} must be hashable, got {type(value).__name__}"
      ) from error
  return tuple(found.values())


def check_array(name: str, value: Any) -> None:
  """An array of numbers or booleans."""
  if not isinstance(value, jax.Array):
    raise TypeError(f"{name} must be an array, got {type(value).__name__}")
  if spec_lib.kind(value.dtype) == "other":
    raise TypeError(f"{name} must hold numbers, got dtype {value.dtype}")


def check_operand(name: str, value: Any) -> None:
  """An array of rank 1 or more."""
  check_array(name, value)
  if value.ndim == 0:
    raise ValueError(f"{name} must have rank 1 or more, got a scalar")


def check_like(name: str, value: Any, other_name: str, other: Any) -> None:
  """An array of the shape and dtype of another."""
  check_array(name, value)
  if value.shape != other.shape or value.dtype != other.dtype:
    raise ValueError(
      f"{name} must be {other.dtype.name}{list(other.shape)} like {other_name},"
      f" got {value.dtype.name}{list(value.shape)}"
    )


def check_rank(name: str, value: Any, rank: int, dimensions: str) -> None:
  """An array of a fixed rank, with `dimensions` its shape in words."""
  check_array(name, value)
  if value.ndim != rank:
    raise ValueError(f"{name} must be {dimensions}, got shape {value.shape}")


def check_integers(name: str, value: Any) -> None:
  """An array of integers."""
  check_array(name, value)
  if spec_lib.kind(value.dtype) != "integer":
    raise TypeError(f"{name} must hold integers, got dtype {value.dtype}")


def check_transposes(options: Options, a: jax.Array, b: jax.Array) -> None:
  """Python booleans; a vector has nothing to transpose."""
  for name, x, flag in (
    ("a", a, options.transpose_a),
    ("b", b, options.transpose_b),
  ):
    if not isinstance(flag, bool):
      raise TypeError(
        f"transpose_{name} must be a bool, got {type(flag).__name__}"
      )
    if flag and x.ndim == 1:
      raise ValueError(
        f"transpose_{name} needs {name} of rank 2 or more, got shape {x.shape}"
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


def factor(name: str, value: Any, dtype: Any) -> complex:
  """alpha or beta as a Python number that fits the dtype.

  Raises:
    TypeError: no Python number, or one that the dtype has no room for.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Number):
    raise _no_number(name, value)
  kind = spec_lib.kind(dtype)
  if kind == "complex":
    return complex(value)
  if isinstance(value, complex):
    raise TypeError(f"{name} must be real for {dtype.name}, got {value}")
  if kind == "floating":
    return float(value)
  if not math.isfinite(value) or value != int(value):
    raise TypeError(f"{name} must be an integer for {dtype.name}, got {value}")
  if kind == "integer" and int(value) != int(np.array(value).astype(dtype)):
    raise TypeError(f"{name} must fit into {dtype.name}, got {value}")
  return int(value)


def _no_number(name: str, value: Any) -> TypeError:
  return TypeError(
    f"{name} must be a Python number, got {type(value).__name__}; to scale by"
    " an array, scale the result instead"
  )


def out_dtype(value: Any, dtype: Any, name: str = "out_dtype") -> Any:
  """The result's dtype: by default that of the operands, else of its kind."""
  if value is None:
    return dtype
  try:
    wanted = jnp.dtype(value)
  except TypeError as error:
    raise TypeError(f"{name} must be a dtype, got {value!r}") from error
  kind = spec_lib.kind(dtype)
  if spec_lib.kind(wanted) != kind:
    raise TypeError(
      f"{name} must be {kind} like the operands, {dtype.name}, got"
      f" {wanted.name}"
    )
  if jax.dtypes.canonicalize_dtype(wanted) != wanted:
    raise TypeError(f"{name} {wanted.name} needs jax_enable_x64")
  return wanted


def check_epilogue_array(name: str, value: jax.Array, wide: Any) -> None:
  """The dtype of bias or C: of the operands' kind, and no wider than sums."""
  check_array(name, value)
  if (
    spec_lib.kind(value.dtype) != spec_lib.kind(wide)
    or value.dtype.itemsize > wide.itemsize
  ):
    raise TypeError(
      f"{name} must have a dtype that fits into the accumulation's,"
      f" {wide.name}, got {value.dtype.name}"
    )


def bias_side(bias: jax.Array, m: int, n: int) -> spec_lib.Side:
  """Which side of the result a bias runs along."""
  if bias.shape == (n,):
    return "n"
  if bias.shape == (m, 1):
    return "m"
  raise ValueError(
    f"bias must have shape [N] = ({n},) or [M, 1] = ({m}, 1), got {bias.shape}"
  )


def check_c(c: jax.Array, shape: tuple[int, ...]) -> None:
  """C has the shape of the result."""
  if c.shape != shape:
    raise ValueError(f"c must have the result's shape {shape}, got {c.shape}")


def check_activation(activation: Any, dtype: Any) -> None:
  """Elementwise, of the dtype that sums have, and of nothing but its argument.

  Raises:
    TypeError: it is not.
  """
  if not callable(activation):
    raise TypeError(
      f"activation must be a function, got {type(activation).__name__}"
    )
  # A scalar has no rows or columns to mix.
  for shape in ((8, 128), ()):
    traced = _traced_activation(activation, shape, dtype)
    outs = [(out.shape, out.dtype) for out in traced.out_avals]
    if outs != [(shape, dtype)]:
      got = ", ".join(f"{d.name}{list(s)}" for s, d in outs)
      raise TypeError(
        "activation must keep shape and dtype of its argument,"
        f" {dtype.name}{list(shape)}, got {got or 'nothing'}"
      )
    if any(isinstance(x, jax.core.Tracer) for x in traced.consts):
      raise TypeError(
        "activation must not close over a traced value: it is compiled into"
        " the kernel, and has no derivative there"
      )
    if any(np.shape(x) for x in traced.consts):
      raise TypeError(
        "activation must not close over an array; it must be elementwise"
      )
  # A scalar goes through what is reduced, or turned round, along all of it.
  scalar = jax.ShapeDtypeStruct((), dtype)
  if mixing := compat.primitives_of(activation, scalar) & compat.OF_ALL:
    raise TypeError(
      f"activation must be elementwise, got {', '.join(sorted(mixing))} in it"
    )


def _traced_activation(activation: Callable[..., Any], shape, dtype):
  try:
    return jax.make_jaxpr(activation)(jax.ShapeDtypeStruct(shape, dtype))
  except Exception as error:
    reason = str(error).partition("\n")[0]
    raise TypeError(
      "activation must be an elementwise function of one array; called with"
      f" {dtype.name}{list(shape)} it raised {type(error).__name__}: {reason}"
    ) from error


def implementation(
  value: Any, known: Collection[str] = IMPLEMENTATIONS
) -> tuple[str, ...] | None:
  """The names to try, all of those known; None for the platform's."""
  if value is None:
    return None
  names = (value,) if isinstance(value, str) else value
  if not isinstance(names, tuple):
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
  return names


def check_config(
  config: Any,
  names: tuple[str, ...] | None,
  known: Collection[str] = IMPLEMENTATIONS,
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
  pair = value if isinstance(value, tuple) else (value,)
  if len(pair) > 2 or not all(
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
