"""What users get wrong with operands of 8 bits, and what is said of it."""

import re
import types

from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.quantization import Quantized, Recipe
from tests.support.ops import NUMBERS, ROWS, SUMS, ragged_numbers

E4M3, INT8 = "float8_e4m3fn", "int8"
PRESETS = lax.DotAlgorithmPreset


def q(*shape, scale=(), dtype=E4M3):
  of = scale if hasattr(scale, "dtype") else ones(*scale)
  return Quantized(ones(*shape, dtype=dtype), of)


def ones(*shape, dtype="float32"):
  return jnp.asarray(np.ones(shape, jnp.dtype(dtype)))


X, W, STACK = q(4, 6), q(6, 8), q(3, 6, 8)
XI, WI = q(4, 6, dtype=INT8), q(6, 8, dtype=INT8)
SIZES = jnp.array([1, 1, 2])
# What each op is called with, where nothing is wrong.
CALLS = {
  "matmul": {"a": X, "b": W},
  "gated_matmul": {"x": X, "w_gate": W, "w_up": W},
  "dot_general": {"lhs": X, "rhs": W, "dimension_numbers": NUMBERS},
  "ragged_dot": {"lhs": X, "rhs": STACK, "group_sizes": SIZES},
  "gated_ragged_dot": {
    "x": X,
    "w_gate": STACK,
    "w_up": STACK,
    "group_sizes": SIZES,
  },
  "ragged_dot_general": {
    "lhs": X,
    "rhs": STACK,
    "group_sizes": SIZES,
    "ragged_dot_dimension_numbers": ROWS,
  },
}
FIRST = {op: next(iter(call)) for op, call in CALLS.items()}
OUT = {
  op: "out_dtype" if "matmul" in op else "preferred_element_type"
  for op in CALLS
}
ZERO_POINT = types.SimpleNamespace(
  qvalue=X.values, scale=X.scale, zero_point=ones()
)
# Whatever op gets it for its first operand, {0}; by what is said of it.
OPERANDS = {
  r"ValueError: {0}.scale must have shape \(\) or rank 2 .* got shape \(6,\)":
    q(4, 6, scale=(6,)),
  r"ValueError: .* {0}.scale must be 1, 6 or 1 .* got shape \(4, 2\)":
    q(4, 6, scale=(4, 2)),
  r"ValueError: .* 0 of {0}.scale must be 1, 4 or 1 .* got shape \(0, 1\)":
    q(4, 6, scale=(0, 1)),
  "TypeError: {0}.values must be one of .* got list":
    Quantized([[1.0]], ones()),
  "ValueError: {0}.zero_point must be None, got ArrayImpl": ZERO_POINT,
  "TypeError: operands with scales must all be of .* got float8.* and int8":
    XI,
}  # fmt: skip
OPERANDS |= {
  "TypeError: {0}.scale must be one of .* got " + dtype:
    q(4, 6, scale=np.ones((), dtype))
  for dtype in ("int32", "float16", "float64")
}  # fmt: skip
OPERANDS |= {
  "TypeError: {0}.values must be one of .* got " + dtype:
    q(4, 6, dtype=getattr(ml_dtypes, dtype, dtype))
  for dtype in ("bfloat16", "uint8", "int4", "float8_e4m3fnuz",
                "float8_e4m3b11fnuz")
}  # fmt: skip
# Of the result's dtype, {0}.
RESULTS = {
  "TypeError: {0} must be of 16 or 32 bits, floating, .* got " + dtype: dtype
  for dtype in (INT8, E4M3, "int32")
}
RAISED = [
  (op, words.format(FIRST[op]), {FIRST[op]: value})
  for op in CALLS
  for words, value in OPERANDS.items()
] + [
  (op, words.format(OUT[op]), {OUT[op]: value})
  for op in CALLS
  for words, value in RESULTS.items()
]
# Of one op.
BF16 = {"a": ones(4, 6, dtype="bfloat16"), "b": ones(6, 8, dtype="bfloat16")}
BARE = {"a": X.values, "b": W.values}
BARE_INTS = {"a": XI.values, "b": WI.values, "out_dtype": "int32"}
RECIPE = {"quantize": Recipe()}
OF_MATMUL = [
  ("TypeError: .* got float8_e4m3fn and int8", {"b": WI}),
  ("TypeError: c must have a dtype that fits .* float32, got complex64",
   {"c": ones(4, 8, dtype="complex64")}),
  ("TypeError: bias must have a dtype that fits .* float32, got int32",
   {"bias": ones(8, dtype="int32")}),
  ("TypeError: an array beside the Quantized b must be of 8 bits or floating",
   {"a": ones(4, 6, dtype="int32")}),
  ("TypeError: quantize= needs b to be Quantized or of .* got float8_e4m3fn",
   BF16 | RECIPE | {"b": W.values}),
  ("ValueError: bias must broadcast", {"bias": ones(5)}),
  ("ValueError: b must have K = 6 like a, got K = 5", {"b": q(5, 8)}),
  ("TypeError: activation must keep shape and dtype",
   BARE_INTS | {"activation": jnp.tanh}),
  ("TypeError: quantize must be a pallas_gemm.Recipe or None, got str",
   BF16 | {"quantize": "block"}),
  ("TypeError: quantize must be a pallas_gemm.Recipe or None, got type",
   BF16 | {"quantize": Recipe}),
  ("TypeError: quantize must be .*hashable|TypeError: quantize must be",
   BF16 | {"quantize": {"scaling": "row"}}),
  ("TypeError: quantize= needs a to be Quantized or of .* got float8_e4m3fn",
   BARE | RECIPE),
  ("TypeError: quantize= needs a to be Quantized or of .* got int8",
   BARE_INTS | {"out_dtype": None} | RECIPE),
  ("TypeError: quantize= needs a to be Quantized or of .* got complex64",
   {x: v.astype("complex64") for x, v in BF16.items()} | RECIPE),
  ("TypeError: quantize= needs a to be Quantized or of .* got int32",
   {x: v.astype("int32") for x, v in BF16.items()} | RECIPE),
  ("ValueError: precision must be None beside quantize=",
   BF16 | RECIPE | {"precision": "highest"}),
]  # fmt: skip
RAISED += [("matmul", words, changes) for words, changes in OF_MATMUL]


