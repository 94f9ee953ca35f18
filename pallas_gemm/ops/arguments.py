"""Checks of what users pass; each message names argument, got and want.

What depends on values, not on types, is checked at every call; the rest while
a call is traced, so that a compiled call does not pay for it.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any
import weakref

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from pallas_gemm import dtypes, meshes, report
from pallas_gemm.kernels import activations
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.ops.implementations import DEFAULT, HOPPER, IMPLEMENTATIONS
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.spec import Operands, Spec

_PRECISIONS = lax.Precision | lax.DotAlgorithmPreset | lax.DotAlgorithm
_LONG = np.longdouble, np.clongdouble
# Names of implementations: all, and those that take grouped products.
DENSE, GROUPED = tuple(IMPLEMENTATIONS), DEFAULT[True]


def _names(a: str, b: str, b_up: str | None = None) -> Operands:
  rest = "bias", "c", "alpha", "beta", None
  of_scales = [x and f"{x}.scale" for x in (a, b, b_up)]
  of_planes = [x and f"{x}.planes" for x in (b, b, b_up, b_up)]
  return Operands(a, b, b_up, *rest, *of_scales, *of_planes)


# What users call the operands: of `matmul`, of what `jax.lax` has, and of gated
# products.
OF_MATMUL, OF_LAX = _names("a", "b"), _names("lhs", "rhs")
OF_GATED = _names("x", "w_gate", "w_up")


def check(
  ok: bool, wanted: str, got: Any, error: type[Exception] = ValueError
) -> None:
  """Raises an error that says what was wanted, and what was got, if not ok."""
  if not ok:
    raise error(f"{wanted}, got {got}")


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
  """The arguments of an op that are no arrays; `options` makes them.

  Compiled functions are kept under them: one object for equal arguments, whose
  hash is its identity.
  """

  activation: activations.Activation | None = None
  out_dtype: Any = None
  precision: Any = None
  implementation: Any = None
  config: Any = None
  out_sharding: Any = None
  reduce_dtype: Any = None
  quantize: Any = None
  transpose_a: bool = False
  transpose_b: bool = False
  without_product: bool = False
  without_c: bool = False
  dimension_numbers: Any = None


# Weak, as those of activations are.
_known: weakref.WeakValueDictionary[tuple[Any, ...], Options]
_known = weakref.WeakValueDictionary()


def options(
  fields: tuple[Any, ...] = (), names: Mapping[str, str] | None = None
) -> Options:
  """The one `Options` of these fields, some of which `names` call otherwise."""
  try:
    return _known[fields]
  except KeyError:
    return _known.setdefault(fields, Options(*fields))
  except TypeError:
    found = dict(vars(Options(*fields)))
  for name, value in found.items():
    if name in ("implementation", "precision") and isinstance(value, list):
      value = found[name] = tuple(value)
    try:
      hash(value)
    except TypeError as error:
      want = "a tuning.Config" if name == "config" else "hashable"
      name, got = (names or {}).get(name, name), type(value).__name__
      raise TypeError(f"{name} must be {want}, got {got}") from error
  return options(tuple(found.values()))


# Arrays.


def array(name: str, value: Any, optional: bool = False) -> Any:
  """An array of numbers or booleans, as `jax.jit` takes it."""
  if isinstance(value, jax.Array) or (optional and value is None):
    return value
  if hasattr(value, "__jax_array__"):
    return array(name, value.__jax_array__())
  if isinstance(value, np.ma.MaskedArray):
    raise TypeError(
      f"{name} must be an array without a mask, got a masked one; fill it first"
    )
  if isinstance(value, np.ndarray | np.generic):
    if dtypes.kind(value.dtype) == "other":
      raise TypeError(f"{name} must hold numbers, got dtype {value.dtype}")
    if not value.dtype.isnative or value.dtype.type in _LONG:
      wanted = f"{name} must have a dtype that JAX has"
      raise TypeError(f"{wanted}, got {value.dtype!r}")
    return value
  if not isinstance(value, int | float | complex):
    raise TypeError(f"{name} must be an array, got {type(value).__name__}")
  info = jnp.iinfo(jnp.result_type(int))
  if isinstance(value, int) and not info.min <= value <= info.max:
    raise ValueError(f"{name} must fit into {info.dtype}, got {short(value)}")
  return value


def short(value: int) -> str:
  """An integer that may have more digits than anybody reads."""
  digits = value.bit_length() * 3 // 10
  return f"an integer of about {digits} digits" if digits > 30 else str(value)


def check_numbers(names: Sequence[str], arrays: Sequence[Any]) -> None:
  """Not arrays of keys, say; checked while tracing."""
  for name, value in zip(names, arrays):
    if value is not None:
      dtype = jnp.result_type(value)
      wanted = f"{name} must hold numbers"
      check(isinstance(dtype, np.dtype), wanted, f"dtype {dtype}", TypeError)


def in_one_memory(
  names: Sequence[str], arrays: Sequence[Any], on_device: bool = False
) -> list[Any]:
  """The arrays, in the memory of the first, or all on the device.

  As in JAX only scalars may come from elsewhere.
  """
  (first, v), *_ = [(x, v) for x, v in zip(names, arrays) if v is not None]
  want, like = jax.typeof(v).memory_space, f"like {first}"
  if on_device:
    want, like = jax.memory.Space.Device, "in a grouped product"
  found = []
  for name, v in zip(names, arrays):
    have = want if v is None else jax.typeof(v).memory_space
    wanted = f"{name} must lie in {_space(want)} memory {like}"
    check(have == want or not v.ndim, wanted, _space(have))
    found.append(v if have == want else jax.device_put(v, want))
  return found


def _space(space: Any) -> str:
  return getattr(space, "name", str(space)).lower()


def check_inner(names: Operands, x: Operands, k: int, k_b: int) -> None:
  """Both operands have the same K."""
  check(
    k == k_b,
    f"{names.b} must have K = {k} like {names.a}",
    f"K = {k_b}; shapes {x.a.shape} and {x.b.shape}",
  )


def added(
  name: str, value: Any, wide: Any, of: str, shape: tuple[int, ...]
) -> Any:
  """Bias or C, checked: a dtype that fits into that of sums, and a shape.

  Args:
    name: the argument.
    value: None: there is none.
    wide: the dtype of sums.
    of: what it is to be broadcast to, in words.
    shape: the shape of that.

  Returns:
    The array; a Python number, which is weakly typed, in the dtype of sums.
  """
  if value is None:
    return None
  if jax.typeof(value).weak_type and jnp.result_type(value, wide) == wide:
    value = value.astype(wide)
  kinds, width = (dtypes.kind(value.dtype), dtypes.kind(wide)), wide.itemsize
  if is_part := kinds == ("floating", "complex"):
    width //= 2
  check(
    (is_part or kinds[0] == kinds[1]) and value.dtype.itemsize <= width,
    f"{name} must have a dtype that fits into the accumulation's, {wide.name}",
    value.dtype.name,
    TypeError,
  )
  wanted = f"{name} must broadcast to {of} {shape}"
  check(broadcasts(value.shape, shape), wanted, value.shape)
  return value


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
  """Whether an array of one shape can be broadcast to the other."""
  pairs = zip(shape[::-1], to[::-1])
  return len(shape) <= len(to) and all(
    have == want or (isinstance(have, int) and have == 1)
    for have, want in pairs
  )


def promoted(names: Operands, x: Operands, options: Options) -> Operands:
  """The operands, A and B of one dtype as `jnp.matmul` has them.

  But for bfloat16 beside float32 in planes: it is one.
  """
  if x.b_up is not None:
    have, want = (f"{v.dtype.name}{list(v.shape)}" for v in (x.b_up, x.b))
    check(have == want, f"{names.b_up} must be {want} like {names.b}", have)
  if x.has_planes:
    return x
  if x.has_scales or {x.a.dtype.name, x.b.dtype.name} <= set(legal.FLOATS8):
    return x  # which JAX promotes to nothing, and a kernel takes in any mixture
  if {x.a.dtype.name, x.b.dtype.name} == {"float32", "bfloat16"}:
    if planes(x, options, grouped=False) == 3:
      return x
  dtype, found = jnp.result_type(x.a, x.b), {}
  for field, name, v in zip(("a", "b", "b_up"), names, x):
    if v is None:
      continue
    is_kernels = dtypes.kind(dtype) == "floating" and dtype.itemsize == 2
    if v.dtype.itemsize == 1 and is_kernels:
      report.warn_once(
        f"{name} of {v.dtype.name} is converted to {dtype.name} outside of the"
        f" kernel: {1 + 2 * dtype.itemsize} bytes for each of its elements are"
        " read and written at each call; convert it once, if it is used again"
      )
    found[field] = v.astype(dtype)
  return x._replace(**found)


def arrays(*values: Any) -> list[jax.Array | None]:
  """JAX's own arrays, as `jit` makes them of all; not so `jax.disable_jit`."""
  return [jax.tree.map(_without_reduced, v) for v in values]


