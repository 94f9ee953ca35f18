"""The largest of numbers, or of arrays of as many candidates.

`model.predict` takes constants that are arrays too, a candidate an element, and
then predicts for all of them at once: `experiments.fit` does.
"""

import functools
from typing import Any

import numpy as np


def largest(*values: Any) -> Any:
  """The largest; of arrays, element by element.

  Example:
    >>> import numpy as np
    >>> from pallas_gemm.tuning.elementwise import largest
    >>> largest(1.0, 2.0)
    2.0
    >>> largest(1.5, np.array([1.0, 2.0])).tolist()
    [1.5, 2.0]
  """
  try:
    return max(values)
  except ValueError:  # arrays are neither true nor false
    return functools.reduce(np.maximum, values)
