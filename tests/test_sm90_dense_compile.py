"""Tier C: the dense Hopper kernel as machine code, compiled without a GPU."""

from collections.abc import Sequence
import re

import pytest

from experiments.harness import compiled as compiled_lib

pytestmark = pytest.mark.aot

DEFAULT = {"block_m": 128, "block_n": 256, "stages": 3}
GATED = {"block_m": 128, "block_n": 128, "stages": 3}

# (problem, config, activation, columns of a wgmma)
EXAMPLES = {
  "plain": ({}, DEFAULT | {"cluster_m": 2, "stages": 4}, None, 256),
  "transposed": (
    {"transpose_a": True, "transpose_b": True},
    DEFAULT | {"cluster_n": 2},
    None,
    256,
  ),
  "gelu": ({"bias": "n"}, DEFAULT, "gelu", 256),
  "with_c": (
    {"c_dtype": "float32", "bias": "m"},
    DEFAULT | {"epilogue_buffers": 1},
    None,
    256,
  ),
  "c_ahead": (
    {"c_dtype": "bfloat16", "bias": "n"},
    DEFAULT | {"epilogue_buffers": 1},
    None,
    256,
  ),
  "c_in_place": (
    {"c_dtype": "bfloat16", "bias": "n"},
    DEFAULT | {"stages": 3, "epilogue_buffers": 4},
    None,
    256,
  ),
  "wide": (
    {"out_dtype": "float32"},
    {"block_m": 256, "block_n": 128, "epilogue_n": 32, "stages": 3},
    None,
    128,
  ),
  "half_as_wide": (
    {"out_dtype": "float32"},
    {"block_m": 128, "block_n": 192, "epilogue_n": 32, "stages": 4},
    None,
    192,
  ),
  "saved": (
    {"save_preactivation": True, "bias": "n"},
    DEFAULT | {"epilogue_n": 32, "stages": 4},
    "gelu",
    256,
  ),
  "pingpong": (
    {"k": 64, "c_dtype": "bfloat16", "bias": "n"},
    {"block_m": 128, "block_n": 128, "split": "pingpong", "stages": 2},
    "gelu",
    128,
  ),
  "one_chain": ({}, GATED, None, 128),
  "gated": ({"gated": True}, GATED, "silu", 128),
  "gated_saved": (
    {"gated": True, "save_preactivation": True},
    GATED | {"stages": 3, "epilogue_buffers": 1},
    "silu",
    128,
  ),
  "three_consumers": (
    {"transpose_b": True},
    {"block_m": 192, "block_n": 160, "consumers": 3, "epilogue_n": 32},
    "silu",
    160,
  ),
  "overlap": (
    {"transpose_b": True},
    {"block_m": 128, "block_n": 240, "epilogue_n": 32, "stages": 4},
    None,
    240,
  ),
  "shifted_inward": (
    {"m": 4112, "n": 4112, "transpose_a": True, "bias": "n"},
    DEFAULT | {"cluster_m": 2},
    "gelu",
    256,
  ),
  "swapped": (
    {"m": 3000, "bias": "n"},
    {"block_m": 256, "block_n": 112, "epilogue_n": 32, "swap_ab": True},
    None,
    112,
  ),
  "swapped_with_c": (
    {"m": 3000, "c_dtype": "bfloat16"},
    {
      "block_m": 128,
      "block_n": 160,
      "epilogue_n": 32,
      "epilogue_buffers": 5,
      "swap_ab": True,
    },
    None,
    160,
  ),
  "evicted": ({"m": 16384, "n": 8192, "k": 256}, DEFAULT, None, 256),
  "few_rows": (
    {"m": 16},
    {"block_m": 64, "block_n": 64, "consumers": 1, "stages": 8},
    None,
    64,
  ),
  "cluster_k": (
    {"m": 16, "n": 2048, "c_dtype": "bfloat16", "bias": "n"},
    {
      "block_m": 64,
      "block_n": 128,
      "consumers": 1,
      "stages": 6,
      "cluster_k": 4,
      "epilogue_n": 32,
    },
    "gelu",
    128,
  ),
  "split_k": (
    {"m": 16},
    {"block_m": 64, "block_n": 128, "consumers": 1, "split_k": 4},
    None,
    128,
  ),
}

# Threads load operands; results leave from registers, but for the first.
BY_THREADS = {
  "moves_two_consumers": (
    {"m": 2560, "n": 192, "k": 196, "transpose_b": True},
    {
      "block_m": 128,
      "block_n": 192,
      "stages": 2,
      "epilogue_n": 64,
      "moves": True,
    },
    None,
    192,
  ),
  "moves_in_a_cluster": (
    {"m": 292, "n": 207, "k": 685},
    {
      "block_m": 64,
      "block_n": 64,
      "stages": 4,
      "consumers": 1,
      "cluster_k": 4,
      "epilogue_n": 16,
      "moves": True,
    },
    None,
    64,
  ),
  "moves_gated": (
    {"m": 100, "n": 333, "k": 200, "gated": True},
    {"block_m": 64, "block_n": 64, "stages": 3, "consumers": 1, "moves": True},
    "silu",
    64,
  ),
  "swapped_float32": (
    {"m": 208, "out_dtype": "float32", "c_dtype": "bfloat16", "bias": "n"},
    {
      "block_m": 128,
      "block_n": 208,
      "stages": 3,
      "epilogue_n": 32,
      "swap_ab": True,
    },
    None,
    208,
  ),
}


