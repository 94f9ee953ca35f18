"""Tier A: numbers of the grouped Hopper kernel, in Pallas' GPU interpreter.

Groups end inside tiles and inside slabs, some are empty, some rows belong to
none. Shared memory that nothing was loaded to holds NaN in the interpreter, so
what leaks from past an edge shows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.sm90 import groups as grouped
from pallas_gemm.kernels.sm90 import legal, tables
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from tests.support import oldest, problems, ragged_kernels

SMALL = Config(block_m=64, block_n=64, stages=2, consumers=1)
TWO = Config(block_m=128, block_n=64, stages=2)
COLUMNS = Config(block_m=64, block_n=128, stages=3, split="n")
PAIRS = Config(
  block_m=64, stages=2, split="n", epilogue_n=128, epilogue_buffers=1
)
WIDER = Config(block_m=64, block_n=128, stages=2, consumers=1)
BY_TWO = Config(block_m=128, block_n=128, stages=3, epilogue_buffers=1)
THREE = Config(block_m=192, block_n=64, stages=2, consumers=3)
WIDE = Config(block_m=64, block_n=64, stages=2, consumers=1, epilogue_n=32)


@dataclasses.dataclass(frozen=True)
class Case:
  """One grouped product with one config."""

  problem: Problem
  offsets: tuple[int, ...]
  config: Config
  activation: ragged_kernels.Activation = None


def case(name, ragged, shape, offsets, config, activation=None, **problem):
  """A parameter of the test; of groups along K, `shape` is (M, N, rows)."""
  m, n, k = shape
  dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  found = Problem.flat(
    m=m,
    n=n,
    k=k,
    ragged=ragged,
    groups=len(offsets) - 1,
    transpose_a=ragged == "k",
    activation=activation and activation.__name__,
    **dtypes | problem,
  )
  return pytest.param(Case(found, offsets, config, activation), id=name)


FP16 = {"dtype": "float16", "out_dtype": "float16"}
CASES = (
  # Tiles that end with their group, groups smaller than a tile, none at all.
  case("rows", "m", (200, 70, 66), (0, 3, 3, 90, 190), SMALL),
  case("rows_before", "m", (150, 72, 70), (7, 70, 70, 150), SMALL, **FP16),
  case("one_group", "m", (130, 64, 64), (0, 130), TWO),
  case("no_rows", "m", (70, 64, 64), (70, 70, 70), SMALL),
  case("one_row_each", "m", (9, 64, 8), tuple(range(10)), SMALL),
  case(
    "rows_transposed",
    "m",
    (140, 136, 130),
    (0, 64, 65, 129, 140),
    COLUMNS,
    transpose_b=True,
  ),
  # Slabs in pairs, the last one alone; fewer of rows that are in no group.
  case(
    "rows_in_pairs",
    "m",
    (150, 128, 448),
    (5, 64, 65, 129, 140),
    COLUMNS,
    transpose_b=True,
  ),
  case(
    "rows_in_clusters",
    "m",
    (100, 130, 64),
    (0, 33, 90),
    dataclasses.replace(SMALL, cluster_n=2),
  ),
  # A second consumer that has some rows, all or none.
  case("two_consumers", "m", (220, 64, 70), (0, 64, 164, 210), TWO),
  case("float32", "m", (80, 72, 64), (0, 5, 77), WIDE, out_dtype="float32"),
  case(
    "bias_and_gelu",
    "m",
    (90, 72, 64),
    (2, 50, 85),
    SMALL,
    jax.nn.gelu,
    bias="n",
  ),
  case(
    "saved",
    "m",
    (70, 72, 64),
    (0, 20, 66),
    SMALL,
    jax.nn.silu,
    bias="n",
    save_preactivation=True,
  ),
  case("gated", "m", (90, 64, 70), (0, 40, 88), SMALL, jax.nn.silu, gated=True),
  case(
    "gated_saved",
    "m",
    (75, 64, 64),
    (3, 70),
    SMALL,
    jax.nn.gelu,
    gated=True,
    save_preactivation=True,
    transpose_b=True,
  ),
  # Weights that are no whole number of atoms: TMA takes the begun ones, threads
  # load rows that it can't address, one, two or four elements at a time.
  case("columns_8", "m", (150, 136, 131), (0, 3, 90, 140), WIDER),
  case("columns_1", "m", (150, 135, 131), (0, 3, 3, 90, 140), SMALL),
  case("columns_2", "m", (90, 134, 128), (0, 64, 88), WIDER, **FP16),
  case("columns_4", "m", (200, 132, 130), (0, 130, 200), THREE),
  case("k_1", "m", (90, 128, 135), (0, 40, 88), TWO, transpose_b=True),
  case(
    "gated_columns_1",
    "m",
    (90, 131, 70),
    (0, 40, 88),
    WIDER,
    jax.nn.silu,
    gated=True,
  ),
  # Of two B's with so many columns a chunk has more than it has elsewhere.
  case(
    "gated_columns_1_of_256",
    "m",
    (70, 259, 130),
    (0, 9, 50, 70),
    dataclasses.replace(PAIRS, epilogue_n=64),
    jax.nn.silu,
    gated=True,
  ),
  # Results that are stored by rows: of groups, of no group, of groups along K
  # without rows.
  case("by_rows", "m", (150, 141, 131), (2, 3, 3, 90, 140), WIDER),
  case("by_rows_of_two", "m", (201, 271, 64), (0, 130, 195), BY_TWO),
  case("slabs_by_rows", "k", (70, 141, 200), (0, 3, 3, 90, 190), WIDER),
  # Slabs: whole ones, none, a last one that blocks of 8 rows do not make up.
  case("slabs", "k", (70, 72, 200), (0, 3, 3, 90, 190), SMALL),
  case("slabs_of_70_rows", "k", (64, 64, 80), (1, 71, 80), SMALL, **FP16),
  case("slabs_from_5", "k", (130, 66, 203), (5, 14, 14, 90, 190, 203), TWO),
  case("no_slabs", "k", (64, 64, 5), (2, 2, 2), SMALL),
  case("slabs_wide", "k", (136, 320, 90), (0, 3, 3, 80, 90), PAIRS),
  # One group that has much more than its share: blocks go both ways.
  case(
    "slabs_uneven", "k", (64, 64, 70), (0, 1, 2, 3, 3, 64, 65, 70, 70), SMALL
  ),
  # Groups of zeros that take longer than the products, and less long.
  case("most_empty", "k", (70, 72, 30), (0, 0, 0, 30, 30, 30), TWO),
  case("one_empty", "k", (70, 72, 400), (0, 0, 400), SMALL, **FP16),
  case("few_rows", "k", (40, 64, 5), (0, 1, 4), SMALL, out_dtype="float32"),
  case(
    "slabs_of_128",
    "k",
    (64, 130, 300),
    (0, 9, 290),
    dataclasses.replace(SMALL, block_k=128, cluster_n=2),
  ),
  case(
    "slabs_in_clusters",
    "k",
    (130, 64, 140),
    (0, 70, 140),
    dataclasses.replace(SMALL, cluster_m=2),
  ),
)


@pytest.fixture(autouse=True)
def two_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  problems.assume_sms(monkeypatch, 2)


@pytest.mark.parametrize("found", oldest.half(CASES))
def test_values(found):
  p = found.problem
  x = ragged_kernels.operands(p, seed=p.m + p.n + p.k)
  outs = ragged_kernels.run(p, found.config, x, found.offsets, found.activation)
  ragged_kernels.assert_right(outs, p, x, found.offsets, found.activation)


ROWS = Problem.flat(
  m=70,
  n=64,
  k=64,
  dtype="bfloat16",
  out_dtype="bfloat16",
  ragged="m",
  groups=2,
)
SLABS = ROWS.changed(k=80, ragged="k", transpose_a=True)


# NumPy, in which the interpreter computes, remarks on inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_stays_in_its_row_and_group():
  x = ragged_kernels.operands(ROWS)
  x["a"] = x["a"].at[20].set(jnp.nan).at[69].set(jnp.nan)  # 69: in no group
  x["b"] = x["b"].at[1].set(jnp.inf)
  (out,) = ragged_kernels.run(ROWS, SMALL, x, (0, 30, 69))
  finite = np.isfinite(np.asarray(out, np.float32))
  assert not finite[20].any()
  assert finite[:20].all() and finite[21:30].all()
  assert not finite[30:69].any()
  assert not np.asarray(out[69]).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
  ("n", "transpose"), [(136, False), (135, False), (128, True)], ids=str
)
def test_nan_of_weights_stays_in_its_column_and_group(n, transpose):
  """Loads run on past the ends of rows, and slabs past the end of K."""
  problem = ROWS.changed(n=n, k=75, transpose_b=transpose)
  x = ragged_kernels.operands(problem)
  first = (0, 0, 1) if transpose else (0, 1, 0)  # the second of K
  x["b"] = x["b"].at[first].set(jnp.nan).at[1].set(jnp.inf)
  (out,) = ragged_kernels.run(problem, WIDER, x, (0, 30, 69))
  finite = np.isfinite(np.asarray(out, np.float32))
  assert not finite[:30, 0].any()
  assert finite[:30, 1:].all()
  assert not finite[30:69].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("operand", ["a", "b"])
def test_nan_stays_in_its_group_along_k(operand):
  x = ragged_kernels.operands(SLABS)
  x[operand] = x[operand].at[30].set(jnp.nan)
  (out,) = ragged_kernels.run(SLABS, SMALL, x, (3, 30, 78))
  finite = np.isfinite(np.asarray(out, np.float32))
  assert finite[0].all()
  assert not finite[1].all()


@pytest.mark.parametrize("problem", [ROWS, SLABS], ids=["rows", "slabs"])
def test_the_config_does_not_change_the_bits(problem):
  """Rows that are computed twice, too, are added up in one order."""
  x = ragged_kernels.operands(problem)
  (want,) = ragged_kernels.run(problem, SMALL, x, (1, 5, 70))
  for config in (TWO, COLUMNS):
    (got,) = ragged_kernels.run(problem, config, x, (1, 5, 70))
    np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


@pytest.mark.parametrize(
  "sizes", [(5, 0, 7), (64, 64, 64), (1, 190, 1), (0, 0, 192)], ids=str
)
def test_row_tiles_cover_each_row_once_but_in_the_last_tile(sizes):
  problem = ROWS.changed(m=200, groups=3)
  offsets = jnp.asarray(np.cumsum((4, *sizes)), jnp.int32)
  plan = Plan.of(problem, SMALL)
  (tiles, ends), _ = tables.make(plan, offsets, ())
  assert len(tiles) == plan.row_tiles >= ends[-1]
  groups = np.full(200, -2)
  for i, (start, end, group, first) in enumerate(tiles[: ends[-1]].tolist()):
    row, rows = grouped.rows_of_tile(start, end, i - first, SMALL)
    assert 0 < rows <= SMALL.block_m
    assert set(groups[row : row + rows]) <= {-2, group}
    groups[row : row + rows] = group
  want = np.repeat((-1, 0, 1, 2, -1), (4, *sizes, 196 - sum(sizes)))
  np.testing.assert_array_equal(groups, want)


@pytest.mark.parametrize("tiles", [(1, 5), (2, 3), (9, 4), (5, 1), (3, 16)])
@pytest.mark.parametrize("raster_dim", ["m", "n"])
def test_tiles_of_a_group_come_in_strips(tiles, raster_dim):
  config = dataclasses.replace(SMALL, raster=4, raster_dim=raster_dim)
  rows, columns = tiles
  numbers = np.arange(rows * columns)
  m, n = map(np.asarray, grouped.tile_in_group(numbers, tiles, config))
  assert {*zip(m.tolist(), n.tolist())} == {*np.ndindex(tiles)}
  along, across = (n, m) if raster_dim == "m" else (m, n)
  # From one to the next within the strip, or to the next line or strip.
  steps = np.abs(np.diff(along))
  assert steps.max(initial=0) <= 1
  widest = 1 + across.max(initial=0, where=numbers < config.raster)
  assert widest <= config.raster


@pytest.mark.parametrize(
  ("sizes", "order", "filled_uneven_spare"),
  [
    ((60, 70, 70), (1, 2, 0), (3, False, True)),
    ((0, 0, 0), (0, 1, 2), (1, False, False)),
    ((0, 8, 0), (1, 0, 2), (1, False, False)),
    ((0, 190, 0), (1, 0, 2), (1, False, True)),
    ((1, 0, 90, 1, 1, 1, 1), (2, 0, 3, 4, 5, 6, 1), (6, True, True)),
  ],
)
def test_groups_along_k_by_size(sizes, order, filled_uneven_spare):
  problem = SLABS.changed(k=200, groups=len(sizes))
  offsets = np.cumsum((4, *sizes))
  plan = Plan.of(problem, SMALL)
  made, _ = tables.make(plan, jnp.asarray(offsets, jnp.int32), ())
  want = [(offsets[g], offsets[g + 1], g) for g in order]
  np.testing.assert_array_equal(made[0], want)
  found = (
    grouped.filled_groups(made),
    grouped.is_uneven(made),
    grouped.has_spare_time(plan, made),
  )
  assert found == filled_uneven_spare


REFUSED = {
  "split_k": (ROWS, {"split_k": 2}, "split_k"),
  "cluster": (ROWS, {"cluster_m": 2}, "cluster_m"),
  "slab": (ROWS, {"block_k": 128}, "block_k"),
  "subtile": (ROWS, {"epilogue_n": 32}, "epilogue_n"),
  "overlap": (SLABS, {"block_n": 96, "epilogue_n": 64}, "must divide 96"),
  # A's atoms would be as narrow as B's, and A's copies two atoms wide.
  "columns": (
    ROWS.changed(out_dtype="float32"),
    {"block_n": 32, "epilogue_n": 32},
    "columns",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_legal(name):
  problem, change, word = REFUSED[name]
  config = dataclasses.replace(SMALL, **change)
  assert word in legal.reason(Plan.of(problem, config))
