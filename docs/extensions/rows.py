"""A field of any committed row, in a sentence."""

from collections.abc import Mapping
import functools
import json
import statistics
from typing import Any

from docs.extensions import lookup, numbers
from experiments.harness import rows as rows_lib
from experiments.harness import tables

_REDUCERS = {"geomean": tables.geomean, "median": statistics.median}
_REDUCERS |= {"min": min, "max": max}
# Experiments whose rows are told apart by kernel and problem.
_REPEATED = ("counters", "dense", "ladder", "ragged", "sweep")
_OPTIONS = ("format", "unit", "scale", "reduce")


def row(text: str) -> str:
  """A field of the row that matches: "nvidia_h200/memory ns level=l2".

  Of rows of the same kernel and problem the last counts, unless the commit is
  among the conditions. A field within another is "arms.jnp.dot.ms_median"; a
  commit may be given by its first digits.
  """
  file, field, *rest = lookup.words(text, 2, "a file, a field and conditions")
  if not all("=" in word for word in rest):
    raise ValueError(f"want conditions key=value, got {text!r}")
  given = dict(word.split("=", 1) for word in rest)
  options = {name: given.pop(name) for name in _OPTIONS if name in given}
  everything = read(file)
  if "commit" not in given and everything[0].get("experiment") in _REPEATED:
    everything = tuple(rows_lib.latest(everything))
  found = [x for x in everything if _matches(x, given)]
  values = [x for one in found if (x := _field(one, field)) is not None]
  reduce = options.get("reduce")
  if not values or (len(found) > 1 and not reduce):
    raise ValueError(
      f"{len(found)} of {len(everything)} rows of {file} have {given}, and"
      f" {len(values)} a field {field!r}; a row has"
      f" {lookup.listed(everything[0])}"
    )
  value = values[0]
  if reduce:
    value = lookup.pick(_REDUCERS, reduce, "reduction")(values)
  return _shown(field, value, options)


@functools.cache
def read(file: str) -> tuple[dict[str, Any], ...]:
  """The rows of a file of results, named without its ending."""
  there = {
    x.relative_to(rows_lib.RESULTS).with_suffix("").as_posix(): x
    for x in rows_lib.RESULTS.glob("*/*.jsonl")
  }
  return tuple(rows_lib.read(lookup.pick(there, file, "file")))


def _matches(one: Mapping[str, Any], given: Mapping[str, str]) -> bool:
  for name, text in given.items():
    value = _field(one, name)
    if name == "commit":
      if not str(value).startswith(text):
        return False
    elif value != text and value != _literal(text):
      return False
  return True


def _literal(text: str) -> Any:
  try:
    return json.loads(text)
  except json.JSONDecodeError:
    return None if text == "None" else text


def _field(one: Mapping[str, Any], name: str) -> Any:
  """A field, or a field of a field; names may have dots themselves."""
  if name in one:
    return one[name]
  for key, inner in one.items():
    if isinstance(inner, Mapping) and name.startswith(key + "."):
      return _field(inner, name[len(key) + 1 :])
  return None


def _shown(field: str, value: Any, options: Mapping[str, str]) -> str:
  if isinstance(value, int | float) and "scale" in options:
    value *= float(options["scale"])
  unit = options.get("unit", "").replace("us", "µs")
  if not unit and "format" not in options:
    return numbers.value(field, value)
  if unit == "x":
    return tables.factor(value)
  form = options.get("format")
  shown = format(value, form) if form else numbers.number(value)
  return f"{shown} {unit}".strip()
