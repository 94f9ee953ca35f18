"""experiments.ampere: what it emits, and what it makes of what runs."""

import json

import jax.numpy as jnp
import pytest

from experiments import ampere
from experiments.harness import cli, rows
from pallas_gemm import compat, ladder
from tests.support import programs

SHAPE = "32x32x32"


def right(a, b, c=None):
  del c
  return jnp.dot(a, b, precision="highest")


@pytest.fixture
def run(monkeypatch, tmp_path):
  """Pretends that there is a Hopper GPU, on which rung 1 runs."""
  programs.pretend_times(monkeypatch)
  monkeypatch.setattr(ampere.ladder_cases, "why_no_hopper", lambda: None)
  monkeypatch.setattr(ampere, "rungs", lambda: [ladder.find(1)])
  monkeypatch.setattr(ampere, "lowered", lambda case: right)
  (tmp_path / ampere.INDEX).write_text("")

  def call():
    args = f"--ptx={tmp_path}", f"--output_dir={tmp_path}", f"--shapes={SHAPE}"
    status = programs.call(ampere.main, args)
    return status, rows.read(tmp_path / "ampere.jsonl")

  return call


def test_a_row_has_the_times_of_each_code(run, monkeypatch):
  monkeypatch.setattr(ampere, "by_driver", lambda case, folder: right)
  status, [row] = run()
  rows.validate(row)
  assert status == 0 and row["passed"] and not row["skipped"]
  arms = "naive", "jnp.dot HIGHEST (baseline)", ampere.LOWERED, ampere.PTX
  assert tuple(row["arms"]) == arms


@pytest.mark.parametrize(
  ("arm", "why"),
  [
    (lambda case, folder: lambda a, b, c: a, "wrong: an error of"),
    (ampere.by_driver, "has no PTX of it"),
  ],
)
def test_code_that_is_wrong_or_missing_has_no_time(run, monkeypatch, arm, why):
  monkeypatch.setattr(ampere, "by_driver", arm)
  status, [row] = run()
  assert status == 1 and ampere.PTX not in row["arms"]
  assert why in row["skipped"][ampere.PTX]


def test_what_can_not_be_done_is_an_error_in_a_line(tmp_path):
  for args, message in (
    ([], "--emit, --ptx: want one of them"),
    ([f"--ptx={tmp_path}"], "no index.jsonl in"),
  ):
    with pytest.raises(cli.FlagError, match=message):
      programs.call(ampere.main, args)
  (tmp_path / ampere.INDEX).write_text("")
  assert not compat.targets_gpu()
  with pytest.raises(cli.FlagError, match="it needs a Hopper GPU"):
    programs.call(ampere.main, [f"--ptx={tmp_path}"])


@pytest.mark.aot
def test_what_is_emitted_is_for_an_a100(monkeypatch, tmp_path):
  monkeypatch.setattr(ampere, "rungs", lambda: [ladder.find("9c")])
  args = [f"--emit={tmp_path}", "--shapes=1000x777x513"]
  assert programs.call(ampere.main, args) == 0
  [line] = (tmp_path / ampere.INDEX).read_text().splitlines()
  found = json.loads(line)
  assert (found["grid"], found["threads"]) == ([56, 1, 1], [128, 1, 1])
  ptx = (tmp_path / found["file"]).read_text()
  assert ".target sm_80\n" in ptx and "cp.async.cg.shared.global" in ptx
  assert ptx.count(".param .u64") == 3  # A, B and the result: no descriptors
