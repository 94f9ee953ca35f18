"""Which plans the Hopper kernels can run; why they can't run others."""

from typing import Any

from jax import lax

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout, tiling
from pallas_gemm.kernels.sm90.layout import ATOM_BYTES, ATOM_ROWS, cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Epilogue, Problem

DTYPES = ("bfloat16", "float16")
# By wgmma in any mixture.
FLOATS8 = ("float8_e4m3fn", "float8_e5m2")
# A thread has at most 255 registers: 160 accumulators leave room for all else,
# 192 spill.
_ACCUMULATORS = {1: 160, 2: 160, 3: 96}
# The same where there are totals of as many; and where factors, too.
_PROMOTED = {1: 96, 2: 96, 3: 64}
_BY_LINES = {1: 80, 2: 80, 3: 48}
# Where small products have accumulators of their own.
_OF_PLANES = {1: 64, 2: 64, 3: 32}
# Coordinates and numbers of work tiles have 32 bits and a sign, and count on a
# little past the end.
_MOST_COUNTED = 2**31 - 2**16
# Bytes of a row of results that are stored by rows.
_MOST_ROW_BYTES = 2**31 - 1
# Columns of A and B, in groups along K: the grid of `tables` has a block for
# each 256 of a plane, along y.
_MOST_TAILS = 2**23
# Rows, or columns, of a copy by TMA.
_MOST_COPIED = 256

_PRESETS = lax.DotAlgorithmPreset
_BELOW_HIGHEST = {None, lax.Precision.DEFAULT, lax.Precision.HIGH}
_OF_ALL_PAIRS = _PRESETS.BF16_BF16_F32_X9
_ARITHMETIC: dict[str, tuple[Any, ...]] = {
  "bfloat16": (_PRESETS.BF16_BF16_F32,),
  "float16": (_PRESETS.F16_F16_F32,),
  **dict.fromkeys(
    FLOATS8,
    (_PRESETS.ANY_F8_ANY_F8_F32, _PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM),
  ),
  "int8": (),
}


def reason(plan: Plan) -> str | None:
  """None, or why the plan can't be run."""
  p = plan.problem
  return (  # in this order: a rule may rely on those before it
    wrong_gpu(plan.gpu)
    or _swap_reason(plan)
    or refuses(p.a.dtype, p.b.dtype, p.out_dtype)
    or _eight_bits_reason(plan)
    or _tile_reason(plan)
    or _cluster_k_reason(plan)
    or _subtiles_reason(plan)
    or _cluster_reason(plan)
    or _size_reason(plan)
    or _groups_reason(plan)
    or _split_reason(plan)
    or _pingpong_reason(plan)
    or plan.loader.why_not
    or _memory_reason(plan)
  )


def refuses(a: str, b: str, out: str, precision: Any = None) -> str | None:
  """None, or why no product of these dtypes is run, whatever its sizes.

  Args:
    a, b: names of the operands' dtypes.
    out: of the result's.
    precision: as of `lax.dot_general`; all of `lax.Precision` is the same
      arithmetic on operands of 16 bits or less.
  """
  are_floats8 = a in FLOATS8 and b in FLOATS8
  if a != b and not are_floats8:
    return f"operands must have one dtype, got {a} and {b}"
  if a not in (*DTYPES, *FLOATS8, "int8"):
    # wgmma would take uint8 for int8.
    return (
      f"operands must be {' or '.join(DTYPES)}, or {', '.join(FLOATS8)} or"
      f" int8, got {a}"
    )
  if out not in (*DTYPES, "float32") and (a, out) != ("int8", "int32"):
    return f"out_dtype must be 16-bit float or float32, got {out}"
  if isinstance(precision, _PRESETS | lax.DotAlgorithm):
    if precision not in (*_ARITHMETIC[a], _PRESETS.DEFAULT):
      adds = "int32" if a == "int8" else "float32"
      return f"multiplies {a} and adds in {adds}, got precision {precision}"
  return None


def planes_of(precision: Any, grouped: bool = False) -> int | None:
  """The planes of bfloat16 that a precision multiplies float32 in, or None.

  Groups have two at all of `lax.Precision` below HIGHEST: they keep 16 bits,
  TF32 11, and XLA has no product of groups that is as fast.
  """
  pair = precision if isinstance(precision, tuple) else (precision,)
  if {*pair} == {lax.Precision.HIGHEST}:
    return 3
  if grouped and {*pair} <= _BELOW_HIGHEST:
    return 2
  presets = _PRESETS.BF16_BF16_F32_X3, _PRESETS.BF16_BF16_F32_X6, _OF_ALL_PAIRS
  return dict(zip(presets, (2, 3, 3))).get(precision)


