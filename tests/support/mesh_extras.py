"""Checks of `meshes` that no single call of an op makes: layers, exports."""

from collections.abc import Callable
import functools
from typing import NamedTuple

from flax import linen
import jax
from jax import export, lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from tests.support import mesh_calls, mesh_checks, ragged, stand_in
from tests.support.mesh_calls import AUTO, EXPLICIT, Mode
from tests.support.mesh_cases import CASES
from tests.support.mesh_checks import Arm
from tests.support.mesh_ops import SIZES
from tests.support.products import normal

_ALL = ("default", "kernel", "reference")
_CHECKS: dict[str, Callable[[Arm], None]] = {}
_ARMS: dict[str, tuple[str, ...]] = {}
BY_KEY = {case.key: case for case in CASES}
_MODES = (EXPLICIT, AUTO)


def checks(arm: str) -> list[tuple[str, Callable[[Arm], None]]]:
  """Those that an arm runs, by name."""
  return [pair for pair in _CHECKS.items() if arm in _ARMS[pair[0]]]


def register(
  name: str, check: Callable[[Arm], None], arms: tuple[str, ...] = _ALL
) -> None:
  """Adds a check, for some arms."""
  _CHECKS[name], _ARMS[name] = check, arms


def _of_modes(name: str, arms=_ALL):
  """Registers a check for Explicit and for Auto axes."""

  def of_both(check):
    for mode in _MODES:
      register(f"{name} | {mode.name}", functools.partial(check, mode), arms)
    return check

  return of_both


def raised(f, args, keywords) -> Exception | None:
  """What a call raises."""
  try:
    f(*args, **keywords)
  except Exception as error:
    return error
  return None


def forget_warnings() -> None:
  """Messages that are logged once are logged again."""
  from pallas_gemm import report

  report.reset()


def _compare(arm: Arm, mode: Mode, ours, plain, args, specs, typed=True):
  """Results of two functions of sharded arrays.

  Args:
    arm: how the op is called.
    mode: of the mesh.
    ours: what calls the op.
    plain: the same in jnp, which the reference arm runs in its stead.
    args: the arrays, on one device.
    specs: how they are sharded.
    typed: `plain` runs under the mesh; else on one device, for values alone.
  """
  call = mesh_calls.Call(lambda f: f, args, specs, None)
  if typed:
    want = mesh_checks.run(mode, call, plain).results
  else:
    want = jax.jit(plain)(*args)
  if arm.reference:
    return
  arm.calls.clear()
  with mesh_checks.logged_warnings() as warnings:
    got = mesh_checks.run(mode, call, ours).results
  assert not warnings, warnings
  mesh_checks.same_values(got, want)
  if typed and mode.explicit:
    mesh_checks.same_shardings(got, want)
  assert arm.calls or not arm.kernel, "no kernel"


def _gradients(f: Callable[..., jax.Array], count: int):
  """The value of a loss and the gradients of all arguments."""
  return jax.value_and_grad(lambda *xs: (f(*xs) ** 2).sum(), range(count))


def _reshard(x: jax.Array, spec: P) -> jax.Array:
  """To another sharding, where types have one."""
  mesh = jax.typeof(x).sharding.mesh
  explicit = jax.sharding.AxisType.Explicit
  if mesh.empty or explicit not in mesh.axis_types:
    return x
  return jax.sharding.reshard(x, spec)


# Layers.


def _dense_layer(how, h, w):
  return pallas_gemm.matmul(h, w, activation=jnp.tanh, **how)


def _plain_layer(how, h, w):
  del how
  return jnp.tanh(h @ w)


def _injected_layer(how, h, w):
  del how
  numbers = (((1,), (0,)), ((), ()))
  return jnp.tanh(pallas_gemm.dot_general(h, w, numbers))


def _gated_layer(how, h, w):
  return pallas_gemm.gated_matmul(h, w, w, **how)


def _plain_gated_layer(how, h, w):
  del how
  return jax.nn.silu(h @ w) * (h @ w)


def _experts_layer(how, h, w):
  return pallas_gemm.ragged_dot(
    h, w, jnp.asarray(SIZES), activation=jnp.tanh, **how
  )


def _plain_experts_layer(how, h, w):
  del how
  return ragged.plain(h, w, jnp.asarray(SIZES), activation=jnp.tanh)


