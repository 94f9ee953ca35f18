"""Rung 2, coalesced: the same loop, but lanes walk columns.

Before it: rung 1's warp touches 32 lines of A at each k and uses 4 bytes of
each.

The idea: number the threads the other way (mapping A of the classics): the
32 lanes of a warp walk *columns*. The arithmetic, the loads per thread and
the bytes requested stay as they are; what changes is which addresses meet in
one request. At each k a warp now touches

    A[i][k]          one address, broadcast;
    B[k][j + lane]   32 neighbours, one line of 128 bytes, all of it used;
    C[i][j + lane]   the same, once at the end.

Traffic: 2 loads per FMA as before, 0.25 FLOP/byte requested. But a request
for B is 4 sectors where one for A was 32, and a step is 2 lines of L1 instead
of 33: the largest gain of any single step on this ladder.

In Mosaic GPU: the layout is 4 x 32 instead of 32 x 4 and the lanes are dealt
to the last dimension. Nothing else differs from rung 1: both call
`one_output_per_thread`.

Source: as rung 1, kernel 2 ("global memory coalescing").
"""

from jax import lax
from jax.experimental import pallas as pl

from pallas_gemm.ladder import contract, register_layouts, simt

DEFAULT = contract.SimtConfig(block_m=4, block_n=32)


def is_legal(config, problem):
  """None, or why `config` can't run (for rungs 1 and 2)."""
  del problem  # Any size is padded to whole blocks.
  return simt.first(
    simt.powers_of_two(config, "block_m", "block_n"),
    simt.fixed(config, thread_m=1, thread_n=1, vector=1, stages=1),
    simt.at_most("outputs a block", config.block_m * config.block_n, 4096),
  )


def one_output_per_thread(a, b, c, problem, config, *, name, walk):
  """The loop of rungs 1 and 2; `walk` says what consecutive lanes walk."""
  block_m, block_n = config.block_m, config.block_n
  layout = register_layouts.element_per_thread(block_m, block_n, walk)

  def accumulate(a_ref, b_ref, m0, n0, _):
    rows, columns = pl.ds(m0, block_m), pl.ds(n0, block_n)

    def step(k, acc):
      a_k = simt.load(a_ref.at[rows, k], layout.reduce(1))
      b_k = simt.load(b_ref.at[k, columns], layout.reduce(0))
      return acc + register_layouts.outer(a_k, b_k, layout)

    acc = simt.zeros(block_m, block_n, layout)
    return lax.fori_loop(0, a_ref.shape[1], step, acc)

  return simt.gemm(
    accumulate, a, b, c, problem, config, name=name, layout=layout
  )


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C."""
  return one_output_per_thread(
    a, b, c, problem, config, name="coalesced", walk="columns"
  )


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT32,
  idea="the same loop, lanes walk columns",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=is_legal,
  kernel=kernel,
)
