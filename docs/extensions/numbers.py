"""What the roles of rungs, counters, models and published figures print."""

import dataclasses
from typing import Any

from docs.extensions import lookup, results, show
from experiments.harness import (
  counter_tables,
  ladder_tables,
  modelled,
  published,
  shapes,
  tables,
)
from pallas_gemm import hardware, roofline
from pallas_gemm.ladder import traffic


def rung(text: str) -> str:
  """A figure of a timed row: "6 tflops", "12 jnp 4096x8192x4096 h100".

  Raises:
    UnknownError: no rung, row or figure of that name.
  """
  name, field, shape, gpu = _parsed(text)
  try:
    row = results.timed(results.rung(name), gpu, shape)
  except lookup.UnknownError as error:
    if name[0].isdigit():
      raise
    try:
      row = results.kernel(name, gpu, shape)
    except lookup.UnknownError as other:
      raise lookup.UnknownError(f"{other}; {error}") from None
  figures = {
    "time": tables.TIME,
    "tflops": lambda row: f"{tables.TFLOPS(row)} TFLOP/s",
    "peak": lambda row: f"{ladder_tables.of_peak(row)} %",
    "jnp": tables.RATIO,
    "before": lambda row: results.relative(row, "x before"),
    "first": lambda row: results.relative(row, "x rung 1"),
  }
  if field in figures:
    found = figures[field](row)
    if found.startswith(tables.EMPTY):
      raise lookup.UnknownError(f"rung {name} has no {field!r} at {shape}")
    return found
  value = lookup.pick({**dict.fromkeys(figures), **row}, field, "figure")
  return show.value(field, value)


def counter(text: str) -> str:
  """A counter, a stall or a part of the occupancy: "6 dram_read_bytes".

  Raises:
    UnknownError: no rung or counter of that name.
  """
  name, key, shape, gpu = _parsed(text)
  if shape != results.CUBE:
    raise lookup.UnknownError(f"counters are of {results.CUBE}, got {shape}")
  row = results.counters(results.rung(name), gpu)
  stalls = row.get("stalls") or {}
  found = {**row["measured"], **stalls, **(row.get("occupancy") or {})}
  value = lookup.pick(found, key, "counter")
  if key in stalls:
    return counter_tables.warps(value)
  if isinstance(value, int | float) and value >= 1e5 and "_bytes" not in key:
    return counter_tables.number(value)
  return show.value(key, value)


def model(text: str) -> str:
  """What the traffic model says: "6 global_read_bytes", "6 floor h100".

  Raises:
    UnknownError: no rung or figure of that name.
  """
  name, key, shape, gpu = _parsed(text)
  t = traffic_of(name, shape, gpu)
  found: dict[str, Any] = {
    field.name: getattr(t, field.name) for field in dataclasses.fields(t)
  }
  for other in ("problem", "config", "gpu", "number", "name"):
    del found[other]
  floor = found.pop("floor")
  found |= {f.name: getattr(floor, f.name) for f in dataclasses.fields(floor)}
  found |= {"fmas": t.fmas, "fma_issue_share": t.fma_issue_share}
  found |= {"floor": floor.seconds, "tflops": t.flops / floor.seconds / 1e12}
  # In words of the counters.
  for key_, ours in {"read": "load", "write": "store"}.items():
    for memory in ("global", "shared"):
      found[f"{memory}_{key_}_bytes"] = found[f"{memory}_{ours}_bytes"]
  value = lookup.pick(found, key, "figure of the model")
  if key == "floor":
    return tables.duration(1e3 * value)
  return show.value(key, value)


def traffic_of(
  name: str, shape: shapes.Shape = results.CUBE, gpu: str = "h200"
) -> traffic.Traffic:
  """The traffic model of a rung with its default config."""
  one = results.rung(name)
  device = results.gpu(gpu)
  with hardware.assume(device.name):
    return modelled.of_rung(one, results.problem(one, shape), device)


