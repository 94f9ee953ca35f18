"""Tier C: the Hopper kernels with operands in planes, as machine code."""

import re

import pytest

from tests.support import machine_code
from tests.support.plane_cases import BF16, OF_A, OF_B, X3, X6, X9

pytestmark = pytest.mark.aot

SQUARE = {
  "block_m": 128, "block_n": 128, "block_k": 32, "stages": 3, "epilogue_n": 32
}  # fmt: skip
DEEP = SQUARE | {"block_k": 64, "stages": 2, "epilogue_buffers": 1}
MOVED = SQUARE | {"moves": True, "epilogue_buffers": 1}
FUSED = {"c_dtype": "bfloat16", "bias": "n"}
ROWS = {"m": 8192, "ragged": "m", "groups": 8, "transpose_b": False}
SLABS = {
  "k": 8192, "ragged": "k", "groups": 8, "transpose_a": True
}  # fmt: skip

# (problem, config, activation, columns of a wgmma)
EXAMPLES = {
  "x6": (X6, SQUARE | {"cluster_m": 2}, None, 128),
  "x6_nt": (X6 | {"transpose_b": True}, SQUARE | {"stages": 4}, None, 128),
  "x6_tn": (X6 | {"transpose_a": True}, SQUARE | {"cluster_n": 2}, None, 128),
  "x6_deep": (X6, DEEP, None, 128),
  "x6_fused": (X6 | BF16 | FUSED, SQUARE | {"epilogue_n": 64}, "gelu", 128),
  "x6_c": (
    X6 | {"c_dtype": "float32"},
    DEEP | {"epilogue_n": 16, "epilogue_buffers": 2},
    None,
    128,
  ),
  "x6_gated": (X6 | {"gated": True}, DEEP | {"block_n": 64}, "silu", 64),
  "x6_few_rows": (
    X6 | {"m": 16, "transpose_b": True},
    {"block_m": 64, "block_n": 16, "block_k": 32, "consumers": 1, "stages": 9,
     "epilogue_n": 16, "epilogue_buffers": 1, "swap_ab": True},
    None,
    16,
  ),
  "x9": (X9, DEEP, None, 128),
  "x3": (X3, DEEP | {"stages": 3}, None, 128),
  "by_bf16": (OF_A, SQUARE | {"stages": 4}, None, 128),
  "bf16_by": (OF_B, SQUARE | {"stages": 4}, None, 128),
  "groups": (X6 | ROWS, DEEP, None, 128),
  "slabs": (X6 | SLABS, DEEP, None, 128),
  "slabs_narrow": (X6 | SLABS, DEEP | {"block_n": 96}, None, 96),
  "moved": (X6 | ROWS, MOVED, None, 128),
  "moved_nt": (
    X6 | ROWS | {"transpose_b": True, "bias": "n"}, MOVED, "gelu", 128
  ),
  "moved_gated": (
    X6 | BF16 | {"m": 128, "gated": True},
    MOVED | {"block_n": 64},
    "silu",
    64,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_instructions(name):
  """No spills, and no wgmma that waits for the one before it."""
  fields, config, activation, columns = EXAMPLES[name]
  problem = dict.fromkeys("mnk", 4096) | {"dtype": "bfloat16"} | fields
  sass = machine_code.of_example(problem, config, activation)
  (found,) = set(re.findall(r"HGMMA\.(\S+)", sass))
  assert found == f"64x{columns}x16.F32.BF16"
  # What small products add up to is read while the large ones run.
  large = 2 if "gated" in problem else 1
  kinds = rf"HGMMA|DEPBAR\.LE gsb0, 0x({large}|0)\b"
  order = [m[1] for m in re.finditer(kinds, sass)]
  at = order.index(str(large))
  assert order[:at] and not any(order[:at])
  assert [x for x in order[at:] if x][:1] == [str(large)]
