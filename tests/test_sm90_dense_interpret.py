"""Tier A: numbers of the dense Hopper kernel, in Pallas' GPU interpreter.

Rows of shared memory that nothing was loaded to hold NaN in the interpreter, so
what leaks from past an edge shows. The cases of test_sm90_dense_races are
checked there.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from tests.support import cases, dense, problems
from tests.support.cases import COLUMNS, ROWS, SMALL, SWAPPED, changed


@pytest.fixture(autouse=True)
def two_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  problems.assume_sms(monkeypatch, 2)


@pytest.mark.parametrize("name", cases.VALUES)
def test_values(name, monkeypatch):
  case = cases.VALUES[name]
  # As many SMs as blocks, where a cluster has more than two.
  problems.assume_sms(monkeypatch, max(2, case.config.blocks))
  run, check = case.prepare()
  check(run())
  plan = Plan.of(case.problem, case.config)
  assert plan.tiling.by_rows == name.startswith("row_wise")


@pytest.fixture(scope="module")
def has_interpreted():
  """A kernel has been interpreted in this process.

  The first one imports modules that add to the keys of JAX's caches.
  """
  run, _ = cases.VALUES["one_element"].prepare()
  run()


@pytest.mark.usefixtures("has_interpreted")
@pytest.mark.parametrize("name", cases.FACTORS)
def test_factors_known_at_run_time(name):
  """One trace, and so one compilation, serves all their values."""
  case = cases.FACTORS[name]
  traces = []

  @jax.jit
  def product(factors):
    traces.append(factors)
    run, _ = dataclasses.replace(case, **factors).prepare()
    return run()

  names = ("alpha", "beta") if case.problem.epilogue.c_dtype else ("alpha",)
  for values in ((-0.3, 2.7), (1.0, 0.0)):
    factors = dict(zip(names, map(jnp.float32, values)))
    outs = product(factors)
    read = {name: float(factor) for name, factor in factors.items()}
    _, check = dataclasses.replace(case, **read).prepare()
    check(outs)
  assert len(traces) == 1


@pytest.mark.parametrize("split_k", (1, 2))
@pytest.mark.parametrize("name", ("alpha", "beta"))
def test_one_factor_known_at_run_time(name, split_k):
  """The other is compiled in. The bits are those of both compiled in."""
  problem = Problem.flat(
    m=66, n=72, k=140, dtype="bfloat16", out_dtype="float32", c_dtype="float16"
  )
  x = dense.operands(problem)
  config = changed(SMALL, split_k=split_k, epilogue_n=32)
  static = dense.Epilogue(alpha=-0.5, beta=4.0)
  factor = jnp.float32(getattr(static, name))
  read = dataclasses.replace(static, **{name: factor})
  (want,), (got,) = (dense.run(problem, config, x, t) for t in (static, read))
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


def test_a_gated_product_has_no_factors():
  fields = {"dtype": "bfloat16", "out_dtype": "bfloat16", "gated": True}
  problem = Problem.flat(m=40, n=64, k=64, **fields)
  x = dense.operands(problem)
  epilogue = dense.Epilogue(activation=jax.nn.silu)
  (want,) = dense.run(problem, SMALL, x, epilogue)
  epilogue = dataclasses.replace(epilogue, alpha=jnp.float32(3))
  (got,) = dense.run(problem, SMALL, x, epilogue)
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


# NumPy, in which the interpreter computes, remarks on inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("split_k", (1, 2))
def test_nan_stays_in_its_row_and_column(split_k):
  problem = Problem.flat(
    m=70, n=64, k=128, dtype="bfloat16", out_dtype="bfloat16"
  )
  x = dense.operands(problem)
  x["a"] = x["a"].at[0, 66, 3].set(jnp.nan)
  x["b"] = x["b"].at[0, 100, 61].set(jnp.inf)
  (out,) = dense.run(problem, changed(SMALL, split_k=split_k), x)
  out = np.asarray(out[0], np.float32)
  assert np.isnan(out[66]).all()
  assert not np.isfinite(out[:, 61]).any()
  others = np.delete(np.delete(out, 66, axis=0), 61, axis=1)
  assert np.isfinite(others).all()


def test_the_config_does_not_change_the_bits():
  """Each sum is added in the order of K, whoever computes it."""
  problem = Problem.flat(
    m=66, n=64, k=140, dtype="bfloat16", out_dtype="float32"
  )
  x = dense.operands(problem)
  (want,) = dense.run(problem, SMALL, x)
  for config in (changed(ROWS, cluster_m=2), changed(COLUMNS, raster=1)):
    (got,) = dense.run(problem, config, x)
    np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


def test_swapped_operands_have_the_same_bits():
  problem = Problem.flat(
    m=66, n=72, k=140, dtype="bfloat16", out_dtype="bfloat16"
  )
  x = dense.operands(problem)
  (want,) = dense.run(problem, SMALL, x)
  (got,) = dense.run(problem, SWAPPED, x)
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want))
