"""The program that prints tables of rows; help and errors of all programs."""

import re

import pytest

from experiments import report
from experiments.harness import cli, rows
from tests.support import programs, result_rows


@pytest.fixture
def run(capsys):
  """Runs the program in this process: (status, output)."""

  def call(*args):
    status = programs.call(report.main, args)
    return status, capsys.readouterr().out

  return call


def test_tables_of_a_folder(run, tmp_path):
  old = result_rows.counters(kernel="coalesced", number=2)
  del old["stalls"], old["occupancy"]  # of an older version: counters alone
  unseen = {"experiment": "dense_unseen", "suite": "odd"}
  for name, found in {
    "ladder": result_rows.ladder(),
    "counters": [result_rows.counters(), old],
    "dense": [result_rows.dense(2.0), result_rows.dense(1.5, suite="gated")],
    "dense_unseen": [result_rows.dense(2.0, **unseen)],
    "ragged": [*result_rows.sizes(), result_rows.ragged(0.5)],
  }.items():
    for row in found:
      rows.append(tmp_path / f"{name}.jsonl", row)
  status, out = run(f"--rows={tmp_path}")
  assert status == 0
  for text in (
      "coalesced +4096x4096x4096 ", "gated +1 ", "odd +1 ", "naive +168 ",
      "coalesced +2.5 GB", "sizes +forward ",
  ):  # fmt: skip
    assert re.search(text, out), text


def test_suites_of_other_dtypes(run, tmp_path):
  def arms(**ms):
    return {
      name.replace("_", " ").replace("ours", "pallas_gemm"): {
        "ms_median": x, "tflops": 100 / x, "frobenius": 1e-7 * x
      }
      for name, x in ms.items()
    }  # fmt: skip

  f8 = {"experiment": "eight_bits", "suite": "dense", "layout": "NT"}
  f32 = f8 | {"experiment": "float32", "layout": "TN", "dtype": "float32"}
  errors = {"suite": "errors", "k": 9} | {
    "arms": arms(ours_HIGHEST=1, xla_HIGHEST=2, xla_x6=1, ours_x3=1, xla_x3=4)
  }
  layer = {"suite": "layer", "kernel": "moe", "epilogue": "row", "groups": 8}
  for fields in (
    f8 | {"dtype": "float8_e4m3fn", "epilogue": "row"}
    | {"arms": arms(ours=2, xla=5)},
    f8 | {"dtype": "bfloat16", "ms_median": 3, "arms": arms(ours=3)},
    f8 | layer | {"dtype": "bfloat16"}
    | {"arms": arms(ours_row=4, ours_bf16=2)},
    f32 | {"epilogue": "HIGHEST", "arms": arms(ours=1, xla=2.5)},
    f32 | errors,
  ):  # fmt: skip
    row = result_rows.row(**fields)
    rows.append(tmp_path / f"{row['experiment']}.jsonl", row)
  status, out = run(f"--rows={tmp_path}")
  assert status == 0
  for text in (
      r" row +50 +1.500x +2.500x\n", r"pallas_gemm row +4.00 ms +0.500x\n",
      r" TN +HIGHEST +100 +2.500x +- +-\n", r" 9 +1.0e-07 +2.0e-07 ",
  ):  # fmt: skip
    assert re.search(text, out), text


def test_all_devices_are_printed(run, monkeypatch, tmp_path):
  monkeypatch.setattr(rows, "RESULTS", tmp_path)
  for device in ("nvidia_a", "nvidia_b"):
    rows.append(tmp_path / device / "dense.jsonl", result_rows.dense(2.0))
  (tmp_path / "cpu").mkdir()  # without times
  assert run()[1].count("Rows of") == 2


@pytest.mark.parametrize(
  "content, message",
  [
    ('{"experiment": "ladder"}\n', "dense.jsonl: want rows of dense, got one"),
    ('{"experiment": "dense"}\n', "dense.jsonl: row lacks kernel"),
    ("no rows\n", "no timed rows in"),
    (None, "no timed rows in"),
  ],
)
def test_files_that_hold_no_such_rows(run, tmp_path, content, message):
  if content is not None:
    (tmp_path / "dense.jsonl").write_text(content)
  with pytest.raises(cli.FlagError, match=message):
    run(f"--rows={tmp_path}")


FLAGS = {
  "ampere": "emit ptx shapes seed output_dir",
  "counters": "kernels shapes dtype seed output_dir gpu ncu timeout_s",
  "dense": "suite shapes dtype repeats warmup seed output_dir tuned base",
  "fit": "device start terms write keep ablate seed",
  "ladder": (
    "kernels sizes shapes dtype alpha beta warmup repeats seed output_dir peers"
    " explain diff gpu sweep"
  ),
  "memory": "measures levels seed output_dir warmup repeats",
  "ragged": "suite passes beside dtype repeats warmup seed output_dir base",
  "release": "seconds list only finish output_dir",
  "report": "rows",
  "targets": "targets kernels output_dir",
  "tune": "shapes suite random groups top more configs output resume freeze",
}


@pytest.mark.parametrize("name", FLAGS)
def test_help_is_for_newcomers(name):
  """And leaves out what a program says to itself."""
  status, out, err = programs.start(f"experiments.{name}", "--help")
  assert (status, err) == (0, "")
  assert f"  python -m experiments.{name} " in out
  shown = re.findall(r"(?m)^  --(?:\[no\])?(\w+):", out)
  assert {*FLAGS[name].split()} <= {*shown} and not {"child", "share"} & {
    *shown
  }


@pytest.mark.parametrize(
  "name, args, message",
  [
    ("ladder", ["--kernels=99"], "error: --kernels: no rung '99'"),
    ("ladder", ["--repeats=3"], "error: flag --repeats=3: "),
    ("dense", ["extra"], "error: unexpected argument 'extra'"),
    ("report", ["--rows="], "error: flag --rows=: want a path, got nothing"),
    ("report", ["--seed=1"], "error: --seed: not a flag of this program"),
    ("ragged", ["--output_dir=/dev/null"], "error: --output_dir: want a fold"),
  ],
)
def test_errors_are_one_line_without_a_traceback(name, args, message):
  status, out, err = programs.start(f"experiments.{name}", *args)
  assert (status, out) == (2, "")
  assert err.startswith(message), err
  assert len(err.splitlines()) == 1
