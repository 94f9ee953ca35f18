"""Qwix's provider on our products: which run, and how far off they are."""

import importlib
import sys

from absl import logging
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm

E4M3, NUMBERS = "float8_e4m3fn", (((1,), (0,)), ((), ()))
NO_RECIPE = {"tile_size": 64, "act_qtype": None, "bwd_qtype": "int8"}
# Qwix 0.1.8 calls what Flax gives up.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")


@pytest.fixture
def both(monkeypatch):
  """flax.nnx, a model by both providers of a rule, and what is warned of."""
  qwix = pytest.importorskip("qwix", reason="needs qwix (the extra `qwix`)")
  ours, said = importlib.import_module("pallas_gemm.qwix"), []
  monkeypatch.setattr(pallas_gemm.report, "_said", set())
  monkeypatch.setattr(logging, "warning", lambda _, x: said.append(x))

  def quantized(model, *args, dtype=E4M3, **rule):
    rule = qwix.QtRule(**{"weight_qtype": dtype, "act_qtype": dtype} | rule)
    of = (x.QtProvider([rule]) for x in (ours, qwix))
    return [qwix.quantize_model(model, x, *args) for x in of]

  return importlib.import_module("flax.nnx"), quantized, said


def mlp(nnx, **how):
  up = nnx.Linear(128, 256, rngs=nnx.Rngs(0), **how)
  down = nnx.Einsum("bk,kn->bn", (256, 128), rngs=nnx.Rngs(1), **how)
  return nnx.Sequential(up, nnx.relu, down)


def normal(*shape):
  return jax.random.normal(jax.random.key(len(shape)), shape)


def of_powers(*shape):
  """Numbers of e4m3 whose scales are powers of two, along dimension 1."""
  draw = np.random.default_rng(0).integers
  x = draw(-7, 8, shape) * 2.0 ** draw(0, 4, shape)
  x[:, 0] = 448
  return jnp.asarray(x * 2.0 ** draw(-6, 6, (shape[0], 1, *shape[2:])))


@pytest.mark.parametrize("bwd", [False, True])
@pytest.mark.parametrize("tile_size", [None, 128])
@pytest.mark.parametrize("dtype, most", [(E4M3, 0.12), ("int8", 0.03)])
def test_an_mlp(both, dtype, most, tile_size, bwd):
  nnx, quantized, said = both
  rule = {"tile_size": tile_size, "bwd_qtype": dtype if bwd else None}
  x, of_mean = normal(32, 128), lambda m, x: jnp.mean(m(x) ** 2)
  step = nnx.jit(lambda m, x: (m(x), nnx.grad(of_mean)(m, x)))
  models = mlp(nnx), *quantized(mlp(nnx), x, dtype=dtype, **rule)
  exact, ours, own = (ravel_pytree(step(m, x))[0] for m in models)
  # By norms: Qwix divides by scales, scales int8 to 127.5, has no 128 x 128,
  # and without bwd_qtype derives by what was not quantised.
  for off in (ours - exact, own - exact, ours - own):
    assert jnp.linalg.norm(off) < most * jnp.linalg.norm(exact) and not said


def test_our_products_run(both):
  model = mlp(both[0], dtype=jnp.bfloat16)
  ours, _ = both[1](model, normal(32, 128), bwd_qtype=E4M3)
  x = jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)
  of_sum = jax.grad(lambda x: jnp.sum(ours(x).astype(jnp.float32) ** 2))
  found = pallas_gemm.explain(of_sum, x, platform="cuda")
  assert {p.implementation for p in found.products} == {"sm90"}
  assert [E4M3 in p.product for p in found.products] == [True] * 4


def test_row_is_qwix_bit_by_bit(both):
  # Where scales, quotients and sums are exact: they are rounded otherwise.
  def calls(x, w, sizes):
    y = jax.lax.dot_general(x, w[0], NUMBERS)
    return y, jnp.einsum("mk,gkn->gmn", x, w), jax.lax.ragged_dot(x, w, sizes)

  w = of_powers(1, 64, 40)  # Qwix's scales are those of all groups
  args = of_powers(24, 64), jnp.concatenate([w, -w]), jnp.array([9, 15])
  model = type("M", (both[0].Module,), {"__call__": lambda self, *x: calls(*x)})
  found = [m(*args) for m in both[1](model(), *args)]
  jax.tree.map(np.testing.assert_array_equal, *found)


def test_what_the_model_derives_and_compiles(both):
  # Qwix listens while the scan is: what we call then is not the model's.
  def slope(x, w, dot=jax.lax.dot_general, **how):
    once = lambda x, _: (dot(x, w, NUMBERS, **how), None)  # noqa: E731
    return jax.grad(lambda x: jnp.sum(jax.lax.scan(once, x, length=2)[0]))(x)

  args = normal(16, 128), normal(128, 128) / 12
  model = type("M", (both[0].Module,), {"__call__": lambda self, *x: slope(*x)})
  ours, _ = both[1](model(), *args)
  how = {"quantize": pallas_gemm.Recipe(gradient=None, scaling="row")}
  wanted = slope(*args, dot=pallas_gemm.dot_general, **how)
  np.testing.assert_array_equal(ours(*args), wanted)


@pytest.mark.parametrize("name", NO_RECIPE)
def test_other_rules_are_left_to_qwix(both, name):
  x = normal(32, 128)
  found = [m(x) for m in both[1](mlp(both[0]), x, **{name: NO_RECIPE[name]})]
  np.testing.assert_array_equal(*found)
  assert len(both[2]) == 1 and name in both[2][0]


def test_what_is_missing_is_said(monkeypatch):
  monkeypatch.setitem(sys.modules, "qwix", None)
  monkeypatch.delitem(sys.modules, "pallas_gemm.qwix", raising=False)
  with pytest.raises(ImportError, match="pip install qwix"):
    importlib.import_module("pallas_gemm.qwix")
