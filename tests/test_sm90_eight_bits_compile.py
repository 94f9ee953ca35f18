"""Tier C: the Hopper kernels with operands of 8 bits, as machine code."""

import re

import pytest

from tests.support import machine_code
from tests.support.eight_bit_cases import BLOCKS, FAST, LINES, SCALED, TENSORS

pytestmark = pytest.mark.aot

LARGE = {"block_m": 128, "block_n": 256, "block_k": 128, "stages": 4}
LARGE_GROUPS = LARGE | {"epilogue_buffers": 1}
SQUARE = {"block_m": 128, "block_n": 128, "block_k": 128, "stages": 6}
ALONE = {"block_m": 64, "block_n": 64, "block_k": 128, "consumers": 1}
WIDE = SQUARE | {"block_n": 192, "stages": 4}
TALL = SQUARE | {
  "block_m": 192, "consumers": 3, "stages": 4, "epilogue_buffers": 1
}  # fmt: skip
ROWS = {"m": 8192, "n": 14336, "k": 4096, "ragged": "m", "groups": 8}
SLABS = {"m": 4096, "n": 14336, "k": 8192, "ragged": "k", "groups": 8}
E4M3, E5M2, INT8 = (
  {"dtype": x, "dtype_b": x, "out_dtype": "bfloat16"}
  for x in ("float8_e4m3fn", "float8_e5m2", "int8")
)
FUSED = {"c_dtype": "bfloat16", "bias": "n"}

