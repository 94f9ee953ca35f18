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

_SHARDS = 6
# The programs run once, so compiling them well is time lost.
_XLA_FLAGS = (
  "--xla_force_host_platform_device_count=8"
  " --xla_backend_optimization_level=0"
  " --xla_llvm_disable_expensive_passes=true"
)


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_as_jax_has_it(shard):
  run(f"--shard={shard}/{_SHARDS}")


def test_reference():
  """The checks hold for jnp itself; a part of them shows it."""
  run("--arms=reference", "--shard=0/24")
  run("--arms=reference", "--filter=stand-in")


def test_matrix():
  """Each op meets each transformation and each kind of mesh."""
  units = list(mesh_calls.units(full=False))
  for op in {case.op for case in mesh_cases.CASES}:
    own = [unit for unit in units if unit.case.op == op]
    met = {unit.transformation for unit in own}
    assert met == set(mesh_calls.TRANSFORMATIONS), op
    modes = {unit.mode.name for unit in own}
    assert {"explicit", "auto", "shard_map"} <= modes, op
  full = {unit.key for unit in mesh_calls.units(full=True)}
  keys = [unit.key for unit in units]
  assert len(set(keys)) == len(keys)
  assert set(keys) <= full
  assert set(mesh_checks.DIFFERENCES) <= full


def run(*args: str) -> None:
  """The program, in a process that has eight devices."""
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _XLA_FLAGS}
  done = subprocess.run(
    [sys.executable, "-W", "error", "-m", "tests.support.meshes", *args],
    cwd=Path(__file__).parent.parent,
    env=environment,
    capture_output=True,
    text=True,
  )
  failed = [x for x in done.stdout.splitlines() if not x.startswith("ok ")]
  assert done.returncode == 0, "\n".join([*failed, done.stderr])
