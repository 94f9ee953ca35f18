"""Which config for a problem: an analytic model of the dense Hopper kernel.

`choose` predicts the time of some dozens of configs and takes the least. A
work tile is a tile of the result (over a part of K, if K is split); a block
works on one after the other. The time has these parts:

* **A slab of K** takes the longest of its multiplication (2048 16-bit FMAs a
  clock and SM), of what wgmma and TMA move through shared memory (128 bytes a
  clock), and of its way from L2, plus a constant for barriers.
* **A round** is as long as a work tile: its slabs, and the part of its epilogue
  that the next work tile does not hide. All blocks take the same number of
  rounds, so a tile that leaves half of the SMs idle in the last wave pays for
  it.
* **Device memory** must be read once and written once. How fast depends on
  how many blocks have how many bytes in flight.
* **Split K**, of all tiles or the last, adds a kernel that reads sums back.
* **Padding** adds copies of operands that TMA can't read.

The first three overlap; the longest counts, blended where they are close.

Constants (`_FIT`) were fitted to times on an H200, see experiments/notes.md;
other Hopper GPUs are predicted with their own sizes, rates and its efficiency.
"""

from collections.abc import Callable, Iterator
import dataclasses

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import bytes_of, cdiv, round_up
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import bounds, odd_sizes, stages, tiles


@dataclasses.dataclass(frozen=True)
class _Fit:
  """Constants that no datasheet has; cycles and microseconds at `clock`.

  Attributes:
    clock: cycles a microsecond under load.
    mma: multiplication, as a part of the time at peak rate.
    columns: the same with columns shared out: shorter wgmmas read A again.
    small: what the smallest tile costs in clock, beside 128 x 256.
    third: the same with three consumers, as a multiple; tall: with more than
      64 rows a consumer.
    shared: shared memory, likewise.
    writes: part of TMA's writes that gets in the way of wgmma's reads.
    narrow: loads of atoms of 32 columns, as a multiple of those of 64.
    narrow_dram, narrow_mma: the same for device memory, and for wgmma.
    swapped: multiplication and device memory where operands are swapped;
      streams: device memory with 256 columns a tile, slabs of 128, or a batch
      of few rows;
      scattered: as much more for what of it are results.
    deep: device memory with slabs of 128 of [N, K], in several rounds.
    leaving: part of the peak rate of device memory at which the results of a
      single round leave, all at once.
    pair_m, pair_n: a slab, where blocks with one consumer share it.
    l2: bytes a cycle and SM from L2; barrier: cycles of a slab's barriers.
    arrival: cycles until a slab that is asked for has arrived.
    epilogue: microseconds until the first results leave.
    store: bytes a microsecond and SM of results.
    subtile: microseconds for each subtile of a consumer's tile.
    activation, with_c: the epilogue with an activation and with C, as
      multiples; by_rows: stored row by row, likewise, but what it adds is
      added.
    hidden: part of the epilogue that the next work tile does not hide.
    packed: microseconds of the epilogue where results are stored beside the
      next work tile's slabs; of 128 x 256 results, besides, applied: of an
      activation; added: of C; ahead: of C in buffers of its own; wide: of twice
      the bytes; saved: of two results.
    awaited: microseconds in which C arrives; drain: in which 128 x 256 results
      of 16 bits leave, beside the slabs of a work tile.
    pingpong: microseconds of the epilogue of 128 x 256 results where consumers
      ping-pong; pingpong_applied, pingpong_added: of an activation and of C,
      besides.
    slivers: microseconds that a subtile of 16 columns holds up one consumer.
    latency: microseconds that a load takes.
    dram: part of the peak rate of device memory.
    blend: exponent of the sum of overlapping parts.
    launch: microseconds until the first block runs and after the last ends.
    reduce: microseconds of the kernel that sums partial products.
    reduce_rate: its bytes a microsecond.
    even: what is lost in clock if no SM is idle in the last wave.
  """

  clock: float = 1650.0
  mma: float = 0.9882
  small: float = 0.01
  third: float = 1.03
  tall: float = 1.01
  columns: float = 1.07
  shared: float = 1.168
  writes: float = 0.06463
  narrow: float = 3.4
  narrow_dram: float = 1.178
  narrow_mma: float = 1.055
  swapped: float = 1.015
  streams: float = 0.985
  scattered: float = 0.12
  deep: float = 0.965
  leaving: float = 1.1
  pair_m: float = 1.05
  pair_n: float = 1.12
  l2: float = 107.0
  barrier: float = 48.09
  arrival: float = 886.1
  epilogue: float = 0.1068
  store: float = 119200.0
  subtile: float = 0.04543
  activation: float = 2.344
  with_c: float = 2.778
  by_rows: float = 7.0
  hidden: float = 1.399
  packed: float = 0.42
  applied: float = 1.8
  added: float = 0.9
  ahead: float = 2.0
  wide: float = 1.75
  saved: float = 1.3
  awaited: float = 2.2
  drain: float = 1.9
  pingpong: float = 1.0
  pingpong_applied: float = 2.0
  pingpong_added: float = 1.6
  slivers: float = 0.15
  latency: float = 0.1901
  dram: float = 0.9087
  blend: float = 7.396
  launch: float = 2.453
  reduce: float = 1.238
  reduce_rate: float = 2817000.0
  even: float = 1.01


