"""The program that compares the dense ops with jax.numpy. No GPU needed."""

from collections import Counter
import dataclasses
import functools
import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import dense
from experiments.harness import case as case_lib
from experiments.harness import (
  cli,
  dense_cases,
  dense_tables,
  rows,
  shapes,
  timing,
)
from experiments.harness import run as run_lib
import pallas_gemm
from pallas_gemm import hardware
from tests.support import programs, result_rows

PLAIN = {"m": 24, "n": 16, "k": 40}
SMALL = [
  PLAIN,
  PLAIN | {"epilogue": "bias+gelu"},
  PLAIN | {"kernel": "matmul_vjp"},
]


def case(**fields):
  return dense_cases.Case(suite="test", **PLAIN | fields)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program in this process: (status, standard output)."""
  monkeypatch.setitem(shapes.DENSE, "interpret", shapes.Suite(SMALL, ()))

  def call(*args):
    flags = f"--output_dir={tmp_path}", "--implementation=xla", *args
    status = programs.call(dense.main, flags)
    return status, capsys.readouterr().out

  return call


@pytest.fixture
def gpu(monkeypatch):
  """Pretends that there is a GPU, where calls take made-up times."""
  programs.pretend_times(monkeypatch)
  fake = types.SimpleNamespace(targets_gpu=lambda: True)
  monkeypatch.setattr(dense, "compat", fake)
  monkeypatch.setattr(run_lib, "_BANDWIDTH_SHAPE", (64, 32))
  published = {"square": [PLAIN], "llama_8b": [PLAIN, PLAIN | {"m": 8}]}
  programs.pretend_suites(monkeypatch, "DENSE", published, SMALL)


def stored(tmp_path):
  return rows.read(tmp_path / "dense.jsonl")


def test_a_run_without_a_gpu_checks_all(run, tmp_path):
  status, out = run()
  assert status == 0, out
  found = stored(tmp_path)
  assert [row["kernel"] for row in found] == ["matmul", "matmul", "matmul_vjp"]
  assert [row["epilogue"] for row in found] == ["none", "bias+gelu", "none"]
  for row in found:
    rows.validate(row)
    assert row["passed"] is True and row["max_error"] <= row["error_bound"]
    assert row["implementation"] == "xla" and row["config"] is None
    assert row["ms_median"] is None and row["tflops"] is None
    assert (row["suite"], row["layout"], row["batch"]) == ("interpret", "NN", 1)
    assert row["dtype"] == row["out_dtype"] == "bfloat16"
  assert out.count("PASSED") == 3 and "results are checked, not timed" in out


def test_the_hopper_kernel_is_named_with_its_config(run, tmp_path):
  status, out = run("--shapes=16x24x32", "--implementation=sm90")
  assert status == 0, out
  [row] = stored(tmp_path)
  rows.validate(row)
  assert row["implementation"] == "sm90" and row["passed"] is True
  assert row["config"]["block_k"] > 0 and row["config_origin"] == "model"


def test_a_timed_run_compares_with_jnp(run, gpu, tmp_path):
  status, out = run("--suite=quick")
  assert status == 0, out
  copy, read, plain, epilogue, vjp = stored(tmp_path)
  for row in stored(tmp_path):
    rows.validate(row)
    assert row["repeats"] == timing.DEFAULT_REPEATS
  assert (copy["kernel"], read["kernel"]) == ("copy", "read")
  size = 64 * 32 * 4 / copy["ms_median"] / 1e6
  assert copy["gbytes_per_s"] == pytest.approx(2 * size)
  # The fake takes twice as long for the second arm.
  assert plain["ratio_to_jnp_dot"] == pytest.approx(2)
  assert plain["copy_gbytes_per_s"] == copy["gbytes_per_s"]
  assert plain["kernel_names"] == ["k0"]
  assert plain["baseline_kernel_names"] == ["k1"]
  flops = 2 * 24 * 16 * 40
  assert plain["tflops"] == pytest.approx(flops / plain["ms_median"] / 1e9)
  assert vjp["tflops"] == pytest.approx(3 * plain["tflops"])
  least = 2 * (24 * 40 + 40 * 16 + 24 * 16 + 16)
  rate = least / epilogue["ms_median"] / 1e6
  assert epilogue["gbytes_per_s"] == pytest.approx(rate)
  assert "2.000x of jnp" in out


def test_all_suites_and_latency(run, gpu, monkeypatch, tmp_path):
  tiny = shapes.Shape(16, 24, 32)
  monkeypatch.setattr(dense, "FIRST_CALLS", (tiny, tiny))
  monkeypatch.setattr(dense, "EAGER_CALLS", 3)
  status, out = run("--suite=all,square")
  assert status == 0, out
  found = rows.latest(stored(tmp_path))
  for row in found:
    rows.validate(row)
  counts = Counter(row["suite"] for row in found)
  assert counts == {"bandwidth": 2, "square": 1, "llama_8b": 2, "latency": 3}
  first, eager, choose = found[-3:]
  assert first["first_call_ms"] > 0 and first["baseline_first_call_ms"] > 0
  assert eager["dispatch_us"] > 0 and eager["baseline_dispatch_us"] > 0
  assert choose["choose_us"] > 0
  assert "| all " not in out and re.search("(?m)^all +3 ", out)


def test_what_a_mean_hides_is_said():
  found = [result_rows.dense(x) for x in (0.5, 2.0, 2.0)]
  assert dense_tables.losses(found) == (
    "1 of 3 cases is slower. Median 2.000x."
  )
  found.append(result_rows.dense(8.0, suite="unaligned"))
  assert dense_tables.losses(found) == (
    "1 of 4 cases is slower. Without `unaligned`: 1.260x; median 2.000x."
  )
  assert dense_tables.losses(found[1:]).startswith("None of 3 cases is slower.")


def test_random_problems_have_a_file_of_their_own(
  run, gpu, monkeypatch, tmp_path
):
  drawn = [dataclasses.replace(case(), suite=name) for name in ("odd", "short")]
  monkeypatch.setattr(dense_cases, "draw", lambda seed, count, dtype: drawn)
  status, out = run("--unseen=2")
  assert status == 0, out
  found = [r for r in rows.read(tmp_path / "dense_unseen.jsonl") if r["passed"]]
  assert [row["suite"] for row in found] == ["odd", "short"]
  assert {row["experiment"] for row in found} == {"dense_unseen"}
  with pytest.raises(cli.FlagError, match="goes with no --suite and no --shap"):
    run("--unseen=2", "--suite=square")


def test_where_a_config_is_from():
  """An H200's choices for the suites are shipped, for other sizes modelled."""
  with hardware.assume("NVIDIA H200"):
    for m, origin in ((4096, "shipped"), (4104, "model")):
      case = dense_cases.Case(suite="square", m=m, n=4096, k=4096)
      fn = dense_cases.ours(case, "sm90")
      config, found = run_lib.config_of(fn, case.operands())
      assert config["block_m"] >= 64 and found == origin


