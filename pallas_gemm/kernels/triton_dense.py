"""Dense matmul in Triton, launched from JAX through jax-triton.

What it is for: the peer row of the ladder (the same problem in the language
that most GPU kernels are written in), and a dense matmul for GPUs that the
Hopper kernel does not run on: other NVIDIA GPUs, and AMD's.

Why an own `autotune`: jax-triton takes `triton.autotune` kernels too, and
then times their configs when the call first runs; but it does not tell which
config won, and a result row must name it.

`import pallas_gemm` imports nothing of this, and importing this module needs
neither triton nor jax_triton: the first call imports them.
"""

from collections.abc import Callable, Sequence
import functools
import importlib.util
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import blas, compat
from pallas_gemm import measure as measure_lib
from pallas_gemm.kernels import triton_kernel
from pallas_gemm.kernels.triton_config import (
  CONFIGS,
  Config,
  default_config,
  is_legal,
)
from pallas_gemm.problem import Problem

NAME = triton_kernel.NAME
DTYPES = blas.FLOAT32 + blas.FLOAT16S
PRECISIONS = ("ieee", "tf32")
PLATFORMS = ("gpu", "cuda", "rocm")

Measure = Callable[[dict[str, Callable[[], jax.Array]]], dict[str, float]]

# (device kind, m, n, k, dtype, precision) -> what `autotune` found.
_best: dict[tuple, Config] = {}


def matmul(
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None = None,
  *,
  alpha: float = 1.0,
  beta: float = 0.0,
  config: Config | None = None,
  precision: str = "ieee",
) -> jax.Array:
  """alpha * A @ B + beta * C with a Triton kernel.

  Works under `jax.jit`. It has no derivative and no batching rule.

  Args:
    a: [M, K] float32, bfloat16 or float16, row-major.
    b: [K, N], the dtype of `a`.
    c: [M, N], the dtype of `a`; never read when beta is 0.
    alpha: a Python number.
    beta: a Python number; not zero needs `c`.
    config: tile sizes; None takes `best_config` at trace time, so call
      `autotune` before the function that uses it is traced.
    precision: how float32 operands are multiplied. "ieee": exact float32
      fused multiply-adds on CUDA cores. "tf32": on tensor cores, operands
      rounded to 10 explicit bits of mantissa.

  Returns:
    [M, N], the dtype of `a`; accumulated in float32, rounded once. K = 0
    gives beta * C.

  Raises:
    TypeError: an argument is of the wrong kind or dtype.
    ValueError: a rank, a shape, `beta` without `c`, a precision, or a config
      that is not legal.
    NotImplementedError: no CUDA or ROCm device, or triton or jax-triton is
      missing; the message says which.

  Example:
    >>> from pallas_gemm.kernels import triton_dense
    >>> y = triton_dense.matmul(a, b)  # doctest: +SKIP
  """
  problem = _check(a, b, c, alpha, beta, precision)
  if config is not None:
    if not isinstance(config, Config):
      raise TypeError(
        f"config of {NAME} must be a triton_dense.Config, got"
        f" {type(config).__name__}"
      )
    if (reason := is_legal(config, problem)) is not None:
      raise ValueError(f"config of {NAME} is not legal: {reason}")
  if (reason := unavailable_reason()) is not None:
    raise NotImplementedError(reason)
  if beta == 0:
    c = None
  if 0 in (problem.m, problem.n, problem.k) or alpha == 0:
    if c is None:
      return jnp.zeros((problem.m, problem.n), a.dtype)
    return (c.astype(jnp.float32) * jnp.float32(beta)).astype(a.dtype)
  config = config or best_config(problem, precision)
  how = {"problem": problem, "config": config, "precision": precision}
  return triton_kernel.launch(a, b, c, alpha, beta, **how)


def precision_of(precision: Any, dtype: Any) -> str:
  """What `matmul` takes, of what `lax.dot_general` takes.

  Of float32: TF32 where XLA takes it too, exact where more is asked for.

  Raises:
    NotImplementedError: it has no arithmetic of that kind.
  """
  presets = lax.DotAlgorithmPreset
  if dtype != jnp.float32:
    return "ieee"
  if precision in (None, lax.Precision.DEFAULT, presets.TF32_TF32_F32):
    return "tf32"
  exact = lax.Precision.HIGH, lax.Precision.HIGHEST, presets.F32_F32_F32
  if precision in exact:
    return "ieee"
  raise NotImplementedError(f"has no precision {precision} of float32")


def best_config(
  problem: Problem, precision: str = "ieee", device: Any = None
) -> Config:
  """What `autotune` found for this problem in this process, or the default.

  Args:
    problem: alpha, beta and C do not matter.
    precision: as for `matmul`.
    device: a JAX device; None takes the one that a trace made now is for.
  """
  key = _key(problem, precision, device)
  return _best.get(key) or default_config(problem, precision)


