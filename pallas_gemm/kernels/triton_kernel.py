"""The Triton kernel of `triton_dense`: its code and its launch.

One program computes one block_m x block_n block of the result. Programs visit
the blocks in groups of `group_m` block rows, column by column inside a group,
so that programs which run at the same time share operands in L2. The compiler
turns the loop over K into a pipeline of `num_stages` slabs in shared memory.
(The raster is that of the matrix multiplication tutorial in Triton's
documentation.)

Sizes are compile-time constants, as everywhere in JAX: so the compiler knows
which rows are 16-byte aligned and which masks are always true. Rows that are
not aligned (K or N times the element size is no multiple of 16 bytes) are
loaded element by element instead of 16 bytes at a time, 16-bit ones through
registers and without the pipeline: right, but with many more instructions.
"""

import functools

import jax
import numpy as np

from pallas_gemm.kernels import triton_config
from pallas_gemm.kernels.triton_config import Config
from pallas_gemm.problem import Problem

NAME = "triton_dense"


@functools.cache
def _raster():
  """Which rows and columns of the result a program computes."""
  # pylint: disable=g-import-not-at-top
  import triton
  import triton.language as tl

  @triton.jit
  def raster(
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    group_m: tl.constexpr,
  ):
    # Groups of group_m block rows, column by column inside a group.
    blocks_m = tl.cdiv(m, block_m)
    blocks_n = tl.cdiv(n, block_n)
    program = tl.program_id(0)
    group = program // (group_m * blocks_n)
    first_m = group * group_m
    rows_in_group = min(blocks_m - first_m, group_m)
    in_group = program % (group_m * blocks_n)
    rows = (first_m + in_group % rows_in_group) * block_m
    rows += tl.arange(0, block_m)
    columns = (in_group // rows_in_group) * block_n + tl.arange(0, block_n)
    return rows, columns

  return raster


@functools.cache
def device_code():
  """The Triton kernel; built on first use, for Triton is optional."""
  # pylint: disable=g-import-not-at-top
  import triton
  import triton.language as tl

  raster = _raster()

  @triton.jit
  def triton_dense(
    a_ptr,
    b_ptr,
    c_ptr,
    out_ptr,
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    alpha: tl.constexpr,
    beta: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
    precision: tl.constexpr,
    wide: tl.constexpr,
  ):
    rows, columns = raster(m, n, block_m, block_n, group_m)
    depth = tl.arange(0, block_k)

    # `| True` folds, and with it the mask, where the size divides.
    in_rows = (rows < m) | (m % block_m == 0)
    in_columns = (columns < n) | (n % block_n == 0)
    offset = tl.int64 if wide else tl.int32  # see `needs_int64`
    rows, columns = rows.to(offset), columns.to(offset)
    offsets_k = depth.to(offset)
    # Rows past the edge read row 0 and are dropped by the store: a mask in
    # the loop would cost more. Columns can't: it would break up vectors.
    a_rows = tl.where(in_rows, rows, 0)
    a_ptrs = a_ptr + a_rows[:, None] * k + offsets_k[None, :]
    b_ptrs = b_ptr + offsets_k[:, None] * n + columns[None, :]

    acc = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, k, block_k):
      # Both operands are masked along K: 0 * garbage could be a NaN.
      in_depth = (depth < k - start) | (k % block_k == 0)
      a = tl.load(a_ptrs, in_depth[None, :], 0.0)
      b = tl.load(b_ptrs, in_depth[:, None] & in_columns[None, :], 0.0)
      acc = tl.dot(a, b, acc, input_precision=precision)
      a_ptrs += block_k
      b_ptrs += block_k * n

    if alpha != 1:
      acc = acc * alpha
    offsets = rows[:, None] * n + columns[None, :]
    inside = in_rows[:, None] & in_columns[None, :]
    if beta != 0:
      c = tl.load(c_ptr + offsets, inside, 0.0)
      acc += c.to(tl.float32) * beta
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), inside)

  return triton_dense


def launch(
  a, b, c, alpha, beta, *, problem: Problem, config: Config, precision: str
) -> jax.Array:
  """Launches the kernel; operands not empty, config legal."""
  import jax_triton  # pylint: disable=g-import-not-at-top

  m, n, k = problem.m, problem.n, problem.k
  gpu = triton_config.current_gpu()
  capability = None  # jax_triton asks the driver
  if gpu is not None:
    major, minor = gpu.compute_capability
    capability = 10 * major + minor
  return jax_triton.triton_call(
    a,
    b,
    a if c is None else c,  # beta is 0: not read
    kernel=device_code(),
    out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
    grid=(triton_config.programs(config, problem),),
    name=NAME,
    num_warps=config.num_warps,
    num_stages=config.num_stages,
    compute_capability=capability,
    m=m,
    n=n,
    k=k,
    # Rounded here, so that Triton makes no float64 constant of them.
    alpha=float(np.float32(alpha)),
    beta=float(np.float32(beta)),
    block_m=config.block_m,
    block_n=config.block_n,
    block_k=config.block_k,
    group_m=config.group_m,
    precision=precision,
    wide=needs_int64(config, problem),
  )


def needs_int64(config: Config, problem: Problem) -> bool:
  """Whether an offset, past the masked edges too, leaves 32 bits."""
  m = problem.m + config.block_m
  n = problem.n + config.block_n
  k = problem.k + config.block_k
  return max(m * k, k * n, m * n) > triton_config.INT32_MAX
