"""Checks of `meshes`: what is left to XLA under a mesh, and what is refused."""

import functools
import re

import jax
from jax import lax
from jax.experimental import checkify
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pallas_gemm
from tests.support import mesh_calls, mesh_checks
from tests.support.mesh_calls import AUTO, EXPLICIT, MIXED, PARTIAL
from tests.support.mesh_cases import SIZES
from tests.support.mesh_checks import BY_KEY, raised, register
from tests.support.ops import NUMBERS, ROWS, SUMS, plain, plain_gated
from tests.support.products import normal

_MODES = EXPLICIT, AUTO
_ADVICE = re.compile(r"jax\.shard_map|Explicit|Manual|name all axes")


@register(
  "{key} | {mode} | left to XLA",
  ("kernel",),
  key=[mesh_calls.EACH_OP[i] for i in (0, 2, 3)],
  mode=(PARTIAL, MIXED),
)
def _left_to_xla(arm, key, mode):
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

  with mesh_checks.logged_warnings() as warnings:
    run(("sm90", "xla"))
  assert any(_ADVICE.search(text) for text in warnings), warnings
  if case.op != "dot_general":
    error = raised(run, "sm90")
    assert isinstance(error, NotImplementedError), repr(error)
    assert _ADVICE.search(str(error)), error


@register(
  "{key} | {mode} | NaNs",
  ("default",),
  key=("matmul: M, N", "ragged_dot: groups"),
  mode=_MODES,
)
def _nans_are_found(arm, key, mode):
  """By `jax.debug_nans` and by checkify; nothing without one."""
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
        error = raised(call, wrong)
      assert isinstance(error, FloatingPointError), error
    assert checked(right)[0].get() is None
    assert "nan generated" in checked(wrong)[0].get()


# Errors.


def _place(shape, *parts):
  return EXPLICIT.place(normal(*shape), P(*parts))


def _matmul(a, b, *, out_sharding=None, **added):
  """`matmul` in jnp."""
  if out_sharding is None:
    return plain(a, b, **added)
  return jnp.matmul(a, b, out_sharding=out_sharding)


_NUMBERS = {"dimension_numbers": NUMBERS}
_OWN = {
  "matmul": (pallas_gemm.matmul, _matmul),
  "gated_matmul": (pallas_gemm.gated_matmul, plain_gated),
  "dot_general": tuple(
    functools.partial(of.dot_general, **_NUMBERS) for of in (pallas_gemm, lax)
  ),
}


def _refused(op):
  """Calls that JAX's own product refuses, in words: arguments, keywords."""
  a, b = (16, 32), (32, 24)
  inner = _place(a, None, "x"), _place(b, "x", None)
  if op == "gated_matmul":
    other = _place(b, None, "y"), _place(b, None, "x")
    yield "K of all", (*inner, inner[1]), {}
    yield "N of gate and up", (_place(a, None, None), *other), {}
    return
  yield "K of both", inner, {}
  yield "M and N over one axis", (_place(a, "x"), _place(b, None, "x")), {}
  yield "K over two axes", (_place(a, None, "x"), _place(b, "y")), {}
  for asked in (P(None, None, "y"), P("z", None), P("y", "y"), "x"):
    yield f"out_sharding {asked}", inner, {"out_sharding": asked}
  if op == "matmul":
    args = _place(a, "x", None), _place(b, None, "y")
    yield "bias", args, {"bias": _place((24,), "x")}
    yield "C", args, {"c": _place((16, 24), None, "x")}


@register("{op}: errors | explicit", ("default",), op=_OWN)
def _refused_alike(arm, op):
  """The class of JAX's own error."""
  del arm
  ours, own = _OWN[op]
  with EXPLICIT.context():
    for what, args, keywords in _refused(op):
      want = raised(own, *args, **keywords)
      assert want is not None, f"JAX's own product takes {what}"
      got = raised(ours, *args, **keywords)
      assert type(got) is type(want), f"{what}: {got!r:.80}, want {want!r:.80}"


