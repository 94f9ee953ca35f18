"""How threads of the producer split float32 into planes of bfloat16.

TMA loads it, and they write its planes to the ring, so that none is written to
memory or read there. Each row tile splits B anew: it is for few of them.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat, ptx
from pallas_gemm.kernels.sm90 import layout, loaders, planes
from pallas_gemm.kernels.sm90.block import on_one_warp, window
from pallas_gemm.kernels.sm90.by_threads import Begin, ByThreads

# Of bfloat16.
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


@dataclasses.dataclass(frozen=True)
class Splitter(ByThreads):
  """float32, which TMA loads some slabs ahead, as planes of each B."""

  def load(self, slot, begin: Begin, begin_last: Begin) -> jax.Array:
    del begin_last
    held, steps = self.block.plan.loader.slabs_by_tma, self.work_tile.steps

    def load(step, state):
      slot, place = state
      begin(step, slot)
      plgpu.barrier_wait(self.block.shared.raw_full.at[place])
      self._split(place, slot)
      self._announce(slot)  # all threads have read what lies there
      self._copy(step + held, place)
      following = lax.select(place == held - 1, jnp.int32(0), place + 1)
      return self.block.next_slot(slot), following

    for place in range(held):
      self._copy(jnp.int32(place), place)
    slot, _ = lax.fori_loop(0, steps, load, (slot, jnp.int32(0)))
    return slot

  def _copy(self, step, place) -> None:
    """Asks TMA for a slab in float32, if there is one."""
    (b,), tiling = self.operands, self.block.plan.tiling
    origin = b.origin(self._start(step))
    at = tuple(map(pl.ds, origin, tiling.b_slab_shape))

    def copy():
      for ref, raw in zip(b.refs, b.raws):
        plgpu.copy_gmem_to_smem(
          window(ref, b.which, at),
          raw.at[place],
          self.block.shared.raw_full.at[place],
        )

    pl.when(step < self.work_tile.steps)(lambda: on_one_warp(copy))

  def _split(self, place, slot) -> None:
    """A slab of each B, up to 8 elements a thread at a time."""
    (b,), tiling = self.operands, self.block.plan.tiling
    rows, columns = tiling.b_slab_shape
    # Lanes side by side have vectors of 16 bytes of a row of an atom.
    atom = layout.elements_in(layout.ATOM_BYTES, "float32")
    of_rows = compat.tiled_layout(
      (loaders.SPLIT_ROWS, atom), (4, atom), (1, 4),
      warps=(-6,), lanes=(-4, -3), vector=-1,
    )  # fmt: skip
    load = functools.partial(plgpu.load, layout=of_rows, optimized=False)
    width = math.gcd(columns, 2 * atom)
    height = math.gcd(rows, 2 * loaders.SPLIT_ROWS * atom // width)
    corners = itertools.product(
      range(0, rows, height), range(0, columns, width)
    )
    pieces = [(pl.ds(i, height), pl.ds(j, width)) for i, j in corners]
    of_each = zip(b.raws, itertools.batched(b.rings, tiling.problem.b.planes))
    work = [(*x, at) for x, at in itertools.product(of_each, pieces)]

    def read(raw, rings, at):
      return load(raw.at[place, *at])

    x = read(*work[0])
    for (_, rings, at), following in itertools.zip_longest(work, work[1:]):
      # Shared memory answers while this piece is split.
      later = read(*following) if following else None
      for ring, plane in zip(rings, _planes(x, len(rings), of_rows)):
        compat.store(ring.at[slot, *at], plane, optimized=False)
      x = later


def _planes(x: jax.Array, count: int, layout: Any) -> Iterator[jax.Array]:
  """The planes of a part of a slab: the bits of `planes.split`.

  But of what is not finite the others are NaN: of sums of small products what
  is not finite is dropped (`mainloops.OfPlanes`).
  """
  bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(planes.CUT - 2**32)
  cut = lax.bitcast_convert_type(bits, jnp.float32)
  near = jnp.where(jnp.abs(x) > _LARGEST, cut, x)
  for _ in range(count):
    plane, x = ptx.split_off(x, near, layout)
    yield plane
    near = x