@pytest.mark.parametrize(("op", "words", "changes"), RAISED)
def test_told(op, words, changes):
  with pytest.raises((TypeError, ValueError)) as info:
    getattr(pallas_gemm, op)(**CALLS[op] | changes)
  said = f"{type(info.value).__name__}: {info.value}".replace("\n", " ")
  assert re.match(words, said), said


def test_the_right_calls():
  for op, call in CALLS.items():
    assert getattr(pallas_gemm, op)(**call).dtype == jnp.bfloat16


# What no kernel has.
OF_GROUPS = {
  "lhs": q(300, 4, scale=(3, 1)),
  "rhs": q(300, 8, scale=(3, 1)),
  "ragged_dot_dimension_numbers": SUMS,
}
LACKS = [
  (r"a scale for each element along what is summed over in \[M, K\]",
   "matmul", {"a": q(4, 6, scale=(4, 6))}),
  (r"a scale for each element along what is summed over in \[K, N\]",
   "matmul", {"b": q(6, 8, scale=(6, 1))}),
  (r"a scale for each element along what is summed over in \[G, K, N\]",
   "ragged_dot", {"rhs": q(3, 6, 8, scale=(1, 6, 8))}),
  ("blocks along the rows of groups, which start anywhere",
   "ragged_dot_general", OF_GROUPS),
  ("operands must be .* got uint8", "matmul",
   {"a": ones(4, 6, dtype="uint8"), "b": ones(6, 8, dtype="uint8")}),
  ("operands must be .* got float8_e4m3fnuz", "matmul",
   {x: v.astype(ml_dtypes.float8_e4m3fnuz) for x, v in BF16.items()}
   | {"out_dtype": "float32"}),
  ("multiplies int8 and adds in int32, got precision", "matmul",
   {"a": XI, "b": WI, "precision": PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM}),
  ("multiplies int8 and adds in int32, got precision", "matmul",
   {"a": XI, "b": WI, "precision": PRESETS.BF16_BF16_F32}),
  ("multiplies float8_e4m3fn and adds in float32, got precision", "matmul",
   {"precision": PRESETS.BF16_BF16_F32}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "op", "changes"), LACKS)
def test_no_kernel(words, op, changes):
  with pytest.raises(NotImplementedError, match=words):
    getattr(pallas_gemm, op)(**CALLS[op] | changes, implementation="sm90")


@pytest.mark.parametrize("case", (0, 1, 2, 3))
def test_xla_has_them(case):
  _, op, changes = LACKS[case]
  out = getattr(pallas_gemm, op)(**CALLS[op] | changes)
  assert np.isfinite(np.asarray(out, np.float32)).all()


def test_highest_precision_of_int8_is_taken():
  a, b = XI.values, WI.values
  out = pallas_gemm.matmul(a, b, out_dtype="int32", precision="highest")
  assert np.array_equal(out, lax.dot(a, b, preferred_element_type="int32"))


LEFT_TO_LAX = {
  "it has batch dimensions":
    {"lhs": ones(2, 4, 6), "rhs": ones(2, 3, 6, 8),
     "ragged_dot_dimension_numbers":
       ragged_numbers(((2,), (2,)), (1,), (1,), ((0,), (0,)))},
  "it contracts 2 dimensions":
    {"lhs": ones(4, 6, 2), "rhs": ones(3, 6, 2, 8),
     "ragged_dot_dimension_numbers": ragged_numbers(((1, 2), (1, 2)))},
  "operands must have one dtype, got float32 and bfloat16":
    {"lhs": ones(4, 6), "rhs": ones(3, 6, 8, dtype="bfloat16")},
}  # fmt: skip


@pytest.mark.parametrize("words", LEFT_TO_LAX)
def test_what_lax_computes_takes_no_recipe(words):
  call = CALLS["ragged_dot_general"] | LEFT_TO_LAX[words]
  with pytest.raises(NotImplementedError, match=f"quantize .*: {words}"):
    pallas_gemm.ragged_dot_general(**call, quantize=Recipe())


@pytest.mark.parametrize("op", CALLS)
def test_recipes_of_every_op(op):
  """Beside what is `Quantized`, and of a wrong type."""
  call = {x: v for x, v in CALLS[op].items() if x != FIRST[op]}
  call[FIRST[op]] = ones(4, 6)
  out = getattr(pallas_gemm, op)(**call, quantize=Recipe())
  assert out.dtype == jnp.bfloat16 and bool(jnp.isfinite(out).all())
  with pytest.raises(TypeError, match=r"quantize must be .* got str"):
    getattr(pallas_gemm, op)(**call, quantize="row")


def test_frozen_weights_of_another_kind():
  with pytest.raises((TypeError, ValueError), match="int8"):
    pallas_gemm.matmul(ones(4, 6), WI, quantize=Recipe())
