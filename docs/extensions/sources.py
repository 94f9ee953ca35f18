"""Code of the rungs in pages: functions of their files, diffs, machine code."""

import ast
import inspect
import pathlib

from docs.extensions import lookup, results
from experiments.harness import rung_text
from pallas_gemm import ladder

# Lines that a page shows without a fold.
_SCREEN = 60


def rung_code(text: str) -> str:
  """A name of a rung's file ("6 kernel"), or all of it but the docstring."""
  label, *names = lookup.words(text, 1, "a rung and perhaps a name")
  file = ladder.find(label).module.replace(".", "/") + ".py"
  return code(" ".join([file, *names]))


def code(text: str) -> str:
  """A name of a file ("examples/moe.py layer"), or lines from one to another.

  The latter are "examples/moe.py 'first line has' 'line after the last has'";
  the second may be empty.
  """
  file, *names = lookup.words(text, 1, "a file and perhaps a name")
  path = lookup.ROOT / file
  if not path.exists():
    raise ValueError(f"no file {file!r}")
  lines = path.read_text().splitlines()
  first, last = 1, len(lines)
  if len(names) == 2:
    first = line(lines, names[0], 0, path) + 1
    last = line(lines, names[1], first, path) if names[1] else last
  else:
    tree = ast.parse("\n".join(lines))
    node = _named(tree, names[0], path) if names else tree.body[1]
    first = min(x.lineno for x in (node, *getattr(node, "decorator_list", ())))
    last = node.end_lineno if names else last
  shown = inspect.cleandoc("\n" + "\n".join(lines[first - 1 : last]))
  return f"`{file}`\n\n{_fence(shown, 'python')}"


def rung_diff(text: str) -> str:
  """What a rung changes of the one before ("6"), or of the one named ("7,8a").

  Of the first rung, which has none before, it is its code.
  """
  *older, newer = (ladder.find(name.strip()) for name in text.split(","))
  before = older[0] if older else results.before(newer)
  if before is None:
    return _fence("\n".join(rung_text.code(newer)), "python")
  found = _fence(rung_text.diff(before, newer), "diff")
  count = found.count("\n")
  title = f"From rung {before.label} to rung {newer.label}: {count} lines"
  return folded(title, found) if count > _SCREEN else found


def rung_sass(label: str) -> str:
  """The machine code of a rung's loop, an excerpt in docs/sass, folded."""
  rung = ladder.find(label)
  there = {x.name: x for x in lookup.ROOT.glob("docs/sass/*.txt")}
  name = f"{rung.number:02}{rung.variant}_{rung.name}.txt"
  text = lookup.pick(there, name, "excerpt").read_text().rstrip()
  return folded(f"Machine code of rung {label}'s loop", _fence(text, "text"))


def folded(title: str, text: str) -> str:
  """Markdown that a reader unfolds."""
  head = f"<details><summary>{title}</summary>"
  return f"{head}\n\n{text.strip()}\n\n</details>"


def _fence(text: str, language: str) -> str:
  return f"```{language}\n{text}\n```"


def line(lines: list[str], part: str, start: int, path: pathlib.Path) -> int:
  """The index of the first line from a start on that has a part."""
  for i, text in enumerate(lines[start:], start):
    if part in text:
      return i
  raise ValueError(f"no line of {path.name} has {part!r}")


def _named(tree: ast.Module, name: str, path: pathlib.Path) -> ast.stmt:
  """What a name stands for; "kernel.slab" is a function within another."""
  node: ast.AST = tree
  for part in name.split("."):
    there = {}
    for inner in ast.walk(node):
      kinds = ast.FunctionDef | ast.ClassDef
      if inner is not node and isinstance(inner, kinds):
        there.setdefault(inner.name, []).append(inner)
    for inner in node.body:
      if isinstance(inner, ast.Assign):
        there[ast.unparse(inner.targets[0])] = [inner]
    found = lookup.pick(there, part, f"name in {path.name}:")
    if len(found) > 1:
      raise ValueError(f"{len(found)} of {part!r} in {path.name}")
    [node] = found
  return node
