"""The program that measures configs: flags, rows, status. No GPU needed."""

import functools
import json
import signal

from absl import flags
import pytest

from experiments import tune
from experiments.harness import cli, rows
from pallas_gemm import autotuning, compat, tuning
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.tuning import cache, model
from tests.support import programs

CHOSEN, FASTER, THIRD = CONFIGS = [
  Config(block_m=64, block_n=64, consumers=1, stages=2, epilogue_n=n)
  for n in (64, 32, 16)
]
GIVEN = Config(stages=1)
GROUPS = "--groups=24x40x4x8xodd"


@pytest.fixture(autouse=True)
def small_model(own_cache, monkeypatch):
  """A model of three small configs."""
  monkeypatch.setattr(model, "candidates", lambda problem, **_: CONFIGS)
  monkeypatch.setattr(model, "choose", lambda problem: CHOSEN)


@pytest.fixture
def run(capsys):
  """Runs the program in this process: (status, standard output)."""

  def call(*args):
    return programs.call(tune.main, args), capsys.readouterr().out

  return call


@pytest.fixture
def output(tmp_path):
  return tmp_path / "rows.jsonl"


@pytest.fixture
def tuned(monkeypatch):
  """Compiles and measures nothing; what was to be measured."""
  seen = []

  def prepare(case, configs, sizes):
    seen.append(autotuning.Prepared(case, configs, {}, {}, sizes))
    return seen[-1]

  def measured(prepared):
    times = [(1e-6 * c.epilogue_n, None) for c in prepared.configs]
    if prepared.configs[-1] == GIVEN:
      times[-1] = None, "too large"
    tried = tuple((c, *x) for c, x in zip(prepared.configs, times))
    times = 32e-6, CHOSEN, 64e-6, tried, 50e-6
    return autotuning.Tuned(prepared.case.problem, FASTER, *times)

  monkeypatch.setattr(autotuning, "prepare", prepare)
  monkeypatch.setattr(autotuning, "measured", measured)
  return seen


def names(seen):
  return [autotuning.describe(x.case.problem) for x in seen]


def test_interpreted(run, output):
  """Without a shape, a small one."""
  status, out = run(f"--output={output}", "--top=2")
  assert status == 0
  assert "48x40x24 bfloat16" in out and "interpreted, which is slow" in out
  found = rows.read(output)
  assert {row["config"].get("epilogue_n", 64) for row in found} == {32, 64}
  for row in found:
    assert row["run"] == "tune" and row["us"] > 0 and row["xla_us"] > 0
    assert {"device", "jax", "commit", "utc"} <= row.keys()
  assert not cache.folder().exists()


@pytest.mark.parametrize(
  ("shape", "want"),
  [
    ("40x24x32 --dtype=float16", "float16"),
    ("40x24x32:NN:none:float32", "bfloat16 out_dtype=float32"),
    ("2x40x24x32:TN", "bfloat16 batch=2 batched_a batched_b transpose_a"),
    ("40x24x32:NT:bias+gelu", "bfloat16 transpose_b bias=n activation=gelu"),
    ("40x24x32:NN:residual", "bfloat16 c_dtype=bfloat16"),
    ("40x24x32:NN:gated", "bfloat16 activation=silu gated"),
  ],
)
def test_a_shape_says_what_is_computed(run, tuned, shape, want):
  assert run(*f"--shapes={shape}".split())[0] == 0
  assert names(tuned) == [f"40x24x32 {want}"]


def test_shapes_suites_seeds_and_groups(run, tuned, output):
  groups = f"{GROUPS},24x40x4x8xodd:dw,24x40x4x8xodd:gated"
  run("--shapes=9x8x7", "--suite=gated", "--random=1:3", groups)
  gated = "4096x14336x4096 bfloat16 activation=silu gated"
  assert names(tuned)[:2] == ["9x8x7 bfloat16", gated]
  assert names(tuned)[5:] == [
    "32x40x24 bfloat16 ragged=m groups=4",
    "24x40x32 bfloat16 transpose_a ragged=k groups=4",
    "32x40x24 bfloat16 activation=silu gated ragged=m groups=4",
  ]
  for found in tuned[5:]:
    assert len(found.sizes) == 4 and (found.sizes % 2 == 1).all()


def test_which_configs_are_measured(run, tuned, output):
  output.write_text(json.dumps({"config": {"stages": 1}}) + "\n")
  configs = "--top=1", "--more=1", f"--configs={output}"
  status, out = run("--shapes=40x24x32", *configs)
  first, drawn, given = tuned[0].configs
  assert first == CHOSEN and drawn in (FASTER, THIRD) and given == GIVEN
  assert status == 1 and "too large" in out


