"""Qwix's provider on our products: which run, and how far off they are."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report

E4M3, NUMBERS = "float8_e4m3fn", (((1,), (0,)), ((), ()))
# Qwix 0.1.8 calls what Flax gives up.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")


@pytest.fixture
def both(monkeypatch):
  """flax.nnx, a model by both providers of a rule, and what is warned of."""
  qwix = pytest.importorskip("qwix", reason="needs qwix (the extra `qwix`)")
  ours, said = importlib.import_module("pallas_gemm.qwix"), []
  monkeypatch.setattr(report.logging, "warning", lambda _, x: said.append(x))
  report.reset()

  def quantized(model, *args, **rule):
    rule = qwix.QtRule(**{"weight_qtype": E4M3, "act_qtype": E4M3} | rule)
    of = (x.QtProvider([rule]) for x in (ours, qwix))
    return [qwix.quantize_model(model, x, *args) for x in of]

  yield importlib.import_module("flax.nnx"), quantized, said
  report.reset()


def mlp(nnx, **how):
  up = nnx.Linear(128, 256, rngs=nnx.Rngs(0), **how)
  down = nnx.Einsum("bk,kn->bn", (256, 128), rngs=nnx.Rngs(1), **how)
  return nnx.Sequential(up, nnx.relu, down)


def model_of(nnx, call):
  return type("Model", (nnx.Module,), {"__call__": lambda self, *x: call(*x)})()


def normal(*shape):
  return jax.random.normal(jax.random.key(len(shape)), shape)


def of_powers(*shape):
  """Numbers of e4m3 whose scales are powers of two, along dimension 1."""
  draw = np.random.default_rng(0)
  x = draw.integers(-7, 8, shape) * 2.0 ** draw.integers(0, 4, shape)
  x[:, 0] = 448
  powers = draw.integers(-6, 6, (shape[0], 1, *shape[2:]))
  return jnp.asarray(x * 2.0**powers, jnp.float32)


def off(*pair):
  x, exact = (
    np.concatenate([*map(np.ravel, jax.tree.leaves(v))]) for v in pair
  )
  return np.linalg.norm(x - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("bwd", [False, True])
@pytest.mark.parametrize("tile_size", [None, 128])
@pytest.mark.parametrize("dtype, most", [(E4M3, 0.12), ("int8", 0.03)])
def test_an_mlp(both, dtype, most, tile_size, bwd):
  nnx, quantized, said = both
  rule = {"weight_qtype": dtype, "act_qtype": dtype, "tile_size": tile_size}
  rule["bwd_qtype"] = dtype if bwd else None
  x, of_mean = normal(32, 128), lambda m, x: jnp.mean(m(x) ** 2)
  step = nnx.jit(lambda m, x: (m(x), nnx.grad(of_mean)(m, x)))
  exact = step(mlp(nnx), x)
  found = [step(m, x) for m in quantized(mlp(nnx), x, **rule)]
  assert max(off(y, exact) for y in found) < most and not said
  # By norms: Qwix divides by scales, scales int8 to 127.5, has no 128 x 128,
  # and without bwd_qtype derives by what was not quantised.
  assert off(*found) < most


def test_our_products_run(both):
  model = mlp(both[0], dtype=jnp.bfloat16)
  ours, _ = both[1](model, normal(32, 128), bwd_qtype=E4M3)
  x = jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)
  of_sum = jax.grad(lambda x: jnp.sum(ours(x).astype(jnp.float32) ** 2))
  found = pallas_gemm.explain(of_sum, x, platform="cuda")
  assert {p.implementation for p in found.products} == {"sm90"}
  assert [E4M3 in p.product for p in found.products] == [True] * 4


def test_row_is_qwix_bit_by_bit(both):
  """Where scales, quotients and sums are exact: they are rounded otherwise."""

  def calls(x, w, sizes):
    y = jax.lax.dot_general(x, w[0], NUMBERS)
    return y, jnp.einsum("mk,gkn->gmn", x, w), jax.lax.ragged_dot(x, w, sizes)

  w = of_powers(1, 64, 40)  # Qwix's scales are those of all groups
  args = of_powers(24, 64), jnp.concatenate([w, -w]), jnp.array([9, 15])
  found = [m(*args) for m in both[1](model_of(both[0], calls), *args)]
  jax.tree.map(np.testing.assert_array_equal, *found)


def test_what_the_model_derives_and_compiles(both):
  """Qwix listens while the scan is: what we call then is not the model's."""

  def slope(x, w, dot=jax.lax.dot_general, **how):
    once = lambda x, _: (dot(x, w, NUMBERS, **how), None)  # noqa: E731
    return jax.grad(lambda x: jnp.sum(jax.lax.scan(once, x, length=2)[0]))(x)

  args = normal(16, 128), normal(128, 128) / 12
  ours, _ = both[1](model_of(both[0], slope), *args)
  how = {"quantize": pallas_gemm.Recipe(gradient=None, scaling="row")}
  wanted = slope(*args, dot=pallas_gemm.dot_general, **how)
  np.testing.assert_array_equal(ours(*args), wanted)


@pytest.mark.parametrize(
  "said, rule",
  [
    ("tile_size must be None or 128, got 64", {"tile_size": 64}),
    ("weight_qtype are (", {"act_qtype": "float8_e5m2"}),
    ("of the kind of forward", {"bwd_qtype": "int8"}),
    ("has act_calibration_method=", {"act_calibration_method": "absmax,0.9"}),
  ],
)
def test_other_rules_are_left_to_qwix(both, said, rule):
  x = normal(32, 128)
  found = [m(x) for m in both[1](mlp(both[0]), x, **rule)]
  np.testing.assert_array_equal(*found)
  assert len(both[2]) == 1 and said in both[2][0]


def test_what_is_missing_is_said(monkeypatch):
  monkeypatch.setitem(sys.modules, "qwix", None)
  monkeypatch.delitem(sys.modules, "pallas_gemm.qwix", raising=False)
  with pytest.raises(ImportError, match="pip install qwix"):
    importlib.import_module("pallas_gemm.qwix")
