"""Tier A: numbers of the grouped Hopper kernel, in Pallas' GPU interpreter.

Shared memory that nothing was loaded to holds NaN in the interpreter, so what
leaks from past an edge shows. The cases of test_sm90_dense_races are checked
there.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.sm90 import groups as grouped
from pallas_gemm.kernels.sm90 import tables
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from tests.support import group_cases, problems, ragged_kernels
from tests.support.cases import COLUMNS, DIRECT, SMALL, TALL


@pytest.fixture(autouse=True)
def two_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  problems.assume_sms(monkeypatch, 2)


@pytest.mark.parametrize("name", group_cases.VALUES)
def test_values(name):
  run, check = group_cases.VALUES[name].prepare()
  check(run())


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
  (out,) = ragged_kernels.run(problem, DIRECT, x, (0, 30, 69))
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
  for config in (TALL, COLUMNS):
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
  assert len(tiles) == plan.tiling.row_tiles >= ends[-1]
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
