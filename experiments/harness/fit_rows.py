"""Rows that constants are fitted to, and how good constants are on them.

A row of `dense_tuning.jsonl` or `ragged_tuning.jsonl` is a config that was
timed on a problem, in a run. Times are compared within a run alone: kernels and
clocks differ from one to the next.

What is wanted is best over chosen. A search needs something smoother: the mean
over configs, weighted by how close to the first the model ranks them; less a
part of how far predicted times are off.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import hashlib
import pathlib
from typing import Any

import numpy as np

from experiments.harness import cli, fit_terms
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache, constants, model, xla

FILES = ("dense_tuning", "ragged_tuning")
FOLDS = 5
# Configs of a problem, that the model can tell apart, with which it counts.
FEWEST = 4
KINDS = ("dense", "groups of rows", "groups along K")
_DTYPES = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
# Configs that are predicted to take 1 % longer weigh 1/e.
_SOFTNESS = 0.01
# Best over chosen that a search gives up to have times off by less; in
# logarithms. Without, predictions of an H200 end low, and no time of XLA's can
# be compared with them.
_ERROR_WEIGHT = 0.2
# What counts as predicted alike.
_ALIKE = 1e-9
# Sets of constants that show which configs the model can tell apart.
_PROBES, _PROBE_WIDTH = 8, 0.3
# A config on its problem, its time, and XLA's or NaN.
_Row = tuple[Plan, float, float]


def predict(plans: list[Plan], known: constants.Constants) -> np.ndarray:
  """Logarithms of predicted times, [plans, candidates]."""
  times = [tuning.model_of(x.tiling.given).predict(x, known) for x in plans]
  return np.log(np.array(times).reshape(len(plans), -1))


@dataclasses.dataclass(frozen=True)
class Rows:
  """Measured configs, those of a problem in a run one after the other.

  Attributes:
    plans: of the problems and configs.
    us: their times, [rows], in microseconds.
    first: the first row of each problem, [problems].
    xla_us: of XLA's product, [problems]; NaN where it was not timed.
    fold: of each problem, [problems]; one problem's is the same in all runs.
    kind: of each problem, an index of `KINDS`.
  """

  plans: list[Plan]
  us: np.ndarray
  first: np.ndarray
  xla_us: np.ndarray
  fold: np.ndarray
  kind: np.ndarray

  @functools.cached_property
  def counts(self) -> np.ndarray:
    """Rows of each problem."""
    return np.diff(np.append(self.first, len(self.us)))

  @functools.cached_property
  def of_row(self) -> np.ndarray:
    """The problem of each row."""
    return np.repeat(np.arange(len(self.first)), self.counts)

  @property
  def seen(self) -> np.ndarray:
    """Which problems each search sees, [FOLDS + 1, problems]."""
    return np.arange(FOLDS + 1)[:, None] != self.fold

  def of(self, which: np.ndarray) -> "Rows":
    """The rows of some problems, given as [problems] of bool."""
    kept = np.flatnonzero(which[self.of_row])
    return Rows(
      [self.plans[i] for i in kept],
      self.us[kept],
      np.append(0, np.cumsum(self.counts[which]))[:-1],
      self.xla_us[which],
      self.fold[which],
      self.kind[which],
    )

  def scores(self, predicted: np.ndarray) -> np.ndarray:
    """Best over chosen, [problems, candidates]; the mean of configs that tie.

    Args:
      predicted: logarithms of times, [rows, candidates].
    """
    least = self._least(predicted)
    return self._weighted((predicted <= least + _ALIKE).astype(float))

  def errors(self, predicted: np.ndarray) -> np.ndarray:
    """How far predicted times are off, [problems, candidates].

    The mean over configs of the absolute logarithm of predicted over measured.
    """
    off = np.abs(predicted - np.log(1e-6 * self.us)[:, None])
    return np.add.reduceat(off, self.first) / self.counts[:, None]

  def fitness(self, predicted: np.ndarray) -> np.ndarray:
    """What a search makes large, [problems, candidates]."""
    behind = self._least(predicted) - predicted
    smooth = self._weighted(np.exp(behind / _SOFTNESS))
    return smooth - _ERROR_WEIGHT * self.errors(predicted)

  def _least(self, values: np.ndarray) -> np.ndarray:
    """That of its problem for each row."""
    return np.minimum.reduceat(values, self.first)[self.of_row]

  def _weighted(self, weights: np.ndarray) -> np.ndarray:
    quality = self._least(self.us) / self.us
    total = np.add.reduceat(weights, self.first)
    return np.add.reduceat(weights * quality[:, None], self.first) / total


def regret(scores: np.ndarray, fold: np.ndarray | int) -> dict[str, float]:
  """What a table and a file say of best over chosen.

  Args:
    scores: [problems, candidates].
    fold: which candidate counts, of each problem or of all.
  """
  some = scores[np.arange(len(scores)), fold]
  return {
    "problems": len(some),
    "mean": round(float(some.mean()), 4),
    "below_0.95": int((some < 0.95).sum()),
    "worst": round(float(some.min()), 3),
  }


def read(folder: pathlib.Path, gpu: hardware.Gpu) -> Rows:
  """The rows of a folder, of problems with any number of configs.

  Of configs that the model can't tell apart, whatever its constants, the
  fastest stands for all: what differs (the order of tiles, say) is chosen by
  rules. Rows of a variant of the kernel, and those whose config is none today
  or not legal, do not count.

  Args:
    folder: experiments/results/<device>; a file may be missing.
    gpu: where they were measured.

  Raises:
    cli.FlagError: a row says that it was measured elsewhere.
  """
  probes = np.repeat(fit_terms.start_of(gpu)[None], _PROBES, axis=0)
  shape = _PROBES, len(fit_terms.MODEL)
  drawn = np.random.default_rng(0).standard_normal(shape)
  probes[:, : shape[1]] *= np.exp(_PROBE_WIDTH * drawn)
  known = fit_terms.constants_of(probes, constants.of(gpu))
  found: dict[Any, list[_Row]] = {}
  for key, row in _measured(folder, gpu):
    found.setdefault(key, []).append(row)
  kept = {
    key: _told_apart(found[key], known)
    for key in sorted(found, key=lambda key: (_number(key[0]), *key[1:]))
  }
  rows = [row for some in kept.values() for row in some]
  ends = np.cumsum([len(some) for some in kept.values()], dtype=int)
  kinds = {None: 0, "m": 1, "k": 2}
  return Rows(
    plans=[plan for plan, *_ in rows],
    us=np.array([us for _, us, _ in rows]),
    first=np.append(0, ends)[:-1],
    xla_us=np.array([some[0][2] for some in kept.values()]),
    fold=np.array([_number(problem) % FOLDS for problem, *_ in kept], int),
    kind=np.array([kinds[problem.along] for problem, *_ in kept], int),
  )


def _measured(
  folder: pathlib.Path, gpu: hardware.Gpu
) -> Iterator[tuple[tuple[Problem, str, str], _Row]]:
  """What is compared with each other, and a row of it."""
  paths = (folder / f"{name}.jsonl" for name in FILES)
  for row in (x for p in paths if p.exists() for x in rows_lib.read(p)):
    if (device := row.get("device", gpu.name)) != gpu.name:
      raise cli.FlagError(
        f"--device: {folder} must have rows of {gpu.name}, got {device}"
      )
    if "variant" in row or row["config"].keys() - vars(Config()).keys():
      continue
    problem = Problem.flat(**_DTYPES | row["problem"])
    plan = Plan.new(problem, Config(**row["config"]), gpu)
    if legal.reason(plan) is None:
      key = problem, row["run"], row.get("group_sizes", "")
      yield key, (plan, row["us"], row.get("xla_us", np.nan))


def _told_apart(measured: list[_Row], known: constants.Constants) -> list[_Row]:
  """The fastest of each set of configs that are predicted alike."""
  alike: dict[tuple[float, ...], _Row] = {}
  predicted = predict([plan for plan, *_ in measured], known)
  for times, row in zip(map(tuple, predicted.round(9)), measured):
    if times not in alike or row[1] < alike[times][1]:
      alike[times] = row
  return list(alike.values())


def _number(problem: Problem) -> int:
  """A number that a problem's fields alone decide."""
  digest = hashlib.sha256(cache.key_of(problem).encode())
  return int.from_bytes(digest.digest()[:8])


