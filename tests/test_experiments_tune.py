"""The tuning program: flags, rows, table, exit status. No GPU needed."""

import signal

from absl import flags
import jax
import pytest

from experiments import tune
from experiments.harness import cli, freeze, rows, suites
from pallas_gemm import compat, tuning
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.tuning import autotune, cache, model
from tests.support import programs

CHOSEN = Config(block_m=64, block_n=64, consumers=1, stages=2, epilogue_n=64)
FASTER = Config(block_m=64, block_n=64, consumers=1, stages=2, epilogue_n=32)
ACTIVATIONS = "relu", "gelu", "silu"
PROVENANCE = {"device", "driver", "cuda", "jax", "jaxlib", "commit", "utc"}


@pytest.fixture(autouse=True)
def small_model(tmp_path, monkeypatch):
  """A cache of its own, and a model of two small configs."""
  monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
  monkeypatch.setattr(
    model, "candidates", lambda problem, **_: [CHOSEN, FASTER]
  )
  monkeypatch.setattr(
    model, "predict", lambda plan, known=None: 1e-6 * plan.config.epilogue_n
  )
  monkeypatch.setattr(model, "choose", lambda problem: CHOSEN)
  cache.clear()
  yield
  cache.clear()


@pytest.fixture
def run(capsys):
  """Runs the program in this process: (status, standard output)."""

  def call(*args):
    status = programs.call(tune.main, args)
    return status, capsys.readouterr().out

  return call


@pytest.fixture
def tuned(monkeypatch):
  """Measures nothing; yields the cases that were to be tuned."""
  cases = []

  def fake(case, *, top, doing):
    doing("something")
    cases.append(case)
    return autotune.Tuned(
      problem=case.problem,
      config=FASTER,
      seconds=1e-4,
      model_config=CHOSEN,
      model_seconds=2e-4,
      tried=((CHOSEN, 2e-4, None), (FASTER, 1e-4, None))[:top],
    )

  monkeypatch.setattr(autotune, "tune", fake)
  return cases


def names(cases):
  return [autotune.describe(case.problem) for case in cases]


def test_interpreted(run, tmp_path):
  status, out = run(f"--output_dir={tmp_path}", "--shapes=40x24x32")
  assert status == 0
  assert "40x24x32 bfloat16" in out and "nothing was remembered" in out
  found = rows.read(tmp_path / "tune.jsonl")
  assert [row["config"]["epilogue_n"] for row in found] == [64, 32]
  assert [row["chosen_by_model"] for row in found] == [True, False]
  assert sum(row["fastest"] for row in found) == 1
  for row in found:
    assert (row["m"], row["n"], row["k"]) == (40, 24, 32)
    assert row["ms_median"] > 0 and row["failed"] is None
    assert row["ms_model"] == 1e-3 * row["config"]["epilogue_n"]
    assert row["interpreted"] and PROVENANCE <= row.keys()
  assert not cache.folder().exists()


def test_table(run, tuned):
  status, out = run("--shapes=40x24x32,8x8x8")
  assert status == 0
  assert out.count("2.00x as fast as the model's choice") == 2
  line = out.splitlines()[-2]
  assert line.split() == [
    "8x8x8", "bfloat16", "100.0", "200.0", "2.000x", "0", "epilogue_n=32",
  ]  # fmt: skip


def test_what_is_left_to_xla_does_not_end_a_suite(run, tuned, monkeypatch):
  find = autotune.find

  def some(fn, a, **operands):
    if a.shape == (8, 8):
      raise ValueError("rows are short")
    return find(fn, a=a, **operands)

  monkeypatch.setattr(autotune, "find", some)
  status, out = run("--shapes=8x8x8,40x24x32")
  assert status == 0
  assert "8x8x8  not tuned: rows are short" in out
  assert names(tuned) == ["40x24x32 bfloat16"]


def test_the_models_choice_may_be_the_fastest():
  found = autotune.Tuned(None, CHOSEN, 1e-4, CHOSEN, 1e-4, ())
  assert tune.short(found) == "the model's"


