"""In which order configs are tried: few of them have to be predicted.

A config takes at least what its multiplications, or device memory, take. That
is soon computed, and of 151 configs for 500 x 1024 x 4096 all but six take
longer by it alone than the best one is predicted to.
"""

from collections.abc import Callable, Iterable, Iterator
import heapq

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import constants, odd_sizes


def best_first(
  configs: Iterable[Config],
  at_least: Callable[[Config], float],
  predict: Callable[[Config], float],
) -> Iterator[Config]:
  """The configs by predicted time; those that tie stay in order.

  Args:
    configs: of one problem.
    at_least: no more than what `predict` gives.
    predict: called for a config when none that is left can be better.
  """
  found = list(configs)
  # A bound comes before a prediction of the same time: it may be of a config
  # that ties, and is to come first.
  heap = [(at_least(config), False, i) for i, config in enumerate(found)]
  heapq.heapify(heap)
  while heap:
    _, is_predicted, i = heap[0]
    if is_predicted:
      heapq.heappop(heap)
      yield found[i]
    else:
      heapq.heapreplace(heap, (predict(found[i]), True, i))


def of(
  problem: Problem,
  gpu: hardware.Gpu,
  known: constants.Constants,
  *,
  b_beside_a: bool = False,
) -> Callable[[Config], float]:
  """What predictions for a problem are at least, in seconds.

  Args:
    problem: what is computed.
    gpu: where.
    known: its constants.
    b_beside_a: whether threads may load B, beside TMA, which loads A.
  """
  p, fit, odd = problem, known.model, known.odd_sizes
  products = p.products
  sums = products * p.results * 4 / fit.reduce_rate * min(1, odd.odd_sums)
  # Multiples that only some configs have may be less than 1.
  even = min(1, fit.even)
  mma = fit.mma * min(1, fit.third) * min(1, fit.tall) * min(1, fit.columns)
  mma *= min(1, fit.swapped) * min(1, fit.narrow_mma)
  rate = gpu.dram_bytes_per_s / 1e6 * fit.dram
  streamed = min(1, fit.deep, fit.streams, fit.swapped)
  rate /= streamed * min(1, fit.narrow_dram) * even
  read = p.operand_bytes / rate
  # Of 16 bits or more.
  stores = p.results * 2 / rate * min(1, odd.straddling_results)
  shared = min(1, fit.pair_m, fit.pair_n, fit.share_m, fit.share_n)
  clock = fit.clock / (shared * even)
  slabs = {block_k: cdiv(p.k, block_k) for block_k in (64, 128)}
  copied, copied_c, copied_out = odd_sizes.copies_at_least(p, odd)
  launch, blend = fit.launch * even + copied, fit.blend
  slow = odd_sizes.loads_at_least(p, odd)
  is_slow = max(slow.as_stored) > 1

  def loads(c: Config, m: int, slow: tuple[float, float]) -> float:
    """Cycles in which a slab of 64 is loaded."""
    a, b = slow[::-1] if c.swap_ab else slow
    rows = min(c.block_m, -(-m // 8) * 8) * a / c.cluster_n
    columns = c.block_n * products * b / c.cluster_m
    both = max(rows, columns) if b_beside_a else rows + columns
    return both * 128 / fit.l2

  def at_least(config: Config) -> float:
    c = config
    m, n = (p.n, p.m) if c.swap_ab else (p.m, p.n)
    area = c.block_m * c.block_n * products
    slab = area * c.block_k / 2048 * mma
    slab *= 1 + fit.small * (1 - area / 2**15)
    # Rounding up in place: this is called for dozens of configs.
    columns = -(-n // (c.block_n * c.cluster_n)) - c.tail_columns
    work_tiles = (
      -(-m // (c.block_m * c.cluster_m)) * columns * p.batch * c.split_k
    )
    rounds = -(-work_tiles // (gpu.sm_count // (c.cluster_m * c.cluster_n)))
    count = rounds * -(-slabs[c.block_k] // c.split_k)
    busy = count * (slab + fit.barrier) / clock
    if is_slow and c.block_k == 64:  # operands of longer slabs are padded
      stored, padded = (
        count * (max(slab, loads(c, m, x)) + fit.barrier) / clock
        for x in (slow.as_stored, slow.padded)
      )
      busy = min(stored, padded + slow.copy)
    memory = read + (stores if c.split_k == 1 else 0)
    time = (busy**blend + memory**blend) ** (1 / blend) + launch
    if c.split_k > 1:
      return (time + fit.reduce + sums * c.split_k) * 1e-6
    is_copied = copied_out and not Plan(p, c, gpu).by_rows
    return (time + copied_c + (copied_out if is_copied else 0)) * 1e-6

  return at_least
