"""The products of a function: as it is traced, and as one device has them."""

import collections
from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, hardware, jaxprs, report, tuning
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
# Or why the kernel looks up no config.
_Found = list[trial.Case | str]


def find(
  fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[trial.Case, ...]:
  """The different problems in fn(*args, **kwargs), in order of appearance.

  Those of one device, where arrays lie on several.

  Raises:
    ValueError, TypeError, RuntimeError: as `autotune`.
  """
  if reason := hardware.why_not("tuning", ("wgmma",)):
    raise RuntimeError(reason)
  call, arrays = of_arrays(fn, args, kwargs)
  if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
    raise TypeError(
      "args must be concrete arrays or jax.ShapeDtypeStructs, got traced ones;"
      " call autotune outside of jit and other transformations"
    )
  if _are_on_several_devices(arrays.values()):
    found = _of_one_device(call, arrays)
  else:
    products = _products(jaxprs.live(call, [arrays]).jaxpr)
    found = [x for spec, operands in products for x in _folded(spec, operands)]
  cases: dict[Problem, trial.Case] = {}
  for case in found:
    if not isinstance(case, str):
      cases.setdefault(case.problem, case)
  if cases:
    return tuple(cases.values())
  reasons = dict.fromkeys(found)
  if _NO_GPU in reasons:
    raise RuntimeError(_NO_GPU)
  raise ValueError(
    "fn must have a product that the Hopper kernel computes; "
    + ("; ".join(reasons) or "it has no product of this package")
  )


def of_arrays(
  fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[dict[int, Any]], Any], dict[int, Any]]:
  """fn(*args, **kwargs) as a function of the arrays among them, and these.

  What is no array may be static to `fn`. The function is a new one each time:
  JAX finds nothing of it in its caches.

  Raises:
    TypeError: `fn` is no function.
  """
  if not callable(fn):
    raise TypeError(
      "fn must be a function, and its arguments follow it; got"
      f" {type(fn).__name__}"
    )
  leaves, tree = jax.tree.flatten((args, kwargs))
  kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
  arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, kinds)}

  def call(arrays):
    args, kwargs = tree.unflatten(
      [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
    )
    return fn(*args, **kwargs)

  return call, arrays


def compiled(call: Callable[[Any], Any], arrays: Any) -> list[report.Ran]:
  """What runs on one device, when the call is compiled for those there are."""
  with report.listening() as heard, compat.without_compilation_cache():
    jax.jit(call).trace(arrays).lower().compile()
  return heard


def counts(
  call: Callable[[Any], Any], arrays: dict[int, Any]
) -> collections.Counter[tuple[Spec, Operands]]:
  """How often each product of a function occurs, as `report.Ran.asked`.

  A loop of known length counts each time. Where arrays are on several devices
  nothing is counted: one of them has other sizes.
  """
  found: collections.Counter[tuple[Spec, Operands]] = collections.Counter()
  if _are_on_several_devices(arrays.values()):
    return found

  def note(times: int, x: Operands, spec: Spec):
    kind = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), x)
    found[spec, kind] += times
    return [jnp.zeros(spec.shape(x), spec.out_dtype)] * spec.outputs

  products: collections.Counter[_Product] = collections.Counter()
  for eqn, times in _equations(jaxprs.live(call, [arrays]).jaxpr):
    if eqn.primitive in PRIMITIVES:
      products[_product_of(eqn)] += times
  for (spec, operands), times in products.items():
    run = functools.partial(note, times)
    folded = functools.partial(implementations.folded, spec=spec, run=run)
    jax.eval_shape(folded, *operands)
  return found


def _are_on_several_devices(arrays: Iterable[Any]) -> bool:
  """Whether arrays are sharded, or a mesh is set that they may be."""
  shardings = [getattr(x, "sharding", None) for x in arrays]
  counts = [x.num_devices for x in shardings if x is not None]
  return max((jax.sharding.get_abstract_mesh().size, *counts)) > 1


def _of_one_device(call: Callable[[Any], Any], arrays: Any) -> _Found:
  """The products that a device has, as only compiling tells."""
  found: _Found = []
  for ran in compiled(call, arrays):
    if ran.asked is None:
      found.append(f"XLA partitions a product: {ran.why}")
    else:
      spec, x = ran.asked
      found.append(_why_not(spec) or _case(x, spec))
  return found


def _products(jaxpr) -> list[_Product]:
  """The different products of a jaxpr, in order of appearance."""
  equations = (x for x, _ in _equations(jaxpr) if x.primitive in PRIMITIVES)
  return list(dict.fromkeys(map(_product_of, equations)))


def _product_of(eqn) -> _Product:
  kinds = (jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars)
  return eqn.params["spec"], tuple(kinds)


def _why_not(spec: Spec) -> str | None:
  """Why no config is looked up for a product; None if one is."""
  if spec.config is not None:
    return "a product has an explicit config"
  if spec.batch_invariant:
    return "a batch-invariant product takes the model's config"
  names = implementations.names(spec, compat.targets_gpu())
  if implementations.HOPPER not in names:
    asked = spec.implementation is not None
    return f"a product runs on {names}" if asked else _NO_GPU
  return None


def _folded(spec: Spec, operands) -> _Found:
  """What the kernel would compute, or why it looks up no config."""
  if reason := _why_not(spec):
    return [reason]
  found: _Found = []

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


def _equations(jaxpr, times: int = 1) -> Iterator[tuple[Any, int]]:
  """Every equation of a jaxpr and of those inside it; how often it runs."""
  for eqn in jaxpr.eqns:
    yield eqn, times
    inside = times * eqn.params.get("length", 1)  # of a scan
    for value in jax.tree.leaves(list(eqn.params.values())):
      inner = getattr(value, "jaxpr", value)  # some are closed, some are not
      if hasattr(inner, "eqns"):
        yield from _equations(inner, inside)
