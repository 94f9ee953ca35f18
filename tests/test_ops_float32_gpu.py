"""float32 in planes of bfloat16 on a GPU, held to the bound of its sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import numerics, tuning
from pallas_gemm.problem import Problem
from tests.support import plane_calls, products, special
from tests.support.plane_calls import ON_KERNEL

pytestmark = pytest.mark.gpu
# Threads make the planes of B.
MOVED = tuning.Config(
  block_n=128, block_k=32, stages=3, epilogue_n=32, epilogue_buffers=1,
  moves=True,
)  # fmt: skip


def check(out, a, b, planes=3):
  found = numerics.check(out, a, b, planes=planes, sample=200)
  assert found.passed, found


@pytest.mark.parametrize("seed", range(100))
def test_random_products(seed):
  plane_calls.check(seed, most=11)


@pytest.mark.parametrize("planes", (3, 2))
@pytest.mark.parametrize("seed", range(10))
def test_random_groups(seed, planes):
  """In three planes at HIGHEST, in two at the default."""
  rng = np.random.default_rng(seed)
  m, n, k = (int(2 ** rng.uniform(3, 10)) for _ in range(3))
  ends = np.sort(rng.integers(0, m + 1, 5))
  ends[-1] = m if seed % 2 else ends[-1]  # or rows of no group
  sizes = np.diff(ends, prepend=0)
  x, w = products.normal(m, k, seed=seed), products.normal(5, k, n, seed=seed)
  y = products.normal(m, n, seed=seed)
  how = ON_KERNEL | {"precision": {3: "highest", 2: None}[planes]}
  op = functools.partial(pallas_gemm.ragged_dot, **how)
  out, pull = jax.vjp(lambda x, w: op(x, w, jnp.asarray(sizes)), x, w)
  dx, dw = pull(y)
  for g, rows in enumerate(map(slice, ends - sizes, ends)):
    if rows.stop > rows.start:
      check(out[rows], x[rows], w[g], planes)
      check(dx[rows], y[rows], w[g].T, planes)
      check(dw[g], x[rows].T, y[rows], planes)
    else:
      assert not dw[g].any()
  assert not out[ends[-1] :].any() and not dx[ends[-1] :].any()


@pytest.mark.parametrize(
  "changes",
  (
    {},
    {"block_m": 64, "consumers": 1, "stages": 4},
    {"block_m": 64, "block_n": 256, "stages": 2, "split": "n"},
    {"block_m": 64, "consumers": 1, "cluster_k": 4},
    {"block_n": 64, "stages": 4, "split_k": 3},
    {"block_n": 96},
  ),
  ids=str,
)
@pytest.mark.parametrize("transpose_b", (False, True))
def test_bits_are_those_of_planes_that_xla_makes(changes, transpose_b):
  a, b = products.normal(300, 2112), products.normal(2112, 1120, seed=1)
  config = dataclasses.replace(MOVED, **changes)
  how = ON_KERNEL | {"transpose_b": transpose_b}
  out, want = (
    pallas_gemm.matmul(a, b.T if transpose_b else b, config=x, **how)
    for x in (config, dataclasses.replace(config, moves=False))
  )
  np.testing.assert_array_equal(out, want)
  check(out, a, b)


def test_bits_of_groups_are_those_of_planes_that_xla_makes():
  sizes = np.array([0, 1, 127, 130, 0, 300, 64, 5])
  a = products.normal(sizes.sum() + 9, 512)
  w, up = (products.normal(8, 512, 384, seed=i) for i in (1, 2))
  narrow = dataclasses.replace(MOVED, block_n=64)
  for op, config in (
    (lambda **x: pallas_gemm.ragged_dot(a, w, sizes, **x), MOVED),
    (
      lambda **x: pallas_gemm.ragged_dot(
        a, w.mT, sizes, transpose_rhs=True, **x
      ),
      MOVED,
    ),
    (lambda **x: pallas_gemm.gated_ragged_dot(a, w, up, sizes, **x), narrow),
  ):
    out, want = (
      op(config=x, **ON_KERNEL)
      for x in (config, dataclasses.replace(config, moves=False))
    )
    np.testing.assert_array_equal(out, want)
    assert jnp.any(out[:627] != 0) and not jnp.any(out[627:])


@pytest.mark.parametrize("kind", special.KINDS)
@pytest.mark.parametrize(
  "how",
  (
    {"precision": "highest"},
    {"precision": "BF16_BF16_F32_X9"},
    {"precision": "highest", "config": MOVED},
  ),
  ids=("x6", "x9", "moved"),
)
def test_special_values_are_those_of_float32(kind, how):
  flat = {"dtype": "bfloat16", "out_dtype": "float32"}
  n, k = (160, 304) if "config" in how else (136, 300)
  a, b = special.KINDS[kind](Problem.flat(m=200, n=n, k=k, **flat))
  how = ON_KERNEL | how
  out = pallas_gemm.matmul(jnp.asarray(a), jnp.asarray(b), **how)
  found = numerics.check(np.asarray(out), a, b, planes=3)
  assert found.passed, found


@pytest.mark.parametrize("kind", special.KINDS)
def test_special_values_of_groups_are_those_of_float32(kind):
  """At the default precision; each group has its own."""
  flat = {"dtype": "bfloat16", "out_dtype": "float32"}
  a, b = special.KINDS[kind](Problem.flat(m=200, n=136, k=300, **flat))
  sizes, w = jnp.array([70, 0, 130]), np.stack([b, np.full_like(b, np.nan), -b])
  out = pallas_gemm.ragged_dot(
    jnp.asarray(a), jnp.asarray(w), sizes, implementation="sm90"
  )
  for g, rows in ((0, slice(70)), (2, slice(70, 200))):
    found = numerics.check(np.asarray(out)[rows], a[rows], w[g], planes=2)
    assert found.passed, found


@pytest.mark.parametrize(
  ("m", "n", "k"),
  [(300, 264, 500), (1536, 1408, 1024)],  # the second in narrow subtiles
)
def test_everything_after_the_product(m, n, k):
  a, b, c = products.normal(m, k), products.normal(k, n), 0.5
  bias, added = products.normal(n), products.normal(m, n)
  out = pallas_gemm.matmul(
    a, b, c=added, alpha=c, beta=-2.0, bias=bias, activation=jax.nn.gelu,
    **ON_KERNEL,
  )  # fmt: skip
  products.assert_product(
    out, a, b, c=added, alpha=c, beta=-2.0, bias=bias, activation=jax.nn.gelu,
    planes=3,
  )  # fmt: skip


def test_gated():
  x, gate, up = (
    products.normal(*shape, seed=i)
    for i, shape in enumerate([(300, 500), (500, 264), (500, 264)])
  )
  how = ON_KERNEL | {"activation": jax.nn.silu}
  out = pallas_gemm.gated_matmul(x, gate, up, **how)
  products.assert_gated(out, x, gate, up, jax.nn.silu, planes=3)


def test_the_same_bits_twice():
  a, b = products.normal(1000, 999), products.normal(999, 1001)
  first, second = (pallas_gemm.matmul(a, b, **ON_KERNEL) for _ in range(2))
  np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("rows", (3, 300))
def test_bits_of_kept_planes_are_those_of_the_array(rows):
  """Of an odd number of columns planes are padded, as arrays are."""
  x, sizes = products.normal(rows, 520), jnp.array([rows // 2, 0, rows // 3])
  for columns in (257, 264):
    w = products.normal(520, columns)
    of_groups = jnp.stack([w, w + 1, w - 1])
    for a in (x, x.astype(jnp.bfloat16)):
      one, two = (
        (
          pallas_gemm.matmul(a, of_one, **ON_KERNEL),
          pallas_gemm.ragged_dot(a, of_three, sizes, **ON_KERNEL),
        )
        for of_one, of_three in (
          (w, of_groups),
          (pallas_gemm.split(w), pallas_gemm.split(of_groups)),
        )
      )
      jax.tree.map(np.testing.assert_array_equal, one, two)


def test_errors_are_below_those_of_sgemm():
  a, b = products.normal(512, 4096), products.normal(4096, 512)
  want = products.float64(a) @ products.float64(b)
  ours = pallas_gemm.matmul(a, b, **ON_KERNEL)
  theirs = jnp.dot(a, b, precision="highest")
  of_ours, of_theirs = (np.linalg.norm(x - want) for x in (ours, theirs))
  assert of_ours < of_theirs
