"""Operands: drawn from N(0, 1) by a stated seed, on the device.

Never zeros and never uniform [0, 1): zeros hide outputs that were not written
and run faster (fewer bits switch, so the clock stays higher), and one-signed
values hide errors under large sums.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_gemm.ladder import contract

DISTRIBUTION = "normal(0,1)"


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
  # Drawn in float32 for every dtype: 16-bit draws are coarse.
  return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def normal(seed: int, index: int, shape: tuple[int, ...], dtype: str):
  """Array number `index` of a seed: [*shape], N(0, 1), rounded to dtype."""
  key = jax.random.fold_in(jax.random.key(seed), index)
  return _normal(key, tuple(shape), dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normals(key: jax.Array, count: int, shape: tuple[int, ...], dtype: str):
  keys = jax.random.split(key, count)
  return jax.lax.map(lambda key: _normal(key, shape, dtype), keys)


def normals(
  seed: int, index: int, count: int, shape: tuple[int, ...], dtype: str
):
  """As `normal`, [count, *shape]; drawn one by one, in little memory."""
  key = jax.random.fold_in(jax.random.key(seed), index)
  return _normals(key, count, tuple(shape), dtype)


def operands(
  problem: contract.Problem, seed: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """A [M, K], B [K, N] and, where beta is not zero, C [M, N] (else None).

  The same seed gives the same values on every device.
  """
  p = problem
  a = normal(seed, 0, (p.m, p.k), p.dtype)
  b = normal(seed, 1, (p.k, p.n), p.dtype)
  c = normal(seed, 2, (p.m, p.n), p.dtype) if p.beta != 0 else None
  return a, b, c
