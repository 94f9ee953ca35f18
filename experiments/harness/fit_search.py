"""How good constants of the cost model are on measured rows; a search for them.

The measure is "best over chosen": the least measured time of a problem over
that of the config which the model ranks first, so 1 is perfect. A search needs
something smoother: the mean over configs, weighted by how close to the first
the model ranks them; less a part of how far predicted times are off.

All candidates are evaluated at once: `model.predict` takes constants that are
arrays. The search is the separable natural evolution strategy of Schaul,
Glasmachers and Schmidhuber, "High dimensions and heavy tails for natural
evolution strategies" (2011), on logarithms, in mirrored pairs: mean and width
of each constant follow what the better candidates have in common.
"""

from collections.abc import Callable, Collection
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from experiments.harness import fit_terms
from experiments.harness.fit_rows import Rows
from pallas_gemm import tuning
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.tuning import constants

# Configs that are predicted to take 1 % longer weigh 1/e.
_SOFTNESS = 0.01
# Best over chosen that a search gives up to have times off by less; in
# logarithms. Without, predictions of an H200 end 30 % low, and no time of XLA's
# can be compared with them; with it, held out problems are chosen for better
# too, 0.981 -> 0.983.
_ERROR_WEIGHT = 0.2
# What counts as predicted alike.
_ALIKE = 1e-9


class Regret(NamedTuple):
  """How good the choices of a model are.

  Attributes:
    problems: how many.
    mean: of best over chosen.
    below: of how many it is less than 0.95.
    worst: the least.
  """

  problems: int
  mean: float
  below: int
  worst: float

  @classmethod
  def of(cls, scores: np.ndarray) -> "Regret":
    """Of best over chosen, [problems]."""
    if not len(scores):
      return cls(0, math.nan, 0, math.nan)
    below = int((scores < 0.95).sum())
    return cls(len(scores), float(scores.mean()), below, float(scores.min()))


def predict(plans: list[Plan], known: constants.Constants) -> np.ndarray:
  """Logarithms of predicted times, [plans, candidates]."""
  models = {plan.given.along: tuning.model_of(plan.given) for plan in plans}
  times = [models[plan.given.along].predict(plan, known) for plan in plans]
  return np.log(np.array(times).reshape(len(plans), -1))


def soft_scores(rows: Rows, predicted: np.ndarray) -> np.ndarray:
  """Smoothed best over chosen, [problems, candidates]."""
  behind = np.minimum.reduceat(predicted, rows.first)[rows.of_row] - predicted
  return _weighted(rows, np.exp(behind / _SOFTNESS))


def errors(rows: Rows, predicted: np.ndarray) -> np.ndarray:
  """How far predicted times are off, [problems, candidates].

  The mean over configs of the absolute logarithm of predicted over measured.
  """
  off = np.abs(predicted - np.log(1e-6 * rows.us)[:, None])
  counts = np.bincount(rows.of_row)[:, None]
  return np.add.reduceat(off, rows.first) / counts


def fitness(rows: Rows, predicted: np.ndarray) -> np.ndarray:
  """What a search makes large, [problems, candidates]."""
  error = _ERROR_WEIGHT * errors(rows, predicted)
  return soft_scores(rows, predicted) - error


def scores(rows: Rows, predicted: np.ndarray) -> np.ndarray:
  """Best over chosen, [problems, candidates]; the mean of configs that tie."""
  least = np.minimum.reduceat(predicted, rows.first)[rows.of_row]
  return _weighted(rows, (predicted <= least + _ALIKE).astype(float))


def _weighted(rows: Rows, weights: np.ndarray) -> np.ndarray:
  total = np.add.reduceat(weights, rows.first)
  weights *= rows.quality[:, None]
  return np.add.reduceat(weights, rows.first) / total


@dataclasses.dataclass(frozen=True)
class Searches:
  """Independent searches, side by side.

  Attributes:
    counts: which problems each is judged by, [searches, problems].
    dropped: the constants that each leaves out.
  """

  counts: np.ndarray
  dropped: tuple[frozenset[str], ...]

  def __len__(self) -> int:
    return len(self.dropped)


def evaluate(
  rows: Rows,
  values: np.ndarray,
  others: constants.Constants,
  how: Callable[[Rows, np.ndarray], np.ndarray] = scores,
) -> np.ndarray:
  """Scores of candidates, [problems, candidates].

  Args:
    rows: what was measured.
    values: [candidates, constants].
    others: has the parts that are not fitted.
    how: `scores`, `errors` or `fitness`.
  """
  known = fit_terms.constants_of(values, others)
  return how(rows, predict(rows.plans, known))


def search(
  rows: Rows,
  searches: Searches,
  start: np.ndarray,
  others: constants.Constants,
  known: dict[str, fit_terms.Term],
  *,
  generations: int,
  population: int,
  width: float,
  seed: int,
  fitted: Collection[str] = fit_terms.NAMES,
  step: Callable[[], None] = lambda: None,
) -> np.ndarray:
  """Constants for each search, [searches, constants].

  Args:
    rows: what was measured.
    searches: what is searched for.
    start: [searches, constants]; positive where they are fitted.
    others: has the parts that are not fitted.
    known: what leaves a constant out.
    generations: how often candidates are drawn.
    population: candidates of a search each time; even.
    width: standard deviation of the logarithms at first.
    seed: of the draws.
    fitted: the constants that do not stay as they start.
    step: called after each generation.
  """
  rng = np.random.default_rng(seed)
  count, size = start.shape
  with np.errstate(divide="ignore"):  # 0 stays 0
    mean = np.log(start)
  moves = np.array([name in fitted for name in fit_terms.NAMES])
  widths = np.where(moves, np.full(start.shape, width), 0.0)
  utility = _utilities(population)
  rate = (3 + math.log(size)) / (5 * math.sqrt(size))
  weights = searches.counts / searches.counts.sum(1, keepdims=True)
  for _ in range(generations):
    # The same for all searches: they differ by what they see and leave out.
    half = rng.standard_normal((population // 2, size))
    drawn = np.concatenate([half, -half])
    values = np.exp(mean[:, None] + widths[:, None] * drawn)
    values = _dropped(values, searches, known).reshape(-1, size)
    found = evaluate(rows, values, others, fitness)
    found = found.reshape(len(rows.first), count, population)
    order = np.argsort(
      -np.einsum("sp,psc->sc", weights, found), axis=1, kind="stable"
    )
    drawn = drawn[order]
    mean += widths * np.einsum("c,scv->sv", utility, drawn)
    widths *= np.exp(
      rate / 2 * np.einsum("c,scv->sv", utility, drawn * drawn - 1)
    )
    step()
  return _dropped(np.exp(mean)[:, None], searches, known)[:, 0]


def _utilities(population: int) -> np.ndarray:
  """What candidates count for by rank; they add up to 0."""
  ranks = np.arange(1, population + 1)
  found = np.maximum(0, math.log(population / 2 + 1) - np.log(ranks))
  return found / found.sum() - 1 / population


def _dropped(
  values: np.ndarray, searches: Searches, known: dict[str, fit_terms.Term]
) -> np.ndarray:
  """The values of each search, [searches, ...], without what it drops."""
  return np.stack(
    [
      fit_terms.without(some, dropped, known)
      for some, dropped in zip(values, searches.dropped)
    ]
  )
