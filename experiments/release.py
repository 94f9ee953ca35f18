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

from collections.abc import Sequence
from concurrent import futures
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

from absl import flags

from experiments.harness import cli, provenance, release_files
from experiments.harness import release_state as state_lib
from experiments.harness.release_state import Piece, State
from pallas_gemm.tuning import cache

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GO_BACK = "--output_dir", "go back to that, or give another folder"
_VERSIONS = """import json; from experiments.harness import provenance
print(json.dumps(provenance.versions()))"""

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
  if piece.file == state_lib.TESTS:  # several processes share the GPU's memory
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  command = piece.arguments(folder)
  how = {"cwd": _ROOT, "env": env, "stderr": subprocess.STDOUT}
  with (folder / state_lib.OUTPUT).open("w") as output:
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
    where = folder / state_lib.OUTPUT
    words = f"FAILED with {status}, see {where}" if status else "done"
    cli.say(f"{piece.name}: {words}, {took:.0f} s")


def measure(state: State, taken: Sequence[Piece]) -> None:
  """Runs pieces, on one GPU or on several, and keeps how each ended.

  Some have all GPUs to themselves, before the others have one each.
  """
  began, count = time.monotonic(), _GPUS.value
  if count == 1:
    Queue(state, taken, began).run()
    return
  alone = [x for x in taken if x.name in state_lib.ALONE]
  Queue(state, alone, began).run()
  queue = Queue(state, [x for x in taken if x not in alone], began)
  with futures.ThreadPoolExecutor(count) as pool:
    try:
      list(pool.map(queue.run, range(count)))
    finally:  # nor after Ctrl-C
      queue.waiting.clear()


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
  for flag, do in (
    (_LIST, show),
    (_FINISH, release_files.finish),
    (_COMPARE, release_files.compare),
  ):
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
    release_files.finish(state)
  if failed:
    cli.say(f"FAILED: {failed}; see --only and --finish")
  return 1 if failed else 0


if __name__ == "__main__":
  cli.run(main)
