"""Which config for a problem: an analytic model of the dense Hopper kernel.

`choose` predicts the time of some dozens of configs and takes the least. A
unit of work is a tile of the result (over a part of K, if K is split); a block
works on one unit after the other. The time has these parts:

* **A slab of K** takes the longest of its multiplication (2048 16-bit FMAs a
  clock and SM), of what wgmma and TMA move through shared memory (128 bytes a
  clock), and of its way from L2, plus a constant for barriers.
* **A round** is as long as a unit: its slabs, and the part of its tail that
  the next unit's loads do not hide. All blocks take the same number of rounds,
  so a tile that leaves half of the SMs idle in the last round pays for it.
* **Device memory** must be read once and written once. How fast depends on
  how many blocks have how many bytes in flight.
* **Split K** adds a kernel that reads the partial sums back.
* **Padding** adds copies of operands that TMA can't read.

The first three overlap; the longest counts, blended where they are close.

Constants (`_FIT`) were fitted to kernel times of an H200, see
experiments/notes.md. Rates and sizes come from `hardware`, so other Hopper
GPUs are predicted with the H200's efficiency.
"""

from collections.abc import Iterator
import dataclasses
import functools

import jax.numpy as jnp

from pallas_gemm import hardware
from pallas_gemm.kernels import sm90_dense_plan as plan
from pallas_gemm.tuning.problem import Config, Problem


@dataclasses.dataclass(frozen=True)
class _Fit:
  """Constants that no datasheet has; cycles and microseconds at `clock`.

  Attributes:
    clock: cycles a microsecond under load.
    mma: multiplication, as a part of the time at peak rate.
    shared: shared memory, likewise.
    writes: part of TMA's writes that gets in the way of wgmma's reads.
    narrow: loads in pieces of 32 columns, as a multiple of those of 64.
    narrow_dram, narrow_mma: the same for loads from device memory, and for
      what wgmma makes of them.
    l2: bytes a cycle and SM from L2.
    barrier: cycles of a slab's barriers.
    tail: microseconds until the first results leave.
    store: bytes a microsecond and SM of results.
    piece: microseconds for each piece of a consumer's tile.
    activation, with_c, by_rows: the tail with an activation, with C, and
      stored row by row, as multiples.
    hidden: part of the tail that the next unit does not hide.
    latency: microseconds that a load takes.
    dram: part of the peak rate of device memory.
    blend: exponent of the sum of overlapping parts.
    launch: microseconds until the first block runs and after the last ends.
    reduce: microseconds of the kernel that sums partial products.
    reduce_rate: its bytes a microsecond.
    copy: microseconds of a padding copy; copy_rate: its bytes a microsecond.
  """

  clock: float = 1650.0
  mma: float = 0.9882
  shared: float = 1.233
  writes: float = 0.07727
  narrow: float = 2.212
  narrow_dram: float = 1.17
  narrow_mma: float = 1.06
  l2: float = 97.2
  barrier: float = 41.51
  tail: float = 0.1369
  store: float = 142000.0
  piece: float = 0.05576
  activation: float = 2.328
  with_c: float = 2.816
  by_rows: float = 6.665
  hidden: float = 1.497
  latency: float = 0.14
  dram: float = 0.9051
  blend: float = 7.623
  launch: float = 2.373
  reduce: float = 1.386
  reduce_rate: float = 2847000.0
  copy: float = 1.564
  copy_rate: float = 3107000.0


_FIT = _Fit()

