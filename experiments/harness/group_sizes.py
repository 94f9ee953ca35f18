"""How M rows are shared out among G groups: (m, groups, rng) -> [groups]."""

from collections.abc import Callable
import math

import numpy as np


def _even(m: int, groups: int, rng) -> np.ndarray:
  del rng
  return m // groups + (np.arange(groups) < m % groups)


def _random(m: int, groups: int, rng) -> np.ndarray:
  return rng.multinomial(m, np.full(groups, 1 / groups))


def _zipf(m: int, groups: int, rng) -> np.ndarray:
  shares = 1 / np.arange(1, groups + 1)
  return rng.permutation(rng.multinomial(m, shares / shares.sum()))


def _one_hot(m: int, groups: int, rng) -> np.ndarray:
  sizes = np.zeros(groups, int)
  sizes[rng.integers(groups)] = m
  return sizes


def _half_empty(m: int, groups: int, rng) -> np.ndarray:
  full = np.arange(groups) < math.ceil(groups / 2)
  sizes = np.zeros(groups, int)
  sizes[rng.permutation(full)] = _even(m, int(full.sum()), rng)
  return sizes


def _odd(m: int, groups: int, rng) -> np.ndarray:
  """Each odd, about even; a row is left over if the parities say so."""
  pairs = _random(max(0, m - groups) // 2, groups, rng)
  return 2 * pairs + 1


def _padded(m: int, groups: int, rng) -> np.ndarray:
  """The last quarter of the rows is of no group."""
  return _random(m - m // 4, groups, rng)


DISTRIBUTIONS: dict[str, Callable[..., np.ndarray]] = {
  "even": _even,
  "random": _random,
  "zipf": _zipf,
  "one_hot": _one_hot,
  "half_empty": _half_empty,
  "odd": _odd,
  "padded": _padded,
}
