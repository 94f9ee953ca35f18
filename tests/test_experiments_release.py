"""The program that measures a release; programs, git and GPU are pretended."""

from importlib import util
import json
import pathlib
import re
import shutil
import sys
import threading

import pytest

from experiments import eight_bits, float32, release
from experiments.harness import (
  apart,
  cli,
  provenance,
  release_state,
  rows,
  shapes,
)
from tests.support import programs, result_rows

COMMIT = "cf6c055e98"
GPU = {
  "device": "Test GPU", "driver": "580.1", "cuda": "13.0", "jax": "0.12",
  "jaxlib": "0.12", "commit": COMMIT,
}  # fmt: skip
SUMMARY = "FAILED tests/test_x.py::test_y - no\n= 1 failed, 2 passed in 9s =\n"
OLD = {"commit": "older"}


class Machine:
  """What the program finds, what it ran, ten seconds each, and how that ends.

  By name of a piece there is what gives its status, and of its rows the fields
  that are not the machine's.
  """

  def __init__(self):
    self.commit, self.versions = COMMIT, dict(GPU)
    self.ran, self.ends, self.fields, self.gpus = [], {}, {}, set()

  def execute(self, piece, folder, gpu=None):
    assert not [*folder.iterdir()]
    self.ran.append(piece.name)
    self.gpus.add(gpu)
    (folder / release_state.OUTPUT).write_text(SUMMARY)
    status = self.ends.get(piece.name, lambda: 0)()
    if piece.file != release_state.TESTS and status != 2:
      fields = {"sm_clock_mhz": 1000.0 + len(self.ran), "power_w": 300.0}
      fields |= GPU | {"kernel": piece.name} | self.fields.get(piece.name, {})
      row = result_rows.row(**fields)
      rows.append(folder / f"{piece.file}.jsonl", row)
    return status


@pytest.fixture
def machine(monkeypatch):
  found = Machine()
  monkeypatch.setattr(release, "execute", found.execute)
  monkeypatch.setattr(release, "versions", lambda: found.versions)
  monkeypatch.setattr(release.time, "monotonic", lambda: 10.0 * len(found.ran))
  monkeypatch.setattr(provenance, "commit", lambda untracked=0: found.commit)
  return found


@pytest.fixture
def results(monkeypatch, tmp_path):
  """Where rows are put, with some that are older."""
  monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
  place = tmp_path / "results" / "test_gpu"
  for name in ("dense", "other"):
    rows.append(place / f"{name}.jsonl", OLD)
  return place


@pytest.fixture
def run(capsys, tmp_path, results, machine):
  """Runs the program in this process: (status, standard output)."""

  def call(*args):
    args = [f"--output_dir={tmp_path / 'staged'}", *args]
    return programs.call(release.main, args), capsys.readouterr().out

  return call


@pytest.fixture
def pieces(tmp_path):
  state = release_state.State(tmp_path)
  state.of = dict(GPU)
  return state.pieces


@pytest.fixture
def names(pieces):
  return [x.name for x in pieces]


def values(flag, pieces, program):
  """What pieces of a program have in a flag, in their order."""
  commands = [x.command for x in pieces if x.command.split()[0] == program]
  found = (re.search(rf"--{flag}=(\S+)", x) for x in commands)
  return [x for hit in found if hit for x in hit[1].split(",")]


