"""The program that compares grouped products with XLA's. No GPU needed."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ragged
from experiments.harness import (
  cli,
  ragged_cases,
  rows,
  shapes,
  timing,
)
from experiments.harness import run as run_lib
import pallas_gemm
from tests.support import programs

SHAPE = {"m": 12, "n": 16, "k": 8, "groups": 3}
SMALL = [
  SHAPE | {"pass_": "forward", "sizes": "even"},
  SHAPE | {"pass_": "forward", "sizes": "one_hot"},
  SHAPE | {"pass_": "dw", "sizes": "odd"},
]


def case(**fields):
  return ragged_cases.Case(suite="test", **SHAPE | fields)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program in this process: (status, standard output)."""
  monkeypatch.setitem(shapes.GROUPED, "interpret", shapes.Suite(SMALL, ()))

  def call(*args):
    status = programs.call(ragged.main, [f"--output_dir={tmp_path}", *args])
    return status, capsys.readouterr().out

  return call


@pytest.fixture
def gpu(monkeypatch):
  """Pretends that there is a GPU, where calls take made-up times."""
  programs.pretend_times(monkeypatch)
  fake = types.SimpleNamespace(targets_gpu=lambda: True)
  monkeypatch.setattr(ragged, "compat", fake)
  monkeypatch.setattr(run_lib, "_BANDWIDTH_SHAPE", (64, 32))
  decode = [SHAPE | {"sizes": "random"}]
  published = {"distributions": SMALL[:2], "decode": decode}
  programs.pretend_suites(monkeypatch, "GROUPED", published, SMALL)


def replaces_ragged_dot(monkeypatch, wrong):
  """Makes the op give something else."""
  real = pallas_gemm.ragged_dot

  def ragged_dot(lhs, rhs, group_sizes, **kwargs):
    return wrong(real, lhs, rhs, group_sizes, **kwargs)

  monkeypatch.setattr(pallas_gemm, "ragged_dot", ragged_dot)


def stored(tmp_path):
  return rows.read(tmp_path / "ragged.jsonl")


def test_a_run_without_a_gpu_checks_all(run, tmp_path):
  status, out = run()
  assert status == 0, out
  found = stored(tmp_path)
  assert [row["pass"] for row in found] == ["forward", "forward", "dw"]
  assert [row["group_sizes"] for row in found] == ["even", "one_hot", "odd"]
  for row in found:
    rows.validate(row)
    assert row["passed"] is True and row["max_error"] <= row["error_bound"]
    assert row["implementation"] == "xla" and row["config"] is None
    assert row["ms_median"] is None and row["tflops"] is None
    assert row["arms"] == {}
    assert (row["suite"], row["groups"]) == ("interpret", 3)
    assert row["kernel"] == "ragged_dot" and row["dtype"] == "bfloat16"
  forward, _, dw = (row["skipped"] for row in found)
  for skipped, example in (
    (forward, "jax_ragged_dot_mgpu"),
    (dw, "jax_transposed_ragged_dot_mgpu"),
  ):
    assert skipped.pop("lax.ragged_dot fused") == "XLA has it for GPUs"
    missing = example, "indexed_linear", "tokamax mosaic", "tokamax triton"
    assert skipped == dict.fromkeys(missing, "it needs a Hopper GPU")
  assert out.count("PASSED") == 3 and "checked, not timed" in out


def test_passes_choose_among_the_cases(run, tmp_path):
  status, out = run("--passes=dw", "--dtype=float16")
  assert status == 0, out
  [row] = stored(tmp_path)
  assert (row["pass"], row["dtype"]) == ("dw", "float16")


