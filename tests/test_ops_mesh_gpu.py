"""Tier D: the ops on a mesh of two GPUs or more, Explicit and Auto.

python -m pytest -m gpu tests/test_ops_mesh_gpu.py
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import pallas_gemm
from tests.support import products
from tests.support.products import normal

pytestmark = pytest.mark.gpu

M, K, N, G = 512, 1024, 768, 8
SIZES = np.array([100, 0, 61, 3, 200, 84, 40, 20], np.int32)  # 4 in none
_NO = P(None, None)


@pytest.fixture(name="mesh", params=("Explicit", "Auto"))
def _mesh(request):
  if jax.device_count() < 2:
    pytest.skip(f"needs two GPUs, JAX sees {jax.device_count()}")
  kind = getattr(AxisType, request.param)
  mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(kind,))
  with jax.set_mesh(mesh):
    yield mesh


def put(mesh, value, spec):
  return jax.device_put(value, NamedSharding(mesh, spec))


def runs_on_the_kernel(fn, *args):
  """Every product of the compiled function does."""
  found = pallas_gemm.explain(fn, *args)
  assert found.products
  assert {ran.implementation for ran in found.products} == {"sm90"}, found


CASES = {
  "rows": (P("x", None), _NO, None),
  "columns": (_NO, P(None, "x"), None),
  "K": (P(None, "x"), P("x", None), P(None, None)),
  "K, scattered": (P(None, "x"), P("x", None), P("x", None)),
  "fsdp": (P("x", None), P("x", None), None),
}


@pytest.mark.parametrize("reduce_dtype", (None, "bfloat16"))
@pytest.mark.parametrize("name", CASES)
def test_matmul(mesh, name, reduce_dtype):
  at_a, at_b, out_sharding = CASES[name]
  a, b = normal(M, K, dtype="bfloat16"), normal(K, N, dtype="bfloat16", seed=1)
  bias = normal(N, seed=2)
  if mesh.axis_types[0] == AxisType.Auto:
    out_sharding = None

  def f(a, b, bias):
    return pallas_gemm.matmul(
      a,
      b,
      bias=bias,
      activation=jax.nn.relu,
      out_sharding=out_sharding,
      reduce_dtype=reduce_dtype,
    )

  args = put(mesh, a, at_a), put(mesh, b, at_b), put(mesh, bias, P(None))
  if name == "columns":
    args = *args[:2], put(mesh, bias, P("x"))
  runs_on_the_kernel(f, *args)
  out = jax.jit(f)(*args)
  reduced = reduce_dtype and (reduce_dtype, jax.device_count())
  how = {"bias": bias, "activation": jax.nn.relu, "reduced": reduced}
  products.assert_product(out, a, b, **how)


@pytest.mark.parametrize("name", CASES)
def test_gradients(mesh, name):
  at_a, at_b, out_sharding = CASES[name]
  a, b = normal(M, K, dtype="bfloat16"), normal(K, N, dtype="bfloat16", seed=1)
  ct = normal(M, N, dtype="bfloat16", seed=2)
  if mesh.axis_types[0] == AxisType.Auto:
    out_sharding = None
  f = functools.partial(pallas_gemm.matmul, out_sharding=out_sharding)
  args = put(mesh, a, at_a), put(mesh, b, at_b)
  at = jax.jit(f)(*args).sharding.spec

  def pullback(a, b, ct):
    return jax.vjp(f, a, b)[1](ct)

  args = *args, put(mesh, ct, at)
  runs_on_the_kernel(pullback, *args)
  d_a, d_b = jax.jit(pullback)(*args)
  products.assert_product(d_a, ct, b.T)
  products.assert_product(d_b, a.T, ct)


def test_sequences_and_gates(mesh):
  """[B, S, K] sharded along S; nothing is gathered."""
  x = normal(4, 256, K, dtype="bfloat16")
  gate = (normal(K, N, seed=1) * K**-0.5).astype("bfloat16")
  up = (normal(K, N, seed=2) * K**-0.5).astype("bfloat16")
  args = put(mesh, x, P(None, "x", None)), put(mesh, gate, _NO)
  args = *args, put(mesh, up, _NO)
  runs_on_the_kernel(pallas_gemm.gated_matmul, *args)
  compiled = jax.jit(pallas_gemm.gated_matmul).lower(*args).compile()
  assert "all-gather" not in compiled.as_text()
  products.assert_gated(compiled(*args), x, gate, up, jax.nn.silu)


GROUPED = {
  "rows": (P("x", None), P(None, None, None)),
  "N": (_NO, P(None, None, "x")),
  "experts": (_NO, P("x", None, None)),
  "rows and experts": (P("x", None), P("x", None, None)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups(mesh, name):
  at_lhs, at_rhs = GROUPED[name]
  lhs = normal(M, K, dtype="bfloat16")
  rhs = normal(G, K, N, dtype="bfloat16", seed=1)
  ct = normal(M, N, dtype="bfloat16", seed=2)
  f = lambda lhs, rhs: pallas_gemm.ragged_dot(lhs, rhs, SIZES)  # noqa: E731
  args = put(mesh, lhs, at_lhs), put(mesh, rhs, at_rhs)
  runs_on_the_kernel(f, *args)
  out = jax.jit(f)(*args)
  ct = put(mesh, ct, out.sharding.spec)
  pullback = jax.jit(lambda lhs, rhs, ct: jax.vjp(f, lhs, rhs)[1](ct))
  d_lhs, d_rhs = pullback(*args, ct)
  ends = np.cumsum(SIZES)
  for group, (start, end) in enumerate(zip(ends - SIZES, ends)):
    rows = slice(start, end)
    if start == end:
      assert not np.asarray(d_rhs, np.float32)[group].any()
      continue
    own = [np.asarray(v)[rows] for v in (out, d_lhs, lhs, ct)]
    own_out, own_d, own_lhs, own_ct = map(jnp.asarray, own)
    w = jnp.asarray(np.asarray(rhs)[group])
    products.assert_product(own_out, own_lhs, w)
    products.assert_product(own_d, own_ct, w.T)
    d_w = jnp.asarray(np.asarray(d_rhs)[group])
    products.assert_product(d_w, own_lhs.T, own_ct)
  assert not np.asarray(out, np.float32)[ends[-1] :].any()
