"""Fits the cost model's constants to a device's rows.

  python -m experiments.fit --device=nvidia_h200
  python -m experiments.fit --device=nvidia_h200 --write --keep
  python -m experiments.fit --device=nvidia_h200 --ablate
  python -m experiments.fit --device=nvidia_h200 --terms=grouped.l2,model.l2

Rows are those of dense_tuning.jsonl and ragged_tuning.jsonl in
experiments/results/<device>: configs that were timed on a problem. Those count
whose config is legal today and whose problem has at least four, in one run,
that the model can tell apart. Fitted are the parts model, odd_sizes and grouped
of pallas_gemm/tuning/constants/<device>.json; then, on rows that have XLA's
time too, what the part xla says of operands whose rows are short or odd.

The measure is best over chosen: the least measured time of a problem over that
of the config which the model ranks first among the measured ones; 1 is perfect.
"or XLA" is the same with XLA's product as one more config. It is printed for
today's constants and for those of the fit, on the problems that it saw and on
those held out: problems are in five folds by a hash of their fields, the same
problem never in two, and five more searches see four of these each.

Every search starts from round numbers that no row has a say in
(experiments/harness/fit_terms.py), or from the constants of another device.
What the terms are was decided with many of these rows in sight; what is held
out is so from the values alone. Today's constants have seen all rows.

The search is the separable natural evolution strategy of Schaul, Glasmachers
and Schmidhuber, "High dimensions and heavy tails for natural evolution
strategies" (2011), on logarithms, in mirrored pairs: mean and width of each
constant follow what the better candidates have in common. The same seed gives
the same constants. A fit takes some minutes of one core, and needs no GPU.

Exit status: 0; 2 for a command that can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Collection, Sequence
import dataclasses
import datetime
import json
import math
from typing import Any

from absl import flags
import numpy as np

from experiments.harness import cli, fit_rows, fit_terms, provenance
from experiments.harness import rows as rows_lib
from experiments.harness.fit_rows import FOLDS, Rows
from experiments.harness.fit_terms import MODEL, NAMES, XLA
from pallas_gemm import hardware
from pallas_gemm.tuning import constants

flags.declare_key_flag("seed")
_DEVICE = flags.DEFINE_string(
  "device", "nvidia_h200", "The GPU, as its folder of experiments/results."
)
_START = flags.DEFINE_string(
  "start", None, "Another device, from whose constants every search starts."
)
cli.not_empty("start")
_TERMS = flags.DEFINE_list(
  "terms",
  [],
  "Constants that are fitted, from round numbers. The others stay as today, or"
  " as --start has them. Default: all.",
)
_WRITE = flags.DEFINE_bool(
  "write", False, "Write the device's file of constants, and how good they are."
)
_KEEP = flags.DEFINE_bool(
  "keep",
  False,
  "With --write: write how good today's constants are, no others.",
)
_ABLATE = flags.DEFINE_bool(
  "ablate",
  False,
  "Print what each constant of the model buys: best over chosen with all, less"
  " that without this one, and the standard error over problems; and how much"
  " more predicted times are off without it.",
)
_GENERATIONS = 80
# (candidates of a search, width at first) of a fit, and of one that starts from
# constants that are fitted but for what is left out.
_FRESH, _AGAIN = (64, 0.1), (16, 0.03)
_ABLATION_GENERATIONS = 20


def search(
  fitness: Callable[[np.ndarray], np.ndarray],
  seen: np.ndarray,
  start: np.ndarray,
  names: Collection[str],
  generations: int,
  how: tuple[int, float],
  seed: int,
  fix: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> np.ndarray:
  """Constants of independent searches, [searches, constants].

  Args:
    fitness: of [candidates, constants], how good they are on each problem,
      [problems, candidates].
    seen: which problems each search is judged by, [searches, problems].
    start: [searches, constants]; positive where they are fitted.
    names: the constants that do not stay as they start.
    generations: how often candidates are drawn.
    how: candidates of a search each time, even; and the standard deviation of
      their logarithms at first.
    seed: of the draws.
    fix: sets constants that a search leaves out, [searches, ..., constants].
  """
  rng = np.random.default_rng(seed)
  at = [i for i, name in enumerate(NAMES) if name in names]
  population, width = how
  mean = np.log(start[:, at])
  widths = np.full(mean.shape, width)
  # What candidates count for by rank; it adds up to 0.
  ranks = np.arange(1, population + 1)
  utility = np.maximum(0, math.log(population / 2 + 1) - np.log(ranks))
  utility = utility / utility.sum() - 1 / population
  rate = (3 + math.log(len(at))) / (5 * math.sqrt(len(at)))
  weights = seen / seen.sum(axis=1, keepdims=True)
  for _ in range(generations):
    # The same for all searches: they differ by what they see and leave out.
    half = rng.standard_normal((population // 2, len(at)))
    drawn = np.concatenate([half, -half])
    values = np.repeat(start[:, None], population, axis=1)
    values[..., at] = np.exp(mean[:, None] + widths[:, None] * drawn)
    found = fitness(fix(values).reshape(-1, len(NAMES)))
    found = found.reshape(-1, len(seen), population)
    order = np.argsort(
      -np.einsum("sp,psc->sc", weights, found), axis=1, kind="stable"
    )
    drawn = drawn[order]
    mean += widths * np.einsum("c,scv->sv", utility, drawn)
    widths *= np.exp(
      rate / 2 * np.einsum("c,scv->sv", utility, drawn * drawn - 1)
    )
  values = start.copy()
  values[:, at] = np.exp(mean)
  return fix(values)


class Study:
  """Rows of a device, and how its constants are fitted to them.

  There are six searches: one for each fold, which does not see the fold's
  problems, and one that sees all, whose constants are those to ship.

  Attributes:
    gpu, today: the device, and what is predicted with today.
    start: from which every search starts, [constants].
    rows, or_xla: those of problems with enough configs, and with XLA's time.
  """

  def __init__(
    self,
    gpu: hardware.Gpu,
    measured: Rows,
    start: np.ndarray,
    seed: int = 0,
  ):
    """`measured` there; `seed` of searches."""
    self.gpu, self.start, self.today = gpu, start, constants.of(gpu)
    self.rows = measured.of(measured.counts >= fit_rows.FEWEST)
    self.or_xla = fit_rows.OrXla(measured, gpu, self.today)
    self._how = {"seed": seed}

  def fit(self, names: Collection[str] = NAMES) -> np.ndarray:
    """Constants of the six searches, [FOLDS + 1, constants].

    Args:
      names: the constants that do not stay as they start.
    """
    values = np.repeat(self.start[None], FOLDS + 1, axis=0)
    how = {"generations": _GENERATIONS, "how": _FRESH} | self._how
    if some := [name for name in MODEL if name in names]:
      values = search(self._fitness, self.rows.seen, values, some, **how)
    if some := [name for name in XLA if name in names]:
      for i, seen in enumerate(self.or_xla.rows.seen):
        # What is predicted for configs differs from one search to the next.
        fitness = self._fitness_with_xla(values[i])
        values[i] = search(fitness, seen[None], values[[i]], some, **how)[0]
    return values

  def known(self, values: np.ndarray) -> constants.Constants:
    """The constants with these values."""
    return fit_terms.constants_of(values, self.today)

  def _predict(self, values: np.ndarray) -> np.ndarray:
    return fit_rows.predict(self.rows.plans, self.known(values))

  def _fitness(self, values: np.ndarray) -> np.ndarray:
    return self.rows.fitness(self._predict(values))

  def _fitness_with_xla(
    self, values: np.ndarray
  ) -> Callable[[np.ndarray], np.ndarray]:
    """Of candidates that differ from the values in the part xla."""
    predict = self.or_xla.predictor(self.known(values))
    return lambda x: self.or_xla.rows.fitness(predict([*map(self.known, x)]))

  def scores(self, values: np.ndarray) -> np.ndarray:
    """Best over chosen, [problems, candidates]."""
    return self.rows.scores(self._predict(values))

  def errors(self, values: np.ndarray) -> np.ndarray:
    """How far predicted times are off, [problems, candidates]."""
    return self.rows.errors(self._predict(values))

  def scores_with_xla(self, values: np.ndarray) -> np.ndarray:
    """Best over chosen, XLA's product one more config."""
    sets = map(self.known, values)
    predicted = [self.or_xla.predictor(known)([known]) for known in sets]
    return self.or_xla.rows.scores(np.concatenate(predicted, axis=1))

  def ablate(self, values: np.ndarray) -> list[list[str]]:
    """A line for each constant of the model, the dearest first.

    In each fold one constant after the other is set to the value that removes
    its term, the others, from the values of `fit`, are fitted again for a few
    generations, and compared with a fit that goes on for as many with all.
    """
    sets = ((), *((name,) for name in MODEL))

    def fix(values):
      each = zip(values, sets)
      return np.stack([fit_terms.without(*x, self.gpu) for x in each])

    gains = []
    for fold, seen in enumerate(self.rows.seen[:FOLDS]):
      found = search(
        self._fitness,
        np.repeat(seen[None], len(sets), axis=0),
        np.repeat(values[fold][None], len(sets), axis=0),
        MODEL,
        generations=_ABLATION_GENERATIONS,
        how=_AGAIN,
        fix=fix,
        **self._how,
      )
      lost, off = -self.scores(found), self.errors(found)
      lost, off = (x[:, 1:] - x[:, :1] for x in (lost, off))
      gains.append((lost[seen], lost[~seen], off[~seen]))
    train, held, off = (np.concatenate(x) for x in zip(*gains))
    errors = held.std(axis=0) / math.sqrt(len(held))
    means = train.mean(axis=0), held.mean(axis=0), errors, off.mean(axis=0)
    lines = sorted(zip(MODEL, *means), key=lambda line: -line[2])
    return [[name, *(f"{x:+.4f}" for x in some)] for name, *some in lines]


