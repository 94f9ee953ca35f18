"""Which config for a problem: an analytic model of the dense Hopper kernel.

`choose` predicts the time of some dozens of configs and takes the least. A
work tile is a tile of the result (over a part of K, if K is split); a block
works on one after the other. The time has these parts:

* **A slab of K** takes the longest of its multiplication (2048 16-bit FMAs a
  clock and SM, 4096 of 8 bits, then 128 additions to totals), of what wgmma and
  TMA move through shared memory (128 bytes a clock), and of its way from L2,
  plus a constant for barriers.
* **A round** is as long as a work tile: its slabs, and the part of its epilogue
  that the next work tile does not hide. All blocks take the same number of
  rounds, so a tile that leaves half of the SMs idle in the last wave pays for
  it.
* **Device memory** must be read once and written once.
* **Split K** adds a kernel that reads sums back.
* **Parts of K in a cluster** take an exchange of sums.
* **Padding** adds copies of operands that TMA can't read, or threads that load
  them take cycles of each slab.

The first three overlap; the longest counts, blended where they are close.

Constants are those of the GPU (`constants`), fitted to times measured there;
one of which there are none is predicted with its own sizes and rates, and the
efficiency of the nearest. Operands of 8 bits have the constants of 16 bits,
and, where their sums are added to totals, some of their own, since blocks of a
cluster then wait for each other as those without one. Those in planes, of which
each pair is multiplied, and which a copy makes, have two of their own.
"""

from collections.abc import Callable, Iterable, Iterator
import math

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout, legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import bytes_of, cdiv, round_up
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import constants, odd_sizes, stages, tiles
from pallas_gemm.tuning.odd_sizes import largest

# Of products in planes, fitted to 65 of an H100 that are predicted within 5.3 %
# (mean): cycles from the end of a slab's products until the next ones start,
# where no other consumer has any; and how much of shared memory's rate a slab
# takes that is stored there.
_ALONE, _STORED = 250, 1.0
# Of 8 bits that are promoted, fitted to 78 of an H100, and 3.0 % off 150 in the
# mean: the part of a tile's additions to totals that nothing hides, and
# what they are times that with scales of lines; cycles of a slab's scales; how
# much of all, and of the barriers, one, two and three consumers let one see;
# and `_STORED` of these. None was of swapped operands or of one consumer.
_ADDED, _LINES_ADD, _SCALED = 0.5, 3, 65
_SEEN, _STORED_8 = (2.0, 1.0, 0.5), 0.35
# Of these by blocks, with three consumers: the slabs after which a block that
# is alone has fallen behind others that read the same, what that takes of each
# slab, in cycles, and what a cluster does.
_TOGETHER, _BEHIND, _PAIRED = 400, 100, 25


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
  return first_legal(problem, candidates(problem, fit))


def first_legal(problem: Problem, configs: Iterable[Config]) -> Config:
  """The first of some configs that can run the problem.

  Raises:
    NotImplementedError: none can; the reason of the last refusal.
  """
  refusal: str | None = "no candidate"
  for config in configs:
    refusal = legal.reason(Plan.of(problem, config))
    if refusal is None:
      return config
  raise NotImplementedError(refusal)


def candidates(
  problem: Problem, fit: Callable[[Plan], Config] = stages.suited
) -> Iterator[Config]:
  """Configs worth a try, legal or not, that with the least time first.

  Args:
    problem: what is computed.
    fit: the config with as many stages as it is to have.
  """
  gpu = hardware.current()
  known = constants.of(gpu)
  some = tiles.worth_a_try(layout.with_rows_along_k(problem), gpu)
  some = odd_sizes.loaded_by_threads(some, problem, gpu)
  if fit is stages.suited:  # for these rows alone
    some = odd_sizes.split_by_threads(some, problem, gpu)
  plans = [Plan.new(problem, config, gpu) for config in some]
  # Those that tie stay in order.
  yield from map(fit, sorted(plans, key=lambda plan: predict(plan, known)))


def predict(plan: Plan, known: constants.Constants | None = None) -> float:
  """Predicted time of all kernels of a call, in seconds.

  Args:
    plan: of a dense product, legal or not.
    known: constants; None are those of the plan's GPU.
  """
  known = known or constants.of(plan.gpu)
  p, cfg, fit = plan.problem, plan.config, known.model
  odd = odd_sizes.costs(plan, known.odd_sizes)
  rounds = _rounds(plan)
  slab = _slab(plan, fit, odd, rounds)
  if rounds * plan.tiling.slabs > cfg.stages:
    # A slab is released when the next one has begun, so the loads of a ring of
    # two wait for each other. One that is promoted is released before.
    others = cfg.stages - (not p.is_promoted)
    slab = largest(slab, (slab + fit.arrival) / others)
  busy = _busy(plan, fit, rounds, slab)
  memory = _memory(plan, fit, odd, rounds)
  time = (busy**fit.blend + memory**fit.blend) ** (1 / fit.blend) + fit.launch
  if cfg.split_k > 1:
    summed = p.results * p.products * cfg.split_k * 4 / fit.reduce_rate
    time += fit.reduce + summed * odd.sums
  return (time + odd.copies) * 1e-6