_LAYERS = {
  "matmul": (_dense_layer, _plain_layer, ()),
  "dot_general": (_injected_layer, _plain_layer, ()),
  "gated_matmul": (_gated_layer, _plain_gated_layer, ()),
  "ragged_dot": (_experts_layer, _plain_experts_layer, (8,)),
}


def _scan(op: str, remat: bool, mode: Mode, arm: Arm) -> None:
  """Layers, with a carry that is sharded."""
  ours, plain, groups = _LAYERS[op]

  def layers(layer, how):
    def body(h, w):
      return _reshard(layer(how, h, w), P("x", None)), None

    body = jax.checkpoint(body) if remat else body
    return lambda h, ws: lax.scan(body, h, ws)[0]

  args = normal(32, 16) / 4, normal(3, *groups, 16, 16) / 4
  specs = P("x", None), P(*[None] * (2 + len(groups)), "y")
  wrap = functools.partial(_gradients, count=2)
  _compare(
    arm,
    mode,
    wrap(layers(ours, arm.how)),
    wrap(layers(plain, {})),
    args,
    specs,
    typed=not groups,
  )


for _op in _LAYERS:
  for _remat in (False, True):
    for _mode in _MODES:
      register(
        f"{_op}: scan{' of remat' * _remat} | {_mode.name}",
        functools.partial(_scan, _op, _remat, _mode),
        ("kernel", "reference") if _remat else _ALL,
      )


@_of_modes("mlp: FSDP and tensor parallel")
def _mlp(mode, arm):
  asked = {"out_sharding": P("x", None, None)} if mode.explicit else {}

  def ours(x, gate, up, down):
    h = pallas_gemm.gated_matmul(x, gate, up, **arm.how)
    return pallas_gemm.matmul(h, down, **arm.how, **asked)

  def plain(x, gate, up, down):
    h = jax.nn.silu(x @ gate) * (x @ up)
    return jnp.matmul(h, down, **asked)

  shapes = (8, 4, 16), (16, 32), (16, 32), (32, 16)
  args = tuple(normal(*shape, seed=i) / 4 for i, shape in enumerate(shapes))
  specs = P("x", None, None), P("x", "y"), P("x", "y"), P("y", "x")
  wrap = functools.partial(_gradients, count=4)
  _compare(arm, mode, wrap(ours), wrap(plain), args, specs)


def _batched_alone(name: str, mode: Mode, arm: Arm) -> None:
  """K over devices, and a batch that alpha alone has, or C."""
  args = normal(16, 32), normal(32, 24)
  specs = P(None, "x"), P("x", None)
  if name == "alpha":
    args, specs = (*args, normal(8)), (*specs, P(None))
  else:  # the axis that sums are spread over
    args, specs = (*args, normal(8, 16, 24)), (*specs, P("x", None, None))
  how = arm.how | ({"out_sharding": P(None, None)} if mode.explicit else {})

  def ours(a, b, v):
    f = lambda v: pallas_gemm.matmul(a, b, **{name: v}, **how)  # noqa: E731
    return jax.vmap(f)(v)

  def plain(a, b, v):
    return v[:, None, None] * (a @ b) if name == "alpha" else a @ b + v

  _compare(arm, mode, ours, plain, args, specs, typed=False)


for _name in ("alpha", "c"):
  _of_modes(f"{_name} alone batched, K sharded")(
    functools.partial(_batched_alone, _name)
  )


@_of_modes("flax.linen.Dense")
def _flax(mode, arm):
  def apply(layer):
    def run(x, kernel, bias):
      params = {"kernel": kernel, "bias": bias}
      return layer.apply({"params": params}, x)

    return _gradients(run, 3)

  args = normal(8, 4, 32), normal(32, 24) / 4, normal(24)
  specs = P("x", None, None), P(None, "y"), P("y")
  ours = linen.Dense(24, dot_general=pallas_gemm.dot_general)
  _compare(arm, mode, apply(ours), apply(linen.Dense(24)), args, specs)


def _uneven(spec_a, spec_b, arm) -> None:
  """Shards of different sizes, which Auto axes alone have."""

  def of(product):
    def run(a, b, bias):
      a, b = (
        lax.with_sharding_constraint(v, NamedSharding(AUTO.mesh, spec))
        for v, spec in ((a, spec_a), (b, spec_b))
      )
      return product(a, b, bias)

    return _gradients(run, 3)

  def ours(a, b, bias):
    return pallas_gemm.matmul(
      a, b, bias=bias, activation=jax.nn.silu, **arm.how
    )

  def plain(a, b, bias):
    return jax.nn.silu(a @ b + bias)

  args = normal(10, 30) / 4, normal(30, 50) / 4, normal(50)
  _compare(arm, AUTO, of(ours), of(plain), args, (P(), P(), P()))


