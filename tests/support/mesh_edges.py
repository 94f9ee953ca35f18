"""Checks of `meshes`: sizes of 0 and 1, and what only some programs have."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm.quantization import Quantized, Recipe, quantize
from tests.support import mesh_checks, ops
from tests.support.mesh_calls import AUTO, EXPLICIT, Mode
from tests.support.mesh_checks import register
from tests.support.products import normal

_SIZES = jnp.array([5, 3])
_ONE = Mode("an axis of size 1", explicit=True, shape=(1, 8))
_BATCHES = {
  "one": ((1, 8, 16), (4, 16, 8), P("x", None, "y")),
  "none": ((8, 16), (4, 16, 8), P("x", None, None)),
  "both one": ((1, 8, 16), (1, 16, 8), P(None, "x", "y")),
  "across": ((4, 1, 8, 16), (2, 16, 8), P("x", "y", None, None)),
}


def _same(arm, f, plain, args, specs, mode=EXPLICIT):
  """Results of ours beside those on one device, and of our shardings."""
  want = jax.jit(plain)(*args)
  with mode.context():
    given = jax.tree.map(mode.place, args, specs)
    got = jax.jit(functools.partial(f, **arm.how))(*given)
  mesh_checks.same_values(got, want)
  return got


@register("out_sharding: batches, {case} | explicit", case=_BATCHES)
def _out_sharding_of_batches(arm, case):
  """Not those dimensions that `jnp.matmul` shards."""
  *shapes, out = _BATCHES[case]
  f = functools.partial(pallas_gemm.matmul, out_sharding=out)
  args = tuple(normal(*shape, seed=i) for i, shape in enumerate(shapes))
  got = _same(arm, f, jnp.matmul, args, (P(), P()))
  assert jax.typeof(got).sharding.spec == out


@register("{heads} heads on y of 8 | auto", heads=(2, 12))
def _part_of_an_axis(arm, heads):
  """Some lie over the axis's major part, for which `P` has no words."""
  queries = {2: 8, 12: 1}[heads]  # for each head

  def layer(f, x, w, w_out):
    v = f(x, w).reshape(2, 8, heads, 8)
    v = jnp.repeat(jnp.cumsum(v, 1), queries, 2)
    return jnp.sum(f(v.reshape(2, 8, -1), w_out))

  # Integers, whose sums no rounding tells apart.
  shapes = (2, 8, 16), (16, heads * 8), (heads * queries * 8, 16)
  args = tuple(jnp.round(normal(*s, seed=i)) for i, s in enumerate(shapes))
  ours = functools.partial(pallas_gemm.matmul, **arm.how)

  def gradient(f, *args):
    return jax.jit(jax.grad(functools.partial(layer, f), (0, 1, 2)))(*args)

  mode = Mode("auto, 1 x 8", shape=(1, 8))
  with mode.context():
    given = map(mode.place, args, (P(), P(None, "y"), P("y", None)))
    got = gradient(ours, *given)
  mesh_checks.same_values(got, gradient(jnp.matmul, *args))


@register("{name} with an axis of size 1 | explicit", name=("bias", "c"))
def _axis_of_size_one(arm, name):
  """The gradient has it too."""

  def loss(a, b, v, **how):
    return pallas_gemm.matmul(a, b, **{name: v}, **how).sum()

  def plain(a, b, v):
    return jnp.sum(a @ b + v)

  args = normal(8, 16), normal(16, 48), normal(8, 1)
  specs = P(), P(), P(None, "x")
  got = _same(arm, jax.grad(loss, 2), jax.grad(plain, 2), args, specs, _ONE)
  assert jax.typeof(got).sharding.spec == specs[2]


@register("groups, one column, an activation | explicit")
def _one_column(arm):
  def loss(x, w, **how):
    op = functools.partial(pallas_gemm.ragged_dot, activation=jnp.tanh)
    return op(x, w, _SIZES, **how).sum()

  args, specs = (normal(8, 4), normal(2, 4, 1)), (P("x", None), P())
  _same(arm, jax.grad(loss, (0, 1)), jax.grad(loss, (0, 1)), args, specs)


