"""Compares the dense ops with what a JAX user writes without them.

  python -m experiments.dense                       a short list, under a minute
  python -m experiments.dense --suite=all           every suite, some minutes
  python -m experiments.dense --suite=square,epilogues --dtype=float16
  python -m experiments.dense --shapes=4096x8192x4096 --tuned
  python -m experiments.dense --unseen=60           random problems, by --seed
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

Rows go to experiments/results/<device>/dense.jsonl as they are measured, those
of random problems to dense_unseen.jsonl beside it, so an interrupted run keeps
what it finished. Without an NVIDIA GPU a few tiny cases are checked, and timed
by the host's clock, which says nothing of a GPU.

Exit status: 0; 1 if a case FAILED or could not run; 2 for a command that can't
be carried out; 130 after Ctrl-C.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os
import tempfile
from typing import Any

from absl import flags
import jax

from experiments.harness import (
  cli,
  dense_cases,
  dense_latency,
  dense_plots,
  dense_tables,
  prepared,
)
from experiments.harness import console as console_lib
from experiments.harness import report as report_lib
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib
from experiments.harness.case import Candidate
from pallas_gemm import compat
from pallas_gemm.tuning import autotune, cache

EXPERIMENT = "dense"
REPORT = report_lib.Report(
  experiment=EXPERIMENT,
  summary=dense_tables.summary,
  timed=dense_tables.compared,
  markdown=dense_tables.markdown,
  figures={
    "dense.png": dense_plots.ratios,
    "dense_small_m.png": dense_plots.small_m,
  },
)
# Random problems: no README section.
UNSEEN = dataclasses.replace(
  REPORT,
  experiment="dense_unseen",
  figures={"dense_unseen.png": dense_plots.ratios},
)
_NAMES = (*dense_cases.NAMES, dense_latency.SUITE)

for _name in ("shapes", "dtype", "seed", "output_dir", *cli.TIMED):
  flags.declare_key_flag(_name)
_SUITE = flags.DEFINE_list(
  "suite",
  [],
  f"What to measure, separated by commas: {', '.join(_NAMES)}. Default, with"
  " no --shapes either: quick on a GPU, interpret without.",
)
_UNSEEN = flags.DEFINE_integer(
  "unseen",
  0,
  "Measure as many problems that are drawn at random by --seed instead: layers"
  " of models, odd sizes, batches, short sums, gated and square products.",
  lower_bound=0,
)
_TUNED = flags.DEFINE_bool(
  "tuned",
  False,
  "Also measure each case, on a GPU, with what pallas_gemm.autotune finds"
  " fastest, a config or XLA: seconds more a case. It is not remembered.",
)
_IMPLEMENTATION = flags.DEFINE_enum(
  "implementation",
  None,
  ("sm90", "triton", "xla"),
  "Passed to the ops. Default: they choose.",
)
# Given any of these, --update_readme follows a measurement.
_MEASURING = (
    "suite", "shapes", "unseen", "dtype", "seed", "warmup", "repeats", "tuned",
    "implementation",
)  # fmt: skip


def chosen(on_gpu: bool) -> tuple[list[dense_cases.Case], bool]:
  """The cases that the flags name, and whether latency is asked for.

  Raises:
    cli.FlagError: no such suite or shape, or not without a GPU.
  """
  dtype, shapes = (
    cli.DTYPE.value or "bfloat16",
    cli.parse_shapes(cli.SHAPES.value),
  )
  names = [name.strip() for name in _SUITE.value]
  if _UNSEEN.value:
    _check_unseen(on_gpu, bool(names or shapes))
    drawn = dense_cases.draw(cli.SEED.value, _UNSEEN.value, dtype)
    return list(dict.fromkeys(drawn)), False
  if not names and not shapes:
    names = ["quick" if on_gpu else "interpret"]
  cases = dense_cases.plain(shapes, dtype)
  cases += cli.parse_suites(
    [name for name in names if name != dense_latency.SUITE],
    dense_cases.suite,
    None if on_gpu else ("interpret", dense_latency.SUITE),
  )
  # A suite that is named beside "all" is measured once.
  latency = "all" in names or dense_latency.SUITE in names
  return list(dict.fromkeys(cases)), latency


def _check_unseen(on_gpu: bool, others: bool) -> None:
  """Whether --unseen can be carried out.

  Raises:
    cli.FlagError: it can't.
  """
  if not on_gpu:
    raise cli.FlagError("--unseen: too large without an NVIDIA GPU")
  if others:
    raise cli.FlagError("--unseen: goes with no --suite and no --shapes")
  if cli.UPDATE_README.value:
    raise cli.FlagError("--update_readme: has no section for --unseen")


def measure(bench: run_lib.Bench, case: prepared.Prepared) -> dict[str, Any]:
  """The row of a case.

  Raises:
    Exception: what kept the op or its baseline from being compiled or run.
  """
  if _TUNED.value and bench.timed and (arm := tuned(case.case)):
    arms = dict(case.arms) | {dense_cases.TUNED: [arm]}
    case = dataclasses.replace(case, arms=arms)
  return bench.measure(case)


def tuned(case: dense_cases.Case) -> Candidate | None:
  """A case with what `autotune` finds fastest, and then forgets.

  Its config is None where that is XLA. None if there is nothing to tune.
  """
  operands = case.operands()
  fn = dense_cases.ours(case, _IMPLEMENTATION.value)
  if prepared.config_of(fn, operands)[0] is None:
    return None
  before = os.environ.get(cache.FOLDER_VARIABLE)
  with tempfile.TemporaryDirectory() as folder:
    os.environ[cache.FOLDER_VARIABLE] = folder
    cache.clear()
    try:
      autotune.autotune(fn, **operands)
      lowered = jax.jit(fn).lower(**operands)
      compiled, config = lowered.compile(), None
      if prepared.runs_kernel(lowered.as_text()):
        config, _ = prepared.config_of(fn, operands)
    finally:
      del os.environ[cache.FOLDER_VARIABLE]
      if before is not None:
        os.environ[cache.FOLDER_VARIABLE] = before
      cache.clear()
  return Candidate(lambda: compiled, config)


def run(console: console_lib.Console) -> int:
  """Measures what the flags say."""
  on_gpu, report, how = compat.targets_gpu(), _report(), _IMPLEMENTATION.value
  cases, latency = chosen(on_gpu)
  session = session_lib.start(console, report.experiment, on_gpu)
  bench = session_lib.bench(report.experiment, on_gpu)
  line = dense_tables.host_line
  with session.measuring(len(cases)):
    if on_gpu:
      session.host_rows("bandwidth", bench.measure_bandwidth, line)
    session.suites(
      cases,
      functools.partial(prepared.prepare, implementation=how),
      functools.partial(measure, bench),
      dense_tables.label,
      dense_tables.measured_parts,
    )
    if latency:
      dtype = cli.DTYPE.value or "bfloat16"
      rows = functools.partial(dense_latency.rows, bench, dtype, how)
      session.host_rows(dense_latency.SUITE, rows, line)
  title = f"The dense ops on {session.device}, relative to jnp"
  report.table(console, title, session.rows)
  folder = session.path.parent
  return session.finish(lambda rows: report.show(console, rows, folder))


def _report() -> report_lib.Report:
  return UNSEEN if _UNSEEN.value else REPORT


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  return session_lib.main(_MEASURING, run, _report().from_rows)


if __name__ == "__main__":
  cli.run(main)
