"""Where copies of one run of bytes into shared memory start, by their trace.

JAX 0.11 makes `cp.async.bulk` of them, which starts at multiples of 16 bytes.
Elsewhere it is an illegal instruction, which nothing but a GPU tells.
"""

import functools
import math
from typing import Any

from jax.extend import core
import jax.numpy as jnp

_BYTES = 16
_SAME = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze")


def unproven(jaxpr: core.Jaxpr) -> list[str]:
  """The copies in a trace that may start at no multiple of 16 bytes."""
  found: list[str] = []
  _visit(jaxpr, {}, found)
  return found


def _visit(jaxpr, known: dict[Any, int], found: list[str]) -> list[int]:
  """What the results are multiples of; adds the copies to `found`.

  `known` is what variables are multiples of; 1 is left out, 0 is one of all.
  """

  def of(x) -> int:
    if not isinstance(x, core.Literal):
      return known.get(x, 1)
    return abs(int(x.val)) if jnp.issubdtype(x.aval.dtype, jnp.integer) else 1

  for eqn in jaxpr.eqns:
    args = [of(x) for x in eqn.invars]
    if eqn.primitive.name == "copy_gmem_to_smem":
      found += _copy(eqn, args)
    inner = [
      _visit(sub, dict(zip(*_bound(eqn, sub, args))), found)
      for sub in _inner(eqn.params)
    ]
    outs = [_multiple(eqn, args)] * len(eqn.outvars)
    is_loop = eqn.primitive.name in ("scan", "while")
    if inner and not is_loop and all(len(x) == len(outs) for x in inner):
      outs = [functools.reduce(math.gcd, x) for x in zip(*inner)]
    known.update(zip(eqn.outvars, outs))
  return [of(x) for x in jaxpr.outvars]


def _inner(params) -> list[Any]:
  """The jaxprs among an equation's parameters, or in lists of them."""
  lists = [x if isinstance(x, tuple | list) else [x] for x in params.values()]
  opened = [getattr(x, "jaxpr", x) for items in lists for x in items]
  return [x for x in opened if hasattr(x, "eqns")]


def _bound(eqn, jaxpr, args: list[int]) -> tuple[list[Any], list[int]]:
  """Variables of an inner jaxpr, and what they are multiples of."""
  name, params = eqn.primitive.name, eqn.params
  if name == "scan":  # a loop in a kernel has constants and a carry alone
    return jaxpr.invars, args[: len(args) - len(eqn.outvars)]
  if name == "while":
    first, count = params["cond_nconsts"], params["body_nconsts"]
    is_body = jaxpr is params["body_jaxpr"].jaxpr
    return jaxpr.invars, args[first : first + count] if is_body else []
  if name == "cond":
    return jaxpr.invars, args[1:]
  variables = jaxpr.invars, jaxpr.constvars
  return next((x for x in variables if len(x) == len(args)), []), args


def _multiple(eqn, args: list[int]) -> int:
  """What the result is a multiple of."""
  name = eqn.primitive.name
  if name == "mul":
    return math.prod(args)
  if name in ("add", "sub", "max", "min", "clamp"):
    return math.gcd(*args)
  if name == "select_n":
    return math.gcd(*args[1:])
  if name == "multiple_of":
    return math.lcm(args[0], *eqn.params["values"])
  return args[0] if name in _SAME else 1


def _copy(eqn, args: list[int]) -> list[str]:
  """The copy, if it is of one run of bytes that may start anywhere."""
  tree, matrix = eqn.params["src_transforms_treedef"], eqn.invars[0].aval
  *_, indexer = tree.unflatten(args[3 : 3 + tree.num_leaves]) or [None]
  if indexer is None:
    return []
  starts = [getattr(x, "start", x) for x in indexer.indices]
  sizes = [getattr(x, "size", 1) for x in indexer.indices]
  if sum(size > 1 for size in sizes) > 1:
    return []
  strides = [math.prod(matrix.shape[i + 1 :]) for i in range(len(sizes))]
  step = math.gcd(*(x * y for x, y in zip(starts, strides)))
  if step * matrix.dtype.itemsize % _BYTES == 0:
    return []
  return [f"{sizes} of {matrix}"]
