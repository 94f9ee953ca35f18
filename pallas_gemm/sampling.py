"""Which parts of large results are checked: float64 on the host is slow.

Of a batch some matrices, or of groups some, and of each some rows and columns.
They are picked where the arrays are: only what is checked travels to the host.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np


def stratified(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
  """First, last, and a random index of each of `count` stripes, or all."""
  if count >= size:
    return np.arange(size)
  edges = np.linspace(0, size, count + 1).astype(np.int64)
  picked = rng.integers(edges[:-1], edges[1:])
  picked[0], picked[-1] = 0, size - 1
  return np.unique(picked)


class Part(NamedTuple):
  """Rows and columns of a matrix of the results.

  Attributes:
    matrix: its index in a batch, or its group.
    rows, columns: which of it.
    k: the part of the operands' K that is summed up.
  """

  matrix: int
  rows: np.ndarray
  columns: np.ndarray
  k: slice = slice(None)

  def of(self, x: jax.Array) -> np.ndarray:
    """This part of [M, N] or [batch, M, N], or of what broadcasts to it."""
    x = self._matrix(x) if x.ndim > 1 else x[None]
    rows, columns = (
      which if size > 1 else np.zeros(1, int)
      for which, size in zip((self.rows, self.columns), x.shape)
    )
    return np.asarray(x[rows[:, None], columns])

  def operands(
    self, arrays: Mapping[str, jax.Array], layout: str = "NN"
  ) -> dict[str, np.ndarray]:
    """What it is made of, as arguments of `check.expected`.

    Args:
      arrays: all of them, by name; "a", "b" and "b_up" [K, ...] as they are
        stored; of several matrices, one that is alone is shared.
      layout: how A and B are stored: "N" as they are, "T" transposed.
    """
    found = {}
    for name, x in arrays.items():
      if name == "a":
        found[name] = self._lines(x, self.rows, layout[0] == "T")
      elif name in ("b", "b_up"):
        found[name] = self._lines(x, self.columns, layout[1] == "N").T
      else:
        found[name] = self.of(x)
    return found

  def _lines(self, x: jax.Array, which: np.ndarray, flip: bool) -> np.ndarray:
    """Rows of a matrix, or its columns as rows, along the part of K."""
    x = self._matrix(x)
    return np.asarray(x[:, which].T if flip else x[which])[:, self.k]

  def _matrix(self, x: jax.Array) -> jax.Array:
    return x[min(self.matrix, len(x) - 1)] if x.ndim == 3 else x


def of_batch(
  shape: tuple[int, ...], lines: int, matrices: int, rng: np.random.Generator
) -> Iterator[Part]:
  """Parts of [M, N], or of some matrices of [batch, M, N].

  Args:
    shape: of the result.
    lines: rows, and columns, of each.
    matrices: how many.
    rng: picks among them.
  """
  *batch, m, n = shape
  rows, columns = (stratified(size, lines, rng) for size in (m, n))
  for matrix in stratified(*batch or [1], matrices, rng):
    yield Part(matrix, rows, columns)


def of_groups(
  shape: tuple[int, ...],
  sizes: np.ndarray,
  lines: int,
  groups: int,
  rng: np.random.Generator,
) -> Iterator[Part]:
  """Parts of [M, N], rows of one group after the other, or [G, M, N], sums.

  The first, the last, the smallest and the largest group that has rows, and
  others; of sums also an empty one, which is zero.

  Args:
    shape: of the result.
    sizes: [G], of the groups.
    lines: rows, and columns, of each.
    groups: how many, besides the extremes.
    rng: picks among them.
  """
  starts, filled = np.cumsum(sizes) - sizes, np.flatnonzero(sizes)
  picked = filled[stratified(len(filled), groups, rng)]
  extremes = filled[[sizes[filled].argmin(), sizes[filled].argmax()]]
  columns = stratified(shape[-1], lines, rng)
  rows = stratified(shape[-2], lines, rng)
  picked = np.unique([*picked, *extremes])
  if len(shape) == 3:
    picked = [*picked, *np.flatnonzero(sizes == 0)[:1]]
  for group in picked:
    start, size = starts[group], sizes[group]
    if len(shape) == 3:
      yield Part(group, rows, columns, slice(start, start + size))
    else:
      rows = start + stratified(size, lines, rng)
      yield Part(group, rows, columns)
