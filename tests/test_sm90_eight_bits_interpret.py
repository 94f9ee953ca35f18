"""Tier A: numbers of the Hopper kernels with operands of 8 bits, interpreted.

The cases of test_sm90_dense_races are checked there. Past their ends scales are
NaN in the interpreter, so what leaks from there shows.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.plan import Plan
from tests.support import eight_bit_cases, problems, ragged_kernels


@pytest.mark.parametrize("name", eight_bit_cases.VALUES)
def test_values(name, monkeypatch):
  case = eight_bit_cases.VALUES[name]
  problems.assume_sms(monkeypatch, max(2, case.config.blocks))
  assert legal.reason(Plan.of(case.problem, case.config)) is None
  run, check = case.prepare()
  check(run())


@pytest.mark.parametrize("kind", ("SCALED", "LINES", "BLOCKS"))
def test_nan_of_no_group_along_k_goes_nowhere(kind, monkeypatch):
  """Beside groups, and in the scales of groups without rows."""
  problems.assume_sms(monkeypatch, 2)
  offsets = (128, 256, 256, 384)
  case = eight_bit_cases.of_slabs(
    (70, 72, 512),
    offsets,
    eight_bit_cases.HALVES,
    eight_bit_cases.E4M3,
    getattr(eight_bit_cases, kind),
  )
  x = ragged_kernels.operands(case.problem)
  for name, array in x.items():
    if array.dtype != jnp.float32:
      beside = np.r_[:128, 384:512]
      x[name] = array.at[:, beside].set(jnp.nan)
    else:
      beside = 1 if kind == "SCALED" else np.array([0, 3])
      axis = (beside,) if kind == "SCALED" else (slice(None), beside)
      x[name] = array.at[axis].set(jnp.nan)
  outs = ragged_kernels.run(case.problem, case.config, x, offsets)
  assert np.isfinite(np.asarray(outs[0], np.float32)).all()
  ragged_kernels.assert_right(outs, case.problem, x, offsets)


@pytest.mark.parametrize("alpha", (2.0, jnp.float32(1)))
def test_sums_of_int8_take_no_factor(alpha):
  case = eight_bit_cases.RACES["int8"]
  run, _ = dataclasses.replace(case, alpha=alpha).prepare()
  with pytest.raises(ValueError, match=r"alpha must be 1 for .* int32, got"):
    run()
