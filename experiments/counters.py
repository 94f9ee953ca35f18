"""Counts, in the GPU's own counters, what each rung of the ladder does.

  python -m experiments.counters                    all rungs, 4096^3
  python -m experiments.counters --kernels=1-3 --shapes=2048x2048x2048

Needs Nsight Compute (`ncu`) and permission to read the counters. Each rung
runs in a process of its own, once to warm up and once under ncu; clocks are
left alone, caches are flushed before each of ncu's passes. Beside each count
stands what the traffic model predicts, where it predicts anything:

  dram_read_bytes        A, B (and C), each once
  dram_write_bytes       the result, once
  thread_load_bytes      what threads load from global memory (rungs 1-7)
  l2_read_bytes          what SMs read from L2 (rungs 3-12)
  sectors_per_request    32-byte sectors per load of a warp (rungs 1-2)
  ffma                   fp32 fused multiply-adds (rungs 1-8)

Rows go to experiments/results/<device>/counters.jsonl, one a rung. Where
model and measurement differ by more than 20 %, the row says why, or the
program lists the difference as unexplained.

ncu and CUPTI can't both be on, so nothing is timed here. Exit status: 0; 1 if
a rung could not be counted; 2 for a command that can't be carried out.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import cli, contestants, modelled, provenance, suites
from experiments.harness import console as console_lib
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic

EXPERIMENT = "counters"
TOLERANCE = 0.20

for _name in cli.COMMON:
  flags.declare_key_flag(_name)
_NCU = flags.DEFINE_string(
  "ncu", "ncu", "Nsight Compute's command line program, by name or path."
)
_TIMEOUT = flags.DEFINE_integer(
  "timeout_s", 300, "Longest time for one rung, in seconds.", lower_bound=1
)
_CHILD = flags.DEFINE_bool(
  "child",
  False,
  "Run the one rung of --kernels twice and exit: what ncu looks at.",
)


@dataclasses.dataclass(frozen=True)
class Counter:
  """One number of a row.

  Attributes:
    names: ncu's metrics for it; the first that this GPU has is used, for
      names change between architectures.
    scale: from ncu's base unit to the row's.
  """

  names: tuple[str, ...]
  scale: float = 1.0


_PERCENT = "avg.pct_of_peak_sustained_active"
COUNTERS: dict[str, Counter] = {
  "duration_ms": Counter(("gpu__time_duration.sum",), 1e-6),
  "dram_read_bytes": Counter(("dram__bytes_read.sum",)),
  "dram_write_bytes": Counter(("dram__bytes_write.sum",)),
  "l2_hit_percent": Counter(("lts__t_sector_hit_rate.pct",)),
  "l2_read_bytes": Counter(
    ("lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_op_read.sum"),
    32,
  ),
  "l1_hit_percent": Counter(("l1tex__t_sector_hit_rate.pct",)),
  "thread_load_bytes": Counter(("smsp__sass_data_bytes_mem_global_op_ld.sum",)),
  "sectors_per_request": Counter(
    ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",)
  ),
  "shared_load_wavefronts": Counter(
    ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",)
  ),
  "shared_load_bank_conflicts": Counter(
    ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",)
  ),
  "shared_store_bank_conflicts": Counter(
    ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",)
  ),
  "ffma": Counter(("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",)),
  "fma_pipe_percent": Counter(
    (
      f"sm__pipe_fma_cycles_active.{_PERCENT}",
      f"sm__inst_executed_pipe_fma.{_PERCENT}",
    )
  ),
  "tensor_pipe_percent": Counter(
    (
      f"sm__pipe_tensor_cycles_active.{_PERCENT}",
      f"sm__pipe_tensor_op_gmma_cycles_active.{_PERCENT}",
      f"sm__pipe_tensor_op_hmma_cycles_active.{_PERCENT}",
      f"sm__inst_executed_pipe_tensor_op_gmma.{_PERCENT}",
      f"sm__inst_executed_pipe_tensor.{_PERCENT}",
    )
  ),
  "lsu_pipe_percent": Counter((f"sm__inst_executed_pipe_lsu.{_PERCENT}",)),
  "issue_active_percent": Counter(
    (
      f"sm__issue_active.{_PERCENT}",
      f"smsp__issue_active.{_PERCENT}",
      f"sm__inst_issued.{_PERCENT}",
    )
  ),
}
# Units that ncu may print although base units are asked for.
_UNITS = {
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6,
    "second": 1e9, "s": 1e9,
}  # fmt: skip

# Why a count differs from the model, by rung and counter: one sentence each,
# for what was seen at the ladder's own shape on an H200.
_BROADCAST = (
  "ncu counts the different bytes of a request: the word that 32 lanes share"
  " counts once, so 33 words a step of the 64 that threads load."
)
_SECOND_READ = (
  "The model reads A and B once; together they are larger than the L2, and"
  " what blocks that run at different times share is read from DRAM again."
)
_ROW_OF_BLOCKS = (
  "The model reads B once; it is larger than the L2 and is read again for each"
  " group of rows of blocks that run at the same time, about {} times."
)
_MERGED = (
  "Each SM receives what the model counts, but requests of several SMs for the"
  " same tile at the same time are merged before the L2 counts them."
)
EXPLANATIONS: dict[tuple[int, str], str] = {
  (1, "thread_load_bytes"): _BROADCAST,
  (2, "thread_load_bytes"): _BROADCAST,
  (1, "dram_read_bytes"): (
    "Of each 32-byte sector of A a warp uses 4 bytes a step, and it is fetched"
    " again where caches drop it before the next 7 steps; B, larger than the"
    " L2, is read again for each group of rows of blocks that run together."
  ),
  (1, "dram_write_bytes"): (
    "C is written 4 bytes a sector; some sectors leave the L2 before their"
    " other 28 bytes have come, and are written more than once."
  ),
  (2, "dram_read_bytes"): _ROW_OF_BLOCKS.format(60),
  (3, "dram_read_bytes"): _ROW_OF_BLOCKS.format(120),
  (4, "dram_read_bytes"): _ROW_OF_BLOCKS.format(30),
  **{(rung, "dram_read_bytes"): _SECOND_READ for rung in range(5, 13)},
  **{(rung, "l2_read_bytes"): _MERGED for rung in (9, 10, 11, 12)},
}


def predicted(t: traffic.Traffic) -> dict[str, float]:
  """What the model says of the counters; none where it says nothing."""
  p = t.problem
  result = p.m * p.n * p.itemsize
  found = {
    "dram_read_bytes": float(t.compulsory_bytes - result),
    "dram_write_bytes": float(result),
  }
  if t.number <= 7:  # from rung 8 on TMA loads, not threads
    found["thread_load_bytes"] = float(t.global_load_bytes)
  if t.number >= 3:  # what L1 keeps on rungs 1 and 2 is not modelled
    found["l2_read_bytes"] = float(t.global_load_bytes)
  if t.sectors is not None:
    # A warp loads a value of A and one of B in each step.
    found["sectors_per_request"] = sum(t.sectors) / 2
  if t.number <= 8:
    found["ffma"] = float(t.fmas)
  return found


def compare(
  number: int, measured: Mapping[str, float], model: Mapping[str, float]
) -> tuple[dict[str, float | None], dict[str, str | None]]:
  """measured / model, and a sentence for each that is off by over 20 %.

  Returns:
    The ratios (None if the model says zero), and explanations by counter
    (None where there is none yet). A counter that agrees is not among them.
  """
  ratios: dict[str, float | None] = {}
  reasons: dict[str, str | None] = {}
  for name, want in model.items():
    if name not in measured:
      continue
    ratio = measured[name] / want if want else None
    ratios[name] = ratio
    if ratio is None or abs(ratio - 1) > TOLERANCE:
      reasons[name] = EXPLANATIONS.get((number, name))
  return ratios, reasons


def parse(output: str) -> list[dict[str, float | str]]:
  """Kernels in what `ncu --csv --page raw` printed.

  A header row (from "ID" on), a row of units, and a row for each kernel;
  other lines, of ncu and of the program, may stand around them.

  Args:
    output: ncu's standard output.

  Returns:
    For each kernel its "Kernel Name", and the value of each metric in base
    units (bytes, nanoseconds). Metrics that ncu could not read are left out.
  """
  lines = output.splitlines()
  starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
  if not starts:
    return []
  table = list(csv.reader(io.StringIO("\n".join(lines[starts[0] :]))))
  header, units = table[0], table[1]
  kernels = []
  for row in table[2:]:
    if len(row) != len(header):
      break  # the program's own output
    found: dict[str, float | str] = {}
    for name, unit, text in zip(header, units, row, strict=True):
      if name == "Kernel Name":
        found[name] = text
        continue
      try:
        value = float(text.replace(",", ""))
      except ValueError:
        continue  # "n/a", or a column of words
      found[name] = value * _UNITS.get(unit, 1.0)
    kernels.append(found)
  return kernels


def measured(kernel: Mapping[str, float | str]) -> dict[str, float]:
  """The counters of a kernel that `parse` found."""
  found = {}
  for name, counter in COUNTERS.items():
    for metric in counter.names:
      if isinstance(value := kernel.get(metric), float):
        found[name] = value * counter.scale
        break
  return found


def known_metrics(ncu: str) -> set[str] | None:
  """Names of the metrics of this GPU, without suffix; None if unknown."""
  try:
    done = subprocess.run(
      [ncu, "--query-metrics", "--csv"],
      capture_output=True,
      text=True,
      timeout=120,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  first = (line.split(",")[0].split() for line in done.stdout.splitlines())
  names = {words[0].strip('"') for words in first if words}
  return {name for name in names if "__" in name} or None


def metrics(known: set[str] | None) -> list[str]:
  """What to ask ncu for: one metric a counter, of those that it knows."""
  asked = []
  for counter in COUNTERS.values():
    # A name that ncu does not know stops it. Without a list, the first name
    # is the best guess.
    there = [
      name
      for name in counter.names
      if known is None or name.split(".")[0] in known
    ]
    asked += there[:1]
  return asked


def command(
  ncu: str,
  asked: Sequence[str],
  kernel_name: str | None,
  child: Sequence[str],
) -> list[str]:
  """ncu's command line: the second launch of the kernel of that name."""
  found = [ncu, "--csv", "--page", "raw", "--print-units", "base"]
  # Clocks stay as they are: the machine may be shared.
  found += ["--clock-control", "none", "--target-processes", "all"]
  if kernel_name is not None:
    found += ["--kernel-name", f"regex:{kernel_name}"]
  found += ["--launch-skip", "1", "--launch-count", "1"]
  return [*found, "--metrics", ",".join(asked), *child]


