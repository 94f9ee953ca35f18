"""Docstrings as Markdown, for the pages of the API reference.

They are written in words and `code`; sections of Google's style become lists,
examples become code.
"""

from collections.abc import Iterator
import dataclasses
import functools
import importlib
import inspect
import re
from typing import Any

from docs.extensions import lookup

_SECTIONS = "Args", "Attributes", "Returns", "Yields", "Raises", "Example"
# A default that prints as an address or a class.
_OBJECT = re.compile(r"<[\w ]*?'?([\w.]+)'?(?: at 0x\w+)?>")
_WIDTH = 76
_ITEM = re.compile(r"  (\S[^:]*): (.*)")


def markdown(text: str) -> str:
  """A function, class or module: "pallas_gemm.matmul", members after it.

  Of a class the members that are named are shown as well, all public ones for
  "*"; of a module all its functions and classes.
  """
  name, *members = lookup.words(text, 1, "a name and perhaps members")
  thing = _found(name)
  if inspect.ismodule(thing):
    body = [_docstring(thing)]
    members = [
      key
      for key, value in vars(thing).items()
      if key[0] != "_" and getattr(value, "__module__", "") == thing.__name__
    ]
  else:
    body = [_entry(name, thing)]
  if members[:1] == ["*"]:
    members[:1] = [x for x, v in vars(thing).items() if _is_member(x, v)]
  short = name if inspect.ismodule(thing) else name.rpartition(".")[2]
  for member in members:
    body.append(_entry(f"{short}.{member}", vars(thing)[member]))
  return "\n\n".join(body)


def _is_member(name: str, value: Any) -> bool:
  kinds = property | functools.cached_property | classmethod
  return name[0] != "_" and (
    isinstance(value, kinds) or inspect.isroutine(value)
  )


def _found(name: str) -> Any:
  parts = name.split(".")
  for i in range(len(parts), 0, -1):
    try:
      thing = importlib.import_module(".".join(parts[:i]))
    except ImportError:
      continue
    for part in parts[i:]:
      if not hasattr(thing, part):
        raise ValueError(f"{'.'.join(parts[:i])} has no {part!r}")
      thing = getattr(thing, part)
    return thing
  raise ValueError(f"no module {parts[0]!r}")


def _entry(name: str, thing: Any) -> str:
  thing = getattr(thing, "__func__", thing)
  if isinstance(thing, property | functools.cached_property):
    signature = ""
    thing = thing.fget if isinstance(thing, property) else thing.func
  else:
    signature = _signature(name, thing)
  return f"### `{name}`\n\n{signature}{_docstring(thing)}"


def _signature(name: str, thing: Any) -> str:
  """The call with its defaults; types are in the source."""
  try:
    found = inspect.signature(thing).parameters.values()
  except (TypeError, ValueError):
    return ""
  words: list[str] = []
  for p in found:
    if p.name in ("self", "cls") or p.kind is p.VAR_KEYWORD:
      continue
    if p.kind is p.KEYWORD_ONLY and "*" not in words:
      words.append("*")
    word = _OBJECT.sub(r"\1", str(p.replace(annotation=p.empty)))
    words.append(word if len(word) < _WIDTH else f"{p.name}=...")
  name = name.rpartition(".")[2]
  call = f"{name}({', '.join(words)})"
  if len(call) > _WIDTH:
    call = f"{name}(\n  " + ",\n  ".join(words) + ",\n)"
  return f"```python\n{call}\n```\n\n"


def _docstring(thing: Any) -> str:
  text = inspect.getdoc(thing) or ""
  if dataclasses.is_dataclass(thing) and text.startswith(f"{thing.__name__}("):
    text = ""
  return "\n".join(_lines(text.splitlines())).strip()


def _lines(lines: list[str]) -> Iterator[str]:
  section, code = "", False
  for line in lines:
    if line.rstrip(":") in _SECTIONS and line.endswith(":"):
      section = line[:-1]
      yield f"**{section}**"
      yield ""
    elif section == "Example":
      if line.strip() and not code:
        code = True
        yield "```python"
      if code and line and not line.startswith(" "):
        code, section = False, ""
        yield "```"
        yield ""
      yield line.removeprefix("  ")
    elif section and (match := _ITEM.fullmatch(line)):
      yield f"- `{match[1]}`: {match[2]}" if section != "Returns" else line[2:]
    elif section:
      if line and not line.startswith(" "):
        section = ""
      yield line.removeprefix("  ") if section != "Returns" else line.strip()
    else:
      yield line
  if code:
    yield "```"
