"""Products whose operands are sharded in every way that matters, as data.

The mesh is 4 x 2, its axes x and y. What is written by hand: how the result is
sharded, and in how many pieces the operands come to the kernel.
"""

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


# The cases.

_NO = P(None, None)
_SILU = {"activation": jax.nn.silu}


def _matmuls():
  """M, N, K = 16, 24, 32; batch and sequence 4 and 8."""

  def case(name, a, b, out, pieces, *, shapes=((16, 32), (32, 24)), **rest):
    args = {"a": (shapes[0], a), "b": (shapes[1], b)}
    args |= rest.pop("more", {})
    return Case(
      op="matmul", name=name, args=args, out=out, pieces=pieces, **rest
    )

  rows = ((4, 8, 32), (32, 24))
  both = ((4, 8, 32), (4, 32, 24))
  return [
    case("whole", _NO, _NO, _NO, (1, 1)),
    case("M", P("x", None), _NO, P("x", None), (4, 1)),
    case("N", _NO, P(None, "x"), P(None, "x"), (1, 4)),
    case("M, N", P("x", None), P(None, "y"), P("x", "y"), (4, 2)),
    case(
      "M over both axes",
      P(("x", "y"), None),
      _NO,
      P(("x", "y"), None),
      (8, 1),
    ),
    case(
      "FSDP: M, and K of B over the same axis",
      P("x", None),
      P("x", None),
      P("x", None),
      (4, 1),
      also={"b": (4,), "out": (1,)},
    ),
    case(
      "FSDP: M, and K of B over the same axis; N",
      P("x", None),
      P("x", "y"),
      P("x", "y"),
      (4, 2),
      also={"b": (8,), "out": (2,)},
    ),
    case("K of A", P(None, "x"), _NO, _NO, (1, 1), also={"b": (4,)}),
    case("K of B", _NO, P("x", None), _NO, (1, 1), also={"a": (4,)}),
    case("K", P(None, "x"), P("x", None), _NO, (4, 4), ask=True),
    case(
      "K, M of the result over its axis",
      P(None, "x"),
      P("x", None),
      P("x", None),
      (4, 4),
      ask=True,
      auto=False,
      also={"a": (1,), "b": (1,), "out": (1,)},
    ),
    case(
      "M, K, N of the result over K's axis",
      P("x", "y"),
      P("y", None),
      P("x", "y"),
      (8, 2),
      ask=True,
      auto=False,
      also={"a": (4,), "b": (1,), "out": (4,)},
    ),
    case("M, K", P("x", "y"), P("y", None), P("x", None), (8, 2), ask=True),
    case(
      "K, alpha, C, bias, silu",
      P(None, "x"),
      P("x", None),
      _NO,
      (4, 4),
      ask=True,
      options=_SILU | {"alpha": 0.5, "beta": -2.0},
      more={"bias": ((24,), P(None)), "c": ((16, 24), _NO)},
    ),
    case(
      "M, K, N of C and bias, silu",
      P("x", "y"),
      P("y", None),
      P("x", None),
      (8, 2),
      ask=True,
      options=_SILU,
      more={
        "bias": ((24,), P(None)),
        "c": ((16, 24), P("x", None)),
      },
    ),
    case(
      "M, N, bias, silu",
      P("x", None),
      P(None, "y"),
      P("x", "y"),
      (4, 2),
      options=_SILU,
      more={"bias": ((24,), P("y"))},
    ),
    case(
      "M; N of the bias alone",
      P("x", None),
      _NO,
      P("x", "y"),
      (4, 2),
      more={"bias": ((24,), P("y"))},
      auto=False,
      also={"b": (1,), "out": (4,)},
    ),
    case(
      "M, N, alpha, C, bias along M",
      P("x", None),
      P(None, "y"),
      P("x", "y"),
      (4, 2),
      options={"alpha": 0.5, "beta": 3.0},
      more={"bias": ((16, 1), P("x", None)), "c": ((16, 24), P("x", "y"))},
    ),
    case(
      "M, N, both stored transposed",
      P(None, "x"),
      P("y", None),
      P("x", "y"),
      (4, 2),
      shapes=((32, 16), (24, 32)),
      options={"transpose_a": True, "transpose_b": True},
    ),
    case(
      "batch of A, N",
      P("x", None, None),
      P(None, "y"),
      P("x", None, "y"),
      (4, 2),
      shapes=rows,
    ),
    case(
      "S of [B, S, K]",
      P(None, "x", None),
      P(None, "y"),
      P(None, "x", "y"),
      (4, 2),
      shapes=rows,
      options=_SILU,
      more={"bias": ((24,), P("y"))},
    ),
    case(
      "B and S of [B, S, K]",
      P("x", "y", None),
      _NO,
      P("x", "y", None),
      (8, 1),
      shapes=rows,
    ),
    case(
      "batch of both, N",
      P("x", None, None),
      P("x", None, "y"),
      P("x", None, "y"),
      (4, 8),
      shapes=both,
    ),
    case(
      "batch of both, K",
      P("x", None, "y"),
      P("x", "y", None),
      P("x", None, None),
      (8, 8),
      ask=True,
      shapes=both,
    ),
    case(
      "batch and M of A, batch of B broadcast",
      P("x", "y", None),
      P(None, None, None),
      P("x", "y", None),
      (8, 1),
      shapes=((4, 8, 32), (1, 32, 24)),
      auto=False,
    ),
  ]


