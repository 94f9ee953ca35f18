"""`autotune`: measures what may compute the products of a function.

The function is not run: what counts are the products that are left after all
transformations, so a training step is tuned with its backward products, and
those of one device, if arrays are sharded. Each of them is then run by itself,
with the configs that the cost model ranks first and by XLA.
"""

from collections.abc import Callable
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import numbers
import os
import sys
from typing import Any, Literal

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat, measure, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.ops import sm90, xla
from pallas_gemm.ops.spec import Operands
from pallas_gemm.problem import Problem
from pallas_gemm.tracing import find
from pallas_gemm.tuning import cache, trial
from pallas_gemm.tuning.cache import Entry

# What may compute a problem.
How = Config | Literal["xla"]
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
    xla_seconds: the time of XLA's product with all that follows it; None if
      it failed, or has scales.
    xla_reason: why it failed; None if it did not.
  """

  problem: Problem
  config: Config | None
  seconds: float | None
  model_config: Config
  model_seconds: float | None
  tried: tuple[tuple[Config, float | None, str | None], ...]
  xla_seconds: float | None = None
  xla_reason: str | None = None

  @property
  def entry(self) -> Entry | None:
    """What is remembered; None if nothing worked."""
    if self.config is None and self.xla_seconds is None:
      return None
    return Entry(self.config, self.seconds, self.xla_seconds)

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
    if self.xla_seconds is not None:
      left = "; it is left to XLA" if self.entry.is_xla_faster else ""
      lines.append(f"  XLA's product: {1e6 * self.xla_seconds:.1f} us{left}")
    failed = [(how, reason) for how, _, reason in self.tried]
    failed.append(("xla", self.xla_reason))
    lines += [f"  failed: {how}: {why}" for how, why in failed if why]
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
    >>> from pallas_gemm import autotuning, tuning
    >>> autotuning.describe(
    ...   tuning.Problem.flat(
    ...     m=8, n=64, k=32, dtype="bfloat16", out_dtype="float32",
    ...     transpose_b=True,
    ...   )
    ... )
    '8x64x32 bfloat16 out_dtype=float32 transpose_b'
  """
  fields = cache.short_row(problem)
  m, n, k, dtype = (fields.pop(name) for name in ("m", "n", "k", "dtype"))
  words = [f"{m}x{n}x{k} {dtype}"]
  if fields["out_dtype"] == dtype:
    del fields["out_dtype"]
  if "activation" in fields:
    fields["activation"] = fields["activation"].rpartition(".")[2]
  words += [
    name if value is True else f"{name}={value}"
    for name, value in fields.items()
  ]
  return " ".join(words)


def autotune(
  fn: Callable[..., Any], /, *args: Any, top: int = 8, **kwargs: Any
) -> Result:
  """Measures what may compute the products in fn(*args, **kwargs).

  Every product that the Hopper kernel can compute is measured with the configs
  that the cost model ranks first, with the one remembered so far, and by XLA.
  The fastest whose result is right is remembered on disk (see
  `pallas_gemm.tuning.cache`) and used from the next call on, in this process
  and in later ones: functions that are compiled already keep what they have,
  except the ops themselves. Products with an explicit config and those under
  `batch_invariant` are left out, for they never look up what was measured; with
  an explicit `implementation` the fastest config is used, though XLA be faster.
  Products with scales are never XLA's where the kernel takes them, so XLA's is
  not measured.

  Of arrays that are sharded, or while `jax.set_mesh` names a mesh of several
  devices, fn is compiled, not only traced: what is tuned are the products of
  one device. They are measured on the first.

  On a machine without a GPU only products with `implementation="sm90"` are
  tuned, by running the kernel in Pallas' interpreter: slow, and the winner
  says nothing about a GPU, so this process alone remembers it. Inside of
  `hardware.assume` the host's times would be kept as those of that GPU.

  Args:
    fn: `pallas_gemm.matmul`, `gated_matmul`, `dot_general`, `ragged_dot`,
      `gated_ragged_dot`, or any function that calls them; it is never run.
      Group sizes have no part in it: they may differ from call to
      call, and are tuned for as if they were moderately uneven.
    *args: its arguments; arrays may be `jax.ShapeDtypeStruct`s, with or without
      shardings.
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
  if not isinstance(top, numbers.Integral) or top is True or top < 1:
    raise ValueError(f"top must be a positive integer, got {top!r}")
  cases, problems = find(fn, *args, **kwargs), []
  with _progress(len(cases)) as (doing, step), on_one_device():
    for case in cases:
      problems.append(tune(case, top=top, doing=doing))
      step()
  return Result(tuple(problems))


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
  name = describe(case.problem)
  configs = candidates(case.problem, top)
  doing(f"{name}: compiling {len(configs)} configs")
  prepared = prepare(case, configs)
  doing(f"{name}: measuring {len(prepared.functions)} of them")
  return measured(prepared)


def candidates(problem: Problem, top: int) -> list[Config]:
  """The model's choice, what else it ranks first, what was measured before."""

  def is_legal(config: Config | None) -> bool:
    return config is not None and not legal.reason(Plan.of(problem, config))

  ranks = tuning.model_of(problem)
  ordered = dict.fromkeys((ranks.choose(problem), *ranks.candidates(problem)))
  found = list(itertools.islice(filter(is_legal, ordered), top))
  known = cache.lookup(problem)
  if known and is_legal(known.config) and known.config not in found:
    found.append(known.config)
  return found


