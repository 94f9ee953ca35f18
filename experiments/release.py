"""Measures everything that is published, on one commit, JAX and device.

  python -m experiments.release                   what is not done yet
  python -m experiments.release --seconds=480     what fits into that
  python -m experiments.release --gpus=4          a piece on each at a time
  python -m experiments.release --list            the pieces, and what is done
  python -m experiments.release --only=dense-1    a piece, once more
  python -m experiments.release --finish          puts what there is
  python -m experiments.release --compare --output_dir=runs/again
                                                  that run beside what was put

A piece is a command of another program; the GPU's tests come first. What is
done is in state.json of --output_dir, by default runs/release: a run that was
ended goes on with the rest, last with the piece that it was in. The commit's
hash draws the seeds of random problems. What is tuned here is left aside.

Once all have passed, their files replace those of experiments/results/<device>.
gpu_tests.txt says how the tests ended, release.json what the rows have in
common. --finish does so though pieces failed or are missing, on any machine; a
file that would lack rows stays as it is. Another machine goes on where the
files of the commit end: copy release.json to runs/release/state.json there.

Exit status: 0; 1 if a piece failed; 2 for a command that can't be carried out;
130 after Ctrl-C.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import hashlib
import json
import math
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

from absl import flags

from experiments.harness import apart, cli, provenance, tables
from experiments.harness import rows as rows_lib
from pallas_gemm.tuning import cache

TESTS, STATE, OUTPUT = "gpu_tests", "state.json", "output.txt"
# The tests that need several GPUs.
MESH = "tests-mesh"
# What all rows have in common.
SAME = "commit", "jax", "jaxlib", "device"
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PYTEST = "-q -m gpu -n 12 --dist worksteal -p no:cacheprovider"
_GO_BACK = "--output_dir", "go back to that, or give another folder"
_VERSIONS = """import json; from experiments.harness import provenance
print(json.dumps(provenance.versions()))"""
# Name, file of its rows, seconds on an H100, command, of which {0} to {2} are
# seeds. None takes longer than eight minutes.
_PIECES = """
tests-ladder gpu_tests 200 pytest tests/test_ladder_gpu.py
tests-ops gpu_tests 280 pytest tests/test_ops_gpu.py -k 'not random_calls'
tests-calls gpu_tests 320 pytest tests/test_ops_gpu.py -k random_calls
tests-ragged gpu_tests 320 pytest tests/test_ops_ragged_gpu.py
tests-eight-bits gpu_tests 240 pytest tests/test_ops_eight_bits_gpu.py
tests-float32 gpu_tests 240 pytest tests/test_ops_float32_gpu.py
tests-mesh gpu_tests 100 pytest tests/test_ops_mesh_gpu.py
tests-others gpu_tests 100 pytest tests/test_triton_dense.py\
 tests/test_tuning_autotune.py
sanitizer gpu_tests 300 make sanitize
ladder ladder 160 ladder --shapes=4096x4096x4096,4096x8192x4096,8192x8192x8192
sweep sweep 260 ladder --sweep
counters counters 160 counters
memory memory 80 memory
dense-1 dense 300 dense --suite=square,llama_8b,llama_70b,unaligned,\
tall_skinny,lora,narrow,models
dense-2 dense 220 dense --suite=short,float32,vocabulary,layouts,epilogues,\
gated,training,batched
dense-unseen-1 dense_unseen 280 dense --unseen=60 --seed={0}
dense-unseen-2 dense_unseen 280 dense --unseen=60 --seed={1}
dense-unseen-3 dense_unseen 280 dense --unseen=60 --seed={2}
ragged-1 ragged 260 ragged --suite=mixtral,deepseek,qwen,decode
ragged-2 ragged 200 ragged --suite=distributions,gated,moe
ragged-forward ragged 240 ragged --suite=sizes --passes=forward
ragged-backward ragged 400 ragged --suite=sizes --passes=dx,dw
ragged-others ragged 280 ragged --suite=odd,experts
ragged-unseen ragged 240 ragged --unseen=40 --seed={0}
xla ragged_xla 90 ragged --implementation=xla --suite=mixtral
xla-float32 ragged_xla 120 ragged --implementation=xla --suite=mixtral\
 --dtype=float32
