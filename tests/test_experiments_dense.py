"""The program that compares the dense ops with jax.numpy. No GPU needed."""

from collections import Counter
import dataclasses
import functools
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
  dense_latency,
  dense_tables,
  overview,
  prepared,
  report,
  rows,
  shapes,
  tables,
  timing,
)
from experiments.harness import run as run_lib
import pallas_gemm
from pallas_gemm import hardware
from tests import test_harness_rows
from tests.support import programs

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
  (tmp_path / "README.md").write_text(programs.readme("dense"))
  monkeypatch.setitem(shapes.DENSE, "interpret", shapes.Suite(SMALL, ()))

  def call(*args):
    places = f"--output_dir={tmp_path}", f"--readme={tmp_path / 'README.md'}"
    # --implementation says what to measure.
    how = () if args == ("--update_readme",) else ("--implementation=xla",)
    status = programs.call(dense.main, [*places, *how, *args])
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


def replaces_matmul(monkeypatch, wrong, when):
  """Makes the op give something else for some operands."""
  real = pallas_gemm.matmul

  def matmul(a, b, **kwargs):
    return (wrong if when(kwargs) else real)(a, b, **kwargs)

  monkeypatch.setattr(pallas_gemm, "matmul", matmul)
  return real


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
    assert row["wall_ms_median"] > 0 and row["baseline_wall_ms_median"] > 0
    assert (row["suite"], row["layout"], row["batch"]) == ("interpret", "NN", 1)
    assert row["dtype"] == row["out_dtype"] == "bfloat16"
  assert out.count("PASSED") == 3 and "nothing was timed on a GPU" in out


def test_the_hopper_kernel_is_named_with_its_config(run, tmp_path):
  status, out = run("--shapes=16x24x32", "--implementation=sm90")
  assert status == 0, out
  [row] = stored(tmp_path)
  rows.validate(row)
  assert row["implementation"] == "sm90" and row["passed"] is True
  assert row["config"]["block_k"] > 0 and row["config_origin"] == "model"


def test_a_timed_run_compares_with_jnp(run, gpu, tmp_path):
  status, out = run("--suite=quick", "--update_readme", "--noplot")
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
  text = (tmp_path / "README.md").read_text()
  assert "| quick | 3 | 2.000x | 2.000x | 24x16x40" in text


def test_all_suites_latency_plots_and_readme(run, gpu, monkeypatch, tmp_path):
  tiny = shapes.Shape(16, 24, 32)
  monkeypatch.setattr(dense_latency, "FIRST_CALLS", (tiny, tiny))
  monkeypatch.setattr(dense_latency, "EAGER_CALLS", 3)
  status, out = run("--suite=all,square", "--update_readme")
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
  assert (tmp_path / "dense.png").stat().st_size > 10_000
  assert (tmp_path / "dense_small_m.png").stat().st_size > 10_000
  text = (tmp_path / "README.md").read_text()
  assert text.startswith("# Title\n\n<!-- dense:begin -->\n\n")
  assert text.endswith("\n\n<!-- dense:end -->\n\nEnd.\n") and "old" not in text
  assert "| llama_8b | 2 |" in text and "| all | 3 |" in text
  assert "of the rate of a copy" in text and "first call under `jit`" in text
  assert "![dense](dense.png)" in text and "![dense_small_m](" in text
  # Alone, it measures nothing and finds nothing new.
  status, out = run("--update_readme")
  assert status == 0 and "nothing new for" in out
  assert (tmp_path / "README.md").read_text() == text


def compared_row(ratio, suite="square", **fields):
  return fields | {
    "suite": suite,
    "kernel": "matmul",
    "m": 8,
    "n": 8,
    "k": 8,
    "dtype": "bfloat16",
    "epilogue": "none",
    "ratio_to_jnp_dot": ratio,
  }


def test_what_a_mean_hides_is_said():
  found = [compared_row(x) for x in (0.5, 2.0, 2.0)]
  assert dense_tables.losses(found) == (
    "1 of 3 cases is slower. Median 2.000x."
  )
  found.append(compared_row(8.0, suite="unaligned"))
  assert dense_tables.losses(found) == (
    "1 of 4 cases is slower. Without `unaligned`: 1.260x; median 2.000x."
  )
  assert dense_tables.losses(found[1:]).startswith("None of 3 cases is slower.")


