"""Tier C: the grouped Hopper kernel as machine code, compiled without a GPU."""

import re

import pytest

from experiments.harness import compiled as compiled_lib

pytestmark = pytest.mark.aot

LARGE = {"block_m": 128, "block_n": 256, "stages": 4, "epilogue_buffers": 1}
ROWS = {"m": 8192, "n": 14336, "k": 4096, "ragged": "m"}
SLABS = {"m": 4096, "n": 14336, "k": 8192, "ragged": "k", "transpose_a": True}
TALL = {"block_m": 256, "block_n": 128, "stages": 4, "epilogue_buffers": 1}
GATED = {"block_m": 128, "block_n": 128, "stages": 3, "epilogue_buffers": 1}

# (problem, config, activation, columns of a wgmma, TMA loads' ranks)
EXAMPLES = {
  # A is read from any row on, so without a grid of swizzle atoms.
  "rows": (ROWS, LARGE, None, 256, {"2D", "5D"}),
  "cluster": (
    ROWS | {"transpose_b": True},
    LARGE | {"cluster_n": 2},
    None,
    256,
    {"2D.MULTICAST", "3D"},
  ),
  "gelu": (
    ROWS | {"bias": "n"},
    LARGE | {"stages": 3},
    "gelu",
    256,
    {"2D", "5D"},
  ),
  "gated": (
    ROWS | {"gated": True, "save_preactivation": True},
    GATED,
    "silu",
    128,
    {"2D", "5D"},
  ),
  "few_rows": (
    ROWS | {"m": 256},
    {"block_m": 64, "block_n": 128, "stages": 8, "consumers": 1},
    None,
    128,
    {"2D", "5D"},
  ),
  "slabs": (SLABS, LARGE, None, 256, {"4D"}),
  "short_slabs": (
    SLABS | {"k": 64},
    {"split": "n", "block_m": 64, "epilogue_n": 128, "epilogue_buffers": 1},
    None,
    128,
    {"2D", "4D"},
  ),
  "few_results": (SLABS | {"m": 512, "n": 512}, LARGE, None, 256, {"4D"}),
  # Weights that are no whole number of atoms.
  "columns_8": (ROWS | {"n": 1400}, LARGE, None, 256, {"2D", "5D"}),
  "columns_4": (ROWS | {"n": 4100}, TALL, None, 128, {"2D", "5D"}),
  "columns_1": (
    ROWS | {"m": 8191, "n": 1407},
    TALL | {"stages": 3},
    None,
    128,
    {"2D", "5D"},
  ),
  "k_1": (
    ROWS | {"k": 1407, "transpose_b": True},
    TALL | {"stages": 3},
    None,
    128,
    {"2D", "3D"},
  ),
}


def _compile(name: str) -> compiled_lib.Compiled:
  """No spills, and no wgmma that waits for the one before it."""
  problem, config, activation, _, _ = EXAMPLES[name]
  dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  compiled = compiled_lib.compile_example(
    "tests.support.ragged_kernels:named_example",
    problem=dtypes | problem | {"groups": 8},
    config=config,
    activation=activation,
  )
  assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
  assert compiled.warnings == ()
  return compiled


@pytest.mark.parametrize("name", EXAMPLES)
def test_instructions(name):
  compiled = _compile(name).only("sm90_ragged")
  columns, ranks = EXAMPLES[name][3:]
  shapes = set(re.findall(r"HGMMA\.64x(\d+)x16\.F32", compiled.sass))
  assert shapes == {str(columns)}
  loads = set(re.findall(r"UTMALDG\.(\S*?)(?= |;|$)", compiled.sass))
  assert loads == ranks
  problem = EXAMPLES[name][0]
  by_rows = problem["n"] % 8 > 0
  assert compiled.has(r"UTMASTG\S*") != by_rows
  assert compiled.stores_beside_wgmma != by_rows
  assert compiled.has(r"STG\S*") == by_rows


@pytest.mark.parametrize(
  ("name", "copies"),
  [
    ("rows", set()),
    ("columns_8", set()),
    ("columns_4", {"E.64"}),
    ("columns_1", {"E.BYPASS.128"}),
    ("k_1", {"E.BYPASS.128"}),
  ],
)
def test_what_threads_copy(name, copies):
  """Only rows that TMA can't address; past the L1 what they move."""
  sass = _compile(name).sass
  assert set(re.findall(r"LDGSTS\.([\w.]+)", sass)) == copies


@pytest.mark.parametrize(
  ("name", "evicted", "prefetched"),
  [
    ("short_slabs", True, True),
    ("slabs", True, False),
    ("few_results", False, False),
    ("rows", False, False),
  ],
)
def test_results_that_leave_the_l2_first(name, evicted, prefetched):
  """Those of groups along K that are more than it holds."""
  sass = _compile(name).only("sm90_ragged").sass
  stores = re.findall(r"UTMASTG[^;]*", sass)
  assert {"desc" in store for store in stores} == {evicted}
  assert ("CCTL.E.PF2" in sass) == prefetched