xla-unseen ragged_xla 120 ragged --implementation=xla --unseen=20 --seed={0}
eight-bits-1 eight_bits 410 eight_bits --suites=dense
eight-bits-2 eight_bits 240 eight_bits --suites=stored,small
eight-bits-3 eight_bits 360 eight_bits --suites=grouped,layer,errors
float32-1 float32 200 float32 --suites=dense
float32-2 float32 240 float32 --suites=layer,grouped,errors
float32-3 float32 330 float32 --suites=unseen --seed={0}
float32-4 float32 330 float32 --suites=sizes
latency dense 20 dense --suite=latency
"""

flags.declare_key_flag("output_dir")
_SECONDS = flags.DEFINE_integer(
  "seconds",
  None,
  "Start no piece that would end later, by what it took before or an estimate.",
  lower_bound=1,
  allow_override=True,  # experiments.tune has one of this name
)
_GPUS = flags.DEFINE_integer(
  "gpus", 1, "GPUs that have a piece at a time; the first ones.", lower_bound=1
)
_LIST = flags.DEFINE_bool("list", False, "List the pieces; measure nothing.")
_ONLY = flags.DEFINE_list("only", [], "Run these pieces, done or not.")
_FINISH = flags.DEFINE_bool("finish", False, "Put what there is.")
_COMPARE = flags.DEFINE_bool(
  "compare", False, "Say how far times lie from those that were put."
)


class Piece(NamedTuple):
  """A part of a release; the rows of those with the same `file` go together."""

  name: str
  file: str
  seconds: int
  command: str

  def arguments(
    self, folder: pathlib.Path, python: str = sys.executable
  ) -> list[str]:
    """What is run."""
    program, *given = shlex.split(self.command)
    if program == "make":
      return [program, *given, f"PYTHON={python}"]
    if self.file == TESTS:
      return [python, "-m", program, *_PYTEST.split(), *given]
    module = f"experiments.{program}"
    return [python, "-m", module, *given, f"--output_dir={folder}"]


def seeds(commit: str) -> list[int]:
  """Three seeds that nobody chose, of a hash or the start of one."""
  digest = hashlib.sha256(commit[:7].encode()).hexdigest()
  return [int(digest[i : i + 8], 16) % 10**6 for i in (0, 8, 16)]


class State:
  """What is done of a release, in a file of its folder.

  Attributes:
    folder: has a folder for each piece.
    of: commit, device and versions; empty if nothing was begun.
    done: by name of a piece, its command, start, seconds and exit status.
  """

  def __init__(self, folder: pathlib.Path) -> None:
    self.folder, path = folder, folder / STATE
    self.of = json.loads(path.read_text()) if path.exists() else {}
    self.done: dict[str, dict[str, Any]] = self.of.pop("pieces", {})

  @property
  def pieces(self) -> list[Piece]:
    """Those of the commit, in the order in which they run."""
    text = _PIECES.format(*seeds(self.of["commit"]))
    fields = (line.split(maxsplit=3) for line in text.strip().splitlines())
    return [Piece(name, file, int(s), how) for name, file, s, how in fields]

  def write(self) -> None:
    """Writes the file, whole."""
    _replace(self.folder / STATE, _text(self.of, self.done))

  def status(self, piece: Piece) -> int | None:
    """A piece's exit status; None if it has not ended."""
    return self.done.get(piece.name, {}).get("status")

  def seconds(self, piece: Piece) -> float:
    """What a piece took, or its estimate."""
    return self.done.get(piece.name, {}).get("seconds", piece.seconds)

  def same(self, row: Mapping[str, Any]) -> bool:
    """Whether a row is of this commit, JAX and device."""
    return all(row.get(name) == self.of[name] for name in SAME)

  def check(self, got: Mapping[str, Any], where: str, what_to_do: str) -> None:
    """Raises FlagError of what is not of this commit, JAX and device."""
    for name, want in ((name, self.of[name]) for name in SAME):
      if (has := got.get(name)) != want:
        text = f"{where}: want {name} {want}, got {has}; {what_to_do}"
        raise cli.FlagError(text)


def _text(of: dict[str, Any], done: dict[str, Any]) -> str:
  return json.dumps(of | {"pieces": done}, indent=2) + "\n"


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file whole, or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(f"{path.name}.new")
  new.write_text(text)
  new.replace(path)


def clean_commit() -> str:
  """The commit of this tree; FlagError if it has none or differs from it."""
  found = provenance.commit(untracked=True)
  if found is None or found.endswith("-dirty"):
    raise cli.FlagError(
      f"want a commit without changes, got {found}; commit or remove what `git"
      f" status` lists, without git set {provenance.COMMIT_VARIABLE}"
    )
  return found


def versions() -> dict[str, str | None]:
  """Device and versions, told by a process that then leaves the GPU alone."""
  command = [sys.executable, "-c", _VERSIONS]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
  found = json.loads((done.stdout or '{"device": "none"}').splitlines()[-1])
  if (device := found["device"]) in ("cpu", "none"):
    raise cli.FlagError(f"want a GPU, got {device}; --list needs none")
  return found


