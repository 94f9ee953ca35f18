"""What `meshes` checks: ops under transformations, modes of meshes and arms.

A check compares values, types and shardings of all results, and how many arrays
each kind of collective takes in the compiled program, with JAX's own product.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from tests.support import mesh_cases, stand_in
from tests.support.mesh_cases import CASES, Case

KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)

# The kernel's program where it is not as JAX's own, by reason and check: how
# many arrays each kind of collective takes.
DIFFERENCES: dict[str, dict[str, dict[str, int]]] = {
  "A sum whose result is sharded over the axis that is summed is scattered;"
  " XLA on CPU adds it up everywhere and takes a slice.": {
    "matmul: FSDP: M, and K of B over the same axis | explicit | vjp": {
      "all-gather": 1,
      "reduce-scatter": 1,
    },
    "matmul: FSDP: M, and K of B over the same axis; N | explicit | vjp": {
      "all-gather": 1,
      "all-reduce": 1,
      "reduce-scatter": 1,
    },
    "matmul: K, M of the result over its axis | explicit | jit": {
      "reduce-scatter": 1,
    },
    "matmul: K, M of the result over its axis | explicit | vjp": {
      "all-gather": 1,
      "reduce-scatter": 1,
    },
    "matmul: K, M of the result over its axis | explicit | jvp": {
      "reduce-scatter": 3,
    },
    "matmul: K, M of the result over its axis | explicit | vmap": {
      "reduce-scatter": 1,
    },
    "matmul: M, K, N of the result over K's axis | explicit | jit": {
      "reduce-scatter": 1,
    },
    "matmul: M, K, N of the result over K's axis | explicit | vjp": {
      "all-gather": 1,
      "all-reduce": 1,
      "reduce-scatter": 1,
    },
    "matmul: M, K, N of the result over K's axis | explicit | jvp": {
      "reduce-scatter": 3,
    },
    "matmul: M, K, N of the result over K's axis | explicit | vmap": {
      "reduce-scatter": 1,
    },
    (
      "gated_matmul: FSDP: M, and K of B over the same axis; N | explicit | vjp"
    ): {
      "all-gather": 2,
      "all-reduce": 2,
      "reduce-scatter": 2,
    },
  },
  "What A alone is sharded along is gathered; here XLA adds up instead.": {
    "matmul: K of A | explicit | vmap": {"all-gather": 1},
    "matmul: K of A | auto | vmap": {"all-gather": 1},
  },
}


def listed(key: str) -> dict[str, int] | None:
  """What `DIFFERENCES` has of a check."""
  return next((d[key] for d in DIFFERENCES.values() if key in d), None)


# Meshes.


@dataclasses.dataclass(frozen=True)
class Mode:
  """How the devices are made known, and to whom.

  Attributes:
    name: in words.
    explicit: the axes are Explicit; else Auto.
    mixed: x is Explicit and y is Auto.
    set_mesh: inside of `jax.set_mesh`.
    manual: axes of a `jax.shard_map` around the op.
    shape: of the mesh.
  """

  name: str
  explicit: bool = False
  mixed: bool = False
  set_mesh: bool = True
  manual: tuple[str, ...] = ()
  shape: tuple[int, int] = (4, 2)

  @functools.cached_property
  def mesh(self) -> Mesh:
    """Axes x and y."""
    x, y = self.explicit or self.mixed, self.explicit
    return jax.make_mesh(
      self.shape,
      ("x", "y"),
      tuple(AxisType.Explicit if e else AxisType.Auto for e in (x, y)),
      devices=jax.devices()[: math.prod(self.shape)],
    )

  @property
  def kernels(self) -> bool:
    """Whether a kernel can run: XLA has no axis left to partition over."""
    return not self.mixed and (self.explicit or self.manual != ("x",))

  @property
  def typed(self) -> bool:
    """Whether types carry shardings where the op is called."""
    return (self.explicit or self.mixed) and not self.manual

  def asked(self, case: Case) -> Any:
    """The result's sharding, if the case must ask for it; else None."""
    if not (self.typed and case.ask):
      return None
    return case.out if self.set_mesh else NamedSharding(self.mesh, case.out)

  def typed_part(self, spec: P) -> P:
    """What of `spec` types have: Explicit axes."""
    return _only(spec, ("x",)) if self.mixed else spec

  def context(self):
    """Where the op is called."""
    return (
      jax.set_mesh(self.mesh) if self.set_mesh else contextlib.nullcontext()
    )

  def place(self, value: Any, spec: P) -> jax.Array:
    """An array as `spec` says."""
    return jax.device_put(value, NamedSharding(self.mesh, spec))


