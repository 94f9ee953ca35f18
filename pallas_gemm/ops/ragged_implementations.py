"""The ways to compute a grouped product, and the choice between them.

As `implementations`: each takes the operands, the spec and the target, and
returns the results, or raises NotImplementedError with the reason why not.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import hardware, tuning
from pallas_gemm.ops import dispatch, implementations, ragged_spec
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.implementations import Target
from pallas_gemm.ops.ragged_spec import RaggedOperands, RaggedSpec

_ROWS_BY_MATRICES = lax.RaggedDotDimensionNumbers(
  (((1,), (1,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(0,),
)
_ROWS_BY_TRANSPOSED = lax.RaggedDotDimensionNumbers(
  (((1,), (2,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(0,),
)
_SUMS_OVER_ROWS = lax.RaggedDotDimensionNumbers(
  (((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(),
)


def run(
  *operands: jax.Array, spec: RaggedSpec, target: Target
) -> list[jax.Array] | tuple[jax.Array, ...]:
  """The results, of the first implementation that takes the product.

  Args:
    *operands: as `spec` names them.
    spec: what is computed.
    target: what is lowered for.

  Raises:
    NotImplementedError: none takes it; the reason of each.
  """
  x = spec.named(operands)
  if spec_lib.is_empty(spec.sizes(x)):
    return _without_product(x, spec)
  return dispatch.first_of(
    RAGGED_IMPLEMENTATIONS, x, spec, target, _in_words(x, spec)
  )


def sm90(
  x: RaggedOperands, spec: RaggedSpec, target: Target
) -> tuple[jax.Array, ...]:
  """The Hopper kernel; interpreted where the target is no GPU."""
  implementations.check_unpartitioned(target)
  if x.a.dtype != x.b.dtype:
    raise NotImplementedError(
      f"operands must have one dtype, got {x.a.dtype} and {x.b.dtype}"
    )
  problem = problem_of(x, spec)
  implementations.check_hopper(problem, spec.precision)
  from pallas_gemm.kernels import sm90_ragged

  config = implementations.given_config(
    spec.config, problem, sm90_ragged.is_legal
  )
  config = tuning.resolve(
    problem, config=config, batch_invariant=spec.batch_invariant
  )
  # Indices in kernels are 32 bits wide, whatever the user's are.
  with jax.enable_x64(False):
    return sm90_ragged.matmul(
      x.a,
      x.b,
      x.offsets,
      problem=problem,
      config=config,
      b_up=x.b_up,
      bias=x.bias,
      activation=spec.activation,
    )


def xla(x: RaggedOperands, spec: RaggedSpec, target: Target) -> list[jax.Array]:
  """`lax.ragged_dot_general`, and XLA's fusions for the epilogue.

  XLA multiplies every row with every B and with zeros where the row is not in
  the group: a NaN or an infinity in B of one group reaches the rows of others.
  """
  del target
  if spec.batch_invariant:
    raise NotImplementedError(implementations.NOT_INVARIANT)
  wide = ragged_spec.accumulation_dtype(x, spec.out_dtype)
  is_alone = spec.activation is None and not spec.has_bias
  if is_alone and implementations.is_wider(spec.out_dtype, x.b.dtype):
    wide = spec.out_dtype
  if spec.ragged == "k":
    return [_sums_over_rows(x, spec, wide).astype(spec.out_dtype)]
  sums = [
    _rows_by_matrices(x, b, spec, wide) for b in (x.b, x.b_up) if b is not None
  ]
  return ragged_spec.epilogue(sums, x, spec)


RAGGED_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
  "sm90": sm90,
  "xla": xla,
}


def problem_of(x: RaggedOperands, spec: RaggedSpec) -> tuning.Problem:
  m, n, k, groups = spec.sizes(x)
  if not all(isinstance(size, int) for size in (m, n, k, groups)):
    raise NotImplementedError("sizes must be known numbers")
  return tuning.Problem(
    m=m,
    n=n,
    k=k,
    dtype=x.a.dtype.name,
    out_dtype=jnp.dtype(spec.out_dtype).name,
    transpose_a=spec.ragged == "k",
    transpose_b=spec.transpose_b,
    bias="n" if spec.has_bias else None,
    activation=implementations.qualified_name(spec.activation),
    gated=spec.gated,
    ragged=spec.ragged,
    groups=groups,
    save_preactivation=spec.save,
    device=hardware.current().name,
  )


def _without_product(x: RaggedOperands, spec: RaggedSpec) -> list[jax.Array]:
  """Zeros, and where K alone is zero activation(bias) in the groups."""
  m, n, _, groups = spec.sizes(x)
  if spec.ragged == "k" or spec_lib.is_empty((m, n, groups)):
    return [jnp.zeros(spec.shape(x), spec.out_dtype)] * spec.outputs
  nothing = jnp.zeros((m, n), ragged_spec.accumulation_dtype(x, spec.out_dtype))
  return ragged_spec.epilogue([nothing] * (2 if spec.gated else 1), x, spec)


def _in_words(x: RaggedOperands, spec: RaggedSpec) -> str:
  """The product, as far as the choice depends on it."""
  m, n, k, groups = spec.sizes(x)
  parts = {
    "bias": spec.has_bias,
    "activation": spec.activation is not None,
    "saved pre-activation": spec.save,
  }
  extra = "".join(f" + {part}" for part, there in parts.items() if there)
  layout = "T" if spec.ragged == "k" else "N"
  layout += "T" if spec.transpose_b else "N"
  return (
    f"{'gated_ragged_dot' if spec.gated else 'ragged_dot'} {x.a.dtype.name} to"
    f" {jnp.dtype(spec.out_dtype).name}, groups {groups} along"
    f" {spec.ragged.upper()}, M {m}, N {n}, K {k}, {layout}{extra}"
  )


def _rows_by_matrices(
  x: RaggedOperands, b: jax.Array, spec: RaggedSpec, dtype: Any
) -> jax.Array:
  """Each row times its group's B, [M, N]; anything outside of the groups."""
  (a,) = _from_first_group([x.a], x, spec)
  numbers = _ROWS_BY_TRANSPOSED if spec.transpose_b else _ROWS_BY_MATRICES
  rows = _ragged_dot(a, b, x, numbers, spec, dtype)
  return jnp.roll(rows, x.offsets[0], axis=0) if spec.leading_rows else rows


def _sums_over_rows(
  x: RaggedOperands, spec: RaggedSpec, dtype: Any
) -> jax.Array:
  """A.T @ B of the rows of each group, [G, M, N]."""
  a, b = _from_first_group([x.a, x.b], x, spec)
  return _ragged_dot(a, b, x, _SUMS_OVER_ROWS, spec, dtype)


def _from_first_group(
  arrays: list[jax.Array], x: RaggedOperands, spec: RaggedSpec
) -> list[jax.Array]:
  """The rows in a circle, from the first group's on, where XLA starts."""
  if not spec.leading_rows:
    return arrays
  return [jnp.roll(rows, -x.offsets[0], axis=0) for rows in arrays]


def _ragged_dot(
  a: jax.Array,
  b: jax.Array,
  x: RaggedOperands,
  numbers: lax.RaggedDotDimensionNumbers,
  spec: RaggedSpec,
  dtype: Any,
) -> jax.Array:
  both = max((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
  return lax.ragged_dot_general(
    a.astype(both),
    b.astype(both),
    jnp.diff(x.offsets),
    numbers,
    precision=spec.precision,
    preferred_element_type=dtype,
  )
