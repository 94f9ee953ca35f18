"""How many stages of the ring pay: slabs that a block asks for ahead.

More are not always better. A block can ask for no more slabs than it has, and
to make a stage ready takes time: 64^3 takes 2.21 us with 12 stages, 1.89 with
two (H200). And where weights are streamed through a round of tiles, what all
blocks ask for should be what memory answers at a time. Less leaves memory idle.
More only waits, and is shared out unevenly: two SMs have one way to L2, so
where some of these pairs have one block and some two, the lone blocks are done
early.

Where all SMs have as much to do, or several rounds of tiles even it out, more
does less harm, and a little more pays: on an H200 82 KB an SM of what no other
block asks for at the same time (8 to 11 MB in all).
"""

import dataclasses
import functools

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import bytes_of, cdiv, round_up
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import constants

FEWEST = 4


def suited(plan: Plan) -> Config:
  """The config with as many of its stages as pay; it has all that find room."""
  p, cfg, gpu = plan.problem, plan.config, plan.gpu
  work_tiles, pingpong = plan.tiling.work_tiles_of_a_block, plan.tiling.pingpong
  if work_tiles is None:
    return cfg
  most = round_up(work_tiles, pingpong) * plan.tiling.slabs
  fit = constants.of(gpu).stages
  is_whole = cfg.split_k == cfg.cluster_k == 1
  streams = min(p.m, p.n) <= fit.streamed_rows and is_whole
  if streams and cfg.stages < most:
    if work_tiles == 1 and _waits_unevenly(plan, fit):
      most = min(most, max(FEWEST, round(for_latency(p, cfg.block_k, gpu))))
    elif 2 * _blocks(plan) > gpu.sm_count:
      share = gpu.dram_bytes_per_s * fit.even_latency_s / gpu.sm_count
      most = min(most, max(FEWEST, 1 + round(share / _own_bytes(plan))))
  if pingpong > 1:  # each consumer has room for a work tile
    most = pingpong * max(cdiv(most, pingpong), plan.tiling.slabs)
  return cfg if cfg.stages <= most else _with_stages(cfg, most)


def for_any_rows(plan: Plan) -> Config:
  """The config without what suits this number of rows, and no batch, alone.

  It keeps its stages: another number of rows may have more slabs a block.
  """
  alone = dict.fromkeys(("cluster_m", "cluster_n", "cluster_k"), 1)
  return dataclasses.replace(plan.config, **alone, moves=False)


def for_latency(problem: Problem, block_k: int, gpu: hardware.Gpu) -> float:
  """Stages with which a round of tiles has as much on its way as memory hides.

  One slab is multiplied meanwhile.
  """
  p = problem
  slab = bytes_of(p.m * block_k, p.a.dtype) * p.a.planes
  slab += bytes_of(p.n * block_k, p.b.dtype) * p.b.planes * p.products
  return 1 + gpu.dram_bytes_per_s * constants.of(gpu).stages.latency_s / slab


def _waits_unevenly(plan: Plan, fit: constants.Stages) -> bool:
  """Whether more slabs than that would be shared out unevenly."""
  if plan.problem.batch > 1:
    return False
  sms = plan.gpu.sm_count
  some_share = sms < 2 * _blocks(plan) < fit.most_uneven * sms
  # Tiles side by side share the weights' slabs in L2.
  return some_share or min(_tiles(plan)) > 1


def _own_bytes(plan: Plan) -> float:
  """Bytes of a slab, less what other blocks ask for at the same time."""
  p, cfg = plan.problem, plan.config
  rows, columns = _tiles(plan)
  a = min(cfg.block_m, p.m) / (columns * (p.batch // p.matrices(p.a)))
  b = min(cfg.block_n, p.n) / (rows * (p.batch // p.matrices(p.b)))
  a *= bytes_of(cfg.block_k, p.a.dtype) * p.a.planes
  b *= bytes_of(cfg.block_k, p.b.dtype) * p.b.planes
  return a + b * p.products


def _tiles(plan: Plan) -> tuple[int, int]:
  """Tiles of one matrix along M and N."""
  p, cfg = plan.problem, plan.config
  return cdiv(p.m, cfg.block_m), cdiv(p.n, cfg.block_n)


def _blocks(plan: Plan) -> int:
  return plan.tiling.clusters * plan.config.blocks


@functools.cache
def _with_stages(config: Config, stages: int) -> Config:
  return dataclasses.replace(config, stages=stages)
