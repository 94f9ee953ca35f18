"""Inputs, shapes, provenance, cases of the ladder, and one comparison."""

import re
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import case as case_lib
from experiments.harness import (
  cli,
  dense_cases,
  inputs,
  ladder_cases,
  provenance,
  ragged_cases,
  rows,
  run,
  shapes,
  timing,
)
from pallas_gemm import numerics
from pallas_gemm.ladder import contract


def test_operands_are_normal_seeded_and_of_the_problem():
  problem = contract.Problem(256, 64, 128, "bfloat16", beta=1.0)
  a, b, c = inputs.operands(problem, seed=3)
  assert (a.shape, b.shape, c.shape) == ((256, 128), (128, 64), (256, 64))
  assert a.dtype == b.dtype == c.dtype == jnp.bfloat16
  values = np.asarray(a, np.float64)
  assert abs(values.mean()) < 0.03 and abs(values.std() - 1) < 0.03
  assert (values < 0).any() and not (values == values[0, 0]).all()
  np.testing.assert_array_equal(a, inputs.operands(problem, seed=3)[0])
  assert (np.asarray(a) != np.asarray(inputs.operands(problem, 4)[0])).any()
  # A and B of one shape are not the same numbers.
  x, y, none = inputs.operands(contract.Problem(8, 8, 8), seed=0)
  assert none is None and (np.asarray(x) != np.asarray(y)).any()


def test_shapes_are_read_and_named():
  shape = shapes.parse(" 4096x8192X64 ")
  assert shape == shapes.Shape(m=4096, n=8192, k=64)
  assert str(shape) == "4096x8192x64"
  for bad in ("", "4x4", "4x4x4x4", "axbxc", "-1x2x3", "0x1x1"):
    with pytest.raises(ValueError, match="got"):
      shapes.parse(bad)
  with pytest.raises(ValueError, match="no suite 'none'; there are square"):
    shapes.suite("none")
  assert shapes.suite("training") == shapes.suite("training")[:2]


def test_versions_fill_a_row_and_are_none_where_unknown():
  found = provenance.versions()
  assert set(found) == {"device", "driver", "cuda", "jax", "jaxlib", "commit"}
  assert found["jax"] == jax.__version__
  if jax.devices()[0].platform == "cpu":
    assert found["driver"] is None and found["cuda"] is None
  assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", provenance.utc())


def test_commit_is_stated_or_git_s_or_unknown(monkeypatch, tmp_path):
  monkeypatch.setenv(provenance.COMMIT_VARIABLE, "abc")
  assert provenance.commit() == "abc"
  monkeypatch.delenv(provenance.COMMIT_VARIABLE)
  monkeypatch.setattr(provenance, "_ROOT", tmp_path)
  monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
  assert provenance.commit() is None

  def git(*args):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True)

  git("init", "-q")
  (tmp_path / "code.py").write_text("1")
  git("add", ".")
  git("commit", "-qm", "first")
  clean = provenance.commit()
  assert re.fullmatch(r"[0-9a-f]{40}", clean)
  results = tmp_path / "experiments" / "results"
  results.mkdir(parents=True)
  (results / "ladder.jsonl").write_text("{}")
  assert provenance.commit(untracked=True) == clean  # rows are no change
  (tmp_path / "new.py").write_text("3")
  assert provenance.commit() == clean
  assert provenance.commit(untracked=True) == f"{clean}-dirty"
  (tmp_path / "code.py").write_text("2")
  assert provenance.commit() == f"{clean}-dirty"


def test_monitor_takes_medians_and_lives_with_gaps():
  loads = iter(
    [provenance.Load(1000.0, None, 30.0), provenance.Load(2000.0, None, 40.0)]
  )
  last = provenance.Load(1500.0, None, None)
  with provenance.Monitor(lambda: next(loads, last)) as monitor:
    while len(monitor._samples) < 3:
      pass
  assert monitor.load == provenance.Load(1500.0, None, 35.0)
  with provenance.Monitor(provenance.Load) as monitor:
    pass
  assert monitor.load == provenance.Load()  # nothing known, one sample


@pytest.fixture
def nvml(monkeypatch):
  """Stands in for the driver's library; questions in `refused` fail."""
  answers = {
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetPowerUsage": 699_210,
    "nvmlDeviceGetTemperature": 54,
  }

  class Library:
    refused, index = (), None

    def nvmlSystemGetDriverVersion(self, text, size):
      text.value = b"580.95.05"
      return size < 80

    def __getattr__(self, name):
      def call(*args):
        if name == "nvmlDeviceGetHandleByIndex_v2":
          self.index = args[0]
        if name in answers:
          args[-1]._obj.value = answers[name]
        return int(name in self.refused)

      return call

  library = Library()
  device = types.SimpleNamespace(platform="gpu")
  monkeypatch.setattr(provenance.jax, "devices", lambda: [device])
  monkeypatch.setattr(provenance.ctypes, "CDLL", lambda name: library)
  provenance._nvml.cache_clear()
  yield library
  provenance._nvml.cache_clear()


