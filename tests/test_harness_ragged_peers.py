"""Grouped products from elsewhere, with stand-ins. No GPU needed."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from experiments.harness import ladder_cases, ragged_cases, ragged_peers
from experiments.harness import run as run_lib
from experiments.harness.case import Candidate
from tests.support import programs


def case(pass_="forward", m=24, n=128, k=64, groups=3):
  return ragged_cases.Case(
    suite="test", m=m, n=n, k=k, groups=groups, pass_=pass_, sizes="zipf"
  )


@pytest.fixture
def gpu(monkeypatch):
  """Pretends that there is a GPU to compile for."""
  fake = types.SimpleNamespace(targets_gpu=lambda: True)
  for module in (ladder_cases, ragged_peers):
    monkeypatch.setattr(module, "compat", fake)


@pytest.fixture
def examples(monkeypatch):
  """Stand-ins for JAX's examples; yields the configs that they were given."""
  # pylint: disable=g-import-not-at-top
  from jax.experimental.pallas.ops.gpu import (
    ragged_dot_mgpu,
    transposed_ragged_dot_mgpu,
  )

  given = []

  def ragged_dot(lhs, rhs, *, group_sizes, transpose_rhs=False, **config):
    given.append(config)
    rhs = jnp.swapaxes(rhs, 1, 2) if transpose_rhs else rhs
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)

  def transposed_ragged_dot(lhs, rhs, *, group_sizes, **config):
    given.append(config)
    numbers = jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((0,), (0,)), ((), ())),
      lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[],
    )
    return jax.lax.ragged_dot_general(lhs, rhs, group_sizes, numbers)

  monkeypatch.setattr(ragged_dot_mgpu, "ragged_dot", ragged_dot)
  monkeypatch.setattr(
    transposed_ragged_dot_mgpu, "transposed_ragged_dot", transposed_ragged_dot
  )
  return given


def assert_computes(each, fn):
  operands = each.draw(seed=1)
  check = each.check(fn(**operands), operands)
  assert check.passed, check


@pytest.mark.parametrize("pass_", ["forward", "dx", "dw"])
def test_jax_s_examples_compute_every_pass(gpu, examples, pass_):
  each = case(pass_)
  found = ragged_peers.jax_example(each)
  assert found
  for fn, config in found:
    assert_computes(each, jax.jit(fn))
    assert examples[-1] == config
    assert config["block_k"] % 64 == 0


def test_examples_get_six_configs_that_fit(gpu, examples):
  def configs(*args, **kwargs):
    found = ragged_peers.jax_example(case(*args, **kwargs))
    return [candidate.config for candidate in found]

  large = {"m": 8192, "n": 2048, "k": 4096}
  for pass_ in ("forward", "dx", "dw"):
    assert len(configs(pass_, **large)) == 6
  # 65 * 64 columns: what takes blocks of 64 alone.
  assert [x["block_n"] for x in configs(n=4160)] == [64]
  assert [x["block_n"] for x in configs("dx", n=64, k=4160)] == [64]
  assert [x["block_m"] for x in configs("dw", k=4160)] == [64, 64]
  for pass_ in ("forward", "dx", "dw"):
    with pytest.raises(NotImplementedError, match=r"K=64 or N=1407 is no mult"):
      configs(pass_, n=1407)


@pytest.mark.parametrize("pass_", ["forward", "dx", "dw"])
def test_indexed_linear_computes_every_pass(gpu, monkeypatch, pass_):
  """By a stand-in that takes letters of operands as the library does."""

  def indexed_linear(a, b, out, counts, *, subscripts, C, Z, **sizes):
    del C, sizes
    of_a, of_b, of_out = subscripts
    group = jnp.repeat(jnp.arange(len(counts)), counts, total_repeat_length=Z)
    if of_out == "uv":
      one = jax.nn.one_hot(group, len(counts))
      return jnp.einsum("zg,zu,zv->guv", one, a, b).astype(out.dtype)
    found = jnp.einsum(f"z{of_a},z{of_b}->z{of_out}", a, b[group])
    return found.astype(out.dtype)

  with pytest.raises(NotImplementedError, match="is not installed"):
    ragged_peers.indexed_linear(case(pass_))
  module = types.ModuleType("cuequivariance_ops_jax")
  module.__version__, module.indexed_linear = "0.13", indexed_linear
  monkeypatch.setitem(sys.modules, module.__name__, module)
  [(fn, config)] = ragged_peers.indexed_linear(case(pass_))
  assert config == {"cuequivariance_ops_jax": "0.13"}
  assert_computes(case(pass_), jax.jit(fn))
  for large in ({"groups": 2**20, "n": 64}, {"m": 2**25}):
    with pytest.raises(NotImplementedError, match=r"an array has 4\.3e\+09$"):
      ragged_peers.indexed_linear(case(pass_, **large))


