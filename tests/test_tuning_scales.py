"""autotune of products with scales: its trials, by the interpreted kernel."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import autotuning, tuning
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import trial
from tests.support.products import normal

pytestmark = pytest.mark.usefixtures("own_cache")
PROBLEM = Problem.flat(
  m=72,
  n=144,
  k=200,
  dtype="float8_e4m3fn",
  out_dtype="bfloat16",
  transpose_b=True,
)
KINDS = {
  kind: {"scale_a": kind, "scale_b": kind}
  for kind in ("tensor", "vector", "block")
}
LINE = {"scale_a": "block", "scale_b": "line"}
SLABS = {"ragged": "k", "groups": 2, "k": 256}
TRIALS = KINDS | {
  "line": LINE,
  "of B alone": {"scale_b": "vector", "fast_accumulation": True},
  "int8": KINDS["vector"] | {"dtype": "int8", "bias": "n"},
  "batch": KINDS["vector"] | {"batch": 2, "batched_a": True},
  "gated": KINDS["block"] | {"gated": True, "activation": "silu"},
  "rows": KINDS["block"] | {"ragged": "m", "groups": 2},
  "slabs": LINE | SLABS,
  "slabs without scales": SLABS,
}


@pytest.mark.parametrize("name", TRIALS)
def test_each_scale_counts(name):
  """Results are right, and wrong if two numbers of a scale change places."""
  problem = PROBLEM.changed(**TRIALS[name])
  activation = problem.epilogue.activation and jax.nn.silu
  attempt = trial.Trial(trial.Case(problem, activation))
  (config,) = autotuning.candidates(problem, 1)
  call = functools.partial(
    attempt.call, trial.compiled(attempt.case, config, attempt.operands)
  )
  results = call()()
  assert attempt.error(results) is None
  assert 0.5 < float(jnp.std(results[-1].astype("float32"))) < 8
  found = [x for x in attempt.operands if x.startswith("scale")]
  kinds = problem.a.scale, *[problem.b.scale] * problem.products
  assert len(found) == len([kind for kind in kinds if kind])
  for x in found:
    scale = attempt.operands[x]
    for axis, size in enumerate(scale.shape):
      wrong = jnp.roll(scale, 1, axis) if size > 1 else 1.25 * scale
      attempt.operands[x] = wrong
      assert "wrong result" in attempt.error(call()())
    attempt.operands[x] = scale


@pytest.mark.parametrize("scaling", ("row", "block"))
def test_what_was_measured_is_used(scaling):
  """XLA's product is none that the op would run."""
  recipe = pallas_gemm.Recipe(scaling=scaling)
  fn = functools.partial(
    pallas_gemm.matmul, implementation="sm90", quantize=recipe
  )
  a, b = normal(64, 136), normal(136, 64)
  (found,) = autotuning.autotune(fn, a, b, top=2).problems
  assert [reason for *_, reason in found.tried] == [None, None]
  assert found.xla_seconds is found.xla_reason is None
  first = next(tuning.ranked(found.problem, xla_too=False))
  assert (first.how, first.source) == (found.config, "measured")
