"""The drop-ins for `jax.lax.dot_general` and `jax.lax.ragged_dot_general`."""

import dataclasses
import functools
import operator
from typing import Any, Never

import jax
from jax import lax

from pallas_gemm import compat, dtypes, report, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.ops import (
  arguments,
  implementations,
  keywords,
  quantized,
  recipes,
  xla,
)
from pallas_gemm.ops.grouped import check_sizes, of_groups
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.spec import LETTERS, Operands
from pallas_gemm.ops.types import (
  ArrayLike,
  DTypeLike,
  GroupedImplementation,
  Operand,
  PrecisionLike,
  Sharding,
)
from pallas_gemm.quantization import Recipe

# What lax calls the dtype of a result.
_PREFERRED = "preferred_element_type"
_NAMES = arguments.OF_LAX
_OPTIONS, _NO_FLAGS = {"out_dtype": _PREFERRED}, (False,) * 4


@keywords.without_others
def dot_general(
  lhs: Operand,
  rhs: Operand,
  dimension_numbers: Any = None,
  precision: PrecisionLike = None,
  preferred_element_type: DTypeLike | None = None,
  *,
  out_sharding: Sharding | None = None,
  reduce_dtype: DTypeLike | None = None,
  quantize: Recipe | None = None,
  **others: Never,
) -> jax.Array:
  """`jax.lax.dot_general`, on the kernels of `matmul` where they take it.

  For libraries that let one inject it: `flax.linen.Dense(dot_general=...)`,
  `flax.nnx.Linear`, `jnp.einsum(..., _dot_general=...)`.

  Operands are read in place where each has its batch dimensions in front and
  its contracting dimensions together, in the same order in both, either last or
  right behind the batch dimensions. Others are transposed by XLA first: one
  read and one write of the operand. Products that no kernel takes, whatever
  their sizes, are passed on to `jax.lax.dot_general`: of most mixed dtypes, of
  float32 but at HIGHEST and BF16_BF16_F32_X3 to X9, of wide integers. On a mesh
  it is as `matmul`.

  Args:
    lhs, rhs: arrays; or each a `Quantized`, as for `matmul`.
    dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs
      batch)) dimensions; None for those of `jnp.dot`.
    precision, out_sharding: as of `jax.lax.dot_general`.
    preferred_element_type: the result's dtype.
    reduce_dtype, quantize: as for `matmul`.

  Returns:
    [batch dimensions, lhs free dimensions, rhs free dimensions].

  Raises:
    TypeError, ValueError: as `jax.lax.dot_general`.
    NotImplementedError: inside of `batch_invariant` on a Hopper GPU, a product
      that is passed on or that falls back to XLA; an unreduced `out_sharding`
      of a product that is not passed on.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((5, 4))
    >>> pallas_gemm.dot_general(x, w, (((2,), (1,)), ((), ()))).shape
    (2, 3, 5)
  """
  if others:
    raise keywords.unexpected(dot_general, others)
  lhs, rhs = quantized.operand("lhs", lhs), quantized.operand("rhs", rhs)
  how = None, preferred_element_type, precision, None, None, out_sharding
  numbers = _canonical(dimension_numbers)
  how = *how, reduce_dtype, quantize, *_NO_FLAGS, numbers
  options = arguments.options(how, _OPTIONS)
  return _dot_general(options, tuning.generation(), lhs, rhs)


def _canonical(numbers: Any) -> Any:
  """Tuples of integers, which can be hashed, of whatever lax takes."""
  if numbers is None:
    return None
  try:
    (contract_l, contract_r), (batch_l, batch_r) = numbers
    sides = (contract_l, contract_r), (batch_l, batch_r)
    return tuple(tuple(map(_indices, pair)) for pair in sides)
  except (TypeError, ValueError) as error:
    raise type(error)(
      "dimension_numbers must be ((lhs contracting, rhs contracting), (lhs"
      f" batch, rhs batch)) dimensions, got {numbers!r}"
    ) from error


