"""What computes a problem: the order of the candidates."""

import functools
import json

import jax
import pytest

import pallas_gemm
from pallas_gemm import hardware, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache, choose, model, xla
from pallas_gemm.tuning.cache import Entry

PROBLEM = Problem.flat(
  m=4096, n=2048, k=1024, dtype="bfloat16", out_dtype="bfloat16"
)
OTHER = PROBLEM.changed(m=1, activation="jax.nn.gelu", bias="n")
MODELLED, MINE = Config(), Config(block_m=64, consumers=1, epilogue_n=32)
MEASURED, SHIPPED = Config(block_n=128), Config(block_n=128, cluster_m=2)
ILLEGAL = Config(stages=1)
CHOOSE, REASON = model.choose, legal.reason


@pytest.fixture(autouse=True)
def warnings_(tmp_path, monkeypatch):
  """A cache and a table of its own for each test; yields what was logged."""
  found = []
  monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
  monkeypatch.setattr(cache, "_SHIPPED", tmp_path)
  monkeypatch.setattr(
    cache.logging, "warning", lambda message, *args: found.append(args[0])
  )
  forget = cache.clear, cache._shipped.cache_clear
  for f in forget:
    f()
  yield found
  for f in forget:
    f()


@pytest.fixture(autouse=True)
def modelled(monkeypatch):
  """Yields the problems that the model was asked about."""
  asked = []

  def choose_one(problem, *, any_rows=False):
    del any_rows
    asked.append(problem)
    return MODELLED

  monkeypatch.setattr(model, "choose", choose_one)
  return asked


def ship(tmp_path, *found):
  (tmp_path / "nvidia_h200.jsonl").write_text(cache.shipped_lines(found))
  cache._shipped.cache_clear()


def order(problem=PROBLEM, **how):
  return [(c.how, c.source) for c in tuning.ranked(problem, **how)]


BY_MODEL = [(MODELLED, "model"), ("xla", "model")]


def test_each_source_comes_before_the_next(tmp_path, modelled, warnings_):
  assert order() == BY_MODEL
  ship(tmp_path, (PROBLEM, Entry(SHIPPED, 2e-6, 3e-6)))
  shipped = [(SHIPPED, "shipped"), ("xla", "shipped")]
  assert order() == shipped + BY_MODEL
  cache.store(PROBLEM, Entry(MEASURED, 5e-6, 6e-6), persist=False)
  measured = [(MEASURED, "measured"), ("xla", "measured")]
  assert order() == measured + shipped + BY_MODEL
  assert order(OTHER) == BY_MODEL
  assert order(config=MINE) == [(MINE, "user")]
  modelled.clear()
  assert tuning.resolve(PROBLEM) == MEASURED
  assert not modelled and not warnings_


def test_only_configs_are_ranked_where_xla_is_not_asked_for(tmp_path):
  ship(tmp_path, (PROBLEM, Entry(None, None, 3e-6)))
  cache.store(PROBLEM, Entry(MEASURED, 5e-6, 4e-6), persist=False)
  assert order()[0] == ("xla", "measured")
  assert order(xla_too=False) == [(MEASURED, "measured"), (MODELLED, "model")]
  assert tuning.resolve(PROBLEM) == MEASURED


def test_what_was_measured_comes_before_a_guess_about_xla(monkeypatch):
  left = xla.Faster("XLA's kernel starts sooner", 1e-6)
  monkeypatch.setattr(xla, "faster", lambda *_: left)
  guess, kernel = tuning.ranked(PROBLEM)
  assert guess == choose.Candidate("xla", 1e-6, "model", left.why)
  assert kernel.how == MODELLED and kernel.seconds > 0
  cache.store(PROBLEM, Entry(MEASURED, 5e-6), persist=False)
  assert order()[0] == (MEASURED, "measured")


@pytest.mark.parametrize(
  "entry, why",
  [
    (
      Entry(MEASURED, 5e-6, 4e-6),
      "it takes 5.0 us, XLA's product 4.0 (shipped)",
    ),
    (Entry(None, None, 4e-6), "no config of the kernel is shipped"),
    (Entry(None), "no config of the kernel is shipped"),
  ],
)
def test_xla_may_be_the_winner(tmp_path, entry, why):
  ship(tmp_path, (PROBLEM, entry))
  first = next(tuning.ranked(PROBLEM))
  assert (first.how, first.seconds) == ("xla", entry.xla_seconds)
  assert why in first.why


def test_what_is_measured_and_illegal_now_is_passed_over(tmp_path, warnings_):
  assert legal.reason(Plan.of(PROBLEM, ILLEGAL))
  ship(tmp_path, (PROBLEM, Entry(ILLEGAL, 1e-6, 2e-6)))
  cache.store(PROBLEM, Entry(ILLEGAL, 1e-6, 2e-6))
  for _ in range(2):
    assert order() == BY_MODEL
  assert len(warnings_) == 1 and "stages" in warnings_[0]


