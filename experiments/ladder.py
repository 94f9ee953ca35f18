"""Runs the ladder of twelve GEMM kernels and compares it with jnp.dot.

  python -m experiments.ladder                      the whole ladder, 4096^3
  python -m experiments.ladder --kernels=1-8        the fp32 rungs
  python -m experiments.ladder --kernels=7,12 --sizes=1024,4096
  python -m experiments.ladder --kernels=8,8a       a rung and its variant
  python -m experiments.ladder --sweep              sizes from 128 to 8192
  python -m experiments.ladder --explain=7          what rung 7 is about
  python -m experiments.ladder --diff=6,7           what rung 7 changes of 6
  python -m experiments.ladder --update_readme      pages of measured rows

Every kernel is first checked against a float64 product, then timed on the GPU
(CUPTI, every kernel that a call launches, cold L2) in turns with jnp.dot: in
precision HIGHEST, which is exact fp32, for rungs 1-8; in 16 bits for 9-12.
One line a kernel is printed as the run goes:

  time (w: untimed calls, r: timed calls), TFLOP/s, GB/s, speed relative to
  jnp.dot and to the rung before (of a variant, to the rung it belongs to),
  PASSED or FAILED, and the largest error beside the bound that correct
  arithmetic obeys.

Rows go to experiments/results/<device>/ladder.jsonl as they are measured, so
an interrupted run keeps what it finished (--resume goes on from there); those
of --sweep to sweep.jsonl there. On a machine without an NVIDIA GPU the kernels
run in Pallas' GPU interpreter on a small problem: they are checked, their
traffic is modelled, nothing is timed.

Exit status: 0; 1 if a kernel FAILED or could not run; 2 for a command that
can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Sequence
import dataclasses
import math
import pathlib
import time
from typing import Any

from absl import flags
import jax

from experiments.harness import bench as bench_lib
from experiments.harness import (
  cli,
  code_diff,
  compiled,
  contestants,
  inputs,
  ladder_pages,
  ladder_tables,
  modelled,
  provenance,
  suites,
  tables,
  timing,
)
from experiments.harness import console as console_lib
from experiments.harness import rows as rows_lib
from pallas_gemm import compat, hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract

EXPERIMENT, SWEEP = ladder_pages.EXPERIMENT, ladder_pages.SWEEP
# Of the sweep: by the model a call takes longer than this, in seconds, so it is
# left out; or so long that fewer calls have to do.
DOES_NOT_FIT_S, LONG_S, LONG_REPEATS = 1.0, 0.1, 5

for _name in cli.COMMON + cli.TIMED:
  flags.declare_key_flag(_name)
_SIZES = flags.DEFINE_list(
  "sizes",
  [],
  "Square products M = N = K, separated by commas: --sizes=128,1024,4096."
  " Default, with no --shapes either: 4096 on a GPU, 48x40x24 without.",
)
_ALPHA = flags.DEFINE_float("alpha", 1.0, "Factor of A@B.")
_BETA = flags.DEFINE_float(
  "beta", 0.0, "Factor of C; C is not read if it is 0."
)
_PEERS = flags.DEFINE_bool(
  "peers",
  True,
  "Also measure matmuls from elsewhere: Triton through jax-triton, and JAX's"
  " own Hopper kernel. One that can't run here is named with its reason.",
)
_RESUME = flags.DEFINE_bool(
  "resume",
  False,
  "Skip what the results file already holds from this commit, device and"
  " JAX, with the same seed and number of calls, and passed.",
)
_SWEEP = flags.DEFINE_bool(
  "sweep",
  False,
  f"Squares of {', '.join(str(size.m) for size in suites.suite('sweep'))}, or"
  " of --sizes, without peers. Leaves out a kernel where the traffic model says"
  f" that a call takes over {DOES_NOT_FIT_S:g} s, and times it"
  f" {LONG_REPEATS} times where it says over {LONG_S:g} s.",
)
_EXPLAIN = flags.DEFINE_string(
  "explain",
  None,
  "Print a rung's page, by number or name (8a is a variant), and for --shapes"
  " or --sizes and --gpu its grid and blocks, the traffic model's numbers, and"
  " what the kernel compiles to; measure nothing.",
)
_DIFF = flags.DEFINE_string(
  "diff",
  None,
  "Print what changes in the code from one rung to another, without docstrings"
  " and comments: --diff=6,7, --diff=7,8a; measure nothing.",
)
# Given any of these, --update_readme follows a measurement.
_MEASURING = (
    "kernels", "shapes", "sizes", "dtype", "alpha", "beta", "seed", "warmup",
    "repeats", "peers", "resume", "sweep",
)  # fmt: skip


@dataclasses.dataclass
class Ladder:
  """A run: what it measures, and the rows it has so far.

  Attributes:
    sweep: whether kernels that take too long are left out.
  """

  console: console_lib.Console
  bench: bench_lib.Bench
  path: pathlib.Path
  gpu: hardware.Gpu
  interrupt: console_lib.Interrupt
  sweep: bool = False
  earlier: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  failures: list[str] = dataclasses.field(default_factory=list)

  def problem(
    self,
    problem: contract.Problem,
    rungs: Sequence[contract.Rung],
    peers: bool,
  ) -> None:
    """Measures baselines, rungs and peers on one problem."""
    try:
      operands = inputs.operands(problem, self.bench.seed)
    except Exception as error:  # pylint: disable=broad-exception-caught
      reason = contestants.first_line(error)  # most likely out of memory
      self.console.line(f"{_size(problem)}  can't run: {reason}", bad=True)
      self.failures.append(_size(problem))
      return
    baselines = contestants.baselines(problem)
    yardstick = baselines[0]

    def one(name: str, build, **kind) -> None:
      self.console.doing(f"{name} {_size(problem)}")
      self._one(problem, operands, name, build, yardstick, **kind)
      self.console.step()

    if self.bench.timed:
      for baseline in baselines:
        one(baseline.kernel, lambda b=baseline: b)
    for rung in rungs:
      one(rung.name, lambda r=rung: contestants.rung(r, problem), rung=rung)
    if peers and self.bench.timed:
      for name, build in contestants.PEERS.items():
        one(
          name,
          lambda f=build: f(problem, operands, self.bench.chooses),
          peer=True,
        )

  def _one(
    self, problem, operands, name, build, yardstick, rung=None, peer=False
  ) -> None:
    """Measures one contestant: its line, its row, or why there is none."""
    number = rung.number if rung else None
    label = f"{rung.label if rung else '':>3} {name:<26} {_size(problem)}"
    bench = self.bench
    if rung is not None and self.sweep:
      least_s = modelled.of_rung(rung, problem, self.gpu).floor.seconds
      if least_s > DOES_NOT_FIT_S:
        least = tables.duration(1e3 * least_s)
        self.console.line(f"{label}  does not fit: at least {least} (model)")
        return
      if least_s > LONG_S:
        bench = dataclasses.replace(bench, repeats=LONG_REPEATS)
    if kept := self._kept(name, problem, bench.repeats):
      self.rows.append(kept)
      self.console.line(f"{label}  kept from {kept['utc']}")
      return
    start = time.perf_counter()
    try:
      contestant = build()
      row = bench.compare(
        problem,
        operands,
        contestant,
        yardstick,
        number,
        optional=resources(contestant, rung, operands),
      )
    except Exception as error:  # pylint: disable=broad-exception-caught
      if self.interrupt.pressed:  # inside a kernel Ctrl-C comes in disguise
        raise KeyboardInterrupt from None
      # A kernel that can't run must not cost the rows of the others; only a
      # peer is allowed not to.
      reason = contestants.reason(error)
      if not peer:
        self.failures.append(name)
      self.console.line(f"{label}  can't run here: {reason}", bad=not peer)
      return
    rows_lib.append(self.path, row)
    self.rows.append(row)
    failed = row["passed"] is False
    if failed:
      self.failures.append(name)
    parts = [label]
    if row["ms_median"] is not None:
      parts += measured_parts(row, self.rows)
    elif not self.bench.timed:
      parts.append(f"interpreted in {time.perf_counter() - start:.1f} s")
    parts.append(
      f"{tables.verdict(row)} error {_number(row['max_error'])}, bound"
      f" {_number(row['error_bound'])}"
    )
    self.console.line("  ".join(parts), bad=failed)
    if rung is not None and not self.bench.timed:
      self.console.line(f"   {modelled.line(rung, problem, self.gpu)}")

  def _kept(
    self, kernel: str, problem: contract.Problem, repeats: int
  ) -> dict[str, Any] | None:
    """The row that `--resume` need not measure again."""
    versions = provenance.versions()
    same = dataclasses.asdict(problem) | {
      "kernel": kernel,
      "seed": self.bench.seed,
      **{f: versions[f] for f in ("device", "jax", "jaxlib", "commit")},
    }
    if self.bench.timed:
      same |= {"warmup": self.bench.warmup, "repeats": repeats}
    row = rows_lib.find(self.earlier, **same)
    return None if row is None or row["passed"] is False else row


def resources(
  contestant: contestants.Contestant,
  rung: contract.Rung | None,
  operands: contestants.Operands,
) -> dict[str, Any]:
  """Optional fields of a rung's row: its variant, and what it compiles to.

  On a GPU it makes the contestant's first call, which compiles the kernel.
  """
  if rung is None:
    return {}
  found: dict[str, Any] = {"variant": rung.variant or None}
  if compat.targets_gpu():
    with compiled.capture() as facts:
      jax.block_until_ready(contestant.fn(*operands))
    found |= facts
  return found


def measured_parts(
  row: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> list[str]:
  """The times of a row, as parts of its line."""
  time_part = (
    f"{tables.duration(row['ms_median']):>8}"
    f" (w:{row['warmup']} r:{row['repeats']})"
  )
  parts = [
    time_part,
    f"{tables.rate(row['tflops']):>5} TFLOP/s",
    f"{tables.rate(row['gbytes_per_s']):>5} GB/s",
    f"{tables.factor(row['ratio_to_jnp_dot']):>6} of jnp.dot",
  ]
  before = ladder_tables.relative(rows)["x before"](row)
  if before != tables.EMPTY:
    rung = row["number"] - (0 if row.get("variant") else 1)
    parts.append(f"{before:>6} of rung {rung}")
  if (wall := row.get("wall_ms_median")) is not None:
    parts.append(f"wall {tables.duration(wall)}")
  return parts


def _size(problem: contract.Problem) -> str:
  p = problem
  return f"{p.m}x{p.n}x{p.k} {p.dtype}"


def _number(x: float | None) -> str:
  return "not finite" if x is None else f"{x:.2e}"


def by_dtype(
  rungs: Sequence[contract.Rung], dtype: str | None
) -> dict[str, list[contract.Rung]]:
  """Rungs by the dtype they run in; those that don't take `dtype` are out."""
  found: dict[str, list[contract.Rung]] = {}
  for rung in rungs:
    if dtype is None or dtype in rung.dtypes:
      found.setdefault(dtype or rung.dtypes[0], []).append(rung)
  return found


