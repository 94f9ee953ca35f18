"""Rung 8, double_buffering: copies overlap the arithmetic; the SIMT summit.

**Bottleneck before.** Rung 7 loads a slab, waits, computes, waits. Other blocks
fill the gaps in part, and copies by registers take issue slots from the FFMAs.
**Idea.** Never wait for a copy. TMA fetches whole tiles while earlier ones are
used, one instruction a tile, into a ring of slabs in shared memory; fragments
of kk + 1 are loaded before the FFMAs of kk. A warpgroup of its own, the loader,
copies, with few registers; two consumers of 128 x 128 outputs have most.
TMA can't transpose 4-byte words: the loader moves A's tile on, transposed.

**Loop.** 8a, the classic form, is rung 7's loop with a second buffer:
    a, b = load A's block (i, k + 1), B's block (k + 1, j)   # to registers
    for kk in range(8): acc += outer(a_s[k % 2, kk], b_s[k % 2, kk])
    a_s[(k + 1) % 2], b_s[(k + 1) % 2] = a.T, b

Rung 8, with barriers `full` and `empty` for each slot k % 2 of the ring:
    loader:    wait for empty; TMA B's block (k, j); A's block (i, k).T
    consumer:  16 times: load kk + 1 (the last: wait for full, load the next
               slab's first), multiply kk; release

**Traffic**, per output: global K/128 + K/256 = 3K/256 loads (rung 7: K/64), 43
FLOP/byte; 4096^3: 3.2 GB. Shared 3K/16 loads a thread; A is stored twice. Of
16 steps' issue slots 2,048 are FFMAs, 96 LDS.128, some 30 others: 94 % FFMA.
K and N are padded to 4 floats for TMA. Source: CUDA Programming Guide; CUTLASS.
"""

import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ladder import blocks, contract, legal
from pallas_gemm.ladder import register_layouts as layouts
from pallas_gemm.ladder.blocks import GMEM, SMEM, Specs, copy_in, window
from pallas_gemm.ladder.register_layouts import LANE, load, outer, zeros

CONSUMERS = 2
# 168 registers a thread of 3 warpgroups, dealt anew; the loader with 24: -12 %.
LOADER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# 3 stages -7 % (with 2, k % stages is an AND); slabs of 8 -8 %, of 32 -11 %.
DEFAULT = contract.SimtConfig(128, 256, 16, 16, 8, 4, stages=2, raster=8)
# Where a block has 99 KiB.
SMALL = contract.SimtConfig(64, 128, 16, 8, 4, 4, stages=2, raster=8)
BY_REGISTERS = contract.SimtConfig(128, 128, 8, 16, 8, 4, stages=2, raster=8)


def grid(problem, config):
  """Blocks of rows, blocks of columns, and a step for each slab of K."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  return pl.cdiv(problem.m, bm), pl.cdiv(problem.n, bn), pl.cdiv(problem.k, bk)


def specs(problem, config, memory=SMEM):
  """A step reads a tile of A and one of B, by TMA to shared memory."""
  bm, bn, bk = config.block_m, config.block_n, config.block_k
  a = plgpu.BlockSpec((bm, bk), lambda i, j, k: (i, k), memory_space=memory)
  b = plgpu.BlockSpec((bk, bn), lambda i, j, k: (k, j), memory_space=memory)
  c = plgpu.BlockSpec((bm, bn), lambda i, j, k: (i, j), memory_space=memory)
  return Specs(in_specs=(a, b, c) if problem.beta else (a, b), out_specs=c)


def default_config(problem):
  """`DEFAULT` where a block has room for it."""
  return SMALL if is_legal(DEFAULT, problem) else DEFAULT


def layout(config):
  """Rung 7's, its FFMAs 2 rows at a time: 53.9 TFLOP/s (1: 53.6, 4: 51.4)."""
  return layouts.warp_tile(config.thread_m, config.thread_n, rows_together=2)


