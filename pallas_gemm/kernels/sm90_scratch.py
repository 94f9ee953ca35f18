"""The shared memory and barriers of a block of the Hopper kernels."""

import functools
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem


def scratch(problem: Problem, config: Config, out_dtype, bias, c):
  """What a block has, by the name that `sm90_body.body` uses."""
  p, cfg = problem, config
  stages, consumers = cfg.stages, cfg.consumers
  columns = plan.operand_columns(cfg, p)
  a_tile = (cfg.block_m, cfg.block_k)
  b_tile = (cfg.block_k, cfg.block_n)
  a_tile = a_tile[::-1] if p.transpose_a else a_tile
  b_tile = b_tile[::-1] if p.transpose_b else b_tile
  ring = functools.partial(_swizzled, dtype=p.dtype, columns=columns)
  buffers, width = plan.buffers(p, cfg), plan.subtile_width(p, cfg)
  subtile_rows, subtile_columns = plan.subtile_shape(p, cfg)
  subtile = (consumers, buffers, subtile_rows, subtile_columns)
  rows, share_n = plan.share(cfg)
  copies = 3 if p.gated else 2
  readers = consumers // plan.pingpong_consumers(cfg)  # of a slab
  axes = ("cluster_n",) * (cfg.cluster_n > 1) + ("cluster_m",) * (
    cfg.cluster_m > 1
  )
  scratch: dict[str, Any] = {
    "a_ring": ring((stages, *a_tile)),
    "b_rings": [ring((stages, *b_tile)) for _ in range(copies - 1)],
    "staging": [
      plgpu.SMEM(subtile, out_dtype)
      if plan.stores_rows(p, cfg)
      else _swizzled(subtile, out_dtype, subtile_columns)
      for _ in range(plan.outputs(p, cfg))
    ],
    "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
  }
  if plan.refills_ring(p, cfg):
    scratch["empty"] = (
      plgpu.ClusterBarrier(
        collective_axes=axes, num_arrivals=readers, num_barriers=stages
      )
      if axes
      else plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    )
  if p.ragged == "m":
    # Not swizzled, so that rows are stored in any number.
    scratch["partial_staging"] = plgpu.SMEM(
      (consumers, plan.WGMMA_ROWS, width), out_dtype
    )
  if p.ragged == "k":
    scratch["zeros"] = _swizzled((plan.WGMMA_ROWS, width), out_dtype, width)
  if cfg.split_k == 1 and bias is not None:
    along = share_n if p.bias == "n" else rows
    # TMA writes to multiples of 128 bytes.
    scratch["bias"] = plgpu.SMEM(
      (consumers, plan.cdiv(along, 64) * 64), bias.dtype
    )
    scratch["bias_loaded"] = plgpu.Barrier(num_barriers=consumers)
  if cfg.split_k == 1 and c is not None:
    ahead = plan.c_buffers(p, cfg)
    if not plan.c_in_place(p, cfg):
      subtile = (consumers, ahead, subtile_rows, subtile_columns)
      scratch["c"] = _swizzled(subtile, c.dtype, subtile_columns)
    scratch["c_loaded"] = plgpu.Barrier(num_barriers=consumers * ahead)
  return scratch


def _swizzled(shape: tuple[int, ...], dtype, columns: int) -> plgpu.SMEM:
  """Shared memory for tiles [..., rows, columns], free of bank conflicts."""
  itemsize = jnp.dtype(dtype).itemsize
  columns = plan.atom_columns(min(columns, shape[-1]), itemsize)
  return plgpu.SMEM(
    shape,
    jnp.dtype(dtype),
    transforms=(
      plgpu.TilingTransform((plan.ATOM_ROWS, columns)),
      plgpu.SwizzleTransform(columns * itemsize),
    ),
  )
