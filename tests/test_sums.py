"""How far sums may be off: bounds hold, and wrong sums do not meet them."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import check, numerics, sums
from pallas_gemm.kernels.sm90 import planes

E4M3, E5M2, INT8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
FLOATS8 = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)]


def summed_up(terms, bits, lap):
  """[..., K] added as the tensor cores are thought to, promoted each lap.

  32 terms and the accumulator, aligned to the largest, are cut to so many bits
  below it.
  """
  total = np.zeros(terms.shape[:-1], np.float32)
  for start in range(0, terms.shape[-1], lap):
    own = np.zeros(terms.shape[:-1])
    for first in range(start, min(start + lap, terms.shape[-1]), 32):
      some = terms[..., first : min(first + 32, start + lap)]
      some = np.concatenate([some, own[..., None]], -1)
      _, exponent = np.frexp(np.abs(some).max(-1, keepdims=True))
      unit = np.ldexp(1.0, exponent - 1 - bits)
      own = (np.trunc(some / unit) * unit).sum(-1)
    total = np.float32(total + np.float32(own))
  return total


def operands(dtypes, k, draw):
  rng = np.random.default_rng((k, len(draw)))
  shapes = (5, k), (k, 6)
  return [
    np.asarray(getattr(rng, draw)(size=shape)).astype(dtype)
    for shape, dtype in zip(shapes, dtypes)
  ]


@pytest.mark.parametrize("fast", (False, True))
@pytest.mark.parametrize("k", (1, 33, 128, 129, 1000, 4096))
@pytest.mark.parametrize("draw", ("standard_normal", "random"))
def test_a_model_of_the_tensor_cores_stays_in_the_bound(draw, k, fast):
  for dtypes in FLOATS8:
    a, b = operands(dtypes, k, draw)
    terms = a.astype(np.float64)[:, None] * b.astype(np.float64).T[None]
    got = summed_up(terms, bits=13, lap=k if fast else 128)
    want, _ = check.expected(
      a, b, out_dtype=jnp.float32, fast_accumulation=fast
    )
    assert want.check(got).passed
    if draw == "random" and not fast:  # terms do not cancel
      assert not want.check(got * np.float32(1.04)).passed


def test_promoted_sums_do_not_grow_with_k():
  short, long = (
    sums.relative_error(k, (E4M3, E4M3), 0, tf32=False, fast=False)
    for k in (128, 2**14)
  )
  assert long - short < 1e-5
  fast = sums.relative_error(2**14, (E4M3, E4M3), 0, tf32=False, fast=True)
  assert fast > 100 * long


@pytest.mark.parametrize("k", (1, 1000, 2**12))
def test_int8_is_exact(k):
  rng = np.random.default_rng(k)
  a, b = (rng.integers(-128, 128, x).astype("int8") for x in ((4, k), (k, 5)))
  out = a.astype("int32") @ b.astype("int32")
  assert numerics.check(out, a, b).passed
  assert numerics.check(out, a, b, sample=2).passed
  assert not numerics.check(out + np.int32(1), a, b).passed
  assert check.expected(a, b, out_dtype="int32")[0].check(out).passed
  assert numerics.check(out.astype("float32"), a, b).passed
  assert not numerics.check(out.astype("bfloat16") + 1e4, a, b).passed


def test_int8_that_may_overflow():
  a, b = np.ones((1, 2**17), "int8"), np.ones((2**17, 1), "int8")
  with pytest.raises(ValueError, match="k must be at most 131071 for int8"):
    numerics.check(np.ones((1, 1), "float32"), a, b)
  # The largest that there is, and the first that there is not.
  assert 2**14 * sums.MOST_INT8 < 2**31 <= 2**14 * (sums.MOST_INT8 + 1)


@pytest.mark.parametrize("of_a", (None, "rows", "all"))
@pytest.mark.parametrize("of_b", (None, "columns", "all"))
def test_scales(of_a, of_b):
  rng = np.random.default_rng(0)
  a, b = operands((INT8, INT8), 40, "standard_normal")
  shapes = {None: None, "rows": 5, "columns": 6, "all": ()}
  scales = [
    None if kind is None else rng.uniform(0.5, 2, shapes[kind]).astype("f4")
    for kind in (of_a, of_b)
  ]
  sums32 = a.astype("int32") @ b.astype("int32")
  out = sums32.astype("float32")
  for scale, shape in zip(scales, ((-1, 1), (1, -1))):
    out = out if scale is None else out * scale.reshape(shape)
  found, _ = check.expected(a, b, scales=(*scales, None), out_dtype=jnp.float32)
  assert found.check(out).passed
  assert not found.check(out * np.float32(1.001)).passed


# float32 in planes.


def _cut(x, bits):
  """x with so many bits."""
  _, exponent = np.frexp(x)
  unit = np.ldexp(1.0, exponent - bits)
  return np.trunc(x / unit) * unit


def _added(total, some):
  """As a tensor core adds: both are cut to two bits below the larger's 24."""
  _, exponent = np.frexp(np.maximum(np.abs(total), np.abs(some)))
  unit = np.ldexp(1.0, exponent - 26)
  cut = np.trunc(total / unit) + np.trunc(some / unit)
  return _cut(cut * unit, 24)


def in_planes(a, b, lap):
  """A @ B in three planes, by a model of the tensor cores: 16 of K a step."""
  a, b = (
    [np.float64(plane) for plane in planes.split(jnp.asarray(x), 3)]
    for x in (a, b)
  )
  total = np.zeros((len(a[0]), b[0].shape[1]), np.float32)
  for start in range(0, a[0].shape[1], lap):
    small, large = np.zeros((2, *total.shape))
    for first in range(start, min(start + lap, a[0].shape[1]), 16):
      at = slice(first, first + 16)
      for i, j in ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1)):
        small = _added(small, a[i][:, at] @ b[j][at])
      large = _added(large, a[0][:, at] @ b[0][at])
    total += np.float32(large) + np.float32(small)
  return total


@pytest.mark.parametrize("lap", (32, 64))
@pytest.mark.parametrize("k", (16, 256, 2048))
@pytest.mark.parametrize("draw", ("standard_normal", "random"))
def test_planes_are_more_accurate_than_sums_in_order(draw, k, lap):
  a, b = operands((jnp.float32, jnp.float32), k, draw)
  want, got = a.astype(np.float64) @ b.astype(np.float64), in_planes(a, b, lap)
  assert numerics.check(got, a, b, planes=3).passed
  in_order = np.zeros_like(got)
  for at in range(k):  # one rounding each, as of a fused multiply-add
    in_order = np.float32(in_order + np.outer(a[:, at], np.float64(b[at])))
  of_planes, of_sums = (np.linalg.norm(x - want) for x in (got, in_order))
  assert of_planes < (1.0 if k < 256 else 0.6) * of_sums
  off = np.float32(1 + 2.0**-15)
  assert (
    draw == "standard_normal"
    or not numerics.check(got * off, a, b, planes=3).passed
  )


def test_planes_are_bound_more_tightly_than_sums_in_order():
  of = {"tf32": False, "fast": False, "dtypes": (jnp.float32,) * 2, "more": 0}
  bounds = [
    [sums.relative_error(k, **of, planes=x) for x in (2, 3, None)]
    for k in (64, 150, 4096)
  ]
  assert all(two > three for two, three, _ in bounds)
  assert [three < plain for _, three, plain in bounds] == [False, True, True]