def _ambiguous():
  """Grouped products that have no type, as their dense one has none."""
  sizes, whole = jnp.asarray(SIZES), (8, 16, 24)
  rows, sums = ({"ragged_dot_dimension_numbers": x} for x in (ROWS, SUMS))
  inner = _place((32, 16), None, "x"), _place(whole, None, "x", None)
  crossed = _place((32, 16), "x", None), _place(whole, None, None, "x")
  for x, w in (inner, crossed):
    yield pallas_gemm.ragged_dot, (x, w, sizes), {}
    yield pallas_gemm.gated_ragged_dot, (x, w, w, sizes), {}
    yield pallas_gemm.ragged_dot_general, (x, w, sizes), rows
  summed = _place((32, 16), "x", None), _place((32, 24), "x", None)
  yield pallas_gemm.ragged_dot_general, (*summed, sizes), sums


@register("ragged: errors | explicit", ("default",))
def _refused_as_ambiguous(arm):
  """With the error of the dense product of one group."""
  del arm
  with EXPLICIT.context():
    inner = _place((16, 32), None, "x"), _place((32, 24), "x", None)
    want = type(raised(jnp.matmul, *inner))
    for op, args, keywords in _ambiguous():
      got = raised(op, *args, **keywords)
      assert type(got) is want, f"{op.__name__}: {got!r:.80}, want {want}"


@register(
  "{key}, unreduced | explicit",
  ("default", "kernel"),
  key=("matmul: K", "gated_matmul: K", "ragged_dot: K"),
)
def _unreduced(arm, key):
  """Results that are still to be added up are left to `jax.lax`."""
  case = BY_KEY[key]
  asked = P(*case.out, unreduced={"x"})
  placed = jax.tree.map(EXPLICIT.place, case.arrays(), case.specs())
  with EXPLICIT.context():
    error = raised(case.ours(asked, **arm.how), placed)
  assert isinstance(error, NotImplementedError), repr(error)


@register("matmul: out_sharding | auto", ("default",))
def _asked_of_auto_axes(arm):
  """`out_sharding` is of Explicit axes; JAX's own error under others."""
  del arm
  case = BY_KEY["matmul: M, N"]
  placed = jax.tree.map(AUTO.place, case.arrays(), case.specs())
  with AUTO.context():
    want = raised(case.plain(case.out), placed)
    got = raised(case.ours(case.out), placed)
  assert want is not None, "JAX's own product takes it"
  assert type(got) is type(want), f"{got!r}, want {want!r}"


# What is at an edge: of a mesh no other than of one device.

_ONES = (1,) * 24
_ADDED = {"activation": jnp.tanh}
# Our function, the same in jnp, shapes of what is sharded, and how it is.
_EDGES = {
  "bias and C broadcast": (
    functools.partial(pallas_gemm.matmul, **_ADDED),
    functools.partial(plain, **_ADDED),
    ((2, 8, 16), (16, 24), (1, 24), (2, 1, 1)),
    (P(None, "x"), P(None, "y"), P(None, "y"), P()),
  ),
  "K sharded, C a row": (
    pallas_gemm.matmul,
    plain,
    ((8, 16), (16, 24), (), (24,)),
    (P(None, "x"), P("x", None), P(), P()),
  ),
  "many dimensions": (
    *_OWN["dot_general"],
    ((8, 16, *_ONES), (16, *_ONES, 24)),
    (P("x"), P(*[None] * 25, "y")),
  ),
}


# Of many dimensions no kernel takes float32; where C is a row, JAX asks how the
# result is sharded under Explicit axes.
@register("{name} | {mode}", ("kernel",), name=[*_EDGES][:2], mode=(AUTO,))
@register("{name} | {mode}", ("default",), name=[*_EDGES][::2], mode=_MODES)
def _edge(arm, name, mode):
  """Values, gradients and shardings, as of the same in jnp."""
  del arm
  ours, plain, shapes, specs = _EDGES[name]
  args = tuple(normal(*shape) for shape in shapes)

  def step(f):
    def both(*args):
      one = lambda a, b, *v: f(a, b, **dict(zip(("bias", "c"), v)))  # noqa: E731
      out, vjp = jax.vjp(one, *args)
      return out, vjp(out)

    return both

  call = mesh_calls.Call(lambda f: f, args, specs, None)
  want = mesh_checks.run(mode, call, step(plain)).results
  got = mesh_checks.run(mode, call, step(ours)).results
  mesh_checks.same_values(got, want)
  if mode.explicit:
    mesh_checks.same_shardings(got, want)
