"""The cases of the ladder: a rung, jnp.dot or a peer on one problem.

Each computes alpha * A @ B + beta * C from (a, b, c), where c is None exactly
when beta is zero, and is timed beside jnp.dot in the problem's arithmetic.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import case as case_lib
from experiments.harness import inputs, peers
from pallas_gemm import numerics
from pallas_gemm.ladder import contract

# Products of more multiply-adds than this are checked on SAMPLE rows times
# SAMPLE columns, spread so that every output tile is met; float64 on the host
# would take minutes otherwise.
CHECKED_IN_FULL = 1024**3
SAMPLE = 512
TRITON, HOPPER = "triton_dense", "jax_hopper_matmul_mgpu"
PEERS = {TRITON: peers.triton_dense, HOPPER: peers.jax_hopper}
_DOTS = "jnp.dot", "jnp.dot HIGHEST", "jnp.dot DEFAULT"
CLAIMS = {
  **dict.fromkeys(_DOTS, case_lib.XLA),
  **{f"{name} (baseline)": case_lib.XLA for name in _DOTS},
  TRITON: peers.TRITON_DENSE,
  HOPPER: peers.JAX_HOPPER,
}


@dataclasses.dataclass(frozen=True)
class Contestant(case_lib.Case):
  """A case of the ladder.

  Attributes:
    kernel: name in the row.
    problem: what it computes.
    arm: what gives its function, jitted.
    rung: which it is; None for a baseline or a peer.
    tf32: whether it may cut float32 operands to TF32; its bound says so.
    judged: whether its result is held to the error bound.
  """

  kernel: str
  problem: contract.Problem
  arm: case_lib.Arm
  rung: contract.Rung | None = None
  tf32: bool = False
  judged: bool = True

  suite, claims = "ladder", CLAIMS

  @property
  def baseline(self) -> str:
    """jnp.dot. Of itself too: that ratio shows the noise of a measurement."""
    return f"{yardstick(self.problem)} (baseline)"

  def fields(self) -> dict[str, Any]:
    """What a row says of the problem and the kernel."""
    rung = self.rung
    found = {"kernel": self.kernel, "number": rung and rung.number}
    variant = {"variant": (rung and rung.variant) or None}
    return dataclasses.asdict(self.problem) | found | variant

  def draw(self, seed: int) -> dict[str, jax.Array | None]:
    """Matrices a, b and c."""
    return dict(zip("abc", inputs.operands(self.problem, seed)))

  def arms(self, implementation: str | None = None) -> dict[str, case_lib.Arm]:
    """The kernel, and jnp.dot."""
    return {
      self.kernel: self.arm,
      self.baseline: baselines(self.problem)[0].arm,
    }

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


def yardstick(problem: contract.Problem) -> str:
  """Name of the jnp.dot in the problem's arithmetic."""
  return "jnp.dot HIGHEST" if problem.dtype == "float32" else "jnp.dot"


def baselines(problem: contract.Problem) -> Sequence[Contestant]:
  """jnp.dot in the arithmetic of the problem; the first is the yardstick.

  For float32 that is precision HIGHEST. DEFAULT is TF32 on a GPU with tensor
  cores: shown, but it is other arithmetic, so held to TF32's bound.
  """
  name = yardstick(problem)
  if problem.dtype != "float32":
    # The product is rounded before alpha and C enter, which the bound of a
    # kernel that rounds once does not allow for.
    once = problem.alpha == 1 and problem.beta == 0
    arm = case_lib.only(jnp_dot(problem))
    return [Contestant(name, problem, arm, judged=once)]
  return [
    Contestant(
      f"jnp.dot {precision}",
      problem,
      case_lib.only(
        jnp_dot(problem, precision.lower()), {"precision": precision}
      ),
      tf32=precision == "DEFAULT",
    )
    for precision in ("HIGHEST", "DEFAULT")
  ]


def rung(kernel: contract.Rung, problem: contract.Problem) -> Contestant:
  """A rung of the ladder with its default config."""

  def arm() -> list[case_lib.Candidate]:
    config = dataclasses.asdict(kernel.default_config(problem))
    factors = {"alpha": problem.alpha, "beta": problem.beta}
    fn = jax.jit(functools.partial(kernel.gemm, **factors))
    return [case_lib.Candidate(fn, config)]

  return Contestant(kernel.name, problem, arm, kernel)


def peer(name: str, problem: contract.Problem) -> Contestant:
  """A matmul from elsewhere, one of `PEERS`."""
  return Contestant(name, problem, functools.partial(PEERS[name], problem))
