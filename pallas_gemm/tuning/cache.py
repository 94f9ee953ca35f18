"""What is known of a problem without a model: measured here, or shipped.

Both are entries. Of a problem and of a config the fields are written that
differ from their defaults: a field that is added later changes nothing of what
is there.

    {"config": {"block_m": 64, "stages": 6}, "seconds": 9.1e-6,
     "xla_seconds": 1.1e-5}

What was measured is in one JSON file a kind of GPU, in the folder that
`PALLAS_GEMM_CACHE_DIR` names or, without it, in the user's cache folder:

    {"format": "pallas_gemm.tuning/1", "entries": {"<key>": <entry>, ...}}

A key holds the problem, the package's version and a hash of the kernels'
syntax: what was measured of another kernel is not found. It stays in the file,
for the installation that measured it.

The file is read once. It is written by reading it again, adding to it, and
replacing it, all under a lock, so that processes which tune at the same time
lose nothing of each other. It keeps its mode, and a link stays one: what is
replaced is the file that it leads to. Whatever is wrong with the file or its
folder is logged once and costs no computation: the worst case is that nothing
is remembered. A file that is no cache is moved aside and kept when the next
entry is written.

What is shipped is in `table/<device>.jsonl`, a line a problem; there need not
be one. `python -m experiments.tune --freeze=FILE` writes what is chosen today
for the suites' problems, so that a change of the cost model leaves them alone.

    {"problem": {"m": 1, "n": 8192, ...}, "config": {"swap_ab": true, ...}}
"""

import ast
from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import secrets
import stat
import threading
from typing import Any, NamedTuple

from absl import logging
import platformdirs

from pallas_gemm import compat, hardware, version
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None

FOLDER_VARIABLE = "PALLAS_GEMM_CACHE_DIR"
FORMAT = "pallas_gemm.tuning/1"
# An activation by its module in JAX, as older entries name it.
_OLD_NAME = re.compile(r'"activation":"jax\.(\w+\.)*')
_KERNELS = pathlib.Path(__file__).parents[1] / "kernels"
_SHIPPED = pathlib.Path(__file__).parent / "table"
# The row of a problem of which nothing is said.
_PLAIN = Problem.flat(m=0, n=0, k=0, dtype="", out_dtype="").row()


class _NotACacheError(ValueError):
  """The file is there, but is not what `_write` writes."""


class Entry(NamedTuple):
  """The fastest config of a problem, and how long XLA's product takes.

  Attributes:
    config: the fastest that was right; None leaves the problem to XLA.
    seconds: its time; None if it is not known.
    xla_seconds: of XLA's product with its epilogue; None if it is not known.
  """

  config: Config | None
  seconds: float | None = None
  xla_seconds: float | None = None

  @property
  def is_xla_faster(self) -> bool:
    """Whether XLA's product is the winner."""
    if self.config is None:
      return True
    is_known = self.seconds is not None and self.xla_seconds is not None
    return is_known and self.xla_seconds < self.seconds


@dataclasses.dataclass
class _Measured:
  """What was measured on one kind of GPU.

  Attributes:
    path: its file; None where there is no folder for it.
    entries: what the file holds, by key.
    found: what `lookup` made of the entries it was asked for.
  """

  path: pathlib.Path | None
  entries: dict[str, Any]
  found: dict[Problem, Entry | None] = dataclasses.field(default_factory=dict)


_lock = threading.RLock()
# By the kind of GPU, and whether programs are for GPUs: what the interpreter
# took says nothing of those.
_measured: dict[tuple[str, bool], _Measured] = {}
_warned: set[str] = set()
_generation = 0


def generation() -> int:
  """How often what is known of some problem may have changed in this process.

  Compiled functions hold the config that was best when they were traced. The
  ops give `jax.jit` this number, so that one found since then is used.
  """
  return _generation


def file_stem(device: str) -> str:
  """A kind of GPU in names of files, "NVIDIA H200" -> nvidia_h200."""
  return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") or "unknown"


def folder() -> pathlib.Path:
  """Where the files are; the folder may not exist yet.

  Raises:
    OSError: nobody says where: there is no home folder.
  """
  if named := os.environ.get(FOLDER_VARIABLE):
    return pathlib.Path(os.path.expanduser(named))
  try:
    return pathlib.Path(platformdirs.user_cache_dir("pallas_gemm"))
  except RuntimeError as error:
    raise OSError(f"{error}; {FOLDER_VARIABLE} can name one") from None


