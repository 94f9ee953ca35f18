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

from tests.support.mesh_cases import CASES, Case
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


def _vmap(case: Case, *, every: bool = False) -> Call:
  """Over A alone, sharded over an axis that is free, or over all arrays."""
  part = None if every else free_axis(case)
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
  "vjp": _vjp,
  "jit": _call,
  "jvp": _jvp,
  "vmap": _vmap,
  "vmap of all, not sharded": functools.partial(_vmap, every=True),
  "eager vjp": functools.partial(_vjp, jit=False),
  "remat": functools.partial(_vjp, remat=True),
  "grad of grad": _hvp,
  "vmap of vjp": _vmap_vjp,
  "vjp of vmap": _vjp_vmap,
}

# The case of each op that meets every transformation.
EACH_OP = (
  "matmul: M, N, bias, silu",
  "gated_matmul: M, N",
  "dot_general: M, N",
  "ragged_dot: N",
  "gated_ragged_dot: N",
  "ragged_dot_general: sums over rows; M, N",
)
# Two of those ops meet each of these modes.
_OTHERS = MANUAL_UNSET, UNCHECKED, PARTIAL, PARTIAL_EXPLICIT
_OTHERS += EXPLICIT_UNSET, AUTO_UNSET


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


def units() -> Iterator[tuple[Unit, tuple[str, ...]]]:
  """A cover: the checks, and the arms that run each.

  Each case meets derivatives under Explicit axes, and under Auto axes or with
  one more transformation. One case of each op meets every
  transformation.
  """
  both, kernel = ("default", "kernel"), ("kernel",)
  names = [name for name in TRANSFORMATIONS if name != "vjp"]
  for i, case in enumerate(CASES):
    yield Unit(case, EXPLICIT, "vjp"), both if i % 3 == 0 else kernel
    if case.key in EACH_OP:
      yield Unit(case, AUTO, "vjp"), both
      for j, name in enumerate(names):
        yield Unit(case, (EXPLICIT, AUTO)[(i + j) % 2], name), kernel
      yield Unit(case, MIXED, "vjp"), both
      for mode in (MANUAL, *_OTHERS[EACH_OP.index(case.key) % 3 :: 3]):
        yield Unit(case, mode, "vjp"), kernel
    elif case.auto and i % 2:
      yield Unit(case, AUTO, "vjp"), kernel
    else:
      yield Unit(case, EXPLICIT, ("jit", "jvp", "vmap")[i // 2 % 3]), kernel
    if case.key == "ragged_dot: rows, N":
      for mode in SMALL:
        yield Unit(case, mode, "vjp"), kernel


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