def is_legal(config, problem):
  """None, or why `config` can't run."""
  (a, b, *_), c = specs(problem, config)
  need = blocks.shared_bytes((a, a, b), config.stages, 4)
  return legal.first(
    legal.vectors_fit(config, CONSUMERS, least_depth=16),
    legal.at_most("columns of a TMA tile", config.block_n, 256),
    legal.fits(need + blocks.shared_bytes((c,), 1, 4)),
  )


def kernel(operands, problem, config):
  """alpha * A @ B + beta * C."""
  *blocks_of_c, slabs = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config)
  (bm, bn), bk, stages = out_spec.block_shape, config.block_k, config.stages
  own, own_n = layout(config), bn // CONSUMERS

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_raw, a_s, b_s, c_s, landed, full, empty, c_landed = refs
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    i, j = plgpu.planar_snake(block, blocks_of_c, 1, config.raster)

    @pl.when(warpgroup == CONSUMERS)
    def _loader():
      plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

      def fetch_a(k):
        slot = lax.rem(k, stages)
        copy_in(a_spec, a_ref, a_raw.at[slot], landed.at[slot], i, j, k)

      for k in range(min(stages, slabs)):
        fetch_a(jnp.int32(k))

      def load_slab(k, _):
        slot = lax.rem(k, stages)

        @pl.when(k >= stages)
        def _():
          plgpu.barrier_wait(empty.at[slot])

        copy_in(b_spec, b_ref, b_s.at[slot], full.at[slot], i, j, k)
        plgpu.barrier_wait(landed.at[slot])
        a_tile = load(a_raw.at[slot], layouts.row_per_lane(bm))
        compat.store(a_s.at[slot].transpose((1, 0)), a_tile, optimized=False)

        @pl.when(k + stages < slabs)
        def _():
          fetch_a(k + stages)

        plgpu.barrier_arrive(full.at[slot])

      lax.fori_loop(0, slabs, load_slab, None)
      for k in range(max(0, slabs - stages), slabs):
        plgpu.barrier_wait(empty.at[k % stages])

    @pl.when(warpgroup < CONSUMERS)
    def _consumer():
      plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
      columns, c_slot = pl.ds(warpgroup * own_n, own_n), c_s.at[warpgroup]
      if problem.beta:  # C comes by the buffer that the result leaves by.
        c_block = window(c_spec[0], c_ref[0], i, j, 0).at[:, columns]
        plgpu.copy_gmem_to_smem(c_block, c_slot, c_landed.at[warpgroup])

      def fragments(slot, kk):
        a_k = load(a_s.at[slot, kk], own.reduce(1))
        return a_k, load(b_s.at[slot, kk, columns], own.reduce(0))

      def compute_slab(k, carry, is_last=False):
        acc, current = carry
        slot, following = lax.rem(k, stages), None
        for kk in range(bk):
          if kk + 1 < bk:
            following = fragments(slot, kk + 1)
          elif not is_last:
            next_slot = lax.rem(k + 1, stages)
            plgpu.barrier_wait(full.at[next_slot])
            following = fragments(next_slot, 0)
          acc += outer(*current, own)
          current = following
        plgpu.barrier_arrive(empty.at[slot])
        return acc, current

      plgpu.barrier_wait(full.at[0])
      carry = zeros(bm, own_n, own), fragments(0, 0)
      carry = lax.fori_loop(0, slabs - 1, compute_slab, carry)
      acc, _ = compute_slab(jnp.int32(slabs - 1), carry, is_last=True)
      result = problem.alpha * acc
      if problem.beta:
        plgpu.barrier_wait(c_landed.at[warpgroup])
        result += problem.beta * load(c_slot, own)
      compat.store(c_slot, result, optimized=False)
      plgpu.commit_smem()
      out_block = window(out_spec, out_ref, i, j, 0).at[:, columns]

      @pl.when(warpgroup == 0 if problem.n == own_n else True)
      def _():  # as wide as C it is copied as bytes: the second ends past C
        plgpu.copy_smem_to_gmem(c_slot, out_block)

      plgpu.wait_smem_to_gmem(0)

  return compat.kernel(
    thread_block,
    name="double_buffering",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    grid=(math.prod(blocks_of_c),),
    grid_names=("block",),
    num_threads=CONSUMERS + 1,
    scratch_types=(
      blocks.ring(a_spec, stages, jnp.float32),  # as TMA copies it
      plgpu.SMEM((stages, bk, bm), jnp.float32),  # transposed
      blocks.ring(b_spec, stages, jnp.float32),
      plgpu.SMEM((CONSUMERS, bm, own_n), jnp.float32),
      plgpu.Barrier(num_barriers=stages),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # TMA and the loader
      plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
      plgpu.Barrier(num_barriers=CONSUMERS),
    ),
    compiler_params=LANE,
  )(*operands)


