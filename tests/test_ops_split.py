"""float32 weights whose planes are kept: the bits are those of the array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import hardware, report, split
from tests.support import interpret, products
from tests.support.plane_calls import ON_KERNEL, X3

normal = products.normal
SIZES = jnp.array([5, 0, 20], jnp.int32)
GELU = {"activation": jax.nn.gelu}
matmul = functools.partial(pallas_gemm.matmul, **ON_KERNEL)
gated_matmul = functools.partial(pallas_gemm.gated_matmul, **ON_KERNEL)
ragged_dot = functools.partial(pallas_gemm.ragged_dot, **ON_KERNEL)
gated_ragged_dot = functools.partial(pallas_gemm.gated_ragged_dot, **ON_KERNEL)
X, W, GROUPS = normal(37, 70), normal(70, 45), normal(3, 70, 24)


def fused(x, w):
  rest = {"bias": normal(45), "c": normal(37, 45), "alpha": 2.0, "beta": -1.0}
  return matmul(x, w, **GELU, **rest, out_dtype=jnp.bfloat16)


PRODUCTS = {
  "dense": (matmul, X, W),
  "transposed": (functools.partial(matmul, transpose_b=True), X, W.T),
  "from columns": (functools.partial(matmul, transpose_a=True), X.T, W),
  "epilogue": (fused, X, W),
  "by bfloat16": (matmul, X.astype(jnp.bfloat16), W),
  "batches": (matmul, normal(2, 5, 70), normal(2, 70, 9)),
  "vmap": (jax.vmap(matmul, (None, 0)), X, normal(2, 70, 9)),
  "row": (matmul, X[0], W),
  "column": (matmul, X, W[:, 0]),
  "gated": (lambda x, w: gated_matmul(x, w, jax.tree.map(jnp.flip, w)), X, W),
  "groups": (lambda x, w: ragged_dot(x, w, SIZES), X, GROUPS),
  "groups transposed": (
    lambda x, w: ragged_dot(x, w, SIZES, transpose_rhs=True),
    normal(37, 24),
    GROUPS,
  ),
  "gated groups": (lambda x, w: gated_ragged_dot(x, w, w, SIZES), X, GROUPS),
  "on XLA": (functools.partial(pallas_gemm.matmul, precision="highest"), X, W),
}


@pytest.mark.parametrize("sign", (1, -1))
def test_two_planes_of_the_largest_number_are_finite(sign):
  most = np.finfo(np.float32).max
  w = split(jnp.full((4, 4), sign * most), 2)
  np.testing.assert_allclose(w.joined(), sign * most, rtol=2**-16)
  out = pallas_gemm.matmul(jnp.eye(4) / 2, w, precision="highest")
  np.testing.assert_allclose(out, sign * most / 2, rtol=2**-16)
  infinity = split(jnp.array([sign * np.inf, np.nan]), 2).joined()
  assert np.array_equal(infinity, [sign * np.inf, np.nan], equal_nan=True)


@pytest.mark.parametrize("name", PRODUCTS)
def test_bits_are_those_of_the_array(name):
  product, x, w = PRODUCTS[name]
  with interpret.interpreted():  # where sums do not depend on the machine
    want, got = map(np.asarray, (product(x, w), product(x, split(w))))
  assert (got.dtype, got.shape) == (want.dtype, want.shape)
  assert np.array_equal(got, want)


@pytest.mark.parametrize(
  ("precision", "planes"), [(X3, 2), ("BF16_BF16_F32_X9", 3)]
)
def test_other_precisions(precision, planes):
  how = ON_KERNEL | {"precision": precision}
  want = pallas_gemm.matmul(X, W, **how)
  assert np.array_equal(pallas_gemm.matmul(X, split(W, planes), **how), want)


@pytest.mark.parametrize(
  "name", ("transposed", "from columns", "gated", "groups")
)
def test_the_derivative_by_the_other_operand(name):
  product, x, w = PRODUCTS[name]

  def loss(x, w):
    return jnp.sum(product(x, w).astype(jnp.float32) ** 2)

  want, got = jax.grad(loss)(x, w), jax.grad(loss)(x, split(w))
  assert np.array_equal(got, want)


def test_the_tangent_by_the_other_operand():
  tangent = jax.jvp(lambda x: matmul(x, split(W)), (X,), (2 * X,))[1]
  assert np.array_equal(tangent, 2 * matmul(X, W))


@pytest.mark.parametrize(
  "op", (matmul, pallas_gemm.matmul), ids=("planes", "added up")
)
def test_there_is_no_derivative_by_it(op):
  with pytest.raises(TypeError, match="no derivative by a Split; pass the arr"):
    jax.grad(lambda w: jnp.sum(op(X[:9], split(w))))(W)


def test_scan_over_layers():
  layers = normal(3, 70, 70) / 10
  step = lambda x, w: (matmul(x, w), None)  # noqa: E731
  found = [jax.lax.scan(step, X, w)[0] for w in (layers, split(layers))]
  assert np.array_equal(*found)


def test_planes_are_read_and_not_made():
  w = jax.eval_shape(split, jax.ShapeDtypeStruct((1024, 512), jnp.float32))
  x = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
  f = jax.jit(functools.partial(pallas_gemm.matmul, precision="highest"))
  with hardware.assume("H100"):
    (ran,) = pallas_gemm.explain(f, x, w, platform="cuda").products
    text = f.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
  assert ran.implementation == "sm90" and "planes that are kept" in ran.product
  assert ran.shapes == ((1, 16, 1024), *[(1, 1024, 512)] * 3)
  assert "16x1024xf32" in text and "1024x512xf32" not in text


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda w: pallas_gemm.matmul(X, w), "the planes of b are added up"),
    (lambda w: matmul(X, split(W, 2)), "the planes of b are added up"),
    (lambda w: matmul(w, W.T), "the planes of a are added up"),
    (
      lambda w: pallas_gemm.dot_general(X, w, (((1,), (0,)), ((), ()))),
      "the planes of rhs are added up",
    ),
    (
      lambda w: pallas_gemm.matmul(X, w, quantize=pallas_gemm.Recipe()),
      "the planes of b are added up",
    ),
  ],
)
def test_elsewhere_it_is_added_up_and_said_so(call, words, caplog):
  report.reset()
  assert call(split(W)).dtype == jnp.float32
  assert words in caplog.text


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    (
      lambda: gated_matmul(X, split(W), W),
      TypeError,
      "w_gate and w_up must both be a Split or none",
    ),
    (
      lambda: split(W.astype(jnp.int32)),
      TypeError,
      "x must be of float32, got",
    ),
    (
      lambda: gated_matmul(X, split(W), split(W, 2)),
      ValueError,
      "w_up must have 3 planes like w_gate, got 2",
    ),
    (lambda: split(W, 4), ValueError, "planes must be 2 or 3, got 4"),
    (lambda: split(W, 2.0), ValueError, "planes must be 2 or 3, got 2.0"),
    (
      lambda: matmul(X, pallas_gemm.Split((W, W))),
      TypeError,
      "b.planes must be two or three of bfloat16 and one shape, got float32",
    ),
    (lambda: matmul(X, split(W[1:])), ValueError, "b must have K = 70 like a"),
  ],
)
def test_bad_input(call, error, words):
  with pytest.raises(error, match=words):
    call()
