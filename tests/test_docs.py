"""What is written about the code holds: examples, commands, links, targets."""

import doctest
import importlib.util
import os
from pathlib import Path
import pkgutil
import re
import subprocess
import sys

import pytest

import docs.extensions
import examples
import experiments
import pallas_gemm
from tests.support import pages

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
  path
  for path in (*ROOT.glob("*.md"), *ROOT.glob("experiments/**/*.md"))
  if path.name != "CHANGELOG.md"
)
README = (ROOT / "README.md").read_text()
# Modules that need an extra which is not always installed.
EXTRAS = {
  "jax_triton", "matplotlib", "nbclient", "nbformat", "qwix",
  "rich", "triton",
}  # fmt: skip

MODULES = sorted(
  module.name
  for package in (pallas_gemm, experiments, examples, docs.extensions)
  for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
)


def _blocks(language: str) -> list[str]:
  """The fenced blocks of the README in a language ("" for commands)."""
  return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
  try:
    module = importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name not in EXTRAS:
      raise
    pytest.skip(f"needs {error.name}")
  assert module.__doc__, "no docstring"
  assert doctest.testmod(module).failed == 0


def test_there_are_examples():
  names = ("pallas_gemm.hardware", "pallas_gemm.numerics", "pallas_gemm.ladder")
  finder = doctest.DocTestFinder()
  for name in names:
    module = importlib.import_module(name)
    assert any(test.examples for test in finder.find(module)), name


def _commands() -> list[str]:
  """Every `python -m program --flags` in the pages, once."""
  found = set()
  for page in (*PAGES, *pages.PAGES):
    text = re.sub(r"\\\n>?\s*", "", page.read_text())
    text = re.sub(r"python -m\s+", "python -m ", text)
    programs = r"python -m (?:docs|examples|experiments)\.[^\n`#]*"
    found.update(line.strip() for line in re.findall(programs, text))
  return sorted(found)


def _helps() -> dict[str, str]:
  """What each program that is given flags says of them."""
  programs = {x.split()[2] for x in _commands() if " --" in x}
  return {
    program: subprocess.run(
      # absl's programs print the flags of all modules.
      [
        sys.executable,
        "-m",
        program,
        "--help" + "full" * (program[:4] != "docs"),
      ],
      cwd=ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
    ).stdout
    for program in sorted(programs)
  }


def test_flags_of_commands_exist():
  helps = _helps()
  assert "experiments.ladder" in helps
  for command in _commands():
    _, _, program, *arguments = command.split()
    assert importlib.util.find_spec(program), command
    for argument in arguments:
      if match := re.match(r"--(?:no)?([a-z_]+)", argument):
        assert re.search(rf"--\[?(?:no\])?{match[1]}\b", helps[program]), (
          command
        )


def test_make_targets_exist():
  targets = set(
    re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
  )
  named = {
    target
    for page in PAGES
    for target in re.findall(r"[`\n]make ([a-z-]+)", page.read_text())
  } | {
    target
    for page in pages.PAGES
    for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", page.read_text())
  }
  assert {"bench", "test"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
  for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
    if not re.match(r"https?:|#", target):
      assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize(
  "page", (*PAGES, *pages.PAGES), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_files_named_exist(page):
  for name in re.findall(r"`([\w./]+/[\w.]+\.py)`", page.read_text()):
    if "NN" not in name:  # a pattern
      # From the root, or from the package.
      found = [x for x in (ROOT, ROOT / "pallas_gemm") if (x / name).exists()]
      assert found, name


def test_the_readme_ends():
  assert len(README.splitlines()) <= 150
  assert len(README.split()) <= 1050  # tables and code counted


def test_the_readmes_snippets_run_one_after_the_other():
  names = {}
  for block in _blocks("python"):
    for size in ("1000", "777", "512"):  # a tenth: it is interpreted here
      block = block.replace(size, size[:-1])
    exec(block, names)
  after, _ = names["loss"](names["w"] - 1e-3 * names["dw"])
  assert after < names["value"]
  assert names["y"].shape == (100, 51)
