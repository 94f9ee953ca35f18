"""What the host waits for: first calls, eager calls, the choice of a config."""

from collections.abc import Callable, Iterator
import inspect
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import dense_bench, inputs, suites
import pallas_gemm
from pallas_gemm.tuning import Problem, model

# Shapes that no suite has: nothing of them is compiled yet. The first is not
# reported: it pays for what a process does once.
FIRST_CALLS = (
  suites.Shape(640, 768, 896),
  suites.Shape(24, 5120, 3072),
  suites.Shape(1280, 1536, 1792),
  suites.Shape(3072, 5120, 2304),
)
TINY = suites.Shape(128, 128, 128)
EAGER_CALLS = 200
SUITE = "latency"


def rows(bench: dense_bench.DenseBench, dtype: str) -> Iterator[dict[str, Any]]:
  """Measures, and yields a row as each is done."""
  implementation = bench.implementation

  def op(a, b):
    return pallas_gemm.matmul(a, b, implementation=implementation)

  first_calls(FIRST_CALLS[0], dtype, op, bench.bench.seed)
  for shape in FIRST_CALLS[1:]:
    found = first_calls(shape, dtype, op, bench.bench.seed)
    yield _row(bench, "first_call", shape, dtype, found, 1)
  found = eager_calls(op, dtype, bench.bench.seed)
  yield _row(bench, "eager_call", TINY, dtype, found, EAGER_CALLS)
  shapes = suites.suite("llama_70b")
  found = {"choose_us": choosing(shapes, dtype)}
  yield _row(bench, "model.choose", shapes[0], dtype, found, len(shapes))


def _row(bench, kernel, shape, dtype, found, repeats) -> dict[str, Any]:
  row = bench.row(
    suite=SUITE, kernel=kernel, dtype=dtype, **shape._asdict(), **found
  )
  return row | {"repeats": repeats}


def first_calls(
  shape: suites.Shape, dtype: str, op: Callable, seed: int
) -> dict[str, float]:
  """ms until the first result of a jitted function: traced, compiled, run."""
  a, b = _operands(shape, dtype, seed)
  found = {}
  for name, fn in (
    ("first_call_ms", op),
    ("baseline_first_call_ms", lambda a, b: jnp.dot(a, b)),
  ):
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(fn)(a, b))
    found[name] = (time.perf_counter() - start) * 1e3
  return found


def eager_calls(op: Callable, dtype: str, seed: int) -> dict[str, float]:
  """us until a call outside jit returns, its kernel perhaps still running."""
  a, b = _operands(TINY, dtype, seed)
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


def choosing(shapes: tuple[suites.Shape, ...], dtype: str) -> float:
  """us that the cost model takes for a problem that it has not seen."""
  choose = inspect.unwrap(model.choose)  # past its cache
  found = []
  for shape in shapes:
    problem = Problem.flat(**shape._asdict(), dtype=dtype, out_dtype=dtype)
    start = time.perf_counter()
    choose(problem)
    found.append((time.perf_counter() - start) * 1e6)
  return statistics.median(found)


def _operands(shape: suites.Shape, dtype: str, seed: int):
  m, n, k = shape
  return jax.block_until_ready(
    (
      inputs.normal(seed, 0, (m, k), dtype),
      inputs.normal(seed, 1, (k, n), dtype),
    )
  )
