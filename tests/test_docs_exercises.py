"""The solutions of "build it" on the rungs' pages are right, and lower."""

import importlib.util
import re
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
