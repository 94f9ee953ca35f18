"""The files of a release: rows and words of pieces that have ended."""

import json
import pathlib
import shlex
from typing import Any

from experiments.harness import apart, cli, tables
from experiments.harness import release_state as state_lib
from experiments.harness import rows as rows_lib
from experiments.harness.release_state import Piece, State


def finish(state: State) -> None:
  """Puts the files of which all pieces ended; FlagError if there are none."""
  texts: dict[str, str] = {}
  for file, of in tables.grouped(state.pieces, lambda x: x.file).items():
    made = {x.name: _made(state, x) for x in of}
    if lacking := [name for name, rows in made.items() if not rows]:
      cli.say(f"{file}: left as it is, for want of {', '.join(lacking)}")
    elif file == state_lib.TESTS:
      texts[f"{file}.txt"] = "\n".join(x["words"] for [x] in made.values())
    else:
      rows = [row for rows in made.values() for row in rows]
      texts[f"{file}.jsonl"] = "".join(json.dumps(x) + "\n" for x in rows)
  if not texts:
    raise cli.FlagError(f"--output_dir: {state.folder} has no whole file")
  place = rows_lib.RESULTS / rows_lib.slug(state.of["device"])
  for name, text in texts.items():
    state_lib.replace(place / name, text)
  state_lib.replace(place / "release.json", _about(state, place))
  cli.say(f"rows: {place}; pages: python -m docs.write --pictures")


def _about(state: State, place: pathlib.Path) -> str:
  """What release.json says: what the files in `place` of this commit share."""
  found, there = [], set()
  for file in {x.file for x in state.pieces}:
    rows = rows_lib.read(place / f"{file}.jsonl")
    if file == state_lib.TESTS:
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
  done = {name: state.done[name] for name in pieces if name in state.done}
  return state_lib.text(about, done)


def compare(state: State) -> None:
  """Puts how far times lie from those that were put, in apart.jsonl.

  Raises:
    FlagError: none were put of this commit, JAX and device.
  """
  place, found = rows_lib.RESULTS / rows_lib.slug(state.of["device"]), []
  for file, pieces in tables.grouped(state.pieces, lambda x: x.file).items():
    put = [x for x in rows_lib.read(place / f"{file}.jsonl") if state.same(x)]
    rows = (_made(state, x) for x in pieces if file != state_lib.TESTS)
    again = [row for of in rows for row in of]
    if of_both := apart.apart(put, again):
      row = {"experiment": "apart", "file": file} | of_both
      row |= {name: state.of[name] for name in state_lib.SAME}
      found.append(row | {"utc": put[0]["utc"], "again_utc": again[0]["utc"]})
  if not found:
    raise cli.FlagError(f"--output_dir: {state.folder} has no times put too")
  header, cells = apart.table(found)
  title = "The longer of two times over the shorter"
  cli.table(title, header, cells, tables.numeric(header))
  text = "".join(json.dumps(x) + "\n" for x in found)
  state_lib.replace(place / "apart.jsonl", text)


def _made(state: State, piece: Piece) -> list[dict[str, Any]]:
  """The rows of a piece that ended, or words; FlagError of rows of others."""
  folder = state.folder / piece.name
  if state.status(piece) not in (0, 1) or not folder.exists():
    return []
  if piece.file == state_lib.TESTS:
    return [{"words": _words(state, piece)}]
  path = folder / f"{piece.file}.jsonl"
  for row in (rows := rows_lib.read(path)):
    state.check(row, str(path), f"run it again, --only={piece.name}")
  return rows


def _words(state: State, piece: Piece) -> str:
  """What gpu_tests.txt says of tests: what ran, what failed, how many."""
  output = state.folder / piece.name / state_lib.OUTPUT
  lines = output.read_text().splitlines()
  failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
  command = shlex.join(piece.arguments(state.folder, "python3"))
  where = "commit {commit}, {device}, jax {jax}"
  count = lines[-1].strip("= ")
  return "\n".join([command, where.format(**state.of), *failed, "", count, ""])
