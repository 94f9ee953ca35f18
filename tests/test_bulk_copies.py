"""Copies of one run of bytes start at multiples of 16 bytes."""

import jax
import pytest

from pallas_gemm import hardware, mosaic
from pallas_gemm.kernels.sm90 import block
from tests.support import (
  bulk_copies,
  cases,
  dense,
  eight_bit_cases,
  group_cases,
  ragged_kernels,
)

CASES = cases.RACES | group_cases.RACES | eight_bit_cases.RACES


def _unproven(name: str, monkeypatch) -> list[str]:
  # What it says of an index is not so.
  monkeypatch.setattr(mosaic, "anywhere", lambda index: index)
  problem, config = CASES[name].problem, CASES[name].config
  support = ragged_kernels if problem.groups else dense
  with hardware.assume("NVIDIA H100 80GB HBM3"):
    kernel, arguments = support.example(problem, config)
    traced = jax.make_jaxpr(kernel)(*arguments)
  return bulk_copies.unproven(traced.jaxpr)


@pytest.mark.parametrize("name", CASES)
def test_kernels_copy_from_multiples_of_16_bytes(name, monkeypatch):
  assert not _unproven(name, monkeypatch)


def test_a_planted_copy_is_found(monkeypatch):
  right = block.Block.stored_origin

  def one_further(self, work_tile):
    row, column = right(self, work_tile)
    return row, column + 1

  monkeypatch.setattr(block.Block, "stored_origin", one_further)
  (found,) = _unproven("c_of_another_dtype", monkeypatch)
  assert found == "[64] of Ref<gmem>{bfloat16[64]}"
