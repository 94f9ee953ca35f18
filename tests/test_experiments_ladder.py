"""The ladder runner: flags, rows, README, exit status. No GPU needed."""

import dataclasses

import jax.numpy as jnp
import pytest

from experiments import ladder
from experiments.harness import cli, rows, suites, timing
from pallas_gemm import compat, hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract
from tests import test_harness_rows
from tests.support import programs


def right(a, b, c, problem, config):
  del config
  acc = jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
  return contract.combine(acc, c, problem).astype(problem.dtype)


def wrong(a, b, c, problem, config):
  return right(a, b, c, problem, config).at[0, 0].add(1.0)


def not_a_number(a, b, c, problem, config):
  return right(a, b, c, problem, config).at[1, 1].set(jnp.nan)


def broken(a, b, c, problem, config):
  raise RuntimeError("no such instruction\nand more lines")


def interrupts(a, b, c, problem, config):
  raise KeyboardInterrupt


def stub(number, name, kernel=right, dtypes=contract.FLOAT32):
  """A rung whose kernel is a function of this file."""
  config = contract.SimtConfig(block_m=16, block_n=16, block_k=8)
  if number > 8:
    config = contract.TensorCoreConfig(block_m=64, block_n=64, block_k=64)
    dtypes = contract.FLOAT16S
  return contract.Rung(
    number=number,
    name=name,
    dtypes=dtypes,
    idea=f"idea of {name}",
    config_type=type(config),
    default_config=lambda problem: config,
    is_legal=lambda config, problem: None,
    kernel=kernel,
    module="pallas_gemm.ladder.contract",
  )


