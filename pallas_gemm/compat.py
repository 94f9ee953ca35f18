"""The module that touches private or version-dependent JAX.

But for `ptx`, which emits instructions, and `mosaic`, which changes how Mosaic
GPU does, everything else imports `jax`, `jax.experimental.pallas` and
`jax.experimental.pallas.mosaic_gpu` alone.
Mosaic GPU, which takes 0.4 s to import, is imported where a kernel is traced.
Supported: jax >= 0.11.2, < 0.13.
"""

from collections.abc import Callable, Hashable, Sequence, Set
import contextlib
import contextvars
import dataclasses
import functools
import os
import re
from typing import Any

from absl import logging
import jax
from jax import export, lax
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import xla_bridge as _xla_bridge
from jax._src.lax.lax import _convert_element_type
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

# Whether this package calls JAX; Qwix puts its functions in place of JAX's.
is_alone = contextvars.ContextVar("is_alone", default=False)
# Whether what is lowered is exported, so that it may name no layout.
_is_exported = contextvars.ContextVar("is_exported", default=False)

CUDA_PLATFORMS = ("gpu", "cuda")
# What a lowered program calls by custom_partitioning.
PARTITIONED_BY_XLA = "CustomSPMDPartitioning"

# XLA's CPU client runs host callbacks, and so what the threads of an
# interpreted kernel wait in, on a pool of as many threads as there are cores.
# A kernel with more of them waiting than that stands still for ever.
_HOST_THREADS = 32
_has_few = (os.cpu_count() or 1) < _HOST_THREADS
_has_few = _has_few and "PJRT_NPROC" not in os.environ
_is_too_late = _has_few and _xla_bridge.backends_are_initialized()
if _has_few:
  os.environ["PJRT_NPROC"] = str(_HOST_THREADS)


@dataclasses.dataclass(frozen=True, slots=True)
class _AbstractGpu(jax.sharding.AbstractDevice):
  """With what Mosaic GPU asks for; of a device without it, it takes 9.0."""

  compute_capability: str


def abstract_gpu(device_kind: str, num_cores: int, compute_capability: str):
  """Context: trace and lower as if `device_kind` were the default device."""
  device = _AbstractGpu(device_kind, num_cores, "gpu", compute_capability)
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh((), (), abstract_device=device)
  )


def one_device(platform: str | None = None):
  """Context: what is traced is for one device, whatever mesh is in force.

  `platform` is the device's; None keeps the device that is in force.
  """
  device = abstract_device()
  if platform is not None:
    device = jax.sharding.AbstractDevice(
      device_kind=platform, platform=platform, num_cores=None
    )
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh((), (), abstract_device=device)
  )


def abstract_device() -> Any:
  """The abstract device that a trace made now is for; None if none is set."""
  return jax.sharding.get_abstract_mesh().abstract_device


def target_device() -> Any:
  """The device that a trace made now is for: abstract if one is set.

  A mesh that is set is of an abstract device that tells nothing but its name:
  this machine's of the same name tells more.
  """
  device = abstract_device()
  if device is None:
    return jax.devices()[0]
  if device.platform in CUDA_PLATFORMS and not assumes_gpu():
    here = jax.devices()[0]
    return here if here.device_kind == device.device_kind else device
  return device


def assumes_gpu() -> bool:
  """Whether a GPU is named, by `abstract_gpu`, that need not be there."""
  return type(abstract_device()) is _AbstractGpu


def is_amd(device: Any) -> bool:
  """Whether a device is AMD's, whose platform JAX calls "gpu" too."""
  capability = getattr(device, "compute_capability", None)
  words = f"{device.platform} {device.device_kind} {capability}".lower()
  return re.search(r"\b(rocm|amd|gfx)", words) is not None


def targets_gpu() -> bool:
  """Whether a kernel traced now is compiled for a GPU (else: interpreted)."""
  device = target_device()
  return device.platform in CUDA_PLATFORMS and not is_amd(device)


