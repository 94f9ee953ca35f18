"""In which order configs are tried: few of them have to be predicted.

A config takes at least what its multiplications, or device memory, take. Of 151
configs for 500 x 1024 x 4096 all but 49 take longer by that alone than the best
one is predicted to; with loads and results, which are soon computed too, all
but six (H200).
"""

from collections.abc import Callable, Iterable, Iterator
import heapq
import math

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import bytes_of, cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import constants, moves, odd_sizes

# What a config takes, or takes at least, in seconds.
Estimate = Callable[[Config], float]


def best_first(
  configs: Iterable[Config], *estimates: Estimate
) -> Iterator[Config]:
  """The configs by the last estimate; those that tie stay in order.

  Args:
    configs: of one problem.
    estimates: what configs take at least, the soonest computed first, and what
      they are predicted to take. A config's next one is asked for when none
      that is left can be better.
  """
  found = list(configs)
  last = len(estimates) - 1
  # A bound comes before a prediction of the same time: it may be of a config
  # that ties, and is to come first.
  heap = [(estimates[0](config), 0, i) for i, config in enumerate(found)]
  heapq.heapify(heap)
  while heap:
    _, known, i = heap[0]
    if known == last:
      heapq.heappop(heap)
      yield found[i]
    else:
      next_one = estimates[known + 1](found[i])
      heapq.heapreplace(heap, (next_one, known + 1, i))


