"""Mistakes that users make with every op, and what is to be said of them."""

from collections.abc import Callable
import inspect
import re
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support.products import normal

A, B, C, BIAS = normal(4, 6), normal(6, 8), normal(4, 8), normal(8)
LHS, RHS, SIZES = normal(9, 6), normal(3, 6, 8), jnp.array([2, 3, 4])
SQUARE = normal(4, 4)
INTS = jnp.arange(16).reshape(4, 4)
NUMBERS = (((1,), (0,)), ((), ()))


def ragged_numbers(
  contract: Any = ((1,), (1,)), ragged: Any = (0,), group: Any = (0,)
) -> lax.RaggedDotDimensionNumbers:
  """Of rows by a matrix for each group, if not told otherwise."""
  return lax.RaggedDotDimensionNumbers((contract, ((), ())), ragged, group)


# What each op is called with, where nothing is wrong.
GROUPS = {"group_sizes": SIZES, "group_offset": np.array([0], np.int32)}
CALLS = {
  "matmul": {"a": A, "b": B, "bias": BIAS, "c": C},
  "gated_matmul": {"x": A, "w_gate": B, "w_up": B},
  "dot_general": {"lhs": A, "rhs": B, "dimension_numbers": NUMBERS},
  "ragged_dot": {"lhs": LHS, "rhs": RHS, "bias": RHS[:, 0]} | GROUPS,
  "gated_ragged_dot": {"x": LHS, "w_gate": RHS, "w_up": RHS} | GROUPS,
  "ragged_dot_general": {
    "lhs": LHS,
    "rhs": RHS,
    "ragged_dot_dimension_numbers": ragged_numbers(),
  }
  | GROUPS,
}
ARRAYS = [
  (op, name)
  for op, call in CALLS.items()
  for name in call
  if not name.endswith("numbers")
]


def takes(op: str, argument: str) -> bool:
  """Whether the op has the argument."""
  return argument in inspect.signature(getattr(pallas_gemm, op)).parameters


ACTIVATED = [op for op in CALLS if takes(op, "activation")]
# What tells a user nothing: names of functions that are not public, numbers of
# arguments that have names, and how the op is compiled.
_INTERNAL = re.compile(
  r"(?<![\w.])_[a-z]\w*|\b(argument|position|argnum)s? \d|\bstatic\b"
)


def told(words: str, op: str, **changes: Any) -> None:
  """An op says so when it is called with some arguments changed.

  Args:
    words: how the error begins, its class first; "..." is anything.
    op: the op.
    **changes: what is wrong in the call, which is that of `CALLS` else.
  """
  with pytest.raises((TypeError, ValueError)) as info:
    getattr(pallas_gemm, op)(**CALLS[op] | changes)
  said = f"{type(info.value).__name__}: {info.value}"
  pattern = ".*".join(map(re.escape, words.split("...")))
  assert re.match(pattern, said, re.DOTALL), said
  assert not _INTERNAL.search(str(info.value)), said


def _zeros(dtype: Any) -> Callable[[Any], np.ndarray]:
  return lambda x: np.zeros(x.shape, dtype)


# What is no array of numbers, made of one that is, by what is said of it; {} is
# its type.
NO_ARRAYS: dict[str, dict[str, Callable[[Any], Any]]] = {
  "be an array, got {}": {
    "none": lambda _: None,
    "str": lambda _: "x",
    "bytes": lambda _: b"x",
    "list": lambda x: np.asarray(x).tolist(),
    "tuple": lambda x: tuple(np.asarray(x)),
    "dict": lambda x: {"w": x},
    "set": lambda _: {1.0},
    "function": lambda x: lambda: x,
    "generator": lambda x: (row for row in np.asarray(x)),
    "ellipsis": lambda _: ...,
    "shape": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
  },
  "hold ..., got dtype key": {
    "keys": lambda x: jax.random.split(jax.random.key(0), x.shape),
  },
  "hold numbers, got dtype ": {
    "objects": lambda x: np.asarray(x).astype(object),
    "strings": lambda x: np.asarray(x).astype(str),
    "byte strings": lambda x: np.asarray(x).astype("S"),
    "dates": _zeros("datetime64[s]"),
    "durations": _zeros("timedelta64[s]"),
    "records": _zeros([("x", "f4")]),
    "float0": _zeros(jax.dtypes.float0),
  },
  "be an array without a mask, got a masked one; fill it first": {
    "masked": lambda x: np.ma.masked_array(x, np.ones(x.shape, bool)),
  },
}
# What no op takes for the dtype of its result.
NO_DTYPES = [
  *("zz", object, 3, ["float32"], str, "datetime64[s]"),
  jax.random.key(0).dtype,
]

_ARRAY = jnp.full((1, 128), 2.0)
# None is a function of one number that gives one number; by what is said of it.
NO_ACTIVATIONS: dict[str, dict[str, Any]] = {
  "be elementwise, got ... in it, which may mix elements": {
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
    "norm": lambda x: x / jnp.linalg.norm(x),
    "triangle": jnp.tril,
    "reversed": lambda x: x[..., ::-1],
    "gather": lambda x: x.ravel()[::-1].reshape(x.shape),
    "first": lambda x: x + x.ravel()[0],
    "scatter": lambda x: x.at[0].set(0.0),
    # Depends on where an element is.
    "iota": lambda x: x + jnp.arange(x.shape[-1]),
    "iota of all": lambda x: x + jnp.arange(x.size).reshape(x.shape),
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "dropout": lambda x: (
      x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    ),
  },
  "be elementwise, got one that depends on the shape of its argument": {
    "shape": lambda x: x * x.shape[-1],
    "size": lambda x: x * x.size,
    "ndim": lambda x: x * x.ndim,
  },
  "not close over an array; it must be elementwise": {
    "array": lambda x: x * _ARRAY,
    "array of one": lambda x: x * _ARRAY[:1, :1],
    "NumPy array": lambda x: x * np.ones((8, 1), np.float32),
    "array that does not broadcast": lambda x: x * _ARRAY[0, :3],
  },
  "keep shape and dtype of its argument, float32[": {
    "sum": jnp.sum,
    "transpose": lambda x: x.T,
    "product": lambda x: x @ x.T,
    "ravel": jnp.ravel,
    "number": lambda x: 1.0,
    "complex": lambda x: x + 1j,
    "bool": lambda x: x > 0,
    "int": lambda x: x.astype(int),
    "half": lambda x: x.astype("bfloat16"),
  },
  "return one array, got ": {
    "nothing": lambda x: None,
    "tuple": lambda x: (x,),
    "pair": lambda x: (x, x),
    "list": lambda x: [x],
    "dict": lambda x: {"x": x},
  },
  "be an elementwise function of one array; called with ... it raised": {
    "no argument": lambda: 0.0,
    "two arguments": jnp.add,
    "collective": lambda x: lax.psum(x, "i"),
    "string": lambda x: "x",
    "NumPy": lambda x: np.asarray(x) * 2,
    "branches": lambda x: x if x > 0 else 0 * x,
    "raises": lambda x: x * (1 // 0),
  },
  "be a function, got ": {
    "str": "relu",
    "a number": 3,
    "an array": _ARRAY,
    "a dict": {"name": "relu"},
  },
}
