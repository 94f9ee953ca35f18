"""What the role of rows prints: a field of any committed row."""

from collections.abc import Iterator, Mapping
import functools
import json
import shlex
import statistics
from typing import Any

from docs.extensions import lookup, show
from experiments.harness import rows as rows_lib
from experiments.harness import tables

_REDUCERS = {
  "geomean": tables.geomean,
  "median": statistics.median,
  "mean": statistics.fmean,
  "min": min,
  "max": max,
  "sum": sum,
  "count": len,
}
# Experiments whose rows are told apart by kernel and problem.
_REPEATED = ("counters", "dense", "ladder", "ragged", "sweep")
_OPTIONS = ("format", "unit", "scale", "reduce")
SHOWN = 5


def row(text: str) -> str:
  """A field of the row that matches: "nvidia_h200/memory ns level=l2".

  Of rows of the same kernel and problem the last counts, unless the commit is
  among the conditions. A field within another is "arms.jnp.dot.ms_median"; a
  commit may be given by its first digits.

  Raises:
    UnknownError: no file or field of that name, or not one row matches.
  """
  file, field, *rest = _split(text)
  given = dict(word.split("=", 1) for word in rest)
  options = {name: given.pop(name) for name in _OPTIONS if name in given}
  everything = read(file)
  if "commit" not in given and all(map(_is_repeated, everything)):
    everything = tuple(rows_lib.latest(everything))
  found = [x for x in everything if _matches(x, given)]
  if not found:
    raise lookup.UnknownError(
      f"none of the {len(everything)} rows of {file} has {given}; a row has"
      f" {lookup.listed(everything[0])}"
    )
  values = [value for x in found if (value := _field(x, field)) is not None]
  if not values:
    raise lookup.UnknownError(
      f"no field {field!r} in rows of {file}; there is"
      f" {lookup.listed(found[0])}"
    )
  if reducer := options.get("reduce"):
    value = lookup.pick(_REDUCERS, reducer, "reduction")(values)
    return f"{value:,}" if reducer == "count" else _shown(field, value, options)
  if len(found) > 1:
    raise lookup.UnknownError(
      f"{len(found)} rows of {file} have {given}; they differ in"
      f" {_differences(found)}"
    )
  return _shown(field, values[0], options)


def _is_repeated(one: Mapping[str, Any]) -> bool:
  """Whether a row replaces an earlier one of its kernel and problem."""
  return one.get("experiment") in _REPEATED


def _split(text: str) -> list[str]:
  found = shlex.split(text)
  if len(found) < 2 or any("=" not in word for word in found[2:]):
    raise lookup.UnknownError(
      f"want a file, a field and conditions key=value, got {text!r}"
    )
  return found


@functools.cache
def read(file: str) -> tuple[dict[str, Any], ...]:
  """The rows of a file of results, named without its ending.

  Raises:
    UnknownError: no file of that name.
  """
  path = rows_lib.RESULTS / f"{file}.jsonl"
  if not path.exists():
    there = sorted(
      x.relative_to(rows_lib.RESULTS).with_suffix("").as_posix()
      for x in rows_lib.RESULTS.glob("*/*.jsonl")
    )
    raise lookup.UnknownError(
      f"no file {file!r}; there is {lookup.listed(there)}"
    )
  return tuple(rows_lib.read(path))


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
  unit = options.get("unit", "")
  if "format" in options:
    space = "" if unit in ("", "x") else " "
    return f"{format(value, options['format'])}{space}{unit}"
  return show.with_unit(value, unit) if unit else show.value(field, value)


def _differences(found: list[dict[str, Any]]) -> str:
  def parts() -> Iterator[str]:
    for name in dict.fromkeys(key for x in found for key in x):
      values = list(dict.fromkeys(str(x.get(name))[:40] for x in found))
      if len(values) > 1:
        more = ", ..." if len(values) > SHOWN else ""
        yield f"{name} ({', '.join(values[:SHOWN])}{more})"

  return "; ".join(parts()) or "nothing"
