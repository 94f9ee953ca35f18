"""What the programs that run on many devices share: their mesh.

A mesh's axes are Explicit (a sharding is part of an array's type, as in
`bfloat16[16@data,8]`) or Auto (XLA finds the shardings of what is between).
Without eight GPUs, eight devices of a CPU do:

  XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \\
      python -m examples.sharded_mlp
"""

import argparse
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

AXES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def add_flag(parser: argparse.ArgumentParser) -> None:
  """--axes, the first argument of `make`."""
  parser.add_argument(
    "--axes", choices=AXES, default="explicit", help="of the mesh (explicit)"
  )


def make(axes: str, names: tuple[str, str]) -> Mesh:
  """A mesh of all devices: two along its second axis, if they are even."""
  second = 2 if jax.device_count() % 2 == 0 else 1
  shape = jax.device_count() // second, second
  print(f"{axes} axes: {dict(zip(names, shape))} devices")
  return jax.make_mesh(shape, names, axis_types=(AXES[axes],) * 2)


def explicit(*spec: Any) -> PartitionSpec | None:
  """An `out_sharding`, which Explicit axes may need and Auto axes refuse."""
  types = jax.sharding.get_abstract_mesh().axis_types
  return PartitionSpec(*spec) if AxisType.Explicit in types else None
