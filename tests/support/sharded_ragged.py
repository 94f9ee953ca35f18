"""Grouped products on four CPU devices, for tests/test_ops_ragged_transforms.

A program that fails with an AssertionError. Experts are spread over the
devices; tokens are on all of them.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm import tuning
from tests.support import products, ragged

SIZES = jnp.array([3, 0, 5, 4, 1, 2, 0, 4])
LOCAL = len(SIZES) // 4


def main() -> None:
  """Runs every check."""
  jax.config.update("jax_enable_x64", True)
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
  shapes = (24, 5), (8, 5, 6), (8, 6)
  args = [products.normal(*shape, dtype="float64") for shape in shapes]
  check_expert_parallel(mesh, args)
  check_partitioned_by_xla(mesh, args)
  check_kernel_inside_of_shard_map(mesh)


def experts(x, w, bias):
  """Each device computes the rows of its own groups; the others are zeros."""
  out = pallas_gemm.ragged_dot(
    x,
    w,
    SIZES,
    group_offset=lax.axis_index("d") * LOCAL,
    bias=bias,
    activation=jnp.tanh,
  )
  return lax.psum(out, "d")


def gated_experts(x, w):
  out = pallas_gemm.gated_ragged_dot(
    x, w, w, SIZES, group_offset=lax.axis_index("d") * LOCAL
  )
  return lax.psum(out, "d")


def plain(x, w, bias):
  """`experts` in jnp, on one device."""
  return ragged.plain(x, w, SIZES, bias, activation=jnp.tanh)


def plain_gated(x, w):
  out = ragged.plain(x, w, SIZES)
  return jax.nn.silu(out) * out


def check_expert_parallel(mesh, args):
  """Forward and backward; the gradient of `x` is a sum over devices."""
  for f, reference, count in (
    (experts, plain, 3),
    (gated_experts, plain_gated, 2),
  ):
    for check_vma in (True, False):
      sharded = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(P(), *[P("d")] * (count - 1)),
        out_specs=P(),
        check_vma=check_vma,
      )
      assert_same_derivatives(sharded, reference, args[:count])


def check_partitioned_by_xla(mesh, args):
  """`jit` of sharded operands; an interpreted kernel can't be split."""
  x, w, bias = args
  w = jax.device_put(w, NamedSharding(mesh, P("d")))

  def layer(x, w, bias):
    return pallas_gemm.ragged_dot(x, w, SIZES, bias=bias, activation=jnp.tanh)

  assert_same_derivatives(layer, plain, [x, w, bias])
  x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
  try:
    pallas_gemm.ragged_dot(x, w, SIZES, implementation="sm90")
  except NotImplementedError as error:
    assert "runs on one device" in str(error)
  else:
    raise AssertionError("the kernel was partitioned")


def check_kernel_inside_of_shard_map(mesh):
  """Lowered for CUDA, ahead of time, with its gradients."""
  config = tuning.Config()

  def local(x, w):
    out = pallas_gemm.ragged_dot(
      x,
      w,
      SIZES,
      group_offset=lax.axis_index("d") * LOCAL,
      implementation="sm90",
      config=config,
    )
    return lax.psum(out, "d")

  sharded = jax.shard_map(
    local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P()
  )
  step = jax.grad(lambda *args: sharded(*args).astype("float32").sum(), (0, 1))
  x = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)
  w = jax.ShapeDtypeStruct((8, 128, 256), jnp.bfloat16)
  lowered = jax.jit(step).trace(x, w).lower(lowering_platforms=("cuda",))
  assert "mosaic_gpu" in lowered.as_text()


def assert_same_derivatives(f, reference, args):
  """Value and gradients of `f` are those of `reference`."""

  def loss(f):
    return lambda *args: (f(*args) ** 2).sum()

  wrt = tuple(range(len(args)))
  got = jax.jit(jax.value_and_grad(loss(f), wrt))(*args)
  want = jax.value_and_grad(loss(reference), wrt)(*map(_on_one_device, args))
  products.assert_same(got, want)


def _on_one_device(x):
  return jax.device_put(x, jax.devices()[0])


if __name__ == "__main__":
  main()
