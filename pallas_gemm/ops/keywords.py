"""Keywords that an op does not take, which are often another op's."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

# Names that differ from op to op, as they do in JAX.
_SAME = {"out_dtype": "preferred_element_type", "transpose_b": "transpose_rhs"}
_SAME |= {theirs: ours for ours, theirs in _SAME.items()}


def without_others[F: Callable[..., Any]](op: F) -> F:
  """The op, whose signature does not show its `**others`, which are none."""
  shown = inspect.signature(op)
  kept = [x for x in shown.parameters.values() if x.kind != x.VAR_KEYWORD]
  op.__signature__ = shown.replace(parameters=kept)
  return op


def unexpected(op: Callable[..., Any], others: Mapping[str, Any]) -> TypeError:
  """What to raise of keywords that an op does not take, with what it takes."""
  name = next(iter(others))
  takes, same = inspect.signature(op).parameters, _SAME.get(name)
  hint = f"{same}, not {name}" if same in takes else ", ".join(takes)
  return TypeError(
    f"{op.__name__}() got an unexpected keyword argument {name!r}; it takes"
    f" {hint}"
  )