EXPLICIT = Mode("explicit", explicit=True)
EXPLICIT_UNSET = Mode("explicit, no set_mesh", explicit=True, set_mesh=False)
AUTO = Mode("auto")
AUTO_UNSET = Mode("auto, no set_mesh", set_mesh=False)
MANUAL = Mode("shard_map", manual=("x", "y"))
MANUAL_UNSET = Mode("shard_map, no set_mesh", manual=("x", "y"), set_mesh=False)
PARTIAL = Mode("shard_map over x, y is Auto", manual=("x",))
PARTIAL_EXPLICIT = Mode(
  "shard_map over x, y is Explicit", explicit=True, manual=("x",)
)
MIXED = Mode("x is Explicit, y is Auto", mixed=True)
SMALL = [
  Mode(f"{name}, {x} x {y}", explicit=explicit, shape=(x, y))
  for name, explicit in (("explicit", True), ("auto", False))
  for x, y in ((8, 1), (1, 1))
]


# Transformations: of a function of named arrays to one of positional ones,
# those, and how the results are sharded.


@dataclasses.dataclass(frozen=True)
class Call:
  """What is run.

  Attributes:
    wrap: makes it of the op, which takes the arrays by name.
    args: its arguments, on one device.
    specs: how they are sharded.
    results: how the results are.
    jit: it is compiled as a whole; else called op by op.
    forward: nothing but the op itself: exact shares are known.
    mapped: by how many elements and devices A is multiplied (vmap).
  """

  wrap: Callable[..., Any]
  args: tuple[Any, ...]
  specs: tuple[Any, ...]
  results: Any
  jit: bool = True
  forward: bool = False
  mapped: tuple[int, int] = (1, 1)


def _call(case: Case, *, jit: bool = True) -> Call:
  return Call(
    lambda f: f,
    (case.arrays(),),
    (case.specs(),),
    case.out,
    jit,
    forward=True,
  )


def _cotangent(case: Case) -> jax.Array:
  shape = jax.eval_shape(case.plain(), case.arrays()).shape
  return mesh_cases.normal(*shape, seed=99)


def _vjp(case: Case, *, remat: bool = False, jit: bool = True) -> Call:
  """Value and gradients; by `jax.vjp`, so that no loss adds collectives."""

  def wrap(f):
    def value_and_gradients(x, ct):
      out, pull = jax.vjp(jax.checkpoint(f) if remat else f, x)
      return out, pull(ct)[0]

    return value_and_gradients

  return Call(
    wrap,
    (case.arrays(), _cotangent(case)),
    (case.specs(), case.out),
    (case.out, case.specs()),
    jit,
  )


def _jvp(case: Case) -> Call:
  def wrap(f):
    return lambda x, dx: jax.jvp(f, (x,), (dx,))

  return Call(
    wrap,
    (case.arrays(), case.arrays(seed=7)),
    (case.specs(), case.specs()),
    (case.out, case.out),
  )


def _loss(f):
  return lambda x: (f(x) ** 2).sum()


def _grad(case: Case) -> Call:
  return Call(
    lambda f: jax.value_and_grad(_loss(f)),
    (case.arrays(),),
    (case.specs(),),
    (P(), case.specs()),
  )


def _hvp(case: Case) -> Call:
  """A gradient of a gradient: forward over reverse, and reverse over it."""

  def wrap(f):
    grad = jax.grad(_loss(f))

    def twice(x, dx):
      _, forward = jax.jvp(grad, (x,), (dx,))
      return forward, jax.grad(
        lambda x: sum(
          (g * d).sum() for g, d in zip(grad(x).values(), dx.values())
        )
      )(x)

    return twice

  specs = case.specs()
  return Call(
    wrap,
    (case.arrays(), case.arrays(seed=7)),
    (specs, specs),
    (specs, specs),
  )


_EXAMPLES = 4