def kernel_by_registers(operands, problem, config):
  """8a: the next slab waits in registers while this one is multiplied."""
  *blocks_of_c, slabs = grid(problem, config)
  (a_spec, b_spec, *c_spec), out_spec = specs(problem, config, GMEM)
  bm, bn, bk, stages = *out_spec.block_shape, config.block_k, config.stages
  own, copy_a = layout(config), layouts.row_per_lane(bm)
  copy_b = layouts.rows_of_vectors(bn)

  def thread_block(a_ref, b_ref, *refs):
    *c_ref, out_ref, a_s, b_s = refs
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    own_a = blocks.rows_of(a_spec, 1, warpgroup)  # as C's rows in rung 7
    i, j = plgpu.planar_snake(block, blocks_of_c, 1, config.raster)

    def fetch(k):
      a_tile = load(window(own_a, a_ref, i, j, k), copy_a)
      return a_tile, load(window(b_spec, b_ref, i, j, k), copy_b)

    def put(slot, a_tile, b_tile):
      compat.store(a_s.at[slot].transpose((1, 0)), a_tile, optimized=False)
      b_s[slot] = b_tile

    def slab(k, acc):
      following = fetch(lax.min(k + 1, slabs - 1))
      a_slab, b_slab = a_s.at[lax.rem(k, stages)], b_s.at[lax.rem(k, stages)]
      for kk in range(bk):
        a_k = load(a_slab.at[kk], own.reduce(1))
        acc += outer(a_k, load(b_slab.at[kk], own.reduce(0)), own)
      put(lax.rem(k + 1, stages), *following)
      return acc

    put(0, *fetch(0))
    acc = lax.fori_loop(0, slabs, slab, zeros(bm, bn, own))
    c = [load(window(c_spec[0], ref, i, j, 0), own) for ref in c_ref]
    result = contract.combine(acc, *c, problem=problem)
    compat.store(window(out_spec, out_ref, i, j, 0), result, optimized=False)

  return compat.kernel(
    thread_block,
    name="double_buffering_registers",
    out_type=jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32),
    grid=(math.prod(blocks_of_c),),
    grid_names=("block",),
    num_threads=1,
    scratch_types=(
      plgpu.SMEM((stages, bk, bm), jnp.float32),
      plgpu.SMEM((stages, bk, bn), jnp.float32),
    ),
    compiler_params=LANE,
  )(*operands)


_BY_REGISTERS = contract.make_rung(
  __name__,
  variant="a",
  name="double_buffering_registers",
  idea="a second buffer by registers, without TMA",
  dtypes=contract.FLOAT32,
  default_config=lambda _: BY_REGISTERS,
  is_legal=lambda c, _: legal.vectors_fit(c, 1, 512 // c.block_m),
  specs=functools.partial(specs, memory=GMEM),
  kernel=kernel_by_registers,
)
RUNG = contract.make_rung(
  __name__,
  idea="TMA ring, fragments prefetched",
  needs=("tma", "mbarrier", "setmaxnreg"),
  dtypes=contract.FLOAT32,
  warpgroups=lambda config: CONSUMERS,
  padding=lambda problem, config: (1, 4, 4),
  variants=(_BY_REGISTERS,),
)