def test_what_xla_computes_fastest_is_tuned_without_a_config(monkeypatch):
  some = case()
  found = {"block_m": 64}
  monkeypatch.setattr(dense.autotune, "autotune", lambda *args, **kwargs: None)
  monkeypatch.setattr(run_lib, "config_of", lambda *args: (found, "cache"))
  arm = dense.tuned(some)  # without a GPU it is XLA that computes it
  assert arm.config is None
  monkeypatch.setattr(run_lib, "runs_kernel", lambda text: True)
  assert dense.tuned(some).config == found
  monkeypatch.setattr(run_lib, "config_of", lambda *args: (None, None))
  assert dense.tuned(some) is None


def test_tuned_is_a_third_arm(run, gpu, monkeypatch, tmp_path):
  choice = "sm90", {"block_m": 64}, "model"
  monkeypatch.setattr(run_lib, "_choice", lambda *args: choice)

  def tuned(case):
    return case_lib.Candidate(
      lambda: dense_cases.baseline(case), {"block_m": 128}
    )

  monkeypatch.setattr(dense, "tuned", tuned)
  status, out = run("--shapes=8x16x24", "--tuned")
  assert status == 0, out
  row = stored(tmp_path)[-1]
  rows.validate(row)
  assert row["config"] == {"block_m": 64} and row["config_origin"] == "model"
  assert row["tuned_config"] == {"block_m": 128}
  # Arms take 1, 2 and 3 times as long.
  assert row["tuned_ms_median"] == pytest.approx(3 * row["ms_median"])
  assert "tuned 0.667x" in out