def _indices(dimensions: Any) -> tuple[int, ...]:
  try:
    return (operator.index(dimensions),)
  except TypeError:
    return tuple(map(operator.index, dimensions))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _dot_general(options, generation, lhs, rhs):
  del generation  # a key: the config may be another one now
  x = Operands(*arguments.arrays(lhs, rhs))
  x = quantized.apart(_NAMES, x, options.quantize)
  arguments.check_numbers(_NAMES, x)
  arguments.in_one_memory(_NAMES, x)
  arguments.check_out_sharding(options.out_sharding)
  lhs, rhs, preferred = x.a, x.b, options.out_dtype
  if x.has_scales:
    preferred = quantized.result_dtype(preferred, x, _PREFERRED)
  reference = functools.partial(
    lax.dot_general,
    dimension_numbers=options.dimension_numbers,
    precision=arguments.precision(options.precision),
    preferred_element_type=preferred,
    out_sharding=options.out_sharding,
  )
  # Raises what is to be raised, and says what None means as dimensions.
  try:
    traced = jax.make_jaxpr(reference)(lhs, rhs)
    if dtypes.kind(traced.out_avals[0].dtype) == "other":
      raise TypeError(f"{_PREFERRED} must be a dtype of numbers")
  except TypeError:
    arguments.dtype_of(options.out_dtype, None, _PREFERRED)  # names it
    raise
  eqn = next(e for e in traced.eqns if e.primitive is lax.dot_general_p)
  words, out = _letters(lhs.ndim, rhs.ndim, eqn.params["dimension_numbers"])
  out_dtype = traced.out_avals[0].dtype
  batch = "".join(c for c in words.a if c in words.b and c in out)
  found, of_found = quantized.named(x, words._asdict(), batch)
  x, words = x._replace(**found), words._replace(**of_found)
  spec = arguments.spec_of(
    options, arguments.DENSE, x, words=words, out=out, out_dtype=out_dtype
  )
  # What a GPU would try first, whatever this is lowered for. Whether XLA's own
  # product may run with `batch_invariant`, only the platform says.
  may_run_kernel = implementations.may_run_kernel(spec, x, cuda=True)
  asked = spec.batch_invariant or spec.reduce_dtype is not None or x.has_scales
  asked |= options.quantize is not None
  if not may_run_kernel and not asked:
    report.log_once(f"dot_general of {lhs.dtype} and {rhs.dtype} runs on XLA")
    return reference(lhs, rhs)
  parts = arguments.parts_of(
    x, lambda x: reference(x.a, x.b), options.out_sharding
  )
  compute = recipes.rule(options, _NAMES, x)
  return compute(x, dataclasses.replace(spec, parts=parts))[0]


def _letters(rank_l: int, rank_r: int, numbers) -> tuple[Operands, str]:
  """Of both operands, and of the result."""
  (contract_l, contract_r), (batch_l, batch_r) = numbers
  names = iter(LETTERS)
  lhs = [next(names) for _ in range(rank_l)]
  rhs = [""] * rank_r
  for i, j in zip((*contract_l, *batch_l), (*contract_r, *batch_r)):
    rhs[j] = lhs[i]
  rhs = [c or next(names) for c in rhs]
  out = [lhs[i] for i in batch_l]
  out += [c for i, c in enumerate(lhs) if i not in (*batch_l, *contract_l)]
  out += [c for j, c in enumerate(rhs) if j not in (*batch_r, *contract_r)]
  return Operands("".join(lhs), "".join(rhs)), "".join(out)


