"""The primitive behind every op, and its rules.

`gemm_p` computes what a `Spec` says of operands of rank 3. It differentiates
into products of its own kind, reading transposed operands in place; it batches
into one product; and it is lowered to whatever `dispatch` chooses.
"""

import dataclasses

import jax
from jax.interpreters import ad, batching
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ops import dispatch, primitives
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.primitives import instantiated, total
from pallas_gemm.ops.spec import Operands, Spec

gemm_p = primitives.define("pallas_gemm", dispatch.run)


def gemm(x: Operands, spec: Spec) -> list[jax.Array]:
  """The results of `spec`, each [batch, M, N]: the product, then what it saves.

  Args:
    x: A [batch or 1, M, K] and B [batch or 1, K, N] of one dtype, B_up as B,
      bias [N] or [M], C [batch, M, N]; transposed as `spec` says.
    spec: what is computed.
  """
  return gemm_p.bind(*compat.join_varying(*x.present()), spec=spec)


@gemm_p.def_effectful_abstract_eval
def _abstract_eval(*avals, spec: Spec):
  batch, m, n, _ = spec.sizes(spec.named(avals))
  return primitives.abstract_results(avals, (batch, m, n), spec)


# Derivatives.


def _jvp(primals, tangents, *, spec: Spec):
  x, dx = spec.named(primals), spec.named(map(instantiated, tangents))
  if spec.activation is None:
    return gemm(x, spec), [_d_preactivation(x, dx, spec)]
  outs = gemm(x, dataclasses.replace(spec, save=True))
  saved = outs[1:]
  if spec.gated:
    of_up = x._replace(b=x.b_up), dx._replace(b=dx.b_up)
    d_saved = [_d_product(x, dx, spec), _d_product(*of_up, spec)]
  else:
    d_saved = [_d_preactivation(x, dx, spec)]
  d_saved = primitives.or_zeros(d_saved, saved)
  activation = primitives.activation_of_saved(spec, x.a.dtype)
  _, d_out = jax.jvp(activation, saved, d_saved)
  return outs[: spec.outputs], [d_out, *d_saved][: spec.outputs]


def _d_product(x: Operands, dx: Operands, spec: Spec) -> jax.Array | None:
  """alpha * (dA @ B + A @ dB), of those tangents that there are."""
  alone = spec.product_alone()
  terms = []
  if dx.a is not None:
    terms += gemm(Operands(dx.a, x.b), alone)
  if dx.b is not None:
    terms += gemm(Operands(x.a, dx.b), alone)
  return total(terms)


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
  return total(terms)


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
