"""A warpgroup that computes: accumulators of work tiles, and their stores.

What it does for the work tile before, and for C of this one, overlaps with the
first slabs, while the tensor cores have them (`stores`).
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.kernels.sm90 import mainloops, reduction
from pallas_gemm.kernels.sm90.block import Block
from pallas_gemm.kernels.sm90.epilogue import FusedEpilogue
from pallas_gemm.kernels.sm90.schedule import WorkTile
from pallas_gemm.kernels.sm90.stores import Stores


def consume(block: Block, compute: Callable[..., list[jax.Array]]) -> None:
  """Everything that a consumer does.

  Args:
    block: what it sees of it.
    compute: the results from accumulators, C and bias, see `epilogues.apply`,
      and from alpha and beta where these lie in memory.
  """
  # Before it has its registers, for which the loader need not wait.
  first = block.warpgroup if block.plan.tiling.pingpong > 1 else 0
  for slot in range(0, block.plan.config.stages, block.plan.tiling.pingpong):
    block.release(first + slot)  # the ring starts empty
  _, registers = block.plan.memory.registers
  plgpu.set_max_registers(registers, action="increase")
  # Once, for all work tiles: memory answers while the first slab is on its way.
  refs = {"alpha": block.operands.alpha, "beta": block.operands.beta}
  factors = {name: ref[0] for name, ref in refs.items() if ref is not None}
  epilogue = FusedEpilogue(block, functools.partial(compute, **factors))
  Consumer(block, mainloops.of(block), Stores(block, epilogue)).run()


@dataclasses.dataclass(frozen=True)
class Consumer:
  """Multiplies by its main loop, stores by its stores."""

  block: Block
  mainloop: mainloops.Mainloop
  stores: Stores

  def run(self) -> None:
    """Computes all of its work tiles: the block's, or its own of them.

    Consumers that ping-pong have work tiles of their own. So has each slots of
    the ring, every `pingpong`-th, of whose barriers it thus sees all phases.
    """
    block, plan = self.block, self.block.plan
    own = plan.tiling.pingpong > 1
    state = jnp.int32(block.warpgroup if own else 0), self.stores.nothing()
    _, pending = block.for_each_work_tile(self._compute, state, own)
    self.stores.end(pending)

  def _compute(self, work_tile: WorkTile, state):
    """The next slot, and what of the work tile's results waits."""
    slot, pending = state
    self.stores.begin(work_tile, pending)
    overlap = functools.partial(
      self.stores.overlap, work_tile=work_tile, pending=pending
    )
    multiply = functools.partial(self._multiply, work_tile, slot, overlap)
    types = self.mainloop.allocated()
    found = pl.run_scoped(multiply, *types) if types else multiply()
    sums, following = found
    slot = slot if following is None else following
    sums = reduction.reduced(self.block, sums)
    return slot, self.stores.finish(work_tile, sums)

  def _multiply(self, work_tile: WorkTile, slot, overlap, *scope):
    """A work tile's sums, and the next slot as of `for_each_slab`.

    overlap(slab) is called once, while the tensor cores have that slab or when
    there is no such slab, for the first `stores.slabs`.
    """
    block, loop, slabs = self.block, self.mainloop, self.stores.slabs

    def multiply(step, slot, before, carry):
      block.wait_for(work_tile, step, slot)

      def overlap_slab(nth=0):
        for slab in range(slabs):
          pl.when(step + nth == slab)(functools.partial(overlap, slab))

      slots = slot, before
      return loop.multiply(work_tile, scope, slots, step, carry, overlap_slab)

    (last, following), carry = block.for_each_slab(
      multiply,
      slot,
      work_tile.steps,
      loop.start(work_tile),
      block.plan.tiling.slabs_at_once,
    )
    for slab in range(1, slabs):
      pl.when(work_tile.steps <= slab)(functools.partial(overlap, slab))
    return loop.sums(scope, last, carry), following