# Tiles, consumers and the side that these share out.
_TILES = (
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
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST_STAGES = 12
# Part of the time that copies may take where XLA needs none.
_MOST_COPYING = 0.03
# Slabs that a part of K must have to be worth a unit of its own.
_FEWEST_SLABS = 4


def choose(problem: Problem) -> Config:
  """The legal config with the least predicted time.

  Args:
    problem: what is computed.

  Raises:
    NotImplementedError: no config is legal; the reason of the last refusal.

  Example:
    >>> from pallas_gemm.tuning import model
    >>> from pallas_gemm.tuning.problem import Problem
    >>> config = model.choose(Problem(
    ...   m=4096, n=4096, k=4096, dtype="bfloat16", out_dtype="bfloat16"))
    >>> config.block_m, config.block_n
    (128, 256)
  """
  reason = "no candidate"
  for config in candidates(problem):
    reason = plan.is_legal(config, problem)
    if reason is None:
      return config
  raise NotImplementedError(reason)


def candidates(problem: Problem) -> list[Config]:
  """Configs worth a try, the one with the least predicted time first.

  Not all need be legal.
  """
  gpu = hardware.current()
  timed = [(predict(c, problem, gpu), c) for c in _all(problem, gpu)]
  return [config for _, config in sorted(timed, key=lambda x: x[0])]


def _all(problem: Problem, gpu: hardware.Gpu) -> Iterator[Config]:
  p, sms = problem, gpu.sm_count
  slabs = _cdiv(p.k, 64)
  for config in _configs(
    p.gated, p.out_dtype, p.c_dtype, p.bias, p.save_preactivation
  ):
    if config.block_n % 32 and not p.transpose_b:
      continue  # wgmma reads B along N in pieces of 32 columns or more
    tall, wide = config.cluster_m > 1, config.cluster_n > 1
    # A tile far larger than the matrix, a cluster with nobody to share with.
    if config.block_m >= 2 * max(p.m, 64) or config.block_n >= 2 * max(p.n, 32):
      continue
    if (tall and p.m <= config.block_m) or (wide and p.n <= config.block_n):
      continue
    yield config
    tiles = _cdiv(p.m, config.block_m) * _cdiv(p.n, config.block_n) * p.batch
    if p.gated or p.save_preactivation or tall or wide or tiles > sms:
      continue
    for split in _SPLITS:
      if tiles * split > 2 * sms or slabs < split * _FEWEST_SLABS:
        break
      parts = _in_parts(config, split)
      if parts is not None:
        yield parts


@functools.cache
def _configs(gated, out_dtype, c_dtype, bias, save) -> tuple[Config, ...]:
  """Every tile and cluster with as many stages as find room."""
  found = []
  for block_m, block_n, consumers, split in _TILES:
    for cluster_m, cluster_n in _CLUSTERS:
      config = Config(
        block_m=block_m,
        block_n=block_n,
        consumers=consumers,
        split=split,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
      )
      config = _fitted(config, gated, out_dtype, c_dtype, bias, save)
      if config is not None:
        found.append(config)
  return tuple(found)


@functools.cache
def _in_parts(config: Config, split_k: int) -> Config | None:
  """The tile for partial sums in float32; they have no tail."""
  parts = _fitted(config, False, "float32", None, None, False)
  return parts and dataclasses.replace(parts, split_k=split_k)


@functools.cache
def _fitted(config, gated, out_dtype, c_dtype, bias, save) -> Config | None:
  """The config with the pieces of its tail and the stages that find room."""
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
  # are then written without waiting for each other. 7168 x 8192 x 512: +2 %,
  # bias and gelu at 4096 x 14336 x 4096: +2 %.
  pieces = len(plan.pieces(problem, config))
  for buffers, fewest in ((pieces, 3), (2, 3), (1, 3), (2, 2), (1, 2)):
    for stages in range(_MOST_STAGES, fewest - 1, -1):
      config = dataclasses.replace(
        config, stages=stages, epilogue_buffers=buffers
      )
      if plan.shared_bytes(config, problem) <= room:
        return config
  return None


def predict(
  config: Config, problem: Problem, gpu: hardware.Gpu | None = None
) -> float:
  """Predicted time of all kernels of a call, in seconds.

  Args:
    config: a config, legal or not.
    problem: what is computed.
    gpu: where; None for `hardware.current()`.
  """
  p, cfg, fit = problem, config, _FIT
  gpu = gpu or hardware.current()
  products = 2 if p.gated else 1
  bm, bn, bk = cfg.block_m, cfg.block_n * products, cfg.block_k
  shares = cfg.consumers if cfg.split == "n" else 1
  size = 4 if cfg.split_k > 1 or p.out_dtype == "float32" else 2

  # A slab, in cycles.
  rows = min(bm, _cdiv(p.m, 8) * 8)  # those that are loaded
  multiply = bm * bn * bk / 2048 * fit.mma
  reads = bm // 64 * (64 * bk * shares * products + bn * bk) * 2
  writes = (rows + bn) * bk * 2
  shared = (reads + fit.writes * writes) / 128 * fit.shared
  loads = (rows / cfg.cluster_n + bn / cfg.cluster_m) * bk * 2 / fit.l2
  narrow = not p.transpose_b and cfg.block_n // shares % 64
  if narrow:
    loads *= fit.narrow
    multiply *= fit.narrow_mma
  slab = max(multiply, shared, loads) + fit.barrier

  # All units.
  cluster = cfg.cluster_m * cfg.cluster_n
  units = _cdiv(p.m, cfg.block_m * cfg.cluster_m)
  units *= _cdiv(p.n, cfg.block_n * cfg.cluster_n) * cfg.split_k * p.batch
  rounds = _cdiv(units, gpu.sm_count // cluster)
  blocks = _cdiv(units, rounds) * cluster
  slabs = _cdiv(_cdiv(p.k, bk), cfg.split_k)
  tail = fit.tail + bm * cfg.block_n * size / fit.store
  tail += fit.piece * bm * cfg.block_n / (cfg.consumers * 64 * cfg.epilogue_n)
  if p.activation:
    tail *= fit.activation
  if p.c_dtype:
    tail *= fit.with_c
  whole = p.m % 64 == p.n % 64 == p.k % 64 == 0  # nothing to pad
  if not whole and plan.stores_rows(p, cfg):
    tail *= fit.by_rows
  between = fit.hidden * (rounds - 1)
  busy = rounds * slabs * slab / fit.clock + (1 + between) * tail

  # Device memory.
  stored = p.m * p.n * p.batch
  moved = p.m * p.k * (p.batch if p.batched_a else 1) * 2
  moved += p.n * p.k * products * (p.batch if p.batched_b else 1) * 2
  if cfg.split_k == 1:
    moved += stored * size * (1 + (p.c_dtype is not None))
  in_flight = cfg.stages * bn * bk * 2
  rate = min(
    gpu.dram_bytes_per_s / 1e6 * fit.dram, blocks * in_flight / fit.latency
  )
  memory = moved / rate * (fit.narrow_dram if narrow else 1)

  time = (busy**fit.blend + memory**fit.blend) ** (1 / fit.blend) + fit.launch
  if cfg.split_k > 1:
    time += fit.reduce + stored * cfg.split_k * 4 / fit.reduce_rate
  if not whole:
    time += _copies(cfg, p)
  return time * 1e-6


def _copies(config: Config, problem: Problem) -> float:
  """Microseconds of the copies into and out of padded matrices."""
  copied = plan.copied_bytes(config, problem)
  return len(copied) * _FIT.copy + sum(copied) / _FIT.copy_rate


def left_to_xla(config: Config, problem: Problem) -> str | None:
  """None, or why XLA's own kernel is expected to be faster than this config.

  XLA's library reads matrices whose rows start at multiples of 16 bytes as
  they are. Where this kernel must copy such a matrix into a padded one first,
  and that is more than a few percent of its time, it does not win that back
  (3000^3: 0.90x of jnp.dot). Other matrices XLA does not read fast either.
  """
  p = problem
  widths = (p.m if p.transpose_a else p.k, p.k if p.transpose_b else p.n, p.n)
  if any(width % 8 for width in widths):
    return None
  copies = _copies(config, problem)
  if copies <= _MOST_COPYING * predict(config, problem) * 1e6:
    return None
  return (
    f"operands would be padded in {copies:.1f} us, where XLA's kernel reads"
    " them as they are"
  )


def _cdiv(a: int, b: int) -> int:
  return -(-a // b)
