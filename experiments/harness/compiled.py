"""What kernels become as machine code: registers, spills, shared memory.

JAX's CUDA plugin compiles for a described GPU as well as for one that is
there, so `compile_rung` and `compile_example` need no GPU: they compile for
an NVIDIA H200, or another GPU, and give what ptxas says, what the kernel is
launched with, and the machine code (SASS). They do so in another process
(`compile_process`), since some failures end it. On a GPU `capture` listens
while a kernel is compiled to run.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import tempfile
from typing import IO, Any

import jax

from experiments.harness import compile_process
from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import contract

GPU = hardware.lookup("NVIDIA H200")
# The kernel before ptxas, and the code that launches it after.
PTX = re.compile(r"(?ms)^\.version .*?^\}\n")
_HOST = re.compile(r"(?ms)^; ModuleID .*?(?=^ptxas info|^//|\Z)")
# The call in that code, of JAX 0.12 or 0.11: grid, cluster and threads of a
# block in three dimensions each, then bytes of dynamic shared memory.
LAUNCH = re.compile(
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

  def only(self, kernel: str) -> "Compiled":
    """The same with the machine code of one of the kernels.

    Args:
      kernel: what its name begins with.
    """
    codes = re.split(r"(?m)^(?=\t\.target\tsm_)", self.sass)
    found = [code for code in codes if f".text.{kernel}" in code]
    return dataclasses.replace(self, sass="".join(found))

  @property
  def stores_beside_wgmma(self) -> bool:
    """Whether TMA stores between a wgmma and the wait for all of them."""
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    after = [text.split(wait) for text in self.sass.split("HGMMA")]
    return any("UTMASTG" in parts[0] for parts in after[1:] if parts[1:])


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
      stack.enter_context(compile_process.printing_to(said.fileno()))
    yield found
    compile_process.flush()
    said.seek(0)
    kernel = resources(said.read().decode(errors="replace"))
  if kernel is not None:
    found |= facts(kernel, gpu or hardware.current())


def facts(kernel: Resources, gpu: hardware.Gpu) -> dict[str, Any]:
  """What a kernel takes, and how many blocks an SM has room for, for a row."""
  room = kernel.occupancy(gpu)
  return {
    "registers": kernel.registers,
    "spill_bytes": kernel.spill_bytes,
    "shared_bytes": kernel.shared_bytes,
    "blocks_per_sm": room and room.blocks,
    "warps_per_sm": room and room.warps,
    "occupancy_limit": room and room.limit,
  }


def describe(
  rung: contract.Rung, problem: contract.Problem, gpu: hardware.Gpu
) -> list[str]:
  """What a rung's kernel takes with its default config, in lines.

  Or, in a line, why that can't be told here. Compiling takes seconds.
  """
  if reason := rung.lacks(gpu):
    return [f"machine code: none; {reason}"]
  if reason := compile_process.unavailable():
    return [f"machine code: not known here; {reason}"]
  try:
    kernel = compile_rung(rung, problem, gpu=gpu)
  except RuntimeError as error:
    return [f"machine code: none; {str(error).splitlines()[-1]}"]
  spills = f"{kernel.spill_bytes} bytes of" if kernel.spill_bytes else "no"
  lines = [
    "machine code, as ptxas made it:",
    f"  {kernel.registers} registers a thread, {spills} spills",
  ]
  room = kernel.occupancy(gpu)
  if room is None:
    return [*lines, "  threads and shared memory of a block: not found"]
  most = gpu.max_threads_per_sm // hardware.WARP_THREADS
  return [
    *lines,
    f"  {kernel.threads} threads and {kernel.shared_bytes / 1024:.1f} KiB of"
    " shared memory a block",
    f"  room on an SM for {room.blocks}"
    f" {'block' if room.blocks == 1 else 'blocks'}: {room.warps} of"
    f" {most} warps; limit: {room.limit}",
  ]


def compile_rung(
  rung: contract.Rung | int | str,
  problem: contract.Problem,
  config: contract.Config | None = None,
  gpu: hardware.Gpu = GPU,
) -> Compiled:
  """The kernel of a rung, or of a variant.

  Args:
    rung: itself, its number or its label: 1..12, "8a".
    problem: what it computes.
    config: None takes the default for that GPU.
    gpu: what it is compiled for.

  Raises:
    RuntimeError: it does not compile, or the compiler reported nothing.
  """
  return compile_example(
    f"{__name__}:rung_example",
    gpu,
    rung=getattr(rung, "label", rung),
    problem=dataclasses.asdict(problem),
    config=config and dataclasses.asdict(config),
  )


def rung_example(rung: int | str, problem, config):
  """A rung's gemm as a function, and its arguments; see `compile_example`."""
  rung, p = ladder.find(rung), contract.Problem(**problem)
  gemm = functools.partial(
    rung.gemm,
    alpha=p.alpha,
    beta=p.beta,
    config=config and rung.config_type(**config),
  )
  shapes = [(p.m, p.k), (p.k, p.n)] + ([(p.m, p.n)] if p.beta else [])
  return gemm, [jax.ShapeDtypeStruct(shape, p.dtype) for shape in shapes]


def compile_example(
  example: str, gpu: hardware.Gpu = GPU, **keywords: Any
) -> Compiled:
  """The kernels of any function that can be jitted.

  Args:
    example: "module:name" of what makes the function: called with the
      keywords it returns the function and the shapes and dtypes of its
      arguments. It is called in another process.
    gpu: what it is compiled for.
    **keywords: whatever JSON holds.

  Raises:
    RuntimeError: it does not compile, or the compiler reported nothing.
  """
  return _compile(example, json.dumps(keywords), gpu)


@functools.cache
def _compile(example: str, keywords: str, gpu: hardware.Gpu) -> Compiled:
  return parse(compile_process.run(example, keywords, gpu))


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
  return Compiled(
    **dataclasses.asdict(found),
    warnings=tuple(warnings),
    sass=PTX.sub("", _HOST.sub("", text[start:])),
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
  launches = [[int(x) for x in found] for found in LAUNCH.findall(text)]
  static = max(int(shared or 0) for _, shared in used)
  return Resources(
    registers=max(int(registers) for registers, _ in used),
    spill_bytes=sum(int(to) + int(back) for _, to, back in stacks),
    stack_bytes=sum(int(stack) for stack, _, _ in stacks),
    threads=max((math.prod(x[6:9]) for x in launches), default=None),
    shared_bytes=max((static + x[9] for x in launches), default=None),
  )
