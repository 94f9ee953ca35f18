"""What `meshes` runs: ops under transformations and modes of meshes."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.mesh_cases import CASES
from tests.support.mesh_ops import Case
from tests.support.products import normal


@dataclasses.dataclass(frozen=True)
class Mode:
  """How the devices are made known, and to whom.

  Attributes:
    name: in words.
    explicit: the axes are Explicit; else Auto.
    mixed: x is Explicit and y is Auto.
    set_mesh: inside of `jax.set_mesh`.
    manual: axes of a `jax.shard_map` around the op.
    check_vma: what that is told.
    shape: of the mesh.
  """

  name: str
  explicit: bool = False
  mixed: bool = False
  set_mesh: bool = True
  manual: tuple[str, ...] = ()
  check_vma: bool = True
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
    return only(spec, ("x",)) if self.mixed else spec

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
UNCHECKED = Mode("shard_map, no VMA", manual=("x", "y"), check_vma=False)
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


def cotangent(case: Case) -> jax.Array:
  """Of the result."""
  shape = jax.eval_shape(case.plain(), case.arrays()).shape
  return normal(*shape, seed=99)


def _vjp(case: Case, *, remat: bool = False, jit: bool = True) -> Call:
  """Value and gradients; by `jax.vjp`, so that no loss adds collectives."""

  def wrap(f):
    def value_and_gradients(x, ct):
      out, pull = jax.vjp(jax.checkpoint(f) if remat else f, x)
      return out, pull(ct)[0]

    return value_and_gradients

  return Call(
    wrap,
    (case.arrays(), cotangent(case)),
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
  ct = jnp.stack([cotangent(case) * (i + 1) for i in range(_EXAMPLES)])
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


def units() -> Iterator[Unit]:
  """The matrix.

  The first case of an op in `SEVERAL` meets those transformations that others
  are spared, and the rest of `SEVERAL` every other one. Those that are not in
  `SEVERAL` meet derivatives, and every other one of `_EVERY`.
  """
  ops = set()
  for i, case in enumerate(CASES):
    several = case.key in SEVERAL
    first = several and case.op not in ops
    ops |= {case.op} if several else set()
    for j, name in enumerate(TRANSFORMATIONS):
      of_all = name in _EVERY and (several or name == "vjp" or (i + j) % 2)
      if of_all or first or (several and (i + j) % 2 == 0):
        yield Unit(case, EXPLICIT, name)
      if case.auto and (
        name == "vjp"
        or (name == "vmap" and (several or i % 2 == 0))
        or (several and (name == "jit" or (i + j) % 3 == 0))
      ):
        yield Unit(case, AUTO, name)
      if several and name in ("vjp", "eager"):
        yield Unit(case, EXPLICIT_UNSET, name)
        if case.auto:
          yield Unit(case, AUTO_UNSET, name)
    if case.key in LOCAL:
      for name in ("jit", "vjp", "vmap") if several else ("vjp",):
        yield Unit(case, MANUAL, name)
      for mode in (MANUAL_UNSET, UNCHECKED, PARTIAL, PARTIAL_EXPLICIT):
        yield Unit(case, mode, "vjp")
    if case.key in SEVERAL and not case.ask:
      yield Unit(case, MIXED, "vjp")
    if case.key in ("matmul: M, N, bias, silu", "ragged_dot: rows, N"):
      for mode in SMALL:
        yield Unit(case, mode, "vjp")


def needed(unit: Unit, arm: str) -> bool:
  """Whether an arm runs a unit; the rules of derivatives are those of both."""
  if arm != "default" or unit.mode.mixed:
    return True
  several = unit.case.key in SEVERAL
  return unit.transformation == "vjp" and (several or unit.mode is EXPLICIT)


# Specs.


def axes_of(specs: Any) -> set[str]:
  """What any dimension is sharded over."""
  return {axis for spec in specs for part in spec for axis in _parts(part)}


def _parts(part: Any) -> tuple[str, ...]:
  return part if isinstance(part, tuple) else () if part is None else (part,)


def only(spec: P, axes: tuple[str, ...]) -> P:
  """The part of a spec that is of these axes."""
  kept = [tuple(a for a in _parts(part) if a in axes) for part in spec]
  return P(*[p[0] if len(p) == 1 else p or None for p in kept])
