"""Counts, in the GPU's own counters, what each rung of the ladder does.

  python -m experiments.counters                    all rungs, 4096^3
  python -m experiments.counters --kernels=1-3,8a --shapes=2048x2048x2048
  python -m experiments.counters --update_readme    results/ladder.md of rows

Needs Nsight Compute (`ncu`) and permission to read the counters. The rungs of
a shape run in one process under ncu, each once; clocks are left alone, caches
are flushed before each of ncu's passes. Beside each count stands what the
traffic model predicts, where it predicts anything:

  dram_read_bytes        A, B (and C), each once
  dram_write_bytes       the result, once
  thread_load_bytes      what threads load from global memory, where they do
  l2_read_bytes          what SMs read from L2, of rungs with slabs
  sectors_per_request    32-byte sectors per load of a warp, of rungs without
  ffma                   fp32 fused multiply-adds

A row says as well what warps wait for (`stalls`: warps that wait for a
reason, for each instruction issued), and how many fit on an SM and why not
more (`occupancy`).

Rows go to experiments/results/<device>/counters.jsonl, one a rung; tables and
plots are made of those of the newest commit. Where model and measurement
differ by more than 20 %, the row says why, or the program lists the difference
as unexplained.

ncu and CUPTI can't both be on, so nothing is timed here. Exit status: 0; 1 if
a rung could not be counted; 2 for a command that can't be carried out; 130
after Ctrl-C.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import functools
import io
import json
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

from experiments.harness import case as case_lib
from experiments.harness import (
  cli,
  compiled,
  counter_plots,
  counter_tables,
  modelled,
  provenance,
  report,
  suites,
  tables,
)
from experiments.harness import console as console_lib
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic

EXPERIMENT = "counters"
TOLERANCE = 0.20

PAGE = rows_lib.RESULTS / "ladder.md"

for _name in (*cli.COMMON, "plot", "update_readme", "from_rows", "readme"):
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
  "l2_write_bytes": Counter(
    ("lts__t_sectors_srcunit_tex_op_write.sum", "lts__t_sectors_op_write.sum"),
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
  "instructions": Counter(("smsp__inst_executed.sum",)),
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
STALLS: dict[str, Counter] = {
  reason: Counter(
    (f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",)
  )
  for reason in counter_tables.REASONS
}
OCCUPANCY: dict[str, Counter] = {
  "registers": Counter(("launch__registers_per_thread",)),
  "threads": Counter(("launch__block_size",)),
  "static_shared_bytes": Counter(("launch__shared_mem_per_block_static",)),
  "dynamic_shared_bytes": Counter(("launch__shared_mem_per_block_dynamic",)),
  "warps_active_percent": Counter((f"sm__warps_active.{_PERCENT}",)),
}
# Blocks that an SM has room for, by what could leave no room for more.
LIMITS: dict[str, Counter] = {
  limit: Counter((f"launch__occupancy_limit_{name}",))
  for limit, name in (
    ("registers", "registers"),
    ("shared memory", "shared_mem"),
    ("threads", "warps"),
    ("blocks", "blocks"),
  )
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
EXPLANATIONS: dict[tuple[str, str], str] = {
  **{
    (rung.name, "dram_read_bytes"): _SECOND_READ
    for rung in ladder_lib.with_variants()
  },
  **{
    (rung.name, "l2_read_bytes"): _MERGED
    for rung in ladder_lib.with_variants()
    if rung.config_type is contract.TensorCoreConfig
  },
  ("naive", "thread_load_bytes"): _BROADCAST,
  ("coalesced", "thread_load_bytes"): _BROADCAST,
  ("naive", "dram_read_bytes"): (
    "Of each 32-byte sector of A a warp uses 4 bytes a step, and it is fetched"
    " again where caches drop it before the next 7 steps; B, larger than the"
    " L2, is read again for each group of rows of blocks that run together."
  ),
  ("naive", "dram_write_bytes"): (
    "C is written 4 bytes a sector; some sectors leave the L2 before their"
    " other 28 bytes have come, and are written more than once."
  ),
  ("coalesced", "dram_read_bytes"): _ROW_OF_BLOCKS.format(60),
  ("shared_memory", "dram_read_bytes"): _ROW_OF_BLOCKS.format(120),
  ("blocktiling_1d", "dram_read_bytes"): _ROW_OF_BLOCKS.format(30),
}


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


def compare(
  name: str, measured: Mapping[str, float], model: Mapping[str, float]
) -> tuple[dict[str, float | None], dict[str, str | None]]:
  """measured / model, and a sentence for each that is off by over 20 %.

  Args:
    name: of the rung.
    measured: by counter.
    model: by counter.

  Returns:
    The ratios (None if the model says zero), and explanations by counter
    (None where there is none yet). A counter that agrees is not among them.
  """
  ratios: dict[str, float | None] = {}
  reasons: dict[str, str | None] = {}
  for counter, want in model.items():
    if counter not in measured:
      continue
    ratio = measured[counter] / want if want else None
    ratios[counter] = ratio
    if ratio is None or abs(ratio - 1) > TOLERANCE:
      reasons[counter] = EXPLANATIONS.get((name, counter))
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
      found[name] = value * _UNITS.get(unit.split("/")[0], 1.0)
    kernels.append(found)
  return kernels


def read(
  kernel: Mapping[str, float | str], counters: Mapping[str, Counter]
) -> dict[str, float]:
  """Those of the counters that a kernel of `parse` has."""
  found = {}
  for name, counter in counters.items():
    for metric in counter.names:
      if isinstance(value := kernel.get(metric), float):
        found[name] = value * counter.scale
        break
  return found


def occupancy(kernel: Mapping[str, float | str]) -> dict[str, float | str]:
  """What a kernel of `parse` takes, how many fit on an SM, and the limit.

  `warps_active_percent` is measured: warps that are there, of those that an
  SM can hold. The others follow from the launch.
  """
  found: dict[str, float | str] = {**read(kernel, OCCUPANCY)}
  shared = [found.pop(f"{x}_shared_bytes", None) for x in ("static", "dynamic")]
  if None not in shared:
    found["shared_bytes"] = sum(shared)
  if room := read(kernel, LIMITS):
    blocks = min(room.values())
    found["blocks_per_sm"] = blocks
    limits = (name for name, count in room.items() if count == blocks)
    found["limit"] = " and ".join(limits)
    if "threads" in found:
      warps = -(-found["threads"] // hardware.WARP_THREADS)
      found["warps_per_sm"] = blocks * warps
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
  groups = (COUNTERS, STALLS, OCCUPANCY, LIMITS)
  for counter in (counter for group in groups for counter in group.values()):
    # A name that ncu does not know stops it. Facts of the launch, which are
    # not counted, every ncu knows and none lists. Without a list, the first
    # name is the best guess.
    there = [
      name
      for name in counter.names
      if known is None
      or name.startswith("launch__")
      or name.split(".")[0] in known
    ]
    asked += there[:1]
  return asked


def command(
  ncu: str,
  asked: Sequence[str],
  rungs: Sequence[contract.Rung],
  child: Sequence[str],
) -> list[str]:
  """ncu's command line: every launch of the rungs' kernels."""
  found = [ncu, "--csv", "--page", "raw", "--print-units", "base"]
  # Clocks stay as they are: the machine may be shared.
  found += ["--clock-control", "none", "--target-processes", "all"]
  names = "|".join(rung.name for rung in rungs)
  found += ["--kernel-name", f"regex:^({names})"]
  return [*found, "--metrics", ",".join(asked), *child]


def count(
  rungs: Sequence[contract.Rung], shape: suites.Shape, asked: Sequence[str]
) -> tuple[dict[str, dict[str, float | str]], dict[str, dict[str, Any]]]:
  """Runs rungs under ncu.

  Returns:
    By label, the kernels as `parse` gives them, and what the child said. A
    rung that could not run is not among the kernels.

  Raises:
    RuntimeError: ncu failed or saw no kernel; its last words are in the
      message.
  """
  child = [sys.executable, "-m", "experiments.counters", "--child"]
  child += [f"--kernels={','.join(rung.label for rung in rungs)}"]
  child += [f"--shapes={shape}", f"--seed={cli.SEED.value}"]
  child += [f"--dtype={cli.DTYPE.value}"] if cli.DTYPE.value else []
  # Kernels inside a CUDA graph would be profiled as one.
  xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
  try:
    done = subprocess.run(
      command(_NCU.value, asked, rungs, child),
      capture_output=True,
      text=True,
      timeout=_TIMEOUT.value,
      cwd=pathlib.Path(__file__).resolve().parents[1],
      env=os.environ | {"XLA_FLAGS": xla.strip()},
      check=False,
    )
  except subprocess.TimeoutExpired:
    raise RuntimeError(f"ncu took over {_TIMEOUT.value} s") from None
  kernels, said = by_label(parse(done.stdout), rungs), heard(done.stdout)
  if not kernels and not any("error" in word for word in said.values()):
    text = f"{done.stdout}\n{done.stderr}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = [line for line in lines if "==ERROR==" in line] or lines[-3:]
    raise RuntimeError(f"ncu saw no kernel: {' | '.join(words)}")
  return kernels, said


def by_label(
  kernels: Sequence[dict[str, float | str]], rungs: Sequence[contract.Rung]
) -> dict[str, dict[str, float | str]]:
  """Kernels by the rung whose name theirs begins with.

  One rung's name may begin with another's: the longer one is meant.
  """
  found = {}
  for kernel in kernels:
    name = str(kernel["Kernel Name"])
    owners = [rung for rung in rungs if name.startswith(rung.name)]
    if owners:
      found[max(owners, key=lambda rung: len(rung.name)).label] = kernel
  return found


def heard(output: str) -> dict[str, dict[str, Any]]:
  """By label, what the child printed of rungs between ncu's lines."""
  found = {}
  for line in output.splitlines():
    try:
      said = json.loads(line)
    except ValueError:
      continue
    if isinstance(said, dict) and "label" in said:
      found[said.pop("label")] = said
  return found


