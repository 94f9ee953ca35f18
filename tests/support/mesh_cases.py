"""Products whose operands are sharded in every way that matters, as data.

The mesh is 4 x 2, its axes x and y. What is written by hand: how the result is
sharded, and in how many pieces the operands come to the kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.support.mesh_ops import ROWS, SUMS, Case


def _spec(parts: str) -> P:
  """ "x . xy" is P("x", None, ("x", "y"))."""
  axes = {".": None, "xy": ("x", "y")}
  return P(*[axes.get(part, part) for part in parts.split()])


_SILU = {"activation": jax.nn.silu}
_TANH = {"activation": jnp.tanh}
# M, N, K = 16, 24, 32; batch and sequence 4 and 8.
_A = {2: (16, 32), 3: (4, 8, 32)}
_B = {2: (32, 24), 3: (4, 32, 24)}
_BIAS = {1: (24,), 2: (16, 1)}


def _of_rank(shapes, parts: str) -> tuple[tuple[int, ...], P]:
  spec = _spec(parts)
  return shapes[len(spec)], spec


def _matmul_case(name, a, b, out, pieces, *, bias=None, c=None, **rest):
  args = {"a": _of_rank(_A, a), "b": _of_rank(_B, b)}
  if bias is not None:
    args["bias"] = _of_rank(_BIAS, bias)
  if c is not None:
    args["c"] = (16, 24), _spec(c)
  return Case(
    op="matmul", name=name, args=args, out=_spec(out), pieces=pieces, **rest
  )


def _matmuls():
  case = _matmul_case
  fsdp = "FSDP: M, and K of B over the same axis"
  scaled = {"alpha": 0.5, "beta": -2.0}
  asked = {"ask": True, "auto": False}
  return [
    case("whole", ". .", ". .", ". .", (1, 1)),
    case("M", "x .", ". .", "x .", (4, 1)),
    case("N", ". .", ". x", ". x", (1, 4)),
    case("M, N", "x .", ". y", "x y", (4, 2)),
    case("M over both axes", "xy .", ". .", "xy .", (8, 1)),
    case(fsdp, "x .", "x .", "x .", (4, 1), also={"b": (4,), "out": (1,)}),
    case(
      f"{fsdp}; N", "x .", "x y", "x y", (4, 2), also={"b": (8,), "out": (2,)}
    ),
    case("K of A", ". x", ". .", ". .", (1, 1), also={"b": (4,)}),
    case("K of B", ". .", "x .", ". .", (1, 1), also={"a": (4,)}),
    case("K", ". x", "x .", ". .", (4, 4), ask=True),
    case(
      "K, M of the result over its axis",
      *(". x", "x .", "x .", (4, 4)),
      also={"a": (1,), "b": (1,), "out": (1,)},
      **asked,
    ),
    case(
      "M, K, N of the result over K's axis",
      *("x y", "y .", "x y", (8, 2)),
      also={"a": (4,), "b": (1,), "out": (4,)},
      **asked,
    ),
    case("M, K", "x y", "y .", "x .", (8, 2), ask=True),
    case(
      "K, alpha, C, bias, silu",
      *(". x", "x .", ". .", (4, 4)),
      bias=".",
      c=". .",
      options=_SILU | scaled,
      ask=True,
    ),
    case(
      "M, K, N of C and bias, silu",
      *("x y", "y .", "x .", (8, 2)),
      bias=".",
      c="x .",
      options=_SILU,
      ask=True,
    ),
    case(
      "M, N, bias, silu",
      *("x .", ". y", "x y", (4, 2)),
      bias="y",
      options=_SILU,
    ),
    case(
      "M; N of the bias alone",
      *("x .", ". .", "x y", (4, 2)),
      bias="y",
      auto=False,
      also={"b": (1,), "out": (4,)},
    ),
    case(
      "M, N, alpha, C, bias along M",
      *("x .", ". y", "x y", (4, 2)),
      bias="x .",
      c="x y",
      options={"alpha": 0.5, "beta": 3.0},
    ),
    Case(
      op="matmul",
      name="M, N, both stored transposed",
      args={"a": ((32, 16), _spec(". x")), "b": ((24, 32), _spec("y ."))},
      out=_spec("x y"),
      pieces=(4, 2),
      options={"transpose_a": True, "transpose_b": True},
    ),
    case("batch of A, N", "x . .", ". y", "x . y", (4, 2)),
    case(
      "S of [B, S, K]",
      *(". x .", ". y", ". x y", (4, 2)),
      bias="y",
      options=_SILU,
    ),
    case("B and S of [B, S, K]", "x y .", ". .", "x y .", (8, 1)),
    case("batch of both, N", "x . .", "x . y", "x . y", (4, 8)),
    case("batch of both, K", "x . y", "x y .", "x . .", (8, 8), ask=True),
    Case(
      op="matmul",
      name="batch and M of A, batch of B broadcast",
      args={"a": (_A[3], _spec("x y .")), "b": ((1, 32, 24), _spec(". . ."))},
      out=_spec("x y ."),
      pieces=(8, 1),
      auto=False,
    ),
  ]


def _gated_matmuls():
  def case(name, x, w, out, pieces, **rest):
    weights = dict.fromkeys(("gate", "up"), _of_rank(_B, w))
    return Case(
      op="gated_matmul",
      name=name,
      args={"x": _of_rank(_A, x)} | weights,
      out=_spec(out),
      pieces=pieces,
      **rest,
    )

  fsdp = "FSDP: M, and K of B over the same axis; N"
  also = {"gate": (8,), "out": (2,)}
  return [
    case("M, N", "x .", ". y", "x y", (4, 2)),
    case("K", ". x", "x .", ". .", (4, 4), ask=True),
    case(fsdp, "x .", "x y", "x y", (4, 2), also=also),
    case("B and S of [B, S, K]", "x y .", ". .", "x y .", (8, 1)),
  ]


def _dot_generals():
  def case(name, lhs, rhs, numbers, out, pieces, **rest):
    lhs, rhs = ((shape, _spec(parts)) for shape, parts in (lhs, rhs))
    return Case(
      op="dot_general",
      name=name,
      args={"lhs": lhs, "rhs": rhs},
      options={"dimension_numbers": numbers},
      out=_spec(out),
      pieces=pieces,
      **rest,
    )

  a, b, two = (16, 32), (32, 24), (((1,), (0,)), ((), ()))
  return [
    case("M, N", (a, "x ."), (b, ". y"), two, "x y", (4, 2)),
    case("K", (a, ". x"), (b, "x ."), two, ". .", (4, 4), ask=True),
    case(
      "two free dimensions, both sharded; rhs stored transposed",
      *(((4, 8, 32), "x y ."), ((24, 32), ". .")),
      *((((2,), (1,)), ((), ())), "x y .", (8, 1)),
    ),
    case(
      "two contracted dimensions, the inner one sharded",
      *(((16, 4, 8), "y . x"), ((4, 8, 24), ". x .")),
      *((((1, 2), (0, 1)), ((), ())), "y .", (8, 4)),
      ask=True,
    ),
    case(
      "a batch dimension in the middle, N",
      *(((16, 4, 32), ". x ."), ((4, 32, 24), "x . y")),
      *((((2,), (1,)), ((1,), (0,))), "x . y", (4, 8)),
    ),
  ]


# Grouped: M, K, N, G = 32, 16, 24, 8. Types of JAX's own there are none, so
# collectives are given by hand, too: of the op, and with its derivatives.


def _all_reduced(forward: int, both: int) -> dict[str, dict[str, int]]:
  """Limits of a case: how many arrays are added up over devices."""
  counts = {"sums": forward, "sums_vjp": both}
  return {k: {"all-reduce": n} if n else {} for k, n in counts.items()}


def _grouped_case(op, name, lhs, rhs, out, pieces, limits, **rest):
  transposed = rest.get("options", {}).get("transpose_rhs", False)
  weights = (8, 24, 16) if transposed else (8, 16, 24), _spec(rhs)
  names = ("gate", "up") if op == "gated_ragged_dot" else ("rhs",)
  first = "x" if op == "gated_ragged_dot" else "lhs"
  args = {first: ((32, 16), _spec(lhs))} | dict.fromkeys(names, weights)
  if "bias" in rest:
    args["bias"] = (8, 24), _spec(rest.pop("bias"))
  if op == "ragged_dot_general":
    rest["options"] = {"ragged_dot_dimension_numbers": ROWS}
  return Case(
    op=op,
    name=name,
    args=args,
    out=_spec(out),
    pieces=pieces,
    **limits,
    **rest,
  )


def _ragged_dots():
  case = functools.partial(_grouped_case, "ragged_dot")
  of = _all_reduced
  return [
    case("rows", "x .", ". . .", "x .", (4, 1), of(0, 1)),
    case("N", ". .", ". . y", ". y", (1, 2), of(0, 1)),
    case("rows, N", "x .", ". . y", "x y", (4, 2), of(0, 2)),
    case("K", ". x", ". x .", ". .", (4, 4), of(1, 1), ask=True),
    case("groups", ". .", "x . .", ". .", (1, 4), of(1, 2)),
    case("rows, groups", "y .", "x . .", "y .", (2, 4), of(1, 3)),
    case(
      "rows, groups over the same axis",
      *("x .", "x . .", "x .", (1, 4)),
      {
        "sums": {"all-gather": 1, "reduce-scatter": 1},
        # Under Auto axes nothing tells the gradient of rhs that it is sharded.
        "sums_vjp": {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 1},
      },
      also={"lhs": (1,), "out": (1,)},
    ),
    case(
      "rows, N, bias, tanh",
      *("x .", ". . y", "x y", (4, 2), of(0, 3)),
      bias=". y",
      options=_TANH,
    ),
    case(
      "groups, bias, tanh",
      *(". .", "x . .", ". .", (1, 4)),
      # Every row is biased after the sum, by whatever group it is in.
      {k: n | {"all-gather": 1} for k, n in of(1, 2).items()},
      bias="x .",
      options=_TANH,
    ),
    case(
      "K, bias, tanh",
      *(". x", ". x .", ". .", (4, 4), of(1, 1)),
      bias=". .",
      options=_TANH,
      ask=True,
    ),
    case(
      "rows, N, rhs stored transposed",
      *("x .", ". y .", "x y", (4, 2), of(0, 2)),
      options={"transpose_rhs": True},
    ),
  ]


def _other_grouped():
  of = _all_reduced
  case = functools.partial(_grouped_case, "gated_ragged_dot")
  general = functools.partial(_grouped_case, "ragged_dot_general")
  return [
    case("N", ". .", ". . y", ". y", (1, 2), of(0, 2)),
    case("rows, N", "x .", ". . y", "x y", (4, 2), of(0, 4)),
    case("K", ". x", ". x .", ". .", (4, 4), of(2, 2), ask=True),
    case("groups", ". .", "x . .", ". .", (1, 4), of(2, 4)),
    general("rows, N", "x .", ". . y", "x y", (4, 2), of(0, 2)),
    general("groups", ". .", "x . .", ". .", (1, 4), of(1, 2)),
  ]


def _grouped_sums():
  """Sums: lhs.T @ rhs of the rows of each group; [G, M, N]."""

  def case(name, lhs, rhs, out, pieces, limits, **rest):
    return Case(
      op="ragged_dot_general",
      name=f"sums over rows; {name}",
      args={"lhs": ((32, 16), _spec(lhs)), "rhs": ((32, 24), _spec(rhs))},
      options={"ragged_dot_dimension_numbers": SUMS},
      out=_spec(out),
      pieces=pieces,
      **limits,
      **rest,
    )

  of, asked = _all_reduced, {"ask": True, "auto": False}
  return [
    case("rows", "x .", "x .", ". . .", (4, 4), of(1, 1), ask=True),
    case("M, N", ". x", ". y", ". x y", (4, 2), of(0, 2)),
    case(
      "groups of the result", ". .", ". .", "x . .", (1, 1), of(0, 2), **asked
    ),
  ]


CASES = [
  *_matmuls(),
  *_gated_matmuls(),
  *_dot_generals(),
  *_ragged_dots(),
  *_other_grouped(),
  *_grouped_sums(),
]
