"""`ragged_dot` and `gated_ragged_dot`: a product for each group of rows.

As in `matmul`, the public functions do next to nothing, and one compiled
function runs the rest while it is traced.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_gemm import tuning
from pallas_gemm.ops import arguments, ragged_spec, row_groups
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.ragged_implementations import RAGGED_IMPLEMENTATIONS
from pallas_gemm.ops.ragged_primitive import ragged
from pallas_gemm.ops.ragged_spec import RaggedOperands, RaggedSpec


class _Options(NamedTuple):
  """The arguments that are no arrays."""

  activation: Any
  transpose_rhs: Any
  preferred_element_type: Any
  precision: Any
  implementation: Any
  config: Any


def ragged_dot(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  precision: Any = None,
  preferred_element_type: Any = None,
  group_offset: jax.Array | int | None = None,
  *,
  transpose_rhs: bool = False,
  bias: jax.Array | None = None,
  activation: Callable[[jax.Array], jax.Array] | None = None,
  implementation: str | Sequence[str] | None = None,
  config: Any = None,
) -> jax.Array:
  """activation(lhs[rows of g] @ rhs[g] + bias[g]) for each group of rows g.

  `jax.lax.ragged_dot` with an epilogue: what a layer of experts computes of
  tokens that are sorted by expert. The first `group_sizes[0]` rows of `lhs`
  are group 0, the next `group_sizes[1]` group 1, and so on. Sizes are known at
  run time alone; a change of them compiles nothing again.

  Products of bfloat16 or float16 run on the Hopper kernel on GPUs of compute
  capability 9.0, everything else on `jax.lax.ragged_dot_general`. What ran is
  logged once, and so is why the other did not.

  Works under `jax.jit`, `jax.grad` (of any order, for `lhs`, `rhs` and `bias`),
  `jax.vmap`, `jax.checkpoint` and `jax.shard_map`. Examples of a `jax.vmap` are
  computed one after the other, by `jax.lax.map`. Where `jax.jit` partitions a
  computation over devices by itself, XLA's product runs; `jax.shard_map` gives
  each device the kernel.

  Rows in no group give zeros, whatever `lhs`, bias and activation are: those
  past the last group, and those of groups that `rhs` does not have. A negative
  size counts as 0, and groups are cut off at M: nothing is read or written out
  of bounds.

  Numerics and derivatives are those of `matmul`: 16-bit operands are multiplied
  exactly and added in float32, bias and activation are applied in float32, one
  rounding follows; the same inputs give the same bits, gradients included. On
  the Hopper kernel a NaN stays in its group; XLA multiplies every row with all
  of `rhs` or with zeros, so there a NaN or infinity in `rhs` reaches all rows.
  The derivative of a bias may run on XLA whatever `implementation` is.

  Args:
    lhs: [M, K]. Mixed dtypes are promoted as by `jnp.matmul`.
    rhs: [G, K, N].
    group_sizes: [G], integers; with `group_offset` [G or more].
    precision: as of `jnp.matmul`; all of `lax.Precision` is the same to 16-bit
      operands.
    preferred_element_type: the result's dtype; by default the operands'.
    group_offset: the group that `rhs[0]` belongs to, an integer or [1]; the
      others follow. `group_sizes` then has the sizes of all groups, `rhs` the
      matrices of some, as with experts that are spread over devices. Cut off to
      where `rhs` has G groups left. None is 0.
    transpose_rhs: `rhs` is stored [G, N, K] and read in place.
    bias: [G, N]; no wider than the accumulation.
    activation: as for `matmul`.
    implementation: "sm90", "xla" or a sequence of them, tried in this order;
      None is ("sm90", "xla") on CUDA and "xla" elsewhere. "sm90" on a machine
      without a GPU is interpreted: slow, and right.
    config: a `tuning.Config` for "sm90"; None takes the fastest one known.

  Returns:
    [M, N].

  Raises:
    TypeError, ValueError: an argument is wrong; the message names it.
    NotImplementedError: none of `implementation` takes the product; the
      message has the reason of each.

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
  options = (
    activation,
    transpose_rhs,
    preferred_element_type,
    precision,
    implementation,
    config,
  )
  return _ragged_dot(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    bias,
    _hashable(options),
    tuning.generation(),
  )


