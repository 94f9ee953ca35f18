"""Tier A: random problems, each against the float64 bound."""

import numpy as np
import pytest

from pallas_gemm import numerics
from pallas_gemm.ladder import LADDER
from tests.support import problems

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

_SIZES = st.one_of(
  st.sampled_from((1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129)),
  st.integers(1, 140),
)
_FACTORS = st.sampled_from((0.0, 1.0, -1.0, 0.5, 3.25, 1e-3))


# A run of the interpreter costs about a second, mostly in compiling what a
# new shape needs, so few examples; HYPOTHESIS_PROFILE=explore takes more.
_FEW = hypothesis.settings(
  max_examples=max(4, hypothesis.settings().max_examples // 25)
)


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.name)
def test_random_problems(rung):
  # One thread block of the first rungs makes few results.
  largest = 40 if rung.number <= 3 else 140

  @_FEW
  @hypothesis.given(
    m=_SIZES.filter(lambda size: size <= largest),
    n=_SIZES.filter(lambda size: size <= largest),
    k=_SIZES.filter(lambda size: size <= largest),
    alpha=_FACTORS,
    beta=_FACTORS,
    dtype=st.sampled_from(rung.dtypes),
    seed=st.integers(0, 2**32 - 1),
  )
  def right(m, n, k, alpha, beta, dtype, seed):
    a, b, c = problems.operands(m, n, k, dtype, seed=seed)
    out = rung.gemm(a, b, c, alpha=alpha, beta=beta)
    check = numerics.check(np.asarray(out), a, b, c, alpha=alpha, beta=beta)
    assert check.passed, check

  right()