LADDER = (
  stub(1, "naive"),
  stub(2, "coalesced"),
  stub(3, "shared_memory"),
  stub(9, "tensor_cores"),
)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program in this process: (status, standard output)."""
  monkeypatch.setattr(ladder_lib, "LADDER", LADDER, raising=False)
  (tmp_path / "README.md").write_text(programs.readme("ladder"))

  def call(*args):
    places = f"--output_dir={tmp_path}", f"--readme={tmp_path / 'README.md'}"
    status = programs.call(ladder.main, [*places, *args])
    return status, capsys.readouterr().out

  return call


@pytest.fixture
def gpu(monkeypatch):
  """Pretends that there is an H200, where calls take made-up times."""
  programs.pretend_times(monkeypatch)
  monkeypatch.setattr(compat, "targets_gpu", lambda: True)
  monkeypatch.setattr(hardware, "current", lambda: hardware.lookup("H200"))


def stored(tmp_path):
  return rows.read(tmp_path / "ladder.jsonl")


def test_interpreter_run_checks_all_and_times_nothing(run, tmp_path):
  status, out = run()
  assert status == 0
  found = stored(tmp_path)
  assert [row["kernel"] for row in found] == [rung.name for rung in LADDER]
  for row in found:
    rows.validate(row)
    assert row["passed"] is True
    assert row["max_error"] <= row["error_bound"]
    assert (row["m"], row["n"], row["k"]) == suites.suite("interpret")[0]
    for name in ("ms_median", "tflops", "gbytes_per_s", "ratio_to_jnp_dot"):
      assert row[name] is None
    assert row["config"] == dataclasses.asdict(
      LADDER[found.index(row)].default_config(None)
    )
  assert [row["dtype"] for row in found] == ["float32"] * 3 + ["bfloat16"]
  assert "interpreted times are not GPU times" in out
  assert out.count("FLOP/byte") == len(LADDER)
  assert out.count("PASSED") == 2 * len(LADDER)  # lines and table


def test_alpha_beta_and_shapes_reach_the_kernel(run, tmp_path):
  status, out = run("--alpha=0.5", "--beta=-2", "--shapes=5x7x3", "--sizes=8")
  assert status == 0, out
  found = stored(tmp_path)
  assert {(r["m"], r["n"], r["k"]) for r in found} == {(8, 8, 8), (5, 7, 3)}
  assert {(r["alpha"], r["beta"]) for r in found} == {(0.5, -2.0)}


@pytest.mark.parametrize("kernel", [wrong, not_a_number])
def test_a_failed_check_exits_non_zero_and_the_run_goes_on(
  run, monkeypatch, tmp_path, kernel
):
  bad = (LADDER[0], stub(2, "coalesced", kernel), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  status, out = run()
  assert status == 1
  assert [row["passed"] for row in stored(tmp_path)] == [True, False, True]
  assert "FAILED: coalesced" in out
  if kernel is not_a_number:
    assert stored(tmp_path)[1]["max_error"] is None


def test_a_kernel_that_can_not_run_costs_no_other_row(
  run, monkeypatch, tmp_path
):
  bad = (LADDER[0], stub(2, "coalesced", broken), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  status, out = run()
  assert status == 1
  assert [r["kernel"] for r in stored(tmp_path)] == ["naive", "shared_memory"]
  assert "can't run here: RuntimeError: no such instruction\n" in out


def test_a_problem_too_large_costs_no_other_row(run, monkeypatch, tmp_path):
  real = ladder.inputs.operands

  def operands(problem, seed):
    if problem.m > 100:
      raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
    return real(problem, seed)

  monkeypatch.setattr(ladder.inputs, "operands", operands)
  status, out = run("--kernels=1", "--sizes=101,8")
  assert status == 1
  assert "101x101x101 float32  can't run: MemoryError: RESOURCE" in out
  assert [row["m"] for row in stored(tmp_path)] == [8]


def test_interrupt_keeps_finished_rows_and_resume_goes_on(
  run, monkeypatch, tmp_path
):
  stops = (LADDER[0], stub(2, "coalesced", interrupts), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", stops, raising=False)
  status, out = run()
  assert status == 130
  assert "interrupted: 1 finished rows were kept" in out
  assert [row["kernel"] for row in stored(tmp_path)] == ["naive"]

  monkeypatch.setattr(ladder_lib, "LADDER", LADDER, raising=False)
  status, out = run("--resume")
  assert status == 0
  assert " 1 naive" in out and "kept from" in out
  # Measured once each, in order; the kept row was not written again.
  names = [row["kernel"] for row in stored(tmp_path)]
  assert names == [rung.name for rung in LADDER]
  # Another seed is another measurement.
  run("--resume", "--seed=1", "--kernels=1")
  assert len(stored(tmp_path)) == len(LADDER) + 1


def test_failed_rows_are_measured_again_on_resume(run, monkeypatch, tmp_path):
  bad = (stub(1, "naive", wrong),)
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  assert run()[0] == 1
  monkeypatch.setattr(ladder_lib, "LADDER", LADDER[:1], raising=False)
  assert run("--resume")[0] == 0
  assert [row["passed"] for row in stored(tmp_path)] == [False, True]


def test_timed_run_compares_with_jnp_dot(run, gpu, tmp_path):
  status, out = run("--sizes=32", "--nopeers")
  assert status == 0, out
  found = stored(tmp_path)
  assert [row["kernel"] for row in found] == [
      "jnp.dot HIGHEST", "jnp.dot DEFAULT", "naive", "coalesced",
      "shared_memory", "jnp.dot", "tensor_cores",
  ]  # fmt: skip
  for row in found:
    rows.validate(row)
    assert row["repeats"] == timing.DEFAULT_REPEATS
    assert row["ms_p25"] < row["ms_median"] < row["ms_p75"]
    # The fake takes twice as long for the second arm, the baseline.
    assert row["ratio_to_jnp_dot"] == pytest.approx(2)
    want = 2 * 32**3 / row["ms_median"] / 1e9
    assert row["tflops"] == pytest.approx(want)
    assert row["kernel_names"] == ["k0"]
    assert row["baseline_kernel_names"] == ["k1"]
  assert "(w:5 r:25)" in out and "2.000x of jnp.dot" in out
  assert "1.000x of rung 1" in out
  assert (tmp_path / "ladder.png").stat().st_size > 10_000
  assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_a_wrong_result_is_never_timed(run, gpu, monkeypatch, tmp_path):
  bad = (stub(1, "naive", wrong), LADDER[1])
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  status, _ = run("--sizes=32", "--nopeers", "--noplot")
  assert status == 1
  row = rows.find(stored(tmp_path), kernel="naive")
  assert row["passed"] is False and row["ms_median"] is None


def test_peers_that_can_not_run_are_named_with_their_reason(
  run, gpu, monkeypatch, tmp_path
):
  monkeypatch.setattr(compat, "target_device", lambda: None, raising=False)
  status, out = run("--sizes=32", "--kernels=1", "--noplot")
  assert status == 0, out
  for name in ("triton_dense", "jax_hopper_matmul_mgpu"):
    [text] = [
      line for line in out.splitlines() if line.strip().startswith(name)
    ]
    assert "can't run here: " in text and len(text) > 60
    assert rows.find(stored(tmp_path), kernel=name) is None


def test_readme_is_rewritten_between_markers_and_only_once(run, gpu, tmp_path):
  run("--sizes=32", "--nopeers", "--update_readme")
  text = (tmp_path / "README.md").read_text()
  assert text.startswith("# Title\n\n<!-- ladder:begin -->\n\n")
  assert text.endswith("\n\n<!-- ladder:end -->\n\nEnd.\n")
  assert "old" not in text
  assert "| 1 | naive | " in text and "| 9 | tensor_cores | " in text
  assert "jnp.dot HIGHEST" in text and "![ladder](ladder.png)" in text
  assert "Boehm" in text  # published figures beside ours
  count = len(stored(tmp_path))
  # Alone, it measures nothing and finds nothing new.
  status, out = run("--update_readme")
  assert status == 0 and "nothing new for" in out
  assert (tmp_path / "README.md").read_text() == text
  assert len(stored(tmp_path)) == count


def test_from_rows_needs_no_gpu(run, tmp_path):
  path = tmp_path / "measured" / "ladder.jsonl"
  for number, name in ((1, "naive"), (2, "coalesced")):
    rows.append(path, test_harness_rows.make_row(number=number, kernel=name))
  status, out = run(f"--from_rows={path}", "--update_readme", "--noplot")
  assert status == 0
  assert "naive" in out
  assert "| 2 | coalesced | " in (tmp_path / "README.md").read_text()


def test_latest_rows_count_in_the_readme(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  for tflops in (1.0, 3.0):
    rows.append(path, test_harness_rows.make_row(tflops=tflops))
  run(f"--from_rows={path}", "--update_readme", "--noplot")
  text = (tmp_path / "README.md").read_text()
  assert "| 3.00 |" in text and "| 1.00 |" not in text


@pytest.mark.parametrize(
  "args, message",
  [
    (["--kernels=13"], "--kernels: no rung 13; there are 1 naive"),
    (["--kernels=0-2"], "--kernels: no rung 0-2"),
    (["--kernels=2-1"], "--kernels: no rung 2-1"),
    (["--kernels=nave"], "--kernels: no rung 'nave'"),
    (["--kernels="], "--kernels: no rung ''"),
    (["--sizes=12,x"], "--sizes: want positive integers, got 'x'"),
    (["--sizes=0"], "--sizes: want positive integers, got '0'"),
    (["--shapes=4x4"], "--shapes: want MxNxK"),
    (["--shapes=4x0x4"], "--shapes: every dimension must be at least 1"),
    (["--gpu=potato"], "--gpu: name must be a known GPU, got 'potato'"),
    (["--kernels=1", "--dtype=bfloat16"], "none of the rungs"),
    (["--alpha=nan"], "--alpha: want a number, got nan"),
    (["--beta=inf"], "--beta: want a number, got inf"),
    (["--explain=42"], "no rung 42"),
    (["--from_rows=/no/such"], "--from_rows: there is no /no/such"),
    (["--update_readme"], "no timed rows"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert "\n" not in str(caught.value)


def test_a_readme_without_markers_is_an_error(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  rows.append(path, test_harness_rows.make_row())
  (tmp_path / "README.md").write_text("no markers")
  with pytest.raises(cli.FlagError, match="want one line <!-- ladder:begin"):
    run(f"--from_rows={path}", "--update_readme", "--noplot")


def test_a_foreign_row_is_an_error(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  rows.append(path, {"experiment": "ladder"})
  with pytest.raises(cli.FlagError, match="row lacks kernel"):
    run(f"--from_rows={path}")


@pytest.mark.parametrize(
  "text, numbers",
  [
    ("all", [1, 2, 3, 9]),
    ("1-2", [1, 2]),
    ("3,1", [1, 3]),
    ("9,naive, 2", [1, 2, 9]),
    ("tensor_cores", [9]),
    ("2-9", [2, 3, 9]),
  ],
)
def test_kernels_are_numbers_ranges_or_names(text, numbers):
  found = cli.parse_rungs(text, LADDER)
  assert [rung.number for rung in found] == numbers


def test_dtype_leaves_out_rungs_that_do_not_take_it(run, tmp_path):
  assert run("--dtype=float16")[0] == 0
  [row] = stored(tmp_path)
  assert (row["kernel"], row["dtype"]) == ("tensor_cores", "float16")


def test_explain_prints_the_page_and_the_models_numbers(run, tmp_path):
  status, out = run("--explain=3", "--sizes=64,128", "--gpu=A100-SXM4-40GB")
  assert status == 0
  assert out.startswith("Rung 3: shared_memory\n====")
  assert "What every rung shares" in out  # the module's docstring
  assert out.count("arithmetic intensity") == 2 and "A100" in out
  assert not (tmp_path / "ladder.jsonl").exists()


def program(*args):
  """The program as a user starts it: (status, stdout, stderr)."""
  return programs.start("experiments.ladder", *args)


def test_the_real_ladder_runs_without_a_gpu(tmp_path):
  status, out, err = program("--shapes=9x10x11", f"--output_dir={tmp_path}")
  assert status == 0, out + err
  found = stored(tmp_path)
  assert [row["number"] for row in found] == list(range(1, 13))
  for row in found:
    rows.validate(row)
    assert row["passed"] is True and row["tflops"] is None


def test_help_is_for_newcomers():
  status, out, err = program("--help")
  assert (status, err) == (0, "")
  assert "python -m experiments.ladder --kernels=1-8" in out
  for flag in (
      "kernels", "sizes", "shapes", "dtype", "alpha", "beta", "warmup",
      "repeats", "seed", "output_dir", "plot", "update_readme", "peers",
      "resume", "explain", "from_rows", "gpu",
  ):  # fmt: skip
    assert f"--{flag}:" in out or f"--[no]{flag}:" in out


@pytest.mark.parametrize(
  "args, message",
  [
    (["--kernels=99"], "error: --kernels: no rung 99"),
    (["--repeats=3"], "error: flag --repeats=3: "),
    (["extra"], "error: unexpected argument 'extra'"),
  ],
)
def test_errors_are_one_line_without_a_traceback(args, message):
  status, out, err = program(*args)
  assert status == 2
  assert out == ""
  assert err.startswith(message), err
  assert len(err.splitlines()) == 1