_FIT = _Fit()


def choose(problem: Problem, *, any_rows: bool = False) -> Config:
  """The legal config with the least predicted time.

  Args:
    problem: what is computed.
    any_rows: it is to be used for any other M too.

  Raises:
    NotImplementedError: no config is legal; the reason of the last refusal.

  Example:
    >>> from pallas_gemm.problem import Problem
    >>> from pallas_gemm.tuning import model
    >>> config = model.choose(Problem.flat(
    ...   m=4096, n=4096, k=4096, dtype="bfloat16", out_dtype="bfloat16"))
    >>> config.block_m, config.block_n
    (128, 256)
  """
  fit = stages.for_any_rows if any_rows else stages.suited
  return legal.first_legal(problem, candidates(problem, fit))


def candidates(
  problem: Problem, fit: Callable[[Plan], Config] = stages.suited
) -> Iterator[Config]:
  """Configs worth a try, legal or not, that with the least time first."""
  gpu = hardware.current()
  at_least = bounds.of(problem, gpu, _FIT)

  def seconds(config: Config) -> float:
    return predict(Plan(problem, config, gpu))

  some = tiles.worth_a_try(problem, gpu)
  for config in bounds.best_first(some, at_least, seconds):
    yield fit(Plan(problem, config, gpu))


def predict(plan: Plan, l2: float | None = None) -> float:
  """Predicted time of all kernels of a call, in seconds.

  Args:
    plan: of a dense product, legal or not.
    l2: bytes a cycle and SM from L2, if not as many as of a dense product.
  """
  p, cfg, fit = plan.problem, plan.config, _FIT
  odd = odd_sizes.costs(plan)
  rounds = _rounds(plan)
  slab = _slab(plan, odd, l2 or fit.l2)
  if rounds * plan.slabs > cfg.stages:
    # A slab is released when the next one has begun, so the loads of a ring of
    # two wait for each other.
    slab = max(slab, (slab + fit.arrival) / (cfg.stages - 1))
  busy = _busy(plan, rounds, slab)
  memory = _memory(plan, odd, rounds)
  time = (busy**fit.blend + memory**fit.blend) ** (1 / fit.blend) + fit.launch
  if cfg.split_k > 1:
    summed = p.results * plan.products * cfg.split_k * 4 / fit.reduce_rate
    time += fit.reduce + summed * odd.sums
  if cfg.tail_columns:
    columns = cfg.tail_columns * cfg.block_n * plan.products
    in_parts = p.m * columns * cfg.tail_split_k * 4
    time = time * fit.even + fit.reduce + in_parts / fit.reduce_rate
  return (time + odd.copies) * 1e-6


def _rounds(plan: Plan) -> int:
  """Rounds of work tiles, none of them cut for the last wave."""
  return cdiv(_work_tiles(plan), _clusters(plan))


def _clusters(plan: Plan) -> int:
  """Clusters that find room at a time."""
  return plan.gpu.sm_count // (plan.config.cluster_m * plan.config.cluster_n)


