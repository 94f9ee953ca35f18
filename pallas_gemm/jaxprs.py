"""Functions as jaxprs: dead code, inner calls and rules of derivatives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


def live(fn: Callable[..., Any], args: Sequence[Any]) -> core.ClosedJaxpr:
  """The jaxpr of fn(*args), without what nobody reads, as jit has it.

  A gradient leaves operations behind whose results are not used.
  """
  closed = jax.make_jaxpr(fn)(*args)
  jaxpr = closed.jaxpr
  jaxpr = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)[0]
  return core.ClosedJaxpr(jaxpr, closed.consts)


def has_rules(jaxpr: Any) -> bool:
  """Whether a part has a `jax.custom_jvp` or `jax.custom_vjp` of its own."""
  return any(
    eqn.primitive.name.startswith("custom_")
    or ((inner := inlined(eqn)) is not None and has_rules(inner.jaxpr))
    for eqn in jaxpr.eqns
  )


def without_custom_derivatives(
  fn: Callable[..., jax.Array],
  replace: Mapping[str, Callable[..., jax.Array]] | None = None,
):
  """The same function without the derivative rules attached to its parts.

  Inside a kernel nothing is differentiated, and Mosaic GPU of JAX 0.11 does
  not lower `jax.custom_jvp` (which `jax.nn.relu` is).

  Args:
    fn: a function of arrays.
    replace: what to compute instead of some primitives, by their names.
  """
  replace = replace or {}

  def evaluate(jaxpr, consts, args):
    values = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

    def read(atom):
      return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
      inputs = [read(x) for x in eqn.invars]
      inner = inlined(eqn)
      if inner is not None:
        outputs = evaluate(inner.jaxpr, inner.consts, inputs)
      elif eqn.primitive.name in replace:
        outputs = [replace[eqn.primitive.name](*inputs)]
      else:
        outputs = eqn.primitive.bind(*inputs, **eqn.params)
        if not eqn.primitive.multiple_results:
          outputs = [outputs]
      values |= dict(zip(eqn.outvars, outputs))
    return [read(x) for x in jaxpr.outvars]

  def plain(*args):
    closed = jax.make_jaxpr(fn)(*args)
    (result,) = evaluate(closed.jaxpr, closed.consts, args)
    return result

  return plain


def primitives_of(fn: Callable[..., jax.Array], *args) -> set[str]:
  """Names of the primitives in a function, custom derivatives left out."""

  def collect(jaxpr):
    names = set()
    for eqn in jaxpr.eqns:
      inner = inlined(eqn)
      names |= {_name(eqn)} if inner is None else collect(inner.jaxpr)
    return names

  return collect(jax.make_jaxpr(fn)(*args).jaxpr)


def _name(eqn) -> str:
  name = eqn.primitive.name
  if name == "integer_pow" and eqn.params["y"] < 0:
    return "integer_pow with a negative exponent"
  return name


def inlined(eqn: Any) -> Any:
  """What stands for the equation if calls are taken apart; None if it stays."""
  if eqn.primitive.name in ("jit", "pjit", "closed_call"):
    return eqn.params["jaxpr"]
  if eqn.primitive.name in ("checkpoint", "remat2"):
    return core.ClosedJaxpr(eqn.params["jaxpr"], ())
  return eqn.params.get("call_jaxpr")  # custom_jvp_call, custom_vjp_call
