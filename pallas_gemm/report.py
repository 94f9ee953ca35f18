"""What is said once in a process, and what `explain` listens to."""

from collections.abc import Iterator
import contextlib
import dataclasses
import threading
from typing import Any

from absl import logging

_lock = threading.Lock()
_said: set[str] = set()
_listeners: list[list["Ran"]] = []


@dataclasses.dataclass(frozen=True)
class Ran:
  """One product of a lowered program, as one device computes it.

  Attributes:
    product: its kind, dtypes, sizes and layout in words; sizes are a device's.
    implementation: what computes it.
    config: of the kernel; None for XLA.
    why: why not those that would have been tried first; "" if there are none.
    shapes: of the operands that a device reads.
    around: the mesh axes it is sharded over and the collectives beside it; ""
      on one device.
    source: where the config comes from: "user" (the call), "measured" (by
      `autotune`), "shipped" (with the package), "model"; "" without a config.
    asked: its `Spec`, and the shapes and dtypes of its `Operands`; None where
      XLA partitions it.
  """

  product: str
  implementation: str
  config: Any = None
  why: str = ""
  shapes: tuple[tuple[int, ...], ...] = ()
  around: str = ""
  source: str = ""
  asked: Any = dataclasses.field(default=None, compare=False, repr=False)


def log_once(message: str) -> None:
  """Logs a message the first time in this process."""
  if _is_new(message):
    logging.info("%s", message)


def warn_once(message: str) -> None:
  """The same as a warning: somebody gets what he would not expect."""
  if _is_new(message):
    logging.warning("%s", message)


def reset() -> None:
  """Everything may be said again."""
  with _lock:
    _said.clear()


def ran(what: Ran) -> None:
  """Tells the listeners of a product."""
  with _lock:
    for heard in _listeners:
      heard.append(what)


@contextlib.contextmanager
def listening() -> Iterator[list[Ran]]:
  """Context that yields a list of the products lowered inside of it.

  XLA partitions in threads of its own, so it hears other threads' products too.
  """
  heard: list[Ran] = []
  with _lock:
    _listeners.append(heard)
  try:
    yield heard
  finally:
    with _lock:
      # By identity: two lists that heard the same are equal.
      _listeners[:] = [other for other in _listeners if other is not heard]


def _is_new(message: str) -> bool:
  with _lock:
    if message in _said:
      return False
    _said.add(message)
    return True
