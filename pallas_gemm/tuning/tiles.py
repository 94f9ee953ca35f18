"""The configs that the cost model weighs: tiles, clusters, splits of K."""

from collections.abc import Iterator
import dataclasses
import functools

import jax.numpy as jnp

from pallas_gemm import hardware
from pallas_gemm.kernels import sm90_legal
from pallas_gemm.kernels import sm90_plan as plan
from pallas_gemm.kernels.problem import Config, Problem, Side
from pallas_gemm.tuning import stages

# Tiles, consumers and the side that these share out.
TILES = (
  (64, 32, 1, "m"),
  (64, 64, 1, "m"),
  (64, 96, 1, "m"),
  (64, 128, 1, "m"),
  (64, 192, 1, "m"),
  (64, 256, 2, "n"),
  (128, 64, 2, "m"),
  (128, 96, 2, "m"),
  (128, 128, 2, "m"),
  (128, 112, 2, "m"),
  (128, 144, 2, "m"),
  (128, 160, 2, "m"),
  (128, 176, 2, "m"),
  (128, 192, 2, "m"),
  (128, 208, 2, "m"),
  (128, 224, 2, "m"),
  (128, 240, 2, "m"),
  (128, 256, 2, "m"),
  (192, 128, 3, "m"),
  (192, 160, 3, "m"),
  (192, 192, 3, "m"),
  (256, 96, 2, "m"),
  (256, 128, 2, "m"),
  (256, 144, 2, "m"),
  (256, 160, 2, "m"),
)
# With the operands swapped: columns of the result, consumers, the most rows,
# block_k. wgmma takes any multiple of 8 rows if A is stored [M, K].
SWAPPED = (
  (64, 1, 256, 64),
  (64, 1, 32, 128),
  (128, 2, 256, 64),
  (192, 3, 192, 64),
  (256, 2, 160, 64),
)
# Tiles of consumers that take turns.
TURNS = {
  "bfloat16": ((64, 64), (64, 128), (128, 128)),
  "float16": ((64, 64), (64, 128), (128, 128)),
  # 8192 x 8192 x 64 with 128 x 128 75.7 us, 64 x 256 69.8 (pingpong-2, -6).
  "float32": ((64, 64), (64, 128), (64, 256)),
}
# Tiles that may have C in buffers of its own; slabs with fewer of which it does
# not come in time to where results are stored from.
AHEAD = {(128, 128): 8, (128, 192): 8, (128, 256): 4}
_ROW_STEP = 16
CLUSTERS = ((1, 1), (2, 1), (1, 2))
_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST_STAGES = {64: 12, 128: 9}
# Slabs that a part of K must have to be worth a unit of its own.
_FEWEST_SLABS = 4
# Of slabs of 128; shorter sums were not tried.
_LEAST_DEEP_K = 2048
# Tiles across a strip of the tile order.
_STRIP = 8


def worth_a_try(problem: Problem, gpu: hardware.Gpu) -> Iterator[Config]:
  """Configs for a problem; not all need be legal."""
  p, sms = problem, gpu.sm_count
  slabs = plan.cdiv(p.k, 64)
  suits_deep = _suits_deep_slabs(p, gpu)
  deep_in_rounds = _suits_deep_rounds(p)
  kind = (
    p.gated,
    p.out_dtype,
    p.c_dtype,
    p.bias,
    p.activation is not None,
    p.save_preactivation,
    p.ragged,
  )
  if not p.transpose_a and not sm90_legal.may_not_swap(p):
    for config in _swapped(*kind):
      rows = plan.cdiv(p.m, config.block_n)
      columns = plan.cdiv(p.n, config.block_m)
      tiles = rows * columns * p.batch
      heights = _heights(p.m, config.block_m == 64 and tiles <= sms)
      if config.block_n in heights and config.block_m < 2 * max(p.n, 64):
        is_narrow = config.block_m == 64 and config.block_n <= 32
        deep = suits_deep and is_narrow and rows == 1 and tiles <= sms
        if (config.block_k == 128) != deep:
          continue
        if not _are_too_many(tiles, config, p, sms):
          yield _in_one_strip(config, rows, columns)
  if not p.ragged:
    yield from _in_turns(p, slabs, kind, sms)
  for config in _configs(*kind):
    if config.block_n % 32 and not p.transpose_b:
      continue  # wgmma reads B along N in pieces of 32 columns or more
    rows = plan.cdiv(p.m, config.block_m)
    columns = plan.cdiv(p.n, config.block_n)
    tiles = rows * columns * p.batch
    tall, wide = config.cluster_m > 1, config.cluster_n > 1
    if (tall or wide) and not (p.ragged or _gains_by_sharing(config, p)):
      continue
    # A tile far larger than the matrix, a cluster with nobody to share with.
    if config.block_m >= 2 * max(p.m, 64) or config.block_n >= 2 * max(p.n, 32):
      continue
    if _are_too_many(tiles, config, p, sms) or not _suits_cluster(config, p):
      continue
    if config.block_k > 64:
      is_one_round = sms < 2 * tiles <= 2 * sms
      in_rounds = deep_in_rounds and tiles > 2 * sms and config.block_n == 64
      if not ((suits_deep and is_one_round) or in_rounds):
        continue
    alone = not (tall or wide or p.ragged)
    least = AHEAD.get((config.block_m, config.block_n), 0)
    if alone and p.c_dtype == p.out_dtype and slabs < least:
      ahead = _ahead(config, *kind)
      if ahead is not None:
        yield _in_one_strip(ahead, rows, columns)
    if not alone:
      yield config
    elif not _suits_pairs(config, p, tiles, sms):
      yield _in_one_strip(config, rows, columns)
    tail = _with_split_tail(config, p, sms)
    if tail is not None:
      yield tail
    if tall or wide or tiles > sms:
      continue
    for split in _SPLITS:
      if tiles * split > 2 * sms or slabs < split * _FEWEST_SLABS:
        break
      parts = _in_parts(config, split, p.gated)
      if parts is not None:
        yield parts


