"""`explain`, and what is tuned, of products on eight CPU devices; a program.

Run by tests/test_explanation.py. Fails with an AssertionError.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm import compat, tracing
from tests.support import stand_in


def main() -> None:
  """Runs every check, with the stand-in for the kernel."""
  # What is tuned has 16 bits, which nothing interprets with Auto axes.
  with stand_in.installed(default=True):
    for check in check_tuned, check_tuned_gradient, check_nothing_to_tune:
      _with_mesh(AxisType.Explicit, check)
  _with_mesh(AxisType.Explicit, check_measured)
  with stand_in.installed():
    for kind in AxisType.Explicit, AxisType.Auto:
      for check in (
        *(check_columns, check_sums, check_alike, check_left_to_xla),
        *(check_gathered, check_scattered, check_what_was_asked),
        check_for_a_gpu,
      ):
        _with_mesh(kind, check)


def _with_mesh(kind, check):
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
  with jax.set_mesh(mesh):
    check(mesh)


def check_columns(mesh):
  """A device's sizes, and no collective."""
  a, b = _shape(mesh, P("x"), 64, 32), _shape(mesh, P(None, "y"), 32, 16)
  (ran,) = pallas_gemm.explain(_kernel, a, b).products
  assert ran.implementation == "sm90"
  assert ran.shapes == ((1, 16, 32), (1, 32, 8)), ran.shapes
  assert "M 16, N 8, K 32" in ran.product, ran.product
  assert ran.around == "a P('x', None), b P(None, 'y')", ran.around
  assert ran.why == ""


def check_sums(mesh):
  """K over devices: the collective is named, and what travels."""
  a, b = _shape(mesh, P("x", "y"), 64, 32), _shape(mesh, P("y"), 32, 16)
  for dtype in "float32", "bfloat16":
    f = functools.partial(_kernel, out=P("x", None), reduce_dtype=dtype)
    found = pallas_gemm.explain(f, a, b)
    (ran,) = found.products
    assert ran.shapes == ((1, 16, 16), (1, 16, 16)), ran.shapes
    assert ran.around.endswith(f"psum ['y'] of {dtype}[16, 16]"), ran.around
    assert f"  shards: {ran.around}" in str(found).splitlines()


def check_scattered(mesh):
  """Along N: computed transposed, for XLA scatters what comes first."""
  a, b = _shape(mesh, P(None, "x"), 64, 32), _shape(mesh, P("x"), 32, 16)
  out = P(None, "x")

  def f(a, b):
    y = _kernel(a, b, out=out)
    return y if _is_explicit(a) else jax.lax.with_sharding_constraint(y, out)

  (ran,) = pallas_gemm.explain(f, a, b).products
  wanted = "psum_scatter {'n': ('x',)} of float32[16, 64]"
  assert ran.around.endswith(wanted), ran.around
  assert ran.shapes == ((1, 8, 16), (1, 64, 8)), ran.shapes


def check_gathered(mesh):
  """A weight that is sharded over the axis of the rows: what a device has."""
  a, b = _shape(mesh, P("x"), 64, 32), _shape(mesh, P("x", "y"), 32, 16)
  (ran,) = pallas_gemm.explain(_kernel, a, b).products
  wanted = "a P('x', None), b P(None, 'y') from [8, 8]"
  assert ran.around == wanted, ran.around


def check_alike(mesh):
  """Nothing is remembered: the same function is explained again."""
  a, b = _shape(mesh, P("x"), 64, 32), _shape(mesh, P(), 32, 16)
  jitted = jax.jit(_kernel)
  first = pallas_gemm.explain(jitted, a, b)
  assert first.products
  assert pallas_gemm.explain(jitted, a, b) == first


def check_left_to_xla(mesh):
  """XLA alone is asked for: it partitions the product."""
  a, b = _shape(mesh, P("x"), 64, 32), _shape(mesh, P(), 32, 16)
  f = functools.partial(pallas_gemm.matmul, implementation="xla")
  (ran,) = pallas_gemm.explain(f, a, b).products
  assert (ran.implementation, ran.config) == ("xla", None)
  assert ran.shapes == ((64, 32), (32, 16)), ran.shapes
  assert ran.around.startswith("partitioned by XLA")
  assert "no kernel is tried" in ran.why


