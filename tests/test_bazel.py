"""The BUILD files say what is in the tree. Bazel itself is not run.

A BUILD file is read as Python, which its few statements are too, with
functions that note down what they are called with.
"""

from collections.abc import Iterator
import dataclasses
import functools
from pathlib import Path
import re
import tomllib
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
  path
  for path in ROOT.rglob("BUILD")
  if not any(part.startswith((".", "_")) for part in path.parts)
)


@dataclasses.dataclass(frozen=True)
class Target:
  """What a rule was called with."""

  rule: str
  label: str
  srcs: tuple[Path, ...]
  deps: tuple[str, ...]
  data: tuple[str, ...]


def _targets(path: Path) -> Iterator[Target]:
  folder = path.parent
  package = "" if folder == ROOT else folder.relative_to(ROOT).as_posix()
  found: list[Target] = []

  def glob(patterns: list[str], allow_empty: bool = False) -> list[str]:
    hits = [
      p.relative_to(folder).as_posix()
      for pattern in patterns
      for p in sorted(folder.glob(pattern.replace("/**", "/**/*")))
      if p.is_file()
    ]
    assert hits or allow_empty, f"{path}: {patterns} match nothing"
    return hits

  def label(name: str) -> str:
    if name.startswith(("//", "@")):
      return name if ":" in name else f"{name}:{name.rsplit('/', 1)[-1]}"
    return f"//{package}:{name.removeprefix(':')}"

  def rule(kind: str, **kwargs: Any) -> None:
    srcs = kwargs.get("srcs", [])
    found.append(
      Target(
        rule=kind,
        label=label(kwargs["name"]),
        srcs=tuple(folder / x for x in srcs if not x.startswith("//")),
        deps=tuple(map(label, kwargs.get("deps", []))),
        data=tuple(kwargs.get("data", [])),
      )
    )

  rules = ("py_library", "py_binary", "py_test", "filegroup")
  names = {kind: functools.partial(rule, kind) for kind in rules}
  ignored = ("load", "package", "licenses", "exports_files")
  names |= dict.fromkeys(ignored, lambda *_, **__: None)
  exec(path.read_text(), names | {"glob": glob})
  return iter(found)


ALL = [target for path in FILES for target in _targets(path)]
LABELS = {target.label for target in ALL}


@pytest.mark.parametrize("target", ALL, ids=lambda t: t.label)
def test_a_target_is_of_files_and_targets_that_exist(target):
  for source in target.srcs:
    assert source.is_file(), source
  for name in target.deps:
    assert name in LABELS or name.startswith("@pypi//"), name
  for name in (x for x in target.data if x.startswith("//")):
    path, file = name[2:].split(":") if ":" in name else (name[2:], "")
    assert name in LABELS or (ROOT / path / file).exists() or not file, name


def test_every_source_is_in_a_target():
  listed = {source for target in ALL for source in target.srcs}
  folders = "docs", "examples", "experiments", "pallas_gemm", "tests"
  sources = {
    path
    for folder in folders
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith((".", "_")) for part in path.parent.parts)
  }
  # What is run in place: by Sphinx, and the start of each test.
  apart = {ROOT / "docs/conf.py", ROOT / "docs/__init__.py"}
  assert sources - listed - apart == set()


def test_every_program_and_test_has_a_target():
  """And no other has one."""
  rules: dict[str, set[str]] = {"py_test": set(), "py_binary": set()}
  for target in ALL:
    rules.setdefault(target.rule, set()).add(target.label)
  tests = {f"//tests:{p.stem}" for p in (ROOT / "tests").glob("test_*.py")}
  programs = {
    f"//experiments:{p.stem}"
    for p in (ROOT / "experiments").glob("*.py")
    if "__main__" in p.read_text()
  }
  assert rules["py_test"] == tests
  ours = {x for x in rules["py_binary"] if x.startswith("//experiments")}
  assert ours == programs


def test_the_hub_has_what_targets_ask_for():
  """MODULE.bazel's requirements are those of pyproject.toml, with versions."""
  text = (ROOT / "requirements_bazel.txt").read_text()
  pinned = {
    re.sub(r"[-.]", "_", name.lower()): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)
  }
  wanted = {
    name.removeprefix("@pypi//").split(":")[0]
    for target in ALL
    for name in target.deps
    if name.startswith("@pypi//")
  }
  assert wanted <= set(pinned)
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = project["optional-dependencies"]
  direct = [*project["dependencies"]]
  for name in ("bench", "test", "docs", "triton"):
    direct += extras[name]
  named = {re.match(r"[\w-]+", x)[0].replace("-", "_").lower() for x in direct}
  assert named - {"pallas_gemm"} <= set(pinned)
  assert "http" not in text
