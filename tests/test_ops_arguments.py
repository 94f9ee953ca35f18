"""Mistakes in one argument, whatever the others are."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support.mistakes import (
  ACTIVATED,
  ARRAYS,
  CALLS,
  INTS,
  NO_ACTIVATIONS,
  NO_ARRAYS,
  NO_DTYPES,
  RHS,
  SIZES,
  SQUARE,
  A,
  B,
  C,
  takes,
  told,
)

HUGE = 10**400


@pytest.mark.parametrize(
  ("words", "kind"), [(words, x) for words, of in NO_ARRAYS.items() for x in of]
)
@pytest.mark.parametrize(("op", "argument"), ARRAYS)
def test_no_array(op, argument, words, kind):
  if kind == "none" and argument in ("bias", "c", "group_offset"):
    pytest.skip("there need be none")
  value = NO_ARRAYS[words][kind](CALLS[op][argument])
  words = words.format(type(value).__name__)
  told(f"TypeError: {argument} must {words}", op, **{argument: value})


@pytest.mark.parametrize(
  ("words", "kind"),
  [(words, x) for words, of in NO_ACTIVATIONS.items() for x in of],
)
@pytest.mark.parametrize("op", ACTIVATED)
def test_no_activation(op, words, kind):
  activation = NO_ACTIVATIONS[words][kind]
  told(f"TypeError: activation must {words}", op, activation=activation)


@pytest.mark.parametrize("transform", (jax.jit, jax.grad))
@pytest.mark.parametrize("op", ACTIVATED)
def test_activation_closes_over_a_traced_value(transform, op):
  words = "TypeError: activation must not close over a traced value"
  f = lambda t: told(words, op, activation=lambda x: x * t)  # noqa: E731
  jax.jit(f)(1.0)
  with pytest.raises(TypeError, match="scalar-output"):  # of no output
    jax.grad(f)(1.0)


# What arguments must not be, by what is said; {0} is the argument, {1} the type
# of its value.
OPTIONS = {
  "out_dtype preferred_element_type": {"TypeError: {0} must be ": NO_DTYPES},
  "reduce_dtype": {
    "TypeError: {0} must be ": NO_DTYPES,
    "TypeError: {0} must be floating, of 16 to 32 bits, for sums": [
      *("int32", bool, "complex64", "float8_e4m3fn"),
    ],
    "TypeError: {0} float64 needs jax_enable_x64": ["float64"],
  },
  "transpose_a transpose_b transpose_rhs": {
    "TypeError: {0} must be a bool, got {1}": ["yes", None, jnp.array(True)],
  },
  "implementation": {
    "ValueError: {0} must be of (...'sm90', ...), got 'cublas'": [
      *("cublas", ["xla", "cublas"]),
    ],
    "ValueError: {0} must be of (...'sm90', ...), got ": [
      *("", "XLA", ("xla", None)),
    ],
    "ValueError: {0} must hold a name, got an empty sequence": [(), []],
    "TypeError: {0} must be None, a name or a sequence of names, got {1}": [
      *(3, b"xla"),
    ],
    "TypeError: {0} must be hashable, got {1}": [{}, {"xla"}, np.array("xla")],
    "TypeError: {0} must be hashable, got tuple": [[["xla"]]],
  },
  "config": {
    "TypeError: {0} must be a tuning.Config...got {1}": [128, "fast", type],
    "TypeError: {0} must be hashable, got dict": [{"block_m": 128}],
  },
  "precision": {
    "TypeError: {0} must be None, a lax.Precision (or two), ...got ": [
      *(3, b"high", (), ("high",) * 3, ("high", None)),
    ],
    "ValueError: {0} must be known to JAX, got 'exact'": ["exact"],
    "TypeError: {0} must be hashable, got dict": [{}],
  },
  "out_sharding": {
    "TypeError: {0} must be None, a PartitionSpec or ...got {1}": [
      *("x", 3, ("x", None)),
    ],
  },
  "group_sizes": {
    "TypeError: {0} must hold integers, got dtype ": [
      *(jnp.ones(3), np.ones(3, np.float32), SIZES > 2, 1j * SIZES),
    ],
  },
  "group_offset": {
    "TypeError: {0} must hold integers, got dtype ": [1.0, True, 1j],
    "ValueError: {0} must have shape () or (1,), got ": [
      *(jnp.array([0, 1]), SIZES, jnp.zeros((1, 1), int)),
    ],
    "ValueError: {0} must fit into int32, got an integer of about 398 digits": [
      HUGE,
    ],
  },
}


@pytest.mark.parametrize(
  ("op", "argument", "words", "value"),
  [
    (op, argument, words, value)
    for arguments, said in OPTIONS.items()
    for argument in arguments.split()
    for op in CALLS
    if takes(op, argument)
    for words, values in said.items()
    for value in values
  ],
)
def test_option(op, argument, words, value):
  words = words.format(argument, type(value).__name__)
  told(words, op, **{argument: value})


# alpha and beta.

FLOATS = {"a": A, "b": B, "bias": None, "c": C}
INTEGERS = FLOATS | {"a": INTS, "b": INTS, "c": INTS}
UNSIGNED = FLOATS | dict.fromkeys("abc", INTS.astype("uint8"))
COMPLEX = FLOATS | dict.fromkeys("abc", SQUARE + 1j)
FACTORS = [
  (FLOATS, "TypeError: {0} must be a number or a scalar array, got {1}", [
    "2", b"2", True, False, np.True_, None, [2.0], {}, abs, np.str_("2"),
    np.datetime64("2020-01-01"),
  ]),
  (FLOATS, "TypeError: {0} must hold numbers, got dtype object", [
    np.array(2, object),
  ]),
  (FLOATS, "TypeError: {0} must be an array without a mask", [
    np.ma.masked_array(2.0, True),
  ]),
  (FLOATS, "ValueError: {0} must be a scalar, got shape (", [
    jnp.ones(3), np.ones(1, np.float32), C,
  ]),
  (FLOATS, "TypeError: {0} must be real for float32, got ", [
    1j, jnp.array(1j), jnp.array(True), jax.random.key(0),
  ]),
  (INTEGERS, "TypeError: {0} must be an integer for int32, got ", [
    0.5, float("nan"), float("inf"), np.float32(0.5), jnp.array(2.0),
    jnp.array(1j),
  ]),
  (INTEGERS, "TypeError: {0} must fit into int32, got ", [2**40, HUGE]),
  (UNSIGNED, "TypeError: {0} must fit into uint32, got -1", [-1]),
  (FLOATS, "TypeError: {0} must fit into float32, got an integer of about", [
    HUGE, -HUGE,
  ]),
  (COMPLEX, "TypeError: {0} must fit into complex64, got ", [HUGE]),
]  # fmt: skip


@pytest.mark.parametrize("name", ("alpha", "beta"))
@pytest.mark.parametrize(
  ("call", "words", "value"),
  [(call, words, value) for call, words, values in FACTORS for value in values],
)
def test_factor(name, call, words, value):
  words = words.format(name, type(value).__name__)
  told(words, "matmul", **call, **{name: value})


@pytest.mark.parametrize("name", ("alpha", "beta"))
@pytest.mark.parametrize("transform", (jax.jit, jax.grad))
def test_traced_factors_of_a_wrong_kind(name, transform):
  def f(t, of):
    factor = {name: t.astype(of) if of else t[None]}
    return pallas_gemm.matmul(A, B, c=C, **factor).sum().real

  for of, error in (("complex64", TypeError), ("bool", TypeError)):
    with pytest.raises(error, match=f"{name} must .*{of}"):
      transform(lambda t, of=of: f(t, of))(1.0)
  with pytest.raises(ValueError, match=rf"{name} must .*\(1,\)"):
    transform(lambda t: f(t, None))(1.0)


# Equal to what is right, and so perhaps compiled already.
EQUAL = [
  ("matmul", "alpha", 1.0, [True, np.True_]),
  ("matmul", "alpha", 1, [True]),
  ("matmul", "alpha", 0.0, [False]),
  ("matmul", "alpha", 2.0, [2 + 0j]),
  ("matmul", "beta", 1.0, [True]),
  ("matmul", "beta", 0.0, [False]),
  ("matmul", "beta", 2.0, [2 + 0j]),
  ("matmul", "transpose_a", False, [0, 0.0, np.False_]),
  ("matmul", "transpose_b", True, [1, np.True_]),
  ("ragged_dot", "transpose_rhs", False, [0, 0.0, np.False_]),
  ("ragged_dot", "transpose_rhs", True, [1]),
]


@pytest.mark.parametrize(("op", "argument", "right", "wrong"), EQUAL)
def test_what_equals_something_right(op, argument, right, wrong):
  """The check may not depend on what is compiled."""
  call = dict.fromkeys("abc", SQUARE) | {"bias": None}
  if op == "ragged_dot":
    call = CALLS[op] | {"rhs": RHS[:, :, :6], "bias": None}
  for value in wrong:
    for _ in range(2):
      getattr(pallas_gemm, op)(**call | {argument: right})
      told(f"TypeError: {argument} must be ", op, **call | {argument: value})


class Array:
  """What says how it becomes an array."""

  def __init__(self, array):
    self.array = jnp.asarray(array)

  def __jax_array__(self):
    return self.array


@pytest.mark.parametrize(("op", "argument"), ARRAYS)
@pytest.mark.parametrize("make", (np.asarray, Array))
def test_what_becomes_an_array(op, argument, make):
  f, call = getattr(pallas_gemm, op), CALLS[op]
  out = f(**call | {argument: make(call[argument])})
  np.testing.assert_array_equal(out, f(**call))


def test_a_matrix_is_masked_nowhere():
  """What is masked is no number: filled in, it is."""
  masked = np.ma.masked_array(np.asarray(A), np.asarray(A) > 0)
  out = pallas_gemm.matmul(masked.filled(0), B)
  np.testing.assert_array_equal(out, pallas_gemm.matmul(jnp.minimum(A, 0), B))


# What an op calls otherwise than another one.
OTHER_NAMES = {
  "out_dtype": "preferred_element_type",
  "transpose_b": "transpose_rhs",
}
OTHER_NAMES |= {theirs: ours for ours, theirs in OTHER_NAMES.items()}


@pytest.mark.parametrize("name", OTHER_NAMES)
@pytest.mark.parametrize("op", CALLS)
def test_a_keyword_of_another_op(op, name):
  """The error has the name that this one takes; no signature shows more."""
  f, other = getattr(pallas_gemm, op), OTHER_NAMES[name]
  kinds = {x.kind for x in inspect.signature(f).parameters.values()}
  assert inspect.Parameter.VAR_KEYWORD not in kinds
  if takes(op, name):
    return
  words = f"TypeError: {op}() got an unexpected keyword argument {name!r}; it"
  words += f" takes {other}, not {name}" if takes(op, other) else " takes "
  told(words, op, **{name: None})
  told(words, op, **{name: "float32"})
