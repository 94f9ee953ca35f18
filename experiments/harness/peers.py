"""Dense matmuls from elsewhere that ours are compared with.

Each gives the functions among which the fastest is chosen, with their configs.
"""

import dataclasses
import functools

from experiments.harness.case import Candidate, Claim
from pallas_gemm import compat
from pallas_gemm.ladder import contract

TRITON_DENSE = Claim(
  "^triton_dense", "it needs the kernel triton_dense, which jax-triton compiles"
)
JAX_HOPPER = Claim(
  "^anonymous_mosaic_gpu_kernel",
  "it needs hopper_matmul_mgpu's kernel, which has no name of its own",
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
  needs_hopper()
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


def needs_hopper() -> None:
  """Refuses what compiles for Hopper alone where there is no GPU.

  Raises:
    NotImplementedError: there is none.
  """
  if not compat.targets_gpu():
    raise NotImplementedError("it needs a Hopper GPU")
