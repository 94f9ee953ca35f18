"""The programs of experiments/, run by their tests."""

from collections.abc import Callable, Mapping, Sequence
import os
import pathlib
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import pytest

from experiments.harness import shapes, timing

# Flags have their defaults outside of `call`.
flags.FLAGS.mark_as_parsed()

ROOT = pathlib.Path(__file__).resolve().parents[2]


def call(main: Callable[[list[str]], int], args: Sequence[str]) -> int:
  """Runs a program in this process; what other tests gave is forgotten."""
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    for name in flags.FLAGS:
      flags.FLAGS[name].present = 0
    return main(flags.FLAGS(["program", *args]))


def pretend_times(
  monkeypatch: pytest.MonkeyPatch,
  kernels: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
  """Every call takes a made-up time: the second arm twice the first's.

  Args:
    monkeypatch: undoes it.
    kernels: of arms, by name; of another one, its place says which.
  """
  kernels = kernels or {}

  def measure(arms, *, warmup, repeats, flush, tick=None):
    del flush, tick
    found = {}
    for i, arm in enumerate(arms):
      arm.call()
      ms = [(1 + i) * (1 + 0.01 * r) for r in range(repeats)]
      names = kernels.get(arm.name, (f"k{i}",))
      found[arm.name] = timing.Timing(tuple(ms), names, warmup)
    return found

  monkeypatch.setattr(timing, "measure", measure)
  monkeypatch.setattr(timing, "l2_flush", lambda size: None)


def pretend_suites(
  monkeypatch: pytest.MonkeyPatch,
  kind: str,
  published: Mapping[str, Sequence[shapes.Problem]],
  small: Sequence[shapes.Problem],
) -> None:
  """Replaces the suites "DENSE" or "GROUPED"; "quick" and "interpret" too."""
  special = dict.fromkeys(("quick", "interpret"), shapes.Suite([*small], ()))
  tagged = {k: shapes.Suite([*x], {"published"}) for k, x in published.items()}
  others = {
    name: suite._replace(tags=frozenset())
    for name, suite in getattr(shapes, kind).items()
    if name not in published
  }
  monkeypatch.setattr(shapes, kind, others | special | tagged)


def start(
  module: str, *args: str, timeout: float | None = 120, **env: str
) -> tuple[int, str, str]:
  """A program as a user starts it: (status, stdout, stderr)."""
  done = subprocess.run(
    [sys.executable, "-W", "error", "-m", module, *args],
    capture_output=True,
    text=True,
    timeout=timeout,
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr


def start_on_eight_devices(module: str, *args: str) -> tuple[int, str, str]:
  """The same, of one that runs once: compiling it well is time lost."""
  flags_of_xla = (
    "--xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
  )
  return start(module, *args, timeout=None, XLA_FLAGS=flags_of_xla)
