"""The configs that the cost model weighs: tiles, clusters, splits of K."""

from collections.abc import Iterator
import dataclasses
import functools

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout, legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import bytes_of, cdiv
from pallas_gemm.kernels.sm90.tiling import WGMMA_COLUMNS
from pallas_gemm.problem import Problem, Side
from pallas_gemm.tuning import fitted, stages

# Tiles that may have C in buffers of its own; slabs with fewer of which it does
# not come in time to where results are stored from.
C_BUFFERED = {(128, 128): 8, (128, 192): 8, (128, 256): 4}
_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Slabs that a part of K must have to be worth a work tile of its own.
_FEWEST_SLABS = 4
# The same, where parts are added up by a cluster.
_CLUSTERS_OF_K, _FEWEST_SLABS_OF_A_BLOCK = (2, 4, 8), 2
# Of slabs of 128; shorter sums were not tried.
_LEAST_DEEP_K = 2048
# Columns of B, a row of A, from which A is transposed for swapped operands.
_LEAST_WEIGHTS = 8
# Tiles across a strip of the tile order.
_STRIP = 8


def worth_a_try(problem: Problem, gpu: hardware.Gpu) -> Iterator[Config]:
  """Configs for a problem; not all need be legal."""
  resources = fitted.resources_of(problem, gpu)
  if _may_swap(problem) and not legal.may_not_swap(problem):
    yield from _swapped(problem, resources)
  if not problem.along:
    yield from _pingpong(problem, resources)
  yield from _tiles(problem, resources)


def _may_swap(problem: Problem) -> bool:
  """Whether A's rows lie along K, or are few and soon transposed."""
  p = problem
  if p.a.k_last:
    return True
  return p.m % 64 > 0 and p.n >= _LEAST_WEIGHTS * p.m


def _swapped(problem: Problem, resources: fitted.Resources) -> Iterator[Config]:
  """Tiles with swapped operands."""
  p, sms = problem, resources.gpu.sm_count
  suits_deep = _suits_deep_slabs(p, resources.gpu)
  some_heights, heights = _heights(p.m, False), _heights(p.m, True)
  either = some_heights | heights
  for config in fitted.swapped(resources):
    if config.block_n not in either or config.block_m >= 2 * max(p.n, 64):
      continue
    rows, columns = cdiv(p.m, config.block_n), cdiv(p.n, config.block_m)
    tiles = rows * columns * p.batch
    is_one_round = config.block_m == 64 and tiles <= sms
    if config.block_n not in (heights if is_one_round else some_heights):
      continue
    is_narrow = config.block_m == 64 and config.block_n <= 32
    deep = suits_deep and is_narrow and rows == 1 and tiles <= sms
    if _is_deep(config, p) != deep:
      continue
    if not _are_too_many(tiles, config, p, sms):
      yield _in_one_strip(config, rows, columns)


def _tiles(problem: Problem, resources: fitted.Resources) -> Iterator[Config]:
  """Tiles whose consumers share them out, and parts of K of these."""
  p, sms = problem, resources.gpu.sm_count
  slabs, straddles = _slabs(p), _straddles(p)
  # Of 127 configs of so few slabs that were timed in a cluster and alone, those
  # in one take 3.5 % more in the mean, 4 % less at best; where rows straddle
  # sectors up to a quarter less (H100 and H200).
  is_short = slabs <= _FEWEST_SLABS and not straddles
  suits_deep = _suits_deep_slabs(p, resources.gpu)
  deep_in_rounds = _suits_deep_rounds(p)
  # A tile far larger than the matrix is not worth a try.
  most_rows, most_columns = 2 * max(p.m, 64), 2 * max(p.n, 32)
  for config in fitted.tiles(resources):
    if config.block_m >= most_rows or config.block_n >= most_columns:
      continue
    if config.block_n % 32 and not p.b.k_last:
      continue  # wgmma reads B along N in atoms of 32 columns or more
    shares = config.blocks > 1
    if shares and is_short and not p.along:
      continue
    if shares and not _gains_by_sharing(config, p, straddles):
      continue
    rows, columns = cdiv(p.m, config.block_m), cdiv(p.n, config.block_n)
    tiles = rows * columns * p.batch
    if _are_too_many(tiles, config, p, sms):
      continue
    if shares and not _suits_cluster(config, p, rows, columns, straddles):
      continue
    # Parts that leave SMs idle, so that each is long: 16 x 16 x 262144 NT 11.5
    # -> 9.9 us, 32 x 24 x 100000 8.6 -> 8.5 (H100).
    is_deep_sum = suits_deep and tiles * _SPLITS[-1] <= sms
    is_deep_sum &= slabs >= _SPLITS[-1] * _FEWEST_SLABS
    if _is_deep(config, p):
      is_one_round = sms < 2 * tiles <= 2 * sms
      in_rounds = deep_in_rounds and tiles > 2 * sms and config.block_n == 64
      if not ((suits_deep and is_one_round) or in_rounds or is_deep_sum):
        continue
    if shares or p.along:
      yield config
    else:
      yield from _alone(config, p, resources, is_short)
    if not shares:
      yield from _in_parts(config, p, resources)


