"""Checks of `meshes`: what is left to XLA under a mesh, and what is refused."""

from collections.abc import Callable
import functools
import re

import jax
from jax import lax
from jax.experimental import checkify
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pallas_gemm
from tests.support import mesh_calls, mesh_checks, mesh_extras
from tests.support.mesh_calls import AUTO, EXPLICIT, MIXED, PARTIAL, Mode
from tests.support.mesh_checks import Arm
from tests.support.mesh_extras import BY_KEY, forget_warnings, raised, register
from tests.support.mesh_ops import ROWS, SIZES, SUMS
from tests.support.products import normal

_ADVICE = re.compile(r"jax\.shard_map|Explicit|Manual|name all axes")


def checks(arm: str) -> list[tuple[str, Callable[[Arm], None]]]:
  """All that an arm runs, by name: those of `mesh_extras`, and these."""
  return mesh_extras.checks(arm)


# What can't be had.


def _left_to_xla(key: str, mode: Mode, arm: Arm) -> None:
  """XLA's product and a warning; of "sm90" alone an error, both with advice."""
  case = BY_KEY[key]
  unit = mesh_calls.Unit(case, mode, "jit")
  call = mesh_calls.TRANSFORMATIONS["jit"](case)

  def run(names):
    # `dot_general` has no such argument: what it tries first is patched.
    op = case.ours(mode.asked(case), implementation=names)
    arm.calls.clear()
    op = mesh_checks.sharded_op(unit, op)
    return mesh_checks.run(mode, call, op).results

  forget_warnings()
  with mesh_checks.logged_warnings() as warnings:
    run(("sm90", "xla"))
  assert any(_ADVICE.search(text) for text in warnings), warnings
  if case.op == "dot_general":
    return
  try:
    run("sm90")
  except NotImplementedError as error:
    assert _ADVICE.search(str(error)), error
  else:
    raise AssertionError("a kernel under Auto axes")


for _mode in (PARTIAL, MIXED):
  for _key in (
    "matmul: M, N, bias, silu",
    "gated_matmul: M, N",
    "dot_general: M, N",
    "ragged_dot: N",
    "gated_ragged_dot: rows, N",
    "ragged_dot_general: sums over rows; M, N",
  ):
    if _mode is MIXED or _key in mesh_calls.LOCAL:
      register(
        f"{_key} | {_mode.name} | left to XLA",
        functools.partial(_left_to_xla, _key, _mode),
        ("kernel",),
      )


# NaNs.


def _nans_are_found(mode: Mode, arm: Arm) -> None:
  """By `jax.debug_nans` and by checkify, of each op; nothing without one."""
  for key in (
    "matmul: M, N, bias, silu",
    "gated_matmul: M, N",
    "dot_general: M, N",
    "ragged_dot: N",
    "gated_ragged_dot: rows, N",
    "ragged_dot_general: sums over rows; M, N",
  ):
    case = BY_KEY[key]
    f = case.ours(mode.asked(case), **arm.how)
    checked = checkify.checkify(jax.jit(f), checkify.float_checks)
    place = functools.partial(jax.tree.map, mode.place)
    right = place(case.arrays(), case.specs())
    # Each in the first row, of which there is a group.
    wrong = {name: v.at[0].set(jnp.nan) for name, v in case.arrays().items()}
    wrong = place(wrong, case.specs())
    with mode.context():
      for call in (f, jax.jit(f)):
        with jax.debug_nans(True):
          jax.block_until_ready(call(right))
          error = raised(call, (wrong,), {})
        assert isinstance(error, FloatingPointError), (key, error)
      assert checked(right)[0].get() is None, key
      assert "nan generated" in checked(wrong)[0].get(), key


for _mode in (EXPLICIT, AUTO):
  register(
    f"every op: NaNs | {_mode.name}",
    functools.partial(_nans_are_found, _mode),
    ("default",),
  )


# Errors.


def _place(shape, *parts):
  return EXPLICIT.place(normal(*shape), P(*parts))


def _matmul(a, b, *, out_sharding=None, **rest):
  """`matmul` in jnp."""
  out = jnp.matmul(a, b, out_sharding=out_sharding)
  for term in rest.values():
    out = out + term
  return out


