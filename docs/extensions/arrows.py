"""Which module of a package imports which, read from the sources."""

import ast
import collections
from collections.abc import Iterator
import pathlib

Arrows = dict[str, dict[str, set[str]]]


def arrows(folder: pathlib.Path) -> Arrows:
  """Which parts of a package import which others: files of a import b.

  A part is a module or a package that lies in the folder, with all that is in
  it; the package's own `__init__` is "__init__". Imports in functions count.

  Example:
    >>> import pathlib
    >>> import pallas_gemm
    >>> from docs.extensions.arrows import arrows
    >>> folder = pathlib.Path(pallas_gemm.__file__).parent
    >>> sorted(arrows(folder)["roofline"])
    ['hardware']
  """
  package, top = folder.name, folder
  while (top.parent / "__init__.py").exists():
    top = top.parent
    package = f"{top.name}.{package}"
  parts = {path.stem for path in folder.glob("*.py")}
  parts |= {path.parent.name for path in folder.glob("*/__init__.py")}
  found: Arrows = collections.defaultdict(lambda: collections.defaultdict(set))
  for path in folder.rglob("*.py"):
    source = path.relative_to(folder).with_suffix("").parts[0]
    for name in _imported(path):
      target = name.removeprefix(f"{package}.").split(".")[0]
      if name.startswith(f"{package}.") and target != source:
        target = target if target in parts else "__init__"
        found[source][target].add(str(path.relative_to(folder)))
  return found


def _imported(path: pathlib.Path) -> Iterator[str]:
  """The full names of what a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{name.name}" for name in node.names)
