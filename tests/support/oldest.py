"""Long lists of cases, shared out so that all tests fit into the time of CI."""

from collections.abc import Sequence
import os
from typing import Any

import jax


def half(cases: Sequence[Any]) -> list[Any]:
  """Every other case, the other ones on JAX 0.11 than on later versions.

  All cases where the environment has ALL_CASES.

  Args:
    cases: parameters.
  """
  if "ALL_CASES" in os.environ:
    return list(cases)
  is_oldest = jax.__version_info__ < (0, 12)
  return list(cases)[0 if is_oldest else 1 :: 2]
