"""Grouped products from elsewhere that ours are compared with.

Each gives the functions among which the fastest is chosen, with their configs.
They take the operands of a case of `ragged_cases`.
"""

from collections.abc import Callable, Iterator
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import math
import random
import sys
import time
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.harness.case import Call, Candidate, Claim, reason
from experiments.harness.ladder_cases import needs_hopper
from pallas_gemm import compat, hardware

# XLA multiplies all rows with the weights of each group, and masks. A call
# that is predicted to take longer, at peak rate, or more memory is left out.
LONGEST_S = 0.1
LARGEST_GIB = 16
# Has XLA leave `ragged_dot` to cuDNN instead.
FUSION = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
# Where cuDNN hands groups on to cuBLASLt, a kernel of its own comes before.
FUSED = Claim(
  "(?i)cudnn|moe_?grouped",
  "XLA's fusion needs a kernel of cuDNN's for each product, so cuDNN 9.22 or"
  " newer, for gradients by weights 9.24 and JAX 0.12; below that XLA keeps the"
  " dense expansion",
)
OLDEST_CUDNN = 9, 22
EXAMPLE = Claim(
  "^body_mosaic_gpu_kernel", "it needs the kernel that JAX calls body"
)
# Prepares the products of groups, which CUTLASS or cuBLAS then has.
INDEXED = Claim(
  "indexed_linear",
  "it needs the kernel of cuequivariance_ops_jax that says indexed_linear",
)
TOKAMAX = {
  "mosaic": Claim(
    r"^ragged_(contracting_dim_)?dot_sm\d+\w*_mosaic_gpu_kernel",
    "it needs tokamax' kernels for Mosaic GPU, ragged_dot_sm90 and the like",
  ),
  "triton": Claim(
    "^_ragged_(contracting_dim_)?dot_kernel",
    "it needs tokamax' kernels in Triton, _ragged_dot_kernel and the like",
  ),
}
# How long tokamax' tuner may take for a program, looked at between so many
# configs.
TUNING_S = 60
_AT_ONCE = 32
PATCHED = "Triton patched to unpack constant tuples"
# Of JAX's examples. The loops at their ends try 180 and 200; these are six of
# the kind, for few rows a group and for many. The last of the six takes any
# multiple of 64 columns.
_NAMES = (
    "block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n",
)  # fmt: skip
_RAGGED_CONFIGS = (
  (128, 128, 64, 4, 1),
  (128, 128, 64, 4, 8),
  (128, 128, 64, 5, 4),
  (64, 256, 64, 4, 4),
  (64, 128, 64, 6, 8),
  (64, 64, 64, 6, 1),
)
_TRANSPOSED_CONFIGS = (
  (128, 128, 64, 4, 1),
  (128, 128, 64, 4, 8),
  (128, 128, 64, 5, 4),
  (128, 128, 128, 2, 4),
  (64, 128, 64, 6, 4),
  (64, 64, 64, 6, 1),
)


def lax_ragged_dot(case: Any, fn: Call) -> list[Candidate]:
  """A case with `jax.lax.ragged_dot`: the function.

  Raises:
    NotImplementedError: it would take too long, or too much memory.
  """
  seconds = case.groups * case.flops(0) / hardware.current().bf16_flops
  if seconds > LONGEST_S:
    raise NotImplementedError(
      f"XLA multiplies all rows with each of {case.groups} groups: predicted"
      f" {seconds:.2g} s a call at peak rate, the limit is {LONGEST_S:g} s"
    )
  itemsize = jnp.dtype(case.dtype).itemsize
  gib = case.groups * case.m * max(case.k, case.n) * itemsize / 2**30
  if gib > LARGEST_GIB:
    raise NotImplementedError(
      f"XLA copies all rows for each of {case.groups} groups: predicted"
      f" {gib:.0f} GiB, the limit is {LARGEST_GIB} GiB"
    )
  return [Candidate(fn)]


def lax_fused(fn: Call) -> list[Candidate]:
  """A function of `jax.lax.ragged_dot`, with XLA's fusion for it.

  The option is experimental: where XLA has none of that name, compiling the
  function says so. Of a cuDNN that is too old it says nothing, see `FUSED`.

  Raises:
    NotImplementedError: there is no GPU to compile for, or its cuDNN is older
      than any that has the fusion.
  """
  if not compat.targets_gpu():
    raise NotImplementedError("XLA has it for GPUs")
  if (has := cudnn_version()) and has < OLDEST_CUDNN:
    # XLA would compile the dense expansion again, to be timed and refuted.
    raise NotImplementedError(f"this is cuDNN {has}; {FUSED.needs}")
  return [Candidate(jax.jit(fn, compiler_options=FUSION), FUSION)]


@functools.cache
def cudnn_version() -> tuple[int, int] | None:
  """That of the cuDNN that JAX has loaded, (9, 22); None if there is none."""
  try:
    number = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()
  except OSError:
    return None
  return number // 10000, number // 100 % 100


