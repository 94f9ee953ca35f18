"""The cases of the ladder: a rung, jnp.dot or a peer on one problem.

Each computes alpha * A @ B + beta * C from (a, b, c), where c is None exactly
when beta is zero, and is interleaved with jnp.dot in the problem's arithmetic.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import case as case_lib
from experiments.harness import inputs
from experiments.harness.case import Arm, Candidate, Claim, only
from pallas_gemm import compat, hardware, numerics
from pallas_gemm.ladder import contract
from pallas_gemm.problem import Problem

# Products of more multiply-adds than this are checked on SAMPLE rows times
# SAMPLE columns, spread so that every output tile is met; float64 on the host
# would take minutes otherwise.
CHECKED_IN_FULL = 1024**3
SAMPLE = 512
TRITON, HOPPER = "triton_dense", "jax_hopper_matmul_mgpu"
_DOTS = "jnp.dot", "jnp.dot HIGHEST", "jnp.dot DEFAULT"
CLAIMS = {
  **dict.fromkeys(_DOTS, case_lib.XLA),
  **{f"{name} (baseline)": case_lib.XLA for name in _DOTS},
  TRITON: Claim(
    "^triton_dense",
    "it needs the kernel triton_dense, which jax-triton compiles",
  ),
  HOPPER: Claim(
    "^anonymous_mosaic_gpu_kernel",
    "it needs hopper_matmul_mgpu's kernel, which has no name of its own",
  ),
}


@dataclasses.dataclass(frozen=True)
class LadderCase(case_lib.Case):
  """A kernel on a problem.

  Attributes:
    kernel: name in the row.
    problem: what it computes.
    arm: gives its candidates.
    rung: which it is; None for a baseline or a peer.
    tf32: whether it may cut float32 operands to TF32; its bound says so.
    judged: whether its result is held to the error bound.
  """

  kernel: str
  problem: contract.Problem
  arm: Arm
  rung: contract.Rung | None = None
  tf32: bool = False
  judged: bool = True

  suite, claims = "ladder", CLAIMS

  @property
  def baseline(self) -> str:
    """jnp.dot. Of itself too: that ratio shows the noise of a measurement."""
    return f"{baselines(self.problem)[0].kernel} (baseline)"

  def fields(self) -> dict[str, Any]:
    """What a row says of the problem and the kernel."""
    rung = self.rung
    found = {"kernel": self.kernel, "number": rung and rung.number}
    variant = {"variant": (rung and rung.variant) or None}
    return dataclasses.asdict(self.problem) | found | variant

  def draw(self, seed: int) -> dict[str, jax.Array | None]:
    """Matrices a, b and c."""
    return dict(zip("abc", inputs.operands(self.problem, seed)))

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    """The kernel, and jnp.dot."""
    dot = baselines(self.problem)[0].arm
    return {self.kernel: self.arm, self.baseline: dot}

  def flops(self, seed: int = 0) -> int:
    """2*M*N*K."""
    return 2 * self.problem.m * self.problem.n * self.problem.k

  def least_bytes(self, seed: int = 0) -> int:
    """Bytes if each operand is read once and the result written once."""
    p = self.problem
    outputs = 2 if p.beta != 0 else 1
    return p.itemsize * (p.m * p.k + p.k * p.n + outputs * p.m * p.n)

  def check(
    self, results: jax.Array, operands: dict[str, Any], seed: int = 0
  ) -> numerics.Check:
    """Compares a result, or samples of a large one, with float64."""
    found = numerics.check(
      results,
      **operands,
      alpha=self.problem.alpha,
      beta=self.problem.beta,
      seed=seed,
      sample=None if self.flops() <= 2 * CHECKED_IN_FULL else SAMPLE,
      tf32=self.tf32,
    )
    return found if self.judged else dataclasses.replace(found, passed=None)


def baselines(problem: contract.Problem) -> Sequence[LadderCase]:
  """jnp.dot; the first is what others are compared with.

  For float32 that is precision HIGHEST. DEFAULT is TF32 on a GPU with tensor
  cores: shown, but it is other arithmetic, so held to TF32's bound.
  """
  if problem.dtype != "float32":
    # The product is rounded before alpha and C enter, which the bound of a
    # kernel that rounds once does not allow for.
    once = problem.alpha == 1 and problem.beta == 0
    arm = only(jnp_dot(problem))
    return [LadderCase("jnp.dot", problem, arm, judged=once)]
  return [
    LadderCase(
      f"jnp.dot {precision}",
      problem,
      only(jnp_dot(problem, precision.lower()), {"precision": precision}),
      tf32=precision == "DEFAULT",
    )
    for precision in ("HIGHEST", "DEFAULT")
  ]


def jnp_dot(problem: contract.Problem, precision: str | None = None):
  """alpha * jnp.dot(a, b) + beta * c, as a user would write it, jitted."""
  alpha, beta = problem.alpha, problem.beta

  @jax.jit
  def dot(a, b, c):
    out = jnp.dot(a, b, precision=precision)
    if alpha != 1:
      out = alpha * out
    return out if c is None else out + beta * c

  return dot


def rung(kernel: contract.Rung, problem: contract.Problem) -> LadderCase:
  """A rung of the ladder with its default config."""

  def arm() -> list[Candidate]:
    config = dataclasses.asdict(kernel.default_config(problem))
    factors = {"alpha": problem.alpha, "beta": problem.beta}
    return [
      Candidate(jax.jit(functools.partial(kernel.gemm, **factors)), config)
    ]

  return LadderCase(kernel.name, problem, arm, kernel)


def peer(name: str, problem: contract.Problem) -> LadderCase:
  """A matmul from elsewhere, one of `PEERS`."""
  return LadderCase(name, problem, functools.partial(PEERS[name], problem))


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
  p = problem
  flat = Problem.flat(m=p.m, n=p.n, k=p.k, dtype=p.dtype, out_dtype=p.dtype)
  return [
    Candidate(
      functools.partial(module.matmul, config=config, **factors),
      dataclasses.asdict(config),
    )
    for config in module.CONFIGS
    if module.is_legal(config, flat) is None
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
  # The side that two consumer warpgroups split, and the pair of a cluster.
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
  """Refuses what compiles for Hopper alone elsewhere.

  Raises:
    NotImplementedError: says why.
  """
  if reason := why_no_hopper():
    raise NotImplementedError(reason)


def why_no_hopper() -> str | None:
  """None, or why what compiles for Hopper alone does not run here."""
  if not compat.targets_gpu():
    return "it needs a Hopper GPU"
  return hardware.why_not("it", ("wgmma",))


PEERS = {TRITON: triton_dense, HOPPER: jax_hopper}
