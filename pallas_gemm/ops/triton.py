"""A folded product on the Triton kernel, which is imported when asked for."""

import jax
import jax.numpy as jnp

from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import Operands, Spec


def refuses(spec: Spec, x: Operands) -> str | None:
  """Why it never takes the product, whatever the sizes."""
  if spec.ragged:
    return "takes no groups"
  if spec.batch_invariant:
    return "its config depends on M"
  from pallas_gemm.kernels import triton_dense

  dtypes = {v.dtype for v in (x.a, x.b, x.c) if v is not None}
  reason = _exceeded(
    {
      "no activation or gate": spec.activation is None,
      "no bias": spec.words.bias is None,
      "no Split": not x.has_planes,
      "one dtype": dtypes == {jnp.dtype(spec.out_dtype)},
    }
  )
  if reason is None and x.a.dtype.name not in triton_dense.DTYPES:
    return f"takes {', '.join(triton_dense.DTYPES)}, got {x.a.dtype.name}"
  return reason


def _exceeded(limits: dict[str, bool]) -> str | None:
  """None, or the limits that are not kept, in words."""
  words = ", ".join(limit for limit, kept in limits.items() if not kept)
  return f"takes {words}" if words else None


def run(x: Operands, spec: Spec) -> list[jax.Array]:
  """The result, of row-major matrices of one dtype."""
  from pallas_gemm.kernels import triton_dense

  limits = {
    "no batch": x.a.shape[0] == x.b.shape[0] == 1,
    "no transposed operand": not (spec.transpose_a or spec.transpose_b),
  }
  if reason := _exceeded(limits):
    raise NotImplementedError(reason)
  # Its factors are compiled in, and its results have the operands' dtype: XLA
  # applies factors that are arrays, to what is rounded already.
  is_plain = x.alpha is None and x.beta is None
  added, config = is_plain and x.c is not None, spec.config
  out = triton_dense.matmul(
    x.a[0],
    x.b[0],
    x.c[0] if added else None,
    beta=float(added),
    config=config if isinstance(config, triton_dense.Config) else None,
    precision=triton_dense.precision_of(spec.precision, x.a.dtype),
  )[None]
  if is_plain:
    return [out]
  return spec_lib.epilogue([out.astype(x.wide(spec.out_dtype))], x, spec)