def jax_example(case: Any) -> list[Candidate]:
  """The grouped matmuls that JAX ships as examples: for rows, or along K.

  The pass "dx" has the weights transposed; "dw" is the second example.

  Raises:
    NotImplementedError: they do not take the case, or are not there.
  """
  needs_hopper()
  try:
    # pylint: disable=g-import-not-at-top
    from jax.experimental.pallas.ops.gpu import (
      ragged_dot_mgpu,
      transposed_ragged_dot_mgpu,
    )
  except ImportError as error:
    raise NotImplementedError(f"this JAX does not have it: {error}") from None

  def forward(lhs, rhs, group_sizes, **config):
    return ragged_dot_mgpu.ragged_dot(
      lhs, rhs, group_sizes=group_sizes, **config
    )

  def dx(dout, rhs, group_sizes, **config):
    return forward(dout, rhs, group_sizes, transpose_rhs=True, **config)

  def dw(lhs, dout, group_sizes, **config):
    return transposed_ragged_dot_mgpu.transposed_ragged_dot(
      lhs, dout, group_sizes=group_sizes, **config
    )

  operands, fn = {
    "forward": (("lhs", "rhs"), forward),
    "dx": (("dout", "rhs"), dx),
    "dw": (("lhs", "dout"), dw),
  }[case.pass_]

  def call(config, **given):
    return fn(*(given[x] for x in (*operands, "group_sizes")), **config)

  return [
    Candidate(functools.partial(call, config), config)
    for config in _example_configs(case)
  ]


def _example_configs(case: Any) -> list[dict[str, int]]:
  """The configs of JAX's examples that fit a case.

  Raises:
    NotImplementedError: none does.
  """
  of_pass = _TRANSPOSED_CONFIGS if case.pass_ == "dw" else _RAGGED_CONFIGS
  found = [
    config
    for config in (dict(zip(_NAMES, values)) for values in of_pass)
    if not any(size % block for size, block in _blocks(case, config))
  ]
  if not found:
    raise NotImplementedError(
      f"no config fits: K={case.k} or N={case.n} is no multiple of its blocks"
    )
  return found


def _blocks(case: Any, config: dict[str, int]) -> list[tuple[int, int]]:
  """Sizes that must be multiples, and of what."""
  block_n = config["block_n"]
  if case.pass_ == "dw":
    return [(case.k, config["block_m"]), (case.n, block_n)]
  summed, n = (case.n, case.k) if case.pass_ == "dx" else (case.k, case.n)
  return [(summed, config["block_k"]), (n, block_n * config["grid_block_n"])]


def indexed_linear(case: Any) -> list[Candidate]:
  """A case with `cuequivariance_ops_jax.indexed_linear`.

  Raises:
    NotImplementedError: it is not installed, there is no GPU for it, or an
      array is too large for it.
  """
  needs_hopper()
  try:
    module = importlib.import_module("cuequivariance_ops_jax")
  except ImportError as error:
    raise NotImplementedError(f"it is not installed: {error}") from None
  rows, weights = case.m, (case.groups, case.k, case.n)
  elements = max(math.prod(weights), rows * max(case.k, case.n))
  if elements >= 2**31:
    # 0.13.0 multiplies numbers of elements in 32 bits, and so would read memory
    # that is not its own, after which nothing runs.
    raise NotImplementedError(
      f"it counts elements in 32 bits, and an array has {elements:.2g}"
    )
  # Operands; letters of these and the result; columns of A and of the result.
  names, letters, u, v, shape = {
    "forward": (
      ("lhs", "rhs"), ("u", "uv", "v"), case.k, case.n, (rows, case.n)
    ),
    "dx": (("dout", "rhs"), ("u", "vu", "v"), case.n, case.k, (rows, case.k)),
    "dw": (("lhs", "dout"), ("u", "v", "uv"), case.k, case.n, weights),
  }[case.pass_]  # fmt: skip
  out = jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))

  def call(**given):
    a, b = (given[x] for x in names)
    return module.indexed_linear(
      a, b, out, given["group_sizes"],
      u=u, v=v, C=case.groups, Z=rows, subscripts=letters, coefficient=1.0,
    )  # fmt: skip

  return [Candidate(call, {"cuequivariance_ops_jax": module.__version__})]


def tokamax(
  how: str,
  written: Callable[[Call], Call],
  operands: dict[str, Any] | None = None,
) -> list[Candidate]:
  """A case with `tokamax.ragged_dot`, derivatives through `jax.vjp`.

  Its config is what tokamax takes by itself: from its table, or, of a problem
  that is not in there, by its rule; or what its tuner finds.

  Args:
    how: its implementation, "mosaic" or "triton".
    written: gives the function of a case's operands, with what multiplies.
    operands: shapes and dtypes to tune it for; None: nothing is tuned.

  Raises:
    NotImplementedError: it is not installed, or can't be imported or tuned.
  """
  needs_hopper()
  try:
    module = load_tokamax()
  except ModuleNotFoundError as error:
    if error.name == "tokamax":
      raise NotImplementedError("it is not installed") from None
    raise NotImplementedError(f"it lacks a module: {error}") from None
  except Exception as error:  # pylint: disable=broad-exception-caught
    raise NotImplementedError(f"can't import it: {reason(error)}") from None

  def dot(lhs, rhs, group_sizes):
    return module.ragged_dot(
      lhs, rhs, group_sizes=group_sizes, implementation=how
    )

  fn, config = written(dot), {"tokamax": module.__version__}
  if how == "triton":
    config |= triton_config()
  if operands is not None:
    try:
      fn, config["tuned"] = tokamax_tuned(module, fn, operands)
    except Exception as error:  # pylint: disable=broad-exception-caught
      raise NotImplementedError(f"can't tune it: {reason(error)}") from None
  return [Candidate(fn, config)]


def load_tokamax() -> Any:
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


def tokamax_tuned(
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
