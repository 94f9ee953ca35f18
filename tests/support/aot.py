"""Compiles kernels for an NVIDIA H200 on a machine without a GPU.

JAX's CUDA plugin compiles for a described GPU as well as for one that is
there. What comes back is what ptxas says about registers and spills, its
warnings, and the machine code (SASS). Each compilation has a process of its
own, since some failures end it.

As a program it is that process:

    python -m tests.support.aot tests.support.aot:rung_example '{"rung": ...}'
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from pallas_gemm import hardware
from pallas_gemm.ladder import contract

GPU = "NVIDIA H200"
_ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Compiled:
  """One or more kernels as machine code.

  Attributes:
    registers: of a thread, the largest of all kernels.
    spill_bytes: stored to or loaded from local memory, summed.
    stack_bytes: of a thread, summed.
    warnings: lines in which ptxas says that performance is lost (serialised
      wgmma, ignored register hints).
    sass: the disassembly.
  """

  registers: int
  spill_bytes: int
  stack_bytes: int
  warnings: tuple[str, ...]
  sass: str

  def has(self, instruction: str) -> bool:
    """Whether an instruction that matches this regular expression is there."""
    return re.search(rf"\s{instruction}[\s;]", self.sass) is not None

  @property
  def stores_beside_wgmma(self) -> bool:
    """Whether TMA stores between a wgmma and the wait for all of them."""
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    after = [text.split(wait) for text in self.sass.split("HGMMA")]
    return any("UTMASTG" in parts[0] for parts in after[1:] if parts[1:])


def unavailable() -> str | None:
  """Why kernels can't be compiled to SASS here, or None."""
  if importlib.util.find_spec("jax_cuda13_plugin") is None:
    return "compiling without a GPU needs the extra `aot`: no CUDA plugin"
  for tool in ("ptxas", "nvdisasm"):
    if _find(tool) is None:
      return f"compiling without a GPU needs the extra `aot`: no {tool}"
  return None


def compile_rung(
  rung: int,
  m: int,
  n: int,
  k: int,
  dtype: str,
  *,
  beta: float = 0.0,
  config: contract.Config | None = None,
) -> Compiled:
  """The kernel of rung number `rung` for A [m, k] and B [k, n].

  Args:
    rung: 1..12.
    m: rows of A.
    n: columns of B.
    k: the contracted dimension.
    dtype: of the operands.
    beta: not zero adds a C [m, n].
    config: None takes the default.

  Raises:
    RuntimeError: it does not compile, or the compiler reported nothing.
  """
  return compile_example(
    "tests.support.aot:rung_example",
    rung=rung,
    shape=(m, n, k),
    dtype=dtype,
    beta=beta,
    config=None if config is None else dataclasses.asdict(config),
  )


def rung_example(rung: int, shape, dtype: str, beta: float, config):
  """A rung's gemm as a function, and its arguments; see `compile_example`."""
  import jax

  from pallas_gemm.ladder import LADDER

  (rung,) = (r for r in LADDER if r.number == rung)
  m, n, k = shape
  config = config and rung.config_type(**config)
  shapes = [(m, k), (k, n)] + ([(m, n)] if beta else [])

  def gemm(*operands):
    return rung.gemm(*operands, beta=beta, config=config)

  return gemm, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def compile_example(example: str, **keywords: Any) -> Compiled:
  """The kernels of any function that can be jitted.

  Args:
    example: "module:name" of what makes the function: called with the
      keywords it returns the function and the shapes and dtypes of its
      arguments. It is called in another process.
    **keywords: whatever JSON holds.

  Raises:
    RuntimeError: it does not compile, or the compiler reported nothing.
  """
  return _compile(example, json.dumps(keywords))