def test_a_timed_run_compares_all_arms(run, gpu, tmp_path):
  status, out = run("--suite=quick")
  assert status == 0, out
  copy, _, even, one_hot, dw = stored(tmp_path)
  for row in stored(tmp_path):
    rows.validate(row)
    assert row["repeats"] == timing.DEFAULT_REPEATS
  assert list(even["arms"]) == ["pallas_gemm", "lax.ragged_dot", "jnp.dot"]
  # The fake takes twice and three times as long for the second and third arm.
  assert even["ratio_to_jnp_dot"] == pytest.approx(2)
  assert even["kernel_names"] == ["k0"]
  assert even["baseline_kernel_names"] == ["k1"]
  # Of 12 rows, 3 odd groups have 11.
  for row, m in ((even, 12), (one_hot, 12), (dw, 11)):
    flops = 2 * m * 16 * 8
    assert row["tflops"] == pytest.approx(flops / row["ms_median"] / 1e9)
    dense = row["arms"]["jnp.dot"]
    assert dense["ms_p25"] < dense["ms_median"] < dense["ms_p75"]
    assert dense["kernel_names"] == ["k2"]
    assert dense["tflops"] == pytest.approx(row["tflops"] / 3)
  least = 2 * (1 * 8 * 16 + 12 * (8 + 16))  # one group has rows
  rate = least / one_hot["ms_median"] / 1e6
  assert one_hot["gbytes_per_s"] == pytest.approx(rate)
  assert one_hot["copy_gbytes_per_s"] == copy["gbytes_per_s"]
  assert one_hot["ratio_to_even"] == 1 and "ratio_to_even" not in dw
  assert "2.000x of lax.ragged_dot" in out and "3.000x of jnp.dot" in out


def test_what_can_not_run_costs_no_other(run, monkeypatch, tmp_path):
  def broken(real, lhs, rhs, group_sizes, **kwargs):
    if isinstance(rhs, jax.core.Tracer) and rhs.shape[0] == 3:
      raise RuntimeError("no such instruction\nand more lines")
    return real(lhs, rhs, group_sizes, **kwargs)

  replaces_ragged_dot(monkeypatch, broken)
  other = SHAPE | {"groups": 2}
  pair = shapes.Suite([SHAPE, other], ())
  monkeypatch.setitem(shapes.GROUPED, "interpret", pair)
  status, out = run()
  assert status == 1
  assert [row["groups"] for row in stored(tmp_path)] == [2]
  assert "can't run here: RuntimeError: no such instruction\n" in out


def test_another_arm_than_the_op_may_fail(run, gpu, monkeypatch, tmp_path):
  def no_memory(*args):
    raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

  monkeypatch.setattr(run_lib.Bench, "_checked", no_memory)
  status, out = run("--suite=decode")
  assert status == 0, out
  row = stored(tmp_path)[-1]
  assert list(row["arms"]) == ["pallas_gemm"]
  assert row["skipped"]["lax.ragged_dot"].startswith("MemoryError: RESOURCE")
  assert row["ratio_to_jnp_dot"] is None


def test_an_arm_that_ends_all_use_of_the_gpu_is_named(run, gpu, monkeypatch):
  def illegal(*args):
    raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

  def checked(*args):
    monkeypatch.setattr(jnp, "negative", illegal)  # the check's
    illegal()

  monkeypatch.setattr(run_lib.Bench, "_checked", checked)
  status, out = run("--suite=decode")
  assert status == 1
  assert "lax.ragged_dot leaves a GPU that runs nothing: JaxRuntimeError" in out


