"""Products on Hopper: one persistent kernel for every op.

    out = activation(alpha * A @ B + beta * C + bias)              `dense`
    out = activation(A @ B) * (A @ B2)                             (gated)
    out[rows of g] = activation(A[rows of g] @ B[g] + bias[g])     `grouped`
    out[g] = A[rows of g].T @ B[rows of g]                         (along K)

A block has one warp that loads and up to three warpgroups that multiply. The
loader fills a ring of `stages` slabs by TMA, the consumers feed it to wgmma,
and both walk over tiles without ever stopping for the other: while consumers
write a tile, the ring fills with the next one's slabs (`stores`, `epilogue`).
Rungs 10-12 of the ladder take that apart step by step; what is here beyond
them:

* **Short products** have no barriers for slots of the ring that nothing is
  loaded to twice, and no loop where a block has one tile: a barrier takes a
  thread 27 cycles to make ready. 512^3 3.46 -> 3.23 us (H200).
* **Short sums** take less time than their results take to store. There two
  consumers ping-pong (`Config.split` "pingpong"), each with whole tiles of its
  own: one stores while the other multiplies, each with slots of the ring that
  hold a tile's slabs. 4096 x 2048 x 64: 7.3 -> 6.2 us; 8192 x 4096 x 64 with
  bias and gelu 37.5 -> 31.2 (H200).
* **Gated products** keep two accumulators and load two matrices B a slab.
* **Batches** come after the tiles of a matrix in the tile order, parts of K
  after them; an operand without a batch dimension is shared.
* **Swapped operands** (`Config.swap_ab`): the tile's rows, of which wgmma takes
  64, lie along N, its columns, in steps of 16, along M. The result and C are
  transposed on their way (stmatrix, ldmatrix), in float32 threads store it from
  registers; A stored [K, M] is transposed before, since wgmma reads columns in
  steps of 8 along K alone. 640 x 2048 x 2048 in float32 takes 10.1 us, 11.5
  with the best without (H100). 384 x 5760 x 2880 takes 20.3 us with tiles of 96
  rows by 192 columns, 24.0 with the best without; 200 x 4096 x 14336 35.0 and
  38.8 us (H200).
* **Parts of K**, where tiles are few and sums long: of a cluster, whose blocks
  send each other their sums (`reduction`); or of all blocks (`split_k`), which
  write float32 sums that XLA adds in a fixed order, and applies the epilogue
  to. Same bits every time, no atomics.

Operands that TMA can't address are copied by XLA into padded ones, each on its
own (`layout`), but for small ones and weights of groups, which threads load
(`by_threads`). A result that it can't address is stored by threads, row by row
or right from registers, or sliced.
Tiles may hang over every edge: TMA fills with zeros and drops stores. Along
rows that are no whole number of swizzle atoms they are shifted inward, to end
with the matrix (`Matrices.shifted_inward`).

Sources: CUTLASS (warp-specialised persistent kernels, ping-pong among them,
tile order), DeepGEMM (block_n that is no power of two, to cut the last wave),
JAX's `hopper_matmul_mgpu` (idiom in Mosaic GPU).
"""

from collections.abc import Callable, Sequence
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_gemm import compat, mosaic
from pallas_gemm.kernels import epilogues
from pallas_gemm.kernels.sm90 import planes, reduction, tables
from pallas_gemm.kernels.sm90.block import Arguments, Block, Results, Shared
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.consumer import consume
from pallas_gemm.kernels.sm90.layout import round_up
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.producer import produce
from pallas_gemm.kernels.sm90.scales import (
  NO_SCALES,
  Scales,
  scaled,
  with_scales,
)
from pallas_gemm.problem import Problem

# A matrix, or the planes of one.
type Operand = jax.Array | Sequence[jax.Array]
# A function of float32, elementwise.
Activation = Callable[[jax.Array], jax.Array]