# XLA's own, and its fusion.


def test_what_is_too_much_for_lax_says_why():
  def refused(case):
    ragged_peers.lax_ragged_dot(case, None)

  refused(case())
  with pytest.raises(NotImplementedError, match=r"0\.5 s a call"):
    refused(ragged_cases.suite("deepseek")[0])
  with pytest.raises(NotImplementedError, match="32 GiB, the limit is"):
    refused(case(m=2**20, groups=64, k=256, n=1))
  for each in ragged_cases.suite("mixtral") + ragged_cases.suite("moe"):
    refused(each)


def fused(each):
  [ready] = run_lib.prepare([each])
  [(compiled, config)] = ready.arms["lax.ragged_dot fused"]
  return compiled, config


def test_xla_s_option_is_the_compiled_function_s(gpu):
  compiled, config = fused(case())
  assert config == {"xla_gpu_experimental_use_ragged_dot_fusion": True}
  assert_computes(case(), compiled())


def test_a_cudnn_without_the_fusion_is_not_asked(gpu, monkeypatch):
  monkeypatch.setattr(ragged_peers, "cudnn_version", lambda: (9, 21))
  with pytest.raises(NotImplementedError, match=r"cuDNN \(9, 21\); XLA's fus"):
    fused(case())[0]()
  monkeypatch.setattr(ragged_peers, "cudnn_version", lambda: (9, 22))
  assert_computes(case(), fused(case())[0]())


def test_the_version_is_cudnn_s(monkeypatch):
  library = types.SimpleNamespace(cudnnGetVersion=lambda: 92103)
  monkeypatch.setattr(ragged_peers.ctypes, "CDLL", lambda name: library)
  assert ragged_peers.cudnn_version.__wrapped__() == (9, 21)


def test_an_option_that_xla_lacks_is_the_reason(gpu, monkeypatch):
  monkeypatch.setattr(ragged_peers, "FUSION", {"xla_gpu_no_such_option": True})
  compiled, _ = fused(case())
  with pytest.raises(Exception, match="No such compile option: 'xla_gpu_no_su"):
    compiled()


# Kernels.

