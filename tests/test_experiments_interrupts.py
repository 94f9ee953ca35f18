"""Ctrl-C, which a program answers with a line and what it has finished."""

import os
import signal
import subprocess
import sys

import pytest

from experiments.harness import rows
from tests.support import programs

# Of a loaded machine; below the time limit of a test.
_TIMEOUT_S = 240
# Two rungs, of which the second is interrupted while it is interpreted: by
# itself, so that no machine is too slow or too quick for it.
_LADDER = """
import dataclasses, os, signal
import jax
from experiments import ladder
from experiments.harness import cli
from pallas_gemm import ladder as ladder_lib

first, second = ladder_lib.LADDER[:2]

def kernel(*args):
  jax.debug.callback(lambda: os.kill(os.getpid(), signal.SIGINT))
  return second.kernel(*args)

ladder_lib.LADDER = first, dataclasses.replace(second, kernel=kernel)
cli.run(ladder.main)
"""


@pytest.fixture(autouse=True)
def sigint_is_not_ignored():
  """A shell that starts tests in the background ignores it for all of them."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def start(*args):
  return subprocess.Popen(
    [sys.executable, *args],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=programs.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )


def test_ctrl_c_leaves_a_line_and_the_finished_rows(tmp_path):
  """In the interpreter, where JAX has words of its own for it."""
  with start("-c", _LADDER, f"--output_dir={tmp_path}") as process:
    out, err = process.communicate(timeout=_TIMEOUT_S)
  assert (process.returncode, err) == (130, "")
  count = len(rows.read(tmp_path / "ladder.jsonl"))
  assert f"interrupted: {count} finished rows were kept" in out and count


@pytest.mark.parametrize("disguise", ["KeyboardInterrupt", "RuntimeError"])
def test_ctrl_c_outside_of_a_measurement(disguise):
  program = f"""
from experiments.harness import cli
import logging, signal

def main(argv):
  try:
    signal.raise_signal(signal.SIGINT)
  except KeyboardInterrupt:
    logging.getLogger("jax._src.callback").exception("a callback failed")
    raise {disguise}

cli.run(main)
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    cwd=programs.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  assert (done.returncode, done.stdout) == (130, "")
  assert done.stderr == "interrupted\n"


def test_ctrl_c_while_a_program_is_imported():
  with start("-v", "-m", "experiments.ladder") as process:
    lines = iter(process.stderr.readline, "")
    assert any("import 'jax._src" in line for line in lines)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=_TIMEOUT_S)
  assert (process.returncode, out) == (130, "")
  assert "interrupted\n" in err and "Traceback" not in err


def test_a_fault_is_no_case_that_failed():
  code = "from experiments.harness import cli; cli.run(lambda _: 1 / 0)"
  with start("-c", code) as process:
    assert "ZeroDivisionError" in process.stderr.read()
  assert process.returncode == 70


def test_nobody_reads_what_a_program_says():
  """As after `| head`."""
  with start("-m", "experiments.ladder", "--explain=6") as process:
    process.stdout.close()
    assert process.stderr.read() == ""
  assert process.returncode == 130
