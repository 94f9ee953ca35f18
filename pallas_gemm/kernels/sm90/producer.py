"""The warpgroup that loads: one warp fills the ring, one stores zeros."""

import dataclasses
import functools
import itertools
import math

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import ptx
from pallas_gemm.kernels.sm90 import by_threads, groups, layout, loaders
from pallas_gemm.kernels.sm90.block import Block, on_one_warp, window
from pallas_gemm.kernels.sm90.by_threads import Loaded
from pallas_gemm.kernels.sm90.layout import (
  ATOM_ROWS,
  cdiv,
  last_slab_copies,
  round_up,
)
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.splitter import Splitter

# Slabs are asked for in pairs where reading weights takes so many times as long
# as multiplying by them, up to 147 rows a group on an H100; and where a group's
# rows are so many times a tile's at most, so that most groups have one tile.
_TO_LOAD_PAIRS, _ROWS_OF_ONE_TILE = 2.0, 1.25

# What threads do for a loader that has some.
_BY_THREADS = {
  loaders.Copies: by_threads.Copier,
  loaders.Shifts: by_threads.Shifter,
  loaders.SlabShifts: by_threads.SlabShifter,
  loaders.Splits: Splitter,
}


def produce(block: Block) -> None:
  """Everything that the warpgroup does that loads."""
  plan, producer = block.plan, Producer(block)
  registers, _ = plan.memory.registers
  plgpu.set_max_registers(registers, action="decrease")
  is_shifted = any(plan.matrices.shifted_inward)
  starts_anywhere = is_shifted or plan.tiling.tiles_overlap
  has_threads = any(plan.loader.operands)
  if not (plan.problem.groups or starts_anywhere or has_threads):

    @on_one_warp
    def _():
      producer.drain(_for_each_work_tile(block, producer.load_work_tile))

    return

  # That tiles start anywhere can be said to Mosaic GPU by whole warpgroups
  # alone, so here one warp has only the slabs of a work tile.
  def load(work_tile, slot):
    if has_threads:
      return producer.load_work_tile_by_threads(work_tile, slot)
    on_one_warp(lambda: producer.load_work_tile(work_tile, slot))
    following = slot + plan.tiling.pingpong * work_tile.steps
    return lax.rem(following, plan.config.stages)

  if _prefetches_operands(plan):
    producer.prefetch_operands()
  if block.shared.zeros is not None:
    producer.store_zeros()
  slot = _for_each_work_tile(block, load)
  if has_threads:  # all of whom have waited so far
    producer.drain(slot)
  else:
    on_one_warp(lambda: producer.drain(slot))


def _for_each_work_tile(block: Block, load):
  """slot = load(work_tile, slot) for the work of this block; the slot after it.

  Consumers that ping-pong have slots of their own, so a work tile's first slot
  is not the one after those of the tile before.
  """

  def load_next(work_tile, slots):
    return (*slots[1:], load(work_tile, slots[0]))

  slots = tuple(jnp.int32(i) for i in range(block.plan.tiling.pingpong))
  return block.for_each_work_tile(load_next, slots)[0]