def _without_reduced(v: Any) -> jax.Array:
  """An array whose type says of no mesh axis that cotangents are to be summed.

  The transpose is a sum over these axes that the type calls unreduced.
  """
  v = jnp.asarray(v)
  if (sharding := jax.typeof(v).sharding).spec.reduced:
    to = PartitionSpec(*sharding.spec.partitions)
    v = jax.sharding.reshard(v, NamedSharding(sharding.mesh, to))
  return v


# Options.


def dtype_of(
  value: Any, default: Any, name: str = "out_dtype", like: Any = None
) -> Any:
  """A dtype of numbers that JAX has, of the kind of `like`; or the default."""
  if value is None:
    return default
  try:
    wanted = jnp.dtype(value)
  except TypeError as error:
    raise TypeError(f"{name} must be a dtype, got {value!r}") from error
  kind = dtypes.kind(wanted)
  if kind == "other" or not wanted.isnative:
    raise TypeError(f"{name} must be a dtype of numbers, got {wanted}")
  if like is not None and kind != dtypes.kind(like):
    raise TypeError(
      f"{name} must be {dtypes.kind(like)} like the operands, {like.name},"
      f" got {wanted.name}"
    )
  if jax.dtypes.canonicalize_dtype(wanted) != wanted:
    raise TypeError(f"{name} {wanted.name} needs jax_enable_x64")
  return wanted


