"""Which committed rows stay when rows that were replaced are dropped."""

import pytest

from experiments import prune
from experiments.harness import rows
from tests.support import programs


def row(m, commit, suite="square", **fields):
  return {"kernel": "matmul", "m": m, "suite": suite, "commit": commit} | fields


def test_the_last_rows_of_a_case_stay():
  found = [row(1, f"c{i}", ms=i) for i in range(8)]
  # Other cases, of runs that are larger than any of the first's commits.
  found[4:4] = [row(m, "whole") for m in (2, 3)]
  found += [row(4, "others", suite="sizes"), row(5, "others", suite="sizes")]
  left = prune.kept(found, named=set())
  assert [x["ms"] for x in left if x["m"] == 1] == [5, 6, 7]
  assert rows.latest(left) == rows.latest(found)
  assert prune.kept(left, named=set()) == left


@pytest.mark.parametrize("suite", ["square", "sizes"])
def test_what_pages_read_stays(tmp_path, suite):
  page = tmp_path / "page.md"
  page.write_text("{row}`gpu/dense ms m=1 commit=c0ffee`")
  named = prune.named_commits([page])
  assert named == {"c0ffee"}
  found = [row(m, "c0ffee12", suite) for m in (1, 2)]
  found += [row(m, "largest", suite) for m in (1, 2, 3)]
  found += [row(1, f"later{i}", suite) for i in range(4)]
  commits = [x["commit"] for x in prune.kept(found, named) if x["m"] == 1]
  assert commits == ["c0ffee12", "largest", "later1", "later2", "later3"]
  commits = [x["commit"] for x in prune.kept(found, set()) if x["m"] == 1]
  assert commits == ["largest", "later1", "later2", "later3"]


def test_files_are_rewritten(tmp_path, capsys):
  path = tmp_path / "dense.jsonl"
  found = [row(1, str(i)) for i in range(6)]
  for each in found:
    rows.append(path, each)
  text = path.read_text()
  args = [f"--output_dir={tmp_path}"]
  assert programs.call(prune.main, [*args, "--dry_run"]) == 0
  assert path.read_text() == text
  assert programs.call(prune.main, args) == 0
  # The first is of the largest run: all are of one row.
  assert rows.read(path) == [found[0], *found[3:]]
  assert capsys.readouterr().out.count("4 of 6 rows stay") == 2


def test_committed_rows_are_pruned(capsys):
  assert programs.call(prune.main, ["--dry_run"]) == 0
  assert capsys.readouterr().out == ""
