"""What each rung moves: FLOP, bytes and arithmetic intensity, as formulas.

The ladder is the history of one ratio: arithmetic per access. This file says
what the ratio is for each rung, from the tile sizes alone, and what the least
time is on a GPU that it leads to. No kernel runs.

Notation: the block that a thread block computes is BM x BN, its slabs are BK
deep, a thread's part of it is TM x TN (`thread_m`, `thread_n`). Counts of
elements are for A and B together; C, which is read once if beta is not 0, is
added to the bytes alone.

Three kinds of count, from the most naive to the most physical:

* *Accesses* are what threads ask for: an element that 32 lanes read at once
  counts 32 times. The classic texts count this way, and so do
  `global_load_bytes`, `shared_load_bytes` and everything derived from them.
* *Requests of a warp*: lanes that touch the same 32-byte sector or 128-byte
  line of global memory are served together (`sectors`), and a value of shared
  memory that several lanes of a warp read is read once.
* *Compulsory bytes*: every operand once, whatever the kernel does.

The floor takes compulsory bytes against device memory, what blocks ask for
against L2, and requests against L1 and shared memory. Where wgmma reads shared
memory the last is no bound: rung 9b was measured beyond it.
Thread blocks are indivisible there: with fewer blocks than SMs, or a last
round that is not full, the floor is that of the busiest SM.

What a block reads in a step, and how often, is read off the rung's grid and
BlockSpecs, which also move the data; which lanes and threads touch what, off
its register layout.

Where threads load, operands are padded to whole blocks, and what the padding
adds is counted (the copies that XLA makes to pad are not: they are other
kernels). Of TMA what is in the given matrices is counted: zeros that XLA adds
until it can address them (`Rung.padded`) are not, though they are read as well.
Accesses of rungs 1 and 2 are those of a thread for each result, as in the
texts: where a thread has several of a row, it loads what they share once.
"""

import dataclasses
import math
from typing import Any

from jax.experimental import pallas as pl

