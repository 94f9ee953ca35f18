"""What kernels become as machine code: registers, spills, shared memory.

JAX's CUDA plugin compiles for a described GPU as well as for one that is
there, so `compile_rung` and `compile_example` need no GPU: they compile for
an NVIDIA H200, and give what ptxas says, what the kernel is launched with, and
the machine code (SASS). Each compilation has a process of its own, since some
failures end it. On a GPU `capture` listens while a kernel is compiled to run.

As a program it is the process of one compilation, given the two arguments of
`main`:

    python -m experiments.harness.compiled MODULE:FUNCTION '{"keyword": 1}'
"""

from collections.abc import Iterator
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import io
import json
import math
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile
from typing import IO, Any

from pallas_gemm import hardware
from pallas_gemm.ladder import contract

GPU = "NVIDIA H200"
_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 240
_MODULE = "experiments.harness.compiled"
# Mosaic GPU prints to the process's stdout, when it compiles a kernel: what
# ptxas says; and the code that launches, which holds what ptxas is not told.
_TELL = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_HOST_LLVM")
# The call in that code, of JAX 0.12 or 0.11: grid, cluster and threads of a
# block in three dimensions each, then bytes of dynamic shared memory.
_LAUNCH = re.compile(
  r"call [^@\n]*@mosaic_gpu_(?:build_kernel_spec|launch_kernel)"
  r"\(ptr [^,]*" + r", i32 (\d+)" * 10
)


@dataclasses.dataclass(frozen=True)
class Resources:
  """What a kernel takes; of several kernels, what the largest does.

  Attributes:
    registers: of a thread, when the kernel starts. Kernels whose warps pass
      registers on to each other do so later.
    spill_bytes: stored to or loaded from local memory, summed over kernels.
    stack_bytes: of a thread, summed over kernels.
    threads: of a block; None if the launch was not found.
    shared_bytes: shared memory of a block, static and dynamic; None likewise.
  """

  registers: int
  spill_bytes: int
  stack_bytes: int
  threads: int | None
  shared_bytes: int | None

  def occupancy(self, gpu: hardware.Gpu) -> hardware.Occupancy | None:
    """How many blocks an SM has room for; None if the launch is unknown."""
    if self.threads is None or self.shared_bytes is None:
      return None
    return hardware.occupancy(
      gpu,
      registers=self.registers,
      threads=self.threads,
      shared_bytes=self.shared_bytes,
    )


@dataclasses.dataclass(frozen=True)
class Compiled(Resources):
  """One or more kernels as machine code.

  Attributes:
    warnings: lines in which ptxas says that performance is lost (serialised
      wgmma, ignored register hints).
    sass: the disassembly.
  """

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


@contextlib.contextmanager
def capture(gpu: hardware.Gpu | None = None) -> Iterator[dict[str, Any]]:
  """Context of a kernel's first call on a GPU, when it is compiled.

  The call must end inside. What else is printed there is lost.

  Args:
    gpu: that it runs on; None is `hardware.current()`.

  Yields:
    A dict, empty until the end, then `facts` of the kernel. It stays empty if
    Mosaic GPU compiled none, or where stdout can't be listened to.

  Example:
    >>> from experiments.harness import compiled
    >>> with compiled.capture() as found:
    ...   pass
    >>> found
    {}
  """
  found: dict[str, Any] = {}
  said: IO[bytes] = io.BytesIO()
  with contextlib.ExitStack() as stack:
    with contextlib.suppress(OSError):  # no stdout, or no room for a file
      said = stack.enter_context(tempfile.TemporaryFile())
      stack.enter_context(_stdout_to(said.fileno()))
      stack.enter_context(_telling())
    yield found
    _flush()
    said.seek(0)
    kernel = resources(said.read().decode(errors="replace"))
  if kernel is not None:
    found |= facts(kernel, gpu or hardware.current())


def facts(kernel: Resources, gpu: hardware.Gpu) -> dict[str, Any]:
  """What a kernel takes, and how many blocks an SM has room for, for a row."""
  occupancy = kernel.occupancy(gpu)
  return {
    "registers": kernel.registers,
    "spill_bytes": kernel.spill_bytes,
    "shared_bytes": kernel.shared_bytes,
    "blocks_per_sm": occupancy and occupancy.blocks,
    "warps_per_sm": occupancy and occupancy.warps,
    "occupancy_limit": occupancy and occupancy.limit,
  }