def path_of(device: str | None = None) -> pathlib.Path:
  """The file of a kind of GPU; None is the one that a trace made now is for."""
  return folder() / f"{file_stem(device or hardware.current().name)}.json"


def lookup(problem: Problem) -> Entry | None:
  """What was measured of a problem on this kind of GPU; None: nothing.

  It may be illegal here (fewer SMs, another driver): the caller asks for that.
  """
  with _lock:
    known = _of_this_gpu()
    if not known.entries:  # most users' case: needs no hash of the kernels
      return None
    if problem not in known.found:
      known.found[problem] = _entry(known.entries.get(_key(problem)))
    return known.found[problem]


def shipped(problem: Problem) -> Entry | None:
  """The entry of a problem that the package ships for this kind of GPU."""
  return _shipped(hardware.current().name).get(problem)


def shipped_lines(found: Iterable[tuple[Problem, Entry]]) -> str:
  """The content of a shipped file that knows these."""
  rows = ({"problem": short_row(p)} | to_json(entry) for p, entry in found)
  return "".join(f"{json.dumps(row)}\n" for row in rows)


def store(problem: Problem, entry: Entry, *, persist: bool = True) -> None:
  """Remembers what was measured of a problem, in place of what was before.

  Never raises for the state of the disk: what can't be written, or is not to be
  (`persist`), is remembered in this process. The former is logged once.
  """
  global _generation
  key, value = _key(problem), to_json(entry)
  with _lock:
    known = _of_this_gpu()
    if persist and known.path:
      try:
        # With what other processes wrote since this one read the file.
        known.entries |= _merge(known.path, key, value)
        known.found.clear()
      except OSError as error:
        warn_once(f"tuning cache {known.path} can't be written: {error}")
    known.entries[key] = value
    known.found[problem] = entry
    _generation += 1


def clear() -> None:
  """Forgets what was read: the next lookup finds and reads the file again."""
  global _generation
  with _lock:
    _measured.clear()
    _warned.clear()
    _generation += 1


def warn_once(message: str) -> None:
  """Logs a warning that this process has not logged before."""
  if message not in _warned:
    _warned.add(message)
    logging.warning("%s", message)


def short_row(problem: Problem) -> dict[str, Any]:
  """The fields of a problem's row that differ from their defaults."""
  row = problem.row()
  return {name: row[name] for name in row if row[name] != _PLAIN.get(name)}


def key_of(problem: Problem, **more: Any) -> str:
  """A problem as text, with `more` among its fields."""
  fields = short_row(problem) | more
  return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def to_json(entry: Entry) -> dict[str, Any]:
  """What `from_json` makes an entry of."""
  config = entry.config and {
    field.name: getattr(entry.config, field.name)
    for field in dataclasses.fields(Config)
    if getattr(entry.config, field.name) != field.default
  }
  times = {"seconds": entry.seconds, "xla_seconds": entry.xla_seconds}
  return {"config": config} | {k: v for k, v in times.items() if v is not None}


def from_json(value: Any) -> Entry:
  """The entry that a value read from a file stands for.

  Raises:
    ValueError: it stands for none.
  """
  if not isinstance(value, dict) or "config" not in value:
    raise ValueError("it holds no config")
  config = value["config"]
  if config is not None:
    types = {f.name: type(f.default) for f in dataclasses.fields(Config)}
    if not isinstance(config, dict) or any(
      type(x) is not types.get(name) for name, x in config.items()
    ):
      raise ValueError("its config has other fields than one of this version")
    config = Config(**config)
  times = [value.get(name) for name in ("seconds", "xla_seconds")]
  if any(type(x) not in (float, int, type(None)) for x in times):
    raise ValueError("its times are no numbers")
  return Entry(config, *times)


def _entry(value: Any) -> Entry | None:
  """The entry that a value of a file stands for; None if for none."""
  try:
    return None if value is None else from_json(value)
  except ValueError as error:
    warn_once(f"tuning cache: an entry is skipped, {error}: {value}")
    return None


@functools.cache
def _kernel_hash() -> str:
  """Changes with what the Hopper kernels do, not with what is said of them.

  It covers their whole folder, so that no file there can be forgotten; `ptx`
  and `mosaic` change with the version. 80 ms, of processes that find something
  in their cache's file.
  """
  digest = hashlib.sha256()
  try:
    for path in sorted(_KERNELS.rglob("*.py")):
      if not path.name.startswith("triton"):
        digest.update(_syntax(path.read_bytes()).encode())
  except OSError:  # installed without sources: the version has to do
    return "no source"
  return digest.hexdigest()[:16]


