"""Activations: elementwise functions, known by what they compute.

A compiled product is kept under its activation. Two functions that compute the
same are one activation here, so that an inline lambda or a fresh
`functools.partial` compiles nothing again.
"""

from collections.abc import Callable, Sequence
import functools
import hashlib
from typing import Any
import weakref

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, dtypes, jaxprs
from pallas_gemm.kernels import epilogues
from pallas_gemm.kernels.function_key import Same, key_of

# Each element of the result depends on that element of the arguments alone.
_ELEMENTWISE = (epilogues.PRIMITIVES - {"broadcast_in_dim"}) | frozenset(
  """
  acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz
  conj copy copy_p cosh digamma erf erf_inv erfc expm1 floor igamma igammac imag
  is_finite lgamma log1p nextafter not optimization_barrier polygamma polynomial
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
# In the text of an operation that calls the host.
_ADDRESS = " at 0x"
_HAS_ARRAY = "activation must not close over an array; it must be elementwise"


class Activation:
  """An elementwise function; `of` gives the one object for what it computes.

  Attributes:
    function: the function.
    dtype: what it is applied to.
    text: what it computes of that, without rules of derivatives.
  """

  def __init__(self, function: Callable[[Any], Any], dtype: Any, text: str):
    self.function, self.dtype, self.text = function, dtype, text

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.function(x)

  def __repr__(self) -> str:
    named = self.function
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"

  @functools.cached_property
  def name(self) -> str:
    """Of what it computes, for whoever remembers measurements by it."""
    for name, known in _NAMED.items():
      argument = _argument(self.dtype)
      if self.text == _text(jax.make_jaxpr(known)(argument), [argument]):
        return name
    return "elementwise_" + hashlib.sha256(self.text.encode()).hexdigest()[:12]


_NAMED = {
  "relu": jax.nn.relu,
  "gelu": jax.nn.gelu,
  "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
  "sigmoid": jax.nn.sigmoid,
  "silu": jax.nn.silu,
  "tanh": jnp.tanh,
}
# Weak: what programs are kept under keeps them, so that they, and what their
# functions close over, go with `jax.clear_caches()`.
_by_key: weakref.WeakValueDictionary[Any, Activation]
_by_key = weakref.WeakValueDictionary()
_by_meaning: weakref.WeakValueDictionary[Any, Activation]
_by_meaning = weakref.WeakValueDictionary()
_by_trace: weakref.WeakValueDictionary[Any, Activation]
_by_trace = weakref.WeakValueDictionary()
# Derivatives that are looked at for one that has no rule of its own.
_MOST_ORDERS = 3


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
  # Without a key it may have changed since, and is traced at each call.
  key = key_of(function)
  try:
    x64 = jax.config.jax_enable_x64
    key = key and (key, a.dtype, b.dtype, out_dtype, x64)
    if key and (known := _by_key.get(key)):
      return known
  except (AttributeError, TypeError):  # no array, no hash
    key = None
  activation = _checked(function, _accumulator_dtype(a, b, out_dtype))
  if key:
    _by_key[key] = activation
  return activation


def _checked(function: Any, dtype: Any) -> Activation:
  if not callable(function):
    name = isinstance(function, str) and hasattr(jax.nn, function)
    got = repr(function) if name else type(function).__name__
    hint = f"; pass jax.nn.{function}" if name else ""
    raise TypeError(f"activation must be a function, got {got}{hint}")
  first = _traced(function, _SHAPES[0], dtype)
  # A method of an object comes here at each call: one trace, without rules.
  code, printed = getattr(function, "__code__", None), _printed(first)
  can_tell = code and _ADDRESS not in printed and not jaxprs.has_rules(first)
  trace = code, dtype, printed
  if can_tell and (known := _by_trace.get(trace)):
    return known
  others = [_traced(function, shape, dtype) for shape in _SHAPES[1:]]
  traced = [first, *others]
  for jaxpr, shape in zip(traced, _SHAPES):
    _check_elementwise(jaxpr.jaxpr, len(shape))
  if len({_numbers(jaxpr.jaxpr, jaxpr.consts) for jaxpr in traced}) > 1:
    raise TypeError(
      "activation must be elementwise, got one that depends on the shape of"
      " its argument"
    )
  text = _text(first, [_argument(dtype)])
  activation = Activation(function, dtype, text)
  meaning = dtype, text, *_derivatives(function, first, dtype)
  if None in meaning or _ADDRESS in text:  # what can't be told apart, is apart
    try:
      owner = getattr(function, "__self__", function)
      meaning += Same(owner), getattr(function, "__func__", None)
    except TypeError:  # no weak references
      return activation
  activation = _by_meaning.setdefault(meaning, activation)
  if can_tell:
    _by_trace[trace] = activation
  return activation


def _argument(dtype: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(_SHAPES[0], dtype)


def _text(jaxpr: core.ClosedJaxpr, arguments: Sequence[Any]) -> str:
  """What a function computes, whoever wrote it in how many functions."""
  plain = jaxprs.without_custom_derivatives(core.jaxpr_as_fun(jaxpr))
  with compat.one_device():
    return _printed(jax.make_jaxpr(plain)(*arguments))


def _printed(jaxpr: core.ClosedJaxpr) -> str:
  return f"{jaxpr} {[np.asarray(x).tobytes() for x in jaxpr.consts]}"


def _derivatives(function: Any, jaxpr: Any, dtype: Any) -> list[str | None]:
  """The derivatives, up to the first one whose own follow from its text.

  What has rules of its own (`jax.custom_jvp`, `jax.custom_vjp`) has derivatives
  that do not follow. None stands for those that are not known.
  """
  arguments, found = [_argument(dtype)], []
  while jaxprs.has_rules(jaxpr):
    try:
      if len(found) == _MOST_ORDERS:
        raise RecursionError
      function, cotangents = _pulled_back(function, arguments)
      arguments = [*arguments, *cotangents]
      with compat.one_device():
        jaxpr = jaxprs.live(function, arguments)
      found.append(_text(jaxpr, arguments))
    except Exception:  # it has none, or one that has rules without an end
      return [*found, None]
  return found


def _pulled_back(function: Callable[..., Any], arguments: Sequence[Any]):
  """The function of arguments and cotangents, and types of the latter."""
  count = len(arguments)

  def apply(*values):
    outs, vjp = jax.vjp(function, *values[:count])
    return vjp(jax.tree.unflatten(jax.tree.structure(outs), values[count:]))

  with compat.one_device():
    outs = jax.eval_shape(function, *arguments)
  return apply, jax.tree.leaves(outs)


def _traced(function: Callable[..., Any], shape: tuple[int, ...], dtype: Any):
  wanted, returned = f"{dtype.name}{list(shape)}", []

  def noted(x):
    out = function(x)
    returned.extend((jax.tree.structure(out), type(out).__name__))
    return out

  try:
    # Whatever mesh the caller is in, an activation is traced outside of it.
    with compat.one_device():
      traced = jax.make_jaxpr(noted)(jax.ShapeDtypeStruct(shape, dtype))
  except Exception as error:
    if _fails_for_its_arrays(function, dtype):
      raise TypeError(_HAS_ARRAY) from None
    if isinstance(error, jax.errors.TracerArrayConversionError):
      name = getattr(function, "__name__", "")
      hint = f"jnp.{name}" if hasattr(jnp, name) else "jax.numpy in it"
      raise TypeError(
        f"activation must be JAX's, got one of NumPy; use {hint}"
      ) from error
    reason = str(error).partition("\n")[0]
    raise TypeError(
      "activation must be an elementwise function of one array; called with"
      f" {wanted} it raised {type(error).__name__}: {reason}"
    ) from error
  structure, name = returned
  if structure != jax.tree.structure(0):
    raise TypeError(f"activation must return one array, got {name}")
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
  kinds = {dtypes.kind(jnp.result_type(x)) for x in traced.consts}
  if any(map(np.shape, traced.consts)) or "other" in kinds:  # keys
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
      inner = jaxprs.inlined(eqn)
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
    # A number with more dimensions may differ along them.
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
    inner = jaxprs.inlined(eqn)
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
    is_kind = dtypes.kind(wide) != "other"
    is_kind &= dtypes.kind(both) != "floating" or dtypes.kind(wide) != "integer"
    if not is_kind or jax.dtypes.canonicalize_dtype(wide) != wide:
      wide = both  # what is wrong with it is said later
    return dtypes.accumulation_dtype(both, both, wide)
  except (AttributeError, TypeError, ValueError):
    return jnp.dtype("float32")
