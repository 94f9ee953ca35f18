"""Products for the tests of the ops: operands, float64 references, bounds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import check, numerics

ACTIVATIONS = (
  jax.nn.relu,
  jax.nn.silu,
  jax.nn.gelu,
  functools.partial(jax.nn.gelu, approximate=False),
  jnp.tanh,
)


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> jax.Array:
  """N(0, 1); other arrays for other shapes and seeds."""
  rng = np.random.default_rng((seed, *shape))
  return jnp.asarray(rng.standard_normal(shape), dtype)


def float64(x: Any) -> np.ndarray:
  """On the host."""
  return np.asarray(x).astype(np.float64)


def assert_product(
  out: jax.Array, a: jax.Array, b: jax.Array, **epilogue: Any
) -> None:
  """`out` is activation(alpha * A @ B + beta * C + bias), within its bound.

  `epilogue` is that of `check.expected`; A, B and C may be stacked.
  """
  batch = out.shape[:-2]
  epilogue |= {"out_dtype": out.dtype}
  stacked = {"out": out, "a": a, "b": b}
  for name in ("b_up", "c"):
    if (x := epilogue.pop(name, None)) is not None:
      stacked[name] = x
  for name, x in stacked.items():
    stacked[name] = np.broadcast_to(np.asarray(x), batch + x.shape[-2:])
  for i in np.ndindex(batch):
    of = {name: x[i] for name, x in stacked.items()}
    got = of.pop("out")
    want, *_ = check.expected(**of, **epilogue)
    assert got.shape == want.want.shape
    found = want.check(got)
    assert found.passed, found


def assert_product_of_xla(out, a, b) -> None:
  """`out` is A @ B in float32, on a GPU by tensor cores that cut it to TF32."""
  is_cut = jax.default_backend() == "gpu"
  a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
  found = numerics.check(out, a, b, tf32=is_cut)
  assert found.passed, found


def assert_gated(out, x, w_gate, w_up, activation, **how) -> None:
  """`out` is activation(x @ w_gate) * (x @ w_up), within its bound."""
  out, x = np.atleast_2d(out), np.atleast_2d(x)
  assert_product(out, x, w_gate, b_up=w_up, activation=activation, **how)


def assert_same(got: Any, want: Any) -> None:
  """Trees of float64 arrays that differ by less than 2^12 roundings."""
  jax.tree.map(_assert_same_array, got, want)


def _assert_same_array(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype == np.float64
  assert got.shape == want.shape
  bound = numerics.gamma(2**12, 2.0**-53) * (1 + np.abs(want).max(initial=0))
  assert np.all(np.abs(got - want) <= bound), np.abs(got - want).max()
