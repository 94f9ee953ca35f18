"""What `meshes` checks: ops under transformations, modes of meshes and arms.

A check compares values, types and shardings of all results, and how many arrays
each kind of collective takes in the compiled program, with JAX's own product.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import logging
import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from pallas_gemm import report
from tests.support import stand_in
from tests.support.cases import pairs
from tests.support.mesh_calls import (
  AUTO,
  EXPLICIT,
  EXPLICIT_UNSET,
  SMALL,
  TRANSFORMATIONS,
  Call,
  Mode,
  Unit,
  axes_of,
  cotangent,
  only,
)
from tests.support.mesh_cases import CASES, FSDP

KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)

# The kernel's program where it is not as JAX's own, by case and check: how many
# arrays each kind of collective takes, in the order of `KINDS`.
_M, _N = "matmul: K, M of the result over its axis", "matmul: M, K, N of the "
_N += "result over K's axis"
_COUNTS = {
  # A sum whose result is sharded over the axis that is summed is scattered; XLA
  # on CPU adds it up everywhere and takes a slice.
  f"matmul: {FSDP} | explicit | vjp": (1, 0, 1),
  f"matmul: {FSDP}; N | explicit | vjp": (1, 1, 1),
  f"gated_matmul: {FSDP}; N | explicit | vjp": (2, 2, 2),
  f"{_M} | explicit | vjp": (1, 0, 1),
  f"{_N} | explicit | vjp": (1, 1, 1),
  **{f"{case} | explicit | vmap": (0, 0, 1) for case in (_M, _N)},
}
DIFFERENCES = {
  check: {kind: n for kind, n in zip(KINDS, counts) if n}
  for check, counts in _COUNTS.items()
}


# Arms.

ARMS = "default", "kernel"
BY_KEY = {case.key: case for case in CASES}


class Arm:
  """How the op is called in a run."""

  def __init__(self, name: str):
    self.name = name
    self.calls: list[stand_in.Call] = []

  @property
  def kernel(self) -> bool:
    """Whether the stand-in computes."""
    return self.name == "kernel"

  @property
  def how(self) -> dict[str, Any]:
    """Arguments of the ops."""
    return {"implementation": "sm90"} if self.kernel else {}

  @contextlib.contextmanager
  def installed(self) -> Iterator[None]:
    """Context: where the checks run."""
    if not self.kernel:
      yield
      return
    with stand_in.installed(default=True) as self.calls:
      yield

  def function(self, unit: Unit) -> Callable[..., Any]:
    """The op of a unit, of arrays by name."""
    case, mode, how = unit.case, unit.mode, self.how
    if self.kernel and not mode.kernels:
      how = {"implementation": ("sm90", "xla")}
    return case.ours(mode.asked(case), **how)


# Checks.

# By name, for some arms: those that are no unit of the matrix.
CHECKS: list[tuple[str, tuple[str, ...], Callable[[Arm], None]]] = []


def register(name: str, arms: tuple[str, ...] = ARMS, /, **parts: Any):
  """Adds checks: each two values of `parts`, which its name has, and arms."""

  def add(run):
    for arm, *values, _ in pairs(arms, *map(tuple, parts.values()), "_"):
      given = dict(zip(parts, values))
      words = {k: getattr(v, "name", v) for k, v in given.items()}
      found = name.format(**words), (arm,), functools.partial(run, **given)
      CHECKS.append(found)
    return run

  return add


def raised(f: Callable[..., Any], *args: Any, **keywords: Any):
  """What a call raises, or None."""
  try:
    f(*args, **keywords)
  except Exception as error:
    return error
  return None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a program computed."""

  results: Any
  collectives: dict[str, int]


def run(mode: Mode, call: Call, op: Callable[..., Any]) -> Outcome:
  """The results of a call and its collectives."""
  f = call.wrap(op)
  args = jax.tree.map(mode.place, call.args, call.specs)
  with mode.context():
    if not call.jit:
      return Outcome(f(*args), {})
    compiled = jax.jit(f).lower(*args).compile()
    return Outcome(compiled(*args), collectives(compiled))


