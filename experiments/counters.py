"""Counts, in the GPU's own counters, what each rung of the ladder does.

  python -m experiments.counters                    all rungs, 4096^3
  python -m experiments.counters --kernels=1-3,8a --shapes=2048x2048x2048

Needs Nsight Compute (`ncu`) and permission to read the counters. The rungs of
a shape run in one process under ncu, each once; clocks are left alone, caches
are flushed before each of ncu's passes. A row has what was counted
(`measured`), what the traffic model predicts (`model`) and how they compare
(`ratio`), what warps wait for (`stalls`: cycles of waiting for a reason, for
each instruction issued), and how many fit on an SM and why not more
(`occupancy`).

Rows go to experiments/results/<device>/counters.jsonl, one a rung; tables are
made of those of the newest commit. Why model and measurement differ
is said on the rung's page.

ncu and CUPTI can't both be on, so nothing is timed here. Exit status: 0; 1 if
a rung could not be counted; 2 for a command that can't be carried out; 130
after Ctrl-C.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import shutil
import sys
from typing import Any

from absl import flags
import jax

from experiments.harness import case as case_lib
from experiments.harness import (
  cli,
  compiled,
  inputs,
  ladder_tables,
  ncu,
  provenance,
)
from experiments.harness import rows as rows_lib
from experiments.harness import shapes as shapes_lib
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic

EXPERIMENT = "counters"
# How the lines of the child begin, among ncu's.
_SAID = '{"label": '

for _name in cli.COMMON:
  flags.declare_key_flag(_name)
_NCU = flags.DEFINE_string(
  "ncu", "ncu", "Nsight Compute's command line program, by name or path."
)
_TIMEOUT = flags.DEFINE_integer(
  "timeout_s",
  540,
  "Longest time for the rungs of a shape, in seconds.",
  lower_bound=1,
)
_CHILD = flags.DEFINE_bool(
  "child",
  False,
  "Run each rung of --kernels once and exit: what ncu looks at.",
  module_name=cli.INTERNAL,
)


def count(
  rungs: Sequence[contract.Rung], shape: shapes_lib.Shape, asked: Sequence[str]
) -> tuple[dict[str, ncu.Kernel], dict[str, dict[str, Any]]]:
  """Runs rungs under ncu: by label, their kernels, and what the child said.

  A rung that could not run is not among the kernels.

  Raises:
    RuntimeError: ncu failed or saw no kernel; its last words are in the
      message.
  """
  child = [sys.executable, "-m", "experiments.counters", "--child"]
  child += [f"--kernels={','.join(rung.label for rung in rungs)}"]
  child += [f"--shapes={shape}", f"--seed={cli.SEED.value}"]
  child += [f"--dtype={cli.DTYPE.value}"] if cli.DTYPE.value else []
  names = [rung.name for rung in rungs]
  output = ncu.profile(_NCU.value, asked, names, child, _TIMEOUT.value)
  lines = [line.strip() for line in output.splitlines() if line.strip()]
  words = [json.loads(x) for x in lines if x.startswith(_SAID)]
  said = {word.pop("label"): word for word in words}
  kernels = by_label(ncu.kernels(output), rungs)
  if not kernels and not any("error" in word for word in said.values()):
    errors = [line for line in lines if "==ERROR==" in line] or lines[-3:]
    raise RuntimeError(f"ncu saw no kernel: {' | '.join(errors)}")
  return kernels, said


def by_label(
  kernels: Sequence[ncu.Kernel], rungs: Sequence[contract.Rung]
) -> dict[str, ncu.Kernel]:
  """Kernels by the rung whose name theirs begins with.

  One rung's name may begin with another's: the longer one is meant.
  """
  found = {}
  for kernel in kernels:
    owners = [x for x in rungs if kernel[ncu.NAME].startswith(x.name)]
    if owners:
      found[max(owners, key=lambda rung: len(rung.name)).label] = kernel
  return found


def child() -> int:
  """Runs each rung once, to be counted; prints what it was compiled to.

  With registers and shared memory follows how many blocks an SM has room for:
  what ncu says of that is the same for all rungs on an H100 and an H200.
  """
  [shape] = cli.parse_shapes(cli.SHAPES.value)
  for rung in chosen():
    said: dict[str, Any] = {"label": rung.label}
    try:
      problem = problem_of(rung, shape)
      operands = inputs.operands(problem, cli.SEED.value)
      with compiled.capture() as found:
        jax.block_until_ready(jax.jit(rung.gemm)(*operands))
      facts = {k.removeprefix("occupancy_"): v for k, v in found.items()}
      said |= {k: v for k, v in facts.items() if v is not None}
    except Exception as error:  # pylint: disable=broad-exception-caught
      said["error"] = case_lib.first_line(error)
    print(json.dumps(said), flush=True)
  return 0


def chosen() -> list[contract.Rung]:
  """The rungs of the flags: those that take the dtype, if one is given.

  Raises:
    cli.FlagError: there are none.
  """
  dtype = cli.DTYPE.value
  rungs = cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER)
  found = [rung for rung in rungs if dtype is None or dtype in rung.dtypes]
  if not found:
    raise cli.FlagError(f"--dtype: none of these rungs takes {dtype}")
  return found


def problem_of(
  rung: contract.Rung, shape: shapes_lib.Shape
) -> contract.Problem:
  """The product of that shape in the dtype of the flags, or the rung's."""
  return contract.Problem(*shape, cli.DTYPE.value or rung.dtypes[0])


