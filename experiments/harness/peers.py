"""Matmuls from elsewhere that ours are compared with.

Each gives the functions among which the fastest is chosen, with their configs.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from experiments.harness.case import Call, Candidate
from pallas_gemm import compat, hardware
from pallas_gemm.ladder import contract

# XLA multiplies all rows with the weights of each group, and masks. A call
# that is predicted to take longer, at peak rate, or more memory is left out.
LONGEST_S = 0.1
LARGEST_GIB = 16
# block_m, block_n, max_concurrent_steps, grid_block_n of JAX's grouped example.
_RAGGED_CONFIGS = (
  (128, 128, 4, 1),
  (128, 128, 4, 8),
  (128, 128, 5, 4),
  (64, 256, 4, 4),
  (64, 128, 6, 8),
)


def triton_dense(problem: contract.Problem) -> list[Candidate]:
  """The package's Triton kernel, through jax-triton.

  Raises:
    NotImplementedError: it can't run here; says why.
  """
  # pylint: disable=g-import-not-at-top
  from pallas_gemm.kernels import triton_dense as module

  if (reason := module.unavailable_reason()) is not None:
    raise NotImplementedError(reason)
  factors = {"alpha": problem.alpha, "beta": problem.beta}
  return [
    Candidate(
      functools.partial(module.matmul, config=config, **factors),
      dataclasses.asdict(config),
    )
    for config in module.CONFIGS
    if module.is_legal(config, problem) is None
  ]


def jax_hopper(problem: contract.Problem) -> list[Candidate]:
  """JAX's own Hopper matmul.

  Raises:
    NotImplementedError: it does not take this problem, or is not there.
  """
  # pylint: disable=g-import-not-at-top
  try:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper
  except ImportError as error:
    raise NotImplementedError(f"this JAX does not have it: {error}") from None

  p = problem
  if p.dtype == "float32":
    raise NotImplementedError("it takes 16-bit operands, got float32")
  if p.alpha != 1 or p.beta not in (0, 1):
    raise NotImplementedError(
      f"it computes A@B + C alone, got alpha={p.alpha}, beta={p.beta}"
    )
  _needs_hopper()
  dimension = hopper.MatmulDimension
  found = []
  # What two consumer warpgroups share out, and the pair of a cluster.
  for side, pair in (("N", None), ("M", None), ("N", "M")):
    for width in (8, 16):
      config = hopper.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=dimension.N,
        grid_tile_width=width,
        wg_dimension=dimension[side],
        cluster_dimension=None if pair is None else dimension[pair],
      )
      fields = {
        key: str(value) if isinstance(value, dimension) else value
        for key, value in dataclasses.asdict(config).items()
      }
      fn = functools.partial(hopper.matmul, config=config)
      found.append(Candidate(fn, fields))
  return found


def lax_ragged_dot(case: Any, fn: Call) -> list[Candidate]:
  """A case of grouped products with `jax.lax.ragged_dot`: the function.

  Raises:
    NotImplementedError: it would take too long, or too much memory.
  """
  seconds = case.groups * case.flops(0) / hardware.current().bf16_flops
  if seconds > LONGEST_S:
    raise NotImplementedError(
      f"XLA multiplies all rows with each of {case.groups} groups: predicted"
      f" {seconds:.2g} s a call at peak rate, the limit is {LONGEST_S:g} s"
    )
  itemsize = jnp.dtype(case.dtype).itemsize
  gib = case.groups * case.m * max(case.k, case.n) * itemsize / 2**30
  if gib > LARGEST_GIB:
    raise NotImplementedError(
      f"XLA copies all rows for each of {case.groups} groups: predicted"
      f" {gib:.0f} GiB, the limit is {LARGEST_GIB} GiB"
    )
  return [Candidate(fn)]


def jax_ragged_dot(n: int) -> list[Candidate]:
  """The grouped matmul that JAX ships as an example, for N columns.

  Raises:
    NotImplementedError: it does not take them, or is not there.
  """
  _needs_hopper()
  try:
    # pylint: disable=g-import-not-at-top
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
  except ImportError as error:
    raise NotImplementedError(f"this JAX does not have it: {error}") from None

  def call(lhs, rhs, group_sizes, *, config: dict[str, Any], **others):
    del others
    return ragged_dot_mgpu.ragged_dot(
      lhs, rhs, group_sizes=group_sizes, **config
    )

  names = "block_m", "block_n", "max_concurrent_steps", "grid_block_n"
  configs = [dict(zip(names, x)) | {"block_k": 64} for x in _RAGGED_CONFIGS]
  found = [
    Candidate(functools.partial(call, config=config), config)
    for config in configs
    if n % (config["block_n"] * config["grid_block_n"]) == 0
  ]
  if not found:
    raise NotImplementedError(
      "no config fits: N must be a multiple of block_n * grid_block_n"
    )
  return found


def _needs_hopper() -> None:
  if not compat.targets_gpu():
    raise NotImplementedError("it needs a Hopper GPU")
