"""Ops under every kind of mesh, on eight devices of their own processes.

The cases are those of tests/support/meshes.py, which can be run alone. Each
process has a part of them.
"""

import os
from pathlib import Path
import subprocess
import sys

import pytest

from tests.support import mesh_calls, mesh_cases, mesh_checks

_SHARDS = 4
# The programs run once, so compiling them well is time lost.
_XLA_FLAGS = (
  "--xla_force_host_platform_device_count=8"
  " --xla_backend_optimization_level=0"
  " --xla_llvm_disable_expensive_passes=true"
)


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_as_jax_has_it(shard):
  """In a process that has eight devices."""
  program = "-W", "error", "-m", "tests.support.meshes"
  done = subprocess.run(
    [sys.executable, *program, f"--shard={shard}/{_SHARDS}"],
    cwd=Path(__file__).parent.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _XLA_FLAGS},
    capture_output=True,
    text=True,
  )
  failed = [x for x in done.stdout.splitlines() if not x.startswith("ok ")]
  assert done.returncode == 0, "\n".join([*failed, done.stderr])


def test_matrix():
  """Each op meets each transformation and each kind of mesh."""
  units = [unit for unit, _ in mesh_calls.units()]
  for op in {case.op for case in mesh_cases.CASES}:
    own = [unit for unit in units if unit.case.op == op]
    met = {unit.transformation for unit in own}
    assert met == set(mesh_calls.TRANSFORMATIONS), op
    modes = {unit.mode.name for unit in own}
    assert {"explicit", "auto", "shard_map"} <= modes, op
  keys = {unit.key for unit in units}
  assert len(keys) == len(units)
  assert set(mesh_checks.DIFFERENCES) <= keys
