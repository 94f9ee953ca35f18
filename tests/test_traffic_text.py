"""What the traffic model says in a terminal."""

import dataclasses

import pytest

from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import traffic_text
from pallas_gemm.ladder.contract import Gemm, SimtConfig

H200 = hardware.lookup("H200")
SMALL = Gemm(16, 16, 16)
RUNGS = {rung.label: rung for rung in ladder.with_variants()}


def explained(label, *sizes, gpu=H200, **factors) -> str:
  """Of the rung's default config."""
  rung = RUNGS[label]
  problem = Gemm(*sizes, rung.dtypes[0], **factors)
  with hardware.assume("H200"):
    config = rung.default_config(problem)
  return traffic_text.explain(label, config, problem, gpu)


@pytest.mark.parametrize("label", RUNGS)
@pytest.mark.parametrize(
  "shape", [(1, 1, 1), (16, 16, 16), (4095, 4097, 65), (16384, 16384, 16384)]
)
def test_it_fits_a_terminal_and_says_what_the_kernel_does(label, shape):
  text = explained(label, *shape, beta=1.0)
  lines = text.split("\n")
  assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
  assert text.isascii()
  assert lines[0].startswith(f"rung {label}, {RUNGS[label].name}, ")
  assert "NVIDIA H200 (132 SMs)" in lines[0]
  assert sum(line.endswith("<- binds") for line in lines) == 1
  number = RUNGS[label].number
  assert ("by wgmma" in text) == (number >= 9 and label not in ("9a", "9c"))
  assert ("for mma" in text) == (label in ("9a", "9c"))
  assert ("issue slots" in text) == (2 < number <= 8)
  assert ("different ones" in text) == (number <= 2)


@pytest.mark.parametrize("label", RUNGS)
def test_multicast_is_said(label):
  text = explained(label, 4096, 4096, 4096)
  assert ("by multicast" in text) == (label == "12")


@pytest.mark.parametrize("label", RUNGS)
def test_nothing_to_multiply(label):
  assert "nothing to launch" in explained(label, 8, 8, 0, beta=2.0)


def test_the_small_example():
  block = SimtConfig(block_m=4, block_n=4)
  text = traffic_text.explain(1, block, SMALL, H200)
  lines = {" ".join(line.split()) for line in text.split("\n") if line.strip()}
  assert "work 8,192 FLOP 2 M N K" in lines
  assert "global reads of a block 512 BM BN (TM + TN) K / (TM TN)" in lines
  assert "different ones 128 (BM + BN) K" in lines
  assert "global bytes read 32,768 B by all blocks" in lines
  assert "arithmetic intensity 0.25 FLOP/byte work / global bytes read" in lines


def test_scaled_rates_are_said():
  gpu = dataclasses.replace(H200, name="other", modelled_on="NVIDIA H200")
  assert "rates scaled from NVIDIA H200" in explained("7", 16, 16, 16, gpu=gpu)
