"""The program that compares products of 8 bits, without a GPU."""

import jax
import numpy as np
import pytest

from experiments import eight_bits
from pallas_gemm import hardware

SMALL = [
  eight_bits.Product("dense", 100, 72, 200, kind)
  for kind in ("", "tensor", "row", "row fast", "block", "line")
]
SMALL += [
  eight_bits.Product("dense", 64, 32, 96, "row", "int8"),
  eight_bits.Product("stored", 64, 32, 96, "row", k_last=False),
  eight_bits.Product("grouped", 512, 72, 200, "block", groups=2),
  eight_bits.Product("grouped", 512, 72, 200, "row", groups=2, pass_="dw"),
  eight_bits.Product("grouped", 512, 72, 200, "line", groups=2, pass_="dw"),
  eight_bits.In16Bits("dense", 64, 32, 96, "row"),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_results_are_within_their_bounds(case):
  operands = case.draw(0)
  results = {name: arm()[0].fn(**operands) for name, arm in case.arms().items()}
  results.pop("xla dequantised", None)  # which rounds operands
  for found in results.values():
    assert case.check(found, operands).passed
    assert not case.check(2 * found + 32, operands).passed


def test_every_arm_is_lowered_for_a_gpu():
  with hardware.assume("H100"):
    for case in eight_bits.cases(["stored", "layer"]):
      operands = case.operands()
      for arm in case.arms().values():
        traced = arm()[0].fn.trace(**operands)
        assert traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_layers_derivatives_are_finite():
  case = eight_bits.Layer(64, 96, 128)
  operands = case.draw(0)
  found = {name: arm()[0].fn(**operands) for name, arm in case.arms().items()}
  assert all(case.check(x, operands).passed for x in found.values())
  (plain,) = found["jnp.dot"]
  for name in ("row", "block", "tensor"):
    (ours,) = found[f"pallas_gemm {name}"]
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain)):
      x, y = (np.asarray(v, np.float64) for v in (x, y))
      assert np.linalg.norm(x - y) < 0.15 * np.linalg.norm(y)
