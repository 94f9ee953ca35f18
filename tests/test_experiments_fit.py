"""The program that fits the cost model's constants. No GPU needed."""

import dataclasses
import json

from absl import flags
import numpy as np
import pytest

from experiments import fit
from experiments.harness import cli, fit_rows, fit_terms
from experiments.harness import rows as rows_lib
from experiments.harness.fit_terms import MODEL, NAMES, XLA
from pallas_gemm import hardware, tuning
from pallas_gemm.tuning import constants, xla
from tests.support import programs

pytestmark = pytest.mark.rows

H200 = hardware.lookup("H200")
KNOWN = constants.of(H200)
TODAY = fit_terms.values_of(KNOWN)
START = fit_terms.start_of(H200)
PATH = constants.path_of(H200.name)
FILES = sorted(constants.FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def measured():
  """Rows of the H200."""
  return fit_rows.read(rows_lib.RESULTS / "nvidia_h200", H200)


@pytest.fixture
def few(measured, monkeypatch):
  """Some of them; fits end soon."""
  monkeypatch.setattr(fit, "_GENERATIONS", 2)
  return measured.of(np.arange(len(measured.first)) % 12 == 0)


@pytest.fixture
def run(few, tmp_path, monkeypatch, capsys):
  """Runs the program on few rows: (status, standard output)."""
  monkeypatch.setattr(constants, "FOLDER", tmp_path)
  monkeypatch.setattr(fit_rows, "read", lambda folder, gpu: few)
  (tmp_path / PATH.name).write_text(PATH.read_text())

  def call(*args):
    return programs.call(fit.main, args), capsys.readouterr().out

  return call


def test_rows_of_another_device_are_told(tmp_path):
  path = rows_lib.RESULTS / "nvidia_h200/dense_tuning.jsonl"
  row = json.loads(path.read_text().splitlines()[0])
  text = json.dumps(row | {"device": "NVIDIA H100 80GB HBM3"})
  (tmp_path / path.name).write_text(text + "\n")
  told = "--device: .* rows of NVIDIA H200, got NVIDIA H100"
  with pytest.raises(cli.FlagError, match=told):
    fit_rows.read(tmp_path, H200)


def test_all_constants_that_decide_between_configs_are_fitted(few):
  """And each can be left out."""
  assert (START > 0).all()
  assert fit_terms.constants_of(TODAY, KNOWN) == KNOWN
  values = [fit_terms.without(TODAY, (name,), H200) for name in MODEL]
  known = fit_terms.constants_of(np.stack(values), KNOWN)
  assert np.isfinite(fit_rows.predict(few.plans, known)).all()


def test_candidates_are_predicted_together_as_one_by_one(few):
  drawn = np.random.default_rng(0).standard_normal((5, len(TODAY)))
  values = TODAY * np.exp(0.3 * drawn)
  found = fit_rows.predict(few.plans, fit_terms.constants_of(values, KNOWN))
  for i, some in enumerate(values):
    alone = fit_terms.constants_of(some, KNOWN)
    predicted = [
      tuning.model_of(x.tiling.given).predict(x, alone) for x in few.plans
    ]
    np.testing.assert_allclose(found[:, i], np.log(predicted), rtol=1e-12)


def test_what_is_dropped_has_its_neutral_value():
  at = NAMES.index
  three = "model.mma_three_consumers"
  dropped = "odd_sizes.uneven", "odd_sizes.short", three, "grouped.l2"
  found = fit_terms.without(TODAY, dropped, H200)
  assert found[at("odd_sizes.uneven")] == found[at("odd_sizes.short")] == 0
  assert found[at(three)] == 1
  assert found[at("grouped.l2")] == TODAY[at("model.l2")]
  assert sum(found != TODAY) == 4


def test_a_problem_is_in_one_fold(measured):
  folds = {}
  for first, fold in zip(measured.first, measured.fold):
    assert folds.setdefault(measured.plans[first].tiling.given, fold) == fold
  for rows in (measured, measured.of(measured.fold == 2)):
    assert rows.counts.sum() == len(rows.plans)
    for plan, problem in zip(rows.plans, rows.of_row):
      assert plan.tiling.given == rows.plans[rows.first[problem]].tiling.given


def test_scores_are_best_over_chosen():
  rows = fit_rows.Rows(
    plans=[],
    us=np.array([2.0, 1.0, 4.0, 3.0, 3.0]),
    first=np.array([0, 3]),
    xla_us=np.full(2, np.nan),
    fold=np.zeros(2, int),
    kind=np.zeros(2, int),
  )
  predicted = np.log([[1, 3], [2, 1], [3, 2], [1, 1], [1, 2]])
  found = rows.scores(predicted)
  assert found.tolist() == [[0.5, 1.0], [1.0, 1.0]]
  # Of two that tie, the mean.
  tied = rows.scores(np.zeros((5, 1)))
  assert tied[:, 0] == pytest.approx([(0.5 + 1 + 0.25) / 3, 1.0])
  said = {"problems": 2, "mean": 0.75, "below_0.95": 1, "worst": 0.5}
  assert fit_rows.regret(found, 0) == said
  # What a search sees is the same but for how far times are off.
  exact = np.log(1e-6 * rows.us)[:, None]
  np.testing.assert_allclose(rows.fitness(exact), 1.0)
  np.testing.assert_allclose(rows.errors(exact + 0.25), 0.25)


def test_a_search_finds_better_constants_and_the_same_again(few):
  """Times of problems that it does not see may be anything."""
  study = fit.Study(H200, few, START)
  found = study.fit()
  for scores in (study.scores, study.scores_with_xla):
    assert scores(found[-1:]).mean() > scores(START[None]).mean()
  assert (found != fit.Study(H200, few, START, seed=1).fit()).any()
  is_hidden = few.fold == 2
  us, xla_us = few.us.copy(), np.where(is_hidden, 9 * few.xla_us, few.xla_us)
  us[is_hidden[few.of_row]] *= np.linspace(1, 9, is_hidden[few.of_row].sum())
  other = dataclasses.replace(few, us=us, xla_us=xla_us)
  changed = fit.Study(H200, other, START).fit()
  np.testing.assert_array_equal(found[2], changed[2])
  assert (found != changed).any(axis=1).sum() == fit_rows.FOLDS


def test_xla_is_chosen_where_the_package_chooses_it(few):
  """Once predicted times are asked."""
  or_xla = fit.Study(H200, few, START).or_xla
  last = or_xla.rows.first + or_xla.rows.counts - 1
  assert (or_xla.rows.us[last] == or_xla.rows.xla_us).all() and len(last) > 10
  limits = np.exp(or_xla.predictor(KNOWN)([KNOWN])[last, 0])
  with hardware.assume(H200.name):
    for problem, limit in zip(or_xla.problems, limits):
      assert xla.faster(problem, 1.001 * limit)
      found = xla.faster(problem, 0.999 * limit)
      assert found is None or " us" not in found.why


# Many rows of an H100 are of what a choice had lost.
BARS = {"nvidia_h100_80gb_hbm3": 0.976, "nvidia_h200": 0.978}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_how_good_its_constants_are(path):
  known = constants.read(path)[constants.WIDTH]
  assert known["by"] and known["commit"] and "dirty" not in known["commit"]
  assert known["rows"] > 0 and known["date"]
  assert known["regret"]["train"]["mean"] >= 0.978
  assert known["regret"]["held_out"]["mean"] >= BARS[path.stem]


def test_the_regret_of_the_shipped_constants_is_what_the_file_says(measured):
  """As far as rows that came since leave it."""
  known = constants.read(PATH)[constants.WIDTH]
  study = fit.Study(H200, measured, START)
  found = study.scores(TODAY[None]).mean()
  assert found == pytest.approx(known["regret"]["train"]["mean"], abs=2e-3)
  assert len(study.rows.us) >= 0.9 * known["rows"]


def test_nothing_is_written_unless_asked(run, tmp_path, monkeypatch):
  monkeypatch.setattr(fit, "_ABLATION_GENERATIONS", 1)
  status, out = run("--ablate")
  assert status == 0
  assert (tmp_path / PATH.name).read_text() == PATH.read_text()
  for said in ("rows of", "today's", "fit, train", "fit, held out", "or XLA"):
    assert said in out
  assert all(name in out for name in MODEL)


def test_constants_are_written(run, tmp_path):
  status, out = run("--write", "--seed=3")
  found = constants.read(tmp_path / PATH.name)
  assert status == 0 and "written" in out
  said = found[constants.WIDTH]
  assert said["by"] == "python -m experiments.fit --seed=3"
  assert 0 < said["rows"] < 1000
  assert {"train", "held_out"} == set(said["regret"])
  new = constants.from_json(found, PATH)
  changed = fit_terms.values_of(new) != TODAY
  assert changed.sum() > 0.9 * len(NAMES) and changed[-len(XLA) :].any()
  assert new.stages == KNOWN.stages


def test_what_is_said_is_written_and_constants_stay(run, tmp_path):
  assert run("--write", "--keep")[0] == 0
  found = constants.read(tmp_path / PATH.name)
  assert constants.from_json(found, PATH) == KNOWN
  given = constants.read(PATH)[constants.WIDTH]
  assert found[constants.WIDTH]["by"] == given["by"]
  assert found[constants.WIDTH]["rows"] < 1000


def test_some_constants_alone_are_fitted(run, tmp_path):
  assert run("--terms=grouped.l2,xla.most", "--write")[0] == 0
  new = constants.from_json(constants.read(tmp_path / PATH.name), PATH)
  (changed,) = np.nonzero(
    ~np.isclose(fit_terms.values_of(new), TODAY, rtol=1e-3)
  )
  assert {NAMES[i] for i in changed} == {"grouped.l2", "xla.most"}


def test_what_another_device_leaves_out_is_fitted(run, tmp_path, monkeypatch):
  model = dataclasses.replace(KNOWN.model, small=0.0)
  theirs = dataclasses.replace(KNOWN, model=model)
  monkeypatch.setattr(constants, "of", lambda gpu: theirs)
  assert run("--start=nvidia_h100_80gb_hbm3", "--write")[0] == 0
  new = constants.from_json(constants.read(tmp_path / PATH.name), PATH)
  assert new.model.small > 0


@pytest.mark.parametrize(
  ("args", "told"),
  (
    (["--device=nvidia_h1000"], "--device: name must be a known GPU"),
    (["--start=nvidia_h1000"], "--start: name must be a known GPU"),
    (["--start="], "--start=: want a path"),
    (["--start=nvidia_h200"], "another device"),
    (["--device=nvidia_l4"], "too few rows"),
    (["--keep"], "--write"),
    (["--terms=model.none"], "no 'model.none'"),
  ),
)
def test_a_command_that_cannot_be_carried_out(args, told, capsys):
  with pytest.raises((cli.FlagError, flags.Error)) as error:
    programs.call(fit.main, args)
  assert told in str(error.value)
  assert capsys.readouterr().out == ""
