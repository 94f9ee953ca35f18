"""Fits of the cost model to a device's rows, and what each constant is worth.

Problems are in five folds by a hash of their fields. There are six searches
side by side: one for each fold, which does not see the fold's problems, and one
that sees all. What the first five choose for problems that they have not seen
is "held out"; the sixth's constants are those to ship.
"""

from collections.abc import Callable, Collection, Sequence
import dataclasses
import functools
import math
import pathlib
from typing import NamedTuple

import numpy as np

from experiments.harness import fit_rows, fit_search, fit_terms
from experiments.harness.fit_rows import FOLDS
from experiments.harness.fit_search import Regret
from pallas_gemm import hardware
from pallas_gemm.tuning import constants

# (candidates of a search, width at first) of a fit, and of one that starts from
# constants that are fitted but for what is left out.
_FRESH, _AGAIN = (64, 0.1), (16, 0.03)
ABLATION_GENERATIONS = 20
DROP_GENERATIONS = 10
# Sets of constants that show which configs the model can tell apart.
_PROBES, _PROBE_WIDTH = 8, 0.3


class Worth(NamedTuple):
  """What a constant buys.

  Attributes:
    name: of the constant.
    train, held_out: mean of best over chosen with all constants, less that
      without this one, each fitted again.
    deviation: standard error of `held_out`, over problems.
    time: by how much more predicted times are off without it, on problems held
      out: logarithms of predicted over measured.
  """

  name: str
  train: float
  held_out: float
  deviation: float
  time: float


