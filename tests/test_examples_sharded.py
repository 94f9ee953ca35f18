"""The examples that run on many devices: on eight, and on the one there is.

What is checked on eight is in tests/support/recipes.py, which can be run alone.
"""

import importlib
import os
from pathlib import Path
import subprocess
import sys

import jax
import pytest

from examples import sharded_mlp, sharded_moe
from tests.support import recipes

# The programs run once, so compiling them well is time lost.
_XLA_FLAGS = (
  "--xla_force_host_platform_device_count=8"
  " --xla_backend_optimization_level=0"
  " --xla_llvm_disable_expensive_passes=true"
)


@pytest.mark.parametrize(
  "names",
  ["mlp moe transformer", "linen linen_fused nnx nnx_fused", "equinox"],
)
def test_on_eight_devices(names):
  if names == "equinox":
    pytest.importorskip("equinox")
  done = subprocess.run(
    [
      *(sys.executable, "-W", "error", "-m", "tests.support.recipes"),
      *names.split(),
    ],
    cwd=Path(__file__).parent.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _XLA_FLAGS},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  passed = [x for x in done.stdout.splitlines() if x.startswith("ok ")]
  wanted = [
    f"ok {n} {axes}" for n in names.split() for axes in recipes.axes_of(n)
  ]
  assert passed == wanted


@pytest.mark.parametrize("program", [sharded_mlp, sharded_moe])
def test_on_one_device(program, capsys):
  if jax.device_count() > 1:
    pytest.skip("there are many")
  assert program.main(["--steps=2"]) == 0
  lines = capsys.readouterr().out.splitlines()
  losses = [float(x.rpartition(" ")[2]) for x in lines if x.startswith("step")]
  assert len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.parametrize(
  "name", ["sharded_mlp", "sharded_moe", "transformer", "layers"]
)
def test_help(name, capsys):
  program = importlib.import_module(f"examples.{name}")
  with pytest.raises(SystemExit) as caught:
    program.main(["--help"])
  assert caught.value.code == 0
  out = capsys.readouterr().out
  assert f"python -m examples.{name} --" in out and "--axes" in out