def test_pieces_are_all_that_there_is_in_short_ones(pieces):
  published = {*shapes.tagged(shapes.DENSE, "published")}
  assert {*values("suite", pieces, "dense")} == published | {"latency"}
  published = {*shapes.tagged(shapes.GROUPED, "published")}
  suites = {*values("suite", pieces, "ragged")}
  assert suites == published | {"sizes", "odd", "experts"}
  assert {*values("passes", pieces, "ragged")} == {*shapes.TRAINING}
  for program in (eight_bits, float32):
    suites = values("suites", pieces, program.EXPERIMENT)
    assert sorted(suites) == sorted(program.SUITES)
  tests = re.findall(r"tests/(\S+)", " ".join(x.command for x in pieces))
  files = (programs.ROOT / "tests").glob("test_*.py")
  marked = {x.name for x in files if re.search(r"mark\.gpu", x.read_text())}
  assert {*tests} == marked
  assert len({x.name for x in pieces}) == len(pieces)
  assert max(x.seconds for x in pieces) <= 480
  order = list(dict.fromkeys(piece.file for piece in pieces))
  assert order[:5] == ["gpu_tests", "ladder", "sweep", "counters", "memory"]


def test_flags_of_pieces_exist(pieces, tmp_path):
  for piece in (x for x in pieces if x.file != release_state.TESTS):
    _, _, program, *given = piece.arguments(tmp_path)
    files = util.find_spec(program).origin, cli.__file__
    text = "".join(pathlib.Path(x).read_text() for x in files)
    names = [x[2:].partition("=")[0] for x in given] + [piece.file]
    assert "output_dir" in names and all(f'"{x}"' in text for x in names), piece


def test_the_sanitizer_has_a_target(pieces, tmp_path):
  [piece] = [x for x in pieces if x.name == "sanitizer"]
  target, python = piece.arguments(tmp_path, "python3")[1:]
  assert python == "PYTHON=python3"
  assert f"\n{target}: " in (programs.ROOT / "Makefile").read_text()


def test_seeds_are_of_the_hash(pieces):
  drawn = [int(x) for x in values("seed", pieces, "dense")]
  assert drawn == release_state.seeds(COMMIT) == release_state.seeds(COMMIT[:7])
  assert len({*drawn, *release_state.seeds("1234567")}) == 6


def test_all_pieces_pass(run, machine, names, results):
  status, out = run()
  assert status == 0 and machine.ran == names
  assert "python -m docs.write --pictures" in out
  found = rows.read(results / "dense.jsonl")
  assert [x["kernel"] for x in found] == ["dense-1", "dense-2", "latency"]
  assert rows.read(results / "other.jsonl") == [OLD]
  about = json.loads((results / "release.json").read_text())
  assert about["commit"] == COMMIT and about["dirty"] is False
  assert about["driver"] == ["580.1"] * 2 and about["power_w"] == [300.0] * 2
  assert about["sm_clock_mhz"][1] == 1000 + len(names)
  assert [*about["pieces"]] == names
  wanted = {"command": "memory", "seconds": 10.0, "status": 0}
  assert about["pieces"]["memory"].items() >= wanted.items()
  text = (results / "gpu_tests.txt").read_text()
  assert f"\ncommit {COMMIT}, Test GPU, jax 0.12\n" in text
  first, *_ = text.split("\n\npython3 ")
  assert "-m gpu" in first and "tests/test_ladder_gpu.py" in first
  assert first.endswith("- no\n\n1 failed, 2 passed in 9s")
  assert run()[0] == 0 and machine.ran == names  # nothing is left
  assert machine.gpus == {None}  # each sees all


def test_a_run_goes_on_where_it_was_ended(run, machine, names):
  def interrupted():
    raise KeyboardInterrupt

  machine.ends = {names[3]: interrupted}
  with pytest.raises(KeyboardInterrupt):
    run()
  assert machine.ran == names[:4]
  machine.ends = {}
  assert run()[0] == 0  # last what may never end
  assert machine.ran[4:] == [*names[4:], names[3]]


def test_several_gpus_share_the_pieces(run, machine, names, results):
  everywhere = threading.Barrier(3)

  def together():
    everywhere.wait(60)
    return 0

  machine.ends = dict.fromkeys(names[:3], together)
  assert run("--gpus=3")[0] == 0
  assert machine.ran[:2] == [*release_state.ALONE]
  assert machine.gpus == {None, 0, 1, 2}
  assert sorted(machine.ran) == sorted(names)
  assert len(rows.read(results / "dense.jsonl")) == 3