@dataclasses.dataclass(frozen=True)
class Study:
  """Rows of a device, and how its constants are fitted to them.

  Attributes:
    gpu: the device.
    rows: what was measured there.
    start: from which every search starts, [constants].
    seed: of the searches.
    fitted: the constants that do not stay as they start.
    step: called after each generation.
  """

  gpu: hardware.Gpu
  rows: fit_rows.Rows
  start: np.ndarray
  seed: int = 0
  fitted: Collection[str] = fit_terms.NAMES
  step: Callable[[], None] = lambda: None

  @functools.cached_property
  def terms(self) -> dict[str, fit_terms.Term]:
    """The constants of this GPU."""
    return fit_terms.terms(self.gpu)

  @functools.cached_property
  def today(self) -> constants.Constants:
    """What predictions for this GPU are made with today."""
    return constants.of(self.gpu)

  @functools.cached_property
  def seen(self) -> np.ndarray:
    """Which problems each search sees, [FOLDS + 1, problems]."""
    by_fold = np.arange(FOLDS)[:, None] != self.rows.fold
    return np.append(by_fold, np.ones((1, len(self.rows.fold)), bool), axis=0)

  def fit(
    self,
    generations: int,
    dropped: frozenset[str] = frozenset(),
    start: np.ndarray | None = None,
  ) -> np.ndarray:
    """Constants of the six searches, [FOLDS + 1, constants].

    Args:
      generations: of the search.
      dropped: constants that are left out.
      start: those of an earlier fit; None: `Study.start`.
    """
    again = start is not None
    if start is None:
      start = np.repeat(self.start[None], FOLDS + 1, axis=0)
    searches = fit_search.Searches(self.seen, (dropped,) * (FOLDS + 1))
    return self._search(
      searches, start, generations, _AGAIN if again else _FRESH
    )

  def scores(self, values: np.ndarray) -> np.ndarray:
    """Best over chosen, [problems, candidates]."""
    return fit_search.evaluate(self.rows, values, self.today)

  def errors(self, values: np.ndarray) -> np.ndarray:
    """How far predicted times are off, [problems, candidates]."""
    how = fit_search.errors
    return fit_search.evaluate(self.rows, values, self.today, how)

  def held_out(self, values: np.ndarray) -> np.ndarray:
    """Best over chosen of each problem, by the search that did not see it."""
    return self.scores(values[:FOLDS])[
      np.arange(len(self.rows.fold)), self.rows.fold
    ]

  def ablate(self, values: np.ndarray) -> list[Worth]:
    """What each constant buys, the dearest first.

    In each fold one constant after the other is set to the value that removes
    its term, the others are fitted again for a few generations, and compared
    with a fit that goes on for as many with all of them.

    Args:
      values: of `fit`.
    """
    names = fit_terms.NAMES
    sets = (frozenset(), *(frozenset((name,)) for name in names))
    gains = {True: [], False: []}
    times = []
    for fold in range(FOLDS):
      seen = self.seen[fold]
      searches = fit_search.Searches(np.repeat(seen[None], len(sets), 0), sets)
      start = np.repeat(values[fold][None], len(sets), axis=0)
      found = self._search(searches, start, ABLATION_GENERATIONS, _AGAIN)
      scores = self.scores(found)
      for is_seen, some in gains.items():
        of_fold = scores[seen == is_seen]
        some.append(of_fold[:, :1] - of_fold[:, 1:])
      off = self.errors(found)[~seen]
      times.append(off[:, 1:] - off[:, :1])
    train, held_out = (np.concatenate(gains[x]) for x in (True, False))
    deviation = held_out.std(axis=0) / math.sqrt(max(1, len(held_out)))
    time = np.concatenate(times).mean(axis=0)
    means = train.mean(axis=0), held_out.mean(axis=0), deviation, time
    return sorted(
      (Worth(name, *map(float, x)) for name, *x in zip(names, *means)),
      key=lambda worth: -worth.held_out,
    )

  def drop(
    self, values: np.ndarray, dropped: frozenset[str]
  ) -> tuple[str, np.ndarray]:
    """The next constant to leave out, and a fit without it.

    It is the one without which training problems are chosen for best, in the
    mean over folds, before the others are fitted again.

    Args:
      values: of a fit without `dropped`.
      dropped: what is left out already.
    """
    left = [name for name in fit_terms.NAMES if name not in dropped]
    means = np.zeros(len(left))
    for fold in range(FOLDS):
      tried = [
        fit_terms.without(values[fold], (*dropped, name), self.terms)
        for name in left
      ]
      means += self.scores(np.stack(tried))[self.seen[fold]].mean(axis=0)
    name = left[int(means.argmax())]
    dropped |= {name}
    # A logarithm has no 0: those that are left out start anywhere.
    start = np.where(
      [x in dropped for x in fit_terms.NAMES], self.start, values
    )
    return name, self.fit(DROP_GENERATIONS, dropped, start)

  def _search(
    self,
    searches: fit_search.Searches,
    start: np.ndarray,
    generations: int,
    how: tuple[int, float],
  ) -> np.ndarray:
    population, width = how
    return fit_search.search(
      self.rows,
      searches,
      start,
      self.today,
      self.terms,
      generations=generations,
      population=population,
      width=width,
      seed=self.seed,
      fitted=self.fitted,
      step=self.step,
    )


def rows_of(
  folder: pathlib.Path, gpu: hardware.Gpu, most_rows: int | None = None
) -> fit_rows.Rows:
  """The rows of a folder that count.

  Args:
    folder: experiments/results/<device>.
    gpu: the device.
    most_rows: about how many at most; None: all.
  """
  start = start_of(gpu)
  drawn = np.random.default_rng(0).standard_normal((_PROBES, len(start)))
  probes = fit_terms.constants_of(
    start * np.exp(_PROBE_WIDTH * drawn), constants.of(gpu)
  )
  predict = functools.partial(fit_search.predict, known=probes)
  return fit_rows.read(folder, gpu, predict, most_rows)


def start_of(gpu: hardware.Gpu) -> np.ndarray:
  """The round numbers of `fit_terms`, [constants]."""
  return np.array([term.start for term in fit_terms.terms(gpu).values()])


def by_kind(rows: fit_rows.Rows, scores: np.ndarray) -> dict[str, Regret]:
  """Regret of each kind of problem that there is, and of all.

  Args:
    rows: what was measured.
    scores: best over chosen, [problems].
  """
  found = {
    name: Regret.of(scores[rows.kind == i])
    for i, name in enumerate(fit_rows.KINDS)
    if (rows.kind == i).any()
  }
  return found | {"all": Regret.of(scores)}


def rounded(values: Sequence[float]) -> np.ndarray:
  """With four digits, as they are shipped."""
  return np.array([float(f"{value:.4g}") for value in values])
