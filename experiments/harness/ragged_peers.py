"""Grouped products from elsewhere that ours are compared with.

Each gives the functions among which the fastest is chosen, with their configs.
They take the operands of a case of `ragged_cases`.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import peers, ragged_tokamax
from experiments.harness.case import Call, Candidate, Claim, reason
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
EXAMPLE = Claim(
  "^body_mosaic_gpu_kernel", "it needs the kernel that JAX calls body"
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
    NotImplementedError: there is no GPU to compile for.
  """
  if not compat.targets_gpu():
    raise NotImplementedError("XLA has it for GPUs")
  return [Candidate(jax.jit(fn, compiler_options=FUSION), FUSION)]


def jax_example(case: Any) -> list[Candidate]:
  """The grouped matmuls that JAX ships as examples: for rows, or along K.

  The pass "dx" has the weights transposed; "dw" is the second example.

  Raises:
    NotImplementedError: they do not take the case, or are not there.
  """
  peers.needs_hopper()
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
  peers.needs_hopper()
  try:
    module = ragged_tokamax.load()
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
    config |= ragged_tokamax.triton_config()
  if operands is not None:
    try:
      fn, config["tuned"] = ragged_tokamax.tuned(module, fn, operands)
    except Exception as error:  # pylint: disable=broad-exception-caught
      raise NotImplementedError(f"can't tune it: {reason(error)}") from None
  return [Candidate(fn, config)]