def test_rows_are_read_as_they_were_measured(run, tuned, output):
  """Fastest first; what is no default or not bfloat16 is said."""
  run("--shapes=40x24x32", GROUPS, f"--output={output}", "--dtype=float16")
  found = rows.read(output)
  assert [row["us"] for row in found[:3]] == [16.0, 32.0, 64.0]
  assert found[-1]["group_sizes"] == "odd"
  for prepared, row in zip(tuned, (found[0], found[-1])):
    read = {"dtype": "bfloat16", "out_dtype": "bfloat16"} | row["problem"]
    assert tuning.Problem.flat(**read) == prepared.case.problem
    assert row["xla_us"] == 50.0


def test_an_interrupted_run_is_resumed(run, tuned, output, monkeypatch):
  measured = autotuning.measured

  def interrupted(prepared):
    if prepared.case.problem.m == 9:
      signal.raise_signal(signal.SIGINT)
    return measured(prepared)

  monkeypatch.setattr(autotuning, "measured", interrupted)
  args = "--shapes=8x8x8,9x8x8", GROUPS, f"--output={output}"
  status, out = run(*args)
  assert status == 130 and "interrupted after 1 of 3 cases" in out
  assert {row["problem"]["m"] for row in rows.read(output)} == {8}
  monkeypatch.setattr(autotuning, "measured", measured)
  tuned.clear()
  assert run(*args, "--resume")[0] == run(*args, "--resume")[0] == 0
  assert [x.case.problem.m for x in tuned] == [9, 32]
  run(*args, "--resume", "--run=other")
  assert len(tuned) == 5


def test_what_is_left_to_xla_or_late_does_not_end_a_run(
  run, tuned, monkeypatch
):
  find, clock = autotuning.find, iter((0, 10, 10, 20))

  def some(fn, a, **operands):
    if a.shape == (8, 8):
      raise ValueError("rows are short")
    return find(fn, a=a, **operands)

  monkeypatch.setattr(autotuning, "find", some)
  monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
  status, out = run("--shapes=8x8x8,40x24x32,16x16x16", "--seconds=15")
  assert status == 0 and "not tuned: rows are short" in out
  assert out.count("out of time: ") == 1
  assert names(tuned) == ["40x24x32 bfloat16"]


def test_processes_share_the_work(run, output, monkeypatch):
  args = "--shapes=8x8x8,16x8x8", "--processes=2", f"--output={output}"
  monkeypatch.chdir(programs.ROOT)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setattr(tune.sys, "argv", ["tune", *args, "--top=1"])
  status, out = run(*args)
  assert status == 0 and out.count("XLA's product") == 2
  assert [row["problem"]["m"] for row in rows.read(output)] == [8, 16]
  monkeypatch.setattr(tune.sys, "executable", "false")
  status, out = run(*args)
  assert status == 1 and out.count("a process ended with 1") == 2


@pytest.mark.parametrize(
  ("args", "told"),
  [
    ("--dtype=float32", "--dtype"),
    ("--suite=none_such", "--suite"),
    ("--shapes=1x2", "--shapes: want .* got '1x2'"),
    ("--shapes=8x8x8:NT:tanh", "--shapes: want"),
    ("--shapes=8x8x8:NT:gated", "--shapes: want"),
    ("--random=3", "--random: want SEED:COUNT, got '3'"),
    ("--groups=8x8x8x8xsome", "--groups: want"),
    ("--groups=8x8x8x8xeven:back", "--groups: want"),
    ("--configs=/no/such", "--configs: there is no file /no/such"),
    ("--output=/no/such/rows.jsonl", "--output: want a file .*/no/such"),
    ("--freeze=/no/such/h200.jsonl", "--freeze: want a file .*/no/such"),
    ("--freeze=", "--freeze=: want a path"),
    ("--resume", "--output"),
  ],
)
def test_what_cannot_be_carried_out(run, args, told):
  with pytest.raises((cli.FlagError, flags.Error), match=told):
    run(*args.split())


def test_what_a_gpu_can_not_tune(run, monkeypatch):
  def find(*args, **kwargs):
    raise RuntimeError("tuning needs a Hopper GPU")

  monkeypatch.setattr(autotuning, "find", find)
  with pytest.raises(cli.FlagError, match="needs a Hopper GPU"):
    run()
  monkeypatch.setattr(compat, "targets_gpu", lambda: True)
  with pytest.raises(cli.FlagError, match="want --suite"):
    run()


def test_freeze(run, monkeypatch, tmp_path):
  """A line a problem, which the shipped table reads."""
  whole = tune.shipped_table
  small = functools.partial(whole, suite="interpret")
  monkeypatch.setattr(tune, "shipped_table", small)
  path = tmp_path / "nvidia_h200.jsonl"
  assert run(f"--freeze={path}") == (0, "")
  monkeypatch.setattr(cache, "_SHIPPED", tmp_path)
  cache._shipped.cache_clear()
  known = cache._shipped("NVIDIA H200")
  assert len(known) == len(path.read_text().splitlines()) > 10
  assert {p.along for p in known} == {None, "m", "k"}
  for problem, entry in known.items():
    how = next(tuning.ranked(problem)).how
    assert entry.config == (None if how == "xla" else how)
  cache._shipped.cache_clear()
