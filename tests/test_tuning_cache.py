"""The tuning cache: nothing is lost, and nothing in it breaks a computation."""

import ast
import concurrent.futures
import contextlib
import dataclasses
import errno
import itertools
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys

import pytest

from pallas_gemm import hardware, tuning, version
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache
from pallas_gemm.tuning.cache import Entry

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROBLEM = Problem.flat(
  m=4096, n=2048, k=1024, dtype="bfloat16", out_dtype="bfloat16"
)
OTHER = PROBLEM.changed(m=1, activation="jax.nn.gelu", bias="n")
CONFIG = Config(block_m=64, consumers=1, epilogue_n=32)
FIRST = Entry(CONFIG, 1e-4, xla_seconds=3e-4)
SECOND = Entry(Config(block_n=128, cluster_m=2), 2e-4)


@pytest.fixture(autouse=True)
def warnings_(own_cache, monkeypatch):
  """What was logged."""
  found = []
  monkeypatch.setattr(
    cache.logging, "warning", lambda message, *args: found.append(args[0])
  )
  return found


@pytest.fixture
def path():
  found = cache.path_of()
  found.parent.mkdir()
  return found


def stored(path):
  return json.loads(path.read_text())["entries"]


def leftovers(path):
  """Files next to the cache that are neither its lock nor kept aside."""
  names = [p.name for p in path.parent.iterdir() if p.name.count(".") > 1]
  return [x for x in names if not re.search(r"\.(lock|corrupt\d*)$", x)]


def test_what_is_stored_is_found():
  before = tuning.generation()
  cache.store(PROBLEM, SECOND)
  cache.store(PROBLEM, FIRST)  # in its place
  cache.store(OTHER, SECOND)
  assert tuning.generation() > before
  for _ in range(2):
    assert cache.lookup(PROBLEM) == FIRST
    assert cache.lookup(OTHER) == SECOND
    cache.clear()  # and again from disk


@pytest.mark.parametrize("module", ("jax._src.nn.functions", "jax.nn"))
def test_an_older_name_of_an_activation_is_read(path, module):
  """Entries named it by where JAX had it."""
  cache.store(OTHER, FIRST)
  now, then = (rf"\"activation\":\"{x}gelu" for x in ("", f"{module}."))
  content = path.read_text()
  assert now in content
  path.write_text(content.replace(now, then))
  cache.clear()
  assert cache.lookup(OTHER) == FIRST
  assert Problem.flat(**OTHER.row() | {"activation": f"{module}.gelu"}) == OTHER


@pytest.mark.parametrize("name", PROBLEM.row())
def test_every_field_of_a_problem_counts(name):
  grouped = {"ragged": "k", "groups": 2}
  problem = PROBLEM.changed(**grouped if name == "groups" else {})
  cache.store(problem, FIRST)
  value = problem.row()[name]
  other = not value if isinstance(value, bool) else f"{value}1"
  if isinstance(value, int) and not isinstance(value, bool):
    other = value + 1
  assert cache.lookup(problem.changed(**{name: other})) is None


def test_a_key_holds_what_is_no_default():
  """So that a field which is added later changes no key that there is."""
  fields = "m n k dtype out_dtype activation bias kernel version"
  assert json.loads(cache._key(OTHER)).keys() == {*fields.split()}


def test_each_gpu_has_its_file(warnings_):
  assert cache.lookup(PROBLEM) is None
  assert not cache.folder().exists()  # looking leaves nothing behind
  cache.store(PROBLEM, FIRST)
  with hardware.assume("NVIDIA H100 80GB HBM3"):
    assert cache.lookup(PROBLEM) is None
    cache.store(PROBLEM, SECOND)
    assert cache.lookup(PROBLEM) == SECOND
  assert cache.lookup(PROBLEM) == FIRST
  names = {p.name for p in cache.folder().glob("*.json")}
  assert names == {"nvidia_h200.json", "nvidia_h100_80gb_hbm3.json"}
  assert cache.path_of("../..").parent == cache.folder()
  assert not warnings_


def test_without_the_variable_it_is_the_users_folder(monkeypatch):
  monkeypatch.delenv(cache.FOLDER_VARIABLE)
  assert cache.folder().name == "pallas_gemm"
  monkeypatch.setenv(cache.FOLDER_VARIABLE, "~/x")
  assert cache.folder() == pathlib.Path.home() / "x"


def test_without_a_home_what_is_stored_is_remembered(monkeypatch, warnings_):
  def user_cache_dir(*_):
    raise RuntimeError("could not determine the home directory")

  monkeypatch.delenv(cache.FOLDER_VARIABLE)
  monkeypatch.setattr(cache.platformdirs, "user_cache_dir", user_cache_dir)
  assert cache.lookup(PROBLEM) is None
  cache.store(PROBLEM, FIRST)
  assert cache.lookup(PROBLEM) == FIRST
  [said] = warnings_
  assert "home directory; PALLAS_GEMM_CACHE_DIR can name one" in said