def _rounds(plan: Plan) -> int:
  """Rounds of work tiles."""
  room = hardware.clusters_at_once(plan.config.blocks, plan.gpu.sm_count)
  return cdiv(plan.tiling.work_tiles, room)


def _is_narrow(plan: Plan) -> bool:
  """Whether B is read in swizzle atoms of 32 columns."""
  shares = plan.config.consumers if plan.config.split == "n" else 1
  return not plan.problem.b.k_last and plan.config.block_n // shares % 64 > 0


def _slab(
  plan: Plan, fit: constants.Model, odd: odd_sizes.Costs, rounds: int
) -> float:
  """Cycles of a slab of K that has arrived.

  L2 gives so many bytes to all SMs: those of a round that have no block leave
  theirs to the others. 1856 x 632 x 7544 with 128 x 128 tiles in clusters of 4
  x 1, 80 blocks, takes 505 cycles a slab (H100), 648 if each had its own rate.
  """
  p, cfg = plan.problem, plan.config
  bm, bn, bk = cfg.block_m, cfg.block_n * p.products, cfg.block_k
  narrow, splits = _is_narrow(plan), plan.loader.slabs_by_tma > 0
  multiply = bm * bn * bk * p.a.bits * len(p.pairs) / 2**15 * fit.mma
  multiply += bm * bn / 128 * p.has_small_apart / plan.tiling.slabs_at_once
  multiply += _ALONE * (p.has_small_apart and cfg.consumers == 1)
  multiply *= 1 + fit.small * (1 - bm * bn / 2**15)
  is_added = p.is_promoted and not p.has_small_apart  # of 8 bits
  if cfg.consumers == 3 and not is_added:
    multiply *= fit.mma_three_consumers
  if cfg.split == "n":
    multiply *= fit.columns
  elif cfg.split == "m" and bm > 64 * cfg.consumers:
    multiply *= fit.mma_many_rows
  multiply *= fit.swapped if cfg.swap_ab else 1
  multiply *= fit.narrow_mma if narrow else 1
  # wgmma reads A for each share of the columns, B for each 64 rows.
  shares = cfg.consumers if cfg.split == "n" else 1
  reads = bm // 64 * (64 * shares * p.products + bn) * bk * len(p.pairs)
  rows = min(bm, round_up(p.m, 8))  # those that are loaded
  rows *= p.a.planes
  # float32 is loaded, and read, for planes that threads make.
  written = p.b.planes + 4 * splits
  writes = (rows + bn * written) * bk
  bn *= 2 if splits else p.b.planes
  reads, writes = bytes_of(reads, p.a.dtype), bytes_of(writes, p.a.dtype)
  stored = _STORED if p.has_small_apart else fit.writes
  shared = (reads + (_STORED_8 if is_added else stored) * writes) / 128
  shared *= fit.shared
  # Of lines, each warp reads eight columns' scales in a cycle.
  shared += (bm // 16) * (bn // 8) * p.has_lines
  slow_a, slow_b = odd.loads
  load_a, load_b = rows * slow_a / cfg.cluster_n, bn * slow_b / cfg.cluster_m
  loads = load_a + load_b
  if odd_sizes.loads_weights(plan):  # while TMA loads A
    longer = largest(load_a, load_b)
    loads = longer + odd.shorter_loads * (loads - longer)
  loads *= bytes_of(bk, p.a.dtype) / fit.l2 * (fit.narrow if narrow else 1)
  busy_sms = cdiv(plan.tiling.work_tiles, rounds) * cfg.blocks  # of each round
  loads *= busy_sms / plan.gpu.sm_count
  loads *= fit.l2_cluster_k if cfg.cluster_k > 1 else 1
  slab = largest(multiply, shared, loads) + odd.short + odd.threads
  if is_added:
    added = _ADDED * bm * bn / 128 * (_LINES_ADD if p.has_lines else 1)
    idle = fit.barrier + added + _SCALED * p.has_blocks
    slab += idle * _SEEN[1 if cfg.swap_ab else cfg.consumers - 1]
    if cfg.consumers < 3 or not p.has_blocks or p.has_lines:
      return slab
    falls_behind = cfg.blocks == 1 and rounds * plan.tiling.slabs > _TOGETHER
    return slab + _BEHIND * falls_behind + _PAIRED * (cfg.blocks > 1)
  shared_m = fit.share_m if cfg.cluster_m > 1 else 0
  shared_n = fit.share_n if cfg.cluster_n > 1 else 0
  return slab + fit.barrier + shared_m + shared_n


def _busy(plan: Plan, fit: constants.Model, rounds: int, slab: float) -> float:
  """Microseconds in which a block is busy; `slab` cycles each."""
  cfg = plan.config
  product = plan.tiling.slabs * slab / fit.clock
  product += _exchange(plan, fit)
  epilogue = _epilogue(plan, fit, rounds)
  area = cfg.block_m * cfg.block_n / 2**15
  words = _stored_bytes(plan) / 2
  applied = fit.applied * bool(plan.problem.epilogue.activation)
  least = (fit.drain * words + applied) * area
  between = _between(plan, fit, epilogue, product, slab, least)
  work_tile = product + between
  if rounds > 1:
    work_tile = largest(work_tile, least)
  return rounds * work_tile + epilogue - between


def _exchange(plan: Plan, fit: constants.Model) -> float:
  """Microseconds in which blocks send each other sums of parts of K."""
  p, cfg = plan.problem, plan.config
  if cfg.cluster_k == 1:
    return 0.0
  rows = min(cfg.block_m, round_up(p.m, 16))  # those of warps that send
  sums = rows * cfg.block_n * p.products * (1 - 1 / cfg.cluster_k)
  waits = fit.exchange * (1 + math.log2(cfg.cluster_k)) / 2
  return waits + 4 * sums / fit.exchange_rate


def _stored_bytes(plan: Plan) -> int:
  """Bytes that are stored for each of a tile's results."""
  return bytes_of(plan.tiling.outputs, plan.matrices.stored_dtype)


def _subtiles(plan: Plan) -> float:
  """Subtiles of one consumer; all of them divide the tile."""
  cfg = plan.config
  across = cdiv(cfg.block_n, cfg.epilogue_n * cfg.cluster_k)
  return across * cfg.block_m / (cfg.consumers * 64)


def _epilogue(plan: Plan, fit: constants.Model, rounds: int) -> float:
  """Microseconds until the results of a block's last work tile have left."""
  p, cfg = plan.problem, plan.config
  stored = _stored_bytes(plan)
  leaves = cfg.block_m * cfg.block_n * stored / fit.store / cfg.cluster_k
  epilogue = fit.epilogue + leaves + fit.subtile * _subtiles(plan)
  epilogue *= fit.activation if p.epilogue.activation else 1
  epilogue *= fit.with_c if p.epilogue.c_dtype else 1
  if plan.tiling.tiles_overlap:
    epilogue += (fit.by_rows - 1) * leaves
  elif plan.tiling.by_rows:
    shares = cfg.consumers if cfg.split == "n" else 1
    epilogue += fit.cut * cfg.block_m * shares
  if cfg.split_k == 1:
    rate = plan.gpu.dram_bytes_per_s * fit.leaving / 1e6
    epilogue = largest(epilogue, p.results * stored / rounds / rate)
  return epilogue


def _between(
  plan: Plan,
  fit: constants.Model,
  epilogue: float,
  product: float,
  slab: float,
  least: float,
) -> float:
  """Microseconds of a work tile's epilogue that the next tile does not hide.

  Args:
    plan: of the work tile.
    fit: constants.
    epilogue: of the last one.
    product: microseconds in which it is multiplied; slab: cycles of a slab.
    least: microseconds of its results, without anything to hide them.
  """
  p, cfg = plan.problem, plan.config
  not_hidden = least - product / fit.busy
  if plan.tiling.by_rows:
    return largest(epilogue, not_hidden) if p.epilogue.activation else epilogue
  has_c = p.epilogue.c_dtype is not None
  area = cfg.block_m * cfg.block_n / 2**15
  words = _stored_bytes(plan) / 2
  if plan.tiling.pingpong > 1:
    applied = fit.pingpong_applied * bool(p.epilogue.activation)
    return area * (fit.pingpong * words + applied + fit.pingpong_added * has_c)
  at_once = plan.memory.stored_at_once
  if at_once == 1:
    hidden = fit.hidden * epilogue
    return largest(hidden, not_hidden) if p.epilogue.activation else hidden
  subtiles = _subtiles(plan)
  between = fit.deferred_us + fit.applied * area * bool(p.epilogue.activation)
  narrow = fit.narrow_subtile_us if cfg.epilogue_n < 32 else 0
  between += narrow * subtiles / cfg.consumers**2
  late = fit.drain * area * words - product / (
    fit.busy if p.epilogue.activation else 1
  )
  at_once *= fit.drain * area * words
  more = fit.saved if p.epilogue.save else fit.wide
  between += largest(more * area * (words - 1), at_once, late, 0)
  if has_c and plan.memory.c_in_place:
    asked = min(subtiles, plan.tiling.slabs) * slab / fit.clock
    between += fit.added * area + largest(0, fit.c_latency_us - product + asked)
  elif has_c:
    between += largest(fit.c_buffered_us * area, fit.c_latency_us - product)
  return between


def _memory(
  plan: Plan, fit: constants.Model, odd: odd_sizes.Costs, rounds: int
) -> float:
  """Microseconds that device memory takes."""
  p, cfg = plan.problem, plan.config
  bn, bk = cfg.block_n * p.products, cfg.block_k
  size = bytes_of(1, plan.matrices.stored_dtype)
  moved = p.operand_bytes
  if plan.loader.slabs_by_tma:  # float32
    planes = 2 * p.b.planes - 4
    moved -= planes * p.n * p.k * p.matrices(p.b) * p.products
  if cfg.split_k == 1:
    added = size if p.epilogue.c_dtype else 0
    moved += p.results * (_stored_bytes(plan) + added) * odd.results
  memory = moved / (plan.gpu.dram_bytes_per_s / 1e6 * fit.dram)
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