def regrets(study: Study, values: np.ndarray) -> list[list[str]]:
  """A line for each set of constants and kind of problem."""
  sets = np.stack([*values, study.start, fit_terms.values_of(study.today)])
  scores, rows = study.scores(sets), study.rows
  which = {name: rows.kind == i for i, name in enumerate(fit_rows.KINDS)}
  scored = {name: (scores[x], rows.fold[x]) for name, x in which.items()}
  scored["all"] = scores, rows.fold
  scored["or XLA"] = study.scores_with_xla(sets), study.or_xla.rows.fold
  columns = {"start": -2, "today's": -1, "fit, train": FOLDS}
  return [
    [
      name,
      kind,
      *map(str, fit_rows.regret(x, columns.get(name, fold)).values()),
    ]
    for name in (*columns, "fit, held out")
    for kind, (x, fold) in scored.items()
    if len(fold)
  ]


def gpu_of(flag: flags.FlagHolder[str]) -> hardware.Gpu:
  """The GPU that a flag names.

  Raises:
    cli.FlagError: none is known by that name.
  """
  try:
    return hardware.lookup(flag.value.replace("_", " "))
  except ValueError as error:
    raise cli.FlagError(f"--{flag.name}: {error}") from None


def start_of_flags(gpu: hardware.Gpu) -> np.ndarray:
  """From where searches start, [constants].

  Raises:
    cli.FlagError: a flag names something else.
  """
  if unknown := set(_TERMS.value) - set(NAMES):
    raise cli.FlagError(
      f"--terms: no {min(unknown)!r}; there are {', '.join(NAMES)}"
    )
  other = gpu_of(_START) if _START.value else None
  if other == gpu:
    raise cli.FlagError(f"--start: want another device, got {_START.value}")
  known = fit_terms.values_of(constants.of(other or gpu))
  is_fresh = np.array([name in (_TERMS.value or NAMES) for name in NAMES])
  if other and not _TERMS.value:
    is_fresh = known <= 0  # from 0, no factor leads away
  return np.where(is_fresh, fit_terms.start_of(gpu), known)


