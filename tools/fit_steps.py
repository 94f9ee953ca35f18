"""Improves a device's constants one at a time, where both halves of rows gain.

  python tools/fit_steps.py --device=nvidia_h100_80gb_hbm3 --steps=20 \\
      --write_steps

`experiments.fit` searches all constants at once, and starts from round numbers.
This starts from the constants of today, for rows that came later: in each step
every constant is tried a little larger and smaller, and that change is taken
that gains most in best over chosen, of those with which neither half of the
problems loses. Afterwards `experiments.fit --write --keep` says how good they
are. Needs no GPU; some minutes.

Exit status: 0; 2 for a command that can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Sequence
import json
from pathlib import Path
import sys

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import flags  # noqa: E402
import numpy as np  # noqa: E402

from experiments import fit  # noqa: E402
from experiments.harness import (  # noqa: E402
  cli,
  fit_study,
  fit_terms,
)
from experiments.harness import rows as rows_lib  # noqa: E402
from pallas_gemm import hardware  # noqa: E402
from pallas_gemm.tuning import constants  # noqa: E402

flags.declare_key_flag("device")
_STEPS = flags.DEFINE_integer("steps", 20, "Most changes.", lower_bound=1)
_WRITE_STEPS = flags.DEFINE_bool(
  "write_steps", False, "Whether the device's file gets the new values."
)
# What a constant is multiplied by.
_FACTORS = (0.8, 0.9, 0.97, 1.03, 1.1, 1.25)
# What a step must gain in best over chosen, of each half in the mean.
_LEAST_GAIN = 3e-5


def gains(study: fit_study.Study, values: np.ndarray) -> np.ndarray:
  """Best over chosen of each half of the problems, [candidates, 2]."""
  scores = study.scores(values)
  half = study.rows.fold % 2
  return np.stack([scores[half == i].mean(axis=0) for i in (0, 1)], axis=-1)


def step(study: fit_study.Study, now: np.ndarray) -> np.ndarray | None:
  """The constants with the best change of one; None if none gains enough."""
  others = np.repeat(now[None], len(now) * len(_FACTORS) + 1, axis=0)
  for i in range(len(now)):
    for j, factor in enumerate(_FACTORS):
      others[1 + i * len(_FACTORS) + j, i] *= factor
  found = gains(study, others)
  gained = found - found[0]
  mean = np.where((gained >= 0).all(axis=-1), gained.mean(axis=-1), 0.0)
  best = int(mean.argmax())
  if mean[best] < _LEAST_GAIN:
    return None
  changed = int(np.flatnonzero(others[best] != now)[0])
  print(
    f"{fit_terms.NAMES[changed]:28} {now[changed]:.4g} ->"
    f" {others[best, changed]:.4g}  {found[best].mean():.5f}",
    flush=True,
  )
  return others[best]


def main(argv: Sequence[str]) -> int:
  """Takes the steps; returns the exit status."""
  del argv
  device = flags.FLAGS.device
  gpu = fit.gpu_of(device)
  with hardware.assume(gpu.name):
    rows = fit_study.rows_of(rows_lib.RESULTS / device, gpu, None)
    now = fit_terms.values_of(constants.of(gpu))
    study = fit_study.Study(gpu, rows, now)
    print(f"{len(rows.first)} problems, {gains(study, now[None]).mean():.5f}")
    for _ in range(_STEPS.value):
      following = step(study, now)
      if following is None:
        break
      now = following
  if _WRITE_STEPS.value:
    path = constants.path_of(gpu.name)
    content = json.loads(path.read_text())
    for name, value in zip(fit_terms.NAMES, now):
      part, field = name.split(".")
      content["16 bits"][part][field] = float(f"{value:.4g}")
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {path}")
  return 0


if __name__ == "__main__":
  cli.run(main)