def test_nvml_is_asked(nvml):
  assert provenance.read_load() == provenance.Load(1980, 699.21, 54)
  assert provenance._driver() == "580.95.05"
  nvml.refused = ("nvmlDeviceGetPowerUsage",)
  assert provenance.read_load() == provenance.Load(1980, None, 54)


@pytest.mark.parametrize("visible, index", [("", 0), ("2,3", 2), ("GPU-a", 0)])
def test_nvml_is_asked_of_the_gpu_that_cuda_sees(
  nvml, monkeypatch, visible, index
):
  monkeypatch.setenv(provenance.GPU_VARIABLE, visible)
  provenance.read_load()
  assert nvml.index == index


def test_without_nvml_nothing_is_known(nvml, monkeypatch):
  nvml.refused = ("nvmlInit_v2",)
  assert provenance.read_load() == provenance.Load()

  def none(name):
    raise OSError(name)

  monkeypatch.setattr(provenance.ctypes, "CDLL", none)
  provenance._nvml.cache_clear()
  assert provenance.read_load() == provenance.Load()
  assert provenance._driver() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("alpha, beta", [(1.0, 0.0), (0.5, -2.0)])
def test_baselines_compute_the_expression(dtype, alpha, beta):
  problem = contract.Problem(8, 6, 4, dtype, alpha, beta)
  operands = inputs.operands(problem, 0)
  for baseline in ladder_cases.baselines(problem):
    [(dot, _)] = baseline.arm()
    out = dot(*operands)
    assert out.dtype == dtype
    want = numerics.reference(*operands, alpha=alpha, beta=beta)
    np.testing.assert_allclose(
      np.asarray(out, np.float64), want, atol=0.1, rtol=0.05
    )
  names = [b.kernel for b in ladder_cases.baselines(problem)]
  if dtype == "float32":
    assert names == ["jnp.dot HIGHEST", "jnp.dot DEFAULT"]
  else:
    assert names == ["jnp.dot"]


def test_rates_count_the_least_work():
  problem = contract.Problem(1000, 2000, 500, "bfloat16", beta=1.0)
  [case] = ladder_cases.baselines(problem)
  assert case.flops() == 2 * 1000 * 2000 * 500
  elements = 1000 * 500 + 500 * 2000 + 2 * 1000 * 2000
  assert case.least_bytes() == 2 * elements


@pytest.mark.parametrize(
  "dtype, alpha, reason",
  [
    ("float32", 1.0, "it takes 16-bit operands"),
    ("bfloat16", 2.0, "it computes A@B . C alone"),
    ("bfloat16", 1.0, "it needs a Hopper GPU"),
  ],
)
def test_jax_s_kernel_says_why_not(dtype, alpha, reason):
  if jax.devices()[0].platform != "cpu":
    pytest.skip("there is a GPU")
  problem = contract.Problem(128, 128, 128, dtype, alpha)
  with pytest.raises(NotImplementedError, match=reason):
    ladder_cases.jax_hopper(problem)


def test_errors_are_cut_to_a_line():
  assert case_lib.first_line(ValueError("\n a\nb")) == "ValueError:  a"
  assert case_lib.first_line(ValueError()) == "ValueError"
  assert len(case_lib.first_line(ValueError("x" * 999))) == 300


@pytest.fixture
def compare(monkeypatch):
  """Gives the row of a function against jnp.dot, with made-up times."""

  def row_of(*fns, timed=True, dtype="float32", name="mine", ran="k", **kwargs):
    measured = []

    def measure(arms, **_):
      measured.append([arm.name for arm in arms])
      return {
        arm.name: timing.Timing(
          (2.0 * (i + 1),) * 3, ("k" if i else ran,), 1, wall
        )
        for i, (arm, wall) in enumerate(zip(arms, ((0.1,), (0.3,))))
      }

    monkeypatch.setattr(timing, "measure", measure)
    arm = [case_lib.Candidate(fn, {"tile": i}) for i, fn in enumerate(fns)]
    problem = contract.Problem(16, 16, 16, dtype)
    case = ladder_cases.LadderCase(name, problem, lambda: arm, **kwargs)
    bench = run.Bench("test", timed=timed)
    return bench.measure(run.uncompiled(case)), measured

  return row_of


