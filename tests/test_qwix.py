"""Qwix's provider on our products: which run, and how far off they are."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report

E4M3 = "float8_e4m3fn"
# Qwix 0.1.8 calls what Flax gives up.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")


@pytest.fixture
def libraries():
  """flax.nnx, qwix and our module, where Qwix is installed."""
  qwix = pytest.importorskip("qwix", reason="needs qwix (the extra `qwix`)")
  nnx = pytest.importorskip("flax.nnx", reason="needs flax")
  return nnx, qwix, importlib.import_module("pallas_gemm.qwix")


@pytest.fixture
def warned(monkeypatch):
  said = []
  monkeypatch.setattr(report.logging, "warning", lambda _, x: said.append(x))
  report.reset()
  yield said
  report.reset()


def mlp(nnx, **how):
  class Mlp(nnx.Module):
    def __init__(self, rngs):
      self.up = nnx.Linear(128, 256, rngs=rngs, **how)
      self.down = nnx.Einsum("bk,kn->bn", (256, 128), rngs=rngs, **how)

    def __call__(self, x):
      return self.down(nnx.relu(self.up(x)))

  return Mlp(nnx.Rngs(0))


def normal(*shape):
  return jax.random.normal(jax.random.key(len(shape)), shape)


def of_powers(*shape, axis):
  """Numbers of e4m3 whose scales along an axis are powers of two.

  Both libraries' scales, quotients and sums are exact then.
  """
  draw = np.random.default_rng(0)
  x = draw.integers(-7, 8, shape) * 2.0 ** draw.integers(0, 4, shape)
  np.moveaxis(x, axis, 0)[0] = 448
  free = [1 if i == axis % x.ndim else n for i, n in enumerate(shape)]
  return jnp.asarray(x * 2.0 ** draw.integers(-6, 6, free), jnp.float32)


def off(x, exact):
  x, exact = (
    np.concatenate([v.ravel() for v in jax.tree.leaves(t)]) for t in (x, exact)
  )
  return np.linalg.norm(x - exact) / np.linalg.norm(exact)


def rule_of(qwix, **how):
  return qwix.QtRule(**{"weight_qtype": E4M3, "act_qtype": E4M3} | how)


@pytest.mark.parametrize("bwd", [False, True])
@pytest.mark.parametrize("tile_size", [None, 128])
@pytest.mark.parametrize("dtype", [E4M3, "int8"])
def test_an_mlp_is_of_eight_bits(libraries, warned, dtype, tile_size, bwd):
  nnx, qwix, ours = libraries
  model, x = mlp(nnx), normal(32, 128)
  rule = qwix.QtRule(
    weight_qtype=dtype,
    act_qtype=dtype,
    tile_size=tile_size,
    bwd_qtype=dtype if bwd else None,
  )

  def step(model, x):
    return nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)

  y, (_, slopes) = model(x), step(model, x)
  found = []
  for cls in (ours.QtProvider, qwix.QtProvider):
    of_8 = qwix.quantize_model(model, cls([rule]), x)
    found.append((of_8(x), nnx.jit(step)(of_8, x)[1]))
    assert off(found[-1], (y, slopes)) < (0.02 if dtype == "int8" else 0.12)
  # Not bit by bit: Qwix divides by scales that are quotients, and by 127.5 for
  # int8, and has no 128 x 128; its derivative is of what was not quantised.
  assert off(*found) < (0.03 if dtype == "int8" else 0.12)
  assert not warned


@pytest.mark.parametrize("tile_size", [None, 128])
def test_our_products_run(libraries, tile_size):
  nnx, qwix, ours = libraries
  rule = rule_of(qwix, tile_size=tile_size, bwd_qtype=E4M3)
  model = mlp(nnx, dtype=jnp.bfloat16)
  model = qwix.quantize_model(model, ours.QtProvider([rule]), normal(32, 128))
  loss = lambda x: jnp.sum(model(x).astype(jnp.float32))  # noqa: E731
  x = jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)
  found = pallas_gemm.explain(jax.grad(loss), x, platform="cuda")
  assert len(found.products) == 4
  assert all(E4M3 in p.product for p in found.products)
  assert {p.implementation for p in found.products} == {"sm90"}


def test_row_is_bit_by_bit_that_of_qwix(libraries):
  nnx, qwix, ours = libraries

  class Products(nnx.Module):
    def __call__(self, x, w, sizes):
      numbers = ((1,), (0,)), ((), ())
      y = jax.lax.dot_general(x, w[0], numbers)
      z = jnp.einsum("mk,gkn->gmn", x, w)
      return y, z, jax.lax.ragged_dot(x, w, sizes)

  # Qwix's scales of columns are those of all groups: here they are a group's.
  w = of_powers(1, 64, 40, axis=1)
  x, w = of_powers(24, 64, axis=1), jnp.concatenate([w, -w])
  args = x, w, jnp.array([9, 15])
  found = []
  for cls in (ours.QtProvider, qwix.QtProvider):
    model = qwix.quantize_model(Products(), cls([rule_of(qwix)]), *args)
    found.append(model(*args))
  for one, other in zip(*found):
    np.testing.assert_array_equal(one, other)


def test_products_of_a_derivative_inside_of_the_model_stay(libraries):
  """Of a scan they are traced while Qwix listens: 16 bits stay 16 bits."""
  nnx, qwix, ours = libraries
  x, w = normal(16, 128), normal(128, 128) / 12

  class Inner(nnx.Module):
    def __call__(self, x, w):
      once = lambda x, _: (jax.lax.dot(x, w), None)  # noqa: E731
      loss = lambda x: jnp.sum(jax.lax.scan(once, x, length=2)[0] ** 2)  # noqa: E731
      return jax.grad(loss)(x)

  model = qwix.quantize_model(Inner(), ours.QtProvider([rule_of(qwix)]), x, w)
  assert 0 < off(model(x, w), Inner()(x, w)) < 0.1


OTHERS = {
  "tile_size must be None or 128, got 64": {"tile_size": 64},
  "act_qtype, weight_qtype are": {"act_qtype": "float8_e5m2"},
  "got None": {"act_qtype": None},
  "of the kind of forward": {"bwd_qtype": "int8"},
  "has weight_calibration_method=": {"weight_calibration_method": "absmax,0.9"},
}


@pytest.mark.parametrize("reason", OTHERS)
def test_other_rules_are_left_to_qwix(libraries, warned, reason):
  nnx, qwix, ours = libraries
  model, x = mlp(nnx), normal(32, 128)
  found = []
  for cls in (ours.QtProvider, qwix.QtProvider):
    of_8 = cls([rule_of(qwix, **OTHERS[reason])])
    found.append(qwix.quantize_model(model, of_8, x)(x))
  np.testing.assert_array_equal(*found)
  (said,) = warned
  assert reason in said


def test_what_is_missing_is_said(monkeypatch):
  monkeypatch.setitem(sys.modules, "qwix", None)
  monkeypatch.delitem(sys.modules, "pallas_gemm.qwix", raising=False)
  with pytest.raises(ImportError, match="pip install qwix"):
    importlib.import_module("pallas_gemm.qwix")
