"""Numbers as text, with their units, by what they are called."""

from typing import Any

from experiments.harness import counter_tables, tables


def number(x: float) -> str:
  """Whole numbers with commas, others with three digits."""
  if float(x).is_integer():
    return f"{int(x):,}"
  return tables.rate(x) if abs(x) >= 0.1 else f"{x:.3g}"


def value(name: str, x: Any) -> str:
  """A field's value, with the unit that the end of its name tells."""
  if not isinstance(x, int | float) or isinstance(x, bool):
    return str(x)
  last = name.split(".")[-1]
  for ending, text in _ENDINGS.items():
    if last == ending or last.endswith("_" + ending):
      return text(x)
  if last.startswith("ms_"):
    return tables.duration(x)
  return tables.factor(x) if last.startswith("ratio") else number(x)


def with_unit(x: float, unit: str) -> str:
  """A number and its unit; "x" follows at once."""
  return tables.factor(x) if unit == "x" else f"{number(x)} {unit}".strip()


_ENDINGS = {
  "ms": tables.duration,
  "ms_median": tables.duration,
  "us": lambda x: tables.duration(x / 1e3),
  "ns": lambda x: f"{number(x)} ns" if x < 1e3 else tables.duration(x / 1e6),
  "seconds": lambda x: tables.duration(x * 1e3),
  "tflops": lambda x: f"{tables.rate(x)} TFLOP/s",
  "gbytes_per_s": lambda x: f"{tables.rate(x)} GB/s",
  "bytes": tables.size,
  "percent": lambda x: f"{counter_tables.percent(x)} %",
  "share": lambda x: f"{x:.1%}".replace("%", " %"),
  "intensity": lambda x: f"{x:.3g} FLOP/byte",
}
