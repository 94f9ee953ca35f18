"""Arrays quantised along both of their dimensions, from one read on Hopper.

Or the maxima of which scales along each are made.

A primitive, since only its lowering knows whether the array lies on one device:
there the kernel of `quantizing` runs, elsewhere XLA makes the same bits.
"""

import functools
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import batching, mlir
import jax.numpy as jnp

from pallas_gemm import compat, quantization
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.ops import sharding
from pallas_gemm.quantization import BLOCK

# CUDA takes 65535 blocks of 128 along either side.
_MOST = 65535 * BLOCK

both_p = core.Primitive("pallas_gemm_both_orders")
both_p.multiple_results = True


def in_blocks(
  x: jax.Array, dtype: str, *, square: bool, power_of_two: bool
) -> list[jax.Array]:
  """Values [B, R, C], scales, and both of the transposes.

  Args:
    x: [B, R, C].
    dtype: of the values.
    square: blocks are 128 x 128, scales [B, ceil(R / 128), ceil(C / 128)] and
      transposed; else 1 x 128, and scales [B, ceil(C / 128), R] and
      [B, ceil(R / 128), C].
    power_of_two: as of `quantize`.
  """
  how = {"dtype": dtype, "power_of_two": power_of_two}
  return both_p.bind(x, scaling="blocks" if square else "rows", **how)


def by_factors(
  x: jax.Array, factors: tuple[Any, Any], factors_t: tuple[Any, Any], dtype: str
) -> list[jax.Array]:
  """Values [B, R, C] and [B, C, R], of what is multiplied by known factors.

  Args:
    x: [B, R, C].
    factors: of columns, [B or 1, C or 1], and of rows, [B or 1, R or 1].
    factors_t: the same of the transpose.
    dtype: of the values.
  """
  how = {"dtype": dtype, "power_of_two": False}
  return both_p.bind(x, *factors, *factors_t, scaling="given", **how)


def maxima(
  x: jax.Array, columns: jax.Array, rows: jax.Array, dtype: str
) -> list[jax.Array]:
  """The largest magnitudes of rows, [B, R], and of columns, [B, C].

  Args:
    x: [B, R, C].
    columns: their factors for the maxima of rows, [B or 1, C or 1].
    rows: their factors for the maxima of columns, [B or 1, R or 1].
    dtype: of the values that scales are made for.
  """
  how = {"dtype": dtype, "power_of_two": False}
  return both_p.bind(x, columns, rows, scaling="maxima", **how)


def _by_xla(x, *given, scaling: str, dtype: str, power_of_two: bool):
  swap = functools.partial(jnp.swapaxes, axis1=-1, axis2=-2)
  if scaling == "given":
    found = []
    for v, (columns, rows) in ((x, given[:2]), (swap(x), given[2:])):
      v = v.astype(jnp.float32) * columns[..., None, :] * rows[..., None]
      found.append(quantization.rounded(v, dtype))
    return found
  if scaling == "maxima":
    (columns, rows), v = given, x.astype(jnp.float32)
    v, t = v * columns[..., None, :], v * rows[..., None]
    v = quantization.maxima(v, dtype, (1, 1, None))[..., 0]
    return [v, quantization.maxima(t, dtype, (1, None, 1))[:, 0]]
  block = (1, BLOCK, BLOCK) if scaling == "blocks" else (1, 1, BLOCK)
  how = {"block": block, "power_of_two": power_of_two}
  q = quantization.quantize(x, dtype, **how)
  if scaling == "blocks":
    return [q.values, q.scale, swap(q.values), swap(q.scale)]
  t = quantization.quantize(swap(x), dtype, **how)
  return [q.values, swap(q.scale), t.values, swap(t.scale)]


def _by_kernel(x, *given, scaling: str, dtype: str, power_of_two: bool):
  # Which imports Mosaic GPU.
  from pallas_gemm.kernels.sm90 import quantizing

  with jax.enable_x64(False):
    if scaling == "given":
      factors = quantizing.Factors(*given[:2]), quantizing.Factors(*given[2:])
      return list(quantizing.cast_both(x, *factors, dtype))
    if scaling == "maxima":
      factors = quantizing.Factors(*given)
      return list(quantizing.maxima_both(x, factors, dtype))
    how = {"scaling": scaling, "power_of_two": power_of_two}
    return list(quantizing.quantize_both(x, dtype, **how))


@both_p.def_abstract_eval
def _abstract_eval(*avals, scaling: str, dtype: str, power_of_two: bool):
  matrices, rows, columns = avals[0].shape
  rows_of, columns_of = (-(-n // BLOCK) for n in (rows, columns))
  scales = {
    "rows": [(columns_of, rows), (rows_of, columns)],
    "blocks": [(rows_of, columns_of), (columns_of, rows_of)],
    "given": [None, None],
  }
  if scaling == "maxima":
    shapes, dtypes = [(rows,), (columns,)], [jnp.float32] * 2
  else:
    shapes = [(rows, columns), scales[scaling][0]]
    shapes += [(columns, rows), scales[scaling][1]]
    dtypes = [dtype, jnp.float32] * 2
  return [
    compat.shaped_like(avals, (matrices, *shape), jnp.dtype(kind))
    for shape, kind in zip(shapes, dtypes)
    if shape is not None
  ]


def _lower(ctx, *operands, cuda: bool, **how):
  on_one = not compat.is_partitioned(ctx.module_context.axis_context)

  def run(x, *given):
    fits = all(isinstance(n, int) and n <= _MOST for n in x.shape[1:])
    by_kernel = fits and on_one and x.size and cuda and not legal.wrong_gpu()
    return (_by_kernel if by_kernel else _by_xla)(x, *given, **how)

  with sharding.lowered_for(ctx, cuda):
    return compat.lowered(ctx, run, operands, typed=False)


def _dce(used: list[bool], eqn) -> tuple[list[bool], Any]:
  if any(used):
    return [True] * len(eqn.invars), eqn
  return [False] * len(eqn.invars), None


def _batch(operands, dims, **how):
  """The new dimension beside that of matrices."""
  moved = [
    v[None] if d is None else jnp.moveaxis(v, d, 0)
    for v, d in zip(operands, dims)
  ]
  size = next(v.shape[0] for v, d in zip(moved, dims) if d is not None)
  matrices = moved[0].shape[1]

  def merged(v):
    v = jnp.broadcast_to(v, (size, matrices, *v.shape[2:]))
    return v.reshape(size * matrices, *v.shape[2:])

  outs = both_p.bind(*map(merged, moved), **how)
  outs = [v.reshape(size, matrices, *v.shape[1:]) for v in outs]
  return outs, [0] * len(outs)


compat.register_primitive(both_p, _dce)
batching.primitive_batchers[both_p] = _batch
for _platform in (None, "cuda"):
  _rule = functools.partial(_lower, cuda=_platform == "cuda")
  mlir.register_lowering(both_p, _rule, platform=_platform)
