"""Checks what `make dist` built: a wheel and an sdist of one version.

  python tools/check_dist.py
  python tools/check_dist.py --python=python3.13 FOLDER

The wheel has at most 3 MB. In a fresh virtual environment, away from the
checkout, it installs with what it depends on, and has its version. There, on
the CPU, `pallas_gemm.matmul` and `jnp.matmul` are within their error bound.

Exit status: 0; 1 if something is wrong; 2 for a command that can't be carried
out, as of a folder without one wheel and its sdist.
"""

import argparse
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile

MOST_BYTES = 3_000_000
USE = """
from importlib import metadata
import sys

import jax
import jax.numpy as jnp

import pallas_gemm
from pallas_gemm import numerics

assert pallas_gemm.__file__.startswith(sys.prefix), pallas_gemm.__file__
versions = pallas_gemm.__version__, metadata.version("pallas_gemm")
assert versions == (sys.argv[1],) * 2, versions
keys = jax.random.split(jax.random.key(0))
a = jax.random.normal(keys[0], (33, 257), jnp.bfloat16)
b = jax.random.normal(keys[1], (257, 65), jnp.bfloat16)
for product in (pallas_gemm.matmul, jnp.matmul):
  found = numerics.check(product(a, b), a, b)
  assert found.passed, found
print("works: JAX", jax.__version__, "on Python", sys.version)
"""


def works(wheel: Path, python: str) -> bool:
  """Whether a wheel installs and multiplies in an environment of its own."""
  with tempfile.TemporaryDirectory() as folder:
    # As it is in `sys.prefix`.
    venv = Path(folder).resolve() / "venv"
    # -I: neither this folder nor PYTHONPATH is looked at.
    inside = str(venv / "bin/python"), "-I"
    version = wheel.name.split("-")[1]
    commands = (
      (python, "-I", "-m", "venv", str(venv)),
      (*inside, "-m", "pip", "install", "--quiet", str(wheel)),
      (*inside, "-W", "error", "-c", USE, version),
    )
    how = {"cwd": folder, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
    return all(subprocess.run(x, **how).returncode == 0 for x in commands)


def main() -> int:
  """Carries out the command; returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--python",
    default=sys.executable,
    help="interpreter of the environment: make dist ARGS=--python=python3.13",
  )
  parser.add_argument("folder", nargs="?", default="dist", type=Path)
  args = parser.parse_args()
  wheels = [path.resolve() for path in args.folder.glob("*.whl")]
  sdists = {path.name for path in args.folder.glob("*.tar.gz")}
  names = {"-".join(x.name.split("-")[:2]) + ".tar.gz" for x in wheels}
  if len(wheels) != 1 or sdists != names:
    parser.error(f"{args.folder} has not one wheel and its sdist")
  if not (python := shutil.which(args.python)):
    parser.error(f"there is no {args.python}")
  [wheel] = wheels
  size = wheel.stat().st_size
  print(f"{wheel.name}: {size} bytes, of {MOST_BYTES} at most", flush=True)
  return int(size > MOST_BYTES or not works(wheel, os.path.abspath(python)))


if __name__ == "__main__":
  sys.exit(main())