def kernel(
  body: Callable[..., None],
  *,
  name: str,
  grid: Sequence[int],
  grid_names: Sequence[Hashable],
  num_threads: int | None = None,
  **kwargs,
):
  """`plgpu.kernel`, interpreted where there is no GPU, and with a name.

  Args:
    grid: thread blocks (clusters, if `cluster` is given) along each axis.
    num_threads: Pallas threads, which are warpgroups, of a block. Their axis is
      named "warpgroup"; without it there is no axis, and one thread.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu

  interpret = None
  if not targets_gpu():
    if _is_too_late:
      logging.log_first_n(
        logging.WARNING,
        "an interpreted kernel may stand still: JAX started before pallas_gemm"
        " was imported, with a thread a core; import it first, or set"
        f" PJRT_NPROC={_HOST_THREADS}",
        1,
      )
    # One vector clock a transfer: a program may have many in flight.
    interpret = plgpu.InterpretGPUParams(num_tma_threads_per_device=64)
  return plgpu.kernel(
    body,
    grid=tuple(grid),
    grid_names=tuple(grid_names),
    num_threads=num_threads,
    thread_name=None if num_threads is None else "warpgroup",
    interpret=interpret,
    kernel_name=name,
    **kwargs,
  )


def tiled_layout(
  *tiles: tuple[int, ...],
  warps: Sequence[Any],
  lanes: Sequence[Any],
  vector: int,
):
  """A register layout from tiles and the dimensions dealt to threads.

  Args:
    *tiles: tile shapes, outermost first; each applies to the suffix of the
      shape that the one before left.
    warps: dimensions (negative, of the tiled shape) dealt over the 4 warps,
      major to minor; or `plgpu.Replicated`.
    lanes: the same for the 32 lanes of a warp.
    vector: the dimension whose elements are contiguous in a register.
  """
  from jax.experimental.mosaic.gpu import fragmented_array
  from jax.experimental.pallas import mosaic_gpu as plgpu

  # Mosaic GPU takes canonical layouts alone (no dimension of size one); the
  # form that reads well is rarely canonical.
  layout = fragmented_array.TiledLayout(
    plgpu.Tiling(tuple(tiles)),
    warp_dims=tuple(warps),
    lane_dims=tuple(lanes),
    vector_dim=vector,
    _check_canonical=False,
  ).canonicalize()
  return plgpu.Layout.TILED(
    layout.tiling,
    warp_dims=layout.warp_dims,
    lane_dims=layout.lane_dims,
    vector_dim=layout.vector_dim,
  )


def layout_facts(layout: Any) -> tuple[Any, Any, Any]:
  """What `tiled_layout` made a layout of: its tiles, warps and lanes."""
  tiled = layout.to_mgpu()
  return tiled.tiling.tiles, tiled.warp_dims, tiled.lane_dims


def kernel_lowering() -> Any:
  """What `mosaic` extends."""
  from jax._src.pallas.mosaic_gpu import lowering

  return lowering


def store(ref: Any, value: jax.Array, *, optimized: bool = True) -> None:
  """`plgpu.store`, which JAX has from 0.12 on.

  `optimized=False` says that the access is known to be slow (uncoalesced, or
  with bank conflicts); JAX 0.12 wants that said, 0.11 does not ask.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu

  if hasattr(plgpu, "store"):
    plgpu.store(ref, value, optimized=optimized)
  else:
    ref[...] = value


def join_varying(*arrays: jax.Array) -> list[jax.Array]:
  """The arrays, each varying over every manual mesh axis that any varies over.

  What `jax.shard_map(check_vma=True)` wants of the operands of a primitive.
  The transpose is the sum over the axes that were added.
  """
  varying = [jax.typeof(x).mat.varying for x in arrays]
  joined = frozenset().union(*varying)
  return [
    lax.pcast(x, tuple(joined - axes), to="varying") if joined - axes else x
    for x, axes in zip(arrays, varying)
  ]


