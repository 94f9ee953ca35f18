"""What the kernels are compared with: jnp.dot, and peers from elsewhere.

A contestant is a jitted function of (a, b, c) that computes
alpha * A @ B + beta * C; c is None exactly when beta is zero.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import timing
from pallas_gemm import compat
from pallas_gemm.ladder import contract

Operands = tuple[jax.Array, jax.Array, jax.Array | None]
# Times arms, briefly, to choose among configs: arms -> Timing by name.
Measure = Callable[[list[timing.Arm]], dict[str, timing.Timing]]


@dataclasses.dataclass(frozen=True)
class Contestant:
  """A function to measure, and what its row says of it.

  Attributes:
    kernel: name in the row.
    fn: jitted, (a, b, c) -> result.
    config: what was chosen for it; None if it takes no choice.
    tf32: whether it may cut float32 operands to TF32; its bound says so.
    judged: whether its result is held to the error bound.
  """

  kernel: str
  fn: Callable[..., jax.Array]
  config: dict[str, Any] | None = None
  tf32: bool = False
  judged: bool = True


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


def baselines(problem: contract.Problem) -> tuple[Contestant, ...]:
  """jnp.dot in the arithmetic of the problem; the first is the yardstick.

  For float32 that is precision HIGHEST. DEFAULT is TF32 on a GPU with tensor
  cores: shown, but it is other arithmetic, so held to TF32's bound.
  """
  if problem.dtype != "float32":
    # The product is rounded before alpha and C enter, which the bound of a
    # kernel that rounds once does not allow for.
    once = problem.alpha == 1 and problem.beta == 0
    return (Contestant("jnp.dot", jnp_dot(problem), judged=once),)
  return (
    Contestant(
      "jnp.dot HIGHEST",
      jnp_dot(problem, "highest"),
      {"precision": "HIGHEST"},
    ),
    Contestant(
      "jnp.dot DEFAULT",
      jnp_dot(problem, "default"),
      {"precision": "DEFAULT"},
      tf32=True,
    ),
  )


def rung(kernel: contract.Rung, problem: contract.Problem) -> Contestant:
  """A rung of the ladder with its default config."""
  gemm = functools.partial(kernel.gemm, alpha=problem.alpha, beta=problem.beta)
  return Contestant(
    kernel.name,
    jax.jit(gemm),
    dataclasses.asdict(kernel.default_config(problem)),
  )


def triton_dense(
  problem: contract.Problem, operands: Operands, measure: Measure
) -> Contestant:
  """The package's Triton kernel, through jax-triton.

  Raises:
    NotImplementedError: it can't run here; says why.
  """
  # pylint: disable=g-import-not-at-top
  from pallas_gemm.kernels import triton_dense as module

  reason = module.unavailable_reason()
  if reason is not None:
    raise NotImplementedError(reason)

  def times(candidates):
    arms = [timing.Arm(name, fn) for name, fn in candidates.items()]
    return {name: t.median for name, t in measure(arms).items()}

  factors = {"alpha": problem.alpha, "beta": problem.beta}
  config = module.autotune(*operands, measure=times, **factors)
  matmul = functools.partial(module.matmul, config=config, **factors)
  return Contestant("triton_dense", jax.jit(matmul), dataclasses.asdict(config))


def jax_hopper(
  problem: contract.Problem, operands: Operands, measure: Measure
) -> Contestant:
  """JAX's own Hopper matmul, the fastest of a few configs.

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
  if not compat.targets_gpu():
    raise NotImplementedError("it needs a Hopper GPU")
  dimension = hopper.MatmulDimension
  tried: dict[str, tuple[Any, Callable]] = {}
  refused = ""
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
      fn = jax.jit(functools.partial(hopper.matmul, config=config))
      try:
        jax.block_until_ready(fn(*operands))
      except (ValueError, NotImplementedError) as error:
        refused = first_line(error)
        continue
      tried[f"split {side}, pair {pair}, width {width}"] = config, fn
  if not tried:
    raise NotImplementedError(f"no config fits: {refused}")
  timings = measure(
    [timing.Arm(name, fn, operands) for name, (_, fn) in tried.items()]
  )
  best = min(timings, key=lambda name: timings[name].median)
  config, fn = tried[best]
  fields = {
    key: str(value) if isinstance(value, dimension) else value
    for key, value in dataclasses.asdict(config).items()
  }
  return Contestant("jax_hopper_matmul_mgpu", fn, fields)


PEERS = {"triton_dense": triton_dense, "jax_hopper_matmul_mgpu": jax_hopper}


def first_line(error: BaseException, limit: int = 300) -> str:
  """Kind and first line of an exception, for a log."""
  lines = [line for line in str(error).splitlines() if line.strip()]
  text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
  return text if len(text) <= limit else text[: limit - 3] + "..."


def reason(error: BaseException) -> str:
  """Why something can't run: what it says itself, or the error's first line."""
  if isinstance(error, NotImplementedError):
    return str(error)
  return first_line(error)


def least_bytes(problem: contract.Problem) -> int:
  """Bytes if each operand is read once and the result written once."""
  p = problem
  outputs = 2 if p.beta != 0 else 1
  return p.itemsize * (p.m * p.k + p.k * p.n + outputs * p.m * p.n)


def tflops(problem: contract.Problem, ms: float) -> float:
  """2*m*n*k FLOP over a time in ms, in 1e12/s."""
  return 2 * problem.m * problem.n * problem.k / ms / 1e9


def gbytes_per_s(problem: contract.Problem, ms: float) -> float:
  """`least_bytes` over a time in ms, in 1e9/s."""
  return least_bytes(problem) / ms / 1e6