def _compile(name: str, factors: Sequence[str] = ()) -> compiled_lib.Compiled:
  """No spills, and no wgmma that waits for the one before it."""
  problem, config, activation, _ = (EXAMPLES | BY_THREADS)[name]
  size = dict.fromkeys("mnk", 4096)
  dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  compiled = compiled_lib.compile_example(
    "tests.support.dense:named_example",
    problem=size | dtypes | problem,
    config=config,
    activation=activation,
    factors=factors,
  )
  assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
  assert compiled.warnings == ()
  return compiled


@pytest.mark.parametrize("name", BY_THREADS)
def test_instructions_of_threads(name):
  """Copies of 16 bytes, past the L1; stores that are not TMA's."""
  compiled = _compile(name)
  _, config, _, columns = BY_THREADS[name]
  shapes = set(re.findall(r"HGMMA\.64x(\d+)x16\.F32", compiled.sass))
  assert shapes == {str(columns)}
  assert compiled.has(r"LDGSTS\.E\.BYPASS\.128\S*") == config.get(
    "moves", False
  )
  assert not compiled.has(r"LDGSTS\.E(?!\.BYPASS\.128)\S*")
  by_tma = name == "moves_two_consumers"
  assert compiled.has(r"UTMASTG\S*") == by_tma
  assert compiled.has(r"STG\.E\S*") != by_tma


@pytest.mark.parametrize("name", EXAMPLES)
def test_instructions(name):
  compiled = _compile(name)
  _, config, _, columns = EXAMPLES[name]
  shapes = set(re.findall(r"HGMMA\.64x(\d+)x16\.F32", compiled.sass))
  assert shapes == {str(columns)}
  assert compiled.has(r"UTMASTG\S*")
  assert compiled.has(r"USETMAXREG\S*")
  shared = config.get("cluster_m", 1) * config.get("cluster_n", 1) > 1
  assert compiled.has(r"UTMALDG\S*")
  assert compiled.has(r"UTMALDG\S*MULTICAST\S*") == shared
  # Results wait for the next tile's slabs, where a block has a next tile and C
  # is of their dtype: all of them or those that find room.
  at_once = ("with_c", "pingpong", "cluster_k", "split_k", "few_rows")
  assert compiled.stores_beside_wgmma == (name not in at_once)
  # Loads and stores of 16 bytes, or none that are not TMA's.
  assert not compiled.has(r"STG\.E(?!\.128)\S*")


@pytest.mark.parametrize(
  "name",
  (
    "plain", "with_c", "c_in_place", "half_as_wide", "saved", "pingpong",
    "three_consumers", "swapped_with_c", "few_rows",
  ),
)  # fmt: skip
def test_factors_known_at_run_time_cost_a_register_each(name):
  """They are read once, and everything else is as without them."""
  problem, *_ = EXAMPLES[name]
  factors = ("alpha", "beta") if "c_dtype" in problem else ("alpha",)
  compiled, without = _compile(name, factors), _compile(name)
  assert compiled.registers == without.registers
  assert compiled.shared_bytes == without.shared_bytes
  assert compiled.stores_beside_wgmma == without.stores_beside_wgmma
  assert _loads(compiled) == len(factors)
  assert _loads(without) == 0


def _loads(compiled: compiled_lib.Compiled) -> int:
  """Instructions that load from global memory and are not TMA's."""
  return len(re.findall(r"\sLDG\b", compiled.sass))


@pytest.mark.parametrize("name", ("few_rows", "plain", "c_in_place"))
def test_each_warp_makes_few_barriers_ready(name):
  """A quarter of each kind, of which there are `full`, `empty` and C's."""
  problem, config, *_ = EXAMPLES[name]
  few = -(-config["stages"] // 4)
  of_c = 2 if "c_dtype" in problem else 0  # those of two consumers' subtiles
  of_bias = 1 if "bias" in problem else 0
  made = len(re.findall(r"SYNCS\.EXCH", _compile(name).sass))
  assert made == 2 * few + of_c + of_bias


def test_parts_of_k_go_to_other_blocks_16_bytes_a_thread():
  """Of 32 columns each to four blocks; what has come is read the same way."""
  compiled = _compile("cluster_k")
  assert len(re.findall(r"\sST\.E\.128", compiled.sass)) == 4 * 4
  assert len(re.findall(r"\sLDS\.128", compiled.sass)) >= 4 * 4


@pytest.mark.parametrize("name", ("plain", "shifted_inward", "evicted"))
def test_results_that_leave_the_l2_first(name):
  """Those that are more than twice what it holds."""
  stores = re.findall(r"UTMASTG[^;]*", _compile(name).sass)
  assert {"desc" in store for store in stores} == {name == "evicted"}


def test_a_gated_product_has_two_chains():
  """As many wgmmas a slab for each of the two accumulators."""

  def wgmmas(name):
    return len(re.findall(r"HGMMA\.64x128x16", _compile(name).sass))

  assert wgmmas("gated") == 2 * wgmmas("one_chain")