def _in_turns(problem: Problem, slabs: int, kind, sms) -> Iterator[Config]:
  """Tiles of two consumers that take turns, where slabs are few.

  One stores while the other multiplies, and neither keeps results that wait.
  """
  p = problem
  for block_m, block_n in TURNS.get(p.out_dtype, ()):
    config = _taking_turns(block_m, block_n, slabs, *kind)
    rows, columns = plan.cdiv(p.m, block_m), plan.cdiv(p.n, block_n)
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
  others between 2.2 % less and 0.4 % more (dense-38). With operands swapped the
  tile's rows lie along N: 8192 x 320 x 1280 13.4 -> 12.2 us.
  """
  if columns > _STRIP or rows <= 2 * columns:
    return config
  return _with_strips(config, _STRIP, "m" if config.swap_ab else "n")


@functools.cache
def _with_strips(config: Config, raster: int, raster_dim: Side) -> Config:
  return dataclasses.replace(config, raster=raster, raster_dim=raster_dim)


def _with_split_tail(
  config: Config, problem: Problem, sms: int
) -> Config | None:
  """The config with the tiles of a partial last round cut along K.

  Tiles of 64 rows gain little: 192 x 6144 x 6144 27.3 -> 26.5 us, 320 x 27648
  x 5120 137.5 -> 139.6 (dense-24).
  """
  p, cfg = problem, config
  rows, columns = plan.cdiv(p.m, cfg.block_m), p.n // cfg.block_n
  if rows * columns < sms or p.n % cfg.block_n or cfg.block_m < 128:
    return None
  if p.batch > 1 or p.ragged or p.c_dtype or p.save_preactivation:
    return None
  if cfg.cluster_m * cfg.cluster_n > 1:
    return None
  split = plan.cdiv(rows * columns % sms, rows)
  slabs = plan.cdiv(p.k, cfg.block_k)
  parts = min(sms // (rows * split), slabs // _FEWEST_SLABS) if split else 0
  if parts < 2:
    return None
  parts = plan.cdiv(slabs, plan.cdiv(slabs, parts))  # none of them is empty
  return dataclasses.replace(cfg, tail_columns=split, tail_split_k=parts)


def _are_too_many(
  tiles: int, config: Config, problem: Problem, sms: int
) -> bool:
  """Whether larger tiles are better in any case, and no worse balanced."""
  has_room = min(problem.m, problem.n) >= 512 and problem.ragged is None
  is_small = config.block_m * config.block_n < 2**14
  return has_room and is_small and tiles > 8 * sms


def _gains_by_sharing(config: Config, problem: Problem) -> bool:
  """Whether loads from L2 could take longer than what is multiplied.

  Bytes a slab at 59 a cycle, the rate of rows that do not start at multiples of
  128 bytes. What is loaded in pieces of 32 columns takes longer.
  """
  columns = config.block_n * (2 if problem.gated else 1)
  if not problem.transpose_b and columns % 64:
    return True
  return (config.block_m + columns) * 2 / 59 > config.block_m * columns / 2048


def _suits_cluster(config: Config, problem: Problem) -> bool:
  """Whether all tiles of a cluster lie in the matrix, and what they share.

  What lies outside is loaded, and slowly: 16 x 4096 x 4096 takes 15.9 us with
  64 x 64 tiles in clusters of 1 x 2, 10.0 us without (dense-19).
  """
  p, cfg = problem, config
  if cfg.cluster_m > 1:
    hangs_over = p.transpose_b and p.n % cfg.block_n
    return not hangs_over and plan.cdiv(p.m, cfg.block_m) % cfg.cluster_m == 0
  if cfg.cluster_n > 1:
    hangs_over = not p.transpose_a and p.m % cfg.block_m
    return not hangs_over and plan.cdiv(p.n, cfg.block_n) % cfg.cluster_n == 0
  return True


def _suits_pairs(
  config: Config, problem: Problem, tiles: int, sms: int
) -> bool:
  """Whether two rows of tiles are better off in clusters, and so only there.

  They then read their weights from L2 once. A cluster's blocks have one way to
  it, so that pairs must occupy most SMs: 128 x 10240 x 8192 43.3 -> 41.1 us,
  128 x 8192 x 28672 113.8 -> 110.5; 128 x 5120 x 5120, with 40 pairs, 16.2 ->
  17.3 (dense-41).
  """
  p, cfg = problem, config
  rows = plan.cdiv(p.m, cfg.block_m)
  if rows != 2 or cfg.block_m > 64 or cfg.block_n < 128 or p.batch > 1:
    return False
  in_pairs = dataclasses.replace(cfg, cluster_m=2)
  return 0.8 * sms <= tiles <= sms and _suits_cluster(in_pairs, p)


def _suits_deep_slabs(problem: Problem, gpu: hardware.Gpu) -> bool:
  """Whether slabs of 128 are worth half as many stages: for streamed weights.

  Each stage has two barriers to make ready: 16 x 4096 x 14336 29.2 -> 28.5 us
  with nine of them, 16 x 2048 x 2048 5.3 -> 4.8 (dense-40). But where four are
  more than memory answers at a time, six of 64 are better: 64 x 10240 x 8192
  40.6 -> 40.0 us (dense-41). Nor do two rows of tiles gain: 128 x 8192 x 28672
  113.4 -> 115.2 (dense-25).
  """
  p = problem
  if p.m > 64 or p.k < _LEAST_DEEP_K or p.ragged:
    return False
  return stages.in_one_answer(p, 128, gpu) >= stages.FEWEST


def _suits_deep_rounds(problem: Problem) -> bool:
  """Whether slabs of 128 are worth it for several rounds of 64 x 64 tiles.

  They are for weights that are stored [N, K], 256 bytes of a row at a time, and
  few rows: 1 x 18944 x 3584 33.7 -> 31.8 us, 8 x 28672 x 4096 56.5 -> 54.9; 64
  x 28672 x 4096 57.7 -> 59.6 (choice-4).
  """
  p = problem
  return (
    p.transpose_b and p.m <= 32 and p.k >= _LEAST_DEEP_K and p.ragged is None
  )


@functools.cache
def _configs(*kind) -> tuple[Config, ...]:
  """Every tile and cluster with as many stages as find room."""
  found = []
  for block_m, block_n, consumers, split in TILES:
    shapes = [(*cluster, 64) for cluster in CLUSTERS]
    if block_m * block_n <= 2**13 and consumers == 1:
      shapes.append((1, 1, 128))
    for cluster_m, cluster_n, block_k in shapes:
      config = Config(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        consumers=consumers,
        split=split,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
      )
      found.append(_fitted(config, *kind))
  return tuple(filter(None, found))


@functools.cache
def _swapped(*kind) -> tuple[Config, ...]:
  """The same with operands swapped, for any number of rows."""
  found = []
  for block_m, consumers, most, block_k in SWAPPED:
    for block_n in range(_ROW_STEP, most + 1, _ROW_STEP):
      config = Config(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        consumers=consumers,
        # Few tiles along M come one after the other: what they share of B is
        # then read once. 200 x 4096 x 14336 takes 35.0 us in strips of 4 tiles
        # along N, 45.2 in strips of 8 (dense-21).
        raster=4,
        swap_ab=True,
      )
      found.append(_fitted(config, *kind))
  return tuple(filter(None, found))


@functools.cache
def _heights(m: int, all_of_them: bool) -> frozenset[int]:
  """Rows that a tile may have: the fewest for each number of row tiles.

  Of many rows, multiples of 64 are left to tiles without a swap, but where 64
  columns give one round: wgmma reads less for 64 x 256 sums than for 256 x 64.
  """
  fewest: dict[int, int] = {}
  for height in range(plan.WGMMA_COLUMNS, 0, -_ROW_STEP):
    if height % 64 or m <= plan.WGMMA_COLUMNS or all_of_them:
      fewest[plan.cdiv(m, height)] = height
  return frozenset(fewest.values())


@functools.cache
def _in_parts(config: Config, split_k: int, gated: bool) -> Config | None:
  """The tile for partial sums in float32; they have no tail."""
  config = dataclasses.replace(config, split_k=2)  # however many
  parts = _fitted(config, gated, "float32", None, None, False, False, None)
  return parts and dataclasses.replace(parts, split_k=split_k)


@functools.cache
def _taking_turns(block_m, block_n, slabs: int, *kind) -> Config | None:
  """The tile of two consumers, with as many whole units in the ring as fit."""
  config = Config(block_m=block_m, block_n=block_n, split="pingpong")
  if 2 * slabs > _MOST_STAGES[config.block_k]:
    return None
  buffers = 1 if block_m * block_n == 64 * 64 else 2
  options = (buffers, 2 * slabs), (1, 2 * slabs)
  found = _fitted(config, *kind, options)
  return found and dataclasses.replace(found, stages=found.stages // 2 * 2)


@functools.cache
def _ahead(config: Config, *kind) -> Config | None:
  """The tile with C in buffers of its own."""
  return _fitted(config, *kind, ((1, 3),))


@functools.cache
def _fitted(
  config,
  gated,
  out_dtype,
  c_dtype,
  bias,
  has_activation,
  save,
  ragged,
  options=None,
) -> Config | None:
  """The config with the pieces of its tail and the stages that find room.

  Args:
    options: pairs of epilogue_buffers and the fewest stages with these, best
      first; None for what suits the tile.
  """
  problem = Problem(
    m=8192,
    n=8192,
    k=8192,
    dtype="bfloat16",
    out_dtype=out_dtype,
    gated=gated,
    c_dtype=c_dtype,
    bias=bias,
    save_preactivation=save,
    ragged=ragged,
  )
  columns = config.block_n
  if config.split == "n":
    columns //= config.consumers
  # One swizzled piece: such copies take matrices of any height (see compat).
  piece = 128 // jnp.dtype(out_dtype).itemsize
  piece = next(w for w in (piece, 32, 16) if columns % w == 0)
  config = dataclasses.replace(config, epilogue_n=piece)
  room = hardware.current().shared_bytes_per_block
  # Room for all pieces of a tile, where that leaves a deep enough ring: they
  # are then written without waiting for each other, and C may come in place of
  # them. With C, 4096 x 14336 x 4096: 612 -> 603 us on an H200 (dense-16).
  pieces = len(plan.pieces(problem, config))
  options = options or ((pieces, 3), (2, 3), (1, 3), (2, 2), (1, 2))
  is_wide = out_dtype == "float32" or save
  size = config.block_m * config.block_n // config.consumers
  is_large = gated or size > 2**13 or (is_wide and config.consumers > 1)
  if is_large and not c_dtype and plan.defers_stores(problem, config):
    # Pieces that are stored one at a time, beside slabs of the next tile, need
    # no room: a deeper ring is worth more (4096^3: 171 -> 169 us, dense-12), of
    # one tile a block too (512 x 8192 x 8192: 89.9 -> 89.3 us, dense-17).
    options = (1, 4), (1, 3), (1, 2)
    suits = is_wide or not has_activation
    if ragged is None and suits and columns % 32 == 0:
      # Half as wide they hold up a slab for less; 7168 x 8192 x 512: 81.9 ->
      # 79.5 us. With an activation it is slower: 606 -> 613 us, unless what it
      # is applied to is stored too: 8192 x 4096 x 1024 118 -> 116 (pingpong-5).
      config = dataclasses.replace(config, epilogue_n=32)
      if not (is_wide and plan.has_room_to_defer(problem, config)):
        options = (2, 4), *options
  for buffers, fewest in options:
    config = dataclasses.replace(config, stages=1, epilogue_buffers=buffers)
    left = room - plan.shared_bytes(config, problem)
    count = 1 + left // plan.slab_bytes(config, problem)
    count = min(_MOST_STAGES[config.block_k], count)
    if count >= fewest:
      return dataclasses.replace(config, stages=count)
  return None
