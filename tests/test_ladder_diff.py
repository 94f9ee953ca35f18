"""One idea a step: each rung's file stands alone and says little that is new.

A step's size is the number of lines of the newer rung's code that the older
one's has not (`rung_text.new_lines`): of what its `make_rung` refers to in its
own file, without imports, docstrings and comments, a statement a line.
"""

import ast
import importlib
import inspect
import itertools
import types

import pytest

from experiments import ladder as program
from experiments.harness import cli, rung_text
from pallas_gemm import ladder
from pallas_gemm.ladder import LADDER
from tests.support import programs

# Lines that are enough for most steps; what the larger ones need more for.
MOST = 35
LARGER = {
  ("2", "3"): (45, "shared memory: warpgroups copy their shares, and wait"),
  ("8a", "8"): (82, "a loader with TMA, fragments ahead, a way out by TMA"),
  ("10a", "10"): (40, "both roles written out, with the barriers between them"),
  ("10", "11"): (40, "each role walks over tiles, and the ring runs on"),
  ("11", "12"): (70, "clusters, a choice of tile per problem, unrolled rings"),
}


def size(older, newer):
  return len(rung_text.new_lines(older, newer))


def steps():
  """Pairs of rungs in the order in which they are read.

  A variant lies on the way to its rung if the larger of the two steps by way
  of it is smaller than the step without it, as in 7, 8a, 8. The others lead
  nowhere, and follow what they are most like: 9b the rung, 9c the variant 9a.
  """
  found = [(LADDER[0], variant) for variant in LADDER[0].variants]
  for before, rung in itertools.pairwise(LADDER):
    # Of the rung itself: what it takes without any.
    larger = {
      x.label: max(size(before, x), size(x, rung))
      for x in (rung, *rung.variants)
    }
    way = min((rung, *rung.variants), key=lambda x: larger[x.label])
    found += [(before, rung)] if way is rung else [(before, way), (way, rung)]
    for i, variant in enumerate(rung.variants):
      like = min((rung, *rung.variants[:i]), key=lambda x: size(x, variant))
      found += [(like, variant)] if variant is not way else []
  return found


STEPS = steps()
labelled = {"ids": lambda rung: rung.label}


def module_of(rung):
  return importlib.import_module(rung.module)


@pytest.mark.parametrize("older, newer", STEPS, **labelled)
def test_a_step_is_one_idea(older, newer):
  most, reason = LARGER.get((older.label, newer.label), (MOST, "small"))
  new = rung_text.new_lines(older, newer)
  assert len(new) <= most, "\n".join([reason, *new])


def test_no_step_is_called_larger_in_vain():
  sizes = {(x.label, y.label): size(x, y) for x, y in STEPS}
  assert set(LARGER) <= set(sizes)
  assert not {step: sizes[step] for step in LARGER if sizes[step] <= MOST}


def test_every_rung_and_variant_is_reached():
  reached = [newer.label for _, newer in STEPS]
  every = [rung.label for rung in ladder.with_variants()]
  assert sorted(["1", *reached]) == sorted(every)


@pytest.mark.parametrize(
  "rung", ladder.with_variants(), ids=lambda rung: rung.label
)
def test_code_is_the_files_without_its_prose(rung):
  lines = rung_text.code(rung)
  tree = ast.parse("\n".join(lines))
  functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
  assert functions and not any(map(ast.get_docstring, functions))
  imports = [line for line in lines if line.startswith(("import ", "from "))]
  assert len(imports) == sum(
    isinstance(x, ast.Import | ast.ImportFrom) for x in ast.walk(tree)
  )
  source = inspect.getsource(module_of(rung)).splitlines()
  for line in set(lines) - set(imports):
    assert "#" not in line
    assert any(x == line or x.startswith(f"{line}  #") for x in source)


def test_rungs_of_one_file_are_told_apart():
  rung, variant = ("\n".join(rung_text.code(ladder.find(x))) for x in (8, "8a"))
  assert "def kernel(" in rung and "set_max_registers" in rung
  assert "def kernel_by_registers(" not in rung
  assert "def kernel_by_registers(" in variant
  assert "def kernel(" not in variant and "set_max_registers" not in variant
  assert "def specs(" in rung and "def specs(" in variant


def test_statements_that_moved_are_not_new(monkeypatch):
  of = {"old": "x = 1\nif x:\n  y = 2\n", "new": "y = 2\nx = (\n  1)\nz = 3\n"}
  monkeypatch.setattr(rung_text, "code", lambda name: of[name].splitlines())
  assert rung_text.new_lines("old", "new") == ["z = 3"]
  assert rung_text.new_lines("new", "old") == ["if x:"]


def test_diff_on_the_command_line(capsys):
  assert programs.call(program.main, ["--diff=6, 7"]) == 0
  plain = capsys.readouterr().out
  first, second, *rest = plain.splitlines()
  assert first.startswith("--- 6 vectorized: ")
  assert second.startswith("+++ 7 warptiling: ")
  assert {x[0] for x in rest if x} == set("@ +-")


@pytest.mark.parametrize("value", ["", "6", "6,7,8", "6,99", "6,", "seven,8"])
def test_wrong_rungs_are_one_line(value):
  with pytest.raises(cli.FlagError, match="--diff: ") as caught:
    programs.call(program.main, [f"--diff={value}"])
  assert "\n" not in str(caught.value)


# Files.


@pytest.mark.parametrize("rung", LADDER, **labelled)
def test_a_file_is_short(rung):
  lines = inspect.getsource(module_of(rung)).splitlines()
  most = 262 if rung.number > 8 else 170 + 60 * len(rung.variants)
  assert len(lines) <= {8: 270}.get(rung.number, most)


@pytest.mark.parametrize("rung", LADDER, **labelled)
def test_a_file_needs_no_other_rungs(rung):
  values = list(vars(module_of(rung)).values())
  homes = {getattr(value, "__module__", None) for value in values}
  homes |= {x.__name__ for x in values if isinstance(x, types.ModuleType)}
  assert not homes & ({x.module for x in LADDER} - {rung.module})