def collectives(compiled: Any) -> dict[str, int]:
  """How many arrays each kind takes; XLA may merge several into one."""
  found: dict[str, int] = {}
  for kind in KINDS:
    pattern = rf"= (\(.*?\)|\S+) {kind}(?:-start)?\("
    count = sum(
      max(1, len(re.findall(r"\w+\[", types)))
      for types in re.findall(pattern, compiled.as_text())
    )
    if count:
      found[kind] = count
  return found


def sharded_op(unit: Unit, op: Callable[..., Any]) -> Callable[..., Any]:
  """The op inside of `jax.shard_map`, if the mode has one."""
  mode, case = unit.mode, unit.case
  if not mode.manual:
    return op
  keep = functools.partial(only, axes=mode.manual)
  summed = axes_of(case.specs().values()) - axes_of([case.out])
  summed &= set(mode.manual)

  def local(x):
    out = op(x)
    return jax.lax.psum(out, tuple(summed)) if summed else out

  return jax.shard_map(
    local,
    mesh=None if mode.set_mesh else mode.mesh,
    in_specs=({name: keep(spec) for name, spec in case.specs().items()},),
    out_specs=keep(case.out),
    axis_names=set(mode.manual),
    check_vma=mode.check_vma,
  )


_references: dict[str, Outcome] = {}


def reference(unit: Unit, call: Call) -> Outcome:
  """JAX's own; of grouped products the values, on one device."""
  key = unit.key
  if unit.case.grouped:
    key = f"{unit.case.key} | {unit.transformation}"
  if key not in _references:
    op = unit.case.plain(unit.mode.asked(unit.case))
    if unit.case.grouped:
      results = jax.jit(call.wrap(op))(*call.args)
      _references[key] = Outcome(results, {})
    else:
      op = sharded_op(unit, op)
      _references[key] = run(unit.mode, call, op)
  return _references[key]


def check(unit: Unit, arm: Arm) -> dict[str, int]:
  """Runs a unit.

  Returns:
    The collectives of JAX's own product.

  Raises:
    AssertionError: it is not as JAX's own.
    Exception: whatever the op raises.
  """
  call = TRANSFORMATIONS[unit.transformation](unit.case)
  want = reference(unit, call)
  if not call.jit:
    jax.clear_caches()  # so that it is lowered again
  arm.calls.clear()
  with logged_warnings() as warnings:
    got = run(unit.mode, call, sharded_op(unit, arm.function(unit)))
  assert not (warnings and unit.mode.kernels), warnings
  same_values(got.results, want.results)
  if unit.case.grouped:
    _check_given_shardings(unit, arm, call, got.results)
  else:
    same_shardings(got.results, want.results)
  if call.jit:
    _check_collectives(unit, arm, got.collectives, want.collectives)
  if arm.kernel:
    _check_shares(unit, call, arm.calls)
  return want.collectives


@contextlib.contextmanager
def logged_warnings() -> Iterator[list[str]]:
  """Context: yields the messages that absl logs as warnings, as if anew."""
  messages: list[str] = []
  report.reset()

  class Handler(logging.Handler):
    def emit(self, record):
      messages.append(record.getMessage())

  handler, logger = Handler(logging.WARNING), logging.getLogger("absl")
  logger.addHandler(handler)
  try:
    yield messages
  finally:
    logger.removeHandler(handler)


def same_values(got: Any, want: Any) -> None:
  """float32 sums in other orders."""

  def same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    worst = np.abs(got - want).max(initial=0)
    bound = 2e-5 * (1 + np.abs(want).max(initial=0))
    assert worst <= bound, f"off by {worst:.3g}, at most {bound:.3g}"

  jax.tree.map(same, got, want)


