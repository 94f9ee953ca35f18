"""Fits which products of short rows are left to XLA to rows of a device.

  python tools/fit_short_rows.py --device=nvidia_h100_80gb_hbm3

Rows of dense_tuning.jsonl whose problem has rows of A or B that are shorter
than 128 bytes, or few rows of K (`tuning.xla`), with XLA's time beside the
kernel's. For each combination of constants from a grid it is chosen between the
config that the model ranks first of those measured, and XLA; printed are the
constants with the least regret: the mean of the logarithm of what was chosen
over the best. Today's are printed first. Needs no GPU; a minute.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
from pathlib import Path
import sys

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import app, flags  # noqa: E402
import numpy as np  # noqa: E402

from experiments import fit  # noqa: E402
from experiments.harness import rows as rows_lib  # noqa: E402
from pallas_gemm import hardware  # noqa: E402
from pallas_gemm.kernels.sm90 import legal  # noqa: E402
from pallas_gemm.kernels.sm90.config import Config  # noqa: E402
from pallas_gemm.kernels.sm90.plan import Plan  # noqa: E402
from pallas_gemm.problem import Problem  # noqa: E402
from pallas_gemm.tuning import constants, model, xla  # noqa: E402

_GRID = {
  "short": (0.0, 40.0, 80.0, 120.0, 170.0),
  "uneven": (200.0, 500.0),
  "short_launch": (2.0e-6, 2.4e-6, 2.8e-6, 3.2e-6),
  "short_per_k": (0.0, 2e-10, 6e-10, 1e-9),
  "short_padded": (0.0, 4e-6),
  "short_rate": (0.8, 0.85, 0.9, 0.95),
}
_SHOWN = 3


@dataclasses.dataclass
class Measured:
  """A problem in a run: plans, their times, and XLA's, in seconds."""

  problem: Problem
  plans: list[Plan] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)
  xla: float = 0.0


def measured(
  device: str, gpu: hardware.Gpu, known: constants.Constants
) -> Iterator[Measured]:
  """The problems whose rows are short."""
  found: dict[tuple[Problem, str], Measured] = {}
  for row in rows_lib.read(rows_lib.RESULTS / device / "dense_tuning.jsonl"):
    if "variant" in row or "xla_us" not in row:
      continue
    dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
    problem = Problem.flat(**dtypes | row["problem"])
    plan = Plan(problem, Config(**row["config"]), gpu)
    if problem.m == 1 or legal.reason(plan):
      continue
    if xla.of_short_rows(problem, known.xla, gpu) is None:
      continue
    key = problem, row["run"]
    case = found.setdefault(key, Measured(problem, xla=1e-6 * row["xla_us"]))
    case.plans.append(plan)
    case.seconds.append(1e-6 * row["us"])
  yield from found.values()


def regrets(
  cases: Sequence[Measured], gpu: hardware.Gpu, known: constants.Constants
) -> Iterator[tuple[float, dict[str, float]]]:
  """The regret of each combination, and the combination."""
  best = np.array([min(*case.seconds, case.xla) for case in cases])
  theirs = np.array([case.xla for case in cases])
  of_kernel, of_xla = list(_GRID)[:2], list(_GRID)[2:]
  for values in itertools.product(*(_GRID[name] for name in of_kernel)):
    mine = dict(zip(of_kernel, values))
    odd = dataclasses.replace(known.odd_sizes, **mine)
    changed = dataclasses.replace(known, odd_sizes=odd)
    times = [[model.predict(x, changed) for x in case.plans] for case in cases]
    predicted = np.array([min(some) for some in times])
    chosen = np.array(
      [case.seconds[np.argmin(some)] for case, some in zip(cases, times)]
    )
    for others in itertools.product(*(_GRID[name] for name in of_xla)):
      names = dict(zip(of_xla, others))
      fit_xla = dataclasses.replace(known.xla, **names)
      left = known.xla.least_gain * np.array(
        [xla.of_short_rows(case.problem, fit_xla, gpu) for case in cases]
      )
      taken = np.where(predicted > left, theirs, chosen)
      yield float(np.log(taken / best).mean()), mine | names


def main(argv: Sequence[str]) -> None:
  """Prints today's constants and the best, with their regret."""
  del argv
  device = flags.FLAGS.device
  gpu = fit.gpu_of(device)
  with hardware.assume(gpu.name):
    known = constants.of(gpu)
    cases = list(measured(device, gpu, known))
    found = list(regrets(cases, gpu, known))
  today = {
    name: getattr(known.xla, name, None) or getattr(known.odd_sizes, name, 0.0)
    for name in _GRID
  }
  print(f"{len(cases)} problems, {gpu.name}")
  print("today ", *(f"{x:.4f}" for x, how in found if how == today), today)
  for regret, how in sorted(found, key=lambda x: x[0])[:_SHOWN]:
    print(f"{regret:.4f}", how)


if __name__ == "__main__":
  app.run(main)
