"""Each op, and the same in jnp, as functions of float64 arrays."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_gemm
from tests.support import ragged
from tests.support.products import normal

# Of M = 7: a group without rows, and rows without a group.
SIZES = jnp.array([3, 0, 2, 1])


def n64(*shape, seed=0):
  """Another array for another shape or seed."""
  return normal(*shape, dtype="float64", seed=seed)


def dense(a, b, bias=None, c=None, **epilogue):
  """`matmul`."""
  return pallas_gemm.matmul(a, b, bias=bias, c=c, **epilogue)


def plain(a, b, bias=None, c=None, *, alpha=1.0, beta=1.0, activation=None):
  """The same in jnp."""
  out = alpha * jnp.matmul(a, b)
  out = out if c is None else out + beta * c
  out = out if bias is None else out + bias
  return out if activation is None else activation(out)


def scaled(a, b, c, alpha, beta):
  """`matmul`, its factors arguments."""
  return dense(a, b, c=c, alpha=alpha, beta=beta, activation=jnp.tanh)


def plain_scaled(a, b, c, alpha, beta):
  """The same in jnp."""
  return plain(a, b, c=c, alpha=alpha, beta=beta, activation=jnp.tanh)


def plain_gated(x, gate, up):
  """`gated_matmul` in jnp."""
  return jax.nn.silu(x @ gate) * (x @ up)


def grouped(lhs, rhs, bias=None, *, group_sizes=SIZES, **options):
  """`ragged_dot`."""
  return pallas_gemm.ragged_dot(lhs, rhs, group_sizes, bias=bias, **options)


def plain_grouped(lhs, rhs, bias=None, *, group_sizes=SIZES, **options):
  """The same in jnp."""
  return ragged.plain(lhs, rhs, group_sizes, bias, **options)


def gated_grouped(x, gate, up, **options):
  """`gated_ragged_dot`."""
  return pallas_gemm.gated_ragged_dot(x, gate, up, SIZES, **options)


def plain_gated_grouped(x, gate, up, **options):
  """The same in jnp."""
  gate = ragged.plain(x, gate, SIZES, **options)
  return jax.nn.silu(gate) * ragged.plain(x, up, SIZES, **options)


class Op(NamedTuple):
  """An op, the same in jnp, and the shapes of its arguments."""

  ours: Callable[..., jax.Array]
  plain: Callable[..., jax.Array]
  shapes: tuple[tuple[int, ...], ...]

  def args(self, seed=0):
    """Its arguments; others for another seed."""
    return tuple(n64(*s, seed=seed + i) for i, s in enumerate(self.shapes))

  def given(self, **options):
    """With further arguments."""
    ours, plain = (functools.partial(f, **options) for f in self[:2])
    return self._replace(ours=ours, plain=plain)


MATMUL = Op(dense, plain, ((2, 3), (3, 4)))
ADDED = Op(dense, plain, ((2, 3), (3, 4), (4,), (2, 4)))
RAGGED = Op(grouped, plain_grouped, ((7, 2), (4, 2, 3)))
BIASED = RAGGED._replace(shapes=((7, 2), (4, 2, 3), (4, 3)))
# Of the second and third group.
PART = BIASED._replace(shapes=((7, 2), (2, 2, 3), (2, 3)))
GATED = Op(gated_grouped, plain_gated_grouped, ((7, 2), *[(4, 2, 3)] * 2))
OPS = {
  "matmul": MATMUL,
  "matmul, epilogue": ADDED.given(activation=jnp.tanh, alpha=2.0, beta=0.5),
  "matmul, factors": Op(scaled, plain_scaled, ((2, 3), (3, 4), (2, 4), (), ())),
  "gated_matmul": Op(
    pallas_gemm.gated_matmul, plain_gated, ((2, 3), (3, 4), (3, 4))
  ),
  "ragged_dot": RAGGED,
  "ragged_dot, epilogue": BIASED.given(activation=jax.nn.gelu),
  "ragged_dot, part": PART.given(activation=jnp.tanh, group_offset=1),
  "gated_ragged_dot": GATED,
  "gated_ragged_dot, part": GATED._replace(
    shapes=((7, 2), *[(2, 2, 3)] * 2)
  ).given(group_offset=1),
}
