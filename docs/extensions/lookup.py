"""Finding what a page names, and saying what there is if it is not there."""

from collections.abc import Iterable, Mapping
import pathlib
import shlex
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


class UnknownError(ValueError):
  """A page names something that is not there, or not in one way."""


def pick(found: Mapping[str, Any], key: str, what: str) -> Any:
  """The value of a key.

  Raises:
    UnknownError: there is none; the message lists the keys.
  """
  if key not in found:
    raise UnknownError(f"no {what} {key!r}; there is {listed(found)}")
  return found[key]


def listed(names: Iterable[Any]) -> str:
  """Names in a sentence."""
  return ", ".join(map(str, names)) or "none"


def words(text: str, least: int, form: str) -> list[str]:
  """The words of a comment; what is in quotes is one.

  Raises:
    UnknownError: there are too few; the message says what is wanted.
  """
  found = shlex.split(text)
  if len(found) < least:
    raise UnknownError(f"want {form}, got {text!r}")
  return found
