"""What pages say of changing a kernel: solutions, and how to add a variant."""

import importlib.util
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from pallas_gemm import hardware, numerics
from pallas_gemm.ladder import LADDER
from tests.support import pages, problems

BUILD_IT = re.compile(
  r"^\*\*3\. Build it\*\* \(\+(\d+) −(\d+) lines\)\..*?^```diff\n(.*?)^```$",
  re.M | re.S,
)


def applied(source: str, diff: str) -> str:
  """A file with the hunks of a diff, each of which is in it once."""
  for hunk in re.split(r"^@@\n", diff, flags=re.M):
    lines = [(line[0], line[1:]) for line in hunk.splitlines(keepends=True)]
    old = "".join(line for mark, line in lines if mark != "+")
    assert source.count(old) == 1, old
    new = "".join(line for mark, line in lines if mark != "-")
    source = source.replace(old, new)
  return source


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_what_is_built_passes(rung, tmp_path):
  stem = rung.module.rsplit(".", 1)[1]
  text = (pages.DOCS / f"rungs/{stem.removeprefix('k')}.md").read_text()
  exercise = BUILD_IT.search(pages.section(text, "Exercises"))
  assert f"tests/test_ladder_lower.py -k {rung.name}`" in exercise[0]
  marks = [line[0] for line in exercise[3].splitlines()]
  assert (marks.count("+"), marks.count("-")) == (
    int(exercise[1]),
    int(exercise[2]),
  )

  file = tmp_path / f"{stem}.py"
  source = importlib.util.find_spec(rung.module).loader.get_source(rung.module)
  file.write_text(applied(source, exercise[3]))
  spec = importlib.util.spec_from_file_location(f"built.{stem}", file)
  module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  finally:
    del sys.modules[spec.name]

  gemm, dtype = module.RUNG.gemm, rung.dtypes[0]
  a, b, c = problems.operands(*problems.one_shape(rung), dtype)
  out = np.asarray(gemm(a, b, c, beta=0.5))
  assert numerics.check(out, a, b, c, beta=0.5).passed
  x = jax.ShapeDtypeStruct((512, 512), dtype)
  with hardware.assume("H200"):
    lowered = jax.jit(gemm).trace(x, x).lower(lowering_platforms=("cuda",))
  assert "mosaic_gpu" in lowered.as_text()


# docs/architecture.md says how a variant is added. Of the steps those are taken
# that need no GPU, in a copy of the tree, and nothing else breaks.

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
  diff = BUILD_IT.search(page)[3]
  kernel = _KERNEL.search(applied(source, diff))[0]
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


@pytest.mark.aot
@pytest.mark.rows
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
