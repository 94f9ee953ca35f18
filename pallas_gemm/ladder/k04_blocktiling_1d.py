"""Rung 4, blocktiling_1d: each thread computes a column of 8 outputs.

Before it: rung 3 loads two values from shared memory for every FMA, and
shared memory serves far fewer values than the FMA units take.

The idea: a thread computes TM = 8 outputs below each other. At each k it
loads one value of B, which stays in a register, and 8 of A: 9 loads for 8
FMAs instead of 16. With more outputs a thread, the block can grow to 64 x 64
with half the threads of rung 3, and a larger block reads global memory less
often.

Traffic, per output, with BM = BN = 64 and TM = 8:

    global   K/BN + K/BM = K/32 loads (rung 3: K/16)
    shared   K * (TM + 1) / TM = 9K/8 loads (rung 3: 2K)
    intensity = 16 FLOP/byte. 4096^3: 8.6 GB.

In Mosaic GPU: 512 CUDA threads are 4 warpgroups; each owns 16 rows as 2 x 2
warps of 8 rows x 32 columns, one column a lane. `layout.reduce(0)`, in which
the row of B is loaded, is one register a thread: the B value held in a
register needs no code of its own. The slab is 32 deep, not 8 as in the
texts: each slab costs two block-wide barriers, dear here (see rung 3), and
8-deep slabs run at less than half the speed.

Source: S. Boehm (2022), kernel 4.
"""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.ladder import contract, register_layouts, simt

# block_k 8 -> 16 -> 32: 8.3 -> 17.7 -> 20.1 TFLOP/s at 4096^3 on H200.
DEFAULT = contract.SimtConfig(block_m=64, block_n=64, block_k=32, thread_m=8)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  warpgroups = _warpgroups(config)
  return simt.first(
    simt.powers_of_two(config, "block_m", "block_k", "thread_m"),
    simt.fixed(config, block_n=64, thread_n=1, vector=1, stages=1),
    None
    if config.block_m >= 2 * config.thread_m
    else f"block_m must be at least 2 * thread_m = {2 * config.thread_m}"
    f" (a warpgroup's rows), got {config.block_m}",
    simt.at_most("warpgroups a block", warpgroups, 8),
    None
    if config.block_k >= warpgroups
    else f"block_k must be at least {warpgroups}, the block's warpgroups,"
    f" got {config.block_k}",
    simt.slabs_fit(config),
  )


def _warpgroups(config):
  return config.block_m // (2 * config.thread_m)


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C."""
  block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
  warpgroups = _warpgroups(config)
  rows, depth = block_m // warpgroups, block_k // warpgroups
  layout = register_layouts.column_per_thread(config.thread_m)
  copy_a = register_layouts.element_per_thread(rows, block_k, "columns")
  copy_b = register_layouts.element_per_thread(depth, block_n, "columns")

  def accumulate(a_ref, b_ref, m0, n0, wg, a_s, b_s, loaded, computed):
    own_a, own_b = pl.ds(wg * rows, rows), pl.ds(wg * depth, depth)

    def slab(s, acc):
      k0 = s * block_k
      a_rows = pl.ds(m0 + wg * rows, rows)
      b_rows = pl.ds(k0 + wg * depth, depth)
      a_tile = simt.load(a_ref.at[a_rows, pl.ds(k0, block_k)], copy_a)
      b_tile = simt.load(b_ref.at[b_rows, pl.ds(n0, block_n)], copy_b)
      a_s[own_a] = a_tile
      b_s[own_b] = b_tile
      simt.sync(loaded)

      def step(k, acc):
        a_k = simt.load(a_s.at[own_a, k], layout.reduce(1))  # TM values
        b_k = simt.load(b_s.at[k], layout.reduce(0))  # one value
        return acc + register_layouts.outer(a_k, b_k, layout)

      acc = lax.fori_loop(0, block_k, step, acc)
      simt.sync(computed)
      return acc

    acc = simt.zeros(rows, block_n, layout)
    return lax.fori_loop(0, a_ref.shape[1] // block_k, slab, acc)

  return simt.gemm(
    accumulate,
    a,
    b,
    c,
    problem,
    config,
    name="blocktiling_1d",
    layout=layout,
    warpgroups=warpgroups,
    scratch_types=(
      plgpu.SMEM((block_m, block_k), jnp.float32),
      plgpu.SMEM((block_k, block_n), jnp.float32),
      plgpu.Barrier(num_arrivals=warpgroups),
      plgpu.Barrier(num_arrivals=warpgroups),
    ),
  )


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT32,
  idea="a thread computes a column of 8",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=is_legal,
  kernel=kernel,
)
