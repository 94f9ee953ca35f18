"""The program that compares precisions of float32, without a GPU."""

import json

import jax
import numpy as np
import pytest

from experiments import float32
from experiments.harness import run, sum_errors
from pallas_gemm import hardware

SMALL = [
  float32.Product("dense", 100, 72, 200, layout, precision)
  for layout in ("NN", "NT", "TN")
  for precision in ("HIGHEST", "x3")  # CPUs have no x9
]
SMALL.append(float32.Product("dense", 100, 72, 200, dtype_b="bfloat16"))
SMALL += [
  float32.Grouped(64, 4, 40, 24, pass_) for pass_ in ("forward", "dx", "dw")
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_results_are_within_their_bounds(case):
  operands = case.draw(0)
  for arm in case.arms().values():
    found = arm()[0].fn(**operands)
    assert case.check(found, operands).passed
    assert not case.check(2 * found + 1, operands).passed


def test_every_arm_is_lowered_for_a_gpu():
  """Ours runs the kernel there."""
  with hardware.assume("H100"):
    cases = [*float32.cases(["dense", "grouped", "layer"], 0)]
    for case in (*cases[::4], *cases[-9:]):  # of each kind
      operands = case.operands()
      for name, arm in case.arms().items():
        traced = arm()[0].fn.trace(**operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("mosaic_gpu" in text) == name.startswith("pallas_gemm")


def test_a_layers_derivatives_are_xlas():
  case = float32.Layer(24, 48, 32)
  operands = case.draw(0)
  ours, theirs = (arm()[0].fn(**operands) for arm in case.arms().values())
  assert case.check(ours, operands).passed
  for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
    assert np.linalg.norm(x - y) < 1e-5 * np.linalg.norm(y)


def test_sizes_that_are_drawn():
  found = float32.drawn(0, 30)
  assert found == float32.drawn(0, 30) != float32.drawn(1, 30)
  assert sum(m % 2 for m, _, _ in found[::3]) == 10
  assert all(m <= 256 for m, _, _ in found[1::3])


def test_errors_of_sums():
  case = sum_errors.Sums(24, 16, 256, "uniform[0,1)", "float32")
  bench = run.Bench("float32", timed=False)
  row = json.loads(json.dumps(sum_errors.row(bench, case)))
  assert (
    row["passed"] and row["arms"].keys() == sum_errors.CLAIMS["float32"].keys()
  )
  assert all(x["frobenius"] < 1e-5 for x in row["arms"].values())
