"""Runs the ladder of twelve GEMM kernels and compares it with jnp.dot.

  python -m experiments.ladder                      the whole ladder, 4096^3
  python -m experiments.ladder --kernels=1-8        the fp32 rungs
  python -m experiments.ladder --kernels=7,12 --sizes=1024,4096
  python -m experiments.ladder --kernels=8,8a       a rung and its variant
  python -m experiments.ladder --sweep              sizes from 128 to 8192
  python -m experiments.ladder --explain=7          what rung 7 is about
  python -m experiments.ladder --explain=4 --config=block_m=128,block_k=16
  python -m experiments.ladder --diff=6,7           what rung 7 changes of 6

Every kernel is first checked against a float64 product, then timed on the GPU
(CUPTI, every kernel that a call launches, cold L2), interleaved with jnp.dot:
in precision HIGHEST, which is exact fp32, for rungs 1-8; in 16 bits for 9-12.
One line a kernel is printed as the run goes:

  time (w: untimed calls, r: timed calls), TFLOP/s, GB/s, speed relative to
  jnp.dot and to the rung before (of a variant, to the rung it belongs to),
  PASSED or FAILED, and the largest error as a part of the bound that correct
  arithmetic obeys.

Rows go to experiments/results/<device>/ladder.jsonl as they are measured, so
an interrupted run keeps what it finished; those of --sweep to sweep.jsonl
there, those of --config to configs.jsonl, which no page reads.
`python -m experiments.report` prints tables of them. On a machine without an
NVIDIA GPU the kernels run in Pallas' GPU interpreter on a small problem: they
are checked, their traffic is modelled, nothing is timed. A rung that
the GPU can't run is skipped, and a line says why.

Exit status: 0; 1 if a kernel FAILED or could not run; 2 for a command that
can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
import dataclasses
import functools
import math
from typing import Any

from absl import flags
import jax

from experiments.harness import (
  cli,
  compiled,
  ladder_cases,
  ladder_tables,
  rung_text,
  tables,
)
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib
from experiments.harness import shapes as shapes_lib
from experiments.harness.ladder_cases import LadderCase
from pallas_gemm import compat, hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract

EXPERIMENT, SWEEP, CONFIGS = "ladder", "sweep", "configs"
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
  " own Hopper kernel. One that can't run here, or that ran other kernels than"
  " its own, is named with its reason.",
)
_SWEEP = flags.DEFINE_bool(
  "sweep",
  False,
  f"Squares of {', '.join(str(x.m) for x in shapes_lib.suite('sweep'))}, or"
  " of --sizes, without peers. Leaves out a kernel where the traffic model says"
  f" that a call takes over {DOES_NOT_FIT_S:g} s, and times it"
  f" {LONG_REPEATS} times where it says over {LONG_S:g} s.",
)
_CONFIG = flags.DEFINE_list(
  "config",
  [],
  "Fields of the config in place of the default's, for --kernels and --explain:"
  " --config=block_m=4,block_n=4,block_k=4.",
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


def cases_of(
  problem: contract.Problem, rungs: Sequence[contract.Rung], on_gpu: bool
) -> Iterator[LadderCase]:
  """Baselines, rungs and peers on one problem."""
  if on_gpu:
    yield from ladder_cases.baselines(problem)
  for rung in rungs:
    yield ladder_cases.rung(rung, problem)
  if on_gpu and _PEERS.value and not _SWEEP.value:
    for name in ladder_cases.PEERS:
      yield ladder_cases.peer(name, problem)


def compare(
  case: LadderCase,
  session: session_lib.Session,
  bench: run_lib.Bench,
  gpu: hardware.Gpu,
) -> None:
  """Measures a case: its line, its row, or why there is none.

  Args:
    case: what is measured.
    session: prints and keeps.
    bench: how it is measured.
    gpu: that the traffic model describes.
  """
  p, rung = case.problem, case.rung
  size = f"{p.m}x{p.n}x{p.k} {p.dtype}"
  name = f"{rung.label if rung else '':>3} {case.kernel:<26} {size}"
  if rung is not None and (reason := _why_skipped(rung, p)):
    cli.say(f"{name}  skipped: {reason}")
    return
  if rung is not None and _SWEEP.value:
    least_s = rung_text.traffic_of(rung, p, gpu).floor.seconds
    if least_s > DOES_NOT_FIT_S:
      least = tables.duration(1e3 * least_s)
      cli.say(f"{name}  does not fit: at least {least} (model)")
      return
    if least_s > LONG_S:
      bench = dataclasses.replace(bench, repeats=LONG_REPEATS)
  session.case(
    name,
    functools.partial(measure, bench, case),
    lambda row: measured_parts(row, session.rows),
    may_fail=case.kernel in ladder_cases.PEERS,
  )
  if rung is not None and not bench.timed:
    cli.say(f"   {rung_text.traffic_line(rung, p, gpu)}")


def _why_skipped(rung: contract.Rung, problem: contract.Problem) -> str | None:
  """None, or why a rung can't run here with its default config."""
  return rung.lacks() or rung.is_legal(rung.default_config(problem), problem)


def measure(bench: run_lib.Bench, case: LadderCase) -> dict[str, Any]:
  """The row of a case; of a rung, with what its kernel takes.

  Raises:
    Exception: why it can't run here.
  """
  ready = run_lib.uncompiled(case)
  if case.rung is not None and bench.timed:
    operands = case.draw(bench.seed)
    with compiled.capture() as facts:
      [(fn, _)] = ready.arms[case.kernel]
      jax.block_until_ready(fn()(**operands))
    ready = dataclasses.replace(ready, facts=facts)
  return bench.measure(ready)