def _work_tiles(plan: Plan) -> int:
  rows, columns = plan.grid
  return rows * columns * plan.config.split_k * plan.problem.batch


def _is_narrow(plan: Plan) -> bool:
  """Whether B is read in swizzle atoms of 32 columns."""
  shares = plan.config.consumers if plan.config.split == "n" else 1
  return not plan.problem.b.k_last and plan.config.block_n // shares % 64 > 0


def _slab(plan: Plan, odd: odd_sizes.Costs, l2: float) -> float:
  """Cycles of a slab of K that has arrived."""
  p, cfg, fit = plan.problem, plan.config, _FIT
  bm, bn, bk = cfg.block_m, cfg.block_n * plan.products, cfg.block_k
  narrow = _is_narrow(plan)
  multiply = bm * bn * bk / 2048 * fit.mma
  multiply *= 1 + fit.small * (1 - bm * bn / 2**15)
  multiply *= fit.third if cfg.consumers == 3 else 1
  multiply *= fit.tall if cfg.split == "m" and bm > 64 * cfg.consumers else 1
  multiply *= fit.columns if cfg.split == "n" else 1
  multiply *= fit.swapped if cfg.swap_ab else 1
  multiply *= fit.narrow_mma if narrow else 1
  # wgmma reads A for each share of the columns, B for each 64 rows.
  shares = cfg.consumers if cfg.split == "n" else 1
  reads = bm // 64 * (64 * shares * plan.products + bn) * bk
  rows = min(bm, round_up(p.m, 8))  # those that are loaded
  writes = (rows + bn) * bk
  reads, writes = bytes_of(reads, p.a.dtype), bytes_of(writes, p.a.dtype)
  shared = (reads + fit.writes * writes) / 128 * fit.shared
  slow_a, slow_b = odd.loads
  loads = rows * slow_a / cfg.cluster_n + bn * slow_b / cfg.cluster_m
  loads *= bytes_of(bk, p.a.dtype) / l2 * (fit.narrow if narrow else 1)
  slab = max(multiply, shared, loads) + fit.barrier + odd.short
  if cfg.consumers == 1:
    slab *= fit.pair_m if cfg.cluster_m > 1 else 1
    slab *= fit.pair_n if cfg.cluster_n > 1 else 1
  return slab


def _busy(plan: Plan, rounds: int, slab: float) -> float:
  """Microseconds in which a block is busy; `slab` cycles each."""
  cfg, fit = plan.config, _FIT
  product = plan.slabs * slab / fit.clock
  epilogue = _epilogue(plan, rounds)
  area = cfg.block_m * cfg.block_n / 2**15
  words = _stored_bytes(plan) / 2
  applied = fit.applied * bool(plan.problem.epilogue.activation)
  least = (fit.drain * words + applied) * area
  between = _between(plan, epilogue, product, slab, least)
  work_tile = product + between
  if rounds > 1:
    work_tile = max(work_tile, least)
  if not cfg.tail_columns:
    return rounds * work_tile + epilogue - between
  partial = cfg.block_m * cfg.block_n * plan.products * 4 / fit.store
  return _longest(plan, work_tile, product) - between + partial + 2 * epilogue


def _stored_bytes(plan: Plan) -> int:
  """Bytes that are stored for each of a tile's results."""
  return bytes_of(plan.outputs, plan.stored_dtype)


def _subtiles(plan: Plan) -> float:
  """Subtiles of a consumer, of which all share out the tile."""
  cfg = plan.config
  across = cdiv(cfg.block_n, cfg.epilogue_n)
  return across * cfg.block_m / (cfg.consumers * 64)


def _epilogue(plan: Plan, rounds: int) -> float:
  """Microseconds until the results of a block's last work tile have left."""
  p, cfg, fit = plan.problem, plan.config, _FIT
  stored = _stored_bytes(plan)
  epilogue = (
    fit.epilogue
    + cfg.block_m * cfg.block_n * stored / fit.store
    + fit.subtile * _subtiles(plan)
  )
  slower = fit.activation if p.epilogue.activation else 1
  slower *= fit.with_c if p.epilogue.c_dtype else 1
  slower += fit.by_rows - 1 if plan.by_rows else 0
  epilogue *= slower
  if rounds == 1 and cfg.split_k == 1:
    rate = plan.gpu.dram_bytes_per_s
    epilogue = max(epilogue, p.results * stored / rate * 1e6 / fit.leaving)
  return epilogue