DENSE = ("loop_transpose_fusion", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_NNT")
ELSEWHERE = (
  ("lax.ragged_dot", DENSE, "body_mosaic_gpu_kernel"),
  ("jnp.dot", ("gemm_fusion_dot_1",), "_ragged_dot_kernel"),
  ("lax.ragged_dot fused", ("cudnn_generated_fort_native_moe",), DENSE[1]),
  (
    "lax.ragged_dot fused",
    ("_ZN5cudnn42prepare_moe_grouped_gemm_fwd_arrays_kernelIiEE", DENSE[1]),
    "gemm_fusion_dot_1",
  ),
  ("jax_ragged_dot_mgpu", ("body_mosaic_gpu_kernel",), DENSE[1]),
  ("jax_transposed_ragged_dot_mgpu", ("body_mosaic_gpu_kernel",), DENSE[1]),
  *(
    (f"tokamax mosaic{tuned}", (name, *DENSE), "_ragged_dot_kernel")
    for tuned in ("", " tuned")
    for name in (
      "ragged_dot_sm90_mosaic_gpu_kernel",
      "ragged_contracting_dim_dot_sm90_mosaic_gpu_kernel",
    )
  ),
  *(
    (f"tokamax triton{tuned}", (name,), "ragged_dot_sm90_mosaic_gpu_kernel")
    for tuned in ("", " tuned")
    for name in ("_ragged_dot_kernel", "_ragged_contracting_dim_dot_kernel")
  ),
)


@pytest.mark.parametrize("arm, own, foreign", ELSEWHERE)
def test_an_arm_that_ran_other_kernels_is_skipped(
  monkeypatch, arm, own, foreign
):
  each = case()
  fn = jax.jit(ragged_cases.lax(each))
  arms = {name: [Candidate(lambda: fn)] for name in ("pallas_gemm", arm)}
  for kernels in (own, ("loop_add_fusion", foreign)):
    programs.pretend_times(monkeypatch, {arm: kernels})
    row = run_lib.Bench("ragged").measure(run_lib.Prepared(each, arms, {}))
    assert row["passed"] and row["ms_median"]
    if kernels == own:
      assert row["arms"][arm]["kernel_names"] == list(own)
      assert arm not in row["skipped"]
    else:
      assert list(row["arms"]) == ["pallas_gemm"]
      assert foreign.split("_256x")[0] in row["skipped"][arm]
      assert ragged_cases.CLAIMS[arm].needs in row["skipped"][arm]
      assert row["baseline_ms_median"] is None


@pytest.mark.parametrize("sign", [1, -1])
def test_an_arm_with_a_config_is_held_to_the_bound(monkeypatch, sign):
  each, name = case(), "tokamax mosaic"
  fn = jax.jit(ragged_cases.lax(each))
  theirs = jax.jit(lambda **operands: sign * fn(**operands))
  arms = {"pallas_gemm": [Candidate(lambda: fn)]}
  arms[name] = [Candidate(lambda: theirs, {"tokamax": "1.2"})]
  own = {name: ("ragged_dot_sm90_mosaic_gpu_kernel",)}
  programs.pretend_times(monkeypatch, own)
  row = run_lib.Bench("ragged").measure(run_lib.Prepared(each, arms, {}))
  if sign < 0:
    assert row["skipped"][name].startswith("wrong: an error of")
  else:
    assert row["arms"][name]["config"] == {"tokamax": "1.2"}


def test_the_fusion_s_reason_names_the_versions_that_it_needs():
  claim = ragged_cases.CLAIMS["lax.ragged_dot fused"]
  said = claim.refuted(DENSE)
  assert said.startswith("it is not what its name says: it ran nvjet_sm90_tst;")
  for part in ("cuDNN 9.22", "gradients by weights 9.24 and JAX 0.12", "dense"):
    assert part in said
  assert "it ran no kernel;" in claim.refuted([])


def test_a_layer_is_fused_if_all_of_its_products_are():
  each = case("layer_grad")
  claim = each.claims["lax.ragged_dot fused"]
  assert each.products == 9
  assert claim.refuted(["cudnn_moe"] * 9, each.products) is None
  assert claim.refuted(["cudnn_moe"] * 6 + [DENSE[1]] * 3, each.products)


# Tokamax.


def tokamax(each):
  candidates = each.arms()["tokamax mosaic"]()
  assert len(candidates) == 1
  return candidates[0]


@pytest.mark.parametrize("pass_", ["forward", "dx", "dw"])
def test_tokamax_computes_every_pass(gpu, monkeypatch, pass_):
  asked = []

  def ragged_dot(lhs, rhs, *, group_sizes, implementation):
    asked.append(implementation)
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)

  module = types.SimpleNamespace(ragged_dot=ragged_dot, __version__="0.1")
  monkeypatch.setitem(sys.modules, "tokamax", module)
  fn, config = tokamax(case(pass_))
  assert config == {"tokamax": "0.1"}
  assert_computes(case(pass_), jax.jit(fn))
  assert set(asked) == {"mosaic"}


def test_why_tokamax_is_missing(gpu, monkeypatch, tmp_path):
  def reason():
    with pytest.raises(NotImplementedError) as caught:
      tokamax(case())
    return str(caught.value)

  monkeypatch.setitem(sys.modules, "tokamax", None)
  assert reason() == "it is not installed"
  monkeypatch.delitem(sys.modules, "tokamax")
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "tokamax.py").write_text("import no_such_module")
  assert reason() == "it lacks a module: No module named 'no_such_module'"
  (tmp_path / "tokamax.py").write_text("raise AttributeError('of this JAX')")
  assert reason() == "can't import it: AttributeError: of this JAX"


def test_without_a_gpu_peers_say_so():
  reasons = {}
  for name, arm in case().arms().items():
    try:
      arm()
    except NotImplementedError as error:
      reasons[name] = str(error)
  needs = "it needs a Hopper GPU"
  assert reasons == {
    "lax.ragged_dot fused": "XLA has it for GPUs",
    "jax_ragged_dot_mgpu": needs,
    "indexed_linear": needs,
    "tokamax mosaic": needs,
    "tokamax triton": needs,
  }
  assert "tokamax mosaic" not in case("gated").arms()