def test_wall_time_of_short_cases_is_shown(run, gpu, monkeypatch, tmp_path):
  measure = timing.measure

  def with_wall(arms, **how):
    times = measure(arms, **how)
    return {
      name: dataclasses.replace(x, wall_ms=(0.09 if i == 0 else 0.06,))
      for i, (name, x) in enumerate(times.items())
    }

  monkeypatch.setattr(timing, "measure", with_wall)
  status, out = run("--suite=quick", "--update_readme", "--noplot")
  assert status == 0, out
  text = (tmp_path / "README.md").read_text()
  assert (
    "of these 3 cases the geomean is 2.000x by kernel time and 0.667x by wall"
    " time, by which 3 are slower, at worst 0.667x (24x16x40)"
  ) in text
  assert "a call takes 90.0 us" in text and "`jnp`'s 60.0 us" in text
  assert "None of these cases launches more kernels than `jnp`." in text


def test_readmes_device_is_taken_where_several_have_rows(monkeypatch, tmp_path):
  monkeypatch.setattr(rows, "RESULTS", tmp_path)
  with pytest.raises(cli.FlagError, match="there is none"):
    report._measured_file("dense")
  for name in ("another", overview.DEVICES[0]):
    (tmp_path / name).mkdir()
    (tmp_path / name / "dense.jsonl").write_text('{"ms_median": 1.0}\n')
    assert report._measured_file("dense").parent.name == name
  (tmp_path / overview.DEVICES[0]).rename(tmp_path / "fourth")
  with pytest.raises(cli.FlagError, match="want one file of timed rows"):
    report._measured_file("dense")


def test_a_page_from_one_devices_rows_keeps_the_others(
  run, monkeypatch, tmp_path
):
  monkeypatch.setattr(rows, "RESULTS", tmp_path)
  names = {device: f"DEVICE OF {device}" for device in overview.DEVICES}
  paths = [tmp_path / device / "dense.jsonl" for device in names]
  for path, name in zip(paths, names.values()):
    rows.append(path, make_row(2.0, device=name))
  pages = set()
  for path in paths:
    run(f"--from_rows={path}", "--update_readme", "--noplot")
    pages.add((tmp_path / "README.md").read_text())
  [text] = pages
  first, second = names.values()
  assert 0 < text.index(first) < text.index(second)


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
  assert (tmp_path / "dense_unseen.png").stat().st_size > 10_000
  assert not (tmp_path / "dense.png").exists()
  for args, message in (
    (["--suite=square"], "--unseen: goes with no --suite and no --shapes"),
    (["--update_readme"], "--update_readme: has no section for --unseen"),
  ):
    with pytest.raises(cli.FlagError, match=message):
      run("--unseen=2", *args)


def test_where_a_config_is_from():
  """An H200's choices for the suites are shipped, for other sizes modelled."""
  with hardware.assume("NVIDIA H200"):
    for m, origin in ((4096, "shipped"), (4104, "model")):
      case = dense_cases.Case(suite="square", m=m, n=4096, k=4096)
      fn = dense_cases.ours(case, "sm90")
      config, found = prepared.config_of(fn, case.operands())
      assert config["block_m"] >= 64 and found == origin


def test_what_xla_computes_fastest_is_tuned_without_a_config(monkeypatch):
  some = case()
  found = {"block_m": 64}
  monkeypatch.setattr(dense.autotune, "autotune", lambda *args, **kwargs: None)
  monkeypatch.setattr(prepared, "config_of", lambda *args: (found, "cache"))
  arm = dense.tuned(some)  # without a GPU it is XLA that computes it
  assert arm.config is None
  monkeypatch.setattr(prepared, "runs_kernel", lambda text: True)
  assert dense.tuned(some).config == found
  monkeypatch.setattr(prepared, "config_of", lambda *args: (None, None))
  assert dense.tuned(some) is None


def test_tuned_is_a_third_arm(run, gpu, monkeypatch, tmp_path):
  choice = "sm90", {"block_m": 64}, "model"
  monkeypatch.setattr(prepared, "_choice", lambda *args: choice)

  def tuned(case):
    return case_lib.Candidate(
      lambda: dense_cases.baseline(case), {"block_m": 128}
    )

  monkeypatch.setattr(dense, "tuned", tuned)
  status, out = run("--shapes=8x16x24", "--tuned", "--noplot")
  assert status == 0, out
  row = stored(tmp_path)[-1]
  rows.validate(row)
  assert row["config"] == {"block_m": 64} and row["config_origin"] == "model"
  assert row["tuned_config"] == {"block_m": 128}
  # Arms take 1, 2 and 3 times as long.
  assert row["tuned_ms_median"] == pytest.approx(3 * row["ms_median"])
  assert "tuned 0.667x" in out


