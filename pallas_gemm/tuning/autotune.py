"""Measures the configs of the products in a function, and remembers the best.

The function is traced, not run: what counts are the products that it leaves
to the Hopper kernel after all transformations, so a training step is tuned
with its backward products. Each of them is then run by itself with the configs
that the cost model ranks first.
"""

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import sys
from typing import Any

from absl import logging
import jax
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, hardware, measure, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.ops import implementations
from pallas_gemm.ops.product import PRIMITIVES
from pallas_gemm.ops.spec import Operands, Spec
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache, trial

_NO_GPU = (
  "tuning needs a Hopper GPU (compute capability 9.0), JAX sees none here;"
  ' products with implementation="sm90" are tuned in the interpreter'
)
# What a product computes, and of what.
_Product = tuple[Spec, tuple[jax.ShapeDtypeStruct, ...]]

# Compiling leaves Python for most of its time.
_COMPILERS = min(8, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Tuned:
  """What was measured of one problem.

  Attributes:
    problem: what was tuned.
    config: the fastest that was right; None if there was none.
    seconds: its time; None if there was none.
    model_config: what the cost model chooses.
    model_seconds: its time; None if it failed.
    tried: (config, seconds, reason) of each candidate, in the order of the
      model; seconds is None where it failed, reason where it did not.
  """

  problem: Problem
  config: Config | None
  seconds: float | None
  model_config: Config
  model_seconds: float | None
  tried: tuple[tuple[Config, float | None, str | None], ...]

  def __str__(self) -> str:
    lines = [describe(self.problem)]
    if self.seconds is None:
      lines.append("  no config worked")
    else:
      gain = ""
      if self.model_seconds is not None:
        gain = f", {self.model_seconds / self.seconds:.2f}x as fast as the"
        gain += " model's choice"
      lines.append(f"  {1e6 * self.seconds:.1f} us{gain}")
      lines.append(f"  {self.config}")
    lines += [
      f"  failed: {config}: {reason}"
      for config, _, reason in self.tried
      if reason is not None
    ]
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Result:
  """What `autotune` found: one `Tuned` for each different problem."""

  problems: tuple[Tuned, ...]

  def __str__(self) -> str:
    return "\n".join(map(str, self.problems))


def describe(problem: Problem) -> str:
  """A problem in a line: what differs from a plain product is said.

  Example:
    >>> from pallas_gemm import tuning
    >>> from pallas_gemm.tuning import autotune
    >>> autotune.describe(
    ...   tuning.Problem(
    ...     m=8, n=64, k=32, dtype="bfloat16", out_dtype="float32",
    ...     transpose_b=True,
    ...   )
    ... )
    '8x64x32 bfloat16 out_dtype=float32 transpose_b'
  """
  p = problem
  words = [f"{p.m}x{p.n}x{p.k} {p.dtype}"]
  if p.out_dtype != p.dtype:
    words.append(f"out_dtype={p.out_dtype}")
  for field in dataclasses.fields(p):
    value = getattr(p, field.name)
    if field.default is dataclasses.MISSING or field.name == "device":
      continue
    if field.name == "activation" and value is not None:
      value = value.rpartition(".")[2]
    if value != field.default:
      words.append(field.name if value is True else f"{field.name}={value}")
  return " ".join(words)


def autotune(
  fn: Callable[..., Any], /, *args: Any, top: int = 8, **kwargs: Any
) -> Result:
  """Measures configs for the products in fn(*args, **kwargs).

  Every product that the Hopper kernel would compute is measured with the
  configs that the cost model ranks first and with the one remembered so far.
  The fastest whose result is right is remembered on disk (see
  `pallas_gemm.tuning.cache`) and used from the next call on, in this process
  and in later ones: functions that are compiled already keep what they have,
  except the ops themselves. Products with an explicit config and those under
  `batch_invariant` are left out, for they never look up what was measured.

  On a machine without a GPU only products with `implementation="sm90"` are
  tuned, by running the kernel in Pallas' interpreter: slow, and the winner
  says nothing about a GPU, so this process alone remembers it.

  Args:
    fn: `pallas_gemm.matmul`, `gated_matmul`, `dot_general`, `ragged_dot`,
      `gated_ragged_dot`, or any function that calls them; it is traced and
      never run. Group sizes have no part in it: they may differ from call to
      call, and are tuned for as if they were moderately uneven.
    *args: its arguments; arrays may be `jax.ShapeDtypeStruct`s.
    top: how many configs of the model to measure.
    **kwargs: its keyword arguments.

  Returns:
    What was tried, and how long each took. Printing it tells the outcome.

  Raises:
    ValueError: fn has no product to tune, or top is below 1.
    TypeError: called while tracing (inside `jax.jit`, say).
    RuntimeError: the machine has no Hopper GPU.

  Example:
    import pallas_gemm
    print(pallas_gemm.autotune(pallas_gemm.matmul, x, w, bias=bias))
    print(pallas_gemm.autotune(jax.grad(loss), params, batch))
  """
  if not isinstance(top, int) or isinstance(top, bool) or top < 1:
    raise ValueError(f"top must be a positive integer, got {top!r}")
  cases = find(fn, *args, **kwargs)
  with _progress(len(cases)) as (doing, step):
    problems = []
    for case in cases:
      problems.append(tune(case, top=top, doing=doing))
      step()
  return Result(tuple(problems))


def find(
  fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[trial.Case, ...]:
  """The different problems in fn(*args, **kwargs), in order of appearance.

  Raises:
    ValueError, TypeError, RuntimeError: as `autotune`.
  """
  gpu = hardware.current()
  if gpu.compute_capability != (9, 0):
    raise RuntimeError(
      "tuning needs a Hopper GPU (compute capability 9.0), this is an"
      f" {gpu.name}"
    )
  cases: dict[Problem, trial.Case] = {}
  reasons: list[str] = []
  for spec, operands in _products(_trace(fn, args, kwargs)):
    found = _folded(spec, operands)
    reasons += [x for x in found if isinstance(x, str)]
    for case in found:
      if not isinstance(case, str):
        cases.setdefault(case.problem, case)
  if cases:
    return tuple(cases.values())
  if _NO_GPU in reasons:
    raise RuntimeError(_NO_GPU)
  raise ValueError(
    "fn must have a product that the Hopper kernel computes; "
    + ("; ".join(dict.fromkeys(reasons)) or "it has no product of this package")
  )


def _products(jaxpr) -> list[_Product]:
  """The different products of a jaxpr, in order of appearance."""
  found = {
    (
      eqn.params["spec"],
      tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars
      ),
    ): None
    for eqn in _equations(jaxpr)
    if eqn.primitive in PRIMITIVES
  }
  return list(found)


def _folded(spec: Spec, operands) -> list[trial.Case | str]:
  """What the kernel would compute, or why it looks up no config."""
  if spec.config is not None:
    return ["a product has an explicit config"]
  if spec.batch_invariant:
    return ["a batch-invariant product takes the model's config"]
  names = implementations.names(spec, compat.targets_gpu())
  if "sm90" not in names:
    asked = spec.implementation is not None
    return [f"a product runs on {names}" if asked else _NO_GPU]
  found: list[trial.Case | str] = []

  def note(x: Operands, spec: Spec):
    found.append(_case(x, spec))
    return [jnp.zeros(spec.shape(x), spec.out_dtype)] * spec.outputs

  jax.eval_shape(
    lambda *x: implementations.folded(*x, spec=spec, run=note), *operands
  )
  return found or ["a product is empty"]


def _case(x: Operands, spec: Spec) -> trial.Case | str:
  if spec.is_empty(x):
    return "a product is empty"
  kernel = implementations.IMPLEMENTATIONS["sm90"]
  try:
    if reason := kernel.refuses(spec, x):
      raise NotImplementedError(reason)
    chosen = dataclasses.replace(spec, config=kernel.choose(x, spec))
    jax.eval_shape(lambda *v: kernel.run(spec.named(v), chosen), *x.present())
  except NotImplementedError as error:
    return f"the kernel does not take a product: {error}"
  factors = [1.0 if v is None else 0.5 for v in (x.alpha, x.beta)]
  problem = implementations.problem_of(x, spec)
  activation = spec.activation and spec.activation.function
  return trial.Case(problem, activation, *factors)


def _trace(fn, args, kwargs):
  """The jaxpr of a call, without dead code; only arrays are traced."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    raise TypeError(
      "args must be concrete arrays or jax.ShapeDtypeStructs, got traced ones;"
      " call autotune outside of jit and other transformations"
    )
  traced = {
    i: leaf
    for i, leaf in enumerate(leaves)
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
  }

  def call(arrays):
    args, kwargs = tree.unflatten(
      [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
    )
    return fn(*args, **kwargs)

  jaxpr = jax.make_jaxpr(call)(traced).jaxpr
  # As jit does: a gradient leaves products behind that nobody reads.
  return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def _equations(jaxpr) -> Iterator[Any]:
  """Every equation of a jaxpr and of those inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in jax.tree.leaves(list(eqn.params.values())):
      inner = getattr(value, "jaxpr", value)  # some are closed, some are not
      if hasattr(inner, "eqns"):
        yield from _equations(inner)


def tune(
  case: trial.Case,
  *,
  top: int = 8,
  doing: Callable[[str], None] = logging.info,
) -> Tuned:
  """Measures the candidates of one problem and remembers the fastest.

  Args:
    case: what to tune.
    top: how many configs of the model to measure.
    doing: told what is under way.
  """
  problem = case.problem
  name = describe(problem)
  chosen = tuning.model_of(problem).choose(problem)
  configs = _candidates(problem, chosen, top)
  doing(f"{name}: compiling {len(configs)} configs")
  calls, reasons = _prepare(trial.Trial(case), configs)
  doing(f"{name}: measuring {len(calls)} configs")
  seconds = dict(zip(calls, measure.seconds(list(calls.values()))))
  for config, reason in reasons.items():
    logging.warning("autotune %s: %s failed: %s", name, config, reason)
  best = min(seconds, key=seconds.__getitem__, default=None)
  if best is not None:
    # What the interpreter takes says nothing about a GPU.
    cache.store(problem, best, seconds[best], persist=compat.targets_gpu())
  return Tuned(
    problem=problem,
    config=best,
    seconds=seconds.get(best),
    model_config=chosen,
    model_seconds=seconds.get(chosen),
    tried=tuple((c, seconds.get(c), reasons.get(c)) for c in configs),
  )


def _candidates(problem: Problem, chosen: Config, top: int) -> list[Config]:
  """The model's choice, what else it ranks first, what was measured before."""

  def is_legal(config: Config | None) -> bool:
    return config is not None and not legal.reason(Plan.of(problem, config))

  candidates = tuning.model_of(problem).candidates(problem)
  ranked = filter(is_legal, dict.fromkeys((chosen, *candidates)))
  found = list(itertools.islice(ranked, top))
  measured = cache.lookup(problem)
  if is_legal(measured) and measured not in found:
    found.append(measured)
  return found


def _prepare(
  attempt: trial.Trial, configs: list[Config]
) -> tuple[dict[Config, measure.Call], dict[Config, str]]:
  """Calls of the configs that compile and are right; why others are not."""
  calls: dict[Config, measure.Call] = {}
  reasons: dict[Config, str] = {}
  with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
    compiled = {c: pool.submit(attempt.compile, c) for c in configs}
  for config, future in compiled.items():
    # One config that can't be compiled or run costs none of the others.
    try:
      call = future.result()
      reason = attempt.error(call())
    except Exception as error:  # pylint: disable=broad-exception-caught
      reason = _first_line(error)
    if reason is None:
      calls[config] = call
    else:
      reasons[config] = reason
  return calls, reasons


def _first_line(error: BaseException) -> str:
  lines = str(error).strip().splitlines()
  return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


@contextlib.contextmanager
def _progress(total: int):
  """(tells what is under way, counts a problem as done).

  A bar on a terminal where rich is installed, else lines of the log.
  """
  try:
    import rich.progress
  except ImportError:
    rich = None
  if rich is None or not sys.stderr.isatty():
    yield logging.info, lambda: None
    return
  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(console=console, transient=True) as bar:
    task = bar.add_task("", total=total)
    yield (
      lambda text: bar.update(task, description=text),
      lambda: bar.advance(task),
    )