def shaped_like(
  avals: Sequence[Any],
  shape: tuple[int, ...],
  dtype: Any,
  parts: Sequence[Any] = (),
) -> jax.core.ShapedArray:
  """The type of what is made of `avals`, all of one mesh.

  Args:
    avals: they vary over the same manual mesh axes, and so does the result;
      it lies in the memory of the first.
    parts: how it is sharded over Explicit mesh axes.
  """
  meshes = [aval.sharding.mesh for aval in avals]
  mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
  parts = PartitionSpec(*parts, *(None,) * (len(shape) - len(parts)))
  first, sharding = avals[0], NamedSharding(mesh, parts)
  kind = {"manual_axis_type": first.mat, "memory_space": first.memory_space}
  return jax.core.ShapedArray(shape, dtype, sharding=sharding, **kind)


def register_serialization(cls: type, name: str) -> None:
  """Lets `jax.export` write a pytree without data of its own; by name, once.

  A module that is loaded again has another class of the name.
  """
  with contextlib.suppress(ValueError):
    export.register_pytree_node_serialization(
      cls,
      serialized_name=name,
      serialize_auxdata=lambda _: b"",
      deserialize_auxdata=lambda _: (),
    )


def is_weak(*arrays: Any) -> bool:
  """Whether JAX's type of what is made of all the arrays is weak."""
  return _dtypes.result_type(*arrays, return_weak_type_flag=True)[1]


def with_weak_type(x: jax.Array) -> jax.Array:
  """The same array, weakly typed: it takes the dtype of what it meets."""
  return _convert_element_type(x, x.dtype, weak_type=True)


def is_partitioned(axis_context: Any) -> bool:
  """Whether XLA splits what is lowered in a module's context over devices."""
  mesh = getattr(axis_context, "mesh", None)
  if mesh is None:
    return getattr(axis_context, "num_devices", 1) > 1
  by_xla = set(mesh.axis_names) - set(axis_context.manual_axes)
  return any(mesh.shape[axis] > 1 for axis in by_xla)


def why_not_partitionable(ctx: Any) -> str | None:
  """None, or why XLA could not be given shards of a kernel; `ctx`: a rule's."""
  module = ctx.module_context
  context = module.axis_context
  if manual := getattr(context, "manual_axes", ()):
    others = set(context.mesh.axis_names) - set(manual)
    return (
      f"of the mesh's axes only {_names(manual)} are Explicit or manual, and"
      f" XLA can't partition a kernel over {_names(others)}; make those"
      " Explicit, or name all axes in jax.shard_map's axis_names"
    )
  if module.lowering_parameters.for_export:
    return (
      "XLA can't partition a kernel that is exported for several devices; use"
      " Explicit mesh axes or jax.shard_map"
    )
  if _mesh_of(ctx) is None:
    return (
      "XLA can't partition a kernel over an unknown mesh; give every argument a"
      " NamedSharding (jax.device_put(x, P())) or create it inside jax.set_mesh"
    )
  return None


def _mesh_of(ctx: Any) -> Any:
  """The mesh that XLA partitions over, if it is known."""
  for mesh in (
    ctx.avals_out[0].sharding.mesh,
    getattr(ctx.module_context.axis_context, "abstract_mesh", None),
    jax.sharding.get_abstract_mesh(),  # of jax.set_mesh
  ):
    if mesh is not None and not mesh.empty:
      return mesh
  return None


def _names(axes: Any) -> str:
  return "{" + ", ".join(map(str, sorted(axes, key=str))) + "}"


def with_mesh(ctx: Any) -> Any:
  """The same context for a lowering rule, with the mesh and devices in it.

  `custom_partitioning` wants to know them. Devices only stand for positions in
  the mesh: shards are counted, never named.
  """
  module = ctx.module_context
  context = module.axis_context
  devices = context.device_assignment
  if devices is None:
    devices = (jax.devices()[0],) * context.num_devices
  context = dataclasses.replace(
    context, device_assignment=devices, abstract_mesh=_mesh_of(ctx)
  )
  return ctx.replace(module_context=module.replace(axis_context=context))


