"""How a product is lowered for one device, or for the shards of many.

A kernel runs on one device. Where operands are sharded, `plan` says what each
device multiplies, and `_on_shard` is that product with the collectives around
it. Explicit mesh axes are in the types: there a `jax.shard_map` does it. Auto
axes are known when XLA partitions: there `custom_partitioning` asks for the
same plan then. What no kernel could take is left to XLA as a whole.

Source: JAX's own rules for cuDNN attention and `scaled_matmul`, which lower a
wrapper to `custom_partitioning`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import hashlib
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from pallas_gemm import compat, hardware, report
from pallas_gemm.ops import folding, implementations
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.implementations import Target
from pallas_gemm.ops.spec import Operands, Spec
from pallas_gemm.version import __version__

Axes = tuple[str, ...]
Product = Callable[[Operands, Spec], list[jax.Array]]


class Plan(NamedTuple):
  """What a device does of a sharded product.

  Attributes:
    operands: a PartitionSpec of each operand that a device reads.
    psum: the axes that sums are spread over.
    scatter: of those, by letter of the result, the axes over which a dimension
      of the sums is scattered.
    rows: the axes that the rows of groups are sharded over while multiplying,
      and then in the result.
    groups: the axes that groups are sharded over.
  """

  operands: Operands
  psum: Axes
  scatter: Mapping[str, Axes]
  rows: tuple[Axes, Axes]
  groups: Axes

  def __str__(self) -> str:
    words = [
      f"{name} {spec}"
      for name, spec in zip(self.operands._fields, self.operands)
      if spec is not None
    ]
    if self.scatter:
      words.append(f"psum_scatter {dict(self.scatter)}")
    scattered = sum(self.scatter.values(), ())
    if rest := [axis for axis in self.psum if axis not in scattered]:
      words.append(f"psum {rest}")
    return ", ".join(words)


def plan(
  spec: Spec,
  have: Operands,
  out: PartitionSpec,
  mesh: Mapping[str, int],
  size: Mapping[str, int],
) -> Plan:
  """Which parts a device multiplies.

  A device computes its part of the result. What is summed over and sharded
  alike in A and B is multiplied in parts and added up by a psum, or scattered
  where the result is sharded over the same axes; otherwise it is gathered, as
  XLA does. Groups (experts) are summed over, too: a device multiplies the rows
  of its own, and the others are zero.

  Args:
    spec: the product.
    have: the PartitionSpec of each operand.
    out: of the result.
    mesh: sizes of the mesh's axes.
    size: of each letter.
  """

  def parts(word, given):
    given = (*given, *(None,) * (len(word or "") - len(given)))
    return {
      c: tuple(x for x in _axes(part) if mesh[x] > 1)
      for c, part in zip(word or "", given)
    }

  def divides(letter, axes):
    return size[letter] % math.prod(mesh[x] for x in axes) == 0

  w, at = spec.words, parts(spec.out, out)
  a, b = parts(w.a, have.a), parts(w.b, have.b)
  up = b if w.b_up is None else parts(w.b_up, have.b_up)
  summed = {}
  for c in spec.contracted:
    # As far as they are sharded alike.
    alike = itertools.takewhile(
      lambda axes: len(set(axes)) == 1, zip(a[c], b[c], up[c])
    )
    axes = tuple(axis for axis, *_ in alike)
    if not axes:
      axes = _cut_for_nothing(c, (w.a, a), (w.b, b), (spec.out, at), mesh, size)
    if axes and divides(c, axes):
      summed[c] = axes
  if spec.ragged == "m" and b["g"] == up["g"] and divides("g", b["g"]):
    summed |= {"g": b["g"]} if b["g"] else {}
  while True:
    psum = set(sum(summed.values(), ()))
    scatter = {
      c: hit
      for c, axes in at.items()
      if (hit := tuple(x for x in axes if x in psum))
    }
    # Scattered is what varies fastest. Sums of all groups may be too large.
    bad = {
      x
      for c, hit in scatter.items()
      if at[c][-len(hit) :] != hit or c == "g" or not divides(c, at[c])
      for x in hit
    }
    if not bad:
      break
    summed = {
      c: tuple(x for x in axes if x not in bad) for c, axes in summed.items()
    }
  multiplied = {
    c: axes[: len(axes) - len(scatter.get(c, ()))] for c, axes in at.items()
  }
  product = multiplied | summed
  # What is applied to the sums has the parts that the result has.
  operands = Operands(
    *[
      None
      if word is None
      else PartitionSpec(
        *[
          (product if name in ("a", "b", "b_up") else at).get(c) or None
          for c in word
        ]
      )
      for name, word in w._asdict().items()
    ]
  )
  ragged = spec.ragged or ""
  return Plan(
    operands,
    tuple(sorted(psum)),
    scatter,
    (product.get(ragged, ()), at.get(ragged, ())),
    summed.get("g", at.get("g", ())),
  )


# Elements of an operand that are gathered in the time that one result of 32
# bits is added up over devices: each of those is sent twice, and twice as wide.
_GATHERED_PER_RESULT = 4


def _cut_for_nothing(
  c: str, a, b, result, mesh: Mapping[str, int], size: Mapping[str, int]
) -> Axes:
  """Axes over which one operand is sharded along K, and the other whole.

  That one is cut for nothing, unless it is sharded over them elsewhere. Then
  results are added up if they are much smaller than what would be gathered, as
  the gradient of weights is beside the activations.
  """
  if bool(a[1][c]) == bool(b[1][c]):
    return ()
  (word, parts), (_, whole) = (a, b) if a[1][c] else (b, a)
  if set(parts[c]) & {x for axes in whole.values() for x in axes}:
    return ()

  def elements(word, parts, without=""):
    axes = [x for d, part in parts.items() if d != without for x in part]
    count = math.prod(size[d] for d in word)
    return count / math.prod(mesh[x] for x in axes)

  gathered = elements(word, parts, c)
  few = _GATHERED_PER_RESULT * elements(*result) <= gathered
  return parts[c] if few else ()


def _axes(part: Any) -> Axes:
  if part is None or isinstance(part, str):
    return () if part is None else (part,)
  return tuple(part) if isinstance(part, tuple) else (part,)


def _on_shard(
  *operands: jax.Array, spec: Spec, plan: Plan, product: Product
) -> list[jax.Array]:
  """A device's part of the results, inside of a shard_map over all axes."""
  spec = dataclasses.replace(
    spec,
    parts=PartitionSpec(),
    around=str(plan),
    # Of the rows before a device's own groups.
    leading_rows=spec.leading_rows or bool(plan.groups),
  )
  x = spec.named(operands)

  def run(x: Operands, spec: Spec) -> list[jax.Array]:
    whole = x.offsets
    if spec.ragged:
      rows = x.a.shape[spec.words.a.index(spec.ragged)]
      offsets = _own_groups(whole, plan.groups)
      x = x._replace(offsets=_clipped(offsets, rows, plan.rows[0]))
    if not plan.psum:
      return product(x, spec)
    wide = x.wide(spec.out_dtype)
    sums = []
    for b, word in ((x.b, spec.words.b), (x.b_up, spec.words.b_up)):
      if b is not None:
        words = Operands(spec.words.a, word, offsets=spec.words.offsets)
        alone = spec.product_alone(words=words, out_dtype=wide)
        (z,) = product(Operands(x.a, b, offsets=x.offsets), alone)
        sums.append(_added_up(z, spec.out, plan))
    if spec.ragged == "m":
      rows = sums[0].shape[spec.out.index("m")]
      x = x._replace(offsets=_clipped(whole, rows, plan.rows[1]))
    return spec_lib.epilogue(sums, x, spec)

  if not spec.ragged:
    return run(x, spec)
  grouped = functools.partial(folding.grouped, run)
  return folding.over_batch(grouped, x, spec)


