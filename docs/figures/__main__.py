"""Writes all pictures: python -m docs.figures [folder]."""

import pathlib
import sys

from docs import figures

if __name__ == "__main__":
  default = pathlib.Path(__file__).parents[1] / "img"
  for path in figures.draw_all(*sys.argv[1:2] or [default]):
    print(path)
