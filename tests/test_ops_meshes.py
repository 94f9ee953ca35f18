"""Ops under every kind of mesh, on eight devices of their own processes.

The cases are those of tests/support/meshes.py, which can be run alone. Each
process has a part of them.
"""

import pytest

from tests.support import mesh_calls, mesh_cases, mesh_checks, programs

_SHARDS = 5


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_as_jax_has_it(shard):
  """In a process that has eight devices."""
  status, out, err = programs.start_on_eight_devices(
    "tests.support.meshes", f"--shard={shard}/{_SHARDS}"
  )
  failed = [x for x in out.splitlines() if not x.startswith("ok ")]
  assert status == 0, "\n".join([*failed, err])


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