def reduce_dtype(value: Any, x: Operands, out_dtype: Any) -> Any:
  """What devices' parts are rounded to before they are added up; or None.

  Sums of integers are exact, and would wrap around in fewer bits.
  """
  if (dtype := dtype_of(value, None, "reduce_dtype")) is None:
    return None
  wide = x.wide(out_dtype)
  kind = dtypes.kind(wide)
  is_exact = kind in ("integer", "bool")
  least = wide.itemsize if is_exact else 2
  check(
    dtypes.kind(dtype) == kind and least <= dtype.itemsize <= wide.itemsize,
    f"reduce_dtype must be {kind}, of {8 * least} to {8 * wide.itemsize} bits,"
    f" for sums of {wide.name}",
    dtype.name,
    TypeError,
  )
  return None if is_exact else dtype


def check_bool(name: str, value: Any) -> None:
  """A Python boolean: 0 and False are one key of a cache, not one argument."""
  if value is not True and value is not False:
    is_numpys = isinstance(value, np.bool_)  # whose type is called bool, too
    got = repr(value) if is_numpys else type(value).__name__
    raise TypeError(f"{name} must be a bool, got {got}")


def spec_of(
  options: Options, known: tuple[str, ...], x: Operands, **fields: Any
) -> Spec:
  """The spec of a product, with what the options ask for, once checked."""
  names = implementation(options.implementation, known)
  _check_config(options.config, names, known)
  return Spec(
    activation=options.activation,
    precision=precision(options.precision),
    in_planes=planes(x, options, grouped="ragged" in fields) is not None,
    implementation=names,
    config=options.config,
    reduce_dtype=reduce_dtype(options.reduce_dtype, x, fields["out_dtype"]),
    batch_invariant=is_batch_invariant(),
    **fields,
  )


