"""Mistakes that users make with every op, and what is to be said of them."""

from collections.abc import Callable
import re
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

# Where either says it well.
EITHER = (TypeError, ValueError)
# What tells a user nothing: names of functions that are not public, numbers of
# arguments that have names, and how the op is compiled.
_INTERNAL = re.compile(
  r"(?<![\w.])_[a-z]\w*|\b(argument|position|argnum)s? \d|\bstatic\b"
)


def assert_told(
  errors: Any, message: str, f: Callable[..., Any], *args: Any, **keywords: Any
) -> None:
  """A call raises one of `errors`, in words that a user knows."""
  with pytest.raises(errors, match=message) as info:
    f(*args, **keywords)
  assert isinstance(info.value, EITHER)
  assert not _INTERNAL.search(str(info.value)), str(info.value)


def _zeros(dtype: Any) -> Callable[[Any], np.ndarray]:
  return lambda x: np.zeros(x.shape, dtype)


# What is no array of numbers, made of one that is, and how it is called.
NO_ARRAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
  "str": (lambda _: "x", "str"),
  "bytes": (lambda _: b"x", "bytes"),
  "list": (lambda x: np.asarray(x).tolist(), "list"),
  "tuple": (lambda x: tuple(np.asarray(x)), "tuple"),
  "dict": (lambda x: {"w": x}, "dict"),
  "set": (lambda _: {1.0}, "set"),
  "function": (lambda x: lambda: x, "function"),
  "generator": (lambda x: (row for row in np.asarray(x)), "generator"),
  "ellipsis": (lambda _: ..., "ellipsis"),
  "shape": (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), "ShapeDtype"),
  "keys": (lambda x: jax.random.split(jax.random.key(0), x.shape), "key"),
  "objects": (lambda x: np.asarray(x).astype(object), "object"),
  "strings": (lambda x: np.asarray(x).astype(str), "str|<U"),
  "byte strings": (lambda x: np.asarray(x).astype("S"), "bytes|S"),
  "dates": (_zeros("datetime64[s]"), "datetime64"),
  "durations": (_zeros("timedelta64[s]"), "timedelta64"),
  "records": (_zeros([("x", "f4")]), "void|'x'"),
  "float0": (_zeros(jax.dtypes.float0), "float0|void"),
  "masked": (
    lambda x: np.ma.masked_array(np.asarray(x), np.ones(x.shape, bool)),
    "[Mm]asked",
  ),
}
# What no op takes for the dtype of its result.
NO_DTYPES: dict[str, Any] = {
  "name": "zz",
  "of objects": object,
  "int": 3,
  "list": ["float32"],
  "of strings": str,
  "of dates": "datetime64[s]",
  "of keys": jax.random.key(0).dtype,
}

_ARRAY = jnp.full((1, 128), 2.0)


def _first_row_is_zero(x: jax.Array) -> jax.Array:
  return x.at[0].set(0.0)


def _dropout(x: jax.Array) -> jax.Array:
  return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


def _branches(x: jax.Array) -> jax.Array:
  return x if x > 0 else 0 * x


# None is a function of one number that gives one number.
NO_ACTIVATIONS: dict[str, Any] = {
  # Mixes elements.
  "cumsum": lambda x: jnp.cumsum(x, -1),
  "cumsum of all": lambda x: jnp.cumsum(x).reshape(x.shape),
  "cumprod of all": lambda x: jnp.cumprod(x).reshape(x.shape),
  "sort": jnp.sort,
  "sort of all": lambda x: jnp.sort(x.ravel()).reshape(x.shape),
  "roll": lambda x: jnp.roll(x, 1),
  "roll of rows": lambda x: jnp.roll(x, 1, -1),
  "flip": jnp.flip,
  "softmax": jax.nn.softmax,
  "log_softmax": jax.nn.log_softmax,
  "standardize": jax.nn.standardize,
  "max": lambda x: x - x.max(),
  "mean": lambda x: x - x.mean(),
  "sum": jnp.sum,
  "norm": lambda x: x / jnp.linalg.norm(x),
  "transpose": lambda x: x.T,
  "product": lambda x: x @ x.T,
  "triangle": jnp.tril,
  "reversed": lambda x: x[..., ::-1],
  "gather": lambda x: x.ravel()[::-1].reshape(x.shape),
  "first": lambda x: x + x.ravel()[0],
  "scatter": _first_row_is_zero,
  "ravel": jnp.ravel,
  "collective": lambda x: lax.psum(x, "i"),
  # Depends on where an element is, or on how many there are.
  "iota": lambda x: x + jnp.arange(x.shape[-1]),
  "iota of all": lambda x: x + jnp.arange(x.size).reshape(x.shape),
  "shape": lambda x: x * x.shape[-1],
  "size": lambda x: x * x.size,
  "ndim": lambda x: x * x.ndim,
  "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
  "dropout": _dropout,
  # Has an array of its own.
  "array": lambda x: x * _ARRAY,
  "array of one": lambda x: x * _ARRAY[:1, :1],
  "NumPy array": lambda x: x * np.ones((8, 1), np.float32),
  # Takes or gives something else.
  "no argument": lambda: 0.0,
  "two arguments": jnp.add,
  "nothing": lambda x: None,
  "number": lambda x: 1.0,
  "string": lambda x: "x",
  "tuple": lambda x: (x,),
  "pair": lambda x: (x, x),
  "list": lambda x: [x],
  "dict": lambda x: {"x": x},
  "complex": lambda x: x + 1j,
  "bool": lambda x: x > 0,
  "int": lambda x: x.astype(int),
  "half": lambda x: x.astype("bfloat16"),
  # Is no function of arrays that JAX can trace.
  "NumPy": lambda x: np.asarray(x) * 2,
  "branches": _branches,
  "raises": lambda x: x * (1 // 0),
  # Is no function.
  "str": "relu",
  "a number": 3,
  "an array": _ARRAY,
  "a dict": {"name": "relu"},
}
