"""Wheel and sdist: what is in them; the wheel works without the checkout."""

import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import pallas_gemm

_BUILD = """
import sys
from setuptools import build_meta
_, folder = sys.argv  # setuptools has arguments of its own there
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""
# They take 0.4 s or are not installed everywhere: imported where they are used.
_HEAVY = [
  "jax.experimental.mosaic.gpu",
  "jax.experimental.pallas",
  "jax_triton",
  "pallas_gemm.kernels.sm90.launch",
  "pallas_gemm.ladder",
]
_USE = f"""
import importlib.util
import sys
import pallas_gemm
print(pallas_gemm.__file__)
print([name for name in {_HEAVY} if name in sys.modules])
print(pallas_gemm.ladder.LADDER[0].name)
import pallas_gemm.ladder
print(pallas_gemm.ladder.__file__)
print(importlib.util.find_spec("experiments"))
"""


@pytest.fixture(scope="module")
def built(repository, tmp_path_factory):
  """Wheel and sdist of this checkout, made without network, outside of it."""
  source = tmp_path_factory.mktemp("source") / "checkout"
  # Of what begins with a dot .ci alone; nothing that was built.
  built = "[!.]*.egg-info", "__pycache__", "_build", "_notebooks", "build"
  ignored = shutil.ignore_patterns(".[!c]*", *built)
  shutil.copytree(repository, source, ignore=ignored, symlinks=True)
  table = source / "pallas_gemm/tuning/table/some_gpu.jsonl"
  table.parent.mkdir(exist_ok=True)
  table.touch()
  folder = tmp_path_factory.mktemp("built")
  done = subprocess.run(
    [sys.executable, "-c", _BUILD, str(folder)],
    cwd=source,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return folder


@pytest.fixture(scope="module")
def wheel(built):
  [path] = built.glob("*.whl")
  return path


def test_the_sdist_holds_what_a_checkout_does_but_rows(built, repository):
  [path] = built.glob("*.tar.gz")
  with tarfile.open(path) as archive:
    files = [Path(x.name) for x in archive.getmembers() if x.isfile()]
  names = {file.relative_to(file.parts[0]).as_posix() for file in files}
  results = {name for name in names if name.startswith("experiments/results/")}
  # A device's folder, whatever is in it, tells the tests that rows are there.
  assert results == {"experiments/results/published.json"}
  assert "CHANGELOG.md" in names
  for folder in ("docs", "examples", "experiments", "tests", "tools", ".ci"):
    for kind in ("*.py", "*.md", "*.svg", "*.sh", "BUILD", "run", "notebook.*"):
      for file in (repository / folder).rglob(kind):
        name = file.relative_to(repository).as_posix()
        assert name in names or "/_" in name, name


def test_the_wheel_holds_the_package_alone(wheel, repository):
  names = zipfile.ZipFile(wheel).namelist()
  assert {name.split("/")[0] for name in names} == {
    "pallas_gemm",
    f"pallas_gemm-{pallas_gemm.__version__}.dist-info",
  }
  assert "pallas_gemm/tuning/table/some_gpu.jsonl" in names
  assert "pallas_gemm/tuning/constants/nvidia_h200.json" in names
  assert "pallas_gemm/py.typed" in names
  modules = {name for name in names if name.endswith(".py")}
  assert modules == {
    path.relative_to(repository).as_posix()
    for path in (repository / "pallas_gemm").rglob("*.py")
  }


def test_the_description_has_no_link_into_a_checkout(wheel):
  archive = zipfile.ZipFile(wheel)
  [name] = [x for x in archive.namelist() if x.endswith("/METADATA")]
  text = archive.read(name).decode()
  assert "Author: The pallas_gemm authors" in text
  targets = re.findall(r"\]\(([^)]*)\)", text)
  assert "# pallas_gemm" in text and "make bench" in text
  assert [x for x in targets if not x.startswith("https://")] == []


def test_the_wheel_works_without_the_checkout(wheel, repository, tmp_path):
  zipfile.ZipFile(wheel).extractall(tmp_path / "wheel")
  # Without `site` there is no editable install of the checkout; what the
  # package depends on is where it is for this process.
  others = [x for x in sys.path if x and Path(x).resolve() != repository]
  done = subprocess.run(
    [sys.executable, "-S", "-P", "-W", "error", "-c", _USE],
    cwd=tmp_path,
    env=os.environ
    | {
      "PYTHONPATH": os.pathsep.join([str(tmp_path / "wheel"), *others]),
      # An unknown platform makes any use of a device an error.
      "JAX_PLATFORMS": "no_such_platform",
    },
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  package = tmp_path / "wheel" / "pallas_gemm"
  assert done.stdout.splitlines() == [
    str(package / "__init__.py"),
    "[]",
    "naive",
    str(package / "ladder" / "__init__.py"),
    "None",
  ]