def test_no_gpu_goes_on_after_an_error(run, machine, names):
  both_run = threading.Barrier(2)

  def edited():
    both_run.wait(60)
    machine.commit = "another"
    return 0

  machine.ends = dict.fromkeys(names[:2], edited)
  with pytest.raises(cli.FlagError, match="want commit"):
    run("--gpus=2")
  assert len(machine.ran) == 4  # with what has the machine to itself


def test_no_piece_is_started_that_would_not_fit(run, machine, pieces):
  status, out = run("--seconds=500")
  fit = []
  for x in pieces:
    fit += [x.name] if 10 * len(fit) + x.seconds <= 500 else []
  assert status == 0 and machine.ran == fit and 1 < len(fit) < len(pieces)
  seconds = [x.seconds for x in pieces if x.name not in fit]
  assert f"left: {len(seconds)} pieces, about {sum(seconds)} s" in out
  # What a piece took counts.
  run("--seconds=10", f"--only={fit[0]},{fit[1]}")
  assert machine.ran == [*fit, fit[0]]


def test_a_piece_that_fails_ends_no_run(run, machine, names, results):
  machine.ends = dict.fromkeys(("counters", "dense-2"), lambda: 2)
  machine.ends["sweep"] = lambda: 1
  status, out = run()
  assert status == 1 and machine.ran == names
  assert "counters: FAILED with 2, see " in out
  assert "\nFAILED: sweep, counters, dense-2; see --only" in out
  assert not (results / "release.json").exists()
  assert run()[0] == 1 and machine.ran == names
  status, out = run("--finish")
  assert status == 0 and "dense: left as it is, for want of dense-2\n" in out
  assert rows.read(results / "dense.jsonl") == [OLD]
  there = {x.stem for x in results.iterdir()}
  assert "sweep" in there and "counters" not in there
  done = json.loads((results / "release.json").read_text())["pieces"]
  assert "sweep" in done and not {"dense-1", "counters"} & {*done}
  machine.ends = {}
  assert run("--only=counters,sweep,dense-2")[0] == 0
  assert len(rows.read(results / "dense.jsonl")) == 3


def test_another_machine_goes_on(
  run, machine, names, results, pieces, tmp_path
):
  first = [x.name for x in pieces if x.file in ("ladder", release_state.TESTS)]
  run(f"--only={','.join(first)}")
  run("--finish")
  there = (results / "release.json").read_text()
  staged = tmp_path / "staged"
  shutil.rmtree(staged)
  staged.mkdir()
  (staged / release_state.STATE).write_text(there)
  ladder = (results / "ladder.jsonl").read_text()
  machine.ran.clear()
  status, out = run()
  assert status == 0 and machine.ran == [x for x in names if x not in first]
  assert "ladder: left as it is" in out
  assert (results / "ladder.jsonl").read_text() == ladder
  about = json.loads((results / "release.json").read_text())
  assert {*about["pieces"]} == {*names}


def test_a_second_run_is_compared(run, machine, results):
  fields = {"sweep": {"ms_median": 2.0}, "ladder": {"arms": {"xla": {}}}}
  arms = {"ours": {"ms_median": 1.0}, "xla": {"ms_median": 2.0}}
  fields["float32-1"] = {"arms": arms}
  machine.fields = fields
  run()
  with pytest.raises(cli.FlagError, match="no release was begun in"):
    run("--compare", f"--output_dir={results / 'again'}")
  fields["sweep"], arms["xla"] = {"ms_median": 1.6}, {"ms_median": 2.02}
  again = f"--output_dir={results.parent / 'again'}"
  run("--only=sweep,float32-1,tests-ops", again)
  status, out = run("--compare", again)
  assert status == 0 and re.search(r"sweep +1 +1.250x +1.250x +sweep", out)
  found = {x["file"]: x for x in rows.read(results / "apart.jsonl")}
  assert [*found] == ["sweep", "float32"]
  of = found["float32"]
  assert (of["times"], of["worst"]) == (2, pytest.approx(1.01))
  assert of["geomean"] == pytest.approx(1.01**0.5)
  assert of["commit"] == COMMIT and of["worst_case"].startswith("xla ")
  machine.commit = machine.versions["commit"] = "b" * 10
  machine.fields = {"sweep": {"commit": "b" * 10}}
  other = f"--output_dir={results.parent / 'other'}"
  run("--only=sweep", other)
  with pytest.raises(cli.FlagError, match="other has no times put too"):
    run("--compare", other)


