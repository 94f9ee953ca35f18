"""`matmul` and `gated_matmul`: what users call, and the way to the primitive.

The public functions do little, so that a call costs what one of `jnp.dot` does:
one compiled function, kept under the arguments that are no arrays, runs the
rest while it is traced.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, Never

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm import compat, meshes, tuning
from pallas_gemm.kernels import activations
from pallas_gemm.ops import arguments, keywords, planes, quantized, recipes
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.arguments import Options
from pallas_gemm.ops.factors import factor
from pallas_gemm.ops.spec import Operands
from pallas_gemm.ops.types import (
  ArrayLike,
  Config,
  DTypeLike,
  Implementation,
  Operand,
  PrecisionLike,
  Sharding,
)
from pallas_gemm.quantization import Recipe

# What most calls have, who are told by its identity.
_ONE = 1.0


@keywords.without_others
def matmul(
  a: Operand,
  b: Operand,
  *,
  bias: ArrayLike | None = None,
  activation: Callable[[jax.Array], jax.Array] | None = None,
  c: ArrayLike | None = None,
  alpha: ArrayLike = _ONE,
  beta: ArrayLike = _ONE,
  transpose_a: bool = False,
  transpose_b: bool = False,
  out_dtype: DTypeLike | None = None,
  precision: PrecisionLike = None,
  implementation: Implementation | None = None,
  config: Config | None = None,
  out_sharding: Sharding | None = None,
  reduce_dtype: DTypeLike | None = None,
  quantize: Recipe | None = None,
  **others: Never,
) -> jax.Array:
  """activation(alpha * A @ B + beta * C + bias), in one kernel where possible.

  Products of bfloat16, float16, 8-bit floats or int8, and of float32 at HIGHEST
  or BF16_BF16_F32_X3 to X9, run on the Hopper kernel on GPUs of compute
  capability 9.0, everything else is XLA's; `explain` tells which, and why. It
  works under all of JAX's transformations and on meshes, where results and
  their shardings are those of `jnp.matmul`. The same inputs give the same bits.
  As in BLAS, nothing is read that has the number 0 as its factor (an array may
  hold any). See docs/ops for more.

  Numerics: 16-bit operands are multiplied exactly and added in float32; alpha,
  C, bias and activation are applied in float32; one rounding to `out_dtype`
  follows. For results of 16 bits the kernel's sigmoid, silu and gelu are good
  to 2^-14 (float16: 2^-16), its tanh to 2^-15 (2^-16). Derivatives of the
  activation are taken at its argument rounded to `out_dtype`; cotangents are
  rounded to the operands' dtype. Of 8 bits, sums of floats are added to float32
  totals every 128 of K, sums of int8 are exact up to a K of 131071, and scales
  are applied in float32; there is no derivative by such operands.

  Args:
    a: [..., M, K], or [K]: a row. Mixed dtypes are promoted, and batch
      dimensions broadcast, as by `jnp.matmul`; two kinds of 8-bit floats are
      taken as they are, with results as of the first. Or a `Quantized`: 8 bits
      and their scales; beside a wider operand it is multiplied out.
    b: [..., K, N], or [K]: a column. Or a `Quantized` or a `Split`.
    bias: what broadcasts to the result: [N], [M, 1], a number; of a vector also
      [M, 1], of a batch of them [.., M, 1]. No wider than the accumulation. A
      kernel has [N] and [M, 1] for all of a batch; others cost what C costs.
    activation: an elementwise JAX function of one array, without arrays or
      traced values of its own; it is compiled into the kernel, once for all
      functions that compute the same.
    c: of the result's shape, or what broadcasts to it (XLA then makes it that
      large); no wider than the accumulation.
    alpha, beta: numbers or arrays of shape (), of the operands' kind.
    transpose_a, transpose_b: the operand is stored [..., K, M], or [..., N, K],
      and read in place.
    out_dtype: of the result; by default the operands', of a `Quantized` beside
      8 bits bfloat16. The kernel has no results of 8 bits: of operands of 8
      bits without scales ask for wider ones.
    precision: as of `jnp.matmul`; all `lax.Precision` are alike to 16 bits. At
      HIGHEST the kernel multiplies float32 in three bfloat16 planes, and is
      more accurate than a float32 sum in order; see docs/ops/float32.
      `DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM` leaves sums of 8-bit
      floats to the tensor cores, which keep about 13 bits of them.
    implementation: "sm90", "triton", "xla" or a sequence of them, tried in this
      order; None: the kernel, or XLA's product where it is faster. "sm90"
      without a GPU is interpreted, on one device alone: slow, and right.
    config: a `tuning.Config` for "sm90" or a `triton_dense.Config` for
      "triton"; None takes the fastest one known. Where the op leaves the
      product to XLA it is not used.
    out_sharding: as of `jnp.matmul`, for Explicit mesh axes.
    reduce_dtype: where K is sharded over devices, what each rounds its part of
      the sums to before they are added up in it, as `jnp.bfloat16`: half the
      bytes that travel, and a rounding more for each device. Of the operands'
      kind, 16 bits or more, and no wider than the accumulation. None: float32,
      where XLA computes the product what it takes.
    quantize: a `Recipe`: operands of 16 or 32 bits are quantised, and in the
      backward pass cotangents. It has the first derivative, in reverse mode. A
      `Quantized` operand is taken as it is. `precision` must be None.

  Returns:
    [..., M, N].

  Raises:
    TypeError, ValueError: an argument is wrong; the message names it. Also of a
      derivative by operands of 8 bits, their scales, or a `Split`.
    NotImplementedError: none of `implementation` takes the product; the
      message has the reason of each. Or `out_sharding` is unreduced.
    ShardingTypeError, of JAX: as of `jnp.matmul`, on Explicit axes.

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
  if others:
    raise keywords.unexpected(matmul, others)
  if not (isinstance(a, jax.Array) and isinstance(b, jax.Array)):
    a, b = quantized.operand("a", a), quantized.operand("b", b)
  if bias is not None or c is not None:
    bias = arguments.array("bias", bias, optional=True)
    c = arguments.array("c", c, optional=True)
  if transpose_a is not False or transpose_b is not False:
    arguments.check_bool("transpose_a", transpose_a)
    arguments.check_bool("transpose_b", transpose_b)
  if activation is not None:
    of_both = quantized.typed(a, b)
    activation = activations.of(activation, *of_both, out_dtype)
  alpha, beta, *without = _scaled(c, alpha, beta, a, b, out_dtype)
  how = activation, out_dtype, precision, implementation, config, out_sharding
  how = *how, reduce_dtype, quantize, transpose_a, transpose_b
  options = arguments.options((*how, *without))
  if bias is None and c is None and alpha is None:
    return _matmul(options, tuning.generation(), a, b)
  return _matmul(options, tuning.generation(), a, b, None, bias, c, alpha, beta)


