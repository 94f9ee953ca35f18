"""One problem, ready to be run with any config, and what its result must be.

A config that makes the kernel wrong must never be remembered, however fast.
Each result is compared with a float64 reference on a grid of rows and columns
that is fine enough to meet the tiles of all but the largest results, against
the elementwise bound of `numerics`. An activation maps an interval of that
width around the exact sum to an interval of results; that one is the bound.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import numerics
from pallas_gemm.kernels.sm90 import launch
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem

Results = tuple[jax.Array, ...]

# Rows, and columns, of which results are checked.
_SAMPLE = 256
# What evaluating an activation may be off, relative to the larger of its
# argument and its value: bfloat16 results use approximate instructions, good
# to 2^-11.
_ACTIVATION_ERROR = {"bfloat16": 2.0**-10}
_EXACT_ACTIVATION_ERROR = 2.0**-20


@dataclasses.dataclass(frozen=True)
class Case:
  """A problem and what else a kernel needs to know to run it.

  Attributes:
    problem: what is tuned.
    activation: the function that `problem.activation` names.
    alpha, beta: factors of the product and of C.
  """

  problem: Problem
  activation: Callable[[jax.Array], jax.Array] | None = None
  alpha: float = 1.0
  beta: float = 1.0


@dataclasses.dataclass(frozen=True)
class Expected:
  """Part of one result: output[index][rows][:, columns].

  Attributes:
    index: of the matrix in the batch.
    rows, columns: which of it.
    want: [rows, columns], float64.
    bound: the largest error of each.
  """

  index: int
  rows: np.ndarray
  columns: np.ndarray
  want: np.ndarray
  bound: np.ndarray

  def error(self, output: jax.Array) -> str | None:
    """None, or where and how much an output is wrong."""
    got = output[self.index][self.rows][:, self.columns]
    error = np.abs(np.asarray(got).astype(np.float64) - self.want)
    ratio = np.where(np.isnan(error), np.inf, error / self.bound)
    if np.max(ratio) <= 1:
      return None
    i, j = np.unravel_index(np.argmax(ratio), ratio.shape)
    return (
      f"wrong result: element [{self.index}, {self.rows[i]},"
      f" {self.columns[j]}] is off by {error[i, j]:.3g}, at most"
      f" {self.bound[i, j]:.3g} is rounding"
    )


class Trial:
  """A case with operands drawn from N(0, 1), scaled to results of that size.

  Attributes:
    case: what is run.
    operands: by the names that they have in `ops.spec.Operands`.
  """

  def __init__(self, case: Case):
    self.case = case
    self.operands = self._make_operands()
    self._expected = self._make_expected()

  def compile(self, config: Config) -> Callable[[], Results]:
    """A call that runs the kernel with a config, compiled.

    Raises:
      Exception: whatever stops the config from being compiled.
    """
    compiled = jax.jit(self._kernel(config)).lower(**self.operands).compile()
    return functools.partial(compiled, **self.operands)

  def error(self, results: Results) -> str | None:
    """None if the results are right, or what is wrong."""
    for output, parts in zip(results, self._expected, strict=True):
      if not bool(jnp.isfinite(output).all()):
        return "wrong result: not all of it is finite"
      for part in parts:
        if reason := part.error(output):
          return reason
    return None

  def _make_operands(self) -> dict[str, jax.Array]:
    return operands(self.case.problem)

  def _make_expected(self) -> "list[list[Expected]]":
    return expected(self.case, self.operands)

  def _kernel(self, config: Config) -> Callable[..., Results]:
    return functools.partial(
      launch.dense,
      problem=self.case.problem,
      config=config,
      alpha=self.case.alpha,
      beta=self.case.beta,
      activation=self.case.activation,
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key, shape: tuple[int, ...], dtype: str, scale: float):
  """N(0, 1), scaled."""
  return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def operands(problem: Problem) -> dict[str, jax.Array]:
  """What the kernel takes, by the name of its argument."""
  p = problem
  a = (p.k, p.m) if p.transpose_a else (p.m, p.k)
  b = (p.n, p.k) if p.transpose_b else (p.k, p.n)
  # A power of two: the bits of the significands are those of N(0, 1).
  scale = 2.0 ** -round(np.log2(p.k) / 2)
  wanted = {"a": ((p.batch if p.batched_a else 1, *a), p.dtype, 1.0)}
  wanted["b"] = ((p.batch if p.batched_b else 1, *b), p.dtype, scale)
  if p.gated:
    wanted["b_up"] = wanted["b"]
  if p.bias:
    wanted["bias"] = ((p.n if p.bias == "n" else p.m,), p.dtype, 1.0)
  if p.c_dtype:
    wanted["c"] = ((p.batch, p.m, p.n), p.c_dtype, 1.0)
  keys = jax.random.split(jax.random.key(0), len(wanted))
  return {
    name: normal(key, *how) for key, (name, how) in zip(keys, wanted.items())
  }


def expected(
  case: Case, operands: Mapping[str, jax.Array]
) -> list[list[Expected]]:
  """Of each result, what is checked: parts of the first and last matrix."""
  p = case.problem
  rows, columns = _spread(p.m), _spread(p.n)
  found: list[list[Expected]] = []
  for index in sorted({0, p.batch - 1}):
    sums = [
      _sum(case, operands, name, index, rows, columns)
      for name in ("b", "b_up")
      if name in operands
    ]
    results = [_activated(case, sums)]
    if p.save_preactivation:
      results += sums
    found = found or [[] for _ in results]
    for parts, (want, bound) in zip(found, results):
      bound = _rounded(want, bound, p.out_dtype)
      parts.append(Expected(index, rows, columns, want, bound))
  return found


def _spread(size: int) -> np.ndarray:
  """At most `_SAMPLE` indices, the first and the last among them."""
  return np.unique(np.linspace(0, size - 1, _SAMPLE).astype(np.int64))


def _sum(case, operands, name, index, rows, columns):
  """alpha * A @ B + beta * C + bias in float64, and its bound in float32."""
  p = case.problem
  a = _picked(operands["a"], index, rows, p.transpose_a)
  b = _picked(operands[name], index, columns, not p.transpose_b).T
  added, size = np.zeros((len(rows), len(columns))), 0.0
  if p.c_dtype:
    c = operands["c"][index][rows][:, columns]
    added = case.beta * np.asarray(c).astype(np.float64)
    size = np.abs(added)
  if p.bias:
    bias = np.asarray(operands["bias"]).astype(np.float64)
    bias = bias[columns] if p.bias == "n" else bias[rows][:, None]
    added, size = added + bias, size + np.abs(bias)
  want = numerics.reference(a, b, added, case.alpha, 1.0)
  # Terms of different signs cancel in the sum, their errors do not.
  bound = numerics.error_bound(
    a, b, np.zeros_like(added) + size, case.alpha, 1.0, jnp.float32
  )
  return want, bound


def _picked(x: jax.Array, index, which, transposed: bool) -> np.ndarray:
  """Rows of one matrix of a batch, or columns, which come as rows."""
  x = x[index if x.shape[0] > 1 else 0]
  return np.asarray(x[:, which]).T if transposed else np.asarray(x[which])


def _activated(case: Case, sums):
  """The result in float64 and its bound, from those of the sums."""
  p = case.problem
  if case.activation is None and not p.gated:
    return sums[0]

  def apply(offsets) -> np.ndarray:
    shifted = [
      jnp.asarray(want + offset * bound, jnp.float32)
      for offset, (want, bound) in zip(offsets, sums)
    ]
    out = case.activation(shifted[0])
    out = out * shifted[1] if p.gated else out
    return np.asarray(out).astype(np.float64)

  want = apply([0] * len(sums))
  corners = itertools.product((-1, 1), repeat=len(sums))
  spread = np.max([np.abs(apply(x) - want) for x in corners], axis=0)
  size = np.prod([np.abs(argument) for argument, _ in sums], axis=0)
  inexact = _ACTIVATION_ERROR.get(p.out_dtype, _EXACT_ACTIVATION_ERROR)
  return want, spread + inexact * np.maximum(size, np.abs(want))


def _rounded(want, bound, dtype: Any) -> np.ndarray:
  """The bound after the result was rounded to its dtype."""
  info = jnp.finfo(dtype)
  unit = float(info.eps) / 2
  return bound + unit * (np.abs(want) + bound) + float(info.smallest_normal)