@dataclasses.dataclass(frozen=True)
class Prepared:
  """What is measured of a problem; it holds no operands.

  Attributes:
    case: the problem.
    configs: what was compiled, the model's choice first.
    functions: by config, or "xla", what is right; of the operands by name.
    reasons: why the rest is not.
    sizes: rows of each group, if not as `trial` has them.
  """

  case: trial.Case
  configs: list[Config]
  functions: dict[How, Callable[..., trial.Outs]]
  reasons: dict[How, str]
  sizes: np.ndarray | None = None


def prepare(
  case: trial.Case, configs: list[Config], sizes: np.ndarray | None = None
) -> Prepared:
  """Compiles a problem with configs and for XLA, and checks the results.

  XLA's product is left out where there are scales.
  """
  attempt = trial.Trial(case, sizes)
  found = Prepared(case, configs, {}, {}, sizes)
  # XLA picks its kernels by timing them. Nothing else runs on the GPU until all
  # is compiled.
  with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
    compiled = {}
    if not case.problem.has_scales:  # which the op never leaves to XLA
      compiled["xla"] = pool.submit(compiled_xla, case, attempt.operands)
    compiled |= {
      config: pool.submit(trial.compiled, case, config, attempt.operands)
      for config in configs
    }
  for how, future in compiled.items():
    # One that can't be compiled or run costs none of the others.
    try:
      function = future.result()
      reason = attempt.error(attempt.call(function)())
    except Exception as error:  # pylint: disable=broad-exception-caught
      reason = _first_line(error)
    if reason is None:
      found.functions[how] = function
    else:
      found.reasons[how] = reason
  return found


def measured(prepared: Prepared) -> Tuned:
  """Measures what was prepared and remembers the fastest."""
  problem, reasons = prepared.case.problem, prepared.reasons
  operands = trial.operands(problem, prepared.sizes)
  calls = [
    functools.partial(function, **operands)
    for function in prepared.functions.values()
  ]
  seconds = dict(zip(prepared.functions, measure.seconds(calls)))
  for how, reason in reasons.items():
    name = describe(problem)
    logging.warning("autotune %s: %s failed: %s", name, how, reason)
  configs, chosen = prepared.configs, prepared.configs[0]
  right = [config for config in configs if config in seconds]
  best = min(right, key=seconds.__getitem__, default=None)
  tuned = Tuned(
    problem=problem,
    config=best,
    seconds=seconds.get(best),
    model_config=chosen,
    model_seconds=seconds.get(chosen),
    tried=tuple((c, seconds.get(c), reasons.get(c)) for c in configs),
    xla_seconds=seconds.get("xla"),
    xla_reason=reasons.get("xla"),
  )
  if tuned.entry is not None:
    # What the interpreter takes says nothing about a GPU.
    cache.store(problem, tuned.entry, persist=compat.targets_gpu())
  return tuned


def compiled_xla(
  case: trial.Case, arrays: dict[str, jax.Array]
) -> Callable[..., trial.Outs]:
  """What the op runs where a case is left to XLA, as `trial.compiled`."""
  factors = {"alpha": case.alpha, "beta": case.beta}
  factors = {k: jnp.float32(v) for k, v in factors.items() if v != 1}
  spec = sm90.spec_of(case.problem, case.activation)
  words = spec.words._replace(**dict.fromkeys(factors, ""))
  spec = dataclasses.replace(spec, words=words)
  x = Operands(**arrays, **factors)
  run = jax.jit(lambda x: tuple(xla.run(x, spec))).lower(x).compile()
  return lambda **operands: run(Operands(**operands, **factors))


def _first_line(error: BaseException) -> str:
  lines = str(error).strip().splitlines()
  return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def on_one_device() -> contextlib.AbstractContextManager[Any]:
  """Context: arrays are made on one device, whichever mesh is set."""
  if jax.sharding.get_abstract_mesh().empty:
    return contextlib.nullcontext()
  return jax.set_mesh(jax.sharding.Mesh(jax.local_devices()[0], ()))


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