def execute(piece: Piece, folder: pathlib.Path, gpu: int | None = None) -> int:
  """Runs a piece, on all GPUs or on one. Gives its exit status.

  What it prints goes to a file.
  """
  env = os.environ | {cache.FOLDER_VARIABLE: str(folder / "tuned")}
  if gpu is not None:
    env[provenance.GPU_VARIABLE] = str(gpu)
  if piece.file == TESTS:  # several processes share the GPU's memory
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  command = piece.arguments(folder)
  how = {"cwd": _ROOT, "env": env, "stderr": subprocess.STDOUT}
  with (folder / OUTPUT).open("w") as output:
    return subprocess.run(command, stdout=output, **how).returncode


class Queue:
  """Pieces that wait for a GPU.

  Attributes:
    state: of the release.
    waiting: the pieces, in order.
    began: when the release did, on the monotonic clock.
  """

  def __init__(
    self, state: State, taken: Sequence[Piece], began: float
  ) -> None:
    self.state, self.waiting, self.began = state, list(taken), began
    self._lock = threading.Lock()

  def run(self, gpu: int | None = None) -> None:
    """Runs pieces, those that fit into --seconds, until none is left."""
    try:
      while piece := self._next():
        self._measure(piece, gpu)
    finally:  # after an error no other GPU goes on either
      self.waiting.clear()

  def _next(self) -> Piece | None:
    left = (_SECONDS.value or math.inf) - (time.monotonic() - self.began)
    with self._lock:
      fit = (x for x in self.waiting if self.state.seconds(x) <= left)
      if piece := next(fit, None):
        self.waiting.remove(piece)
      return piece

  def _measure(self, piece: Piece, gpu: int | None) -> None:
    """Runs a piece, and keeps how it ended."""
    state = self.state
    state.check(state.of | {"commit": clean_commit()}, *_GO_BACK)
    about: dict[str, Any] = {"command": piece.command}
    about["start"] = provenance.utc()
    folder = state.folder / piece.name
    shutil.rmtree(folder, ignore_errors=True)
    with self._lock:
      state.done[piece.name] = about
      state.write()
    folder.mkdir()
    cli.say(f"{piece.name}: {piece.command}")
    start = time.monotonic()
    status = execute(piece, folder, gpu)
    took = round(time.monotonic() - start, 1)
    with self._lock:
      about |= {"status": status, "seconds": took}
      state.write()
    words = f"FAILED with {status}, see {folder / OUTPUT}" if status else "done"
    cli.say(f"{piece.name}: {words}, {took:.0f} s")


def measure(state: State, taken: Sequence[Piece]) -> None:
  """Runs pieces, on one GPU or on several, and keeps how each ended.

  Those of several GPUs have all of them, before the others have one each.
  """
  began, count = time.monotonic(), _GPUS.value
  if count == 1:
    Queue(state, taken, began).run()
    return
  Queue(state, [x for x in taken if x.name == MESH], began).run()
  queue = Queue(state, [x for x in taken if x.name != MESH], began)
  with futures.ThreadPoolExecutor(count) as pool:
    try:
      list(pool.map(queue.run, range(count)))
    finally:  # nor after Ctrl-C
      queue.waiting.clear()


def finish(state: State) -> None:
  """Puts the files of which all pieces ended; FlagError if there are none."""
  texts: dict[str, str] = {}
  for file, of in tables.grouped(state.pieces, lambda x: x.file).items():
    made = {x.name: _made(state, x) for x in of}
    if lacking := [name for name, rows in made.items() if not rows]:
      cli.say(f"{file}: left as it is, for want of {', '.join(lacking)}")
    elif file == TESTS:
      texts[f"{file}.txt"] = "\n".join(x["words"] for [x] in made.values())
    else:
      rows = [row for rows in made.values() for row in rows]
      texts[f"{file}.jsonl"] = "".join(json.dumps(x) + "\n" for x in rows)
  if not texts:
    raise cli.FlagError(f"--output_dir: {state.folder} has no whole file")
  place = rows_lib.RESULTS / rows_lib.slug(state.of["device"])
  for name, text in texts.items():
    _replace(place / name, text)
  _replace(place / "release.json", _about(state, place))
  cli.say(f"rows: {place}; pages: python -m docs.write --pictures")


def _about(state: State, place: pathlib.Path) -> str:
  """What release.json says: what the files in `place` of this commit share."""
  found, there = [], set()
  for file in {x.file for x in state.pieces}:
    rows = rows_lib.read(place / f"{file}.jsonl")
    if file == TESTS:
      path = place / f"{file}.txt"
      text = path.read_text() if path.exists() else ""
      count = text.count(f"\ncommit {state.of['commit']}, ")
      of_it = 0 < count == text.count("\ncommit ")
    else:
      of_it = rows and all(state.same(row) for row in rows)
    if of_it:
      found, there = found + rows, there | {file}
  about = dict(state.of)
  for name in ("driver", "utc", "sm_clock_mhz", "power_w"):
    values = sorted({x[name] for x in found if x.get(name) is not None})
    about[name] = [values[0], values[-1]] if values else None
  pieces = [x.name for x in state.pieces if x.file in there]
  return _text(about, {x: state.done[x] for x in pieces if x in state.done})