def test_another_checkout_is_an_arm(run, gpu, tmp_path):
  status, out = run("--shapes=8x16x24", f"--base={programs.ROOT}")
  assert status == 0, out
  row = stored(tmp_path)[-1]
  rows.validate(row)
  assert row["before_ms_median"] == pytest.approx(3 * row["ms_median"])
  assert "3.000x of before" in out
  module = importlib.import_module("pallas_gemm_before")
  assert module.matmul is not pallas_gemm.matmul


@pytest.mark.parametrize(
  "args, message",
  [
    (["--base=/no/such"], "--base: want another checkout, there is no /no/su"),
    (["--suite=nope"], "--suite: no suite 'nope'; there are square"),
    (["--suite=square,all"], "--suite=square,all: too large without"),
    (["--shapes=4x4"], "--shapes: want MxNxK"),
    (["--dtype=float32"], "--dtype: the ops are compared in 16 bits"),
    (["--unseen=3"], "--unseen: too large without an NVIDIA GPU"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert "\n" not in str(caught.value)


# Cases.


def test_both_arms_of_every_case_give_the_same_arrays():
  cases = dense_cases.suite("all")
  assert len(set(cases)) == len(cases) > 100
  for each in cases + dense_cases.suite("interpret"):
    operands = each.operands()
    mine = jax.eval_shape(dense_cases.ours(each), **operands)
    theirs = jax.eval_shape(dense_cases.baseline(each), **operands)
    assert mine == theirs, each


def test_random_problems_are_those_of_their_seed():
  drawn = dense_cases.draw(77, 200, "float16")
  assert drawn == dense_cases.draw(77, 200, "float16")
  assert set(dense_cases.draw(77, 20, "float16")) < set(drawn)
  assert drawn != dense_cases.draw(78, 200, "float16")
  assert len(set(drawn)) > 190 and all(
    each.dtype == "float16" for each in drawn
  )
  assert {each.suite for each in drawn} == set(dense_cases._KINDS)
  for each in drawn[::5]:
    operands = each.operands()
    mine = jax.eval_shape(dense_cases.ours(each), **operands)
    assert mine == jax.eval_shape(dense_cases.baseline(each), **operands), each


def test_work_is_counted():
  gated = case(kernel="gated_matmul")
  assert gated.flops() == 2 * case().flops() == 4 * 24 * 16 * 40
  assert gated.least_bytes() == 2 * (24 * 40 + 2 * 40 * 16 + 24 * 16)
  vjp = case(kernel="matmul_vjp")
  assert vjp.least_bytes() == 4 * (24 * 40 + 40 * 16 + 24 * 16)
  batched = case(batch=3, out_dtype="float32")
  assert batched.flops() == 3 * case().flops()
  assert batched.least_bytes() == 3 * (2 * (24 * 40 + 40 * 16) + 4 * 24 * 16)


# The check.

# Larger than what is sampled.
SAMPLED = {"m": 70, "n": 66}
CHECKED = [
  case(**SAMPLED),
  case(**SAMPLED, batch=5, layout="NT"),
  case(**SAMPLED, layout="TT", epilogue="residual+bias"),
  case(**SAMPLED, layout="TN", out_dtype="float32"),
  case(**SAMPLED, epilogue="bias+gelu", dtype="float16"),
  case(**SAMPLED, epilogue="relu"),
  case(**SAMPLED, kernel="gated_matmul"),
  case(**SAMPLED, kernel="matmul_vjp"),
]


@functools.partial(jax.jit, static_argnums=0)
def once_rounded(each, operands):
  """The case as its baseline, in float32 until its last rounding."""
  wide = {name: x.astype(jnp.float32) for name, x in operands.items()}
  found = dense_cases.baseline(each)(**wide)
  return jax.tree.map(lambda x: x.astype(each.result_dtype), found)


@pytest.mark.parametrize(
  "each", CHECKED, ids=lambda each: dense_tables.label(each.fields())
)
def test_right_results_pass_and_wrong_ones_do_not(each):
  rng = np.random.default_rng(1)
  operands = {
    name: jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype))
    for name, x in each.operands().items()
  }
  found = once_rounded(each, operands)
  check = each.check(found, operands)
  assert check.passed and 0 < check.worst_ratio <= 1, check
  assert 0 < check.error_bound < 1
  # The last result: of a "matmul_vjp" the derivative of B.
  *before, last = map(np.asarray, jax.tree.leaves(found))

  def judged(changed):
    changed = jnp.asarray(changed)
    results = (*before, changed) if before else changed
    return each.check(results, operands)

  def with_element(index, value):
    changed = last.copy()
    changed[..., index, index] = value
    return changed

  assert not judged(with_element(0, last[..., 0, 0] + 1)).passed
  assert not judged(np.roll(last, 1, axis=-1)).passed
  unseen = judged(with_element(-2, np.nan))
  assert not unseen.passed and np.isinf(unseen.max_error)


# Tables.


def test_wall_time_of_short_cases_is_shown():
  wall = {"wall_ms_median": 0.09, "baseline_wall_ms_median": 0.06}
  found = [result_rows.dense(2.0, **wall) for _ in range(3)]
  text = dense_tables.markdown(found)
  assert (
    "of these 3 cases the geomean is 2.000x by kernel time and 0.667x by wall"
    " time, by which 3 are slower, at worst 0.667x (48x40x24)"
  ) in text
  assert "a call takes 90.0 µs" in text and "`jnp`'s 60.0 µs" in text
  assert "None of these cases launches more kernels than `jnp`." in text


def test_the_page_has_what_bounds_small_batches_and_the_host():
  small = {"suite": "llama_8b", "m": 8, "gbytes_per_s": 3000.0}
  found = [
    result_rows.dense(1.0, **small, copy_gbytes_per_s=4000.0),
    result_rows.row(
      suite="latency", kernel="first_call", first_call_ms=400.0,
      baseline_first_call_ms=200.0,
    ),
  ]  # fmt: skip
  text = dense_tables.markdown(found)
  assert "75% to 75%, median 75%, of the rate of a copy (4000 GB/s)" in text
  line = "| first call under `jit`: traced, compiled, run | 48x40x24 | 400 ms |"
  assert f"{line} 200 ms |" in text


def test_summary_gives_geomean_worst_and_best():
  found = [
    result_rows.dense(0.5, layout="TN"),
    result_rows.dense(2.0, batch=3, epilogue="bias", out_dtype="float32"),
    result_rows.dense(None, passed=False, ms_median=None),
    result_rows.dense(4.0, suite="gated", kernel="gated_matmul"),
  ]
  for row in found:
    rows.validate(row)
  header, cells = dense_tables.summary(found)
  assert "tuned" not in header
  assert cells[0] == [
      "square", "3", "1.000x", "0.500x", "48x40x24 TN", "2.000x",
      "3 x 48x40x24 bias to float32", "1",
  ]  # fmt: skip
  assert cells[1][:3] == ["gated", "1", "4.000x"]
  assert cells[1][4] == "48x40x24 gated_matmul"
  assert cells[2][:3] == ["all", "4", f"{4 ** (1 / 3):.3f}x"]
  found[0]["tuned_ms_median"] = 0.25
  header, cells = dense_tables.summary(found)
  assert dict(zip(header, cells[0]))["tuned"] == "4.000x"


def test_random_problems_have_a_line_for_each_draw():
  """A seed that is drawn on other kernels is another draw."""
  first = [result_rows.dense(x, seed=7, commit="a") for x in (0.9, 1.6)]
  again = [
    result_rows.dense(1.0, seed=7, commit="b"),
    result_rows.dense(None, ms_median=None),
  ]
  lines = dense_tables.by_seed([*first, *again]).splitlines()
  assert "tuned" not in lines[0]
  assert lines[2:] == [
    "| 7 | a | 2 | 1.200x | 1 | 0.900x | 48x40x24 |",
    "| 7 | b | 1 | 1.000x | 0 | 1.000x | 48x40x24 |",
  ]
  tuned = first[0]["baseline_ms_median"] / 1.25
  found = dense_tables.by_seed([first[0] | {"tuned_ms_median": tuned}, *again])
  header, _, line, other = found.splitlines()
  assert header.endswith("| tuned | tuned, below 0.95x | tuned, worst |")
  assert line.endswith("| 1.250x | 0 | 1.250x |")
  assert other.endswith("| - | - | - |")
