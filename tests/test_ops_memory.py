"""Operands in the host's memory, as JAX has it."""

import itertools

import jax
from jax import lax
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report
from tests.support import ops
from tests.support.mistakes import CALLS
from tests.support.products import normal

KINDS = "device", "pinned_host", "unpinned_host"
# Dense products, and two more.
DENSE = {x: ops.EVERY[x] for x in ops.EVERY if "ragged" not in x} | {
  "only c": ops.Op(
    lambda a, b, c: pallas_gemm.matmul(a, b, c=c, alpha=0),
    lambda a, b, c: 0 * (a @ b) + c,
    ("mk", "kn", "mn"),
  ),
  "only a number": ops.Op(
    lambda a, b: pallas_gemm.matmul(a, b, bias=2.0, alpha=0),
    lambda a, b: 0 * (a @ b) + 2.0,
    ("mk", "kn"),
  ),
  "vmap": ops.MATMUL._replace(ours=jax.vmap(ops.dense, (0, None))),
}


def put(x, kind):
  """An array in that memory."""
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.device_put(x, one.with_memory_kind(kind))


def outcome(f, *args):
  """Where the result is, or the class of the error."""
  try:
    out = f(*args)
  except Exception as error:
    return type(error), None
  return out.sharding.memory_kind, np.asarray(out)


@ops.each(DENSE)
def test_results_lie_where_jnp_has_them(op):
  """Of each combination of operands, or the same error."""
  for i, kinds in enumerate(itertools.product(KINDS, repeat=2)):
    args = op.args(dtype=("float32", "bfloat16")[i % 2])
    of = kinds + kinds[1:] * len(args)
    given = [put(x, kind) for x, kind in zip(args, of)]
    want, values = outcome(op.plain, *given)
    for f in (op.ours, jax.jit(op.ours)):
      where, out = outcome(f, *given)
      assert where == want, kinds
      if out is not None and args[0].dtype == "float32":
        np.testing.assert_allclose(out, values, rtol=2e-5, atol=1e-5)


@ops.each({name: op for name, op in DENSE.items() if "only" not in name})
def test_cotangents_lie_where_operands_do(op):
  args = [put(x, "pinned_host") for x in op.args(dtype="float32")]
  found = [jax.vjp(f, *args)[1](op.plain(*args)) for f in op[:2]]
  for got, want in zip(*found):
    assert jax.typeof(got).memory_space == jax.typeof(want).memory_space
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("op", "name", "words"),
  (
    ("matmul", "a", "b must lie in host memory like a, got device"),
    *(
      (op, name, f"{name} must lie in device memory like {first}, got host")
      for op, first, names in (
        ("matmul", "a", ("b", "bias", "c")),
        ("gated_matmul", "x", ("w_gate", "w_up")),
        ("dot_general", "lhs", ("rhs",)),
      )
      for name in names
    ),
    # `lax.ragged_dot` raises too, of whatever is in the host's memory.
    *(
      (op, name, f"{name} must lie in device memory in a grouped product")
      for op in CALLS
      if "ragged" in op
      for name in CALLS[op]
      if "numbers" not in name
    ),
  ),
)
def test_the_odd_one_is_named(op, name, words):
  given = CALLS[op] | {name: put(CALLS[op][name], "pinned_host")}
  with pytest.raises(ValueError, match=words):
    getattr(pallas_gemm, op)(**given)
  if op == "ragged_dot" and name in ("lhs", "rhs", "group_sizes"):
    x = {k: given[k] for k in ("lhs", "rhs", "group_sizes")}
    with pytest.raises(ValueError):
      lax.ragged_dot(**x)


def test_no_kernel_reads_the_hosts_memory(monkeypatch):
  """XLA's product with a warning; of "sm90" alone an error with the reason."""
  warned = []
  monkeypatch.setattr(report, "warn_once", warned.append)
  x = put(normal(256, 256, dtype="bfloat16"), "pinned_host")
  assert "mosaic_gpu" not in ops.lowered(pallas_gemm.matmul, x, x)
  assert ["lie in the host's memory" in text for text in warned] == [True]
  for names in ("sm90", "triton"):
    with pytest.raises(NotImplementedError, match="lie in the host's memory"):
      pallas_gemm.matmul(x, x, implementation=names)
  out = pallas_gemm.matmul(x, x, implementation=("sm90", "xla"))
  assert out.sharding.memory_kind == "pinned_host"


def test_a_kernel_reads_what_a_layer_fetches():
  """Weights that are copied inside of jit are the device's."""
  x = normal(256, 256, dtype="bfloat16")

  def layer(x, w):
    return pallas_gemm.matmul(x, jax.device_put(w, jax.memory.Space.Device))

  assert "mosaic_gpu" in ops.lowered(layer, x, put(x, "pinned_host"))