def model_gpu() -> hardware.Gpu:
  """The GPU that the traffic model describes."""
  try:
    return (
      hardware.lookup(cli.GPU.value) if cli.GPU.value else hardware.current()
    )
  except ValueError as error:
    raise cli.FlagError(f"--gpu: {error}") from None


def explain(name: str, console: console_lib.Console) -> int:
  """Prints a rung's page and the model's numbers."""
  rungs = cli.parse_rungs(name, ladder_lib.LADDER)
  gpu = model_gpu()
  shapes = cli.parse_shapes(cli.SHAPES.value, _SIZES.value)
  for dtype, chosen in by_dtype(rungs, cli.DTYPE.value).items():
    for rung in chosen:
      console.line(modelled.page(rung))
      for shape in shapes or suites.suite("ladder"):
        problem = contract.Problem(
          *shape, dtype, alpha=_ALPHA.value, beta=_BETA.value
        )
        console.line(modelled.explain(rung, problem, gpu))
  return 0


def diff(text: str) -> int:
  """Prints what changes in the code from one rung to another."""
  names = [name.strip() for name in text.split(",")]
  if len(names) != 2:
    raise cli.FlagError(f"--diff: want two rungs, as in 6,7; got {text!r}")
  try:
    code_diff.show(*map(ladder_lib.find, names))
  except ValueError as error:
    raise cli.FlagError(f"--diff: {error}") from None
  return 0