def dense(
  a: jax.Array,
  b: Operand,
  *,
  problem: Problem,
  config: Config,
  b_up: Operand | None = None,
  bias: jax.Array | None = None,
  c: jax.Array | None = None,
  alpha: float | jax.Array = 1.0,
  beta: float | jax.Array = 1.0,
  activation: Activation | None = None,
  scales: Scales = NO_SCALES,
) -> tuple[jax.Array, ...]:
  """Computes `problem`, which has no groups, with `config`.

  Args:
    a: [batch or 1, M, K], stored [.., K, M] unless `problem.a.k_last`.
    b: [batch or 1, K, N], stored [.., N, K] if `problem.b.k_last`; or its
      planes.
    problem: what is computed; must describe the arguments.
    config: how; one that `legal.reason` does not refuse.
    b_up: the second B of a gated product.
    bias: [N] or [M], as `problem.epilogue.bias` says.
    c: [batch, M, N].
    alpha: factor of the product, not of gated ones. A Python number is
      compiled in; a float32 array of shape () is read when the kernel runs, so
      that one kernel serves all values.
    beta: factor of C, likewise. C is read and multiplied whatever the value,
      so that NaN of C remains where beta is 0.
    activation: elementwise, applied in float32.
    scales: of A and B, those that `problem` says there are. They are applied
      before all else.

  Returns:
    The result [batch, M, N] and, if `problem.epilogue.save`, what the
    activation was applied to (gated: the two products).

  Raises:
    NotImplementedError: the activation contains what a kernel can't compute;
      the reason.
    ValueError: alpha is a factor of results in int32.
  """
  is_plain = not isinstance(alpha, jax.Array) and alpha == 1
  if problem.out_dtype == "int32" and not is_plain:
    raise ValueError(f"alpha must be 1 for results in int32, got {alpha}")
  plan = Plan.of(problem, config)
  if config.swap_ab:
    a, b, scales = b, a, Scales(scales.b, scales.a)
  p, (a_shape, b_shape) = plan.problem, plan.matrices.operand_paddings
  stored = [x for x in (a, b, b_up) if x is not None]
  is_a, is_b = plan.tiling.transposed
  a, *b = (
    [jnp.swapaxes(v, 1, 2) if swaps else v for v in planes.listed(x)]
    for x, swaps in zip(stored, (is_a, is_b, is_b))
  )
  operands = Arguments(
    tables=(),
    a=_operand(plan, a, a_shape, 0),
    b=[plane for x in b for plane in _operand(plan, x, b_shape, 1)],
  )
  epilogue = _epilogue(plan, activation, alpha=alpha, beta=beta)
  if config.split_k > 1:
    sums = _launch(plan, operands, lambda x, c, bias: x, is_approximate=False)
    totals = [  # in order
      functools.reduce(jnp.add, x) for x in _dense_results(plan, sums.out)
    ]
    of_b = scales.b, scales.b_up
    totals = [scaled(x, scales.a, scale) for x, scale in zip(totals, of_b)]
    outs = epilogue(totals, c, _bias_of(totals[0].shape, bias, p))
    return tuple(x.astype(p.out_dtype) for x in outs)
  operands = operands._replace(
    alpha=None if p.epilogue.gated else _read_factor(alpha),
    beta=None if p.epilogue.gated or c is None else _read_factor(beta),
    bias=bias,
    c=None if c is None else _matrices(c, plan.matrices.c_padding, p.batch > 1),
  )
  operands = with_scales(plan, operands, scales)
  is_approximate = epilogues.is_approximate(activation, p)
  results = _launch(plan, operands, epilogue, is_approximate)
  return tuple(_dense_results(plan, results.out))


