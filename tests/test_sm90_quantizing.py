"""A matrix quantised in both orders: bits, races, machine code."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import compiled as compiled_lib
from pallas_gemm import quantization
from pallas_gemm.kernels.sm90 import quantized_tile, quantizing
from pallas_gemm.ops import both_orders
from tests.support import interpret, mutations

E4M3, E5M2, INT8 = quantization.DTYPES
BUGS = [
  bug
  for module in (quantizing, quantized_tile)
  for bug in mutations.bugs_of(module.__name__)
]


def matrix(shape, dtype, *, special=True):
  """Of many exponents, with a row of zeros and what is not finite."""
  rng = np.random.default_rng(0)
  with np.errstate(over="ignore"):
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-40, 14, shape))
    x = x.astype(dtype)
  if special:
    x[..., -1, :] = 0
    x[..., 0, :3] = np.array([np.nan, np.inf, -np.inf])[: shape[-1]]
  return jnp.asarray(x)


def check(x, dtype, scaling, power_of_two=False) -> bool:
  """Whether all bits are those of `quantize`."""
  how = {"power_of_two": power_of_two}
  if scaling == "given":
    return _check_given(x, dtype, how)
  got = quantizing.quantize_both(x, dtype, scaling=scaling, **how)
  if scaling == "blocks":
    q = quantization.quantize(x, dtype, block=(128, 128), **how)
    want = q.values, q.scale, q.values.T, q.scale.T
  else:
    of_rows, of_columns = (
      quantization.quantize(v, dtype, block=(1, 128), **how) for v in (x, x.T)
    )
    want = (
      *(of_rows.values, of_rows.scale.T),
      *(of_columns.values, of_columns.scale.T),
    )
  return all(map(same, jax.block_until_ready(got), want))


def _check_given(x, dtype, how) -> bool:
  """Values by rows' scales, of x and of what its rows are multiplied by."""
  factor = jnp.linspace(0.5, 1, x.shape[0])[None]
  of_columns = x.T.astype(jnp.float32) * factor
  q, q_t = (
    quantization.quantize(v, dtype, block=(1, None), **how)
    for v in (x, of_columns)
  )
  one = jnp.ones((1, 1))
  got = quantizing.cast_both(
    x,
    quantizing.Factors(one, 1 / q.scale.T),
    quantizing.Factors(factor, 1 / q_t.scale.T),
    dtype,
  )
  return all(map(same, jax.block_until_ready(got), (q.values, q_t.values)))


def same(x, y) -> bool:
  """Whether two arrays have the same bits, but for which NaN it is."""
  x, y = (np.asarray(v).astype(np.float32) for v in (x, y))
  zeros = np.signbit(x) == np.signbit(y)
  return np.array_equal(x, y, equal_nan=True) and np.all(zeros | np.isnan(x))


# Each scaling meets each source, each dtype, and scales of both kinds.
BITS = (
  ((129, 257), "bfloat16", E4M3, False, "rows blocks"),
  ((1, 127), "bfloat16", E4M3, True, "rows given"),
  ((127, 130), "float32", E4M3, False, "blocks given"),
  ((130, 1), "float16", E4M3, False, "blocks given"),
  ((130, 129), "float16", E5M2, True, "rows blocks"),
  ((64, 140), "float32", E5M2, False, "rows given"),
  ((129, 64), "bfloat16", INT8, False, "rows blocks given"),
)


@pytest.mark.parametrize(
  "shape, source, dtype, power_of_two, scaling",
  [(*case, scaling) for *case, found in BITS for scaling in found.split()],
)
def test_bits(shape, source, dtype, power_of_two, scaling):
  with interpret.interpreted(detect_races=True) as report:
    assert check(matrix(shape, source), dtype, scaling, power_of_two)
  assert not report.races_found and report.kernels == 1


# Factors of columns and of rows: vectors, or one number.
MAXIMA = (
  ((1, 1), "bfloat16", E4M3, "vectors"),
  ((130, 300), "bfloat16", INT8, "vectors"),
  ((256, 128), "float16", E5M2, "number"),
  ((130, 129), "float32", E4M3, "vectors"),
  ((2, 3, 140), "float32", INT8, "number"),
  ((2, 129, 64), "bfloat16", E5M2, "vectors"),
)


@pytest.mark.parametrize("shape, source, dtype, kind", MAXIMA)
def test_maxima(shape, source, dtype, kind):
  """Those of XLA, of products some of which are not finite."""
  x = matrix(shape, source)
  factors = [jnp.full((1, 1), 0.3)] * 2
  if kind == "vectors":
    lead = shape[0] if len(shape) == 3 else 1
    sizes = [(lead, n) for n in (shape[-1], shape[-2])]
    factors = [jnp.asarray(matrix(s, "float32", special=False)) for s in sizes]
    factors[0] = factors[0].at[:, -1].set(3e38)
  with interpret.interpreted(detect_races=True) as report:
    how = quantizing.Factors(*factors), dtype
    got = jax.block_until_ready(quantizing.maxima_both(x, *how))
  assert not report.races_found and report.kernels == 1
  want = both_orders.maxima(x.reshape(-1, *shape[-2:]), *factors, dtype)
  lost = [bool(jnp.isnan(v).any()) for v in want]
  assert lost == [dtype == "int8"] * 2
  assert all(same(v, w.reshape(v.shape)) for v, w in zip(got, want))