def test_shapes_and_suites_each_once(run, tuned):
  run("--suite=interpret,textbook", "--shapes=16x16x16,9x8x7")
  assert names(tuned) == [
    "16x16x16 bfloat16",
    "9x8x7 bfloat16",
    "48x40x24 bfloat16",
  ]


def test_without_shapes_a_small_one_is_interpreted(run, tuned):
  run()
  (shape,) = suites.suite("interpret")
  assert names(tuned) == [f"{shape} bfloat16"]


@pytest.mark.parametrize(
  "flags_, want",
  [
    ("--dtype=float16", "float16"),
    ("--out_dtype=float32", "bfloat16 out_dtype=float32"),
    ("--layout=nt", "bfloat16 transpose_b"),
    ("--layout=tn", "bfloat16 transpose_a"),
    ("--layout=tt --epilogue=bias", "bfloat16 transpose_a transpose_b bias=n"),
    ("--epilogue=residual", "bfloat16 c_dtype=bfloat16"),
  ],
)
def test_flags_say_what_is_computed(run, tuned, flags_, want):
  run("--shapes=40x24x32", *flags_.split())
  assert names(tuned) == [f"40x24x32 {want}"]


@pytest.mark.parametrize("epilogue", ["none", "gated_silu"])
def test_groups(run, tuned, epilogue, tmp_path):
  """A grouped product, and those of its derivatives."""
  flags_ = "--shapes=40x24x32 --groups=3".split()
  run(*flags_, f"--epilogue={epilogue}", f"--output_dir={tmp_path}")
  problems = [case.problem for case in tuned]
  assert sorted(p.along for p in problems) == ["k", "m", "m"]
  assert {p.groups.count for p in problems} == {3}
  assert problems[0].epilogue.gated == (epilogue == "gated_silu")
  found = rows.read(tmp_path / "tune.jsonl")
  assert {row["kernel"] for row in found} == {"sm90_ragged"}
  assert all(row["ms_model"] > 0 for row in found)


@pytest.mark.parametrize("epilogue", flags.FLAGS["epilogue"].parser.enum_values)
def test_epilogues(run, tuned, epilogue):
  run("--shapes=40x24x32", f"--epilogue={epilogue}", "--out_dtype=float32")
  (case,) = tuned
  parts = epilogue.split("_")
  assert (case.problem.epilogue.bias == "n") == ("bias" in parts)
  assert (case.problem.epilogue.c_dtype is not None) == ("residual" in parts)
  assert case.problem.epilogue.gated == ("gated" in parts)
  activation = next(
    (getattr(jax.nn, x) for x in parts if x in ACTIVATIONS), None
  )
  assert case.activation is activation
  assert case.problem.out_dtype == "float32"


@pytest.fixture
def forgotten():
  """What is read of a table is read again, before and after."""
  cache._shipped.cache_clear()
  yield
  cache._shipped.cache_clear()


def test_freeze(run, monkeypatch, tmp_path, forgotten):
  """A line a problem, which the shipped table reads."""
  del forgotten
  whole = freeze.table_of
  some = lambda device: whole(device, suite="interpret")  # noqa: E731
  monkeypatch.setattr(freeze, "table_of", some)
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


def test_a_place_that_nothing_can_be_frozen_to_is_told_first(
  run, monkeypatch, tmp_path
):
  monkeypatch.delattr(freeze, "table_of")
  for path in (tmp_path, tmp_path / "missing" / "h200.jsonl"):
    with pytest.raises(cli.FlagError, match=f"--freeze: want .*{path}: "):
      run(f"--freeze={path}")
  with pytest.raises(flags.Error, match="--freeze=: want a path"):
    run("--freeze=")


def test_top(run, tuned, tmp_path):
  run("--top=1", f"--output_dir={tmp_path}")
  assert len(rows.read(tmp_path / "tune.jsonl")) == 1