def test_another_version_is_not_found_and_not_lost(monkeypatch, path):
  cache.store(PROBLEM, FIRST)
  with monkeypatch.context() as patch:
    patch.setattr(version, "__version__", "0.0.1")
    cache._key.cache_clear()
    cache.clear()
    assert cache.lookup(PROBLEM) is None
    cache.store(PROBLEM, SECOND)
  cache._key.cache_clear()
  assert len(stored(path)) == 2


@pytest.fixture
def kernels(monkeypatch, tmp_path):
  """A copy of the kernels that the cache takes for them: change(edit)."""
  original = cache._KERNELS
  forget = cache._key.cache_clear, cache._kernel_hash.cache_clear, cache.clear

  def change(edit):
    folder = tmp_path / "kernels"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    edit(folder)
    monkeypatch.setattr(cache, "_KERNELS", folder)
    for f in forget:
      f()

  yield change
  monkeypatch.undo()
  for f in forget[:2]:
    f()


def documented(text):
  """Other docstrings and comments, and more lines."""
  tree = ast.parse(text)
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
      if ast.get_docstring(node):
        node.body[0].value.value = "Something else."
      else:
        node.body.insert(0, ast.Expr(ast.Constant("Something.")))
  return f"# A comment.\n\n{ast.unparse(tree)}"


def appended(name):
  def edit(folder):
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "a") as f:
      f.write("\nx = 1\n")

  return edit


def documented_all(folder):
  for path in folder.rglob("*.py"):
    path.write_text(documented(path.read_text()))


EDITS = {
  "nothing": (lambda folder: None, FIRST),
  "comments, docstrings, layout": (documented_all, FIRST),
  "triton": (appended("triton_dense.py"), FIRST),
  "a kernel": (appended("sm90/layout.py"), None),
  "epilogues": (appended("epilogues.py"), None),
  "a new file": (appended("new/file.py"), None),
}


@pytest.mark.parametrize("edit, found", EDITS.values(), ids=EDITS)
def test_what_changes_a_kernel_is_measured_anew(kernels, edit, found):
  cache.store(PROBLEM, FIRST)
  kernels(edit)
  assert cache.lookup(PROBLEM) == found


def test_without_sources(kernels):
  kernels(shutil.rmtree)
  cache.store(PROBLEM, FIRST)
  assert cache.lookup(PROBLEM) == FIRST


def test_entries_of_earlier_kinds_stay_in_the_file(path, warnings_):
  """Keys held every field, entries no time of XLA's."""
  old = PROBLEM.row() | {"device": "NVIDIA H200", "kernel": "1"}
  entry = {"config": dataclasses.asdict(CONFIG), "seconds": 1e-4}
  content = {"format": cache.FORMAT, "entries": {json.dumps(old): entry}}
  path.write_text(json.dumps(content))
  assert cache.lookup(PROBLEM) is None
  cache.store(PROBLEM, SECOND)
  assert stored(path)[json.dumps(old)] == entry
  assert cache.from_json(entry) == Entry(CONFIG, 1e-4)
  assert not warnings_


def test_what_is_known_of_several_processes(path):
  cache.store(OTHER, FIRST, persist=False)  # of this one alone
  theirs = {cache._key(PROBLEM): cache.to_json(FIRST)}
  path.write_text(json.dumps({"format": cache.FORMAT, "entries": theirs}))
  assert cache.lookup(PROBLEM) is None
  cache.store(PROBLEM.changed(m=2), SECOND)  # reads what others wrote
  assert cache.lookup(PROBLEM) == cache.lookup(OTHER) == FIRST
  assert len(stored(path)) == 2


# Loads the cache without JAX, which the packages import and what knows the
# GPU; waits until every writer is there, and stores.
WRITER = """
import sys, types
for name in ("", ".tuning", ".hardware"):
  module = types.ModuleType("pallas_gemm" + name)
  module.__path__ = [sys.argv[1] + name.replace(".", "/")]
  sys.modules["pallas_gemm" + name] = module
gpu = types.SimpleNamespace(name="NVIDIA H200")
sys.modules["pallas_gemm"].hardware = module
module.current = lambda: gpu
sys.modules["pallas_gemm"].compat = types.SimpleNamespace(targets_gpu=bool)
from pallas_gemm.tuning import cache
from pallas_gemm.tuning.cache import Entry
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
assert "jax" not in sys.modules
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[3])):
  problem = Problem.flat(m=1 + int(sys.argv[2]), n=1 + i, k=1, dtype="bfloat16",
                    out_dtype="bfloat16")
  cache.store(problem, Entry(Config(stages=2 + int(sys.argv[2])), 1e-4))
"""


