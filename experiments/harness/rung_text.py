"""A rung in print: its page, grid and blocks, the traffic model, its code.

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
import functools
import importlib
import inspect
import io
import math
import tokenize

from jax.experimental import pallas as pl

from experiments.harness import compiled, tables
from pallas_gemm import hardware
from pallas_gemm.ladder import blocks, contract, traffic, traffic_text

_FIELDS = {"DEFAULT", *(x.name for x in dataclasses.fields(contract.Rung))}


def traffic_of(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> traffic.Traffic:
  """What a rung moves with its default config."""
  config = rung.default_config(problem)
  return traffic.model(rung, config, problem, gpu)


def traffic_line(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> str:
  """Modelled traffic, intensity and floor, in a line."""
  t = traffic_of(rung, problem, gpu)
  return (
    f"model: reads {tables.size(t.global_load_bytes)} and writes"
    f" {tables.size(t.global_store_bytes)} of global memory,"
    f" {t.intensity:.3g} FLOP/byte, at least"
    f" {tables.duration(t.floor.seconds * 1e3)} ({t.floor.binds} binds)"
  )


def page(rung: contract.Rung) -> str:
  """The docstring of the rung's file."""
  text = inspect.getdoc(importlib.import_module(rung.module)) or rung.idea
  title = f"Rung {rung.label}: {rung.name}"
  if rung.label != str(rung.number):
    text = f"A variant: {rung.idea}. Its file says:\n\n{text}"
  return f"{title}\n{'=' * len(title)}\n\n{text}\n"


def explain(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> str:
  """Grid, blocks, the model's numbers with their formulas, and registers.

  All for the default config.
  """
  config = rung.default_config(problem)
  model = traffic_text.explain(rung, config, problem, gpu)
  if 0 in (problem.m, problem.n, problem.k) or problem.alpha == 0:
    return model + "\n"  # no kernel is started
  parts = (
    grid_lines(rung, problem, config) + block_lines(rung, problem, config),
    [model],
    compiled.describe(rung, problem, gpu),
  )
  return "\n".join("\n".join(lines) + "\n" for lines in parts)


def grid_lines(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> list[str]:
  """What each dimension of the grid is, and what is started for it."""
  dimensions, started = grid_cells(rung, problem, config)
  lines = [f"grid of rung {rung.label}, {rung.name}"]
  lines += [
    f"  {index}  {count:>9}  {text}" for index, count, text in dimensions
  ]
  if started:
    lines.append(f"  started: {started}, which take (i, j) in turn")
  return lines


def grid_cells(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> tuple[list[tuple[str, str, str]], str]:
  """The grid's dimensions: index, steps, of what; and what is started for it.

  The latter is "" where that is one thread block for each of the result's.
  """
  given, problem = problem, rung.padded(problem, config)
  grid = rung.grid(problem, config)
  (a, *_), c = rung.specs(problem, config)
  dimensions = []
  for index, side, step, count in zip(
    "ijk", "mnk", (*c.block_shape, a.block_shape[1]), grid
  ):
    name, size = side.upper(), getattr(problem, side)
    text = f"{name} / B{name} = {size} / {step}" if step else name
    if step and size % step:
      text += ", rounded up"
    if size != getattr(given, side):
      text += f", {name} padded from {getattr(given, side)}"
    dimensions.append((index, f"{count:,}", text))
  cluster = [getattr(config, f"cluster_{side}", 1) for side in "mn"]
  launched = math.prod(rung.launch(problem, config))
  started = ""
  if math.prod(cluster) > 1:
    started = f"{launched:,} clusters of {cluster[0]} x {cluster[1]} blocks"
  elif launched != math.prod(grid[:2]):
    started = f"{launched:,} thread blocks"
  return dimensions, started


def block_lines(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> list[str]:
  """A table: which block of each matrix belongs to a point of the grid."""
  rows = block_cells(rung, problem, config)
  widths = [max(map(len, column)) for column in zip(*rows)]
  return [
    "  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
  ]


def block_cells(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> list[tuple[str, ...]]:
  """The header and the rows of that table."""
  problem = rung.padded(problem, config)
  grid = rung.grid(problem, config)
  inputs, out = rung.specs(problem, config)
  rows = [("", "block", "at", "memory", "bytes", "each element")]
  for name, spec in zip("ABC", inputs):
    # C is read once for all steps along K.
    points = (*grid[:2], 1) if name == "C" else grid
    axes = spec.collective_axes or ()
    sharers = math.prod(getattr(config, axis) for axis in axes)
    times = pl.cdiv(blocks.times_read(spec, points), sharers)
    text = f"read {times:,} times" if times > 1 else "read once"
    if sharers > 1:
      text += ", multicast"
    rows.append((name, *_placed(spec, problem), text))
  return [*rows, ("result", *_placed(out, problem), "written once")]


def _placed(spec, problem: contract.Problem) -> tuple[str, ...]:
  """A block's shape, its indices, where it is put, and its bytes."""
  shape = " x ".join(str(size or 1) for size in spec.block_shape)
  at = ", ".join(map(str, spec.index_map("i", "j", "k")))
  count = blocks.elements(spec) * problem.itemsize
  return shape, f"({at})", spec.memory_space.name, f"{count:,}"


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
  return list((_lines(newer) - _lines(older)).elements())


@functools.cache
def _lines(rung: contract.Rung) -> collections.Counter[str]:
  return collections.Counter(
    line.strip()
    for statement in ast.parse("\n".join(code(rung))).body
    if not isinstance(statement, ast.Import | ast.ImportFrom)
    for line in ast.unparse(statement).splitlines()
  )


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