def check_what_was_asked(mesh):
  """Of a product with arrays on one device, of a mesh that is set."""
  a, b = jnp.ones((64, 32)), jnp.ones((32, 16))

  def f(a, b):
    constrain = jax.lax.with_sharding_constraint
    reshard = jax.sharding.reshard if _is_explicit(a) else constrain
    return _kernel(reshard(a, P("x")), b)

  (ran,) = tracing.compiled(*tracing.of_arrays(f, (a, b), {}))
  spec, x = ran.asked
  assert spec.sizes(x) == (1, 16, 16, 32, 0), spec.sizes(x)
  assert ran.shapes == (x.a.shape, x.b.shape)


def check_tuned(mesh):
  """What is tuned has a device's sizes."""
  a = _shape(mesh, P("x", "y"), 64, 32, dtype=jnp.bfloat16)
  b = _shape(mesh, P("y"), 32, 16, dtype=jnp.bfloat16)
  f = functools.partial(_matmul, out=P("x", None))
  (case,) = tracing.find(f, a, b)
  p = case.problem
  assert (p.m, p.n, p.k, p.out_dtype) == (16, 16, 16, "float32"), p
  # Sums over devices come before the activation.
  assert case.activation is None and p.epilogue.activation is None, case


def check_tuned_gradient(mesh):
  """Of a training step with tokens over all devices, all three products."""
  a = _shape(mesh, P(("x", "y")), 64, 32, dtype=jnp.bfloat16)
  b = _shape(mesh, P(), 32, 24, dtype=jnp.bfloat16)

  def loss(a, b):
    return jnp.sum(_matmul(a, b).astype(jnp.float32))

  cases = tracing.find(jax.grad(loss, (0, 1)), a, b)
  found = {(x.problem.m, x.problem.n, x.problem.k) for x in cases}
  assert found == {(8, 24, 32), (8, 32, 24), (32, 24, 8)}, found
  assert {x.activation for x in cases} == {None, jnp.tanh}, cases


def check_nothing_to_tune(mesh):
  """The reason is the partitioned product's."""
  a = _shape(mesh, P("x"), 64, 32, dtype=jnp.bfloat16)
  b = _shape(mesh, P(), 32, 16, dtype=jnp.bfloat16)
  f = functools.partial(pallas_gemm.matmul, implementation="xla")
  try:
    tracing.find(f, a, b)
  except ValueError as error:
    assert "XLA partitions a product" in str(error), error
  else:
    raise AssertionError("nothing could be tuned")


def check_measured(mesh):
  """A device's part, on one device, by the interpreted kernel itself."""
  a = _shape(mesh, P("x"), 64, 32, dtype=jnp.bfloat16)
  b = _shape(mesh, P(None, "y"), 32, 64, dtype=jnp.bfloat16)
  (tuned,) = pallas_gemm.autotune(_kernel, a, b, top=1).problems
  assert (tuned.problem.m, tuned.problem.n, tuned.problem.k) == (16, 32, 32)
  assert tuned.seconds > 0 and tuned.xla_seconds > 0, tuned
  with compat.on_one_device():
    assert jnp.ones(3).sharding.num_devices == 1


def check_for_a_gpu(mesh):
  """Lowering alone shows what Explicit axes have, not what Auto ones will.

  Arrays may lie on no mesh: the one that is set is known all the same.
  """
  for a, b in (
    (_shape(mesh, P("x"), 64, 32), _shape(mesh, P(), 32, 16)),
    (jnp.ones((64, 32)), jnp.ones((32, 16))),
  ):
    found = pallas_gemm.explain(_kernel, a, b, platform="cuda")
    is_later = not _is_explicit(a)
    assert found.platform == "cuda"
    assert len(found.products) == 1 - is_later, found
    assert found.is_partitioned_later == is_later
    assert ("not known yet" in str(found)) == is_later


def _matmul(a, b, out=None, **options):
  """A product; `out` is asked of Explicit axes."""
  asked = out if _is_explicit(a) else None
  return pallas_gemm.matmul(
    a, b, activation=jnp.tanh, out_sharding=asked, **options
  )


def _is_explicit(a):
  return AxisType.Explicit in jax.typeof(a).sharding.mesh.axis_types


# By the kernel alone.
_kernel = functools.partial(_matmul, implementation="sm90")


def _shape(mesh, spec, *shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


if __name__ == "__main__":
  main()
