"""The environment that `make` sets up, and what it builds."""

import os
import shutil
import subprocess
import sys

import pytest

_PYTHON = """#!/bin/sh
# Is new enough, makes environments and installs nothing.
case "$1 $2" in "-m venv")
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
  touch "$3/pyvenv.cfg" && echo once >>"$3/made"
esac
"""
# Makes environments of itself, and fails where it is asked to.
_ALONE = """#!/bin/sh
case "$1 $2 $3" in
"$FAILS") exit 3 ;;
"-I -m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-I -m pip") test -f "$6" ;;
esac
"""


@pytest.fixture
def python(tmp_path):
  """A python3 that stands in for the real one."""
  path = tmp_path / "path" / "python3"
  path.parent.mkdir()
  path.write_text(_PYTHON)
  path.chmod(0o755)
  return path


@pytest.fixture
def set_up(repository, python):
  """Runs tools/setup_env.sh for a place: (status, what it said)."""
  for name in ("cat", "cksum", "cp", "dirname", "grep", "ls", "mkdir", "rm",
               "touch"):  # fmt: skip
    (python.parent / name).symlink_to(shutil.which(name))

  def call(place):
    done = subprocess.run(
      [shutil.which("sh"), repository / "tools/setup_env.sh", place, "extra"],
      env={"PATH": str(python.parent)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    return done.returncode, done.stdout

  return call


def test_the_set_up_leaves_other_folders_alone(set_up, tmp_path):
  for name in ("of_something_else", "of_somebody_else"):
    (tmp_path / name).mkdir()
  kept = tmp_path / "of_something_else" / "kept"
  kept.touch()
  cfg = tmp_path / "of_somebody_else" / "pyvenv.cfg"
  cfg.touch()
  for place in (kept, kept.parent, cfg.parent):
    status, said = set_up(place)
    assert (status, said) == (
      2,
      f"setup: {place} exists and is no environment of this project\n",
    )
  assert kept.exists() and cfg.exists()


def test_the_set_up_makes_what_is_its_own(set_up, python, tmp_path):
  (tmp_path / "empty").mkdir()
  for place in (tmp_path / "new", tmp_path / "empty"):
    assert set_up(place)[0] == 0
    assert (place / "made").read_text() == "once\n"
    assert set_up(place) == (0, "")
  # One whose interpreter is gone stays until there is another, and is made
  # anew then.
  (place / "bin/python").unlink()
  python.rename(python.with_name("hidden"))
  status, said = set_up(place)
  assert status == 1 and "needs Python 3.12" in said
  assert (place / "made").exists()
  python.with_name("hidden").rename(python)
  (place / "made").unlink()
  assert set_up(place)[0] == 0 and (place / "made").exists()


@pytest.fixture
def check_dist(repository, tmp_path):
  """Runs tools/check_dist.py for a folder `dist`: (status, what it said)."""
  alone = tmp_path / "alone"
  alone.write_text(_ALONE)
  alone.chmod(0o755)
  (tmp_path / "dist").mkdir()

  def call(python=alone, fails=""):
    program = repository / "tools/check_dist.py"
    done = subprocess.run(
      [sys.executable, program, f"--python={python}"],
      env=os.environ | {"FAILS": fails},
      cwd=tmp_path,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    return done.returncode, done.stdout

  return call


def test_a_wheel_is_tried_in_an_environment_of_its_own(check_dist, tmp_path):
  wheel = tmp_path / "dist/pallas_gemm-0.1.0-py3-none-any.whl"
  wheel.touch()
  status, said = check_dist()
  assert status == 2 and "dist has not one wheel and its sdist" in said
  (tmp_path / "dist/pallas_gemm-0.1.0.tar.gz").touch()
  assert check_dist() == (0, f"{wheel.name}: 0 bytes, of 3000000 at most\n")
  for fails in ("-I -m venv", "-I -m pip", "-I -W error"):
    assert check_dist(fails=fails)[0] == 1
  status, said = check_dist("no_such_python")
  assert status == 2 and "there is no no_such_python" in said
  os.truncate(wheel, 3_000_001)
  assert check_dist()[0] == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_takes_its_variables_from_the_command_line_alone(repository):
  def lines(*args, target="lint"):
    env = os.environ | {"VENV": "/else", "PYTHON": "/else/python"}
    # A make that runs these tests says in it what it was given.
    env = {k: x for k, x in env.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    command = ["make", "-n", "--no-print-directory", target, *args]
    return subprocess.check_output(command, env=env, cwd=repository, text=True)

  assert "setup_env.sh .venv dev" in lines() and "/else" not in lines()
  text = lines("VENV=/here")
  assert "setup_env.sh /here dev" in text and "\n/here/bin/python -m" in text
  text = lines("PYTHON=python3")
  assert "setup_env" not in text and "\npython3 -m ruff" in text
  text = lines("ARGS=--python=python3.13", target="dist")
  assert "setup_env.sh .venv dist\n" in text and " -m build\n" in text
  assert text.endswith("tools/check_dist.py --python=python3.13\n")
