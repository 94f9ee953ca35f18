"""Numbers in a sentence: what each kind of comment prints."""

import dataclasses
import functools
import re
from typing import Any

from docs.extensions import lookup, results
from experiments.harness import (
  counter_tables,
  ladder_tables,
  rung_text,
  shapes,
  tables,
)  # fmt: skip
from pallas_gemm import hardware, ladder, roofline
from pallas_gemm.ladder import traffic


def rung(text: str) -> str:
  """A figure of a timed row: "6 tflops", "12 jnp 4096x8192x4096 h100"."""
  name, field, shape, gpu = _parsed(text)
  if name[0].isdigit():
    row = results.timed(ladder.find(name), gpu, shape)
  else:
    row = results.kernel(name, gpu, shape)
  figures = {
    "time": tables.TIME,
    "tflops": lambda row: f"{tables.TFLOPS(row)} TFLOP/s",
    "peak": lambda row: f"{ladder_tables.of_peak(row)} %",
    "jnp": tables.RATIO,
    "before": lambda row: results.relative(row, "x before"),
    "first": lambda row: results.relative(row, "x rung 1"),
  }
  if field not in figures:
    return value(field, lookup.pick({**figures, **row}, field, "figure"))
  found = figures[field](row)
  if found.startswith(tables.EMPTY):
    raise ValueError(f"rung {name} has no {field!r} at {shape}")
  return found


def counter(text: str) -> str:
  """A counter, a stall or a part of the occupancy: "6 dram_read_bytes"."""
  name, key, _, gpu = _parsed(text)
  row = results.counters(ladder.find(name), gpu)
  stalls = row.get("stalls") or {}
  found = {**row["measured"], **stalls, **(row.get("occupancy") or {})}
  moved = found["dram_read_bytes"] + found["dram_write_bytes"]
  found["dram_gbytes_per_s"] = moved / found["duration_ms"] / 1e6
  x = lookup.pick(found, key, "counter")
  if key in stalls:
    return counter_tables.warps(x)
  if isinstance(x, int | float) and x >= 1e5 and "_bytes" not in key:
    return counter_tables.number(x)
  return value(key, x)


def model(text: str) -> str:
  """What the traffic model says: "6 global_load_bytes", "6 floor h100"."""
  name, key, shape, gpu = _parsed(text)
  t = traffic_of(name, shape, gpu)
  found: dict[str, Any] = {
    field.name: getattr(x, field.name)
    for x in (t, t.floor)
    for field in dataclasses.fields(x)
  }
  found |= {
    "floor": tables.duration(1e3 * t.floor.seconds),
    "tflops": t.flops / t.floor.seconds / 1e12,
    "fma_issue_share": t.fma_issue_share,
  }
  return value(key, lookup.pick(found, key, "figure of the model"))


def traffic_of(
  name: str, shape: shapes.Shape = results.CUBE, gpu: str = "h200"
) -> traffic.Traffic:
  """The traffic model of a rung with its default config."""
  one, device = ladder.find(name), results.gpu(gpu)
  with hardware.assume(device.name):
    return rung_text.traffic_of(one, results.problem(one, shape), device)


def published(text: str) -> str:
  """A published step: "Boehm 6", "tilus stages", "Boehm cublas", "Boehm 6 x".

  A last "x" is the step's speed over cuBLAS on the same GPU.
  """
  source, *step = lookup.words(text, 2, "a source and a step")
  ladders = {x.source: x for x in ladder_tables.PUBLISHED}
  names = [x for x in ladders if source.lower() in x.lower()]
  theirs = lookup.pick(ladders, names[0] if names else source, "source")
  ratio = step[-1] == "x" and len(step) > 1
  if step == ["note"]:
    return theirs.note
  steps = {"cublas": theirs.cublas}
  for name, figure, number in theirs.steps:
    steps |= {name: figure, str(number): figure}
  key = " ".join(step[:-1] if ratio else step)
  figure = lookup.pick(steps, key, f"step of {theirs.source}")
  if not ratio:
    return f"{figure:,g} {theirs.unit}"
  over = theirs.of_cublas(int(key)) if key.isdigit() else None
  if over is None:
    raise ValueError(f"{theirs.source} gives no cuBLAS for {key!r}")
  return tables.factor(over)


def gpu(text: str) -> str:
  """A fact of a GPU: "h200 sms", "rtx 3090 fp32", "h100 ridge_bf16"."""
  *name, key = lookup.words(text, 2, "a GPU and a fact")
  device = results.gpu(" ".join(name))
  l2_rate = device.sm_count * roofline.L2_BYTES_PER_CLOCK * device.clock_hz

  def rate(x: float) -> str:
    return f"{x / 1e12:,.4g} T" if x >= 1e12 else f"{x / 1e9:,.4g} G"

  ridge = functools.partial(roofline.ridge_point, device)
  facts = {
    "sms": f"{device.sm_count}",
    "lanes": f"{device.fp32_lanes_per_sm}",
    "l2": f"{device.l2_bytes / 1024**2:g} MiB",
    "dram": f"{rate(device.dram_bytes_per_s)}B/s",
    "shared": f"{device.shared_bytes_per_sm / 1024:g} KiB",
    "shared_block": f"{device.shared_bytes_per_block / 1024:g} KiB",
    "shared_rate": f"{rate(device.shared_bytes_per_s)}B/s",
    "l2_rate": f"{rate(l2_rate)}B/s",
    "fp32": f"{rate(device.fp32_flops)}FLOP/s",
    "bf16": f"{rate(device.bf16_flops)}FLOP/s",
    "ridge_fp32": f"{ridge('float32'):.3g} FLOP/byte",
    "ridge_bf16": f"{ridge('bfloat16'):.3g} FLOP/byte",
  }
  return lookup.pick(facts, key, "fact of a GPU")


def calc(text: str) -> str:
  """The value of "2 * 4096**3 / 1e9 .1f"; a last word may be its format."""
  expression, _, form = text.strip().rpartition(" ")
  if not (expression and re.fullmatch(r",?(\.\d+)?[dfg]|,", form)):
    expression, form = text.strip(), ""
  if not re.fullmatch(r"(?:[\d.]+(?:e\d+)?|[-+*/() ])+", expression):
    raise ValueError(f"want numbers and + - * /, got {expression!r}")
  try:
    result = eval(expression)  # numbers and operators alone
  except (SyntaxError, ArithmeticError) as error:
    raise ValueError(f"{expression!r}: {error}") from None
  return format(result, form) if form else number(result)


def _parsed(text: str) -> tuple[str, str, shapes.Shape, str]:
  """Kernel, key, shape and GPU of "6 tflops 4096x8192x4096 h100"."""
  form = r"(.+?) (\S+?)(?: (\d+x\d+x\d+))?(?: (h[12]00))?"
  if not (match := re.fullmatch(form, text)):
    raise ValueError(f"want a rung and a key, perhaps MxNxK, GPU; got {text!r}")
  name, key, shape, gpu_name = match.groups()
  shape = shapes.parse(shape) if shape else results.CUBE
  return name, key, shape, gpu_name or "h200"


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
    if f"_{last}".endswith(f"_{ending}"):
      return text(x)
  return tables.factor(x) if last.startswith("ratio") else number(x)


_ENDINGS = {
  "ms": tables.duration,
  "ms_median": tables.duration,
  "ms_least": tables.duration,
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
