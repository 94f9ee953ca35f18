"""Tables of a fit: how good constants are, and what each buys."""

from collections.abc import Sequence

import numpy as np

from experiments.harness import fit_study, fit_terms
from experiments.harness.fit_study import Study, Worth

REGRET = ("constants", "problems", "count", "mean", "below 0.95", "worst")
WORTH = ("constant", "train", "held out", "+-", "time")


def regrets(study: Study, values: np.ndarray) -> list[list[str]]:
  """The lines below `REGRET`.

  Args:
    study: what was fitted.
    values: of `Study.fit`.
  """
  today = fit_terms.values_of(study.today)
  sets = {
    "start": study.scores(study.start[None])[:, 0],
    "today's": study.scores(today[None])[:, 0],
    "fit, train": study.scores(fit_study.rounded(values[-1])[None])[:, 0],
    "fit, held out": study.held_out(values),
  }
  return [
    [
      name,
      kind,
      str(x.problems),
      f"{x.mean:.4f}",
      str(x.below),
      f"{x.worst:.3f}",
    ]
    for name, scores in sets.items()
    for kind, x in fit_study.by_kind(study.rows, scores).items()
  ]


def worths(found: Sequence[Worth]) -> list[list[str]]:
  """The lines below `WORTH`."""
  return [
    [
      x.name,
      f"{x.train:+.4f}",
      f"{x.held_out:+.4f}",
      f"{x.deviation:.4f}",
      f"{x.time:+.3f}",
    ]
    for x in found
  ]


def errors(study: Study, values: np.ndarray) -> str:
  """A line: how far predicted times are off, in the mean over problems."""
  today = fit_terms.values_of(study.today)
  off = study.errors(np.stack([today, values[-1]])).mean(axis=0)
  return (
    f"predicted times are off by {off[0]:.3f} today, {off[1]:.3f} by the fit"
  )
