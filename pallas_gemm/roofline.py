"""Floors: how fast a kernel could be at most, and what stops it there.

A kernel does arithmetic and moves bytes, and a GPU does each at some peak
rate. Whatever the overlap, the kernel takes no less time than the slowest of
them alone; that time is the floor, and the resource it comes from *binds*
(S. Williams et al., *Roofline: an insightful visual performance model for
multicore architectures*, 2009). FLOP per byte of device memory is the
arithmetic intensity; the intensity from which on arithmetic binds is the
ridge point of the GPU.

Rates that no datasheet has, the same on all GPUs of `hardware`:

* shared memory: 32 banks of 4 bytes, 128 bytes a clock on each SM;
* L2 to an SM: 64 bytes a clock on each SM (Z. Jia et al., *Dissecting the
  NVIDIA Volta GPU architecture via microbenchmarking*, 2018);
* L1: one 128-byte cache line looked up a clock on each SM. A warp whose lanes
  touch 32 lines takes 32 clocks where neighbouring addresses take one.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_gemm import hardware

L2_BYTES_PER_CLOCK = 64
L1_LINES_PER_CLOCK = 1


@dataclasses.dataclass(frozen=True)
class Floor:
  """The least time a kernel can take; all in seconds.

  Attributes:
    seconds: the largest of the others.
    binds: where that comes from: "compute", "dram", "l2", "l1" or
      "shared memory".
    compute_seconds: the FLOP at the peak rate of the dtype.
    memory_seconds: the bytes at the peak rate of device memory.
    shared_seconds: the bytes at the peak rate of shared memory; 0 if the
      kernel uses none.
    l2_seconds: the bytes at the peak rate from L2 into the SMs.
    l1_seconds: the cache lines at the peak rate of L1 lookups.
  """

  seconds: float
  binds: str
  compute_seconds: float
  memory_seconds: float
  shared_seconds: float = 0.0
  l2_seconds: float = 0.0
  l1_seconds: float = 0.0


def peak_flops(gpu: hardware.Gpu, dtype: Any) -> float:
  """Peak FLOP/s with operands of a dtype and float32 accumulation.

  Args:
    gpu: the GPU.
    dtype: float32 (CUDA cores, exact fp32 arithmetic), bfloat16, float16,
      float8_e4m3fn, float8_e5m2 or int8 (tensor cores), or the string "tf32"
      (tensor cores, float32 operands cut to TF32). The tensor cores of a T4
      are left out, and of 8 bits see `Gpu.tensor_flops`.

  Raises:
    ValueError: another dtype.
    TypeError: no dtype.
  """
  name = dtype if dtype == "tf32" else jnp.dtype(dtype).name
  rates = {
    "float32": gpu.fp32_flops,
    "tf32": gpu.tf32_flops,
    "bfloat16": gpu.bf16_flops,
    "float16": gpu.bf16_flops,
    **dict.fromkeys(
      ("float8_e4m3fn", "float8_e5m2", "int8"), gpu.tensor_flops(8)
    ),
  }
  if name not in rates:
    raise ValueError(f"dtype must be one of {', '.join(rates)}, got {name}")
  return rates[name]


def ridge_point(gpu: hardware.Gpu, dtype: Any = "float32") -> float:
  """FLOP per byte of device memory from which on arithmetic binds.

  Args:
    gpu: the GPU.
    dtype: as for `peak_flops`.

  Example:
    >>> from pallas_gemm import hardware, roofline
    >>> a100 = hardware.lookup("A100-SXM4-80GB")
    >>> round(roofline.ridge_point(a100, "float32"), 1)
    9.6
  """
  return peak_flops(gpu, dtype) / gpu.dram_bytes_per_s


def attainable(
  intensity: float, gpu: hardware.Gpu, dtype: Any = "float32"
) -> float:
  """FLOP/s under the roofline at an arithmetic intensity.

  Args:
    intensity: FLOP per byte of device memory.
    gpu: the GPU.
    dtype: as for `peak_flops`.

  Raises:
    ValueError: a negative intensity.
  """
  _check_not_negative(intensity=intensity)
  return min(peak_flops(gpu, dtype), intensity * gpu.dram_bytes_per_s)


def floor(
  flops: float,
  bytes: float,
  gpu: hardware.Gpu,
  dtype: Any = "float32",
  shared_bytes: float | None = None,
  *,
  l2_bytes: float | None = None,
  l1_lines: float | None = None,
) -> Floor:
  """The least time for that much work, spread evenly over the GPU.

  Args:
    flops: FLOP; a fused multiply-add is two.
    bytes: read from and written to device memory.
    gpu: the GPU.
    dtype: as for `peak_flops`.
    shared_bytes: read from and written to shared memory, None for none.
    l2_bytes: moved from L2 into SMs and back, None to leave L2 out.
    l1_lines: cache lines that warps' global accesses look up in L1, None to
      leave L1 out.

  Raises:
    ValueError: an amount below zero, or a dtype without a peak rate.

  Example:
    >>> from pallas_gemm import hardware, roofline
    >>> h200 = hardware.lookup("H200")
    >>> roofline.floor(2 * 4096**3, 3 * 4 * 4096**2, h200).binds
    'compute'
    >>> roofline.floor(2 * 4096**2, 4 * 4096**2, h200).binds
    'dram'
  """
  shared_bytes, l2_bytes = shared_bytes or 0, l2_bytes or 0
  l1_lines = l1_lines or 0
  _check_not_negative(
    flops=flops,
    bytes=bytes,
    shared_bytes=shared_bytes,
    l2_bytes=l2_bytes,
    l1_lines=l1_lines,
  )
  sm_clocks_per_s = gpu.sm_count * gpu.clock_hz
  seconds = {
    "compute": flops / peak_flops(gpu, dtype),
    "dram": bytes / gpu.dram_bytes_per_s,
    "l2": l2_bytes / (L2_BYTES_PER_CLOCK * sm_clocks_per_s),
    "l1": l1_lines / (L1_LINES_PER_CLOCK * sm_clocks_per_s),
    "shared memory": shared_bytes / gpu.shared_bytes_per_s,
  }
  binds = max(seconds, key=seconds.__getitem__)
  return Floor(
    seconds=seconds[binds],
    binds=binds,
    compute_seconds=seconds["compute"],
    memory_seconds=seconds["dram"],
    shared_seconds=seconds["shared memory"],
    l2_seconds=seconds["l2"],
    l1_seconds=seconds["l1"],
  )


def _check_not_negative(**amounts: float) -> None:
  for name, amount in amounts.items():
    # Written so that NaN fails too.
    if not amount >= 0:
      raise ValueError(f"{name} must be 0 or more, got {amount}")