def _scaled(c: Any, alpha: Any, beta: Any, a: Any, b: Any, out_dtype: Any):
  """alpha and beta, None for the number 1; whether each is the number 0.

  Nothing is read that has a factor of zero, so that is another program.
  """
  if alpha is _ONE and beta is _ONE:
    return None, None, False, False
  a, b = quantized.typed(a, b)
  alpha, no_product = factor("alpha", alpha, a, b, out_dtype)
  beta, no_c = factor("beta", beta, a, b, out_dtype)
  if c is None and beta is not None:
    raise ValueError(f"beta is {beta} but c is None; pass c")
  alpha, beta = None if no_product else alpha, None if no_c else beta
  return alpha, beta, no_product, no_c


@keywords.without_others
def gated_matmul(
  x: Operand,
  w_gate: Operand,
  w_up: Operand,
  *,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  out_dtype: DTypeLike | None = None,
  precision: PrecisionLike = None,
  implementation: Implementation | None = None,
  config: Config | None = None,
  out_sharding: Sharding | None = None,
  reduce_dtype: DTypeLike | None = None,
  quantize: Recipe | None = None,
  **others: Never,
) -> jax.Array:
  """activation(x @ w_gate) * (x @ w_up), in one kernel where possible.

  The first half of a gated feed-forward layer: `x` is read once, and the two
  products never leave the chip. Kept for derivatives are the two products,
  rounded to `out_dtype`. All else is as for `matmul`, errors too.

  Args:
    x: [..., M, K], or [K]; or a `Quantized`.
    w_gate, w_up: [..., K, N], of one shape and dtype; or each a `Quantized`
      or a `Split`.
    activation, out_dtype, precision, implementation: as for `matmul`.
    config, out_sharding, reduce_dtype, quantize: as for `matmul`.

  Returns:
    [..., M, N].

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
    >>> pallas_gemm.gated_matmul(x, w, 2 * w, activation=jnp.square).tolist()
    [[128.0, 128.0, 128.0], [128.0, 128.0, 128.0]]
  """
  if others:
    raise keywords.unexpected(gated_matmul, others)
  x, w_gate = quantized.operand("x", x), quantized.operand("w_gate", w_gate)
  w_up = quantized.operand("w_up", w_up)
  of_both = quantized.typed(x, w_gate)
  activation = activations.of(activation, *of_both, out_dtype)
  how = activation, out_dtype, precision, implementation, config, out_sharding
  options = arguments.options((*how, reduce_dtype, quantize))
  return _matmul(options, tuning.generation(), x, w_gate, w_up)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _matmul(options, generation, *operands):
  del generation  # a key: the config may be another one now
  x = Operands(*arguments.arrays(*operands))
  names = arguments.OF_MATMUL if x.b_up is None else arguments.OF_GATED
  x = planes.apart(names, x, arguments.planes(x, options, grouped=False))
  x = quantized.apart(names, x, options.quantize)
  arguments.check_numbers(names, x)
  x = Operands(*arguments.in_one_memory(names, x))
  compute = recipes.rule(options, names, x)
  passed, x = x, arguments.promoted(names, x, options)
  out_dtype = quantized.result_dtype(options.out_dtype, x)
  words, out, operands = _named(names, x, options, out_dtype)
  if options.without_c:
    passed, x = passed._replace(c=None), x._replace(c=None)
  reference = functools.partial(_reference, options)
  spec = arguments.spec_of(
    options,
    arguments.DENSE,
    x,
    words=words,
    out=out,
    out_dtype=out_dtype,
    parts=arguments.parts_of(x, reference, options.out_sharding),
  )
  if options.without_product:
    compute = spec_lib.without_product
  result = compute(operands, spec)[0]
  # Factors have no part in it, and nothing promotes bias and C.
  products, added = passed[:3], (passed.bias, passed.c)
  # Nor does JAX promote two 8-bit floats, of which none is weak.
  weak = x.a.dtype == x.b.dtype
  weak = weak and compat.is_weak(*[v for v in products if v is not None])
  weak &= all(jax.typeof(v).weak_type for v in added if v is not None)
  if weak and options.out_dtype is None:
    result = compat.with_weak_type(result)
  return result


