"""Every tile as a config: the subtiles of its epilogue, stages that find room.

What finds room depends on what is computed, not on its sizes, so that there are
few of these configs and they are cached.
"""

import dataclasses
import functools
import itertools

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import ATOM_BYTES
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import (
  Epilogue,
  Groups,
  Operand,
  Problem,
  Scale,
  bits,
)

# Tiles, consumers and the side that these divide.
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
# With scales of lines, too: no consumer has registers for 128 columns.
TILES_BY_LINES = ((192, 96, 3, "m"),)
# With the operands swapped: columns of the result, consumers, the most rows,
# block_k. wgmma takes any multiple of 8 rows if A is stored [M, K].
SWAPPED = (
  (64, 1, 256, 64),
  (64, 1, 32, 128),
  (128, 2, 256, 64),
  (192, 3, 192, 64),
  (256, 2, 160, 64),
)
# Tiles of consumers that ping-pong.
PINGPONG = {
  "bfloat16": ((64, 64), (64, 128), (128, 128)),
  "float16": ((64, 64), (64, 128), (128, 128)),
  # 8192 x 8192 x 64 with 128 x 128 75.7 us, 64 x 256 69.8 (H200).
  "float32": ((64, 64), (64, 128), (64, 256)),
}
ROW_STEP = 16
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4))
_MOST_STAGES = {32: 12, 64: 12, 128: 9}


@dataclasses.dataclass(frozen=True, eq=False)
class Resources:
  """What decides what finds room; there is one for each that differs.

  Attributes:
    gpu: where.
    problem: one that takes as much room, of sizes that say nothing.
  """

  gpu: hardware.Gpu
  problem: Problem


_resources = functools.cache(Resources)


def resources_of(problem: Problem, gpu: hardware.Gpu) -> Resources:
  """Whichever activation, that there is one is what counts."""
  p, epilogue = problem, problem.epilogue
  if epilogue.activation:
    epilogue = dataclasses.replace(epilogue, activation="any")
  # Scales that come with slabs take room, others do not.
  scales = (p.a.scale, p.b.scale) if p.has_blocks else (None, None)
  nominal = Problem(
    m=8192,
    n=8192,
    k=8192,
    a=_nominal(p.a, True, scales[0]),
    b=_nominal(p.b, False, scales[1]),
    out_dtype=p.out_dtype,
    groups=p.groups and Groups(along=p.groups.along, count=1),
    epilogue=epilogue,
    fast_accumulation=p.fast_accumulation,
  )
  return _resources(gpu, nominal)


def _nominal(operand: Operand, k_last: bool, scale: Scale | None) -> Operand:
  planes = operand.planes
  return Operand(dtype=operand.dtype, k_last=k_last, scale=scale, planes=planes)


@functools.cache
def _of_sums(resources: Resources) -> Resources:
  """Of dense products in float32, with nothing after them."""
  epilogue = Epilogue(gated=resources.problem.epilogue.gated)
  sums = dataclasses.replace(
    resources.problem, out_dtype="float32", groups=None, epilogue=epilogue
  )
  return _resources(resources.gpu, sums)


@functools.cache
def tiles(resources: Resources) -> tuple[Config, ...]:
  """Every tile and cluster with as many stages as find room."""
  found, more = [], TILES_BY_LINES * resources.problem.has_lines
  for block_m, block_n, consumers, split in TILES + more:
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
      found.append(_fitted(config, resources))
  return tuple(filter(None, found))


@functools.cache
def swapped(resources: Resources) -> tuple[Config, ...]:
  """The same with operands swapped, for any number of rows."""
  found, p = [], resources.problem
  is_wide = p.out_dtype == "float32" and p.epilogue.c_dtype is not None
  for block_m, consumers, most, block_k in SWAPPED:
    for block_n in range(ROW_STEP, most + 1, ROW_STEP):
      if is_wide and block_m * block_n > 13312 * consumers:
        continue  # what is worked out for C and results would spill
      config = Config(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        consumers=consumers,
        # Few tiles along M come one after the other: what they share of B is
        # then read once. 200 x 4096 x 14336 takes 35.0 us in strips of 4 tiles
        # along N, 45.2 in strips of 8 (H200).
        raster=4,
        swap_ab=True,
      )
      found.append(_fitted(config, resources))
  return tuple(filter(None, found))


