"""Tier A: every rung is free of races, and these tests can tell.

A test of a protocol that can't fail shows nothing. So each call that
synchronises, in the source of each rung that has any, is broken in turn: a
wait is left out or waits for too little, a fence is left out, a barrier is
arrived at twice. Each such bug must come to light, as a race, as an error of
the interpreter or as a wrong result. Those that can't are listed with the
reason; a kernel that gains a call gains a test.
"""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
import re
import sys

import jax
import pytest

from pallas_gemm import hardware, numerics
from pallas_gemm.ladder import LADDER, contract
from tests.support import interpret, problems

# What is done to a call, and what it does instead of f(*args).
_BREAK = {
  "left out": lambda f, args, kwargs: None,
  "too weak": lambda f, args, kwargs: f(args[0] + 1, *args[1:], **kwargs),
  "twice": lambda f, args, kwargs: (f(*args, **kwargs), f(*args, **kwargs)),
}

# The calls that synchronise, and how each can be broken. (A barrier that is
# not arrived at hangs the kernel; nothing need be shown.)
_CALLS = {
  "plgpu.barrier_wait": ("left out",),
  "plgpu.barrier_arrive": ("twice",),
  "plgpu.commit_smem": ("left out",),
  "plgpu.wait_smem_to_gmem": ("left out", "too weak"),
  "plgpu.wgmma_wait": ("left out", "too weak"),
  "simt.sync": ("left out",),
}


@dataclasses.dataclass(frozen=True)
class Bug:
  """A call in the source of a rung that is broken.

  Attributes:
    rung: whose source.
    call: the function, as the source names it.
    ordinal: which of the rung's calls of that function, in source order.
    line: where.
    how: what is done to it.
  """

  rung: contract.Rung
  call: str
  ordinal: int
  line: int
  how: str

  @property
  def key(self) -> tuple[str, str, int, str]:
    """Names the bug whatever line it is in."""
    return (self.rung.name, self.call, self.ordinal, self.how)

  def __str__(self) -> str:
    return f"{self.rung.name}-{self.call}#{self.ordinal}-{self.how}"


def _bugs() -> list[Bug]:
  bugs = []
  for rung in LADDER:
    tree = ast.parse(inspect.getsource(importlib.import_module(rung.module)))
    sites = sorted(
      (node.lineno, ast.unparse(node.func))
      for node in ast.walk(tree)
      if isinstance(node, ast.Call)
    )
    seen = dict.fromkeys(_CALLS, 0)
    for line, call in sites:
      for how in _CALLS.get(call, ()):
        bugs.append(Bug(rung, call, seen[call], line, how))
      if call in seen:
        seen[call] += 1
  return bugs


BUGS = _bugs()

# Bugs that nothing can show here, and why.
_DRAIN = (
  "the last releases are waited for so that no barrier is left with a"
  " completion unseen; nothing is loaded after them"
)
_RELEASED = "the accumulator is read next, which waits; the slot stays unused"
_WRITTEN = "every piece was waited for when it had been read"
UNSEEN = {
  ("double_buffering", "plgpu.barrier_wait", 2, "left out"): _DRAIN,
  ("warp_specialized", "plgpu.barrier_wait", 1, "left out"): _DRAIN,
  ("persistent", "plgpu.barrier_wait", 3, "left out"): _DRAIN,
  ("cluster_multicast", "plgpu.barrier_wait", 2, "left out"): (
    "a block that leaves before its peers have arrived at its barriers is a"
    " fault on the chip alone"
  ),
  ("warp_specialized", "plgpu.wgmma_wait", 1, "left out"): _RELEASED,
  ("warp_specialized", "plgpu.wgmma_wait", 1, "too weak"): _RELEASED,
  ("warp_specialized", "plgpu.wait_smem_to_gmem", 1, "left out"): _WRITTEN,
  ("warp_specialized", "plgpu.wait_smem_to_gmem", 1, "too weak"): _WRITTEN,
}


def _problem(rung: contract.Rung) -> contract.Problem:
  """Several tiles, more slabs of K than stages, tails on each side, a C."""
  m, n, k = 200, 136, 264
  if rung.config_type is contract.SimtConfig:
    config = problems.small_configs(rung, contract.Problem(1, 1, 1))[0]
    m, n = config.block_m + 1, config.block_n - 1
    k = (config.stages + 1) * max(config.block_k, 1) + 1
  return contract.Problem(m, n, k, rung.dtypes[0], beta=1.0)


def _run(rung, problem, config) -> tuple[numerics.Check, interpret.Report]:
  a, b, c = problems.operands(problem.m, problem.n, problem.k, problem.dtype)
  out, report = interpret.run(
    lambda: rung.gemm(a, b, c, beta=problem.beta, config=config),
    detect_races=True,
  )
  return numerics.check(out, a, b, c, beta=problem.beta), report


@pytest.fixture(autouse=True)
def few_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  monkeypatch.setattr(hardware, "sm_count", lambda: 2)


@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.name)
def test_free_of_races(rung):
  problem = _problem(rung)
  for config in problems.small_configs(rung, problem):
    check, report = _run(rung, problem, config)
    assert check.passed, (config, check)
    assert report.kernels == 1
    assert not report.races_found, config


def test_there_are_calls_to_break():
  assert {bug.rung.number for bug in BUGS} >= {3, 8, 9, 10, 11, 12}
  assert {bug.call for bug in BUGS} == set(_CALLS)
  assert set(UNSEEN) <= {bug.key for bug in BUGS}, "no longer in the source"


def _parameter(bug: Bug):
  reason = UNSEEN.get(bug.key)
  marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
  return pytest.param(bug, id=str(bug), marks=marks)


@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS])
def test_a_planted_bug_is_caught(bug, monkeypatch):
  module = importlib.import_module(bug.rung.module)
  owner_name, name = bug.call.split(".")
  owner = getattr(module, owner_name)
  original = getattr(owner, name)
  source = Path(module.__file__).resolve()
  planted = 0

  def broken(*args, **kwargs):
    nonlocal planted
    caller = sys._getframe(1)
    here = caller.f_lineno == bug.line
    if here and Path(caller.f_code.co_filename).resolve() == source:
      planted += 1
      return _BREAK[bug.how](original, args, kwargs)
    return original(*args, **kwargs)

  monkeypatch.setattr(owner, name, broken)
  problem = _problem(bug.rung)
  config = problems.small_configs(bug.rung, problem)[0]
  try:
    check, report = _run(bug.rung, problem, config)
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    # What the interpreter says of a broken protocol, and nothing else.
    assert re.search(
      r"ValueError: .*([Bb]arrier|copy_smem_to_gmem)", str(error)
    ), error
  else:
    assert report.races_found or not check.passed
  assert planted, "the kernel never came to the planted bug"
