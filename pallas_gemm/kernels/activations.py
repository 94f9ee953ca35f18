"""Activations: elementwise functions, known by what they compute.

A compiled product is kept under its activation. Two functions that compute the
same are one activation here, so that an inline lambda or a fresh
`functools.partial` compiles nothing again.
"""

from collections.abc import Callable
import functools
import re
import types
from typing import Any
import weakref

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, dtypes
from pallas_gemm.kernels import epilogues

# Each element of the result depends on that element of the arguments alone.
_ELEMENTWISE = (epilogues.PRIMITIVES - {"broadcast_in_dim"}) | frozenset(
  """
  acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz
  conj copy copy_p cosh digamma erf erf_inv erfc expm1 floor igamma igammac imag
  is_finite lgamma log1p nextafter not optimization_barrier polygamma
  population_count pow real reduce_precision regularized_incomplete_beta rem
  shift_left shift_right_arithmetic shift_right_logical sinh stop_gradient tan
  xor zeta
""".split()
)
_REDUCTIONS = frozenset(
  "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split()
)
# What an activation is tried on: a number that comes from a shape differs.
_SHAPES = (8, 128), (16, 256), (3, 8, 128)
_HAS_ARRAY = "activation must not close over an array; it must be elementwise"


class Activation:
  """An elementwise function; `of` gives the one object for what it computes.

  Attributes:
    function: the function.
    name: its qualified name.
    jaxpr: what it computes of float32 (or what accumulators have), as text.
  """

  def __init__(self, function: Callable[[Any], Any], jaxpr: str):
    self.function = function
    named = function if hasattr(function, "__qualname__") else type(function)
    self.name = f"{named.__module__}.{named.__qualname__}"
    self.jaxpr = jaxpr

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.function(x)

  def __repr__(self) -> str:
    return self.name


_by_jaxpr: dict[tuple[Any, str], Activation] = {}
# Functions seen before, by identity; anything else that can be called may have
# changed since, and is traced at each call.
_by_function: dict[int, tuple[weakref.ref, dict[Any, Activation]]] = {}
_FUNCTIONS = (
  types.FunctionType | jax.custom_jvp | jax.custom_vjp | type(jax.jit(abs))
)


def of(function: Any, a: Any, b: Any, out_dtype: Any) -> Activation:
  """The activation that a function is.

  Args:
    function: as the user passed it.
    a, b: the operands of the product that it follows.
    out_dtype: of the product, as the user passed it.

  Raises:
    TypeError: it is no elementwise function of one array, or has arrays or
      traced values of its own.
  """
  if not isinstance(function, _FUNCTIONS):
    return _checked(function, _accumulator_dtype(a, b, out_dtype))
  seen, found = _by_function.get(id(function), (None, None))
  if seen is None or seen() is not function:
    # Gone with the function, whose identity may then be another's.
    forget = functools.partial(_forget, _by_function, id(function))
    seen, found = weakref.ref(function, forget), {}
    _by_function[id(function)] = seen, found
  try:
    return found[a.dtype, b.dtype, out_dtype]
  except (AttributeError, KeyError, TypeError):  # no array, new, no hash
    pass
  activation = _checked(function, _accumulator_dtype(a, b, out_dtype))
  try:
    found[a.dtype, b.dtype, out_dtype] = activation
  except (AttributeError, TypeError):
    pass
  return activation


def _forget(functions: dict, key: int, seen: weakref.ref) -> None:
  if functions.get(key, (None,))[0] is seen:
    del functions[key]


def _checked(function: Any, dtype: Any) -> Activation:
  if not callable(function):
    raise TypeError(
      f"activation must be a function, got {type(function).__name__}"
    )
  traced = [_traced(function, shape, dtype) for shape in _SHAPES]
  for jaxpr, shape in zip(traced, _SHAPES):
    _check_elementwise(jaxpr.jaxpr, len(shape))
  if len({_numbers(jaxpr.jaxpr, jaxpr.consts) for jaxpr in traced}) > 1:
    raise TypeError(
      "activation must be elementwise, got one that depends on the shape of"
      " its argument"
    )
  consts = [np.asarray(x).tobytes() for x in traced[0].consts]
  text = f"{traced[0]} {consts}"
  if "custom_" in text:  # what is done with a derivative is not in it
    text += _derivative(function, dtype)
  key = dtype, re.sub("0x[0-9a-f]+", "", text)
  return _by_jaxpr.setdefault(key, Activation(function, key[1]))


def _derivative(function: Callable[..., Any], dtype: Any) -> str:
  x = jax.ShapeDtypeStruct(_SHAPES[0], dtype)
  try:
    with compat.one_device():
      return str(
        jax.make_jaxpr(lambda x, dx: jax.jvp(function, [x], [dx]))(x, x)
      )
  except Exception:  # it has none
    return ""


