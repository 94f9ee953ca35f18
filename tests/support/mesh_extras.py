"""Checks of `meshes` that no single call of an op makes: layers, exports."""

from collections.abc import Callable

import jax
from jax import export, lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm import split
from tests.support import mesh_calls, mesh_checks, ops, ragged, stand_in
from tests.support.mesh_calls import AUTO, EXPLICIT
from tests.support.mesh_cases import SIZES
from tests.support.mesh_checks import BY_KEY, raised, register
from tests.support.products import normal

_MODES = EXPLICIT, AUTO


def _compare(arm, mode, ours, plain, args, specs, typed=True):
  """Results of two functions of sharded arrays.

  Args:
    arm: how the op is called.
    mode: of the mesh.
    ours: what calls the op.
    plain: the same in jnp.
    args: the arrays, on one device.
    specs: how they are sharded.
    typed: `plain` runs under the mesh; else on one device, for values alone.

  Returns:
    What `ours` gives.
  """
  call = mesh_calls.Call(lambda f: f, args, specs, None)
  if typed:
    want = mesh_checks.run(mode, call, plain).results
  else:
    want = jax.jit(plain)(*args)
  arm.calls.clear()
  with mesh_checks.logged_warnings() as warnings:
    got = mesh_checks.run(mode, call, ours).results
  assert not warnings, warnings
  mesh_checks.same_values(got, want)
  if typed and mode.explicit:
    mesh_checks.same_shardings(got, want)
  assert arm.calls or not arm.kernel, "no kernel"
  return got


def _gradients(f: Callable[..., jax.Array], count: int):
  """The value of a loss and the gradients of all arguments."""
  return jax.value_and_grad(ops.squared(f), range(count))


# Operands of grouped products, and where the bias is added to each row.
_GROUPED = normal(32, 16) / 4, normal(8, 16, 24) / 4, normal(8, 24)


def _ragged_dot(x, w, bias=None, **how):
  return pallas_gemm.ragged_dot(x, w, jnp.asarray(SIZES), bias=bias, **how)


def _plain_ragged_dot(x, w, bias=None, **how):
  return ragged.plain(x, w, jnp.asarray(SIZES), bias, **how)


# Layers.


@register(
  "{op}: scan, remat {remat} | {mode}",
  op=("matmul", "ragged_dot"),
  remat=(False, True),
  mode=_MODES,
)
def _scan(arm, op, remat, mode):
  """Layers, with a carry that is sharded."""
  grouped = op == "ragged_dot"
  ours, plain = (
    (_ragged_dot, _plain_ragged_dot) if grouped else (ops.dense, ops.plain)
  )

  def layers(layer, how):
    def body(h, w):
      h = layer(h, w, activation=jnp.tanh, **how)
      is_typed = mode.explicit and not jax.typeof(h).sharding.mesh.empty
      return jax.sharding.reshard(h, P("x", None)) if is_typed else h, None

    body = jax.checkpoint(body) if remat else body
    return _gradients(lambda h, ws: lax.scan(body, h, ws)[0], 2)

  groups = (8,) if grouped else ()
  args = normal(32, 16) / 4, normal(3, *groups, 16, 16) / 4
  specs = P("x", None), P(*[None] * (2 + len(groups)), "y")
  both = layers(ours, arm.how), layers(plain, {})
  _compare(arm, mode, *both, args, specs, typed=not grouped)


@register(
  "planes of w, sharded along {along} | {mode}",
  along=("n", "k", "g"),
  mode=_MODES,
)
def _kept_planes(arm, along, mode):
  """Planes of a weight are sharded, gathered and added up as it is."""
  how = {"precision": "highest"}
  ours, plain = ops.dense, ops.plain
  args, specs = (normal(32, 16), normal(16, 24)), (P("x", None), P(None, "y"))
  if along == "k":
    specs = P("y", None), P("x", None)
  if along == "g":
    ours, plain = _ragged_dot, _plain_ragged_dot
    args, specs = _GROUPED[:2], (P(), P("x", None, None))
  both = (
    lambda x, w: _gradients(lambda x: ours(x, split(w), **how), 1)(x),
    lambda x, w: _gradients(lambda x: plain(x, w), 1)(x),
  )
  _compare(arm, mode, *both, args, specs, typed=along != "g")


@register(
  "{name} alone batched, K sharded | {mode}", name=("alpha", "c"), mode=_MODES
)
def _batched_alone(arm, name, mode):
  """K over devices, and a batch that alpha alone has, or C."""
  args = normal(16, 32), normal(32, 24)
  specs = P(None, "x"), P("x", None)
  if name == "alpha":
    args, specs = (*args, normal(8)), (*specs, P(None))
  else:  # the axis that sums are spread over
    args, specs = (*args, normal(8, 16, 24)), (*specs, P("x", None, None))
  how = arm.how | ({"out_sharding": P(None, None)} if mode.explicit else {})

  def over(f, how):
    return lambda a, b, v: jax.vmap(lambda v: f(a, b, **{name: v}, **how))(v)

  both = over(pallas_gemm.matmul, how), over(ops.plain, {})
  _compare(arm, mode, *both, args, specs, typed=False)