def _word(name: str, v: jax.Array, transposed: bool, matrix: str) -> str:
  """The letters of the matrix in an operand, as it is stored; of a vector k."""
  arguments.check(v.ndim, f"{name} must have rank 1 or more", "a scalar")
  needs = f"transpose_{name} needs {name} of rank 2 or more"
  arguments.check(v.ndim > 1 or not transposed, needs, f"shape {v.shape}")
  return "k" if v.ndim == 1 else matrix[::-1] if transposed else matrix


def _named(names: Operands, x: Operands, options: Options, out_dtype: Any):
  """The letters of operands and result, and operands that do not broadcast."""
  a = _word(names.a, x.a, options.transpose_a, "mk")
  b = _word(names.b, x.b, options.transpose_b, "kn")
  size_a, size_b = (
    dict(zip(word[::-1], v.shape[::-1])) for word, v in ((a, x.a), (b, x.b))
  )
  arguments.check_inner(names, x, size_a["k"], size_b["k"])
  batch_a, batch_b = x.a.shape[: -len(a)], x.b.shape[: -len(b)]
  try:
    batch = jnp.broadcast_shapes(batch_a, batch_b)
  except ValueError as error:
    raise ValueError(
      f"batch dimensions of {names.b} must broadcast against those of"
      f" {names.a}, {batch_a}, got {batch_b}"
    ) from error
  letters = spec_lib.LETTERS[: len(batch)]
  out = (letters + a + b).replace("k", "")
  size = {"m": 1, "n": 1} | size_a | size_b | dict(zip(letters, batch))
  shape, wide = tuple(size[c] for c in out), x.wide(out_dtype)
  bias, of_bias = _bias(x.bias, wide, out, size)
  c = arguments.added("c", x.c, wide, "the result's shape", shape)
  x = x._replace(bias=bias, c=None if options.without_c else c)
  words, arrays = {"bias": of_bias, "alpha": "", "beta": ""}, x._asdict()
  whole = {}
  of_b = dict.fromkeys(("b", "b_up", *spec_lib.BESIDE), b)
  for name, word in ({"a": a} | of_b).items():
    if (v := arrays[name]) is not None:
      whole[name] = letters[len(letters) - v.ndim + len(word) :] + word
      words[name], arrays[name] = _without_ones(v, word, letters, batch)
  found, of_found = quantized.named(x, whole, letters)
  arrays, words = arrays | found, words | of_found
  if x.c is not None:
    words["c"], arrays["c"] = _without_ones(x.c, "", out, shape)
  there = [None if v is None else words[name] for name, v in arrays.items()]
  return Operands(*there), out, Operands(**arrays)


