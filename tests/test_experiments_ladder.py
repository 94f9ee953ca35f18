"""The ladder runner: flags, rows, exit status. No GPU needed."""

import dataclasses
import re
import types

import jax.numpy as jnp
import pytest

from experiments import ladder
from experiments.harness import (
  cli,
  ladder_cases,
  rows,
  rung_text,
  shapes,
  timing,
)
from pallas_gemm import compat, hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract
from tests.support import programs


def right(operands, problem, config):
  del config
  a, b, *c = operands
  acc = jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
  c = c[0] if c else None
  return contract.combine(acc, c, problem=problem).astype(problem.dtype)


def wrong(operands, problem, config):
  return right(operands, problem, config).at[0, 0].add(1.0)


def not_a_number(operands, problem, config):
  return right(operands, problem, config).at[1, 1].set(jnp.nan)


def broken(operands, problem, config):
  raise RuntimeError("no such instruction\nand more lines")


def interrupts(operands, problem, config):
  raise KeyboardInterrupt


def stub(name, kernel=right, variants=()):
  """A rung, or a variant, whose kernel is a function of this file."""
  return dataclasses.replace(
    ladder_lib.find(name), kernel=kernel, variants=variants
  )


LADDER = (
  stub("naive"),
  stub("coalesced"),
  stub("shared_memory"),
  stub("tensor_cores", variants=(stub("tensor_cores_pipelined"),)),
)
ALL = ladder_lib.with_variants(LADDER)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program in this process: (status, standard output)."""
  monkeypatch.setattr(ladder_lib, "LADDER", LADDER, raising=False)

  def call(*args):
    place = f"--output_dir={tmp_path}"
    status = programs.call(ladder.main, [place, *args])
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
  assert [row["kernel"] for row in found] == [rung.name for rung in ALL]
  for rung, row in zip(ALL, found):
    rows.validate(row)
    assert (row["number"], row.get("variant", "")) == (
      rung.number,
      rung.variant,
    )
    assert row["passed"] is True
    assert row["max_error"] <= row["error_bound"]
    assert (row["m"], row["n"], row["k"]) == shapes.suite("one")[0]
    for name in ("ms_median", "tflops", "gbytes_per_s", "ratio_to_jnp_dot"):
      assert row[name] is None
    problem = contract.Problem(row["m"], row["n"], row["k"], row["dtype"])
    config = rung.default_config(problem)
    assert row["config"] == dataclasses.asdict(config)
  assert [r["dtype"] for r in found] == ["float32"] * 3 + ["bfloat16"] * 2
  assert "run in Pallas' GPU interpreter" in out
  assert out.count("FLOP/byte") == len(ALL)
  assert out.count("PASSED") == 2 * len(ALL)  # lines and table


@pytest.mark.parametrize(
  ("kind", "capability", "skipped"),
  [
    ("Tesla T4", "7.5", ("wgmma",)),
    ("Tesla V100", "7.0", ("CUDA 13's ptxas",)),
    ("NVIDIA A100-SXM4-80GB", "8.0", ("wgmma",)),
    ("strange", None, ("CUDA 13's ptxas",)),
    ("AMD Instinct MI300X", "gfx942", ("an NVIDIA GPU",)),
  ],
)
def test_another_gpu_measures_what_it_can(
  run, monkeypatch, kind, capability, skipped
):
  """Or says why not, rung by rung."""
  programs.pretend_times(monkeypatch)
  device = types.SimpleNamespace(
    platform="gpu", device_kind=kind, compute_capability=capability
  )
  monkeypatch.setattr(compat, "target_device", lambda: device)
  status, out = run("--sizes=32", "--nopeers")
  assert status == 0, out
  for reason in skipped:
    assert re.search(rf"  skipped: rung \w+ needs {reason}, ", out)
  ran = {"Tesla T4": 3, "NVIDIA A100-SXM4-80GB": 3}.get(kind, 0)
  of_rungs = len(re.findall(r"(?m)^ +\d+[ab]? .*PASSED error", out))
  assert of_rungs == ran, out


def test_factors_shapes_and_dtypes_reach_the_kernels(run, tmp_path):
  """Rungs that do not take the dtype are left out."""
  flags = "--alpha=0.5", "--beta=-2", "--shapes=5x7x3", "--sizes=8"
  status, out = run(*flags, "--dtype=float16")
  assert status == 0, out
  found = stored(tmp_path)
  assert {(r["m"], r["n"], r["k"]) for r in found} == {(8, 8, 8), (5, 7, 3)}
  assert {(r["alpha"], r["beta"]) for r in found} == {(0.5, -2.0)}
  assert {(r["number"], r["dtype"]) for r in found} == {(9, "float16")}


@pytest.mark.parametrize(
  "kernel, said",
  [
    (wrong, "FAILED error / bound"),
    (not_a_number, "FAILED error / bound not finite"),
    (broken, "can't run here: RuntimeError: no such instruction\n"),
  ],
)
def test_what_fails_costs_no_other_row(
  run, monkeypatch, tmp_path, kernel, said
):
  bad = (LADDER[0], stub("coalesced", kernel), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  status, out = run()
  assert status == 1 and said in out
  assert "FAILED (1): 2 coalesced 48x40x24 float32" in out
  found = {row["kernel"]: row["passed"] for row in stored(tmp_path)}
  failed = {} if kernel is broken else {"coalesced": False}
  assert found == {"naive": True, "shared_memory": True} | failed


def test_interrupt_keeps_finished_rows(run, monkeypatch, tmp_path):
  stops = (LADDER[0], stub("coalesced", interrupts), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", stops, raising=False)
  status, out = run()
  assert status == 130
  assert "interrupted: 1 finished rows were kept" in out
  assert [row["kernel"] for row in stored(tmp_path)] == ["naive"]


def test_timed_run_compares_with_jnp_dot(run, gpu, tmp_path):
  status, out = run("--sizes=32", "--nopeers")
  assert status == 0, out
  found = stored(tmp_path)
  assert [row["kernel"] for row in found] == [
      "jnp.dot HIGHEST", "jnp.dot DEFAULT", "naive", "coalesced",
      "shared_memory", "jnp.dot", "tensor_cores", "tensor_cores_pipelined",
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
  assert "1.000x of rung 9" in out  # its variant
  assert "x rung 1  x rung 9" in out


def test_peers_that_can_not_run_are_named_with_their_reason(
  run, gpu, monkeypatch, tmp_path
):
  device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA L4")
  monkeypatch.setattr(compat, "target_device", lambda: device)
  status, out = run("--sizes=32", "--kernels=1")
  assert status == 0, out
  for name in ("triton_dense", "jax_hopper_matmul_mgpu"):
    [text] = [
      line for line in out.splitlines() if line.strip().startswith(name)
    ]
    assert "can't run here: " in text and len(text) > 60
    assert rows.find(stored(tmp_path), kernel=name) is None


def test_the_sweep_has_rows_of_its_own(run, gpu, monkeypatch, tmp_path):
  # The model says 1.1 ms for naive at 640, 8 us at 128.
  monkeypatch.setattr(ladder, "DOES_NOT_FIT_S", 0.5e-3)
  monkeypatch.setattr(ladder, "LONG_S", 5e-6)
  status, out = run("--sweep", "--sizes=128,640", "--kernels=1,2,9,9b")
  assert status == 0, out
  assert not (tmp_path / "ladder.jsonl").exists()
  found = rows.read(tmp_path / "sweep.jsonl")
  assert {row["experiment"] for row in found} == {"sweep"}
  assert not {row["kernel"] for row in found} & set(ladder_cases.PEERS)
  assert rows.find(found, kernel="naive", m=640) is None
  assert "naive                      640x640x640 float32  does not fit" in out
  repeats = {(r["kernel"], r["m"]): r["repeats"] for r in found}
  assert repeats["naive", 128] == ladder.LONG_REPEATS
  assert repeats["coalesced", 128] == timing.DEFAULT_REPEATS


@pytest.mark.parametrize(
  "args, message",
  [
    (["--kernels=14"], "--kernels: no rung '14'; there are 1 naive"),
    (["--kernels=0-2"], "--kernels: no rung '0-2'"),
    (["--kernels=2-1"], "--kernels: no rung '2-1'"),
    (["--kernels=nave"], "--kernels: no rung 'nave'"),
    (["--kernels=9c"], "no rung '9c'; .* 9b tensor_cores_pipelined"),
    (["--kernels="], "--kernels: no rung ''"),
    (["--sizes=12,x"], "--sizes: want positive integers, got 'x'"),
    (["--sizes=0"], "--sizes: want positive integers, got '0'"),
    (["--shapes=4x4"], "--shapes: want MxNxK"),
    (["--shapes=4x0x4"], "--shapes: every dimension must be at least 1"),
    (["--gpu=potato"], "--gpu: name must be a known GPU, got 'potato'"),
    (["--kernels=1", "--dtype=bfloat16"], "none of the rungs"),
    (["--alpha=nan"], "--alpha: want a number, got nan"),
    (["--beta=inf"], "--beta: want a number, got inf"),
    (["--explain=42"], "--explain: no rung '42'"),
    (["--explain=1", "--dtype=bfloat16"], "rungs of --explain=1 takes it"),
    (["--explain=1", "--diff=1,2"], "--explain, --diff: want one of them"),
    (["--explain=3", "--config=split=m"], "block_k=..; got 'split=m'"),
    (["--explain=3", "--config=block_m"], "fields of rung 3, block_m=.., "),
    (["--kernels=3", "--config=block_m=3"], "not legal: .* of two, got 3"),
    (["--explain=3", "--config=block_m=x"], "block_m must be an int .*'x'"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "text, labels",
  [
    ("all", "1 2 3 9 9b"),
    ("1-2", "1 2"),
    ("3,1", "1 3"),
    ("9,naive, 2", "1 2 9"),
    ("tensor_cores", "9"),
    ("2-9", "2 3 9"),
    ("9b", "9b"),
    ("1,tensor_cores_pipelined", "1 9b"),
  ],
)
def test_kernels_are_numbers_ranges_labels_or_names(text, labels):
  found = cli.parse_rungs(text, LADDER)
  assert " ".join(rung.label for rung in found) == labels


def test_explain_prints_the_page_and_the_models_numbers(run, tmp_path):
  status, out = run("--explain=3", "--sizes=64,128", "--gpu=A100-SXM4-40GB")
  assert status == 0
  assert out.startswith("Rung 3: shared_memory\n====")
  assert "Rung 3, shared_memory: a block loads" in out  # the docstring
  assert out.count("arithmetic intensity") == 2 and "A100" in out
  assert not (tmp_path / "ladder.jsonl").exists()


def test_explain_of_a_variant_says_whose_text_follows():
  out = rung_text.page(ladder_lib.find("8a"))
  *_, idea, _, text = out.splitlines()[:6]
  assert idea.startswith("A variant: ") and idea.endswith("Its file says:")
  assert text.startswith("Rung 8, double_buffering")


def test_fields_of_a_config(run, tmp_path):
  config = "--config=block_m=4,block_n=4,block_k=4"
  _, out = run("--explain=3", "--sizes=16", config)
  assert "M / BM = 16 / 4" in out and "K / BK = 16 / 4" in out
  assert run("--kernels=3", config)[0] == 0
  [row] = rows.read(tmp_path / "configs.jsonl")
  assert [row["config"][f"block_{side}"] for side in "mnk"] == [4, 4, 4]
  assert not (tmp_path / "ladder.jsonl").exists()


def test_the_real_ladder_runs_without_a_gpu(tmp_path):
  status, out, err = programs.start(
    "experiments.ladder", "--shapes=9x10x11", f"--output_dir={tmp_path}"
  )
  assert status == 0, out + err
  found = stored(tmp_path)
  there = [(x.number, x.name) for x in ladder_lib.with_variants()]
  assert [(row["number"], row["kernel"]) for row in found] == there
  for row in found:
    rows.validate(row)
    assert row["passed"] is True and row["tflops"] is None


def test_a_run_without_rows_names_no_file(run, monkeypatch, tmp_path):
  for kernel, status in ((broken, 1), (interrupts, 130)):
    only = (stub("naive", kernel),)
    monkeypatch.setattr(ladder_lib, "LADDER", only, raising=False)
    got, out = run(f"--output_dir={tmp_path / 'new'}")
    assert got == status
    assert "rows: " not in out and str(tmp_path) not in out
    assert not (tmp_path / "new").exists()
