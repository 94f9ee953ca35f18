"""Predicts which config computes a grouped product fastest.

How large each group is, only the device knows when the product runs. The model
takes them for about equally large, and a grouped product for a batch of dense
ones of that size, whose time `model` predicts:

* Groups of rows do not end with tiles. Three in ten are taken to have exactly
  as many rows, the others more or fewer: by chance, and by three tenths.
* Groups along K have half a slab more.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import math
import statistics

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import loaders
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import ATOM_ROWS, cdiv, round_up
from pallas_gemm.kernels.sm90.matrices import Matrices
from pallas_gemm.kernels.sm90.memory import Memory
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.kernels.sm90.tiling import Tiling
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import constants, fitted, model, odd_sizes, tiles

# Groups that have exactly as many rows as the others in the mean, and the
# standard deviation of these, more than by chance, in means. Best over chosen
# of 103 problems of an H100 is 0.986, of 28 of an H200 0.980; with half a tile
# more for each 0.983 and 0.978.
_EVEN, _SPREAD = 0.3, 0.3


def choose(problem: Problem, *, any_rows: bool = False) -> Config:
  """The legal config with the least predicted time.

  In no cluster, but with scales of blocks (`fitted.pairs_stay_together`). Of
  groups along K most configs are in clusters, and none is predicted to be best
  (a test holds that). Measured, some are: `autotune` tries them.

  Args:
    problem: what is computed; has groups.
    any_rows: it is to be used for any other M too.

  Raises:
    NotImplementedError: no config is legal; the reason of the last refusal.

  Example:
    >>> from pallas_gemm.problem import Problem
    >>> from pallas_gemm.tuning import grouped
    >>> config = grouped.choose(Problem.flat(
    ...   m=8192, n=14336, k=4096, ragged="m", groups=8, dtype="bfloat16",
    ...   out_dtype="bfloat16"))
    >>> config.split_k, config.cluster_m
    (1, 1)
  """
  configs = _ranked(problem, clusters=False, any_rows=any_rows)
  return model.first_legal(problem, configs)


def candidates(problem: Problem) -> list[Config]:
  """Configs worth a try, the one with the least predicted time first.

  Not all need be legal. Clusters slow groups of 16 bits down: of 27 configs
  three took up to 0.8 % less time in clusters than alone, the others up to 6 %
  more with large groups and 20 to 72 % more with 128 to 205 rows a group
  (H200).
  """
  return list(_ranked(problem, clusters=problem.along == "k"))


def _ranked(
  problem: Problem, clusters: bool, any_rows: bool = False
) -> Iterator[Config]:
  """`candidates`, with those in clusters or without."""
  gpu = hardware.current()
  batch = _as_batch(problem, max(1, round(_rows(problem))))
  # Rows of groups are stored in subtiles of up to 64 columns.
  batch = dataclasses.replace(batch, n=max(problem.n, 64))
  known = constants.of(gpu)

  @functools.cache
  def plan(config: Config) -> Plan:
    return Plan.new(problem, config, gpu)

  of_batch = tiles.worth_a_try(batch, gpu)
  if not any_rows:
    of_batch = odd_sizes.split_by_threads(of_batch, problem, gpu)
  some = (
    _with_room_to_move(config, plan)
    for config in of_batch
    if config.split_k == config.cluster_k == 1
    and (
      clusters
      or config.blocks == 1
      or fitted.pairs_stay_together(problem, config)
    )
  )
  plans = (plan(config) for config in some if config)
  for found in sorted(plans, key=lambda plan: predict(plan, known)):
    yield _with_wide_subtiles(problem, found.config)


def _of(
  problem: Problem, has_many_rows: bool, known: constants.Constants
) -> constants.Constants:
  """The constants of groups, and of tiles of that many rows."""
  if problem.along == "m":
    return known.of_groups_of_rows
  return known.of_many_rows_along_k if has_many_rows else known


def predict(plan: Plan, known: constants.Constants | None = None) -> float:
  """Predicted time of the kernel, in seconds.

  Args:
    plan: of a grouped product, legal or not.
    known: constants; None are those of the plan's GPU.
  """
  problem, config, gpu = plan.tiling.given, plan.config, plan.gpu
  known = _of(problem, config.block_m > 64, known or constants.of(gpu))

  def seconds(rows: int) -> float:
    tiling = _BatchTiling(_as_batch(problem, rows), config, gpu, plan)
    matrices = _BatchMatrices(tiling, plan)
    memory = Memory(tiling, matrices)
    return model.predict(Plan(tiling, matrices, memory), known)

  return sum(share * seconds(rows) for rows, share in _sizes(problem, config))


@dataclasses.dataclass(frozen=True, eq=False)
class _BatchTiling(Tiling):
  """Of a batch of dense products whose results are stored as those of groups.

  Attributes:
    groups: the plan of these.
  """

  groups: Plan

  @property
  def by_rows(self) -> bool:
    return self.groups.tiling.by_rows


@dataclasses.dataclass(frozen=True, eq=False)
class _BatchMatrices(Matrices):
  """Of such a batch, whose weights are loaded as those of groups."""

  groups: Plan

  @property
  def loader(self) -> loaders.Loader:
    return self.groups.loader

  @property
  def b_last_apart(self) -> bool:
    return self.groups.matrices.b_last_apart


def _with_room_to_move(
  config: Config, plan: Callable[[Config], Plan]
) -> Config | None:
  """The config with room for what threads move, where they do.

  There are fewer subtiles of results then, and stages. None if there is no
  room for two of these.
  """
  first = plan(config)
  room = first.gpu.shared_bytes_per_block
  has_room = first.memory.shared_bytes <= room
  if has_room or not isinstance(first.loader, loaders.Shifts):
    return config
  config = dataclasses.replace(config, epilogue_buffers=1)
  over = max(0, plan(config).memory.shared_bytes - room)
  stages = config.stages - cdiv(over, first.memory.slab_bytes)
  return dataclasses.replace(config, stages=stages) if stages > 1 else None


def _with_wide_subtiles(problem: Problem, config: Config) -> Config:
  """The config with both 64-column subtiles of a consumer stored as one.

  Along K, where results are most of the bytes: 64 x 256 tiles take 2 to 5 %
  less time on eight of nine problems, the same on one (H100, evict-1). Such
  copies are of whole swizzle atoms, which TMA must find in the result.
  """
  columns = config.block_n // config.consumers
  is_whole = problem.m % ATOM_ROWS == 0 and problem.n % (columns // 2) == 0
  pairs = config.split == "n" and columns == 2 * config.epilogue_n == 128
  if problem.along != "k" or not (pairs and is_whole):
    return config
  return dataclasses.replace(config, epilogue_n=columns, epilogue_buffers=1)


def _rows(problem: Problem) -> float:
  """Rows of a group."""
  rows = problem.m if problem.along == "m" else problem.k
  return rows / problem.groups.count


def _sizes(problem: Problem, config: Config) -> Iterator[tuple[int, float]]:
  """Rows of the dense products, and which share of the groups has them."""
  rows = _rows(problem)
  if problem.along == "k":  # of rows that are no whole atoms none is copied
    yield round_up(round(rows + config.block_k / 2), ATOM_ROWS), 1.0
    return
  height = config.block_m
  row_tiles = _row_tiles(rows, height)
  fewer = int(row_tiles)
  yield fewer * height, 1 - (row_tiles - fewer)
  if row_tiles > fewer:
    yield (fewer + 1) * height, row_tiles - fewer


@functools.lru_cache(maxsize=1024)
def _row_tiles(rows: float, height: int) -> float:
  """Tiles of that height that a group has in the mean."""
  even = max(1, math.ceil(rows / height))
  deviation = math.sqrt(rows) + _SPREAD * rows
  if deviation > height:  # a group ends anywhere in its last tile
    return _EVEN * even + (1 - _EVEN) * (rows / height + 0.5)
  sizes = statistics.NormalDist(rows, deviation)
  # One, and one more for each whole tile that a group has more rows than.
  most = math.ceil((rows + 3 * deviation) / height)
  spread = 1 + sum(1 - sizes.cdf(i * height) for i in range(1, most))
  return _EVEN * even + (1 - _EVEN) * spread


# Dozens of configs ask for a few.
@functools.lru_cache(maxsize=256)
def _as_batch(problem: Problem, rows: int) -> Problem:
  """A batch of dense products, of that many rows each."""
  return dataclasses.replace(
    problem,
    batch=problem.groups.count,
    a=dataclasses.replace(problem.a, batched=True),
    b=dataclasses.replace(problem.b, batched=True),
    **{problem.along: rows},
  )
