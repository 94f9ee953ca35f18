"""What every rung shares: the problem, the argument checks, the configs.

A rung's file holds only its idea. Everything that is the same in all twelve
lives here, once: which arguments are legal, what happens when a dimension is
zero, how operands that a kernel can't mask are padded, and how `alpha`, `beta`
and `C` enter the result.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

FLOAT32 = ("float32",)
FLOAT16S = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Problem:
  """alpha * A[m, k] @ B[k, n] + beta * C[m, n], all of one dtype.

  Attributes:
    m: rows of A and of the result.
    n: columns of B and of the result.
    k: the contracted dimension.
    dtype: name of the operands' and the result's dtype.
    alpha: factor of the product.
    beta: factor of C; C takes no part when it is zero.
  """

  m: int
  n: int
  k: int
  dtype: str = "float32"
  alpha: float = 1.0
  beta: float = 0.0

  @property
  def itemsize(self) -> int:
    """Bytes of one element."""
    return jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class SimtConfig:
  """Tile sizes of an fp32 rung (1-8), in elements.

  Attributes:
    block_m: rows of the output block that one thread block computes.
    block_n: columns of that block.
    block_k: depth of one slab of A and B in shared memory (0: no slab, the
      rung reads global memory in its inner loop).
    thread_m: rows of the block that one thread holds in registers.
    thread_n: columns that one thread holds.
    vector: elements a thread moves with one load (4 floats = 128 bits).
    stages: slabs in flight between global and shared memory.
    raster: output blocks of one column strip visited together, so that
      thread blocks that run at the same time share operands in L2.
  """

  block_m: int
  block_n: int
  block_k: int = 0
  thread_m: int = 1
  thread_n: int = 1
  vector: int = 1
  stages: int = 1
  raster: int = 1


@dataclasses.dataclass(frozen=True)
class TensorCoreConfig:
  """Tile sizes of a tensor-core rung (9-12), in elements.

  Attributes:
    block_m: rows of the output tile that one thread block computes.
    block_n: columns of that tile.
    block_k: depth of one stage of A and B in shared memory.
    stages: stages of the ring between global and shared memory.
    consumers: warpgroups that issue wgmma; they share the tile.
    split: "m" or "n": which side of the tile the consumers share out.
    epilogue_n: columns of one piece of the tile on its way through shared
      memory to global memory (0: straight from registers).
    raster: tiles of `raster_dim` visited together before the other dimension
      advances (the width of the snake).
    raster_dim: "m" or "n".
    cluster_m: thread blocks of a cluster along M (they share a tile of B).
    cluster_n: thread blocks of a cluster along N (they share a tile of A).
  """

  block_m: int
  block_n: int
  block_k: int
  stages: int = 1
  consumers: int = 1
  split: str = "m"
  epilogue_n: int = 0
  raster: int = 1
  raster_dim: str = "n"
  cluster_m: int = 1
  cluster_n: int = 1


Config = SimtConfig | TensorCoreConfig


@dataclasses.dataclass(frozen=True)
class Rung:
  """One rung of the ladder.

  Attributes:
    number: 1..12; the same number is in the file's name and the table's row.
    name: the idea, as it stands in the file's name.
    dtypes: names of the dtypes that `gemm` takes.
    idea: one line for tables.
    config_type: SimtConfig or TensorCoreConfig.
    default_config: the config that `gemm` uses for a problem when none is
      given.
    is_legal: (config, problem) -> None, or the reason why it can't run.
    kernel: (a, b, c, problem, config) -> result; a and b non-empty, c an
      array exactly when problem.beta is not zero, config legal.
    module: dotted name of the module, whose docstring is the rung's page.
  """

  number: int
  name: str
  dtypes: tuple[str, ...]
  idea: str
  config_type: type
  default_config: Callable[[Problem], Config]
  is_legal: Callable[[Any, Problem], str | None]
  kernel: Callable[..., jax.Array]
  module: str

  def gemm(
    self,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: Config | None = None,
  ) -> jax.Array:
    """alpha * A @ B + beta * C with this rung's kernel.

    Works under `jax.jit`. On a machine without an NVIDIA GPU the same kernel
    runs in Pallas' GPU interpreter: slow, right.

    Args:
      a: [M, K], a dtype of `self.dtypes`, row-major.
      b: [K, N], the dtype of `a`.
      c: [M, N], the dtype of `a`; never read when beta is 0.
      alpha: a Python number.
      beta: a Python number; not zero needs `c`.
      config: tile sizes; None takes `default_config`.

    Returns:
      [M, N], the dtype of `a`. Products are accumulated in float32 in
      increasing order of k; the result is rounded once. K = 0 gives beta * C.
      The error of an element is at most `numerics.error_bound`.

    Raises:
      TypeError: an argument is of the wrong kind or dtype.
      ValueError: a rank, a shape, `beta` without `c`, or a config that is
        not legal.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_gemm.ladder import LADDER
      >>> a, b = jnp.ones((3, 5)), jnp.ones((5, 2))
      >>> LADDER[0].gemm(a, b, alpha=2.0).tolist()
      [[10.0, 10.0], [10.0, 10.0], [10.0, 10.0]]
    """
    problem = check_arguments(
      a, b, c, alpha=alpha, beta=beta, dtypes=self.dtypes, rung=self.name
    )
    if config is None:
      config = self.default_config(problem)
    elif not isinstance(config, self.config_type):
      raise TypeError(
        f"config of {self.name} must be a {self.config_type.__name__}, got"
        f" {type(config).__name__}"
      )
    if (reason := check_fields(config)) is None:
      reason = self.is_legal(config, problem)
    if reason is not None:
      raise ValueError(f"config of {self.name} is not legal: {reason}")
    if problem.beta == 0:
      c = None
    if 0 in (problem.m, problem.n) or problem.k == 0 or problem.alpha == 0:
      return _without_product(c, problem)
    return self.kernel(a, b, c, problem, config)


def check_arguments(
  a, b, c, *, alpha, beta, dtypes: tuple[str, ...], rung: str
) -> Problem:
  """Checks what a user passed; returns the problem it describes.

  Raises:
    TypeError: not an array, a dtype the rung does not take, dtypes that
      differ, or alpha or beta that is no Python number.
    ValueError: a rank that is not 2, shapes that do not fit, or beta without
      c.
  """
  operands = {"a": a, "b": b} | ({} if c is None else {"c": c})
  for name, x in operands.items():
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
      raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if len(x.shape) != 2:
      raise ValueError(f"{name} must have rank 2, got shape {tuple(x.shape)}")
    if jnp.dtype(x.dtype).name not in dtypes:
      raise TypeError(
        f"{name} has dtype {jnp.dtype(x.dtype).name}; {rung} takes"
        f" {' or '.join(dtypes)}"
      )
    if x.dtype != a.dtype:
      raise TypeError(
        f"{name} must have the dtype of a, {jnp.dtype(a.dtype).name}, got"
        f" {jnp.dtype(x.dtype).name}"
      )
  for name, x in {"alpha": alpha, "beta": beta}.items():
    if isinstance(x, bool) or not isinstance(x, int | float):
      raise TypeError(
        f"{name} must be a Python int or float, got {type(x).__name__}"
      )
  (m, k), (k_b, n) = a.shape, b.shape
  if k != k_b:
    raise ValueError(
      f"b must have K = {k} rows, as a {tuple(a.shape)} has columns, got"
      f" shape {tuple(b.shape)}"
    )
  if c is not None and tuple(c.shape) != (m, n):
    raise ValueError(f"c must have shape {(m, n)}, got {tuple(c.shape)}")
  if beta != 0 and c is None:
    raise ValueError(f"beta is {beta} but c is None; pass c or beta=0")
  return Problem(
    m, n, k, jnp.dtype(a.dtype).name, alpha=float(alpha), beta=float(beta)
  )


def check_fields(config: Config) -> str | None:
  """The first field that no rung could use, or None."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    default = field.default
    if field.name in ("split", "raster_dim"):
      if value not in ("m", "n"):
        return f"{field.name} must be 'm' or 'n', got {value!r}"
      continue
    least = 0 if default == 0 else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      return f"{field.name} must be an int >= {least}, got {value!r}"
  return None


