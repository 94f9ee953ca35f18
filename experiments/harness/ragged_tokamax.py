"""tokamax where not all is there that it asks for, and its own tuner."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import importlib
import importlib.util
import random
import sys
import time
import types
from typing import Any
from unittest import mock

import jax

from experiments.harness.case import Call

# How long its tuner may take for a program, looked at between so many configs.
TUNING_S = 60
_AT_ONCE = 32
PATCHED = "Triton patched to unpack constant tuples"


def load() -> Any:
  """The module tokamax.

  Its benchmarks import xprof, 32 MB, which they use on TPUs alone: where that
  is not installed an empty module stands in. jax-triton 0.4 takes Triton below
  3.7 for one without NVIDIA's backend, because it has no name for TF32 in host
  descriptors, which tokamax's kernels have none of.

  Raises:
    ModuleNotFoundError: tokamax, or what it needs, is not installed.
    Exception: whatever else its import raises.
  """
  if "tokamax" not in sys.modules and not importlib.util.find_spec("tokamax"):
    raise ModuleNotFoundError("it is not installed", name="tokamax")
  with contextlib.suppress(ModuleNotFoundError):
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "TMA_TF32"):
      driver.TMA_TF32 = 11  # as in Triton 3.7
  with _without_xprof():
    return importlib.import_module("tokamax")


@contextlib.contextmanager
def _without_xprof() -> Iterator[None]:
  """An empty xprof to import, where there is none."""
  names = "xprof", "xprof.cli", "xprof.cli.tools"
  if "xprof" in sys.modules or importlib.util.find_spec("xprof"):
    yield
    return
  found = {name: types.ModuleType(name) for name in names}
  found["xprof.cli.tools"].get_kernel_stats_tool = None
  sys.modules.update(found)
  try:
    yield
  finally:
    for name in names:
      del sys.modules[name]


def triton_config() -> dict[str, str]:
  """What its Triton kernels are compiled by; patches Triton if it must.

  Raises:
    NotImplementedError: jax-triton or Triton is not installed.
  """
  try:
    jax_triton = importlib.import_module("jax_triton")
    triton = importlib.import_module("triton")
  except ImportError as error:
    raise NotImplementedError(f"it lacks a module: {error}") from None
  found = {"jax_triton": jax_triton.__version__, "triton": triton.__version__}
  if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
    _unpack_constants()
    found["patched"] = PATCHED
  return found


@functools.cache
def _unpack_constants() -> None:
  """Has Triton's code generator unpack a tuple that is a constant.

  tokamax's kernels do, `stride_am, stride_ak = a_strides`. Triton 3.6 and 3.7
  hold a parameter like that as one constant, whose value is a tuple, and fail
  with "cannot convert ... of type <class 'tuple'> to tensor". As a tuple of
  constants, like one from within a kernel, it compiles; 3.8 needs no help.
  """
  language = importlib.import_module("triton.language")
  generator = importlib.import_module("triton.compiler.code_generator")
  original = generator.ASTFunction.deserialize

  def unpacked(value):
    held = value.value if isinstance(value, language.constexpr) else value
    if not isinstance(held, tuple):
      return language.constexpr(held)
    return language.tuple([unpacked(x) for x in held])

  def deserialize(self, fn):
    values = original(self, fn)
    return language.tuple(
      [unpacked(x) if isinstance(x, language.constexpr) else x for x in values]
    )

  generator.ASTFunction.deserialize = deserialize


def tuned(
  tokamax: Any, fn: Call, operands: dict[str, Any]
) -> tuple[Call, dict[str, Any]]:
  """A function of one pass with the config that tokamax's tuner finds fastest.

  What it picks untuned is tried first, then others in a drawn order, until
  `TUNING_S` are over. It draws operands and sizes of groups by itself.

  Returns:
    The function, and what was found: its config, how many were tried, of how
    many.

  Raises:
    Exception: no config runs.
  """
  # The last is the pass's own. One before it is the forward product in a
  # derivative, whose result nothing takes.
  *_, bound = tokamax.autotuning.get_bound_args(jax.jit(fn), **operands)
  first = bound.default_config
  configs = sorted(bound.autotuning_configs - {first}, key=str)
  random.Random(0).shuffle(configs)
  configs = [first, *configs]
  ends, times, tried = time.monotonic() + TUNING_S, None, 0
  while tried < len(configs) and (not tried or time.monotonic() < ends):
    some = configs[tried : tried + _AT_ONCE]
    more = bound.autotune({*some}, cache_results=False, timeout=TUNING_S)
    times = more if times is None else times | more
    tried += len(some)
  best = times.fastest_config
  said = {"config": str(best), "tried": tried, "of": len(configs)}
  return _with_config(fn, bound, best), said


def _with_config(fn: Call, bound: Any, config: Any) -> Call:
  """The function, traced with a config for the product of these arguments.

  Done by hand, because tokamax 0.0.17 does not find what its tuner hands back:
  it looks for an equal op, and gives each one that it makes another `vjp`.
  """
  kind, key = type(bound.op), bound.autotuning_cache_key
  default: Callable[[Any], Any] = type(bound).default_config.fget

  def chosen(self):
    same = type(self.op) is kind and self.autotuning_cache_key == key
    return config if same else default(self)

  def call(**operands):
    with mock.patch.object(type(bound), "default_config", property(chosen)):
      return fn(**operands)

  return call
