"""Rung 3, shared_memory: a block loads each value once and shares it.

Before it: rung 2's loads are coalesced, but each value of A is still asked
for by every thread of its row and each value of B by every thread of its
column.

The idea: the threads of a 32 x 32 block walk K in slabs of 32. They first
copy a 32 x 32 tile of A and one of B to shared memory together, one element
of each a thread, wait for each other, multiply out of shared memory, and
wait again before the tiles are overwritten.

Traffic, per output:

    global   2 * K / 32 = K/16 loads (rung 2: 2K)
    shared   2K loads
    intensity = block / 4 = 8 FLOP/byte (rung 2: 0.25): global traffic falls
    by the block size. 4096^3: 17 GB instead of 550.

16^3 in 4 x 4 blocks: 128 loads a block, all different, 8,192 bytes in all,
1.0 FLOP/byte: four times rung 2, the block size.

What binds now is shared memory: 2 loads for 1 FMA.

In Mosaic GPU: 1,024 outputs at one a thread are 8 warpgroups, 8 Pallas
threads of one block, each owning 4 rows. Two things differ from the CUDA
kernel. The barrier: there is no `__syncthreads` over warpgroups, and the
mbarrier that stands in counts 1,024 arrivals, twice a slab. And rows of
shared memory may be read by `ldmatrix` (LDSM), which Mosaic GPU picks by
itself where the layout allows. The k loop is a loop: unrolled, LLVM merges
the loads of A along k into 128-bit ones, which is slower (7.5 -> 5.6 TFLOP/s
at 4096^3 on H200).

Source: D. Kirk, W. Hwu, "Programming Massively Parallel Processors", tiled
matrix multiplication; S. Boehm (2022), kernel 3.
"""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.ladder import contract, register_layouts, simt

DEFAULT = contract.SimtConfig(block_m=32, block_n=32, block_k=32)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  outputs = config.block_m * config.block_n
  warpgroups = _warpgroups(config)
  return simt.first(
    simt.powers_of_two(config, "block_m", "block_n", "block_k"),
    simt.fixed(config, thread_m=1, thread_n=1, vector=1, stages=1),
    simt.at_most("threads a block", outputs, 1024),
    None
    if config.block_m >= warpgroups and config.block_k >= warpgroups
    else f"block_m and block_k must be at least {warpgroups}, the block's"
    f" warpgroups, got {config.block_m} and {config.block_k}",
    simt.slabs_fit(config),
  )


def _warpgroups(config):
  return max(1, config.block_m * config.block_n // register_layouts.THREADS)


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C."""
  block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
  warpgroups = _warpgroups(config)
  # What one warpgroup owns of the block, and copies of a slab of A and B.
  rows, depth = block_m // warpgroups, block_k // warpgroups
  spread = register_layouts.element_per_thread
  layout = spread(rows, block_n, "columns")
  copy_a = spread(rows, block_k, "columns")
  copy_b = spread(depth, block_n, "columns")

  def accumulate(a_ref, b_ref, m0, n0, wg, a_s, b_s, loaded, computed):
    own_a, own_b = pl.ds(wg * rows, rows), pl.ds(wg * depth, depth)

    def slab(s, acc):
      k0 = s * block_k
      a_rows = pl.ds(m0 + wg * rows, rows)
      b_rows = pl.ds(k0 + wg * depth, depth)
      # Both loads are in flight before the first store waits for one.
      a_tile = simt.load(a_ref.at[a_rows, pl.ds(k0, block_k)], copy_a)
      b_tile = simt.load(b_ref.at[b_rows, pl.ds(n0, block_n)], copy_b)
      a_s[own_a] = a_tile
      b_s[own_b] = b_tile
      simt.sync(loaded)

      def step(k, acc):
        a_k = simt.load(a_s.at[own_a, k], layout.reduce(1))
        b_k = simt.load(b_s.at[k], layout.reduce(0))
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
    name="shared_memory",
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
  idea="tiles of A and B shared by a block",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=is_legal,
  kernel=kernel,
)
