"""The rows of a release are of its commit, and the package still is."""

import ast
import functools
import json
import subprocess

import pytest

from experiments.harness import release_state, rows
from tests.support import pages, result_rows

DEVICES = ["nvidia_h200", "nvidia_h100_80gb_hbm3"]
VERSION = "__version__"


def about(folder):
  """What release.json says; a test that needs it is skipped without."""
  if not (path := folder / "release.json").exists():
    pytest.skip(f"no release.json in {folder.name}")
  return json.loads(path.read_text())


def wrong(folder):
  """What the files of a release have that is not of it, a line each."""
  of = about(folder)
  state = release_state.State(folder)  # which has no state of its own
  state.of, done = of, of["pieces"]
  found = [] if of["dirty"] is False else [f"dirty is {of['dirty']}"]
  seeds, drawn = {*release_state.seeds(of["commit"])}, set()
  for file in dict.fromkeys(x.file for x in state.pieces if x.name in done):
    if file == release_state.TESTS:
      text = (folder / f"{file}.txt").read_text()
      same = f"\ncommit {of['commit']}, {of['device']}, "
      if text.count(same) != text.count("\ncommit ") or same not in text:
        found.append(f"{file}: another commit or device")
      continue
    if not (there := rows.read(folder / f"{file}.jsonl")):
      found.append(f"{file}: no rows")
    for name in release_state.SAME:
      others = {str(row.get(name)) for row in there} - {of[name]}
      found += [f"{file}: {name} {x}" for x in sorted(others)]
    random = {
      row["seed"]
      for row in there
      if file == "dense_unseen" or row.get("suite") == "unseen"
    }
    drawn |= random
    found += [f"{file}: seed {x}" for x in sorted(random - seeds)]
  if "dense-unseen-1" in done:
    found += [f"no rows of seed {x}" for x in sorted(seeds - drawn)]
  return found


def git(*args, root=pages.ROOT):
  """What git prints; None if it fails or is not there."""
  command = ["git", "-C", str(root), *args]
  try:
    return subprocess.run(
      command, capture_output=True, check=True, text=True
    ).stdout
  except (OSError, subprocess.CalledProcessError):
    return None


def code(text):
  """A module without comments, docstrings and version."""
  tree = ast.parse(text)
  for node in ast.walk(tree):
    body = getattr(node, "body", None)
    if not isinstance(body, list):
      continue
    if isinstance(node, ast.Module):
      names = [x for x in body if isinstance(x, ast.Assign)]
      names = [x for x in names if ast.unparse(x.targets[0]) == VERSION]
      node.body = body = [x for x in body if x not in names]
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
      del body[0]
  return ast.dump(tree)


def changed(commit, root=pages.ROOT):
  """Files of the package that do more than say something else since then."""
  diff = ("diff", "--name-only", "--no-renames", commit, "--", "pallas_gemm")
  found = []
  for name in git(*diff, ":(exclude)**/BUILD", root=root).splitlines():
    old, new = git("show", f"{commit}:{name}", root=root), root / name
    if name.endswith(".py") and old is not None and new.exists():
      if code(old) == code(new.read_text()):
        continue
    found.append(name)
  return found


@pytest.mark.rows
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_release_are_of_its_commit(device):
  assert wrong(rows.RESULTS / device) == []


@pytest.mark.rows
@pytest.mark.parametrize("device", DEVICES)
def test_the_package_is_what_a_release_measured(device):
  """But for words and the version."""
  commit = about(rows.RESULTS / device)["commit"]
  if git("cat-file", "-e", f"{commit}^{{commit}}") is None:
    pytest.skip(f"no git, or it has no commit {commit[:10]}")
  assert changed(commit) == [], f"measure again; {commit} is published"


@pytest.fixture
def folder(tmp_path):
  """A release's files, made up."""
  of = dict.fromkeys(release_state.SAME, "x") | {
    "commit": "abcdef0",
    "dirty": False,
  }
  state = release_state.State(tmp_path)
  state.of = of
  done = {piece.name: {"status": 0} for piece in state.pieces}
  (tmp_path / "release.json").write_text(json.dumps(of | {"pieces": done}))
  same = {name: of[name] for name in release_state.SAME}
  for file in dict.fromkeys(piece.file for piece in state.pieces):
    if file == release_state.TESTS:
      (tmp_path / f"{file}.txt").write_text("pytest\ncommit abcdef0, x, y\n")
    for seed in (
      release_state.seeds("abcdef0") if file == "dense_unseen" else [0]
    ):
      row = result_rows.row(**same, seed=seed)
      rows.append(tmp_path / f"{file}.jsonl", row)
  return tmp_path


@pytest.mark.parametrize(
  "file, fields, said",
  [
    ("dense", {}, None),
    ("dense", {"commit": "another"}, "dense: commit another"),
    ("memory", {"jaxlib": "0.1"}, "memory: jaxlib 0.1"),
    ("sweep", {"device": None}, "sweep: device None"),
    ("dense_unseen", {"seed": 7}, "dense_unseen: seed 7"),
    ("ragged", {"suite": "unseen"}, "ragged: seed 0"),
  ],
)
def test_a_row_of_another_release_is_found(folder, file, fields, said):
  path = folder / f"{file}.jsonl"
  rows.append(path, rows.read(path)[0] | fields)
  assert wrong(folder) == ([said] if said else [])


def test_what_else_is_no_release_is_found(folder):
  (folder / "dense_unseen.jsonl").unlink()
  (folder / f"{release_state.TESTS}.txt").write_text("\ncommit 1234567, x, y\n")
  path = folder / "release.json"
  path.write_text(path.read_text().replace("false", "true"))
  seeds = [
    f"no rows of seed {x}" for x in sorted(release_state.seeds("abcdef0"))
  ]
  assert wrong(folder) == [
    "dirty is True", "gpu_tests: another commit or device",
    "dense_unseen: no rows", *seeds,
  ]  # fmt: skip
  path.unlink()
  with pytest.raises(pytest.skip.Exception, match=r"no release.json in"):
    wrong(folder)


def test_words_and_version_may_change(tmp_path):
  call = functools.partial(git, root=tmp_path)
  if call("init") is None:
    pytest.skip("needs git")
  package = tmp_path / "pallas_gemm"
  package.mkdir()
  text = '"""Words."""\n__version__ = "1"\n\ndef f(x):\n  "More."\n  return x\n'
  for name in ("a.py", "b.py", "BUILD", "table.jsonl"):
    (package / name).write_text(text)
  call("add", "-A")
  call("-c", "user.name=x", "-c", "user.email=x", "commit", "-m", "x")
  commit = call("rev-parse", "HEAD").strip()
  for name in ("a.py", "BUILD"):
    other = text.replace("Words", "Others").replace('"1"', '"2"  # new')
    (package / name).write_text(other.replace("More", "Less"))
  assert changed(commit, tmp_path) == []
  (package / "b.py").write_text(text.replace("return x", "return -x"))
  (package / "table.jsonl").unlink()
  assert changed(commit, tmp_path) == [
    "pallas_gemm/b.py", "pallas_gemm/table.jsonl",
  ]  # fmt: skip