def test_a_failed_config_is_told(run, monkeypatch, tmp_path):
  monkeypatch.setattr(
    autotune,
    "tune",
    lambda case, **_: autotune.Tuned(
      case.problem, None, None, CHOSEN, None, ((CHOSEN, None, "too large"),)
    ),
  )
  status, out = run(f"--output_dir={tmp_path}")
  assert status == 1
  assert "too large" in out and "none works" in out
  (row,) = rows.read(tmp_path / "tune.jsonl")
  assert row["failed"] == "too large" and row["ms_median"] is None


def test_interrupted_runs_keep_what_they_finished(
  run, tuned, monkeypatch, tmp_path
):
  fake = autotune.tune

  def interrupted(case, **kwargs):
    if case.problem.m == 9:
      signal.raise_signal(signal.SIGINT)
    return fake(case, **kwargs)

  monkeypatch.setattr(autotune, "tune", interrupted)
  status, out = run("--shapes=8x8x8,9x8x8,7x8x8", f"--output_dir={tmp_path}")
  assert status == 130
  assert "interrupted after 1 of 3 shapes" in out
  assert {row["m"] for row in rows.read(tmp_path / "tune.jsonl")} == {8}


@pytest.mark.parametrize(
  "flags_, want",
  [
    ("--dtype=float32", "--dtype"),
    ("--suite=none_such", "--suite"),
    ("--shapes=1x2", "--shapes"),
    ("--layout=nt --epilogue=gated_silu", "--layout"),
    ("--groups=2 --epilogue=relu", "--groups"),
    ("--groups=2 --layout=nt", "--groups"),
  ],
)
def test_what_cannot_be_carried_out(run, flags_, want):
  with pytest.raises(cli.FlagError, match=want):
    run(*flags_.split())


def test_a_gpu_wants_to_be_told_what(run, monkeypatch):
  monkeypatch.setattr(compat, "targets_gpu", lambda: True)
  with pytest.raises(cli.FlagError, match="--suite or --shapes"):
    run()


def test_a_gpu_that_is_no_hopper(run, monkeypatch):
  def find(*args, **kwargs):
    raise RuntimeError("tuning needs a Hopper GPU")

  monkeypatch.setattr(autotune, "find", find)
  with pytest.raises(cli.FlagError, match="needs a Hopper GPU"):
    run()


def program(*args):
  """The program as a user starts it: (status, stdout, stderr)."""
  return programs.start("experiments.tune", *args)


def test_help_lists_the_flags():
  status, out, err = program("--help")
  assert status == 0, err
  for name in ("suite", "shapes", "dtype", "out_dtype", "top", "epilogue"):
    assert f"--{name}" in out or f"--[no]{name}" in out, name
  assert "llama_70b" in out and "pallas_gemm.autotune" in out


def test_a_bad_flag_is_one_line():
  status, out, err = program("--epilogue=swish")
  assert status == 2 and not out
  assert err.startswith("error: ") and len(err.splitlines()) == 1


def test_rows_that_can_not_be_written_are_told_before_a_run(
  run, tuned, tmp_path
):
  folder = tmp_path / "file" / "below"
  (tmp_path / "file").touch()
  with pytest.raises(cli.FlagError, match=f"--output_dir: want .*{folder}"):
    run(f"--output_dir={folder}")
  assert not tuned


def test_a_run_without_rows_names_no_file(run, monkeypatch, tmp_path):
  """Nor does what was taken for a config's failure make a row."""

  def interrupted(case, **kwargs):
    try:
      signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
      reason = "INTERNAL: callback failed"
    tried = ((CHOSEN, None, reason),)
    return autotune.Tuned(case.problem, None, None, CHOSEN, None, tried)

  monkeypatch.setattr(autotune, "tune", interrupted)
  status, out = run(f"--output_dir={tmp_path / 'new'}")
  assert status == 130 and "interrupted after 0 of 1 shapes" in out
  assert "rows: " not in out and not (tmp_path / "new").exists()
