"""Groups of rows with weights whose rows TMA can't address: no copy of them.

Numbers in Pallas' GPU interpreter, as of `test_sm90_ragged_interpret`: what
leaks from past an edge shows.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.sm90 import folding
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import constants, odd_sizes
from tests.support import oldest, problems, ragged_kernels

SMALL = Config(block_m=64, block_n=64, stages=2, consumers=1)
WIDE = Config(block_m=64, block_n=128, stages=3, consumers=1)
TWO = Config(block_m=128, block_n=128, stages=2)
COLUMNS = Config(block_m=64, block_n=128, stages=3, split="n")
PINGPONG = dataclasses.replace(WIDE, consumers=2, split="pingpong", stages=4)

ROWS = Problem.flat(
  m=200,
  n=131,
  k=64,
  ragged="m",
  groups=4,
  dtype="bfloat16",
  out_dtype="bfloat16",
)
# Empty groups, groups that end in tiles, rows of no group before and after.
OFFSETS = (3, 3, 60, 60, 190)
FP16 = {"dtype": "float16", "out_dtype": "float16"}
GATED = {"gated": True, "activation": "silu"}

# What is changed of `ROWS`, how, and the rows of B that are one.
CASES = {
  "odd": ({}, SMALL, 8),
  "in_two_atoms": ({}, WIDE, 8),
  "one_tile": ({"n": 71, "k": 136}, WIDE, 8),
  "part_of_a_slab": ({"n": 133, "k": 72} | FP16, TWO, 8),
  "less_than_a_slab": ({"n": 129, "k": 8}, WIDE, 8),
  "even": ({"n": 70, "k": 128}, WIDE, 4),
  "even_and_part": ({"n": 134, "k": 100} | FP16, COLUMNS, 4),
  "fours": ({"n": 100, "k": 192}, WIDE, 2),
  "fours_and_part": ({"n": 260, "k": 70}, TWO, 2),
  "few_columns": ({"n": 7}, WIDE, 8),
  "some_columns": ({"n": 44, "k": 66}, WIDE, 2),
  "pingpong": ({"k": 80}, PINGPONG, 8),
  "in_clusters": ({}, dataclasses.replace(WIDE, cluster_n=2), 8),
  "gated": ({"n": 71} | GATED, SMALL, 8),
  "gated_saved": (
    {"n": 132, "k": 68, "save_preactivation": True} | GATED | FP16,
    WIDE,
    2,
  ),
  "bias": ({"bias": "n", "activation": "gelu"}, WIDE, 8),
  "float32": (
    {"n": 70, "out_dtype": "float32"},
    dataclasses.replace(WIDE, epilogue_n=32),
    4,
  ),
}


@pytest.fixture(autouse=True)
def two_sms(monkeypatch):
  """A persistent grid of fewer blocks than there are tiles."""
  problems.assume_sms(monkeypatch, 2)


@pytest.mark.parametrize(
  "name", oldest.every_other([pytest.param(x, id=x) for x in CASES])
)
def test_values(name):
  change, config, rows = CASES[name]
  p = ROWS.changed(**change)
  plan = Plan.of(p, config)
  assert plan.fold == rows
  assert plan.operand_paddings[1] == (p.k // rows, p.n * rows)
  named = p.epilogue.activation
  activation = getattr(jax.nn, named) if named else None
  x = ragged_kernels.operands(p, seed=p.n + p.k)
  outs = ragged_kernels.run(p, config, x, OFFSETS, activation)
  ragged_kernels.assert_right(outs, p, x, OFFSETS, activation)


# NumPy, in which the interpreter computes, remarks on inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("k", (64, 72))
def test_nan_stays_in_its_row_column_and_group(k):
  """Also where the last slab, and the last tile, look beyond the group."""
  problem = ROWS.changed(k=k, groups=3)
  x = ragged_kernels.operands(problem)
  x["a"] = x["a"].at[20].set(jnp.nan).at[199].set(jnp.nan)  # 199: in no group
  x["b"] = x["b"].at[1].set(jnp.nan).at[2, 5, 3].set(jnp.inf)
  (out,) = ragged_kernels.run(problem, WIDE, x, (0, 70, 90, 199))
  finite = np.isfinite(np.asarray(out, np.float32))
  want = np.ones_like(finite)
  want[20] = want[70:90] = want[90:199, 3] = False
  np.testing.assert_array_equal(finite, want)


def test_the_config_does_not_change_the_bits():
  x = ragged_kernels.operands(ROWS)
  outs = [
    ragged_kernels.run(ROWS, config, x, OFFSETS)[0]
    for config in (SMALL, WIDE, TWO)
  ]
  for got, want in itertools.pairwise(map(problems.bits, outs)):
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  "change",
  (
    {"n": 136},
    {"k": 65},
    {"transpose_b": True},
    {"ragged": None, "groups": 0},
    {"ragged": "k", "transpose_a": True},
  ),
  ids=str,
)
def test_what_is_addressed_as_it_is_or_padded(change):
  """Aligned; uneven; along K; no groups; groups along K."""
  assert folding.fold(ROWS.changed(**change)) == 1


def test_rows_do_not_depend_on_the_others():
  """Bits of a row are the same in a product of few rows and of many."""
  x = ragged_kernels.operands(ROWS)
  (want,) = ragged_kernels.run(ROWS, SMALL, x, OFFSETS)
  few = ROWS.changed(m=9)
  (got,) = ragged_kernels.run(
    few, SMALL, x | {"a": x["a"][60:69]}, (0, 0, 0, 0, 9)
  )
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want[60:69]))
  assert folding.fold(ROWS.changed(m=10**6)) == folding.fold(few) == 8


def test_columns_of_a_are_in_the_order_of_the_rows_of_b():
  """The slabs of both, laid out as TMA reads them, have the same product."""
  a, b = np.arange(3 * 16).reshape(3, 16), np.arange(16 * 5).reshape(16, 5)
  permuted = folding.in_slab_order(jnp.asarray(a), fold=4, block_k=8)
  view = b.reshape(4, 4 * 5)
  slabs = [
    np.concatenate([view[q : q + 2, 5 * r : 5 * r + 5] for r in range(4)])
    for q in (0, 2)
  ]
  np.testing.assert_array_equal(permuted @ np.concatenate(slabs), a @ b)


def test_one_copy_of_a_and_none_of_the_weights():
  plan = Plan.of(ROWS.changed(k=100, n=134, gated=True), SMALL)
  assert plan.fold == 4
  assert plan.copied_bytes[0] == [2 * 200 * (100 + 128)]
  # Rows of B start at any element, and none is read for the copy.
  padded = Plan.of(ROWS.changed(k=99, n=134), SMALL)
  fit = constants.of(plan.gpu).odd_sizes
  slow, fast = (odd_sizes.costs(x, fit).loads[1] for x in (plan, padded))
  assert fast < slow
