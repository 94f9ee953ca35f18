"""`matmul` and `gated_matmul`: what users call, and the way to the primitive.

The public functions do little, so that a call costs what one of `jnp.dot` does:
one compiled function, kept under the arguments that are no arrays, runs the
rest while it is traced.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, tuning
from pallas_gemm.kernels import activations
from pallas_gemm.ops import arguments
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.product import product, typed
from pallas_gemm.ops.spec import Operands, Spec


class Options(NamedTuple):
  """The arguments that are no arrays."""

  activation: activations.Activation | None = None
  out_dtype: Any = None
  precision: Any = None
  implementation: Any = None
  config: Any = None
  out_sharding: Any = None
  transpose_a: bool = False
  transpose_b: bool = False
  without_product: bool = False


# What most calls have: each of these tells them at a glance.
_ONE, _PLAIN = 1.0, arguments.key(Options)


def matmul(
  a: jax.Array,
  b: jax.Array,
  *,
  bias: jax.Array | None = None,
  activation: Callable[[jax.Array], jax.Array] | None = None,
  c: jax.Array | None = None,
  alpha: jax.typing.ArrayLike = _ONE,
  beta: jax.typing.ArrayLike = _ONE,
  transpose_a: bool = False,
  transpose_b: bool = False,
  out_dtype: Any = None,
  precision: Any = None,
  implementation: str | Sequence[str] | None = None,
  config: Any = None,
  out_sharding: Any = None,
) -> jax.Array:
  """activation(alpha * A @ B + beta * C + bias), in one kernel where possible.

  Products of bfloat16 or float16 run on the Hopper kernel on GPUs of compute
  capability 9.0. Everything else is XLA's. What ran is logged once, and so is
  why the others did not.

  Works under `jax.jit`, `jax.grad` (of any order), `jax.vmap`, `jax.checkpoint`
  and `jax.shard_map`. On a mesh, whether its axes are Explicit or Auto, each
  device runs the kernel on its part, and results, gradients and their shardings
  are those of `jnp.matmul`. If K is sharded alike in A and B, parts are summed
  in float32 before C, bias and activation are applied. Where XLA's product has
  to run though the kernel would be expected, one warning says why.

  Shapes are those of `jnp.matmul`: batch dimensions broadcast, and a vector is
  a row on the left, a column on the right. Leading dimensions of `a` become
  rows if `b` is a matrix.

  Numerics: 16-bit operands are multiplied exactly and added in float32; alpha,
  C, bias and activation are applied in float32; one rounding to `out_dtype`
  follows. For results of 16 bits the kernel's sigmoid, silu and gelu are good
  to 2^-14 (float16: 2^-16), its tanh to 2^-21 beside 1. The same inputs give
  the same bits. As in BLAS, nothing is read that has a factor of zero, so a NaN
  there does not spread.

  Derivatives: those of the activation are taken at its argument rounded to
  `out_dtype`, the one thing that is kept for them. A cotangent is rounded to
  the operands' dtype before it is multiplied. The products they need find
  their own configs.

  Args:
    a: [..., M, K], or [K]. Mixed dtypes are promoted as by `jnp.matmul`.
    b: [..., K, N], or [K].
    bias: [N] or [M, 1], shared by the batch; no wider than the accumulation.
      Under `jax.vmap`, a bias for each example is first added to C.
    activation: an elementwise JAX function of one array, without arrays or
      traced values of its own; it is compiled into the kernel. One made of
      what a kernel does not compute (`floor`, say) leaves the product to XLA
      too. Functions that compute the same are the same: an inline lambda
      compiles nothing again.
    c: of the result's shape; no wider than the accumulation.
    alpha: a number or an array of shape (), of the operands' kind. Another
      value compiles nothing again, but for the numbers 0 and 1.
    beta: the same.
    transpose_a: `a` is stored [..., K, M] and read in place.
    transpose_b: `b` is stored [..., N, K] and read in place.
    out_dtype: of the result; by default the operands'.
    precision: as of `jnp.matmul`; all of `lax.Precision` is the same to 16-bit
      operands.
    implementation: "sm90", "triton", "xla" or a sequence of them, tried in
      this order; None is ("sm90", "xla") on CUDA and "xla" elsewhere. "sm90" on
      a machine without a GPU is interpreted: slow, and right.
    config: a `tuning.Config` for "sm90" or a `triton_dense.Config` for
      "triton"; None takes the fastest one known.
    out_sharding: as of `jnp.matmul`, for Explicit mesh axes.

  Returns:
    [..., M, N].

  Raises:
    TypeError, ValueError: an argument is wrong; the message names it.
    NotImplementedError: none of `implementation` takes the product; the
      message has the reason of each. Or `out_sharding` is unreduced.
    jax.errors.ShardingTypeError: as `jnp.matmul`.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import pallas_gemm
    >>> x = jnp.ones((2, 3, 4), jnp.bfloat16)
    >>> w = jnp.full((4, 5), 0.5, jnp.bfloat16)
    >>> y = pallas_gemm.matmul(
    ...   x, w, bias=jnp.arange(5.0), activation=jax.nn.relu
    ... )
    >>> y.shape, y[0, 0].tolist()
    ((2, 3, 5), [2.0, 3.0, 4.0, 5.0, 6.0])
  """
  if not (isinstance(a, jax.Array) and isinstance(b, jax.Array)):
    a, b = arguments.array("a", a), arguments.array("b", b)
  if bias is not None and not isinstance(bias, jax.Array):
    bias = arguments.array("bias", bias)
  if c is not None and not isinstance(c, jax.Array):
    c = arguments.array("c", c)
  if transpose_a is not False or transpose_b is not False:
    arguments.check_bool("transpose_a", transpose_a)
    arguments.check_bool("transpose_b", transpose_b)
  if activation is not None:
    activation = activations.of(activation, a, b, out_dtype)
  without_product = False
  if alpha is not _ONE:
    alpha, without_product = _factor("alpha", alpha, a, b, out_dtype)
  if beta is not _ONE:
    beta, is_zero = _factor("beta", beta, a, b, out_dtype)
    if c is None and beta is not _ONE:
      raise ValueError(f"beta is {beta} but c is None; pass c")
    if is_zero:
      beta, c = _ONE, None
  options = _PLAIN
  if (
    activation is not None
    or out_dtype is not None
    or precision is not None
    or implementation is not None
    or config is not None
    or out_sharding is not None
    or transpose_a
    or transpose_b
    or without_product
  ):
    options = arguments.key(
      Options,
      activation,
      out_dtype,
      precision,
      implementation,
      config,
      out_sharding,
      transpose_a,
      transpose_b,
      without_product,
    )
  rest = ()
  if bias is not None or c is not None or alpha is not _ONE:
    alpha = None if alpha is _ONE or without_product else alpha
    rest = bias, c, alpha, None if beta is _ONE else beta
  return _matmul(options, tuning.generation(), a, b, *rest)


def _factor(name: str, value: Any, a: Any, b: Any, out_dtype: Any):
  """`_ONE`, or a scalar in the dtype of sums; and whether it is the number 0.

  Nothing is read that has a factor of zero, so that is another program.
  """
  if arguments.is_one(value):
    return _ONE, False
  is_zero = not isinstance(value, jax.Array | np.ndarray) and value == 0
  return arguments.factor(name, value, a, b, out_dtype), is_zero


def gated_matmul(
  x: jax.Array,
  w_gate: jax.Array,
  w_up: jax.Array,
  *,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  out_dtype: Any = None,
  implementation: str | Sequence[str] | None = None,
  config: Any = None,
  out_sharding: Any = None,
) -> jax.Array:
  """activation(x @ w_gate) * (x @ w_up), in one kernel where possible.

  The first half of a gated feed-forward layer: `x` is read once, and the two
  products never leave the chip. Transformations, numerics and derivatives are
  those of `matmul`; kept for derivatives are the two products, rounded to
  `out_dtype`.

  Args:
    x: [..., M, K], or [K].
    w_gate: [..., K, N].
    w_up: shape and dtype of `w_gate`.
    activation: as for `matmul`.
    out_dtype: as for `matmul`.
    implementation: as for `matmul`.
    config: as for `matmul`.
    out_sharding: as for `matmul`.

  Returns:
    [..., M, N].

  Raises:
    TypeError, ValueError: an argument is wrong; the message names it.
    NotImplementedError: none of `implementation` takes the product.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
    >>> pallas_gemm.gated_matmul(x, w, 2 * w, activation=jnp.square).tolist()
    [[128.0, 128.0, 128.0], [128.0, 128.0, 128.0]]
  """
  x, w_gate = arguments.array("x", x), arguments.array("w_gate", w_gate)
  w_up = arguments.array("w_up", w_up)
  if activation is None:
    raise TypeError("activation must be a function, got None")
  activation = activations.of(activation, x, w_gate, out_dtype)
  options = arguments.key(
    Options, activation, out_dtype, None, implementation, config, out_sharding
  )
  return _gated_matmul(options, tuning.generation(), x, w_gate, w_up)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _matmul(key, generation, a, b, bias=None, c=None, alpha=None, beta=None):
  del generation  # a key: the config may be another one now
  options = key.options
  arguments.check_numbers(a=a, b=b, bias=bias, c=c)
  arguments.check_operand("a", a)
  arguments.check_operand("b", b)
  arguments.check_transpose("a", a, options.transpose_a)
  arguments.check_transpose("b", b, options.transpose_b)
  weak = compat.is_weak(*(v for v in (a, b, bias, c) if v is not None))
  a, b = arguments.promoted(("a", "b"), a, b)
  x = Operands(a, b, bias=bias, c=c, alpha=alpha, beta=beta)
  out = _product(x, options, ("a", "b"))
  if weak and options.out_dtype is None:
    out = compat.with_weak_type(out)
  return out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gated_matmul(key, generation, x, w_gate, w_up):
  del generation
  options = key.options
  arguments.check_numbers(x=x, w_gate=w_gate, w_up=w_up)
  arguments.check_operand("x", x)
  arguments.check_operand("w_gate", w_gate)
  arguments.check_like("w_up", w_up, "w_gate", w_gate)
  weak = compat.is_weak(x, w_gate, w_up)
  names = "x", "w_gate", "w_up"
  operands = Operands(*arguments.promoted(names, x, w_gate, w_up))
  out = _product(operands, options, names[:2])
  if weak and options.out_dtype is None:
    out = compat.with_weak_type(out)
  return out


def _product(x: Operands, options: Options, of: tuple[str, str]):
  """Checks what is left to check, and computes."""
  *batch_a, m, k = _dimensions(x.a.shape, options.transpose_a, (0,))
  *batch_b, k_b, n = _dimensions(x.b.shape, options.transpose_b, (1,))
  arguments.check_inner(of, x.a.shape, x.b.shape, k, k_b)
  batch = arguments.batch_shape(of, tuple(batch_a), tuple(batch_b))
  row, column = "m" * (x.a.ndim > 1), "n" * (x.b.ndim > 1)
  letters = spec_lib.LETTERS[: len(batch)]
  shape = (*batch, *((m,) * len(row)), *((n,) * len(column)))
  like = x.a.dtype
  out_dtype = arguments.dtype_of(options.out_dtype, like, like=like)
  names = arguments.implementation(options.implementation)
  arguments.check_config(options.config, names)
  _check_epilogue(x, shape, m, n, out_dtype)
  spec = Spec(
    words=Operands(None, None),
    out=letters + row + column,
    out_dtype=out_dtype,
    activation=options.activation,
    precision=arguments.precision(options.precision),
    implementation=names,
    config=options.config,
    batch_invariant=is_batch_invariant(),
  )
  spec = typed(x, spec, _reference(options), options.out_sharding)
  a = "k" + row if options.transpose_a else row + "k"
  b = column + "k" if options.transpose_b else "k" + column
  words, x = _named(x, a, b, spec.out, batch)
  spec = dataclasses.replace(spec, words=words)
  if options.without_product:
    return _without_product(x, spec, shape)
  return product(x, spec)[0]


def _dimensions(shape: tuple[int, ...], transposed: bool, vector):
  """[.., M, K] or [.., K, N]; a vector is a row on the left, else a column."""
  if len(shape) == 1:
    return (1, *shape) if vector == (0,) else (*shape, 1)
  return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def _check_epilogue(x: Operands, shape, m: int, n: int, out_dtype: Any) -> None:
  """Bias and C have shapes and dtypes that can be added to the sums."""
  wide = x.wide(out_dtype)
  for name, v in (("bias", x.bias), ("c", x.c)):
    if v is not None:
      arguments.check_epilogue_array(name, v, wide)
  if x.bias is not None and x.bias.shape not in ((n,), (m, 1)):
    raise ValueError(
      f"bias must have shape [N] = ({n},) or [M, 1] = ({m}, 1), got"
      f" {x.bias.shape}"
    )
  if x.c is not None and x.c.shape != shape:
    raise ValueError(f"c must have the result's shape {shape}, got {x.c.shape}")


def _reference(options: Options):
  """The op in JAX's own functions, as far as types go."""

  def reference(x: Operands):
    a = jnp.swapaxes(x.a, -1, -2) if options.transpose_a else x.a
    outs = [
      jnp.matmul(
        a,
        jnp.swapaxes(b, -1, -2) if options.transpose_b else b,
        out_sharding=options.out_sharding,
      )
      for b in (x.b, x.b_up)
      if b is not None
    ]
    out = outs[0] * outs[1] if len(outs) > 1 else outs[0]
    for v in (x.c, x.bias):
      out = out if v is None else out + v.astype(out.dtype)
    return out

  return reference