def _gated_matmuls():
  def case(name, x, w, out, pieces, shape=(16, 32), **rest):
    args = {"x": (shape, x), "gate": ((32, 24), w), "up": ((32, 24), w)}
    return Case(
      op="gated_matmul", name=name, args=args, out=out, pieces=pieces, **rest
    )

  return [
    case("M, N", P("x", None), P(None, "y"), P("x", "y"), (4, 2)),
    case("K", P(None, "x"), P("x", None), _NO, (4, 4), ask=True),
    case(
      "FSDP: M, and K of B over the same axis; N",
      P("x", None),
      P("x", "y"),
      P("x", "y"),
      (4, 2),
      also={"gate": (8,), "out": (2,)},
    ),
    case(
      "B and S of [B, S, K]",
      P("x", "y", None),
      _NO,
      P("x", "y", None),
      (8, 1),
      (4, 8, 32),
    ),
  ]


def _dot_generals():
  def case(name, lhs, rhs, numbers, out, pieces, **rest):
    return Case(
      op="dot_general",
      name=name,
      args={"lhs": lhs, "rhs": rhs},
      options={"dimension_numbers": numbers},
      out=out,
      pieces=pieces,
      **rest,
    )

  two = (((1,), (0,)), ((), ()))
  return [
    case(
      "M, N",
      ((16, 32), P("x", None)),
      ((32, 24), P(None, "y")),
      two,
      P("x", "y"),
      (4, 2),
    ),
    case(
      "K",
      ((16, 32), P(None, "x")),
      ((32, 24), P("x", None)),
      two,
      _NO,
      (4, 4),
      ask=True,
    ),
    case(
      "two free dimensions, both sharded; rhs stored transposed",
      ((4, 8, 32), P("x", "y", None)),
      ((24, 32), _NO),
      (((2,), (1,)), ((), ())),
      P("x", "y", None),
      (8, 1),
    ),
    case(
      "two contracted dimensions, the inner one sharded",
      ((16, 4, 8), P("y", None, "x")),
      ((4, 8, 24), P(None, "x", None)),
      (((1, 2), (0, 1)), ((), ())),
      P("y", None),
      (8, 4),
      ask=True,
    ),
    case(
      "a batch dimension in the middle, N",
      ((16, 4, 32), P(None, "x", None)),
      ((4, 32, 24), P("x", None, "y")),
      (((2,), (1,)), ((1,), (0,))),
      P("x", None, "y"),
      (4, 8),
    ),
  ]


# Grouped: M, K, N, G = 32, 16, 24, 8. Types of JAX's own there are none, so
# collectives are given by hand, too.
_ONE = {"all-reduce": 1}
_TWO = {"all-reduce": 2}
_THREE = {"all-reduce": 3}
_FOUR = {"all-reduce": 4}
_NONE: dict[str, int] = {}


def _grouped_args(op, lhs, rhs, bias=None, transposed=False):
  stored = (8, 24, 16) if transposed else (8, 16, 24)
  if op == "gated_ragged_dot":
    return {"x": ((32, 16), lhs), "gate": (stored, rhs), "up": (stored, rhs)}
  args = {"lhs": ((32, 16), lhs), "rhs": (stored, rhs)}
  return args if bias is None else args | {"bias": ((8, 24), bias)}