def child() -> int:
  """Runs each rung once, to be counted; prints what ncu can't tell of it."""
  [shape] = cli.parse_shapes(cli.SHAPES.value)
  for rung in taking(cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER)):
    said: dict[str, Any] = {"label": rung.label}
    try:
      with compiled.capture() as found:
        run_once(rung, problem_of(rung, shape))
      said |= {k: v for k, v in found.items() if k == "spill_bytes"}
    except Exception as error:  # pylint: disable=broad-exception-caught
      said["error"] = case_lib.first_line(error)
    print(json.dumps(said), flush=True)
  return 0


def run_once(rung: contract.Rung, problem: contract.Problem) -> None:
  """One call of a rung on random operands."""
  # Drawn on the host: on the device that would launch kernels of its own.
  rng = np.random.default_rng(cli.SEED.value)
  a, b = (
    jax.device_put(
      rng.standard_normal(size, np.float32).astype(jnp.dtype(problem.dtype))
    )
    for size in ((problem.m, problem.k), (problem.k, problem.n))
  )
  jax.block_until_ready(jax.jit(rung.gemm)(a, b))


def taking(rungs: Sequence[contract.Rung]) -> list[contract.Rung]:
  """The rungs that take the dtype of the flags; all if there is none."""
  wanted = cli.DTYPE.value
  return [rung for rung in rungs if wanted is None or wanted in rung.dtypes]


