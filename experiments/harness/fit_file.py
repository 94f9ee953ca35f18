"""A device's file of constants, as a fit writes it."""

import dataclasses
import datetime
from typing import Any

import numpy as np

from experiments.harness import fit_terms, provenance
from experiments.harness.fit_search import Regret
from experiments.harness.fit_study import Study
from pallas_gemm.tuning import constants


def content(
  study: Study, values: np.ndarray | None, held_out: Regret
) -> dict[str, Any]:
  """What the file is to hold, beside what it has for other widths.

  Args:
    study: what was fitted, and to what.
    values: the constants; None leaves today's, and who found them.
    held_out: regret of fits on problems that they did not see.
  """
  path = constants.path_of(study.gpu.name)
  old = constants.read(path) if path.exists() else {}
  by, found = old.get(constants.WIDTH, {}).get("by", "hand"), study.today
  if values is not None:
    by = "python -m experiments.fit"
    found = fit_terms.constants_of(values, study.today)
  train = study.scores(fit_terms.values_of(found)[None])[:, 0]
  said = {
    "by": by,
    "commit": provenance.commit(),
    "rows": len(study.rows.us),
    "date": datetime.date.today().isoformat(),
    "regret": {
      "train": _shown(Regret.of(train)),
      "held_out": _shown(held_out),
    },
  }
  device = {"device": study.gpu.name}
  return old | device | {constants.WIDTH: said | dataclasses.asdict(found)}


def _shown(regret: Regret) -> dict[str, float]:
  return {
    "problems": regret.problems,
    "mean": round(regret.mean, 4),
    "below_0.95": regret.below,
    "worst": round(regret.worst, 3),
  }