@register(
  "matmul: uneven {sides} | auto",
  sides=("16x 1 @", "1 @ 1 24x", "1 32x @ 32x", "16x 1 @ 1 24y"),
)
def _uneven(arm, sides):
  """Shards of different sizes, which Auto axes alone have."""
  specs = [
    P(*[word.lstrip("0123456789") or None for word in side.split()])
    for side in sides.split("@")
  ]

  def of(product):
    def run(a, b, bias):
      a, b = (
        lax.with_sharding_constraint(v, NamedSharding(AUTO.mesh, spec))
        for v, spec in zip((a, b), specs)
      )
      return product(a, b, bias, activation=jax.nn.silu)

    return _gradients(run, 3)

  ours = lambda *x, **how: ops.dense(*x, **how, **arm.how)  # noqa: E731
  args = normal(10, 30) / 4, normal(30, 50) / 4, normal(50)
  _compare(arm, AUTO, of(ours), of(ops.plain), args, (P(), P(), P()))


@register("ragged_dot: sizes sharded like their experts | {mode}", mode=_MODES)
def _sharded_sizes(arm, mode):
  ours = lambda *x: pallas_gemm.ragged_dot(*x, **arm.how)  # noqa: E731
  args = *_GROUPED[:2], jnp.asarray(SIZES)
  specs = P(), P("x", None, None), P("x")
  _compare(arm, mode, ours, ragged.plain, args, specs, typed=False)


@register(
  "{op}: out_sharding and a sharded bias | explicit",
  op=("matmul", "ragged_dot"),
)
def _gathered(arm, op):
  """`out_sharding` is the result's, whatever the bias has."""
  out, first = P("y", None), op == "matmul"
  both = (ops.dense, ops.plain) if first else (_ragged_dot, _plain_ragged_dot)
  how = arm.how | {"out_sharding": out}

  def of(f, how):
    of_op = lambda v: v[0] if first else v  # noqa: E731
    return lambda x, w, bias: f(x, of_op(w), bias=of_op(bias), **how)

  both = of(both[0], how), of(both[1], {})
  specs = P("x", None), P(None, None, "y"), P(None, "y")
  got = _compare(arm, EXPLICIT, *both, _GROUPED, specs, typed=False)
  assert jax.typeof(got).sharding.spec == out


@register("matmul: vmap with spmd_axis_name | auto")
def _named_axis(arm):
  """`jax.vmap(spmd_axis_name=)`, of Auto axes."""

  def over(f, how):
    one = lambda h, w: f(h, w, activation=jnp.tanh, **how)  # noqa: E731
    mapped = jax.vmap(one, in_axes=(0, None), spmd_axis_name="x")
    return _gradients(mapped, 2)

  args = normal(4, 8, 32) / 4, normal(32, 24) / 4
  specs = P("x", None, None), P(None, "y")
  both = over(ops.dense, arm.how), over(ops.plain, {})
  _compare(arm, AUTO, *both, args, specs)


@register(
  "{op}: groups by group_offset | shard_map, VMA {vma}",
  op=("ragged_dot", "gated_ragged_dot"),
  vma=(True, False),
)
def _experts(arm, op, vma):
  """`group_offset` in `jax.shard_map`: each device has its own groups."""
  sizes, tanh = jnp.asarray(SIZES), {"activation": jnp.tanh}

  def local(x, w, bias):
    how = {"group_offset": lax.axis_index("x") * len(w)} | tanh | arm.how
    if op == "ragged_dot":
      out = pallas_gemm.ragged_dot(x, w, sizes, bias=bias, **how)
    else:
      out = pallas_gemm.gated_ragged_dot(x, w, w, sizes, **how)
    return lax.psum(out, "x")

  def plain(x, w, bias):
    if op == "ragged_dot":
      return ragged.plain(x, w, sizes, bias, **tanh)
    out = ragged.plain(x, w, sizes)
    return jnp.tanh(out) * out

  at = P("x", None, None), P("x", None)
  sharded = jax.shard_map(
    local, in_specs=(P(), *at), out_specs=P(), check_vma=vma
  )
  both = _gradients(sharded, 3), _gradients(plain, 3)
  _compare(arm, AUTO, *both, _GROUPED, (P(), *at), typed=False)


# The kernel itself, not its stand-in.


