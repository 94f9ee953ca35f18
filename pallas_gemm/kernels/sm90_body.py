"""What a block of the Hopper kernels does; see `sm90_dense`, `sm90_ragged`.

From the bottom up: `body` deals out work to the warpgroups; one warp loads
(`load_unit`), the consumers multiply (`multiply`) and store (`store_tiles`;
`store_rows` where TMA can't; `store_first_rows` where a group ends inside the
tile). A unit of work is a tile of the result; `sm90_schedule` says which.

Every barrier among the threads of a warpgroup is explicit: `commit_smem` and
`wait_smem_to_gmem` hold one each.
"""

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels import sm90_schedule as schedules
from pallas_gemm.kernels.problem import Config, Problem

# wgmmas in an unrolled lap of the ring; the descriptors of more would spill.
_UNROLLED_WGMMAS = 16
# Rows that are stored at a time where TMA can't.
_ROWS_AT_ONCE = 8
# Rows that TMA stores at a time where a group ends inside a tile.
_POWERS = (64, 32, 16, 8, 4, 2, 1)


def body(
  *refs,
  tail,
  problem: Problem,
  config: Config,
  a_ring,
  b_rings,
  staging,
  full,
  empty,
  bias=None,
  bias_loaded=None,
  c=None,
  c_loaded=None,
  rest=None,
):
  """What a block does: one warp loads, `consumers` warpgroups multiply."""
  p, cfg = problem, config
  schedule_refs, refs = _split(refs, plan.schedule_arrays(p))
  (a_ref, *b_refs), refs = _split(refs, 1 + len(b_rings))
  edge_refs, refs = _split(refs, 2 if p.ragged == "k" else 0)
  bias_ref, *refs = refs if bias is not None else (None, *refs)
  c_ref, *out_refs = refs if c is not None else (None, *refs)
  stages, consumers, bk = cfg.stages, cfg.consumers, cfg.block_k
  loaded = plan.loaded_rows(p, cfg)
  cluster = lax.axis_index("cluster")
  warpgroup = lax.axis_index("warpgroup")

  def for_each_unit(visit, slot):
    """slot = visit(unit, slot) for this block's work."""
    schedule = schedules.of(p, cfg, schedule_refs)
    return schedule.for_each(cluster, plan.clusters(p, cfg), visit, slot)

  def load_unit(unit, slot):
    rows = pl.ds(unit.row, loaded)
    columns = pl.ds(unit.column, cfg.block_n)
    shared_a = "cluster_n" if cfg.cluster_n > 1 else None
    shared_b = "cluster_m" if cfg.cluster_m > 1 else None

    def copy(a_ref, b_refs, start, slot):
      slab = pl.ds(start, bk)
      a_window = (slab, rows) if p.transpose_a else (rows, slab)
      b_window = (columns, slab) if p.transpose_b else (slab, columns)
      plgpu.copy_gmem_to_smem(
        _window(a_ref, unit.a, a_window),
        a_ring.at[slot] if p.transpose_a else a_ring.at[slot, pl.ds(0, loaded)],
        full.at[slot],
        collective_axes=shared_a,
      )
      for b_ref, b_ring in zip(b_refs, b_rings):
        plgpu.copy_gmem_to_smem(
          _window(b_ref, unit.b, b_window),
          b_ring.at[slot],
          full.at[slot],
          collective_axes=shared_b,
        )

    def load(step, slot, _):
      plgpu.barrier_wait(empty.at[slot])
      if not edge_refs:
        copy(a_ref, b_refs, unit.start + step * bk, slot)
        return

      @pl.when(step < unit.whole)
      def _():
        copy(a_ref, b_refs, unit.start + step * bk, slot)

      @pl.when(step >= unit.whole)
      def _():
        copy(edge_refs[0], edge_refs[1:], (step - unit.whole) * bk, slot)

    return _for_each_step(load, slot, unit.steps, p, cfg)[1]

  @pl.when(warpgroup == consumers)
  def _produce():
    plgpu.set_max_registers(plan.REGISTERS[consumers][0], action="decrease")

    def drain(slot):  # leave no release unseen
      for _ in range(stages):
        plgpu.barrier_wait(empty.at[slot])
        slot = _next_slot(slot, stages)

    if not p.ragged:

      @_on_one_warp
      def _():
        drain(for_each_unit(load_unit, jnp.int32(0)))

      return

    # What is known of a group's rows can be said to Mosaic GPU by whole
    # warpgroups alone, so here it is the slabs of a unit that one warp loads.
    def load(unit, slot):
      _on_one_warp(lambda: load_unit(unit, slot))
      return lax.rem(slot + unit.steps, stages)

    slot = for_each_unit(load, jnp.int32(0))
    _on_one_warp(lambda: drain(slot))

  def multiply(unit, slot, *accumulators):
    """A unit's sums, and the slot of the next unit's first slab."""

    def step_(step, slot, before):
      plgpu.barrier_wait(full.at[slot])
      a = _a_operand(a_ring.at[slot], warpgroup, p, cfg)
      for acc, b_ring in zip(accumulators, b_rings):
        plgpu.wgmma(acc, a, _b_operand(b_ring.at[slot], warpgroup, p, cfg))
      # The step before is done, this one runs on.
      plgpu.wgmma_wait(len(accumulators))
      plgpu.barrier_arrive(empty.at[before], predicate=step > 0)

    last, slot = _for_each_step(step_, slot, unit.steps, p, cfg)
    plgpu.wgmma_wait(0)
    held = None if p.ragged is None else unit.steps > 0
    plgpu.barrier_arrive(empty.at[last], predicate=held)
    return [acc[...] for acc in accumulators], slot

  pieces = plan.pieces(p, cfg)
  buffers, width = plan.buffers(p, cfg), plan.piece_width(p, cfg)
  ahead = plan.c_buffers(p, cfg)

  def window(unit, piece, first=0, rows=plan.WGMMA_ROWS):
    """The part of a result, or of C, that a piece of the tile is."""
    i, j = _corner(unit, warpgroup, cfg)
    i, j = i + pieces[piece][0] + first, j + pieces[piece][1]
    return unit.out, (pl.ds(i, rows), pl.ds(j, width))

  def load_c(unit, piece):
    plgpu.copy_gmem_to_smem(
      _window(c_ref, *window(unit, piece)),
      c.at[warpgroup, piece % ahead],
      c_loaded.at[warpgroup * ahead + piece % ahead],
    )

  def prefetch(unit):
    """Starts to load what the tail of this unit needs first."""
    if bias is not None:
      start = _corner(unit, warpgroup, cfg)[p.bias == "n"]
      size = plan.share(cfg)[p.bias == "n"]
      along = pl.ds(start, size)
      plgpu.copy_gmem_to_smem(
        bias_ref.at[unit.b, along] if p.ragged else bias_ref.at[along],
        bias.at[warpgroup, pl.ds(0, size)],
        bias_loaded.at[warpgroup],
      )
    if c is not None:
      for piece in range(ahead):
        load_c(unit, piece)

  def bias_of(piece):
    along_n = p.bias == "n"
    size = width if along_n else plan.WGMMA_ROWS
    values = plgpu.load(
      bias.at[warpgroup, pl.ds(pieces[piece][along_n], size)],
      layout=plgpu.Layout.WGMMA.reduce(0 if along_n else 1),
      optimized=False,
    )
    shape = (plan.WGMMA_ROWS, width)
    values = values.astype(jnp.float32)
    values = lax.broadcast_in_dim(values, shape, (1 if along_n else 0,))
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA)

  def results_of(unit, sums, piece):
    """The results of one piece, once what they need has arrived."""
    i, j = pieces[piece]
    c_piece = None
    if c is not None:
      plgpu.barrier_wait(c_loaded.at[warpgroup * ahead + piece % ahead])
      c_piece = c[warpgroup, piece % ahead]
    results = tail(
      [x[i : i + plan.WGMMA_ROWS, j : j + width] for x in sums],
      c_piece,
      None if bias is None else bias_of(piece),
    )
    if p.ragged == "m" and (bias is not None or p.activation):
      # What activation and bias make of nothing is not zero.
      keep = jnp.broadcast_to(unit.is_group, (plan.WGMMA_ROWS, width))
      return [jnp.where(keep, x, 0.0) for x in results]
    return results

  def store_tiles(unit, sums):
    """Stores a unit's results by TMA, and does not wait for them."""
    # As many pieces at a time as leave as many buffers to those before, or
    # all of them: one barrier for each such chunk.
    chunk = buffers if buffers == len(pieces) else max(1, buffers // 2)
    if c is not None:
      chunk = min(chunk, ahead)
    for start in range(0, len(pieces), chunk):
      some = range(start, min(start + chunk, len(pieces)))
      # These buffers are free once all stores but the newest have left shared
      # memory; for the first chunks those are stores of the unit before,
      # which may have ended with any buffer.
      in_turn = start > 0 or len(pieces) % buffers == 0
      pending = (buffers - chunk) * len(out_refs) if in_turn else 0
      plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
      for piece in some:
        results = results_of(unit, sums, piece)
        for staged, result in zip(staging, results):
          staged[warpgroup, piece % buffers] = result.astype(staged.dtype)
      plgpu.commit_smem()
      for piece in some:
        for staged, out_ref in zip(staging, out_refs):
          plgpu.copy_smem_to_gmem(
            staged.at[warpgroup, piece % buffers],
            _window(out_ref, *window(unit, piece)),
          )
        if c is not None and piece + ahead < len(pieces):
          load_c(unit, piece + ahead)

  def store_first_rows(unit, sums, rows):
    """Stores the first rows of a tile: as many as a power of two at a time.

    That a number of rows can be stored so is from JAX's `ragged_dot_mgpu`.
    """
    for piece in range(len(pieces)):
      here = jnp.clip(rows - pieces[piece][0], 0, plan.WGMMA_ROWS)
      for result, out_ref in zip(results_of(unit, sums, piece), out_refs):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = rest.at[warpgroup]
        compat.store(staged, result.astype(staged.dtype), optimized=False)
        plgpu.commit_smem()
        for height in _POWERS:
          above = here & ~(2 * height - 1)  # rows of greater heights

          @pl.when((here & height) != 0)
          def _(height=height, above=above, out_ref=out_ref, piece=piece):
            target = window(unit, piece, above, height)
            plgpu.copy_smem_to_gmem(
              rest.at[warpgroup, pl.ds(above, height)],
              _window(out_ref, *target),
            )

  def store_rows(unit, result, piece):
    """Stores a piece row by row, a column a thread."""
    staged = staging[0].at[warpgroup, 0]
    plgpu.commit_smem()  # every thread has read the piece before
    compat.store(staged, result.astype(staged.dtype), optimized=False)
    plgpu.commit_smem()  # every thread has written this one
    corner = _corner(unit, warpgroup, cfg)
    first, column = (x + y for x, y in zip(corner, pieces[piece]))
    rows = jnp.clip(p.m - first, 0, plan.WGMMA_ROWS)
    whole = p.n - p.n % plan.DIRECT

    def store_to(out_ref, column):
      def store_row(row, _):
        target = (first + row, pl.ds(column, plan.DIRECT))
        _window(out_ref, unit.out, target)[...] = staged[row]

      def store_some(i, _):
        for row in range(_ROWS_AT_ONCE):
          store_row(i * _ROWS_AT_ONCE + row, None)

      groups = lax.div(rows, jnp.int32(_ROWS_AT_ONCE))
      lax.fori_loop(0, groups, store_some, None)
      lax.fori_loop(groups * _ROWS_AT_ONCE, rows, store_row, None)

    @pl.when(column < whole)
    def _():
      store_to(out_refs[0], column)

    if whole < p.n:

      @pl.when(column == whole)
      def _():
        store_to(out_refs[1], 0)

  def store(unit, sums):
    """Applies the tail to a unit's sums, and stores the results."""
    if bias is not None:
      plgpu.barrier_wait(bias_loaded.at[warpgroup])
    if plan.stores_rows(p, cfg):
      for piece in range(len(pieces)):
        (result,) = results_of(unit, sums, piece)
        store_rows(unit, result, piece)
        if c is not None and piece + ahead < len(pieces):
          load_c(unit, piece + ahead)
    elif p.ragged == "m":
      most, _ = plan.share(cfg)
      above = warpgroup * most if cfg.split == "m" else 0
      rows = jnp.clip(unit.rows - above, 0, most)
      pl.when(rows == most)(lambda: store_tiles(unit, sums))
      pl.when(rows < most)(lambda: store_first_rows(unit, sums, rows))
    else:
      store_tiles(unit, sums)

  @pl.when(warpgroup < consumers)
  def _consume():
    plgpu.set_max_registers(plan.REGISTERS[consumers][1], action="increase")
    for slot in range(stages):  # the ring starts empty
      plgpu.barrier_arrive(empty.at[slot])

    def compute_unit(unit, slot):
      prefetch(unit)
      accumulator = plgpu.ACC(plan.share(cfg), jnp.float32)
      sums, slot = pl.run_scoped(
        functools.partial(multiply, unit, slot), *[accumulator] * len(b_rings)
      )
      store(unit, sums)
      return slot

    for_each_unit(compute_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _on_one_warp(visit) -> None:
  """Calls `visit` on the first warp of a warpgroup."""

  @plgpu.warp_map
  def _(warp):
    @pl.when(warp == 0)
    def _():
      visit()


def _for_each_step(visit, slot, steps, problem: Problem, config: Config):
  """visit(step, slot, slot before) for a unit's slabs, from `slot` on.

  Where whole laps of the ring make up a unit, slots are Python numbers and
  wgmma's descriptors are worked out before the loop: less than half the
  instructions (rung 12).

  Returns:
    The slot of the last slab and that of the next unit's first.
  """
  stages = config.stages
  if _is_whole_laps(problem, config):

    def lap(i, _):
      for s in range(stages):
        visit(i * stages + s, s, (s - 1) % stages)

    laps = steps // stages if isinstance(steps, int) else lax.div(steps, stages)
    lax.fori_loop(0, laps, lap, None)
    return stages - 1, slot  # which is 0 in this case

  def turn(step, slots):
    before, slot = slots
    visit(step, slot, before)
    return slot, _next_slot(slot, stages)

  return lax.fori_loop(0, steps, turn, (slot, slot))


def _is_whole_laps(problem: Problem, config: Config) -> bool:
  """Whether units are whole laps of the ring, short enough to be unrolled."""
  if problem.ragged == "k":
    return False  # only the device knows how many slabs a group has
  steps = plan.cdiv(plan.cdiv(problem.k, config.block_k), config.split_k)
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


def _corner(unit, consumer, config: Config):
  """Row and column of the result where a consumer's share of a tile starts."""
  rows, columns = plan.share(config)
  if config.split == "m":
    return unit.row + consumer * rows, unit.column
  return unit.row, unit.column + consumer * columns


def _split(items, count: int):
  """The first items, and the others."""
  return items[:count], items[count:]


def _window(ref, batch, window):
  """A window of a matrix, or of one matrix of a batch."""
  return ref.at[window] if len(ref.shape) == 2 else ref.at[batch, *window]


def _next_slot(slot, stages: int):
  """The ring's next slot; a select, where a remainder would be a division."""
  return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)
