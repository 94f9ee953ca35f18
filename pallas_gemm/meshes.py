"""What the types of arrays say of meshes with Explicit axes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType


def explicit(arrays: Sequence[Any]) -> Any:
  """The mesh with Explicit axes that arrays have, or that is set; or None."""
  found = (m for m in _of(arrays) if AxisType.Explicit in m.axis_types)
  return next(found, None)


def is_known(arrays: Sequence[Any]) -> bool:
  """Whether types or `jax.set_mesh` tell the mesh of a product traced now."""
  return not all(mesh.empty for mesh in _of(arrays))


def on_auto_axes(
  f: Callable[..., Any], mesh: Any, sharding: Any
) -> Callable[..., Any]:
  """f, of which XLA lays out everything but the results.

  Args:
    f: of arrays.
    mesh: theirs, with Explicit axes.
    sharding: of the results.
  """
  kinds = zip(mesh.axis_names, mesh.axis_types)
  axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
  return jax.sharding.auto_axes(f, axes=axes, out_sharding=sharding)


def _of(arrays: Sequence[Any]) -> list[Any]:
  meshes = [jax.typeof(x).sharding.mesh for x in arrays]
  return [*meshes, jax.sharding.get_abstract_mesh()]
