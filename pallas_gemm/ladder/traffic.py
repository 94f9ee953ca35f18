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

The floor takes the last two, because only they bound the time from below:
compulsory bytes against device memory, requests against L1 and shared memory.
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

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal

import numpy as np

from pallas_gemm import hardware, roofline
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.hardware import LINE_BYTES, SECTOR_BYTES
from pallas_gemm.ladder import blocks as blocks_lib
from pallas_gemm.ladder import contract, register_layouts
from pallas_gemm.ladder.contract import cdiv

WARP = 32
# One wgmma takes 64 rows of A and up to 256 columns of B.
WGMMA_M = 64
WGMMA_MAX_N = 256


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
  slabs: bool
  threads_load: bool
  problem: contract.Problem
  config: contract.Config
  gpu: hardware.Gpu
  blocks: int
  flops: int
  block_reads: int
  block_unique_reads: int
  global_load_bytes: int
  global_store_bytes: int
  compulsory_bytes: int
  shared_load_bytes: int
  shared_store_bytes: int
  global_accesses_per_result: float
  shared_accesses_per_result: float
  compute_to_load: float
  loads_per_fma: float
  intensity: float
  sectors: tuple[int, int] | None
  floor: roofline.Floor

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


@dataclasses.dataclass(frozen=True)
class LaneAccess:
  """The (row, column) of A, B and C that one lane touches in one step."""

  a: tuple[int, int]
  b: tuple[int, int]
  c: tuple[int, int]


