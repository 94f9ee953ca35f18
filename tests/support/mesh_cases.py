"""Products whose operands are sharded in every way that matters, as data.

The mesh is 4 x 2, its axes x and y. What is written by hand: how operands and
the result are sharded, and in how many pieces the operands come to the kernel.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import re
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_gemm
from tests.support import ragged
from tests.support.ops import NUMBERS, ROWS, SUMS
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
  if ragged_dot_dimension_numbers is ROWS:
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


# Operands, "->" the result, whose sizes are left out, "in" as many pieces as A
# and B are given to the kernel in; each dimension with the axes that it is
# sharded over. Of grouped products, which have no type of JAX's own, "adding"
# as many arrays over devices, forward, and forward and backward.
_ROW = re.compile(r"(.+) -> (.+) in (\d) (\d)(?: adding (\d) (\d))?")

# What most rows lack.
_ASK, _EXPLICIT = {"ask": True}, {"ask": True, "auto": False}
_ONE = {"a": (1,), "b": (1,), "out": (1,)}
_SILU = {"options": {"activation": jax.nn.silu}}
_TANH = {"options": {"activation": jnp.tanh}}
_SCALED = {"alpha": 0.5, "beta": -2.0}
_TRANSPOSED = {"options": {"transpose_a": True, "transpose_b": True}}


def _numbers(contract: Any, batch: Any = ((), ())) -> dict[str, Any]:
  return {"options": {"dimension_numbers": (contract, batch)}}


FSDP = "FSDP: M, and K of B over the same axis"
# M, N, K = 16, 24, 32; batch and sequence 4 and 8.
_MATMULS = {
  "whole": "16 32 @ 32 24 -> . . in 1 1",
  "M": "16x 32 @ 32 24 -> x . in 4 1",
  "N": "16 32 @ 32 24x -> . x in 1 4",
  "M, N": "16x 32 @ 32 24y -> x y in 4 2",
  "M over both axes": "16xy 32 @ 32 24 -> xy . in 8 1",
  FSDP: ("16x 32 @ 32x 24 -> x . in 4 1", {"also": {"b": (4,), "out": (1,)}}),
  f"{FSDP}; N": (
    "16x 32 @ 32x 24y -> x y in 4 2",
    {"also": {"b": (8,), "out": (2,)}},
  ),
  "K of A": ("16 32x @ 32 24 -> . . in 1 1", {"also": {"b": (4,)}}),
  "K of B": ("16 32 @ 32x 24 -> . . in 1 1", {"also": {"a": (4,)}}),
  "K": ("16 32x @ 32x 24 -> . . in 4 4", _ASK),
  "K, M of the result over its axis": (
    "16 32x @ 32x 24 -> x . in 4 4",
    _EXPLICIT | {"also": _ONE},
  ),
  "M, K, N of the result over K's axis": (
    "16x 32y @ 32y 24 -> x y in 8 2",
    _EXPLICIT | {"also": {"a": (4,), "b": (1,), "out": (4,)}},
  ),
  "M, K": ("16x 32y @ 32y 24 -> x . in 8 2", _ASK),
  "K, alpha, C, bias, silu": (
    "16 32x @ 32x 24 @ 24 @ 16 24 -> . . in 4 4",
    _ASK | {"options": _SILU["options"] | _SCALED},
  ),
  "M, K, N of C and bias, silu": (
    "16x 32y @ 32y 24 @ 24 @ 16x 24 -> x . in 8 2",
    _ASK | _SILU,
  ),
  "M, N, bias, silu": ("16x 32 @ 32 24y @ 24y -> x y in 4 2", _SILU),
  "M; N of the bias alone": (
    "16x 32 @ 32 24 @ 24y -> x y in 4 2",
    {"auto": False, "also": {"b": (1,), "out": (4,)}},
  ),
  "M, N, alpha, C, bias along M": (
    "16x 32 @ 32 24y @ 16x 1 @ 16x 24y -> x y in 4 2",
    {"options": _SCALED},
  ),
  "M, N, both stored transposed": (
    "32 16x @ 24y 32 -> x y in 4 2",
    _TRANSPOSED,
  ),
  "batch of A, N": "4x 8 32 @ 32 24y -> x . y in 4 2",
  "S of [B, S, K]": ("4 8x 32 @ 32 24y @ 24y -> . x y in 4 2", _SILU),
  "B and S of [B, S, K]": "4x 8y 32 @ 32 24 -> x y . in 8 1",
  "batch of both, N": "4x 8 32 @ 4x 32 24y -> x . y in 4 8",
  "batch of both, K": ("4x 8 32y @ 4x 32y 24 -> x . . in 8 8", _ASK),
  "batch and M of A, batch of B broadcast": (
    "4x 8y 32 @ 1 32 24 -> x y . in 8 1",
    {"auto": False},
  ),
}
_GATED_MATMULS = {
  "M, N": "16x 32 @ 32 24y -> x y in 4 2",
  "K": ("16 32x @ 32x 24 -> . . in 4 4", _ASK),
  f"{FSDP}; N": (
    "16x 32 @ 32x 24y -> x y in 4 2",
    {"also": {"w_gate": (8,), "out": (2,)}},
  ),
  "B and S of [B, S, K]": "4x 8y 32 @ 32 24 -> x y . in 8 1",
}
_DOT_GENERALS = {
  "M, N": ("16x 32 @ 32 24y -> x y in 4 2", _numbers(*NUMBERS)),
  "K": ("16 32x @ 32x 24 -> . . in 4 4", _ASK | _numbers(*NUMBERS)),
  "two free dimensions, both sharded; rhs stored transposed": (
    "4x 8y 32 @ 24 32 -> x y . in 8 1",
    _numbers(((2,), (1,))),
  ),
  "two contracted dimensions, the inner one sharded": (
    "16y 4 8x @ 4 8x 24 -> y . in 8 4",
    _ASK | _numbers(((1, 2), (0, 1))),
  ),
  "a batch dimension in the middle, N": (
    "16 4x 32 @ 4x 32 24y -> x . y in 4 8",
    _numbers(((2,), (1,)), ((1,), (0,))),
  ),
}
# M, K, N, G = 32, 16, 24, 8.
_RAGGED_DOTS = {
  "rows": "32x 16 @ 8 16 24 -> x . in 4 1 adding 0 1",
  "N": "32 16 @ 8 16 24y -> . y in 1 2 adding 0 1",
  "rows, N": "32x 16 @ 8 16 24y -> x y in 4 2 adding 0 2",
  "K": ("32 16x @ 8 16x 24 -> . . in 4 4 adding 1 1", _ASK),
  "groups": "32 16 @ 8x 16 24 -> . . in 1 4 adding 1 2",
  "rows, groups": "32y 16 @ 8x 16 24 -> y . in 2 4 adding 1 3",
  "rows, groups over the same axis": (
    "32x 16 @ 8x 16 24 -> x . in 1 4",
    {
      "sums": {"all-gather": 1, "reduce-scatter": 1},
      # Under Auto axes nothing tells the gradient of rhs that it is sharded.
      "sums_vjp": {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 1},
      "also": {"lhs": (1,), "out": (1,)},
    },
  ),
  "rows, N, bias, tanh": (
    "32x 16 @ 8 16 24y @ 8 24y -> x y in 4 2 adding 0 3",
    _TANH,
  ),
  "groups, bias, tanh": (
    "32 16 @ 8x 16 24 @ 8x 24 -> . . in 1 4",
    # Every row is biased after the sum, by whatever group it is in.
    {
      "sums": {"all-reduce": 1, "all-gather": 1},
      "sums_vjp": {"all-reduce": 2, "all-gather": 1},
    }
    | _TANH,
  ),
  "K, bias, tanh": (
    "32 16x @ 8 16x 24 @ 8 24 -> . . in 4 4 adding 1 1",
    _ASK | _TANH,
  ),
  "rows, N, rhs stored transposed": (
    "32x 16 @ 8 24y 16 -> x y in 4 2 adding 0 2",
    {"options": {"transpose_rhs": True}},
  ),
}
_GATED_RAGGED_DOTS = {
  "N": "32 16 @ 8 16 24y -> . y in 1 2 adding 0 2",
  "rows, N": "32x 16 @ 8 16 24y -> x y in 4 2 adding 0 4",
  "K": ("32 16x @ 8 16x 24 -> . . in 4 4 adding 2 2", _ASK),
  "groups": "32 16 @ 8x 16 24 -> . . in 1 4 adding 2 4",
}
# Sums are lhs.T @ rhs of the rows of each group, [G, M, N] = [8, 16, 24].
_RAGGED_DOT_GENERALS = {
  "rows, N": "32x 16 @ 8 16 24y -> x y in 4 2 adding 0 2",
  "groups": "32 16 @ 8x 16 24 -> . . in 1 4 adding 1 2",
  "sums over rows; rows": ("32x 16 @ 32x 24 -> . . . in 4 4 adding 1 1", _ASK),
  "sums over rows; M, N": "32 16x @ 32 24y -> . x y in 4 2 adding 0 2",
  "sums over rows; groups of the result": (
    "32 16 @ 32 24 -> x . . in 1 1 adding 0 2",
    _EXPLICIT,
  ),
}
# The operands of each op and its rows; weights of gated ones are alike.
_OPS = {
  "matmul": ("a b bias c", _MATMULS),
  "gated_matmul": ("x w_gate w_up", _GATED_MATMULS),
  "dot_general": ("lhs rhs", _DOT_GENERALS),
  "ragged_dot": ("lhs rhs bias", _RAGGED_DOTS),
  "gated_ragged_dot": ("x w_gate w_up", _GATED_RAGGED_DOTS),
  "ragged_dot_general": ("lhs rhs", _RAGGED_DOT_GENERALS),
}


def _array(text: str) -> tuple[tuple[int, ...], P]:
  """ "16x 32 8xy" is [16, 32, 8], sharded as P("x", None, ("x", "y"))."""
  found = [re.fullmatch(r"(\d*)(.*)", word).groups() for word in text.split()]
  axes = {"": None, ".": None, "xy": ("x", "y")}
  spec = P(*[axes.get(part, part) for _, part in found])
  return tuple(int(size or 0) for size, _ in found), spec


def _cases() -> Iterator[Case]:
  for op, (names, rows) in _OPS.items():
    for name, row in rows.items():
      text, rest = (row, {}) if isinstance(row, str) else row
      operands, out, *numbers = _ROW.fullmatch(text).groups()
      arrays = [_array(x) for x in operands.split(" @ ")]
      arrays += arrays[1:] * ("gated" in op)
      a, b, *sums = (int(x) for x in numbers if x is not None)
      limits = ({"all-reduce": n} if n else {} for n in sums)
      rest = dict(zip(("sums", "sums_vjp"), limits)) | rest
      if op == "ragged_dot_general":
        kind = ROWS if len(arrays[1][0]) == 3 else SUMS
        rest["options"] = {"ragged_dot_dimension_numbers": kind}
      yield Case(
        op=op,
        name=name,
        args=dict(zip(names.split(), arrays)),
        out=_array(out)[1],
        pieces=(a, b),
        **rest,
      )


CASES = [*_cases()]
