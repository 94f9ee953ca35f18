"""What a block of the Hopper kernels does; see `sm90_dense`, `sm90_ragged`.

From the bottom up: `body` deals out work to the warpgroups; one warp loads
(`load_work_tile`), the consumers multiply (`multiply`) and store
(`sm90_stores`), and where groups have no rows another warp stores zeros
(`fill_with_zeros`). A work tile is one tile of the result, or a part of K of
one; `sm90_schedule` says which.
"""

import functools
import itertools
import math

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels import sm90_schedule as schedules
from pallas_gemm.kernels.problem import Config, Problem
from pallas_gemm.kernels.sm90_epilogue import Epilogue
from pallas_gemm.kernels.sm90_stores import Stores

# wgmmas in an unrolled lap of the ring; the descriptors of more would spill.
_UNROLLED_WGMMAS = 16
# A consumer's accumulators up to which the descriptors of a lap have room
# beside them and results that wait to be stored.
_MOST_ACCUMULATORS_IF_UNROLLED = 64 * 128


def body(
  *refs,
  epilogue,
  problem: Problem,
  config: Config,
  factors=(),
  a_ring,
  b_rings,
  staging,
  full,
  empty=None,
  bias=None,
  bias_loaded=None,
  c=None,
  c_loaded=None,
  partial_staging=None,
  zeros=None,
):
  """What a block does: one warp loads, `consumers` warpgroups multiply.

  `factors` names the arguments of `epilogue` that lie in global memory.
  """
  p, cfg = problem, config
  if c_loaded is not None and c is None:
    c = staging[0]  # see `plan.c_in_place`
  schedule_refs, refs = _split(refs, plan.schedule_arrays(p))
  (a_ref, *b_refs), refs = _split(refs, 1 + len(b_rings))
  edge_refs, refs = _split(refs, 2 if p.ragged == "k" else 0)
  factor_refs, refs = _split(refs, len(factors))
  bias_ref, *refs = refs if bias is not None else (None, *refs)
  c_ref, *out_refs = refs if c is not None else (None, *refs)
  parts = len(b_rings) if cfg.tail_columns else 0
  out_refs, part_refs = _split(out_refs, len(out_refs) - parts)
  stages, consumers, bk = cfg.stages, cfg.consumers, cfg.block_k
  pingpong = plan.pingpong_consumers(cfg)
  cluster = lax.axis_index("cluster")
  warpgroup = lax.axis_index("warpgroup")

  def for_each_work_tile(visit, slot):
    """slot = visit(work_tile, slot) for this block's work."""
    schedule = schedules.of(p, cfg, schedule_refs)
    return schedule.for_each(cluster, plan.clusters(p, cfg), visit, slot)

  def for_each_own_work_tile(visit, state):
    """The same for the work tiles of one of the consumers that ping-pong."""
    schedule = schedules.of(p, cfg, schedule_refs)
    step = plan.clusters(p, cfg)
    first = cluster + warpgroup * step
    return schedule.for_each(first, pingpong * step, visit, state)

  def load_work_tile(work_tile, slot):
    shared_a = "cluster_n" if cfg.cluster_n > 1 else None
    shared_b = "cluster_m" if cfg.cluster_m > 1 else None

    def copy(a_ref, b_refs, start, slot):
      slab = pl.ds(start, bk)

      def copy_a(size):
        at = pl.ds(work_tile.row, size), slab
        tile = pl.ds(0, size), pl.ds(0, bk)
        if p.transpose_a:
          at, tile = at[::-1], tile[::-1]
        plgpu.copy_gmem_to_smem(
          schedules.window(a_ref, work_tile.a, at),
          a_ring.at[slot, *tile],
          full.at[slot],
          collective_axes=shared_a,
        )

      def copy_b(size):
        at = slab, pl.ds(work_tile.column, size)
        tile = pl.ds(0, bk), pl.ds(0, size)
        if p.transpose_b:
          at, tile = at[::-1], tile[::-1]
        for b_ref, b_ring in zip(b_refs, b_rings):
          plgpu.copy_gmem_to_smem(
            schedules.window(b_ref, work_tile.b, at),
            b_ring.at[slot, *tile],
            full.at[slot],
            collective_axes=shared_b,
          )

      _copy_loaded(copy_a, plan.loaded_rows(p, cfg), work_tile.row)
      _copy_loaded(copy_b, plan.loaded_columns(p, cfg), work_tile.column)

    def load(step, slot, _):
      if empty is not None:
        plgpu.barrier_wait(empty.at[slot])
      if not edge_refs:
        copy(a_ref, b_refs, work_tile.start + step * bk, slot)
        return

      @pl.when(step < work_tile.whole)
      def _():
        copy(a_ref, b_refs, work_tile.start + step * bk, slot)

      @pl.when(step >= work_tile.whole)
      def _():
        copy(edge_refs[0], edge_refs[1:], (step - work_tile.whole) * bk, slot)

    _, following = _for_each_step(load, slot, work_tile.steps, p, cfg)
    return slot if following is None else following

  def fill_with_zeros():
    """Stores the results of groups along K that have no rows.

    By a warp that nothing waits for, two subtiles at a time where products take
    longer: writes in one go would hold up their loads. Of 32 groups one with
    all rows: 988 -> 868 us on an H200.
    """
    subtile = jnp.zeros(zeros.shape, zeros.dtype)
    zeros[...] = plgpu.layout_cast(subtile, plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    (out_ref,) = out_refs
    spare = schedule_refs[1][schedules.Facts.spare]
    rows, columns = zeros.shape

    def fill(work_tile):
      places = itertools.product(
        range(0, cfg.block_m, rows), range(0, cfg.block_n, columns)
      )
      for i, j in places:
        at = (
          pl.ds(work_tile.row + i, rows),
          pl.ds(work_tile.column + j, columns),
        )
        plgpu.copy_smem_to_gmem(
          zeros, schedules.window(out_ref, work_tile.out, at)
        )

        @pl.when(spare != 0)
        def _():
          plgpu.wait_smem_to_gmem(1)

    def fill_all():
      schedules.for_each_zero(p, cfg, schedule_refs, cluster, fill)
      plgpu.wait_smem_to_gmem(0)

    _on_one_warp(fill_all, 1)

  @pl.when(warpgroup == consumers)
  def _produce():
    plgpu.set_max_registers(plan.REGISTERS[consumers][0], action="decrease")

    def drain(slot):  # leave no release unseen
      for _ in range(stages if empty is not None else 0):
        plgpu.barrier_wait(empty.at[slot])
        slot = lax.select(slot == stages - 1, jnp.int32(0), slot + 1)

    def for_pingpong(load):
      """The same for a tuple of slots, of which the first is to be filled."""

      def load_next(work_tile, slots):
        return (*slots[1:], load(work_tile, slots[0]))

      return load_next

    first_slots = tuple(jnp.int32(i) for i in range(pingpong))
    if not p.ragged:

      @_on_one_warp
      def _():
        slots = for_each_work_tile(for_pingpong(load_work_tile), first_slots)
        drain(slots[0])

      return

    # What is known of a group's rows can be said to Mosaic GPU by whole
    # warpgroups alone, so here it is the slabs of a work tile that one warp
    # loads.
    def load(work_tile, slot):
      _on_one_warp(lambda: load_work_tile(work_tile, slot))
      return lax.rem(slot + pingpong * work_tile.steps, stages)

    if zeros is not None:
      fill_with_zeros()
    slots = for_each_work_tile(for_pingpong(load), first_slots)
    _on_one_warp(lambda: drain(slots[0]))

  def make_stores():
    """The consumer's `Stores`; reads the factors, for all of its work tiles.

    Memory answers while the first slab is on its way.
    """
    read = {name: ref[0] for name, ref in zip(factors, factor_refs)}
    share = {"problem": p, "config": cfg, "warpgroup": warpgroup}
    return Stores(
      **share,
      epilogue=Epilogue(
        **share,
        compute=functools.partial(epilogue, **read),
        bias_ref=bias_ref,
        bias=bias,
        bias_loaded=bias_loaded,
        c_ref=c_ref,
        c=c,
        c_loaded=c_loaded,
      ),
      out_refs=out_refs,
      part_refs=part_refs,
      staging=staging,
      partial_staging=partial_staging,
    )

  def release(slot, **when):
    if empty is not None:
      plgpu.barrier_arrive(empty.at[slot], **when)

  def multiply(stores, work_tile, slot, beside, *accumulators):
    """A work tile's accumulators, and the next slot as of `_for_each_step`.

    beside(slab) is called once, while the tensor cores have that slab or when
    there is no such slab, for the first `stores.slabs`.
    """

    def step_(step, slot, before):
      plgpu.barrier_wait(full.at[slot])
      a = _a_operand(a_ring.at[slot], warpgroup, p, cfg)
      for acc, b_ring in zip(accumulators, b_rings):
        plgpu.wgmma(acc, a, _b_operand(b_ring.at[slot], warpgroup, p, cfg))

      def release_before():
        plgpu.wgmma_wait(len(accumulators))  # this slab runs on
        release(before, predicate=step > 0)

      def go_beside():
        for slab in range(stores.slabs):
          pl.when(step == slab)(functools.partial(beside, slab))

      # Loads wait for the release: 16384 x 2048 x 512 with C 61.1 -> 57.0 us
      # (H200). Subtiles of float32 take longer, and before it there is more to
      # go beside: 4096 x 14336 x 4096 599.9 us, after it 609.6.
      in_order = (release_before, go_beside)
      for act in in_order[::-1] if p.out_dtype == "float32" else in_order:
        act()

    last, following = _for_each_step(step_, slot, work_tile.steps, p, cfg)
    for slab in range(1, stores.slabs):
      pl.when(work_tile.steps <= slab)(functools.partial(beside, slab))
    plgpu.wgmma_wait(0)
    release(last)
    return [acc[...] for acc in accumulators], following

  def ping_pong(stores):
    """What each of the `pingpong` consumers does: it has work tiles of its own.

    So has it slots of the ring, every `pingpong`-th, of whose barriers it thus
    sees all phases.
    """
    for slot in range(0, stages, pingpong):  # the ring starts empty
      release(slot + warpgroup)

    def compute_work_tile(work_tile, slot):
      stores.begin(work_tile, None)
      beside = functools.partial(
        stores.beside, work_tile=work_tile, pending=None
      )
      accumulator = plgpu.ACC(plan.share(cfg), jnp.float32)
      accumulators, slot = pl.run_scoped(
        functools.partial(multiply, stores, work_tile, slot, beside),
        *[accumulator] * len(b_rings),
      )
      stores.finish(work_tile, accumulators)
      return slot

    for_each_own_work_tile(compute_work_tile, warpgroup)
    stores.end(None)

  @pl.when(warpgroup < consumers)
  def _consume():
    plgpu.set_max_registers(plan.REGISTERS[consumers][1], action="increase")
    stores = make_stores()
    if pingpong > 1:
      ping_pong(stores)
      return
    for slot in range(stages):  # the ring starts empty
      release(slot)

    def compute_work_tile(work_tile, state):
      slot, pending = state
      stores.begin(work_tile, pending)
      beside = functools.partial(
        stores.beside, work_tile=work_tile, pending=pending
      )
      accumulator = plgpu.ACC(plan.share(cfg), jnp.float32)
      accumulators, following = pl.run_scoped(
        functools.partial(multiply, stores, work_tile, slot, beside),
        *[accumulator] * len(b_rings),
      )
      slot = slot if following is None else following
      return slot, stores.finish(work_tile, accumulators)

    state = for_each_work_tile(
      compute_work_tile, (jnp.int32(0), stores.nothing())
    )
    stores.end(state[1])


def _on_one_warp(visit, number: int = 0) -> None:
  """Calls `visit` on one warp of a warpgroup, and does not wait for it."""

  @plgpu.warp_map
  def _(warp):
    @pl.when(warp == number)
    def _():
      visit()


def _copy_loaded(copy, extent: plan.Extent, start) -> None:
  """copy(how much), of the tile that starts there."""
  if extent.whole == extent.last:
    return copy(extent.whole)
  pl.when(start < extent.start)(lambda: copy(extent.whole))
  pl.when(start >= extent.start)(lambda: copy(extent.last))


def _for_each_step(visit, slot, steps, problem: Problem, config: Config):
  """visit(step, slot, slot before) for a work tile's slabs, from `slot` on.

  Where a work tile is whole laps of the ring, slots are Python numbers and
  wgmma's descriptors are worked out before the loop: less than half the
  instructions (rung 12).

  Returns:
    The slot of the last slab, and that of the next tile's first; None if it is
    the slot that this tile's first had. (With one work tile a block that is a
    constant, which Mosaic GPU does not let out of a scope.)
  """
  stages = config.stages
  if _is_whole_laps(problem, config):

    def lap(i, _):
      for s in range(stages):
        visit(i * stages + s, s, (s - 1) % stages)

    laps = steps // stages if isinstance(steps, int) else lax.div(steps, stages)
    lax.fori_loop(0, laps, lap, None)
    return stages - 1, None

  def iteration(step, slots):
    before, slot = slots
    visit(step, slot, before)
    return slot, _next_slot(slot, config)

  return lax.fori_loop(0, steps, iteration, (slot, slot))


def _is_whole_laps(problem: Problem, config: Config) -> bool:
  """Whether work tiles are whole laps of the ring that are worth unrolling."""
  pingpong = plan.pingpong_consumers(config) > 1
  if problem.ragged == "k" or config.tail_columns or pingpong:
    return False  # how many slabs there are differs from work tile to work tile
  if plan.defers_stores(problem, config):
    accumulators = math.prod(plan.share(config))
    if accumulators > _MOST_ACCUMULATORS_IF_UNROLLED:
      return False
  steps = plan.slabs_of_a_work_tile(problem, config)
  unrolled = plan.lap(config, problem) <= _UNROLLED_WGMMAS
  return steps % config.stages == 0 and unrolled


def _a_operand(tile, consumer, problem: Problem, config: Config):
  """The rows of A's tile that a consumer multiplies, as [rows, block_k]."""
  rows, _ = plan.share(config)
  window = pl.ds(consumer * rows if config.split == "m" else 0, rows)
  if problem.transpose_a:
    return tile.at[:, window].transpose((1, 0))
  return tile.at[window, :]


def _b_operand(tile, consumer, problem: Problem, config: Config):
  """The columns of B's tile that a consumer multiplies."""
  _, columns = plan.share(config)
  window = pl.ds(consumer * columns if config.split == "n" else 0, columns)
  if problem.transpose_b:
    return tile.at[window, :].transpose((1, 0))
  return tile.at[:, window]


def _split(items, count: int):
  """The first items, and the others."""
  return items[:count], items[count:]


def _next_slot(slot, config: Config):
  """The next slot of the ring, or of a consumer's part of it.

  By a select, where a remainder would be a division.
  """
  pingpong = plan.pingpong_consumers(config)
  if pingpong == 1:
    return lax.select(slot == config.stages - 1, jnp.int32(0), slot + 1)
  following = slot + pingpong
  wrapped = following - config.stages
  return lax.select(wrapped >= 0, wrapped, following)
