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
from tests.support.ops import NUMBERS, ROWS
from tests.support.products import normal

A, B, C, BIAS = normal(4, 6), normal(6, 8), normal(4, 8), normal(8)
LHS, RHS, SIZES = normal(9, 6), normal(3, 6, 8), jnp.array([2, 3, 4])
SQUARE = normal(4, 4)
INTS = jnp.arange(16).reshape(4, 4)

# What each op is called with, where nothing is wrong.
GROUPS = {"group_sizes": SIZES, "group_offset": np.array([0], np.int32)}
CALLS = {
  "matmul": {"a": A, "b": B, "bias": BIAS, "c": C},
  "gated_matmul": {"x": A, "w_gate": B, "w_up": B},
  "dot_general": {"lhs": A, "rhs": B, "dimension_numbers": NUMBERS},
  "ragged_dot": {"lhs": LHS, "rhs": RHS, "bias": RHS[:, 0]} | GROUPS,
  "gated_ragged_dot": {"x": LHS, "w_gate": RHS, "w_up": RHS} | GROUPS,
  "ragged_dot_general": {"lhs": LHS, "rhs": RHS}
  | {"ragged_dot_dimension_numbers": ROWS}
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
NO_ARRAYS: dict[str, list[Callable[[Any], Any]]] = {
  "be an array, got {}": [
    lambda _: None,
    lambda _: "x",
    lambda _: b"x",
    lambda x: np.asarray(x).tolist(),
    lambda x: tuple(np.asarray(x)),
    lambda x: {"w": x},
    lambda _: {1.0},
    lambda x: lambda: x,
    lambda x: (row for row in np.asarray(x)),
    lambda _: ...,
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
  ],
  "hold ..., got dtype key": [
    lambda x: jax.random.split(jax.random.key(0), x.shape)
  ],
  "hold numbers, got dtype ": [
    lambda x: np.asarray(x).astype(object),
    lambda x: np.asarray(x).astype(str),
    lambda x: np.asarray(x).astype("S"),
    *map(_zeros, ("datetime64[s]", "timedelta64[s]", [("x", "f4")])),
    _zeros(jax.dtypes.float0),
  ],
  "have a dtype that JAX has, got dtype('": [
    lambda x: np.asarray(x).astype(">f4"),
    lambda x: np.asarray(x).astype(">i8"),
    lambda x: np.asarray(x).astype(np.longdouble),
  ],
  "be an array without a mask, got a masked one; fill it first": [
    lambda x: np.ma.masked_array(x, np.ones(x.shape, bool))
  ],
}
# What no op takes for the dtype of its result.
NO_DTYPES = [
  *("zz", object, 3, ["float32"], str, "datetime64[s]", ">f4"),
  jax.random.key(0).dtype,
]

_ARRAY = jnp.full((1, 128), 2.0)
_KEY = jax.random.key(0)
# None is a function of one number that gives one number; by what is said of it.
NO_ACTIVATIONS: dict[str, list[Any]] = {
  "be elementwise, got ... in it, which may mix elements": [
    lambda x: jnp.cumsum(x, -1),
    lambda x: jnp.cumsum(x).reshape(x.shape),
    lambda x: jnp.cumprod(x).reshape(x.shape),
    jnp.sort,
    lambda x: jnp.sort(x.ravel()).reshape(x.shape),
    lambda x: jnp.roll(x, 1),
    lambda x: jnp.roll(x, 1, -1),
    jnp.flip,
    jax.nn.softmax,
    jax.nn.log_softmax,
    jax.nn.standardize,
    lambda x: x - x.max(),
    lambda x: x - x.mean(),
    lambda x: x / jnp.linalg.norm(x),
    jnp.tril,
    lambda x: x[..., ::-1],
    lambda x: x.ravel()[::-1].reshape(x.shape),
    lambda x: x + x.ravel()[0],
    lambda x: x.at[0].set(0.0),
    # Depends on where an element is.
    lambda x: x + jnp.arange(x.shape[-1]),
    lambda x: x + jnp.arange(x.size).reshape(x.shape),
    lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
  ],
  "be elementwise, got one that depends on the shape of its argument": [
    lambda x: x * x.shape[-1],
    lambda x: x * x.size,
    lambda x: x * x.ndim,
  ],
  "not close over an array; it must be elementwise": [
    lambda x: x * jax.random.uniform(_KEY),
    lambda x: x * _ARRAY,
    lambda x: x * _ARRAY[:1, :1],
    lambda x: x * np.ones((8, 1), np.float32),
    lambda x: x * _ARRAY[0, :3],  # which does not broadcast
  ],
  "keep shape and dtype of its argument, float32[": [
    jnp.sum,
    lambda x: x.T,
    lambda x: x @ x.T,
    jnp.ravel,
    lambda x: 1.0,
    lambda x: x + 1j,
    lambda x: x > 0,
    lambda x: x.astype(int),
    lambda x: x.astype("bfloat16"),
  ],
  "return one array, got ": [
    lambda x: None,
    lambda x: (x,),
    lambda x: (x, x),
    lambda x: [x],
    lambda x: {"x": x},
  ],
  "be an elementwise function of one array; called with ... it raised": [
    lambda: 0.0,
    jnp.add,
    lambda x: lax.psum(x, "i"),
    lambda x: "x",
    lambda x: x if x > 0 else 0 * x,
    lambda x: x * (1 // 0),
  ],
  "be JAX's, got one of NumPy; use jnp.tanh": [np.tanh],
  "be JAX's, got one of NumPy; use jax.numpy in it": [
    lambda x: np.asarray(x) * 2,
  ],
  "be a function, got 'relu'; pass jax.nn.relu": ["relu"],
  "be a function, got ": ["cube", 3, _ARRAY, {"name": "relu"}],
}


def cover(table: dict[str, list[Any]], others: list[Any]) -> list[Any]:
  """Each of `others` with what is first of its words, one with each other.

  Args:
    table: cases by what is said of them.
    others: ops or arguments, none of which has a check of its own.

  Returns:
    (other, words, case)
  """
  return [
    (other, words, case)
    for words, cases in table.items()
    for i, case in enumerate(cases)
    for j, other in enumerate(others)
    if i == 0 or i % len(others) == j
  ]
