"""Which configs can run a problem on the Hopper kernels; why others can not."""

from collections.abc import Iterable
from typing import Any

from jax import lax
import jax.numpy as jnp

from pallas_gemm import hardware
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem

_PRESETS = lax.DotAlgorithmPreset
_ARITHMETIC = {
  "bfloat16": _PRESETS.BF16_BF16_F32,
  "float16": _PRESETS.F16_F16_F32,
}


def refuses(a: str, b: str, out: str, precision: Any = None) -> str | None:
  """None, or why no product of these dtypes is run, whatever its sizes.

  Args:
    a, b: names of the operands' dtypes.
    out: of the result's.
    precision: as of `lax.dot_general`; all of `lax.Precision` is the same
      arithmetic on 16-bit operands.
  """
  if a != b:
    return f"operands must have one dtype, got {a} and {b}"
  if a not in plan.DTYPES:
    return f"operands must be {' or '.join(plan.DTYPES)}, got {a}"
  if out not in (*plan.DTYPES, "float32"):
    return f"out_dtype must be 16-bit float or float32, got {out}"
  if isinstance(precision, _PRESETS | lax.DotAlgorithm):
    if precision not in (_ARITHMETIC[a], _PRESETS.DEFAULT):
      return f"multiplies {a} and adds in float32, got precision {precision}"
  return None


def wrong_gpu() -> str | None:
  """None, or why nothing is run on the GPU that a trace made now is for."""
  gpu = hardware.current()
  if gpu.compute_capability == (9, 0):
    return None
  has = ".".join(map(str, gpu.compute_capability))
  return f"needs a GPU of compute capability 9.0, the {gpu.name} has {has}"


def is_legal(config: Config, problem: Problem) -> str | None:
  """None, or the reason why the config can't run the problem."""
  if reason := wrong_gpu():
    return reason
  if config.swap_ab:
    if reason := may_not_swap(problem):
      return reason
    if config.split_k != 1:
      return f"swap_ab has no split_k, got {config.split_k}"
  problem = plan.computed(problem, config)
  if reason := refuses(problem.dtype, problem.dtype, problem.out_dtype):
    return reason
  if reason := _is_legal_tile(config, problem):
    return reason
  if reason := _is_legal_cluster(config, problem):
    return reason
  if problem.ragged and (reason := _is_legal_ragged(config, problem)):
    return reason
  k_steps = plan.cdiv(problem.k, config.block_k)
  if config.split_k < 1 or config.split_k > k_steps:
    return f"split_k must be in 1..{k_steps}, got {config.split_k}"
  if reason := _is_legal_last_wave(config, problem):
    return reason
  if config.split == "pingpong":
    if reason := _is_legal_pingpong(config, problem):
      return reason
  if config.epilogue_buffers < 1:
    return f"epilogue_buffers must be at least 1, got {config.epilogue_buffers}"
  fewest = 2 if plan.refills_ring(problem, config) else 1
  if config.stages < fewest:
    return f"stages must be at least {fewest}, got {config.stages}"
  if config.raster < 1 or config.raster_dim not in ("m", "n"):
    return f"raster must be positive, raster_dim m or n, got {config}"
  need = plan.shared_bytes(config, problem)
  room = hardware.current().shared_bytes_per_block
  if need > room:
    return f"tiles need {need} bytes of shared memory, a block has {room}"
  return None


def first_legal(configs: Iterable[Config], problem: Problem) -> Config:
  """The first of some configs that can run the problem.

  Raises:
    NotImplementedError: none can; the reason of the last refusal.
  """
  reason: str | None = "no candidate"
  for config in configs:
    reason = is_legal(config, problem)
    if reason is None:
      return config
  raise NotImplementedError(reason)


def may_not_swap(problem: Problem) -> str | None:
  """None, or why no config that swaps operands can run the problem."""
  p = problem
  if p.ragged or p.gated:
    return "swap_ab takes no groups and no gated product"
  if "float32" in (p.out_dtype, p.c_dtype):
    return "swap_ab has results and C of 16 bits, got float32"
  return None


def _is_legal_tile(config: Config, problem: Problem) -> str | None:
  if config.block_k not in (64, 128):
    return f"block_k must be 64 or 128, got {config.block_k}"
  splits = ("m", "n", "pingpong")
  if config.consumers not in plan.REGISTERS or config.split not in splits:
    return (
      "consumers must be 1, 2 or 3 and split m, n or pingpong, got"
      f" {config.consumers} and {config.split!r}"
    )
  divided = {"m": config.block_m, "n": config.block_n}.get(config.split, 0)
  rows, columns = plan.share(config)
  step = 8 if problem.transpose_b else 32
  if min(rows, columns) < 1 or divided % config.consumers:
    return f"consumers must divide the tile, got {config}"
  if rows % plan.WGMMA_ROWS or columns % step:
    return (
      f"a consumer's share must be multiples of {plan.WGMMA_ROWS} rows and"
      f" {step} columns, got {rows}x{columns}"
    )
  accumulators = rows * columns * (2 if problem.gated else 1)
  most = plan.THREADS * plan.ACCUMULATORS[config.consumers]
  if columns > plan.WGMMA_COLUMNS or accumulators > most:
    return (
      f"a consumer's share must have at most {plan.WGMMA_COLUMNS} columns and"
      f" {most} accumulators, got {rows}x{columns}"
      + (" twice" if problem.gated else "")
    )
  width = config.epilogue_n
  is_one_atom = width * _widest_element(config, problem) <= plan.ATOM_BYTES
  if width < 16 or width > columns or (columns % width and not is_one_atom):
    # Subtiles that overlap start anywhere, see `compat.allow_ragged_copies`.
    return (
      f"epilogue_n must divide {columns}, or be less and {plan.ATOM_BYTES}"
      f" bytes of results and of C or less, got {width}"
    )
  if width not in (16, 32) and width % 64:
    return f"epilogue_n must be 16, 32 or a multiple of 64, got {width}"
  return None