def _traced(function: Callable[..., Any], shape: tuple[int, ...], dtype: Any):
  wanted, returned = f"{dtype.name}{list(shape)}", []

  def noted(x):
    returned.append(function(x))
    return returned[0]

  try:
    # Whatever mesh the caller is in, an activation is traced outside of it.
    with compat.one_device():
      traced = jax.make_jaxpr(noted)(jax.ShapeDtypeStruct(shape, dtype))
  except Exception as error:
    if _fails_for_its_arrays(function, dtype):
      raise TypeError(_HAS_ARRAY) from None
    reason = str(error).partition("\n")[0]
    raise TypeError(
      "activation must be an elementwise function of one array; called with"
      f" {wanted} it raised {type(error).__name__}: {reason}"
    ) from error
  if jax.tree.structure(returned[0]) != jax.tree.structure(0):
    raise TypeError(
      f"activation must return one array, got {type(returned[0]).__name__}"
    )
  outs = [(out.shape, out.dtype) for out in traced.out_avals]
  if outs != [(shape, dtype)]:
    ((got_shape, got_dtype),) = outs
    raise TypeError(
      f"activation must keep shape and dtype of its argument, {wanted}, got"
      f" {got_dtype.name}{list(got_shape)}"
    )
  if any(isinstance(x, jax.core.Tracer) for x in traced.consts):
    raise TypeError(
      "activation must not close over a traced value: it is compiled into the"
      " kernel, and has no derivative there"
    )
  if any(np.shape(x) for x in traced.consts):
    raise TypeError(_HAS_ARRAY)
  return traced


def _fails_for_its_arrays(function: Callable[..., Any], dtype: Any) -> bool:
  """Whether it has arrays of its own, which suit no argument but a number."""
  try:
    with compat.one_device():
      traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), dtype))
  except Exception:
    return False
  return any(np.shape(x) for x in traced.consts)


def _check_elementwise(jaxpr: Any, rank: int) -> None:
  """Follows where the dimensions of the argument are, operation by operation.

  Raises:
    TypeError: an operation mixes elements along one of them.
  """
  # Of each value: where the argument's dimensions are; () of one number.
  places: dict[Any, tuple[int, ...]] = dict.fromkeys(jaxpr.constvars, ())
  places |= {v: tuple(range(rank)) for v in jaxpr.invars}

  def place(atom):
    return () if isinstance(atom, core.Literal) else places[atom]

  def visit(jaxpr):
    for eqn in jaxpr.eqns:
      inner = compat.inlined(eqn)
      if inner is not None:
        closed = inner.jaxpr
        places.update(zip(closed.invars, map(place, eqn.invars)))
        places.update(dict.fromkeys(closed.constvars, ()))
        visit(closed)
        places.update(zip(eqn.outvars, map(place, closed.outvars)))
        continue
      found = _place_of(eqn, [place(v) for v in eqn.invars])
      if found is None:
        raise TypeError(
          f"activation must be elementwise, got {eqn.primitive.name} in it,"
          " which may mix elements"
        )
      places.update(dict.fromkeys(eqn.outvars, found))

  visit(jaxpr)


def _place_of(eqn: Any, ins: list[tuple[int, ...]]) -> tuple[int, ...] | None:
  """Where the argument's dimensions are in a result; None if it mixes them."""
  name, params = eqn.primitive.name, eqn.params
  used = {at for at in ins if at}
  if len(used) > 1:
    return None
  at = next(iter(used), ())
  if name in _ELEMENTWISE:
    # A number that has dimensions beside them may differ along them.
    return at
  if name == "broadcast_in_dim":
    return tuple(params["broadcast_dimensions"][i] for i in at)
  if name == "concatenate":
    return None if params["dimension"] in at or not at else at
  if name == "stack":
    return tuple(i + (i >= params["axis"]) for i in at) if at else None
  if name in _REDUCTIONS:
    axes = params["axes"]
    if set(axes) & set(at):
      return None
    return tuple(i - sum(axis < i for axis in axes) for i in at)
  if name in ("squeeze", "expand_dims"):
    gone = params["dimensions"]
    return tuple(i - sum(d < i for d in gone) for i in at)
  if name == "reshape":
    return _place_in_shape(eqn.invars[0].aval.shape, at, params["new_sizes"])
  # Anything may be computed of single numbers.
  return None if at or any(v.aval.shape for v in eqn.outvars) else ()


def _place_in_shape(old, at, new) -> tuple[int, ...] | None:
  """Of a reshape that adds or drops dimensions of size 1."""
  if not at:
    return ()
  kept = [i for i, n in enumerate(old) if n != 1 or i in at]
  there = [i for i, n in enumerate(new) if n != 1]
  if [old[i] for i in kept] != [new[i] for i in there]:
    return None
  return tuple(there[kept.index(i)] for i in at)


def _numbers(jaxpr: Any, consts=()) -> str:
  """The operations and the numbers in them, without shapes and dimensions."""
  words = [str(np.asarray(x)) for x in consts]
  for eqn in jaxpr.eqns:
    inner = compat.inlined(eqn)
    if inner is not None:
      words.append(_numbers(inner.jaxpr, inner.consts))
      continue
    if eqn.primitive.name in ("broadcast_in_dim", "reshape"):
      continue
    words.append(eqn.primitive.name)
    words += [str(v.val) for v in eqn.invars if isinstance(v, core.Literal)]
    if "y" in eqn.params:
      words.append(str(eqn.params["y"]))
  return " ".join(words)


def _accumulator_dtype(a: Any, b: Any, out_dtype: Any) -> Any:
  """What an activation of a product is applied to; float32 if none is known."""
  try:
    both = jnp.promote_types(
      *(jax.dtypes.canonicalize_dtype(v.dtype) for v in (a, b))
    )
    wide = both if out_dtype is None else jnp.dtype(out_dtype)
    is_number = dtypes.kind(wide) != "other"
    if not is_number or jax.dtypes.canonicalize_dtype(wide) != wide:
      wide = both  # what is wrong with it is said later
    return dtypes.accumulation_dtype(both, both, wide)
  except (AttributeError, TypeError, ValueError):
    return jnp.dtype("float32")
