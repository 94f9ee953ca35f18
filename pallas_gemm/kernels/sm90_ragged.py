"""Grouped products on Hopper: groups of rows, each with a matrix of its own.

    out[rows of g] = activation(A[rows of g] @ B[g] + bias[g])     ragged "m"
    out[g] = A[rows of g].T @ B[rows of g]                         ragged "k"

The first is the forward pass of a mixture of experts, and the derivative by its
rows; the second the derivative by its weights. Rows of a group are consecutive,
and where groups start only the device knows. Both run `sm90_body`, the loader,
ring and consumers of the dense product; what differs is the schedule.

**Groups of rows.** Tiles start where groups start, so no tile has rows of two
groups. A small XLA fusion lists them: first row, rows, group. The last tile of
a group that is larger than a tile ends where the group ends, and computes some
rows a second time: the same bits are stored twice, and nothing is masked. Only
a group that is smaller than a tile is stored in part, in TMA copies of 32, 16,
8, 4, 2 and 1 rows. Rows that belong to no group are tiles of few slabs, whose
accumulators are dropped and zeros stored. Tiles of one group follow each other,
so that blocks which run at a time share its B in the L2.

**Groups along K.** A work tile sums the slabs of its group. TMA fetches whole
slabs from A and B. What a group has beside them, fewer than block_k + 7 rows,
is first copied by XLA into slabs of its own, filled up with zeros: rows of
other groups never meet, so a NaN stays in its group, and no step is masked.
Results of groups without rows are zeros, which a warp of its own stores beside
the products.

**Limits.** Row strides that are no multiples of 16 bytes, and groups along K of
matrices whose number of rows is no multiple of 8, make XLA pad the operand.

Sources: MegaBlocks and CUTLASS (grouped GEMM with a schedule on the device),
JAX's `ragged_dot_mgpu` (stores of any number of rows).
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels import epilogues, sm90_legal, sm90_memory
from pallas_gemm.kernels import sm90_body as device
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels import sm90_schedule as schedules
from pallas_gemm.kernels.problem import Config, Problem
from pallas_gemm.kernels.sm90_scratch import scratch

is_legal = sm90_legal.is_legal

# Times the mean that the largest group along K has, from which half of the
# blocks start with the small groups. On an H200, of 256 groups the largest 42
# times: 3484 -> 3185 us; of 8 groups 2.9 times: no gain; even sizes would take
# 5 % longer.
_UNEVEN = 4


def matmul(
  a: jax.Array,
  b: jax.Array,
  offsets: jax.Array,
  *,
  problem: Problem,
  config: Config,
  b_up: jax.Array | None = None,
  bias: jax.Array | None = None,
  activation: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
  """Computes `problem` with `config`.

  Args:
    a: [M, K]; of groups along K stored [K, M].
    b: [groups, K, N], stored [groups, N, K] if `problem.transpose_b`; of groups
      along K [K, N].
    offsets: int32 [groups + 1], nondecreasing, within the rows of `a`: group g
      is rows offsets[g] to offsets[g + 1].
    problem: what is computed; must describe the arguments.
    config: how.
    b_up: the second B of a gated product.
    bias: [groups, N].
    activation: elementwise, applied in float32.

  Returns:
    The result, [M, N] or [groups, M, N], and, if `problem.save_preactivation`,
    what the activation was applied to (gated: the two products). Rows that are
    in no group are zero.

  Raises:
    NotImplementedError: `is_legal` refuses, or the activation contains what a
      kernel can't compute; the reason.
  """
  p = problem
  if reason := is_legal(config, p):
    raise NotImplementedError(reason)
  approximate = epilogues.is_approximate(activation, p)
  epilogue = functools.partial(
    epilogues.apply,
    alpha=1.0,
    beta=1.0,
    activation=epilogues.fusible(activation, p),
    problem=p,
  )
  a, *b = _addressable([x for x in (a, b, b_up) if x is not None], p, config)
  if p.ragged == "m":
    operands = [*_row_tiles(offsets, p, config), a, *b]
  else:
    edges = [_edges(x, offsets, config.block_k) for x in (a, *b)]
    operands = [*_by_size(offsets, p, config), a, *b, *edges]
  if bias is not None:
    operands.append(_with_strides_for_tma(bias))
  outs = _launch(operands, epilogue, approximate, bias, p, config)
  return tuple(x[..., : p.m, : p.n] for x in outs)


def _launch(operands, epilogue, approximate, bias, p: Problem, config: Config):
  """Runs the kernel; results of the shapes that it writes."""
  name = f"sm90_ragged_{p.ragged}"
  compat.allow_ragged_copies(anywhere=name if p.ragged == "m" else None)
  out_dtype = jnp.dtype(p.out_dtype)
  lead = (p.groups,) if p.ragged == "k" else ()
  return compat.kernel(
    functools.partial(device.body, epilogue=epilogue, problem=p, config=config),
    name=name,
    out_type=[
      jax.ShapeDtypeStruct((*lead, *shape), out_dtype)
      for shape in sm90_memory.result_shapes(p, config, out_dtype.itemsize)
    ],
    grid=(plan.clusters(p, config),),
    grid_names=("cluster",),
    cluster=(config.cluster_m, config.cluster_n),
    cluster_names=("cluster_m", "cluster_n"),
    num_threads=config.consumers + 1,
    compiler_params=plgpu.CompilerParams(
      approx_math=approximate,
      unsafe_no_auto_barriers=True,  # as in `sm90_dense`
    ),
    scratch_types=scratch(p, config, out_dtype, bias, None),
  )(*operands)


def _addressable(operands, p: Problem, config: Config) -> list[jax.Array]:
  """A and B, padded where TMA can't address their rows."""
  a, *b = operands
  a_shape, b_shape = sm90_memory.operand_paddings(
    config, p, a.shape, b[0].shape
  )
  return [_padded(a, a_shape), *[_padded(x, b_shape) for x in b]]