def grouped(
  a: jax.Array,
  b: Operand,
  offsets: jax.Array,
  *,
  problem: Problem,
  config: Config,
  b_up: Operand | None = None,
  bias: jax.Array | None = None,
  activation: Activation | None = None,
  scales: Scales = NO_SCALES,
) -> tuple[jax.Array, ...]:
  """Computes `problem`, which has groups, with `config`; see `groups`.

  Args:
    a: [M, K]; of groups along K stored [K, M], of 8 bits [M, K].
    b: [groups, K, N], stored [groups, N, K] if `problem.b.k_last`; of groups
      along K [K, N], of 8 bits stored [N, K]; or its planes.
    offsets: int32 [groups + 1], nondecreasing, within the rows of `a`: group g
      is rows offsets[g] to offsets[g + 1]. Of groups along K of 8 bits, all
      are multiples of 128, and what a group has less rows than that is zeros.
    bias: [groups, N].
    problem, config, b_up, activation, scales: as of `dense`.

  Returns:
    The result, [M, N] or [groups, M, N], and, if `problem.epilogue.save`,
    what the activation was applied to (gated: the two products). Rows that are
    in no group are zero.

  Raises:
    NotImplementedError: the activation contains what a kernel can't compute;
      the reason.
  """
  plan = Plan.of(problem, config)
  p, (a_shape, b_shape) = plan.problem, plan.matrices.operand_paddings
  stored = [planes.listed(x) for x in (b, b_up) if x is not None]
  if plan.tiling.transposed[1]:
    stored = [[jnp.swapaxes(v, 1, 2) for v in x] for x in stored]
  a = planes.split(_padded(a, a_shape), p.a.planes)
  padded = [[_padded(v, b_shape) for v in x] for x in stored]
  count = 1 if plan.loader.slabs_by_tma else p.b.planes
  b = [v for x in padded for v in planes.made(x, count)]
  made, k_tails = tables.make(plan, offsets, (*a, *b))
  b_last = [_last_slab(x, plan) for x in b if plan.matrices.b_last_apart]
  if plan.loader.reads_past_rows:
    b = [_read_past_rows(x, config.block_n) for x in b]
  operands = Arguments(made, a, b, k_tails, b_last)
  if bias is not None:
    step = 16 // bias.dtype.itemsize  # of strides that TMA takes
    shape = bias.shape[0], round_up(bias.shape[1], step)
    operands = operands._replace(bias=_padded(bias, shape))
  operands = with_scales(plan, operands, scales)
  epilogue = _epilogue(plan, activation)
  is_approximate = epilogues.is_approximate(activation, p)
  results = _launch(plan, operands, epilogue, is_approximate)
  return tuple(x[..., : p.m, : p.n] for x in results.out)


def _epilogue(
  plan: Plan,
  activation: Activation | None,
  alpha: float | jax.Array = 1.0,
  beta: float | jax.Array = 1.0,
) -> Callable[..., list[jax.Array]]:
  """The results from accumulators, C and bias."""
  return functools.partial(
    epilogues.apply,
    alpha=alpha,
    beta=beta,
    activation=epilogues.fusible(activation, plan.problem),
    problem=plan.problem,
  )


def _read_factor(factor: float | jax.Array) -> jax.Array | None:
  """What the kernel reads; factors one by one: joining them takes a kernel."""
  return factor.reshape(1) if isinstance(factor, jax.Array) else None


def _operand(
  plan: Plan, x: list[jax.Array], shape: tuple[int, int], side: int
) -> list[jax.Array]:
  """The planes of A, or of a B, as the kernel reads them."""
  p, cfg = plan.problem, plan.config
  operand, block = ((p.a, cfg.block_m), (p.b, cfg.block_n))[side]
  x = [_matrices(v, shape, operand.batched) for v in x]
  if not plan.loader.operands[side]:
    return planes.made(x, operand.planes)
  if not plan.loader.reads_past_rows:
    return x
  k = plan.tiling.slabs * cfg.split_k * cfg.cluster_k * cfg.block_k - p.k
  rows, columns = (block, k) if operand.k_last else (k, block)
  return [_read_past_rows(v, columns, rows) for v in x]


def _read_past_rows(x: jax.Array, columns: int, rows: int = 0) -> jax.Array:
  """Matrices of which a kernel may read windows that run on past a row's end.

  What it finds there is the next row's, so all but the last rows have it. The
  interpreter checks the end of each row: there, rows get that many columns
  more, of NaN; and matrices that many rows more, of zeros.
  """
  if compat.targets_gpu():
    return x
  lead = [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, [*lead, (0, 0), (0, columns)], constant_values=jnp.nan)
  return jnp.pad(x, [*lead, (0, rows), (0, 0)])


def _last_slab(b: jax.Array, plan: Plan) -> jax.Array:
  """The last slab of each group's B, filled up with zeros."""
  start = (plan.tiling.slabs - 1) * plan.config.block_k
  last = b[:, :, start:] if plan.problem.b.k_last else b[:, start:]
  return _padded(last, plan.matrices.last_slab_shape)


def _matrices(x: jax.Array, shape: tuple[int, int], batched: bool) -> jax.Array:
  """The batch of matrices, or the one that all products share, padded."""
  x = _padded(x, shape)
  return x if batched else x.reshape(x.shape[1:])


