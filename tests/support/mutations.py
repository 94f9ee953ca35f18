"""Bugs of synchronisation, planted in the source of kernels.

A test of a protocol that can't fail shows nothing. So each call that
synchronises, in the source of a kernel, is broken in turn: a wait is left out
or waits for too little, a fence is left out, a barrier is arrived at twice.
Each such bug must come to light, as a race, as an error of the interpreter or
as a wrong result.
"""

import ast
from collections.abc import Callable, Collection
import dataclasses
import importlib
import inspect
from pathlib import Path
import re
import sys
from typing import Any

import jax
import pytest

# What is done to a call, and what it does instead of f(*args).
_BREAK = {
  "left out": lambda f, args, kwargs: None,
  "too weak": lambda f, args, kwargs: f(args[0] + 1, *args[1:], **kwargs),
  "twice": lambda f, args, kwargs: (f(*args, **kwargs), f(*args, **kwargs)),
}

# The calls that synchronise, and how each can be broken. (A barrier that is
# not arrived at hangs the kernel; nothing need be shown.)
CALLS = {
  "plgpu.barrier_wait": ("left out",),
  "plgpu.barrier_arrive": ("twice",),
  "plgpu.commit_smem": ("left out",),
  "ptx.wait_for_block": ("left out",),
  "plgpu.wait_smem_to_gmem": ("left out", "too weak"),
  "plgpu.wait_load_tmem": ("left out",),
  "plgpu.wgmma_wait": ("left out", "too weak"),
}

# Why nothing here can show that a call is left out.
OUTLIVED = "waited for so that shared memory outlives its readers, on the chip"


@dataclasses.dataclass(frozen=True)
class Bug:
  """A call in the source of a kernel that is broken.

  Attributes:
    module: whose source.
    call: the function, as the source names it.
    ordinal: which of the module's calls of that function, in source order.
    line: where.
    how: what is done to it.
  """

  module: str
  call: str
  ordinal: int
  line: int
  how: str

  @property
  def key(self) -> tuple[str, int, str]:
    """Names the bug whatever line it is in."""
    return (self.call, self.ordinal, self.how)

  def __str__(self) -> str:
    return f"{self.call}#{self.ordinal}-{self.how}"


def bugs_of(module: str) -> list[Bug]:
  """Every way to break a call of `CALLS` in a module's source."""
  tree = ast.parse(inspect.getsource(importlib.import_module(module)))
  sites = sorted(
    (node.lineno, ast.unparse(node.func))
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
  )
  bugs = []
  seen = dict.fromkeys(CALLS, 0)
  for line, call in sites:
    for how in CALLS.get(call, ()):
      bugs.append(Bug(module, call, seen[call], line, how))
    if call in seen:
      seen[call] += 1
  return bugs


class Planted:
  """A bug that is in force until the monkeypatch ends.

  Attributes:
    reached: how often the kernel came to it.
  """

  def __init__(self, bug: Bug, monkeypatch: pytest.MonkeyPatch):
    self.reached = 0
    module = importlib.import_module(bug.module)
    owner_name, name = bug.call.split(".")
    owner = getattr(module, owner_name)
    original = getattr(owner, name)
    source = Path(module.__file__).resolve()

    def broken(*args, **kwargs):
      caller = sys._getframe(1)
      here = caller.f_lineno == bug.line
      if here and Path(caller.f_code.co_filename).resolve() == source:
        self.reached += 1
        return _BREAK[bug.how](original, args, kwargs)
      return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def plant_rewrite(
  function: Callable[..., Any],
  rewrites: Collection[tuple[str, str]],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """Puts a function or class of a module in force whose source is changed.

  Args:
    function: defined in a module, at its outermost level; or a class.
    rewrites: pairs of text in its source, each there once, and what stands
      there instead.
    monkeypatch: takes it back.
  """
  source = inspect.getsource(function)
  for old, new in rewrites:
    assert source.count(old) == 1, f"not once in {function.__name__}: {old}"
    source = source.replace(old, new)
  scope = dict(vars(sys.modules[function.__module__]))
  exec(compile(source, f"<{function.__name__}, rewritten>", "exec"), scope)
  monkeypatch.setattr(
    sys.modules[function.__module__],
    function.__name__,
    scope[function.__name__],
  )


def attempts(bug: "Bug") -> int:
  """Runs that a bug may take to show.

  A slot that is released too early is not refilled early in every run.
  """
  return 8 if bug.call == "plgpu.barrier_arrive" else 1


def comes_to_light(
  run: Callable[[], tuple[bool, bool]], attempts: int = 1
) -> bool:
  """Whether a run shows that the kernel is broken.

  Args:
    run: runs the kernel; whether its numbers are right, and whether races
      were found. What it raises must be what the interpreter says of a
      broken protocol.
    attempts: how often it is run at most.
  """
  return any(_shows(run) for _ in range(attempts))


def _shows(run: Callable[[], tuple[bool, bool]]) -> bool:
  try:
    right, races_found = run()
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    assert re.search(
      r"ValueError: .*([Bb]arrier|copy_smem_to_gmem)", str(error)
    ), error
    return True
  return races_found or not right
