"""Rung 6, vectorized: 128-bit loads, and A transposed on its way to SMEM.

Before it: rung 5 moves words of 4 bytes. A load instruction takes an issue
slot that an FFMA could have had, whatever its width.

The idea: move 16 bytes at a time. From global memory a thread takes 4
neighbouring floats of a row of A or B. From shared memory it takes its
fragments 4 floats at a time, which for A needs 8 *rows* of one k side by
side: so A is stored transposed, [k][m].

Traffic: byte for byte rung 5's (the slab is 16 deep instead of 8, which
changes no total). Instructions, per thread and k, for 64 FMAs:

    shared   4 loads of 16 bytes (rung 5: 8 words of A and 2 LDSM for B)
    global   (64 + 128) / 128 / 4 = 0.4 loads (rung 5: 1.5)

In Mosaic GPU: a layout whose `vector` dimension has 4 elements makes a load
128 bits wide; global references are generic pointers, so the instruction in
SASS is LD.E.128, not LDG.E.128. The transpose is a store through
`ref.transpose`, word by word (a register vector can't be torn apart, so the
tile of A is held in a layout of single words whose 4 neighbours the compiler
fuses to one load). The k loop is unrolled from this rung on: with addresses
known, LLVM and ptxas pair the loads with the FFMAs of the step before.

Source: S. Boehm (2022), kernel 6.
"""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import contract, register_layouts, simt

DEFAULT = contract.SimtConfig(
  block_m=64, block_n=128, block_k=16, thread_m=8, thread_n=8, vector=4
)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  return simt.first(
    tiles_are_legal(config),
    None
    if config.block_m % 64 == 0 and config.block_k % 8 == 0
    else "a slab of A must be a multiple of 64 x 8 to be dealt to 128"
    f" threads, got {config.block_m} x {config.block_k}",
  )


def tiles_are_legal(config):
  """What rungs 6 and 7 both ask of a config; a reason or None."""
  slab_b = config.block_k * config.block_n
  return simt.first(
    simt.powers_of_two(config, "thread_m", "thread_n", "block_k"),
    simt.fixed(
      config,
      block_m=8 * config.thread_m,
      block_n=16 * config.thread_n,
      vector=4,
      stages=1,
    ),
    None
    if min(config.thread_m, config.thread_n) >= 4
    else "thread_m and thread_n must be at least 4, a vector's length",
    simt.at_most("outputs a thread", config.thread_m * config.thread_n, 128),
    simt.at_most("block_k", config.block_k, 32),
    None
    if slab_b % (4 * register_layouts.THREADS) == 0
    else f"block_k * block_n must be a multiple of 512, got {slab_b}",
  )


def block_tile(a, b, c, problem, config, *, name, layout, copy_a):
  """Rungs 6 and 7: they differ in who owns which outputs, and copies what."""
  block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
  copy_b = register_layouts.rows_of_vectors(block_n)

  def accumulate(a_ref, b_ref, m0, n0, _, a_s, b_s):
    rows, columns = pl.ds(m0, block_m), pl.ds(n0, block_n)

    def slab(s, acc):
      k0 = pl.ds(s * block_k, block_k)
      a_tile = simt.load(a_ref.at[rows, k0], copy_a)
      b_tile = simt.load(b_ref.at[k0, columns], copy_b)
      compat.store(a_s.transpose((1, 0)), a_tile, optimized=False)
      b_s[...] = b_tile
      for k in range(block_k):
        a_k = simt.load(a_s.at[k], layout.reduce(1))
        b_k = simt.load(b_s.at[k], layout.reduce(0))
        acc += register_layouts.outer(a_k, b_k, layout)
      return acc

    acc = simt.zeros(block_m, block_n, layout)
    return lax.fori_loop(0, a_ref.shape[1] // block_k, slab, acc)

  return simt.gemm(
    accumulate,
    a,
    b,
    c,
    problem,
    config,
    name=name,
    layout=layout,
    scratch_types=(
      plgpu.SMEM((block_k, block_m), jnp.float32),
      plgpu.SMEM((block_k, block_n), jnp.float32),
    ),
  )


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C."""
  layout = register_layouts.contiguous_tile(config.thread_m, config.thread_n)
  return block_tile(
    a,
    b,
    c,
    problem,
    config,
    name="vectorized",
    layout=layout,
    copy_a=register_layouts.words_of_row_vectors(),
  )


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT32,
  idea="128-bit accesses, A transposed in SMEM",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=is_legal,
  kernel=kernel,
)