def _vmap(case: Case, *, every: bool = False, sharded: bool = True) -> Call:
  """Over A alone or over all arrays, sharded over an axis that is free."""
  part = free_axis(case) if sharded else None
  names = list(case.args)
  mapped = names if every else names[:1]
  args, specs = case.arrays(), case.specs()
  for name in mapped:
    args[name] = _examples(case, name)
    specs[name] = P(part, *specs[name])
  axes = {name: 0 if name in mapped else None for name in names}
  return Call(
    lambda f: jax.vmap(f, in_axes=(axes,)),
    (args,),
    (specs,),
    P(part, *case.out),
    mapped=(_EXAMPLES, {None: 1, "x": 4, "y": 2}[part]),
  )


def _examples(case: Case, name: str) -> jax.Array:
  return jnp.stack([case.arrays(seed=s)[name] for s in range(_EXAMPLES)])


def _vmap_vjp(case: Case) -> Call:
  """Gradients of examples; B is shared."""
  forward, one = _vmap(case), _vjp(case)
  part = forward.results[0]
  axes = {name: 0 if i == 0 else None for i, name in enumerate(forward.args[0])}
  ct = jnp.stack([one.args[1] * (i + 1) for i in range(_EXAMPLES)])
  return Call(
    lambda f: jax.vmap(one.wrap(f), in_axes=(axes, 0)),
    (forward.args[0], ct),
    (forward.specs[0], forward.results),
    (forward.results, {n: P(part, *s) for n, s in case.specs().items()}),
    mapped=forward.mapped,
  )


def _vjp_vmap(case: Case) -> Call:
  """Gradients of a batch; that of B is a sum."""
  forward = _vmap(case)
  ct = jnp.stack([_cotangent(case) * (i + 1) for i in range(_EXAMPLES)])
  one = _vjp(case)
  return Call(
    lambda f: one.wrap(forward.wrap(f)),
    (forward.args[0], ct),
    (forward.specs[0], forward.results),
    (forward.results, forward.specs[0]),
    mapped=forward.mapped,
  )


def free_axis(case: Case) -> str | None:
  """An axis that nothing is sharded over."""
  used = str([case.out, *case.specs().values()])
  return next((axis for axis in "yx" if f"'{axis}'" not in used), None)


TRANSFORMATIONS: dict[str, Callable[[Case], Call]] = {
  "jit": _call,
  "vjp": _vjp,
  "jvp": _jvp,
  "vmap": _vmap,
  "vmap of all": functools.partial(_vmap, every=True),
  "vmap, not sharded": functools.partial(_vmap, sharded=False),
  "eager": functools.partial(_call, jit=False),
  "eager vjp": functools.partial(_vjp, jit=False),
  "grad": _grad,
  "remat": functools.partial(_vjp, remat=True),
  "grad of grad": _hvp,
  "vmap of vjp": _vmap_vjp,
  "vjp of vmap": _vjp_vmap,
}
_EVERY = ("jit", "vjp", "jvp", "vmap")

# Cases that meet the transformations and modes that others are spared.
SEVERAL = (
  "matmul: M, N, bias, silu",
  "matmul: K, alpha, C, bias, silu",
  "matmul: S of [B, S, K]",
  "gated_matmul: M, N",
  "dot_general: M, N",
  "ragged_dot: rows, N, bias, tanh",
  "ragged_dot: groups, bias, tanh",
  "gated_ragged_dot: rows, N",
  "ragged_dot_general: sums over rows; M, N",
)
# Their local product, and for K the sum of it, is what a user of shard_map
# writes.
LOCAL = (
  "matmul: M",
  "matmul: N",
  "matmul: K",
  "matmul: M, N, bias, silu",
  "matmul: M, N, both stored transposed",
  "matmul: B and S of [B, S, K]",
  "gated_matmul: M, N",
  "dot_general: M, N",
  "ragged_dot: N",
  "ragged_dot: K",
  "gated_ragged_dot: N",
  "ragged_dot_general: sums over rows; M, N",
)


@dataclasses.dataclass(frozen=True)
class Unit:
  """One check."""

  case: Case
  mode: Mode
  transformation: str

  @property
  def key(self) -> str:
    """The check in a line."""
    return f"{self.case.key} | {self.mode.name} | {self.transformation}"


