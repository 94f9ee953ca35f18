"""Nsight Compute's command line: what to ask it, and what it answers."""

from collections.abc import Mapping, Sequence
import contextlib
import csv
import itertools
import os
import pathlib
import subprocess

from experiments.harness import counter_tables

# A kernel's metrics in base units (bytes, nanoseconds), and its name.
Kernel = Mapping[str, float | str]
NAME = "Kernel Name"

_ACTIVE = "avg.pct_of_peak_sustained_active"
# By the name in a row, ncu's metrics: the first that this GPU has is used, for
# names change between architectures.
COUNTERS = {
    "duration_ms": ("gpu__time_duration.sum",),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct",),
    "l2_read_bytes": (
        "lts__t_sectors_srcunit_tex_op_read.sum",
        "lts__t_sectors_op_read.sum",
    ),
    "l2_write_bytes": (
        "lts__t_sectors_srcunit_tex_op_write.sum",
        "lts__t_sectors_op_write.sum",
    ),
    "l1_hit_percent": ("l1tex__t_sector_hit_rate.pct",),
    "thread_load_bytes": ("smsp__sass_data_bytes_mem_global_op_ld.sum",),
    "sectors_per_request": (
        "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    ),
    "shared_load_wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    ),
    "shared_load_bank_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    ),
    "shared_store_bank_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    ),
    "instructions": ("smsp__inst_executed.sum",),
    "ffma": ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",),
    "fma_pipe_percent": (
        f"sm__pipe_fma_cycles_active.{_ACTIVE}",
        f"sm__inst_executed_pipe_fma.{_ACTIVE}",
    ),
    "tensor_pipe_percent": (
        f"sm__pipe_tensor_cycles_active.{_ACTIVE}",
        f"sm__pipe_tensor_op_gmma_cycles_active.{_ACTIVE}",
        f"sm__pipe_tensor_op_hmma_cycles_active.{_ACTIVE}",
        f"sm__inst_executed_pipe_tensor_op_gmma.{_ACTIVE}",
        f"sm__inst_executed_pipe_tensor.{_ACTIVE}",
    ),
    "lsu_pipe_percent": (f"sm__inst_executed_pipe_lsu.{_ACTIVE}",),
    "issue_active_percent": (
        f"sm__issue_active.{_ACTIVE}",
        f"smsp__issue_active.{_ACTIVE}",
        f"sm__inst_issued.{_ACTIVE}",
    ),
}  # fmt: skip
STALLS = {
  reason: (
    f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",
  )
  for reason in counter_tables.REASONS
}
OCCUPANCY = {
  "threads": ("launch__block_size",),
  "warps_active_percent": (f"sm__warps_active.{_ACTIVE}",),
}
# From ncu's base units, nanoseconds and sectors, to those of a row.
_SCALES = {"duration_ms": 1e-6, "l2_read_bytes": 32, "l2_write_bytes": 32}
# Units that ncu may print although base units are asked for.
_UNITS = {
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6,
    "second": 1e9, "s": 1e9,
}  # fmt: skip


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
  """What to ask ncu for: one metric a number, of those that it knows."""

  def there(metric: str) -> bool:
    # A name that ncu does not know stops it. Facts of the launch, which are
    # not counted, every ncu knows and none lists. Without a list, the first
    # name is the best guess.
    of_launch = metric.startswith("launch__")
    return known is None or of_launch or metric.split(".")[0] in known

  numbers = (COUNTERS | STALLS | OCCUPANCY).values()
  return [x for names in numbers for x in [*filter(there, names)][:1]]


def profile(
  ncu: str,
  asked: Sequence[str],
  names: Sequence[str],
  program: Sequence[str],
  timeout_s: float,
) -> str:
  """Runs a program under ncu; both outputs, of ncu and the program.

  Args:
    ncu: the program, by name or path.
    asked: metrics.
    names: of the kernels, or how theirs begin; others are not looked at.
    program: its command line.
    timeout_s: longest time for it.

  Raises:
    RuntimeError: it took too long.
  """
  command = [ncu, "--csv", "--page", "raw", "--print-units", "base"]
  # Clocks stay as they are: the machine may be shared.
  command += ["--clock-control", "none", "--target-processes", "all"]
  command += ["--kernel-name", f"regex:^({'|'.join(names)})"]
  # Kernels inside a CUDA graph would be profiled as one. A compiled kernel that
  # comes out of a cache does not say what it takes.
  xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
  environment = {
    "XLA_FLAGS": xla.strip(),
    "JAX_ENABLE_COMPILATION_CACHE": "false",
  }
  try:
    done = subprocess.run(
      [*command, "--metrics", ",".join(asked), *program],
      capture_output=True,
      text=True,
      timeout=timeout_s,
      cwd=pathlib.Path(__file__).resolve().parents[2],
      env=os.environ | environment,
      check=False,
    )
  except subprocess.TimeoutExpired:
    raise RuntimeError(f"ncu took over {timeout_s} s") from None
  return f"{done.stdout}\n{done.stderr}"


def kernels(output: str) -> list[Kernel]:
  """Kernels in what `ncu --csv --page raw` printed.

  A header row (from "ID" on), a row of units, and a row for each kernel;
  other lines, of ncu and of the program, may stand around them.

  Args:
    output: as `profile` gives it.

  Returns:
    For each kernel its "Kernel Name", and the value of each metric in base
    units. Metrics that ncu could not read are left out.
  """
  lines = output.splitlines()
  table = itertools.dropwhile(lambda x: not x.startswith('"ID"'), lines)
  rows = csv.reader(table)
  header, units = next(rows, None), next(rows, None)
  found = []
  # Until the program's own output goes on.
  for row in itertools.takewhile(lambda row: len(row) == len(header), rows):
    kernel: dict[str, float | str] = {}
    for name, unit, text in zip(header, units, row, strict=True):
      with contextlib.suppress(ValueError):  # "n/a", or a column of words
        value = float(text.replace(",", ""))
        kernel[name] = value * _UNITS.get(unit.split("/")[0], 1.0)
    found.append(kernel | {NAME: row[header.index(NAME)]})
  return found


def read(
  kernel: Kernel, numbers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
  """Those of the numbers that a kernel has."""
  found = {}
  for name, names in numbers.items():
    if metric := next((x for x in names if x in kernel), None):
      found[name] = kernel[metric] * _SCALES.get(name, 1)
  return found