def _alone(
  config: Config, problem: Problem, resources: fitted.Resources, is_short: bool
) -> Iterator[Config]:
  """The tile in no cluster, with its order of tiles; and with buffers for C."""
  p, cfg = problem, config
  rows, columns = cdiv(p.m, cfg.block_m), cdiv(p.n, cfg.block_n)
  least = C_BUFFERED.get((cfg.block_m, cfg.block_n), 0)
  if p.epilogue.c_dtype == p.out_dtype and _slabs(p) < least:
    if buffered := fitted.with_c_buffers(cfg, resources):
      yield _in_one_strip(buffered, rows, columns)
  tiles = rows * columns * p.batch
  if is_short or not _suits_pairs(cfg, p, tiles, resources.gpu.sm_count):
    yield _in_one_strip(cfg, rows, columns)


def _in_parts(
  config: Config, problem: Problem, resources: fitted.Resources
) -> Iterator[Config]:
  """The tile with K cut in parts, and in parts that a cluster adds up."""
  p, cfg, sms = problem, config, resources.gpu.sm_count
  tiles = cdiv(p.m, cfg.block_m) * cdiv(p.n, cfg.block_n) * p.batch
  if tiles > sms:
    return
  slabs = _slabs(p)
  some = [x for x in _SPLITS if x <= slabs // _FEWEST_SLABS]
  in_one_round = [x for x in some if tiles * x <= sms]
  in_two_rounds = [x for x in some if tiles * x <= 2 * sms]
  # Fewer parts leave SMs idle: of 3453 problems none is computed in them.
  for split in in_one_round[-3:] or in_two_rounds[-1:]:
    if parts := fitted.in_parts(cfg, split, resources):
      yield parts
  if cfg.block_m * cfg.block_n > 2**13:
    return  # the sums of larger tiles take long to send
  for split in _CLUSTERS_OF_K:
    room = hardware.clusters_at_once(split, sms)
    if tiles > room or slabs < split * _FEWEST_SLABS_OF_A_BLOCK:
      break
    if parts := fitted.in_cluster(cfg, split, resources):
      yield parts


def _pingpong(
  problem: Problem, resources: fitted.Resources
) -> Iterator[Config]:
  """Tiles of two consumers that ping-pong, where slabs are few.

  One stores while the other multiplies, and neither keeps results that wait.
  """
  p, sms = problem, resources.gpu.sm_count
  slabs = _slabs(p)
  for block_m, block_n in fitted.PINGPONG.get(p.out_dtype, ()):
    config = fitted.pingpong(block_m, block_n, slabs, resources)
    rows, columns = cdiv(p.m, block_m), cdiv(p.n, block_n)
    if config is None or rows * columns * p.batch <= sms:
      continue
    if block_m >= 2 * max(p.m, 64) or block_n >= 2 * max(p.n, 32):
      continue
    if not _are_too_many(rows * columns * p.batch, config, p, 4 * sms):
      yield _in_one_strip(config, rows, columns)


def _in_one_strip(config: Config, rows: int, columns: int) -> Config:
  """The config with all columns of a narrow result side by side in tile order.

  Blocks that share rows of A, which is what takes time, then read them at the
  same time: 2048 x 256 x 4096 11.9 -> 9.8 us, 4096 x 128 x 2880 10.5 -> 9.1, of
  others between 2.2 % less and 0.4 % more (H200). With operands swapped the
  tile's rows lie along N: 8192 x 320 x 1280 13.4 -> 12.2 us.
  """
  if columns > _STRIP or rows <= 2 * columns:
    return config
  return _with_strips(config, _STRIP, "m" if config.swap_ab else "n")


@functools.cache
def _with_strips(config: Config, raster: int, raster_dim: Side) -> Config:
  return dataclasses.replace(config, raster=raster, raster_dim=raster_dim)


def _are_too_many(
  tiles: int, config: Config, problem: Problem, sms: int
) -> bool:
  """Whether larger tiles are better in any case, and no worse balanced."""
  has_room = min(problem.m, problem.n) >= 512 and problem.along is None
  # Of two promoted products no larger ones have room.
  products = problem.products if problem.is_promoted else 1
  is_small = config.block_m * config.block_n * products < 2**14
  return has_room and is_small and tiles > 8 * sms


def _slabs(problem: Problem) -> int:
  return cdiv(problem.k, fitted.slab_of(problem))


def _is_deep(config: Config, problem: Problem) -> bool:
  """Whether slabs are twice as deep."""
  return config.block_k > fitted.slab_of(problem)


def _straddles(problem: Problem) -> bool:
  """Whether an operand's rows start at odd multiples of 16 bytes."""
  p, ((_, a), (_, b)) = problem, layout.operand_shapes(problem)
  return layout.straddles(a, p.a.dtype) or layout.straddles(b, p.b.dtype)


def _gains_by_sharing(
  config: Config, problem: Problem, straddles: bool
) -> bool:
  """Whether loads from L2 could take longer than what is multiplied.

  Bytes a slab at 59 a cycle, of rows that do not start at multiples of 128
  bytes; at 32 where they straddle sectors. The fitted rates (`odd_sizes`) are
  lower, 51 and 30 on an H200; these only choose what is predicted. What is
  loaded in atoms of 32 columns takes longer.
  """
  if fitted.pairs_stay_together(problem, config):
    return True
  rate = 32 if straddles else 59
  columns = config.block_n * problem.products
  if problem.along or (not problem.b.k_last and columns % 64):
    return True
  loads = bytes_of(config.block_m + columns, problem.a.dtype) / rate
  return loads > config.block_m * columns * problem.a.bits / 2**15


def _suits_cluster(
  config: Config, problem: Problem, rows: int, columns: int, straddles: bool
) -> bool:
  """Whether all tiles of a cluster lie in the matrix, and what they share.

  What lies outside is loaded, and slowly: 16 x 4096 x 4096 takes 15.9 us with
  64 x 64 tiles in clusters of 1 x 2, 10.0 us without (H200). Of many tiles the
  few that hang over cost less than rows that TMA reads slowly: 4384 x 2496 x
  328 NT 20.1 -> 16.5 us (H200).
  """
  p, cfg = problem, config
  if cfg.blocks > 2:
    # 1856 x 632 x 7544: 50.2 us without, 38.9 in 4 x 1 (H100).
    slow = any(layout.operands_misaligned(p))
    return slow and rows >= cfg.cluster_m and columns >= cfg.cluster_n
  if straddles and min(rows, columns) >= _STRIP:
    return True
  if fitted.pairs_stay_together(p, cfg) and rows > 1:
    return columns % 2 == 0 or columns >= _STRIP
  if cfg.cluster_m > 1:
    hangs_over = p.b.k_last and p.n % cfg.block_n
    return not hangs_over and rows % cfg.cluster_m == 0
  hangs_over = p.a.k_last and p.m % cfg.block_m
  return not hangs_over and columns % cfg.cluster_n == 0


def _suits_pairs(
  config: Config, problem: Problem, tiles: int, sms: int
) -> bool:
  """Whether two rows of tiles are better off in clusters, and so only there.

  They then read their weights from L2 once. A cluster's blocks have one way to
  it, so that pairs must occupy most SMs: 128 x 10240 x 8192 43.3 -> 41.1 us,
  128 x 8192 x 28672 113.8 -> 110.5; 128 x 5120 x 5120, with 40 pairs, 16.2 ->
  17.3 (H200).
  """
  p, cfg = problem, config
  rows = cdiv(p.m, cfg.block_m)
  if rows != 2 or cfg.block_m > 64 or cfg.block_n < 128 or p.batch > 1:
    return False
  hangs_over = p.b.k_last and p.n % cfg.block_n
  return 0.8 * sms <= tiles <= sms and not hangs_over


def _suits_deep_slabs(problem: Problem, gpu: hardware.Gpu) -> bool:
  """Whether slabs of 128 are worth half as many stages: for streamed weights.

  Each stage has two barriers to make ready: 16 x 4096 x 14336 29.2 -> 28.5 us
  with nine of them, 16 x 2048 x 2048 5.3 -> 4.8 (H200). But where four are
  more than memory answers at a time, six of 64 are better: 64 x 10240 x 8192
  40.6 -> 40.0 us. Nor do two rows of tiles gain: 128 x 8192 x 28672 113.4 ->
  115.2.
  """
  p = problem
  if p.m > 64 or p.k < _LEAST_DEEP_K or p.along:
    return False
  return stages.for_latency(p, 128, gpu) >= stages.FEWEST


def _suits_deep_rounds(problem: Problem) -> bool:
  """Whether slabs of 128 are worth it for several rounds of 64 x 64 tiles.

  They are for weights that are stored [N, K], 256 bytes of a row at a time, and
  few rows: 1 x 18944 x 3584 33.7 -> 31.8 us, 8 x 28672 x 4096 56.5 -> 54.9; 64
  x 28672 x 4096 57.7 -> 59.6 (H200).
  """
  p = problem
  return p.b.k_last and p.m <= 32 and p.k >= _LEAST_DEEP_K and p.along is None


@functools.cache
def _heights(m: int, all_of_them: bool) -> frozenset[int]:
  """Rows that a tile may have: the fewest for each number of row tiles.

  Of many rows, multiples of 64 are left to tiles without a swap, but where 64
  columns give one round: wgmma reads less for 64 x 256 accumulators than
  for 256 x 64.
  """
  fewest: dict[int, int] = {}
  for height in range(WGMMA_COLUMNS, 0, -fitted.ROW_STEP):
    if height % 64 or m <= WGMMA_COLUMNS or all_of_them:
      fewest[cdiv(m, height)] = height
  return frozenset(fewest.values())