def problem_of(rung: contract.Rung, shape: suites.Shape) -> contract.Problem:
  """The product of that shape in the dtype of the flags, or the rung's."""
  return contract.Problem(*shape, cli.DTYPE.value or rung.dtypes[0])


def make_row(
  rung: contract.Rung,
  problem: contract.Problem,
  kernel: Mapping[str, float | str],
  gpu: hardware.Gpu,
  said: Mapping[str, Any],
) -> dict[str, Any]:
  """The row of a rung: counts, the model's numbers, ratios, explanations."""
  counted = read(kernel, COUNTERS)
  model = predicted(modelled.of_rung(rung, problem, gpu))
  ratios, reasons = compare(rung.name, counted, model)
  shape = suites.Shape(problem.m, problem.n, problem.k)
  if shape not in suites.suite("ladder"):
    reasons = dict.fromkeys(reasons)  # Seen at other shapes, not at this one.
  return {
    "experiment": EXPERIMENT,
    "kernel": rung.name,
    "number": rung.number,
    **({"variant": rung.variant} if rung.variant else {}),
    **dataclasses.asdict(problem),
    "config": dataclasses.asdict(rung.default_config(problem)),
    "kernel_name": kernel.get("Kernel Name"),
    "measured": counted,
    "stalls": read(kernel, STALLS),
    "occupancy": {**said, **occupancy(kernel)},
    "model": model,
    "ratio": ratios,
    "explanation": reasons,
    "seed": cli.SEED.value,
    **provenance.versions(),
    "utc": provenance.utc(),
  }


