"""What a rung's blocks are and what the traffic model says, in print."""

import importlib
import inspect
import math

from jax.experimental import pallas as pl

from experiments.harness import compiled, tables
from pallas_gemm import hardware
from pallas_gemm.ladder import blocks, contract, traffic, traffic_text


def of_rung(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> traffic.Traffic:
  """What a rung moves with its default config."""
  config = rung.default_config(problem)
  return traffic.model(rung, config, problem, gpu)


def line(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> str:
  """Modelled traffic, intensity and floor, in a line."""
  t = of_rung(rung, problem, gpu)
  return (
    f"model: reads {size(t.global_load_bytes)} and writes"
    f" {size(t.global_store_bytes)} of global memory,"
    f" {t.intensity:.3g} FLOP/byte, at least"
    f" {tables.duration(t.floor.seconds * 1e3)} ({t.floor.binds} binds)"
  )


def page(rung: contract.Rung) -> str:
  """The docstring of the rung's file."""
  text = inspect.getdoc(importlib.import_module(rung.module)) or rung.idea
  title = f"Rung {rung.label}: {rung.name}"
  return f"{title}\n{'=' * len(title)}\n\n{text}\n"


def explain(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> str:
  """Grid, blocks, the model's numbers with their formulas, and registers.

  All for the default config.
  """
  config = rung.default_config(problem)
  model = traffic_text.explain(rung, config, problem, gpu)
  if 0 in (problem.m, problem.n, problem.k) or problem.alpha == 0:
    return model + "\n"  # no kernel is started
  parts = (
    grid_lines(rung, problem, config) + block_lines(rung, problem, config),
    [model],
    compiled.describe(rung, problem, gpu),
  )
  return "\n".join("\n".join(lines) + "\n" for lines in parts)


def grid_lines(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> list[str]:
  """What each dimension of the grid is, and what is started for it."""
  dimensions, started = grid_cells(rung, problem, config)
  lines = [f"grid of rung {rung.label}, {rung.name}"]
  lines += [
    f"  {index}  {count:>9}  {text}" for index, count, text in dimensions
  ]
  if started:
    lines.append(f"  started: {started}, which take (i, j) in turn")
  return lines


def grid_cells(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> tuple[list[tuple[str, str, str]], str]:
  """The grid's dimensions: index, steps, of what; and what is started for it.

  The latter is "" where that is one thread block for each of the result's.
  """
  given, problem = problem, rung.padded(problem, config)
  grid = rung.grid(problem, config)
  (a, *_), c = rung.specs(problem, config)
  dimensions = []
  for index, side, step, count in zip(
    "ijk", "mnk", (*c.block_shape, a.block_shape[1]), grid
  ):
    name, size = side.upper(), getattr(problem, side)
    text = f"{name} / B{name} = {size} / {step}" if step else name
    if step and size % step:
      text += ", rounded up"
    if size != getattr(given, side):
      text += f", {name} padded from {getattr(given, side)}"
    dimensions.append((index, f"{count:,}", text))
  cluster = [getattr(config, f"cluster_{side}", 1) for side in "mn"]
  launched = math.prod(rung.launch(problem, config))
  started = ""
  if math.prod(cluster) > 1:
    started = f"{launched:,} clusters of {cluster[0]} x {cluster[1]} blocks"
  elif launched != math.prod(grid[:2]):
    started = f"{launched:,} thread blocks"
  return dimensions, started


def block_lines(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> list[str]:
  """A table: which block of each matrix belongs to a point of the grid."""
  rows = block_cells(rung, problem, config)
  widths = [max(map(len, column)) for column in zip(*rows)]
  return [
    "  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
  ]


def block_cells(
  rung: contract.Rung, problem: contract.Problem, config: contract.Config
) -> list[tuple[str, ...]]:
  """The header and the rows of that table."""
  problem = rung.padded(problem, config)
  grid = rung.grid(problem, config)
  inputs, out = rung.specs(problem, config)
  rows = [("", "block", "at", "memory", "bytes", "each element")]
  for name, spec in zip("ABC", inputs):
    # C is read once for all steps along K.
    points = (*grid[:2], 1) if name == "C" else grid
    axes = spec.collective_axes or ()
    sharers = math.prod(getattr(config, axis) for axis in axes)
    times = pl.cdiv(blocks.times_read(spec, points), sharers)
    text = f"read {times:,} times" if times > 1 else "read once"
    if sharers > 1:
      text += ", multicast"
    rows.append((name, *_placed(spec, problem), text))
  return [*rows, ("result", *_placed(out, problem), "written once")]


def _placed(spec, problem: contract.Problem) -> tuple[str, ...]:
  """A block's shape, its indices, where it is put, and its bytes."""
  shape = " x ".join(str(size or 1) for size in spec.block_shape)
  at = ", ".join(map(str, spec.index_map("i", "j", "k")))
  count = blocks.elements(spec) * problem.itemsize
  return shape, f"({at})", spec.memory_space.name, f"{count:,}"


def size(count: float) -> str:
  """Bytes with a prefix: "33.6 MB"."""
  for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
    if count >= scale:
      return f"{count / scale:.3g} {unit}"
  return f"{count:.0f} B"