def _clipped(offsets: jax.Array, rows: int, axes: Axes) -> jax.Array:
  """Where groups start in a device's own rows."""
  if not axes:
    return offsets
  return jnp.clip(offsets - lax.axis_index(axes) * rows, 0, rows)


def _own_groups(offsets: jax.Array, axes: Axes) -> jax.Array:
  """Where a device's own groups start; those past the last are empty."""
  if not axes:
    return offsets
  shards = lax.psum(1, axes)
  groups = -(-(offsets.shape[0] - 1) // shards)
  more = groups * shards - (offsets.shape[0] - 1)
  offsets = jnp.pad(offsets, (0, more), mode="edge")
  first = lax.axis_index(axes) * groups
  return lax.dynamic_slice(offsets, (first,), (groups + 1,))


def _added_up(z: jax.Array, out: str, plan: Plan) -> jax.Array:
  for letter, axes in plan.scatter.items():
    dim = out.index(letter)
    z = lax.psum_scatter(z, axes, scatter_dimension=dim, tiled=True)
  scattered = sum(plan.scatter.values(), ())
  rest = tuple(axis for axis in plan.psum if axis not in scattered)
  return lax.psum(z, rest) if rest else z


# Lowering.

_INTERPRETED = (
  "XLA can't partition an interpreted kernel; use Explicit mesh axes or"
  " jax.shard_map"
)


def lower(ctx, *operands, spec: Spec, product: Product, cuda: bool):
  """The rule of the primitive; `product` binds it."""
  module, target = ctx.module_context, Target(cuda)
  x = spec.named(ctx.avals_in)
  if not compat.is_partitioned(module.axis_context):
    return _for_one_device(ctx, operands, spec, target)
  mesh = ctx.avals_out[0].sharding.mesh
  kernel = implementations.may_run_kernel(spec, x, target)
  is_explicit = AxisType.Explicit in mesh.axis_types
  if is_explicit and (kernel or spec.ragged):
    return _by_shard_map(ctx, operands, spec, target, mesh, product)
  if not kernel:
    return _whole(ctx, operands, spec, target, mesh, "")
  reason = compat.why_not_partitionable(ctx)
  if reason is None and not cuda and x.a.dtype.itemsize == 2:
    if "sm90" in implementations.names(spec, target):
      reason = _INTERPRETED
  if reason is not None:
    return _whole(ctx, operands, spec, target, mesh, reason)
  return _by_xla(ctx, operands, spec, target, product)


def _for_one_device(ctx, operands, spec: Spec, target: Target):
  """A kernel is traced for one device.

  That it is inside of a shard_map shows in the types of its operands alone, and
  is of no concern from here on.
  """
  run = functools.partial(implementations.run, spec=spec, target=target)
  with _one_device(target.cuda):
    return _lowered(ctx, run, operands)


def _lowered(ctx, run, operands, typed: bool = False):
  """A function of arrays, lowered; `typed` if their shardings concern it."""
  inner = ctx
  if not typed:
    plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    inner = ctx.replace(avals_in=plain)
  outs = mlir.lower_fun(run)(inner, *operands)
  if (
    inner is not ctx and inner.tokens_out is not None
  ):  # of an interpreted kernel's effects
    ctx.set_tokens_out(inner.tokens_out)
  return outs


def _one_device(cuda: bool):
  """Context: kernels are traced for one device of what is lowered for."""
  if cuda and not compat.targets_gpu():  # ahead of time, without a GPU
    return hardware.assume(hardware.DEFAULT_NAME)
  if not cuda and compat.targets_gpu():
    return compat.one_device("cpu")
  return compat.one_device()


def _by_shard_map(
  ctx, operands, spec: Spec, target: Target, mesh, product: Product
):
  """Explicit axes: what lies where is in the types."""
  x = spec.named(ctx.avals_in)
  have = Operands(*[v if v is None else v.sharding.spec for v in x])
  out = ctx.avals_out[0].sharding.spec
  size, axes = spec.letters(x), dict(zip(mesh.axis_names, mesh.axis_sizes))
  todo = plan(spec, have, out, axes, size)
  _check_order(spec, todo, target)
  specs = tuple(todo.operands.present())
  # The result is handed over with its type's own parts.
  names = {
    name
    for name, kind in zip(mesh.axis_names, mesh.axis_types)
    if kind == AxisType.Explicit
  }

  def run(*operands):
    operands = [
      jax.sharding.reshard(v, NamedSharding(mesh, to))
      for v, to in zip(operands, specs)
    ]
    body = functools.partial(_on_shard, spec=spec, plan=todo, product=product)
    # Nothing differentiates this: what varies over which axis is no concern.
    return jax.shard_map(
      body,
      in_specs=specs,
      out_specs=[out] * spec.outputs,
      axis_names=names,
      check_vma=False,
    )(*operands)

  with jax.sharding.use_abstract_mesh(mesh):
    return _lowered(ctx, run, operands, typed=True)


def _by_xla(ctx, operands, spec: Spec, target: Target, product: Product):
  """Auto axes: XLA says what lies where when it partitions the program."""
  x = spec.named(ctx.avals_in)
  size = spec.letters(x)
  words = [" ".join(word) for word in spec.words.present()]
  results = ctx.avals_out

  def partition(mesh, args, outs):
    have = spec.named([v.sharding.spec for v in args[:-1]])
    out = outs[0].sharding.spec
    todo = plan(spec, have, out, mesh.shape, size)
    _check_order(spec, todo, target)
    body = functools.partial(_on_shard, spec=spec, plan=todo, product=product)
    to = functools.partial(NamedSharding, mesh)
    return (
      mesh,
      lambda *operands: body(*operands[:-1]),
      [to(out)] * spec.outputs,
      (*map(to, todo.operands.present()), to(PartitionSpec(None))),
    )

  # It is traced at the global shapes, for its types alone.
  @custom_partitioning
  def op(*_):
    return [jnp.zeros(v.shape, v.dtype) for v in results]

  summed = spec.contracted + ("g" if spec.ragged == "m" else "")
  op.def_partition(
    partition,
    sharding_rule=(
      f"{', '.join(words)}, digest -> "
      + ", ".join([" ".join(spec.out)] * spec.outputs)
    ),
    # In the order in which the rule names them.
    reduction_factors=tuple(summed),
    need_replication_factors=(*("o" if spec.ragged else ""), "digest"),
  )
  ctx = compat.with_mesh(ctx)
  run = lambda *operands: op(*operands, jnp.asarray(digest(spec)))  # noqa: E731
  return _lowered(ctx, run, operands)


def digest(spec: Spec) -> np.ndarray:
  """Tells products of equal shapes apart in a program.

  The call that XLA partitions shows neither activation nor config. JAX's
  persistent cache may leave out what it does show, a pointer, and would give
  one product the other's program; the constant operand that this is it keeps.
  """
  activation = spec.activation and spec.activation.jaxpr
  text = repr((dataclasses.replace(spec, activation=None), activation))
  text = hashlib.sha256(f"{__version__} {text}".encode()).digest()
  return np.frombuffer(text[:16], np.int32)


def _check_order(spec: Spec, todo: Plan, target: Target) -> None:
  if not (spec.batch_invariant and todo.psum):
    return
  if "sm90" in implementations.names(spec, target):
    raise NotImplementedError(
      f"batch_invariant() with sums over the mesh axes {todo.psum}: the order"
      " in which devices' sums are added is not known; gather K first"
    )
  implementations.check_invariance(spec, target)  # as elsewhere off Hopper


def _whole(ctx, operands, spec: Spec, target: Target, mesh, reason: str):
  """XLA's product of the arrays as they are, for XLA to partition."""
  names = implementations.names(spec, target)
  if reason and "xla" not in names:
    raise NotImplementedError(
      f"no implementation of {names} computes a product here: {reason}"
    )
  if reason:
    report.warn_once(f"XLA's product runs instead of a kernel: {reason}")
  is_explicit = AxisType.Explicit in mesh.axis_types
  avals = spec.named(ctx.avals_in)
  shapes = tuple(v.shape for v in avals.present())
  words = f"{avals.a.dtype.name} {spec.words.a} x {spec.words.b} -> {spec.out}"
  why = reason or "XLA's alone is asked for, or takes these dtypes"
  report.ran(report.Ran(words, "xla", None, why, shapes, "partitioned by XLA"))

  def run(*operands):
    return _xla_of_any_rank(spec.named(operands), spec, target, mesh)

  if not is_explicit:
    with _one_device(target.cuda):
      return _lowered(ctx, run, operands)
  with jax.sharding.use_abstract_mesh(mesh):
    return _lowered(ctx, run, operands, typed=True)


def _xla_of_any_rank(x: Operands, spec: Spec, target: Target, mesh):
  if spec.ragged:
    return implementations.run(
      *x.present(),
      spec=dataclasses.replace(spec, implementation=("xla",)),
      target=target,
    )
  to = None
  if AxisType.Explicit in mesh.axis_types:
    parts = (*spec.parts, *(None,) * (len(spec.out) - len(spec.parts)))
    to = NamedSharding(mesh, PartitionSpec(*parts))
  outs, shape = implementations.xla(x, spec, target, to), spec.shape(x)
  # A dimension that C alone has is still missing in a product alone.
  at = tuple(range(len(shape)))
  return [
    v
    if v.shape == shape
    else lax.broadcast_in_dim(v, shape, at, out_sharding=to)
    for v in outs
  ]