def model(
  rung: contract.Rung | int | str,
  config: contract.Config,
  problem: contract.Problem,
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
    ValueError: no such rung.
    TypeError: a config of the other kind.

  Example:
    >>> from pallas_gemm.ladder import contract, traffic
    >>> block = contract.SimtConfig(block_m=4, block_n=4)
    >>> t = traffic.model("naive", block, contract.Problem(16, 16, 16))
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
  if 0 in (problem.m, problem.n, problem.k) or problem.alpha == 0:
    return _without_product(rung, config, problem, gpu)
  if rung.config_type is contract.SimtConfig:
    return _simt(rung, config, problem, gpu)
  return _tensor_cores(rung, config, problem, gpu)


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


def lanes_addresses(
  mapping: Literal["A", "B"],
  *,
  k: int = 0,
  lanes: Sequence[int] = range(4),
  width: int = WARP,
) -> tuple[LaneAccess, ...]:
  """What the lanes of a warp touch in step k of the naive loop.

  Args:
    mapping: "A": consecutive lanes take consecutive columns of C
      (coalesced); "B": consecutive rows (uncoalesced).
    k: the step.
    lanes: which lanes; T0-T3 unless told.
    width: lanes along the walked dimension; the next lane starts the next
      column (mapping B) or row (mapping A).

  Raises:
    ValueError: another mapping.

  Example:
    >>> from pallas_gemm.ladder import traffic
    >>> [x.b for x in traffic.lanes_addresses("A", k=7)]
    [(7, 0), (7, 1), (7, 2), (7, 3)]
    >>> [x.b for x in traffic.lanes_addresses("B", k=7)]
    [(7, 0), (7, 0), (7, 0), (7, 0)]
  """
  if mapping not in ("A", "B"):
    raise ValueError(f"mapping must be 'A' or 'B', got {mapping!r}")
  touched = []
  for lane in lanes:
    slow, fast = divmod(lane, width)
    row, column = (slow, fast) if mapping == "A" else (fast, slow)
    touched.append(LaneAccess(a=(row, k), b=(k, column), c=(row, column)))
  return tuple(touched)


def units_touched(
  addresses: Sequence[tuple[int, int]],
  row_stride: int,
  itemsize: int = 4,
  unit: int = SECTOR_BYTES,
) -> int:
  """Aligned units of memory that one request of a warp touches.

  Args:
    addresses: (row, column) of each lane.
    row_stride: elements from one row to the next.
    itemsize: bytes of an element.
    unit: bytes of a unit; a sector (32) unless told, a cache line has 128.

  Example:
    >>> from pallas_gemm.ladder import traffic
    >>> warp = traffic.lanes_addresses("A", lanes=range(32))
    >>> traffic.units_touched([x.b for x in warp], row_stride=4096)
    4
    >>> warp = traffic.lanes_addresses("B", lanes=range(32))
    >>> traffic.units_touched([x.a for x in warp], row_stride=4096)
    32
  """
  return len(
    {
      (row * row_stride + column) * itemsize // unit
      for row, column in addresses
    }
  )


def warp_tile(
  rung: contract.Rung | int | str, config: contract.SimtConfig
) -> tuple[int, int]:
  """Rows and columns of the block that one warp of an fp32 rung computes."""
  lanes = _first_warp(ladder_lib.find(rung), config)
  return tuple(len(np.unique(lanes[..., side])) for side in (0, 1))


def warp_footprint(
  rung: contract.Rung | int | str,
  config: contract.SimtConfig,
  problem: contract.Problem,
) -> tuple[int, int]:
  """Bytes of A and of B that one warp needs over the whole of K, each once.

  Example:
    >>> from pallas_gemm.ladder import contract, traffic
    >>> cube = contract.Problem(256, 256, 256)
    >>> block = contract.SimtConfig(block_m=4, block_n=32)
    >>> traffic.warp_footprint("coalesced", block, cube)
    (1024, 32768)
  """
  rows, columns = warp_tile(rung, config)
  row_bytes = problem.k * problem.itemsize
  return rows * row_bytes, columns * row_bytes


def _first_warp(rung, config) -> np.ndarray:
  """(row, column) of what each lane of a warp holds: [32, registers, 2]."""
  rows, columns = config.block_m, config.block_n
  # Warpgroups share out the rows; the consumers of a loader, the columns.
  own_rows, own_columns = register_layouts.base_tile(rung.layout(config))
  if rows > own_rows:
    rows //= rung.warpgroups(config)
  elif columns > own_columns:
    columns //= rung.warpgroups(config)
  return register_layouts.owners(rung.layout(config), (rows, columns))[0]


def _reads(rung, config, problem) -> int:
  """Elements of A and B that all blocks read from global memory.

  A tile that a cluster shares is read once for it.
  """
  grid = rung.grid(problem, config)
  a, b, *_ = rung.specs(problem, config).in_specs
  shapes = (problem.m, problem.k), (problem.k, problem.n)
  return sum(
    math.prod(shape)
    * cdiv(blocks_lib.times_read(spec, grid), _sharers(spec, config))
    for spec, shape in zip((a, b), shapes)
  )


def _sharers(spec, config) -> int:
  """Blocks of a cluster that one copy of the spec's blocks reaches."""
  axes = spec.collective_axes or ()
  return math.prod(getattr(config, axis) for axis in axes)


def _simt(rung, config, problem, gpu) -> Traffic:
  """Rungs on CUDA cores."""
  (a, b, *_), c = rung.specs(problem, config)
  blocks_m, blocks_n, steps = rung.grid(problem, config)
  (bm, bn), depth = c.block_shape, a.block_shape[1]
  slabs, threads_load = depth is not None, a.memory_space is blocks_lib.GMEM
  blocks, k = blocks_m * blocks_n, steps * (depth or 1)
  tm, tn = config.thread_m, config.thread_n

  # Every thread reads TM of A and TN of B for each k ...
  thread_reads = bm * bn * (tm + tn) * k // (tm * tn)
  unique_reads = steps * (blocks_lib.elements(a) + blocks_lib.elements(b))
  # ... from global memory, or from slabs that the block reads there once.
  there = rung.padded(problem, config) if threads_load else problem
  reads = _reads(rung, config, there) if slabs else blocks * thread_reads
  item, results = problem.itemsize, there.m * there.n

  sectors = l1_lines = None
  wm, wn = warp_tile(rung, config)
  warps = blocks * bm * bn / (wm * wn)
  shared_floor = 0.0
  if slabs:
    # A value that several lanes of a warp read leaves the banks once.
    shared_floor = (warps * (wm + wn) * k + blocks * unique_reads) * item
  else:
    sectors, lines = _requests(rung, config, there)
    l1_lines = warps * k * lines
  block_reads = unique_reads if slabs else thread_reads
  return _traffic(
    rung,
    config,
    problem,
    gpu,
    slabs=slabs,
    threads_load=threads_load,
    blocks=blocks,
    block_reads=block_reads,
    block_unique_reads=unique_reads,
    global_load_bytes=(reads + (results if problem.beta else 0)) * item,
    global_store_bytes=results * item,
    shared_load_bytes=blocks * thread_reads * item * slabs,
    shared_store_bytes=blocks * unique_reads * item * slabs,
    global_accesses_per_result=block_reads / (bm * bn),
    shared_accesses_per_result=thread_reads / (bm * bn) if slabs else 0.0,
    compute_to_load=compute_to_load(tm, tn),
    loads_per_fma=(tm + tn) / (tm * tn * config.vector),
    sectors=sectors,
    executed_flops=2 * blocks * bm * bn * k,
    shared_floor=shared_floor,
    l1_lines=l1_lines,
  )


def _requests(rung, config, problem):
  """Sectors of A and of B in a step, and lines of a warp's requests for both.

  A lane requests each of its rows of A and each of its columns of B.
  """
  lanes = _first_warp(rung, config)
  rows, columns = (np.unique(lanes[..., side], axis=1) for side in (0, 1))
  requests_a = [[(row, 0) for row in each] for each in rows.T]
  requests_b = [[(0, column) for column in each] for each in columns.T]

  def touched(requests, stride, unit):
    of = (stride, problem.itemsize, unit)
    return [units_touched(request, *of) for request in requests]

  sectors = tuple(
    touched(requests, stride, SECTOR_BYTES)[0]
    for requests, stride in ((requests_a, problem.k), (requests_b, problem.n))
  )
  lines = sum(touched(requests_a, problem.k, LINE_BYTES))
  return sectors, lines + sum(touched(requests_b, problem.n, LINE_BYTES))


def _tensor_cores(rung, config, problem, gpu) -> Traffic:
  """Rungs on tensor cores: tiles in shared memory."""
  (a, b, *_), c = rung.specs(problem, config)
  blocks_m, blocks_n, steps = rung.grid(problem, config)
  (bm, bn), depth = c.block_shape, a.block_shape[1]
  blocks, k = blocks_m * blocks_n, steps * depth
  threads_load = a.memory_space is blocks_lib.GMEM
  there = rung.padded(problem, config) if threads_load else problem
  item, results = problem.itemsize, there.m * there.n

  # A tile that a cluster shares is read by one of its blocks.
  block_reads = there.k * sum(
    cdiv(size, _sharers(spec, config)) for spec, size in ((a, bm), (b, bn))
  )
  # What is multiplied together is read from shared memory for it: A again for
  # each group of columns, B for each group of rows.
  rows, columns = multiplied_together(config, threads_load)
  tensor_reads = (bm * cdiv(bn, columns) + bn * cdiv(bm, rows)) * k
  # The result passes through shared memory once, on its way to TMA.
  staged = 0 if threads_load else bm * bn
  shared_loads = blocks * (tensor_reads + staged) * item
  shared_stores = blocks * ((bm + bn) * k + staged) * item
  reads = _reads(rung, config, there)
  return _traffic(
    rung,
    config,
    problem,
    gpu,
    slabs=True,
    threads_load=threads_load,
    blocks=blocks,
    block_reads=block_reads,
    block_unique_reads=(bm + bn) * there.k,
    global_load_bytes=(reads + (results if problem.beta else 0)) * item,
    global_store_bytes=results * item,
    shared_load_bytes=shared_loads,
    shared_store_bytes=shared_stores,
    global_accesses_per_result=block_reads / (bm * bn),
    shared_accesses_per_result=tensor_reads / (bm * bn),
    compute_to_load=compute_to_load(rows, columns),
    loads_per_fma=0.0,
    sectors=None,
    executed_flops=2 * blocks * bm * bn * k,
    shared_floor=shared_loads + shared_stores,
    l1_lines=None,
  )


def _without_product(rung, config, problem, gpu) -> Traffic:
  results = problem.m * problem.n * problem.itemsize
  c_bytes = results if problem.beta else 0
  return Traffic(
    number=rung.number,
    name=rung.name,
    slabs=False,
    threads_load=False,
    problem=problem,
    config=config,
    gpu=gpu,
    blocks=0,
    flops=0,
    block_reads=0,
    block_unique_reads=0,
    global_load_bytes=c_bytes,
    global_store_bytes=results,
    compulsory_bytes=c_bytes + results,
    shared_load_bytes=0,
    shared_store_bytes=0,
    global_accesses_per_result=0.0,
    shared_accesses_per_result=0.0,
    compute_to_load=0.0,
    loads_per_fma=0.0,
    intensity=0.0,
    sectors=None,
    floor=roofline.floor(0, c_bytes + results, gpu, problem.dtype),
  )


def _traffic(
  rung,
  config,
  problem,
  gpu,
  *,
  executed_flops,
  shared_floor,
  l1_lines,
  **counts,
) -> Traffic:
  """What follows from the counts in the same way on every rung."""
  m, n, k = problem.m, problem.n, problem.k
  flops = 2 * m * n * k
  c_elements = m * n if problem.beta else 0
  compulsory = (m * k + k * n + m * n + c_elements) * problem.itemsize
  # The busiest SM computes this many times its even share.
  blocks = counts["blocks"]
  uneven = cdiv(blocks, gpu.sm_count) * gpu.sm_count / blocks
  # What L1 keeps between the blocks of an SM is unknown where threads read
  # global memory in each step.
  l2_bytes = None
  if counts["slabs"]:
    l2_bytes = counts["global_load_bytes"] + counts["global_store_bytes"]
  return Traffic(
    number=rung.number,
    name=rung.name,
    problem=problem,
    config=config,
    gpu=gpu,
    flops=flops,
    compulsory_bytes=compulsory,
    intensity=flops / counts["global_load_bytes"],
    floor=roofline.floor(
      executed_flops * uneven,
      compulsory,
      gpu,
      problem.dtype,
      shared_floor * uneven,
      l2_bytes=l2_bytes,
      l1_lines=None if l1_lines is None else l1_lines * uneven,
    ),
    **counts,
  )


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
    columns = cdiv(columns, config.consumers)
  return WGMMA_M, min(columns, WGMMA_MAX_N)