def multiplies_all_pairs(precision: Any) -> bool:
  """Whether a precision asks for the products of all planes."""
  return precision == _OF_ALL_PAIRS


def precision_of(problem: Problem) -> Any:
  """A precision with which the ops compute the problem."""
  if problem.fast_accumulation:
    return _PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM
  if problem.all_pairs:
    return _OF_ALL_PAIRS
  of_planes = {2: _PRESETS.BF16_BF16_F32_X3, 3: lax.Precision.HIGHEST}
  return of_planes.get(problem.planes)


def accumulates_fast(precision: Any) -> bool:
  """Whether a precision asks for 8-bit sums without promotion."""
  return precision == _PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM


def wrong_gpu(gpu: hardware.Gpu | None = None) -> str | None:
  """None, or why nothing is run on a GPU; on that of a trace made now."""
  return hardware.why_not("the kernel", ("wgmma", "tma"), gpu)


def may_not_swap(problem: Problem) -> str | None:
  """None, or why no config that swaps operands can run the problem."""
  p = problem
  if p.along or p.epilogue.gated:
    return "swap_ab takes no groups and no gated product"
  if p.epilogue.c_dtype == "float32":
    return "swap_ab has C of 16 bits, got float32"
  if p.out_dtype == "float32" and p.epilogue.save:
    return "swap_ab has no pre-activation beside results in float32"
  return None


def _swap_reason(plan: Plan) -> str | None:
  if not plan.config.swap_ab:
    return None
  if found := may_not_swap(plan.tiling.given):
    return found
  if plan.config.split_k != 1 or plan.config.blocks > 1:
    return "swap_ab has no split_k and no cluster"
  return None


def _eight_bits_reason(plan: Plan) -> str | None:
  p, cfg = plan.problem, plan.config
  if p.a.bits != 8:
    scaled = p.a.scale or p.b.scale
    return f"scales are of 8-bit operands, got {p.a.dtype}" if scaled else None
  if p.has_whole_slabs and not (p.a.k_last and p.b.k_last):
    return f"groups along K of {p.a.dtype} are stored along K"
  if cfg.block_k != 128:
    return f"block_k must be 128 for 8-bit operands, got {cfg.block_k}"
  if p.a.dtype == "int8" and cfg.split_k * cfg.cluster_k > 1:
    return "int8 has no split_k and no cluster_k, which add in float32"
  if p.has_blocks and (found := _blocks_reason(plan)):
    return found
  if p.out_dtype != "int32":
    return None
  if p.a.scale or p.b.scale or p.epilogue != Epilogue():
    return "results in int32 are sums of products alone: no scale, no epilogue"
  return None


def _blocks_reason(plan: Plan) -> str | None:
  p, (_, columns) = plan.problem, plan.tiling.warpgroup_tile
  if plan.config.swap_ab or plan.config.split_k > 1:
    return "scales of blocks take no swap_ab and no split_k"
  if p.a.scale != "block" or p.b.scale not in ("block", "line"):
    return (
      "both operands have scales of blocks or none, lines are B's, got"
      f" {plan.tiling.given.a.scale} and {plan.tiling.given.b.scale}"
    )
  # So that no consumer's columns are of two blocks.
  cuts_blocks = columns < 1 or 128 % columns or plan.tiling.tiles_overlap
  if cuts_blocks and not p.has_lines:
    return f"a consumer's columns must divide 128 for blocks, got {columns}"
  return None