def exact(a, b, c):
  return jnp.dot(a, b, precision="highest")


def broken(a, b, c):
  raise ValueError("no such tile\nand more lines")


def test_a_case_is_checked_timed_and_made_a_row(compare):
  row, measured = compare(exact)
  rows.validate(row)
  assert measured == [["mine", "jnp.dot HIGHEST (baseline)"]]
  assert row["passed"] and row["max_error"] <= row["error_bound"]
  assert row["ratio_to_jnp_dot"] == 2.0 and row["ms_median"] == 2.0
  assert (row["wall_ms_median"], row["baseline_wall_ms_median"]) == (0.1, 0.3)
  assert row["config"] == {"tile": 0}


def test_the_fastest_candidate_that_runs_is_taken(compare):
  row, measured = compare(broken, exact, exact)
  assert row["config"] == {"tile": 1} and row["passed"]
  assert measured[0] == ["{'tile': 1}", "{'tile': 2}"]
  with pytest.raises(NotImplementedError, match=r"ValueError: no such tile$"):
    compare(broken, broken)


def test_what_is_wrong_is_not_timed(compare):
  for bad in (jnp.nan, 1.0):
    row, measured = compare(lambda a, b, c, bad=bad: jnp.dot(a, b) + bad)
    assert row["passed"] is False and measured == []
    assert row["ms_median"] is None and row["ratio_to_jnp_dot"] is None


def test_what_is_not_judged_is_timed(compare):
  row, measured = compare(lambda a, b, c: jnp.dot(a, b) + 1, judged=False)
  assert row["passed"] is None and row["ms_median"] == 2.0 and measured


@pytest.mark.parametrize(
  "name, kernel, foreign, reason",
  [
    ("triton_dense", "triton_dense", "gemm_fusion_dot", "it ran gemm_fusion_"),
    (
      "jax_hopper_matmul_mgpu",
      "anonymous_mosaic_gpu_kernel",
      "nvjet_sm90_tst_128x160_64x5_NNT",
      r"it ran nvjet_sm90_tst; it needs hopper_matmul_mgpu's kernel",
    ),
    ("jnp.dot", "nvjet_sm90_tss", "naive_mosaic_gpu_kernel", "it ran naive_m"),
  ],
)
def test_what_did_not_run_its_own_kernels_has_no_row(
  compare, name, kernel, foreign, reason
):
  row, _ = compare(exact, name=name, ran=kernel)
  assert row["kernel_names"] == [kernel] and row["ms_median"] == 2.0
  with pytest.raises(NotImplementedError, match=f"^{name}: .*{reason}"):
    compare(exact, name=name, ran=foreign)


def test_all_that_is_from_elsewhere_claims_kernels():
  assert ladder_cases.PEERS.keys() < ladder_cases.CLAIMS.keys()
  for dtype in ("float32", "bfloat16"):
    problem = contract.Problem(16, 16, 16, dtype)
    for case in ladder_cases.baselines(problem):
      assert {case.kernel, case.baseline} <= ladder_cases.CLAIMS.keys()
  of_ragged = {*ragged_cases.PEERS, *ragged_cases.BESIDE}
  assert of_ragged - {ragged_cases.TWO} == ragged_cases.CLAIMS.keys()
  cases = [*dense_cases.suite("interpret")]
  for pass_ in shapes.PASSES:
    shape = {"suite": "", "m": 8, "n": 8, "k": 8, "groups": 2, "pass_": pass_}
    cases.append(ragged_cases.Case(**shape, tune_tokamax=True))
  ours = {case_lib.OURS, ragged_cases.TWO}
  for case in cases:
    assert case.arms().keys() - ours == case.arms().keys() & case.claims.keys()


def test_without_a_gpu_results_are_checked(compare):
  row, measured = compare(exact, timed=False)
  assert row["passed"] and row["tflops"] is None and measured == []
  assert row["repeats"] == row["warmup"] == 0


def test_large_products_are_checked_on_a_sample(compare, monkeypatch):
  asked = []
  monkeypatch.setattr(ladder_cases, "CHECKED_IN_FULL", 16**3 - 1)

  def check(*args, sample, **kwargs):
    asked.append(sample)
    return numerics.Check(True, 0.0, 1.0, 0.0, 1)

  monkeypatch.setattr(numerics, "check", check)
  compare(exact)
  assert asked == [ladder_cases.SAMPLE]


def test_tables_are_plain_text(capsys):
  cli.table("T", ["#", "name"], [["1", "x"], ["12", "long"]], ["#"])
  assert capsys.readouterr().out.splitlines() == [
    "T",
    " #  name",
    "--  ----",
    " 1  x",
    "12  long",
  ]
