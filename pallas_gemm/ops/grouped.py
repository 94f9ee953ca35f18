"""`ragged_dot` and `gated_ragged_dot`: a product for each group of rows.

As in `matmul`, the public functions do little, and one compiled function runs
the rest while it is traced.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import tuning
from pallas_gemm.kernels import activations
from pallas_gemm.ops import arguments, row_groups
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.matmul import Options
from pallas_gemm.ops.product import product, typed
from pallas_gemm.ops.spec import Operands, Spec


def ragged_dot(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  precision: Any = None,
  preferred_element_type: Any = None,
  group_offset: jax.Array | int | None = None,
  out_sharding: Any = None,
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
  computed one after the other, by `jax.lax.map`.

  On a mesh, whether its axes are Explicit or Auto, each device runs the kernel
  on its part of the rows, of N, of K or of the groups (expert parallel): where
  K or groups are sharded, parts are summed in float32 before bias and
  activation are applied. The result is sharded as `lhs` along M and as `rhs`
  along N, or as `out_sharding` says.

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
    preferred_element_type: the result's dtype, as of `jax.lax.ragged_dot`; by
      default the operands'.
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
    out_sharding: of the result, for Explicit mesh axes.

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
  arguments.check_bool("transpose_rhs", transpose_rhs)
  arrays = _arrays(
    lhs=lhs,
    rhs=rhs,
    group_sizes=group_sizes,
    group_offset=group_offset,
    bias=bias,
  )
  options = _options(
    arrays,
    activation,
    preferred_element_type,
    precision,
    implementation,
    config,
    out_sharding,
    transpose_rhs,
  )
  return _ragged_dot(options, tuning.generation(), *arrays)


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
  out_sharding: Any = None,
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
    out_sharding: as for `ragged_dot`.

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
  if activation is None:
    raise TypeError("activation must be a function, got None")
  arrays = _arrays(
    x=x,
    w_gate=w_gate,
    w_up=w_up,
    group_sizes=group_sizes,
    group_offset=group_offset,
  )
  options = _options(
    arrays,
    activation,
    preferred_element_type,
    None,
    implementation,
    config,
    out_sharding,
    False,
  )
  return _gated_ragged_dot(options, tuning.generation(), *arrays)


def _arrays(**arrays: Any) -> list[Any]:
  return [
    v
    if isinstance(v, jax.Array)
    or (v is None and name in ("group_offset", "bias"))
    else arguments.array(name, v)
    for name, v in arrays.items()
  ]


def _options(arrays: list[Any], activation: Any, dtype: Any, *rest: Any):
  """The key of the arguments that are no arrays, as `Options` has them."""
  if activation is not None:
    activation = activations.of(activation, *arrays[:2], dtype)
  return arguments.key(
    Options, activation, dtype, *rest[:-1], False, rest[-1], names=_NAMES
  )


# What the grouped ops call their options.
_NAMES = {"out_dtype": "preferred_element_type", "transpose_b": "transpose_rhs"}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ragged_dot(key, generation, lhs, rhs, group_sizes, group_offset, bias):
  del generation  # a key: the config may be another one now
  options = key.options
  arguments.check_numbers(lhs=lhs, rhs=rhs, group_sizes=group_sizes, bias=bias)
  arguments.check_rank("lhs", lhs, 2, "[M, K]")
  stored = "[G, N, K]" if options.transpose_b else "[G, K, N]"
  arguments.check_rank("rhs", rhs, 3, stored)
  x = Operands(*arguments.promoted(("lhs", "rhs"), lhs, rhs), bias=bias)
  return _product(x, group_sizes, group_offset, options, ("lhs", "rhs"))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gated_ragged_dot(
  key, generation, x, w_gate, w_up, group_sizes, group_offset
):
  del generation
  options = key.options
  arguments.check_numbers(x=x, w_gate=w_gate, w_up=w_up)
  arguments.check_rank("x", x, 2, "[M, K]")
  arguments.check_rank("w_gate", w_gate, 3, "[G, K, N]")
  arguments.check_like("w_up", w_up, "w_gate", w_gate)
  names = "x", "w_gate", "w_up"
  operands = Operands(*arguments.promoted(names, x, w_gate, w_up))
  return _product(operands, group_sizes, group_offset, options, names[:2])


def _product(
  x: Operands, group_sizes, group_offset, options: Options, names
) -> jax.Array:
  """Checks what is left to check, and computes."""
  groups, k, n = x.b.shape
  if options.transpose_b:
    n, k = k, n
  arguments.check_inner(names, x.a.shape, x.b.shape, x.a.shape[1], k)
  row_groups.check_sizes(group_sizes, group_offset, groups, names[1])
  out_dtype = _out_dtype(x, options)
  wide = x.wide(out_dtype)
  if x.bias is not None:
    row_groups.check_bias(x.bias, groups, n, wide)
  known = arguments.implementation(options.implementation, arguments.GROUPED)
  arguments.check_config(options.config, known, arguments.GROUPED)
  b = "gnk" if options.transpose_b else "gkn"
  words = Operands(
    "mk",
    b,
    None if x.b_up is None else b,
    None if x.bias is None else "gn",
    offsets="o",
  )
  spec = Spec(
    words=words,
    out="mn",
    ragged="m",
    out_dtype=out_dtype,
    activation=options.activation,
    precision=arguments.precision(options.precision),
    implementation=known,
    config=options.config,
    batch_invariant=is_batch_invariant(),
    leading_rows=group_offset is not None,
  )
  out = jax.ShapeDtypeStruct((x.a.shape[0], n), out_dtype)
  spec = typed(
    x, spec, reference(spec, out, options.out_sharding), options.out_sharding
  )
  offsets = row_groups.bounds(group_sizes, group_offset, x.a.shape[0], groups)
  return product(x._replace(offsets=offsets), spec)[0]


def _out_dtype(x: Operands, options: Options) -> Any:
  """What lax makes of the operands' dtype and the one that is wanted."""
  name, dtype = "preferred_element_type", x.a.dtype
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


def reference(spec: Spec, out: Any, out_sharding: Any):
  """The product of one group in JAX's own functions, as far as types go.

  Args:
    spec: the grouped product.
    out: the shape of its result, as a jax.ShapeDtypeStruct.
    out_sharding: as the user passed it.
  """

  def of_one_group(x: Operands):
    if spec.ragged == "k" and out_sharding is not None:
      return jax.sharding.reshard(jnp.zeros(out.shape), out_sharding)
    word, b = spec.words.b, x.b
    if "g" in word:
      b = jnp.sum(b, word.index("g"), dtype=b.dtype)
      word = word.replace("g", "")
    contracted = (spec.words.a.index("k"),), (word.index("k"),)
    z = lax.dot_general(
      x.a, b, (contracted, ((), ())), out_sharding=out_sharding
    )
    if x.bias is not None:
      z = z + jnp.sum(x.bias, 0).astype(z.dtype)
    return z if spec.ragged == "m" else z[None]

  return of_one_group
