"""How a product is lowered for one device, or for the shards of many.

A kernel runs on one device. Where operands are sharded, `mesh_plan` says what
each device multiplies, and `_on_shard` is that product with the collectives
around it. Explicit mesh axes are in the types: there a `jax.shard_map` does it.
Auto axes are known when XLA partitions: there `custom_partitioning` asks for
the same plan then. What no kernel could take is left to XLA as a whole.

Source: JAX's own rules for cuDNN attention and `scaled_matmul`, which lower a
wrapper to `custom_partitioning`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
import math

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from pallas_gemm import compat, hardware, report
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.ops import folding, implementations, scales, sm90, xla
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.mesh_plan import Axes, MeshPlan, plan_of
from pallas_gemm.ops.spec import Operands, Spec
from pallas_gemm.ops.xla_parts import parts_of
from pallas_gemm.version import __version__

Product = Callable[[Operands, Spec], list[jax.Array]]


def _on_shard(
  *operands: jax.Array, spec: Spec, plan: MeshPlan, product: Product
) -> list[jax.Array]:
  """A device's part of the results, inside of a shard_map over all axes."""
  reduce_dtype = spec.reduce_dtype
  spec = dataclasses.replace(
    spec,
    parts=PartitionSpec(),
    around=str(plan),
    reduce_dtype=None,
    # Of the rows before a device's own groups.
    leading_rows=spec.leading_rows or bool(plan.groups),
  )
  x = spec.named(operands)
  x, spec = _with_own_blocks(x, spec, plan)

  def run(x: Operands, spec: Spec) -> list[jax.Array]:
    whole = x.offsets
    if spec.ragged:
      rows = x.a.shape[spec.words.a.index(spec.ragged)]
      offsets = _own_groups(whole, plan.groups)
      x = x._replace(offsets=_clipped(offsets, rows, plan.rows[0]))
    if not plan.psum:
      return product(x, spec)
    sums, wide = [], x.wide(spec.out_dtype)
    dtype = wide
    if reduce_dtype is not None and jnp.can_cast(reduce_dtype, wide):
      dtype = reduce_dtype
    for one, alone in spec.products(x, out_dtype=dtype):
      one, alone = _scattered_first(one, alone, plan)
      said = f"{plan} of {dtype.name}{list(alone.shape(one))}"
      (z,) = product(one, dataclasses.replace(alone, around=said))
      z = _added_up(z, alone.out, plan).astype(wide)
      sums.append(spec_lib.lifted(z, alone.out, spec.out))
    if spec.ragged == "m":
      rows = sums[0].shape[spec.out.index("m")]
      x = x._replace(offsets=_clipped(whole, rows, plan.rows[1]))
    outs = spec_lib.epilogue(sums, x, spec)
    return [jnp.broadcast_to(out, outs[0].shape) for out in outs]

  if not spec.ragged:
    return run(x, spec)
  grouped = functools.partial(folding.grouped, run)
  return folding.over_batch(grouped, x, spec)


def _with_own_blocks(
  x: Operands, spec: Spec, plan: MeshPlan
) -> tuple[Operands, Spec]:
  """Scales of blocks that shards cut: those of a device's own indices, each."""
  found, words, size = {}, {}, spec.letters(x)
  for field, scale, word, of in scales.present(x, spec.words):
    name = scales.FIELDS[field]
    parts = dict(
      zip(word, (*getattr(plan.operands, name), *[None] * len(word)))
    )
    of_operand = dict(zip(of, getattr(plan.operands, field)))
    for c in word:
      whole = spec_lib.whole_of(c)
      axes = of_operand.get(whole)
      if c == whole or parts[c] or not axes:
        continue
      number = lax.axis_index(axes) * size[whole] + lax.iota(
        jnp.int32, size[whole]
      )
      scale = jnp.take(
        scale, number // scales.BLOCK, axis=word.index(c), mode="clip"
      )
      word = word.replace(c, whole)
    found[name], words[name] = scale, word
  words = spec.words._replace(**words)
  return x._replace(**found), dataclasses.replace(spec, words=words)


