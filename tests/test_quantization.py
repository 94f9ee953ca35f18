"""Operands of 8 bits: numbers of `quantize`, `Quantized`, and their errors."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import Quantized, Recipe, quantization, quantize
from tests.support.eight_bit_calls import spread
from tests.support.products import float64

E4M3, E5M2, INT8 = quantization.DTYPES
# |q s - x| is at most the first of |x|, and the second of s.
BOUNDS = {
  E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17), INT8: (2.0**-20, 0.5)
}  # fmt: skip
BLOCKS = (1, 128), (128, 128), (1, None), (None, None)
TINY = 2.0**-126


def many_exponents(shape, dtype, seed=0):
  """Of all exponents that a dtype has, by rows and within them; some zeros."""
  rng, info = np.random.default_rng(seed), jnp.finfo(dtype)
  low, high = info.minexp - info.nmant, info.maxexp - 1
  exponents = rng.integers(low, high, (shape[0], 1))
  within = rng.integers(-30, 1, shape)
  with np.errstate(all="ignore"):
    x = rng.uniform(-2, 2, shape) * np.exp2(np.maximum(exponents + within, low))
    x *= rng.uniform(size=shape) > 0.1
    return np.clip(x, float(info.min), float(info.max)).astype(dtype)


def largest_of_blocks(x, block):
  """The largest |x| of the block that each element is in."""
  found = np.abs(x)
  for i, of in enumerate(block):
    starts = np.arange(0, x.shape[i], of or x.shape[i])
    found = np.maximum.reduceat(found, starts, axis=i)
  return spread(found, x.shape)


@pytest.mark.parametrize("dtype", quantization.DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("power_of_two", (False, True))
@pytest.mark.parametrize("source", ("float32", "bfloat16", "float16"))
def test_errors_are_within_bounds(dtype, block, power_of_two, source):
  shape = (129, 256) if source == "bfloat16" else (300, 127)
  x = many_exponents(shape, source)
  q = quantize(x, dtype, block=block, power_of_two=power_of_two)
  assert q.shape == shape and q.dtype == dtype and q.checked("q") is q
  assert q.scale.dtype == jnp.float32
  s, x = spread(float64(q.scale), shape), x.astype(np.float64)
  assert np.all(np.isfinite(s)) and s.min() >= TINY
  of_x, of_s = BOUNDS[dtype]
  flushed = np.where(np.abs(x) < TINY, np.abs(x), 0)
  got = np.asarray(q.values).astype(np.float64) * s
  assert np.all(np.abs(got - x) <= of_x * np.abs(x) + of_s * s + flushed)
  # And scales are no larger than need be.
  amax = largest_of_blocks(x, block)
  exact = np.maximum(amax / quantization.largest(dtype), TINY)
  if power_of_two:
    exact = np.exp2(np.ceil(np.log2(exact)))
  exact = np.where(amax < TINY, 1.0, exact)
  assert np.all(np.abs(s - exact) <= (not power_of_two) * 2.0**-23 * exact)


@pytest.mark.parametrize("dtype", quantization.DTYPES)
def test_powers_of_two_are_the_least(dtype):
  most = np.float32(quantization.largest(dtype))
  x = [most, np.nextafter(most, 0), np.nextafter(most, 2 * most), 2.0**-125]
  x = np.array([*x, np.finfo(np.float32).max], np.float32)[:, None]
  q = quantize(x, dtype, block=(1, 1), power_of_two=True)
  last = {E4M3: 120, E5M2: 113, INT8: 122}[dtype]
  assert q.scale[:, 0].tolist() == [1, 1, 2, TINY, 2.0**last]


@pytest.mark.parametrize("dtype", (E4M3, E5M2))
def test_what_is_not_finite_stays_where_it_is(dtype):
  x = np.ones((2, 256), np.float32)
  x[0, 3], x[0, 4], x[0, 5], x[1, 128:] = np.nan, np.inf, -np.inf, np.inf
  q = quantize(x, dtype, block=(1, 128))
  one = 1 / quantization.largest(dtype)
  np.testing.assert_allclose(q.scale, [[one, one], [one, 1]], rtol=1e-6)
  got = np.asarray(q.dequantized())
  want = x if dtype == E5M2 else np.where(np.isinf(x), np.nan, x)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_int8_of_what_is_not_finite_has_a_scale_of_nan():
  x = np.ones((2, 256), np.float32)
  x[0, 3], x[1, 200] = np.nan, -np.inf
  q = quantize(x, INT8, block=(1, 128))
  assert np.isnan(q.scale).tolist() == [[True, False], [False, True]]
  assert not np.any(q.values[0, :128]) and np.all(q.values[0, 128:] == 127)


@pytest.mark.parametrize("shape", ((0, 5), (3, 0)))
@pytest.mark.parametrize("block", BLOCKS)
def test_empty(shape, block):
  q = quantize(jnp.zeros(shape), block=block).checked("q")
  assert q.shape == q.dequantized().shape == shape


def test_ranks_and_zeros():
  q = quantize(jnp.zeros((2, 3, 130)), block=(1, 1, 128))
  assert q.scale.shape == (2, 3, 2) and np.all(q.scale == 1)
  number = quantize(jnp.float32(3), block=(), power_of_two=True)
  assert number.scale.shape == () and number.dequantized() == 3
  assert quantize([1.0, 2.0], INT8, block=(None,)).values.tolist() == [64, 127]


def test_nothing_is_copied_for_whole_blocks():
  x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
  text = jax.jit(lambda x: quantize(x, block=(1, 128))).lower(x).as_text()
  assert "stablehlo.pad" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize("scale_dtype", quantization.SCALE_DTYPES)
def test_dequantized(scale_dtype):
  values = jnp.arange(-100, 160).astype(jnp.int8).reshape(2, 130)
  scale = jnp.array([[1, 2], [4, 0.5]], scale_dtype)
  q = Quantized(values, scale).checked("q")
  want = np.repeat(np.array([[1, 2], [4, 0.5]]), 128, axis=1)[:, :130] * values
  assert np.array_equal(q.dequantized(), want)
  assert np.array_equal(q.T.dequantized(), want.T)
  assert np.array_equal(jax.jit(lambda q: q.mT.dequantized())(q), want.T)
  total = Quantized(values, jnp.array(2, scale_dtype)).checked("q")
  assert np.array_equal(total.T.dequantized(), 2.0 * values.T)
  with pytest.raises(ValueError, match=r"T needs .* got shape \(1, 2, 130\)"):
    _ = Quantized(values[None], scale[None]).T


def test_under_transformations():
  x = jax.random.normal(jax.random.key(0), (3, 4, 256))
  q = quantize(x, block=(1, 1, 128))
  want = q.dequantized()
  assert np.array_equal(jax.vmap(lambda q: q.dequantized())(q), want)
  _, got = jax.lax.scan(lambda _, q: (None, q.dequantized()), None, q)
  assert np.array_equal(got, want)
  each = jax.vmap(lambda x: quantize(x, block=(1, 128)))(x)
  assert jax.tree.all(jax.tree.map(np.array_equal, each, q))
  assert jax.tree.map(lambda _: None, q).values is None


def test_indexing_by_arrays_of_any_rank():
  """Where all elements share a scale."""
  q = quantize(jnp.arange(40.0).reshape(4, 10), "int8", block=(None, 1))
  for index in (jnp.array([2]), jnp.array([[1, 3, 0], [2, 2, 1]]), 1):
    got, want = (
      np.asarray(v) for v in (q[index].dequantized(), q.dequantized()[index])
    )
    assert np.array_equal(got, want)
  with pytest.raises(TypeError, match="the index must be one of"):
    q[np.True_]


def test_indexing():
  x = jax.random.normal(jax.random.key(0), (3, 4, 256))
  for block in ((1, 1, 128), (None, 1, 128)):
    q = quantize(x, block=block)
    want = q.dequantized()
    for index in (0, -1, np.int32(1), slice(1, None), jnp.array([2, 0])):
      assert np.array_equal(q[index].checked("q").dequantized(), want[index])
    got = jax.jit(lambda q, i: q[i].dequantized())(q, 2)
    assert np.array_equal(got, want[2])
  assert quantize(x, block=(1,) * 3)[0].scale.shape == (4, 256)
  rows = [row.dequantized() for row in q]
  assert np.array_equal(rows, want)
  assert Quantized(x.astype(INT8), jnp.ones(()))[1].scale.shape == ()
  with pytest.raises(TypeError, match=r"index must be .* got \(0, 1\)"):
    _ = q[0, 1]
  with pytest.raises(ValueError, match=r"scales of blocks, got \(3, 1\)"):
    _ = quantize(jnp.ones((300, 5)), block=(128, None))[0]


@pytest.mark.parametrize(
  "size, tile, scales",
  ((512, 32, 512), (512, 128, 4), (512, 256, 4), (96, 96, 1), (96, 1, 96)),
)
def test_qwix(size, tile, scales):
  values = jnp.ones((2, size), jnp.int8)
  scale = jnp.arange(1.0, 1 + 2 * (size // tile)).reshape(2, -1)
  array = types.SimpleNamespace(qvalue=values, scale=scale, zero_point=None)
  q = quantization.as_quantized(array)
  assert np.array_equal(q.dequantized(), np.repeat(scale, tile, axis=1))
  assert q.scale.shape == (2, scales)
  assert quantization.as_quantized(q) is q
  assert quantization.as_quantized(values) is None
  array.zero_point = jnp.zeros(())
  with pytest.raises(ValueError, match=r"rhs\.zero_point must be None, got"):
    quantization.as_quantized(array, "rhs")


@pytest.mark.parametrize(
  "x, dtype, block, error, message",
  (
    ("int32", E4M3, (1, 1), TypeError, "x must be .* got int32"),
    ("complex64", E4M3, (1, 1), TypeError, "x must be .* got complex64"),
    ("float32", "uint8", (1, 1), TypeError, "dtype must .* got uint8"),
    ("float32", jnp.int4, (1, 1), TypeError, "dtype must .* got int4"),
    ("float32", None, (1, 1), TypeError, "dtype must .* got None"),
    ("float32", "float8_e4m3fnuz", (1, 1), TypeError, "e4m3fnuz"),
    ("float32", "fp8", (1, 1), TypeError, "got 'fp8'"),
    ("float32", E4M3, (0, 1), ValueError, r"block must .* got \(0, 1\)"),
    ("float32", E4M3, (True, 1), ValueError, r"block must .* got \(True, 1\)"),
    ("float32", E4M3, (1, 1.0), ValueError, r"block must .* got \(1, 1.0\)"),
    ("float32", E4M3, (1,), ValueError, r"of x \(2, 2\), got \(1,\)"),
    ("float32", E4M3, 128, TypeError, "block must .* got 128"),
  ),
)
def test_errors_of_quantize(x, dtype, block, error, message):
  with pytest.raises(error, match=message):
    quantize(jnp.ones((2, 2), x), dtype, block=block)


@pytest.mark.parametrize(
  "fields, error, message",
  (
    ({"forward": "fp8"}, TypeError, "forward must be one of .* got 'fp8'"),
    ({"gradient": "uint8"}, TypeError, "gradient must be .* got uint8"),
    ({"gradient": "int8"}, ValueError, "kind of forward, .*e4m3fn, got int8"),
    ({"forward": "int8"}, ValueError, "forward, int8, got float8_e4m3fn"),
    ({"scaling": "column"}, ValueError, "scaling must .* got 'column'"),
    ({"power_of_two": 1}, TypeError, "power_of_two must be a bool, got 1"),
    ({"fast_accumulation": None}, TypeError, "must be a bool, got None"),
  ),
)
def test_errors_of_recipes(fields, error, message):
  with pytest.raises(error, match=message):
    Recipe(**fields)


def test_recipes_are_keys():
  recipe = Recipe(forward=jnp.float8_e4m3fn, gradient=E5M2)
  assert recipe == Recipe(gradient=jnp.float8_e5m2)
  assert hash(recipe) == hash(Recipe(gradient=E5M2))
