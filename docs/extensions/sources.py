"""Code of the rungs in pages: functions of their files, diffs, machine code."""

import ast
from collections.abc import Iterator
import dataclasses
import importlib
import inspect
import pathlib

from docs.extensions import lookup, results
from experiments.harness import code_diff
from pallas_gemm.ladder import contract

SASS = lookup.ROOT / "docs" / "sass"


@dataclasses.dataclass(frozen=True)
class Excerpt:
  """Lines of a file, the number of the first, and the file from the root."""

  text: str
  first: int
  file: str


def excerpt(text: str) -> Excerpt:
  """A name of a rung's file ("6 kernel"), or all of it but the docstring.

  A name is of a function, a class or a variable, and may be that of a function
  within another; "kernel.slab" is one where several have it.

  Raises:
    UnknownError: no rung or name, or several.
  """
  label, *names = lookup.words(text, 1, "a rung and perhaps a name")
  module = importlib.import_module(results.rung(label).module)
  path = pathlib.Path(inspect.getfile(module))
  lines = path.read_text().splitlines()
  tree = ast.parse("\n".join(lines))
  if names:
    first, last = _span(tree, " ".join(names), path)
  else:
    # The first statement after the docstring.
    first, last = _start(tree.body[1]), len(lines)
  code = inspect.cleandoc("\n" + "\n".join(lines[first - 1 : last]))
  return Excerpt(code, first, path.relative_to(lookup.ROOT).as_posix())


def diff(text: str) -> tuple[str, str]:
  """What a rung changes, and the language that this is written in.

  "6" is what rung 6 changes of the one before, "7,8a" of the one named. Of the
  first rung, which has none before, it is its code.

  Raises:
    UnknownError: no rung of that name.
  """
  *older, newer = (results.rung(name.strip()) for name in text.split(","))
  before: contract.Rung | None
  if len(older) > 1:
    raise lookup.UnknownError(f"want a rung, or two as in 6,7; got {text!r}")
  before = older[0] if older else results.before(newer)
  if before is not None:
    return code_diff.diff(before, newer), "diff"
  return "\n".join(code_diff.code(newer)), "python"


def sass(text: str) -> tuple[str, str]:
  """The machine code of a rung ("6", "6 loop") and the file that holds it.

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
  return found[0].read_text().rstrip(), f"docs/sass/{found[0].name}"


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
