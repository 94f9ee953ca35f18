"""Is the result of a case right? Sampled rows and columns, against float64.

A plain product is held to `numerics.check`. What follows a product carries the
product's bound along: an activation f moves two arguments that are d apart to
values at most L d apart, L the largest slope of f, and a factor multiplies
what its partner is off by. Evaluating f and rounding the result come on top.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import dense_cases
from pallas_gemm import numerics

# Rows, and columns, that are checked of each matrix, and matrices of a batch.
SAMPLE = 64
MATRICES = 3
# What evaluating an activation may be off, relative to the larger of its
# argument and its value: 16-bit results may use approximate instructions,
# good to 2^-11.
_EVALUATION = {2: 2.0**-10, 4: 2.0**-20}


@dataclasses.dataclass(frozen=True)
class _Activation:
  """An activation in float64, and its largest slope (rounded up)."""

  fn: Callable[[np.ndarray], np.ndarray]
  slope: float


def _relu(x):
  return np.maximum(x, 0)


def _gelu(x):
  return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_erf(x):
  return x / 2 * np.vectorize(math.erfc, otypes=[np.float64])(-x / 2**0.5)


def _silu(x):
  # As a tanh, which does not overflow.
  return x / 2 * (1 + np.tanh(x / 2))


_ACTIVATIONS = {
  "relu": _Activation(_relu, 1.0),
  "gelu": _Activation(_gelu, 1.13),
  "gelu_erf": _Activation(_gelu_erf, 1.13),
  "silu": _Activation(_silu, 1.10),
}


def check(
  case: dense_cases.Case,
  results: jax.Array | tuple[jax.Array, ...],
  operands: dict[str, jax.Array],
  seed: int = 0,
) -> numerics.Check:
  """Compares the results of a case with float64, against their error bounds.

  All of a result is scanned for NaN, and for infinities where its dtype has
  room for any result of N(0, 1) operands.

  Args:
    case: what was computed.
    results: one array, or of a "matmul_vjp" the product and both derivatives.
    operands: as `case.draw` gives them.
    seed: picks what is sampled.

  Returns:
    What was found at the worst element of all.
  """
  rng = np.random.default_rng(seed)
  checks = [
    compare(case, sample)
    for result, x in _products(case, results, operands)
    for sample in _samples(case, result, x, rng)
  ]
  return worst_of(checks, results)


def worst_of(checks: Sequence[numerics.Check], results: Any) -> numerics.Check:
  """One of all: the worst, failed if anything in `results` is not finite."""
  worst = max(checks, key=lambda found: found.worst_ratio)
  checked = sum(found.checked for found in checks)
  finite = all(bool(_no_stray(x)) for x in jax.tree.leaves(results))
  if not finite:
    return numerics.Check(False, np.inf, worst.error_bound, np.inf, checked)
  return dataclasses.replace(worst, checked=checked)


def _products(case, results, operands) -> Iterator[tuple]:
  """(result, operands stored as they are multiplied) of each product."""
  turned = dict(operands)
  for name, how in zip("ab", case.layout):
    if how == "T":
      turned[name] = jnp.swapaxes(operands[name], -1, -2)
  if case.kernel != "matmul_vjp":
    yield results, turned
    return
  a, b, ct = turned["a"], turned["b"], turned["ct"]
  out, da, db = results
  yield out, {"a": a, "b": b}
  yield da, {"a": ct, "b": b.T}
  yield db, {"a": a.T, "b": ct}


def _samples(case, out, x, rng) -> Iterator[dict[str, np.ndarray]]:
  """Rows of A, columns of B and what belongs to them, on the host."""
  rows, columns = (some(size, SAMPLE, rng) for size in out.shape[-2:])
  for index in some(case.batch, MATRICES, rng):
    arrays = {"out": out, **x}
    yield jax.device_get(_pick(arrays, index, rows, columns))


def some(size: int, count: int, rng) -> np.ndarray:
  """Up to `count` indices: the first, the last, and others at random."""
  if count >= size:
    return np.arange(size)
  inner = rng.choice(np.arange(1, size - 1), count - 2, replace=False)
  return np.sort([0, *inner, size - 1])


@jax.jit
def _pick(arrays, index, rows, columns):
  # Indexed where the arrays are: only what is checked travels to the host.
  along = {"a": (rows,), "b": (slice(None), columns)}
  along |= {"b2": along["b"], "bias": (columns,)}
  found = {}
  for name, x in arrays.items():
    x = x[index] if x.ndim == 3 else x
    found[name] = x[along.get(name, (rows[:, None], columns))]
  return found


@jax.jit
def _no_stray(out: jax.Array) -> jax.Array:
  """Whether nothing but float16, whose range is small, holds infinities."""
  allowed = out.dtype == jnp.float16
  return ~jnp.any(jnp.isnan(out) if allowed else ~jnp.isfinite(out))


def compare(case, sample: dict[str, np.ndarray]) -> numerics.Check:
  """`numerics.check`, for any expression."""
  out, a, b = sample["out"], sample["a"], sample["b"]
  if case.epilogue == "none" and case.kernel != "gated_matmul":
    return numerics.check(out, a, b)
  return verdict(out, *expected(case, sample))


def expected(
  case: dense_cases.Case, sample: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """The result in float64, and how far off one of the case's dtype may be."""
  want, bound = _sum(sample, "b")
  if case.activation is not None:
    want, bound = _activated(case, want, bound)
  if case.kernel == "gated_matmul":
    up, up_bound = _sum(sample, "b2")
    bound = bound * (np.abs(up) + up_bound) + np.abs(want) * up_bound
    want = want * up
  return want, rounded(want, bound, jnp.dtype(case.result_dtype))


