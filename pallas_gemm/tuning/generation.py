"""A count of the changes to what tuning knows.

Compiled functions hold the config that was best when they were traced. The
ops pass this number to `jax.jit` as a static argument, so that a config found
since then is used from the next call on.
"""

import threading

_lock = threading.Lock()
_current = 0


def generation() -> int:
  """How often `bump` was called in this process."""
  return _current


def bump() -> None:
  """Says that the config of some problem may be another now."""
  global _current
  with _lock:
    _current += 1
