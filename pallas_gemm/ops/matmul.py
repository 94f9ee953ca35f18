"""`matmul` and `gated_matmul`: what users call, and the way to the primitive.

The public functions do next to nothing, so that a call costs what one of
`jnp.dot` does: one compiled function, kept under the arguments that are no
arrays, runs the rest while it is traced.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm import tuning
from pallas_gemm.ops import arguments
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.arguments import Options
from pallas_gemm.ops.folding import to_rank_3
from pallas_gemm.ops.gemm import gemm
from pallas_gemm.ops.invariance import is_batch_invariant
from pallas_gemm.ops.spec import Operands, Spec


def matmul(
  a: jax.Array,
  b: jax.Array,
  *,
  bias: jax.Array | None = None,
  activation: Callable[[jax.Array], jax.Array] | None = None,
  c: jax.Array | None = None,
  alpha: float = 1.0,
  beta: float = 1.0,
  transpose_a: bool = False,
  transpose_b: bool = False,
  out_dtype: Any = None,
  precision: Any = None,
  implementation: str | Sequence[str] | None = None,
  config: Any = None,
) -> jax.Array:
  """activation(alpha * A @ B + beta * C + bias), in one kernel where possible.

  Products of bfloat16 or float16 run on the Hopper kernel on GPUs of compute
  capability 9.0. Everything else is XLA's. What ran is logged once, and so is
  why the others did not.

  Works under `jax.jit`, `jax.grad` (of any order), `jax.vmap`, `jax.checkpoint`
  and `jax.shard_map`. Where `jax.jit` partitions a computation over devices by
  itself, XLA's product runs; `jax.shard_map` gives each device the kernel.

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
      too.
    c: of the result's shape; no wider than the accumulation.
    alpha: a Python number; an integer if the operands are integers.
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

  Returns:
    [..., M, N].

  Raises:
    TypeError, ValueError: an argument is wrong; the message names it.
    NotImplementedError: none of `implementation` takes the product; the
      message has the reason of each.

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
  options = (
    activation,
    alpha,
    beta,
    transpose_a,
    transpose_b,
    out_dtype,
    precision,
    implementation,
    config,
  )
  try:
    hash(options)
  except TypeError:
    options = arguments.hashable(options)
  return _matmul(a, b, bias, c, options, tuning.generation())


def gated_matmul(
  x: jax.Array,
  w_gate: jax.Array,
  w_up: jax.Array,
  *,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  out_dtype: Any = None,
  implementation: str | Sequence[str] | None = None,
  config: Any = None,
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
  options = (
    activation,
    1.0,
    1.0,
    False,
    False,
    out_dtype,
    None,
    implementation,
    config,
  )
  try:
    hash(options)
  except TypeError:
    options = arguments.hashable(options)
  return _gated_matmul(x, w_gate, w_up, options, tuning.generation())


@functools.partial(jax.jit, static_argnums=(4, 5))
def _matmul(a, b, bias, c, options, generation):
  del generation  # a key: the config may be another one now
  options = Options(*options)
  arguments.check_operand("a", a)
  arguments.check_operand("b", b)
  arguments.check_transposes(options, a, b)
  dtype = jnp.result_type(a, b)
  x = Operands(a.astype(dtype), b.astype(dtype), bias=bias, c=c)
  return _product(x, options, ("a", "b"))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _gated_matmul(x, w_gate, w_up, options, generation):
  del generation
  options = Options(*options)
  arguments.check_operand("x", x)
  arguments.check_operand("w_gate", w_gate)
  arguments.check_like("w_up", w_up, "w_gate", w_gate)
  if options.activation is None:
    raise TypeError("activation must be a function, got None")
  dtype = jnp.result_type(x, w_gate)
  operands = Operands(*[v.astype(dtype) for v in (x, w_gate, w_up)])
  return _product(operands, options, ("x", "w_gate"))


def _product(x: Operands, options: Options, names: tuple[str, str]):
  """Checks what is left to check, and computes."""
  vectors = [axis for axis, v in ((-2, x.a), (-1, x.b)) if v.ndim == 1]
  x = _matrices(x)
  *batch_a, m, k = _unstored(x.a.shape, options.transpose_a)
  *batch_b, k_b, n = _unstored(x.b.shape, options.transpose_b)
  arguments.check_inner(names, x.a.shape, x.b.shape, k, k_b)
  batch = arguments.batch_shape(names, tuple(batch_a), tuple(batch_b))
  shape = (*batch, m, n)
  spec = _spec(x, options)
  x, spec = _with_bias(x, spec, m, n)
  x, spec = _with_c(x, spec, shape, vectors)
  (out,) = gemm(to_rank_3(x, spec, shape), spec)
  return jnp.squeeze(out.reshape(shape), vectors)


def _matrices(x: Operands) -> Operands:
  """A vector is a row on the left, a column on the right."""
  if x.a.ndim == 1:
    x = x._replace(a=x.a[None, :])
  if x.b.ndim == 1:
    up = None if x.b_up is None else x.b_up[:, None]
    x = x._replace(b=x.b[:, None], b_up=up)
  return x


def _unstored(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
  return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def _spec(x: Operands, options: Options) -> Spec:
  """What is computed, but for C and bias."""
  dtype = x.a.dtype
  out_dtype = arguments.out_dtype(options.out_dtype, dtype)
  wide = spec_lib.accumulation_dtype(dtype, out_dtype)
  names = arguments.implementation(options.implementation)
  arguments.check_config(options.config, names)
  if options.activation is not None:
    arguments.check_activation(options.activation, wide)
  return Spec(
    out_dtype=out_dtype,
    alpha=arguments.factor("alpha", options.alpha, wide),
    beta=arguments.factor("beta", options.beta, wide),
    transpose_a=options.transpose_a,
    transpose_b=options.transpose_b,
    activation=options.activation,
    gated=x.b_up is not None,
    precision=arguments.precision(options.precision),
    implementation=names,
    config=options.config,
    batch_invariant=is_batch_invariant(),
  )


def _with_bias(x: Operands, spec: Spec, m: int, n: int):
  """Operands and spec with what there is of a bias, checked."""
  if x.bias is None:
    return x, spec
  wide = spec_lib.accumulation_dtype(x.a.dtype, spec.out_dtype)
  arguments.check_epilogue_array("bias", x.bias, wide)
  side = arguments.bias_side(x.bias, m, n)
  return x._replace(bias=x.bias.ravel()), dataclasses.replace(spec, bias=side)


def _with_c(x: Operands, spec: Spec, shape: tuple[int, ...], vectors):
  """Operands and spec with C, checked; a C that beta drops is not read."""
  if x.c is None:
    if spec.beta != 1:
      raise ValueError(f"beta is {spec.beta} but c is None; pass c")
    return x, spec
  wide = spec_lib.accumulation_dtype(x.a.dtype, spec.out_dtype)
  arguments.check_epilogue_array("c", x.c, wide)
  want = tuple(
    size for i, size in enumerate(shape) if i - len(shape) not in vectors
  )
  arguments.check_c(x.c, want)
  if spec.beta == 0:
    return x._replace(c=None), dataclasses.replace(spec, beta=1.0)
  return x._replace(c=x.c.reshape(shape)), dataclasses.replace(spec, has_c=True)
