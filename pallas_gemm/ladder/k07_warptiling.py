"""Rung 7, warptiling: block -> warp -> thread, fragments in quadrants.

Before it: rung 6 lays its threads out as a line of tiles across the block. A
warp's outputs are then a strip of 16 x 128: it reads 144 values of shared
memory a step for 2,048 outputs, and because each lane's columns are 8 apart,
lanes meet in the same banks.

The idea: put a level between block and thread. The block is split into 2 x 2
warp tiles, as square as can be, and a thread's outputs within the warp tile
into 4 x 4 quadrants, 16 rows and 32 columns apart. A warp then reads
64 + 64 values a step for 64 x 64 outputs; the lanes of one load read one
solid run of memory, without bank conflicts; lanes of the same row or column
read the same word, which is broadcast. With fewer words to read, a thread
can hold 16 x 8 outputs instead of 8 x 8.

Traffic, per output, with BM = BN = 128, TM = 16, TN = 8:

    global   K/64 loads (rung 6: 3K/128)
    shared   K * (TM + TN) / (TM * TN) = 3K/16 a thread (rung 6: K/4),
             K * (64 + 64) / (64 * 64) = K/32 different words a warp
    FMAs per load of 16 bytes: 128 / 6 = 21 (rung 6: 64 / 4 = 16)
    intensity = 32 FLOP/byte. 4096^3: 4.3 GB.

In Mosaic GPU: the layout is all that changes (register_layouts.warp_tile);
the loop is rung 6's `block_tile`. A's tile is read a row a lane, which suits
its transposing store (it becomes `stmatrix`, STSM, four words a lane) and
makes the order of the blocks matter: they go down strips 8 blocks wide. The
128 accumulators leave room for two blocks on an SM; while one waits for its
slab, the other computes. The slab is 8 deep: at 16 the unrolled loop is 35 KB
of instructions.

Source: S. Boehm (2022), kernel 10; quadrant fragments after NVIDIA's CUTLASS
("Efficient GEMM in CUDA") and S. Gray's maxas SGEMM.
"""

from pallas_gemm.ladder import contract, k06_vectorized, register_layouts, simt

# 8 x 8 outputs a thread and slabs of 16: 44.0 TFLOP/s; 16 x 8 and 8: 47.1
# (4096^3 on H200). raster 1 -> 8: 43.8 -> 47.1.
DEFAULT = contract.SimtConfig(
  block_m=128,
  block_n=128,
  block_k=8,
  thread_m=16,
  thread_n=8,
  vector=4,
  raster=8,
)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  warps_k = max(1, register_layouts.THREADS // config.block_m)
  return simt.first(
    k06_vectorized.tiles_are_legal(config),
    None
    if config.block_k % (4 * warps_k) == 0
    else f"block_k must be a multiple of {4 * warps_k} at block_m ="
    f" {config.block_m}, got {config.block_k}",
  )


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C."""
  layout = register_layouts.warp_tile(config.thread_m, config.thread_n)
  return k06_vectorized.block_tile(
    a,
    b,
    c,
    problem,
    config,
    name="warptiling",
    layout=layout,
    copy_a=register_layouts.row_per_lane(config.block_m),
  )


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT32,
  idea="block, warp, thread; no bank conflicts",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=is_legal,
  kernel=kernel,
)