def test_a_wrong_result_is_never_timed_and_the_run_goes_on(
  run, gpu, monkeypatch, tmp_path
):
  real = replaces_matmul(
    monkeypatch,
    lambda a, b, **kwargs: real(a, b, **kwargs).at[0, 0].add(8.0),
    lambda kwargs: kwargs.get("bias") is not None,
  )
  status, out = run("--suite=quick", "--noplot")
  assert status == 1
  *_, plain, epilogue, vjp = stored(tmp_path)
  assert [r["passed"] for r in (plain, epilogue, vjp)] == [True, False, True]
  assert epilogue["ms_median"] is None and vjp["ms_median"] is not None
  assert "FAILED (1): quick 24x16x40 bias+gelu bfloat16" in out


def test_a_case_that_can_not_run_costs_no_other(run, monkeypatch, tmp_path):
  def broken(a, b, **kwargs):
    raise RuntimeError("no such instruction\nand more lines")

  replaces_matmul(
    monkeypatch, broken, lambda kwargs: kwargs.get("bias") is not None
  )
  status, out = run()
  assert status == 1
  assert [row["kernel"] for row in stored(tmp_path)] == ["matmul", "matmul_vjp"]
  assert "can't run here: RuntimeError: no such instruction\n" in out
  assert "FAILED (1): interpret 24x16x40 bias+gelu" in out


def test_interrupt_keeps_finished_rows(run, monkeypatch, tmp_path):
  real = dense_cases.Case.check

  def check(case, *args):
    if case.epilogue != "none":
      raise KeyboardInterrupt
    return real(case, *args)

  monkeypatch.setattr(dense_cases.Case, "check", check)
  status, out = run()
  assert status == 130 and "interrupted: 1 finished rows were kept" in out
  assert len(stored(tmp_path)) == 1


@pytest.mark.parametrize(
  "args, message",
  [
    (["--suite=nope"], "--suite: no suite 'nope'; there are square"),
    (["--suite=square,all"], "--suite=square,all: too large without"),
    (["--shapes=4x4"], "--shapes: want MxNxK"),
    (["--dtype=float32"], "--dtype: the ops are compared in 16 bits"),
    (["--unseen=3"], "--unseen: too large without an NVIDIA GPU"),
    (["--from_rows=/no/such"], "--from_rows: there is no /no/such"),
    (["--update_readme"], "no timed rows"),
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


def make_row(ratio, **fields):
  base = {
    "experiment": "dense",
    "kernel": "matmul",
    "number": None,
    "dtype": "bfloat16",
    "ratio_to_jnp_dot": ratio,
  }
  variant = {"suite": "square", "epilogue": "none", "layout": "NN", "batch": 1}
  row = test_harness_rows.make_row(**base)
  return row | variant | {"out_dtype": "bfloat16"} | fields


def test_summary_gives_geomean_worst_and_best():
  found = [
    make_row(0.5, layout="TN"),
    make_row(2.0, batch=3, epilogue="bias", out_dtype="float32"),
    make_row(None, passed=False, ms_median=None),
    make_row(4.0, suite="gated", kernel="gated_matmul"),
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
  first = [make_row(x, seed=7, commit="a") for x in (0.9, 1.6)]
  again = [make_row(1.0, seed=7, commit="b"), make_row(None, ms_median=None)]
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


def test_rows_that_differ_in_a_variant_are_kept_apart():
  found = [make_row(1.0, layout=layout) for layout in ("NN", "NT", "NN")]
  assert [r["layout"] for r in rows.latest(found)] == ["NN", "NT"]
  found.append(make_row(1.0, dtype="float16"))
  assert list(tables.grouped(found, tables.suite)) == [
    "square",
    "square float16",
  ]


def test_help_is_for_newcomers():
  status, out, err = programs.start("experiments.dense", "--help")
  assert (status, err) == (0, "")
  assert "python -m experiments.dense --suite=all" in out
  for flag in (
      "suite", "shapes", "dtype", "repeats", "warmup", "seed", "output_dir",
      "tuned", "implementation", "plot", "update_readme", "from_rows",
  ):  # fmt: skip
    assert re.search(rf"--\[?(no\])?{flag}:", out), flag
