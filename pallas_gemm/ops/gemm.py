"""The primitive behind every op, and its rules.

`gemm_p` computes what a `Spec` says of operands of rank 3. It differentiates
into products of its own kind, reading transposed operands in place; it batches
into one product; and it is lowered to whatever `dispatch` chooses.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ops import dispatch
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.implementations import Target
from pallas_gemm.ops.spec import Operands, Spec

gemm_p = core.Primitive("pallas_gemm")
gemm_p.multiple_results = True


def gemm(x: Operands, spec: Spec) -> list[jax.Array]:
  """The results of `spec`, each [batch, M, N]: the product, then what it saves.

  Args:
    x: A [batch or 1, M, K] and B [batch or 1, K, N] of one dtype, B_up as B,
      bias [N] or [M], C [batch, M, N]; transposed as `spec` says.
    spec: what is computed.
  """
  return gemm_p.bind(*compat.join_varying(*x.present()), spec=spec)


@functools.partial(jax.jit, static_argnames="spec")
def _eagerly(*operands, spec):
  return gemm_p.bind(*operands, spec=spec)


gemm_p.def_impl(_eagerly)


@gemm_p.def_effectful_abstract_eval
def _abstract_eval(*avals, spec: Spec):
  batch, m, n, _ = spec.sizes(spec.named(avals))
  out = compat.shaped_like(avals[0], (batch, m, n), spec.out_dtype)
  interpreted = (
    "sm90" in (spec.implementation or ())
    and avals[0].dtype.itemsize == 2
    and not compat.targets_gpu()
  )
  effects = compat.interpreter_effects() if interpreted else frozenset()
  return [out] * spec.outputs, effects


# Lowering.


def _lowering(ctx, *operands, spec: Spec, cuda: bool):
  partitioned = compat.is_partitioned(ctx.module_context.axis_context)
  run = functools.partial(
    dispatch.run, spec=spec, target=Target(cuda, partitioned)
  )
  # A kernel is traced for one device. That it is inside of a shard_map shows
  # in the types of its operands alone, and is of no concern from here on.
  plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
  inner = ctx.replace(avals_in=plain)
  with _one_device(cuda):
    outs = mlir.lower_fun(run)(inner, *operands)
  if inner.tokens_out is not None:  # of an interpreted kernel's effects
    ctx.set_tokens_out(inner.tokens_out)
  return outs


def _one_device(cuda: bool):
  """Context: kernels are traced for one device of what is lowered for."""
  if cuda and not compat.targets_gpu():  # ahead of time, without a GPU
    return hardware.assume(hardware.DEFAULT_NAME)
  if not cuda and compat.targets_gpu():
    return compat.one_device("cpu")
  return compat.one_device()


mlir.register_lowering(gemm_p, functools.partial(_lowering, cuda=False))
mlir.register_lowering(
  gemm_p, functools.partial(_lowering, cuda=True), platform="cuda"
)


# Derivatives.


def _jvp(primals, tangents, *, spec: Spec):
  x, dx = spec.named(primals), spec.named(map(_instantiated, tangents))
  if spec.activation is None:
    return gemm(x, spec), [_d_preactivation(x, dx, spec)]
  outs = gemm(x, dataclasses.replace(spec, save=True))
  saved = outs[1:]
  if spec.gated:
    of_up = x._replace(b=x.b_up), dx._replace(b=dx.b_up)
    d_saved = [_d_product(x, dx, spec), _d_product(*of_up, spec)]
  else:
    d_saved = [_d_preactivation(x, dx, spec)]
  d_saved = [
    jnp.zeros_like(z) if d is None else d for d, z in zip(d_saved, saved)
  ]
  _, d_out = jax.jvp(_activation(spec, x.a.dtype), saved, d_saved)
  return outs[: spec.outputs], [d_out, *d_saved][: spec.outputs]


def _instantiated(tangent):
  """None for a tangent that is known to be zero."""
  return None if type(tangent) is ad.Zero else tangent


def _d_product(x: Operands, dx: Operands, spec: Spec) -> jax.Array | None:
  """alpha * (dA @ B + A @ dB), of those tangents that there are."""
  alone = spec.product_alone()
  terms = []
  if dx.a is not None:
    terms += gemm(Operands(dx.a, x.b), alone)
  if dx.b is not None:
    terms += gemm(Operands(x.a, dx.b), alone)
  return _sum(terms)


def _sum(terms: list[jax.Array]) -> jax.Array | None:
  return functools.reduce(jnp.add, terms) if terms else None


def _d_preactivation(x: Operands, dx: Operands, spec: Spec):
  """The tangent of what the activation is applied to; None if zero."""
  product = _d_product(x, dx, spec)
  terms = [] if product is None else [product]
  wide = spec_lib.accumulation_dtype(x.a.dtype, spec.out_dtype)
  # Through the wide dtype, so that the transposed sums are added in it.
  if dx.c is not None:
    c = dx.c.astype(wide) * jnp.asarray(spec.beta, wide)
    terms.append(c.astype(spec.out_dtype))
  if dx.bias is not None:
    batch, m, n, _ = spec.sizes(x)
    bias = spec_lib.bias_as_matrix(dx.bias.astype(wide), spec.bias)
    bias = jnp.broadcast_to(bias, (batch, m, n))
    terms.append(bias.astype(spec.out_dtype))
  return _sum(terms)


def _activation(spec: Spec, dtype):
  """The activation as a function of what is saved; keeps only that."""
  wide = spec_lib.accumulation_dtype(dtype, spec.out_dtype)

  def apply(first, *rest):
    out = spec.activation(first.astype(wide))
    for up in rest:
      out = out * up.astype(wide)
    return out.astype(spec.out_dtype)

  # Nothing is there to be recomputed that a compiler could share: the forward
  # pass applied the activation inside the kernel.
  return jax.checkpoint(apply, prevent_cse=False)


ad.primitive_jvps[gemm_p] = _jvp


def _transpose(cotangents, *operands, spec: Spec):
  """Of a product alone, which is linear in A and in B."""
  (ct,) = cotangents
  x = spec.named(operands)
  to_a = ad.is_undefined_primal(x.a)
  aval = (x.a if to_a else x.b).aval
  if type(ct) is ad.Zero:
    grad = ad.Zero(aval)
  else:
    grad = _cotangent(ct, x.b if to_a else x.a, to_a, aval, spec)
  return [grad, None] if to_a else [None, grad]


def _cotangent(ct, other, to_a: bool, aval, spec: Spec) -> jax.Array:
  """Of A (from B) or of B (from A); every operand is read as it is stored."""
  ta, tb = spec.transpose_a, spec.transpose_b
  if to_a:
    layout = (other, ct, tb, True) if ta else (ct, other, False, not tb)
  else:
    layout = (ct, other, True, ta) if tb else (other, ct, not ta, False)
  a, b, transpose_a, transpose_b = layout
  summed = aval.shape[0] == 1 and ct.shape[0] != 1
  wide = spec_lib.accumulation_dtype(aval.dtype, aval.dtype)
  spec = dataclasses.replace(
    spec,
    out_dtype=wide if summed else aval.dtype,
    transpose_a=transpose_a,
    transpose_b=transpose_b,
  )
  (grad,) = gemm(Operands(a.astype(aval.dtype), b.astype(aval.dtype)), spec)
  if summed:
    grad = jnp.sum(grad, axis=0, keepdims=True).astype(aval.dtype)
  return grad


ad.primitive_transposes[gemm_p] = _transpose


# Batching.


def _batch(operands, dims, *, spec: Spec):
  x, dim = spec.named(operands), spec.named(dims)
  (size,) = {v.shape[d] for v, d in zip(operands, dims) if d is not None}
  # From here on, an operand with a new dimension has it in front.
  x = Operands(
    *[v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(x, dim)]
  )
  is_new = Operands(*[d is not None for d in dim])
  one = _without_new(x, is_new)
  batch, m, n, k = spec.sizes(one)
  if is_new.bias:
    c = _bias_added_to_c(x, spec, (size, batch, m, n))
    x, is_new = x._replace(bias=None, c=c), is_new._replace(c=True)
    spec = dataclasses.replace(spec, bias=None, has_c=True, beta=1.0)
  only_a = is_new.a and not is_new.b and not is_new.b_up
  if only_a and batch == 1 and not spec.transpose_a and spec.bias != "m":
    x = _folded_into_m(x, is_new, (size, m, n, k))
  else:
    x = _merged(x, is_new, size, batch)
  outs = gemm(x, spec)
  return [out.reshape(size, batch, m, n) for out in outs], [0] * len(outs)


def _without_new(x: Operands, is_new: Operands) -> Operands:
  """Shapes of one example's operands."""
  return Operands(
    *[
      jax.ShapeDtypeStruct(v.shape[1:], v.dtype) if new else v
      for v, new in zip(x, is_new)
    ]
  )