def _padded(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
  """The matrix, or matrices, with that many rows and columns."""
  extra = [want - have for want, have in zip(shape, x.shape[-2:])]
  if not any(extra):
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, size) for size in extra])


def _launch(
  plan: Plan, operands: Arguments, epilogue, is_approximate: bool
) -> Results:
  """Runs the kernel; the results are of the shapes that it writes."""
  p, cfg = plan.problem, plan.config
  is_shifted = any(plan.matrices.shifted_inward)
  overlap = plan.tiling.subtiles_overlap or plan.tiling.tiles_overlap
  of_ragged = "column" if is_shifted else None
  bias_dtype = None if operands.bias is None else operands.bias.dtype
  axes = {"cluster_m": cfg.cluster_m, "cluster_n": cfg.cluster_n}
  if cfg.cluster_k > 1:
    axes["cluster_k"] = cfg.cluster_k
  (results,) = compat.kernel(
    functools.partial(_body, plan=plan, epilogue=epilogue),
    name=_kernel_name(p),
    out_type=[_result_types(plan)],
    grid=(plan.tiling.clusters,),
    grid_names=("cluster",),
    cluster=tuple(axes.values()),
    cluster_names=tuple(axes),
    num_threads=cfg.consumers + 1,
    compiler_params=mosaic.CompilerParams(
      approx_math=is_approximate,
      # Mosaic GPU would put a barrier around every store to shared memory;
      # the kernel has those that are needed.
      unsafe_no_auto_barriers=True,
      narrow_copies_anywhere=bool(p.groups) or overlap or is_shifted,
      wide_copies_at_any_row=p.along == "k" and not p.has_whole_slabs,
      wide_copies_of_ragged="atom" if plan.matrices.b_last_apart else of_ragged,
      columns_inside_atoms=plan.matrices.unaligned_columns,
      evict_results_first=plan.matrices.evicts_results,
    ),
    scratch_types=plan.memory.scratch_types(bias_dtype),
  )(operands)
  return results


def _body(operands: Arguments, results: Results, *, plan, epilogue, **shared):
  """What a block does."""
  block = Block(
    plan=plan,
    operands=operands,
    results=results,
    shared=Shared(**shared),
    cluster=lax.axis_index("cluster"),
    warpgroup=lax.axis_index("warpgroup"),
  )
  consumers = plan.config.consumers
  pl.when(block.warpgroup == consumers)(lambda: produce(block))
  pl.when(block.warpgroup < consumers)(lambda: consume(block, epilogue))


def _kernel_name(problem: Problem) -> str:
  if problem.groups:
    return f"sm90_ragged_{problem.along}"
  return "sm90_gated" if problem.epilogue.gated else "sm90_dense"


def _result_types(plan: Plan) -> Results:
  """What the kernel writes: a matrix each, of a batch, of groups, of parts."""
  p, cfg, tiling = plan.problem, plan.config, plan.tiling
  count = p.groups.count if p.along == "k" else p.batch * cfg.split_k
  lead = (count,) if count > 1 or p.along == "k" else ()
  shapes = plan.matrices.result_shapes
  if tiling.by_elements and not compat.targets_gpu():  # stored in whole tiles
    rows = tiling.grid[0] * cfg.cluster_m * cfg.block_m
    columns = tiling.read_columns
    shapes = [(columns, rows) if cfg.swap_ab else (rows, columns)]
  out = [
    jax.ShapeDtypeStruct((*lead, *shape), jnp.dtype(plan.matrices.stored_dtype))
    for shape in shapes
  ]
  return Results(out, reduction.result_types(plan))


def _dense_results(plan: Plan, outs: Sequence[jax.Array]) -> list[jax.Array]:
  """[batch, M, N] each; of parts of K [parts, batch, M, N]."""
  p, splits = plan.problem, plan.config.split_k
  m, n = plan.matrices.result_shape
  shape = (splits, p.batch, m, n) if splits > 1 else (p.batch, m, n)
  return [x[..., :m, :n].reshape(shape) for x in outs]


def _bias_of(shape: tuple[int, ...], bias, problem: Problem):
  """The bias of each result, if there is one."""
  if bias is None:
    return None
  bias = bias[:, None] if problem.epilogue.bias == "m" else bias
  return jnp.broadcast_to(bias.astype(jnp.float32), shape)