def _tile_reason(plan: Plan) -> str | None:
  cfg = plan.config
  depths = (64, 128) if plan.problem.planes == 1 else (32, 64)
  if cfg.block_k not in depths:
    of_planes = " for operands in planes" if plan.problem.planes > 1 else ""
    one, other = depths
    return f"block_k must be {one} or {other}{of_planes}, got {cfg.block_k}"
  splits = ("m", "n", "pingpong")
  if cfg.consumers not in _ACCUMULATORS or cfg.split not in splits:
    return (
      "consumers must be 1, 2 or 3 and split m, n or pingpong, got"
      f" {cfg.consumers} and {cfg.split!r}"
    )
  if max(cfg.block_m, cfg.block_n) > _MOST_COPIED:
    return (
      f"block_m and block_n must be at most {_MOST_COPIED}, which is what one"
      f" copy by TMA takes, got {cfg.block_m}x{cfg.block_n}"
    )
  divided = {"m": cfg.block_m, "n": cfg.block_n}.get(cfg.split, 0)
  rows, columns = plan.tiling.warpgroup_tile
  step = 8 if plan.problem.b.k_last else 32
  if plan.problem.sum_dtype == "int32" and columns > 32:
    step = 16  # as wgmma has integers; ptxas refuses others
  if min(rows, columns) < 1 or divided % cfg.consumers:
    return f"consumers must divide the tile, got {cfg}"
  if rows % tiling.WGMMA_ROWS or columns % step:
    return (
      f"a consumer's share must be multiples of {tiling.WGMMA_ROWS} rows and"
      f" {step} columns, got {rows}x{columns}"
    )
  registers = _PROMOTED if plan.problem.is_promoted else _ACCUMULATORS
  registers = _BY_LINES if plan.problem.has_lines else registers
  registers = _OF_PLANES if plan.problem.has_small_apart else registers
  most = tiling.THREADS * registers[cfg.consumers]
  accumulators = rows * columns * plan.problem.products
  if columns > tiling.WGMMA_COLUMNS or accumulators > most:
    return (
      f"a consumer's share must have at most {tiling.WGMMA_COLUMNS} columns and"
      f" {most} accumulators, got {rows}x{columns}"
      + (" twice" if plan.problem.products == 2 else "")
    )
  return None


def _subtiles_reason(plan: Plan) -> str | None:
  width, (_, columns) = plan.config.epilogue_n, plan.tiling.stored_tile
  c_dtype = plan.problem.epilogue.c_dtype
  dtypes = filter(None, (plan.matrices.stored_dtype, c_dtype))
  is_one_atom = max(layout.bytes_of(width, x) for x in dtypes) <= ATOM_BYTES
  if width < 16 or width > columns or (columns % width and not is_one_atom):
    # Subtiles that overlap start anywhere, see `mosaic.CompilerParams`.
    return (
      f"epilogue_n must divide {columns}, or be less and {ATOM_BYTES}"
      f" bytes of results and of C or less, got {width}"
    )
  if width not in (16, 32) and width % 64:
    return f"epilogue_n must be 16, 32 or a multiple of 64, got {width}"
  return None


def _cluster_reason(plan: Plan) -> str | None:
  p, cfg = plan.problem, plan.config
  cluster = (cfg.cluster_m, cfg.cluster_n)
  if min(cluster) != 1 or max(cluster) not in (1, 2, 4):
    # 2 x 2 is no faster than 4 x 1 or 1 x 4: 1856 x 632 x 7544 47.7 us, 39.0 in
    # 4 x 1, 128 x 128 tiles (H100).
    return (
      "a cluster must have 1, 2 or 4 blocks along one side, got"
      f" {cluster[0]}x{cluster[1]}"
    )
  if cfg.blocks > plan.gpu.sm_count:
    return f"the GPU has too few SMs for a cluster of {cfg.blocks}"
  # Each block loads a part of the rows of a tile as it is stored.
  rows_a = cfg.block_m if p.a.k_last else cfg.block_k
  rows_b = cfg.block_n if p.b.k_last else cfg.block_k
  for name, rows in (("cluster_n", rows_a), ("cluster_m", rows_b)):
    if rows % (getattr(cfg, name) * ATOM_ROWS):
      return f"{name} does not divide a stored tile of {rows} rows"
  return None


def _groups_reason(plan: Plan) -> str | None:
  p, cfg = plan.problem, plan.config
  if p.along and cfg.split_k != 1:
    return f"a grouped product has no split_k, got {cfg.split_k}"
  if p.along == "k" and plan.tiling.subtiles_overlap:
    # Zeros of groups without rows are stored in subtiles side by side.
    return (
      f"epilogue_n must divide {plan.tiling.warpgroup_tile[1]} for groups"
      f" along K, got {cfg.epilogue_n}"
    )
  return _groups_of_rows_reason(plan) if p.along == "m" else None


def _groups_of_rows_reason(plan: Plan) -> str | None:
  p, cfg = plan.problem, plan.config
  if cfg.cluster_m != 1:
    # The next row tile may be another group's, and so need another B.
    return f"cluster_m must be 1 for groups of rows, got {cfg.cluster_m}"
  # Groups start at any row. TMA reaches that in copies that are one swizzle
  # atom wide alone (see `mosaic.CompilerParams`).
  atom = layout.elements_in(ATOM_BYTES, p.a.dtype)
  atom = atom if p.planes == 1 else min(atom, cfg.block_k)
  if cfg.block_k != atom:
    return f"block_k must be {atom} for groups of rows, got {cfg.block_k}"
  if plan.tiling.operand_columns != atom:
    return (
      f"a consumer's columns must be a multiple of {atom} for groups of rows"
      f" where B is stored [K, N], got {plan.tiling.warpgroup_tile[1]}"
    )
  width = layout.elements_in(ATOM_BYTES, p.out_dtype)
  if cfg.epilogue_n != width:
    return (
      f"epilogue_n must be {width} for groups of rows of {p.out_dtype}, got"
      f" {cfg.epilogue_n}"
    )
  return None


