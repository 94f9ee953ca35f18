"""Operands in the host's memory, as JAX has it."""

import itertools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report
from tests.support.products import normal

KINDS = "device", "pinned_host", "unpinned_host"
NUMBERS = (((1,), (0,)), ((), ()))
A, B, C, BIAS = normal(4, 6), normal(6, 8), normal(4, 8), normal(8)


def put(x, kind):
  """An array in that memory."""
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.device_put(x, one.with_memory_kind(kind))


def _added(a, b, bias, c):
  return pallas_gemm.matmul(a, b, bias=bias, c=c, alpha=2, beta=jnp.float32(3))


def _scaled(a, b, x):
  return pallas_gemm.matmul(a, b, alpha=x, activation=jnp.tanh)


# Each op, the same in jnp, and what both are called with.
DENSE = {
  "matmul": (pallas_gemm.matmul, jnp.matmul, (A, B)),
  "added": (
    _added,
    lambda a, b, v, c: 2 * (a @ b) + 3 * c + v,
    (A, B, BIAS, C),
  ),
  "scaled": (
    _scaled,
    lambda a, b, x: jnp.tanh(x * (a @ b)),
    (A, B, jnp.float32(0.1)),
  ),
  "only c": (
    lambda a, b, c: pallas_gemm.matmul(a, b, c=c, alpha=0),
    lambda a, b, c: 0 * (a @ b) + c,
    (A, B, C),
  ),
  "gated": (
    lambda a, b: pallas_gemm.gated_matmul(a, b, 2 * b),
    lambda a, b: jax.nn.silu(a @ b) * (a @ (2 * b)),
    (A, B),
  ),
  "dot_general": (
    lambda a, b: pallas_gemm.dot_general(a, b, NUMBERS),
    lambda a, b: lax.dot_general(a, b, NUMBERS),
    (A, B),
  ),
  "vmap": (
    lambda a, b: jax.vmap(pallas_gemm.matmul, (0, None))(a, b),
    jnp.matmul,
    (A, B),
  ),
}


def outcome(f, *args):
  """Where the result is, or the class of the error."""
  try:
    out = f(*args)
  except Exception as error:
    return type(error), None
  return out.sharding.memory_kind, np.asarray(out)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", DENSE)
def test_results_lie_where_jnp_has_them(name, dtype):
  """Of each combination of operands, or the same error."""
  ours, plain, args = DENSE[name]
  for kinds in itertools.product(KINDS, repeat=2):
    of = kinds + kinds[1:] * len(args)
    given = [put(x.astype(dtype), kind) for x, kind in zip(args, of)]
    want, values = outcome(plain, *given)
    for f in (ours, jax.jit(ours)):
      where, out = outcome(f, *given)
      assert where == want, kinds
      if out is not None and dtype == "float32":
        np.testing.assert_allclose(out, values, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", [x for x in DENSE if x != "only c"])
def test_cotangents_lie_where_operands_do(name):
  ours, plain, args = DENSE[name]
  args = [put(x, "pinned_host") for x in args]
  found = [jax.vjp(f, *args)[1](plain(*args)) for f in (ours, plain)]
  for got, want in zip(*found):
    assert jax.typeof(got).memory_space == jax.typeof(want).memory_space
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", ("a", "b", "bias", "c"))
def test_the_odd_one_is_named(name):
  x = {"a": A, "b": B, "bias": BIAS, "c": C}
  x[name] = put(x[name], "pinned_host")
  odd = "b must lie in host memory like a, got device"
  if name != "a":
    odd = f"{name} must lie in device memory like a, got host"
  with pytest.raises(ValueError, match=odd):
    pallas_gemm.matmul(**x)
  with pytest.raises(ValueError, match="w_up must lie in device memory like x"):
    pallas_gemm.gated_matmul(A, B, put(B, "pinned_host"))
  with pytest.raises(
    ValueError, match="rhs must lie in device memory like lhs"
  ):
    pallas_gemm.dot_general(A, put(B, "pinned_host"), NUMBERS)


def test_groups_lie_on_the_device():
  """`lax.ragged_dot` raises too, of whatever is in the host's memory."""
  x = {"lhs": A, "rhs": jnp.stack([B, B]), "group_sizes": jnp.array([1, 3])}
  bias, numbers = (
    jnp.stack([BIAS] * 2),
    lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,)),
  )
  for names in (["lhs"], ["rhs"], ["group_sizes"], [*x]):
    given = x | {name: put(x[name], "pinned_host") for name in names}
    with pytest.raises(ValueError):
      lax.ragged_dot(**given)
    message = f"{names[0]} must lie in device memory in a grouped product"
    with pytest.raises(ValueError, match=message):
      pallas_gemm.ragged_dot(**given)
    with pytest.raises(ValueError, match=message):
      pallas_gemm.ragged_dot_general(
        **given, ragged_dot_dimension_numbers=numbers
      )
    with pytest.raises(ValueError, match="must lie in device memory"):
      lhs, rhs, sizes = given.values()
      pallas_gemm.gated_ragged_dot(lhs, rhs, rhs, sizes)
  for name, value in (("bias", bias), ("group_offset", jnp.array([0]))):
    with pytest.raises(ValueError, match=f"{name} must lie in device memory"):
      pallas_gemm.ragged_dot(**x, **{name: put(value, "pinned_host")})


def test_no_kernel_reads_the_hosts_memory(monkeypatch):
  """XLA's product with a warning; of "sm90" alone an error with the reason."""
  warned = []
  monkeypatch.setattr(report, "warn_once", warned.append)
  x = put(normal(256, 256, dtype="bfloat16"), "pinned_host")
  lowered = jax.jit(pallas_gemm.matmul).trace(x, x)
  text = lowered.lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" not in text
  assert ["lie in the host's memory" in text for text in warned] == [True]
  for names in ("sm90", "triton"):
    with pytest.raises(NotImplementedError, match="lie in the host's memory"):
      pallas_gemm.matmul(x, x, implementation=names)
  out = pallas_gemm.matmul(x, x, implementation=("sm90", "xla"))
  assert out.sharding.memory_kind == "pinned_host"


def test_a_kernel_reads_what_was_brought():
  """Weights that a layer fetches inside of jit are the device's."""
  x = normal(256, 256, dtype="bfloat16")

  def layer(x, w):
    return pallas_gemm.matmul(x, jax.device_put(w, jax.memory.Space.Device))

  traced = jax.jit(layer).trace(x, put(x, "pinned_host"))
  assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
