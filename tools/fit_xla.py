"""Fits what is left to XLA to a device's rows: which constants regret least.

  python tools/fit_xla.py --device=nvidia_h100_80gb_hbm3

Rows of dense_tuning.jsonl that have XLA's time beside the kernel's, of three
kinds of problems (`tuning.xla`):

* short: rows of A or B are shorter than 128 bytes, or K is less than 32;
* odd: rows of A, B or the results are no multiples of 16 bytes, and K is more
  than 64;
* whole: rows are no whole number of 128 bytes, but multiples of 16.

For each combination of constants from a grid it is chosen between the config
that the model ranks first of those measured, and XLA. Printed are the
combinations with the least regret: the mean of the logarithm of what was chosen
over the best; and today's. Needs no GPU; some seconds.

Exit status: 0; 2 for a command that can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools
from pathlib import Path
import sys

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import flags  # noqa: E402
import numpy as np  # noqa: E402

from experiments import fit  # noqa: E402
from experiments.harness import cli  # noqa: E402
from experiments.harness import rows as rows_lib  # noqa: E402
from pallas_gemm import hardware  # noqa: E402
from pallas_gemm.kernels.sm90 import legal  # noqa: E402
from pallas_gemm.kernels.sm90.config import Config  # noqa: E402
from pallas_gemm.kernels.sm90.plan import Plan  # noqa: E402
from pallas_gemm.problem import Problem  # noqa: E402
from pallas_gemm.tuning import constants, model, xla  # noqa: E402

flags.declare_key_flag("device")
# Of the parts odd_sizes and xla of a device's constants.
_GRIDS = {
  "short": {
    "short": (0.0, 40.0, 80.0, 120.0, 170.0, 230.0, 300.0),
    "uneven": (200.0, 500.0),
    "short_launch": (2.0e-6, 2.4e-6, 2.8e-6, 3.2e-6),
    "short_per_k": (0.0, 2e-10, 6e-10, 1e-9),
    "short_most_k": (4096, 8192, 16384),
    "short_padded": (0.0, 4e-6),
    "short_rate": (0.8, 0.85, 0.9, 0.95),
  },
  "odd": {
    "launch": (2.5e-6, 3.0e-6, 3.5e-6, 4.0e-6, 4.5e-6),
    "per_k": (4e-9, 6e-9, 8e-9),
    "flops": (1.0e14, 1.2e14, 1.5e14),
    "words": (0.6, 0.7, 0.8, 0.9, 1.0),
    "few_odd_rows": (0.9, 1.0, 1.1, 1.2, 1.3, 1.5),
  },
  "whole": {
    "most": (0.9, 0.95, 1.0, 1.04, 1.1, 1.2, 1.3, 1.4),
    "most_beside": (0.8e-6, 1.2e-6, 2e-6, 3e-6, 4e-6, 5e-6),
  },
}
_SHOWN = 3

Known = constants.Constants


@dataclasses.dataclass
class Measured:
  """A problem in a run: plans, their times, and XLA's, in seconds.

  Attributes:
    whole: what the problem with whole rows is predicted to take.
  """

  problem: Problem
  xla: float
  plans: list[Plan] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)
  whole: float = 0.0


def measured(
  device: str, gpu: hardware.Gpu, known: Known
) -> dict[str, list[Measured]]:
  """The problems of each kind.

  Raises:
    cli.FlagError: there are none of the device.
  """
  found: dict[tuple[Problem, str], Measured] = {}
  path = rows_lib.RESULTS / device / "dense_tuning.jsonl"
  for row in rows_lib.read(path):
    if "variant" in row or "xla_us" not in row:
      continue
    dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
    problem = Problem.flat(**dtypes | row["problem"])
    if row["config"].keys() - vars(Config()).keys():
      continue  # a field that is no longer there
    plan = Plan(problem, Config(**row["config"]), gpu)
    if problem.m == 1 or legal.reason(plan):
      continue
    empty = Measured(problem, 1e-6 * row["xla_us"])
    case = found.setdefault((problem, row["run"]), empty)
    case.plans.append(plan)
    case.seconds.append(1e-6 * row["us"])
  if not found:
    raise cli.FlagError(f"--device: no rows with XLA's time in {path}")
  kinds: dict[str, list[Measured]] = {name: [] for name in _GRIDS}
  for case in found.values():
    if xla.of_short_rows(case.problem, known.xla, gpu) is not None:
      kinds["short"].append(case)
    elif xla.of_odd_rows(case.problem, known.xla, gpu) is not None:
      if case.problem.k > 64:
        kinds["odd"].append(case)
    else:
      whole = xla.with_whole_rows(case.problem)
      if whole is not None and case.problem.k > 64:
        plan = Plan(whole, model.choose(whole), gpu)
        case.whole = model.predict(plan, known)
        kinds["whole"].append(case)
  return kinds


def most_of(kind: str, gpu: hardware.Gpu) -> Callable[[Measured, Known], float]:
  """Seconds that the kernel may take before XLA is chosen."""

  def of_short(case: Measured, known: Known) -> float:
    theirs = xla.of_short_rows(case.problem, known.xla, gpu)
    return known.xla.least_gain * theirs

  def of_whole(case: Measured, known: Known) -> float:
    apart = xla.epilogue(case.problem, known.xla, gpu)
    apart += xla.padding(case.problem, known.xla, gpu)
    return known.xla.most * case.whole + known.xla.most_beside + apart

  def of_odd(case: Measured, known: Known) -> float:
    theirs = xla.of_odd_rows(case.problem, known.xla, gpu)
    return known.xla.least_gain * theirs

  return {"short": of_short, "odd": of_odd, "whole": of_whole}[kind]


def regrets(
  kind: str, cases: Sequence[Measured], gpu: hardware.Gpu, known: Known
) -> Iterator[tuple[float, dict[str, float]]]:
  """The regret of each combination, and the combination."""
  best = np.array([min(*case.seconds, case.xla) for case in cases])
  theirs = np.array([case.xla for case in cases])
  grid, most = _GRIDS[kind], most_of(kind, gpu)
  of_kernel = [name for name in grid if hasattr(known.odd_sizes, name)]
  of_xla = [name for name in grid if name not in of_kernel]
  for values in itertools.product(*(grid[name] for name in of_kernel)):
    mine = dict(zip(of_kernel, values))
    odd = dataclasses.replace(known.odd_sizes, **mine)
    changed = dataclasses.replace(known, odd_sizes=odd)
    times = [[model.predict(x, changed) for x in case.plans] for case in cases]
    predicted = np.array([min(some) for some in times])
    chosen = np.array(
      [case.seconds[np.argmin(some)] for case, some in zip(cases, times)]
    )
    for others in itertools.product(*(grid[name] for name in of_xla)):
      names = dict(zip(of_xla, others))
      fitted = dataclasses.replace(known.xla, **names)
      changed = dataclasses.replace(changed, xla=fitted)
      left = np.array([most(case, changed) for case in cases])
      taken = np.where(predicted > left, theirs, chosen)
      yield float(np.log(taken / best).mean()), mine | names


def today(kind: str, known: Known) -> dict[str, float]:
  """The constants of that kind."""
  parts = dataclasses.asdict(known.odd_sizes) | dataclasses.asdict(known.xla)
  return {name: parts[name] for name in _GRIDS[kind]}


def main(argv: Sequence[str]) -> int:
  """Prints today's constants and the best, with their regret."""
  del argv
  device = flags.FLAGS.device
  gpu = fit.gpu_of(device)
  with hardware.assume(gpu.name):
    known = constants.of(gpu)
    for kind, cases in measured(device, gpu, known).items():
      found = list(regrets(kind, cases, gpu, known))
      now = today(kind, known)
      print(f"{kind}: {len(cases)} problems, {gpu.name}")
      print("today ", *(f"{x:.4f}" for x, how in found if how == now), now)
      for regret, how in sorted(found, key=lambda x: x[0])[:_SHOWN]:
        print(f"{regret:.4f}", how)
  return 0


if __name__ == "__main__":
  cli.run(main)