@register("{op}: no column, K sharded | explicit", op=("matmul", "ragged_dot"))
def _no_column(arm, op):
  """Nothing is scattered."""
  w, rest, how = jnp.ones((16, 0)), (), {"reduce_dtype": "float32"}
  if op == "ragged_dot":
    w, rest = jnp.ones((2, 16, 0)), (_SIZES,)
  spec = P(*[None] * (w.ndim - 2), "x", None)
  f = functools.partial(getattr(pallas_gemm, op), out_sharding=P(None, "x"))
  with EXPLICIT.context():
    x, w = EXPLICIT.place(normal(8, 16), P(None, "x")), EXPLICIT.place(w, spec)
    got = f(x, w, *rest, **how, **arm.how)
  assert got.shape == (8, 0)


@register("8 bits: groups, a scale for each of K | explicit", ("default",))
def _scale_along_k(arm):
  x = quantize(normal(8, 256), "int8", block=(1, None))
  w = quantize(normal(2, 256, 16), "int8", block=(1, 1, None))
  f = lambda x, w, **how: pallas_gemm.ragged_dot(x, w, _SIZES, **how)  # noqa: E731
  specs = Quantized(P("x", None), P("x", None)), Quantized(P(), P())
  _same(arm, f, f, (x, w), specs)


@register(
  "recipe: groups | shard_map over x alone | {scaling}",
  ("default",),
  scaling=("row", "tensor", "block"),
)
def _recipe_in_part(arm, scaling):
  """Of groups within each device's rows, with gradients."""
  op = functools.partial(
    pallas_gemm.ragged_dot,
    group_sizes=jnp.array([1, 1]),
    quantize=Recipe(scaling=scaling),
  )
  x, w = normal(8, 16), normal(2, 16, 12)

  def loss(f):
    return jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))

  def one_by_one(x, w):
    return jnp.concatenate([op(v, w) for v in jnp.split(x, 4)])

  want = loss(one_by_one)(x, w)
  how = {"in_specs": (P("x"), P()), "out_specs": P("x"), "axis_names": {"x"}}
  with AUTO.context():
    got = loss(jax.shard_map(op, **how))(x, w)
  mesh_checks.same_values(got, want)


@register(
  "recipe: 6 blocks on x of 4 | {mode}", ("default",), mode=(AUTO, EXPLICIT)
)
def _blocks_on_more_devices(arm, mode):
  """XLA shards their scales over a part of the axis."""
  how = {"quantize": Recipe(scaling="block"), "reduce_dtype": "float32"}
  f = functools.partial(pallas_gemm.matmul, **how)
  args, specs = (normal(64, 128), normal(128, 768)), (P(), P(None, "x"))
  _same(arm, f, f, args, specs, mode)


@register("alpha of 0 | shard_map", ("default",))
def _nothing_multiplied(arm):
  """Varies as the operands do."""

  def body(a, b):
    f = lambda alpha: pallas_gemm.matmul(a, b, alpha=alpha)  # noqa: E731
    return jax.lax.cond(a[0, 0] > 9, lambda: f(1.0), lambda: f(0))

  with AUTO.context():
    f = jax.shard_map(body, in_specs=(P("x"), P()), out_specs=P("x"))
    got = jax.jit(f)(normal(8, 4), normal(4, 4))
  mesh_checks.same_values(got, jnp.zeros((8, 4)))


@register("{op}: reduced axes | explicit", op=("matmul", "dot_general"))
def _reduced(arm, op):
  """The gradient is unreduced."""
  types = (AxisType.Explicit,) * 2
  mesh = jax.make_mesh((4, 2), ("x", "y"), types)
  of_w = NamedSharding(mesh, P(None, None, reduced={"x"}))
  with jax.set_mesh(mesh):
    # Integers, whose sums no rounding tells apart.
    x, w = (
      jnp.round(normal(*s, dtype="bfloat16")) for s in ((8, 16), (16, 12))
    )
    x, w = jax.device_put(x, P("x", None)), jax.device_put(w, of_w)

    def gradient(f):
      loss = lambda w: f(x, w).astype("float32").sum()  # noqa: E731
      return jax.jit(jax.grad(loss))(w)

    how = {"dimension_numbers": ops.NUMBERS} if op == "dot_general" else arm.how
    f = functools.partial(getattr(pallas_gemm, op), **how)
    got, want = gradient(f), gradient(jnp.matmul)
    assert jax.typeof(got) == jax.typeof(want)
    got, want = (jax.sharding.reshard(v, P()) for v in (got, want))
  mesh_checks.same_values(got, want)
