"""What follows from (problem, config), by the names that `plan.Plan` has."""

import jax.numpy as jnp

from pallas_gemm.kernels import sm90_memory, sm90_scratch
from pallas_gemm.kernels import sm90_plan as plans
from pallas_gemm.kernels.problem import Config, Problem


class Plan:
  """Stands in for `plan.Plan`, on the functions of `sm90_plan`."""

  def __init__(self, problem: Problem, config: Config):
    self.given, self.config = problem, config
    self.problem = plans.computed(problem, config)

  @classmethod
  def of(cls, problem: Problem, config: Config) -> "Plan":
    return cls(problem, config)

  def __getattr__(self, name):
    p, cfg = self.problem, self.config
    if name in _OF_BOTH:
      value = _OF_BOTH[name](p, cfg)
    else:
      value = _OTHERS[name](self)
    setattr(self, name, value)
    return value

  def scratch_types(self, bias_dtype):
    fused = self.config.split_k == 1
    bias = jnp.zeros((), bias_dtype) if bias_dtype is not None else None
    c_dtype = self.problem.c_dtype if fused else None
    c = jnp.zeros((), c_dtype) if c_dtype else None
    return sm90_scratch.scratch(
      self.problem, self.config, self.stored_dtype, bias, c
    )


_OF_BOTH = {
  "slabs": plans.slabs_of_a_work_tile,
  "refills": plans.refills_ring,
  "loaded_a": plans.loaded_rows,
  "loaded_b": plans.loaded_columns,
  "by_rows": plans.stores_rows,
  "deferred": plans.deferred_subtiles,
  **{
    name: getattr(plans, name)
    for name in (
      "work_tiles_of_a_block row_tiles grid clusters last_wave_start subtiles"
      " subtile_width subtile_shape subtiles_overlap outputs buffers c_buffers"
      " c_in_place result_shape"
    ).split()
  },
}


def _whole_laps(plan) -> bool:
  p, cfg = plan.problem, plan.config
  if p.ragged == "k" or cfg.tail_columns or plan.pingpong > 1:
    return False  # how many slabs there are differs from work tile to work tile
  if plan.deferred and plan.share[0] * plan.share[1] > 64 * 128:
    return False
  return plan.slabs % cfg.stages == 0 and plans.lap(cfg, p) <= 16


def _c_padding(plan):
  _, width = plan.subtile_shape
  size = jnp.dtype(plan.problem.c_dtype).itemsize
  return plans.padding(plan.result_shape, width, width, size)


_OTHERS = {
  "share": lambda plan: plans.share(plan.config),
  "pingpong": lambda plan: plans.pingpong_consumers(plan.config),
  "whole_laps": _whole_laps,
  "stored_dtype": lambda plan: jnp.dtype(
    "float32" if plan.config.split_k > 1 else plan.problem.out_dtype
  ),
  "operand_paddings": lambda plan: sm90_memory.operand_paddings(
    plan.config, plan.problem, *sm90_memory.operand_shapes(plan.problem)
  ),
  "result_shapes": lambda plan: sm90_memory.result_shapes(
    plan.problem, plan.config, plan.stored_dtype.itemsize
  ),
  "c_padding": _c_padding,
}
