"""Calls what `export_buckets` serialized, in a process of its own.

  python -m tests.support.served FILE ROWS..

The file is of a function of x [M, 16] and w [16, 8], both float32. Prints how
far results are off x @ w at most. The package that made the file is not needed,
but for the class that reads it.
"""

import sys

import numpy as np

from pallas_gemm import serving
from tests.support.products import normal


def main(file: str, *rows: str) -> None:
  """Calls it with some numbers of rows."""
  with open(file, "rb") as data:
    served = serving.Buckets.deserialize(data.read())
  w = normal(16, 8)
  off = 0.0
  for m in map(int, rows):
    x = normal(m, 16)
    out = np.asarray(served(x, w))
    want = np.asarray(x) @ np.asarray(w)
    assert out.shape == want.shape
    off = max(off, float(np.abs(out - want).max()))
  print(off)


if __name__ == "__main__":
  main(*sys.argv[1:])