def units(full: bool = False) -> Iterator[Unit]:
  """The matrix.

  Args:
    full: every case meets every transformation under every mesh; else the first
      of an op in `SEVERAL` meets those transformations that others are spared,
      and the rest of `SEVERAL` every other one.
  """
  ops = set()
  for i, case in enumerate(CASES):
    several = full or case.key in SEVERAL
    first = several and case.op not in ops
    ops |= {case.op} if several else set()
    for j, name in enumerate(TRANSFORMATIONS):
      of_all = name in _EVERY
      if of_all or full or first or (several and (i + j) % 2 == 0):
        yield Unit(case, EXPLICIT, name)
      if case.auto and (
        full
        or name in ("vjp", "vmap")
        or (several and (name == "jit" or (i + j) % 3 == 0))
      ):
        yield Unit(case, AUTO, name)
      if several and (full or name in ("vjp", "eager")):
        yield Unit(case, EXPLICIT_UNSET, name)
        if case.auto:
          yield Unit(case, AUTO_UNSET, name)
    if case.key in LOCAL:
      for name in ("jit", "vjp", "vmap") if several else ("vjp",):
        yield Unit(case, MANUAL, name)
      for mode in (MANUAL_UNSET, PARTIAL, PARTIAL_EXPLICIT):
        yield Unit(case, mode, "vjp")
    if case.key in SEVERAL and not case.ask:
      yield Unit(case, MIXED, "vjp")
    if case.key in ("matmul: M, N, bias, silu", "ragged_dot: rows, N"):
      for mode in SMALL:
        yield Unit(case, mode, "vjp")


def needed(unit: Unit, arm: str, full: bool) -> bool:
  """Whether an arm runs a unit; the rules of derivatives are those of both."""
  if full or arm != "default" or unit.mode.mixed:
    return True
  several = unit.case.key in SEVERAL
  return unit.transformation == "vjp" and (several or unit.mode is EXPLICIT)


# Arms.


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
  def reference(self) -> bool:
    """Whether jnp does."""
    return self.name == "reference"

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
    case, mode = unit.case, unit.mode
    if self.reference:
      op = case.plain(mode.asked(case))
      typed = case.grouped and mode.typed
      return _untyped(case, op, mode) if typed else op
    how = self.how
    if self.kernel and not mode.kernels:
      how = {"implementation": ("sm90", "xla")}
    return case.ours(mode.asked(case), **how)


def _untyped(
  case: Case, op: Callable[..., Any], mode: Mode
) -> Callable[..., Any]:
  """A grouped product in jnp under an Explicit mesh: of whole operands."""

  def call(x):
    def place(value, spec):
      mesh = jax.typeof(next(iter(x.values()))).sharding.mesh
      return jax.sharding.reshard(value, NamedSharding(mesh, spec))

    whole = {name: place(v, P()) for name, v in x.items()}
    return place(op(whole), mode.typed_part(case.out))

  return call


# Checks.


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
  keep = functools.partial(_only, axes=mode.manual)
  summed = _axes(case.specs().values()) - _axes([case.out])
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
  )


def _axes(specs: Any) -> set[str]:
  return {axis for spec in specs for part in spec for axis in _parts(part)}


def _parts(part: Any) -> tuple[str, ...]:
  return part if isinstance(part, tuple) else () if part is None else (part,)


def _only(spec: P, axes: tuple[str, ...]) -> P:
  kept = [tuple(a for a in _parts(part) if a in axes) for part in spec]
  return P(*[p[0] if len(p) == 1 else p or None for p in kept])


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
  if not arm.reference and call.jit:
    _check_collectives(unit, arm, got.collectives, want.collectives)
  if arm.kernel:
    _check_shares(unit, call, arm.calls)
  return want.collectives


@contextlib.contextmanager
def logged_warnings() -> Iterator[list[str]]:
  """Context: yields the messages that absl logs as warnings."""
  messages: list[str] = []

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
  case, exception = unit.case, listed(unit.key)
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
  exact = tuple(sizes[name] // pieces[name] for name in names[:2])
  sizes["out"] = _cotangent(case).size
  given = [tuple(int(np.prod(s)) for s in c.shapes[:2]) for c in calls]
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
  return int(np.prod([{"x": 4, "y": 2}[axis] for axis in _axes([spec])]))
