"""The process of one compilation, for a GPU that need not be there.

python -m experiments.harness.compile_process MODULE:FUNCTION '{"word": 1}' GPU

The last argument is a `hardware.Gpu` as JSON. A process compiles for one GPU:
Mosaic GPU keeps the first one's target.
"""

import importlib
import json
import os
import sys

import jax
from jax.experimental import topologies
import numpy as np

from experiments.harness import compiled
from pallas_gemm import hardware


def target_config(gpu: hardware.Gpu) -> str:
  """The GPU as XLA's GpuTargetConfig, in text form.

  Numbers that are not the GPU's are limits of CUDA.
  """
  major, minor = gpu.compute_capability
  # Of sm_90a and later: wgmma, and what ptxas knows of one architecture alone.
  extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024
      threads_per_warp: 32
      shared_memory_per_block: 49152
      shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
      shared_memory_per_core: {gpu.shared_bytes_per_sm}
      threads_per_core_limit: {gpu.max_threads_per_sm}
      core_count: {gpu.sm_count}
      fpus_per_core: {gpu.fp32_lanes_per_sm}
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      memory_bandwidth: {gpu.dram_bytes_per_s:.0f}
      l2_cache_size: {gpu.l2_bytes}
      clock_rate_ghz: {gpu.clock_hz / 1e9}
      device_memory_size: {64 << 30}
      cuda_compute_capability {{
        major: {major}
        minor: {minor}
        feature_extension: {extension}
      }}
      registers_per_core_limit: {gpu.registers_per_sm}
      registers_per_block_limit: {gpu.registers_per_sm}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 }}
    device_description_str: "{gpu.name}"
  """


def main(example: str, keywords: str, gpu: str) -> None:
  """Compiles, and leaves what the compiler prints on stdout."""
  from jax.experimental.mosaic.gpu import core  # noqa: F401  (sets the next)

  # Importing it points Mosaic GPU at the CUDA installation it finds.
  os.environ["MOSAIC_GPU_CUDA_ROOT"] = os.environ["PALLAS_GEMM_AOT_TOOLS"]
  os.environ |= dict.fromkeys((*compiled.TELL, "MOSAIC_GPU_DUMP_SASS"), "1")

  module, _, name = example.partition(":")
  make = getattr(importlib.import_module(module), name)
  fields = json.loads(gpu)
  fields["compute_capability"] = tuple(fields["compute_capability"])
  with hardware.assume(hardware.Gpu(**fields)) as target:
    function, shapes = make(**json.loads(keywords))
    topology = topologies.get_topology_desc(
      platform="cuda", target_config=target_config(target), topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in shapes
    ]
    traced = jax.jit(function, out_shardings=whole).trace(*arguments)
    traced.lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
  main(*sys.argv[1:])