def test_sixteen_writers_at_once_lose_nothing(path, warnings_):
  writers, each = 16, 8
  command = [sys.executable, "-W", "error", "-c", WRITER]
  command += [str(ROOT / "pallas_gemm")]
  pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
  with contextlib.ExitStack() as stack:
    processes = [
      stack.enter_context(
        subprocess.Popen([*command, str(i), str(each)], **pipes, text=True)
      )
      for i in range(writers)
    ]
    for process in processes:
      assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
      process.stdin.write("go\n")
      process.stdin.flush()
    ends = [process.communicate(timeout=60)[1] for process in processes]
  assert ends == [""] * writers
  assert len(stored(path)) == writers * each
  for i, j in itertools.product(range(writers), range(each)):
    problem = PROBLEM.changed(m=1 + i, n=1 + j, k=1)
    assert cache.lookup(problem).config == Config(stages=2 + i)
  assert not leftovers(path) and not warnings_


def test_sixteen_threads(path, warnings_):
  def work(i):
    for j in range(2):
      problem = PROBLEM.changed(m=1 + i, n=1 + j)
      cache.store(problem, FIRST)
      assert cache.lookup(problem) == FIRST

  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    list(pool.map(work, range(16)))
  assert len(stored(path)) == 16 * 2
  assert not warnings_


# What may stand in the file.


def test_a_file_cut_short_at_any_byte(path):
  cache.store(PROBLEM, FIRST)
  whole = path.read_bytes()
  # The last byte ends the line; JSON does not need it.
  for size in range(len(whole) - 1):
    path.write_bytes(whole[:size])
    cache.clear()
    assert cache.lookup(PROBLEM) is None, size
  path.write_bytes(whole[:-1])
  cache.clear()
  assert cache.lookup(PROBLEM) == FIRST


FOREIGN = {
  "empty": b"",
  "binary": bytes(range(256)),
  "not utf-8": b'{"format": "\xff"}',
  "list": b"[1, 2, 3]",
  "number": b"17",
  "no format": b'{"entries": {}}',
  "other format": b'{"format": "pallas_gemm.tuning/9", "entries": {}}',
  "list of entries": b'{"format": "pallas_gemm.tuning/1", "entries": []}',
  "no entries": b'{"format": "pallas_gemm.tuning/1"}',
  "nested deeply": b"[" * 100_000,
  "long number": b"1" * 10_000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_foreign_content_is_kept_aside(path, warnings_, content):
  path.write_bytes(content)
  assert cache.lookup(PROBLEM) is cache.lookup(OTHER) is None
  assert len(warnings_) == 1
  assert path.read_bytes() == content  # looking changes nothing
  cache.store(PROBLEM, FIRST)
  assert len(warnings_) == 2
  assert path.with_name(f"{path.name}.corrupt").read_bytes() == content
  cache.clear()
  assert cache.lookup(PROBLEM) == FIRST


def test_a_folder_in_place_of_the_file_is_kept_aside(path):
  (path / "precious").mkdir(parents=True)
  cache.store(PROBLEM, FIRST)
  cache.clear()
  assert cache.lookup(PROBLEM) == FIRST
  assert (path.with_name(f"{path.name}.corrupt") / "precious").exists()


BAD_CONFIGS = {
  "unknown field": {"warps": 4},
  "number as text": {"stages": "4"},
  "fraction": {"stages": 4.0},
  "truth value": {"split_k": True},
  "null field": {"split": None},
}
BAD_ENTRIES = {
  "no object": 17,
  "null": None,
  "no config": {"seconds": 1.0},
  "time as text": {"config": None, "xla_seconds": "1.0"},
  "config is a list": {"config": [1]},
} | {name: {"config": config} for name, config in BAD_CONFIGS.items()}


@pytest.mark.parametrize("entry", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_entry_costs_no_other(path, warnings_, entry):
  cache.store(PROBLEM, FIRST)
  content = json.loads(path.read_text())
  content["entries"][cache._key(OTHER)] = entry
  content["entries"]["written by something newer"] = entry
  path.write_text(json.dumps(content))
  cache.clear()
  assert cache.lookup(PROBLEM) == FIRST
  assert cache.lookup(OTHER) is None
  assert cache.lookup(OTHER) is None
  assert len(warnings_) == (entry is not None)  # null says: none
  cache.store(PROBLEM, SECOND)
  assert stored(path)["written by something newer"] == entry


# What the file is: its mode, and links to it.


@pytest.fixture(params=(0o022, 0o077), ids=oct)
def umask(request):
  """Whatever this system's is; yields the mode of new files."""
  before = os.umask(request.param)
  yield 0o666 & ~request.param
  os.umask(before)


def mode(path):
  return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=("none", "file", "links to links", "folder"))
def target(path, tmp_path, request):
  """What the path leads to by some links; it does not exist yet."""
  if request.param == "none":
    return path
  (tmp_path / "shared").mkdir()
  if request.param == "folder":
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path / "shared")
    return tmp_path / "shared" / path.name
  if request.param == "file":
    path.symlink_to(tmp_path / "shared" / "tuned.json")
  else:
    (tmp_path / "between").symlink_to("shared/tuned.json")
    path.symlink_to("../between")
  return tmp_path / "shared" / "tuned.json"