@functools.cache
def _compile(example: str, keywords: str) -> Compiled:
  with tempfile.TemporaryDirectory() as folder:
    # Mosaic GPU looks for its tools in bin/ of one CUDA installation.
    tools = Path(folder, "bin")
    tools.mkdir()
    for tool in ("ptxas", "nvdisasm"):
      (tools / tool).symlink_to(_find(tool))
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "PALLAS_GEMM_AOT_TOOLS": folder,
      # A compiled kernel that comes out of a cache reports nothing.
      "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
      [sys.executable, "-m", "tests.support.aot", example, keywords],
      cwd=_ROOT,
      env=environment,
      capture_output=True,
      text=True,
      timeout=240,
    )
  if done.returncode != 0:
    raise RuntimeError(
      f"{example} with {keywords} does not compile (exit {done.returncode}):\n"
      + done.stderr[-4000:]
    )
  return parse(done.stdout)


def parse(text: str) -> Compiled:
  """What ptxas -v and nvdisasm printed.

  Raises:
    RuntimeError: no kernel is in the text.
  """
  registers = [int(x) for x in re.findall(r"Used (\d+) registers", text)]
  start = text.find("\t.target\tsm_")
  if not registers or start < 0:
    raise RuntimeError(f"ptxas or nvdisasm printed nothing:\n{text[-4000:]}")
  properties = re.findall(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores,"
    r" (\d+) bytes spill loads",
    text,
  )
  # C75xx are ptxas's remarks on wgmma. Those that cost say so; that a fence
  # was inserted (C7519) does not.
  warnings = [
    line.strip()
    for line in text.splitlines()
    if "Potential Performance Loss" in line
    or re.search(r"\(C75\d\d\).*serialized", line)
  ]
  return Compiled(
    registers=max(registers),
    spill_bytes=sum(int(to) + int(back) for _, to, back in properties),
    stack_bytes=sum(int(stack) for stack, _, _ in properties),
    warnings=tuple(warnings),
    sass=text[start:],
  )


@functools.cache
def _find(tool: str) -> str | None:
  """Absolute path of a CUDA program, or None."""

  def in_package(name: str, *parts: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec else None
    return [Path(place, *parts) for place in places or ()]

  # NVIDIA's wheels, where JAX looks first; an installation; Triton's copies,
  # which may be older than the plugin's PTX.
  folders = in_package("nvidia", "cu13", "bin")
  if home := os.environ.get("CUDA_HOME"):
    folders.append(Path(home, "bin"))
  folders += [Path("/usr/local/cuda/bin")]
  folders += [Path(place) for place in os.environ["PATH"].split(os.pathsep)]
  folders += in_package("triton", "backends", "nvidia", "bin")
  for folder in folders:
    if found := shutil.which(tool, path=str(folder)):
      return os.path.abspath(found)
  return None


def _target(gpu: hardware.Gpu) -> str:
  """The GPU as XLA's GpuTargetConfig, in text form.

  Numbers that are not the GPU's are limits of CUDA.
  """
  major, minor = gpu.compute_capability
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
        feature_extension: ACCELERATED_FEATURES
      }}
      registers_per_core_limit: {gpu.registers_per_sm}
      registers_per_block_limit: {gpu.registers_per_sm}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 }}
    device_description_str: "{gpu.name}"
  """


def main(example: str, keywords: str) -> None:
  """Compiles, and leaves what the compiler prints on stdout."""
  import jax
  from jax.experimental import topologies
  from jax.experimental.mosaic.gpu import core  # noqa: F401  (sets the next)

  # Importing it points Mosaic GPU at the CUDA installation it finds.
  os.environ["MOSAIC_GPU_CUDA_ROOT"] = os.environ["PALLAS_GEMM_AOT_TOOLS"]
  os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
  os.environ["MOSAIC_GPU_DUMP_SASS"] = "1"

  import numpy as np

  module, _, name = example.partition(":")
  make = getattr(importlib.import_module(module), name)
  with hardware.assume(GPU) as gpu:
    function, shapes = make(**json.loads(keywords))
    topology = topologies.get_topology_desc(
      platform="cuda", target_config=_target(gpu), topology="1x1x1"
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