def _between(
  plan: Plan, epilogue: float, product: float, slab: float, least: float
) -> float:
  """Microseconds of a work tile's epilogue that the next tile does not hide.

  Args:
    plan: of the work tile.
    epilogue: of the last one.
    product: microseconds in which it is multiplied; slab: cycles of a slab.
    least: microseconds of its results, without anything to hide them.
  """
  p, cfg, fit = plan.problem, plan.config, _FIT
  if plan.by_rows:
    return (
      max(epilogue, least - product / 3) if p.epilogue.activation else epilogue
    )
  has_c = p.epilogue.c_dtype is not None
  area = cfg.block_m * cfg.block_n / 2**15
  words = _stored_bytes(plan) / 2
  if plan.pingpong > 1:
    applied = fit.pingpong_applied * bool(p.epilogue.activation)
    return area * (fit.pingpong * words + applied + fit.pingpong_added * has_c)
  at_once = plan.stored_at_once
  if at_once == 1:
    hidden = fit.hidden * epilogue
    return max(hidden, least - product / 3) if p.epilogue.activation else hidden
  subtiles = _subtiles(plan)
  between = fit.packed + fit.applied * area * bool(p.epilogue.activation)
  slivers = fit.slivers if cfg.epilogue_n < 32 else 0
  between += slivers * subtiles / cfg.consumers**2
  late = fit.drain * area * words - product / (
    3 if p.epilogue.activation else 1
  )
  at_once *= fit.drain * area * words
  more = fit.saved if p.epilogue.save else fit.wide
  between += max(more * area * (words - 1), at_once, late, 0)
  if has_c and plan.c_in_place:
    asked = min(subtiles, plan.slabs) * slab / fit.clock
    between += fit.added * area + max(0, fit.awaited - product + asked)
  elif has_c:
    between += max(fit.ahead * area, fit.awaited - product)
  return between


def _longest(plan: Plan, work_tile: float, product: float) -> float:
  """Microseconds of the slowest block; `product` is of a whole `work_tile`."""
  cfg, sms = plan.config, plan.gpu.sm_count
  rows, columns = plan.grid
  whole = rows * (columns - cfg.tail_columns)
  work_tiles = whole + rows * cfg.tail_columns * cfg.tail_split_k
  times = []
  # Of the blocks with as many whole tiles the first has the most work tiles.
  for block in {0, whole % sms}:
    first = cdiv(whole - block, sms)
    parts = cdiv(work_tiles - block, sms) - first
    times.append(first * work_tile + parts * product / cfg.tail_split_k)
  return max(times)


def _memory(plan: Plan, odd: odd_sizes.Costs, rounds: int) -> float:
  """Microseconds that device memory takes."""
  p, cfg, fit = plan.problem, plan.config, _FIT
  bn, bk = cfg.block_n * plan.products, cfg.block_k
  size = bytes_of(1, plan.stored_dtype)
  moved = p.operand_bytes
  if cfg.split_k == 1:
    added = size if p.epilogue.c_dtype else 0
    moved += p.results * (_stored_bytes(plan) + added) * odd.results
  blocks = cdiv(_work_tiles(plan), rounds) * cfg.cluster_m * cfg.cluster_n
  streamed = cfg.block_m if cfg.swap_ab else bn
  in_flight = bytes_of(cfg.stages * streamed * bk, p.a.dtype)
  memory = moved / min(
    plan.gpu.dram_bytes_per_s / 1e6 * fit.dram, blocks * in_flight / fit.latency
  )
  memory *= fit.narrow_dram if _is_narrow(plan) else 1
  if cfg.swap_ab:
    batch = p.batch > 1
    fast = bk == 128 or (
      batch if bn <= 16 else cfg.block_m == 256 and not batch
    )
    memory *= fit.streams if fast else fit.swapped
    memory *= 1 + fit.scattered * p.results * size / moved
  elif bk == 128 and p.b.k_last and rounds > 2:
    memory *= fit.deep
  return memory