def published_figure(text: str) -> str:
  """A published step: "Boehm 6", "tilus stages", "Boehm cublas", "Boehm 6 x".

  A last "x" is the step's speed over cuBLAS on the same GPU.

  Raises:
    UnknownError: no ladder or step of that name.
  """
  source, *step = lookup.words(text, 2, "a source and a step")
  found = [x for x in published.LADDERS if source.lower() in x.source.lower()]
  if len(found) != 1:
    names = lookup.listed(x.source for x in published.LADDERS)
    raise lookup.UnknownError(f"no one source {source!r}; there is {names}")
  [ladder] = found
  ratio = step[-1] == "x" and len(step) > 1
  key = " ".join(step[:-1] if ratio else step)
  steps: dict[str, Any] = {name: (x, n) for name, x, n in ladder.steps}
  steps |= {str(n): (x, n) for _, x, n in ladder.steps if n is not None}
  if ladder.cublas is not None:
    steps["cublas"] = (ladder.cublas, None)
  figure, number = lookup.pick(steps, key, f"step of {ladder.source}")
  if not ratio:
    return f"{figure:,g} {ladder.unit}"
  over = None if number is None else ladder.of_cublas(number)
  if over is None:
    raise lookup.UnknownError(f"{ladder.source} gives no cuBLAS for {key!r}")
  return tables.factor(over)


def gpu(text: str) -> str:
  """A fact of a GPU: "h200 sms", "rtx 3090 fp32", "h100 ridge_bf16".

  Raises:
    UnknownError: no GPU or fact of that name.
  """
  *name, key = lookup.words(text, 2, "a GPU and a fact")
  device = results.gpu(" ".join(name))
  kib, mib = 1024, 1024**2
  facts = {
    "sms": lambda: f"{device.sm_count}",
    "lanes": lambda: f"{device.fp32_lanes_per_sm}",
    "clock": lambda: f"{device.clock_hz / 1e6:.0f} MHz",
    "l2": lambda: f"{device.l2_bytes / mib:g} MiB",
    "dram": lambda: _rate(device.dram_bytes_per_s, "B/s"),
    "shared": lambda: f"{device.shared_bytes_per_sm / kib:g} KiB",
    "shared_block": lambda: f"{device.shared_bytes_per_block / kib:g} KiB",
    "shared_rate": lambda: _rate(device.shared_bytes_per_s, "B/s"),
    "l2_rate": lambda: _rate(
      device.sm_count * roofline.L2_BYTES_PER_CLOCK * device.clock_hz, "B/s"
    ),
    "registers": lambda: f"{device.registers_per_sm:,}",
    "threads": lambda: f"{device.max_threads_per_sm:,}",
    "blocks": lambda: f"{device.max_blocks_per_sm}",
    "capability": lambda: ".".join(map(str, device.compute_capability)),
    "fp32": lambda: _rate(device.fp32_flops, "FLOP/s"),
    "tf32": lambda: _rate(device.tf32_flops, "FLOP/s"),
    "bf16": lambda: _rate(device.bf16_flops, "FLOP/s"),
    "ridge_fp32": lambda: _ridge(device, "float32"),
    "ridge_tf32": lambda: _ridge(device, "tf32"),
    "ridge_bf16": lambda: _ridge(device, "bfloat16"),
    "name": lambda: device.name,
  }
  return lookup.pick(facts, key, "fact of a GPU")()


def _rate(x: float, unit: str) -> str:
  for scale, prefix in ((1e12, "T"), (1e9, "G")):
    if x >= scale:
      return f"{x / scale:,.4g} {prefix}{unit}"
  return f"{x:,.4g} {unit}"


def _ridge(device: hardware.Gpu, dtype: str) -> str:
  return f"{roofline.ridge_point(device, dtype):.3g} FLOP/byte"


def _parsed(text: str) -> tuple[str, str, shapes.Shape, str]:
  """Kernel, key, shape and GPU of "6 tflops 4096x8192x4096 h100"."""
  form = "a rung and a key, then perhaps MxNxK and a GPU"
  found = lookup.words(text, 2, form)
  gpu_name = "h200"
  if found[-1].lower() in results.MEASURED:
    gpu_name = found.pop().lower()
  shape = results.CUBE
  try:
    shape = shapes.parse(found[-1])
  except ValueError:
    pass
  else:
    found.pop()
  if len(found) < 2:
    raise lookup.UnknownError(f"want {form}, got {text!r}")
  *name, key = found
  return " ".join(name), key, shape, gpu_name
