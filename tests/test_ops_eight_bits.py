"""Products of 8 bits by every op: values, of each kind of scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.quantization import Quantized, quantize
from tests.support import eight_bit_calls
from tests.support.eight_bit_calls import EVERY, ON_KERNEL, Draw
from tests.support.ops import ROWS, SUMS, lowered

SMOKE = range(2)
E4M3, E5M2 = eight_bit_calls.FLOATS


def seeds(count):
  return [
    pytest.param(x, marks=[pytest.mark.smoke] * (x in SMOKE))
    for x in range(count)
  ]


@pytest.mark.parametrize("seed", seeds(17))
@pytest.mark.parametrize("op", EVERY)
def test_values(op, seed):
  run, assert_right = EVERY[op](Draw(seed, [*EVERY].index(op)))
  out = run()
  assert_right(out)
  assert np.array_equal(np.asarray(run()), np.asarray(out), equal_nan=True)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("op", ON_KERNEL)
def test_sm90(op, seed):
  """The kernel, interpreted."""
  draw = Draw(seed, 100 + ON_KERNEL.index(op), kernel=True)
  run, assert_right = EVERY[op](draw, implementation="sm90")
  assert_right(run())


@pytest.mark.parametrize("implementation", (None, "sm90"))
@pytest.mark.parametrize("block", ((1, 128), (1, 1), (1, None)))
def test_nothing_to_sum(implementation, block):
  """Of K = 0, where a scale has nothing, whatever it is one for."""
  a, b = quantize(jnp.ones((130, 0)), block=block), jnp.ones((0, 7), E4M3)
  b = Quantized(b, jnp.ones((0, 7) if block[1] == 1 else (0, 1)))
  bias = jnp.arange(7.0)
  out = pallas_gemm.matmul(a, b, bias=bias, implementation=implementation)
  assert out.dtype == "bfloat16"
  np.testing.assert_array_equal(out, jnp.broadcast_to(bias, (130, 7)))


# Values alone.


@pytest.mark.parametrize("types", ((E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2)))
@pytest.mark.parametrize("out_dtype", eight_bit_calls.OUT_DTYPES)
def test_bare_floats(types, out_dtype):
  draw = Draw(0)
  a, b = (
    draw.normal(5, 140, dtype=types[0]),
    draw.normal(140, 9, dtype=types[1]),
  )
  sizes = jnp.array([2, 3])
  dense = pallas_gemm.matmul(a, b, out_dtype=out_dtype)
  general = pallas_gemm.dot_general(a, b, preferred_element_type=out_dtype)
  grouped = pallas_gemm.ragged_dot(
    a, jnp.stack([b, b]), sizes, preferred_element_type=out_dtype
  )
  for out in (dense, general, grouped):
    assert out.dtype == out_dtype
    eight_bit_calls.assert_right(out, *(np.float64(v) for v in (a, b)))


@pytest.mark.parametrize("how", ({}, {"implementation": "sm90"}))
def test_sums_of_int8_are_those_of_lax(how):
  rng = np.random.default_rng(0)
  a = jnp.asarray(rng.integers(-128, 128, (70, 150)), jnp.int8)
  b = jnp.asarray(rng.integers(-128, 128, (2, 150, 40)), jnp.int8)
  sizes = jnp.array([1, 60])
  want = jax.lax.dot(a, b[0], preferred_element_type=jnp.int32)
  out = pallas_gemm.matmul(a, b[0], out_dtype=jnp.int32, **how)
  assert out.dtype == jnp.int32 and np.array_equal(out, want)
  if not how:
    out = pallas_gemm.dot_general(a, b[0], preferred_element_type=jnp.int32)
    assert np.array_equal(out, want)
  out = pallas_gemm.ragged_dot(a, b, sizes, None, jnp.int32, **how)
  want = jax.lax.ragged_dot(a, b, sizes, preferred_element_type=jnp.int32)
  assert np.array_equal(out, want)


def scaled_by_one(v):
  return Quantized(jnp.asarray(v), jnp.float32(1))


def large_int8(*lead, k):
  """A and B, and A @ B: above 2^24 float32 rounds each sum that it adds to."""
  rng = np.random.default_rng(0)
  a = rng.integers(60, 128, (*lead, 16, k)).astype(np.int8)
  b = rng.integers(60, 128, (*lead, k, 32)).astype(np.int8)
  return a, b, np.matmul(a, b, dtype=np.int32).astype(np.float32)


@pytest.mark.parametrize("k", (4096, 4097))
@pytest.mark.parametrize("lead", ((), (2,)))
def test_xla_adds_int8_in_int32(lead, k):
  *operands, want = large_int8(*lead, k=k)
  a, b = map(scaled_by_one, operands)

  def f(precision=None):
    how = {"out_dtype": jnp.float32, "implementation": "xla"}
    return pallas_gemm.matmul(a, b, precision=precision, **how)

  assert np.array_equal(f(), want)
  # CPUs have no such product of int8.
  assert np.array_equal(f("ANY_F8_ANY_F8_F32_FAST_ACCUM"), want)
  assert ("x32xi32>" in lowered(f)) == (k % 16 == 0)


@pytest.mark.parametrize("kind", (jnp.asarray, scaled_by_one))
@pytest.mark.parametrize("k", (4096, 4097))
def test_xla_adds_int8_of_groups_in_int32(k, kind):
  a, b, want = large_int8(k=k)
  rows = pallas_gemm.ragged_dot(
    kind(a), kind(b[None]), jnp.array([16]), preferred_element_type=want.dtype
  )
  assert np.array_equal(rows, want)
  sums = pallas_gemm.ragged_dot_general(
    kind(a.T), kind(b), jnp.array([k]), SUMS, preferred_element_type=want.dtype
  )
  assert np.array_equal(sums[0], want)


@pytest.mark.parametrize("kind", (jnp.asarray, scaled_by_one))
def test_sums_of_int8_that_int32_does_not_hold(kind):
  a = np.full((2, 140_000), 127, np.int8)
  out = pallas_gemm.dot_general(
    kind(a), kind(a.T), preferred_element_type=jnp.float32
  )
  np.testing.assert_allclose(out, 127.0**2 * 140_000, rtol=1e-3)


@pytest.mark.parametrize("alpha", (2, np.int32(2), jnp.array(-3)))
def test_the_kernel_leaves_scaled_sums_of_int8_to_xla(alpha):
  rng = np.random.default_rng(0)
  a, b = (jnp.asarray(rng.integers(-9, 9, (64, 64)), jnp.int8) for _ in "ab")

  def f(alpha, names=("sm90", "xla"), **how):
    how |= {"out_dtype": jnp.int32, "implementation": names}
    return pallas_gemm.matmul(a, b, alpha=alpha, **how)

  sums = np.matmul(a, b, dtype=np.int32)
  assert np.array_equal(f(alpha), int(alpha) * sums)
  assert np.array_equal(f(1, activation=jnp.abs), abs(sums))
  assert "mosaic_gpu" not in lowered(lambda: f(alpha))
  assert "mosaic_gpu" not in lowered(lambda: f(1, activation=jnp.abs))
  with pytest.raises(NotImplementedError, match="sm90: results in int32"):
    f(alpha, "sm90")
  assert "mosaic_gpu" in lowered(lambda: f(1))
  # Many factors are applied after the kernel.
  assert "mosaic_gpu" in lowered(lambda: jax.vmap(f)(jnp.array([1, 2])))


def test_results_are_bfloat16_where_an_operand_has_a_scale():
  x = Quantized(jnp.ones((4, 4), E4M3), jnp.ones(()))
  stack, one = jax.tree.map(lambda v: v[None], x), jnp.array([4])
  stack = Quantized(stack.values, x.scale)
  outs = [
    pallas_gemm.matmul(x, x.values),
    pallas_gemm.matmul(x.values, x),
    pallas_gemm.gated_matmul(x, x, x),
    pallas_gemm.dot_general(x, x),
    pallas_gemm.ragged_dot(x, stack, one),
    pallas_gemm.gated_ragged_dot(x, stack, stack, one),
    pallas_gemm.ragged_dot_general(x, stack, one, ROWS),
    pallas_gemm.ragged_dot_general(x, x, one, SUMS),
  ]
  assert {out.dtype.name for out in outs} == {"bfloat16"}


@pytest.mark.parametrize("number", (-2.0, 0.0, np.nan, np.inf))
def test_scales_are_arithmetic(number):
  """Whatever they are, as NumPy has it."""
  values = jnp.array([[1, 0, -2], [3, 4, 5]], E4M3)
  a = Quantized(values, jnp.array([[number], [1.0]]))
  out = jax.jit(pallas_gemm.matmul)(a, Quantized(values.T, jnp.ones(())))
  exact = np.float64(values)
  with np.errstate(invalid="ignore"):
    want = exact @ exact.T * np.array([[number], [1]])
    products = (exact * np.array([[number], [1]])) @ exact.T
  # A scale may be applied to a sum or to its terms: inf * 0 is among those.
  same = [np.array_equal(out, x, equal_nan=True) for x in (want, products)]
  assert any(same), (out, want)


def test_beside_16_bits_it_is_multiplied_out():
  draw = Draw(0)
  a, b = draw.normal(5, 140, dtype="bfloat16"), draw.normal(140, 9)
  q = pallas_gemm.quantize(b, block=(None, 1))
  want = pallas_gemm.matmul(a, q.dequantized(jnp.bfloat16))
  assert np.array_equal(pallas_gemm.matmul(a, q), want)


def test_a_precision_of_the_context():
  """Is said of sums of 8 bits, not of what stands in for them."""
  a, b = (quantize(jnp.ones((16, 16)), block=(1, 1)) for _ in range(2))
  precision = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
  want = pallas_gemm.matmul(a, b, precision=precision)
  with jax.default_matmul_precision(precision):
    assert np.array_equal(pallas_gemm.matmul(a, b), want)