def _syntax(source: bytes) -> str:
  """A module without comments, docstrings and layout."""
  tree = ast.parse(source)
  documented = ast.Module | ast.ClassDef | ast.FunctionDef
  for node in ast.walk(tree):
    if isinstance(node, documented) and ast.get_docstring(node, clean=False):
      del node.body[0]
  return ast.dump(tree)


@functools.lru_cache(maxsize=4096)
def _key(problem: Problem) -> str:
  return key_of(problem, kernel=_kernel_hash(), version=version.__version__)


@functools.cache
def _shipped(device: str) -> dict[Problem, Entry]:
  path = _SHIPPED / f"{file_stem(device)}.jsonl"
  if not path.exists():
    return {}
  rows = map(json.loads, path.read_text().splitlines())
  found = {Problem.from_row(row["problem"]): _entry(row) for row in rows}
  return {problem: entry for problem, entry in found.items() if entry}


def _of_this_gpu() -> _Measured:
  """What was measured on this kind of GPU; reads its file the first time."""
  device = hardware.current().name
  key = device, compat.targets_gpu()
  if key not in _measured:
    path, entries = None, {}
    try:
      path = path_of(device)
      entries = _read(path)
    except _NotACacheError as error:
      warn_once(f"tuning cache {path} is not used: {error}")
    except OSError as error:
      warn_once(f"tuning cache {path or '(no folder)'} can't be read: {error}")
    _measured[key] = _Measured(path, entries)
  return _measured[key]


def _read(path: pathlib.Path) -> dict[str, Any]:
  """The entries of a file; none where there is no file.

  Raises:
    _NotACacheError: the file is no cache.
    OSError: the file can't be read.
  """
  _check_kind(path)
  try:
    found = json.loads(path.read_bytes())
  except FileNotFoundError:
    return {}
  except IsADirectoryError:
    raise _NotACacheError("it is a folder") from None
  except (ValueError, RecursionError) as error:
    raise _NotACacheError(f"it is not JSON: {error}") from None
  entries = found.get("entries") if isinstance(found, dict) else None
  if not isinstance(entries, dict) or found.get("format") != FORMAT:
    raise _NotACacheError(f"it is not in the format {FORMAT}")
  return {_OLD_NAME.sub('"activation":"', key): entries[key] for key in entries}


def _merge(path: pathlib.Path, key: str, entry: dict[str, Any]):
  """Adds one entry to a file; returns all of its entries."""
  path.parent.mkdir(parents=True, exist_ok=True)
  # Where links lead to: there are the file, its lock (shared by all links to
  # it) and what is moved aside.
  path = pathlib.Path(os.path.realpath(path))
  _check_kind(path)
  with _locked(path):
    try:
      entries = _read(path)
    except _NotACacheError as error:
      kept = _keep_aside(path)
      warn_once(f"tuning cache {path} was moved to {kept}: {error}")
      entries = {}
    entries[key] = entry
    _write(path, {"format": FORMAT, "entries": entries})
  return entries


def _check_kind(path: pathlib.Path) -> None:
  """A device (a link to /dev/null, say) or a pipe is let alone."""
  if path.exists() and not (path.is_file() or path.is_dir()):
    raise OSError("it is no regular file")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  """Keeps other writers of a file out."""
  # A file of its own: the one it guards is replaced, and a lock on what was
  # replaced guards nothing.
  with open(f"{path}.lock", "a") as lock:
    if fcntl is not None:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX)
      except OSError as error:  # a file system without locks
        # The file stays whole; writers at the same time may lose an entry.
        warn_once(f"tuning cache {path} can't be locked: {error}")
    yield  # closing the file unlocks it


def _keep_aside(path: pathlib.Path) -> pathlib.Path:
  """Moves a file (or folder) to the first free name; returns the name."""
  numbers = itertools.chain([""], itertools.count(2))
  names = (path.with_name(f"{path.name}.corrupt{i}") for i in numbers)
  kept = next(name for name in names if not name.exists())
  os.replace(path, kept)
  return kept


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
  """Replaces a file in one step: readers see the old content or the new.

  The mode stays that of the old file; a new one has what the umask leaves.
  """
  name = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
  try:
    with open(name, "x") as f:
      with contextlib.suppress(FileNotFoundError):
        os.chmod(name, stat.S_IMODE(path.stat().st_mode))
      json.dump(content, f, indent=1, sort_keys=True)
      f.write("\n")
      f.flush()
      os.fsync(f.fileno())
    os.replace(name, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(name)
    raise
