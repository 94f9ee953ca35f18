"""Numbers that the values of 8-bit operands are multiplied by."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.kernels.sm90.block import Arguments
from pallas_gemm.kernels.sm90.layout import round_up
from pallas_gemm.kernels.sm90.plan import Plan


class Scales(NamedTuple):
  """Of each operand, of any floating dtype; None where there is none.

  Attributes:
    a: [matrices or 1, M or 1]: a number of each row, or of all.
    b, b_up: [matrices or 1, N or 1]: of each column. Matrices of B are those of
      a batch, or one of each group; along K, where A has one of each too.

  Those of blocks are [.., slabs of 128, M] and [.., slabs, blocks of 128 of N],
  of lines [.., slabs, N]. Groups along K share them out with their slabs.
  """

  a: jax.Array | None = None
  b: jax.Array | None = None
  b_up: jax.Array | None = None


NO_SCALES = Scales()


def with_scales(plan: Plan, operands: Arguments, scales: Scales) -> Arguments:
  """What the kernel is given, with scales in float32.

  Its threads read no further than their end. The interpreter reads whole tiles:
  there, NaN follows.
  """
  cfg, is_on_gpu = plan.config, compat.targets_gpu()

  def read(x, tile: int):
    x = x.astype(jnp.float32)
    if is_on_gpu or x.shape[1:] == (1,):
      return x
    beyond = [(0, 0)] * (x.ndim - 1) + [(0, tile)]
    return jnp.pad(x, beyond, constant_values=jnp.nan)

  of_b = [x for x in (scales.b, scales.b_up) if x is not None]
  if plan.problem.has_blocks:  # which TMA copies
    found = {"scale_a": _addressable(scales.a)}
    return operands._replace(**found, scale_b=[_addressable(x) for x in of_b])
  if scales.a is not None:
    tile = cfg.block_m * cfg.cluster_m
    operands = operands._replace(scale_a=read(scales.a, tile))
  tile = cfg.block_n * cfg.cluster_n
  return operands._replace(scale_b=[read(x, tile) for x in of_b])


def _addressable(x: jax.Array) -> jax.Array:
  """In float32, in rows that are multiples of 16 bytes."""
  x, size = x.astype(jnp.float32), x.shape[-1]
  return jnp.pad(x, ((0, 0), (0, 0), (0, round_up(size, 4) - size)))


def scaled(sums: jax.Array, a, b) -> jax.Array:
  """Sums [batch, M, N] times the scales of A and B."""
  sums = sums if a is None else sums * a.astype(jnp.float32)[:, :, None]
  return sums if b is None else sums * b.astype(jnp.float32)[:, None, :]