def count(
  rung: contract.Rung, problem: contract.Problem, asked: Sequence[str]
) -> dict[str, float | str]:
  """Runs a rung under ncu; the kernel as `parse` gives it.

  Raises:
    RuntimeError: ncu failed or saw no kernel; its last words are in the
      message.
  """
  p = problem
  child = [sys.executable, "-m", "experiments.counters", "--child"]
  child += [f"--kernels={rung.number}", f"--dtype={p.dtype}"]
  child += [f"--shapes={p.m}x{p.n}x{p.k}", f"--seed={cli.SEED.value}"]
  # Kernels inside a CUDA graph would be profiled as one.
  xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
  last_words = ""
  # By name first. If no kernel has the rung's name, any: the child launches
  # nothing but the rung's kernels.
  for kernel_name in (rung.name, None):
    try:
      done = subprocess.run(
        command(_NCU.value, asked, kernel_name, child),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT.value,
        cwd=pathlib.Path(__file__).resolve().parents[1],
        env=os.environ | {"XLA_FLAGS": xla.strip()},
        check=False,
      )
    except subprocess.TimeoutExpired:
      raise RuntimeError(f"ncu took over {_TIMEOUT.value} s") from None
    if kernels := parse(done.stdout):
      return kernels[-1]
    said = f"{done.stdout}\n{done.stderr}".split("\n")
    last_words = " | ".join([x.strip() for x in said if x.strip()][-3:])
  raise RuntimeError(f"ncu saw no kernel of {rung.name}: {last_words}")


