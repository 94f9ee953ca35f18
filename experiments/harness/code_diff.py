"""What changes in the code from one rung of the ladder to another.

The code of a rung is what its file defines for it, without docstrings and
comments. In a file that has variants too, that is what the rung's call of
`make_rung` names or takes from the file, and what that refers to.
"""

import ast
import collections
from collections.abc import Iterator
import copy
import dataclasses
import difflib
import importlib
import inspect
import io
import tokenize

from pallas_gemm.ladder import contract

try:
  import rich.console
  import rich.syntax
except ImportError:  # the extra `bench` is not installed
  rich = None

_FIELDS = {"DEFAULT", *(x.name for x in dataclasses.fields(contract.Rung))}


def code(rung: contract.Rung) -> list[str]:
  """A rung's code: imports, a name a line; then definitions as in the file.

  The call of `make_rung` is no part of it.
  """
  module = importlib.import_module(rung.module)
  source = inspect.getsource(module)
  tree = ast.parse(source)
  rungs = {x: y for x, y in vars(module).items() if isinstance(y, type(rung))}
  left, used = [], []
  for binds, statement in _statements(tree):
    if not binds & rungs.keys():
      left.append((binds, statement))
    elif any(rungs[name] is rung for name in binds):
      # What it does not give, the file does under the name of the field.
      given = {keyword.arg for keyword in statement.value.keywords}
      wanted = _FIELDS - given | _names(statement)
  while new := [part for part in left if part[0] & wanted]:
    left = [part for part in left if part not in new]
    used += [statement for _, statement in new]
    wanted = set().union(*(_names(statement) for _, statement in new))
  lines, bare = [], _without_prose(source, tree)
  for statement in sorted(used, key=lambda x: x.lineno):
    if isinstance(statement, ast.Import | ast.ImportFrom):
      lines.append(ast.unparse(statement))
    else:
      decorators = getattr(statement, "decorator_list", [])
      first = min(x.lineno for x in [statement, *decorators])
      rows = range(first, statement.end_lineno + 1)
      lines += ["", *(bare[row] for row in rows if row in bare)]
  return lines


def diff(older: contract.Rung, newer: contract.Rung) -> str:
  """How one rung's code becomes another's: a unified diff."""
  names = [f"{x.label} {x.name}: {x.idea}" for x in (older, newer)]
  lines = difflib.unified_diff(code(older), code(newer), *names, lineterm="")
  return "\n".join(lines)


def new_lines(older: contract.Rung, newer: contract.Rung) -> list[str]:
  """The lines of `newer` that `older` has not, or not as often.

  A statement is a line, however it is wrapped in the file, and is the same
  wherever it stands and however deep it is indented. Imports do not count.
  """
  before, after = (
    collections.Counter(
      line.strip()
      for statement in ast.parse("\n".join(code(rung))).body
      if not isinstance(statement, ast.Import | ast.ImportFrom)
      for line in ast.unparse(statement).splitlines()
    )
    for rung in (older, newer)
  )
  return list((after - before).elements())


def show(older: contract.Rung, newer: contract.Rung) -> None:
  """Prints the diff, in colour on a terminal."""
  text = diff(older, newer)
  if rich is None:
    print(text)
    return
  syntax = rich.syntax.Syntax(
    "", "diff", theme="ansi_dark", background_color="default"
  )
  rich.console.Console().print(syntax.highlight(text), end="", soft_wrap=True)


def _statements(tree: ast.Module) -> Iterator[tuple[set[str], ast.stmt]]:
  """What each statement of a module binds; an import for each of its names."""
  for statement in tree.body:
    if isinstance(statement, ast.Import | ast.ImportFrom):
      for alias in statement.names:
        one = copy.copy(statement)
        one.names = [alias]
        yield {alias.asname or alias.name.split(".")[0]}, one
    elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
      yield {statement.name}, statement
    elif isinstance(statement, ast.Assign):
      yield set().union(*map(_names, statement.targets)), statement
    elif isinstance(statement, ast.AnnAssign):
      yield _names(statement.target), statement


def _names(node: ast.AST) -> set[str]:
  return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _without_prose(source: str, tree: ast.Module) -> dict[int, str]:
  """The lines of a file by number, without comments and docstrings."""
  lines = dict(enumerate(source.splitlines(), start=1))
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      row, column = token.start
      lines[row] = lines[row][:column].rstrip()
      if not lines[row]:
        del lines[row]
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      if ast.get_docstring(node) is not None:
        doc = node.body[0]
        for row in range(doc.lineno, doc.end_lineno + 1):
          del lines[row]
  return lines