def autotune(
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None = None,
  *,
  alpha: float = 1.0,
  beta: float = 0.0,
  precision: str = "ieee",
  configs: Sequence[Config] = CONFIGS,
  measure: Measure | None = None,
) -> Config:
  """Times the legal configs on the device; remembers and returns the best.

  It is remembered in this process, per device kind, M, N, K, dtype and
  precision.

  Args:
    a: as for `matmul`, and so are b, c, alpha, beta and precision; but
      concrete arrays, so not under `jax.jit`.
    b: see a.
    c: see a.
    alpha: see a.
    beta: see a.
    precision: see a.
    configs: the candidates.
    measure: takes {name: function that launches one candidate and returns
      its result}, compiled; returns {name: time}, in any unit. None: as
      `measure.seconds`, with whatever the call before left in L2.

  Returns:
    The fastest config.

  Raises:
    TypeError, ValueError, NotImplementedError: as `matmul`; ValueError also
      if no config is legal, TypeError for a traced array.
  """
  problem = _check(a, b, c, alpha, beta, precision)
  for name, x in {"a": a, "b": b, "c": c}.items():
    if isinstance(x, jax.core.Tracer):
      raise TypeError(
        f"{name} must be a concrete array, got a traced one; call autotune"
        " outside of jax.jit"
      )
  if (reason := unavailable_reason()) is not None:
    raise NotImplementedError(reason)
  reasons = {config: is_legal(config, problem) for config in configs}
  legal = [config for config, reason in reasons.items() if reason is None]
  if not legal:
    raise ValueError(f"configs must hold a legal config, got {reasons}")
  if beta == 0:
    c = None
  operands = (a, b) if c is None else (a, b, c)
  runs, failure = {}, None
  for config in legal:
    run = functools.partial(
      matmul, alpha=alpha, beta=beta, config=config, precision=precision
    )
    run = functools.partial(jax.jit(run), *operands)
    try:
      jax.block_until_ready(run())  # compiles
      runs[str(config)] = run
    except jax.errors.JaxRuntimeError as error:
      failure = error  # a limit of this GPU that is_legal can't know
  if not runs:
    raise failure
  times = (measure or _kernel_times)(runs)
  best = min(legal, key=lambda config: times.get(str(config), math.inf))
  _best[_key(problem, precision)] = best
  return best


def unavailable_reason(device: Any = None) -> str | None:
  """Why `matmul` can't run on a device, or None if it can.

  Args:
    device: a JAX device; None takes the one that a trace made now is for.

  Returns:
    A sentence that names what is missing, or None.
  """
  device = compat.target_device() if device is None else device
  if device.platform not in PLATFORMS:
    return (
      f"{NAME} needs a CUDA or ROCm device, the default device is"
      f" {device.device_kind!r} ({device.platform}); use jnp.dot there"
    )
  return _missing_package()


@functools.cache
def _missing_package() -> str | None:
  for package, distribution in (
    ("triton", "triton"),
    ("jax_triton", "jax-triton"),
  ):
    if importlib.util.find_spec(package) is None:
      return (
        f"{NAME} needs the Python package {distribution}, which is not"
        " installed; install pallas-gemm[triton]"
      )
  try:
    import jax_triton  # noqa: F401  pylint: disable=g-import-not-at-top
  except Exception as error:  # it refuses a jaxlib without the GPU plugin
    return f"{NAME} needs jax-triton, which can't be imported: {error}"
  return None


def _check(a, b, c, alpha, beta, precision) -> Problem:
  factors = {"alpha": alpha, "beta": beta}
  m, n, k = blas.sizes(a, b, c, **factors, dtypes=DTYPES, kernel=NAME)
  dtype = jnp.dtype(a.dtype).name
  if precision not in PRECISIONS:
    raise ValueError(
      f"precision must be one of {PRECISIONS}, got {precision!r}"
    )
  if precision != "ieee" and dtype != "float32":
    raise ValueError(
      f"precision must be 'ieee' for {dtype}, got {precision!r};"
      " tf32 is a way to multiply float32"
    )
  return Problem.flat(m=m, n=n, k=k, dtype=dtype, out_dtype=dtype)


def _key(problem: Problem, precision: str, device: Any = None):
  device = compat.target_device() if device is None else device
  shape = (problem.m, problem.n, problem.k)
  return (device.device_kind, *shape, problem.a.dtype, precision)


def _kernel_times(
  runs: dict[str, Callable[[], jax.Array]],
) -> dict[str, float]:
  """Median seconds of each."""
  return dict(zip(runs, measure_lib.seconds(list(runs.values()), cold=False)))