@pytest.mark.parametrize(
  "args, message",
  [
    (["--suite=nope"], "--suite: no suite 'nope'; there are mixtral"),
    (["--suite=decode,all"], "--suite=decode,all: too large without"),
    (["--passes=up"], "--passes: no pass 'up'; there are forward, dx"),
    (["--passes=dx"], "--passes=dx: interpret has no such case"),
    (["--beside=me"], "--beside: no 'me'; there are jnp.dot"),
    (["--dtype=float32"], "--dtype: the ops are compared in 16 bits"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert "\n" not in str(caught.value)


# Cases.


def test_all_arms_of_every_case_give_the_same_arrays():
  names = "all", "interpret", "sizes", "odd"
  cases = [x for name in names for x in ragged_cases.suite(name)]
  assert len(set(cases)) == len(cases) > 50
  for each in {each.program: each for each in cases}.values():
    operands = each.operands()
    mine = jax.eval_shape(ragged_cases.ours(each), **operands)
    assert mine == jax.eval_shape(ragged_cases.lax(each), **operands), each
    assert mine == jax.eval_shape(ragged_cases.two_calls(each), **operands)
    jax.eval_shape(ragged_cases.dense(each), **operands)


@pytest.mark.parametrize("pass_", ["forward", "dx", "dw"])
def test_a_pass_computes_one_product(pass_):
  """Or two: the loop along K has a group's first tile and those that add."""
  each, of_loop = case(pass_=pass_), 2 if pass_ == "dw" else 1
  arms = ragged_cases.lax(each), ragged_cases.ours(each, "xla")
  for arm, products in zip(arms, (1, of_loop)):
    text = jax.jit(arm).lower(**each.operands()).as_text("hlo")
    count = text.count(" ragged-dot(") + text.count(" dot(")
    assert count == products, text


@pytest.mark.parametrize("name", ragged_cases.DISTRIBUTIONS)
def test_group_sizes(name):
  for m, groups in ((16384, 32), (64, 64), (33, 4)):
    sizes = case(m=m, groups=groups, sizes=name).group_sizes(seed=3)
    assert sizes.dtype == np.int32 and sizes.shape == (groups,)
    missing = {"padded": m // 4, "odd": (m - groups) % 2}.get(name, 0)
    assert sizes.sum() == m - missing and sizes.min() >= 0
    again = case(m=m, groups=groups, sizes=name).group_sizes(seed=3)
    np.testing.assert_array_equal(sizes, again)
    if name == "even":
      assert sizes.max() - sizes.min() <= 1
    if name == "odd":
      assert (sizes % 2 == 1).all()
    if name == "one_hot":
      assert np.count_nonzero(sizes) == 1
    if name == "half_empty":
      assert np.count_nonzero(sizes) == groups // 2
    if name == "zipf" and m > 1000:
      assert sizes.max() > 4 * m / groups > 8 * np.median(sizes)


def test_work_is_counted():
  product = 2 * 12 * 16 * 8
  assert case().flops(0) == case(pass_="dw").flops(0) == product
  assert case(sizes="padded").flops(0) == product * 9 // 12
  assert case(pass_="gated").flops(0) == 2 * product
  layer = case(pass_="layer", top_k=2)
  assert layer.flops(0) == 3 * product
  assert case(pass_="layer_grad", top_k=2).flops(0) == 9 * product
  rows_ = 12 * (16 + 8)
  assert case().least_bytes(0) == 2 * (3 * 16 * 8 + rows_)
  assert case(sizes="one_hot").least_bytes(0) == 2 * (16 * 8 + rows_)
  dw = case(sizes="one_hot", pass_="dw")
  assert dw.least_bytes(0) == 2 * (3 * 16 * 8 + rows_)
  assert layer.least_bytes(0) == 2 * (9 * 16 * 8 + 2 * 6 * 8)


# The check.

# More rows, columns and groups than are sampled.
LARGE = {"m": 900, "n": 70, "k": 66, "groups": 12}
CHECKED = [
  case(**LARGE, sizes="zipf"),
  case(**LARGE, sizes="padded"),
  case(**LARGE, sizes="half_empty", pass_="dx"),
  case(**LARGE, sizes="half_empty", pass_="dw"),
  case(**LARGE, sizes="one_hot", pass_="gated"),
  case(**LARGE, pass_="layer", top_k=2),
]


@pytest.mark.parametrize(
  "each", CHECKED, ids=lambda each: f"{each.pass_}_{each.sizes}"
)
def test_right_results_pass_and_wrong_ones_do_not(each):
  operands = each.draw(seed=1)
  out = jax.jit(ragged_cases.ours(each, "xla"))(**operands)
  check = each.check(out, operands)
  assert check.passed and 0 < check.worst_ratio <= 1, check
  assert 0 < check.error_bound < 8

  def judged(changed):
    return each.check(jnp.asarray(changed), operands)

  values = np.asarray(out)
  assert not judged(-values).passed
  assert not judged(np.roll(values, 1, axis=-1)).passed
  if not each.is_layer:
    assert not judged(np.roll(values, 40, axis=0)).passed
  values = values.copy()
  values[tuple(size // 2 for size in values.shape)] = np.nan
  unseen = judged(values)
  assert not unseen.passed and np.isinf(unseen.max_error)


def test_rows_outside_of_all_groups_must_be_zero():
  each = CHECKED[1]
  operands = each.draw(seed=1)
  out = jax.jit(ragged_cases.ours(each, "xla"))(**operands)
  assert not each.check(out.at[-7, 3].set(1e-3), operands).passed


def test_an_empty_groups_weights_must_have_no_derivative():
  each = CHECKED[3]
  operands = each.draw(seed=1)
  out = jax.jit(ragged_cases.ours(each, "xla"))(**operands)
  empty = int(np.argmin(operands["group_sizes"]))
  changed = out.at[empty, 0, 0].set(1e-3)
  assert not each.check(changed, operands).passed
