"""The products of a function that can be tuned."""

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

import jax
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, hardware, tuning
from pallas_gemm.ops import implementations, sm90
from pallas_gemm.ops.product import PRIMITIVES
from pallas_gemm.ops.spec import Operands, Spec
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import trial

_NO_GPU = (
  "tuning needs a Hopper GPU (compute capability 9.0), JAX sees none here;"
  f' products with implementation="{implementations.HOPPER}" are tuned in the'
  " interpreter"
)
# What a product computes, and of what.
_Product = tuple[Spec, tuple[jax.ShapeDtypeStruct, ...]]


def find(
  fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[trial.Case, ...]:
  """The different problems in fn(*args, **kwargs), in order of appearance.

  Raises:
    ValueError, TypeError, RuntimeError: as `autotune`.
  """
  gpu = hardware.current()
  if gpu.compute_capability != (9, 0):
    raise RuntimeError(
      "tuning needs a Hopper GPU (compute capability 9.0), this is an"
      f" {gpu.name}"
    )
  cases: dict[Problem, trial.Case] = {}
  reasons: list[str] = []
  for spec, operands in _products(_trace(fn, args, kwargs)):
    found = _folded(spec, operands)
    reasons += [x for x in found if isinstance(x, str)]
    for case in found:
      if not isinstance(case, str):
        cases.setdefault(case.problem, case)
  if cases:
    return tuple(cases.values())
  if _NO_GPU in reasons:
    raise RuntimeError(_NO_GPU)
  raise ValueError(
    "fn must have a product that the Hopper kernel computes; "
    + ("; ".join(dict.fromkeys(reasons)) or "it has no product of this package")
  )


def _products(jaxpr) -> list[_Product]:
  """The different products of a jaxpr, in order of appearance."""
  found = {
    (
      eqn.params["spec"],
      tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars
      ),
    ): None
    for eqn in _equations(jaxpr)
    if eqn.primitive in PRIMITIVES
  }
  return list(found)


def _folded(spec: Spec, operands) -> list[trial.Case | str]:
  """What the kernel would compute, or why it looks up no config."""
  if spec.config is not None:
    return ["a product has an explicit config"]
  if spec.batch_invariant:
    return ["a batch-invariant product takes the model's config"]
  names = implementations.names(spec, compat.targets_gpu())
  if implementations.HOPPER not in names:
    asked = spec.implementation is not None
    return [f"a product runs on {names}" if asked else _NO_GPU]
  found: list[trial.Case | str] = []

  def note(x: Operands, spec: Spec):
    found.append(_case(x, spec))
    return [jnp.zeros(spec.shape(x), spec.out_dtype)] * spec.outputs

  jax.eval_shape(
    lambda *x: implementations.folded(*x, spec=spec, run=note), *operands
  )
  return found or ["a product is empty"]


def _case(x: Operands, spec: Spec) -> trial.Case | str:
  if spec.is_empty(x):
    return "a product is empty"
  try:
    if reason := sm90.refuses(spec, x):
      raise NotImplementedError(reason)
    problem = sm90.problem_of(x, spec)
    some = dataclasses.replace(spec, config=tuning.resolve(problem))
    jax.eval_shape(lambda *v: sm90.run(spec.named(v), some), *x.present())
  except NotImplementedError as error:
    return f"the kernel does not take a product: {error}"
  factors = [1.0 if v is None else 0.5 for v in (x.alpha, x.beta)]
  activation = spec.activation and spec.activation.function
  return trial.Case(problem, activation, *factors)


def _trace(fn, args, kwargs):
  """The jaxpr of a call, without dead code; only arrays are traced."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    raise TypeError(
      "args must be concrete arrays or jax.ShapeDtypeStructs, got traced ones;"
      " call autotune outside of jit and other transformations"
    )
  traced = {
    i: leaf
    for i, leaf in enumerate(leaves)
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
  }

  def call(arrays):
    args, kwargs = tree.unflatten(
      [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
    )
    return fn(*args, **kwargs)

  jaxpr = jax.make_jaxpr(call)(traced).jaxpr
  # As jit does: a gradient leaves products behind that nobody reads.
  return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def _equations(jaxpr) -> Iterator[Any]:
  """Every equation of a jaxpr and of those inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in jax.tree.leaves(list(eqn.params.values())):
      inner = getattr(value, "jaxpr", value)  # some are closed, some are not
      if hasattr(inner, "eqns"):
        yield from _equations(inner)