from pallas_gemm import hardware, roofline
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import blocks as blocks_lib
from pallas_gemm.ladder import contract, lanes
from pallas_gemm.ladder.lanes import LaneAccess as LaneAccess
from pallas_gemm.ladder.lanes import lanes_addresses as lanes_addresses
from pallas_gemm.ladder.lanes import units_touched as units_touched
from pallas_gemm.ladder.tensor_core_common import WGMMA_COLUMNS, WGMMA_ROWS


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What one rung moves for one problem.

  Attributes:
    number: of the rung.
    name: of the rung, or of its variant.
    slabs: whether operands pass through shared memory (else threads read
      global memory in the innermost step).
    threads_load: whether threads load from global memory (else TMA does).
    problem: the problem.
    config: the tile sizes.
    gpu: the GPU that `floor` is for.
    blocks: thread blocks (output tiles, on the persistent rungs).
    flops: 2 M N K; what padding adds is not work.
    block_reads: elements of A and B that the threads of one block read from
      global memory.
    block_unique_reads: how many different elements those are.
    global_load_bytes: what all threads read from global memory, C included;
      a tile that a cluster receives by multicast is read once.
    global_store_bytes: what all threads write to global memory.
    compulsory_bytes: A, B and the result once, and C if beta is not 0.
    shared_load_bytes: what threads, or wgmma, read from shared memory; a
      fragment of mma counts once for its warp.
    shared_store_bytes: what is written to shared memory.
    global_accesses_per_result: elements of A and B read from global memory
      for each element of the result.
    shared_accesses_per_result: the same from shared memory.
    compute_to_load: FMAs for each element read in the innermost step.
    loads_per_fma: loads of a thread for each of its FMAs in the innermost
      step, as its kernel is written: one a word, or one a vector if it loads
      vectors; 0 on tensor cores, whose instructions are many FMAs each.
    intensity: FLOP per byte read from global memory; stores do not count.
    sectors: 32-byte sectors that one warp touches to read A, and to read B,
      in one step of k; None where the inner step does not read global memory.
    floor: the least time on `gpu`, and what binds.
  """

  number: int
  name: str
  problem: contract.Gemm
  config: contract.Config
  gpu: hardware.Gpu
  global_load_bytes: int
  global_store_bytes: int
  compulsory_bytes: int
  floor: roofline.Floor
  slabs: bool = False
  threads_load: bool = False
  blocks: int = 0
  flops: int = 0
  block_reads: int = 0
  block_unique_reads: int = 0
  shared_load_bytes: int = 0
  shared_store_bytes: int = 0
  global_accesses_per_result: float = 0.0
  shared_accesses_per_result: float = 0.0
  compute_to_load: float = 0.0
  loads_per_fma: float = 0.0
  intensity: float = 0.0
  sectors: tuple[int, int] | None = None

  @property
  def fmas(self) -> int:
    """Fused multiply-adds, M N K."""
    return self.flops // 2

  @property
  def fma_issue_share(self) -> float:
    """Share of FMAs among FMAs and loads, by the words that threads load.

    An SM's schedulers start one instruction a clock each, an FMA or a load. It
    is no bound: a compiler that merges loads of several words into one, as it
    does in rungs 3 to 5, leaves FMAs more, addresses and barriers less.
    """
    return 1 / (1 + self.loads_per_fma)


def model(
  rung: contract.Rung | int | str,
  config: contract.Config,
  problem: contract.Gemm,
  gpu: hardware.Gpu | None = None,
) -> Traffic:
  """What a rung moves for a problem.

  Args:
    rung: a rung or a variant, or its number, label or name.
    config: tile sizes, of the rung's `config_type`. It is taken as legal.
    problem: shape, dtype, alpha and beta.
    gpu: what the floor is for; None is `hardware.current()`.

  Returns:
    The counts. A problem without a product (M, N or K or alpha is 0) runs no
    kernel: nothing is read but C.

  Raises:
    ValueError: no rung of that name.
    TypeError: a config of the other kind.

  Example:
    >>> from pallas_gemm.ladder import contract, traffic
    >>> block = contract.SimtConfig(block_m=4, block_n=4)
    >>> t = traffic.model("naive", block, contract.Gemm(16, 16, 16))
    >>> t.block_reads, t.block_unique_reads, t.global_load_bytes, t.intensity
    (512, 128, 32768, 0.25)
  """
  rung = ladder_lib.find(rung)
  if not isinstance(config, rung.config_type):
    raise TypeError(
      f"config of {rung.name} must be a {rung.config_type.__name__}, got"
      f" {type(config).__name__}"
    )
  gpu = hardware.current() if gpu is None else gpu
  known = {"number": rung.number, "name": rung.name}
  known |= {"problem": problem, "config": config, "gpu": gpu}
  m, n, k = problem.m, problem.n, problem.k
  if 0 not in (m, n, k) and problem.alpha != 0:
    return Traffic(**known, **_counts(rung, config, problem, gpu))
  results = m * n * problem.itemsize
  c_bytes = results if problem.beta else 0
  return Traffic(
    **known,
    global_load_bytes=c_bytes,
    global_store_bytes=results,
    compulsory_bytes=c_bytes + results,
    floor=roofline.floor(0, c_bytes + results, gpu, problem.dtype),
  )


def compute_to_load(rows: int, columns: int) -> float:
  """FMAs per element read for a tile held in registers.

  A step of k reads a column of `rows` values and a row of `columns`, and
  multiplies each with each.

  Example:
    >>> from pallas_gemm.ladder import traffic
    >>> traffic.compute_to_load(1, 1), traffic.compute_to_load(8, 8)
    (0.5, 4.0)
  """
  return rows * columns / (rows + columns)


def _reads(rung, config, problem) -> int:
  """Elements of A and B that all blocks read from global memory.

  A tile that a cluster shares is read once for it.
  """
  grid = rung.grid(problem, config)
  a, b, *_ = rung.specs(problem, config).in_specs
  shapes = (problem.m, problem.k), (problem.k, problem.n)
  return sum(
    math.prod(shape)
    * pl.cdiv(blocks_lib.times_read(spec, grid), _sharers(spec, config))
    for spec, shape in zip((a, b), shapes)
  )


def _sharers(spec, config) -> int:
  """Blocks of a cluster that one copy of the spec's blocks reaches."""
  axes = spec.collective_axes or ()
  return math.prod(getattr(config, axis) for axis in axes)


def _counts(rung, config, problem, gpu) -> dict[str, Any]:
  """Fields of `Traffic`, of a problem that has a product."""
  (a, *_), c = rung.specs(problem, config)
  blocks_m, blocks_n, steps = rung.grid(problem, config)
  (bm, bn), blocks = c.block_shape, blocks_m * blocks_n
  depth = steps * (a.block_shape[1] or 1)
  threads_load = a.memory_space is blocks_lib.GMEM
  there = rung.padded(problem, config) if threads_load else problem
  is_simt = rung.config_type is contract.SimtConfig
  counts, reads, shared_bytes, l1_lines = (_simt if is_simt else _tensor_cores)(
    rung, config, there, blocks, depth
  )
  m, n, k, item = problem.m, problem.n, problem.k, problem.itemsize
  flops, has_c = 2 * m * n * k, problem.beta != 0
  compulsory = (m * k + k * n + m * n * (1 + has_c)) * item
  loads = (reads + there.m * there.n * has_c) * item
  stores = there.m * there.n * item
  # The busiest SM computes this many times its even share.
  uneven = pl.cdiv(blocks, gpu.sm_count) * gpu.sm_count / blocks
  floor = roofline.floor(
    2 * blocks * bm * bn * depth * uneven,
    compulsory,
    gpu,
    problem.dtype,
    shared_bytes * uneven,
    # What L1 keeps between the blocks of an SM is unknown where threads read
    # global memory in each step.
    l2_bytes=loads + stores if counts["slabs"] else None,
    l1_lines=l1_lines * uneven,
  )
  return counts | {
    "threads_load": threads_load,
    "blocks": blocks,
    "flops": flops,
    "global_load_bytes": loads,
    "global_store_bytes": stores,
    "compulsory_bytes": compulsory,
    "global_accesses_per_result": counts["block_reads"] / (bm * bn),
    "intensity": flops / loads,
    "floor": floor,
  }


