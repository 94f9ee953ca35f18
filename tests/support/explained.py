"""`explain` of sharded products on eight CPU devices; a program.

Run by tests/test_explanation.py. Fails with an AssertionError.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from tests.support import stand_in

_KINDS = AxisType.Explicit, AxisType.Auto


def main() -> None:
  """Runs every check, with the stand-in for the kernel."""
  checks = check_columns, check_sums, check_alike, check_left_to_xla
  with stand_in.installed():
    for kind in _KINDS:
      for check in checks:
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
          check(mesh)
    for kind, count in zip(_KINDS, (1, 0)):
      mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
      with jax.set_mesh(mesh):
        check_for_a_gpu(mesh, count)
    check_mesh_of_the_context(mesh)


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
  """K over devices: the collective is named."""
  a, b = _shape(mesh, P("x", "y"), 64, 32), _shape(mesh, P("y"), 32, 16)
  f = functools.partial(_kernel, out=P("x", None))
  found = pallas_gemm.explain(f, a, b)
  (ran,) = found.products
  assert ran.shapes == ((1, 16, 16), (1, 16, 16)), ran.shapes
  assert ran.around.endswith("psum ['y']"), ran.around
  assert f"  shards: {ran.around}" in str(found).splitlines()


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


def check_for_a_gpu(mesh, count):
  """Lowering alone shows what Explicit axes have, not what Auto ones will."""
  a, b = _shape(mesh, P("x"), 64, 32), _shape(mesh, P(), 32, 16)
  found = pallas_gemm.explain(_kernel, a, b, platform="cuda")
  assert found.platform == "cuda"
  assert len(found.products) == count, found
  assert found.is_partitioned_later == (count == 0)
  assert ("not known yet" in str(found)) == (count == 0)


def check_mesh_of_the_context(mesh):
  """Arrays that lie on no mesh: the one that is set is known all the same."""
  a, b = jnp.ones((64, 32)), jnp.ones((32, 16))
  with jax.set_mesh(mesh):
    found = pallas_gemm.explain(_kernel, a, b, platform="cuda")
  assert found.is_partitioned_later, found


def _kernel(a, b, out=None):
  """A product by the kernel alone; `out` is asked of Explicit axes."""
  asked = None
  if AxisType.Explicit in jax.typeof(a).sharding.mesh.axis_types:
    asked = out
  return pallas_gemm.matmul(
    a, b, implementation="sm90", activation=jnp.tanh, out_sharding=asked
  )


def _shape(mesh, spec, *shape):
  return jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, spec)
  )


if __name__ == "__main__":
  main()