def _without_product(c: jax.Array | None, problem: Problem) -> jax.Array:
  """beta * C, or zeros: no kernel has anything to multiply."""
  if c is None:
    return jnp.zeros((problem.m, problem.n), problem.dtype)
  scaled = jnp.float32(problem.beta) * c.astype(jnp.float32)
  return scaled.astype(problem.dtype)


def pad_to(x: jax.Array, rows: int, columns: int) -> jax.Array:
  """Zero-pads to multiples of (rows, columns); no copy if it fits."""
  pad = [(0, -size % to) for size, to in zip(x.shape, (rows, columns))]
  return jnp.pad(x, pad) if any(p for _, p in pad) else x


def padded(
  launch: Callable[..., jax.Array],
  a: jax.Array,
  b: jax.Array,
  c: jax.Array | None,
  *,
  multiple_m: int,
  multiple_n: int,
  multiple_k: int,
) -> jax.Array:
  """Runs `launch(a, b, c)` on operands padded to whole multiples.

  For kernels that load through registers and can't mask. XLA copies an
  operand that does not fit: one read and one write of it, O(MK + KN + MN)
  bytes beside O(MNK) work.
  """
  m, n = a.shape[0], b.shape[1]
  out = launch(
    pad_to(a, multiple_m, multiple_k),
    pad_to(b, multiple_k, multiple_n),
    None if c is None else pad_to(c, multiple_m, multiple_n),
  )
  return out if out.shape == (m, n) else out[:m, :n]


def combine(acc: jax.Array, c: jax.Array | None, problem: Problem) -> jax.Array:
  """alpha * acc + beta * C in float32; used inside kernels.

  Factors of one cost no instruction.
  """
  if problem.alpha != 1:
    acc = acc * jnp.float32(problem.alpha)
  if c is None:
    return acc
  c = c.astype(jnp.float32)
  if problem.beta != 1:
    c = c * jnp.float32(problem.beta)
  return acc + c


def cdiv(a: int, b: int) -> int:
  """Smallest integer >= a / b."""
  return -(-a // b)


def make_rung(module: str, **fields) -> Rung:
  """The rung of a kernel file `kNN_name.py`: number and name from the file."""
  stem = module.rsplit(".", 1)[-1]
  number, name = stem[1:3], stem[4:]
  return Rung(number=int(number), name=name, module=module, **fields)
