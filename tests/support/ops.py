"""Each op beside the same in jnp: the one table that tests of all ops share."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support import ragged
from tests.support.products import normal

# Sizes by letter. Of M = 7 rows: a group without any, and rows in no group.
_DENSE = {"m": 2, "n": 4, "k": 3}
_GROUPED = {"m": 7, "n": 3, "k": 2, "g": 4, "local": 2}
SIZES = jnp.array([3, 0, 2, 1])
# Of a matrix times a matrix: what `lax.dot_general` contracts.
NUMBERS = (((1,), (0,)), ((), ()))


def ragged_numbers(
  contract: Any = ((1,), (1,)),
  rows: Any = (0,),
  group: Any = (0,),
  batch: Any = ((), ()),
) -> lax.RaggedDotDimensionNumbers:
  """Of rows by a matrix for each group, if not told otherwise."""
  return lax.RaggedDotDimensionNumbers((contract, batch), rows, group)


ROWS = ragged_numbers()
SUMS = ragged_numbers(((0,), (0,)), group=())


@pytest.fixture
def x64():
  """Where right and wrong are far apart."""
  with jax.enable_x64(True):
    yield


def n64(*shape, seed=0):
  """Another array for another shape or seed."""
  return normal(*shape, dtype="float64", seed=seed)


def dense(a, b, bias=None, c=None, **epilogue):
  """`matmul`."""
  return pallas_gemm.matmul(a, b, bias=bias, c=c, **epilogue)


def plain(a, b, bias=None, c=None, *, alpha=1.0, beta=1.0, activation=None):
  """The same in jnp."""
  out = alpha * jnp.matmul(a, b)
  out = out if c is None else out + beta * c
  out = out if bias is None else out + bias
  return out if activation is None else activation(out)


def _with_factors(f):
  return lambda a, b, c, alpha, beta: f(
    a, b, c=c, alpha=alpha, beta=beta, activation=jnp.tanh
  )


def plain_gated(x, gate, up, activation=jax.nn.silu):
  """`gated_matmul` in jnp."""
  return activation(x @ gate) * (x @ up)


def grouped(lhs, rhs, bias=None, *, group_sizes=SIZES, **options):
  """`ragged_dot`."""
  return pallas_gemm.ragged_dot(lhs, rhs, group_sizes, bias=bias, **options)


def plain_grouped(lhs, rhs, bias=None, *, group_sizes=SIZES, **options):
  """The same in jnp."""
  return ragged.plain(lhs, rhs, group_sizes, bias, **options)


def gated_grouped(x, gate, up, **options):
  """`gated_ragged_dot`."""
  return pallas_gemm.gated_ragged_dot(x, gate, up, SIZES, **options)


def plain_gated_grouped(x, gate, up, activation=jax.nn.silu, **options):
  """The same in jnp."""
  gate = ragged.plain(x, gate, SIZES, **options)
  return activation(gate) * ragged.plain(x, up, SIZES, **options)


class Op(NamedTuple):
  """An op, the same in jnp, and the letters of each of its arguments."""

  ours: Callable[..., jax.Array]
  plain: Callable[..., jax.Array]
  words: tuple[str, ...]
  sizes: Mapping[str, int] = _DENSE
  dtype: str = "float64"

  @property
  def shapes(self) -> list[tuple[int, ...]]:
    """Of its arguments."""
    return [tuple(self.sizes[c] for c in word) for word in self.words]

  def args(
    self, seed: int = 0, dtype: str | None = None
  ) -> tuple[jax.Array, ...]:
    """Its arguments; others for another seed."""
    dtype = dtype or self.dtype
    return tuple(
      normal(*shape, dtype=dtype, seed=seed + i)
      for i, shape in enumerate(self.shapes)
    )

  def given(self, **options: Any) -> "Op":
    """With further options of the op."""
    ours, plain = (functools.partial(f, **options) for f in self[:2])
    return self._replace(ours=ours, plain=plain)

  def of(self, **sizes: int) -> "Op":
    """Of other sizes."""
    return self._replace(sizes={**self.sizes, **sizes})


MATMUL = Op(dense, plain, ("mk", "kn"))
ADDED = MATMUL._replace(words=("mk", "kn", "n", "mn"))
RAGGED = Op(grouped, plain_grouped, ("mk", "gkn"), _GROUPED)
BIASED = RAGGED._replace(words=("mk", "gkn", "gn"))
GATED = Op(pallas_gemm.gated_matmul, plain_gated, ("mk", "kn", "kn"))
GATED_RAGGED = Op(
  gated_grouped, plain_gated_grouped, ("mk", "gkn", "gkn"), _GROUPED
)
# Of the second and third group.
PART = BIASED.of(g=2).given(group_offset=1)
# An op of each kind.
TWO = {"matmul": MATMUL, "ragged_dot": RAGGED}
OPS = {
  "matmul": MATMUL,
  "matmul, epilogue": ADDED.given(activation=jnp.tanh, alpha=2.0, beta=0.5),
  "matmul, factors": Op(
    *map(_with_factors, MATMUL[:2]), ("mk", "kn", "mn", "", "")
  ),
  "gated_matmul": GATED,
  "ragged_dot": RAGGED,
  "ragged_dot, epilogue": BIASED.given(activation=jax.nn.gelu),
  "ragged_dot, part": PART.given(activation=jnp.tanh),
  "gated_ragged_dot": GATED_RAGGED,
  "gated_ragged_dot, part": GATED_RAGGED.of(g=2).given(group_offset=1),
}
# Of 16 bits, as kernels are: other dtypes are passed on to lax.
DROP_INS = {
  "dot_general": Op(
    lambda a, b: pallas_gemm.dot_general(a, b, NUMBERS),
    jnp.matmul,
    MATMUL.words,
    dtype="bfloat16",
  ),
  "ragged_dot_general": Op(
    lambda a, b: pallas_gemm.ragged_dot_general(a, b, SIZES, ROWS),
    plain_grouped,
    RAGGED.words,
    _GROUPED,
    dtype="bfloat16",
  ),
}
EVERY = OPS | DROP_INS
# Those that have an activation, without any.
ACTIVATED = {
  "matmul": MATMUL,
  "gated_matmul": GATED,
  "ragged_dot": RAGGED,
  "gated_ragged_dot": GATED_RAGGED,
}


def each(ops: Mapping[str, Op]):
  """A test of each op."""
  return pytest.mark.parametrize("op", ops.values(), ids=ops)


def squared(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """A loss whose cotangents are no constants."""
  return lambda *args: (f(*args) ** 2).sum()


def value_and_gradients(
  f: Callable[..., jax.Array], args: tuple[jax.Array, ...]
) -> Any:
  """Of that loss, with respect to all arguments."""
  return jax.value_and_grad(squared(f), tuple(range(len(args))))(*args)


def lowered(f: Callable[..., Any], *args: Any, platform: str = "cuda") -> str:
  """The program, ahead of time: this machine need not have the platform."""
  traced = jax.jit(f).trace(*args)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def float32(*args: jax.Array) -> list[np.ndarray]:
  """On the host."""
  return [np.asarray(x).astype(np.float32) for x in args]