def run(console: console_lib.Console) -> int:
  """Measures what the flags say."""
  rungs = cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER)
  groups = by_dtype(rungs, cli.DTYPE.value)
  if not groups:
    raise cli.FlagError(
      f"--dtype={cli.DTYPE.value}: none of the rungs of"
      f" --kernels={cli.KERNELS.value} takes it"
    )
  for flag in (_ALPHA, _BETA):
    if not math.isfinite(flag.value):
      raise cli.FlagError(f"--{flag.name}: want a number, got {flag.value}")
  on_gpu = compat.targets_gpu()
  shapes = cli.parse_shapes(cli.SHAPES.value, _SIZES.value)
  experiment = SWEEP if _SWEEP.value else EXPERIMENT
  shapes = shapes or suites.suite(experiment if on_gpu else "interpret")
  gpu = model_gpu()
  device = provenance.device_name()
  path = rows_lib.results_file(device, experiment, cli.OUTPUT_DIR.value)
  bench = bench_lib.Bench(
    experiment=experiment,
    seed=cli.SEED.value,
    warmup=cli.WARMUP.value,
    repeats=cli.REPEATS.value,
    timed=on_gpu,
    measure=timing.measure,
    flush=timing.l2_flush(hardware.current().l2_bytes) if on_gpu else None,
  )
  interrupt = console_lib.Interrupt()
  ladder = Ladder(console, bench, path, gpu, interrupt, _SWEEP.value)
  if _RESUME.value:
    ladder.earlier = rows_lib.read(path)
  if on_gpu:
    console.line(f"{device}; times are GPU kernel times, L2 flushed")
  else:
    console.line(
      f"No NVIDIA GPU here ({device}): the kernels run in Pallas' GPU"
      " interpreter. They are checked; interpreted times are not GPU times,"
      f" so no throughput is given. The traffic model is of the {gpu.name}."
    )
  kernels = sum(map(len, groups.values()))
  peers = _PEERS.value and not _SWEEP.value
  extra = 4 * len(groups) if on_gpu else 0
  interrupted = False
  try:
    with interrupt, console.progress((kernels + extra) * len(shapes)):
      for shape in shapes:
        for dtype, chosen in groups.items():
          problem = contract.Problem(
            *shape, dtype, alpha=_ALPHA.value, beta=_BETA.value
          )
          ladder.problem(problem, chosen, peers)
  except KeyboardInterrupt:
    interrupted = True
  ladder_pages.print_table(console, f"The ladder on {device}", ladder.rows)
  if ladder.rows:
    console.line(f"rows: {path}")
  if interrupted:
    console.line(
      f"interrupted: {len(ladder.rows)} finished rows were kept;"
      " --resume goes on from there"
    )
    return 130
  if on_gpu:
    everything = cli.UPDATE_README.value
    shown = ladder_pages.folders() if everything else [path.parent]
    ladder_pages.show(
      console, [ladder_pages.Device.read(folder) for folder in shown]
    )
  elif cli.UPDATE_README.value or cli.PLOT.value:
    console.line("no plots and no README table: nothing was timed")
  if ladder.failures:
    console.line(f"FAILED: {', '.join(ladder.failures)}", bad=True)
    return 1
  return 0


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  console = console_lib.Console()
  if _EXPLAIN.value is not None:
    return explain(_EXPLAIN.value, console)
  if _DIFF.value is not None:
    return diff(_DIFF.value)
  measuring = any(flags.FLAGS[name].present for name in _MEASURING)
  if cli.FROM_ROWS.value or (cli.UPDATE_README.value and not measuring):
    return ladder_pages.from_rows(console)
  return run(console)


if __name__ == "__main__":
  cli.run(main)