for _name, *_specs in (
  ("M", P("x", None), P()),
  ("N", P(), P(None, "x")),
  ("K", P(None, "x"), P("x", None)),
  ("M, N", P("x", None), P(None, "y")),
):
  register(
    f"matmul: {_name}, uneven | auto", functools.partial(_uneven, *_specs)
  )


@_of_modes("ragged_dot: sizes sharded like their experts")
def _sharded_sizes(mode, arm):
  def ours(x, w, sizes):
    return pallas_gemm.ragged_dot(x, w, sizes, **arm.how)

  def plain(x, w, sizes):
    return ragged.plain(x, w, sizes)

  args = normal(32, 16) / 4, normal(8, 16, 24) / 4, jnp.asarray(SIZES)
  specs = P(), P("x", None, None), P("x")
  _compare(arm, mode, ours, plain, args, specs, typed=False)


def _gathered(op: str, arm: Arm) -> None:
  """`out_sharding` is the result's, whatever the bias has."""
  out = P("y", None)

  def ours(x, w, bias):
    how = arm.how | {"bias": bias, "out_sharding": out}
    if op == "matmul":
      return pallas_gemm.matmul(x, w[0], **how | {"bias": bias[0]})
    return pallas_gemm.ragged_dot(x, w, jnp.asarray(SIZES), **how)

  def plain(x, w, bias):
    if op == "matmul":
      return x @ w[0] + bias[0]
    return ragged.plain(x, w, jnp.asarray(SIZES), bias)

  args = normal(32, 16) / 4, normal(8, 16, 24) / 4, normal(8, 24)
  specs = P("x", None), P(None, None, "y"), P(None, "y")
  _compare(arm, EXPLICIT, ours, plain, args, specs, typed=False)
  if arm.reference:
    return
  call = mesh_calls.Call(lambda f: f, args, specs, None)
  (got,) = jax.tree.leaves(mesh_checks.run(EXPLICIT, call, ours).results)
  assert jax.typeof(got).sharding.spec == out, jax.typeof(got)


for _op in ("matmul", "ragged_dot"):
  register(
    f"{_op}: out_sharding beside a sharded bias | explicit",
    functools.partial(_gathered, _op),
  )


def _named_axis(arm: Arm) -> None:
  """`jax.vmap(spmd_axis_name=)`, of Auto axes."""

  def over(f):
    return _gradients(jax.vmap(f, in_axes=(0, None), spmd_axis_name="x"), 2)

  args = normal(4, 8, 32) / 4, normal(32, 24) / 4
  specs = P("x", None, None), P(None, "y")
  ours = functools.partial(_dense_layer, arm.how)
  plain = functools.partial(_plain_layer, {})
  _compare(arm, AUTO, over(ours), over(plain), args, specs)


register("matmul: vmap with spmd_axis_name | auto", _named_axis)


def _experts(op: str, check_vma: bool, arm: Arm) -> None:
  """`group_offset` in `jax.shard_map`: each device has its own groups."""
  sizes = jnp.asarray(SIZES)
  of_groups = {"group_sizes": sizes, "activation": jnp.tanh}

  def local(x, w, bias):
    how = of_groups | {"group_offset": lax.axis_index("x") * len(w)} | arm.how
    if op == "ragged_dot":
      out = pallas_gemm.ragged_dot(x, w, bias=bias, **how)
    else:
      out = pallas_gemm.gated_ragged_dot(x, w, w, **how)
    return lax.psum(out, "x")

  def plain(x, w, bias):
    if op == "ragged_dot":
      return ragged.plain(x, w, sizes, bias, activation=jnp.tanh)
    out = ragged.plain(x, w, sizes)
    return jnp.tanh(out) * out

  at = P("x", None, None), P("x", None)
  sharded = jax.shard_map(
    local, in_specs=(P(), *at), out_specs=P(), check_vma=check_vma
  )
  args = normal(32, 16) / 4, normal(8, 16, 24) / 4, normal(8, 24)
  ours, want = _gradients(sharded, 3), _gradients(plain, 3)
  _compare(arm, AUTO, ours, want, args, (P(), *at), typed=False)


