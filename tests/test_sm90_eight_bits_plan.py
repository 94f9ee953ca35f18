"""Which products of 8 bits the kernel takes, and with which configs."""

import dataclasses

import jax
from jax import lax
import pytest

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import choose, odd_sizes
from tests.support import dense, ragged_kernels
from tests.support.eight_bit_cases import BLOCKS, LINES, SCALED

E4M3, E5M2, INT8 = "float8_e4m3fn", "float8_e5m2", "int8"
CONFIG = Config(block_m=128, block_n=128, block_k=128, stages=4)
ROWS = {"ragged": "m", "groups": 8}
SLABS = {"ragged": "k", "groups": 8}
PRESETS = lax.DotAlgorithmPreset


@pytest.fixture(autouse=True)
def on_h100():
  with hardware.assume("NVIDIA H100 80GB HBM3"):
    yield


def problem(dtype=E4M3, **fields) -> Problem:
  found = {"out_dtype": "bfloat16", "transpose_b": True, "dtype": dtype}
  return Problem.flat(**dict.fromkeys("mnk", 1024) | found | fields)


@pytest.mark.parametrize("a", (E4M3, E5M2))
@pytest.mark.parametrize("b", (E4M3, E5M2))
def test_floats_mix(a, b):
  for out in ("bfloat16", "float16", "float32"):
    assert legal.refuses(a, b, out) is None


@pytest.mark.parametrize(
  ("a", "b", "out", "words"),
  [
    (E4M3, INT8, "float32", "operands must have one dtype, got float8_e4m3fn"),
    ("bfloat16", E4M3, "float32", "operands must have one dtype, got bfloat16"),
    ("uint8", "uint8", "float32", "operands must be .* int8, got uint8"),
    ("int4", "int4", "int32", "operands must be .* int8, got int4"),
    ("float8_e4m3fnuz",) * 2 + ("float32", "must be .*, got float8_e4m3fnuz"),
    ("float8_e4m3b11fnuz",) * 2 + ("float32", "got float8_e4m3b11fnuz"),
    ("float4_e2m1fn",) * 2 + ("float32", "got float4_e2m1fn"),
    (E4M3, E4M3, "int32", "out_dtype must be 16-bit float or float32, got int"),
    (E4M3, E4M3, E4M3, "out_dtype must be .*, got float8_e4m3fn"),
    (INT8, INT8, INT8, "out_dtype must be 16-bit float or float32, got int8"),
  ],
)
def test_refused_dtypes(a, b, out, words):
  found = legal.refuses(a, b, out)
  assert found
  with pytest.raises(AssertionError, match=words):
    raise AssertionError(found)


@pytest.mark.parametrize(
  ("dtype", "precision", "is_taken"),
  [
    (E4M3, None, True),
    (E4M3, lax.Precision.HIGHEST, True),
    (E4M3, PRESETS.ANY_F8_ANY_F8_F32, True),
    (E4M3, PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM, True),
    (E4M3, PRESETS.BF16_BF16_F32, False),
    (INT8, lax.Precision.HIGHEST, True),
    (INT8, PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM, False),
    (INT8, PRESETS.BF16_BF16_F32, False),
    ("bfloat16", PRESETS.ANY_F8_ANY_F8_F32, False),
  ],
)
def test_precision(dtype, precision, is_taken):
  assert (legal.refuses(dtype, dtype, "float32", precision) is None) == is_taken
  is_fast = precision is PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM
  assert legal.accumulates_fast(precision) == is_fast