@register("sm90: lowered in shard_map", ("default",))
def _lowered_in_shard_map(arm):
  """For CUDA, ahead of time: a kernel for each product, with gradients."""
  del arm
  how = {"implementation": "sm90"}

  def dense(x, w):
    return pallas_gemm.matmul(x, w, activation=jnp.tanh, **how)

  def grouped(x, w):
    offset = lax.axis_index("x") * len(w)
    return lax.psum(_ragged_dot(x, w, group_offset=offset, **how), "x")

  at = P("x"), P()
  for local, shape, specs, out, kernels in (
    (dense, (128, 256), at, at[0], 3),
    (grouped, (8, 128, 256), at[::-1], at[1], 6),  # each with its tables'
  ):
    f = jax.shard_map(local, mesh=AUTO.mesh, in_specs=specs, out_specs=out)
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1024, 128), shape)]
    loss = lambda *x, f=f: f(*x).astype("float32").sum()  # noqa: E731
    text = ops.lowered(jax.value_and_grad(loss, (0, 1)), *shapes)
    assert text.count("custom_call @mosaic_gpu") == kernels, text


@register("sm90: no kernel is interpreted | auto", ("default",))
def _interpreted_runs_on_one_device(arm):
  """XLA can't partition it: its own product runs if it may, or none."""
  del arm
  x = AUTO.place(normal(32, 16, dtype="bfloat16"), P("x"))
  w = normal(8, 16, 24, dtype="bfloat16")
  out = pallas_gemm.matmul(x, w[0], implementation=("sm90", "xla"))
  assert out.sharding.spec == P("x"), out.sharding
  for op, args in ((pallas_gemm.matmul, (x, w[0])), (_ragged_dot, (x, w))):
    error = raised(op, *args, implementation="sm90")
    assert isinstance(error, NotImplementedError), repr(error)
    assert "runs on one device" in str(error), error


@register("sm90: {dtype} | auto", ("default",), dtype=("float32", "int32"))
def _named_kernel(arm, dtype):
  """Of planes none is interpreted; what the kernel never takes is refused."""
  del arm
  how = {"precision": "highest"}
  why = {"float32": "runs on one device", "int32": "sm90: operands must be"}
  x = AUTO.place(jnp.round(4 * normal(32, 16)).astype(dtype), P("x"))
  w = jnp.round(4 * normal(8, 16, 24)).astype(dtype)
  for op, args in ((pallas_gemm.matmul, (x, w[0])), (_ragged_dot, (x, w))):
    error = raised(op, *args, implementation="sm90", **how)
    assert isinstance(error, NotImplementedError), repr(error)
    assert why[dtype] in str(error), error
    got = op(*args, implementation=("sm90", "xla"), **how)
    mesh_checks.same_values(got, op(*args, **how))


# What the checks rest on.


@register("stand-in: not partitioned", ("default",))
def _not_partitioned(arm):
  """The stand-in is lowered for one device alone, for what that one has."""
  del arm
  calls: list[stand_in.Call] = []
  run = stand_in.taking_all(lambda x, *_: [x[0] @ x[1]], calls)

  def product(a, b):
    return run(pallas_gemm.ops.spec.Operands(a, b), None)[0]

  a = AUTO.place(normal(16, 32), P("x"))
  b = AUTO.place(normal(32, 24), P())
  error = raised(jax.jit(product), a, b)
  assert isinstance(error, AssertionError), repr(error)
  assert not calls
  local = jax.shard_map(
    product, mesh=AUTO.mesh, in_specs=(P("x"), P()), out_specs=P("x")
  )
  mesh_checks.same_values(jax.jit(local)(a, b), a @ b)
  assert [call.shapes for call in calls] == [((4, 32), (32, 24))], calls


# Programs for other processes.


@register("export | {mode}", ("default", "kernel"), mode=_MODES)
def _export(arm, mode):
  """Explicit axes: the kernel. Auto ones: XLA's product, and a warning."""
  how = arm.how
  if arm.kernel and not mode.explicit:
    how = {"implementation": ("sm90", "xla")}
  case = BY_KEY["matmul: M, N, bias, silu"]
  arrays, specs = case.arrays(), case.specs()
  placed = jax.tree.map(mode.place, arrays, specs)
  arm.calls.clear()
  with mode.context(), mesh_checks.logged_warnings() as warnings:
    exported = export.export(jax.jit(case.ours(**how)))(placed)
    again = export.deserialize(exported.serialize())
    out = jax.jit(again.call)(placed)
  mesh_checks.same_values(out, case.plain()(arrays))
  assert out.sharding.spec == case.out, out.sharding
  if arm.kernel:
    assert bool(arm.calls) == mode.explicit, arm.calls
    assert bool(warnings) != mode.explicit, warnings
