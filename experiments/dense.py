"""Compares the dense ops with what a JAX user writes without them.

  python -m experiments.dense                       a short list, under a minute
  python -m experiments.dense --suite=all           published suites, minutes
  python -m experiments.dense --suite=square,epilogues --dtype=float16
  python -m experiments.dense --shapes=4096x8192x4096 --tuned
  python -m experiments.dense --unseen=60           random problems, by --seed

A case is one expression on one shape. Under jax.jit it is computed by
pallas_gemm with the config that it picks by itself, and by the same expression
in jax.numpy. The first result is checked against float64 on sampled rows and
columns; then both are timed, interleaved (CUPTI, every kernel that a call
launches, cold L2). One line a case is printed as the run goes:

  implementation, time, TFLOP/s, GB/s (operands and result once), speed
  relative to jax.numpy, PASSED or FAILED, and the largest error over the
  bound that correct arithmetic obeys.

With --suite=all or --suite=latency it also takes what the host waits for: the
first call of a new shape, a call outside jit, and the choice of a config. A
copy and a sum of 1 GiB tell the memory rate of this GPU, for the rows of small
batches.

Rows go to experiments/results/<device>/dense.jsonl as they are measured, those
of random problems to dense_unseen.jsonl there, so an interrupted run keeps what
it finished. `python -m experiments.report` prints tables of them.
Without an NVIDIA GPU a few tiny cases are checked, and nothing is timed.

Exit status: 0; 1 if a case FAILED or could not run; 2 for a command that can't
be carried out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import inspect
import os
import statistics
import tempfile
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

from experiments.harness import (
  before,
  cli,
  dense_cases,
  dense_tables,
)
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib
from experiments.harness import shapes as shapes_lib
from experiments.harness.case import Candidate
import pallas_gemm
from pallas_gemm import compat
from pallas_gemm.tuning import Problem, autotune, cache, model

EXPERIMENT, UNSEEN = "dense", "dense_unseen"
LATENCY = "latency"
# Shapes that no suite has: nothing of them is compiled yet. The first is not
# reported: it pays for what a process does once.
FIRST_CALLS = (
  shapes_lib.Shape(640, 768, 896),
  shapes_lib.Shape(24, 5120, 3072),
  shapes_lib.Shape(1280, 1536, 1792),
  shapes_lib.Shape(3072, 5120, 2304),
)
TINY = shapes_lib.Shape(128, 128, 128)
EAGER_CALLS = 200
_NAMES = (*dense_cases.NAMES, LATENCY)

for _name in ("shapes", "dtype", "seed", "output_dir", "base", *cli.TIMED):
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
  cases += session_lib.parse_suites(
    [name for name in names if name != LATENCY],
    dense_cases.suite,
    None if on_gpu else ("interpret", LATENCY),
  )
  # A suite that "all" has too is measured once.
  latency = "all" in names or LATENCY in names
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


def measure(bench: run_lib.Bench, case: run_lib.Prepared) -> dict[str, Any]:
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
  if run_lib.config_of(fn, operands)[0] is None:
    return None
  given = os.environ.get(cache.FOLDER_VARIABLE)
  with tempfile.TemporaryDirectory() as folder:
    os.environ[cache.FOLDER_VARIABLE] = folder
    cache.clear()
    try:
      autotune.autotune(fn, **operands)
      lowered = jax.jit(fn).lower(**operands)
      compiled, config = lowered.compile(), None
      if run_lib.runs_kernel(lowered.as_text()):
        config, _ = run_lib.config_of(fn, operands)
    finally:
      del os.environ[cache.FOLDER_VARIABLE]
      if given is not None:
        os.environ[cache.FOLDER_VARIABLE] = given
      cache.clear()
  return Candidate(lambda: compiled, config)


def host_rows(
  bench: run_lib.Bench, dtype: str, implementation: str | None
) -> Iterator[dict[str, Any]]:
  """Rows of what the host waits for: each as it is measured."""

  def op(a, b):
    return pallas_gemm.matmul(a, b, implementation=implementation)

  def row(kernel: str, shape: shapes_lib.Shape, found, repeats: int):
    fields = shape._asdict() | found
    made = bench.row(suite=LATENCY, kernel=kernel, dtype=dtype, **fields)
    return made | {"repeats": repeats}

  def operands(shape: shapes_lib.Shape):
    [case] = dense_cases.plain((shape,), dtype)
    return jax.block_until_ready(case.draw(bench.seed))

  first_calls(op, **operands(FIRST_CALLS[0]))
  for shape in FIRST_CALLS[1:]:
    found = first_calls(op, **operands(shape))
    yield row("first_call", shape, found, 1)
  found = eager_calls(op, **operands(TINY))
  yield row("eager_call", TINY, found, EAGER_CALLS)
  shapes = shapes_lib.suite("llama_70b")
  found = {"choose_us": choosing(shapes, dtype)}
  yield row("model.choose", shapes[0], found, len(shapes))


def first_calls(op: Callable, a: jax.Array, b: jax.Array) -> dict[str, float]:
  """ms until the first result of a jitted function: traced, compiled, run."""
  found = {}
  for name, fn in (
    ("first_call_ms", op),
    ("baseline_first_call_ms", lambda a, b: jnp.dot(a, b)),
  ):
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(fn)(a, b))
    found[name] = (time.perf_counter() - start) * 1e3
  return found


def eager_calls(op: Callable, a: jax.Array, b: jax.Array) -> dict[str, float]:
  """us until a call outside jit returns, its kernel perhaps still running."""
  times: dict[str, list[float]] = {
    "dispatch_us": [],
    "baseline_dispatch_us": [],
  }
  arms = dict(zip(times, (op, jnp.dot)))
  for fn in arms.values():
    jax.block_until_ready(fn(a, b))
  for _ in range(EAGER_CALLS):
    for name, fn in arms.items():
      start = time.perf_counter()
      out = fn(a, b)
      times[name].append((time.perf_counter() - start) * 1e6)
      jax.block_until_ready(out)
  return {name: statistics.median(values) for name, values in times.items()}


def choosing(shapes: tuple[shapes_lib.Shape, ...], dtype: str) -> float:
  """us that the cost model takes for a problem that it has not seen."""
  choose = inspect.unwrap(model.choose)  # past its cache
  found = []
  for shape in shapes:
    problem = Problem.flat(**shape._asdict(), dtype=dtype, out_dtype=dtype)
    start = time.perf_counter()
    choose(problem)
    found.append((time.perf_counter() - start) * 1e6)
  return statistics.median(found)


def main(argv: Sequence[str]) -> int:
  """Measures what the flags say; returns the exit status."""
  del argv
  on_gpu, how = compat.targets_gpu(), _IMPLEMENTATION.value
  experiment = UNSEEN if _UNSEEN.value else EXPERIMENT
  cases, latency = chosen(on_gpu)
  session = session_lib.start(experiment, on_gpu)
  bench = session_lib.bench(experiment, on_gpu)
  line = dense_tables.host_line
  with session.measuring():
    if on_gpu:
      session.host_rows("bandwidth", bench.measure_bandwidth, line)
    session.suites(
      cases,
      functools.partial(
        run_lib.prepare,
        implementation=how,
        more=functools.partial(before.arms, "dense"),
      ),
      functools.partial(measure, bench),
      dense_tables.label,
      dense_tables.measured_parts,
    )
    if latency:
      dtype = cli.DTYPE.value or "bfloat16"
      rows = functools.partial(host_rows, bench, dtype, how)
      session.host_rows(LATENCY, rows, line)
  title = f"The dense ops on {session.device}, relative to jnp"
  session.table(title, dense_tables.summary(session.rows))
  return session.finish()


if __name__ == "__main__":
  cli.run(main)
