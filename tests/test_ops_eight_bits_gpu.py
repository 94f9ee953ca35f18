"""Products of 8 bits on a GPU, held to the bound of its tensor cores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import Recipe, numerics, quantization, quantize
from pallas_gemm.kernels.sm90 import quantizing
from pallas_gemm.kernels.sm90.config import Config
from tests.support.ops import SUMS

pytestmark = pytest.mark.gpu
FLOATS = "float8_e4m3fn", "float8_e5m2"
OF_A = {"tensor": (None, None), "row": (1, None), "block": (1, 128)}
OF_B = {
  "tensor": (None, None),
  "column": (None, 1),
  "block": (128, 128),
  "line": (128, 1),
}
SCALINGS = "block", "row", "tensor"


def normal(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def check(out, a, b, bias, dtypes):
  """Holds a result to float64's."""
  size = np.zeros(out.shape) + np.abs(bias)
  bound = numerics.bound_of_sum(a, b, size, 1.0, 1.0, dtypes=dtypes, more=4)
  found = numerics.compare(out, a @ b + bias, bound)
  assert found.passed, found


def exact(q):
  return np.asarray(q.dequantized(), np.float64)


@pytest.mark.parametrize("seed", range(40))
def test_random_products(seed):
  rng = np.random.default_rng(seed)
  m, n, k = (int(2 ** rng.uniform(0, 10)) for _ in range(3))
  dtypes = ("int8",) * 2 if rng.random() < 0.3 else rng.choice(FLOATS, 2)
  of_a = OF_A[rng.choice([*OF_A])]
  of_b = OF_B[rng.choice([*OF_B])]
  groups, is_last = int(rng.integers(0, 5)), bool(rng.random() < 0.5)
  lead = (groups,) if groups else ()
  a = quantize(normal(rng, m, k), dtypes[0], block=of_a)
  b = normal(rng, *lead, k, n)
  b = quantize(b, dtypes[1], block=(1,) * len(lead) + of_b)
  bias = normal(rng, *lead, n)
  given, kinds = b.mT if is_last else b, tuple(map(jnp.dtype, dtypes))
  x, w, added = exact(a), exact(b), np.asarray(bias, np.float64)
  if not groups:
    out = pallas_gemm.matmul(a, given, bias=bias, transpose_b=is_last)
    check(out, x, w, added, kinds)
    return
  ends = np.sort(rng.integers(0, m + 1, groups))
  starts = np.append(0, ends[:-1])
  out = pallas_gemm.ragged_dot(
    a, given, jnp.asarray(ends - starts), bias=bias, transpose_rhs=is_last
  )
  for g, rows in enumerate(map(slice, starts, ends)):
    if rows.stop > rows.start:
      check(out[rows], x[rows], w[g], added[g], kinds)
  assert not np.any(np.asarray(out[ends[-1] :], np.float32))


@pytest.mark.parametrize("block_m", (128, 192))
@pytest.mark.parametrize("groups", (0, 5))
def test_blocks_in_a_cluster(groups, block_m):
  """Of large products, with tiles that hang over at both sides."""
  rng, (m, n, k) = np.random.default_rng(0), (1000, 1100, 700)
  config = Config(
    block_m=block_m, block_n=128, block_k=128, stages=4, cluster_n=2,
    consumers=block_m // 64, epilogue_buffers=1,
  )  # fmt: skip
  lead = (groups,) if groups else ()
  a = quantize(normal(rng, m, k), block=(1, 128))
  b = quantize(normal(rng, *lead, n, k), block=(1,) * len(lead) + (128, 128))
  x, w, dtypes = exact(a), exact(b.mT), (jnp.dtype("float8_e4m3fn"),) * 2
  if not groups:
    out = pallas_gemm.matmul(a, b, transpose_b=True, config=config)
    check(out, x, w, np.zeros(n), dtypes)
    return
  ends = np.array([0, 7, 300, 301, 990])
  sizes = jnp.asarray(np.diff(ends, prepend=0))
  out = pallas_gemm.ragged_dot(a, b, sizes, transpose_rhs=True, config=config)
  for g, rows in enumerate(map(slice, np.append(0, ends), ends)):
    check(out[rows], x[rows], w[g], np.zeros(n), dtypes)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("forward", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("kind", ("dense", "rows", "sums"))
def test_derivatives_are_those_of_xla(scaling, forward, kind):
  """Of the same bits: they differ by how sums are added."""
  rng = np.random.default_rng(0)
  recipe = Recipe(forward, forward, scaling)
  x, y = normal(rng, 300, 384), normal(rng, 300, 264)
  w = normal(rng, *([4] if kind != "dense" else []), 384, 264)
  w, ct = (y, w) if kind == "sums" else (w, y)
  sizes = jnp.array([0, 33, 190, 60])

  def op(x, w, implementation):
    how = {"quantize": recipe, "implementation": implementation}
    if kind == "sums":
      return pallas_gemm.ragged_dot_general(x, w, sizes, SUMS, **how)
    if kind == "rows":
      return pallas_gemm.ragged_dot(x, w, sizes, **how)
    return pallas_gemm.matmul(x, w, **how)

  found = [
    jax.jit(
      lambda x, w, name=name: jax.vjp(lambda *v: op(*v, name), x, w)[1](ct)
    )(x, w)
    for name in (("sm90", "xla"), ("xla",))
  ]
  for ours, theirs in zip(*found):
    assert bool(jnp.isfinite(ours).all())
    # Relative to norms: sums lose 2^-11 of their magnitudes (`sums`), and XLA's
    # blocks are rounded to bfloat16, twice 2^-9.
    off = 2.0**-7 * np.linalg.norm(np.asarray(theirs, np.float64))
    assert np.linalg.norm(np.asarray(ours - theirs, np.float64)) <= off


def special(source):
  """Of many exponents, some not finite."""
  rng = np.random.default_rng(0)
  exponents = np.exp2(rng.integers(-40, 14, (300, 264)))
  x = jnp.asarray(rng.standard_normal((300, 264)) * exponents, source)
  return x.at[0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf], source))


@pytest.mark.parametrize("dtype", (*FLOATS, "int8"))
@pytest.mark.parametrize("source", ("bfloat16", "float32"))
def test_bits_of_maxima(source, dtype):
  x, rng = special(source), np.random.default_rng(1)
  columns, rows = normal(rng, 1, 264).at[0, 7].set(3e38), normal(rng, 1, 300)
  factors = quantizing.Factors(columns, rows)
  got = quantizing.maxima_both(x, factors, dtype)
  x = x.astype(jnp.float32)
  of_rows = quantization.maxima(x * columns, dtype, (1, None))[:, 0]
  of_columns = quantization.maxima(x * rows.T, dtype, (None, 1))[0]
  for ours, theirs in zip(got, (of_rows, of_columns)):
    assert np.array_equal(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", (*FLOATS, "int8"))
@pytest.mark.parametrize("source", ("bfloat16", "float32"))
@pytest.mark.parametrize("scaling", ("rows", "blocks"))
def test_bits_of_both_orders(scaling, source, dtype):
  x = special(source)
  got = quantizing.quantize_both(x, dtype, scaling=scaling)
  block = (1, 128) if scaling == "rows" else (128, 128)
  q, t = (quantize(v, dtype, block=block) for v in (x, x.T))
  scales = (q.scale.T, t.scale.T) if scaling == "rows" else (q.scale, t.scale)
  want = q.values, scales[0], t.values, scales[1]
  for ours, theirs in zip(got, want):
    ours, theirs = (np.asarray(v, np.float32) for v in (ours, theirs))
    assert np.array_equal(ours, theirs, equal_nan=True)
