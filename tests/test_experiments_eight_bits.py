"""The program that compares products of 8 bits, without a GPU."""

import json
import types

import jax
import numpy as np
import pytest

from experiments import eight_bits
from experiments.harness import rows, run
from experiments.harness import sum_errors as errors
from pallas_gemm import hardware

SMALL = [
  eight_bits.Product("dense", 100, 72, 200, kind)
  for kind in ("", "tensor", "row", "row fast", "block", "line")
]
SMALL += [
  eight_bits.Product("dense", 100, 128, 256, "block"),
  eight_bits.Product("dense", 100, 128, 256, "line"),
  eight_bits.Product("dense", 64, 32, 96, "row", "int8"),
  eight_bits.Product("stored", 64, 32, 96, "row", k_last=False),
  eight_bits.Product("grouped", 512, 72, 200, "block", groups=2),
  eight_bits.Product("grouped", 512, 72, 200, "row", groups=2, pass_="dw"),
  eight_bits.Product(
    "grouped", 512, 72, 200, "row in slabs", groups=2, pass_="dw"
  ),
  eight_bits.Product(
    "grouped", 512, 72, 200, "line in slabs", groups=2, pass_="dw"
  ),
  eight_bits.In16Bits("dense", 64, 32, 96, "row"),
]


def functions(case):
  """Of its arms; and why there are no others."""
  found, skipped = {}, {}
  for name, arm in case.arms().items():
    try:
      found[name] = jax.jit(arm()[0].fn)
    except NotImplementedError as error:
      skipped[name] = str(error)
  return found, skipped


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_results_are_within_their_bounds(case):
  operands = case.draw(0)
  found, _ = functions(case)
  results = {name: fn(**operands) for name, fn in found.items()}
  results.pop("xla dequantised", None)  # which rounds operands
  for found in results.values():
    assert case.check(found, operands).passed
    assert not case.check(2 * found + 32, operands).passed


def test_who_takes_what():
  """Peers have scales of their own kinds, and a claim each."""
  of_rows, of_blocks, along_n, in_8_rows = (
    eight_bits.Product("dense", 64, 128, 256, "row"),
    eight_bits.Product("dense", 64, 128, 200, "block"),
    eight_bits.Product("stored", 64, 128, 256, "row", k_last=False),
    eight_bits.Product("grouped", 512, 72, 256, "block", groups=2),
  )
  scaled = {"jax.nn.scaled_matmul", "lax.scaled_dot"}
  found, skipped = functions(of_rows)
  assert scaled <= found.keys() | {x for x in skipped if "JAX" in skipped[x]}
  assert scaled | {"qwix"} <= of_rows.claims.keys()
  for case, why in ((of_blocks, "whole blocks"), (along_n, "along K")):
    reasons = functions(case)[1]
    assert all(why in reasons[name] for name in scaled & found.keys())
  assert "blocks" in functions(in_8_rows)[1]["lax.ragged_dot"]
  assert "xla" in found and not functions(SMALL[0])[1]  # without scales


def test_qwix_is_a_peer_where_it_is():
  case = eight_bits.Product("dense", 64, 128, 256, "block")
  found, skipped = functions(case)
  if "qwix" not in found:
    assert "lacks a module" in skipped["qwix"]
    pytest.skip("needs qwix (the extra `qwix`)")
  operands = case.draw(0)
  assert case.check(found["qwix"](**operands), operands).passed


@pytest.mark.parametrize("distribution", ("normal(0,1)", "uniform[0,1)"))
def test_errors_of_sums(distribution):
  """On CPUs all are sums in float32, as XLA has them."""
  case = errors.Sums(24, 16, 1024, distribution)
  bench = run.Bench("eight_bits", timed=False)
  row = json.loads(json.dumps(errors.row(bench, case)))
  rows.validate(row)
  assert row["passed"] and row["distribution"] == distribution
  names = errors.CLAIMS[eight_bits.F8].keys()
  assert row["arms"].keys() == names and not row["skipped"]
  off = [x["frobenius"] for x in row["arms"].values()]
  assert all(0 <= x < 1024 * 2.0**-24 for x in off), off
  assert len(errors.parts(row)) == 4
  assert len({case.name for case in errors.cases(eight_bits.F8)}) == 6


def test_what_another_kernel_adds_up_is_no_arm(monkeypatch):
  ours = types.SimpleNamespace(kernel_names=("sm90_dense_mosaic_gpu_kernel",))
  times = dict.fromkeys(errors.CLAIMS[eight_bits.F8], ours)
  monkeypatch.setattr(run.Bench, "times", lambda *_: times)
  case = errors.Sums(8, 8, 128, "normal(0,1)")
  row = errors.row(run.Bench("eight_bits"), case)
  assert [*row["arms"]] == ["pallas_gemm promoted", "pallas_gemm fast"]
  assert [*row["skipped"]] == ["xla default", "xla HIGHEST"]


def test_every_arm_is_lowered_for_a_gpu():
  with hardware.assume("H100"):
    grouped = next(eight_bits.cases(["grouped"]))
    for case in (grouped, *eight_bits.cases(["stored", "layer"])):
      operands, arms = case.operands(), functions(case)[0]
      # Of experts, whose kernels are many, one recipe and bfloat16.
      is_moe = case.fields()["kernel"] == "moe"
      few = "pallas_gemm row fast", "pallas_gemm bf16"
      for name in few if is_moe else arms:
        traced = arms[name].trace(**operands)
        assert traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
  "case",
  [eight_bits.Layer(64, 96, 128), eight_bits.Experts(64, 96, 128, groups=3)],
  ids=("mlp", "experts"),
)
def test_a_layers_derivatives_are_finite(case):
  operands = case.draw(0)
  found = {name: arm()[0].fn(**operands) for name, arm in case.arms().items()}
  assert all(case.check(x, operands).passed for x in found.values())
  plain = found[case.baseline]
  for name in ("row", "block", "tensor"):
    ours = found[f"pallas_gemm {name}"]
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain)):
      x, y = (np.asarray(v, np.float64) for v in (x, y))
      assert np.linalg.norm(x - y) < 0.15 * np.linalg.norm(y)
