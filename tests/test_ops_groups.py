"""The loop of a grouped product that no kernel takes, and when it runs."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import hardware
from pallas_gemm.ops import xla_groups
from tests.support import ops, ragged
from tests.support.products import normal

x64 = ops.x64


def tiles_of(monkeypatch, rows: int) -> None:
  """The loop runs over tiles of so many rows, whatever the rule says."""
  choose = lambda x, spec: xla_groups.Tiles(rows)  # noqa: E731
  monkeypatch.setattr(xla_groups, "choose", choose)
  jax.clear_caches()


def check(case: ragged.Case, seed: int = 0) -> None:
  """Values and gradients."""
  x = case.operands(seed)
  ct = normal(case.m, case.n, dtype=case.out_dtype or case.dtype, seed=seed)

  @jax.jit
  def step(x):
    out, pullback = jax.vjp(case, x)
    return out, pullback(ct)[0]

  out, gradients = step(x)
  case.assert_right(out, x)
  case.assert_gradients(gradients, ct, x)


@pytest.mark.parametrize("seed", range(15))
def test_values_and_gradients_of_random_splits(seed, monkeypatch):
  """Empty groups, sums above and below M, groups smaller than a tile."""
  tiles_of(monkeypatch, (1, 4, 16)[seed % 3])
  check(ragged.draw(seed, sizes_dtype="int32"), seed)


EDGES = {
  "one group": ((9,), 9),
  "one has all": ((0, 20, 0, 0), 20),
  "the last has all": ((0, 0, 20), 20),
  "all are empty": ((0, 0), 5),
  "a row each": ((1,) * 7, 7),
  "more than M": ((9, 9, 9), 13),
  "no rows": ((3, 2), 0),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("k", (0, 5))
def test_edges(edge, k, monkeypatch):
  tiles_of(monkeypatch, 4)
  sizes, m = EDGES[edge]
  check(ragged.Case(m=m, n=6, k=k, sizes=sizes, bias=True))


def test_float64(x64, monkeypatch):
  del x64
  tiles_of(monkeypatch, 4)
  rng = np.random.default_rng(0)
  a, b = rng.standard_normal((11, 3)), rng.standard_normal((4, 3, 5))

  def of(f):
    f = functools.partial(f, group_sizes=ops.SIZES)
    gradients = jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2), (0, 1))
    return f(a, b), *gradients(a, b)

  for got, want in zip(of(pallas_gemm.ragged_dot), of(ragged.plain)):
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", (2, 8))
def test_a_nan_stays_in_its_group(rows, monkeypatch):
  """In weights, and along K in rows; in rows of no group it is not read."""
  tiles_of(monkeypatch, rows)
  sizes = jnp.array([3, 5, 0, 4])
  a, b = normal(14, 6), normal(4, 6, 7)
  out = pallas_gemm.ragged_dot(a, b.at[1].set(jnp.nan), sizes)
  bad = np.isnan(out).any(1)
  assert bad[3:8].all() and bad.sum() == 5
  for row, groups in ((4, [1]), (13, [])):
    bad = a.at[row].set(jnp.nan)
    out = pallas_gemm.ragged_dot_general(bad, normal(14, 7), sizes, ops.SUMS)
    assert np.flatnonzero(np.isnan(out).any((1, 2))).tolist() == groups


def test_vmap_of_sizes(monkeypatch):
  tiles_of(monkeypatch, 4)
  a, b = normal(2, 9, 5), normal(3, 5, 4)
  sizes = jnp.array([[4, 0, 5], [1, 6, 1]])
  got = jax.vmap(pallas_gemm.ragged_dot, (0, None, 0))(a, b, sizes)
  want = [ragged.plain(*one) for one in zip(a, (b, b), sizes)]
  np.testing.assert_allclose(got, np.stack(want), rtol=1e-5, atol=1e-5)


def compiled(f, *shapes, dtype="float32"):
  arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  sizes = jax.ShapeDtypeStruct(arrays[1].shape[:1], "int32")
  return jax.jit(f).lower(*arrays, sizes).compile().memory_analysis()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(
  ("m", "n", "k", "groups"),
  ((2048, 1024, 512, 8), (512, 64, 64, 64), (64, 512, 256, 32)),
)
def test_it_takes_no_more_memory_than_lax(m, n, k, groups, dtype):
  found = [
    compiled(op, (m, k), (groups, k, n), dtype=dtype).temp_size_in_bytes
    for op in (pallas_gemm.ragged_dot, lax.ragged_dot)
  ]
  assert found[0] <= found[1], found


def test_many_groups_fit():
  """Of which `lax.ragged_dot` makes 481 GB."""
  shapes = (131072, 7168), (256, 7168, 1024)
  memory = compiled(pallas_gemm.ragged_dot, *shapes, dtype="bfloat16")
  assert memory.temp_size_in_bytes <= 4e9


RULES = {
  "large groups": ((8192, 14336, 4096, 8), "a loop over tiles of "),
  "few rows a group": ((64, 2048, 1024, 64), None),
}


@pytest.mark.parametrize("name", RULES)
def test_what_the_rule_says_on_a_gpu(name, capsys):
  (m, n, k, groups), says = RULES[name]
  shapes = (m, k), (groups, k, n)
  arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
  sizes = jax.ShapeDtypeStruct((groups,), "int32")
  with hardware.assume("A100-SXM4-80GB"):
    found = pallas_gemm.explain(
      pallas_gemm.ragged_dot, *arrays, sizes, platform="cuda"
    )
  (ran,) = found.products
  assert ran.implementation == "xla"
  if says is None:
    assert ran.config is None
    return
  assert f"  {says}{ran.config.rows} rows, by the cost model" in (
    capsys.readouterr().out
  )
