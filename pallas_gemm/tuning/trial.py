"""One problem, ready to be run with any config, and what its result must be.

A config that makes the kernel wrong must never be remembered, however fast.
Each result is compared with float64 (see `check`) on a grid of rows and columns
that is fine enough to meet the tiles of all but the largest results.

How large groups are is not part of a problem. Here they are between half and
one and a half times as large as each other would make them: none ends with a
tile, and no config can win by suiting sizes that are all the same.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import check
from pallas_gemm.kernels.sm90 import launch
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem

Arrays = dict[str, jax.Array]
Results = tuple[jax.Array, ...]

# Rows, and columns, of which results are checked; and of how many groups.
_SAMPLE, _GROUPS = 256, 4


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


class _Part(NamedTuple):
  """Rows and columns of one matrix of the results, and what they must be.

  Attributes:
    matrix: its index in a batch or among groups; () where there is one.
    rows, columns: which of it.
    expected: of each result.
  """

  matrix: tuple[int, ...]
  rows: np.ndarray
  columns: np.ndarray
  expected: tuple[check.Expected, ...]

  def error(self, results: Results) -> str | None:
    """None, or where and how much a result is wrong."""
    at = *self.matrix, self.rows[:, None], self.columns
    for out, expected in zip(results, self.expected):
      found = expected.check(out[at])
      if not found.passed:
        i, j = found.worst
        element = [*self.matrix, int(self.rows[i]), int(self.columns[j])]
        return (
          f"wrong result: element {element} is off by"
          f" {found.worst_ratio * found.error_bound:.3g}, at most"
          f" {found.error_bound:.3g} is rounding"
        )
    return None


class Trial:
  """A case with operands drawn from N(0, 1), scaled to results of that size.

  Attributes:
    case: what is run.
  """

  def __init__(self, case: Case):
    self.case = case
    self._operands = _operands(case.problem)
    self._parts = [
      _part(case, *matrix) for matrix in _matrices(case.problem, self._operands)
    ]

  def compile(self, config: Config) -> Callable[[], Results]:
    """A call that runs the kernel with a config, compiled.

    Raises:
      Exception: whatever stops the config from being compiled.
    """
    case = self.case
    kernel, factors = launch.grouped, {}
    if not case.problem.ragged:
      kernel = launch.dense
      factors = {"alpha": case.alpha, "beta": case.beta}
    run = functools.partial(
      kernel,
      problem=case.problem,
      config=config,
      activation=case.activation,
      **factors,
    )
    compiled = jax.jit(run).lower(**self._operands).compile()
    return functools.partial(compiled, **self._operands)

  def error(self, results: Results) -> str | None:
    """None if the results are right, or what is wrong."""
    if not all(bool(jnp.isfinite(x).all()) for x in results):
      return "wrong result: not all of it is finite"
    return next(filter(None, (x.error(results) for x in self._parts)), None)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape: tuple[int, ...], dtype: str, scale: float):
  return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _operands(p: Problem) -> Arrays:
  """What the kernel takes, by the name of its argument."""
  a = (p.k, p.m) if p.transpose_a else (p.m, p.k)
  b = (p.n, p.k) if p.transpose_b else (p.k, p.n)
  if not p.ragged:
    a = (p.batch if p.batched_a else 1, *a)
    b = (p.batch if p.batched_b else 1, *b)
  elif p.ragged == "m":
    b = (p.groups, *b)
  # A power of two: the bits of the significands are those of N(0, 1).
  scale = 2.0 ** -round(np.log2(p.k) / 2)
  wanted = {"a": (a, p.dtype, 1.0), "b": (b, p.dtype, scale)}
  if p.gated:
    wanted["b_up"] = wanted["b"]
  if p.bias:
    size = (p.n if p.bias == "n" else p.m,)
    wanted["bias"] = ((p.groups, *size) if p.ragged else size, p.dtype, 1.0)
  if p.c_dtype:
    wanted["c"] = ((p.batch, p.m, p.n), p.c_dtype, 1.0)
  keys = jax.random.split(jax.random.key(0), len(wanted))
  found = {
    name: _normal(key, *how) for key, (name, how) in zip(keys, wanted.items())
  }
  if p.ragged:
    rows = p.m if p.ragged == "m" else p.k
    found["offsets"] = jnp.asarray(_offsets(rows, p.groups))
  return found


def _offsets(rows: int, groups: int) -> np.ndarray:
  """[groups + 1]: where groups of different sizes start, without a gap."""
  weights = np.random.default_rng(0).uniform(0.5, 1.5, groups)
  ends = np.cumsum(weights) / weights.sum() * rows
  return np.concatenate([[0], np.round(ends)]).astype(np.int32)


def _matrices(
  p: Problem, x: Arrays
) -> Iterator[tuple[tuple[int, ...], int, Arrays]]:
  """(index, first row, operands) of each matrix whose results are checked.

  The first and the last of a batch; of groups the first, the last and some
  between them, but for empty ones.
  """
  if not p.ragged:
    shared = {"bias": x["bias"]} if p.bias else {}
    for i in sorted({0, p.batch - 1}):
      stacked = {k: v[min(i, len(v) - 1)] for k, v in x.items()}
      yield (i,), 0, stacked | shared
    return
  offsets = np.asarray(x["offsets"])
  for group in _spread(p.groups, _GROUPS).tolist():
    start, end = offsets[group : group + 2]
    if start == end:
      continue
    if p.ragged == "k":
      yield (group,), 0, {name: x[name][start:end] for name in ("a", "b")}
    else:
      of_group = {k: x[k][group] for k in ("b", "b_up", "bias") if k in x}
      yield (), start, {"a": x["a"][start:end]} | of_group


def _spread(size: int, count: int = _SAMPLE) -> np.ndarray:
  """At most `count` indices, the first and the last among them."""
  return np.unique(np.linspace(0, size - 1, count).astype(int))


def _part(case: Case, matrix: tuple[int, ...], first: int, x: Arrays) -> _Part:
  """What some rows and columns of a matrix must be."""
  p = case.problem
  rows = _spread(x["a"].shape[1 if p.transpose_a else 0])
  columns = _spread(p.n)
  picked = {"a": x["a"][:, rows].T if p.transpose_a else x["a"][rows]}
  for name in x.keys() & {"b", "b_up"}:
    b = x[name]
    picked[name] = b[columns].T if p.transpose_b else b[:, columns]
  if p.bias:
    bias = x["bias"]
    picked["bias"] = bias[columns] if p.bias == "n" else bias[rows][:, None]
  if p.c_dtype:
    picked["c"] = x["c"][rows][:, columns]
  expected = check.expected(
    **picked,
    alpha=case.alpha,
    beta=case.beta,
    activation=case.activation,
    out_dtype=p.out_dtype,
  )
  return _Part(matrix, rows + first, columns, expected)