def test_maxima_of_mapped_matrices():
  x = jnp.stack([matrix((2, 5, 7), "float32") * n for n in (1, 2, 3)])
  columns, rows = jnp.linspace(1, 2, 42).reshape(3, 2, 7), jnp.ones((1, 1))
  of_one = lambda *v: both_orders.maxima(*v, rows, INT8)  # noqa: E731
  got = jax.vmap(of_one)(x, columns)
  each = zip(*map(of_one, x, columns))
  assert all(map(same, got, map(jnp.stack, each)))


def test_matrices_are_quantised_one_by_one():
  x = jnp.stack(
    [matrix((130, 140), "bfloat16"), matrix((130, 140), "bfloat16")]
  )
  x = x * jnp.array([1, 2], x.dtype)[:, None, None]
  with interpret.interpreted():
    got = quantizing.quantize_both(x, E4M3, scaling="rows")
    each = [quantizing.quantize_both(v, E4M3, scaling="rows") for v in x]
  assert all(map(same, got, map(jnp.stack, zip(*each))))


def _run(scaling: str) -> tuple[bool, bool]:
  """Whether bits are right, and whether races were found."""
  x = matrix((130, 129), "bfloat16", special=False)
  with interpret.interpreted(detect_races=True) as report:
    is_right = check(x, E4M3, scaling)
  return is_right, report.races_found


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_caught(bug, monkeypatch):
  if bug.call == "plgpu.wait_smem_to_gmem":
    pytest.xfail(mutations.OUTLIVED)
  planted = mutations.Planted(bug, monkeypatch)
  found = mutations.comes_to_light(
    lambda: _run("blocks"), mutations.attempts(bug)
  )
  assert planted.reached and found


def example(shape, source, dtype, scaling):
  """See `compiled.compile_example`."""

  def both(x, *vectors):
    if scaling == "maxima":
      return quantizing.maxima_both(x, quantizing.Factors(*vectors), dtype)
    if vectors:
      of_x, of_transpose = vectors[:2], vectors[2:]
      factors = quantizing.Factors(*of_x), quantizing.Factors(*of_transpose)
      return quantizing.cast_both(x, *factors, dtype)
    return quantizing.quantize_both(x, dtype, scaling=scaling)

  r, c = (jax.ShapeDtypeStruct((1, n), "float32") for n in shape)
  vectors = {"given": (c, r, r, c), "maxima": (c, r)}.get(scaling, ())
  return both, [jax.ShapeDtypeStruct(tuple(shape), source), *vectors]


@pytest.mark.aot
@pytest.mark.parametrize(
  "shape, source, dtype, scaling, blocks",
  (
    ((8192, 8192), "bfloat16", E4M3, "rows", 3),
    ((8192, 8192), "bfloat16", E4M3, "blocks", 3),
    ((8192, 8192), "float16", E5M2, "rows", 3),
    ((8192, 8192), "bfloat16", INT8, "rows", 2),
    ((8192, 8192), "float32", E4M3, "rows", 2),
    ((8192, 8192), "float32", E5M2, "blocks", 2),
    ((8192, 8192), "bfloat16", E4M3, "given", 3),
    ((8192, 8192), "bfloat16", E4M3, "maxima", 4),
    ((8192, 8192), "bfloat16", INT8, "maxima", 4),
    ((8192, 8192), "float32", E4M3, "maxima", 3),
    ((4001, 1000), "float16", E5M2, "maxima", 4),
    ((4001, 1000), "bfloat16", E4M3, "rows", 3),
    ((33, 40), "float32", INT8, "blocks", 2),
  ),
)
def test_instructions(shape, source, dtype, scaling, blocks):
  """No spills, vectors of 16 bytes, two values a cast, several blocks."""
  compiled = compiled_lib.compile_example(
    f"{__name__}:example",
    shape=shape,
    source=source,
    dtype=dtype,
    scaling=scaling,
  )
  assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
  assert compiled.occupancy(compiled_lib.GPU).blocks == blocks
  kernel = compiled.only("sm90_quantize")
  assert kernel.has(r"LDS\.128") and kernel.has("UTMALDG.2D")
  # Columns of 16 bits are transposed on their way.
  assert kernel.has(r"LDSM\.16\.MT88\.4") == (source != "float32")
  cast = {E4M3: r"F2FP\.SATFINITE\.E4M3\S*", E5M2: r"F2FP\.SATFINITE\.E5M2\S*"}
  if dtype in cast and scaling != "maxima":
    count = len(re.findall(cast[dtype], kernel.sass))
    assert count == 2 * 128 * 128 // 128 // 2
