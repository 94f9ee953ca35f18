"""Tier A: numbers of the Hopper kernels with operands of 8 bits, interpreted.

The cases of test_sm90_dense_races are checked there. Past their ends scales are
NaN in the interpreter, so what leaks from there shows.
"""

import pytest

from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.plan import Plan
from tests.support import eight_bit_cases, problems


@pytest.mark.parametrize("name", eight_bit_cases.VALUES)
def test_values(name, monkeypatch):
  case = eight_bit_cases.VALUES[name]
  problems.assume_sms(monkeypatch, max(2, case.config.blocks))
  assert legal.reason(Plan.of(case.problem, case.config)) is None
  run, check = case.prepare()
  check(run())