def child() -> int:
  """Runs one rung twice: to warm up, and to be counted."""
  [rung] = cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER)
  [shape] = cli.parse_shapes(cli.SHAPES.value)
  problem = contract.Problem(*shape, cli.DTYPE.value or rung.dtypes[0])
  # Drawn on the host: on the device that would launch kernels of its own.
  rng = np.random.default_rng(cli.SEED.value)
  a, b = (
    jax.device_put(
      rng.standard_normal(size, np.float32).astype(jnp.dtype(problem.dtype))
    )
    for size in ((problem.m, problem.k), (problem.k, problem.n))
  )
  fn = contestants.rung(rung, problem).fn
  for _ in range(2):
    jax.block_until_ready(fn(a, b, None))
  return 0


def make_row(
  rung: contract.Rung,
  problem: contract.Problem,
  kernel: Mapping[str, float | str],
  gpu: hardware.Gpu,
) -> dict[str, Any]:
  """The row of a rung: counts, the model's numbers, ratios, explanations."""
  counted = measured(kernel)
  model = predicted(modelled.of_rung(rung, problem, gpu))
  ratios, reasons = compare(rung.number, counted, model)
  if suites.Shape(problem.m, problem.n, problem.k) not in suites.suite(
    "ladder"
  ):
    reasons = dict.fromkeys(reasons)  # Seen at other shapes, not at this one.
  return {
    "experiment": EXPERIMENT,
    "kernel": rung.name,
    "number": rung.number,
    **dataclasses.asdict(problem),
    "config": dataclasses.asdict(rung.default_config(problem)),
    "kernel_name": kernel.get("Kernel Name"),
    "measured": counted,
    "model": model,
    "ratio": ratios,
    "explanation": reasons,
    "seed": cli.SEED.value,
    **provenance.versions(),
    "utc": provenance.utc(),
  }


