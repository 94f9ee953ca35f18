"""Rung 8, double_buffering: copies run beside the arithmetic; the SIMT summit.

Before it: rung 7 loads a slab, waits, computes, waits. Other blocks on the
SM fill the gaps only in part, and computing a copy's addresses and moving it
through registers takes issue slots from the FFMAs.

The idea: never wait for a copy, at any level.

  global -> shared     TMA fetches whole tiles while earlier ones are used: a
                       ring of `stages` slabs. One instruction moves a tile;
                       rows and columns past the edge arrive as zeros.
  shared -> registers  the fragments of step k + 1 are loaded before the
                       FFMAs of step k, across the slab boundary too: the
                       loop carries them.
  registers -> global  the block leaves through shared memory by TMA, which
                       also drops what lies past the edge.

The copying is given to a warpgroup of its own, the loader, which has few
registers and leaves the rest to two consumers of 128 x 128 outputs, 16 x 8 a
thread. TMA can't transpose 4-byte words, so the loader also does what rungs
6 and 7 did on the way: it takes A's tile out of the buffer where TMA put it
and stores it transposed into the ring.

Traffic, per output, with BM = 128, BN = 256:

    global   K/128 + K/256 = 3K/256 loads (rung 7: K/64)
    shared   3K/16 loads a thread as in rung 7; A passes through twice, which
             adds 2 * K/256
    intensity = 43 FLOP/byte. 4096^3: 3.2 GB.

    issue slots: 2,048 FFMAs, 96 LDS.128 and some 30 others per 16 steps,
    94 % FFMA at best; 64 FFMAs for 4 LDS.128 (8 x 8 a thread) would be
    capped at 94 % before any other instruction.

In Mosaic GPU: TMA is `plgpu.copy_gmem_to_smem` with a barrier that counts
its bytes, the loader is a Pallas thread, and `set_max_registers` moves
registers between the two kinds. A CUDA kernel of this name on older chips
uses cp.async or plain loads into a second buffer; with plain loads the step
often loses speed, since it buys overlap with registers.

Edges: nothing is padded but row strides that TMA refuses: K and N are padded
to multiples of 4 floats (16 bytes) if they are none, a copy of the operands
that need it.

Source: NVIDIA, CUDA C++ Programming Guide, "Tensor Memory Access"; software
pipelining after CUTLASS ("Efficient GEMM in CUDA").
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ladder import contract, register_layouts, simt

CONSUMERS = 2
# 3 warpgroups start with 168 registers a thread; 40 + 2 * 232 = 504 = 3 * 168.
# With 24 for the loader its transpose spills: 45.9 instead of 51.9 TFLOP/s.
LOADER_REGISTERS, CONSUMER_REGISTERS = 40, 232

# Two stages are enough and three are slower (48.2 against 51.9 TFLOP/s): the
# ring's slot is s % stages, an AND only for powers of two. block_k 8 costs
# more barriers (47.6), 32 outgrows the instruction cache (46.2).
DEFAULT = contract.SimtConfig(
  block_m=128,
  block_n=256,
  block_k=16,
  thread_m=16,
  thread_n=8,
  vector=4,
  stages=2,
  raster=8,
)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  del problem
  return simt.first(
    simt.powers_of_two(config, "thread_m", "thread_n", "stages"),
    simt.fixed(
      config,
      block_m=8 * config.thread_m,
      block_n=16 * config.thread_n * CONSUMERS,
      vector=4,
    ),
    None
    if min(config.thread_m, config.thread_n) >= 4
    else "thread_m and thread_n must be at least 4, a vector's length",
    simt.at_most("outputs a thread", config.thread_m * config.thread_n, 128),
    simt.at_most("columns of a TMA tile", config.block_n, 256),
    None
    if config.block_k % 16 == 0
    else f"block_k must be a multiple of 16, got {config.block_k}",
    simt.at_most(
      "bytes of shared memory",
      _shared_bytes(config),
      hardware.current().shared_bytes_per_block,
    ),
  )


def _shared_bytes(config):
  slab = config.block_k * (2 * config.block_m + config.block_n)
  return 4 * (config.stages * slab + config.block_m * config.block_n)


def kernel(a, b, c, problem, config):
  """alpha * A @ B + beta * C."""
  return contract.padded(
    lambda a, b, c: _launch(a, b, c, problem, config),
    a,
    b,
    c,
    multiple_m=1,
    multiple_n=4,
    multiple_k=4,
  )


def _launch(a, b, c, problem, config):
  block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
  stages = config.stages
  (m, k), n = a.shape, b.shape[1]
  own_n = block_n // CONSUMERS
  blocks = contract.cdiv(m, block_m), contract.cdiv(n, block_n)
  slabs = contract.cdiv(k, block_k)
  # Finishing two rows of a quadrant before the next quadrant orders the
  # FFMAs so that fewer wait for a register bank: 53.9 TFLOP/s, 53.6 with one
  # row, 51.4 with four.
  layout = register_layouts.warp_tile(
    config.thread_m, config.thread_n, rows_together=2
  )
  transpose = register_layouts.row_per_lane(block_m)

  def body(a_ref, b_ref, *refs):
    c_ref, (out_ref, *scratch) = (
      (None, refs) if c is None else (refs[0], refs[1:])
    )
    a_raw, a_s, b_s, out_s, landed, full, empty, c_landed = scratch
    i, j = simt.block_at(lax.axis_index("block"), blocks, config.raster)
    wg = lax.axis_index("warpgroup")

    @pl.when(wg == CONSUMERS)
    def _loader():
      plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

      def fetch_a(s):
        slot = lax.rem(s, stages)
        tile = pl.ds(i * block_m, block_m), pl.ds(s * block_k, block_k)
        plgpu.copy_gmem_to_smem(
          a_ref.at[*tile], a_raw.at[slot], landed.at[slot]
        )

      for s in range(min(stages, slabs)):
        fetch_a(jnp.int32(s))

      def load_slab(s, _):
        slot = lax.rem(s, stages)

        @pl.when(s >= stages)
        def _():
          plgpu.barrier_wait(empty.at[slot])

        tile = pl.ds(s * block_k, block_k), pl.ds(j * block_n, block_n)
        plgpu.copy_gmem_to_smem(b_ref.at[*tile], b_s.at[slot], full.at[slot])
        plgpu.barrier_wait(landed.at[slot])
        a_tile = simt.load(a_raw.at[slot], transpose)
        compat.store(a_s.at[slot].transpose((1, 0)), a_tile, optimized=False)

        @pl.when(s + stages < slabs)
        def _():
          fetch_a(s + stages)

        plgpu.barrier_arrive(full.at[slot])
        return _

      lax.fori_loop(0, slabs, load_slab, None)
      for s in range(max(0, slabs - stages), slabs):
        plgpu.barrier_wait(empty.at[s % stages])

    @pl.when(wg < CONSUMERS)
    def _consumer():
      plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
      columns = pl.ds(wg * own_n, own_n)
      out_tile = (
        pl.ds(i * block_m, block_m),
        pl.ds(j * block_n + wg * own_n, own_n),
      )
      if c_ref is not None:
        # C comes while the product is formed, into the buffer it leaves by.
        plgpu.copy_gmem_to_smem(
          c_ref.at[*out_tile], out_s.at[wg], c_landed.at[wg]
        )

      def fragments(slot, k):
        return (
          simt.load(a_s.at[slot, k], layout.reduce(1)),
          simt.load(b_s.at[slot, k, columns], layout.reduce(0)),
        )

      def compute_slab(s, carry, is_last=False):
        acc, current = carry
        slot = lax.rem(s, stages)
        for k in range(block_k):
          following = None
          if k + 1 < block_k:
            following = fragments(slot, k + 1)
          elif not is_last:
            next_slot = lax.rem(s + 1, stages)
            plgpu.barrier_wait(full.at[next_slot])
            following = fragments(next_slot, 0)
          acc += register_layouts.outer(*current, layout)
          current = following
        plgpu.barrier_arrive(empty.at[slot])
        return acc, current

      plgpu.barrier_wait(full.at[0])
      carry = simt.zeros(block_m, own_n, layout), fragments(0, 0)
      carry = lax.fori_loop(0, slabs - 1, compute_slab, carry)
      acc, _ = compute_slab(jnp.int32(slabs - 1), carry, is_last=True)

      c_tile = None
      if c_ref is not None:
        plgpu.barrier_wait(c_landed.at[wg])
        c_tile = simt.load(out_s.at[wg], layout)
      result = contract.combine(acc, c_tile, problem)
      compat.store(out_s.at[wg], result, optimized=False)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(out_s.at[wg], out_ref.at[*out_tile])
      plgpu.wait_smem_to_gmem(0)

  return compat.kernel(
    body,
    name="double_buffering",
    out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
    grid=(blocks[0] * blocks[1],),
    grid_names=("block",),
    num_threads=CONSUMERS + 1,
    thread_name="warpgroup",
    scratch_types=(
      plgpu.SMEM((stages, block_m, block_k), jnp.float32),
      plgpu.SMEM((stages, block_k, block_m), jnp.float32),
      plgpu.SMEM((stages, block_k, block_n), jnp.float32),
      plgpu.SMEM((CONSUMERS, block_m, own_n), jnp.float32),
      plgpu.Barrier(num_arrivals=1, num_barriers=stages),
      # TMA's B and the loader's A.
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
      plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
    ),
    compiler_params=simt.LANE,
  )(*[x for x in (a, b, c) if x is not None])


RUNG = contract.make_rung(
  __name__,
  dtypes=contract.FLOAT32,
  idea="TMA ring, fragments prefetched",
  config_type=contract.SimtConfig,
  default_config=simt.default(DEFAULT),
  is_legal=is_legal,
  kernel=kernel,
)