def show(console: console_lib.Console, row: Mapping[str, Any]) -> None:
  """A rung's counts, in lines."""
  label = counter_tables.label(row)
  console.line(f"{label:>3} {row['kernel']} ({row['kernel_name']})")
  for name, value in row["measured"].items():
    text = f"   {name:<28} {value:>14,.6g}"
    if name in row["model"]:
      ratio = row["ratio"][name]
      text += f"   model {row['model'][name]:>14,.6g}"
      text += "" if ratio is None else f"   ratio {ratio:.2f}"
    console.line(text)
    if name in row["explanation"]:
      console.line(f"     {row['explanation'][name] or 'not explained yet'}")
  for field in ("stalls", "occupancy"):
    parts = [
      f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
      for name, value in row[field].items()
      if value
    ]
    console.line(f"   {field}: {', '.join(parts)}")


def unexplained(row: Mapping[str, Any]) -> list[str]:
  """A line for each count that is off and not explained."""
  return [
    f"{counter_tables.label(row)} {row['kernel']}, {name}:"
    f" {row['ratio'][name] if row['ratio'][name] is not None else 'inf'}"
    f" of the model at {tables.shape(row)} {row['dtype']}"
    for name, reason in row["explanation"].items()
    if reason is None
  ]


def measure(console: console_lib.Console) -> int:
  """Counts the rungs of the flags; returns the exit status."""
  rungs = taking(cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER))
  if not rungs:
    raise cli.FlagError(f"--dtype: no such rung takes {cli.DTYPE.value}")
  shapes = cli.parse_shapes(cli.SHAPES.value) or suites.suite("ladder")
  if shutil.which(_NCU.value) is None:
    raise cli.FlagError(
      f"--ncu: there is no {_NCU.value}; counters need Nsight Compute"
    )
  # This process asks for the device's name alone: the memory is the child's.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  gpu = gpu_of_flags()
  path = rows_lib.results_file(
    provenance.device_name(), EXPERIMENT, cli.OUTPUT_DIR.value
  )
  asked = metrics(known_metrics(_NCU.value))
  for name, counter in (COUNTERS | STALLS | OCCUPANCY).items():
    if not set(counter.names) & set(asked):
      console.line(f"{name}: this GPU has none of {', '.join(counter.names)}")
  rows, failures = [], []
  with console.progress(len(shapes)):
    for shape in shapes:
      console.doing(f"{len(rungs)} rungs, {shape}")
      found = one_shape(console, rungs, shape, asked, gpu)
      failures += [rung.name for rung in rungs if rung.label not in found]
      for row in found.values():
        rows_lib.append(path, row)
        show(console, row)
      rows += found.values()
      console.step()
  if rows:
    console.line(f"rows: {path}")
  if lines := [line for row in rows for line in unexplained(row)]:
    console.line(f"off by more than {TOLERANCE:.0%} and not explained:")
    for line in lines:
      console.line(f"  {line}")
  if failures:
    console.line(f"not counted: {', '.join(failures)}", bad=True)
  return 1 if failures else 0


