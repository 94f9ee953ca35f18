"""How matrices lie in global memory so that the Hopper kernels can use them.

TMA wants row strides that are multiples of 16 bytes, Mosaic GPU whole swizzled
swizzle atoms. Shapes for which that does not hold are padded.
"""

import math

import jax.numpy as jnp

from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem


def operand_shapes(problem: Problem):
  """Rows and columns of A and B in memory."""
  p = problem
  a = (p.k, p.m) if p.transpose_a else (p.m, p.k)
  b = (p.n, p.k) if p.transpose_b else (p.k, p.n)
  return a, b


def operand_paddings(config: Config, problem: Problem, a_shape, b_shape):
  """Rows and columns of A and B, as stored, once TMA can address them."""
  columns = plan.operand_columns(config, problem)
  a_box = config.block_m if problem.transpose_a else config.block_k
  b_box = config.block_k if problem.transpose_b else config.block_n
  a_pad = plan.padding(a_shape, columns, a_box, 2)
  b_pad = plan.padding(b_shape, columns, b_box, 2)
  return _aligned(a_shape, a_pad), _aligned(b_shape, b_pad)


def _aligned(shape, padded: tuple[int, int]) -> tuple[int, int]:
  """The padded rows and columns, with rows that TMA reads fast.

  Those of a matrix that is copied anyway start at multiples of 128 bytes; short
  ones of 32. At odd multiples of 16 they take TMA three times as long
  (`odd_sizes`).
  """
  rows, columns = padded
  if columns == shape[-1]:
    return padded
  step = 64 if columns > 64 else 16
  return rows, plan.cdiv(columns, step) * step


def result_shapes(problem: Problem, config: Config, itemsize: int):
  """Shapes of the matrices that the kernel writes."""
  p = problem
  if plan.stores_rows(p, config):
    last = [(p.m, plan.DIRECT)] if p.n % plan.DIRECT else []
    return [(p.m, p.n), *last]
  _, width = plan.subtile_shape(p, config)
  columns = plan.atom_columns(width, itemsize)
  m, n = plan.padding(plan.result_shape(p, config), width, width, itemsize)
  if n <= columns < (config.block_m if config.swap_ab else config.block_n):
    # Of a matrix that is one swizzle atom wide, Mosaic GPU drops the column
    # index of a store that is one atom wide: what lies past the edge would land
    # in column 0 instead of nowhere.
    n = 2 * columns
  return [(m, n)] * plan.outputs(p, config)


def copied_bytes(
  config: Config, problem: Problem
) -> tuple[list[int], list[int]]:
  """Bytes read and written by each copy into, and out of, a padded matrix."""
  p = problem
  a, b = operand_shapes(p)
  a_pad, b_pad = operand_paddings(config, p, a, b)
  batch_a = p.batch if p.batched_a else 1
  batch_b = p.batch if p.batched_b else 1
  into = [(a, a_pad, batch_a, 2)]
  into += [(b, b_pad, batch_b, 2)] * (2 if p.gated else 1)
  out_of = []
  if config.split_k == 1:
    shape = plan.result_shape(p, config)
    _, width = plan.subtile_shape(p, config)
    if p.c_dtype:
      size = jnp.dtype(p.c_dtype).itemsize
      padded = plan.padding(shape, width, width, size)
      into.append((shape, padded, p.batch, size))
    if not plan.stores_rows(p, config):
      size = jnp.dtype(p.out_dtype).itemsize
      padded = result_shapes(p, config, size)[0]
      out_of = [(shape, padded, p.batch, size)] * plan.outputs(p, config)
  return _copied(into), _copied(out_of)


def _copied(pairs) -> list[int]:
  return [
    size * batch * (math.prod(shape) + math.prod(padded))
    for shape, padded, batch, size in pairs
    if shape != padded
  ]
