"""What the oldest JAX is spared, so that all tests fit into the time of CI."""

from collections.abc import Sequence
from typing import Any

import pytest


def every_other(cases: Sequence[Any]) -> list[Any]:
  """The parameters, every other one left out on the oldest JAX (`any_jax`).

  Args:
    cases: as of `pytest.param`.
  """
  return [
    case
    if i % 2 == 0
    else pytest.param(
      *case.values, marks=(*case.marks, pytest.mark.any_jax), id=case.id
    )
    for i, case in enumerate(cases)
  ]
