"""The ways to compute a product, each with its name in `implementation=`.

Each takes the operands, the spec and the target, and returns the results, or
raises NotImplementedError with the reason why it does not.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import hardware, tuning
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import Operands, Spec

NOT_INVARIANT = (
  "XLA chooses the order of additions for M too, so it is not batch invariant"
)
_PRESETS = lax.DotAlgorithmPreset


@dataclasses.dataclass(frozen=True)
class Target:
  """What a product is lowered for.

  Attributes:
    cuda: a CUDA GPU; else any other platform.
    partitioned: XLA splits the computation over several devices.
  """

  cuda: bool
  partitioned: bool = False

  @property
  def default(self) -> tuple[str, ...]:
    """The names that implementation=None stands for."""
    return ("sm90", "xla") if self.cuda else ("xla",)


def sm90(x: Operands, spec: Spec, target: Target) -> tuple[jax.Array, ...]:
  """The Hopper kernel; interpreted where the target is no GPU."""
  check_unpartitioned(target)
  problem = problem_of(x, spec)
  check_hopper(problem, spec.precision)
  from pallas_gemm.kernels import sm90_dense
  from pallas_gemm.tuning import left_to_xla

  config = given_config(spec.config, problem, sm90_dense.is_legal)
  free = config is None and not spec.batch_invariant
  config = tuning.resolve(
    problem, config=config, batch_invariant=spec.batch_invariant
  )
  if free and spec.implementation is None:
    if reason := left_to_xla.why(config, problem):
      raise NotImplementedError(reason)
  batch, m, n, _ = spec.sizes(x)
  if _is_column(x, spec):
    x = _as_row(x, spec)
  # Indices in kernels are 32 bits wide, whatever the user's are.
  with jax.enable_x64(False):
    outs = sm90_dense.matmul(
      x.a,
      x.b,
      problem=problem,
      config=config,
      b_up=x.b_up,
      bias=x.bias,
      c=x.c,
      alpha=spec.alpha,
      beta=spec.beta,
      activation=spec.activation,
    )
  return tuple(out.reshape(batch, m, n) for out in outs)


def xla(x: Operands, spec: Spec, target: Target) -> list[jax.Array]:
  """What `jnp.dot` runs, and XLA's fusions for the epilogue."""
  del target
  if spec.batch_invariant:
    raise NotImplementedError(NOT_INVARIANT)
  dtype = x.a.dtype
  wide = spec_lib.accumulation_dtype(dtype, spec.out_dtype)
  if spec.has_epilogue or spec.gated or not is_wider(spec.out_dtype, dtype):
    sums = [_dot(x.a, b, spec, wide) for b in (x.b, x.b_up) if b is not None]
    return spec_lib.epilogue(sums, x, spec)
  return [_dot(x.a, x.b, spec, spec.out_dtype)]


def triton(x: Operands, spec: Spec, target: Target) -> list[jax.Array]:
  """The Triton kernel: row-major matrices of one dtype, alpha and beta."""
  check_unpartitioned(target)
  if spec.batch_invariant:
    raise NotImplementedError("its config depends on M")
  dtypes = {x.a.dtype, jnp.dtype(spec.out_dtype)}
  if x.c is not None:
    dtypes.add(x.c.dtype)
  limits = {
    "no batch": x.a.shape[0] == x.b.shape[0] == 1,
    "no transposed operand": not (spec.transpose_a or spec.transpose_b),
    "no activation or gate": spec.activation is None,
    "no bias": spec.bias is None,
    "one dtype": len(dtypes) == 1,
  }
  if exceeded := [limit for limit, kept in limits.items() if not kept]:
    raise NotImplementedError(f"takes {', '.join(exceeded)}")
  from pallas_gemm.kernels import triton_dense

  if x.a.dtype.name not in triton_dense.DTYPES:
    raise NotImplementedError(
      f"takes {', '.join(triton_dense.DTYPES)}, got {x.a.dtype.name}"
    )
  config = spec.config
  out = triton_dense.matmul(
    x.a[0],
    x.b[0],
    None if x.c is None else x.c[0],
    alpha=spec.alpha,
    beta=spec.beta if spec.has_c else 0.0,
    config=config if isinstance(config, triton_dense.Config) else None,
    precision=_triton_precision(spec.precision, x.a.dtype),
  )
  return [out[None]]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
  "sm90": sm90,
  "triton": triton,
  "xla": xla,
}


def problem_of(x: Operands, spec: Spec) -> tuning.Problem:
  """What the kernel computes: of a matrix times a column, the transposed."""
  batch, m, n, k = spec.sizes(x)
  if not all(isinstance(size, int) for size in (batch, m, n, k)):
    raise NotImplementedError("sizes must be known numbers")
  problem = tuning.Problem(
    m=m,
    n=n,
    k=k,
    dtype=x.a.dtype.name,
    out_dtype=jnp.dtype(spec.out_dtype).name,
    batch=batch,
    batched_a=x.a.shape[0] > 1,
    batched_b=x.b.shape[0] > 1,
    transpose_a=spec.transpose_a,
    transpose_b=spec.transpose_b,
    bias=spec.bias,
    c_dtype=None if x.c is None else x.c.dtype.name,
    activation=qualified_name(spec.activation),
    gated=spec.gated,
    save_preactivation=spec.save,
    device=hardware.current().name,
  )
  if not _is_column(x, spec):
    return problem
  rows = dataclasses.replace(problem.transposed(), transpose_a=False)
  if problem.batched_b and not problem.batched_a:
    return dataclasses.replace(rows, m=batch, batch=1, batched_a=False)
  return rows


