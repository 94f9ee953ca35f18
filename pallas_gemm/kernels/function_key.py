"""A key of what a Python function computes, in microseconds, without a trace.

Functions of equal keys run the same code on equal values: those of their
closures, defaults and global names, and of functions among these. What may
change in place (a list, an object with attributes) has no key, and neither has
a function that reads it.
"""

from collections.abc import Callable, Hashable
import dis
import enum
import functools
import types
from typing import Any
import weakref

import jax
import jax.numpy as jnp
import numpy as np

# What these hold is taken to stay as it is.
_LIBRARIES = frozenset(("builtins", "jax", "jaxlib", "math", "numpy"))
_JITTED = type(jax.jit(abs))
_WITH_RULES = jax.custom_jvp | jax.custom_vjp
_PARTS = (
  types.FunctionType
  | types.BuiltinFunctionType
  | types.ModuleType
  | type
  | np.ufunc
  | jnp.ufunc
  | _JITTED
)
_CONSTANTS = np.dtype | enum.Enum
_PLAIN = (int, bool, str, bytes, type(None), type(...))
# What they return depends on more than their arguments.
_READERS = frozenset("__import__ eval exec getattr globals locals vars".split())


class _NoKeyError(Exception):
  """Something may change in place."""


class Same:
  """Equal for one object, which it does not keep alive."""

  def __init__(self, value: Any):
    self._ref, self._hash = weakref.ref(value), id(value)

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other: Any) -> bool:
    value = self._ref()
    return value is not None and value is getattr(other, "_ref", lambda: None)()


def key_of(function: Callable[..., Any]) -> Hashable | None:
  """The key of a function; None if it has none.

  Example:
    >>> from pallas_gemm.kernels.function_key import key_of
    >>> def scaled(factor):
    ...   return lambda x: factor * x
    >>> key_of(scaled(2.0)) == key_of(scaled(2.0))
    True
    >>> key_of(scaled(2.0)) == key_of(scaled(3.0))
    False
    >>> key_of(scaled([2.0])) is None
    True
  """
  try:
    return _key(function, ())
  except (_NoKeyError, RecursionError):
    return None


def _key(value: Any, inside: tuple[Any, ...]) -> Hashable:
  """The key of a value that a function reads; `inside`: functions around it."""
  kind = type(value)
  if kind is types.FunctionType:  # most of all, so first
    return value if _is_of_library(value) else _of_code(value, inside)
  if kind in _PLAIN:
    return kind, value
  if kind in (float, complex):
    return kind, repr(value)  # tells the zeros apart, and makes NaNs one
  if kind is tuple:
    return kind, *[_key(v, inside) for v in value]
  if kind is functools.partial:
    parts = value.func, value.args, tuple(value.keywords.items())
    return kind, *[_key(v, inside) for v in parts]
  if isinstance(value, np.generic):
    return kind, value.tobytes()
  if isinstance(value, _CONSTANTS):
    return kind, value
  if isinstance(value, _WITH_RULES):
    if _is_of_library(value.fun):
      return value
  elif isinstance(value, _PARTS):
    name = value.__name__ if kind is types.ModuleType else value.__module__
    if _is_library(name):
      return value
  if isinstance(value, _WITH_RULES):
    if (around := _place_of(value, inside)) is not None:
      return around
    rules = [item for item in vars(value).items() if item[0][0] != "_"]
    return kind, _key(tuple(rules), (*inside, value))
  if kind is _JITTED or (isinstance(value, jax.Array) and value.shape == ()):
    return Same(value)
  raise _NoKeyError


def _is_of_library(function: Any) -> bool:
  """By where its code is: `functools.wraps` copies `__module__`."""
  if type(function) is _JITTED:
    function = function.__wrapped__
  names = getattr(function, "__globals__", {})
  return _is_library(names.get("__name__"))


@functools.cache
def _is_library(module: str | None) -> bool:
  return str(module).partition(".")[0] in _LIBRARIES


def _place_of(function: Any, inside: tuple[Any, ...]) -> Hashable | None:
  """The key of a function that calls itself, where it does."""
  for i, other in enumerate(inside):
    if other is function:
      return "the function around", i
  return None


def _of_code(function: Any, inside: tuple[Any, ...]) -> Hashable:
  if (around := _place_of(function, inside)) is not None:
    return around
  names, attributes = _names(function.__code__)
  if function.__dict__.keys() - {"__wrapped__"}:  # which its code may read
    raise _NoKeyError
  inside, there = (*inside, function), function.__globals__
  values = [cell.cell_contents for cell in _full(function.__closure__)]
  values += [there.get(name, ...) for name in names]  # ...: a builtin
  if function.__defaults__ or function.__kwdefaults__:
    keywords = tuple((function.__kwdefaults__ or {}).items())
    values.append((function.__defaults__, keywords))
  return function.__code__, *[
    _of_module(v, attributes, inside)
    if type(v) is types.ModuleType
    else _key(v, inside)
    for v in values
  ]


def _full(cells: Any) -> Any:
  for cell in cells or ():
    try:
      cell.cell_contents  # noqa: B018
    except ValueError:
      raise _NoKeyError from None
  return cells or ()


def _of_module(
  module: types.ModuleType, attributes: frozenset[str], inside: tuple[Any, ...]
) -> Hashable:
  """What of a module a function may read by these names."""
  if _is_library(module.__name__):
    return module
  if any(module is other for other in inside):
    return "module", module.__name__
  inside = *inside, module
  return module, *[
    _of_module(v, attributes, inside)
    if type(v) is types.ModuleType
    else _key(v, inside)
    for name in sorted(attributes & vars(module).keys())
    for v in (vars(module)[name],)
  ]


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
  """The global names that code reads, and all attributes."""
  names, attributes = set(), set()
  for instruction in dis.get_instructions(code):
    operation, name = instruction.opname, instruction.argval
    if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
      names.add(name)
    elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
      attributes.add(name)
    elif operation in ("IMPORT_NAME", "STORE_GLOBAL", "STORE_ATTR"):
      raise _NoKeyError
  for inner in code.co_consts:
    if isinstance(inner, types.CodeType):
      more, of_more = _names(inner)
      names |= set(more)
      attributes |= of_more
  if names & _READERS:
    raise _NoKeyError
  return tuple(sorted(names)), frozenset(attributes)
