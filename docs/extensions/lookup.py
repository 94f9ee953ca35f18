"""Finding what a page names, and saying what there is if it is not there."""

from collections.abc import Iterable, Mapping
import pathlib
import shlex
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def pick(found: Mapping[str, Any], key: str, what: str) -> Any:
  """The value of a key."""
  if key not in found:
    raise ValueError(f"no {what} {key!r}; there is {listed(found)}")
  return found[key]


def listed(names: Iterable[Any]) -> str:
  """Names in a sentence."""
  return ", ".join(map(str, names)) or "none"


def words(text: str, least: int, form: str) -> list[str]:
  """The words of a comment; what is in quotes is one."""
  found = shlex.split(text)
  if len(found) < least:
    raise ValueError(f"want {form}, got {text!r}")
  return found