def _bias(bias: Any, wide: Any, out: str, size: dict[str, int]):
  """A bias without dimensions that broadcast, and its letters."""
  if bias is None:
    return None, None
  # Beside a vector it may have the dimension that the result lacks: [M, 1].
  whole = out.replace("m", "").replace("n", "") + "mn"
  shape, of_whole = (tuple(size[c] for c in word) for word in (out, whole))
  over, fits = out, arguments.broadcasts
  is_longer = bias.ndim > len(shape)
  if not fits(bias.shape, shape) and is_longer and fits(bias.shape, of_whole):
    over, shape = whole, of_whole
  bias = arguments.added("bias", bias, wide, "the result's shape", shape)
  word, bias = _without_ones(bias, "", over, shape)
  for c in word[::-1]:
    if size[c] == 1 and (len(word) > 1 or c not in out):
      bias = _squeezed(bias, (word.index(c),))
      word = word.replace(c, "")
  return bias, word


def _without_ones(v: jax.Array, word: str, letters: str, batch):
  """The letters of an operand, and it without dimensions that broadcast."""
  first = len(batch) - (v.ndim - len(word))
  shared = [
    i
    for i, (have, want) in enumerate(zip(v.shape, batch[first:]))
    if isinstance(have, int) and have == 1 != want
  ]
  kept = "".join(c for i, c in enumerate(letters[first:]) if i not in shared)
  return kept + word, _squeezed(v, shared) if shared else v


def _squeezed(v: jax.Array, at: Sequence[int]) -> jax.Array:
  """v without dimensions of size 1.

  The transpose would not give them their mesh axes, of size 1, back.
  """
  sharding = jax.typeof(v).sharding
  parts = [None if i in at else x for i, x in enumerate(sharding.spec)]
  if parts != [*sharding.spec]:
    to = NamedSharding(sharding.mesh, PartitionSpec(*parts))
    v = jax.sharding.reshard(v, to)
  return jax.lax.squeeze(v, at)


def _reference(options: Options, x: Operands) -> jax.Array:
  """The op in JAX's own functions, as far as types go."""
  if x.a.dtype != x.b.dtype:  # of 8 bits, which JAX promotes to nothing
    x = Operands(*[v if v is None else v.astype(jnp.bfloat16) for v in x[:3]])
  a = jnp.swapaxes(x.a, -1, -2) if options.transpose_a else x.a
  multiply = functools.partial(_matmul_to, options.out_sharding)
  outs = [
    multiply(a, jnp.swapaxes(b, -1, -2) if options.transpose_b else b)
    for b in (x.b, x.b_up)
    if b is not None
  ]
  out = outs[0] * outs[1] if len(outs) > 1 else outs[0]
  if options.out_sharding is None:  # what is added may shard the result
    for v in (x.c, x.bias):
      if v is not None and arguments.broadcasts(v.shape, out.shape):
        out = out + v.astype(out.dtype)
  return out


def _matmul_to(to: Any, a: jax.Array, b: jax.Array) -> jax.Array:
  """`jnp.matmul`, sharded as it is asked for.

  Where batches broadcast, JAX 0.11.2 to 0.12 takes dimensions for others.
  """
  batch, mesh = a.shape[:-2], meshes.explicit([a, b])
  are_alike = batch == b.shape[:-2] and 1 not in batch
  if to is None or mesh is None or are_alike:
    return jnp.matmul(a, b, out_sharding=to)
  whole = NamedSharding(mesh, PartitionSpec())
  a, b = (jax.sharding.reshard(v, whole) for v in (a, b))
  return jax.sharding.reshard(jnp.matmul(a, b), to)