def _gated(x, gate, up):
  return jax.nn.silu(x @ gate) * (x @ up)


def _dense_calls():
  """Calls that JAX's own product refuses, in words: arguments, keywords."""
  a, b = (16, 32), (32, 24)
  inner = _place(a, None, "x"), _place(b, "x", None)
  return {
    "K of both": (inner, {}),
    "M and N over one axis": ((_place(a, "x"), _place(b, None, "x")), {}),
    "K over two axes": ((_place(a, None, "x"), _place(b, "y")), {}),
    "out_sharding too long": (inner, {"out_sharding": P(None, None, "y")}),
    "out_sharding of no axis": (inner, {"out_sharding": P("z", None)}),
    "out_sharding with an axis twice": (inner, {"out_sharding": P("y", "y")}),
    "out_sharding a string": (inner, {"out_sharding": "x"}),
  }


def _matmul_calls():
  args = _place((16, 32), "x", None), _place((32, 24), None, "y")
  return _dense_calls() | {
    "bias": (args, {"bias": _place((24,), "x")}),
    "C": (args, {"c": _place((16, 24), None, "x")}),
  }


def _gated_calls():
  x, gate, up = (16, 32), (32, 24), (32, 24)
  inner = [_place(w, "x", None) for w in (gate, up)]
  other = _place(gate, None, "y"), _place(up, None, "x")
  return {
    "K of all": ((_place(x, None, "x"), *inner), {}),
    "N of gate and up": ((_place(x, None, None), *other), {}),
  }


_TWO = (((1,), (0,)), ((), ()))
_REFUSED = {
  "matmul": (pallas_gemm.matmul, _matmul, _matmul_calls),
  "gated_matmul": (pallas_gemm.gated_matmul, _gated, _gated_calls),
  "dot_general": (
    functools.partial(pallas_gemm.dot_general, dimension_numbers=_TWO),
    functools.partial(lax.dot_general, dimension_numbers=_TWO),
    _dense_calls,
  ),
}


def _refused_alike(op: str, arm: Arm) -> None:
  """The class of JAX's own error."""
  ours, own, calls = _REFUSED[op]
  wrong = []
  with EXPLICIT.context():
    for what, (args, keywords) in calls().items():
      want = raised(own, args, keywords)
      assert want is not None, f"JAX's own product takes {what}"
      got = raised(own if arm.reference else ours, args, keywords)
      if type(got) is not type(want):
        wrong.append(f"{what}: {got!r:.80}, want {type(want).__name__}")
  assert not wrong, "; ".join(wrong)


for _op in _REFUSED:
  register(
    f"{_op}: errors | explicit",
    functools.partial(_refused_alike, _op),
    ("default", "reference"),
  )


def _grouped_calls():
  """Calls that have no type, as their dense product has none."""
  sizes, whole = jnp.asarray(SIZES), (8, 16, 24)
  rows = {"ragged_dot_dimension_numbers": ROWS}
  sums = {"ragged_dot_dimension_numbers": SUMS}
  inner = _place((32, 16), None, "x"), _place(whole, None, "x", None)
  crossed = _place((32, 16), "x", None), _place(whole, None, None, "x")
  summed = _place((32, 16), "x", None), _place((32, 24), "x", None)
  calls = {}
  for what, (x, w) in (("K of both", inner), ("rows and N", crossed)):
    for op, args, more in (
      (pallas_gemm.ragged_dot, (x, w, sizes), {}),
      (pallas_gemm.gated_ragged_dot, (x, w, w, sizes), {}),
      (pallas_gemm.ragged_dot_general, (x, w, sizes), rows),
    ):
      calls[f"{op.__name__}, {what}"] = op, args, more
  op = pallas_gemm.ragged_dot_general
  calls["sums over rows of both"] = op, (*summed, sizes), sums
  return calls


