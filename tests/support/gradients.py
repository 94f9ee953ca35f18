"""Gradients of `matmul` in 16 bits, against float64 and a bound."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gemm
from pallas_gemm import numerics
from tests.support import products
from tests.support.products import normal

# By name, with the largest second derivative, rounded up.
_ACTIVATIONS = {
  "none": (None, 0.0),
  "tanh": (jnp.tanh, 0.77),
  "silu": (jax.nn.silu, 0.51),
  "gelu": (jax.nn.gelu, 1.1),
}
ACTIVATIONS = tuple(_ACTIVATIONS)


def assert_right(
  shape: tuple[int, int, int],
  dtype: str,
  activation: str,
  with_c: bool,
  **options: Any,
) -> None:
  """Of sum(ct * activation(A @ B + bias + C)) for A, B, the bias and C.

  Args:
    shape: M, N and K.
    dtype: of every operand.
    activation: one of `ACTIVATIONS`.
    with_c: whether there is a C.
    **options: passed to `matmul`.
  """
  m, n, k = shape
  a = normal(m, k, dtype=dtype)
  b = (normal(k, n) * k**-0.5).astype(dtype)
  bias, ct = normal(n, dtype=dtype, seed=1), normal(m, n, dtype=dtype, seed=2)
  c = (normal(m, n, dtype=dtype, seed=3),) if with_c else ()
  function, curvature = _ACTIVATIONS[activation]

  def op(a, b, bias, c=None):
    return pallas_gemm.matmul(
      a, b, bias=bias, c=c, activation=function, **options
    )

  got = jax.jit(lambda ct, *x: jax.vjp(op, *x)[1](ct))(ct, a, b, bias, *c)
  wanted = _expected(a, b, bias, ct, function, curvature, *c)
  for grad, want, bound in zip(got, *wanted):
    error = np.abs(products.float64(grad) - want)
    assert np.all(error <= bound), f"{(error / bound).max()} of the bound"


def _expected(a, b, bias, ct, activation, curvature, c=0.0):
  """Gradients in float64, and how far off those of 16-bit operands may be."""
  info = jnp.finfo(a.dtype)
  unit = float(info.eps) / 2
  a, b, bias, ct, c = (products.float64(x) for x in (a, b, bias, ct, c))
  z = a @ b + bias + c
  # The sum is rounded to 16 bits where it is kept.
  size = np.abs(a) @ np.abs(b) + np.abs(bias) + np.abs(c)
  terms = a.shape[1] + 4 + bool(c.ndim)
  off = numerics.gamma(terms, 2.0**-23) * size
  off += unit * (np.abs(z) + off)
  # The cotangent of the sum.
  d, d_off = ct, np.zeros_like(ct)
  if activation is not None:
    with jax.enable_x64(True):
      slope = np.asarray(
        jax.vjp(activation, jnp.asarray(z))[1](jnp.ones_like(z))[0]
      )
    own = numerics.gamma(64, 2.0**-24) * (1 + np.abs(z))
    d, d_off = ct * slope, np.abs(ct) * (curvature * off + own)
    # It is rounded when the activation's derivative gives it and when it
    # becomes an operand.
    d_off += 2 * unit * (np.abs(d) + d_off)
    d_off += float(info.smallest_subnormal)

  def product(x, x_off, y, y_off):
    x_size, y_size = np.abs(x) + x_off, np.abs(y) + y_off
    found = x_off @ y_size + x_size @ y_off
    found += numerics.gamma(x.shape[1] + 1, 2.0**-23) * (x_size @ y_size)
    return x @ y, found + unit * (np.abs(x @ y) + found)

  exact = np.zeros_like(a), np.zeros_like(b)
  d_a, a_off = product(d, d_off, b.T, exact[1].T)
  d_b, b_off = product(a.T, exact[0].T, d, d_off)
  d_bias, rows = d.sum(0), d_off.sum(0)
  rows = rows + numerics.gamma(len(d), 2.0**-24) * (np.abs(d) + d_off).sum(0)
  rows = rows + unit * (np.abs(d_bias) + rows)
  return (d_a, d_b, d_bias, d), (a_off, b_off, rows, d_off)