def test_the_users_config_must_be_legal():
  with pytest.raises(ValueError, match=r"config can't compute .*stages"):
    order(config=ILLEGAL)
  assert tuning.resolve(PROBLEM, config=ILLEGAL) is ILLEGAL


@pytest.mark.parametrize("source", ("user", "measured", "shipped", "model"))
def test_a_config_that_is_chosen_is_asked_about_once(
  monkeypatch, tmp_path, source
):
  asked = []
  monkeypatch.setattr(model, "choose", CHOOSE)
  monkeypatch.setattr(
    legal, "reason", lambda plan: asked.append(plan.config) or REASON(plan)
  )
  problem = PROBLEM.changed(m=64, n=64, k=64)
  if source == "measured":
    cache.store(problem, Entry(MINE), persist=False)
  if source == "shipped":
    ship(tmp_path, (problem, Entry(MINE)))
  how = {"implementation": "sm90"}
  if source == "user":
    how["config"] = MINE
  x = jax.ShapeDtypeStruct((64, 64), "bfloat16")
  jax.jit(functools.partial(pallas_gemm.matmul, **how)).lower(x, x)
  chosen = asked[-1]
  assert asked.count(chosen) == 1
  assert (chosen == MINE) == (source != "model")


def test_batch_invariant_is_one_config_for_all_rows(modelled):
  variants = [
    PROBLEM.changed(m=m, **batch)
    for m in (1, 127, 8192)
    for batch in (
      {},
      {"batch": 7, "batched_a": True},
      {"batch": 3, "batched_a": True, "batched_b": True},
    )
  ]
  for problem in variants:
    cache.store(problem, Entry(MINE, 2e-4, 1e-4), persist=False)
    assert order(problem, batch_invariant=True) == [(MODELLED, "model")]
  assert len(set(modelled)) == 1
  assert modelled[0] == PROBLEM.changed(m=tuning.INVARIANT_M)
  other_weights = PROBLEM.changed(n=64)
  tuning.resolve(other_weights, batch_invariant=True)
  assert modelled[-1].n == 64


def test_groups_along_k_are_batch_invariant_as_they_are():
  grouped = PROBLEM.changed(ragged="k", groups=8, transpose_a=True)
  cache.store(grouped, Entry(MEASURED, 2e-4, 1e-4), persist=False)
  found = order(grouped, batch_invariant=True)
  assert found[0] == (MEASURED, "measured")
  assert "xla" not in [how for how, _ in found]
  assert order(grouped)[0] == ("xla", "measured")


# The shipped table.


def test_a_table_is_of_one_gpu(tmp_path):
  entry = Entry(SHIPPED, 2e-6)
  ship(tmp_path, (PROBLEM, entry), (OTHER, Entry(None)))
  assert cache.shipped(PROBLEM) == entry and cache.shipped(OTHER) == Entry(None)
  with hardware.assume("NVIDIA H100 80GB HBM3"):
    assert cache.shipped(PROBLEM) is None


def test_a_line_holds_what_is_no_default():
  (line,) = cache.shipped_lines([(PROBLEM, Entry(SHIPPED, 2e-6))]).splitlines()
  assert json.loads(line) == {
    "problem": {
      "m": 4096,
      "n": 2048,
      "k": 1024,
      "dtype": "bfloat16",
      "out_dtype": "bfloat16",
    },
    "config": {"block_n": 128, "cluster_m": 2},
    "seconds": 2e-6,
  }


def test_what_is_shipped_is_legal(monkeypatch):
  monkeypatch.undo()
  for path in cache._SHIPPED.glob("*.jsonl"):
    for row in map(json.loads, path.read_text().splitlines()):
      problem = Problem.from_row(row["problem"])
      entry = cache._shipped(path.stem)[problem]
      assert entry.config is None or not legal.reason(
        Plan.of(problem, entry.config)
      )


# What `explain` says of it.


@pytest.mark.parametrize(
  "entry, runs, said",
  [
    (Entry(SHIPPED, 2e-6, 3e-6), "sm90", ", measured by autotune"),
    (Entry(SHIPPED, 3e-6, 2e-6), "xla", "because sm90: it takes 3.0 us"),
  ],
)
def test_what_was_measured_is_explained(entry, runs, said):
  a, b = (
    jax.ShapeDtypeStruct(shape, "bfloat16")
    for shape in ((4096, 1024), (1024, 2048))
  )
  cache.store(PROBLEM, entry)
  found = pallas_gemm.explain(pallas_gemm.matmul, a, b, platform="cuda")
  assert found.products[0].implementation == runs
  assert said in str(found)
