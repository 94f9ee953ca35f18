"""What a GPU is: how many SMs, how much of each memory, how fast at most.

All that depends on the machine asks here, so that no kernel carries a number
that is true of one GPU alone. `current()` describes the one that a trace made
now is for, `lookup()` one by name, of the tables of `gpus`.
"""

from collections.abc import Iterable
import contextlib
import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

from pallas_gemm import compat, gpus

KIB, MIB = 1024, 1024**2

# Groups of SMs of a Hopper GPU within which a cluster must find room; which of
# their SMs work differs from GPU to GPU. SMs come in pairs.
_GPCS, _PAIRS_OF_A_GPC = 8, 9

# What memory and the caches move, and what they hold under one address. A
# sector that is written in part is read first.
SECTOR_BYTES, LINE_BYTES = 32, 128
# The most that a thread loads or stores at a time.
VECTOR_BYTES = 16

# How an SM deals out registers and shared memory: to a warp so many registers
# at a time, from the quarter of the SM that the warp runs on; to a block so
# many bytes, and from Ampere on one KiB more for CUDA.
WARP_THREADS = 32
_QUARTERS = 4
_REGISTER_UNIT = 256
_SHARED_UNIT_BYTES = 128


class Feature(NamedTuple):
  """What some GPUs have: a name, the compute capabilities, those in words."""

  name: str
  least: tuple[int, int]
  last: tuple[float, float]
  which: str


def _from(name: str, major: int, minor: int = 0) -> Feature:
  which = f"{major}.{minor} and later have"
  return Feature(name, (major, minor), (math.inf, 0), which)


