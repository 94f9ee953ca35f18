"""Code of the rungs in pages: functions of their files, diffs, machine code."""

import ast
from collections.abc import Iterator
import importlib
import inspect
import pathlib
import shlex

from docs.extensions import lookup, results
from experiments.harness import rung_text
from pallas_gemm.ladder import contract

SASS = lookup.ROOT / "docs" / "sass"


# Lines that a page shows without a fold.
_SCREEN = 60


def rung_code(text: str) -> str:
  """A name of a rung's file ("6 kernel"), or all of it but the docstring.

  Raises:
    UnknownError: no rung or name, or several.
  """
  label, *names = lookup.words(text, 1, "a rung and perhaps a name")
  module = importlib.import_module(results.rung(label).module)
  return _excerpt(pathlib.Path(inspect.getfile(module)), names)


def code(text: str) -> str:
  """A name of a file ("examples/moe.py layer"), or lines from one to another.

  The latter are "examples/moe.py 'first line has' 'line after the last has'";
  the second may be empty.

  Raises:
    UnknownError: there is no such file or name, or several.
  """
  file, *names = shlex.split(text)
  path = lookup.ROOT / file
  if not path.exists():
    raise lookup.UnknownError(f"no file {file!r}")
  if len(names) < 2:
    return _excerpt(path, names)
  lines = path.read_text().splitlines()
  start = _line(lines, names[0], 0, path)
  end = _line(lines, names[1], start + 1, path) if names[1] else len(lines)
  return _shown("\n".join(lines[start:end]).strip("\n"), path)


def rung_diff(text: str) -> str:
  """What a rung changes of the one before ("6"), or of the one named ("7,8a").

  Of the first rung, which has none before, it is its code.

  Raises:
    UnknownError: no rung of that name.
  """
  *older, newer = (results.rung(name.strip()) for name in text.split(","))
  before: contract.Rung | None
  if len(older) > 1:
    raise lookup.UnknownError(f"want a rung, or two as in 6,7; got {text!r}")
  before = older[0] if older else results.before(newer)
  if before is None:
    return _fence("\n".join(rung_text.code(newer)), "python")
  found = rung_text.diff(before, newer)
  return folded(
    f"From rung {before.label} to rung {newer.label}", _fence(found, "diff")
  )


def rung_sass(text: str) -> str:
  """The machine code of a rung ("6", "6 loop"), an excerpt in docs/sass.

  Raises:
    UnknownError: no file, or several.
  """
  label, *rest = lookup.words(text, 1, "a rung and perhaps a part of a name")
  rung = results.rung(label)
  stem = f"{rung.number:02}{rung.variant}"
  there = sorted(SASS.glob("*.txt"))
  found = [
    x
    for x in there
    if x.name.startswith((f"{stem}_", f"{stem}."))
    and all(word in x.stem for word in rest)
  ]
  if len(found) != 1:
    raise lookup.UnknownError(
      f"{len(found)} files docs/sass/{stem}_*.txt of {text!r}; there is"
      f" {lookup.listed(x.name for x in there)}"
    )
  shown = _fence(found[0].read_text().rstrip(), "text")
  return folded(f"Machine code of rung {rung.label}", shown)


def folded(summary: str, text: str) -> str:
  """Markdown that a reader unfolds, if it is longer than a screen."""
  count = text.count("\n")
  if count <= _SCREEN:
    return text
  return (
    f"<details><summary>{summary}: {count} lines</summary>\n\n{text}\n\n"
    "</details>"
  )


def _fence(text: str, language: str) -> str:
  return f"```{language}\n{text}\n```"


def _shown(text: str, path: pathlib.Path) -> str:
  file = path.relative_to(lookup.ROOT).as_posix()
  return f"`{file}`\n\n{_fence(text, 'python')}"


def _line(lines: list[str], part: str, start: int, path: pathlib.Path) -> int:
  for i, line in enumerate(lines[start:], start):
    if part in line:
      return i
  raise lookup.UnknownError(f"no line of {path.name} has {part!r}")


def _excerpt(path: pathlib.Path, names: list[str]) -> str:
  lines = path.read_text().splitlines()
  tree = ast.parse("\n".join(lines))
  if names:
    first, last = _span(tree, " ".join(names), path)
  else:
    # The first statement after the docstring.
    first, last = _start(tree.body[1]), len(lines)
  text = inspect.cleandoc("\n" + "\n".join(lines[first - 1 : last]))
  return _shown(text, path)


def _span(tree: ast.Module, name: str, path: pathlib.Path) -> tuple[int, int]:
  """First and last line of what a name stands for."""
  everything = list(_definitions(tree))
  *around, last = name.split(".")
  found = []
  for known, node in everything:
    *outer, inner = known.split(".")
    if inner == last and set(around) <= set(outer):
      found.append(node)
  if len(found) != 1:
    names = lookup.listed(known for known, _ in everything)
    raise lookup.UnknownError(
      f"{len(found)} definitions of {name!r} in {path.name}; there is {names}"
    )
  return _start(found[0]), found[0].end_lineno or 0


def _start(node: ast.stmt) -> int:
  decorators = getattr(node, "decorator_list", [])
  return min(x.lineno for x in [node, *decorators])


def _definitions(
  node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.stmt]]:
  """Names and what they stand for; of variables those of the file alone."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.FunctionDef | ast.ClassDef):
      yield prefix + child.name, child
      yield from _definitions(child, f"{prefix}{child.name}.")
    elif isinstance(child, ast.Assign) and not prefix:
      for target in child.targets:
        yield ast.unparse(target), child
    else:
      yield from (
        found
        for found in _definitions(child, prefix)
        if not isinstance(found[1], ast.Assign)
      )
