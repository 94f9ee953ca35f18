"""The primitive behind every op, and its rules.

`product_p` computes what a `Spec` says of operands of any rank, as one array
each: on how many devices they lie shows in its type alone. It differentiates
into products of its own kind that read every operand as it is stored, a vmap
gives its operands one more letter, and `sharding` lowers it.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import jet
from jax.extend import core
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_gemm import compat, dtypes, jaxprs, meshes
from pallas_gemm.ops import constants, scales, sharding, sm90
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.cotangents import transposed
from pallas_gemm.ops.spec import BESIDE, Operands, Spec

# One primitive under two objects: JAX tells the lowering of the second which
# mesh its operands lie on, and then refuses meshes without devices, so it is
# for products that are traced where no type and no context says it.
product_p = core.Primitive("pallas_gemm")
product_on_unknown_mesh_p = core.Primitive("pallas_gemm")
PRIMITIVES = product_p, product_on_unknown_mesh_p


def product(x: Operands, spec: Spec) -> list[jax.Array]:
  """The results of `spec`, all of one shape: the product, then what it saves.

  Args:
    x: the operands, with the dimensions that `spec.words` names.
    spec: what is computed.
  """
  operands = x.present()
  known = meshes.is_known(operands)
  primitive = product_p if known else product_on_unknown_mesh_p
  return primitive.bind(*compat.join_varying(*operands), spec=spec)


def _abstract_eval(*avals, spec: Spec):
  shape = spec.shape(spec.named(avals))
  out = compat.shaped_like(avals, shape, spec.out_dtype, spec.parts)
  interpreted = (
    sm90.is_asked_for(spec, spec.named(avals))
    and avals[0].memory_space == jax.memory.Space.Device
    and not compat.targets_gpu()
  )
  effects = compat.interpreter_effects() if interpreted else frozenset()
  return [out] * spec.outputs, effects


def _dce(used: list[bool], eqn) -> tuple[list[bool], Any]:
  """What is saved for a derivative is not written if nobody reads it."""
  if not any(used):
    return [False] * len(eqn.invars), None
  spec = eqn.params["spec"]
  if spec.save and not any(used[1:]):
    spec = dataclasses.replace(spec, save=False)
    eqn = eqn.replace(params={"spec": spec}, outvars=eqn.outvars[:1])
  return [True] * len(eqn.invars), eqn


# Derivatives.


def _jvp(primals, tangents, *, spec: Spec):
  tangents = [None if type(t) is ad.Zero else t for t in tangents]
  x, dx = spec.named(primals), spec.named(tangents)
  _check_differentiable(x, dx)
  if spec.activation is None and not spec.gated:
    outs = product(x, spec)
    return outs, [_d_preactivation(x, dx, outs[0], spec)] * spec.outputs
  out_dtype, before = jnp.dtype(spec.out_dtype), spec
  wide = x.wide(out_dtype)
  if dtypes.has_less_range(out_dtype, wide):
    # What the activation is applied to may be too large for its result's dtype.
    # Its cotangent is rounded to that all the same, as theirs is who have
    # results of 16 bits, so that gradients run on the kernel.
    spec = dataclasses.replace(spec, out_dtype=wide, rounds_cotangent=True)
  outs = product(x, dataclasses.replace(spec, save=True))
  saved = outs[1:]
  d_saved = [_d_preactivation(x, dx, saved[0], spec)]
  if spec.gated:
    w = spec.words
    up = dataclasses.replace(spec, words=w.of_up)
    d_saved.append(_d_preactivation(x.of_up, dx.of_up, saved[1], up))
  _, d_out = jax.jvp(activation_of_saved(x, before), saved, d_saved)
  outs, d_outs = (
    [v.astype(out_dtype) for v in vs[: spec.outputs]]
    for vs in (outs, [d_out, *d_saved])
  )
  return outs, d_outs


def _check_differentiable(x: Operands, dx: Operands) -> None:
  """A cotangent of 8 bits would keep none of its digits, or be nothing."""
  operands = scales.FIELDS if x.a.dtype.itemsize == 1 else {}
  if x.has_planes and any(getattr(dx, v) is not None for v in ("b", *BESIDE)):
    raise TypeError(constants.OF_SPLIT)
  for name in (*operands, *scales.FIELDS.values()):
    if getattr(dx, name) is not None:
      raise TypeError(constants.OF_8_BITS)


def _d_preactivation(x: Operands, dx: Operands, out, spec: Spec) -> jax.Array:
  """The tangent of what the activation is applied to; `out` has its type."""
  w, wide, terms = spec.words, x.wide(spec.out_dtype), []
  words = Operands(w.a, w.b, alpha=w.alpha, offsets=w.offsets, **w.beside_b())
  alone = spec.product_alone(words)
  rest = {"alpha": x.alpha, "offsets": x.offsets} | x.beside_b()
  for a, b in ((dx.a, x.b), (x.a, dx.b)):
    if a is not None and b is not None:
      (z,) = product(Operands(a, b, **rest), alone)
      if alone.out != spec.out:
        z = _spread(z, alone.out, out, spec, spec.out_dtype)
      terms.append(z)
  # Through the wide dtype, so that transposed sums are added in it.
  spread = functools.partial(_spread, like=out, spec=spec, dtype=wide)
  if dx.alpha is not None:
    operands, of_one = next(spec.products(x, out_dtype=wide))
    (z,) = product(operands, of_one)
    z = z if z.shape == out.shape else spread(z, of_one.out)
    terms.append((z * spread(dx.alpha, w.alpha)).astype(spec.out_dtype))
  for c, beta in ((dx.c, x.beta), (x.c, dx.beta)):
    if c is not None and (beta is not None or c is dx.c):
      c = spread(c, w.c)
      c = c if beta is None else c * spread(beta, w.beta)
      terms.append(c.astype(spec.out_dtype))
  if dx.bias is not None and spec.ragged:
    terms.append(_rows_of_bias(x, dx.bias, out, spec))
  elif dx.bias is not None:
    terms.append(spread(dx.bias, w.bias).astype(spec.out_dtype))
  return functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)


def _spread(v, word: str, like: jax.Array, spec: Spec, dtype: Any) -> jax.Array:
  """An operand of the epilogue, as large as the result and sharded like it."""
  to, typed = jax.typeof(like), None
  if meshes.explicit([like]) is not None:
    typed = to.sharding
  v = spec_lib.in_order(v, word, spec.out)
  at = sorted(map(spec.out.index, word))
  return lax.broadcast_in_dim(v.astype(dtype), to.shape, at, out_sharding=typed)


def _rows_of_bias(x: Operands, bias: jax.Array, out, spec: Spec) -> jax.Array:
  """The bias of each row's group, as a product with ones; as large as `out`.

  The transpose adds rows group by group, in the accumulation's dtype: a sum
  over rows of ones and a cotangent, both of the results' dtype.
  """
  w, wide = spec.words, x.wide(spec.out_dtype)
  narrow = spec.rounds_cotangent and x.a.dtype.itemsize > 1
  dtype = x.a.dtype if narrow else spec.out_dtype
  ones = jnp.ones([1 if c == "k" else spec.letters(x)[c] for c in w.a], dtype)
  at = w.bias.index("n")
  words = Operands(w.a, w.bias[:at] + "k" + w.bias[at:], offsets=w.offsets)
  alone = spec.product_alone(
    words,
    # The Hopper kernel has one dtype for both operands.
    implementation=or_xla(spec.implementation),
    precision=lax.Precision.HIGHEST,  # nothing of the bias is cut off
    in_planes=False,
    reduce_dtype=None,  # nor of its gradient, which is small
    batch_invariant=False,  # one term is no sum
  )
  bias = jnp.expand_dims(bias.astype(wide), at)
  (z,) = product(Operands(ones, bias, offsets=x.offsets), alone)
  if alone.out != spec.out:
    z = _spread(z, alone.out, out, spec, spec.out_dtype)
  return z


def activation_of_saved(x: Operands, spec: Spec):
  """The activation as a function of what is saved; keeps only that."""
  wide = x.wide(spec.out_dtype)

  def apply(first, *rest):
    out = spec.activation(first.astype(wide))
    for up in rest:
      out = out * up.astype(wide)
    out = out.astype(spec.out_dtype)
    if spec.ragged != "m":
      return out
    # Zeros are saved outside of the groups, where the activation's derivative
    # may be infinite.
    return spec_lib.zero_outside(out, x.offsets, spec.words.offsets, spec.out)

  # Nothing is there to be recomputed that a compiler could share: the forward
  # pass applied the activation inside the kernel.
  return jax.checkpoint(apply, prevent_cse=False)


def _transpose(cotangents, *operands, spec: Spec):
  x = spec.named(operands)
  unknown = Operands(*map(ad.is_undefined_primal, x))
  _check_linear(unknown, spec)
  of_a, others = unknown.a, any(unknown._replace(a=False, b=False))
  if spec.gated or spec.activation is not None or others:
    return _transpose_by_vjp(cotangents, operands, spec)
  # A product alone, which is linear in A and in B.
  (ct,) = cotangents
  aval = (x.a if of_a else x.b).aval
  if type(ct) is ad.Zero:
    grad = ad.Zero(aval)
  else:
    rule = _grouped_cotangent if spec.ragged else _cotangent
    grad = rule(ct, x, of_a, aval, spec)
  found = Operands(grad if of_a else None, None if of_a else grad)
  return [g for g, word in zip(found, spec.words) if word is not None]


def _check_linear(unknown: Operands, spec: Spec) -> None:
  """What is transposed is linear, but where a user has it transposed."""
  u = unknown
  names = [name for name in ("a", "b", "b_up", "alpha") if getattr(u, name)]
  names += ["a"] * (u.a and spec.gated)  # which both products have
  names = names if len(names) > 1 else ["beta", "c"] * (u.beta and u.c)
  reason = f"in {' and '.join(names)} together" if names else ""
  if spec.activation is not None and any(u._replace(b_up=False)):
    try:
      one = jnp.ones(())
      jax.linear_transpose(spec.activation, one)(one)
    except Exception:  # as JAX's rules fail where there is none
      reason = "behind an activation that is not"
  if reason:
    raise ValueError(
      f"jax.linear_transpose needs what is linear, a product is not {reason}"
    )


def _transpose_by_vjp(cotangents, operands, spec: Spec):
  """Of what is linear in some operands: it is its own derivative, anywhere."""
  unknown = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]

  def linear(*values):
    given = [*operands]
    for i, value in zip(unknown, values):
      given[i] = value
    return product(spec.named(given), spec)

  zeros = [ad.instantiate_zeros(ad.Zero(operands[i].aval)) for i in unknown]
  _, vjp = jax.vjp(linear, *zeros)
  found = dict(zip(unknown, vjp([*map(ad.instantiate_zeros, cotangents)])))
  return [found.get(i) for i in range(len(operands))]


def _cotangent(ct, x: Operands, of_a: bool, aval, spec: Spec) -> jax.Array:
  """Of A (from B) or of B (from A)."""
  w, t = spec.words, transposed(spec, of_a)
  other, beside = (x.b, x.beside_b()) if of_a else (x.a, {})
  alpha, word_alpha = x.alpha, w.alpha
  wide = Operands(other, other).wide(spec.out_dtype)
  if word_alpha:  # many factors, which may differ along what is summed over
    ct = _spread(alpha, word_alpha, ct, spec, wide) * ct.astype(wide)
    alpha = word_alpha = None
    # Of examples that share A and B, cotangents are added up.
    shared = [c for c in spec.out if c not in w.a + w.b]
    ct = jnp.sum(ct, tuple(map(spec.out.index, shared)))
    t = t._replace(ct="".join(c for c in spec.out if c not in shared))
  dtype = _dtype_of_factors(ct, aval, spec)
  names = spec.implementation
  spec = spec.product_alone(
    Operands(*t.operands(t.ct, t.other), alpha=word_alpha)._replace(
      **_words_of(beside, t.other)
    ),
    implementation=names if dtype == aval.dtype else or_xla(names),
    out=t.out,
    out_dtype=aval.dtype,
    parts=aval.sharding.spec,
  )
  operands = t.operands(*_factors(ct, other, dtype, spec))
  return product(Operands(*operands, alpha=alpha, **beside), spec)[0]


def _words_of(planes: dict[str, Any], word: str) -> dict[str, str | None]:
  """The letters of planes beside an operand, which has them too."""
  return {field: None if v is None else word for field, v in planes.items()}


def _dtype_of_factors(ct, aval, spec: Spec) -> Any:
  """What a cotangent and the other operand are multiplied in.

  That of the operands, which the kernel takes, unless the cotangent would leave
  its range: of float16 operands and float32 results, say.
  """
  if dtypes.has_less_range(aval.dtype, ct.dtype) and not spec.rounds_cotangent:
    return ct.dtype
  return aval.dtype


def _factors(ct, other, dtype: Any, spec: Spec) -> tuple[jax.Array, jax.Array]:
  """A cotangent and the other operand, in a dtype; in planes, as they are.

  There an operand of bfloat16 is one, and its gradient is rounded to that.
  """
  if spec.in_planes:
    return ct.astype(jnp.float32), other
  return ct.astype(dtype), other.astype(dtype)


def or_xla(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
  """For products of dtypes that the kernel may not take."""
  return names and tuple(dict.fromkeys((*names, "xla")))


def _grouped_cotangent(ct, x: Operands, of_a: bool, aval, spec: Spec):
  """Of A (from B) or of B (from A), of a product with groups."""
  w, t = spec.words, transposed(spec, of_a)
  other, beside = (x.b, x.beside_b()) if of_a else (x.a, {})
  dtype = _dtype_of_factors(ct, other, spec)
  tried = spec.implementation
  # Examples that share the target have a product each, and then a sum.
  target = w.a if of_a else w.b
  shared = [c for c in spec.out if c not in "mnkg" + target]
  of_out = spec.parts_of()
  wide = Operands(other, other).wide(aval.dtype)
  spec = spec.product_alone(
    Operands(*t.operands(t.ct, t.other), offsets=w.offsets)._replace(
      **_words_of(beside, t.other)
    ),
    implementation=tried
    if dtype == aval.dtype or spec.in_planes
    else or_xla(tried),
    ragged=t.ragged,
    out="".join(shared) + t.out,
    out_dtype=wide if shared else aval.dtype,
    parts=PartitionSpec(*[of_out[c] for c in shared], *aval.sharding.spec),
  )
  operands = t.operands(*_factors(ct, other, dtype, spec))
  (grad,) = product(Operands(*operands, offsets=x.offsets, **beside), spec)
  if not shared:
    return grad
  return jnp.sum(grad, range(len(shared))).astype(aval.dtype)


def _jet(primals, series, *, spec: Spec):
  """Taylor series: of A @ B by Leibniz' rule, of the rest by JAX's rules."""
  x, terms = spec.named(primals), spec.named(series)
  if x.has_planes:
    raise TypeError("a Split has no Taylor series; pass the array")
  if not spec.has_epilogue:
    a, b = (x.a, *terms.a), (x.b, *terms.b)
    of = lambda a, b: product(x._replace(a=a, b=b), spec)[0]  # noqa: E731
    out, *rest = (
      functools.reduce(jnp.add, map(of, a[: i + 1], b[i::-1]))
      for i in range(len(a))
    )
    return [out], [rest]

  # As JAX does, which has no rule for what has a derivative of its own.
  plain = spec.activation and jaxprs.without_custom_derivatives(spec.activation)

  def taken_apart(*operands):
    x = spec.named([*operands, *offsets])
    sums = [
      spec_lib.lifted(product(*one)[0], one[1].out, spec.out)
      for one in spec.products(x, out_dtype=x.wide(spec.out_dtype))
    ]
    outs = spec_lib.epilogue(
      sums, x, dataclasses.replace(spec, activation=plain)
    )
    return [jnp.broadcast_to(out, spec.shape(x)) for out in outs]

  # Integers, and the last, if they are there.
  floating = len(primals) - (x.offsets is not None)
  offsets = primals[floating:]
  return jet.jet(
    taken_apart, primals[:floating], series[:floating], factorial_scaled=False
  )


# Batching.


def _batch(axis_data, operands, dims, *, spec: Spec):
  """One more letter, where each operand has the new dimension."""
  if all(d is None for d in dims):
    return product(spec.named(operands), spec), [None] * spec.outputs
  taken = "bmnkgo" + "".join(w for w in spec.words if w) + spec.out
  letter = next(c for c in spec_lib.LETTERS if c not in taken)
  at = spec.named(dims)
  operands, at = scales.with_batched_operands(
    spec.named(operands), at, axis_data.size
  )
  words = Operands(
    *[
      w if w is None or d is None else w[:d] + letter + w[d:]
      for w, d in zip(spec.words, at)
    ]
  )
  part = axis_data.explicit_mesh_axis  # of the new dimension, in the type
  if part is not None and len(part) == 1:
    (part,) = part
  parts = PartitionSpec(part, *spec.parts_of().values())
  spec = dataclasses.replace(
    spec, words=words, out=letter + spec.out, parts=parts
  )
  return product(operands, spec), [0] * spec.outputs


for _primitive in PRIMITIVES:
  _primitive.multiple_results = True
  _primitive.def_effectful_abstract_eval(_abstract_eval)
  ad.primitive_jvps[_primitive] = _jvp
  ad.primitive_transposes[_primitive] = _transpose
  jet.jet_rules[_primitive] = _jet
  batching.fancy_primitive_batchers[_primitive] = _batch
  compat.register_primitive(_primitive, _dce)
  for _platform in (None, "cpu", "cuda"):
    _rule = functools.partial(
      sharding.lower, product=product, platform=_platform
    )
    mlir.register_lowering(_primitive, _rule, platform=_platform)
compat.require_devices(product_on_unknown_mesh_p)