class Bounds:
  """What predictions for a problem are at least, in seconds.

  Constants that only some configs are slowed or sped up by count where they
  make a bound less.
  """

  def __init__(
    self,
    problem: Problem,
    gpu: hardware.Gpu,
    known: constants.Constants,
    by_threads: Callable[[Config], float] | None = None,
    movable: moves.Movable = ((False, False), (False, False)),
  ):
    """Computes what all configs share.

    Args:
      problem: what is computed.
      gpu: where.
      known: its constants.
      by_threads: loads of B, as a multiple, where threads load it beside TMA,
        which loads A; 0 where they don't, None if they never do.
      movable: whether threads bring A, and B, of a config that says so, with
        operands as they are and swapped.
    """
    p, fit, odd = problem, known.model, known.odd_sizes
    self._problem, self._gpu, self._fit, self._odd = p, gpu, fit, odd
    self._by_threads = by_threads
    self._outputs = 1 + p.products * p.epilogue.save
    mma = fit.mma * min(1, fit.third) * min(1, fit.tall) * min(1, fit.columns)
    self._mma = mma * min(1, fit.swapped) * min(1, fit.narrow_mma) * p.products
    self._clock = fit.clock
    self._slabs = {block_k: cdiv(p.k, block_k) for block_k in (64, 128)}
    self._sums = p.products * p.results * 4 * min(1, odd.odd_sums)
    self._copies = odd_sizes.copies_at_least(p, odd)
    self._copied = self._copies.a + self._copies.b
    self._movable = movable
    self._launch = fit.launch
    self._slow = odd_sizes.loads_at_least(p, odd)
    self._may_wait = by_threads or max(self._slow.as_stored) > 1
    rate = gpu.dram_bytes_per_s / 1e6 * fit.dram
    self._read = p.operand_bytes / rate
    result = bytes_of(p.results, p.out_dtype) / rate
    self._stores = self._outputs * result * min(1, odd.straddling_results)
    # Of swapped operands results take longer by their share of all bytes.
    most = self._outputs + bool(p.epilogue.c_dtype)
    narrow = odd_sizes.straddling_results(bytes_of(16, p.out_dtype), odd)
    most = self._read + most * result * max(1, narrow)
    swapped = min(fit.streams, fit.swapped)
    self._swapped = swapped * (1 + fit.scattered * result / most)
    self._least_read = self._read * min(1, fit.deep, self._swapped)

  def roughly(self, config: Config) -> float:
    """By multiplications or operands alone."""
    rounds, count, slab, _ = self._work(config)
    slab += barriers_of(config, self._fit)
    busy = rounds * count * slab / self._clock
    time = max(busy, self._least_read) + self._launch + self._copied_of(config)
    return time * 1e-6

  def closely(self, config: Config) -> float:
    """By loads and results too."""
    p, c, fit = self._problem, config, self._fit
    rounds, count, slab, busy_sms = self._work(c)
    is_narrow = _is_narrow(c, p)
    if is_narrow:  # operands are padded, as those of slabs of 128 are
      loads = busy_sms * self._loads(c, (1.0, 1.0))
      slab = max(slab, fit.narrow * loads)
    barriers = barriers_of(c, fit)
    product = count * (slab + barriers) / self._clock
    if self._may_wait and c.block_k == 64 and not is_narrow:
      as_stored, padded = (
        count * (max(slab, busy_sms * loads) + barriers) / self._clock
        + copy / rounds
        for loads, copy in (
          self._as_stored(c),
          (self._loads(c, self._slow.padded), self._slow.copy),
        )
      )
      product = min(as_stored, padded)
    between, alone, epilogue = self._results(c)
    busy = (rounds - 1) * max(product + between, alone) + product + epilogue
    memory = self._read + (self._stores if c.split_k == 1 else 0)
    if c.swap_ab:
      memory *= self._swapped
    else:
      memory *= fit.narrow_dram if is_narrow else min(1, fit.deep)
    time = (busy**fit.blend + memory**fit.blend) ** (1 / fit.blend)
    time += self._launch + self._copied_of(c)
    if c.split_k > 1:
      summed = self._sums * c.split_k / fit.reduce_rate
      return (time + fit.reduce + summed) * 1e-6
    if self._copies.out_of:
      plan = Plan(p, c, self._gpu)
      if not (plan.by_rows or plan.by_elements):
        time += self._copies.out_of
    return (time + self._copies.c) * 1e-6

  def _copied_of(self, config: Config) -> float:
    """Microseconds of copies of operands."""
    if not config.moves:
      return self._copied
    moved_a, moved_b = self._movable[config.swap_ab]
    return self._copies.a * (not moved_a) + self._copies.b * (not moved_b)

  def _work(self, config: Config) -> tuple[int, int, float, float]:
    """Rounds of work tiles, slabs of one, cycles of a slab, SMs that work.

    SMs are a share of all.
    """
    p, c, fit = self._problem, config, self._fit
    m, n = (p.n, p.m) if c.swap_ab else (p.m, p.n)
    area = c.block_m * c.block_n
    slab = area * c.block_k / 2048 * self._mma
    slab *= 1 + fit.small * (1 - area * p.products / 2**15)
    # Rounding up in place: this is called for dozens of configs.
    columns = -(-n // (c.block_n * c.cluster_n))
    rows = -(-m // (c.block_m * c.cluster_m))
    work_tiles = rows * columns * p.batch * c.split_k
    sms = self._gpu.sm_count
    rounds = -(-work_tiles // hardware.clusters_at_once(c.blocks, sms))
    busy = -(-work_tiles // rounds) * c.blocks / sms
    slabs = -(-self._slabs[c.block_k] // (c.split_k * c.cluster_k))
    if c.moves:
      p = p.transposed() if c.swap_ab else p
      how = self._movable[c.swap_ab]
      how = how[::-1] if c.swap_ab else how
      slab += moves.cycles(p, c, how, self._odd)
    return rounds, slabs, slab, busy

  def _as_stored(self, config: Config) -> tuple[float, float]:
    """Loads of what is not padded, and microseconds of copies of what is."""
    c, slow = config, self._slow
    blocks = (c.block_n, c.block_m) if c.swap_ab else (c.block_m, c.block_n)
    is_copied = [
      copy > 0 and block > 64 for block, copy in zip(blocks, slow.copies)
    ]
    a, b = (
      1.0 if now else stored for now, stored in zip(is_copied, slow.as_stored)
    )
    copies = sum(copy for now, copy in zip(is_copied, slow.copies) if now)
    return self._loads(c, (a, b)), copies

  def _loads(self, config: Config, slow: tuple[float, float]) -> float:
    """Cycles in which a slab of 64 is loaded, where all SMs work."""
    p, c = self._problem, config
    m, a, b = (p.n, *slow[::-1]) if c.swap_ab else (p.m, *slow)
    if c.swap_ab and not p.a.k_last:  # a copy, in rows that TMA reads fast
      b = 1.0
    rows = min(c.block_m, -(-m // 8) * 8) * a / c.cluster_n
    columns = c.block_n * p.products / c.cluster_m
    if slow_b := self._by_threads and self._by_threads(c):
      columns *= slow_b
      both = max(rows, columns) + self._odd.beside * min(rows, columns)
    else:
      both = rows + columns * b
    return both * 128 / self._fit.l2

  def _results(self, config: Config) -> tuple[float, float, float]:
    """Microseconds of results.

    Those that pass between work tiles, all of a tile's by themselves, and those
    of the last.
    """
    p, c, fit = self._problem, config, self._fit
    words = bytes_of(self._outputs, p.out_dtype) / 2
    words = words if c.split_k == 1 else 2 * p.products
    area, applied = c.block_m * c.block_n, bool(p.epilogue.activation)
    area /= c.cluster_k
    epilogue = fit.epilogue + 2 * words * area / fit.store
    epilogue *= fit.activation if applied else 1
    epilogue *= fit.with_c if p.epilogue.c_dtype else 1
    epilogue += exchange(c, p, fit)
    area /= 2**15
    if c.split == "pingpong":
      between = area * (fit.pingpong * words + fit.pingpong_applied * applied)
    else:
      more = fit.saved if p.epilogue.save else fit.wide
      waits = fit.applied * applied + max(0, more * (words - 1))
      between = min(fit.packed + area * waits, epilogue * min(1, fit.hidden))
    alone = area * (fit.drain * words + fit.applied * applied)
    return between, alone, epilogue


def exchange(config: Config, problem: Problem, fit: constants.Model) -> float:
  """Microseconds in which blocks send each other sums of parts of K."""
  c = config
  if c.cluster_k == 1:
    return 0.0
  rows = min(c.block_m, -(-problem.m // 16) * 16)  # those of warps that send
  sums = rows * c.block_n * problem.products * (1 - 1 / c.cluster_k)
  waits = fit.exchange * (1 + math.log2(c.cluster_k)) / 2
  return waits + 4 * sums / fit.exchange_rate


def barriers_of(config: Config, fit: constants.Model) -> float:
  """Cycles of a slab's barriers, those of a cluster that shares it too."""
  shared_m = fit.share_m if config.cluster_m > 1 else 0
  shared_n = fit.share_n if config.cluster_n > 1 else 0
  return fit.barrier + shared_m + shared_n


def _is_narrow(config: Config, problem: Problem) -> bool:
  """Whether B is read in swizzle atoms of 32 columns."""
  c = config
  if c.swap_ab or problem.b.k_last:
    return False
  return c.block_n // (c.consumers if c.split == "n" else 1) % 64 > 0
