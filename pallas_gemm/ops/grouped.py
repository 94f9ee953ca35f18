"""`ragged_dot` and `gated_ragged_dot`: a product for each group of rows.

As in `matmul`, the public functions do little, and one compiled function runs
the rest while it is traced.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Never

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import dtypes, tuning
from pallas_gemm.kernels import activations
from pallas_gemm.ops import arguments, keywords, planes, quantized, recipes
from pallas_gemm.ops.arguments import Options, check
from pallas_gemm.ops.product import product
from pallas_gemm.ops.spec import BESIDE, Operands, Spec
from pallas_gemm.ops.types import (
  ArrayLike,
  DTypeLike,
  GroupedConfig,
  GroupedImplementation,
  Operand,
  PrecisionLike,
  Sharding,
)
from pallas_gemm.quantization import Recipe

# What users call the options of the grouped ops.
_OPTIONS = {
  "out_dtype": "preferred_element_type",
  "transpose_b": "transpose_rhs",
}


@keywords.without_others
def ragged_dot(
  lhs: Operand,
  rhs: Operand,
  group_sizes: ArrayLike,
  precision: PrecisionLike = None,
  preferred_element_type: DTypeLike | None = None,
  group_offset: ArrayLike | None = None,
  out_sharding: Sharding | None = None,
  *,
  transpose_rhs: bool = False,
  bias: ArrayLike | None = None,
  activation: Callable[[jax.Array], jax.Array] | None = None,
  implementation: GroupedImplementation | None = None,
  config: GroupedConfig | None = None,
  reduce_dtype: DTypeLike | None = None,
  quantize: Recipe | None = None,
  **others: Never,
) -> jax.Array:
  """activation(lhs[rows of g] @ rhs[g] + bias[g]) for each group of rows g.

  `jax.lax.ragged_dot` with an epilogue: what a layer of experts computes of
  tokens that are sorted by expert. The first `group_sizes[0]` rows of `lhs`
  are group 0, the next `group_sizes[1]` group 1, and so on. Sizes are known at
  run time alone; a change of them compiles nothing again.

  What is not said here is as for `matmul`: on which kernel it runs,
  transformations, numerics, derivatives, errors. XLA's product is a loop that
  multiplies tiles of rows with their own group's matrix. Where that is expected
  to take longer (few rows, many groups; on GPUs alone), of symbolic sizes and
  over Auto axes it is `jax.lax.ragged_dot_general`; `explain` tells. Examples
  of a `jax.vmap` are computed one after the other, by `jax.lax.map`. The
  derivative of a bias may run on XLA whatever `implementation` is.

  On a mesh each device runs the kernel on its part of the rows, of N, of K or
  of the groups (expert parallel): where K or groups are sharded, parts are
  summed in float32, or `reduce_dtype`, before bias and activation are applied.
  The result is
  sharded as `lhs` along M and as `rhs` along N, or as `out_sharding` says.

  Rows in no group give zeros, whatever `lhs`, bias and activation are: those
  past the last group, and those of groups that `rhs` does not have. A negative
  size counts as 0, and groups are cut off at M: nothing is read or written out
  of bounds. A NaN stays in its group, on the Hopper kernel and in the loop;
  `jax.lax.ragged_dot_general` multiplies every row with all of `rhs` or with
  zeros, so there a NaN or infinity in `rhs` reaches all rows.

  Args:
    lhs: [M, K]; or a `Quantized`, as for `matmul`.
    rhs: [G, K, N]; or a `Quantized` or a `Split`.
    group_sizes: [G], integers; with `group_offset` [G or more].
    precision: as for `matmul`; but the kernel multiplies float32 below HIGHEST
      too, in two bfloat16 planes, of 16 bits (TF32 has 11).
    preferred_element_type: the result's dtype, as of `jax.lax.ragged_dot`; by
      default the operands'.
    group_offset: the group that `rhs[0]` belongs to, an integer or [1]; the
      others follow. `group_sizes` then has the sizes of all groups, `rhs` the
      matrices of some, as with experts that are spread over devices. Cut off to
      where `rhs` has G groups left. None is 0.
    out_sharding: of the result, for Explicit mesh axes.
    transpose_rhs: `rhs` is stored [G, N, K] and read in place.
    bias: [G, N], or what broadcasts to it; no wider than the accumulation.
    activation: as for `matmul`.
    implementation: as for `matmul`; "triton" is none.
    config: a `tuning.Config` for "sm90"; None takes the fastest one known.
    reduce_dtype: as for `matmul`, where K or groups are sharded.
    quantize: as for `matmul`. Rows of no group touch no scale.

  Returns:
    [M, N].

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x = jnp.ones((4, 3), jnp.bfloat16)
    >>> experts = jnp.stack([jnp.full((3, 2), 1.0), jnp.full((3, 2), 2.0)])
    >>> y = pallas_gemm.ragged_dot(
    ...   x, experts.astype(x.dtype), jnp.array([1, 2])
    ... )
    >>> y.tolist()
    [[3.0, 3.0], [6.0, 6.0], [6.0, 6.0], [0.0, 0.0]]
  """
  if others:
    raise keywords.unexpected(ragged_dot, others)
  arguments.check_bool("transpose_rhs", transpose_rhs)
  lhs, rhs = quantized.operand("lhs", lhs), quantized.operand("rhs", rhs)
  bias = arguments.array("bias", bias, optional=True)
  if activation is not None:
    of_both = quantized.typed(lhs, rhs)
    activation = activations.of(activation, *of_both, preferred_element_type)
  dtype = preferred_element_type
  how = activation, dtype, precision, implementation, config, out_sharding
  flags = reduce_dtype, quantize, False, transpose_rhs
  return _call((lhs, rhs, None), group_sizes, group_offset, bias, how + flags)


@keywords.without_others
def gated_ragged_dot(
  x: Operand,
  w_gate: Operand,
  w_up: Operand,
  group_sizes: ArrayLike,
  *,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  group_offset: ArrayLike | None = None,
  precision: PrecisionLike = None,
  preferred_element_type: DTypeLike | None = None,
  implementation: GroupedImplementation | None = None,
  config: GroupedConfig | None = None,
  out_sharding: Sharding | None = None,
  reduce_dtype: DTypeLike | None = None,
  quantize: Recipe | None = None,
  **others: Never,
) -> jax.Array:
  """activation(x @ w_gate[g]) * (x @ w_up[g]) for each group of rows g.

  The first half of a layer of gated experts: `x` is read once, and the two
  products never leave the chip. Kept for derivatives are the two products,
  rounded to the result's dtype. All else is as for `ragged_dot`, errors too.

  Args:
    x: [M, K]; or a `Quantized`.
    w_gate, w_up: [G, K, N], of one shape and dtype; or each a `Quantized` or
      a `Split`.
    group_sizes: [G], integers; with `group_offset` [G or more].
    activation: as for `matmul`.
    group_offset, precision, preferred_element_type: as for `ragged_dot`.
    implementation, config, out_sharding, reduce_dtype: as for `ragged_dot`.
    quantize: as for `ragged_dot`.

  Returns:
    [M, N].

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((3, 4)), jnp.ones((2, 4, 2))
    >>> pallas_gemm.gated_ragged_dot(
    ...   x, w, 2 * w, jnp.array([2, 0]), activation=jnp.square
    ... ).tolist()
    [[128.0, 128.0], [128.0, 128.0], [0.0, 0.0]]
  """
  if others:
    raise keywords.unexpected(gated_ragged_dot, others)
  x, w_gate = quantized.operand("x", x), quantized.operand("w_gate", w_gate)
  w_up, dtype = quantized.operand("w_up", w_up), preferred_element_type
  activation = activations.of(activation, *quantized.typed(x, w_gate), dtype)
  how = activation, dtype, precision, implementation, config, out_sharding
  how = *how, reduce_dtype, quantize
  return _call((x, w_gate, w_up), group_sizes, group_offset, None, how)


def _call(operands, group_sizes, group_offset, bias, options) -> jax.Array:
  group_sizes = arguments.array("group_sizes", group_sizes)
  group_offset = arguments.array("group_offset", group_offset, optional=True)
  options, rest = arguments.options(options, _OPTIONS), (group_offset, bias)
  return _ragged_dot(
    options, tuning.generation(), *operands, group_sizes, *rest
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ragged_dot(
  options, generation, a, b, b_up, group_sizes, group_offset, bias
):
  del generation  # a key: the config may be another one now
  x = Operands(*arguments.arrays(a, b, b_up, bias))
  group_sizes, group_offset = arguments.arrays(group_sizes, group_offset)
  names = arguments.OF_LAX if x.b_up is None else arguments.OF_GATED
  x = planes.apart(names, x, arguments.planes(x, options, grouped=True))
  x = quantized.apart(names, x, options.quantize)
  stored = "[G, N, K]" if options.transpose_b else "[G, K, N]"
  arguments.check_numbers(names, x)
  check(x.a.ndim == 2, f"{names.a} must be [M, K]", f"shape {x.a.shape}")
  check(x.b.ndim == 3, f"{names.b} must be {stored}", f"shape {x.b.shape}")
  compute = recipes.rule(options, names, x)
  x = arguments.promoted(names, x, options)
  groups, k, n = x.b.shape
  if options.transpose_b:
    n, k = k, n
  arguments.check_inner(names, x, x.a.shape[1], k)
  check_sizes(group_sizes, group_offset, groups, names.b)
  out_dtype, shape = _out_dtype(x, options), (groups, n)
  wide = x.wide(out_dtype)
  bias = arguments.added("bias", x.bias, wide, "[G, N] =", shape)
  if bias is not None and bias.shape != shape:  # its gradient's sums are wide
    bias = jnp.broadcast_to(bias.astype(wide), shape)
  x = x._replace(bias=bias)
  of_b = "gnk" if options.transpose_b else "gkn"
  words = Operands("mk", of_b, of_b, "gn")
  words = words._replace(**dict.fromkeys(BESIDE, of_b))
  words = Operands(*[None if v is None else word for word, v in zip(words, x)])
  found, of_found = quantized.named(x, words._asdict(), "g")
  x, words = x._replace(**found), words._replace(**of_found)
  spec = arguments.spec_of(
    options,
    arguments.GROUPED,
    x,
    words=words,
    out="mn",
    ragged="m",
    out_dtype=out_dtype,
  )
  rest = group_sizes, group_offset, options.out_sharding
  return of_groups(names, x, spec, *rest, compute)


def _out_dtype(x: Operands, options: Options) -> Any:
  """What lax makes of the operands' dtype and the one that is wanted."""
  name, dtype = _OPTIONS["out_dtype"], x.a.dtype
  if x.has_scales or x.has_planes or x.a.dtype != x.b.dtype:
    return quantized.result_dtype(options.out_dtype, x, name)
  wanted = arguments.dtype_of(options.out_dtype, dtype, name)
  if wanted == dtype:
    return dtype
  one = jax.ShapeDtypeStruct((1, 1), dtype)
  lax_dot = functools.partial(
    lax.dot,
    precision=arguments.precision(options.precision),
    preferred_element_type=wanted,
  )
  try:
    return jax.eval_shape(lax_dot, one, one).dtype
  except TypeError as error:
    raise TypeError(
      f"{name} must be one that lax takes for {dtype.name}, got {wanted.name}:"
      f" {error}"
    ) from error