# (problem, config, activation, sums of a wgmma)
EXAMPLES = {
  "fast": (E4M3 | FAST, LARGE | {"cluster_m": 2}, None, "64x256"),
  "fast_scaled": (
    E5M2 | FAST | SCALED,
    LARGE | {"cluster_m": 2},
    None,
    "64x256",
  ),
  "fast_fused": (
    E4M3 | FAST | SCALED | FUSED, LARGE | {"stages": 3}, "gelu", "64x256"
  ),
  "mixed": (
    E4M3 | {"dtype_b": "float8_e5m2"}, SQUARE, None, "64x128"
  ),
  "promoted": (
    E4M3 | SCALED, SQUARE | {"cluster_n": 2}, None, "64x128"
  ),
  "promoted_wide": (E4M3 | SCALED, WIDE, None, "64x192"),
  "promoted_tall": (E4M3 | SCALED, TALL, None, "64x128"),
  "promoted_float32": (
    E4M3 | TENSORS | {"out_dtype": "float32"},
    SQUARE | {"epilogue_n": 32},
    None,
    "64x128",
  ),
  "promoted_fused": (
    E4M3 | SCALED | FUSED,
    SQUARE | {"stages": 5},
    "gelu",
    "64x128",
  ),
  "promoted_gated": (
    E4M3 | SCALED | {"gated": True},
    SQUARE | {"block_n": 64},
    "silu",
    "64x64",
  ),
  "pingpong": (
    E4M3 | SCALED | {"k": 256},
    SQUARE | {"block_m": 64, "split": "pingpong", "stages": 4},
    None,
    "64x128",
  ),
  "pingpong_fast": (
    E4M3 | SCALED | FAST | {"k": 128},
    SQUARE | {"split": "pingpong", "stages": 2},
    "gelu",
    "64x128",
  ),
  "swapped": (
    E4M3 | SCALED | {"m": 64},
    SQUARE | {"block_n": 64, "swap_ab": True},
    None,
    "64x64",
  ),
  "transposed": (
    E4M3 | SCALED | {"transpose_a": True, "transpose_b": False},
    SQUARE,
    None,
    "64x128",
  ),
  "few_rows": (
    E4M3 | SCALED | {"m": 16},
    ALONE | {"stages": 8},
    None,
    "64x64",
  ),
  "cluster_k": (
    E4M3 | SCALED | {"m": 16, "n": 2048},
    ALONE | {"stages": 6, "cluster_k": 4, "epilogue_n": 16},
    None,
    "64x64",
  ),
  "split_k": (
    E4M3 | SCALED | {"m": 16},
    ALONE | {"split_k": 4},
    None,
    "64x64",
  ),
  "int8": (
    INT8 | {"out_dtype": "int32"},
    LARGE | {"epilogue_n": 32},
    None,
    "64x256",
  ),
  "int8_scaled": (INT8 | SCALED, LARGE | {"cluster_m": 2}, None, "64x256"),
  "int8_gated": (
    INT8 | SCALED | {"gated": True},
    SQUARE | {"stages": 4, "epilogue_buffers": 1},
    "silu",
    "64x128",
  ),
  "groups": (ROWS | E4M3 | SCALED, SQUARE | {"stages": 5}, None, "64x128"),
  "groups_wide": (ROWS | E4M3 | SCALED, WIDE, None, "64x192"),
  "groups_tall": (ROWS | E4M3 | SCALED, TALL, None, "64x128"),
  "blocks": (
    E4M3 | BLOCKS, SQUARE | {"cluster_n": 2, "stages": 5}, None, "64x128"
  ),
  "blocks_tall": (E4M3 | BLOCKS, TALL | {"cluster_n": 2}, None, "64x128"),
  "blocks_fused": (
    E4M3 | BLOCKS | FUSED, SQUARE | {"stages": 4}, "gelu", "64x128"
  ),
  "blocks_gated": (
    E4M3 | BLOCKS | {"gated": True},
    SQUARE | {"block_n": 64, "stages": 5},
    "silu",
    "64x64",
  ),
  "blocks_of_int8": (
    INT8 | BLOCKS, SQUARE | {"stages": 5}, None, "64x128"
  ),
  "groups_blocks": (
    ROWS | E4M3 | BLOCKS,
    SQUARE | {"stages": 5, "cluster_n": 2},
    None,
    "64x128",
  ),
  "groups_blocks_tall": (
    ROWS | E4M3 | BLOCKS, TALL | {"cluster_n": 2}, None, "64x128"
  ),
  "groups_fast": (
    ROWS | E4M3 | SCALED | FAST,
    LARGE | {"epilogue_buffers": 1},
    None,
    "64x256",
  ),
  "groups_int8": (
    ROWS | INT8 | SCALED,
    LARGE | {"epilogue_buffers": 1, "cluster_n": 2},
    "gelu",
    "64x256",
  ),
  "slabs": (
    SLABS | E4M3 | SCALED,
    SQUARE | {"cluster_m": 2, "stages": 5},
    None,
    "64x128",
  ),
  "slabs_wide": (SLABS | E4M3 | SCALED, WIDE, None, "64x192"),
  "slabs_fast": (SLABS | E5M2 | FAST | SCALED, LARGE_GROUPS, None, "64x256"),
  "slabs_float32": (
    SLABS | E4M3 | TENSORS | {"out_dtype": "float32"},
    SQUARE | {"epilogue_n": 32, "stages": 5},
    None,
    "64x128",
  ),
  "slabs_int8": (SLABS | INT8 | SCALED, LARGE_GROUPS, None, "64x256"),
  "slabs_blocks": (
    SLABS | E4M3 | BLOCKS, SQUARE | {"stages": 5}, None, "64x128"
  ),
  "lines": (
    E4M3 | LINES, SQUARE | {"cluster_m": 2, "stages": 5}, None, "64x128"
  ),
  "lines_wide": (
    E4M3 | LINES, WIDE | {"block_n": 160, "epilogue_n": 32}, None, "64x160"
  ),
  "lines_tall": (
    E4M3 | LINES, TALL | {"block_n": 96, "epilogue_n": 32}, None, "64x96"
  ),
  "lines_fused": (
    E4M3 | LINES | FUSED, SQUARE | {"stages": 4}, "gelu", "64x128"
  ),
  "lines_gated": (
    INT8 | LINES | {"gated": True}, SQUARE | {"block_n": 64}, "silu", "64x64"
  ),
  "groups_lines": (
    ROWS | E4M3 | LINES, SQUARE | {"stages": 5}, None, "64x128"
  ),
  "slabs_lines": (
    SLABS | E4M3 | LINES | {"out_dtype": "float32"},
    SQUARE | {"epilogue_n": 32, "stages": 5},
    None,
    "64x128",
  ),
  "groups_int32": (
    ROWS | INT8 | {"out_dtype": "int32"},
    SQUARE | {"epilogue_n": 32, "stages": 5},
    None,
    "64x128",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_instructions(name):
  """No spills, and no wgmma that waits for the one before it."""
  fields, config, activation, sums = EXAMPLES[name]
  problem = dict.fromkeys("mnk", 4096) | {"transpose_b": True} | fields
  sass = machine_code.of_example(problem, config, activation)
  of = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2", "int8": "S8"}
  kinds = f"{of[problem['dtype']]}.{of[problem['dtype_b']]}"
  kinds = kinds if kinds == "S8.S8" else f"F32.{kinds}"
  (found,) = set(re.findall(r"[IQ]GMMA\.(\S+)", sass))
  assert found == f"{sums}x32.{kinds}"
  # What threads load are scales, but of blocks, and which tiles groups have.
  loads = re.search(r"\sLDG\b", sass) is not None
  in_kernel = problem.get("scale_a", "block") != "block" and name != "split_k"
  assert loads == (in_kernel or "ragged" in problem)
  # Nor is anything but a bias a bulk copy that starts at multiples of 16 bytes.
  assert "UBLKCP" not in sass or "bias" in problem
