"""The program that runs kernels under compute-sanitizer. No GPU needed."""

import json
import os
import types

import numpy as np
import pytest

from experiments import sanitize
from experiments.harness import case as case_lib
from experiments.harness import cli
from tests.support import programs

CLEAN = "echo '========= ERROR SUMMARY: 0 errors'"
FAULTS = "echo '========= ERROR SUMMARY: 3 errors'"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program with a tool that is a shell script.

  Returns (status, standard output, rows).
  """
  tool = tmp_path / "bin" / "compute-sanitizer"
  tool.parent.mkdir()
  path = os.pathsep.join((str(tool.parent), os.environ["PATH"]))
  monkeypatch.setenv("PATH", path)

  def call(script, *args):
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    results = tmp_path / "results"
    args = [f"--output_dir={results}", "--kernels=1", *args]
    status = programs.call(sanitize.main, args)
    lines = [
      line
      for file in results.rglob("*.jsonl")
      for line in file.read_text().splitlines()
    ]
    return status, capsys.readouterr().out, [json.loads(x) for x in lines]

  return call


def test_a_clean_kernel(run):
  status, out, (row,) = run(CLEAN)
  assert status == 0
  assert (row["errors"], row["passed"], row["kernel"]) == (0, True, "naive")
  assert "0 errors, result PASSED" in out


def test_each_op_and_shape_has_a_row(run):
  status, _, rows = run(CLEAN, "--ops=all", "--shapes=8x8x8,16x8x8")
  assert status == 0
  found = [(row["kernel"], row["m"]) for row in rows]
  assert found == [(name, m) for name in sanitize.OPS for m in (8, 16)]


def test_a_variant_is_run_by_its_own_label(run):
  status, _, rows = run(f'echo "========= $*"; {CLEAN}', "--kernels=8,8a")
  assert status == 0
  names = ["double_buffering", "double_buffering_registers"]
  assert [row["kernel"] for row in rows] == names
  for row, label in zip(rows, ("8", "8a"), strict=True):
    assert f" --kernels={label} " in row["said"][0]


@pytest.mark.parametrize("names", ["all", "1-12,8a,9a,9b,10a,11a"])
def test_all_are_rungs_and_variants(run, names):
  _, _, rows = run(CLEAN, f"--kernels={names}")
  assert len(rows) == 17
  assert len({row["kernel"] for row in rows}) == 17


@pytest.mark.parametrize(
  ("script", "errors"),
  [(FAULTS, 3), (f"{CLEAN}; exit 1", 0), ("echo nothing said", None)],
)
def test_what_is_not_clean(run, script, errors):
  status, _, (row,) = run(script)
  assert status == 1
  assert row["errors"] == errors


def test_hazards_of_racecheck_are_no_verdict(run):
  script = "echo '========= RACECHECK SUMMARY: 2 hazards displayed'"
  status, _, (row,) = run(script, "--tool=racecheck")
  assert (status, row["errors"]) == (0, 2)


def test_a_kernel_that_does_not_end(run):
  status, out, (row,) = run("exec sleep 60", "--sanitize_timeout_s=1")
  assert status == 1
  assert (row["errors"], row["passed"]) == (None, False)
  assert "no end after 1 s" in out


@pytest.mark.parametrize("right", [True, False])
def test_the_childs_status_tells_whether_all_results_are_right(
  run, monkeypatch, right
):
  def case(passed):
    return types.SimpleNamespace(
      arms=lambda implementation: {"ours": case_lib.only(lambda x: x)},
      draw=lambda seed: {"x": np.ones(2)},
      check=lambda *_: types.SimpleNamespace(passed=passed),
    )

  cases = lambda shape: [case(True), case(right)]  # noqa: E731
  monkeypatch.setitem(sanitize.OPS, "matmul", cases)
  status, out, rows = run(CLEAN, "--ops=matmul", "--under_sanitizer")
  assert (status, out, rows) == (1 - right, "", [])


def test_rows_that_can_not_be_written_are_told_before_a_run(run, tmp_path):
  folder = tmp_path / "bin" / "compute-sanitizer" / "below"
  with pytest.raises(cli.FlagError, match=f"--output_dir: want .*{folder}"):
    run(f"touch {tmp_path / 'ran'}", f"--output_dir={folder}")
  assert not (tmp_path / "ran").exists()