def check_sizes(
  group_sizes: Any, group_offset: Any, groups: int, of: str
) -> None:
  """Integers, one for each group; more if there is an offset to start at.

  Args:
    group_sizes: of all groups.
    group_offset: None, or the first of those that are computed.
    groups: how many are computed.
    of: the argument that has as many.
  """
  for name, v in (("group_sizes", group_sizes), ("group_offset", group_offset)):
    dtype = jnp.int32 if v is None else v.dtype
    is_integer, got = dtypes.kind(dtype) == "integer", f"dtype {dtype}"
    check(is_integer, f"{name} must hold integers", got, TypeError)
  got = f"shape {group_sizes.shape}"
  check(group_sizes.ndim == 1, "group_sizes must have rank 1", got)
  (count,) = group_sizes.shape
  wanted = f"group_sizes must have {groups} entries"
  if group_offset is None:
    got = f"{count}; with group_offset it may have more"
    check(count == groups, f"{wanted}, as {of} has groups", got)
    return
  if isinstance(count, int) and isinstance(groups, int):  # none is symbolic
    check(count >= groups, f"{wanted} or more, as {of} has groups", count)
  shape, wanted = group_offset.shape, "group_offset must have shape () or (1,)"
  check(shape in ((), (1,)), wanted, shape)


