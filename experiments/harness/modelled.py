"""The traffic model's word on a rung, as the programs print it."""

from collections.abc import Mapping, Sequence
import importlib
import inspect
from typing import Any

from experiments.harness import tables
from pallas_gemm import hardware
from pallas_gemm.ladder import contract, traffic, traffic_text


def of_rung(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> traffic.Traffic:
  """What a rung moves with its default config."""
  config = rung.default_config(problem)
  return traffic.model(rung.number, config, problem, gpu)


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
  title = f"Rung {rung.number}: {rung.name}"
  return f"{title}\n{'=' * len(title)}\n\n{text}\n"


def explain(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> str:
  """The model's numbers with their formulas, for the default config."""
  config = rung.default_config(problem)
  return traffic_text.explain(rung.number, config, problem, gpu) + "\n"


def intensity(
  row: Mapping[str, Any], ladder: Sequence[contract.Rung]
) -> float | None:
  """FLOP per byte read from global memory, of the config in a row.

  None for a row that is no rung's, or whose config is of another version.
  """
  found = [rung for rung in ladder if rung.number == row["number"]]
  if not found or row["config"] is None:
    return None
  problem = contract.Problem(
    row["m"], row["n"], row["k"], row["dtype"], row["alpha"], row["beta"]
  )
  try:
    config = found[0].config_type(**row["config"])
    # What is read does not depend on the GPU; any will do.
    gpu = hardware.lookup(hardware.DEFAULT_NAME)
    return traffic.model(row["number"], config, problem, gpu).intensity
  except (TypeError, ValueError):
    return None


def size(count: float) -> str:
  """Bytes with a prefix: "33.6 MB"."""
  for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
    if count >= scale:
      return f"{count / scale:.3g} {unit}"
  return f"{count:.0f} B"