def gpu_of_flags() -> hardware.Gpu:
  """The GPU that the model describes.

  Raises:
    cli.FlagError: none is known by that name.
  """
  try:
    name = cli.GPU.value
    return hardware.lookup(name) if name else hardware.current()
  except ValueError as error:
    raise cli.FlagError(f"--gpu: {error}") from None


def one_shape(
  console: console_lib.Console,
  rungs: Sequence[contract.Rung],
  shape: suites.Shape,
  asked: Sequence[str],
  gpu: hardware.Gpu,
) -> dict[str, dict[str, Any]]:
  """Rows by label; prints why a rung has none."""
  try:
    kernels, said = count(rungs, shape, asked)
  except RuntimeError as error:
    console.line(f"{shape}: {error}", bad=True)
    return {}
  rows = {}
  for rung in rungs:
    word = said.get(rung.label, {})
    if rung.label in kernels and "error" not in word:
      kernel, problem = kernels[rung.label], problem_of(rung, shape)
      rows[rung.label] = make_row(rung, problem, kernel, gpu, word)
    else:
      reason = word.get("error", "ncu saw no kernel of that name")
      console.line(f"{rung.label:>3} {rung.name}: {reason}", bad=True)
  return rows


def from_rows(console: console_lib.Console) -> int:
  """Tables and plots of rows counted before; the exit status.

  Raises:
    cli.FlagError: there are no rows, or no page to write to.
  """
  page = pathlib.Path(cli.README_FILE.value or PAGE)
  parts = []
  for path in files():
    rows = counter_tables.newest(read_rows(path))
    folder = pathlib.Path(cli.OUTPUT_DIR.value or path.parent)
    if cli.PLOT.value:
      draws = counter_plots.FIGURES.items()
      figures = {name: functools.partial(draw, rows) for name, draw in draws}
      report.draw(console, folder, figures)
    parts.append(counter_tables.markdown(rows, links(folder, page)))
  text = "\n\n".join(parts)
  if not cli.UPDATE_README.value:
    console.line(text)
    return 0
  try:
    changed = tables.update_file(page, EXPERIMENT, text)
  except (OSError, ValueError) as error:
    raise cli.FlagError(f"--update_readme: {error}") from None
  console.line(f"{'rewrote' if changed else 'nothing new for'} {page}")
  return 0


def files() -> list[pathlib.Path]:
  """The files of rows that the flags mean: one, or that of each device.

  Raises:
    cli.FlagError: no device has one.
  """
  if cli.FROM_ROWS.value:
    return [pathlib.Path(cli.FROM_ROWS.value)]
  name = f"{EXPERIMENT}.jsonl"
  if cli.OUTPUT_DIR.value:
    return [pathlib.Path(cli.OUTPUT_DIR.value, name)]
  found = sorted(rows_lib.RESULTS.glob(f"*/{name}"))
  if not found:
    raise cli.FlagError(f"--update_readme: no */{name} in {rows_lib.RESULTS}")
  return found


def links(folder: pathlib.Path, page: pathlib.Path) -> dict[str, pathlib.Path]:
  """Where the page finds the figures that lie beside it or below it."""
  root = page.resolve().parent
  there = {name: (folder / name).resolve() for name in counter_plots.FIGURES}
  return {
    name: figure.relative_to(root)
    for name, figure in there.items()
    if figure.exists() and figure.is_relative_to(root)
  }


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a file.

  Raises:
    cli.FlagError: there is none, or it holds no rows of this program.
  """
  try:
    rows = rows_lib.read(path)
  except OSError as error:
    raise cli.FlagError(f"can't read {path}: {error.strerror}") from None
  found = [row for row in rows if row.get("experiment") == EXPERIMENT]
  if not found:
    raise cli.FlagError(f"no rows of counters in {path}; count on a GPU first")
  return found


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if _CHILD.value:
    return child()
  console = console_lib.Console()
  if cli.FROM_ROWS.value or cli.UPDATE_README.value:
    return from_rows(console)
  return measure(console)


if __name__ == "__main__":
  cli.run(main)
