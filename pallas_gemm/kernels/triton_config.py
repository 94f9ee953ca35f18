"""The configs of the Triton kernel: which there are, and which are legal."""

import dataclasses

from pallas_gemm import compat, hardware
from pallas_gemm.problem import Problem

ALIGNMENT_BYTES = 16  # of a row, for asynchronous copies of whole vectors
# PTX can name 255 registers a thread; Triton's smallest dot is 16 on a side.
REGISTERS_PER_THREAD = 255
LEAST_BLOCK = 16
LANES = 32
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Config:
  """Tile sizes and launch parameters.

  Attributes:
    block_m: rows of the block that one program computes, a power of two.
    block_n: columns of that block, a power of two.
    block_k: depth of one slab of A and B in shared memory, a power of two.
    group_m: block rows that are visited together.
    num_warps: warps of one program, a power of two.
    num_stages: slabs in flight between global and shared memory.
  """

  block_m: int
  block_n: int
  block_k: int
  group_m: int = 8
  num_warps: int = 4
  num_stages: int = 3


# Candidates, from large blocks to small ones. `autotune` tries those that are
# legal; `default_config` takes the first of one group that fills the GPU.
_TENSOR_CORES = (
  Config(128, 256, 64, num_warps=8),
  Config(256, 128, 64, num_warps=8),
  Config(128, 128, 64, num_stages=4),
  Config(64, 128, 64, num_stages=4),
)
_FEW_ROWS = (Config(16, 128, 128),)
# Shallow slabs: exact float32, whose dot is unrolled over a slab, and rows
# that load through registers spill with deep ones.
_SHALLOW = (
  Config(128, 128, 32, num_warps=8, num_stages=4),
  Config(128, 128, 16, num_warps=8),
  Config(64, 128, 16),
  Config(64, 64, 16),
)
CONFIGS = _TENSOR_CORES + _FEW_ROWS + _SHALLOW


def is_legal(config: Config, problem: Problem) -> str | None:
  """Why a config can't run a problem on the GPU in use, or None if it can.

  Args:
    config: the config.
    problem: what it is to compute.

  Returns:
    The reason, or None.

  Example:
    >>> from pallas_gemm.kernels import triton_config
    >>> from pallas_gemm.problem import Problem
    >>> problem = Problem.flat(
    ...   m=64, n=64, k=64, dtype="float32", out_dtype="float32")
    >>> triton_config.is_legal(triton_config.Config(48, 64, 16), problem)
    'block_m must be a power of two >= 16, got 48'
  """
  for name, value in dataclasses.asdict(config).items():
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      return f"{name} must be an int >= 1, got {value!r}"
  for name in ("block_m", "block_n", "block_k"):
    size = getattr(config, name)
    if size < LEAST_BLOCK or size & (size - 1):
      return f"{name} must be a power of two >= {LEAST_BLOCK}, got {size}"
  if config.num_warps not in (1, 2, 4, 8, 16, 32):
    return f"num_warps must be a power of two <= 32, got {config.num_warps}"
  threads = LANES * config.num_warps
  accumulators = config.block_m * config.block_n // threads
  if accumulators > REGISTERS_PER_THREAD:
    return (
      f"{accumulators} accumulators a thread, of {REGISTERS_PER_THREAD}"
      " registers; take a smaller block or more warps"
    )
  slab = (config.block_m + config.block_n) * config.block_k
  slab *= problem.a.bits // 8
  gpu = current_gpu()
  if gpu is not None and slab * config.num_stages > gpu.shared_bytes_per_block:
    return (
      f"{config.num_stages} stages of {slab} bytes, of"
      f" {gpu.shared_bytes_per_block} bytes of shared memory"
    )
  if programs(config, problem) > INT32_MAX:
    return f"more than {INT32_MAX} programs; take a larger block"
  return None


def default_config(problem: Problem, precision: str = "ieee") -> Config:
  """The config for a problem that was not autotuned.

  The largest block that still gives every SM one, from the group of `CONFIGS`
  that fits the precision and the alignment of the rows.

  Args:
    problem: what is to be computed.
    precision: as for `matmul`.
  """
  aligned = all(
    size * problem.a.bits // 8 % ALIGNMENT_BYTES == 0
    for size in (problem.k, problem.n)
  )
  exact = problem.a.dtype == "float32" and precision == "ieee"
  if exact or not aligned:
    group = _SHALLOW
  elif problem.m <= _FEW_ROWS[0].block_m:
    group = _FEW_ROWS
  else:
    group = _TENSOR_CORES
  legal = [config for config in group if is_legal(config, problem) is None]
  gpu = current_gpu()
  for config in legal:
    if gpu is None or programs(config, problem) >= gpu.sm_count:
      return config
  return legal[-1] if legal else CONFIGS[-1]


def programs(config: Config, problem: Problem) -> int:
  """Programs of a launch: one for each block of the result.

  Args:
    config: has the block's sizes.
    problem: has the result's.
  """
  rows, columns = (
    -(-problem.m // config.block_m),
    -(-problem.n // config.block_n),
  )
  return rows * columns


def current_gpu() -> hardware.Gpu | None:
  """The GPU in use, or None where only its driver knows (AMD, old NVIDIA)."""
  gpu = hardware.current()
  is_old = gpu.compute_capability < (8, 0)
  return None if is_old or compat.is_amd(compat.target_device()) else gpu