def content(study: Study, values: np.ndarray, keep: bool) -> dict[str, Any]:
  """What the device's file of constants is to hold.

  Args:
    study: what was fitted, and to what.
    values: of `Study.fit`.
    keep: whether today's constants stay, and who found them.
  """
  path = constants.path_of(study.gpu.name)
  old = constants.read(path) if path.exists() else {}
  by, found = old.get(constants.WIDTH, {}).get("by", "hand"), study.today
  if not keep:
    how = (flags.FLAGS[name] for name in ("start", "terms", "seed"))
    given = [flag.serialize() for flag in how if flag.present]
    by = " ".join(["python -m experiments.fit", *given])
    # With four digits.
    found = study.known(np.array([float(f"{x:.4g}") for x in values[-1]]))
  train = study.scores(fit_terms.values_of(found)[None])
  said = {
    "by": by,
    "commit": provenance.commit(),
    "rows": len(study.rows.us),
    "date": datetime.date.today().isoformat(),
    "regret": {
      "train": fit_rows.regret(train, 0),
      "held_out": fit_rows.regret(study.scores(values), study.rows.fold),
    },
  }
  device = {"device": study.gpu.name}
  return old | device | {constants.WIDTH: said | dataclasses.asdict(found)}


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if _KEEP.value and not _WRITE.value:
    raise cli.FlagError("--keep: goes with --write")
  gpu = gpu_of(_DEVICE)
  path = constants.path_of(gpu.name)
  if _WRITE.value:
    cli.check_file("write", path)
  start = start_of_flags(gpu)
  folder = rows_lib.RESULTS / rows_lib.slug(gpu.name)
  study = Study(gpu, fit_rows.read(folder, gpu), start, cli.SEED.value)
  rows = study.rows
  if any(len({*x.fold}) < FOLDS for x in (rows, study.or_xla.rows)):
    raise cli.FlagError(f"--device: {folder} has too few rows of tuning")
  cli.say(f"{len(rows.us)} rows of {len(rows.first)} problems count")
  values = study.fit(_TERMS.value or NAMES)
  worths = study.ablate(values) if _ABLATE.value else ()
  header = ("constants", "problems", "count", "mean", "below 0.95", "worst")
  title = f"Best over chosen, {gpu.name}"
  cli.table(title, header, regrets(study, values), header[2:])
  today = fit_terms.values_of(study.today)
  off = study.errors(np.stack([today, values[-1]])).mean(axis=0)
  cli.say(
    f"predicted times are off by {off[0]:.3f} today, {off[1]:.3f} by the fit"
  )
  if worths:
    header = ("constant", "train", "held out", "+-", "time")
    cli.table("What each constant buys", header, worths, header[1:])
  if _WRITE.value:
    found = content(study, values, _KEEP.value)
    path.write_text(json.dumps(found, indent=2) + "\n")
    cli.say(f"written: {path}")
  return 0


if __name__ == "__main__":
  cli.run(main)
