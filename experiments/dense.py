"""Compares the dense ops with what a JAX user writes without them.

  python -m experiments.dense                       a short list, under a minute
  python -m experiments.dense --suite=all           every suite, some minutes
  python -m experiments.dense --suite=square,epilogues --dtype=float16
  python -m experiments.dense --shapes=4096x8192x4096 --tuned
  python -m experiments.dense --update_readme       README from measured rows

A case is one expression on one shape. Under jax.jit it is computed by
pallas_gemm with the config that it picks by itself, and by the same expression
in jax.numpy. The first result is checked against float64 on sampled rows and
columns; then both are timed in turns (CUPTI, every kernel that a call
launches, cold L2). One line a case is printed as the run goes:

  implementation, time, TFLOP/s, GB/s (operands and result once), speed
  relative to jax.numpy, PASSED or FAILED, and the largest error beside the
  bound that correct arithmetic obeys.

With --suite=all or --suite=latency it also takes what the host waits for: the
first call of a new shape, a call outside jit, and the choice of a config. A
copy and a sum of 1 GiB tell the memory rate of this GPU, for the rows of small
batches.

Rows go to experiments/results/<device>/dense.jsonl as they are measured, so an
interrupted run keeps what it finished. Without an NVIDIA GPU a few tiny cases
are checked, and timed by the host's clock, which says nothing of a GPU.

Exit status: 0; 1 if a case FAILED or could not run; 2 for a command that can't
be carried out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import pathlib
from typing import Any

from absl import flags, logging

from experiments.harness import bench as bench_lib
from experiments.harness import (
  cli,
  contestants,
  dense_bench,
  dense_cases,
  dense_latency,
  dense_plots,
  dense_tables,
  provenance,
  report,
  tables,
  timing,
)
from experiments.harness import console as console_lib
from experiments.harness import rows as rows_lib
from pallas_gemm import compat, hardware

EXPERIMENT = "dense"
# Without a GPU: what is small enough to be interpreted.
_ON_HOST = ("interpret", dense_latency.SUITE)
_NAMES = (*dense_cases.NAMES, dense_latency.SUITE)

for _name in ("shapes", "dtype", "seed", "output_dir", *cli.TIMED):
  flags.declare_key_flag(_name)
_SUITE = flags.DEFINE_list(
  "suite",
  [],
  f"What to measure, separated by commas: {', '.join(_NAMES)}. Default, with"
  " no --shapes either: quick on a GPU, interpret without.",
)
_TUNED = flags.DEFINE_bool(
  "tuned",
  False,
  "Also measure each case with the fastest of the configs that"
  " pallas_gemm.autotune tries: seconds more a case. The measured configs are"
  " not remembered.",
)
_IMPLEMENTATION = flags.DEFINE_enum(
  "implementation",
  None,
  ("sm90", "triton", "xla"),
  "Passed to the ops. Default: they choose.",
)
# Given any of these, --update_readme follows a measurement.
_MEASURING = (
    "suite", "shapes", "dtype", "seed", "warmup", "repeats", "tuned",
    "implementation",
)  # fmt: skip


@dataclasses.dataclass
class Dense:
  """A run: how it measures, and the rows it has so far."""

  console: console_lib.Console
  bench: dense_bench.DenseBench
  path: pathlib.Path
  interrupt: console_lib.Interrupt
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  failures: list[str] = dataclasses.field(default_factory=list)

  def cases(self, cases: Sequence[dense_cases.Case]) -> None:
    """Measures cases, those of a suite compiled together."""
    for name, suite in itertools.groupby(cases, lambda case: case.suite):
      suite = list(suite)
      self.console.doing(f"{name}: compiling {len(suite)} cases")
      prepared = dense_bench.prepare(suite, self.bench.implementation)
      for case in prepared:
        self._case(case)
        self.console.step()

  def _case(self, prepared: dense_bench.Prepared) -> None:
    fields = prepared.case.fields()
    name = f"{fields['suite']} {dense_tables.label(fields)} {fields['dtype']}"
    self.console.doing(name)
    found = self._guarded(name, lambda: self.bench.measure(prepared))
    if found is None:
      return
    self._keep(found)
    parts = [
      f"{name:<46}",
      *dense_tables.measured_parts(found),
      f"{tables.verdict(found)} error / bound {tables.of_bound(found)}",
    ]
    failed = found["passed"] is False
    if failed:
      self.failures.append(name)
    self.console.line("  ".join(parts), bad=failed)

  def host_rows(self, name: str, measure: Callable[[], Any]) -> None:
    """Keeps and prints rows that compare no case; `measure` gives them."""

    def take() -> None:
      for row in measure():
        self._keep(row)
        self.console.line(f"{name} {dense_tables.host_line(row)}")

    self.console.doing(name)
    self._guarded(name, take)

  def _guarded(self, name: str, work: Callable[[], Any]) -> Any:
    """What `work` gives; None if it failed, with its reason in a line."""
    try:
      return work()
    except Exception as error:  # pylint: disable=broad-exception-caught
      if self.interrupt.pressed:  # inside a kernel Ctrl-C comes in disguise
        raise KeyboardInterrupt from None
      reason = contestants.first_line(error)
      self.failures.append(name)
      self.console.line(f"{name}  can't run here: {reason}", bad=True)
      return None

  def _keep(self, row: dict[str, Any]) -> None:
    rows_lib.append(self.path, row)
    self.rows.append(row)


def chosen(on_gpu: bool) -> tuple[list[dense_cases.Case], bool]:
  """The cases that the flags name, and whether latency is asked for.

  Raises:
    cli.FlagError: no such suite or shape, or not without a GPU.
  """
  dtype = cli.DTYPE.value or "bfloat16"
  if dtype == "float32":
    raise cli.FlagError("--dtype: the dense ops are compared in 16 bits")
  shapes = cli.parse_shapes(cli.SHAPES.value)
  names = list(dict.fromkeys(name.strip() for name in _SUITE.value))
  if not names and not shapes:
    names = ["quick" if on_gpu else "interpret"]
  large = [name for name in names if name not in _ON_HOST and name in _NAMES]
  if large and not on_gpu:
    raise cli.FlagError(
      f"--suite={','.join(large)}: too large without an NVIDIA GPU; there are"
      f" {', '.join(_ON_HOST)} and --shapes"
    )
  cases = dense_cases.plain(shapes, dtype)
  for name in names:
    if name == dense_latency.SUITE:
      continue
    try:
      cases += dense_cases.suite(name, dtype)
    except ValueError as error:
      raise cli.FlagError(f"--suite: {error}") from None
  # A suite that is named beside "all" is measured once.
  latency = "all" in names or dense_latency.SUITE in names
  return list(dict.fromkeys(cases)), latency


def run(console: console_lib.Console) -> int:
  """Measures what the flags say."""
  on_gpu = compat.targets_gpu()
  cases, latency = chosen(on_gpu)
  device = provenance.device_name()
  path = rows_lib.results_file(device, EXPERIMENT, cli.OUTPUT_DIR.value)
  bench = bench_lib.Bench(
    experiment=EXPERIMENT,
    seed=cli.SEED.value,
    warmup=cli.WARMUP.value,
    repeats=cli.REPEATS.value,
    timed=on_gpu,
    measure=timing.measure,
    flush=timing.l2_flush(hardware.current().l2_bytes) if on_gpu else None,
  )
  interrupt = console_lib.Interrupt()
  dense = Dense(
    console,
    dense_bench.DenseBench(
      bench, tuned=_TUNED.value, implementation=_IMPLEMENTATION.value
    ),
    path,
    interrupt,
  )
  if on_gpu:
    console.line(f"{device}; times are GPU kernel times, L2 flushed")
  else:
    console.line(
      f"No NVIDIA GPU here ({device}): results are checked; wall times are the"
      " host's and say nothing of a GPU"
    )
  interrupted = False
  try:
    with interrupt, console.progress(len(cases)):
      if on_gpu:
        dense.host_rows("bandwidth", dense.bench.measure_bandwidth)
      dense.cases(cases)
      if latency:
        dtype = cli.DTYPE.value or "bfloat16"
        dense.host_rows(
          dense_latency.SUITE, lambda: dense_latency.rows(dense.bench, dtype)
        )
  except KeyboardInterrupt:
    interrupted = True
  return _finish(dense, device, on_gpu, interrupted)


def _finish(dense: Dense, device: str, on_gpu: bool, interrupted: bool) -> int:
  """Table, plots, README; the exit status."""
  console = dense.console
  _print(console, f"The dense ops on {device}, relative to jnp", dense.rows)
  console.line(f"rows: {dense.path}")
  if interrupted:
    console.line(f"interrupted: {len(dense.rows)} finished rows were kept")
    return 130
  if on_gpu:
    show(console, rows_lib.read(dense.path), dense.path.parent)
  elif cli.UPDATE_README.value or cli.PLOT.value:
    console.line("no plots and no README table: nothing was timed on a GPU")
  if dense.failures:
    count, names = len(dense.failures), "; ".join(dense.failures)
    console.line(f"FAILED ({count}): {names}", bad=True)
    return 1
  return 0


def _print(console: console_lib.Console, title: str, rows) -> None:
  header, cells = dense_tables.summary(rows)
  console.line()
  console.table(title, header, cells, dense_tables.NUMERIC)


def show(
  console: console_lib.Console,
  rows: Sequence[dict[str, Any]],
  folder: pathlib.Path,
) -> None:
  """Plots and README tables, as the flags say, of one device's rows."""
  latest = rows_lib.latest(rows)
  if not dense_tables.compared(latest):
    raise cli.FlagError(f"no timed rows in {folder}; measure on a GPU first")
  figures = {
    "dense.png": lambda path: dense_plots.ratios(latest, path),
    "dense_small_m.png": lambda path: dense_plots.small_m(latest, path),
  }
  if cli.PLOT.value:
    report.draw(console, folder, figures)
  if cli.UPDATE_README.value:
    report.update_readme(
      console,
      EXPERIMENT,
      dense_tables.markdown(latest),
      [folder / name for name in figures],
    )


def from_rows(console: console_lib.Console) -> int:
  """Table, plots and README from rows measured before."""
  path, folder, rows = report.measured_before(EXPERIMENT)
  _print(console, f"Rows of {path}", rows_lib.latest(rows))
  show(console, rows, folder)
  return 0


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if not flags.FLAGS["verbosity"].present:
    # Each line says which implementation ran; the ops log it too.
    logging.set_verbosity(logging.WARNING)
  console = console_lib.Console()
  measuring = any(flags.FLAGS[name].present for name in _MEASURING)
  if cli.FROM_ROWS.value or (cli.UPDATE_README.value and not measuring):
    return from_rows(console)
  return run(console)


if __name__ == "__main__":
  cli.run(main)
