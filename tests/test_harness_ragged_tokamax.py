"""tokamax, with stand-ins for it and for Triton. No GPU needed."""

import sys
import types

import jax
import pytest

from experiments import ragged
from experiments.harness import ladder_cases, ragged_cases, ragged_peers


def case(pass_="forward"):
  return ragged_cases.Case(
    suite="test", m=24, n=128, k=64, groups=3, pass_=pass_, tune_tokamax=True
  )


def test_tokamax_is_imported_without_xprof(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(tmp_path)
  text = "from xprof.cli.tools import get_kernel_stats_tool as found"
  (tmp_path / "tokamax.py").write_text(text)
  assert ragged_peers.load_tokamax().found is None
  assert "xprof" not in sys.modules
  del sys.modules["tokamax"]


class Constant:
  def __init__(self, value):
    self.value = value


@pytest.fixture
def triton(monkeypatch):
  """A stand-in for Triton, whose arguments are constants; yields both."""
  language = types.SimpleNamespace(constexpr=Constant, tuple=tuple)

  class ASTFunction:
    def deserialize(self, fn):
      return [Constant(x) for x in fn]

  generator = types.SimpleNamespace(ASTFunction=ASTFunction)
  found = types.SimpleNamespace(__version__="3.7.1", generator=generator)
  modules = {
    "triton": found,
    "triton.language": language,
    "triton.compiler.code_generator": generator,
    "jax_triton": types.SimpleNamespace(__version__="0.4"),
  }
  for name, module in modules.items():
    monkeypatch.setitem(sys.modules, name, module)
  ragged_peers._unpack_constants.cache_clear()
  yield found
  ragged_peers._unpack_constants.cache_clear()


def plain(x):
  """What constants hold, in lists."""
  return x.value if isinstance(x, Constant) else [plain(y) for y in x]


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_triton_is_patched_to_unpack_constants(triton, version):
  triton.__version__ = version
  for _ in range(2):  # the second patches nothing
    config = ragged_peers.triton_config()
  assert config == {
    "jax_triton": "0.4",
    "triton": version,
    "patched": ragged_peers.PATCHED,
  }
  values = triton.generator.ASTFunction().deserialize([1, (), (2, (3,)), None])
  assert [plain(x) for x in values] == [1, [], [2, [3]], None]


def test_a_newer_triton_is_left_as_it_is(triton):
  triton.__version__ = "3.8.0"
  assert "patched" not in ragged_peers.triton_config()
  values = triton.generator.ASTFunction().deserialize([(1, 2)])
  assert [plain(x) for x in values] == [(1, 2)]


class Bound:
  """A stand-in for a product of tokamax, with what it was traced with."""

  op, autotuning_cache_key = None, "key"
  autotuning_configs = frozenset(range(100))
  traced, tried = [], []

  @property
  def default_config(self):
    return 7

  def autotune(self, configs, cache_results, timeout):
    assert not cache_results and timeout == ragged_peers.TUNING_S
    self.tried.append(configs)
    return Times({x: (x - 40) ** 2 for x in configs})


class Times(dict):
  def __or__(self, other):
    return Times({**self, **other})

  @property
  def fastest_config(self):
    return min(self, key=self.get)


@pytest.fixture
def tunable(monkeypatch):
  """A stand-in for tokamax with a tuner; yields its product."""
  fake = types.SimpleNamespace(targets_gpu=lambda: True)
  monkeypatch.setattr(ladder_cases, "compat", fake)
  bound = Bound()
  bound.traced, bound.tried = [], []

  def ragged_dot(lhs, rhs, *, group_sizes, implementation):
    bound.traced.append(bound.default_config)
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)

  def get_bound_args(fn, **operands):
    fn.lower(**operands)
    return "of the forward product", bound

  module = types.SimpleNamespace(
    ragged_dot=ragged_dot,
    __version__="0.1",
    autotuning=types.SimpleNamespace(get_bound_args=get_bound_args),
  )
  monkeypatch.setitem(sys.modules, "tokamax", module)
  return bound


def tuned(each):
  [found] = each.arms()["tokamax mosaic tuned"]()
  return found


@pytest.mark.parametrize("pass_", ["forward", "dx", "dw"])
def test_tokamax_is_tuned(tunable, pass_):
  each = case(pass_)
  fn, config = tuned(each)
  said = {"config": "40", "tried": 100, "of": 100}
  assert config == {"tokamax": "0.1", "tuned": said}
  assert 7 in tunable.tried[0] and set().union(*tunable.tried) == {*range(100)}
  tunable.traced.clear()
  operands = each.draw(seed=1)
  assert each.check(jax.jit(fn)(**operands), operands).passed
  assert set(tunable.traced) == {40}
  assert tunable.default_config == 7


def test_its_tuner_has_little_time(tunable, monkeypatch):
  monkeypatch.setattr(ragged_peers, "TUNING_S", 0)
  _, config = tuned(case())
  assert len(tunable.tried) == 1 and 7 in tunable.tried[0]
  assert config["tuned"]["tried"] == len(tunable.tried[0]) < 100


def test_why_tokamax_is_not_tuned(tunable, monkeypatch):
  monkeypatch.setattr(Bound, "autotune", lambda *_, **__: 1 / 0)
  with pytest.raises(NotImplementedError, match="can't tune it: ZeroDivision"):
    tuned(case())


def test_it_is_tuned_if_asked_to(monkeypatch):
  def value(of):
    return types.SimpleNamespace(value=of)

  cases = ragged_cases.suite("odd")
  suites = lambda *_, **__: cases  # noqa: E731
  monkeypatch.setattr(ragged.session_lib, "parse_suites", suites)
  monkeypatch.setattr(ragged, "_SUITE", value(["odd"]))
  monkeypatch.setattr(ragged, "_PASSES", value(["dw"]))
  monkeypatch.setattr(ragged, "_BESIDE", value(["jnp.dot", "tokamax triton"]))
  for tune in (False, True):
    monkeypatch.setattr(ragged, "_TUNE_TOKAMAX", value(tune))
    found = ragged.chosen(on_gpu=True)
    assert found
    for each in found:
      assert "tokamax triton" in each.arms()
      assert ("tokamax triton tuned" in each.arms()) == tune
      assert "tune_tokamax" not in each.fields()
  asked = ["jnp.dot", "tokamax triton", "tokamax triton tuned"]
  assert ragged.arms() == asked