def _named(x: Operands, a: str, b: str, out: str, batch: tuple[int, ...]):
  """The letters of each operand, which has no dimension that broadcasts."""

  def batched(v, word):
    lead = v.ndim - len(word)
    shared = [
      i
      for i, (have, want) in enumerate(zip(v.shape, batch[len(batch) - lead :]))
      if isinstance(have, int) and have == 1 != want
    ]
    letters = out[len(batch) - lead : len(batch)]
    kept = "".join(c for i, c in enumerate(letters) if i not in shared)
    return kept + word, jax.lax.squeeze(v, shared) if shared else v

  words = {"a": a, "b": b, "c": out, "alpha": "", "beta": ""}
  found = {name: (words.get(name), v) for name, v in x._asdict().items()}
  found["a"], found["b"] = batched(x.a, a), batched(x.b, b)
  if x.b_up is not None:
    found["b_up"] = batched(x.b_up, b)
  if x.bias is not None:
    side = "n" if x.bias.ndim == 1 else "m"
    bias = x.bias if side == "n" else jax.lax.squeeze(x.bias, (1,))
    if side not in out:  # of a vector, which has no such dimension
      side, bias = "", jax.lax.squeeze(bias, (0,))
    found["bias"] = side, bias
  return (
    Operands(**{k: w for k, (w, v) in found.items() if v is not None}),
    Operands(**{k: v for k, (_, v) in found.items() if v is not None}),
  )


def _without_product(x: Operands, spec: Spec, shape: tuple[int, ...]):
  """activation(beta * C + bias), as in BLAS where alpha is zero."""
  mesh = compat.explicit_mesh(x.present())
  to = mesh and jax.sharding.NamedSharding(mesh, spec.parts)
  wide = x.wide(spec.out_dtype)
  nothing = jnp.zeros(shape, wide, out_sharding=to)
  return spec_lib.epilogue([nothing], x._replace(alpha=None), spec)[0]