def same_shardings(got: Any, want: Any) -> None:
  """Types, and where the pieces are."""

  def same(got, want):
    types = jax.typeof(got), jax.typeof(want)
    assert types[0] == types[1], "type {}, want {}".format(*types)
    where = got.sharding, want.sharding
    same = where[0].is_equivalent_to(where[1], got.ndim)
    assert same, "sharded {}, want {}".format(*[s.spec for s in where])

  jax.tree.map(same, got, want)


def _check_given_shardings(
  unit: Unit, arm: Arm, call: Call, results: Any
) -> None:
  """As written by hand; under Auto axes, XLA may choose what is its own."""
  if not unit.mode.typed and not (arm.kernel and call.forward):
    return

  def same(got, spec):
    where = NamedSharding(unit.mode.mesh, spec)
    right = got.sharding.is_equivalent_to(where, got.ndim)
    if not unit.mode.mixed:
      assert right, f"sharded {got.sharding.spec}, want {spec}"
    if unit.mode.typed:
      parts = tuple(jax.typeof(got).sharding.spec)
      parts += (None,) * (got.ndim - len(parts))
      want = (*unit.mode.typed_part(spec), *(None,) * (got.ndim - len(spec)))
      assert parts == want, f"type {jax.typeof(got)}, want {spec}"

  jax.tree.map(same, results, call.results)


def _check_collectives(unit, arm, got, own) -> None:
  case, exception = unit.case, DIFFERENCES.get(unit.key)
  if arm.kernel and exception is not None:
    assert got == exception, f"collectives {got}, listed {exception}"
    assert case.grouped or got != own, f"listed, but as JAX's own: {got}"
    return
  if not case.grouped:
    more = {k: n for k, n in got.items() if n > own.get(k, 0)}
    assert not more or got == exception, f"collectives {got}, JAX's own {own}"
    return
  if not arm.kernel or unit.mode not in (EXPLICIT, EXPLICIT_UNSET, AUTO):
    return
  limits = {"jit": case.sums, "vjp": case.sums_vjp}.get(unit.transformation)
  if limits is not None:
    over = {k: n for k, n in got.items() if n > limits.get(k, 0)}
    assert not over, f"collectives {got}, at most {limits}"


def _check_shares(unit: Unit, call: Call, calls: list[stand_in.Call]) -> None:
  """The kernel is given what one device has, and no more."""
  case = unit.case
  if not unit.mode.kernels:
    assert not calls, "a kernel under Auto axes"
    return
  assert calls, "no kernel"
  if unit.mode in SMALL:
    return
  names = list(case.args)
  sizes = {name: int(np.prod(shape)) for name, (shape, _) in case.args.items()}
  pieces = dict(zip(names, case.pieces))
  # In any order: what is scattered along N is computed transposed.
  exact = tuple(sorted(sizes[name] // pieces[name] for name in names[:2]))
  sizes["out"] = cotangent(case).size
  given = [tuple(sorted(int(np.prod(s)) for s in c.shapes[:2])) for c in calls]
  if call.forward:
    assert given == [exact], f"shares of {given} elements, want {exact}"
    return
  if unit.transformation == "vjp":
    assert exact in given, f"shares of {given} elements, forward {exact}"
  specs = case.specs() | {"out": case.out}
  if case.grouped and "bias" in case.args:
    # The bias of each row is a product with a one for each.
    sizes["ones"], specs["ones"] = case.args["lhs"][0][0], specs["lhs"][:1]
  shares = set()
  for name, size in sizes.items():
    counts = {pieces.get(name), _count(specs[name]), *case.also.get(name, ())}
    for count in counts - {None}:
      shares.add(size // count)
      examples, devices = call.mapped
      # shard_map has an axis of its own for examples only if it is named.
      for split in {devices, 1} if unit.mode.manual else {devices}:
        shares.add(size // count * examples // split)
  extra = [pair for pair in given if not set(pair) <= shares]
  assert not extra, f"shares of {extra} elements, none of {sorted(shares)}"


def _count(spec: P) -> int:
  return int(np.prod([{"x": 4, "y": 2}[axis] for axis in axes_of([spec])]))