def test_links_and_modes_stay(path, target, umask, warnings_):
  links = [x for x in (path, *path.parents) if x.is_symlink()]
  want = umask
  for kept in (0o600, 0o666, 0o440, None):
    cache.store(PROBLEM.changed(m=want), FIRST)
    assert all(x.is_symlink() for x in links) and not target.is_symlink()
    assert mode(target) == want
    if kept:
      target.chmod(want := kept)
  cache.clear()
  assert cache.lookup(PROBLEM.changed(m=0o440)) == FIRST
  # All links to a file share its lock.
  assert target.with_name(f"{target.name}.lock").exists()
  assert not leftovers(path) and not leftovers(target) and not warnings_


def test_foreign_content_is_kept_where_links_lead_to(path, target):
  for content, name in (("one", "corrupt"), ("two", "corrupt2")):
    target.write_text(content)
    cache.store(PROBLEM, FIRST)
    kept = target.with_name(f"{target.name}.{name}")
    assert kept.read_text() == content and len(stored(target)) == 1
  assert path.samefile(target)


# What may be wrong with the folder. Root may write anywhere, so permissions
# are played.


def refuse(*_, **__):
  raise PermissionError(errno.EACCES, "Permission denied")


CALLS = "os.replace os.fsync os.chmod builtins.open pathlib.Path.mkdir".split()


@pytest.mark.parametrize("what", CALLS)
def test_what_cannot_be_written_is_still_remembered(
  monkeypatch, path, warnings_, what
):
  cache.store(PROBLEM, FIRST)
  before = path.read_bytes()
  monkeypatch.setattr(what, refuse)
  for _ in range(3):
    cache.store(OTHER, SECOND)
  assert cache.lookup(PROBLEM) == FIRST
  assert cache.lookup(OTHER) == SECOND
  assert len(warnings_) == 1 and "can't be written" in warnings_[0]
  assert path.read_bytes() == before
  assert not leftovers(path)


def test_what_is_no_regular_file_is_left_alone(path, warnings_):
  """Neither waited for nor replaced, as a link to /dev/null would be."""
  os.mkfifo(path)
  cache.store(PROBLEM, FIRST)
  assert cache.lookup(PROBLEM) == FIRST
  assert stat.S_ISFIFO(path.stat().st_mode)
  assert [x.name for x in path.parent.iterdir()] == [path.name]
  assert len(warnings_) == 2  # reading and writing
  assert all("it is no regular file" in x for x in warnings_)


def test_what_the_interpreter_took_is_not_for_gpus(monkeypatch):
  cache.store(PROBLEM, FIRST, persist=False)
  assert cache.lookup(PROBLEM) == FIRST
  monkeypatch.setattr(cache.compat, "targets_gpu", lambda: True)
  assert cache.lookup(PROBLEM) is None


@pytest.mark.parametrize("to", ("no such folder/x.json", "itself", "a file"))
def test_a_path_that_leads_nowhere_is_left_alone(path, warnings_, to):
  if to == "a file":  # in place of the folder
    path.parent.rmdir()
    path.parent.write_text(to)
  else:
    to = path.name if to == "itself" else to
    path.symlink_to(to)
  cache.store(PROBLEM, FIRST)
  assert cache.lookup(PROBLEM) == FIRST
  left = path.parent.read_text() if path.parent.is_file() else os.readlink(path)
  assert left == to
  assert any("can't be written" in warning for warning in warnings_)


def test_a_file_that_cannot_be_read_is_not_overwritten(
  monkeypatch, path, warnings_
):
  cache.store(PROBLEM, FIRST)
  before = path.read_bytes()
  cache.clear()
  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "read_bytes", refuse)
    assert cache.lookup(PROBLEM) is None
    assert len(warnings_) == 1 and "can't be read" in warnings_[0]
    cache.store(OTHER, SECOND)
  assert cache.lookup(OTHER) == SECOND
  assert path.read_bytes() == before


@pytest.mark.parametrize("missing", [True, False])
def test_without_locks(monkeypatch, warnings_, missing):
  if missing:
    monkeypatch.setattr(cache, "fcntl", None)
  else:
    monkeypatch.setattr(cache.fcntl, "flock", refuse)
  cache.store(PROBLEM, FIRST)
  cache.clear()
  assert cache.lookup(PROBLEM) == FIRST
  assert len(warnings_) == (0 if missing else 1)
