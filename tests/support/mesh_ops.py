"""Calls of ops with sharded operands, and the same in jnp."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_gemm
from tests.support import ops, ragged
from tests.support.products import normal

Arrays = dict[str, Any]

# The last two of 32 rows are in no group.
SIZES = np.array([3, 0, 9, 1, 6, 5, 2, 4], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A call of an op with sharded operands.

  Attributes:
    op: the public function.
    name: what is sharded, in words.
    args: shape and sharding of each array, by name; the first two are A and B.
    out: the result's sharding.
    pieces: in how many pieces A and B come to the kernel.
    ask: `out` is asked for by `out_sharding` where axes are Explicit; JAX does
      not infer it.
    auto: runs under Auto axes too.
    options: other arguments.
    also: further numbers of pieces that derivatives may read an array in, by
      name ("out" is the result). That of `pieces` and the array's own are fine.
    sums: how many arrays each kind of collective takes at most; None compares
      with JAX's own product.
    sums_vjp: the same, forward and backward together.
  """

  op: str
  name: str
  args: Mapping[str, tuple[tuple[int, ...], P]]
  out: P
  pieces: tuple[int, int]
  ask: bool = False
  auto: bool = True
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  also: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  sums: Mapping[str, int] | None = None
  sums_vjp: Mapping[str, int] | None = None

  @property
  def grouped(self) -> bool:
    """JAX's own product has no type to compare with: values alone are."""
    return "ragged" in self.op

  @property
  def key(self) -> str:
    """The case in a line."""
    return f"{self.op}: {self.name}"

  def arrays(self, seed: int = 0) -> Arrays:
    """The arrays, on one device; values of the order of one."""
    return {
      name: normal(*shape, seed=seed + i) / shape[-1] ** 0.5
      for i, (name, (shape, _)) in enumerate(self.args.items())
    }

  def specs(self) -> dict[str, P]:
    """How each array is sharded."""
    return {name: spec for name, (_, spec) in self.args.items()}

  def ours(self, asked: Any = None, **how: Any) -> Callable[[Arrays], Any]:
    """The op, as a function of the arrays by name.

    Args:
      asked: the `out_sharding`, if any.
      **how: other arguments of the op, beside `options`.
    """
    how = {**self.options, **how}
    if asked is not None:
      how["out_sharding"] = asked
    if self.op == "dot_general":
      how.pop("implementation", None)
    op = getattr(pallas_gemm, self.op)

    def call(x):
      sizes = {"group_sizes": jnp.asarray(SIZES)} if self.grouped else {}
      return op(**x, **sizes, **how)

    return call

  def plain(self, asked: Any = None) -> Callable[[Arrays], jax.Array]:
    """The same in jnp; grouped products by what is not sharded."""
    how = {} if self.grouped else {"out_sharding": asked}
    of = functools.partial(_PLAIN[self.op], **self.options, **how)
    return lambda x: of(*[x[name] for name in self.args])


def _matmul(
  a,
  b,
  *added,
  out_sharding,
  alpha=1.0,
  beta=1.0,
  activation=lambda z: z,
  transpose_a=False,
  transpose_b=False,
):
  a, b = a.mT if transpose_a else a, b.mT if transpose_b else b
  z = alpha * jnp.matmul(a, b, out_sharding=out_sharding)
  for factor, v in zip((1.0, beta), added):  # bias and C, if there are
    z = z + factor * v
  return activation(z)


def _gated(x, *weights, out_sharding):
  gate, up = (jnp.matmul(x, w, out_sharding=out_sharding) for w in weights)
  return jax.nn.silu(gate) * up


def _ragged(lhs, rhs, bias=None, *, transpose_rhs=False, **options):
  rhs = rhs.mT if transpose_rhs else rhs
  return ragged.plain(lhs, rhs, jnp.asarray(SIZES), bias, **options)


def _gated_ragged(x, gate, up):
  return jax.nn.silu(_ragged(x, gate)) * _ragged(x, up)


def _ragged_general(lhs, rhs, *, ragged_dot_dimension_numbers):
  if ragged_dot_dimension_numbers is ops.ROWS:
    return _ragged(lhs, rhs)
  rows = ragged.membership(len(lhs), jnp.asarray(SIZES)).astype(lhs.dtype)
  return jnp.einsum("mg,mk,mn->gkn", rows, lhs, rhs)


_PLAIN = {
  "matmul": _matmul,
  "gated_matmul": _gated,
  "dot_general": lax.dot_general,
  "ragged_dot": _ragged,
  "gated_ragged_dot": _gated_ragged,
  "ragged_dot_general": _ragged_general,
}
