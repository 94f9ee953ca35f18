"""Types of the programs' flags."""

import argparse


def positive(value: str) -> int:
  """An integer from 1 on."""
  if not (value.isdecimal() and int(value)):
    raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
  return int(value)
