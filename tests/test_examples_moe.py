"""The mixture-of-experts example: values, derivatives, the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import moe, sharded_moe
from experiments.harness import ragged_cases
from pallas_gemm import numerics
from tests.support import programs

SIZES = {"features": 24, "hidden": 40, "experts": 5}


def drawn(tokens=33, dtype=jnp.bfloat16, **sizes):
  params = moe.init(jax.random.key(0), **SIZES | sizes, dtype=dtype)
  shape = tokens, params.router.shape[0]
  return params, jax.random.normal(jax.random.key(1), shape, dtype)


def checked(out, params, x, top_k):
  """`out` against float64, by its error bound."""
  experts, features, hidden = params.gate.shape
  case = ragged_cases.Case(
    suite="test",
    pass_="layer",
    m=x.shape[0] * top_k,
    n=hidden,
    k=features,
    groups=experts,
    dtype=x.dtype.name,
    top_k=top_k,
  )
  return case.check(out, {"params": params, "x": x})


@pytest.mark.parametrize(
  "top_k, dtype", [(1, "float16"), (2, "bfloat16"), (5, "bfloat16")]
)
def test_layer(top_k, dtype):
  params, x = drawn(dtype=dtype)
  out = jax.jit(moe.layer, static_argnames="top_k")(params, x, top_k=top_k)
  assert out.shape == x.shape and out.dtype == dtype
  check = checked(out, params, x, top_k)
  assert check.passed and check.checked > 0, check
  assert not checked(jnp.roll(out, 1, axis=0), params, x, top_k).passed


def test_what_takes_the_place_of_the_ops_gives_the_same():
  """And a token of its own the same row."""
  params, x = drawn()
  alone = moe.layer(params, x[7:8], top_k=2)
  assert checked(alone, params, x[7:8], 2).passed
  dot = jax.lax.ragged_dot
  out = moe.layer(params, x, top_k=2, dot=dot, gated_dot=moe.gated(dot))
  assert checked(out, params, x, 2).passed


def test_the_weights_of_a_token_add_up_to_one():
  params, x = drawn()
  weights, experts = moe.route(params.router, x, 3)
  # Sums of 3 float32 numbers, each rounded once or twice.
  np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=8 * 2.0**-24)
  assert (np.asarray(weights) > 0).all()
  assert all(len(set(row)) == 3 for row in np.asarray(experts).tolist())


def test_derivatives_are_those_of_every_expert_on_every_token():
  params, x = drawn(tokens=9, dtype=jnp.float32)

  @jax.jit
  def slopes(params, x):
    def of(layer):
      def total(*args):
        return jnp.sum(jnp.sin(layer(*args, top_k=2)))

      return jax.grad(total, argnums=(0, 1))(params, x)

    return of(moe.layer), of(moe.reference)

  for got, want in zip(*map(jax.tree.leaves, slopes(params, x)), strict=True):
    assert got.shape == want.shape and float(jnp.abs(want).max()) > 0
    # Four products, one after the other, of sums of at most 45 terms; both
    # ways are off.
    roundings = 2 * 4 * 45
    limit = numerics.gamma(roundings, 2.0**-24) * float(jnp.abs(want).max())
    assert float(jnp.abs(got - want).max()) <= limit


def test_training_lowers_the_loss(capsys):
  assert moe.main(["--steps=3", "--tokens=16", "--features=8"]) == 0
  first, *lines = capsys.readouterr().out.splitlines()
  assert first.startswith("PASSED: relative distance")
  losses = [float(line.rpartition(" ")[2]) for line in lines]
  assert len(losses) == 3 and losses == sorted(losses, reverse=True)


def test_a_wrong_layer_is_told(monkeypatch, capsys):
  real = moe.layer
  monkeypatch.setattr(
    moe, "layer", lambda *args, **kwargs: 1.1 * real(*args, **kwargs)
  )
  assert moe.main(["--steps=0", "--tokens=16", "--features=8"]) == 1
  assert "FAILED: relative distance" in capsys.readouterr().out


def test_help():
  status, out, err = programs.start("examples.moe", "--help")
  assert (status, err) == (0, "")
  assert "--top_k" in out and "python -m examples.moe" in out


@pytest.mark.parametrize("program", (moe, sharded_moe))
def test_more_experts_of_a_token_than_there_are(program, capsys):
  with pytest.raises(SystemExit) as caught:
    program.main(["--top_k=5"])
  assert caught.value.code == 2
  assert "--top_k must be from 1 to --experts=4" in capsys.readouterr().err