def _is_column(x: Operands, spec: Spec) -> bool:
  """Whether the product is a matrix times a column, computed as a row.

  TMA can't address columns: they would be copied into padded ones. 4096 x 1 x
  4096 takes 37.9 us so on an H200, 1 x 4096 x 4096 (NT) 10.0 (dense-30, -28).
  """
  _, m, n, _ = spec.sizes(x)
  free = spec.config is None and not spec.batch_invariant
  return n == 1 and m > 1 and free and not spec.gated


def _as_row(x: Operands, spec: Spec) -> Operands:
  """The operands of the transposed product; a column is a row in memory.

  Columns that share a matrix (vmap of a matrix times a vector) are the rows of
  one product.
  """
  batch, m, _, k = spec.sizes(x)
  rows = batch if x.a.shape[0] == 1 else 1
  bias = x.bias
  if spec.bias == "n":
    bias = jnp.broadcast_to(bias, (rows,))
  return Operands(
    a=x.b.reshape(-1, rows, k),
    b=x.a,
    bias=bias,
    c=None if x.c is None else x.c.reshape(-1, rows, m),
  )


def qualified_name(function: Callable[..., Any] | None) -> str | None:
  if function is None:
    return None
  named = function if hasattr(function, "__qualname__") else type(function)
  return f"{named.__module__}.{named.__qualname__}"


def check_unpartitioned(target: Target) -> None:
  """A kernel runs on one device."""
  if target.partitioned:
    raise NotImplementedError(
      "XLA can't partition a kernel; wrap the call in jax.shard_map"
    )


def check_hopper(problem: tuning.Problem, precision: Any) -> None:
  """What the Hopper kernels have in common: dtypes, GPU and precision."""
  if problem.dtype not in ("bfloat16", "float16"):
    raise NotImplementedError(
      f"operands must be bfloat16 or float16, got {problem.dtype}"
    )
  if problem.out_dtype not in ("bfloat16", "float16", "float32"):
    raise NotImplementedError(
      f"out_dtype must be 16-bit float or float32, got {problem.out_dtype}"
    )
  gpu = hardware.current()
  if gpu.compute_capability != (9, 0):
    raise NotImplementedError(
      f"needs a GPU of compute capability 9.0, the {gpu.name} has"
      f" {'.'.join(map(str, gpu.compute_capability))}"
    )
  _check_16_bit_precision(precision, problem.dtype)


def given_config(
  config: Any,
  problem: tuning.Problem,
  is_legal: Callable[[tuning.Config, tuning.Problem], str | None],
) -> tuning.Config | None:
  """The user's config for a Hopper kernel, if there is one.

  Raises:
    ValueError: the kernel can't compute the problem with it.
  """
  if not isinstance(config, tuning.Config):
    return None
  if reason := is_legal(config, problem):
    raise ValueError(f"config can't compute this product: {reason}")
  return config


def _check_16_bit_precision(precision: Any, dtype: str) -> None:
  """All of `lax.Precision` is the same arithmetic on 16-bit operands."""
  same = {
    "bfloat16": _PRESETS.BF16_BF16_F32,
    "float16": _PRESETS.F16_F16_F32,
  }[dtype]
  if (
    isinstance(precision, _PRESETS | lax.DotAlgorithm)
    and precision != same
    and precision != _PRESETS.DEFAULT
  ):
    raise NotImplementedError(
      f"multiplies {dtype} and adds in float32, got precision {precision}"
    )


def _triton_precision(precision: Any, dtype: Any) -> str:
  """Of float32: TF32 where XLA takes it too, exact where more is asked for."""
  if dtype != jnp.float32:
    return "ieee"
  tf32 = (None, lax.Precision.DEFAULT, _PRESETS.TF32_TF32_F32)
  exact = (lax.Precision.HIGH, lax.Precision.HIGHEST, _PRESETS.F32_F32_F32)
  if precision in tf32:
    return "tf32"
  if precision in exact:
    return "ieee"
  raise NotImplementedError(f"has no precision {precision} of float32")


def is_wider(dtype: Any, than: Any) -> bool:
  """Whether `lax.dot_general` takes `dtype` for the result of `than`."""
  return dtype == than or jnp.dtype(dtype).itemsize > than.itemsize


def _dot(a: jax.Array, b: jax.Array, spec: Spec, dtype: Any) -> jax.Array:
  """A @ B as one `lax.dot_general`; [batch, M, N]."""
  contract_a = 1 if spec.transpose_a else 2
  contract_b = 2 if spec.transpose_b else 1
  shared_a, shared_b = (v.shape[0] == 1 for v in (a, b))
  batch_a, batch_b = (), ()
  if shared_a and shared_b:
    a, b = jnp.squeeze(a, 0), jnp.squeeze(b, 0)
    contract_a, contract_b = contract_a - 1, contract_b - 1
  elif shared_b:
    b, contract_b = jnp.squeeze(b, 0), contract_b - 1
  elif shared_a:
    a, contract_a = jnp.squeeze(a, 0), contract_a - 1
  else:
    batch_a, batch_b = (0,), (0,)
  out = lax.dot_general(
    a,
    b,
    (((contract_a,), (contract_b,)), (batch_a, batch_b)),
    precision=spec.precision,
    preferred_element_type=dtype,
  )
  if shared_a and shared_b:
    return out.reshape(1, *out.shape)
  return jnp.moveaxis(out, 1, 0) if shared_a else out