def _bias_added_to_c(x: Operands, spec: Spec, shape) -> jax.Array:
  """beta * C + bias, for a bias of each example: the kernel has one for all."""
  wide = spec_lib.accumulation_dtype(x.a.dtype, spec.out_dtype)
  axis = 1 if spec.bias == "n" else 2
  c = jnp.expand_dims(x.bias.astype(wide), (1, 1 + axis))
  if x.c is not None:
    c = c + jnp.asarray(spec.beta, wide) * x.c.astype(wide)
  return jnp.broadcast_to(c, shape)


def _folded_into_m(x: Operands, is_new: Operands, sizes) -> Operands:
  """A batch of A alone is more rows of A."""
  size, m, n, k = sizes
  c = x.c
  if c is not None:
    c = c if is_new.c else jnp.broadcast_to(c, (size, 1, m, n))
    c = c.reshape(1, size * m, n)
  return x._replace(a=x.a.reshape(1, size * m, k), c=c)


def _merged(x: Operands, is_new: Operands, size: int, batch: int) -> Operands:
  """The new dimension and the batch dimension as one."""

  def merge(v, new, to_full):
    old = v.shape[1:] if new else v.shape
    if not to_full and not new and old[0] == 1:
      return v  # shared by all
    v = v if new else v[None]
    v = jnp.broadcast_to(v, (size, batch, *old[1:]))
    return v.reshape(size * batch, *old[1:])

  # Something must carry the batch, and both B of a gated product alike.
  nothing_new = not (is_new.a or is_new.b or is_new.b_up)
  new_b = is_new.b or is_new.b_up
  return x._replace(
    a=merge(x.a, is_new.a, nothing_new),
    b=merge(x.b, is_new.b, new_b),
    b_up=None if x.b_up is None else merge(x.b_up, is_new.b_up, new_b),
    c=None if x.c is None else merge(x.c, is_new.c, True),
  )


batching.primitive_batchers[gemm_p] = _batch


# Dead code: what is saved for a derivative is not written if nobody reads it.


def _dce(used: list[bool], eqn) -> tuple[list[bool], Any]:
  if not any(used):
    return [False] * len(eqn.invars), None
  spec = eqn.params["spec"]
  if spec.save and not any(used[1:]):
    spec = dataclasses.replace(spec, save=False)
    eqn = eqn.replace(params={"spec": spec}, outvars=eqn.outvars[:1])
  return [True] * len(eqn.invars), eqn


compat.register_dce_rule(gemm_p, _dce)