def tiles_of_devices(sharding: Any, mesh: Any) -> np.ndarray | None:
  """Which tile of an array each device of a mesh has; None if all are whole.

  Args:
    sharding: as `custom_partitioning` tells it with `decode_shardings=False`.
    mesh: what XLA partitions over.

  Returns:
    Numbers of tiles: the mesh's axes, then one of the array's dimensions, and
    of what XLA replicates over.
  """
  hlo = sharding._hlo_sharding
  if not hlo.is_tiled():
    return None
  tiles = hlo.tile_assignment_dimensions()
  tile = np.indices(tiles).reshape(len(tiles), -1)
  of_device = tile[:, np.argsort(hlo.tile_assignment_devices())]
  return of_device.T.reshape(*mesh.axis_sizes, len(tiles))


def alone(function: Callable[..., Any], *args: Any) -> Any:
  """function(*args), in which `is_alone` is True."""
  context = contextvars.copy_context()
  context.run(is_alone.set, True)
  return context.run(function, *args)


def lowered(
  ctx: Any, run: Callable[..., Any], operands: Sequence[Any], typed: bool
) -> Sequence[Any]:
  """What `run` computes of operands, in the lowering rule that got `ctx`.

  Args:
    typed: shardings in the operands' types concern the function; else it is
      traced for one device, even inside of a `jax.shard_map`.
  """
  inner = ctx
  if not typed:
    plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    inner = ctx.replace(avals_in=plain)
  for_export = ctx.module_context.lowering_parameters.for_export

  def lower(*args):
    _is_exported.set(for_export)
    return mlir.lower_fun(run)(*args)

  outs = alone(lower, inner, *operands)
  # Of an interpreted kernel's effects.
  if inner is not ctx and inner.tokens_out is not None:
    ctx.set_tokens_out(inner.tokens_out)
  return outs


def in_rows(x: jax.Array) -> jax.Array:
  """A matrix that XLA is to lay out in rows, where it may be told so."""
  rows = Layout((0, 1))
  return x if _is_exported.get() else with_layout_constraint(x, rows)


def require_devices(primitive: Any) -> None:
  """Tells JAX that a primitive's lowering asks for the mesh of the arrays."""
  _dispatch.prim_requires_devices_during_lowering.add(primitive)


def interpreter_effects() -> Set[Any]:
  """The effects of a kernel that is interpreted: its calls of the host."""
  from jax._src.pallas import core
  from jax.experimental.pallas import mosaic_gpu as plgpu

  return core.get_interpret_effects(plgpu.InterpretGPUParams())


def without_compilation_cache():
  """Context: programs are compiled, not read from JAX's persistent cache."""
  return _config.enable_compilation_cache(False)


def register_primitive(
  primitive: Any, dce: Callable[[Sequence[bool], Any], tuple[Any, Any]]
) -> None:
  """A primitive runs, is checked for NaN and left out as JAX's own are.

  `dce(used outputs, equation)` gives used inputs and the new equation.
  """
  # Marked as a whole, inside of which `debug_nans` looks for no cause.
  primitive.def_impl(functools.partial(_dispatch.apply_primitive, primitive))
  # JAX 0.12 hands over the live inputs between the two.
  pe.dce_rules[primitive] = lambda used, *rest: dce(used, rest[-1])
  check = functools.partial(_checkify.nan_error_check, primitive)
  _checkify.error_checks[primitive] = check


@contextlib.contextmanager
def cupti_session():
  """Context that yields a list, filled at exit: (kernel name, ms), in order.

  Every kernel that any stream launches inside the context is in the list;
  the caller must block on its results before the context ends.

  Raises:
    RuntimeError: this jaxlib has no CUPTI (no CUDA plugin).
  """
  try:
    from jax._src.lib import mosaic_gpu as lib

    ext = getattr(lib, "_mosaic_gpu_ext", None)
  except ImportError:  # JAX 0.11 without the plugin
    ext = None
  if ext is None or not hasattr(ext, "_cupti_init"):
    raise RuntimeError("CUPTI needs the jax CUDA plugin; it is not installed")
  timings: list[tuple[str, float]] = []
  ext._cupti_init()
  try:
    yield timings
  finally:
    timings.extend(ext._cupti_get_timings(True))