def _split_reason(plan: Plan) -> str | None:
  cfg = plan.config
  slabs = cdiv(plan.problem.k, cfg.block_k)
  if not 1 <= cfg.split_k <= slabs:
    return f"split_k must be in 1..{slabs}, got {cfg.split_k}"
  return None


def _cluster_k_reason(plan: Plan) -> str | None:
  cfg, parts = plan.config, plan.config.cluster_k
  if parts == 1:
    return None
  if parts not in (2, 4, 8):
    return f"cluster_k must be 1, 2, 4 or 8, got {parts}"
  shares = cfg.cluster_m * cfg.cluster_n > 1
  if shares or cfg.split_k > 1 or plan.tiling.pingpong > 1:
    return "cluster_k has no other cluster, no other parts of K and no pingpong"
  if plan.problem.along:
    return "cluster_k has no groups"
  slabs = cdiv(plan.problem.k, cfg.block_k)
  if parts > slabs:
    return f"cluster_k must be in 1..{slabs}, got {parts}"
  if plan.tiling.warpgroup_tile[1] % (8 * parts):
    return (
      f"cluster_k must divide a consumer's columns in eights, got {parts} for"
      f" {plan.tiling.warpgroup_tile[1]}"
    )
  return None


def _pingpong_reason(plan: Plan) -> str | None:
  cfg = plan.config
  if cfg.split != "pingpong":
    return None
  if plan.problem.along == "k":  # which take work tiles up from both ends
    return "pingpong takes no groups along K"
  if cfg.split_k > 1:
    return f"pingpong takes no split_k, got {cfg.split_k}"
  if cfg.consumers < 2 or cfg.stages % cfg.consumers:
    return (
      "with pingpong stages must be a multiple of the consumers, at least two,"
      f" got {cfg.stages} and {cfg.consumers}"
    )
  # Each consumer has slots of its own. Where they do not hold a work tile, one
  # is loaded no faster than it is multiplied, and the other consumer waits:
  # 8192 x 4096 x 1024 with C 103 -> 130 us (H200).
  fewest = cfg.consumers * plan.tiling.slabs
  if cfg.stages < fewest:
    return f"with pingpong stages must be {fewest} or more, got {cfg.stages}"
  return None


def _size_reason(plan: Plan) -> str | None:
  p, (rows, columns) = plan.problem, plan.tiling.grid
  groups = p.groups.count if p.groups else 1
  tiles = (rows + groups) * columns * plan.config.split_k
  tiles *= groups if p.along == "k" else p.batch
  row_bytes = layout.bytes_of(p.n, p.out_dtype) if plan.tiling.by_rows else 0
  if row_bytes > _MOST_ROW_BYTES:
    return f"rows of results must be below 2^31 bytes, got {row_bytes}"
  if p.along == "k" and p.m + p.n > _MOST_TAILS:
    sizes = f"{p.m} and {p.n}"
    return f"groups along K take at most {_MOST_TAILS} columns, got {sizes}"
  # That a strip would have if it were full.
  strip = plan.config.raster * max(rows + groups, columns)
  if max(p.m, p.n, p.k, tiles, strip) <= _MOST_COUNTED:
    return None
  return (
    f"sizes and tiles must be at most {_MOST_COUNTED}, got {p.m} x {p.n} x"
    f" {p.k} in {tiles} tiles, {strip} a strip"
  )


def _memory_reason(plan: Plan) -> str | None:
  cfg = plan.config
  if cfg.epilogue_buffers < 1:
    return f"epilogue_buffers must be at least 1, got {cfg.epilogue_buffers}"
  fewest = 2 if plan.tiling.refills else 1
  if cfg.stages < fewest:
    return f"stages must be at least {fewest}, got {cfg.stages}"
  if cfg.raster < 1 or cfg.raster_dim not in ("m", "n"):
    return f"raster must be positive, raster_dim m or n, got {cfg}"
  need, room = plan.memory.shared_bytes, plan.gpu.shared_bytes_per_block
  if need > room:
    return f"tiles need {need} bytes of shared memory, a block has {room}"
  return None
