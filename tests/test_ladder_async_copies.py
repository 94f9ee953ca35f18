"""Rung 9c: what cp.async copies is there once it was waited for, not before.

In the interpreter the package's own copies are done at once, so a wait that is
forgotten would show nothing. Here they are late: a slot holds NaN from when its
copy starts until the thread has waited for it and then for the others.
"""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_gemm import numerics
from pallas_gemm.ladder import contract, find, k09_mma
from tests.support import mutations, problems

CONFIG = contract.TensorCoreConfig(64, 64, 32, stages=3, raster=2)
SHAPE = (70, 130, 7 * 32)


class _LateCopies:
  """`ptx`'s copies, in the order in which a GPU may do them at the latest."""

  def __init__(self):
    self.groups, self.arrived = [], []

  def copy_async(self, window, slot, *, swizzle):
    del swizzle
    slot[...] = jnp.full(slot.shape, jnp.nan, slot.dtype)

    def land():
      slot[...] = window[...]

    self.groups.append(land)

  def wait_async(self, count):
    done = len(self.groups) - count
    self.arrived += self.groups[: max(done, 0)]
    self.groups = self.groups[max(done, 0) :]

  def wait_for_warpgroup(self):
    for land in self.arrived:
      land()
    self.arrived = []


def _fori_loop(start, stop, body, carry):
  """Unrolled as it is traced, so that copies can wait for a later lap."""
  for i in range(start, stop):
    carry = body(i, carry)
  return carry


def _is_right(kernel, monkeypatch) -> bool:
  late = _LateCopies()
  for name in ("copy_async", "wait_async", "wait_for_warpgroup"):
    monkeypatch.setattr(k09_mma.ptx, name, getattr(late, name))
  monkeypatch.setattr(k09_mma.lax, "fori_loop", _fori_loop)
  a, b, c = problems.operands(*SHAPE, "bfloat16")
  rung = dataclasses.replace(find("9c"), kernel=kernel)
  out = rung.gemm(a, b, c, beta=1.0, config=CONFIG)
  return numerics.check(out, a, b, c, beta=1.0).passed


def test_late_copies_are_waited_for(monkeypatch):
  assert _is_right(k09_mma.kernel_by_ring, monkeypatch)


@pytest.mark.parametrize(
  ("right", "wrong"),
  [
    ("ptx.wait_async(2 * (stages - 2))", "ptx.wait_async(2 * (stages - 1))"),
    ("ptx.wait_for_warpgroup()", "None"),
    ("ring.at[lax.rem(k, stages)]", "ring.at[lax.rem(k, stages - 1)]"),
  ],
  ids=["waits for too few", "no barrier", "a ring one slot short"],
)
def test_a_planted_bug_is_caught(right, wrong, monkeypatch):
  kernel = k09_mma.kernel_by_ring
  mutations.plant_rewrite(kernel, [(right, wrong)], monkeypatch)
  assert not _is_right(k09_mma.kernel_by_ring, monkeypatch)
