"""What the host waits for: first calls, eager calls, the choice of a config."""

from collections.abc import Callable, Iterator
import inspect
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import dense_cases
from experiments.harness import run as run_lib
from experiments.harness import shapes as shapes_lib
import pallas_gemm
from pallas_gemm.tuning import Problem, model

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
SUITE = "latency"


def rows(
  bench: run_lib.Bench, dtype: str, implementation: str | None
) -> Iterator[dict[str, Any]]:
  """Measures, and yields a row as each is done."""

  def op(a, b):
    return pallas_gemm.matmul(a, b, implementation=implementation)

  def row(kernel: str, shape: shapes_lib.Shape, found, repeats: int):
    fields = shape._asdict() | found
    made = bench.row(suite=SUITE, kernel=kernel, dtype=dtype, **fields)
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
