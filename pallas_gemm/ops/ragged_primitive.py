"""The primitive behind the grouped ops, and its rules.

`ragged_p` computes what a `RaggedSpec` says. The two kinds of grouped products
are each other's derivatives, and every operand is read as it is stored.
"""

import dataclasses

import jax
from jax import lax
from jax.interpreters import ad, batching
import jax.numpy as jnp

from pallas_gemm import compat
from pallas_gemm.ops import primitives, ragged_implementations, ragged_spec
from pallas_gemm.ops.primitives import instantiated, total
from pallas_gemm.ops.ragged_spec import RaggedOperands, RaggedSpec

ragged_p = primitives.define("pallas_gemm_ragged", ragged_implementations.run)


def ragged(x: RaggedOperands, spec: RaggedSpec) -> list[jax.Array]:
  """The results of `spec`, all of one shape: the product, then what it saves.

  Args:
    x: the operands, as `RaggedSpec` has them; offsets are int32.
    spec: what is computed.
  """
  return ragged_p.bind(*compat.join_varying(*x.present()), spec=spec)


@ragged_p.def_effectful_abstract_eval
def _abstract_eval(*avals, spec: RaggedSpec):
  shape = spec.shape(spec.named(avals))
  return primitives.abstract_results(avals, shape, spec)


# Derivatives.


def _jvp(primals, tangents, *, spec: RaggedSpec):
  x, dx = spec.named(primals), spec.named(map(instantiated, tangents))
  if spec.activation is None:
    return ragged(x, spec), [_d_preactivation(x, dx, spec)]
  outs = ragged(x, dataclasses.replace(spec, save=True))
  saved = outs[1:]
  if spec.gated:
    of_up = x._replace(b=x.b_up), dx._replace(b=dx.b_up)
    d_saved = [_d_product(x, dx, spec), _d_product(*of_up, spec)]
  else:
    d_saved = [_d_preactivation(x, dx, spec)]
  d_saved = primitives.or_zeros(d_saved, saved)
  # Zeros are saved outside of the groups, where the activation's derivative
  # may be infinite.
  activation = primitives.activation_of_saved(
    spec, x.a.dtype, lambda out: ragged_spec.zero_outside(out, x.offsets)
  )
  _, d_out = jax.jvp(activation, saved, d_saved)
  return outs[: spec.outputs], [d_out, *d_saved][: spec.outputs]


def _d_product(
  x: RaggedOperands, dx: RaggedOperands, spec: RaggedSpec
) -> jax.Array | None:
  """dA @ B + A @ dB, of those tangents that there are."""
  terms = []
  if dx.a is not None:
    terms += _product(dx.a, x.b, x.offsets, spec.product_alone())
  if dx.b is not None:
    terms += _product(x.a, dx.b, x.offsets, spec.product_alone())
  return total(terms)


def _product(a, b, offsets, spec: RaggedSpec) -> list[jax.Array]:
  return ragged(RaggedOperands(a, b, None, None, offsets), spec)


def _d_preactivation(
  x: RaggedOperands, dx: RaggedOperands, spec: RaggedSpec
) -> jax.Array | None:
  """The tangent of what the activation is applied to; None if zero."""
  product = _d_product(x, dx, spec)
  terms = [] if product is None else [product]
  if dx.bias is not None:
    terms.append(_rows_of_bias(x, dx.bias, spec))
  return total(terms)


def _rows_of_bias(
  x: RaggedOperands, bias: jax.Array, spec: RaggedSpec
) -> jax.Array:
  """The bias of each row's group, as a product with ones.

  The transpose adds rows group by group, in the accumulation's dtype: "k" of
  ones and a cotangent, both of the results' dtype.
  """
  names = spec.implementation
  alone = spec.product_alone(
    transpose_b=False,
    # The Hopper kernel has one dtype for both operands.
    implementation=names and tuple(dict.fromkeys((*names, "xla"))),
    precision=lax.Precision.HIGHEST,  # nothing of the bias is cut off
    batch_invariant=False,  # one term is no sum
  )
  wide = ragged_spec.accumulation_dtype(x, spec.out_dtype)
  ones = jnp.ones((x.a.shape[0], 1), spec.out_dtype)
  (rows,) = _product(ones, bias.astype(wide)[:, None], x.offsets, alone)
  return rows


ad.primitive_jvps[ragged_p] = _jvp


def _transpose(cotangents, *operands, spec: RaggedSpec):
  """Of a product alone, which is linear in A and in B."""
  (ct,) = cotangents
  x = spec.named(operands)
  to_a = ad.is_undefined_primal(x.a)
  aval = (x.a if to_a else x.b).aval
  if type(ct) is ad.Zero:
    grad = ad.Zero(aval)
  else:
    other = x.b if to_a else x.a
    ct = ct.astype(other.dtype)
    grad = _cotangent(ct, other, x.offsets, to_a, spec, aval.dtype)
  return [grad, None, None] if to_a else [None, grad, None]


def _cotangent(
  ct: jax.Array, other: jax.Array, offsets, to_a: bool, spec: RaggedSpec, dtype
) -> jax.Array:
  """Of A (from B) or of B (from A); every operand is read as it is stored."""
  kind, transpose_b = "m", False
  if spec.ragged == "k":
    a, b, transpose_b = other, ct, to_a
  elif to_a:
    a, b, transpose_b = ct, other, not spec.transpose_b
  else:
    kind = "k"
    a, b = (ct, other) if spec.transpose_b else (other, ct)
  spec = spec.product_alone(
    ragged=kind, transpose_b=transpose_b, out_dtype=dtype
  )
  (grad,) = _product(a, b, offsets, spec)
  return grad


ad.primitive_transposes[ragged_p] = _transpose


# Batching.


def _batch(operands, dims, *, spec: RaggedSpec):
  """One product after the other; what is not batched is shared."""
  batched = [
    jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims) if dim is not None
  ]

  def one(examples):
    rest = iter(examples)
    return ragged(
      spec.named(
        [x if dim is None else next(rest) for x, dim in zip(operands, dims)]
      ),
      spec,
    )

  outs = lax.map(one, batched)
  return outs, [0] * len(outs)


batching.primitive_batchers[ragged_p] = _batch
