"""Qwix's quantised training on these ops; it needs the extra `qwix`."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import compat, report
from pallas_gemm.ops.general import dot_general
from pallas_gemm.ops.grouped import ragged_dot
from pallas_gemm.quantization import BLOCK, Recipe

try:
  import qwix
except ModuleNotFoundError as error:
  wanted = "pallas_gemm.qwix needs Qwix: pip install qwix"
  raise ModuleNotFoundError(wanted, name="qwix") from error
_RULE_OF = "_get_current_rule_and_op_id"
if not hasattr(qwix.QtProvider, _RULE_OF):
  wanted = f"pallas_gemm.qwix needs Qwix 0.1.8, for QtProvider.{_RULE_OF}"
  raise ImportError(f"{wanted}, got Qwix {qwix.__version__}")

# Of a rule: what a recipe has, and what nothing reads beside it.
_FREE = {"module_path", "op_names", "act_qtype", "weight_qtype", "bwd_qtype"}
_FREE |= {"tile_size", "act_batch_axes", "channelwise_noise_axes"}
_ARRAYS = ("lhs", "rhs"), ("group_sizes", "group_offset")
_SOURCES = {"float32", "bfloat16", "float16"}


class QtProvider(qwix.QtProvider):
  """`qwix.QtProvider`, whose products are those of this package.

  A rule is a `Recipe` if `act_qtype` and `weight_qtype` are one dtype of it,
  `bwd_qtype` is None or of that kind (its `gradient`), and `tile_size` is None
  (scaling "row") or 128 ("block"). Other products are Qwix's own, and the
  reason is logged once, as a warning.

  Unlike Qwix's, scales of "row" are float32, those of `ragged_dot` are a
  group's, int8 is scaled to 127, not 127.5, and "block" has 128 x 128 of the
  second operand, not 1 x 128. Without `bwd_qtype` cotangents are multiplied by
  what was quantised, not by what it was of.
  """

  def dot_general(self, lhs, rhs, *args, **how):
    return self._by("dot_general", lhs, rhs)(lhs, rhs, *args, **how)

  def einsum(self, einsum_str, *operands, **how):
    return self._by("einsum", *operands)(einsum_str, *operands, **how)

  def ragged_dot(self, lhs, rhs, *args, **how):
    return self._by("ragged_dot", lhs, rhs)(lhs, rhs, *args, **how)

  def _by(self, op: str, *operands: Any) -> Callable:
    """The function that computes this call."""
    if compat.is_alone.get():
      return getattr(jnp if op == "einsum" else lax, op)
    own = getattr(super(), op)
    rule, _ = getattr(self, _RULE_OF)(op, only_rule=True)
    if rule is None or rule.weight_qtype is None:
      return own
    found = _recipe(rule, self._init_rule(type(rule)()))
    if isinstance(found, Recipe):
      names = [str(getattr(v, "dtype", type(v))) for v in operands]
      if len(names) == 2 and _SOURCES.issuperset(names):
        return _by_recipe(op, found)
      found = f"{op} takes two arrays of 16 or 32 bits, got {', '.join(names)}"
    report.warn_once(f"Qwix computes {rule.module_path!r} itself: {found}")
    return own


def _recipe(rule: qwix.QtRule, default: qwix.QtRule) -> Recipe | str:
  """What a rule asks for, or why no recipe does."""
  tile, qtypes = rule.tile_size, (rule.act_qtype, rule.weight_qtype)
  for name in sorted({x.name for x in dataclasses.fields(rule)} - _FREE):
    value = getattr(rule, name)
    of_block = name == "bwd_weight_grad_tile_size" and value == tile
    if value != getattr(default, name) and not of_block:
      return f"no recipe has {name}={value!r}"
  if tile is not None and (type(tile), tile) != (int, BLOCK):
    return f"tile_size must be None or {BLOCK}, got {tile!r}"
  rest = rule.bwd_qtype, "block" if tile else "row"
  try:
    found, other = (Recipe(x, *rest) for x in qtypes)
  except (TypeError, ValueError) as error:
    return f"act_qtype, weight_qtype and bwd_qtype are no recipe: {error}"
  return found if found == other else f"act_qtype, weight_qtype are {qtypes}"


def _ours(op: Callable, recipe: Recipe, *args: Any, **how: Any) -> jax.Array:
  """An op by a recipe; derivatives are traced late: alone too."""
  how = inspect.signature(op).bind(*args, **how).arguments
  how |= {"precision": None, "quantize": recipe}  # as Qwix, without precision
  wide, rest = ({n: how.pop(n) for n in x if n in how} for x in _ARRAYS)
  run = functools.partial(compat.alone, lambda x, rest: op(**x, **rest, **how))
  by_rule = jax.custom_vjp(run)
  by_rule.defvjp(
    lambda wide, rest: compat.alone(jax.vjp, lambda x: run(x, rest), wide),
    lambda pull, ct: (*compat.alone(pull, ct), None),
  )
  return by_rule(wide, rest)


@functools.cache  # for `jnp.einsum` compiles anew for each function
def _by_recipe(op: str, recipe: Recipe) -> Callable:
  if op == "einsum":
    by = {"_dot_general": _by_recipe("dot_general", recipe)}
    return lambda *args, **how: jnp.einsum(*args, **how | by)
  of = ragged_dot if op == "ragged_dot" else dot_general
  return functools.partial(_ours, of, recipe)