def gated_ragged_dot(
  x: jax.Array,
  w_gate: jax.Array,
  w_up: jax.Array,
  group_sizes: jax.Array,
  *,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  group_offset: jax.Array | int | None = None,
  preferred_element_type: Any = None,
  implementation: str | Sequence[str] | None = None,
  config: Any = None,
) -> jax.Array:
  """activation(x @ w_gate[g]) * (x @ w_up[g]) for each group of rows g.

  The first half of a layer of gated experts: `x` is read once, and the two
  products never leave the chip. Groups, transformations, numerics and
  derivatives are those of `ragged_dot`; kept for derivatives are the two
  products, rounded to the result's dtype.

  Args:
    x: [M, K].
    w_gate: [G, K, N].
    w_up: shape and dtype of `w_gate`.
    group_sizes: as for `ragged_dot`.
    activation: as for `matmul`.
    group_offset: as for `ragged_dot`.
    preferred_element_type: as for `ragged_dot`.
    implementation: as for `ragged_dot`.
    config: as for `ragged_dot`.

  Returns:
    [M, N].

  Raises:
    TypeError, ValueError: an argument is wrong; the message names it.
    NotImplementedError: as `ragged_dot`.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((3, 4)), jnp.ones((2, 4, 2))
    >>> pallas_gemm.gated_ragged_dot(
    ...   x, w, 2 * w, jnp.array([2, 0]), activation=jnp.square
    ... ).tolist()
    [[128.0, 128.0], [128.0, 128.0], [0.0, 0.0]]
  """
  options = (
    activation,
    False,
    preferred_element_type,
    None,
    implementation,
    config,
  )
  return _gated_ragged_dot(
    x,
    w_gate,
    w_up,
    group_sizes,
    group_offset,
    _hashable(options),
    tuning.generation(),
  )


def _hashable(options: tuple[Any, ...]) -> tuple[Any, ...]:
  try:
    hash(options)
  except TypeError:
    return arguments.hashable(options, _Options._fields)
  return options


@functools.partial(jax.jit, static_argnums=(5, 6))
def _ragged_dot(lhs, rhs, group_sizes, group_offset, bias, options, generation):
  del generation  # a key: the config may be another one now
  options = _Options(*options)
  if not isinstance(options.transpose_rhs, bool):
    raise TypeError(
      "transpose_rhs must be a bool, got"
      f" {type(options.transpose_rhs).__name__}"
    )
  arguments.check_rank("lhs", lhs, 2, "[M, K]")
  stored = "[G, N, K]" if options.transpose_rhs else "[G, K, N]"
  arguments.check_rank("rhs", rhs, 3, stored)
  dtype = jnp.result_type(lhs, rhs)
  x = RaggedOperands(lhs.astype(dtype), rhs.astype(dtype), None, bias, None)
  return _product(x, group_sizes, group_offset, options, ("lhs", "rhs"))


@functools.partial(jax.jit, static_argnums=(5, 6))
def _gated_ragged_dot(
  x, w_gate, w_up, group_sizes, group_offset, options, generation
):
  del generation
  options = _Options(*options)
  arguments.check_rank("x", x, 2, "[M, K]")
  arguments.check_rank("w_gate", w_gate, 3, "[G, K, N]")
  arguments.check_like("w_up", w_up, "w_gate", w_gate)
  if options.activation is None:
    raise TypeError("activation must be a function, got None")
  dtype = jnp.result_type(x, w_gate)
  a, b, b_up = (v.astype(dtype) for v in (x, w_gate, w_up))
  operands = RaggedOperands(a, b, b_up, None, None)
  return _product(operands, group_sizes, group_offset, options, ("x", "w_gate"))


def _product(
  x: RaggedOperands,
  group_sizes: jax.Array,
  group_offset: jax.Array | None,
  options: _Options,
  names: tuple[str, str],
) -> jax.Array:
  """Checks what is left to check, and computes."""
  groups, k, n = x.b.shape
  if options.transpose_rhs:
    n, k = k, n
  arguments.check_inner(names, x.a.shape, x.b.shape, x.a.shape[1], k)
  row_groups.check_sizes(group_sizes, group_offset, groups, names[1])
  spec = _spec(x, options, leading_rows=group_offset is not None)
  if x.bias is not None:
    wide = ragged_spec.accumulation_dtype(x, spec.out_dtype)
    row_groups.check_bias(x.bias, groups, n, wide)
  offsets = row_groups.bounds(group_sizes, group_offset, x.a.shape[0], groups)
  (out,) = ragged(x._replace(offsets=offsets), spec)
  return out


def _spec(
  x: RaggedOperands, options: _Options, leading_rows: bool
) -> RaggedSpec:
  """What is computed."""
  out_dtype = arguments.out_dtype(
    options.preferred_element_type, x.a.dtype, "preferred_element_type"
  )
  names = arguments.implementation(
    options.implementation, RAGGED_IMPLEMENTATIONS
  )
  arguments.check_config(options.config, names, RAGGED_IMPLEMENTATIONS)
  if options.activation is not None:
    wide = ragged_spec.accumulation_dtype(x, out_dtype)
    arguments.check_activation(options.activation, wide)
  return RaggedSpec(
    ragged="m",
    out_dtype=out_dtype,
    transpose_b=options.transpose_rhs,
    activation=options.activation,
    gated=x.b_up is not None,
    has_bias=x.bias is not None,
    precision=arguments.precision(options.precision),
    implementation=names,
    config=options.config,
    batch_invariant=is_batch_invariant(),
    leading_rows=leading_rows,
  )
