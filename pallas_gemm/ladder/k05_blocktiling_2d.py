"""Rung 5, blocktiling_2d: each thread computes 8 x 8 outputs.

Before it: rung 4 still loads 9 values for 8 FMAs.

The idea: extend the thread's column to a tile. At each k a thread loads a
fragment of 8 values of A and one of 8 values of B to registers and forms
their outer product: 64 FMAs for 16 loads.

Traffic, per output, with a block of BM = 64, BN = 128 and TM = TN = 8:

    global   K/BM + K/BN = 3K/128 loads (rung 4: 4K/128)
    shared   K * (TM + TN) / (TM * TN) = K/4 loads (rung 4: 9K/8)
    FMAs per shared load = TM * TN / (TM + TN) = 4 (rung 4: 8/9)
    intensity = 21 FLOP/byte. 4096^3: 6.4 GB.

In Mosaic GPU: 128 threads of 64 outputs are one warpgroup, and a block is
one. With that the barriers of rungs 3 and 4 are gone from the source: Mosaic
GPU puts a warpgroup barrier (BAR.SYNC) before and after every store to
shared memory, which is the barrier after the load and the one after the
compute. A thread's rows are 2 apart and its columns 16, so lanes are
neighbours and every word is loaded by itself; Mosaic GPU serves the row of B
by `ldmatrix`, four words a lane at once. In CUDA the tile is usually solid
and the loads are left to the compiler to widen.

Source: S. Boehm (2022), kernel 5.
"""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.ladder import contract, register_layouts, simt

DEFAULT = contract.SimtConfig(
  block_m=64, block_n=128, block_k=8, thread_m=8, thread_n=8
)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  return simt.first(
    simt.powers_of_two(config, "block_k", "thread_m", "thread_n"),
    simt.fixed(
      config,
      block_m=8 * config.thread_m,
      block_n=16 * config.thread_n,
      vector=1,
      stages=1,
    ),
    simt.at_most("outputs a thread", config.thread_m * config.thread_n, 128),
    simt.at_most("block_k", config.block_k, 64),
  )


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C."""
  block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
  layout = register_layouts.strided_tile(config.thread_m, config.thread_n)
  copy_a = register_layouts.element_per_thread(block_m, block_k, "columns")
  copy_b = register_layouts.element_per_thread(block_k, block_n, "columns")

  def accumulate(a_ref, b_ref, m0, n0, _, a_s, b_s):
    rows, columns = pl.ds(m0, block_m), pl.ds(n0, block_n)

    def slab(s, acc):
      k0 = pl.ds(s * block_k, block_k)
      a_tile = simt.load(a_ref.at[rows, k0], copy_a)
      b_tile = simt.load(b_ref.at[k0, columns], copy_b)
      a_s[...] = a_tile
      b_s[...] = b_tile

      def step(k, acc):
        a_k = simt.load(a_s.at[:, k], layout.reduce(1))  # TM values
        b_k = simt.load(b_s.at[k], layout.reduce(0))  # TN values
        return acc + register_layouts.outer(a_k, b_k, layout)

      return lax.fori_loop(0, block_k, step, acc)

    acc = simt.zeros(block_m, block_n, layout)
    return lax.fori_loop(0, a_ref.shape[1] // block_k, slab, acc)

  return simt.gemm(
    accumulate,
    a,
    b,
    c,
    problem,
    config,
    name="blocktiling_2d",
    layout=layout,
    scratch_types=(
      plgpu.SMEM((block_m, block_k), jnp.float32),
      plgpu.SMEM((block_k, block_n), jnp.float32),
    ),
  )


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT32,
  idea="a thread computes 8 x 8",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=is_legal,
  kernel=kernel,
)
