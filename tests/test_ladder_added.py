"""A variant is added to a copy of the tree as docs/architecture.md says.

Of the steps those are taken that need no GPU, and nothing else breaks.
"""

import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import pytest

from tests import test_docs_exercises as exercises
from tests.support import pages

pytestmark = [pytest.mark.aot, pytest.mark.rows]

_KERNEL = re.compile(r"^def kernel\(.*?(?=^RUNG = )", re.M | re.S)
_VARIANT = """_BY_COLUMNS = contract.make_rung(
  __name__,
  variant="a",
  name="by_columns",
  idea="blocks walk down columns",
  dtypes=contract.FLOAT32,
  uses=("block_m", "block_n"),
  kernel=kernel_by_columns,
)
RUNG = contract.make_rung(
  __name__,
  variants=(_BY_COLUMNS,),"""
# What runs over the ladder: of each file what is of the variant, or of all.
_CHECKS = [
  f"tests/test_{name}.py"
  for name in (
    *("bazel", "contract", "docs_sass", "docs_site", "docs_write", "traffic"),
    *(f"ladder_{x}" for x in ("compile", "diff", "interpret", "lower")),
  )
]
_OF_THEM = (
  "by_columns or 1a or 01_naive or gpus.md or every_program or variants_stand"
  " or reached or in_vain or every_rung or rows_of_all_targets"
  " or operands_come or what_runs_there"
)


def _written(root: Path) -> None:
  """Steps 1 to 3: the solution of rung 1's exercise as its variant."""
  file = root / "pallas_gemm/ladder/k01_naive.py"
  source = file.read_text()
  page = (root / "docs/rungs/01_naive.md").read_text()
  diff = exercises.BUILD_IT.search(page)[3]
  kernel = _KERNEL.search(exercises.applied(source, diff))[0]
  kernel = kernel.replace("def kernel(", "def kernel_by_columns(")
  kernel = kernel.replace('name="naive"', 'name="by_columns"')
  head, tail = source.split("RUNG = contract.make_rung(\n  __name__,")
  file.write_text(head + kernel + _VARIANT + tail)
  claims = root / "tests/test_ladder_compile.py"
  text = claims.read_text()
  assert text.count("CLAIMS = {\n") == 1
  added = '  "1a": [r"FFMA", r"LD\\.E"],\n'
  claims.write_text(text.replace("CLAIMS = {\n", f"CLAIMS = {{\n{added}"))


def _run(root: Path, *command: str) -> None:
  done = subprocess.run(
    [sys.executable, *command],
    cwd=root,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_a_variant_is_added_to_the_letter(tmp_path):
  root = tmp_path / "tree"
  left = shutil.ignore_patterns(".*", "_build", "__pycache__", "runs")
  shutil.copytree(pages.ROOT, root, ignore=left, symlinks=True)
  _written(root)
  text = (pages.DOCS / "architecture.md").read_text()
  steps = pages.section(text, "How to add a rung")
  commands = re.findall(r"^ +\$ python (.*)$", steps, re.M)
  assert len(commands) == 3
  for command in commands:
    _run(root, *command.replace("6a", "1a").split())
  checks = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", _OF_THEM]
  _run(root, *checks, *_CHECKS)