def _widest_element(config: Config, problem: Problem) -> int:
  """Bytes of an element of what a kernel stores, or of C."""
  dtypes = [problem.out_dtype if config.split_k == 1 else "float32"]
  dtypes += [problem.c_dtype] if problem.c_dtype else []
  return max(jnp.dtype(dtype).itemsize for dtype in dtypes)


def _is_legal_cluster(config: Config, problem: Problem) -> str | None:
  cluster = (config.cluster_m, config.cluster_n)
  if cluster not in ((1, 1), (2, 1), (1, 2)):
    # More blocks leave SMs of a GPC idle: 2 x 2 ran at 0.6x (rung 12).
    return f"a cluster must be 1x1, 2x1 or 1x2, got {cluster[0]}x{cluster[1]}"
  if max(cluster) > hardware.sm_count():
    return f"the GPU has too few SMs for a cluster of {max(cluster)}"
  # Each block loads its share of the rows of a tile as it is stored.
  rows_a = config.block_k if problem.transpose_a else config.block_m
  rows_b = config.block_n if problem.transpose_b else config.block_k
  for name, rows in (("cluster_n", rows_a), ("cluster_m", rows_b)):
    if rows % (getattr(config, name) * plan.ATOM_ROWS):
      return f"{name} does not divide a stored tile of {rows} rows"
  return None


def _is_legal_ragged(config: Config, problem: Problem) -> str | None:
  if config.split_k != 1:
    return f"a grouped product has no split_k, got {config.split_k}"
  if problem.ragged == "k":
    if plan.subtiles_overlap(problem, config):
      # Zeros of groups without rows are stored in subtiles side by side.
      columns = plan.share(config)[1]
      return (
        f"epilogue_n must divide {columns} for groups along K, got"
        f" {config.epilogue_n}"
      )
    return None
  if config.cluster_m != 1:
    # The next row tile may be another group's, and so need another B.
    return f"cluster_m must be 1 for groups of rows, got {config.cluster_m}"
  # Groups start at any row. TMA reaches that in copies that are one swizzle
  # atom wide alone (see `compat.allow_ragged_copies`).
  if config.block_k * 2 != plan.ATOM_BYTES:
    return f"block_k must be 64 for groups of rows, got {config.block_k}"
  if plan.operand_columns(config, problem) != config.block_k:
    return (
      "a consumer's columns must be a multiple of 64 for groups of rows where B"
      f" is stored [K, N], got {plan.share(config)[1]}"
    )
  size = jnp.dtype(problem.out_dtype).itemsize
  if config.epilogue_n * size != plan.ATOM_BYTES:
    return (
      f"epilogue_n must be {plan.ATOM_BYTES // size} for groups of rows of"
      f" {problem.out_dtype}, got {config.epilogue_n}"
    )
  return None


def _is_legal_pingpong(config: Config, problem: Problem) -> str | None:
  if problem.ragged == "k":  # which take work tiles up from both ends
    return "pingpong takes no groups along K"
  if config.split_k > 1 or config.tail_columns:
    return "pingpong takes no split_k and no split of the last wave"
  if config.consumers < 2 or config.stages % config.consumers:
    return (
      "with pingpong stages must be a multiple of the consumers, at least two,"
      f" got {config.stages} and {config.consumers}"
    )
  # Each consumer has slots of its own. Where they do not hold a work tile, one
  # is loaded no faster than it is multiplied, and the other consumer waits:
  # 8192 x 4096 x 1024 with C 103 -> 130 us (H200).
  fewest = config.consumers * plan.slabs_of_a_work_tile(problem, config)
  if config.stages < fewest:
    return f"with pingpong stages must be {fewest} or more, got {config.stages}"
  return None


def _is_legal_last_wave(config: Config, problem: Problem) -> str | None:
  p, cfg = problem, config
  columns, parts = cfg.tail_columns, cfg.tail_split_k
  if columns == 0 and parts == 1:
    return None
  clustered = cfg.cluster_m * cfg.cluster_n > 1
  if clustered or cfg.split_k > 1 or cfg.swap_ab:
    return "a split last wave has no cluster, no split_k and no swap_ab"
  most = plan.grid(p, cfg)[1] - 1
  if not 1 <= columns <= most:
    return f"tail_columns must be in 1..{most}, got {columns}"
  slabs = plan.cdiv(p.k, cfg.block_k)
  if parts < 2 or (parts - 1) * plan.cdiv(slabs, parts) >= slabs:
    return f"tail_split_k does not cut {slabs} slabs of K in parts, got {parts}"
  if p.ragged or p.batch > 1 or p.c_dtype or p.save_preactivation:
    return (
      "a split last wave has no groups, no batch, no C and no pre-activation"
    )
  if plan.stores_rows(p, cfg):
    return "a split last wave needs results that TMA stores"
  return None
