"""Copies of one run of bytes start at multiples of 16 bytes."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_gemm import compat, hardware, mosaic
from tests.support import (
  bulk_copies,
  cases,
  dense,
  eight_bit_cases,
  group_cases,
  ragged_kernels,
)

CASES = cases.RACES | group_cases.RACES | eight_bit_cases.RACES


@pytest.fixture(autouse=True)
def on_h100(monkeypatch):
  # What it says of an index is not so.
  monkeypatch.setattr(mosaic, "anywhere", lambda index: index)
  with hardware.assume("NVIDIA H100 80GB HBM3"):
    yield


@pytest.mark.parametrize("name", CASES)
def test_kernels_copy_from_multiples_of_16_bytes(name):
  problem, config = CASES[name].problem, CASES[name].config
  support = ragged_kernels if problem.groups else dense
  kernel, arguments = support.example(problem, config)
  traced = jax.make_jaxpr(kernel)(*arguments)
  assert not bulk_copies.unproven(traced.jaxpr)


@pytest.mark.parametrize(("step", "count"), ((4, 0), (2, 1)))
def test_a_planted_copy_is_found(step, count):
  def body(x, out, room, loaded):
    def copy(i, _):
      window = x.at[1, pl.ds((2 * i + lax.axis_index("block")) * step, 64)]
      plgpu.copy_gmem_to_smem(window, room, loaded)
      plgpu.barrier_wait(loaded)

    lax.fori_loop(0, 3, copy, None)
    out[...] = room[...]

  kernel = compat.kernel(
    body,
    name="planted",
    out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
    grid=(2,),
    grid_names=("block",),
    scratch_types=[
      plgpu.SMEM((64,), jnp.float32), plgpu.Barrier(num_arrivals=1)
    ],
  )  # fmt: skip
  traced = jax.make_jaxpr(kernel)(jnp.zeros((2, 256)))
  assert len(bulk_copies.unproven(traced.jaxpr)) == count