def _padded(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
  """The matrix, or matrices, with that many rows and columns."""
  extra = [want - have for want, have in zip(shape, x.shape[-2:])]
  if not any(extra):
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, size) for size in extra])


def _with_strides_for_tma(bias: jax.Array) -> jax.Array:
  step = 16 // bias.dtype.itemsize
  return _padded(bias, (bias.shape[0], plan.cdiv(bias.shape[1], step) * step))


def _row_tiles(
  offsets: jax.Array, p: Problem, config: Config
) -> tuple[jax.Array, jax.Array]:
  """What `sm90_schedule` reads: each tile's first row, rows, group; how many.

  Rows before the first group and after the last one are of group -1.
  """
  height = config.block_m
  zero, end = jnp.zeros(1, jnp.int32), jnp.full(1, p.m, jnp.int32)
  bounds = jnp.concatenate([zero, offsets, end])
  starts, ends = bounds[:-1], bounds[1:]
  tiles = lax.div(ends - starts + (height - 1), height)
  # Tiles up to each range of rows. A masked sum, which XLA fuses; a cumulative
  # sum would be some kernels.
  before = jnp.tri(len(starts), dtype=jnp.int32)
  tile_ends = jnp.sum(before * tiles[None, :], axis=1, dtype=jnp.int32)
  tile = jnp.arange(plan.row_tiles(p, config), dtype=jnp.int32)
  of = jnp.sum(tile_ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
  of = jnp.minimum(of, len(starts) - 1)
  start, end = starts[of], ends[of]
  row = start + (tile - (tile_ends - tiles)[of]) * height
  row = jnp.maximum(jnp.minimum(row, end - height), start)
  rows = jnp.minimum(end - row, height)
  group = jnp.where((of > 0) & (of <= p.groups), of - 1, -1)
  return jnp.stack([row, rows, group], axis=1), tile_ends[-1:]


def _by_size(
  offsets: jax.Array, p: Problem, config: Config
) -> tuple[jax.Array, jax.Array]:
  """What `sm90_schedule` reads of groups along K.

  Returns:
    [groups, 3]: first row, row after the last, group, large groups first; and
    the `Facts`.
  """
  starts, ends = offsets[:-1], offsets[1:]
  sizes, rows = ends - starts, ends[-1] - starts[0]
  number = jnp.arange(p.groups, dtype=jnp.int32)
  # Counting, which XLA fuses; sorting would be kernels of its own.
  larger = sizes[None, :] > sizes[:, None]
  same = (sizes[None, :] == sizes[:, None]) & (number < number[:, None])
  rank = jnp.sum(larger | same, axis=1, dtype=jnp.int32)
  is_nth = rank[None, :] == number[:, None]
  order = jnp.sum(is_nth * number, axis=1, dtype=jnp.int32)
  filled = jnp.maximum(jnp.sum(sizes > 0, dtype=jnp.int32), 1)
  subtiles = config.consumers * len(plan.subtiles(p, config))
  facts = {
    schedules.Facts.filled: filled,
    schedules.Facts.uneven: jnp.max(sizes) > _UNEVEN * lax.div(rows, filled),
    schedules.Facts.spare: rows
    > config.block_k * subtiles * (p.groups - filled),
  }
  table = jnp.stack([starts[order], ends[order], order], axis=1)
  return table, jnp.stack([facts[i].astype(jnp.int32) for i in sorted(facts)])


def _edges(x: jax.Array, offsets: jax.Array, block_k: int) -> jax.Array:
  """[groups, block_k + 8, columns]: rows outside of whole slabs, then zeros."""
  start, end = offsets[:-1, None], offsets[1:, None]
  cut = schedules.slabs_of(start, end, block_k)
  i = jnp.arange(block_k + plan.ATOM_ROWS, dtype=jnp.int32)[None, :]
  after = cut.first + cut.whole * block_k + (i - cut.head)
  row = jnp.where(i < cut.head, start + i, after)
  is_there = i < cut.edges
  rows = jnp.take(x, jnp.where(is_there, row, 0), axis=0, mode="clip")
  return jnp.where(is_there[..., None], rows, 0)
