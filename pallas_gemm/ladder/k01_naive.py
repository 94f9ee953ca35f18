"""Rung 1, naive: one CUDA thread computes one C[i][j].

Before it: nothing. This is the triple loop, with the two outer loops spread
over threads and the sum over k left to each of them.

The idea: thread (i, j) reads row i of A and column j of B from global memory
and adds up K products. Nothing is shared, nothing is kept: every FMA costs
two loads. And the threads are numbered the unlucky way: the 32 lanes of a
warp walk *rows* (mapping B of the classics), so that at each k

    A[i + lane][k]   32 addresses, K floats apart: 32 sectors of 32 bytes for
                     32 useful floats, an eighth of what is moved is used;
    B[k][j]          one address, broadcast to the warp;
    C[i + lane][j]   written once at the end, N floats apart.

Traffic: 2 loads of 4 bytes per FMA.

    intensity = 2 FLOP / 8 bytes = 0.25 FLOP/byte, whatever the size
    4096^3:     2 * 4096^3 * 4 bytes = 550 GB requested, 1.3e11 FLOP

16^3 in 4 x 4 blocks: a block asks for 16 outputs * 16 k * 2 = 512 values, of
which only 2 * 4 * 16 = 128 differ; all blocks together move 32,768 bytes.
Caches catch the repeats; what binds is the L1, which serves a warp's request
one 128-byte line a cycle, 33 lines a step here.

In Mosaic GPU: a Pallas thread is a warpgroup of 128 CUDA threads, and which
of them computes which element is a register layout (register_layouts.py):
here a 32 x 4 block, lanes along M, warps along N. The loop below is written
once for the warpgroup; each CUDA thread runs it on its own element as the
CUDA kernel of the same name does. `optimized=False` in `simt.load` is what
lets the strided access through: Mosaic GPU refuses it by default.

Source: the first kernel of every GEMM ladder, e.g. S. Boehm, "How to Optimize
a CUDA Matmul Kernel for cuBLAS-like Performance" (2022), kernel 1.
"""

from pallas_gemm.ladder import contract, k02_coalesced, simt

DEFAULT = contract.SimtConfig(block_m=32, block_n=4)


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C; the loop is rung 2's, the mapping is not."""
  return k02_coalesced.one_output_per_thread(
    a, b, c, problem, config, name="naive", walk="rows"
  )


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT32,
  idea="one thread one output, lanes walk rows",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=k02_coalesced.is_legal,
  kernel=kernel,
)