def describe(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> list[str]:
  """What a rung's kernel takes with its default config, in lines.

  Or, in a line, why that can't be told here. Compiling takes seconds.
  """
  if gpu.compute_capability != hardware.lookup(GPU).compute_capability:
    return [f"machine code: compiled for GPUs like {GPU} alone, not {gpu.name}"]
  if reason := unavailable():
    return [f"machine code: not known here; {reason}"]
  try:
    kernel = compile_rung(
      rung.label,
      problem.m,
      problem.n,
      problem.k,
      problem.dtype,
      beta=problem.beta,
      config=rung.default_config(problem),
    )
  except RuntimeError as error:
    return [f"machine code: none; {str(error).splitlines()[-1]}"]
  spills = f"{kernel.spill_bytes} bytes of" if kernel.spill_bytes else "no"
  lines = [
    "machine code, as ptxas made it:",
    f"  {kernel.registers} registers a thread, {spills} spills",
  ]
  occupancy = kernel.occupancy(gpu)
  if occupancy is None:
    return [*lines, "  threads and shared memory of a block: not found"]
  most = gpu.max_threads_per_sm // hardware.WARP_THREADS
  return [
    *lines,
    f"  {kernel.threads} threads and {kernel.shared_bytes / 1024:.1f} KiB of"
    " shared memory a block",
    f"  room on an SM for {occupancy.blocks}"
    f" {'block' if occupancy.blocks == 1 else 'blocks'}: {occupancy.warps} of"
    f" {most} warps; limit: {occupancy.limit}",
  ]


def compile_rung(
  rung: int | str,
  m: int,
  n: int,
  k: int,
  dtype: str,
  *,
  beta: float = 0.0,
  config: contract.Config | None = None,
) -> Compiled:
  """The kernel of a rung, or of a variant, for A [m, k] and B [k, n].

  Args:
    rung: its number or its label: 1..12, "8a".
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
    f"{_MODULE}:rung_example",
    rung=rung,
    shape=(m, n, k),
    dtype=dtype,
    beta=beta,
    config=None if config is None else dataclasses.asdict(config),
  )


def rung_example(rung: int | str, shape, dtype: str, beta: float, config):
  """A rung's gemm as a function, and its arguments; see `compile_example`."""
  import jax

  from pallas_gemm.ladder import with_variants

  (rung,) = (r for r in with_variants() if r.label == str(rung))
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
    try:
      done = subprocess.run(
        [sys.executable, "-m", _MODULE, example, keywords],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
      )
    except subprocess.TimeoutExpired:
      raise RuntimeError(
        f"{example} with {keywords} took over {_TIMEOUT_S} s to compile"
      ) from None
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
  found = resources(text)
  start = text.find("\t.target\tsm_")
  if found is None or start < 0:
    raise RuntimeError(f"ptxas or nvdisasm printed nothing:\n{text[-4000:]}")
  # C75xx are ptxas's remarks on wgmma. Those that cost say so; that a fence
  # was inserted (C7519) does not.
  warnings = [
    line.strip()
    for line in text.splitlines()
    if "Potential Performance Loss" in line
    or re.search(r"\(C75\d\d\).*serialized", line)
  ]
  # The code that launches follows each kernel's.
  host = r"(?ms)^; ModuleID .*?(?=^ptxas info|\Z)"
  return Compiled(
    **dataclasses.asdict(found),
    warnings=tuple(warnings),
    sass=re.sub(host, "", text[start:]),
  )


def resources(text: str) -> Resources | None:
  """What the kernels take that ptxas -v speaks of; None if of none."""
  used = re.findall(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", text)
  if not used:
    return None
  stacks = re.findall(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores,"
    r" (\d+) bytes spill loads",
    text,
  )
  launches = [[int(x) for x in found] for found in _LAUNCH.findall(text)]
  static = max(int(shared or 0) for _, shared in used)
  return Resources(
    registers=max(int(registers) for registers, _ in used),
    spill_bytes=sum(int(to) + int(back) for _, to, back in stacks),
    stack_bytes=sum(int(stack) for stack, _, _ in stacks),
    threads=max((math.prod(x[6:9]) for x in launches), default=None),
    shared_bytes=max((static + x[9] for x in launches), default=None),
  )


@contextlib.contextmanager
def _stdout_to(file: int) -> Iterator[None]:
  """Context in which the process's stdout is another file."""
  _flush()
  before = os.dup(1)
  try:
    os.dup2(file, 1)
    yield
  finally:
    _flush()
    os.dup2(before, 1)
    os.close(before)


def _flush() -> None:
  """Empties what Python and C hold back of stdout."""
  with contextlib.suppress(AttributeError, OSError, ValueError):
    sys.stdout.flush()
  with contextlib.suppress(OSError, TypeError):
    ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
  """Context in which Mosaic GPU prints what it compiles."""
  before = {name: os.environ.get(name) for name in _TELL}
  os.environ |= dict.fromkeys(_TELL, "1")
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name)
      if value is not None:
        os.environ[name] = value


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


def target_config(gpu: hardware.Gpu) -> str:
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
  os.environ |= dict.fromkeys((*_TELL, "MOSAIC_GPU_DUMP_SASS"), "1")

  import numpy as np

  module, _, name = example.partition(":")
  make = getattr(importlib.import_module(module), name)
  with hardware.assume(GPU) as gpu:
    function, shapes = make(**json.loads(keywords))
    topology = topologies.get_topology_desc(
      platform="cuda", target_config=target_config(gpu), topology="1x1x1"
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