def _sum(sample, name: str) -> tuple[np.ndarray, np.ndarray]:
  """A @ B + C + bias in float64, and how far off float32 may be."""
  a, b = sample["a"], sample[name]
  zeros = np.zeros((a.shape[0], b.shape[1]))
  added = [
    sample[name].astype(np.float64) for name in ("c", "bias") if name in sample
  ]
  want = numerics.reference(a, b, zeros + sum(added), beta=1.0)
  # Terms of different signs cancel in the sum; their errors do not.
  sizes = zeros + sum(np.abs(x) for x in added)
  bound = numerics.error_bound(a, b, sizes, beta=1.0, out_dtype=jnp.float32)
  return want, bound


def _activated(case, want, bound) -> tuple[np.ndarray, np.ndarray]:
  activation = _ACTIVATIONS[case.activation]
  size = np.abs(want) + bound  # |f(x)| <= |x| for each of them
  inexact = _EVALUATION[jnp.dtype(case.result_dtype).itemsize] * size
  return activation.fn(want), activation.slope * bound + inexact


def rounded(want, bound, dtype) -> np.ndarray:
  """Adds the rounding of the result to its dtype."""
  info = jnp.finfo(dtype)
  unit = float(info.eps) / 2
  return bound + unit * (np.abs(want) + bound) + float(info.smallest_normal)


def verdict(out, want, bound) -> numerics.Check:
  """Compares a result with a reference, given the bound of each element."""
  got = out.astype(np.float64)
  # A result that rounds to an infinity.
  overflow = np.isinf(got) & (np.sign(got) == np.sign(want))
  overflow &= np.abs(want) + bound >= float(jnp.finfo(out.dtype).max)
  with np.errstate(invalid="ignore"):
    error = np.where(overflow, 0.0, np.abs(got - want))
  error = np.where(np.isnan(error), np.inf, error)
  ratio = error / bound
  worst = np.unravel_index(np.argmax(ratio), ratio.shape)
  return numerics.Check(
    passed=bool(ratio[worst] <= 1),
    max_error=float(error.max()),
    error_bound=float(bound[worst]),
    worst_ratio=float(ratio[worst]),
    checked=got.size,
  )