class OrXla:
  """Problems of which it is chosen between the model's configs and XLA.

  Those with XLA's time whose rows are short, or no multiples of 16 bytes, or no
  whole number of 128 bytes (`tuning.xla`).

  Attributes:
    problems: what they are.
    rows: their configs, and XLA's product as the last row of each.
  """

  def __init__(
    self, measured: Rows, gpu: hardware.Gpu, known: constants.Constants
  ):
    """`known`: today's constants, by which whole rows get a config."""
    self._gpu = gpu
    # The config that a problem would get with whole rows, if that has a say.
    self._wholes: list[Plan | None] = []
    which = np.zeros(len(measured.first), bool)
    for i in np.flatnonzero(~np.isnan(measured.xla_us)):
      p = measured.plans[measured.first[i]].tiling.given
      plan, whole = None, xla.with_whole_rows(p)
      is_short = xla.of_short_rows(p, known.xla, gpu) is not None
      if p.m > 1 and (is_short or (whole is not None and p.k > 64)):
        if not is_short:
          with hardware.assume(gpu.name):
            plan = Plan.new(whole, model.choose(whole), gpu)
        which[i] = True
        self._wholes.append(plan)
    rows = measured.of(which)
    self._plans, self._ends = rows.plans, rows.first + rows.counts
    self.problems = [rows.plans[i].tiling.given for i in rows.first]
    self.rows = dataclasses.replace(
      rows,
      us=np.insert(rows.us, self._ends, rows.xla_us),
      first=rows.first + np.arange(len(rows.first)),
    )

  def predictor(
    self, known: constants.Constants
  ) -> Callable[[list[constants.Constants]], np.ndarray]:
    """A function: logarithms of seconds, [rows, candidates].

    Those of configs are the same for all candidates. XLA's are the times from
    which on `tuning.xla` leaves a product to it.

    Args:
      known: predicts the time of configs.
    """
    kernels = predict(self._plans, known)
    wholes = [x and model.predict(x, known) for x in self._wholes]

    def of(candidates):
      most = [
        [self._most(p, whole, x.xla) for x in candidates]
        for p, whole in zip(self.problems, wholes)
      ]
      times = np.repeat(kernels, len(candidates), axis=1)
      return np.insert(times, self._ends, np.log(most), axis=0)

    return of

  def _most(self, p: Problem, whole: float | None, fit: constants.Xla) -> float:
    """Seconds that the kernel may take."""
    theirs = xla.of_short_rows(p, fit, self._gpu)
    theirs = theirs or xla.of_odd_rows(p, fit, self._gpu)
    if theirs is not None:
      return fit.least_gain * theirs
    apart = xla.epilogue(p, fit, self._gpu) + xla.padding(p, fit, self._gpu)
    return fit.most * whole + fit.most_added_s + apart
