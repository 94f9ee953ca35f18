"""numerics: correct results pass in any order, wrong ones never do."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import numerics, sampling

DTYPES = ("float32", "float16", "bfloat16")


def normal(shape, dtype="float32", seed=0, scale=1.0):
  x = np.random.default_rng(seed).standard_normal(shape) * scale
  return x.astype(jnp.dtype(dtype))


def operands(m, n, k, dtype="float32"):
  return (
    normal((m, k), dtype, 1),
    normal((k, n), dtype, 2),
    normal((m, n), dtype, 3),
  )


def product(a, b, order=None):
  """A @ B with float32 additions one after the other, in a given order."""
  a, b = a.astype(np.float32), b.astype(np.float32)
  out = np.zeros((a.shape[0], b.shape[1]), np.float32)
  for k in range(a.shape[1]) if order is None else order:
    out += np.outer(a[:, k], b[k])
  return out


def truncated(x):
  """Drops what float32 has no room for, instead of rounding to nearest."""
  near = x.astype(np.float32)
  toward = np.nextafter(near, np.float32(0))
  return np.where(np.abs(near.astype(np.float64)) > np.abs(x), toward, near)


# The reference.


def test_reference_is_blas():
  for k in (3, 0):
    a, b, c = operands(5, 7, k)
    got = numerics.reference(a, b, c, alpha=2.0, beta=-0.5)
    want = 2.0 * a.astype(float) @ b.astype(float) - 0.5 * c.astype(float)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14)


def test_reference_does_not_read_what_a_zero_factor_skips():
  nan = np.full((2, 2), np.nan, np.float32)
  one = np.ones((2, 2), np.float32)
  assert (numerics.reference(one, one, nan) == 2).all()
  assert (numerics.reference(nan, one, one, alpha=0.0, beta=3.0) == 3).all()


# Right results pass.


@settings(max_examples=40)
@given(
  st.integers(1, 40),
  st.integers(1, 40),
  st.integers(0, 300),
  st.sampled_from(DTYPES),
  st.sampled_from([1.0, -0.3, 7.0]),
  st.sampled_from([0.0, 1.0, -2.7]),
  st.integers(0, 2**32 - 1),
)
def test_any_order_of_summation_passes(m, n, k, dtype, alpha, beta, seed):
  a, b, c = operands(m, n, k, dtype)
  order = np.random.default_rng(seed).permutation(k)
  out = np.float32(alpha) * product(a, b, order)
  if beta:
    out = out + np.float32(beta) * c.astype(np.float32)
  out = out.astype(jnp.dtype(dtype))
  check = numerics.check(out, a, b, c, alpha=alpha, beta=beta)
  assert check.passed
  assert check.checked == m * n
  assert 0 <= check.worst_ratio <= 1


@pytest.mark.parametrize("splits", [2, 7, 64])
def test_split_sums_pass(splits):
  a, b, _ = operands(16, 24, 448)
  parts = [
    product(x, y)
    for x, y in zip(np.split(a, splits, axis=1), np.split(b, splits))
  ]
  assert numerics.check(sum(parts), a, b).passed
  for low in map(jnp.dtype, ("float16", "bfloat16")):
    rounded = sum(part.astype(low) for part in parts)
    assert rounded.dtype == low
    out = rounded.astype(np.float32)
    assert numerics.check(out, a, b, reduced=(low, splits)).passed
    assert not numerics.check(out, a, b).passed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("group", [4, 16])
def test_truncating_accumulation_passes(dtype, group):
  # A tensor core's way: exact products, aligned to the largest, cut off.
  a, b, _ = operands(8, 8, 512, dtype)
  a, b = np.abs(a.astype(float)), np.abs(b.astype(float))
  out = np.zeros((8, 8))
  for k in range(0, 512, group):
    terms = [np.outer(a[:, i], b[i]) for i in range(k, k + group)] + [out]
    unit = 2.0 ** (np.floor(np.log2(np.max(terms, axis=0))) - 23)
    out = truncated(sum(np.floor(t / unit) * unit for t in terms))
    out = out.astype(float)
  out = out.astype(np.float32)
  low = jnp.dtype(dtype)
  check = numerics.check(out, a.astype(low), b.astype(low))
  assert check.passed
  # What float32's rounding alone would allow is not enough to be sure.
  assert check.max_error > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_passes_and_reports(dtype):
  a, b, c = (jnp.asarray(x) for x in operands(33, 65, 129, dtype))
  out = 0.5 * jnp.dot(
    a, b, precision="highest", preferred_element_type=jnp.float32
  ) + 2.0 * c.astype(jnp.float32)
  out = out.astype(dtype)
  check = numerics.check(out, a, b, c, alpha=0.5, beta=2.0)
  assert check.passed and check.checked == 33 * 65
  want = numerics.reference(a, b, c, alpha=0.5, beta=2.0)
  error = np.abs(np.asarray(out).astype(float) - want)
  assert check.max_error == pytest.approx(error.max())
  bound = numerics.error_bound(a, b, c, alpha=0.5, beta=2.0)
  assert check.worst_ratio == pytest.approx((error / bound).max())


def test_tf32_needs_to_be_said():
  a, b, _ = operands(64, 64, 256)
  a, b = np.abs(a), np.abs(b)
  cut = [
    (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b)
  ]
  out = product(*cut)
  assert not numerics.check(out, a, b).passed
  assert numerics.check(out, a, b, tf32=True).passed


def test_flushed_subnormals_pass():
  a = np.full((1, 4), 1e-39, np.float32)
  b = np.full((4, 1), 1e30, np.float32)
  # On a device that flushes them the operands are zeros.
  assert numerics.check(np.zeros((1, 1), np.float32), a, b).passed
  assert numerics.check(product(a, b), a, b).passed
  tiny = np.full((1, 1), 1e-25, np.float32)
  assert numerics.check(np.zeros((1, 1), np.float32), tiny, tiny).passed


def test_float16_keeps_its_subnormals():
  a = np.full((1, 1), 2.0**-10, np.float16)
  b = np.full((1, 1), 2.0**-10, np.float16)
  out = a * b
  assert out[0, 0] == 2.0**-20
  assert numerics.check(out, a, b).passed
  assert not numerics.check(np.zeros_like(out), a, b).passed


# Units.


@pytest.mark.parametrize(
  ("dtype", "unit"),
  [("float32", 2.0**-24), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)],
)
def test_unit_roundoff_is_what_rounding_does(dtype, unit):
  # The midpoint of 1 and its successor is the worst case: u / (1 + u).
  worst, below = np.float64(1 + unit), np.float64(1 + 1.999 * unit)
  low = jnp.dtype(dtype)
  assert abs(float(worst.astype(low)) - worst) == unit
  assert float(below.astype(low)) != 1.0
  one = np.ones((1, 1), low)
  bound = numerics.error_bound(one, one)[0, 0]
  assert unit < bound < unit * 1.1 + 2.0**-20


def test_gamma():
  assert numerics.gamma(1000, 2.0**-24) == pytest.approx(1000 * 2.0**-24, 1e-3)
  with pytest.raises(ValueError, match="roundings must be below 16777216"):
    numerics.gamma(2**24, 2.0**-24)


def test_the_bound_grows_with_k_alpha_and_beta():
  bounds = []
  for k in (1, 8, 64):
    a, b = np.ones((1, k), np.float32), np.ones((k, 1), np.float32)
    bounds.append(numerics.error_bound(a, b)[0, 0])
  assert bounds == sorted(bounds)
  c = np.ones((1, 1), np.float32)
  plain = numerics.error_bound(a, b)[0, 0]
  assert numerics.error_bound(a, b, alpha=3.0)[0, 0] > 2.9 * plain
  assert numerics.error_bound(a, b, c, beta=9.0)[0, 0] > plain
  assert numerics.error_bound(a, b, out_dtype="bfloat16")[0, 0] > plain


# Wrong results fail.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [(0, 0), (31, 46), (17, 5)])
def test_one_wrong_element_fails(dtype, where):
  a, b, _ = operands(32, 47, 64, dtype)
  out = product(a, b)
  # A missing step of k in one element.
  out[where] -= (
    a.astype(np.float32)[where[0], 9] * b.astype(np.float32)[9, where[1]]
  )
  check = numerics.check(out.astype(jnp.dtype(dtype)), a, b)
  assert not check.passed
  assert check.worst_ratio > 1
  assert check.max_error > check.error_bound


@pytest.mark.parametrize("mistake", ["transposed", "no beta", "alpha", "k"])
def test_plain_mistakes_fail(mistake):
  a, b, c = operands(24, 24, 24)
  out = {
    "transposed": lambda: product(b, a) + c,
    "no beta": lambda: product(a, b),
    "alpha": lambda: 1.001 * product(a, b) + c,
    "k": lambda: product(a[:, :-1], b[:-1]) + c,
  }[mistake]()
  assert numerics.check(product(a, b) + c, a, b, c, beta=1.0).passed
  out = out.astype(np.float32)
  assert not numerics.check(out, a, b, c, beta=1.0).passed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_fails(dtype, bad):
  a, b, _ = operands(8, 9, 10, dtype)
  out = product(a, b).astype(jnp.dtype(dtype))
  out[3, 4] = bad
  check = numerics.check(out, a, b)
  assert not check.passed
  assert check.max_error == check.worst_ratio == math.inf
  assert math.isfinite(check.error_bound)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_the_operands_explain_passes_only_where_they_do(bad):
  a, b, _ = operands(8, 9, 10)
  a[2, 3] = bad
  with np.errstate(invalid="ignore"):
    right = product(a, b)
  assert not np.isfinite(right[2]).any()
  assert numerics.check(right, a, b).passed
  for row, value in ((2, 0.0), (2, -right[2, 1]), (5, np.nan)):
    wrong = right.copy()
    wrong[row, 1] = value
    if np.isnan(bad) and row == 2 and np.isnan(value):
      continue
    assert not numerics.check(wrong, a, b).passed


@pytest.mark.parametrize(
  ("value", "right"),
  [(np.inf, True), (-np.inf, False), (65504.0, False), (np.nan, False)],
)
def test_infinity_where_float16_overflows(value, right):
  a = np.full((1, 2), 200.0, np.float16)
  out = np.full((1, 1), value, np.float16)  # 80000 > 65504
  assert numerics.check(out, a, a.T).passed is right


@pytest.mark.parametrize(
  ("value", "infinite_is_right"), [(65500.0, False), (65519.0, True)]
)
def test_infinity_near_the_limit_of_float16(value, infinite_is_right):
  # 65520 rounds to infinity; the sum may be off by less than 1 there.
  a = np.array([[value - 65000.0, 65000.0]], np.float32)
  b = np.ones((2, 1), np.float32)
  out = np.full((1, 1), np.inf, np.float16)
  if infinite_is_right:
    a, b = np.tile(a / 4096, 4096), np.ones((8192, 1), np.float32)
  assert numerics.check(out, a, b).passed is infinite_is_right


# Samples.


def test_samples_meet_every_tile_and_the_edges():
  rng = np.random.default_rng(0)
  for size in (300, 4095, 4096, 10000):
    picked = sampling.stratified(size, 256, rng)
    assert picked[0] == 0 and picked[-1] == size - 1
    assert len(picked) == len(set(picked)) == 256
    # One in each stripe: no more than two stripes between neighbours.
    assert np.diff(picked).max() <= 2 * -(-size // 256)


def test_a_sample_of_everything_is_everything():
  a, b, _ = operands(9, 11, 5)
  out = product(a, b)
  assert numerics.check(out, a, b, sample=11) == numerics.check(out, a, b)
  assert numerics.check(out, a, b, sample=10).checked == 9 * 10


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_finds_a_wrong_tile(kind, dtype):
  a, b, c = operands(512, 640, 16, dtype)
  out = product(a, b) + c.astype(np.float32)
  args = [kind(x) for x in (a, b, c)]
  right = kind(out.astype(jnp.dtype(dtype)))
  check = numerics.check(right, *args, beta=1.0, sample=32)
  assert check.passed and check.checked == 32 * 32
  out[128:192, 320:384] = 0
  wrong = kind(out.astype(jnp.dtype(dtype)))
  for seed in range(3):
    check = numerics.check(wrong, *args, beta=1.0, sample=32, seed=seed)
    assert not check.passed


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sample_still_sees_one_stray_nan(kind, dtype, bad):
  a, b, _ = operands(100, 90, 8, dtype)
  out = product(a, b).astype(jnp.dtype(dtype))
  out[57, 43] = bad
  check = numerics.check(kind(out), kind(a), kind(b), sample=2)
  assert not check.passed
  assert check.checked == 4
  assert check.worst_ratio == math.inf


def test_a_sample_of_operands_with_a_nan():
  a, b, _ = operands(100, 90, 8)
  a[50] = np.nan
  assert numerics.check(product(a, b), a, b, sample=2).passed


def test_the_same_seed_is_the_same_sample_which_holds_the_corners():
  a, b, _ = operands(100, 90, 8)
  out = product(a, b)
  first, again, other = (
    numerics.check(out, a, b, sample=9, seed=seed) for seed in (4, 4, 5)
  )
  assert first == again != other
  for where in ((0, 0), (0, 89), (99, 0), (99, 89)):
    wrong = out.copy()
    wrong[where] += 1
    assert not numerics.check(wrong, a, b, sample=2).passed


# Edges and errors.


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (0, 0, 0)])
@pytest.mark.parametrize("sample", [None, 2])
def test_nothing_to_check(shape, sample):
  m, n, k = shape
  a, b, _ = operands(m, n, k)
  check = numerics.check(np.zeros((m, n), np.float32), a, b, sample=sample)
  assert check == numerics.Check(True, 0.0, 0.0, 0.0, 0)


def test_an_empty_sum_is_zero():
  a, b, _ = operands(3, 4, 0)
  out = np.zeros((3, 4), np.float32)
  assert numerics.check(out, a, b).passed
  out[1, 1] = 1e-30
  assert not numerics.check(out, a, b).passed


@pytest.mark.parametrize(
  ("error", "words", "change"),
  [
    (ValueError, r"a must have rank 2, got shape \(15,", {"a": (15,)}),
    (ValueError, "b must have 5 rows", {"b": (4, 4)}),
    (ValueError, "c is None", {"beta": 1.0}),
    (ValueError, r"c must have shape \(3, 4\)", {"c": (4, 3), "beta": 1.0}),
    (ValueError, r"out must have shape \(3, 4\)", {"out": (4, 3)}),
    (ValueError, "sample must be None or at least 1", {"sample": 0}),
    (TypeError, "float32, float16 or bfloat16, got int", {"dtype": "int32"}),
  ],
)
def test_wrong_arguments(error, words, change):
  call = {"out": (3, 4), "a": (3, 5), "b": (5, 4)} | change
  dtype = call.pop("dtype", "float32")
  for name, x in call.items():
    if isinstance(x, tuple):
      call[name] = np.ones(x, dtype if name == "out" else "float32")
  with pytest.raises(error, match=words):
    numerics.check(**call)