def of_groups(
  names: Operands,
  x: Operands,
  spec: Spec,
  group_sizes: jax.Array,
  group_offset: jax.Array | None,
  out_sharding: Any,
  compute: Callable[[Operands, Spec], list[jax.Array]] = product,
) -> jax.Array:
  """A grouped product, by `compute`, once its arguments are checked."""
  *x, group_sizes, group_offset = arguments.in_one_memory(
    (*names, "group_sizes", "group_offset"),
    (*x, group_sizes, group_offset),
    on_device=True,
  )
  x = Operands(*x)
  rows = x.a.shape[spec.words.a.index(spec.ragged)]
  (groups,), w = group_sizes.shape, spec.words
  if "g" in w.b:
    groups = x.b.shape[w.b.index("g")]
  x = x._replace(offsets=bounds(group_sizes, group_offset, rows, groups))
  spec = dataclasses.replace(
    spec,
    words=w._replace(offsets="o"),
    leading_rows=group_offset is not None,
  )
  reference = functools.partial(_reference, spec, out_sharding)
  parts = arguments.parts_of(x, reference, out_sharding)
  return compute(x, dataclasses.replace(spec, parts=parts))[0]


def _reference(spec: Spec, out_sharding: Any, x: Operands) -> jax.Array:
  """The product of one group in JAX's own functions, as far as types go."""
  if spec.ragged == "k" and out_sharding is not None:
    return jax.sharding.reshard(jnp.zeros(spec.shape(x)), out_sharding)
  word, b = spec.words.b, x.b
  if "g" in word:
    b = jnp.sum(b, word.index("g"), dtype=b.dtype)
    word = word.replace("g", "")
  contracted = (spec.words.a.index("k"),), (word.index("k"),)
  a, dtype = x.a, spec.out_dtype
  if a.dtype.itemsize == 1:
    a, b = a.astype(dtype), b.astype(dtype)
  z = lax.dot_general(a, b, (contracted, ((), ())), out_sharding=out_sharding)
  if x.bias is not None and out_sharding is None:  # it may shard the result
    z = z + jnp.sum(x.bias, 0).astype(z.dtype)
  return z if spec.ragged == "m" else z[None]


