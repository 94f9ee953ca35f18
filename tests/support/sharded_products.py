"""Products on four CPU devices; a program, run by tests/test_ops_transforms.

Fails with an AssertionError.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm import tuning
from tests.support import products


def layer(x, w, bias):
  """What is sharded."""
  return pallas_gemm.matmul(x, w, bias=bias, activation=jnp.tanh)


def plain(x, w, bias):
  """`layer` in jnp."""
  return jnp.tanh(x @ w + bias)


def main() -> None:
  """Runs every check."""
  jax.config.update("jax_enable_x64", True)
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
  shapes = (8, 12), (12, 16), (16,)
  args = [products.normal(*shape, dtype="float64") for shape in shapes]
  check_shard_map(mesh, args)
  check_contraction_over_devices(mesh, args)
  check_partitioned_by_xla(mesh, args)
  check_kernel_inside_of_shard_map(mesh)


def check_shard_map(mesh, args):
  """Data and model parallel, forward and backward."""
  rows = (P("d"), P(), P()), P("d")
  columns = (P(), P(None, "d"), P("d")), P(None, "d")
  for in_specs, out_specs in (rows, columns):
    for check_vma in (True, False):
      sharded = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
      )
      assert_same_derivatives(sharded, args)


def check_contraction_over_devices(mesh, args):
  """K over devices, summed by psum."""

  def partial(x, w):
    return jax.lax.psum(pallas_gemm.matmul(x, w), "d")

  sharded = jax.shard_map(
    partial, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=P()
  )
  products.assert_same(jax.jit(sharded)(*args[:2]), args[0] @ args[1])


def check_partitioned_by_xla(mesh, args):
  """`jit` of sharded operands; an interpreted kernel can't be split."""
  x = jax.device_put(args[0], NamedSharding(mesh, P("d")))
  assert_same_derivatives(layer, [x, *args[1:]])
  x, w = (args[i].astype(jnp.bfloat16) for i in (0, 1))
  x = jax.device_put(x, NamedSharding(mesh, P("d")))
  out = pallas_gemm.matmul(x, w, implementation=("sm90", "xla"))
  assert out.sharding.spec == P("d")
  try:
    pallas_gemm.matmul(x, w, implementation="sm90")
  except NotImplementedError as error:
    assert "runs on one device" in str(error)
  else:
    raise AssertionError("the kernel was partitioned")


def check_kernel_inside_of_shard_map(mesh):
  """Lowered for CUDA, ahead of time."""
  config = tuning.Config()

  def local(x, w):
    return pallas_gemm.matmul(x, w, config=config, activation=jnp.tanh)

  sharded = jax.shard_map(
    local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")
  )
  x = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)
  w = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
  lowered = jax.jit(sharded).trace(x, w).lower(lowering_platforms=("cuda",))
  assert "mosaic_gpu" in lowered.as_text()


def assert_same_derivatives(f, args):
  """Value and gradients of `f` are those of `plain`."""

  def loss(f):
    return lambda *args: (f(*args) ** 2).sum()

  wrt = tuple(range(len(args)))
  got = jax.jit(jax.value_and_grad(loss(f), wrt))(*args)
  products.assert_same(got, jax.value_and_grad(loss(plain), wrt)(*args))


if __name__ == "__main__":
  main()