@pytest.mark.parametrize(
  ("fields", "config", "words"),
  [
    ({}, {"block_k": 64}, "block_k must be 128 for 8-bit operands, got 64"),
    ({}, {"block_n": 256}, "at most 256 columns and 12288 accumulators"),
    ({"k": 1001}, {"moves": True}, "moves shifts 16-bit elements, got 8-bit"),
    (
      SLABS | {"transpose_a": True, "transpose_b": False},
      {},
      "groups along K of float8_e4m3fn are stored along K",
    ),
    (
      {"dtype": INT8},
      {"block_m": 64, "block_n": 40, "consumers": 1},
      "multiples of 64 rows and 16 columns, got 64x40",
    ),
    ({"dtype": INT8}, {"split_k": 2}, "int8 has no split_k and no cluster_k"),
    ({"dtype": INT8}, {"cluster_k": 2}, "int8 has no split_k and no cluster_k"),
    (
      {"dtype": INT8, "out_dtype": "int32", "bias": "n"},
      {"epilogue_n": 32},
      "results in int32 are sums of products alone",
    ),
    (
      {"dtype": INT8, "out_dtype": "int32", "scale_a": "tensor"},
      {"epilogue_n": 32},
      "results in int32 are sums of products alone",
    ),
    (
      {"scale_a": "block", "scale_b": "vector"},
      {},
      "scales of blocks or none, lines are B's, got block and vector",
    ),
    (
      {"scale_a": "line", "scale_b": "block"},
      {},
      "scales of blocks or none, lines are B's, got line and block",
    ),
    (LINES, {"swap_ab": True}, "take no swap_ab and no split_k"),
    (LINES, {"block_n": 192}, "at most 256 columns and 10240 accumulators"),
    (BLOCKS, {"block_n": 96}, "columns must divide 128 for blocks, got 96"),
    (BLOCKS, {"split_k": 2}, "take no swap_ab and no split_k"),
    (
      {"dtype": "bfloat16", "scale_b": "tensor"},
      {},
      "scales are of 8-bit operands, got bfloat16",
    ),
  ],
)
def test_refused_plans(fields, config, words):
  found = legal.reason(
    Plan.of(problem(**fields), dataclasses.replace(CONFIG, **config))
  )
  assert found and words in found


def test_totals_take_registers():
  """So fewer accumulators find room, and fewer results wait."""
  promoted, fast = (
    Plan.of(problem(m=8192, n=8192, fast_accumulation=x), CONFIG)
    for x in (False, True)
  )
  assert promoted.problem.is_promoted and not fast.problem.is_promoted
  assert not problem(INT8).is_promoted
  assert promoted.memory.stored_at_once >= fast.memory.stored_at_once
  wide = dataclasses.replace(CONFIG, block_n=256, stages=3)
  assert legal.reason(Plan.of(problem(fast_accumulation=True), wide)) is None


def test_rows_of_a_problem():
  """Older rows are the same problems, and newer ones come back."""
  plain = Problem.flat(
    m=1, n=1, k=1, dtype="bfloat16", out_dtype="bfloat16"
  ).row()
  assert not {"scale_a", "scale_b", "fast_accumulation"} & set(plain)
  p = problem(dtype_b=E5M2, fast_accumulation=True, scale_b="tensor")
  assert Problem.from_row(p.row()) == p
  swapped = p.transposed()
  assert (swapped.a.scale, swapped.b.scale) == ("tensor", None)
  assert Problem.from_row(problem(**LINES).row()).has_lines


def test_what_is_not_stored_along_k_is_copied():
  stored = problem(transpose_a=True, transpose_b=False)
  plan = Plan.of(stored, CONFIG)
  assert plan.tiling.transposed == (True, True)
  into, _ = odd_sizes.copied_bytes(plan)
  assert into == [2 * 1024 * 1024] * 2
  assert Plan.of(problem(), CONFIG).tiling.transposed == (False, False)


SIZES = (
  (4096, 4096, 4096), (64, 14336, 4096), (1, 777, 130), (1000, 777, 528)
)  # fmt: skip
KINDS = (
  {},
  {"fast_accumulation": True, "out_dtype": "float32"},
  {"dtype": INT8},
  {"dtype": INT8, "out_dtype": "int32", "scale_a": None, "scale_b": None},
  {"bias": "n", "c_dtype": "bfloat16", "activation": "gelu"},
  {"gated": True, "activation": "silu"},
  {"transpose_b": False},
  BLOCKS,
  BLOCKS | {"dtype": INT8, "gated": True, "activation": "silu"},
  ROWS,
  ROWS | BLOCKS,
  ROWS | {"dtype": INT8, "gated": True, "activation": "silu"},
  SLABS,
  SLABS | BLOCKS | {"out_dtype": "float32"},
  SLABS | {"dtype": INT8},
  SLABS | LINES,
  LINES | {"dtype": INT8, "gated": True, "activation": "silu"},
)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_the_chosen_config_lowers(size, kind):
  p = problem(**dict(zip("mnk", SIZES[size])) | SCALED | KINDS[kind])
  found = next(choose.ranked(p, xla_too=False))
  config = found.how
  assert config.block_k == 128
  assert legal.reason(Plan.of(p, config)) is None
  support = ragged_kernels if p.groups else dense
  kernel, arguments = support.example(p, config)
  traced = jax.jit(kernel).trace(*arguments)
  lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" in lowered
