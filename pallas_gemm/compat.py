"""The one module that touches private or version-dependent JAX.

Everything else imports `jax`, `jax.experimental.pallas` and
`jax.experimental.pallas.mosaic_gpu` alone. Supported: jax >= 0.11.2, < 0.13.
"""

from collections.abc import Callable, Hashable, Sequence
import contextlib
from typing import Any

import jax
from jax.experimental import pallas as pl  # noqa: F401  (registers backends)
from jax.experimental.mosaic.gpu import fragmented_array as _fa
from jax.experimental.pallas import mosaic_gpu as plgpu

CUDA_PLATFORMS = ("gpu", "cuda")


def abstract_gpu(device_kind: str, num_cores: int):
  """Context: trace and lower as if `device_kind` were the default device."""
  device = jax.sharding.AbstractDevice(
    device_kind=device_kind, platform="gpu", num_cores=num_cores
  )
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh((), (), abstract_device=device)
  )


def target_device() -> Any:
  """The device that a trace made now is for: abstract if one is set."""
  mesh = jax.sharding.get_abstract_mesh()
  device = getattr(mesh, "abstract_device", None)
  return jax.devices()[0] if device is None else device


def targets_gpu() -> bool:
  """Whether a kernel traced now is compiled for a GPU (else: interpreted)."""
  return target_device().platform in CUDA_PLATFORMS


def kernel(
  body: Callable[..., None],
  *,
  name: str,
  grid: Sequence[int],
  grid_names: Sequence[Hashable],
  **kwargs,
):
  """`plgpu.kernel`, interpreted where there is no GPU, and with a name.

  Args:
    body: the kernel's body.
    name: the kernel's name in profiles.
    grid: thread blocks (clusters, if `cluster` is given) along each axis.
    grid_names: names of the axes.
    **kwargs: passed on to `plgpu.kernel`.
  """
  interpret = None
  if not targets_gpu():
    # One vector clock a transfer: a program may have many in flight.
    interpret = plgpu.InterpretGPUParams(num_tma_threads_per_device=64)
  return plgpu.kernel(
    body,
    grid=tuple(grid),
    grid_names=tuple(grid_names),
    interpret=interpret,
    kernel_name=name,
    **kwargs,
  )


def tiled_layout(
  *tiles: tuple[int, ...],
  warps: Sequence[int | plgpu.Replicated],
  lanes: Sequence[int | plgpu.Replicated],
  vector: int,
):
  """A register layout from tiles and the dimensions dealt to threads.

  Args:
    *tiles: tile shapes, outermost first; each applies to the suffix of the
      shape that the one before left.
    warps: dimensions (negative, of the tiled shape) dealt over the 4 warps,
      major to minor.
    lanes: the same for the 32 lanes of a warp.
    vector: the dimension whose elements are contiguous in a register.
  """
  # Mosaic GPU takes canonical layouts alone (no dimension of size one); the
  # form that reads well is rarely canonical.
  layout = _fa.TiledLayout(
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


def store(ref: Any, value: jax.Array, *, optimized: bool = True) -> None:
  """`plgpu.store`, which JAX has from 0.12 on.

  `optimized=False` says that the access is known to be slow (uncoalesced, or
  with bank conflicts); JAX 0.12 wants that said, 0.11 does not ask.
  """
  if hasattr(plgpu, "store"):
    plgpu.store(ref, value, optimized=optimized)
  else:
    ref[...] = value


@contextlib.contextmanager
def cupti_session():
  """Context that yields a list, filled at exit: (kernel name, ms), in order.

  Every kernel that any stream launches inside the context is in the list;
  the caller must block on its results before the context ends.

  Raises:
    RuntimeError: this jaxlib has no CUPTI (no CUDA plugin).
  """
  try:
    from jax._src.lib import mosaic_gpu as lib  # pylint: disable=g-import-not-at-top

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
