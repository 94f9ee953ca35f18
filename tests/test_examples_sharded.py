"""The examples that run on many devices: on eight, and on the one there is.

What is checked on eight is in tests/support/recipes.py, which can be run alone.
"""

import importlib

import jax
import pytest

from examples import sharded_mlp, sharded_moe
from tests.support import programs, recipes


@pytest.mark.parametrize(
  "names",
  ["mlp moe transformer", "linen linen_fused nnx nnx_fused", "equinox"],
)
def test_on_eight_devices(names):
  if names == "equinox":
    pytest.importorskip("equinox")
  status, out, err = programs.start_on_eight_devices(
    "tests.support.recipes", *names.split()
  )
  assert status == 0, err
  passed = [x for x in out.splitlines() if x.startswith("ok ")]
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
