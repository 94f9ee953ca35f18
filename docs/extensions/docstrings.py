"""Docstrings as they are written, in words and `code`, made reStructuredText.

A star, a bar or a backquote in them stands for itself; only `code` in single
backquotes, **bold** words and the sections of Google's style mean something.
"""

import re
import sys
from typing import Any

# What keeps its meaning: code, bold and slanted words, the star of a list or
# of *args:.
_KEPT = re.compile(
  r"(``[^`]+``|`[^`]+`"
  r"|\*\*[^*\s][^*]*\*\*|(?<!\w)\*[A-Za-z][\w -]*\w\*(?![\w*])"
  r"|^\s*\*+\s|^\s*\*+\w+:)"
)
# A default that is a constant of its module.
_CONSTANT = re.compile(r"(?<==)_[A-Z_]+\b")


def escaped(lines: list[str]) -> list[str]:
  """The lines of a docstring with what is markup by accident escaped.

  Example:
    >>> from docs.extensions import docstrings
    >>> docstrings.escaped(["fn(*args) of `x`s", ">>> f(*args)"])
    ['fn(\\\\*args) of ``x``\\\\ s', '>>> f(*args)']
  """
  found, example = [], False
  for line in lines:
    example = bool(line.strip()) and (
      example or line.lstrip().startswith(">>>")
    )
    found.append(line if example else _line(line))
  return found


def _line(line: str) -> str:
  parts = _KEPT.split(line)
  for i, part in enumerate(parts):
    if i % 2 == 0:
      parts[i] = re.sub(r"([*|])", r"\\\1", part)
    elif part.startswith("`"):
      code = part.strip("`")
      follows = parts[i + 1][:1]
      parts[i] = f"``{code}``" + ("\\ " if follows.isalnum() else "")
  return "".join(parts)


def setup(app: Any) -> None:
  """Has docstrings escaped before napoleon reads their sections.

  In signatures, private constants are replaced by their values.
  """

  def escape(app, what, name, thing, options, lines: list[str]) -> None:
    del app, what, name, thing, options
    lines[:] = escaped(lines)

  def put_values(app, what, name, thing, options, signature, returns):
    del app, what, name, options
    if not signature or not _CONSTANT.search(signature):
      return None
    module = sys.modules[thing.__module__]
    values = _CONSTANT.sub(lambda x: repr(getattr(module, x[0])), signature)
    return values, returns

  app.setup_extension("sphinx.ext.autodoc")
  app.connect("autodoc-process-docstring", escape, priority=400)
  app.connect("autodoc-process-signature", put_values)