def predicted(t: traffic.Traffic) -> dict[str, float]:
  """What the model says of the counters; none where it says nothing."""
  p = t.problem
  result = p.m * p.n * p.itemsize
  found = {
    "dram_read_bytes": float(t.compulsory_bytes - result),
    "dram_write_bytes": float(result),
  }
  if t.threads_load:
    found["thread_load_bytes"] = float(t.global_load_bytes)
  if t.slabs:  # what L1 keeps of loads without them is not modelled
    found["l2_read_bytes"] = float(t.global_load_bytes)
  if t.sectors is not None:
    # A warp loads a value of A and one of B in each step.
    found["sectors_per_request"] = sum(t.sectors) / 2
  if p.dtype == "float32":  # 16-bit rungs multiply on tensor cores
    found["ffma"] = float(t.fmas)
  return found


def make_row(
  rung: contract.Rung,
  problem: contract.Problem,
  kernel: ncu.Kernel,
  gpu: hardware.Gpu,
  said: Mapping[str, Any],
) -> dict[str, Any]:
  """The row of a rung: counts, the model's numbers, and their ratios."""
  counted = ncu.read(kernel, ncu.COUNTERS)
  config = rung.default_config(problem)
  model = predicted(traffic.model(rung, config, problem, gpu))
  ratios = {
    name: counted[name] / want if want else None
    for name, want in model.items()
    if name in counted
  }
  return {
    "experiment": EXPERIMENT,
    "kernel": rung.name,
    "number": rung.number,
    **({"variant": rung.variant} if rung.variant else {}),
    **dataclasses.asdict(problem),
    "config": dataclasses.asdict(config),
    "kernel_name": kernel[ncu.NAME],
    "measured": counted,
    "stalls": ncu.read(kernel, ncu.STALLS),
    "occupancy": {**said, **ncu.read(kernel, ncu.OCCUPANCY)},
    "model": model,
    "ratio": ratios,
    "seed": cli.SEED.value,
    **provenance.versions(),
    "utc": provenance.utc(),
  }


def show(row: Mapping[str, Any]) -> None:
  """A rung's counts, in lines."""
  label = ladder_tables.label(row)
  cli.say(f"{label:>3} {row['kernel']} ({row['kernel_name']})")
  for name, value in row["measured"].items():
    text = f"   {name:<28} {value:>14,.6g}"
    if name in row["model"]:
      text += f"   model {row['model'][name]:>14,.6g}"
    if row["ratio"].get(name) is not None:
      text += f"   ratio {row['ratio'][name]:.2f}"
    cli.say(text)
  for field in ("stalls", "occupancy"):
    parts = [
      f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
      for name, value in row[field].items()
      if value
    ]
    cli.say(f"   {field}: {', '.join(parts)}")


def measure() -> int:
  """Counts the rungs of the flags; returns the exit status."""
  rungs = chosen()
  shapes = cli.parse_shapes(cli.SHAPES.value) or shapes_lib.suite("ladder")
  if shutil.which(_NCU.value) is None:
    raise cli.FlagError(
      f"--ncu: there is no {_NCU.value}; counters need Nsight Compute"
    )
  # This process asks for the device's name alone: the memory is the child's.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  gpu = cli.gpu()
  path = rows_lib.results_file(
    provenance.device_name(), EXPERIMENT, cli.OUTPUT_DIR.value
  )
  asked = ncu.metrics(ncu.known_metrics(_NCU.value))
  for name, metrics in (ncu.COUNTERS | ncu.STALLS | ncu.OCCUPANCY).items():
    if not set(metrics) & set(asked):
      cli.say(f"{name}: this GPU has none of {', '.join(metrics)}")
  counted, failures = 0, []
  for shape in shapes:
    found = shape_rows(rungs, shape, asked, gpu)
    for row in found:
      rows_lib.append(path, row)
      show(row)
    counted += len(found)
    there = {row["kernel"] for row in found}
    failures += [rung.name for rung in rungs if rung.name not in there]
  if counted:
    cli.say(f"rows: {path}")
  if failures:
    cli.say(f"not counted: {', '.join(failures)}")
  return 1 if failures else 0


def shape_rows(
  rungs: Sequence[contract.Rung],
  shape: shapes_lib.Shape,
  asked: Sequence[str],
  gpu: hardware.Gpu,
) -> list[dict[str, Any]]:
  """The rows of a shape; prints why a rung has none."""
  try:
    kernels, said = count(rungs, shape, asked)
  except RuntimeError as error:
    cli.say(f"{shape}: {error}")
    return []
  rows = []
  for rung in rungs:
    kernel, word = kernels.get(rung.label), said.get(rung.label, {})
    if kernel and "error" not in word:
      rows.append(make_row(rung, problem_of(rung, shape), kernel, gpu, word))
    else:
      reason = word.get("error", "ncu saw no kernel of that name")
      cli.say(f"{rung.label:>3} {rung.name}: {reason}")
  return rows


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if _CHILD.value:
    return child()
  return measure()


if __name__ == "__main__":
  cli.run(main)
