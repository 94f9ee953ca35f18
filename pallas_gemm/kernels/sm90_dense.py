"""The dense product on Hopper: one persistent kernel for every op.

    out = activation(alpha * A @ B + beta * C + bias)
    out = activation(A @ B) * (A @ B2)                      (gated)

A block has one warp that loads and up to three warpgroups that multiply. The
loader fills a ring of `stages` slabs by TMA, the consumers feed it to wgmma,
and both walk over tiles without ever stopping for the other: while consumers
write a tile, the ring fills with the next one's slabs. Rungs 10-12 of the
ladder take that apart step by step; what is here beyond them:

* **A tile is written while the next one is multiplied**, subtile by subtile,
  from registers (`sm90_stores`).
* **Layouts.** wgmma reads 16-bit operands along either dimension, so all of
  NN, NT, TN and TT are read as they are stored: a tile is loaded in its stored
  order and handed to wgmma through a transposed reference.
* **Short products** have no barriers for slots of the ring that nothing is
  loaded to twice, and no loop where a block has one tile: each barrier takes 45
  cycles to make ready. 512^3 3.46 -> 3.23 us (H200).
* **Short sums** take less time than their results take to store. There two
  consumers ping-pong (`Config.split` "pingpong"), each with whole tiles of its
  own: one stores while the other multiplies, each with slots of the ring that
  hold a tile's slabs. 4096 x 2048 x 64: 7.3 -> 6.2 us; 8192 x 4096 x 64 with
  bias and gelu 37.5 -> 31.2 (H200).
* **The epilogue is fused.** Bias and C are fetched by TMA while the product
  runs, and alpha, beta, bias and activation are applied to the accumulators in
  registers, before the only rounding. C is prefetched. Factors that are arrays
  are read by the consumers, once, while the first slab is on its way.
* **Gated products** keep two accumulators and load two matrices B a slab.
* **Batches** are the outermost coordinate of the tile order; an operand
  without a batch dimension is shared.
* **Swapped operands** (`Config.swap_ab`): the tile's rows, of which wgmma takes
  64, lie along N, its columns, in steps of 16, along M. The result and C are
  transposed on their way (stmatrix, ldmatrix). 384 x 5760 x 2880
  takes 20.3 us with tiles of 96 rows by 192 columns, 24.0 with the best
  without; 200 x 4096 x 14336 35.0 and 38.8 us (H200).
* **A partial last wave** of tiles leaves SMs idle. Its tiles, columns of them
  at the end of N, are cut along K (`Config.tail_split_k`): the last work tiles
  of the same launch, whose partial sums a second kernel adds in order and puts
  in place. 768 x 7168 x 18432 (TN): 276 -> 259 us, 2048 x 32000 x 4096: 672 ->
  657, 500 x 4544 x 18176: 125 -> 115 (H200).
* **split_k** writes float32 partial sums of parts of K, which XLA adds in a
  fixed order (and applies the epilogue to): same bits every time, no atomics.

**Shapes.** TMA wants row strides that are multiples of 16 bytes, and Mosaic
GPU wants a matrix in memory to be a whole number of swizzle atoms (8 rows of
128 bytes) or less than one. Operands for which that does not hold are
copied by XLA into padded ones, each on its own; the result is sliced. Tiles
may hang over every edge: TMA fills with zeros and drops stores. Rows past the
last are not asked for where that is possible, since they take longer than
others: 192 x 6144 x 6144 with 128 x 96 tiles, 44.6 -> 26.8 us (H200).

Sources: Osama et al., "Stream-K" (2023; whole tiles first, then those of
the last wave in parts of K); CUTLASS (warp-specialised persistent kernels,
ping-pong among them, tile order), DeepGEMM (block_n that is no power of two, to
cut the last wave), JAX's `hopper_matmul_mgpu` (idiom in Mosaic GPU).
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
from pallas_gemm.kernels.problem import Config, Problem
from pallas_gemm.kernels.sm90_scratch import scratch

is_legal = sm90_legal.is_legal
shared_bytes = plan.shared_bytes


def matmul(
  a: jax.Array,
  b: jax.Array,
  *,
  problem: Problem,
  config: Config,
  b_up: jax.Array | None = None,
  bias: jax.Array | None = None,
  c: jax.Array | None = None,
  alpha: float | jax.Array = 1.0,
  beta: float | jax.Array = 1.0,
  activation: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
  """Computes `problem` with `config`.

  Args:
    a: [batch or 1, M, K], stored [.., K, M] if `problem.transpose_a`.
    b: [batch or 1, K, N], stored [.., N, K] if `problem.transpose_b`.
    problem: what is computed; must describe the arguments.
    config: how.
    b_up: the second B of a gated product.
    bias: [N] or [M], as `problem.bias` says.
    c: [batch, M, N].
    alpha: factor of the product, not of gated ones. A Python number is
      compiled in; a float32 array of shape () is read when the kernel runs, so
      that one kernel serves all values.
    beta: factor of C, likewise. C is read and multiplied whatever the value,
      so that NaN of C remains where beta is 0.
    activation: elementwise, applied in float32.

  Returns:
    The result [batch, M, N] and, if `problem.save_preactivation`, what the
    activation was applied to (gated: the two products).

  Raises:
    NotImplementedError: `is_legal` refuses, or the activation contains what a
      kernel can't compute; the reason.
  """
  if reason := is_legal(config, problem):
    raise NotImplementedError(reason)
  if config.swap_ab:
    a, b, problem = b, a, plan.computed(problem, config)
  approximate = epilogues.is_approximate(activation, problem)
  activation = epilogues.fusible(activation, problem)
  epilogue = functools.partial(
    epilogues.apply,
    alpha=alpha,
    beta=beta,
    activation=activation,
    problem=problem,
  )
  if config.split_k == 1:
    operands = (a, b, b_up, bias, c, _read_factors(alpha, beta, c, problem))
    outs, parts = _launch(*operands, epilogue, approximate, problem, config)
    if config.tail_columns:
      outs = [_with_last_wave(*outs, parts, bias, epilogue, problem, config)]
    return tuple(outs)
  operands = (a, b, b_up, None, None, {})
  parts, _ = _launch(*operands, _no_epilogue, False, problem, config)
  totals = [_sum(x) for x in parts]
  outs = epilogue(totals, c, _bias_of(totals[0].shape, bias, problem))
  return tuple(x.astype(problem.out_dtype) for x in outs)


def _read_factors(alpha, beta, c, problem: Problem) -> dict[str, jax.Array]:
  """The factors that the kernel reads, by name.

  One by one: to put them into one array would take a kernel.
  """
  if problem.gated:
    return {}
  factors = {"alpha": alpha} | ({} if c is None else {"beta": beta})
  return {
    name: factor
    for name, factor in factors.items()
    if isinstance(factor, jax.Array)
  }


def _with_last_wave(
  out, parts, bias, epilogue, problem: Problem, config: Config
):
  """The result, with the last columns from the sums over parts of K."""
  start = plan.last_wave_start(problem, config)
  totals = [_sum(x[:, : problem.m, : problem.n - start]) for x in parts]
  if problem.bias == "n":
    bias = bias[start:]
  (last,) = epilogue(totals, None, _bias_of(totals[0].shape, bias, problem))
  last = last.astype(problem.out_dtype)[None]
  return lax.dynamic_update_slice(out, last, (0, 0, start))


def _sum(parts: jax.Array) -> jax.Array:
  """The sum over the first axis, in order."""
  total = parts[0]
  for part in parts[1:]:
    total = total + part
  return total


def _bias_of(shape: tuple[int, ...], bias, problem: Problem):
  """The bias of each result, if there is one."""
  if bias is None:
    return None
  bias = bias[:, None] if problem.bias == "m" else bias
  return jnp.broadcast_to(bias.astype(jnp.float32), shape)


def _no_epilogue(accumulators, c, bias):
  del c, bias
  return accumulators


def _launch(
  a,
  b,
  b_up,
  bias,
  c,
  factors: dict[str, jax.Array],
  epilogue,
  approximate,
  problem: Problem,
  config: Config,
):
  """Runs the kernel.

  Returns:
    The results, [batch, M, N], or with split_k partial sums of each product,
    [split, batch, M, N]; and of a split last wave the sums over parts of
    K, [parts, rows, columns] of whole tiles.
  """
  p = problem
  splits = config.split_k
  parts = p.batch * splits
  out_dtype = jnp.dtype("float32" if splits > 1 else p.out_dtype)
  a_pad, b_pad = sm90_memory.operand_paddings(config, p, a.shape, b.shape)
  operands = [_pad(a, a_pad, p.batched_a), _pad(b, b_pad, p.batched_b)]
  if p.gated:
    operands.append(_pad(b_up, b_pad, p.batched_b))
  operands += [x.reshape(1) for x in factors.values()]
  fused = splits == 1
  if fused and bias is not None:
    operands.append(bias)
  if fused and c is not None:
    _, width = plan.subtile_shape(p, config)
    c_pad = plan.padding(c.shape, width, width, c.dtype.itemsize)
    operands.append(_pad(c, c_pad, p.batch > 1))
  lead = (parts,) if parts > 1 else ()
  out_types = [
    jax.ShapeDtypeStruct((*lead, *shape), out_dtype)
    for shape in sm90_memory.result_shapes(p, config, out_dtype.itemsize)
  ]
  results = len(out_types)
  if config.tail_columns:
    rows = plan.grid(p, config)[0] * config.block_m
    columns = config.tail_columns * config.block_n
    partial = jax.ShapeDtypeStruct(
      (config.tail_split_k, rows, columns), jnp.float32
    )
    out_types += [partial] * (1 + p.gated)
  name = "sm90_gated" if p.gated else "sm90_dense"
  overlap = plan.subtiles_overlap(p, config)
  name += "_overlap" if overlap else ""
  compat.allow_ragged_copies(anywhere=name if overlap else None)
  outs = compat.kernel(
    functools.partial(
      device.body,
      epilogue=epilogue,
      problem=p,
      config=config,
      factors=tuple(factors),
    ),
    name=name,
    out_type=out_types,
    grid=(plan.clusters(p, config),),
    grid_names=("cluster",),
    cluster=(config.cluster_m, config.cluster_n),
    cluster_names=("cluster_m", "cluster_n"),
    num_threads=config.consumers + 1,
    compiler_params=plgpu.CompilerParams(
      approx_math=approximate,
      # Mosaic GPU would put a barrier around every store to shared memory;
      # `body` has those that are needed.
      unsafe_no_auto_barriers=True,
    ),
    scratch_types=scratch(p, config, out_dtype, bias, c),
  )(*operands)
  outs, last_wave_parts = outs[:results], outs[results:]
  shape = (splits, p.batch) if splits > 1 else (p.batch,)
  m, n = plan.result_shape(p, config)
  if plan.stores_rows(p, config) and p.n % plan.DIRECT:
    out, last = outs  # its last columns are in an array of their own
    at = (0,) * len(lead) + (0, p.n - p.n % plan.DIRECT)
    outs = [lax.dynamic_update_slice(out, last[..., : p.n % plan.DIRECT], at)]
  return [x[..., :m, :n].reshape(*shape, m, n) for x in outs], last_wave_parts


def _pad(x, padded: tuple[int, int], batched: bool):
  """The matrix, or batch of them, padded to that many rows and columns."""
  rows, columns = padded[0] - x.shape[-2], padded[1] - x.shape[-1]
  if rows or columns:
    x = jnp.pad(x, ((0, 0), (0, rows), (0, columns)))
  return x if batched else x.reshape(x.shape[1:])