for _op in ("ragged_dot", "gated_ragged_dot"):
  for _vma in (True, False):
    register(
      f"{_op}: groups by group_offset | shard_map{', no VMA' * (not _vma)}",
      functools.partial(_experts, _op, _vma),
    )


# The kernel itself, not its stand-in.


def _lowered_in_shard_map(arm: Arm) -> None:
  """For CUDA, ahead of time: a kernel for each product, with gradients."""
  del arm
  how = {"implementation": "sm90"}

  def dense(x, w):
    return pallas_gemm.matmul(x, w, activation=jnp.tanh, **how)

  def grouped(x, w):
    offset = lax.axis_index("x") * len(w)
    out = pallas_gemm.ragged_dot(
      x, w, jnp.asarray(SIZES), group_offset=offset, **how
    )
    return lax.psum(out, "x")

  at = P("x"), P()
  for local, shape, specs, out, kernels in (
    (dense, (128, 256), at, at[0], 3),
    (grouped, (8, 128, 256), at[::-1], at[1], 6),  # each with its tables'
  ):
    f = jax.shard_map(local, mesh=AUTO.mesh, in_specs=specs, out_specs=out)
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1024, 128), shape)]
    loss = lambda *x, f=f: f(*x).astype("float32").sum()  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*shapes)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels, text


def _interpreted_runs_on_one_device(arm: Arm) -> None:
  """XLA can't partition it: its own product runs if it may, or none."""
  del arm
  x = AUTO.place(normal(32, 16, dtype="bfloat16"), P("x"))
  w, sizes = normal(8, 16, 24, dtype="bfloat16"), jnp.asarray(SIZES)
  out = pallas_gemm.matmul(x, w[0], implementation=("sm90", "xla"))
  assert out.sharding.spec == P("x"), out.sharding
  for op, args in (
    (pallas_gemm.matmul, (x, w[0])),
    (pallas_gemm.ragged_dot, (x, w, sizes)),
  ):
    error = raised(op, args, {"implementation": "sm90"})
    assert isinstance(error, NotImplementedError), repr(error)
    assert "runs on one device" in str(error), error


register("sm90: lowered in shard_map", _lowered_in_shard_map, ("default",))
register(
  "sm90: interpreted | auto", _interpreted_runs_on_one_device, ("default",)
)


# What the checks rest on.


class _Pair(NamedTuple):
  """Operands, as an op hands them to an implementation."""

  a: jax.Array
  b: jax.Array

  def present(self):
    return list(self)


def _not_partitioned(arm: Arm) -> None:
  """The stand-in is lowered for one device alone, for what that one has."""
  del arm
  calls: list[stand_in.Call] = []
  run = stand_in.taking_all(lambda x, *_: [x.a @ x.b], calls)

  def product(a, b):
    return run(_Pair(a, b), None)[0]

  a = AUTO.place(normal(16, 32), P("x"))
  b = AUTO.place(normal(32, 24), P())
  error = raised(jax.jit(product), (a, b), {})
  assert isinstance(error, AssertionError), repr(error)
  assert not calls
  local = jax.shard_map(
    product, mesh=AUTO.mesh, in_specs=(P("x"), P()), out_specs=P("x")
  )
  mesh_checks.same_values(jax.jit(local)(a, b), a @ b)
  assert [call.shapes for call in calls] == [((4, 32), (32, 24))], calls


register("stand-in: not partitioned", _not_partitioned, ("reference",))


# Programs for other processes.


@_of_modes("export", arms=("default", "kernel"))
def _export(mode, arm):
  """Explicit axes: the kernel. Auto ones: XLA's product, and a warning."""
  how = arm.how
  if arm.kernel and not mode.explicit:
    how = {"implementation": ("sm90", "xla")}
  case = BY_KEY["matmul: M, N, bias, silu"]
  arrays, specs = case.arrays(), case.specs()
  placed = jax.tree.map(mode.place, arrays, specs)
  arm.calls.clear()
  forget_warnings()
  with mode.context(), mesh_checks.logged_warnings() as warnings:
    exported = export.export(jax.jit(case.ours(**how)))(placed)
    again = export.deserialize(exported.serialize())
    out = jax.jit(again.call)(placed)
  mesh_checks.same_values(out, case.plain()(arrays))
  assert out.sharding.spec == case.out, out.sharding
  if arm.kernel:
    assert bool(arm.calls) == mode.explicit, arm.calls
    assert bool(warnings) != mode.explicit, warnings