def test_rows_without_sizes_are_compared():
  fields = {"measure": "latency", "level": "l2"}
  first = [fields | {"working_set_bytes": n, "ms_median": 1.0} for n in (1, 2)]
  second = [first[1] | {"ms_median": 2.0}, first[0]]
  found = apart.apart(first, second)
  assert (found["times"], found["worst"]) == (2, 2.0)
  assert found["worst_case"] == "latency l2 2"


@pytest.mark.parametrize("name", release_state.SAME)
def test_another_commit_jax_or_device_is_refused(run, machine, results, name):
  machine.fields = {"sweep": {name: "foreign"}}
  with pytest.raises(cli.FlagError, match=f"{name} .*foreign.*--only=sweep"):
    run()
  assert sorted(x.stem for x in results.iterdir()) == ["dense", "other"]
  count = len(machine.ran)
  machine.versions[name] = "another"
  with pytest.raises(cli.FlagError, match=f"want {name} .*another; go back"):
    run("--only=sweep")
  assert len(machine.ran) == count


@pytest.mark.parametrize("commit", [None, f"{COMMIT}-dirty"])
def test_a_tree_that_is_no_commit_is_refused(run, machine, names, commit):
  def edited():
    machine.commit = commit
    return 0

  machine.ends = {names[0]: edited}
  for _ in range(2):  # meanwhile, and at the start
    with pytest.raises(cli.FlagError, match="commit without changes, got"):
      run()
  assert machine.ran == names[:1] and run("--list")[0] == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"commit": 1}'])
def test_a_broken_state_is_named(run, results, content):
  run("--only=sweep")
  (results.parents[1] / "staged" / release_state.STATE).write_text(content)
  with pytest.raises(cli.FlagError, match="is no state of a release"):
    run("--list")


def test_pieces_are_listed_and_named(run, machine, names):
  machine.ends = {"memory": lambda: 1}
  with pytest.raises(cli.FlagError, match="no release was begun in"):
    run("--finish")
  with pytest.raises(cli.FlagError, match="--only: no piece 'dense'"):
    run("--only=dense")
  run("--only=sweep,memory")
  out = run("--list")[1]
  lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()[3:]}
  assert [*lines] == names and len(machine.ran) == 2
  assert lines["sweep"][:3] == ["10", "done", "ladder"]
  assert lines["memory"][:3] == ["10", "FAILED", "1"]
  assert lines["counters"] == ["40", "counters"]


def test_a_gpu_is_needed():
  with pytest.raises(cli.FlagError, match="want a GPU, got cpu"):
    release.versions()


def test_a_command_leaves_its_words_and_status(monkeypatch, tmp_path):
  program = "import os; print(os.environ['PALLAS_GEMM_CACHE_DIR']); exit(3)"
  command = [sys.executable, "-c", program]
  monkeypatch.setattr(release_state.Piece, "arguments", lambda *_: command)
  piece = release_state.Piece("x", release_state.TESTS, 1, "")
  assert release.execute(piece, tmp_path) == 3
  assert (
    tmp_path / release_state.OUTPUT
  ).read_text() == f"{tmp_path / 'tuned'}\n"