@dataclasses.dataclass(frozen=True)
class Producer:
  """What its warps do, one each."""

  block: Block

  def load_work_tile(self, work_tile, slot):
    """Loads a work tile's slabs; the slot of the next one's first."""
    block, bk = self.block, self.block.plan.config.block_k

    def load(step, slot, *_):
      if block.shared.empty is not None:
        plgpu.barrier_wait(block.shared.empty.at[slot])
      start = work_tile.start + step * bk
      whole, load_last = work_tile.whole, self._load_last_slab
      if block.plan.matrices.b_last_apart:
        whole, load_last = work_tile.steps - 1, self._load_copied_slab
      if whole is None:
        self._load_slab(work_tile, start, slot)
        return
      pl.when(step < whole)(lambda: self._load_slab(work_tile, start, slot))
      pl.when(step >= whole)(lambda: load_last(work_tile, start, slot))

    if loads_pairs(block.plan):
      load = functools.partial(self._load_pair, work_tile)
    (_, following), _ = block.for_each_slab(load, slot, work_tile.steps)
    return slot if following is None else following

  def _load_pair(self, work_tile, step, slot, *_) -> None:
    """Asks for this slab and the next one, at every other step."""
    block, bk = self.block, self.block.plan.config.block_k
    second = block.next_slot(slot)
    start = work_tile.start + step * bk
    has_second = step + 1 < work_tile.steps

    @pl.when(lax.rem(step, 2) == 0)
    def _():
      plgpu.barrier_wait(block.shared.empty.at[slot])
      pl.when(has_second)(
        lambda: plgpu.barrier_wait(block.shared.empty.at[second])
      )
      self._load_slab(work_tile, start, slot)
      pl.when(has_second)(
        lambda: self._load_slab(work_tile, start + bk, second)
      )

  def load_work_tile_by_threads(self, work_tile, slot):
    """The same where the threads of the warpgroup load A or B."""
    block, operands = self.block, self._operands(work_tile)
    pairs = list(zip(operands, block.plan.loader.operands))
    theirs = [x for x, is_theirs in pairs if is_theirs]
    by_tma = [x for x, is_theirs in pairs if not is_theirs]

    def begin(load, step, slot):
      if block.shared.empty is not None:
        plgpu.barrier_wait(block.shared.empty.at[slot])
      start = work_tile.start + step * block.plan.config.block_k
      on_one_warp(lambda: load(start, slot))

    def load(start, slot):
      for operand in by_tma:
        self._load(operand, start, slot)

    load_last = functools.partial(self._load_copied_slab, work_tile)
    kind = _BY_THREADS[type(block.plan.loader)]
    return kind(block, work_tile, theirs).load(
      slot,
      begin=functools.partial(begin, load),
      begin_last=functools.partial(begin, load_last),
    )

  def _load_slab(self, work_tile, start, slot) -> None:
    """Asks for one slab of A and of each B, from row `start` of K on."""
    for operand in self._operands(work_tile):
      self._load(operand, start, slot)
    self._load_scales(work_tile, start, slot)

  def _load_scales(self, work_tile, start, slot) -> None:
    """Asks for the scales of the slab's blocks, where it has some.

    Consumers that loaded them a slab ahead waited for memory each time, since
    what a loop hands on is copied, once it is there: 4096 cubed 133.8 -> 115.0
    us, 1 x 14336 x 4096 41.2 -> 25.4 (H100).
    """
    block, cfg = self.block, self.block.plan.config
    if not block.plan.problem.has_blocks:
      return
    slab = lax.div(jnp.int32(start), jnp.int32(cfg.block_k))

    def load(ref, ring, which, first, size):
      matrices, slabs, _ = ref.shape
      which = which if matrices > 1 else 0
      nth = jnp.minimum(slab, slabs - 1)  # parts of K have some beyond
      plgpu.copy_gmem_to_smem(
        ref.at[which, nth, pl.ds(first, size)],
        ring.at[slot, pl.ds(0, size)],
        block.shared.full.at[slot],
      )

    operands, shared = block.operands, block.shared
    row, column = block.scales_origin(work_tile)
    of_a, of_b = block.plan.memory.scales_copied
    load(operands.scale_a, shared.scales_a, work_tile.a, row, of_a)
    for ref, ring in zip(operands.scale_b, shared.scales_b):
      load(ref, ring, work_tile.b, column, of_b)

  def _load_copied_slab(self, work_tile, start, slot) -> None:
    """The same of the last slab, of which B is a copy."""
    a, b = self._operands(work_tile)
    self._load(a, start, slot)
    self._load(b._replace(refs=self.block.operands.b_last), 0, slot)
    self._load_scales(work_tile, start, slot)

  def _operands(self, work_tile) -> tuple[Loaded, Loaded]:
    """What of A, and of each B, a work tile is made of."""
    plan, shared = self.block.plan, self.block.shared
    problem, cfg = plan.problem, plan.config
    operands = self.block.operands
    a = Loaded(
      operands.a,
      shared.a_rings,
      work_tile.a,
      k_last=problem.a.k_last,
      begin=work_tile.row,
      extent=plan.tiling.loaded_a,
      peers="cluster_n" if cfg.cluster_n > 1 else None,
      raws=shared.raw_a,
    )
    b = Loaded(
      operands.b,
      shared.b_rings,
      work_tile.b,
      k_last=problem.b.k_last,
      begin=work_tile.column,
      extent=plan.tiling.loaded_b,
      peers="cluster_m" if cfg.cluster_m > 1 else None,
      raws=shared.raw_b,
    )
    return a, b

  def _load(self, operand: Loaded, start, slot) -> None:
    """Asks for a slab of A or of each B."""
    block_k, full = self.block.plan.config.block_k, self.block.shared.full

    def copy(size):
      at = pl.ds(operand.begin, size), pl.ds(start, block_k)
      tile = pl.ds(0, size), pl.ds(0, block_k)
      if not operand.k_last:
        at, tile = at[::-1], tile[::-1]
      for ref, ring in zip(operand.refs, operand.rings):
        plgpu.copy_gmem_to_smem(
          window(ref, operand.which, at),
          ring.at[slot, *tile],
          full.at[slot],
          collective_axes=operand.peers,
        )

    extent = operand.extent
    if extent.whole == extent.last:
      copy(extent.whole)
      return
    pl.when(operand.begin < extent.start)(lambda: copy(extent.whole))
    pl.when(operand.begin >= extent.start)(lambda: copy(extent.last))

  def _load_last_slab(self, work_tile, start, slot) -> None:
    """Asks for a group's last slab along K; after its last row are zeros.

    In copies of half of the slab, a quarter, down to 8 rows, each either of the
    group's, behind those before it, or of zeros, before those behind it. What
    is left between them is the block of 8 rows that the group's end cuts.
    """
    block, operands, shared = self.block, self.block.operands, self.block.shared
    cfg = block.plan.config
    at_m = pl.ds(work_tile.row, cfg.block_m)
    at_n = pl.ds(work_tile.column, cfg.block_n)
    columns = *[at_m] * len(operands.a), *[at_n] * len(operands.b)
    rings = *shared.a_rings, *shared.b_rings

    def load(refs, row, block, size):
      for ref, ring, at in zip(refs, rings, columns):
        plgpu.copy_gmem_to_smem(
          ref.at[pl.ds(row, size), at],
          ring.at[slot, pl.ds(block * ATOM_ROWS, size)],
          shared.last_full.at[slot],
        )

    refs = *operands.a, *operands.b
    beyond = round_up(refs[0].shape[0], cfg.block_k)
    first, last = jnp.int32(0), jnp.int32(cfg.block_k // ATOM_ROWS)
    for size in last_slab_copies(cfg.block_k):
      count = size // ATOM_ROWS
      is_there = lax.rem(lax.div(work_tile.k_tail, size), 2) == 1
      row = jnp.where(is_there, start + first * ATOM_ROWS, beyond)
      load(refs, row, jnp.where(is_there, first, last - count), size)
      first = jnp.where(is_there, first + count, first)
      last = jnp.where(is_there, last, last - count)
    has_tail = lax.rem(work_tile.k_tail, ATOM_ROWS) > 0
    beyond = operands.k_tails[0].shape[0]
    row = jnp.where(has_tail, work_tile.out * ATOM_ROWS, beyond)
    load(operands.k_tails, row, first, ATOM_ROWS)

  def prefetch_operands(self) -> None:
    """Asks the L2 for this block's part of the rows of A and B."""
    block, operands = self.block, self.block.operands
    for ref in (*operands.a, *operands.b):
      rows = cdiv(ref.shape[0], block.plan.tiling.clusters)
      first = jnp.minimum(block.cluster * rows, ref.shape[0] - rows)
      ptx.prefetch(ref.at[pl.ds(first, rows)])

  def drain(self, slot) -> None:
    """Leaves no release unseen."""
    stages, empty = self.block.plan.config.stages, self.block.shared.empty
    for _ in range(stages if empty is not None else 0):
      plgpu.barrier_wait(empty.at[slot])
      slot = lax.select(slot == stages - 1, jnp.int32(0), slot + 1)

  def store_zeros(self) -> None:
    """Stores the results of groups along K that have no rows.

    By a warp that nothing waits for, two subtiles at a time where products take
    longer: writes in one go would hold up their loads. Of 32 groups one with
    all rows: 988 -> 868 us on an H200.
    """
    block, zeros = self.block, self.block.shared.zeros
    subtile = jnp.zeros(zeros.shape, zeros.dtype)
    zeros[...] = plgpu.layout_cast(subtile, plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    (out_ref,) = block.results.out
    tables = block.operands.tables
    has_spare_time = groups.has_spare_time(block.plan, tables)
    rows, columns = zeros.shape

    def store(work_tile):
      down = range(0, block.plan.config.block_m, rows)
      across = range(0, block.plan.config.block_n, columns)
      for i, j in itertools.product(down, across):
        at = (
          pl.ds(work_tile.row + i, rows),
          pl.ds(work_tile.column + j, columns),
        )
        plgpu.copy_smem_to_gmem(zeros, window(out_ref, work_tile.out, at))

        @pl.when(has_spare_time)
        def _():
          plgpu.wait_smem_to_gmem(1)

    def store_all():
      groups.for_each_tile_of_zeros(block.plan, tables, block.cluster, store)
      plgpu.wait_smem_to_gmem(0)

    on_one_warp(store_all, 1)


def loads_pairs(plan: Plan) -> bool:
  """Whether two slabs are asked for at a time, once two slots are empty.

  A slab of weights that are stored along K is 128 bytes of each row. Memory
  gives the next 128 sooner if they are asked for at once: 32 groups of 8 to
  64 rows, 2048 x 4096, 191 to 220 us -> 183 to 207, of 128 rows 240 -> 219
  (H100). But a ring of four slabs then holds fewer ahead. Where the tensor
  cores bind, or a group has several row tiles, which must not lose each other
  for the L2 to read its weights once, that is 2 to 8 % slower: 192 rows 230
  -> 236 us. Of two slots the one would wait for a slab that is released when
  the next has come.
  """
  p, cfg, gpu = plan.problem, plan.config, plan.gpu
  if p.along != "m" or not p.b.k_last or plan.matrices.b_last_apart:
    return False
  if cfg.stages // plan.tiling.pingpong < 3:
    return False
  rows = max(1.0, p.m / p.groups.count)
  if rows > _ROWS_OF_ONE_TILE * cfg.block_m:
    return False
  # What reading a group's weights takes, over what multiplying by them does.
  reading = layout.bytes_of(1, p.b.dtype) / gpu.dram_bytes_per_s
  return reading > _TO_LOAD_PAIRS * 2 * rows / gpu.tensor_flops(p.b.bits)


def _prefetches_operands(plan: Plan) -> bool:
  """Whether the L2 is asked for all operands before anything is written.

  Operands of a quarter of the L2 stay there, since results leave first: 651
  -> 621 us. 25 MB do not: 212 -> 219 (H100).
  """
  if not (plan.problem.along and plan.matrices.evicts_results):
    return False
  shapes = zip(plan.matrices.operand_paddings, (plan.problem.a, plan.problem.b))
  sizes = [layout.bytes_of(math.prod(x), y.dtype) for x, y in shapes]
  return 4 * sum(sizes) <= plan.gpu.l2_bytes