def bounds(
  group_sizes: jax.Array, group_offset: jax.Array | None, m: int, groups: int
) -> jax.Array:
  """Where groups start and end: [groups + 1], never falling, in [0, m].

  In int32; of 2^31 rows or more in JAX's int. If that is int32 too, rows past
  2^31 - 1 are in no group.

  Args:
    group_sizes: [groups or more], integers of any value.
    group_offset: the first group, a scalar or [1]; None is 0.
    m: rows.
    groups: how many.
  """
  # The same numbers, as ones that a Taylor series takes for constants.
  group_sizes = group_sizes | 0
  is_long = isinstance(m, int) and m >= 2**31
  dtype = jnp.result_type(int) if is_long else np.dtype(np.int32)
  most = int(jnp.iinfo(dtype).max)
  m = min(m, most) if is_long else m
  if group_sizes.dtype.itemsize < dtype.itemsize:  # it may have no room for m
    group_sizes = group_sizes.astype(dtype)
  sizes = jnp.clip(group_sizes, 0, m).astype(dtype)
  numbers = lax.iota(jnp.int32, groups + 1)
  if group_offset is not None:
    first = group_offset.reshape(()) | 0
    if first.dtype.itemsize < 4:  # it may have no room for the last
      first = first.astype(jnp.int32)
    last = group_sizes.shape[0] - groups
    numbers += jnp.clip(first, 0, jnp.maximum(last, 0)).astype(jnp.int32)
  # Each bound is a sum of its own, for then XLA makes one kernel of it all.
  count = sizes.shape[0]
  is_before = lax.iota(jnp.int32, count)[None] < numbers[:, None]
  before = jnp.where(is_before, sizes[None], 0)
  are_numbers = isinstance(count, int) and isinstance(m, int)
  if are_numbers and count * m <= most:
    ends = jnp.sum(before, 1, dtype=dtype)
  else:  # which XLA can't do with sizes that are sharded
    ends = lax.reduce(before, dtype.type(0), _saturating_add, (1,))
  return jnp.minimum(ends, m).astype(dtype)


def _saturating_add(x: jax.Array, y: jax.Array) -> jax.Array:
  """x + y, or the largest number there is; neither is negative."""
  largest = x.dtype.type(jnp.iinfo(x.dtype).max)
  return x + jnp.minimum(y, largest - x)
