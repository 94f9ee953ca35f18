"""Calls of ops with sharded operands, and the same in jnp."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_gemm
from tests.support import ragged
from tests.support.products import normal

Arrays = dict[str, Any]

# The last two rows are in no group.
SIZES = np.array([3, 0, 9, 1, 6, 5, 2, 4], np.int32)
ROWS = lax.RaggedDotDimensionNumbers(
  (((1,), (1,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(0,),
)
SUMS = lax.RaggedDotDimensionNumbers(
  (((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(),
)


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
    return lambda x: _OURS[self.op](x, **how)

  def plain(self, asked: Any = None) -> Callable[[Arrays], jax.Array]:
    """The same in jnp; grouped products by what is not sharded."""
    if self.grouped:
      return lambda x: _PLAIN[self.op](x, **self.options)
    return lambda x: _PLAIN[self.op](x, asked, **self.options)


# What is called.


def _ours_ragged(op):
  def call(x, **how):
    return op(x["lhs"], x["rhs"], _sizes(), bias=x.get("bias"), **how)

  return call


def _sizes():
  return jnp.asarray(SIZES)


_OURS = {
  "matmul": lambda x, **how: pallas_gemm.matmul(
    x["a"], x["b"], bias=x.get("bias"), c=x.get("c"), **how
  ),
  "gated_matmul": lambda x, **how: pallas_gemm.gated_matmul(
    x["x"], x["gate"], x["up"], **how
  ),
  "dot_general": lambda x, **how: pallas_gemm.dot_general(
    x["lhs"], x["rhs"], **how
  ),
  "ragged_dot": _ours_ragged(pallas_gemm.ragged_dot),
  "gated_ragged_dot": lambda x, **how: pallas_gemm.gated_ragged_dot(
    x["x"], x["gate"], x["up"], _sizes(), **how
  ),
  "ragged_dot_general": lambda x, **how: pallas_gemm.ragged_dot_general(
    x["lhs"], x["rhs"], _sizes(), **how
  ),
}


def _matmul(
  x,
  out,
  *,
  alpha=1.0,
  beta=1.0,
  activation=None,
  transpose_a=False,
  transpose_b=False,
):
  a = x["a"].mT if transpose_a else x["a"]
  b = x["b"].mT if transpose_b else x["b"]
  z = jnp.matmul(a, b, out_sharding=out)
  z = z if alpha == 1 else alpha * z
  z = z + beta * x["c"] if "c" in x else z
  z = z + x["bias"] if "bias" in x else z
  return z if activation is None else activation(z)


def _gated(x, out):
  gate, up = (
    jnp.matmul(x["x"], x[name], out_sharding=out) for name in ("gate", "up")
  )
  return jax.nn.silu(gate) * up


def _dot_general(x, out, **options):
  return lax.dot_general(x["lhs"], x["rhs"], out_sharding=out, **options)


def _ragged(x, *, activation=None, transpose_rhs=False):
  rhs = x["rhs"].mT if transpose_rhs else x["rhs"]
  return ragged.plain(
    x["lhs"], rhs, _sizes(), x.get("bias"), activation=activation
  )


def _gated_ragged(x):
  gate, up = (ragged.plain(x["x"], x[n], _sizes()) for n in ("gate", "up"))
  return jax.nn.silu(gate) * up


def _ragged_general(x, *, ragged_dot_dimension_numbers):
  if ragged_dot_dimension_numbers is ROWS:
    return ragged.plain(x["lhs"], x["rhs"], _sizes())
  rows = ragged.membership(len(x["lhs"]), _sizes()).astype(x["lhs"].dtype)
  return jnp.einsum("mg,mk,mn->gkn", rows, x["lhs"], x["rhs"])


_PLAIN = {
  "matmul": _matmul,
  "gated_matmul": _gated,
  "dot_general": _dot_general,
  "ragged_dot": _ragged,
  "gated_ragged_dot": _gated_ragged,
  "ragged_dot_general": _ragged_general,
}