# What kernels need of a GPU.
FEATURES = {
  "ptxas": _from("CUDA 13's ptxas", 7, 5),
  "mbarrier": _from("mbarrier", 8),
  "mma": _from("mma of 16 x 8 x 16", 8),
  "tma": _from("TMA", 9),
  "setmaxnreg": _from("setmaxnreg", 9),
  "cluster": _from("clusters of thread blocks", 9),
  "wgmma": Feature("wgmma", (9, 0), (9, 0), "9.0 alone has"),
  "tcgen05": Feature("tcgen05", (10, 0), (10, math.inf), "10.x alone has"),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
  """One GPU, in bytes, hertz, bytes a second and FLOP a second.

  A fused multiply-add counts as two FLOP.

  Attributes:
    name: as the CUDA driver reports it.
    compute_capability: (major, minor); (0, 0) if it can't be known.
    sm_count: streaming multiprocessors.
    fp32_lanes_per_sm: float32 FMAs that one SM starts in a clock.
    clock_hz: boost clock of the SMs.
    l2_bytes: size of the L2 cache.
    dram_bytes_per_s: peak rate of device memory, reads and writes together.
    shared_bytes_per_block: most shared memory that one thread block can have.
    shared_bytes_per_sm: shared memory of one SM; from Ampere on each resident
      thread block takes 1 KiB of it more than its own.
    registers_per_sm: 32-bit registers of one SM.
    max_threads_per_sm: threads that can be resident on one SM.
    max_blocks_per_sm: thread blocks that can be.
    fp32_flops: peak of the CUDA cores in float32.
    tf32_flops: dense peak of the tensor cores with TF32 operands; of a GPU
      that has no TF32, `fp32_flops`.
    bf16_flops: dense peak of the tensor cores with bfloat16 or float16
      operands and float32 accumulation; of one without bfloat16, `fp32_flops`.
    modelled_on: None if the rates are this product's own; otherwise the known
      product whose rates, scaled by the number of SMs, stand in for them.
  """

  name: str
  compute_capability: tuple[int, int]
  sm_count: int
  fp32_lanes_per_sm: int
  clock_hz: float
  l2_bytes: int
  dram_bytes_per_s: float
  shared_bytes_per_block: int
  shared_bytes_per_sm: int
  registers_per_sm: int
  max_threads_per_sm: int
  max_blocks_per_sm: int
  fp32_flops: float
  tf32_flops: float
  bf16_flops: float
  modelled_on: str | None = None

  def lacks(self, what: str) -> str | None:
    """None, or that the GPU has not got one of `FEATURES`, in words.

    Example:
      >>> from pallas_gemm import hardware
      >>> hardware.lookup("L4").lacks("tma")
      'TMA, which compute capability 9.0 and later have; NVIDIA L4 has 8.9'
    """
    feature, have = FEATURES[what], self.compute_capability
    if feature.least <= have <= feature.last:
      return None
    has = "{}.{}".format(*have) if any(have) else "none that is known"
    which = f"compute capability {feature.which}"
    return f"{feature.name}, which {which}; {self.name} has {has}"

  def tensor_flops(self, bits: int) -> float:
    """Dense peak of the tensor cores with operands of 16 bits, or of 8.

    Of 8 bits it is twice that of 16, of float8 too where a GPU has none. That
    is too low for int8 on GeForce: the rate of 16 bits is that of float32 sums.
    """
    return self.bf16_flops * 16 / bits

  @property
  def shared_bytes_per_s(self) -> float:
    """Peak rate of shared memory of all SMs: 32 banks of 4 bytes a clock."""
    return self.sm_count * 32 * 4 * self.clock_hz


def _reserved(capability: tuple[int, int]) -> int:
  return KIB if capability >= (8, 0) else 0


def _product(name, capability, sms, mhz, l2_mib, dram_gb, *tflops) -> Gpu:
  """A row of the table."""
  lanes, shared_kib, threads, blocks = gpus.ARCHITECTURES[capability]
  fp32, tf32, bf16 = (rate * 1e12 for rate in tflops)
  return Gpu(
    name=name,
    compute_capability=capability,
    sm_count=sms,
    fp32_lanes_per_sm=lanes,
    clock_hz=mhz * 1e6,
    l2_bytes=l2_mib * MIB,
    dram_bytes_per_s=dram_gb * 1e9,
    shared_bytes_per_block=shared_kib * KIB - _reserved(capability),
    shared_bytes_per_sm=shared_kib * KIB,
    registers_per_sm=64 * KIB,
    max_threads_per_sm=threads,
    max_blocks_per_sm=blocks,
    fp32_flops=fp32,
    tf32_flops=tf32,
    bf16_flops=bf16,
  )


_KNOWN = {name: _product(name, *row) for name, row in gpus.PRODUCTS.items()}

# What is modelled where there is no GPU to ask.
DEFAULT_NAME = "NVIDIA H200"


def known_names() -> tuple[str, ...]:
  """Names that `lookup` takes."""
  return tuple(_KNOWN)


def lookup(name: str) -> Gpu:
  """The GPU of that name.

  Args:
    name: as the CUDA driver reports it; case and the words "NVIDIA",
      "GeForce" and "Tesla" do not matter. "H100" is the one of 80 GB with HBM3.

  Raises:
    ValueError: it is not in the table; the message lists the known names.

  Example:
    >>> from pallas_gemm import hardware
    >>> hardware.lookup("A100-SXM4-80GB").dram_bytes_per_s
    2039000000000.0
  """
  if gpu := _find(name):
    return gpu
  known = ", ".join(_KNOWN)
  raise ValueError(f"name must be a known GPU, got {name!r}; known: {known}")


def current() -> Gpu:
  """The GPU that a trace made now is for.

  * A GPU of the table (by its name): that row, with the number of SMs that
    the device itself reports (a partition of a GPU has fewer).
  * Another NVIDIA GPU: name, compute capability, number of SMs and shared
    memory are read off the device, as far as it tells them. The rest is an
    estimate: that of the product in the table with the same or the nearest
    older compute capability (else the oldest) and the nearest number of SMs,
    rates scaled by the number of SMs. `modelled_on` names that product.
  * No NVIDIA GPU (kernels are interpreted): the H200's row, so that the traffic
    model and its floors can be printed on any machine.
  """
  if not compat.targets_gpu():
    return _KNOWN[DEFAULT_NAME]
  device = compat.target_device()
  sms, gpu = _reported_sm_count(device), _find(device.device_kind)
  if gpu is None:
    return _estimate(device, sms)
  return gpu if sms is None else dataclasses.replace(gpu, sm_count=sms)


def why_not(
  who: str, needs: Iterable[str], gpu: Gpu | None = None
) -> str | None:
  """None, or what a GPU lacks of what a kernel needs.

  Args:
    who: the kernel, as the sentence names it.
    needs: of `FEATURES`.
    gpu: None is the one that a trace made now is for. Where there is none
      kernels are interpreted, which needs nothing.

  Example:
    >>> from pallas_gemm import hardware
    >>> hardware.why_not("it", ("mma", "wgmma"), hardware.lookup("L4"))
    'it needs wgmma, which compute capability 9.0 alone has; NVIDIA L4 has 8.9'
  """
  if gpu is None:
    device = compat.target_device()
    if compat.is_amd(device):
      return f"{who} needs an NVIDIA GPU, this is for {device.device_kind}"
    if not compat.targets_gpu():
      return None
    gpu = current()
  found = next(filter(None, map(gpu.lacks, ("ptxas", *needs))), None)
  return found and f"{who} needs {found}"


def sm_count() -> int:
  """Streaming multiprocessors of `current()`: the size of persistent grids."""
  return current().sm_count


def clusters_at_once(blocks: int, sms: int) -> int:
  """Clusters of so many thread blocks that surely run together, one an SM.

  SMs come in pairs, and a cluster lies within a GPC, which has nine pairs at
  most. How many each has differs from GPU to GPU, so this is for the worst one.
  Of four blocks 29 clusters find room in any case on 132 SMs, of eight 13; CUDA
  said 30 and 15 of one H100 (`cudaOccupancyMaxActiveClusters`). More would have
  to wait until the first ones end.

  Example:
    >>> from pallas_gemm import hardware
    >>> [hardware.clusters_at_once(blocks, 132) for blocks in (1, 2, 4, 8)]
    [132, 66, 29, 13]
  """
  if blocks == 1:
    return sms
  return max(1, _fewest_clusters(sms // 2, _GPCS, -(-blocks // 2)))


@functools.cache
def _fewest_clusters(pairs: int, gpcs: int, wanted: int) -> int:
  """Clusters of `wanted` pairs, however so many pairs lie in so many GPCs."""
  if gpcs == 1:
    return pairs // wanted
  most = max(_PAIRS_OF_A_GPC, -(-pairs // gpcs))
  fewest = max(0, pairs - most * (gpcs - 1))
  return min(
    here // wanted + _fewest_clusters(pairs - here, gpcs - 1, wanted)
    for here in range(fewest, min(pairs, most) + 1)
  )


@dataclasses.dataclass(frozen=True)
class Occupancy:
  """How much of a kernel an SM has room for at once.

  Attributes:
    blocks: thread blocks; 0 if one alone does not fit.
    warps: of those blocks.
    limit: what leaves no room for one block more: of registers, shared
      memory, threads and blocks those that run out, joined by "and".
  """

  blocks: int
  warps: int
  limit: str


def occupancy(
  gpu: Gpu, *, registers: int, threads: int, shared_bytes: int
) -> Occupancy:
  """How many blocks of a kernel are resident on an SM.

  Args:
    gpu: of the SM.
    registers: of a thread when the kernel starts. Warps that later pass
      registers on to each other (setmaxnreg) do so within their block.
    threads: of a block.
    shared_bytes: shared memory of a block, static and dynamic.

  Example:
    >>> from pallas_gemm import hardware
    >>> gpu = hardware.lookup("H200")
    >>> hardware.occupancy(gpu, registers=64, threads=256, shared_bytes=33000)
    Occupancy(blocks=4, warps=32, limit='registers')
  """
  warps = -(-threads // WARP_THREADS)
  of_warp = -(-registers * WARP_THREADS // _REGISTER_UNIT) * _REGISTER_UNIT
  warps_a_quarter = gpu.registers_per_sm // _QUARTERS // of_warp
  reserved = _reserved(gpu.compute_capability)
  of_block = -(-(shared_bytes + reserved) // _SHARED_UNIT_BYTES)
  of_block *= _SHARED_UNIT_BYTES
  room = {
    "registers": _QUARTERS * warps_a_quarter // warps,
    "shared memory": gpu.shared_bytes_per_sm // max(1, of_block),
    "threads": gpu.max_threads_per_sm // (warps * WARP_THREADS),
    "blocks": gpu.max_blocks_per_sm,
  }
  blocks = min(room.values())
  limits = " and ".join(x for x, count in room.items() if count == blocks)
  return Occupancy(blocks, blocks * warps, limits)


@contextlib.contextmanager
def assume(name: str | Gpu):
  """Context that yields the `Gpu` that traces and lowerings are made for.

  For machines without a GPU: `current()` gives this one inside, and kernels are
  lowered for it instead of interpreted. They can't be run on a CPU.

  Args:
    name: as for `lookup`; or a GPU, of which `current()` knows name, compute
      capability and number of SMs if it is not in the table.

  Raises:
    ValueError: a name that is not in the table.

  Example:
    >>> from pallas_gemm import hardware
    >>> with hardware.assume("H100 PCIe"):
    ...   hardware.sm_count()
    114
  """
  gpu = name if isinstance(name, Gpu) else lookup(name)
  capability = "{}.{}".format(*gpu.compute_capability)
  with compat.abstract_gpu(gpu.name, gpu.sm_count, capability):
    yield gpu


@functools.lru_cache(maxsize=64)  # asked for several times a choice
def _find(name: str) -> Gpu | None:
  plain = _plain(gpus.SHORT.get(_plain(name), name))
  return next((g for g in _KNOWN.values() if _plain(g.name) == plain), None)


def _plain(name: str) -> str:
  words = str(name).lower().split()
  return " ".join(x for x in words if x not in ("nvidia", "geforce", "tesla"))


def _reported_sm_count(device: Any) -> int | None:
  """SMs by the device's word; abstract devices call them num_cores."""
  counts = (getattr(device, x, None) for x in ("core_count", "num_cores"))
  return next((x for x in counts if isinstance(x, int) and x > 0), None)


def _estimate(device: Any, sms: int | None) -> Gpu:
  """A GPU that is not in the table; see `current`."""
  said = str(getattr(device, "compute_capability", ""))
  found = re.fullmatch(r"(\d+)\.(\d+)", said)
  capability = (int(found[1]), int(found[2])) if found else (0, 0)
  older = [c for c in gpus.ARCHITECTURES if c <= capability]
  nearest = max(older, default=min(gpus.ARCHITECTURES))
  peers = [g for g in _KNOWN.values() if g.compute_capability == nearest]
  peer = min(peers, key=lambda g: abs(g.sm_count - (sms or g.sm_count)))
  sms = sms or peer.sm_count
  share = sms / peer.sm_count
  shared = getattr(device, "shared_memory_per_block_optin", None)
  return dataclasses.replace(
    peer,
    name=device.device_kind,
    compute_capability=capability,
    sm_count=sms,
    l2_bytes=int(peer.l2_bytes * share),
    dram_bytes_per_s=peer.dram_bytes_per_s * share,
    shared_bytes_per_block=shared or peer.shared_bytes_per_block,
    fp32_flops=peer.fp32_flops * share,
    tf32_flops=peer.tf32_flops * share,
    bf16_flops=peer.bf16_flops * share,
    modelled_on=peer.name,
  )