@keywords.without_others
def ragged_dot_general(
  lhs: Operand,
  rhs: Operand,
  group_sizes: ArrayLike,
  ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
  precision: PrecisionLike = None,
  preferred_element_type: DTypeLike | None = None,
  group_offset: ArrayLike | None = None,
  out_sharding: Sharding | None = None,
  *,
  implementation: GroupedImplementation | None = None,
  reduce_dtype: DTypeLike | None = None,
  quantize: Recipe | None = None,
  **others: Never,
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
    lhs, rhs: arrays; or each a `Quantized`, as for `matmul`.
    group_sizes: integers.
    ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
    precision, preferred_element_type: as of `jax.lax.ragged_dot_general`.
    group_offset: as for `ragged_dot`, where `rhs` has a group dimension.
    out_sharding, implementation, reduce_dtype: as for `ragged_dot`; what is
      passed on is added up as `jax.lax` does.
    quantize: as for `ragged_dot`; of sums over rows both operands are quantised
      as `lhs`. Nothing that is passed on takes it.

  Returns:
    As `jax.lax.ragged_dot_general`.

  Raises:
    TypeError, ValueError: as `jax.lax.ragged_dot_general`.
    NotImplementedError: as `ragged_dot`; "xla" is not in `implementation` and
      the product is one that is passed on; or one with a `group_offset` or
      `quantize` is.

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
  if others:
    raise keywords.unexpected(ragged_dot_general, others)
  lhs, rhs = quantized.operand("lhs", lhs), quantized.operand("rhs", rhs)
  group_sizes = arguments.array("group_sizes", group_sizes)
  group_offset = arguments.array("group_offset", group_offset, optional=True)
  numbers = ragged_dot_dimension_numbers
  if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
    raise TypeError(
      "ragged_dot_dimension_numbers must be a"
      f" jax.lax.RaggedDotDimensionNumbers, got {type(numbers).__name__}"
    )
  dtype = preferred_element_type
  how = None, dtype, precision, implementation, None, out_sharding
  how = *how, reduce_dtype, quantize, *_NO_FLAGS
  options = arguments.options((*how, numbers), _OPTIONS)
  rest = group_sizes, group_offset
  return _ragged_dot_general(options, tuning.generation(), lhs, rhs, *rest)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ragged_dot_general(
  options, generation, lhs, rhs, group_sizes, group_offset
):
  del generation
  numbers = options.dimension_numbers
  group_offset, group_sizes, *operands = arguments.arrays(
    group_offset, group_sizes, lhs, rhs
  )
  x = quantized.apart(_NAMES, Operands(*operands), options.quantize)
  compute = recipes.rule(options, _NAMES, x)
  reason = _left_to_lax(x, group_sizes, numbers)
  if reason and options.quantize is not None:
    raise NotImplementedError(f"quantize is not taken here: {reason}")
  preferred = arguments.dtype_of(options.out_dtype, None, _PREFERRED)
  if x.has_scales:
    preferred = quantized.result_dtype(options.out_dtype, x, _PREFERRED)
    x = quantized.multiplied_out(x) if reason else x
  lhs, rhs = x.a, x.b
  arrays = lhs, rhs, group_sizes
  arguments.check_numbers(("lhs", "rhs", "group_sizes"), arrays)
  reference = functools.partial(
    lax.ragged_dot_general,
    ragged_dot_dimension_numbers=numbers,
    precision=arguments.precision(options.precision),
    preferred_element_type=preferred,
  )
  names = arguments.implementation(options.implementation, arguments.GROUPED)
  sizes = group_sizes
  if group_offset is not None:
    if reason or not numbers.rhs_group_dimensions:
      reason = reason or "rhs has no group dimension"
      raise NotImplementedError(f"group_offset is not taken here: {reason}")
    groups = rhs.shape[numbers.rhs_group_dimensions[0]]
    check_sizes(group_sizes, group_offset, groups, "rhs")
    sizes = jax.ShapeDtypeStruct((groups,), group_sizes.dtype)
  # Raises what is to be raised. lax has no rule for shardings.
  dtypes_of = lhs.dtype, lhs.dtype if reason is None else rhs.dtype, sizes.dtype
  plain = map(
    jax.ShapeDtypeStruct, (lhs.shape, rhs.shape, sizes.shape), dtypes_of
  )
  with compat.one_device():
    out = jax.eval_shape(reference, *plain)
  if reason:
    arguments.reduce_dtype(options.reduce_dtype, x, out.dtype)
    _check_lax_may(names, reason)
    return reference(*arrays, out_sharding=options.out_sharding)
  words, result = _grouped_letters(rhs.ndim, numbers)
  found, of_found = quantized.named(x, words._asdict(), "g")
  x, words = x._replace(**found), words._replace(**of_found)
  spec = arguments.spec_of(
    options,
    arguments.GROUPED,
    x,
    words=words,
    out=result,
    ragged="k" if _is_contracted(numbers) else "m",
    out_dtype=out.dtype,
  )
  rest = group_sizes, group_offset, options.out_sharding
  return of_groups(_NAMES, x, spec, *rest, compute)


def _check_lax_may(names: tuple[str, ...] | None, reason: str) -> None:
  """Raises if a product that only `jax.lax` takes may not be left to it."""
  if "xla" not in (names or ("xla",)):
    raise NotImplementedError(
      f"implementation={names} does not take this product: {reason}"
    )
  xla.check_invariance(
    is_batch_invariant(), compat.targets_gpu(), f"; {reason}"
  )
  report.log_once(f"ragged_dot_general runs on jax.lax: {reason}")


def _left_to_lax(
  x: Operands,
  group_sizes: jax.Array,
  numbers: lax.RaggedDotDimensionNumbers,
) -> str | None:
  """None, or why the product is none of `product_p`."""
  lhs, rhs = x.a, x.b
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
  may_differ = {lhs.dtype.name, rhs.dtype.name} <= set(legal.FLOATS8)
  may_differ |= x.has_scales  # beside what a recipe quantises
  if lhs.dtype != rhs.dtype and not may_differ:
    return f"operands must have one dtype, got {lhs.dtype} and {rhs.dtype}"
  return None


def _is_contracted(numbers: lax.RaggedDotDimensionNumbers) -> bool:
  """Whether the ragged dimension is."""
  return numbers.lhs_ragged_dimensions == numbers.dot_dimension_numbers[0][0]


def _grouped_letters(
  rank_r: int, numbers: lax.RaggedDotDimensionNumbers
) -> tuple[Operands, str]:
  """Of both operands and of the result, as `Spec` names them."""
  ((contract_l,), (contract_r,)), _ = numbers.dot_dimension_numbers
  lhs, rhs = ["m", "m"], ["n"] * rank_r
  lhs[contract_l] = rhs[contract_r] = "k"
  if not _is_contracted(numbers):
    rhs[numbers.rhs_group_dimensions[0]] = "g"
  out = "gmn" if _is_contracted(numbers) else "mn"
  return Operands("".join(lhs), "".join(rhs)), out
