"""`ragged_dot_general`: the drop-in for `jax.lax.ragged_dot_general`."""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import tuning
from pallas_gemm.ops import arguments, dispatch, row_groups
from pallas_gemm.ops.implementations import NOT_INVARIANT
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.ragged_implementations import RAGGED_IMPLEMENTATIONS
from pallas_gemm.ops.ragged_primitive import ragged
from pallas_gemm.ops.ragged_spec import RaggedOperands, RaggedSpec


class _Options(NamedTuple):
  """The arguments that are no arrays."""

  ragged_dot_dimension_numbers: Any
  precision: Any
  preferred_element_type: Any
  implementation: Any


def ragged_dot_general(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
  precision: Any = None,
  preferred_element_type: Any = None,
  group_offset: jax.Array | int | None = None,
  *,
  implementation: str | Sequence[str] | None = None,
) -> jax.Array:
  """`jax.lax.ragged_dot_general`, on the kernels of `ragged_dot` if possible.

  Two cases are: rows by a matrix for each group, `lhs` of rank 2 and `rhs` of
  rank 3 (the ragged dimension is a free one of `lhs`), and sums over the rows
  of each group, both of rank 2 (it is the one contracted). `lhs` is read in
  place if its rows come first, `rhs` if its groups or rows do; others are
  transposed by XLA, one read and one write. What has batch dimensions, further
  dimensions, group sizes of rank 2 or more, or mixed dtypes is passed on to
  `jax.lax.ragged_dot_general`, and logged once.

  Groups, transformations, numerics and derivatives are those of `ragged_dot`.

  Args:
    lhs: an array.
    rhs: an array.
    group_sizes: integers.
    ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
    precision: as of `jax.lax.ragged_dot_general`.
    preferred_element_type: the result's dtype.
    group_offset: as for `ragged_dot`, where `rhs` has a group dimension.
    implementation: as for `ragged_dot`.

  Returns:
    As `jax.lax.ragged_dot_general`.

  Raises:
    TypeError, ValueError: as `jax.lax.ragged_dot_general`.
    NotImplementedError: as `ragged_dot`; "xla" is not in `implementation` and
      the product is one that is passed on; or one with a `group_offset` is.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import pallas_gemm
    >>> numbers = jax.lax.RaggedDotDimensionNumbers(
    ...   (((0,), (0,)), ((), ())),
    ...   lhs_ragged_dimensions=(0,),
    ...   rhs_group_dimensions=(),
    ... )
    >>> x, y = jnp.ones((5, 2)), jnp.ones((5, 1))
    >>> pallas_gemm.ragged_dot_general(
    ...   x, y, jnp.array([2, 0, 3]), numbers
    ... ).tolist()
    [[[2.0], [2.0]], [[0.0], [0.0]], [[3.0], [3.0]]]
  """
  options = (
    ragged_dot_dimension_numbers,
    precision,
    preferred_element_type,
    implementation,
  )
  options = arguments.hashable(options, _Options._fields)
  return _ragged_dot_general(
    lhs, rhs, group_sizes, group_offset, options, tuning.generation()
  )


@functools.partial(jax.jit, static_argnums=(4, 5))
def _ragged_dot_general(
  lhs, rhs, group_sizes, group_offset, options, generation
):
  del generation  # a key: the config may be another one now
  options = _Options(*options)
  numbers = options.ragged_dot_dimension_numbers
  names = arguments.implementation(
    options.implementation, RAGGED_IMPLEMENTATIONS
  )
  for name, x in {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes}.items():
    arguments.check_array(name, x)
  if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
    raise TypeError(
      "ragged_dot_dimension_numbers must be a"
      f" jax.lax.RaggedDotDimensionNumbers, got {type(numbers).__name__}"
    )
  reference = functools.partial(
    lax.ragged_dot_general,
    ragged_dot_dimension_numbers=numbers,
    precision=options.precision,
    preferred_element_type=options.preferred_element_type,
  )
  reason = _left_to_lax(lhs, rhs, group_sizes, numbers)
  sizes = group_sizes
  if group_offset is not None:
    if reason or not numbers.rhs_group_dimensions:
      reason = reason or "rhs has no group dimension"
      raise NotImplementedError(f"group_offset is not taken here: {reason}")
    groups = rhs.shape[numbers.rhs_group_dimensions[0]]
    row_groups.check_sizes(group_sizes, group_offset, groups, "rhs")
    sizes = jax.ShapeDtypeStruct((groups,), group_sizes.dtype)
  out = jax.eval_shape(reference, lhs, rhs, sizes)  # raises what is to be
  if reason:
    if "xla" not in (names or ("xla",)):
      raise NotImplementedError(
        f"implementation={names} does not take this product: {reason}"
      )
    if is_batch_invariant():
      raise NotImplementedError(f"{NOT_INVARIANT}; {reason}")
    dispatch.log_once(f"ragged_dot_general runs on jax.lax: {reason}")
    return reference(lhs, rhs, group_sizes)
  x, transpose_b = _as_ragged(lhs, rhs, numbers)
  spec = RaggedSpec(
    ragged="k" if _is_contracted(numbers) else "m",
    transpose_b=transpose_b,
    out_dtype=out.dtype,
    precision=arguments.precision(options.precision),
    implementation=names,
    batch_invariant=is_batch_invariant(),
    leading_rows=group_offset is not None,
  )
  groups = out.shape[0] if spec.ragged == "k" else x.b.shape[0]
  offsets = row_groups.bounds(group_sizes, group_offset, x.a.shape[0], groups)
  (result,) = ragged(x._replace(offsets=offsets), spec)
  return result


def _left_to_lax(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  numbers: lax.RaggedDotDimensionNumbers,
) -> str | None:
  """None, or why the product is none of `ragged_p`."""
  (contract, _), (batch, _) = numbers.dot_dimension_numbers
  if batch:
    return "it has batch dimensions"
  if len(contract) != 1:
    return f"it contracts {len(contract)} dimensions"
  ranks = (2, 2) if _is_contracted(numbers) else (2, 3)
  if (lhs.ndim, rhs.ndim) != ranks:
    return f"lhs and rhs must have ranks {ranks}, got {lhs.ndim, rhs.ndim}"
  if group_sizes.ndim != 1:
    return f"group_sizes must have rank 1, got {group_sizes.ndim}"
  if lhs.dtype != rhs.dtype:
    return f"operands must have one dtype, got {lhs.dtype} and {rhs.dtype}"
  return None


def _is_contracted(numbers: lax.RaggedDotDimensionNumbers) -> bool:
  """Whether the ragged dimension is."""
  return numbers.lhs_ragged_dimensions == numbers.dot_dimension_numbers[0][0]


def _as_ragged(
  lhs: jax.Array, rhs: jax.Array, numbers: lax.RaggedDotDimensionNumbers
) -> tuple[RaggedOperands, bool]:
  """Operands as `ragged_p` takes them, without offsets; is B transposed?"""
  (_, (contracted,)), _ = numbers.dot_dimension_numbers
  a = jnp.moveaxis(lhs, numbers.lhs_ragged_dimensions[0], 0)
  if _is_contracted(numbers):
    b, transpose_b = jnp.moveaxis(rhs, contracted, 0), False
  else:
    (group,) = numbers.rhs_group_dimensions
    b = jnp.moveaxis(rhs, group, 0)
    # The other two keep their order.
    transpose_b = contracted == max({0, 1, 2} - {group})
  return RaggedOperands(a, b, None, None, None), transpose_b