def _grouped():
  def case(name, lhs, rhs, out, pieces, sums, op="ragged_dot", **rest):
    args = _grouped_args(
      op, lhs, rhs, rest.pop("bias", None), rest.pop("transposed", False)
    )
    if op == "ragged_dot_general":
      rest["options"] = {"ragged_dot_dimension_numbers": ROWS}
    return Case(
      op=op,
      name=name,
      args=args,
      out=out,
      pieces=pieces,
      sums=sums[0],
      sums_vjp=sums[1],
      **rest,
    )

  whole = P(None, None, None)
  biased = {"options": {"activation": jnp.tanh}, "bias": P(None, None)}
  by_n = {"options": {"activation": jnp.tanh}, "bias": P(None, "y")}
  by_group = {"options": {"activation": jnp.tanh}, "bias": P("x", None)}
  gated = {"op": "gated_ragged_dot"}
  general = {"op": "ragged_dot_general"}
  n, g = P(None, None, "y"), P("x", None, None)
  k = P(None, "x", None)
  m = P("x", None)
  return [
    case("rows", m, whole, m, (4, 1), (_NONE, _ONE)),
    case("N", _NO, n, P(None, "y"), (1, 2), (_NONE, _ONE)),
    case("rows, N", m, n, P("x", "y"), (4, 2), (_NONE, _TWO)),
    case("K", P(None, "x"), k, _NO, (4, 4), (_ONE, _ONE), ask=True),
    case("groups", _NO, g, _NO, (1, 4), (_ONE, _TWO)),
    case(
      "rows, groups",
      P("y", None),
      g,
      P("y", None),
      (2, 4),
      (_ONE, _THREE),
    ),
    case(
      "rows, groups over the same axis",
      m,
      g,
      m,
      (1, 4),
      (
        {"all-gather": 1, "reduce-scatter": 1},
        # Under Auto axes nothing tells the gradient of rhs that it is sharded.
        {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 1},
      ),
      also={"lhs": (1,), "out": (1,)},
    ),
    case(
      "rows, N, bias, tanh", m, n, P("x", "y"), (4, 2), (_NONE, _THREE), **by_n
    ),
    case(
      "groups, bias, tanh",
      _NO,
      g,
      _NO,
      (1, 4),
      # Every row is biased after the sum, by whatever group it is in.
      (_ONE | {"all-gather": 1}, _TWO | {"all-gather": 1}),
      **by_group,
    ),
    case(
      "K, bias, tanh",
      P(None, "x"),
      k,
      _NO,
      (4, 4),
      (_ONE, _ONE),
      ask=True,
      **biased,
    ),
    case(
      "rows, N, rhs stored transposed",
      m,
      P(None, "y", None),
      P("x", "y"),
      (4, 2),
      (_NONE, _TWO),
      options={"transpose_rhs": True},
      transposed=True,
    ),
    case("N", _NO, n, P(None, "y"), (1, 2), (_NONE, _TWO), **gated),
    case("rows, N", m, n, P("x", "y"), (4, 2), (_NONE, _FOUR), **gated),
    case("K", P(None, "x"), k, _NO, (4, 4), (_TWO, _TWO), ask=True, **gated),
    case("groups", _NO, g, _NO, (1, 4), (_TWO, _FOUR), **gated),
    case("rows, N", m, n, P("x", "y"), (4, 2), (_NONE, _TWO), **general),
    case("groups", _NO, g, _NO, (1, 4), (_ONE, _TWO), **general),
  ]


def _grouped_sums():
  """Sums: lhs.T @ rhs of the rows of each group; [G, M, N]."""

  def case(name, lhs, rhs, out, pieces, sums, **rest):
    return Case(
      op="ragged_dot_general",
      name=f"sums over rows; {name}",
      args={"lhs": ((32, 16), lhs), "rhs": ((32, 24), rhs)},
      options={"ragged_dot_dimension_numbers": SUMS},
      out=out,
      pieces=pieces,
      sums=sums[0],
      sums_vjp=sums[1],
      **rest,
    )

  m = P("x", None)
  return [
    case("rows", m, m, P(None, None, None), (4, 4), (_ONE, _ONE), ask=True),
    case(
      "M, N",
      P(None, "x"),
      P(None, "y"),
      P(None, "x", "y"),
      (4, 2),
      (_NONE, _TWO),
    ),
    case(
      "groups of the result",
      _NO,
      _NO,
      P("x", None, None),
      (1, 1),
      (_NONE, _TWO),
      ask=True,
      auto=False,
    ),
  ]


CASES = [
  *_matmuls(),
  *_gated_matmuls(),
  *_dot_generals(),
  *_grouped(),
  *_grouped_sums(),
]
