"""The ops of another checkout, as an arm next to this one's."""

import atexit
import dataclasses
import functools
import importlib
from pathlib import Path
import re
import shutil
import sys
import tempfile
from typing import Any

from absl import flags

from experiments.harness import cli
from experiments.harness.case import Arm, only

NAME = "before"
_PACKAGES = "pallas_gemm", "experiments", "examples"

BASE = flags.DEFINE_string(
  "base",
  None,
  "Another checkout, of the commit before say: its op is an arm of each case.",
)
cli.not_empty("base")


@functools.cache
def _load(base: str) -> None:
  """Makes the other checkout's packages importable, as pallas_gemm_before.

  Raises:
    cli.FlagError: it has not all of them.
  """
  folder = tempfile.TemporaryDirectory()
  atexit.register(folder.cleanup)
  for name in _PACKAGES:
    if not (path := Path(base, name)).is_dir():
      raise cli.FlagError(f"--base: want another checkout, there is no {path}")
    to = Path(folder.name, f"{name}_before")
    ignored = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(path, to, ignore=ignored)
    for file in to.rglob("*.py"):
      names = rf"\b({'|'.join(_PACKAGES)})\b"
      file.write_text(re.sub(names, r"\1_before", file.read_text()))
  sys.path.insert(0, folder.name)


def arms(kind: str, case: Any) -> dict[str, Arm]:
  """The arm of a case of "dense" or "ragged"; none without --base.

  Raises:
    cli.FlagError: --base is no checkout.
  """
  if BASE.value is None:
    return {}
  _load(BASE.value)
  name = f"experiments_before.harness.{kind}_cases"
  module = importlib.import_module(name)
  known = {field.name for field in dataclasses.fields(module.Case)}
  fields = {k: x for k, x in vars(case).items() if k in known}
  return {NAME: only(module.ours(module.Case(**fields)))}