def measured_parts(
  row: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> list[str]:
  """The times of a row, as parts of its line."""
  if row["ms_median"] is None:
    return []
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


def by_dtype(
  rungs: Sequence[contract.Rung], dtype: str | None
) -> dict[str, list[contract.Rung]]:
  """Rungs by the dtype they run in; those that don't take `dtype` are out."""
  found: dict[str, list[contract.Rung]] = {}
  for rung in rungs:
    if dtype is None or dtype in rung.dtypes:
      found.setdefault(dtype or rung.dtypes[0], []).append(rung)
  return found


def problem_of(shape: shapes_lib.Shape, dtype: str) -> contract.Problem:
  """A product with the factors of the flags."""
  return contract.Problem(*shape, dtype, alpha=_ALPHA.value, beta=_BETA.value)


def rungs_of(flag: str, names: str) -> dict[str, list[contract.Rung]]:
  """The rungs that a flag names, by the dtype they run in.

  Raises:
    cli.FlagError: no rung has that name, or none takes the dtype.
  """
  ladder = ladder_lib.LADDER + ladder_lib.BLACKWELL * (names != "all")
  rungs = cli.parse_rungs(names, ladder, flag)
  if _CONFIG.value:
    rungs = [_with_config(rung) for rung in rungs]
  groups = by_dtype(rungs, cli.DTYPE.value)
  if not groups:
    raise cli.FlagError(
      f"--dtype={cli.DTYPE.value}: none of the rungs of --{flag}={names} takes"
      " it"
    )
  return groups


def _with_config(rung: contract.Rung) -> contract.Rung:
  """The rung, whose default config has the fields of --config."""
  fields: dict[str, Any] = {}
  for item in _CONFIG.value:
    name, _, value = item.partition("=")
    if name not in rung.uses or not value:
      raise cli.FlagError(
        f"--config: want fields of rung {rung.label},"
        f" {'=.., '.join(rung.uses)}=..; got {item!r}"
      )
    fields[name] = int(value) if value.isdecimal() else value

  def default_config(problem: contract.Problem) -> contract.Config:
    config = dataclasses.replace(rung.default_config(problem), **fields)
    if (reason := rung.is_legal(config, problem)) is not None:
      raise cli.FlagError(
        f"--config: config of {rung.name} is not legal: {reason}"
      )
    return config

  return dataclasses.replace(rung, default_config=default_config)


def explain(name: str) -> int:
  """Prints a rung's page and the model's numbers."""
  groups = rungs_of("explain", name)
  gpu = cli.gpu()
  shapes = cli.parse_shapes(cli.SHAPES.value, _SIZES.value)
  for dtype, chosen in groups.items():
    for rung in chosen:
      cli.say(rung_text.page(rung))
      for shape in shapes or shapes_lib.suite("ladder"):
        problem = problem_of(shape, dtype)
        # Default configs are those for that GPU.
        with hardware.assume(gpu) if cli.GPU.value else nullcontext():
          cli.say(rung_text.explain(rung, problem, gpu))
  return 0


def diff(text: str) -> int:
  """Prints what changes in the code from one rung to another."""
  names = [name.strip() for name in text.split(",")]
  if len(names) != 2:
    raise cli.FlagError(f"--diff: want two rungs, as in 6,7; got {text!r}")
  try:
    older, newer = map(ladder_lib.find, names)
  except ValueError as error:
    raise cli.FlagError(f"--diff: {error}") from None
  cli.say(rung_text.diff(older, newer))
  return 0


def run() -> int:
  """Measures what the flags say."""
  groups = rungs_of("kernels", cli.KERNELS.value)
  for flag in (_ALPHA, _BETA):
    if not math.isfinite(flag.value):
      raise cli.FlagError(f"--{flag.name}: want a number, got {flag.value}")
  on_gpu = compat.targets_gpu()
  shapes = cli.parse_shapes(cli.SHAPES.value, _SIZES.value)
  experiment = SWEEP if _SWEEP.value else EXPERIMENT
  shapes = shapes or shapes_lib.suite(experiment if on_gpu else "one")
  gpu = cli.gpu()
  cases = [
    case
    for shape in shapes
    for dtype, chosen in groups.items()
    for case in cases_of(problem_of(shape, dtype), chosen, on_gpu)
  ]
  for case in cases:
    if _CONFIG.value and case.rung is not None:
      case.rung.default_config(case.problem)  # raises if it is not legal
  name = CONFIGS if _CONFIG.value else experiment
  session = session_lib.start(name, on_gpu)
  if not on_gpu:
    cli.say(
      "The kernels run in Pallas' GPU interpreter. The traffic model is of the"
      f" {gpu.name}."
    )
  bench = session_lib.bench(experiment, on_gpu)
  with session.measuring():
    for case in cases:
      compare(case, session, bench, gpu)
  title = f"The ladder on {session.device}"
  session.table(title, ladder_tables.summary(session.rows))
  return session.finish()


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if _EXPLAIN.value is not None and _DIFF.value is not None:
    raise cli.FlagError("--explain, --diff: want one of them")
  if _EXPLAIN.value is not None:
    return explain(_EXPLAIN.value)
  if _DIFF.value is not None:
    return diff(_DIFF.value)
  return run()


if __name__ == "__main__":
  cli.run(main)
