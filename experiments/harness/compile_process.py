"""A process that compiles kernels for GPUs that need not be there.

It has JAX imported, and each kernel is compiled in a fork of it. So a kernel
costs less than half the CPU time of a process of its own, none finds what
was compiled before it (Mosaic GPU keeps kernels, and prints nothing of one that
it has), each may be for another GPU, and a failure ends the fork alone.
"""

import atexit
from collections.abc import Iterator
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import Any, NoReturn

import jax
from jax.experimental import topologies
import numpy as np

from pallas_gemm import hardware

# JAX's CUDA plugin, if tools/setup_env.sh put it there.
_PLUGIN = Path(sys.prefix, "cuda-plugin")
_TIMEOUT_S = 240
_TOOLS = "ptxas", "nvdisasm"
# Mosaic GPU prints to the process's stdout, when it compiles a kernel: PTX,
# what ptxas says, and the code that launches, with what ptxas is not told.
TELL = tuple(f"MOSAIC_GPU_DUMP_{x}" for x in ("PTX", "PTXAS", "HOST_LLVM"))


def unavailable() -> str | None:
  """Why kernels can't be compiled to SASS here, or None."""
  if not _has_plugin() and not _PLUGIN.is_dir():
    return (
      "compiling without a GPU needs what tools/setup_env.sh installs for the"
      " extra `aot`: no CUDA plugin"
    )
  for tool in _TOOLS:
    if _find(tool) is None:
      return f"compiling without a GPU needs the extra `aot`: no {tool}"
  return None


def _has_plugin() -> bool:
  """Whether this process finds JAX's CUDA plugin itself."""
  found = importlib.util.find_spec("jax_cuda13_plugin")
  # What tests import for jax-triton, others do not find.
  return found is not None and not str(found.origin).startswith(str(_PLUGIN))


def environment() -> dict[str, str]:
  """Of a process that compiles for a GPU that need not be there."""
  found = os.environ | {
    "JAX_PLATFORMS": "cpu",
    # A compiled kernel that comes out of a cache reports nothing.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
  }
  if not _has_plugin():
    paths = str(_PLUGIN), found.get("PYTHONPATH", "")
    found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  return found


@functools.cache
def _find(tool: str) -> str | None:
  """Absolute path of a CUDA program, or None."""

  def in_package(name: str, *parts: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec else None
    return [os.path.join(place, *parts) for place in places or ()]

  # NVIDIA's wheels, where JAX looks first; an installation; Triton's copies,
  # which may be older than the plugin's PTX.
  folders = [
    *in_package("nvidia", "cu13", "bin"),
    os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"),
    "/usr/local/cuda/bin",
    os.environ["PATH"],
    *in_package("triton", "backends", "nvidia", "bin"),
  ]
  found = shutil.which(tool, path=os.pathsep.join(folders))
  return found and os.path.abspath(found)


def run(example: str, keywords: str, gpu: hardware.Gpu) -> str:
  """What compilers print of an example; see `compiled.compile_example`.

  Raises:
    RuntimeError: it does not compile.
  """
  process = _process()
  request = json.dumps([example, json.loads(keywords), dataclasses.asdict(gpu)])
  with contextlib.suppress(BrokenPipeError):
    print(request, file=process.stdin, flush=True)
  answer = process.stdout.readline()
  if not answer:
    _process.cache_clear()
    raise RuntimeError("the process that compiles has ended")
  status, said, errors = json.loads(answer)
  if status == -signal.SIGALRM:
    raise RuntimeError(
      f"{example} with {keywords} took over {_TIMEOUT_S} s to compile"
    )
  if status != 0:
    raise RuntimeError(
      f"{example} with {keywords} does not compile (exit {status}):\n"
      + errors[-4000:]
    )
  return said


@functools.cache
def _process() -> subprocess.Popen[str]:
  folder = tempfile.TemporaryDirectory()
  # Mosaic GPU looks for its tools in bin/ of one CUDA installation.
  tools = Path(folder.name, "bin")
  tools.mkdir()
  for tool in _TOOLS:
    (tools / tool).symlink_to(_find(tool))
  process = subprocess.Popen(
    [sys.executable, "-m", "experiments.harness.compile_process", folder.name],
    cwd=Path(__file__).resolve().parents[2],
    env=environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  atexit.register(folder.cleanup)
  atexit.register(process.communicate)  # at the end of its requests it ends
  return process


@contextlib.contextmanager
def printing_to(file: int) -> Iterator[None]:
  """Context in which Mosaic GPU says what it compiles, stdout is that file."""
  flush()
  stdout = os.dup(1)
  before = {name: os.environ.get(name) for name in TELL}
  try:
    os.dup2(file, 1)
    os.environ |= dict.fromkeys(TELL, "1")
    yield
  finally:
    flush()
    os.dup2(stdout, 1)
    os.close(stdout)
    for name, value in before.items():
      os.environ.pop(name, None)
      if value is not None:
        os.environ[name] = value


def flush() -> None:
  """Empties what Python and C hold back of stdout."""
  with contextlib.suppress(AttributeError, OSError, ValueError):
    sys.stdout.flush()
  with contextlib.suppress(OSError, TypeError):
    ctypes.CDLL(None).fflush(None)


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


def main(tools: str) -> None:
  """Answers requests until there are no more."""
  from jax.experimental.mosaic.gpu import core  # noqa: F401  (sets the next)

  # Importing it points Mosaic GPU at the CUDA installation it finds.
  os.environ |= {"MOSAIC_GPU_CUDA_ROOT": tools, "MOSAIC_GPU_DUMP_SASS": "1"}
  for line in sys.stdin:
    request = json.loads(line)
    # Modules of the example are there for the next one, too.
    with contextlib.suppress(ImportError):
      importlib.import_module(request[0].partition(":")[0])
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
      fork = os.fork()
      if fork == 0:
        os.dup2(errors.fileno(), 2)
        _compile_and_exit(*request, said.fileno())
      status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
      texts = []
      for file in said, errors:
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
    print(json.dumps([status, *texts]), flush=True)


def _compile_and_exit(
  example: str, keywords: dict[str, Any], gpu: dict[str, Any], file: int
) -> NoReturn:
  """What the compiler prints goes to the file."""
  signal.alarm(_TIMEOUT_S)
  status = 1
  try:
    with printing_to(file):
      _compile(example, keywords, gpu)
    status = 0
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stderr.flush()
    os._exit(status)


def _compile(
  example: str, keywords: dict[str, Any], gpu: dict[str, Any]
) -> None:
  gpu["compute_capability"] = tuple(gpu["compute_capability"])
  module, _, name = example.partition(":")
  make = getattr(importlib.import_module(module), name)
  with hardware.assume(hardware.Gpu(**gpu)) as target:
    function, shapes = make(**keywords)
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