def compare(state: State) -> None:
  """Puts how far times lie from those that were put, in apart.jsonl.

  Raises:
    FlagError: none were put of this commit, JAX and device.
  """
  place, found = rows_lib.RESULTS / rows_lib.slug(state.of["device"]), []
  for file, pieces in tables.grouped(state.pieces, lambda x: x.file).items():
    put = [x for x in rows_lib.read(place / f"{file}.jsonl") if state.same(x)]
    rows = (_made(state, x) for x in pieces if file != TESTS)
    again = [row for of in rows for row in of]
    if of_both := apart.apart(put, again):
      row = {"experiment": "apart", "file": file} | of_both
      row |= {name: state.of[name] for name in SAME}
      found.append(row | {"utc": put[0]["utc"], "again_utc": again[0]["utc"]})
  if not found:
    raise cli.FlagError(f"--output_dir: {state.folder} has no times put too")
  header, cells = apart.table(found)
  title = "The longer of two times over the shorter"
  cli.table(title, header, cells, tables.numeric(header))
  text = "".join(json.dumps(x) + "\n" for x in found)
  _replace(place / "apart.jsonl", text)


def _made(state: State, piece: Piece) -> list[dict[str, Any]]:
  """The rows of a piece that ended, or words; FlagError of rows of others."""
  folder = state.folder / piece.name
  if state.status(piece) not in (0, 1) or not folder.exists():
    return []
  if piece.file == TESTS:
    return [{"words": _words(state, piece)}]
  path = folder / f"{piece.file}.jsonl"
  for row in (rows := rows_lib.read(path)):
    state.check(row, str(path), f"run it again, --only={piece.name}")
  return rows


def _words(state: State, piece: Piece) -> str:
  """What gpu_tests.txt says of tests: what ran, what failed, how many."""
  lines = (state.folder / piece.name / OUTPUT).read_text().splitlines()
  failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
  command = shlex.join(piece.arguments(state.folder, "python3"))
  where = "commit {commit}, {device}, jax {jax}"
  count = lines[-1].strip("= ")
  return "\n".join([command, where.format(**state.of), *failed, "", count, ""])


def show(state: State) -> None:
  """Lists the pieces."""
  cells = []
  for x in state.pieces:
    status = state.status(x)
    words = {None: "", 0: "done"}.get(status, f"FAILED {status}")
    cells.append([x.name, f"{state.seconds(x):.0f}", words, x.command])
  header = ["piece", "seconds", "state", "command"]
  cli.table(f"Pieces of {state.folder}", header, cells, ["seconds"])


def chosen(state: State) -> list[Piece]:
  """The pieces of --only, or those that have not ended, begun ones last."""
  if unknown := {*_ONLY.value} - {x.name for x in state.pieces}:
    raise cli.FlagError(f"--only: no piece {min(unknown)!r}; see --list")
  if _ONLY.value:
    return [x for x in state.pieces if x.name in _ONLY.value]
  left = [x for x in state.pieces if state.status(x) is None]
  return sorted(left, key=lambda x: x.name in state.done)


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  folder = pathlib.Path(cli.OUTPUT_DIR.value or _ROOT / "runs" / "release")
  cli.check_folder(folder)
  state = State(folder.resolve())
  if (_FINISH.value or _COMPARE.value) and not state.of:
    raise cli.FlagError(f"--output_dir: no release was begun in {folder}")
  for flag, do in ((_LIST, show), (_FINISH, finish), (_COMPARE, compare)):
    if flag.value:
      state.of = state.of or {"commit": provenance.commit() or ""}
      do(state)
      return 0
  here = {"commit": clean_commit(), "dirty": False} | versions()
  state.of = state.of or here
  state.check(here, *_GO_BACK)
  measure(state, chosen(state))
  failed = ", ".join(x.name for x in state.pieces if state.status(x))
  if left := [x for x in state.pieces if state.status(x) is None]:
    seconds = sum(map(state.seconds, left))
    cli.say(f"left: {len(left)} pieces, about {seconds:.0f} s; start again")
  elif not failed:
    finish(state)
  if failed:
    cli.say(f"FAILED: {failed}; see --only and --finish")
  return 1 if failed else 0


if __name__ == "__main__":
  cli.run(main)
