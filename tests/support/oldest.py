"""Long lists of cases, shared out so that all tests fit into the time of CI."""

from collections.abc import Sequence
import itertools
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
  return list(cases)[_parity() :: 2]


def half_of_product(*parts: Sequence[Any]) -> list[Any]:
  """Half of all combinations, like the fields of one colour on a chessboard.

  So every value meets half of the others on each JAX, where every other one of
  the combinations in a row would leave a whole value to one of them.

  Args:
    *parts: what values each parameter has.
  """
  found = [
    (tuple(value for _, value in pairs), sum(i for i, _ in pairs))
    for pairs in itertools.product(*[enumerate(part) for part in parts])
  ]
  every = "ALL_CASES" in os.environ
  return [case for case, i in found if every or i % 2 == _parity()]


def _parity() -> int:
  return 0 if jax.__version_info__ < (0, 12) else 1