def show(console: console_lib.Console, row: Mapping[str, Any]) -> None:
  """A rung's counts, in lines."""
  console.line(f"{row['number']:>2} {row['kernel']} ({row['kernel_name']})")
  for name, value in row["measured"].items():
    text = f"   {name:<28} {value:>14,.6g}"
    if name in row["model"]:
      ratio = row["ratio"][name]
      text += f"   model {row['model'][name]:>14,.6g}"
      text += "" if ratio is None else f"   ratio {ratio:.2f}"
    console.line(text)
    if name in row["explanation"]:
      console.line(f"     {row['explanation'][name] or 'not explained yet'}")


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if _CHILD.value:
    return child()
  console = console_lib.Console()
  rungs = cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER)
  shapes = cli.parse_shapes(cli.SHAPES.value) or suites.suite("ladder")
  if shutil.which(_NCU.value) is None:
    raise cli.FlagError(
      f"--ncu: there is no {_NCU.value}; counters need Nsight Compute"
    )
  # This process asks for the device's name alone: the memory is the child's.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  try:
    gpu = (
      hardware.lookup(cli.GPU.value) if cli.GPU.value else hardware.current()
    )
  except ValueError as error:
    raise cli.FlagError(f"--gpu: {error}") from None
  path = rows_lib.results_file(
    provenance.device_name(), EXPERIMENT, cli.OUTPUT_DIR.value
  )
  known = known_metrics(_NCU.value)
  asked = metrics(known)
  for name, counter in COUNTERS.items():
    if not set(counter.names) & set(asked):
      console.line(f"{name}: this GPU has none of {', '.join(counter.names)}")
  failures, unexplained = [], []
  with console.progress(len(rungs) * len(shapes)):
    for shape in shapes:
      for rung in rungs:
        dtype = cli.DTYPE.value or rung.dtypes[0]
        if dtype not in rung.dtypes:
          console.step()
          continue
        problem = contract.Problem(*shape, dtype)
        console.doing(f"{rung.name} {shape}")
        try:
          kernel = count(rung, problem, asked)
        except RuntimeError as error:
          console.line(f"{rung.number:>2} {rung.name}: {error}", bad=True)
          failures.append(rung.name)
          continue
        finally:
          console.step()
        row = make_row(rung, problem, kernel, gpu)
        rows_lib.append(path, row)
        show(console, row)
        unexplained += [
          f"{rung.number} {rung.name}, {name}:"
          f" {row['ratio'][name] if row['ratio'][name] is not None else 'inf'}"
          f" of the model at {shape} {dtype}"
          for name, reason in row["explanation"].items()
          if reason is None
        ]
  console.line(f"rows: {path}")
  if unexplained:
    console.line(f"off by more than {TOLERANCE:.0%} and not explained:")
    for text in unexplained:
      console.line(f"  {text}")
  if failures:
    console.line(f"not counted: {', '.join(failures)}", bad=True)
    return 1
  return 0


if __name__ == "__main__":
  cli.run(main)
