"""What was measured on this machine: remembered across processes.

One JSON file a kind of GPU, in the folder that `PALLAS_GEMM_CACHE_DIR` names
or, without it, in the user's cache folder:

    {"format": "pallas_gemm.tuning/1",
     "entries": {"<key>": {"config": {...}, "seconds": 1.7e-4, ...}, ...}}

A key holds the problem (see `entries`), the package's version and a hash of
the kernels' syntax: what was measured of another kernel is not found. It stays
in the file, for the installation that measured it.

The file is read once. It is written by reading it again, adding to it, and
replacing it, all under a lock, so that processes which tune at the same time
lose nothing of each other. It keeps its mode, and a link stays one: what is
replaced is the file that it leads to. Whatever is wrong with the file or its
folder is logged once and costs no computation: the worst case is that nothing
is remembered. A file that is no cache is moved aside and kept when the next
entry is written.
"""

import ast
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import secrets
import stat
import threading
from typing import Any

from absl import logging
import platformdirs

from pallas_gemm import hardware, version
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import entries as entries_lib
from pallas_gemm.tuning.entries import Entry
from pallas_gemm.tuning.generation import bump

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None

FOLDER_VARIABLE = "PALLAS_GEMM_CACHE_DIR"
FORMAT = "pallas_gemm.tuning/1"
# An activation by its module in JAX, as older entries name it.
_OLD_NAME = re.compile(r'"activation":"jax\.(\w+\.)*')
_KERNELS = pathlib.Path(__file__).parents[1] / "kernels"


class _NotACacheError(ValueError):
  """The file is there, but is not what `_write` writes."""


@dataclasses.dataclass
class _Table:
  """What is known of one kind of GPU.

  Attributes:
    path: its file.
    entries: what the file holds, by key.
    found: what `lookup` made of the entries it was asked for.
  """

  path: pathlib.Path
  entries: dict[str, Any]
  found: dict[Problem, Entry | None] = dataclasses.field(default_factory=dict)


_lock = threading.RLock()
_tables: dict[str, _Table] = {}
_warned: set[str] = set()


def folder() -> pathlib.Path:
  """Where the files are; the folder may not exist yet."""
  if named := os.environ.get(FOLDER_VARIABLE):
    return pathlib.Path(os.path.expanduser(named))
  return pathlib.Path(platformdirs.user_cache_dir("pallas_gemm"))


def path_of(device: str | None = None) -> pathlib.Path:
  """The file of a kind of GPU, "NVIDIA H200" -> .../nvidia_h200.json.

  Args:
    device: as the driver names it; None is the one that a trace made now is
      for.
  """
  device = device or hardware.current().name
  return folder() / f"{entries_lib.file_stem(device)}.json"


def lookup(problem: Problem) -> Entry | None:
  """What was measured of a problem on this kind of GPU; None: nothing.

  The config may be illegal on this machine (fewer SMs, another driver): the
  caller asks the kernel. Takes microseconds after the first call for a GPU.

  Args:
    problem: what is to be computed.
  """
  with _lock:
    table = _table()
    if not table.entries:  # most users' case: needs no hash of the kernels
      return None
    if problem not in table.found:
      table.found[problem] = _entry(table.entries.get(_key(problem)))
    return table.found[problem]


def store(problem: Problem, entry: Entry, *, persist: bool = True) -> None:
  """Remembers what was measured of a problem, in place of what was before.

  Never raises for the state of the disk: what can't be written is remembered
  in this process and logged once.

  Args:
    problem: what was measured.
    entry: the fastest config, and the times.
    persist: also write it to disk; else this process alone remembers it.
  """
  key, value = _key(problem), entries_lib.to_json(entry)
  with _lock:
    table = _table()
    if persist:
      try:
        # With what other processes wrote since this one read the file.
        table.entries |= _merge(table.path, key, value)
        table.found.clear()
      except OSError as error:
        warn_once(f"tuning cache {table.path} can't be written: {error}")
    table.entries[key] = value
    table.found[problem] = entry
  bump()


def clear() -> None:
  """Forgets what was read: the next lookup reads the file again.

  It also looks again where the file is.
  """
  with _lock:
    _tables.clear()
    _warned.clear()
  bump()


def warn_once(message: str) -> None:
  """Logs a warning that this process has not logged before."""
  if message not in _warned:
    _warned.add(message)
    logging.warning("%s", message)


@functools.cache
def _kernel_hash() -> str:
  """Changes with what the Hopper kernels do, not with what is said of them.

  It covers the whole folder, so that no file can be forgotten. 80 ms, of
  processes that find something in their cache's file.
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
  return entries_lib.key_of(
    problem, kernel=_kernel_hash(), version=version.__version__
  )


def _entry(value: Any) -> Entry | None:
  """The entry that a value of the file stands for; None if for none."""
  if value is None:
    return None
  try:
    return entries_lib.from_json(value)
  except ValueError as error:
    warn_once(f"tuning cache: an entry is skipped, {error}: {value}")
    return None


def _table() -> _Table:
  """What is known of this kind of GPU; reads its file the first time."""
  device = hardware.current().name
  if device not in _tables:
    path, entries = path_of(device), {}
    try:
      entries = _read(path)
    except _NotACacheError as error:
      warn_once(f"tuning cache {path} is not used: {error}")
    except OSError as error:
      warn_once(f"tuning cache {path} can't be read: {error}")
    _tables[device] = _Table(path, entries)
  return _tables[device]


def _read(path: pathlib.Path) -> dict[str, Any]:
  """The entries of a file; none where there is no file.

  Raises:
    _NotACacheError: the file is no cache.
    OSError: the file can't be read.
  """
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
  kept = path.with_name(f"{path.name}.corrupt")
  count = 1
  while kept.exists():
    count += 1
    kept = path.with_name(f"{path.name}.corrupt{count}")
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
