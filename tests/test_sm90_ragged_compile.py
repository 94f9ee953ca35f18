"""Tier C: the grouped Hopper kernel as machine code, compiled without a GPU."""

import re

import pytest

from experiments.harness import compiled as compiled_lib
from pallas_gemm import hardware
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem

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
  "gated_1": (
    ROWS | {"gated": True, "n": 1407},
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
  # Weights that are no whole number of atoms.
  "columns_8": (ROWS | {"n": 1400}, LARGE, None, 256, {"2D", "5D"}),
  "columns_4": (ROWS | {"n": 4100}, LARGE, None, 256, {"2D", "5D"}),
  "columns_1": (ROWS | {"m": 8191, "n": 1407}, TALL, None, 128, {"2D", "5D"}),
  "k_1": (
    ROWS | {"k": 1407, "transpose_b": True},
    TALL,
    None,
    128,
    {"2D", "3D"},
  ),
}


def _problem(name: str) -> dict:
  dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  return dtypes | EXAMPLES[name][0] | {"groups": 8}


def _compile(name: str) -> compiled_lib.Compiled:
  _, config, activation, _, _ = EXAMPLES[name]
  return compiled_lib.compile_example(
    "tests.support.ragged_kernels:named_example",
    problem=_problem(name),
    config=config,
    activation=activation,
  )


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_lost(name):
  """No spills, and no wgmma that waits for the one before it."""
  compiled = _compile(name)
  assert compiled.spill_bytes == 0
  assert compiled.stack_bytes == 0
  assert compiled.warnings == ()


@pytest.mark.parametrize("name", EXAMPLES)
def test_shared_memory_is_what_the_plan_says(name):
  """At least, and not much less: `legal` goes by it."""
  problem, config = Problem.flat(**_problem(name)), Config(**EXAMPLES[name][1])
  with hardware.assume(compiled_lib.GPU):
    plan = Plan.of(problem, config)
  assert 0 <= plan.shared_bytes - _compile(name).shared_bytes <= 1024


@pytest.mark.parametrize("name", EXAMPLES)
def test_instructions(name):
  compiled = _compile(name).only("sm90_ragged")
  columns, ranks = EXAMPLES[name][3:]
  shapes = set(re.findall(r"HGMMA\.64x(\d+)x16\.F32", compiled.sass))
  assert shapes == {str(columns)}
  loads = set(re.findall(r"UTMALDG\.(\S*?)(?= |;|$)", compiled.sass))
  assert loads == ranks
  problem = EXAMPLES[name][0]
  by_rows = problem["m"] * problem["n"] % 4 > 0
  assert compiled.has(r"UTMASTG\S*") != by_rows
  assert compiled.stores_beside_wgmma != by_rows
  assert compiled.has(r"STG\S*") == by_rows


@pytest.mark.parametrize(
  ("name", "width", "shifts"),
  [
    ("rows", None, False),
    ("columns_8", None, False),
    ("columns_4", "E.64", False),
    ("columns_1", "E", True),
    ("k_1", "E", True),
    ("gated_1", "E", True),
  ],
)
def test_what_threads_copy(name, width, shifts):
  """Only rows that TMA can't address, past registers; odd ones are shifted."""
  compiled = _compile(name).only("sm90_ragged")
  copies = set(re.findall(r"LDGSTS\.(\S+)", compiled.sass))
  assert copies == ({width} if width else set())
  assert compiled.has("LDGDEPBAR") == bool(width)
  assert not compiled.has(r"LDG?\.E\.(U16|64)")
  assert compiled.has("SHFL.DOWN") == compiled.has("STS.128") == shifts
