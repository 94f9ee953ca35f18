"""Tier D: the rungs on an NVIDIA GPU of compute capability 9.0."""

import jax
import numpy as np
import pytest

from experiments.harness import inputs, shapes
from pallas_gemm import numerics
from pallas_gemm.ladder import LADDER, contract, with_variants
from tests.support import problems

pytestmark = pytest.mark.gpu

each_rung = pytest.mark.parametrize(
  "rung", with_variants(), ids=lambda r: r.name
)
SHAPES = (
  shapes.suite("edges") + shapes.suite("primes") + shapes.suite("past_tiles")
)


def _run(rung, shape, dtype, *, alpha=1.0, beta=0.0, config=None, seed=0):
  problem = contract.Gemm(*shape, dtype, alpha, beta)
  a, b, c = inputs.operands(problem, seed)

  @jax.jit
  def gemm(a, b, c):
    return rung.gemm(a, b, c, alpha=alpha, beta=beta, config=config)

  out = gemm(a, b, c)
  check = numerics.check(out, a, b, c, alpha=alpha, beta=beta, sample=256)
  assert check.passed, (shape, dtype, check)
  return gemm, (a, b, c), out


@each_rung
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(rung, shape):
  for dtype in rung.dtypes:
    _run(rung, shape, dtype, seed=sum(shape))


@each_rung
@pytest.mark.parametrize("factors", problems.FACTORS, ids=str)
def test_alpha_and_beta(rung, factors):
  alpha, beta = factors
  _run(rung, (257, 385, 129), rung.dtypes[-1], alpha=alpha, beta=beta)


@pytest.mark.parametrize("rung", LADDER[1:], ids=lambda r: r.name)
def test_large_and_odd(rung):
  _run(rung, (4095, 4095, 4095), rung.dtypes[0])


@each_rung
def test_random_shapes(rung):
  rng = np.random.default_rng(rung.number)
  for _ in range(10):
    shape = tuple(int(x) for x in rng.integers(1, 400, 3))
    _run(rung, shape, rung.dtypes[0], alpha=-1.5, beta=0.5, seed=shape[0])


@each_rung
def test_small_configs(rung):
  shape = (200, 264, 200)
  problem = contract.Gemm(*shape, rung.dtypes[0], beta=1.0)
  for config in problems.small_configs(rung, problem):
    _run(rung, shape, rung.dtypes[0], beta=1.0, config=config)


@each_rung
def test_the_same_bits_every_time(rung):
  for shape in ((1000, 777, 513), (2048, 2048, 512)):
    gemm, operands, first = _run(rung, shape, rung.dtypes[0])
    for _ in range(20):
      again = gemm(*operands)
      np.testing.assert_array_equal(problems.bits(again), problems.bits(first))


@each_rung
def test_beta_of_zero_does_not_read_c(rung):
  a, b, c = inputs.operands(
    contract.Gemm(130, 70, 90, rung.dtypes[0], beta=1.0), 0
  )
  out = jax.jit(lambda a, b, c: rung.gemm(a, b, c))(a, b, c * np.nan)
  assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("rung", LADDER[:8], ids=lambda r: r.name)
def test_fp32_rungs_agree_to_the_bit(rung):
  """All of them add products in the order of k, one FMA each."""
  shape = (257, 129, 300)
  _, operands, out = _run(rung, shape, "float32")
  expected = jax.jit(lambda a, b, c: LADDER[1].gemm(a, b, c))(*operands)
  np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