def _clipped(offsets: jax.Array, rows: int, axes: Axes) -> jax.Array:
  """Where groups start in a device's own rows."""
  if not axes:
    return offsets
  shard, most = lax.axis_index(axes), jnp.iinfo(offsets.dtype).max
  if not isinstance(rows, int) or rows * lax.psum(1, axes) <= most:
    return jnp.clip(offsets - shard * rows, 0, rows)
  # Rows that offsets have no numbers for are in no group.
  first = shard.astype(offsets.dtype) * min(rows, most)
  first = jnp.where(shard > most // rows, most, first)
  return jnp.clip(offsets - first, 0, min(rows, most))


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


def _scattered_first(
  x: Operands, spec: Spec, plan: MeshPlan
) -> tuple[Operands, Spec]:
  """The product, with the dimension in front that is scattered.

  XLA copies an array to scatter another dimension than the first. A result is
  computed transposed for nothing; rows of a batch in another order cost a copy
  of A, which is done if A is smaller.
  """
  first = next((c for c in plan.scatter if c in spec.out), "")
  if spec.ragged or spec.out.startswith(first):
    return x, spec
  w, size, swapped = spec.words, spec.letters(x), x
  if first not in w.a:
    if x.has_planes:  # which B alone has
      return x, spec
    swapped, w = (
      v._replace(a=v.b, b=v.a, scale_a=v.scale_b, scale_b=v.scale_a)
      for v in (x, w)
    )
  free = [c for c in w.a if c in spec.out and size[c] != 1]
  if free[:1] != [first]:
    copied = swapped.a.size, math.prod(spec.shape(x))
    if not all(isinstance(n, int) for n in copied) or copied[0] > copied[1]:
      return x, spec
  out = first + spec.out.replace(first, "")
  return swapped, dataclasses.replace(spec, words=w, out=out)


def _added_up(z: jax.Array, out: str, plan: MeshPlan) -> jax.Array:
  done: Axes = ()
  for letter, axes in plan.scatter.items():
    if letter in out:  # else C alone has it, say
      dim = out.index(letter)
      z = lax.psum_scatter(z, axes, scatter_dimension=dim, tiled=True)
      done += axes
  rest = tuple(axis for axis in plan.psum if axis not in done)
  return lax.psum(z, rest) if rest else z


# Lowering.

_ON_HOST = "operands lie in the host's memory; kernels have them on the device"
_FOR_GPU = "what is traced for a GPU is not interpreted on other devices"
_INTERPRETED = (
  "XLA can't partition an interpreted kernel, which runs on one device; leave"
  " implementation to its default on a mesh of CPUs"
)


def lower(ctx, *operands, spec: Spec, product: Product, platform: str | None):
  """The rule of the primitive; `product` binds it."""
  # Pallas itself keeps tracers of any kernel.
  with xla.on_cpu(platform == "cpu"), jax.check_tracer_leaks(False):
    return _lower(ctx, operands, spec, platform == "cuda", product)


def _lower(ctx, operands, spec: Spec, cuda: bool, product: Product):
  x, mesh = spec.named(ctx.avals_in), ctx.avals_out[0].sharding.mesh
  if x.a.memory_space != jax.memory.Space.Device:
    kernel = implementations.may_run_kernel(spec, x, cuda)
    return _whole(ctx, operands, spec, cuda, mesh, _ON_HOST if kernel else "")
  may_interpret = cuda or legal.wrong_gpu() or not compat.targets_gpu()
  if not may_interpret and sm90.is_asked_for(spec, x):
    return _whole(ctx, operands, spec, cuda, mesh, _FOR_GPU)
  if not compat.is_partitioned(ctx.module_context.axis_context):
    run = functools.partial(implementations.run, spec=spec)
    with lowered_for(ctx, cuda):
      return compat.lowered(ctx, run, operands, typed=False)
  kernel = implementations.may_run_kernel(spec, x, cuda)
  planned = kernel or spec.reduce_dtype is not None
  if _takes_shard_map(mesh.axis_types) and (planned or spec.ragged):
    return _by_shard_map(ctx, operands, spec, cuda, mesh, product)
  if not planned:
    return _whole(ctx, operands, spec, cuda, mesh, "")
  reason = compat.why_not_partitionable(ctx)
  if reason and not kernel:
    report.warn_once(f"reduce_dtype has no effect: {reason}")
    return _whole(ctx, operands, spec, cuda, mesh, "")
  if reason is None and not cuda and sm90.is_asked_for(spec, x):
    reason = _INTERPRETED
  if reason is not None:
    return _whole(ctx, operands, spec, cuda, mesh, reason)
  return _by_xla(ctx, operands, spec, cuda, product)


def _takes_shard_map(kinds: Sequence[AxisType]) -> bool:
  """Whether there are Explicit axes, and XLA takes a shard_map over them.

  Beside Auto axes XLA ends the process at one in a shard_map over later axes.
  """
  typed = [kind for kind in kinds if kind != AxisType.Auto]
  in_order = sorted(typed, key=lambda kind: kind == AxisType.Explicit)
  return AxisType.Explicit in kinds and (
    AxisType.Auto not in kinds or typed == in_order
  )


def lowered_for(ctx, cuda: bool):
  """Context: what is traced is for a device of the platform."""
  others = set(ctx.module_context.platforms) - {"cpu", "cuda"}
  if others and not cuda:
    return compat.one_device(min(others))
  targets_gpu, asked = compat.targets_gpu(), compat.abstract_device()
  if not cuda and targets_gpu:
    return compat.one_device("cpu")
  if targets_gpu or not cuda or (asked is not None and compat.is_amd(asked)):
    return compat.one_device()
  return hardware.assume(hardware.DEFAULT_NAME)  # ahead of time


def _planned(
  spec: Spec, have: Operands, out, axes, size, cuda: bool, product: Product
):
  """The plan, and the function of a device's operands that follows it."""
  todo = plan_of(spec, have, out, axes, size)
  if spec.batch_invariant and todo.psum:
    tried = implementations.HOPPER in implementations.names(spec, cuda)
    if tried and not (cuda and legal.wrong_gpu()):
      raise NotImplementedError(
        f"batch_invariant() with sums over the mesh axes {todo.psum}: the order"
        " in which devices' sums are added is not known; gather K first"
      )
    xla.check_invariance(True, cuda)  # as elsewhere off Hopper
  body = functools.partial(_on_shard, spec=spec, plan=todo, product=product)
  return todo, body


def _by_shard_map(
  ctx, operands, spec: Spec, cuda: bool, mesh, product: Product
):
  """Explicit axes: what lies where is in the types."""
  x = spec.named(ctx.avals_in)
  have = Operands(*[v if v is None else v.sharding.spec for v in x])
  out = ctx.avals_out[0].sharding.spec
  size, axes = spec.letters(x), dict(zip(mesh.axis_names, mesh.axis_sizes))
  todo, body = _planned(spec, have, out, axes, size, cuda, product)
  specs = tuple(todo.operands.present())
  # The result is handed over with its type's own parts.
  kinds = dict(zip(mesh.axis_names, mesh.axis_types))
  names = {name for name, kind in kinds.items() if kind == AxisType.Explicit}

  def run(*operands):
    operands = [
      jax.sharding.reshard(v, NamedSharding(mesh, to))
      for v, to in zip(operands, specs)
    ]
    # Nothing differentiates this: what varies over which axis is no concern.
    return jax.shard_map(
      body,
      in_specs=specs,
      out_specs=[out] * spec.outputs,
      axis_names=names,
      check_vma=False,
    )(*operands)

  with jax.sharding.use_abstract_mesh(mesh):
    return compat.lowered(ctx, run, operands, typed=True)


def _by_xla(ctx, operands, spec: Spec, cuda: bool, product: Product):
  """Auto axes: XLA says what lies where when it partitions the program."""
  size = spec.letters(spec.named(ctx.avals_in))
  results = ctx.avals_out

  def partition(mesh, args, outs):
    have = spec.named([parts_of(v, mesh) for v in args[:-1]])
    out = parts_of(outs[0], mesh)
    todo, body = _planned(spec, have, out, mesh.shape, size, cuda, product)
    to = functools.partial(NamedSharding, mesh)

    def local(*operands):
      with compat.one_device():  # also where Explicit axes are in force
        return body(*operands[:-1])

    return (
      mesh,
      local,
      [to(out)] * spec.outputs,
      (*map(to, todo.operands.present()), to(PartitionSpec(None))),
    )

  # It is traced at the global shapes, for its types alone.
  @custom_partitioning
  def op(*_):
    return [jnp.zeros(v.shape, v.dtype) for v in results]

  summed = spec.contracted + ("g" if spec.ragged == "m" else "")
  words = ", ".join(" ".join(map(_factor, w)) for w in spec.words.present())
  op.def_partition(
    partition,
    decode_shardings=False,  # JAX raises for a part of an axis
    sharding_rule=f"{words}, digest -> "
    + ", ".join([" ".join(spec.out)] * spec.outputs),
    # In the order in which the rule names them.
    reduction_factors=tuple(summed),
    need_replication_factors=(*("o" if spec.ragged else ""), "digest"),
  )
  ctx = compat.with_mesh(ctx)
  run = lambda *operands: op(*operands, jnp.asarray(digest(spec)))  # noqa: E731
  return compat.lowered(ctx, run, operands, typed=False)


def _factor(letter: str) -> str:
  """How a rule of shardings calls a dimension."""
  whole = spec_lib.whole_of(letter)
  return letter if letter == whole else f"blocks{whole}"


def digest(spec: Spec) -> np.ndarray:
  """Tells products of equal shapes apart in a program.

  The call that XLA partitions shows neither activation nor config. JAX's
  persistent cache may leave out what it does show, a pointer, and would give
  one product the other's program; the constant operand that this is it keeps.
  """
  activation = spec.activation and spec.activation.text
  text = repr((dataclasses.replace(spec, activation=None), activation))
  text = hashlib.sha256(f"{__version__} {text}".encode()).digest()
  return np.frombuffer(text[:16], np.int32)


def _whole(ctx, operands, spec: Spec, cuda: bool, mesh, reason: str):
  """XLA's product of the arrays as they are, for XLA to partition."""
  names, avals = implementations.names(spec, cuda), spec.named(ctx.avals_in)
  if "xla" not in names:
    why = reason or implementations.why_none(spec, avals, cuda)
    raise NotImplementedError(
      f"no implementation of {names} computes a product here: {why}"
    )
  if reason:
    report.warn_once(f"XLA's product runs instead of a kernel: {reason}")
  xla.check_invariance(spec.batch_invariant, cuda)
  shapes = tuple(v.shape for v in avals.present())
  words = f"{avals.a.dtype.name} {spec.words.a} x {spec.words.b} -> {spec.out}"
  why = reason or "no kernel is tried on this platform, or takes these dtypes"
  around = "partitioned by XLA; the shapes are of whole arrays"
  report.ran(report.Ran(words, "xla", None, why, shapes, around))
  to, shape = None, ctx.avals_out[0].shape
  if is_explicit := AxisType.Explicit in mesh.axis_types:
    to = NamedSharding(mesh, PartitionSpec(*spec.parts_of().values()))

  def run(*operands):
    if spec.ragged:  # no loop: XLA partitions none
      alone = dataclasses.replace(spec, config=None)
      return implementations.folded(*operands, spec=alone, run=_by_lax)
    x = spec.named(operands)
    outs = xla.run(_added_as_results(x, spec) if is_explicit else x, spec, to)
    # A dimension that C alone has is still missing in a product alone.
    at = tuple(range(len(shape)))
    return [
      v
      if v.shape == shape
      else lax.broadcast_in_dim(v, shape, at, out_sharding=to)
      for v in outs
    ]

  if not is_explicit:
    with lowered_for(ctx, cuda):
      return compat.lowered(ctx, run, operands, typed=False)
  with jax.sharding.use_abstract_mesh(mesh):
    return compat.lowered(ctx, run, operands, typed=True)


def _by_lax(x: Operands, spec: Spec) -> list[jax.Array]:
  """A grouped product as `lax.ragged_dot`."""
  is_empty = spec.is_empty(x)
  return spec_lib.without_product(x, spec) if is_empty else xla.run(x, spec)


def _added_as_results(x: Operands, spec: Spec) -> Operands:
  """The operands, with what is applied to sums sharded as the results are."""
  parts = spec.parts_of()
  names = "bias", "c", *scales.FIELDS.values()
  added = {
    name: jax.sharding.reshard(v, PartitionSpec(*map(parts.get, word)))
    for name in names
    if (v := getattr(x, name)) is not None
    for word in (getattr(spec.words, name),)
  }
  return x._replace(**added)
