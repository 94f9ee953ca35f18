"""Products whose operands are sharded in every way that matters, as data.

The mesh is 4 x 2, its axes x and y. What is written by hand: how operands and
the result are sharded, and in how many pieces the operands come to the kernel.
"""

from collections.abc import Iterator
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.support.mesh_ops import Case
from tests.support.ops import NUMBERS, ROWS, SUMS

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


_FSDP = "FSDP: M, and K of B over the same axis"
# M, N, K = 16, 24, 32; batch and sequence 4 and 8.
_MATMULS = {
  "whole": "16 32 @ 32 24 -> . . in 1 1",
  "M": "16x 32 @ 32 24 -> x . in 4 1",
  "N": "16 32 @ 32 24x -> . x in 1 4",
  "M, N": "16x 32 @ 32 24y -> x y in 4 2",
  "M over both axes": "16xy 32 @ 32 24 -> xy . in 8 1",
  _FSDP: ("16x 32 @ 32x 24 -> x . in 4 1", {"also": {"b": (4,), "out": (1,)}}),
  f"{_FSDP}; N": (
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
  f"{_FSDP}; N": (
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