def _simt(rung, config, problem, blocks, k):
  """Rungs on CUDA cores: counts, elements read, bytes of banks, lines of L1."""
  (a, b, *_), c = rung.specs(problem, config)
  (bm, bn), (*_, steps) = c.block_shape, rung.grid(problem, config)
  slabs, item = a.block_shape[1] is not None, problem.itemsize
  tm, tn = config.thread_m, config.thread_n

  # Every thread reads TM of A and TN of B for each k ...
  thread_reads = bm * bn * (tm + tn) * k // (tm * tn)
  unique_reads = steps * (blocks_lib.elements(a) + blocks_lib.elements(b))
  # ... from global memory, or from slabs that the block reads there once.
  counts = {
    "slabs": slabs,
    "block_reads": unique_reads if slabs else thread_reads,
    "block_unique_reads": unique_reads,
    "compute_to_load": compute_to_load(tm, tn),
    "loads_per_fma": (tm + tn) / (tm * tn * config.vector),
  }
  wm, wn = lanes.warp_tile(rung, config)
  warps = blocks * bm * bn / (wm * wn)
  if not slabs:
    counts["sectors"], lines = lanes.requests(rung, config, problem)
    return counts, blocks * thread_reads, 0.0, warps * k * lines
  counts |= {
    "shared_load_bytes": blocks * thread_reads * item,
    "shared_store_bytes": blocks * unique_reads * item,
    "shared_accesses_per_result": thread_reads / (bm * bn),
  }
  # A value that several lanes of a warp read leaves the banks once.
  shared_bytes = (warps * (wm + wn) * k + blocks * unique_reads) * item
  return counts, _reads(rung, config, problem), shared_bytes, 0.0


def _tensor_cores(rung, config, problem, blocks, k):
  """The same of rungs on tensor cores, whose tiles are in shared memory."""
  (a, b, *_), c = rung.specs(problem, config)
  (bm, bn), item = c.block_shape, problem.itemsize
  threads_load = a.memory_space is blocks_lib.GMEM
  # What is multiplied together is read from shared memory for it: A again for
  # each group of columns, B for each group of rows.
  rows, columns = multiplied_together(config, threads_load)
  tensor_reads = (bm * pl.cdiv(bn, columns) + bn * pl.cdiv(bm, rows)) * k
  # The result passes through shared memory once, on its way to TMA.
  staged = 0 if threads_load else bm * bn
  loads = blocks * (tensor_reads + staged) * item
  stores = blocks * ((bm + bn) * k + staged) * item
  counts = {
    "slabs": True,
    # A tile that a cluster shares is read by one of its blocks.
    "block_reads": problem.k
    * sum(
      pl.cdiv(size, _sharers(spec, config)) for spec, size in ((a, bm), (b, bn))
    ),
    "block_unique_reads": (bm + bn) * problem.k,
    "shared_load_bytes": loads,
    "shared_store_bytes": stores,
    "shared_accesses_per_result": tensor_reads / (bm * bn),
    "compute_to_load": compute_to_load(rows, columns),
  }
  return counts, _reads(rung, config, problem), loads + stores, 0.0


def multiplied_together(
  config: contract.TensorCoreConfig, threads_load: bool
) -> tuple[int, int]:
  """Rows and columns of the result that operands are read together for.

  Args:
    config: tile sizes.
    threads_load: whether threads load: then they also load the fragments of
      mma, each of 2 x 2 warps those of its quarter of the block. Else wgmma
      reads its operands itself.
  """
  if threads_load:
    return config.block_m // 2, config.block_n // 2
  columns = config.block_n
  if config.split == "n":
    columns = pl.cdiv(columns, config.consumers)
  return WGMMA_ROWS, min(columns, WGMMA_COLUMNS)