def planes(x: Operands, options: Options, grouped: bool) -> int | None:
  """The planes of float32; None with a recipe, and where it is left to XLA."""
  known = GROUPED if grouped else DENSE
  names = implementation(options.implementation, known)
  if options.quantize is not None or (names and HOPPER not in names):
    return None
  if jnp.float32 not in (x.a.dtype, x.b.dtype) and not x.has_planes:
    return None
  if _is_float64(options.out_dtype):
    return None  # cotangents may not fit into float32
  return legal.planes_of(precision(options.precision), grouped)


def _is_float64(dtype: Any) -> bool:
  try:
    return dtype is not None and jnp.dtype(dtype) == np.float64
  except TypeError:  # which `dtype_of` raises with the argument's name
    return False


def implementation(
  value: Any, known: tuple[str, ...]
) -> tuple[str, ...] | None:
  """The names to try, all of those known; None for the platform's."""
  if value is None:
    return None
  names = (value,) if isinstance(value, str) else value
  wanted = "implementation must be None, a name or a sequence of names"
  is_sequence = isinstance(names, tuple | list)
  check(is_sequence, wanted, type(value).__name__, TypeError)
  check(names, "implementation must hold a name", "an empty sequence")
  for name in names:
    check(name in known, f"implementation must be of {known}", repr(name))
  return tuple(names)


def _check_config(
  config: Any, names: tuple[str, ...] | None, known: tuple[str, ...]
) -> None:
  """A config of one of the implementations that will be tried."""
  if config is None:
    return
  # Here, because most calls have no config and need no Triton.
  from pallas_gemm.kernels import triton_dense
  from pallas_gemm.tuning import Config

  owners = {"a tuning.Config": (HOPPER, Config)}
  if "triton" in known:
    owners["a triton_dense.Config"] = "triton", triton_dense.Config
  owner = [name for name, kind in owners.values() if isinstance(config, kind)]
  wanted = f"config must be {' or '.join(owners)}"
  check(owner, wanted, type(config).__name__, TypeError)
  for field in dataclasses.fields(config):
    value, wanted = getattr(config, field.name), f"config.{field.name} must be"
    if type(field.default) is int:
      check(type(value) is int, f"{wanted} an int", repr(value), TypeError)
  if owner[0] not in (names or DEFAULT[True]):
    kind = f"config is one of {owner[0]!r}"
    raise ValueError(f"{kind}, which implementation={names} does not try")


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
  are_names = all(isinstance(item, str | lax.Precision) for item in pair)
  check(
    are_names and 0 < len(pair) <= 2,
    "precision must be None, a lax.Precision (or two), a name of one, or a"
    " lax.DotAlgorithmPreset",
    repr(value),
    TypeError,
  )
  try:
    pair = tuple(lax.Precision(item) for item in pair)
  except ValueError as error:
    names = ", ".join(repr(x.name.lower()) for x in lax.Precision)
    raise ValueError(
      f"precision must be {names}, or a name of lax.DotAlgorithmPreset, got"
      f" {value!r}"
    ) from error
  return pair[0] if len(pair) == 1 else pair


def check_out_sharding(value: Any) -> None:
  """None, a PartitionSpec or a NamedSharding."""
  check(
    isinstance(value, None | PartitionSpec | NamedSharding),
    "out_sharding must be None, a PartitionSpec or a NamedSharding",
    type(value).__name__,
    TypeError,
  )


def parts_of(
  x: Operands, reference: Callable[[Operands], Any], out_sharding: Any
) -> PartitionSpec:
  """How the result is sharded over Explicit mesh axes; raises as JAX does.

  Args:
    x: the operands.
    reference: reference(x) is the product in JAX's own functions.
    out_sharding: as the user passed it.
  """
  check_out_sharding(out_sharding)
  if out_sharding is None and meshes.explicit(x.present()) is None:
    return PartitionSpec()
  wanted = getattr(out_sharding, "spec", out_sharding)
  if wanted is not None and wanted.unreduced:
    raise NotImplementedError(
      "out_sharding must not be unreduced; use jax.lax.dot_general"
    )
  # Not jax.eval_shape: it drops the sharding if any axis is Auto.
  (out,) = jax.make_jaxpr(reference)(x).out_avals
  return out.sharding.spec
