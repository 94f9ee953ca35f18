"""Operands in float32 that a product in planes could get wrong."""

from collections.abc import Callable
import functools

import numpy as np

from pallas_gemm.problem import Problem

Arrays = tuple[np.ndarray, np.ndarray]
_MOST = np.finfo(np.float32).max
_TINY = np.finfo(np.float32).smallest_normal


def _normal(problem: Problem) -> Arrays:
  rng = np.random.default_rng(7)
  shapes = (problem.m, problem.k), (problem.k, problem.n)
  a, b = (rng.standard_normal(x).astype(np.float32) for x in shapes)
  return a, b


def _with(problem: Problem, *values: float, zeros: bool = False) -> Arrays:
  """N(0, 1) with values in the second row of A; they may meet zeros."""
  a, b = _normal(problem)
  a[1, 3 : 3 + len(values)] = values
  if zeros:
    b[3, ::2] = 0
  return a, b


def _scaled(problem: Problem, of_a: float, of_b: float) -> Arrays:
  """All of one sign, so that sums overflow, or underflow, if products do."""
  a, b = map(np.abs, _normal(problem))
  return a * np.float32(of_a), b * np.float32(of_b)


def _of_many_exponents(problem: Problem) -> Arrays:
  a, b = _normal(problem)
  exponents = np.linspace(-60, 60, problem.k).astype(int)
  return np.ldexp(a, exponents), np.ldexp(b, -exponents[:, None])


def _exact(problem: Problem) -> Arrays:
  """Infinities against numbers that are one plane, with zeros in the others."""
  a, b = _with(problem, np.inf)
  return a, np.round(b)


def _negative_zeros(problem: Problem) -> Arrays:
  a, b = _normal(problem)
  return np.full_like(a, -0.0), np.abs(b)


def _partial(*values: float, **how: bool) -> Callable[[Problem], Arrays]:
  return lambda problem: _with(problem, *values, **how)


_SMALL_NAN = np.uint32(0x7F800001).view(np.float32)
_ROUNDS_UP = np.float32(2.0**128 * (1 - 2.0**-9))

KINDS: dict[str, Callable[[Problem], Arrays]] = {
  "infinity": _partial(np.inf),
  "negative_infinity": _partial(-np.inf),
  "infinity_by_zero": _partial(np.inf, zeros=True),
  "infinity_by_exact": _exact,
  "infinities": _partial(np.inf, -np.inf),
  "nan": _partial(np.nan),
  "small_nan": _partial(_SMALL_NAN),
  "largest": _partial(_MOST),
  "rounds_to_infinity": _partial(_ROUNDS_UP),
  "overflow": functools.partial(_scaled, of_a=1e25, of_b=1e20),
  "subnormal_operands": functools.partial(_scaled, of_a=_TINY / 64, of_b=1.0),
  "subnormal_results": functools.partial(_scaled, of_a=1e-22, of_b=1e-22),
  "exponents": _of_many_exponents,
  "negative_zeros": _negative_zeros,
}
