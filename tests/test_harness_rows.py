"""Result rows: schema, appending, reading back."""

import json
import math
import pathlib

import pytest

from experiments import float32
from experiments.harness import (
  cli,
  dense_cases,
  eight_bit_peers,
  ladder_cases,
  ragged_cases,
  rows,
  sum_errors,
)
from tests.support.result_rows import row as make_row

# The order and the names that readers of the files rely on.
FIXED = (
  "experiment, kernel, number, m, n, k, dtype, alpha, beta, config,"
  " ms_median, ms_p25, ms_p75, tflops, gbytes_per_s, baseline_ms_median,"
  " ratio_to_jnp_dot, max_error, error_bound, passed, repeats, warmup,"
  " distribution, seed, device, driver, cuda, jax, jaxlib, sm_clock_mhz,"
  " power_w, temperature_c, kernel_names, baseline_kernel_names, commit, utc"
).split(", ")


def test_fields_are_the_fixed_ones():
  assert list(rows.FIELDS) == FIXED
  assert list(make_row()) == FIXED


def test_optional_fields_are_there_only_if_taken():
  row = rows.Row(**make_row())
  assert "wall_ms_median" not in rows.as_dict(row, wall_ms_median=None)
  assert rows.as_dict(row, wall_ms_median=0.02)["wall_ms_median"] == 0.02
  with pytest.raises(ValueError, match="got \\['speed'\\]"):
    rows.as_dict(row, speed=1.0)


def test_numbers_that_json_lacks_become_null():
  row = make_row(max_error=math.nan, config={"x": [math.inf]})
  assert row["max_error"] is None and row["config"] == {"x": [None]}


@pytest.mark.parametrize(
  "change, message",
  [
    ({"m": "4096"}, "row field m must be <class 'int'>, got '4096'"),
    ({"m": 1.5}, "row field m"),
    ({"m": True}, "row field m"),
    ({"number": "one"}, "row field number"),
    ({"passed": 1}, "row field passed"),
    ({"kernel_names": "naive"}, "row field kernel_names"),
    ({"utc": None}, "row field utc"),
    ({"wall_ms_median": "x"}, "row field wall_ms_median"),
    ({"surprise": 1}, "unknown fields surprise"),
  ],
)
def test_validate_names_the_field(change, message):
  rows.validate(make_row())
  rows.validate(make_row(ms_median=None, passed=None, config=None, alpha=1))
  with pytest.raises(ValueError, match=message):
    rows.validate(make_row() | change)


@pytest.mark.parametrize("name", ["experiment", "passed", "utc"])
def test_validate_misses_fields(name):
  row = make_row()
  del row[name]
  with pytest.raises(ValueError, match=f"row lacks {name}"):
    rows.validate(row)


def test_appended_rows_come_back(tmp_path):
  path = tmp_path / "new" / "ladder.jsonl"
  assert rows.read(path) == []
  written = [make_row(), make_row(kernel="coalesced", number=2)]
  for row in written:
    rows.append(path, row)
  assert rows.read(path) == written
  assert len(path.read_text().splitlines()) == 2
  assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_line_cut_short_costs_that_line_alone(tmp_path):
  path = tmp_path / "ladder.jsonl"
  rows.append(path, make_row())
  with open(path, "a") as f:
    f.write('{"experiment": "lad')
  rows.append(path, make_row(number=2))
  assert [row["number"] for row in rows.read(path)] == [1, 2]


def test_latest_row_of_each_problem_counts():
  old, new = make_row(tflops=1.0), make_row(tflops=2.0)
  other = make_row(m=64)
  assert rows.latest([old, other, new]) == [new, other]
  assert rows.find([old, other, new], kernel="naive", m=48) == new
  assert rows.find([old], kernel="none") is None


def test_files_are_named_after_the_device(tmp_path):
  assert rows.slug("NVIDIA H200") == "nvidia_h200"
  assert rows.slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
  path = rows.results_file("NVIDIA H200", "ladder")
  assert path == rows.RESULTS / "nvidia_h200" / "ladder.jsonl"
  assert rows.results_file("x", "dense", tmp_path) == tmp_path / "dense.jsonl"


def test_rows_of_a_copy_that_is_no_checkout_go_to_the_current_folder(tmp_path):
  programs = tmp_path / "experiments"
  assert rows._results(programs) == pathlib.Path("results")
  (tmp_path / "pyproject.toml").touch()
  assert rows._results(programs) == programs / "results"


@pytest.mark.parametrize(
  "folder", ["file", "file/below", "dangling/below", "taken"]
)
def test_where_no_rows_can_be_written(folder, tmp_path):
  (tmp_path / "file").touch()
  (tmp_path / "dangling").symlink_to("nothing")
  (tmp_path / "taken" / "ladder.jsonl").mkdir(parents=True)
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(cli.FlagError, match="--output_dir: "):
    rows.results_file("x", "ladder", tmp_path / folder)
  assert sorted(tmp_path.rglob("*")) == before


def test_asking_for_a_results_file_makes_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for folder in ("", "new", "new/below", tmp_path, tmp_path / "new" / "below"):
    path = rows.results_file("x", "ladder", folder)
    assert path == pathlib.Path(folder, "ladder.jsonl")
  assert not list(tmp_path.iterdir())


def test_what_is_no_text_has_no_rows(tmp_path):
  path = tmp_path / "ladder.jsonl"
  path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
  assert rows.read(path) == []


# Rows that are committed.

CLAIMS = {
  "ladder": ladder_cases.CLAIMS,
  "sweep": ladder_cases.CLAIMS,
  "dense": dense_cases.CLAIMS,
  "dense_unseen": dense_cases.CLAIMS,
  "ragged": ragged_cases.CLAIMS,
  "float32": sum_errors.CLAIMS["float32"] | float32.CLAIMS,
  "eight_bits": sum_errors.CLAIMS["float8_e4m3fn"] | eight_bit_peers.CLAIMS,
}


def ran(row):
  """The arms of a row, with the kernels of each."""
  if row["baseline_kernel_names"]:
    name = {"dense": "jnp", "ragged": "lax.ragged_dot"}
    name = name.get(row["experiment"].partition("_")[0], "jnp.dot")
    yield name, row["baseline_kernel_names"]
  if "arms" not in row:
    yield row["kernel"], row["kernel_names"]
  for name, arm in row.get("arms", {}).items():
    yield name, arm["kernel_names"]


@pytest.mark.rows
@pytest.mark.parametrize("device", ["nvidia_h200", "nvidia_h100_80gb_hbm3"])
def test_arms_of_committed_rows_ran_what_they_claim(device):
  held, wrong = set(), []
  for path in sorted((rows.RESULTS / device).glob("*.jsonl")):
    for row in rows.read(path):
      # Of a log, or of a program without arms.
      if "kernel_names" not in row or row["experiment"] not in CLAIMS:
        continue
      claims, products = CLAIMS[row["experiment"]], 1
      if "pass" in row:
        shape = dict.fromkeys(("m", "n", "k", "groups"), 1)
        case = ragged_cases.Case(suite="", **shape, pass_=row["pass"])
        products = case.products
      for arm, kernels in ran(row):
        if arm in claims and kernels:
          held.add(arm)
          why = claims[arm].refuted(kernels, products)
          wrong += [(path.name, row["utc"], arm, why)] if why else []
  assert not wrong
  assert held >= {
    "jnp",
    "jnp.dot HIGHEST",
    *ladder_cases.PEERS,
    "jax_ragged_dot_mgpu",
    "tokamax triton",
  }
