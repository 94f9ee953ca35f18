"""Tier A: random calls of the ops, on the Hopper kernel, interpreted."""

import pytest

from tests.support import calls, problems

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

# Around the edges of tiles and of what TMA takes. Larger ones cost seconds.
_SIZES = (64, 1, 8, 0, 7, 31, 33, 65, 72, 100, 129, 136)
_EXPLORED = (*_SIZES, *range(2, 301))

# A run of the interpreter costs a second or two, mostly in compiling what a
# new shape needs, so few examples; HYPOTHESIS_PROFILE=explore takes more.
_MOST = hypothesis.settings().max_examples
_IS_EXPLORING = _MOST > 100
_FEW = hypothesis.settings(
  max_examples=_MOST if _IS_EXPLORING else _MOST // 10,
  suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.fixture(autouse=True)
def two_sms(monkeypatch):
  """A persistent grid of few blocks, and large tiles to go with it."""
  problems.assume_sms(monkeypatch, 2)


@pytest.mark.timeout(600, method="thread")
def test_random_calls():
  sizes = _EXPLORED if _IS_EXPLORING else _SIZES

  @_FEW
  @hypothesis.given(data=st.data(), seed=st.integers(0, 2**16))
  def right(data, seed):
    call = calls.draw(
      lambda options: data.draw(st.sampled_from(options)), sizes
    )
    hypothesis.note(f"{call}, seed {seed}")
    x = call.operands(seed)
    call.assert_right(call(x, implementation="sm90"), x)

  right()
