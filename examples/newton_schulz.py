"""The inverse square root of a matrix in float32, as Shampoo needs it.

  python -m examples.newton_schulz
  python -m examples.newton_schulz --size=4096 --implementation=xla

Coupled Newton-Schulz steps are products alone. At `precision="highest"` they
are as accurate as float32 is. On a Hopper GPU tensor cores compute them, in
planes of bfloat16; `--implementation=xla` has CUDA cores do it.

The program prints how far z a z is off the identity after each step, which
shrinks until float32 ends it, and fails if it ends above that.

Source: N. Higham, *Functions of Matrices*, 2008, section 6.7.
"""

import argparse
from collections.abc import Sequence
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from examples.flag_types import positive
import pallas_gemm

# Of a rounding to float32.
_UNIT = 2.0**-24


def with_condition(key: jax.Array, size: int, condition: float) -> jax.Array:
  """A symmetric [size, size] with eigenvalues from 1 / condition to 1."""
  q, _ = jnp.linalg.qr(jax.random.normal(key, (size, size)))
  eigenvalues = jnp.geomspace(1 / condition, 1, size)
  return jnp.matmul(q * eigenvalues, q.T, precision="highest")


@functools.partial(jax.jit, static_argnames="implementation")
def step(y: jax.Array, z: jax.Array, *, implementation: Any = None):
  """One step: y goes to the square root of a, z to its inverse.

  Args:
    y, z: [n, n]; at first a and the identity. Eigenvalues of z y lie in (0, 3).
    implementation: as of `pallas_gemm.matmul`.
  """
  matmul = functools.partial(
    pallas_gemm.matmul, precision="highest", implementation=implementation
  )
  identity = jnp.eye(len(y), dtype=y.dtype)
  t = matmul(z, y, c=identity, alpha=-0.5, beta=1.5)
  return matmul(y, t), matmul(t, z)


def off_identity(a: jax.Array, z: jax.Array) -> float:
  """The norm of z a z less the identity, over that of the identity."""
  dot = functools.partial(jnp.matmul, precision="highest")
  off = dot(dot(z, a), z) - jnp.eye(len(a))
  return float(jnp.linalg.norm(off)) / len(a) ** 0.5


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the error of each step; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m examples.newton_schulz",
    description=__doc__.partition("\n")[0],
  )
  parser.add_argument(
    "--size", type=positive, default=256, help="of the matrix"
  )
  parser.add_argument("--steps", type=positive, default=10)
  parser.add_argument(
    "--condition",
    type=float,
    default=100.0,
    help="largest eigenvalue over least",
  )
  parser.add_argument(
    "--implementation", choices=("sm90", "xla"), help="what multiplies"
  )
  flags = parser.parse_args(argv)
  if not flags.condition >= 1:
    parser.error(f"--condition must be 1 or more, got {flags.condition}")
  a = with_condition(jax.random.key(0), flags.size, flags.condition)
  y, z = a, jnp.eye(flags.size)
  for i in range(flags.steps):
    y, z = step(y, z, implementation=flags.implementation)
    off = off_identity(a, z)
    print(f"step {i + 1:2}: off by {off:.1e}")
  most = 16 * flags.condition * _UNIT
  passed = off <= most
  print(f"{'PASSED' if passed else 'FAILED'}: {off:.1e}, at most {most:.1e}")
  return 0 if passed else 1


if __name__ == "__main__":
  sys.exit(main())