@functools.cache
def in_parts(
  config: Config, split_k: int, resources: Resources
) -> Config | None:
  """The tile for partial sums in float32; they have no epilogue.

  They are stored once a block, so that a deeper ring is worth more than room
  for all of their subtiles: 256 x 3072 x 24576 57.6 -> 52.9 us, 160 x 2048 x
  7168 13.9 -> 13.1 (H200).
  """
  config = dataclasses.replace(config, split_k=2)  # however many
  options = (2, 3), (1, 3), (2, 2), (1, 2)
  parts = _fitted(config, _of_sums(resources), options)
  return parts and dataclasses.replace(parts, split_k=split_k)


@functools.cache
def in_cluster(
  config: Config, parts: int, resources: Resources
) -> Config | None:
  """The tile for blocks of a cluster that have a part of K each."""
  shares = config.consumers if config.split == "n" else 1
  if config.block_n % (16 * shares * parts):  # a subtile has 16 columns or more
    return None
  return _fitted(dataclasses.replace(config, cluster_k=parts), resources)


@functools.cache
def pingpong(
  block_m: int, block_n: int, slabs: int, resources: Resources
) -> Config | None:
  """The tile of two consumers, with as many whole tiles in the ring as fit."""
  config = Config(block_m=block_m, block_n=block_n, split="pingpong")
  if 2 * slabs > _MOST_STAGES[config.block_k]:
    return None
  buffers = 1 if block_m * block_n == 64 * 64 else 2
  options = (buffers, 2 * slabs), (1, 2 * slabs)
  found = _fitted(config, resources, options)
  return found and dataclasses.replace(found, stages=found.stages // 2 * 2)


@functools.cache
def with_c_buffers(config: Config, resources: Resources) -> Config | None:
  """The tile with C in buffers of its own."""
  return _fitted(config, resources, ((1, 3),))


@functools.cache
def _fitted(
  config: Config,
  resources: Resources,
  options: tuple[tuple[int, int], ...] | None = None,
) -> Config | None:
  """The config with the subtiles of its epilogue and the stages that find room.

  Args:
    options: pairs of epilogue_buffers and the fewest stages with these, best
      first; None for what suits the tile.
  """
  problem, gpu = resources.problem, resources.gpu
  most = _MOST_STAGES[config.block_k]
  if problem.a.bits == 8 or problem.planes > 1:
    # Of twice as many bytes, or planes, there are no slabs.
    if config.block_k == 128:
      return None
    config = dataclasses.replace(config, block_k=slab_of(problem))
  config = _with_subtiles(config, problem)
  if options is None:
    config, options = _with_options(config, resources)
  # Beside two slabs in three planes C has no room in wider subtiles.
  widths = [config.epilogue_n, 16][: 1 + (problem.planes > 1)]
  for width, (buffers, fewest) in itertools.product(widths, options):
    config = dataclasses.replace(
      config, epilogue_n=width, stages=1, epilogue_buffers=buffers
    )
    memory = Plan.new(problem, config, gpu).memory
    left = gpu.shared_bytes_per_block - memory.shared_bytes
    count = min(most, 1 + left // memory.slab_bytes)
    if count >= fewest:
      return dataclasses.replace(config, stages=count)
  return None


def slab_of(problem: Problem) -> int:
  """What of K most tiles have in a slab, 128 bytes of each plane.

  In three planes 4096^3 takes 1089 us in slabs of 64 with two stages, 1160 in
  slabs of 32 with four (H100).
  """
  return 128 if problem.a.bits == 8 else 64


def pairs_stay_together(problem: Problem, config: Config) -> bool:
  """Whether thread blocks gain by pairs that share rows of A.

  With scales of blocks: of three consumers 8192^3 870 -> 788 us, 8192 x 28672
  x 4096 1537 -> 1428, 16 groups of 2048, 4096 x 4096 908 -> 823; of two 8
  groups of 1024, 4096 x 14336 871 -> 794, but dense ones lose 2 % (H100).
  """
  is_pair = (config.cluster_m, config.cluster_n) == (1, 2)
  by_blocks = problem.has_blocks and not problem.has_lines
  gains = config.consumers == 3 or (problem.along and config.block_m > 64)
  return bool(is_pair and by_blocks and gains)


def _with_subtiles(config: Config, problem: Problem) -> Config:
  columns = config.block_n // config.cluster_k
  if config.split == "n":
    columns //= config.consumers
  # One swizzle atom: its copies take matrices of any height (see `mosaic`).
  atom = layout.elements_in(ATOM_BYTES, problem.out_dtype)
  width = next((w for w in (atom, 32) if columns % w == 0), 16)
  if bits(problem.out_dtype) == 16 and width < 32 < columns:
    # 16 columns are stored twice, and it is still faster: with 128 x 240, 208
    # and 144 tiles and K = 512 15.8 -> 14.1 us, 13.9 -> 12.6, 10.0 -> 9.7. In
    # float32 and 144 columns 11.2 -> 11.6 (H200).
    width = 32
  return dataclasses.replace(config, epilogue_n=width)


def _with_options(
  config: Config, resources: Resources
) -> tuple[Config, tuple[tuple[int, int], ...]]:
  """The config, maybe with other subtiles, and the options that suit it."""
  problem, gpu = resources.problem, resources.gpu
  epilogue, plan = problem.epilogue, Plan.new(problem, config, gpu)
  is_wide = problem.out_dtype == "float32" or epilogue.save
  size = config.block_m * config.block_n // config.consumers
  is_large = (
    epilogue.gated or size > 2**13 or (is_wide and config.consumers > 1)
  )
  if is_large and not epilogue.c_dtype and plan.memory.deferred:
    # Subtiles that are stored one at a time, during slabs of the next tile,
    # need no room: a deeper ring is worth more (4096^3: 171 -> 169 us), of one
    # tile a block too (512 x 8192 x 8192: 89.9 -> 89.3 us, H200).
    options = (1, 4), (1, 3), (1, 2)
    suits = is_wide or not epilogue.activation
    if problem.groups is None and suits and config.epilogue_n >= 32:
      # Half as wide they hold up a slab for less; 7168 x 8192 x 512: 81.9 ->
      # 79.5 us. With an activation it is slower: 606 -> 613 us, unless what it
      # is applied to is stored too: 8192 x 4096 x 1024 118 -> 116 (H200).
      config = dataclasses.replace(config, epilogue_n=32)
      memory = Plan.new(problem, config, gpu).memory
      if not (is_wide and memory.has_room_to_defer):
        options = (2, 4), *options
    return config, options
  # Room for all subtiles of a tile, where that leaves a deep enough ring: they
  # are then written without waiting for each other, and C may come in place of
  # them. With C, 4096 x 14336 x 4096: 612 -> 603 us on an H200.
  subtiles = len(plan.tiling.subtiles)
  options = (subtiles, 3), (2, 3), (1, 3), (2, 2), (1, 2)
  if problem.is_promoted and config.consumers == 3:
    # Of 8 bits four slabs were timed: in 8 groups of 1,024 rows, 4096 x 14336,
    # by blocks 849 us, 906 in 128 x 128 tiles with five (H100).
    options = (2, 4), (1, 4), *options
  if epilogue.activation and config.consumers == subtiles == 3:
    # An activation takes longer than a store: subtiles leave one at a time, not
    # all together. With 192 x 192 tiles 8192 x 4096 x 64 with bias and gelu
    # 37.8 -> 32.7 us, 12608 x 3072 x 768 102.1 -> 98.0 (H200).
    options = options[1:]
  return config, options
