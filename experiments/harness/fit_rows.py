"""The rows that constants of the cost model are fitted to.

A row of `dense_tuning.jsonl` or `ragged_tuning.jsonl` is a config that was
timed on a problem, in a run. Times are compared within a run alone: kernels and
clocks differ from one to the next.
"""

from collections.abc import Callable, Iterator
import dataclasses
import hashlib
import pathlib
from typing import Any

import numpy as np

from experiments.harness import rows as rows_lib
from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache

FILES = ("dense_tuning", "ragged_tuning")
FOLDS = 5
# Configs of a problem, that the model can tell apart, with which it counts.
FEWEST = 4
KINDS = ("dense", "groups of rows", "groups along K")
_DTYPES = {"dtype": "bfloat16", "out_dtype": "bfloat16"}

# Logarithms of predicted times, [plans, candidates].
Predict = Callable[[list[Plan]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rows:
  """Measured configs, those of a problem in a run side by side.

  Attributes:
    plans: of the problems and configs.
    us: their times, [rows], in microseconds.
    first: the first row of each problem, [problems].
    fold: of each problem, [problems]; one problem's is the same in all runs.
    kind: of each problem, an index of `KINDS`.
    skipped: how many rows of the files do not count, by the reason.
  """

  plans: list[Plan]
  us: np.ndarray
  first: np.ndarray
  fold: np.ndarray
  kind: np.ndarray
  skipped: dict[str, int]

  @property
  def of_row(self) -> np.ndarray:
    """The problem of each row."""
    counts = np.diff(np.append(self.first, len(self.us)))
    return np.repeat(np.arange(len(self.first)), counts)

  @property
  def quality(self) -> np.ndarray:
    """The least time of a row's problem over its own, [rows]."""
    return np.minimum.reduceat(self.us, self.first)[self.of_row] / self.us


def read(
  folder: pathlib.Path,
  gpu: hardware.Gpu,
  predict: Predict,
  most_rows: int | None = None,
) -> Rows:
  """The rows of a folder that count.

  Of configs that the model can't tell apart, whatever its constants, the
  fastest stands for all: what differs (the order of tiles, say) is chosen by
  rules. Problems of which fewer than four are left do not count. Nor do rows of
  a variant of the kernel, or whose config is not legal today.

  Args:
    folder: experiments/results/<device>; a file may be missing.
    gpu: where they were measured.
    predict: with a few sets of constants that have no two terms in common.
    most_rows: problems beyond so many rows are left out, in the order of a hash
      of their fields.

  Raises:
    ValueError: a row says that it was measured elsewhere.
  """
  skipped = {"variant": 0, "not legal": 0, "few configs": 0}
  found: dict[Any, list[tuple[Plan, float]]] = {}
  for key, plan, us in _measured(folder, gpu, skipped):
    found.setdefault(key, []).append((plan, us))
  kept = []
  for key in sorted(found, key=lambda key: (_number(key[0]), *key[1:])):
    some = _told_apart(found[key], predict)
    if len(some) < FEWEST:
      skipped["few configs"] += len(some)
    elif most_rows is None or sum(len(x) for _, x in kept) < most_rows:
      kept.append((key[0], some))
  ends = np.cumsum([len(some) for _, some in kept], dtype=int)
  return Rows(
    plans=[plan for _, some in kept for plan, _ in some],
    us=np.array([us for _, some in kept for _, us in some]),
    first=np.append(0, ends)[:-1],
    fold=np.array([_number(problem) % FOLDS for problem, _ in kept], int),
    kind=np.array([_kind(problem) for problem, _ in kept], int),
    skipped=skipped,
  )


def _measured(
  folder: pathlib.Path, gpu: hardware.Gpu, skipped: dict[str, int]
) -> Iterator[tuple[tuple[Problem, str, str], Plan, float]]:
  """What is compared with each other, and a row of it."""
  paths = (folder / f"{name}.jsonl" for name in FILES)
  for row in (x for p in paths if p.exists() for x in rows_lib.read(p)):
    if (device := row.get("device", gpu.name)) != gpu.name:
      raise ValueError(f"{folder} must have rows of {gpu.name}, got {device}")
    if "variant" in row:
      skipped["variant"] += 1
      continue
    problem = Problem.flat(**_DTYPES | row["problem"])
    if row["config"].keys() - vars(Config()).keys():
      skipped["not legal"] += 1
      continue
    plan = Plan(problem, Config(**row["config"]), gpu)
    if legal.reason(plan):
      skipped["not legal"] += 1
      continue
    yield (problem, row["run"], row.get("group_sizes", "")), plan, row["us"]


def _told_apart(
  measured: list[tuple[Plan, float]], predict: Predict
) -> list[tuple[Plan, float]]:
  """The fastest of each set of configs that are predicted alike."""
  alike: dict[tuple[float, ...], tuple[Plan, float]] = {}
  predicted = predict([plan for plan, _ in measured])
  for times, (plan, us) in zip(predicted.round(9).tolist(), measured):
    known = alike.get(tuple(times))
    if known is None or us < known[1]:
      alike[tuple(times)] = plan, us
  return list(alike.values())


def _kind(problem: Problem) -> int:
  return {None: 0, "m": 1, "k": 2}[problem.along]


def _number(problem: Problem) -> int:
  """A number that a problem's fields alone decide."""
  digest = hashlib.sha256(cache.key_of(problem).encode())
  return int.from_bytes(digest.digest()[:8])
