"""What the primitives of the ops have in common.

A primitive has one static parameter, `spec`, with at least `out_dtype`,
`activation`, `save`, `outputs` and `implementation`; its results are the
product and, if `save`, what the activation is applied to.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, mlir
import jax.numpy as jnp

from pallas_gemm import compat, hardware
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.implementations import Target


def define(name: str, run: Callable[..., Any]) -> core.Primitive:
  """A primitive that evaluates, is lowered, and drops what nobody reads.

  Args:
    name: of the primitive.
    run: run(*operands, spec=, target=) gives the results; traced when the
      primitive is lowered.
  """
  primitive = core.Primitive(name)
  primitive.multiple_results = True

  @functools.partial(jax.jit, static_argnames="spec")
  def eagerly(*operands, spec):
    return primitive.bind(*operands, spec=spec)

  primitive.def_impl(eagerly)
  for platform, cuda in ((None, False), ("cuda", True)):
    rule = functools.partial(_lowering, run=run, cuda=cuda)
    mlir.register_lowering(primitive, rule, platform=platform)
  compat.register_dce_rule(primitive, _dce)
  return primitive


def abstract_results(avals: Sequence[Any], shape: tuple[int, ...], spec: Any):
  """The types of the results, all of one shape, and the effects."""
  out = compat.shaped_like(avals[0], shape, spec.out_dtype)
  interpreted = (
    "sm90" in (spec.implementation or ())
    and avals[0].dtype.itemsize == 2
    and not compat.targets_gpu()
  )
  effects = compat.interpreter_effects() if interpreted else frozenset()
  return [out] * spec.outputs, effects


def _lowering(ctx, *operands, spec, run, cuda: bool):
  partitioned = compat.is_partitioned(ctx.module_context.axis_context)
  run = functools.partial(run, spec=spec, target=Target(cuda, partitioned))
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


def _dce(used: list[bool], eqn) -> tuple[list[bool], Any]:
  """What is saved for a derivative is not written if nobody reads it."""
  if not any(used):
    return [False] * len(eqn.invars), None
  spec = eqn.params["spec"]
  if spec.save and not any(used[1:]):
    spec = dataclasses.replace(spec, save=False)
    eqn = eqn.replace(params={"spec": spec}, outvars=eqn.outvars[:1])
  return [True] * len(eqn.invars), eqn


# For derivatives.


def instantiated(tangent):
  """None for a tangent that is known to be zero."""
  return None if type(tangent) is ad.Zero else tangent


def total(terms: list[jax.Array]) -> jax.Array | None:
  """The sum of those terms that there are; None without any."""
  return functools.reduce(jnp.add, terms) if terms else None


def or_zeros(tangents: Sequence[jax.Array | None], like: Sequence[jax.Array]):
  """The tangents, with zeros for None."""
  return [
    jnp.zeros_like(x) if tangent is None else tangent
    for tangent, x in zip(tangents, like)
  ]


def activation_of_saved(
  spec: Any, dtype: Any, finish: Callable[[jax.Array], jax.Array] | None = None
) -> Callable[..., jax.Array]:
  """The activation as a function of what is saved; keeps only that.

  Args:
    spec: of the product.
    dtype: of its operands.
    finish: applied to the result.
  """
  wide = spec_lib.accumulation_dtype(dtype, spec.out_dtype)

  def apply(first, *rest):
    out = spec.activation(first.astype(wide))
    for up in rest:
      out = out * up.astype(wide)
    out = out.astype(spec.out_dtype)
    return out if finish is None else finish(out)

  # Nothing is there to be recomputed that a compiler could share: the forward
  # pass applied the activation inside the kernel.
  return jax.checkpoint(apply, prevent_cse=False)