def _refused_as_ambiguous(arm: Arm) -> None:
  """With the error of the dense product of one group."""
  del arm
  wrong = []
  with EXPLICIT.context():
    inner = _place((16, 32), None, "x"), _place((32, 24), "x", None)
    want = type(raised(jnp.matmul, inner, {}))
    for what, (op, args, keywords) in _grouped_calls().items():
      got = raised(op, args, keywords)
      if type(got) is not want:
        wrong.append(f"{what}: {got!r:.80}, want {want.__name__}")
  assert not wrong, "; ".join(wrong)


register("ragged: errors | explicit", _refused_as_ambiguous, ("default",))


def _unreduced(key: str, arm: Arm) -> None:
  """Results that are still to be added up are left to `jax.lax`."""
  case = BY_KEY[key]
  asked = P(*case.out, unreduced={"x"})
  placed = jax.tree.map(EXPLICIT.place, case.arrays(), case.specs())
  with EXPLICIT.context():
    error = raised(case.ours(asked, **arm.how), (placed,), {})
  assert isinstance(error, NotImplementedError), repr(error)


for _key in ("matmul: K", "gated_matmul: K", "ragged_dot: K"):
  register(
    f"{_key}, unreduced | explicit",
    functools.partial(_unreduced, _key),
    ("default", "kernel"),
  )


def _asked_of_auto_axes(arm: Arm) -> None:
  """`out_sharding` is of Explicit axes; JAX's own error under others."""
  case = BY_KEY["matmul: M, N"]
  placed = jax.tree.map(AUTO.place, case.arrays(), case.specs())
  ours = case.plain if arm.reference else case.ours
  with AUTO.context():
    want = raised(case.plain(case.out), (placed,), {})
    got = raised(ours(case.out), (placed,), {})
  assert want is not None, "JAX's own product takes it"
  assert type(got) is type(want), f"{got!r}, want {want!r}"


register(
  "matmul: out_sharding | auto", _asked_of_auto_axes, ("default", "reference")
)


# What is at an edge: of a mesh no other than of one device.

_ONES = (1,) * 44


# Our function, the same in jnp, shapes of what is sharded, and how it is.
_EDGES = {
  "bias and C broadcast": (
    lambda a, b, bias, c: pallas_gemm.matmul(
      a, b, bias=bias, c=c, activation=jnp.tanh
    ),
    lambda a, b, bias, c: jnp.tanh(jnp.matmul(a, b) + c + bias),
    ((2, 8, 16), (16, 24), (1, 24), (2, 1, 1)),
    (P(None, "x"), P(None, "y"), P(None, "y"), P()),
  ),
  "K sharded, C a row": (
    lambda a, b, bias, c: pallas_gemm.matmul(a, b, bias=bias, c=c),
    lambda a, b, bias, c: jnp.matmul(a, b) + c + bias,
    ((8, 16), (16, 24), (), (24,)),
    (P(None, "x"), P("x", None), P(), P()),
  ),
  "many dimensions": (
    lambda a, b: pallas_gemm.dot_general(a, b, (((1,), (0,)), ((), ()))),
    lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ()))),
    ((8, 16, *_ONES[:24]), (16, *_ONES[:24], 24)),
    (P("x"), P(*[None] * 25, "y")),
  ),
}


def _edge(name: str, mode: Mode, arm: Arm) -> None:
  """Values, gradients and shardings, as of the same in jnp."""
  ours, plain, shapes, specs = _EDGES[name]
  if arm.kernel and name == "many dimensions":
    return  # of float32, which no kernel takes
  args = tuple(normal(*shape) for shape in shapes)

  def step(f):
    def both(*args):
      out, vjp = jax.vjp(f, *args)
      return out, vjp(out)

    return both

  call = mesh_calls.Call(lambda f: f, args, specs, None)
  want = mesh_checks.run(mode, call, step(plain)).results
  if not arm.reference:
    got = mesh_checks.run(mode, call, step(ours)).results
    mesh_checks.same_values(got, want)
    if mode.explicit:
      mesh_checks.same_shardings(got, want)


for _name in _EDGES:
  for _mode in (EXPLICIT, AUTO):
    if _mode is AUTO or "K sharded" not in _name:  # else JAX asks how
      register(
        f"{_name} | {_mode.name}", functools.partial(_edge, _name, _mode)
      )
